"""Tabular Q-learning for N environments at once.

Shapes: N environments, S states, A actions.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.options import Adjustable, Configurable, Scheduled, adjustable, fraction
from rein.agents.base.policies import Explore, exploring
from rein.ops.devices import checked_device
from rein.ops.exploration import epsilon_greedy
from rein.ops.random import checked_seed, generator, own_state, restore_own
from rein.ops.trees import map_tree, pack, unpack
from rein.ops.values import share_of_duplicates, step_toward_, td_target
from rein.schedules import Schedule
from rein.types import NAMED_TUPLES, Transition


class QLearning(Configurable):
    """Off-policy control by a table of action values.

        Q(s, a) <- Q(s, a) + learning_rate * (r + gamma * max_a' Q(s', a') - Q(s, a))

    and no second term where the task terminated at s'. It learns from the transition that was recorded last; where
    several environments were in the same state with the same action, see `rein.ops.values.step_toward_`. `table` (S, A)
    begins uniform on [-0.1, 0.1); a state's row is the row-major index of its observation. `learning_rate`, and
    `epsilon`, the probability of a random action, are numbers or schedules of `rein.schedules`, and may be assigned in
    mid-run.

    Source: Watkins & Dayan 1992; Sutton & Barto 2018, 6.5.

    Raises ValueError for spaces other than Discrete or MultiDiscrete observations and Discrete actions, and for numbers
    out of their range.
    """

    loaded = False  # whether a state was: what came with it is not drawn anew for a seed
    learning_rate: Scheduled = Scheduled(high=1.0)
    gamma: Adjustable = Adjustable(fraction)
    epsilon: Scheduled = Scheduled(high=1.0)

    @torch.inference_mode(False)  # inference tensors cannot be trained
    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        learning_rate: float | Schedule = 0.1,
        gamma: float = 0.99,
        epsilon: float | Schedule = 0.1,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if not isinstance(action_space, spaces.Discrete):
            raise ValueError(f"QLearning: the action space is {action_space}; a table needs Discrete actions")
        self.observation_space = observation_space
        self.action_space = action_space
        self.device = checked_device(device)
        self.learning_rate = learning_rate
        self.gamma = gamma
        self.epsilon = epsilon
        self.seed = checked_seed(seed)
        self.env_steps = 0
        self.updates = 0
        self._row = _RowIndex(observation_space, self.device)
        self._first_action = int(action_space.start)
        self._last: Transition | None = None  # recorded and not yet learned from
        self.table = torch.empty(self._row.states, int(action_space.n), dtype=torch.float32, device=self.device)
        self._cells = self.table.view(-1)
        self._count = torch.zeros(self.table.numel(), dtype=torch.int64, device=self.device)  # zero between updates
        self._share, self._share_of = torch.empty(0, dtype=torch.float64, device="cpu"), (0.0, 0)  # see _shares
        self._draw(secrets.randbits(31) if self.seed is None else self.seed)

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return {
            "observation_space": str(self.observation_space),
            "action_space": str(self.action_space),
            **adjustable(self),
            "seed": self.seed,
            "device": str(self.device),
        }

    def select_action(self, observation: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """An epsilon-greedy action (N,) int64 for an observation (N,) or (N, K)."""
        value_NA = self.table.index_select(0, self._row(observation))
        action_N = self._choose(value_NA, self._generator)
        return (action_N + self._first_action if self._first_action else action_N), {}

    def record_observation(self, transition: Transition) -> None:
        """Keep the transition for `optimize_model`, in place of any before it."""
        self._last = transition
        self.env_steps += transition.reward.numel()

    def observe_reset(self, observation: Tensor, mask: Tensor) -> None:
        """Nothing to forget: no update reaches over more than one transition."""

    def optimize_model(self) -> dict[str, Any]:
        """Learn from the last transition; `td_error` is the mean absolute error of its valid rows before the update."""
        if self._last is None:
            return {}
        last, self._last = self._last, None
        action_N = last.action - self._first_action if self._first_action else last.action
        cell_N = torch.add(action_N, self._row(last.observation), alpha=self.table.shape[1])
        next_value_N = self.table.index_select(0, self._row(last.next_observation)).amax(dim=1)
        target_N = td_target(last.reward, last.terminated, next_value_N, self.gamma)
        share = self._shares(target_N.numel())
        error_N = step_toward_(self._cells, cell_N, target_N, last.valid, share, self._count)
        self.updates += 1
        td_error = error_N.abs().sum() / last.valid.count_nonzero().clamp(min=1)
        return {"td_error": td_error, "epsilon": self._exploration()}

    def q_values(self, observation: Tensor) -> Tensor:
        """The values (N, A) of all actions at an observation: a copy, for looking at."""
        return self.table.index_select(0, self._row(observation))

    def policy(self, deterministic: bool = True, *, epsilon: float | None = None) -> TabularPolicy:
        """The greedy policy of the table as it learns on; epsilon-greedy where not `deterministic`.

        Its epsilon is the agent's at any time, or the one that is given, from 0 to 1. An epsilon-greedy one begins the
        same stream of its own each time, so evaluations compare like with like.
        """
        explore = exploring(self, self._choose, epsilon)
        own = None if deterministic and epsilon is None else generator(self._root, "policy", device=self.device)
        return TabularPolicy(self.table, self._row, self._first_action, explore, own)

    @torch.inference_mode(False)
    def reseed(self, seed: int) -> None:
        """Take `seed` and draw the table anew, unless it was loaded; RuntimeError after the first step."""
        if self.env_steps and not self.loaded:
            raise RuntimeError(f"QLearning.reseed({seed}): {self.env_steps} env_steps are recorded; build a new one")
        if not self.loaded:
            self._draw(seed)
        elif not self.env_steps:
            self._root, self._generator = seed, generator(seed, "agent", device=self.device)
        self.seed = seed

    def state_dict(self) -> dict[str, Any]:
        """Table, generator, counts and what was recorded and not yet learned from."""
        return {
            "table": self.table,
            "seed": self.seed,
            "root": self._root,
            "generator": self._generator.get_state(),
            "env_steps": self.env_steps,
            "updates": self.updates,
            "last": pack(self._last),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the agent that `state_dict` was taken from; ValueError where it is of another size."""
        mine = self.state_dict()
        if missing := mine.keys() - state.keys():
            raise ValueError(f"QLearning.load_state_dict: the state lacks {', '.join(sorted(missing))}")
        for name in ("table", "generator"):
            if state[name].shape != mine[name].shape:
                raise ValueError(
                    f"QLearning.load_state_dict: {name} is {tuple(state[name].shape)} in the state and "
                    f"{tuple(mine[name].shape)} here; build the agent with the same spaces and device"
                )
        last = unpack(state["last"], NAMED_TUPLES)
        self.table.copy_(state["table"])  # in place: policies share it
        self._generator.set_state(state["generator"].cpu())
        self._last = map_tree(lambda x: x.to(self.device, copy=True), last)
        self._root, self.loaded = state["root"], True
        for name in ("seed", "env_steps", "updates"):
            setattr(self, name, state[name])

    def _draw(self, root: int) -> None:
        """Begin all streams at `root`: the seed, or a number of the system's where none was given."""
        self._root = root
        self._generator = generator(root, "agent", device=self.device)
        self.table.uniform_(-0.1, 0.1, generator=self._generator)

    def _shares(self, rows: int) -> Tensor:
        """The weight of each of n duplicates, made anew when the learning rate or N is another."""
        share_of = self.learning_rate(env_steps=self.env_steps, updates=self.updates), rows
        if self._share_of != share_of:
            self._share, self._share_of = share_of_duplicates(*share_of, self.device), share_of
        return self._share

    def _choose(self, value_NA: Tensor, drawing: torch.Generator) -> Tensor:
        return epsilon_greedy(value_NA, self._exploration(), drawing)

    def _exploration(self) -> float:
        """Epsilon now."""
        return self.epsilon(env_steps=self.env_steps, updates=self.updates)


class TabularPolicy:
    """Acts by a table that it shares with an agent: greedily, or as `explore` says, with a generator of its own."""

    def __init__(
        self,
        table: Tensor,
        row: Callable[[Tensor], Tensor],
        first_action: int,
        explore: Explore,
        own_generator: torch.Generator | None,
    ) -> None:
        self.device = table.device
        self._table = table
        self._row = row
        self._first_action = first_action
        self._explore, self._generator = explore, own_generator

    def select_action(self, observation: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The action (N,) int64 for an observation (N,) or (N, K)."""
        value_NA = self._table.index_select(0, self._row(observation))
        if self._generator is None:
            return value_NA.argmax(dim=1) + self._first_action, {}
        return self._explore(value_NA, self._generator) + self._first_action, {}

    def reset(self, mask: Tensor | None = None) -> None:
        """Nothing to forget: an action depends on the observation alone."""

    def state_dict(self) -> dict[str, Any]:
        """Its own generator; the table is the agent's."""
        return {"generator": own_state(self._generator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError for the state of the other kind of policy."""
        restore_own(self._generator, state["generator"])


class _RowIndex:
    """The table's row of an observation: row-major, counted from the `start` of each dimension."""

    def __init__(self, space: spaces.Space[Any], device: torch.device) -> None:
        if isinstance(space, spaces.Discrete):
            sizes, start = [int(space.n)], [int(space.start)]
        elif isinstance(space, spaces.MultiDiscrete):
            sizes, start = space.nvec.reshape(-1).tolist(), space.start.reshape(-1).tolist()
        else:
            raise ValueError(f"QLearning: the observation space is {space}; a table needs Discrete or MultiDiscrete")
        strides = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
        self.states = math.prod(sizes)
        self._shape = space.shape or ()
        self._first = sum(s * stride for s, stride in zip(start, strides, strict=True))
        self._stride = torch.tensor(strides, dtype=torch.int64, device=device)

    def __call__(self, observation: Tensor) -> Tensor:
        if observation.shape[1:] != self._shape:
            expected = ", ".join(["N", *map(str, self._shape)])
            raise ValueError(f"QLearning: an observation of shape {tuple(observation.shape)}; expected ({expected})")
        if self._shape:
            observation = (observation.flatten(1) * self._stride).sum(dim=1)
        return observation - self._first if self._first else observation
