"""Base class of multi-agent worlds simulated in torch.

Shapes: S state variables, W worlds, A agents of a world, N = W * A rows, O one observation, P episode seeds, Q numbers
that describe the start of a world.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rein.envs.base.contract import check_rows_of, checked_count, representation, restored
from rein.envs.base.rendering import Frame
from rein.envs.base.seeding import EpisodeSeeds
from rein.envs.base.simulation import SimulatedEnvironment, transposed
from rein.errors import check_keywords
from rein.ops.random import uniform
from rein.ops.trees import map_tree
from rein.types import Group, TimeStep, Tree


class SimulatedWorlds(SimulatedEnvironment):
    """Base class of W multi-agent worlds of A agents that are simulated with batched tensor operations.

    A subclass defines `agents`, the spaces of one agent, `initial_range` and `dynamics`, as with
    `SimulatedEnvironment`. The state is one tensor (S, W, A): `state[s, w, a]` is variable s of agent a in world w.
    Row `w * A + a` of observations, actions and rewards belongs to this agent.

    An agent leaves when it is terminated. Its state then no longer changes, and its row repeats the last observation
    with reward 0 and `valid` False. A world resets when all its agents have left, or after `max_episode_steps`.

    Args:
        worlds: number of worlds W.
        seed: random seed of all worlds. By default it is drawn at the first reset.
        max_episode_steps: steps after which the episode of a world is truncated; None for no limit.
        device: device of observations and actions.
    """

    agents: int  # number of agents of a world, A
    agent_groups: Mapping[str, Sequence[int]] = {}  # name -> agents (0 to A - 1), for statistics by group

    @check_keywords
    @torch.inference_mode(False)
    def __init__(
        self,
        worlds: int = 16,
        *,
        seed: int | None = None,
        max_episode_steps: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        name = type(self).__name__
        self.worlds = checked_count(f"{name}(worlds={worlds!r})", worlds)
        self.agents = checked_count(f"{name}(agents={self.agents!r})", self.agents)
        for group, members in self.agent_groups.items():
            if wrong := sorted(set(members) - set(range(self.agents))):
                raise ValueError(
                    f"{name}.agent_groups: the group {group!r} has the agents {wrong}, but a world has the agents 0 to "
                    f"{self.agents - 1}"
                )
        super().__init__(self.worlds * self.agents, seed=seed, max_episode_steps=max_episode_steps, device=device)
        self._steps_W = torch.zeros(self.worlds, dtype=torch.int64, device=self.device)
        self._left_WA = torch.zeros(self.worlds, self.agents, dtype=torch.bool, device=self.device)
        self._seen = torch.zeros_like(self._rows(self.observe(self._state_SWA)))  # (N, O) observation of the last step
        self._seeds = EpisodeSeeds(self.worlds, seed, self.device, self._start)
        self._repeated: Any = None, None  # seeds of worlds, and of their rows

    @abstractmethod
    def dynamics(self, state: Tensor, action: Any, /) -> tuple[Tensor, Tensor, Tensor]:
        """Compute one step of all worlds.

        Return new tensors, and do not modify the arguments. Do not draw random numbers: an episode must be determined
        by its seed and its actions. State, reward and `terminated` of agents that have left are ignored. To let other
        agents know that an agent has left, set a state variable in the step in which it is terminated.

        Args:
            state: (S, W, A) float32.
            action: `(W, A, *action)`, a dictionary of such tensors for a Dict or Tuple, or (W, A) float32 if the
                environment has `action_values`. Actions in a Box are not clipped.

        Returns:
            next state (S, W, A) float32, reward (W, A) float32, terminated (W, A) bool.
        """

    def observe(self, state: Tensor, /) -> Tensor:
        """Return the observations (O, W, A) float32 of states (S, W, A). By default the observation is the state."""
        return state

    def initial_state(self, seeds: Tensor, /) -> Tensor:
        """Return the first states (S, P, A) float32 of the worlds with these episode seeds (P,) int64.

        By default state variable s of every agent is uniform in `initial_range[s]`. For other distributions, override
        this method and use the functions of `rein.ops.random`. The state of a world may depend on its seed only.
        """
        low_S11, high_S11 = self._tensor(self.initial_range)[:, :, None, None].unbind(1)
        place_S1A = torch.arange(len(low_S11) * self.agents, device=seeds.device).view(-1, 1, self.agents)
        return uniform(seeds[:, None], place_S1A) * (high_S11 - low_S11) + low_S11

    def draw(self, state: list[list[float]], /) -> Frame:  # type: ignore[override]
        """Return an RGB frame (height, width, 3) uint8 of the state (S, A) of one world. Not implemented by default."""
        raise NotImplementedError(f"{type(self).__name__} does not render; define draw(state)")

    @property
    def groups(self) -> dict[str, Group]:
        """Groups of agents by name: the rows of the agents in `agent_groups`."""
        first_W1 = torch.arange(0, self.num_envs, self.agents, device=self.device)[:, None]
        spaces = self.single_observation_space, self.single_action_space
        agents = {
            name: torch.tensor(members, dtype=torch.int64, device=self.device)
            for name, members in self.agent_groups.items()
        }
        return {name: Group((first_W1 + members).flatten(), *spaces) for name, members in agents.items()}

    @property
    def episode_seeds(self) -> Tensor:
        """(N,) int64: seeds of the current episodes, equal in all rows of a world; -1 before the first reset."""
        if self._repeated[0] is not self._seeds.current:
            self._repeated = self._seeds.current, self._seeds.current.repeat_interleave(self.agents)
        return self._repeated[1]

    def reset_to(self, episode_seeds: Tensor) -> Tensor:
        """Begin the episodes with these seeds (N,), for a replay. Later episodes are seeded as usual.

        Raises ValueError if the rows of a world have different seeds.
        """
        check_rows_of("reset_to", episode_seeds, self.num_envs, torch.int64)
        seed_WA = self._by_world(episode_seeds)
        if not torch.equal(seed_WA, seed_WA[:, :1].expand_as(seed_WA)):
            raise ValueError(f"reset_to: expected one seed for all {self.agents} rows of a world, got {episode_seeds}")
        return self._begin(self._seeds.override(seed_WA[:, 0]))

    def reset_where(self, mask: Tensor) -> Tensor:
        """Begin the next episode of every world with a row in `mask` (N,). Returns all current observations.

        Raises RuntimeError before the first reset.
        """
        self._check_begun("reset_where")
        check_rows_of("reset_where", mask, self.num_envs, torch.bool)
        over_W = self._by_world(mask).any(1)
        self._own_tensors = self._restarted(self._own_tensors, over_W, self._seeds.advance(over_W))
        self.watch(self._seen)
        return self._seen

    def render(self, index: int = 0) -> Frame:
        """Return an RGB frame (height, width, 3) of the world of one row."""
        return self.draw(self._state_SWA[:, range(self.num_envs)[index] // self.agents].tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the episode of every world, and the agents that have left."""
        names = {"state": self._state_SN, "steps": self._steps_W, "left": self._left_WA, "observation": self._seen}
        return {"seeds": self._seeds.state_dict(), **names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Raises ValueError for another number of worlds."""
        state_SN, steps_W = restored(state, "state", self._state_SN), restored(state, "steps", self._steps_W)
        left_WA, seen = restored(state, "left", self._left_WA), restored(state, "observation", self._seen)
        self._seeds.load_state_dict(state["seeds"])
        self._state_SN, self._steps_W = state_SN.contiguous(), steps_W
        self._left_WA, self._seen = left_WA, seen

    def __repr__(self) -> str:
        return representation(self, f"worlds={self.worlds}, agents={self.agents}")

    def tensors(self) -> tuple[Tensor, ...]:
        """See `SimulatedEnvironment`."""
        return *self._own_tensors, self._seeds.place

    def set_tensors(self, tensors: Sequence[Tensor]) -> None:
        """See `SimulatedEnvironment`."""
        *own, place_W = tensors
        self._own_tensors = tuple(own)
        self._seeds.go_to(place_W)

    def advance(self, tensors: Sequence[Tensor], start_PQ: Tensor, action: Tree) -> tuple[tuple[Tensor, ...], TimeStep]:
        """See `SimulatedEnvironment`."""
        *before, place_W = tensors
        moved, over_W, time_step = self._moved(before, map_tree(self._by_world, self._control(action)), None)
        place_W = place_W + over_W
        after = self._restarted(moved, over_W, start_PQ[place_W])
        return (*after, place_W), _continued(time_step, after[-1])

    def seeds_at(self, place: Tensor, seed_P: Tensor) -> Tensor:
        """Return the episode seeds (..., N) at places (..., W) of the table."""
        return super().seeds_at(place, seed_P).repeat_interleave(self.agents, -1)

    @property
    def _own_tensors(self) -> tuple[Tensor, ...]:
        return self._state_SN, self._steps_W, self._left_WA, self._seen

    @_own_tensors.setter
    def _own_tensors(self, tensors: tuple[Tensor, ...]) -> None:
        self._state_SN, self._steps_W, self._left_WA, self._seen = tensors

    @property
    def _shape_SWA(self) -> tuple[int, int, int]:
        return -1, self.worlds, self.agents

    @property
    def _state_SWA(self) -> Tensor:
        return self._state_SN.view(self._shape_SWA)

    def _by_world(self, x_N: Tensor) -> Tensor:
        return x_N.view(self.worlds, self.agents, *x_N.shape[1:])

    def _rows(self, observation_OWA: Tensor) -> Tensor:
        return transposed(observation_OWA.flatten(1))

    def _observation(self) -> Tensor:
        self._seen = self._rows(self.observe(self._state_SWA))
        self.watch(self._seen)
        return self._seen

    def _start(self, seed_P: Tensor) -> Tensor:
        """Return (P, Q): the first states (S, A) of worlds, followed by their observations (A, O)."""
        state_SPA = self.initial_state(seed_P)
        observation_OPA = self.observe(state_SPA)
        return torch.cat([state_SPA.transpose(0, 1).flatten(1), observation_OPA.permute(1, 2, 0).flatten(1)], 1)

    def _begin(self, start_NQ: Tensor) -> Tensor:  # with a row for each world
        self._steps_W, self._left_WA = torch.zeros_like(self._steps_W), torch.zeros_like(self._left_WA)
        size = len(self._state_SN)
        start_WSA = start_NQ[:, : size * self.agents].view(self.worlds, size, self.agents)
        self._state_SN = start_WSA.transpose(0, 1).flatten(1).contiguous()
        return self._observation()

    def _restarted(self, tensors: Sequence[Tensor], over_W: Tensor, start_WQ: Tensor) -> tuple[Tensor, ...]:
        """Begin the episodes with these starts (W, Q) in the worlds of `over_W`. Takes and returns `_own_tensors`."""
        state_SN, steps_W, left_WA, seen = tensors
        size, over_W1 = len(state_SN), over_W[:, None]
        start_WSA = start_WQ[:, : size * self.agents].view(self.worlds, size, self.agents)
        first_WAO = start_WQ[:, size * self.agents :].view(self.worlds, self.agents, -1)
        state_SN = torch.where(over_W1, start_WSA.transpose(0, 1), state_SN.view(self._shape_SWA)).flatten(1)
        seen = torch.where(over_W1[:, :, None], first_WAO, self._by_world(seen)).flatten(0, 1)
        return state_SN, steps_W.masked_fill(over_W, 0), left_WA & ~over_W1, seen

    def _moved(
        self, tensors: Sequence[Tensor], control: Tree, stepped_W: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Tensor, TimeStep]:
        """Step all worlds, or those of `stepped_W`, without a reset.

        Returns `_own_tensors`, the worlds (W,) whose episodes have ended, and the result.
        """
        state_SN, steps_W, left_WA, seen = tensors
        before_SWA = state_SN.view(self._shape_SWA)
        state_SWA, reward_WA, terminated_WA = self.dynamics(before_SWA, control)
        on_WA = ~left_WA if stepped_W is None else ~left_WA & stepped_W[:, None]
        state_SWA = torch.where(on_WA, state_SWA, before_SWA)
        terminated_WA = terminated_WA & on_WA
        steps_W = steps_W + (1 if stepped_W is None else stepped_W)
        truncated_WA = (steps_W >= self._limit)[:, None] & on_WA
        left_WA = left_WA | terminated_WA | truncated_WA
        observation = torch.where(on_WA.view(-1, 1), self._rows(self.observe(state_SWA)), seen)
        reward_N = torch.where(on_WA, reward_WA, 0.0).flatten()
        ends = terminated_WA.flatten(), truncated_WA.flatten()
        time_step = TimeStep(observation, reward_N, *ends, observation, on_WA.flatten(), {})
        return (state_SWA.flatten(1), steps_W, left_WA, observation), left_WA.all(1), time_step

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        if not self._checked or self._has_components or action.shape != self._action_shape:
            self._check(action)
        control = map_tree(self._by_world, self._control(action))
        if not self._checked:
            self._check_dynamics(self._state_SWA, *self.dynamics(self._state_SWA, control))
            self._checked = True
        stepped_W = None if mask is None else self._by_world(mask).any(1)
        tensors, over_W, time_step = self._moved(self._own_tensors, control, stepped_W)
        if self.device.type != "cpu" or bool(over_W.any()):  # reading a flag on a GPU would wait
            tensors = self._restarted(tensors, over_W, self._seeds.advance(over_W))
            time_step = _continued(time_step, tensors[-1])
        self._own_tensors = tensors
        self.watch(time_step.observation)
        return time_step


def _continued(time_step: TimeStep, observation: Tensor) -> TimeStep:
    """Return the result of a step with the observations (N, O) after resets."""
    on_N1 = time_step.valid.view(-1, 1)  # no episode ends in the other rows
    final_observation = torch.where(on_N1, time_step.final_observation, observation)
    return time_step._replace(observation=observation, final_observation=final_observation)
