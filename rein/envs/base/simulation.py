"""Base classes of environments simulated in torch, N at once.

Shapes: N environments.
"""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import check_action, check_rows_of, checked_num_envs, restored
from rein.envs.base.drawing import Frame
from rein.envs.base.seeding import EpisodeSeeds
from rein.envs.base.spaces import tensor_dtype
from rein.foreign_names import ENVIRONMENT_ATTRIBUTES, check_keywords, explain
from rein.ops.backend import compiled_for
from rein.ops.devices import checked_device
from rein.ops.random import uniform
from rein.types import TimeStep


@explain(ENVIRONMENT_ATTRIBUTES)
class SimulatedEnvironment(ABC):
    """N environments of one physics; a subclass adds its constructor and the picture of a state.

    `options` are what `config` tells beside `num_envs`, `seed` and `device`: `max_episode_steps` and `compile`, if they
    are not given.

    Args:
        max_episode_steps: steps after which an episode is truncated; None for no limit.
        compile: compile the physics with torch.compile.
    """

    replayable = True

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "__init__" in vars(cls):
            cls.__init__ = check_keywords(cls.__init__)  # type: ignore[method-assign]

    def __init__(
        self,
        physics: Physics,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        num_envs: int,
        seed: int | None,
        max_episode_steps: int | None,
        device: torch.device | str,
        compile: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.device = checked_device(device)
        self.max_episode_steps = max_episode_steps
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self._options = {"max_episode_steps": max_episode_steps, "compile": compile} if options is None else options
        self._simulation = Simulation(
            type(self).__name__,
            physics,
            action_space,
            num_envs=num_envs,
            seed=seed,
            max_episode_steps=max_episode_steps,
            device=self.device,
            compile=compile,
        )
        self.num_envs = self._simulation.num_envs

    @abstractmethod
    def _draw(self, state: list[float]) -> Frame:
        """A picture of one state (S,)."""

    def _watch(self, observation: Tensor) -> None:  # noqa: B027  # may be left as it is
        """Called with what is observed (N, *O) after every reset and step, for a subclass that keeps some of it."""

    @property
    def seed(self) -> int | None:
        """The seed of all streams; None until given, drawn at the first reset if it never was."""
        return self._simulation.seed

    @property
    def episode_seeds(self) -> Tensor:
        """(N,) int64: what each environment's current episode was reset with; -1 before the first reset."""
        return self._simulation.episode_seeds

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return {"num_envs": self.num_envs, **self._options, "seed": self.seed, "device": str(self.device)}

    def reset(self, seed: int | None = None) -> Tensor:
        """Begin the next episode of every environment; `seed` starts all streams anew. Returns the observation."""
        return self._begun(self._simulation.reset(seed))

    def reset_to(self, episode_seeds: Tensor) -> Tensor:
        """Begin the episodes that these seeds (N,) give, for a replay; what follows them follows the streams."""
        return self._begun(self._simulation.reset_to(episode_seeds))

    def reset_where(self, mask: Tensor) -> Tensor:
        """Begin the next episode where `mask` (N,) is True; returns the current observation of all.

        Raises RuntimeError before the first reset.
        """
        return self._begun(self._simulation.reset_where(mask))

    def apply_action(self, action: Tensor) -> TimeStep:
        """Step every environment with `action` (N, *A).

        Raises RuntimeError before the first reset and EnvironmentContractError for what is no action.
        """
        return self._stepped(self._simulation.apply_action(action))

    def apply_action_where(self, action: Tensor, mask: Tensor) -> TimeStep:
        """Step where `mask` (N,) is True; the other rows stay as they are, and are not valid.

        Raises RuntimeError before the first reset, EnvironmentContractError for what is no action, in any row, and
        ValueError for what is no mask.
        """
        check_rows_of("apply_action_where", mask, self.num_envs, torch.bool)
        return self._stepped(self._simulation.apply_action(action, mask))

    def render(self, index: int = 0) -> Frame:
        """An RGB frame (height, width, 3) of one environment."""
        return self._draw(self._simulation.state_of(index))

    def reseed(self, seed: int) -> None:
        """Take `seed` for all streams; RuntimeError after the first reset."""
        self._simulation.reseed(seed)

    def close(self) -> None:  # noqa: B027  # may be left as it is
        """Nothing to release."""

    def state_dict(self) -> dict[str, Any]:
        """The state of every environment, and its episode."""
        return self._simulation.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; ValueError for another number of environments."""
        self._simulation.load_state_dict(state)

    def _begun(self, observation: Tensor) -> Tensor:
        self._watch(observation)
        return observation

    def _stepped(self, time_step: TimeStep) -> TimeStep:
        self._watch(time_step.observation)
        return time_step


class Moved(NamedTuple):
    """What physics makes of a state and a control; all of it new."""

    state_SN: Tensor
    reward_N: Tensor
    terminated_N: Tensor


class Physics(NamedTuple):
    """A simulated task: its pure functions, and from where its episodes start."""

    move: Callable[[Tensor, Tensor], Moved]  # of state (S, N) and control: `controls[action]` (N,), or the action
    starts: Sequence[tuple[float, float]]  # (S,) low, high: each number of the first state is uniform between them
    controls: Sequence[float] | None = None  # (A,) what each discrete action stands for; None: the action itself
    observe: Callable[[Tensor], Tensor] | None = None  # (S, N) -> (O, N) float32; None: the state


class Simulation:
    """N environments of one physics, with seeds, time limit and autoreset.

    Raises ValueError for options out of range, in the name of the environment `name`.
    """

    @torch.inference_mode(False)  # inference tensors cannot be written to outside of that mode
    def __init__(
        self,
        name: str,
        physics: Physics,
        action_space: spaces.Space[Any],
        *,
        num_envs: int,
        seed: int | None,
        max_episode_steps: int | None,
        device: torch.device | str,
        compile: bool,
    ) -> None:
        self.num_envs = num_envs = checked_num_envs(num_envs, name)
        if max_episode_steps is not None and max_episode_steps < 1:
            raise ValueError(f"{name}(max_episode_steps={max_episode_steps}): give 1 or more, or None for no limit")
        self.device = torch.device(device)
        self._limit = sys.maxsize if max_episode_steps is None else max_episode_steps
        self._name, self._physics, self._action_space = name, physics, action_space
        self._action_shape, self._action_dtype = (num_envs, *(action_space.shape or ())), tensor_dtype(action_space)
        self._compile = compile
        self._controls_A = (
            None
            if physics.controls is None
            else torch.tensor(physics.controls, dtype=torch.float32, device=self.device)
        )
        self._low_S1, high_S1 = torch.tensor(physics.starts, dtype=torch.float32, device=self.device).split(1, dim=1)
        self._span_S1 = high_S1 - self._low_S1
        self._state_SN = torch.zeros(len(physics.starts), num_envs, dtype=torch.float32, device=self.device)
        self._steps_N = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._seeds = EpisodeSeeds(num_envs, seed, self.device, self._start)
        self._by_rows = self.device.type == "cpu" and not compile
        self._masked: dict[int, Callable[..., tuple[Tensor, ...]]] = {}  # by number of inputs
        self._checked = False

    @property
    def seed(self) -> int | None:
        """The seed of all streams; None until given, drawn at the first reset if it never was."""
        return self._seeds.seed

    @property
    def episode_seeds(self) -> Tensor:
        """(N,) int64: what each environment's current episode was reset with; -1 before the first reset."""
        return self._seeds.current

    @property
    def steps(self) -> Tensor:
        """(N,) int64: the steps of the current episodes so far. A later step may write to it."""
        return self._steps_N

    def state_of(self, index: int) -> list[float]:
        """The state of one environment (S,), as numbers on the host."""
        return self._state_SN[:, index].tolist()

    def reset(self, seed: int | None = None) -> Tensor:
        """Begin the next episode of every environment; `seed` starts all streams anew. Returns the observation."""
        if seed is not None:
            self._seeds.restart(seed)
        return self._begin(self._seeds.advance())

    def reset_to(self, episode_seeds: Tensor) -> Tensor:
        """Begin the episodes that these seeds (N,) give, for a replay; what follows them follows the streams."""
        return self._begin(self._seeds.override(episode_seeds))

    def reset_where(self, mask: Tensor) -> Tensor:
        """Begin the next episode where `mask` (N,) is True; returns the current observation of all.

        Raises RuntimeError before the first reset.
        """
        self._check_begun("reset_where")
        check_rows_of("reset_where", mask, self.num_envs, torch.bool)
        start_SN = transposed(self._seeds.advance(mask)[:, : len(self._state_SN)])
        self._state_SN = torch.where(mask, start_SN, self._state_SN)
        self._steps_N = self._steps_N.masked_fill(mask, 0)
        return transposed(_observe(self._physics, self._state_SN))

    def apply_action(self, action: Tensor, mask: Tensor | None = None) -> TimeStep:
        """Move every environment, and begin anew those whose episode ended; only those in `mask` (N,), if it is given.

        Raises RuntimeError before the first reset and EnvironmentContractError for what is no action.
        """
        if not self._checked or action.shape != self._action_shape:
            self._check(action)
        if self._controls_A is None:
            control = action.detach().to(self._action_dtype).contiguous()
        else:
            try:
                control = self._controls_A.index_select(0, action)
            except (IndexError, RuntimeError):  # later actions are not looked at before
                self._check(action)
                raise
        return self._step_rows(control, mask) if self._by_rows else self._step_masked(control, mask)

    def reseed(self, seed: int) -> None:
        """Take `seed` for all streams; RuntimeError after the first reset."""
        self._seeds.reseed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Where every environment stands, and its episode."""
        steps_N = self._steps_N.clone()  # which are counted in place
        return {"seeds": self._seeds.state_dict(), "state": self._state_SN, "steps": steps_N}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; ValueError for another number of environments."""
        state_SN, steps_N = restored(state, "state", self._state_SN), restored(state, "steps", self._steps_N)
        self._seeds.load_state_dict(state["seeds"])
        self._state_SN, self._steps_N = state_SN.contiguous(), steps_N

    def _start(self, seed_P: Tensor) -> Tensor:
        """(P, Q): an episode's first state, number s of it by draw s of the seed, and last what is observed of it."""
        draw_S1 = torch.arange(len(self._low_S1), device=self.device)[:, None]
        state_SP = uniform(seed_P, draw_S1) * self._span_S1 + self._low_S1
        observe = self._physics.observe
        return transposed(state_SP if observe is None else torch.cat([state_SP, observe(state_SP)]))

    def _begin(self, start_NQ: Tensor) -> Tensor:
        self._state_SN = transposed(start_NQ[:, : len(self._state_SN)])
        self._steps_N = torch.zeros_like(self._steps_N)
        return transposed(_observe(self._physics, self._state_SN))

    def _step_rows(self, control: Tensor, mask_N: Tensor | None) -> TimeStep:
        state_SN, reward_N, terminated_N = _move(self._physics, self._state_SN, control, mask_N)
        final_observation = transposed(_observe(self._physics, state_SN))
        observation = final_observation.clone()
        # numpy, for few rows take torch several times as long
        steps_N, chosen_N = self._steps_N.numpy(), None if mask_N is None else mask_N.numpy()
        steps_N += 1 if chosen_N is None else chosen_N
        truncated_N = torch.from_numpy(_truncated(steps_N, self._limit, chosen_N))
        row_R = (terminated_N | truncated_N).numpy().nonzero()[0]
        if row_R.size:
            start_RQ = self._seeds.begin(row_R)
            state_SN.numpy()[:, row_R] = start_RQ[:, : len(state_SN)].T
            observation.numpy()[row_R] = start_RQ[:, -observation.shape[1] :]
            steps_N[row_R] = 0
        self._state_SN = state_SN
        return _time_step(mask_N, observation, reward_N, terminated_N, truncated_N, final_observation)

    def _step_masked(self, control: Tensor, mask_N: Tensor | None) -> TimeStep:
        inputs = (self._state_SN, self._steps_N, *self._seeds.table(), control)
        if mask_N is not None:
            inputs = (*inputs, mask_N)
        if len(inputs) not in self._masked:
            masked = functools.partial(_masked, self._physics, self._limit)
            self._masked[len(inputs)] = compiled_for(masked, inputs) if self._compile else masked
        self._state_SN, self._steps_N, place_N, *seen = self._masked[len(inputs)](*inputs)
        self._seeds.go_to(place_N)
        return _time_step(mask_N, *(x.view(torch.bool) if x.dtype is torch.uint8 else x for x in seen))

    def _check(self, action: Tensor) -> None:
        self._check_begun("apply_action")
        check_action(action, self.num_envs, self._action_space)
        self._checked = True

    def _check_begun(self, method: str) -> None:
        if not self._seeds.started:
            raise RuntimeError(f"{self._name}.{method}: call reset() first")


def transposed(state_SN: Tensor) -> Tensor:
    """(N, S), contiguous and new: in half the time that torch takes for `state_SN.T.contiguous()`, where N is large."""
    state_NS = state_SN.new_empty(state_SN.shape[1], state_SN.shape[0])
    state_NS.T.copy_(state_SN)
    return state_NS


def _observe(physics: Physics, state_SN: Tensor) -> Tensor:
    return state_SN if physics.observe is None else physics.observe(state_SN)


def _move(physics: Physics, state_SN: Tensor, control: Tensor, mask_N: Tensor | None) -> Moved:
    """What physics makes of a state where `mask_N` is True, or everywhere; elsewhere nothing has moved."""
    moved = physics.move(state_SN, control)
    if mask_N is None:
        return moved
    state_SN, reward_N = torch.where(mask_N, moved.state_SN, state_SN), torch.where(mask_N, moved.reward_N, 0.0)
    return Moved(state_SN, reward_N, moved.terminated_N & mask_N)


def _truncated(steps_N: Any, limit: int, mask_N: Any) -> Any:
    """For tensors and arrays alike."""
    return steps_N >= limit if mask_N is None else (steps_N >= limit) & mask_N


def _masked(
    physics: Physics,
    limit: int,
    state_SN: Tensor,
    steps_N: Tensor,
    place_N: Tensor,
    start_PQ: Tensor,
    control: Tensor,
    mask_N: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """State, steps and place after a step of all; observation, reward, terminated, truncated, final_observation."""
    state_SN, reward_N, terminated_N = _move(physics, state_SN, control, mask_N)
    steps_N = steps_N + (1 if mask_N is None else mask_N.to(torch.int64))
    truncated_N = _truncated(steps_N, limit, mask_N)
    ending_N = torch.maximum(terminated_N.to(torch.float32), truncated_N.to(torch.float32))
    ended_N = ending_N > 0  # compiled code would keep `terminated_N | truncated_N` byte by byte: half of its time
    place_N = place_N + ending_N.to(torch.int64)
    start_NQ = start_PQ[place_N]
    final_observation = _observe(physics, state_SN).T.contiguous()
    observation = torch.where(ended_N[:, None], start_NQ[:, -final_observation.shape[1] :], final_observation)
    pairs = zip(start_NQ[:, : len(state_SN)].unbind(1), state_SN.unbind(), strict=True)
    state_SN = torch.stack([torch.where(ended_N, new_N, old_N) for new_N, old_N in pairs])  # so as to stay (S, N)
    steps_N = torch.where(ended_N, 0, steps_N)
    return state_SN, steps_N, place_N, observation, reward_N, terminated_N, truncated_N, final_observation


def _time_step(
    mask_N: Tensor | None,
    observation: Tensor,
    reward_N: Tensor,
    terminated_N: Tensor,
    truncated_N: Tensor,
    final_observation: Tensor,
) -> TimeStep:
    valid_N = torch.ones_like(terminated_N) if mask_N is None else mask_N.clone()
    return TimeStep(observation, reward_N, terminated_N, truncated_N, final_observation, valid_N, {})
