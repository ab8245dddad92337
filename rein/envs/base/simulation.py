"""Base class of environments simulated in torch, N at once.

Shapes: S state variables, N environments, O one observation, A one action, P episode seeds, R rows.
"""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rein.accelerators import find
from rein.envs.base.contract import (
    check_action,
    check_rows_of,
    checked_num_envs,
    options_of,
    passes_keywords_on,
    representation,
    restored,
)
from rein.envs.base.rendering import Frame
from rein.envs.base.seeding import EpisodeSeeds, ReplayableEnvironment
from rein.errors import EnvironmentContractError, check_keywords
from rein.ops.random import uniform
from rein.ops.trees import checked_device, map_tree
from rein.spaces import children
from rein.spaces.conversion import dtypes_of
from rein.types import TimeStep, Tree

Dynamics = Callable[[Tensor, Tree], tuple[Tensor, Tensor, Tensor]]
Observe = Callable[[Tensor], Tensor]


class SimulatedEnvironment(ReplayableEnvironment, ABC):
    """Base class of N environments that are simulated with batched tensor operations.

    A subclass defines the spaces, `initial_range` and `dynamics`. It may override `observe`, `initial_state`, `draw`
    and `watch`. The state of all environments is one tensor (S, N): row s holds state variable s. The base class
    provides seeding, one seed per episode, automatic reset, truncation, partial steps and resets, replay, and
    `state_dict`.

    Keep each constructor option as an attribute of the same name. `config` collects the options from there. A subclass
    without a constructor can declare its time limit: `class MyTask(SimulatedEnvironment, max_episode_steps=500)`.

    Args:
        num_envs: number of environments N.
        seed: random seed of all environments. By default it is drawn at the first reset.
        max_episode_steps: steps after which an episode is truncated; None for no limit.
        device: device of observations and actions.
        compile: compile the step with `torch.compile`.
    """

    single_observation_space: spaces.Space[Any]
    single_action_space: spaces.Space[Any]
    initial_range: Sequence[tuple[float, float]]  # (S, 2) low, high: variable s starts uniformly in [low, high)
    action_values: Sequence[float] | None = None  # number that `dynamics` gets for each discrete action
    replayable = True

    def __init_subclass__(cls, *, max_episode_steps: int | None = None, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if max_episode_steps is not None:
            if "__init__" in vars(cls):
                raise TypeError(
                    f"{cls.__name__}(max_episode_steps={max_episode_steps}): the class has a constructor; set the "
                    "default of max_episode_steps there"
                )
            _set_time_limit(cls, max_episode_steps)
        if "__init__" in vars(cls) and not passes_keywords_on(cls):
            cls.__init__ = check_keywords(cls.__init__)  # type: ignore[method-assign]

    @check_keywords
    @torch.inference_mode(False)  # inference tensors cannot be modified outside of inference mode
    def __init__(
        self,
        num_envs: int = 16,
        *,
        seed: int | None = None,
        max_episode_steps: int | None = None,
        device: torch.device | str = "cpu",
        compile: bool = False,
    ) -> None:
        name = type(self).__name__
        self.num_envs = checked_num_envs(num_envs, name)
        if max_episode_steps is not None and max_episode_steps < 1:
            raise ValueError(f"{name}(max_episode_steps={max_episode_steps}): give 1 or more, or None for no limit")
        self.device = checked_device(device)
        self.max_episode_steps, self.compile = max_episode_steps, compile
        self._limit = sys.maxsize if max_episode_steps is None else max_episode_steps
        self._has_components = children(self.single_action_space) is not None
        if self._has_components and compile:
            raise ValueError(
                f"{name}(compile=True): a step with actions in {self.single_action_space} cannot be compiled; use "
                "compile=False"
            )
        self._action_shape = (self.num_envs, *(self.single_action_space.shape or ()))
        self._action_dtype = dtypes_of(self.single_action_space)
        self._values_A = None if self.action_values is None else self._tensor(self.action_values)
        size = len(self.initial_state(torch.zeros(1, dtype=torch.int64, device=self.device)))
        self._state_SN = torch.zeros(size, self.num_envs, dtype=torch.float32, device=self.device)
        self._steps_N = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._seeds = EpisodeSeeds(self.num_envs, seed, self.device, self._start)
        self._by_rows = self.device.type == "cpu" and not compile
        self._masked: dict[int, Callable[..., tuple[Tensor, ...]]] = {}  # by number of inputs
        self._checked = False

    @abstractmethod
    def dynamics(self, state: Tensor, action: Any, /) -> tuple[Tensor, Tensor, Tensor]:
        """Compute one step of all environments.

        Return new tensors, and do not modify the arguments. Do not draw random numbers: an episode must be determined
        by its seed and its actions.

        Args:
            state: (S, N) float32.
            action: `(N, *A)`, a dictionary of such tensors for a Dict or Tuple, or (N,) float32 if the environment has
                `action_values`. Actions in a Box are not clipped.

        Returns:
            next state (S, N) float32, reward (N,) float32, terminated (N,) bool.
        """

    def observe(self, state: Tensor, /) -> Tensor:
        """Return the observations (O, N) float32 of states (S, N). By default the observation is the state."""
        return state

    def initial_state(self, seeds: Tensor, /) -> Tensor:
        """Return the first states (S, P) float32 of the episodes with these seeds (P,) int64.

        By default state variable s is uniform in `initial_range[s]`. For other distributions, override this method and
        use the functions of `rein.ops.random`, such as `uniform(seeds, s)`. Each state may depend on its seed only.
        """
        low_S1, high_S1 = self._tensor(self.initial_range).split(1, dim=1)
        variable_S1 = torch.arange(len(low_S1), device=seeds.device)[:, None]
        return uniform(seeds, variable_S1) * (high_S1 - low_S1) + low_S1

    def draw(self, state: list[float], /) -> Frame:
        """Return an RGB frame (height, width, 3) uint8 of one state (S,). By default it is not implemented."""
        raise NotImplementedError(f"{type(self).__name__} does not render; define draw(state)")

    def watch(self, observation: Tensor, /) -> None:  # an optional hook
        """Hook that is called with the observation (N, O) after every reset and every step. Does nothing by default."""

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON values."""
        return options_of(self)

    def reset_where(self, mask: Tensor) -> Tensor:
        """Begin the next episode where `mask` (N,) is True. Returns the current observation of all environments.

        Raises RuntimeError before the first reset.
        """
        self._check_begun("reset_where")
        check_rows_of("reset_where", mask, self.num_envs, torch.bool)
        start_SN = transposed(self._seeds.advance(mask)[:, : len(self._state_SN)])
        self._state_SN = torch.where(mask, start_SN, self._state_SN)
        self._steps_N = self._steps_N.masked_fill(mask, 0)
        return self._observation()

    def apply_action(self, action: Tree) -> TimeStep:
        """Step every environment with actions `(N, *A)`, and reset those whose episode ended.

        Raises RuntimeError before the first reset and EnvironmentContractError for an invalid action.
        """
        return self._step(action, None)

    def apply_action_where(self, action: Tree, mask: Tensor) -> TimeStep:
        """Step the environments where `mask` (N,) is True. The other rows do not change and are not valid.

        Raises RuntimeError before the first reset, EnvironmentContractError for an invalid action in any row, and
        ValueError for an invalid mask.
        """
        check_rows_of("apply_action_where", mask, self.num_envs, torch.bool)
        return self._step(action, mask)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that a step replaces, for `advance`. The last one is `EpisodeSeeds.place`."""
        return self._state_SN, self._steps_N, self._seeds.place

    def set_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Set the results of `advance`."""
        self._state_SN, self._steps_N, place_N = tensors
        self._seeds.go_to(place_N)

    def advance(self, tensors: Sequence[Tensor], start_PQ: Tensor, action: Tree) -> tuple[tuple[Tensor, ...], TimeStep]:
        """Compute `apply_action` as a pure function, without checks and without reading values on the host.

        `start_PQ` is the table of episode starts, see `EpisodeSeeds.cover`. Returns the new `tensors` and the result.
        """
        before_SN, steps_N, place_N = tensors
        functions = self.dynamics, self.observe, self._limit
        inputs = before_SN, steps_N, place_N, start_PQ, self._control(action)
        state_SN, steps_N, place_N, *seen = _masked(*functions, *inputs)
        return (state_SN, steps_N, place_N), _time_step(None, *seen)

    def cover(self, steps: int) -> tuple[Tensor, Tensor]:
        """Return seeds and starts of the episodes of this many steps, see `EpisodeSeeds.cover`."""
        return self._seeds.cover(steps)

    def seeds_at(self, place: Tensor, seed_P: Tensor) -> Tensor:
        """Return the episode seeds (..., N) at places of the table."""
        return seed_P[place]

    def render(self, index: int = 0) -> Frame:
        """Return an RGB frame (height, width, 3) of one environment."""
        return self.draw(self._state_SN[:, index].tolist())

    def close(self) -> None:
        """Refuse further steps. The environment holds no resources."""
        super().close()
        self._checked = False  # the next step checks

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the episode of every environment."""
        steps_N = self._steps_N.clone()  # counted in place
        return {"seeds": self._seeds.state_dict(), "state": self._state_SN, "steps": steps_N}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Raises ValueError for another number of environments."""
        state_SN, steps_N = restored(state, "state", self._state_SN), restored(state, "steps", self._steps_N)
        self._seeds.load_state_dict(state["seeds"])
        self._state_SN, self._steps_N = state_SN.contiguous(), steps_N

    def __repr__(self) -> str:
        return representation(self, f"num_envs={self.num_envs}")

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def _observation(self) -> Tensor:
        observation = transposed(self.observe(self._state_SN))
        self.watch(observation)
        return observation

    def _start(self, seed_P: Tensor) -> Tensor:
        """Return (P, Q): the first states and observations of episodes, or only the states if both are equal."""
        state_SP = self.initial_state(seed_P)
        observation_OP = self.observe(state_SP)
        return transposed(state_SP if observation_OP is state_SP else torch.cat([state_SP, observation_OP]))

    def _begin(self, start_NQ: Tensor) -> Tensor:
        self._state_SN = transposed(start_NQ[:, : len(self._state_SN)])
        self._steps_N = torch.zeros_like(self._steps_N)
        return self._observation()

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        if not self._checked or self._has_components or action.shape != self._action_shape:
            self._check(action)
        control = self._control(action)
        if not self._checked:
            self._check_dynamics(self._state_SN, *self.dynamics(self._state_SN.clone(), control))
            self._checked = True
        time_step = self._step_rows(control, mask) if self._by_rows else self._step_masked(control, mask)
        self.watch(time_step.observation)
        return time_step

    def _control(self, action: Tree) -> Tree:
        """Return the action in the form that `dynamics` takes."""
        if self._has_components:
            return map_tree(lambda dtype, x: x.detach().to(dtype).contiguous(), self._action_dtype, action)
        if self._values_A is None:
            return action.detach().to(self._action_dtype).contiguous()
        try:
            return self._values_A.index_select(0, action)
        except (IndexError, RuntimeError):  # only the first action is checked in advance
            self._check(action)
            raise

    def _step_rows(self, control: Tree, mask_N: Tensor | None) -> TimeStep:
        state_SN, reward_N, terminated_N = _move(self.dynamics, self._state_SN, control, mask_N)
        final_observation = transposed(self.observe(state_SN))
        observation = final_observation.clone()
        # NumPy is several times faster than torch for few rows
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

    def _step_masked(self, control: Tree, mask_N: Tensor | None) -> TimeStep:
        inputs = (self._state_SN, self._steps_N, *self._seeds.table(), control)
        if mask_N is not None:
            inputs = (*inputs, mask_N)
        if len(inputs) not in self._masked:
            masked = functools.partial(_masked, self.dynamics, self.observe, self._limit)
            self._masked[len(inputs)] = (find("step", masked, inputs) if self.compile else None) or masked
        self._state_SN, self._steps_N, place_N, *seen = self._masked[len(inputs)](*inputs)
        self._seeds.go_to(place_N)
        return _time_step(mask_N, *(x.view(torch.bool) if x.dtype is torch.uint8 else x for x in seen))

    def _check(self, action: Tree) -> None:
        self._check_begun("apply_action")
        check_action(action, self.num_envs, self.single_action_space)

    def _check_dynamics(self, before: Tensor, state: Tensor, reward: Tensor, terminated: Tensor) -> None:
        rows = before.shape[1:]
        for name, value, shape, dtype in (
            ("state", state, before.shape, torch.float32),
            ("reward", reward, rows, torch.float32),
            ("terminated", terminated, rows, torch.bool),
        ):
            if value.shape != shape or value.dtype is not dtype:
                raise EnvironmentContractError(
                    f"{type(self).__name__}.dynamics: expected {name} as {dtype} of shape {tuple(shape)}, "
                    f"got {value.dtype} of shape {tuple(value.shape)}"
                )


def _set_time_limit(cls: type[SimulatedEnvironment], steps: int) -> None:
    """Set the default of `max_episode_steps` in the constructor of a class."""

    def __init__(
        self: SimulatedEnvironment,
        num_envs: int = 16,
        *,
        seed: int | None = None,
        max_episode_steps: int | None = steps,
        device: torch.device | str = "cpu",
        compile: bool = False,
    ) -> None:
        options: Any = {"seed": seed, "max_episode_steps": max_episode_steps, "device": device, "compile": compile}
        super(cls, self).__init__(num_envs, **options)  # pyright: ignore[reportCallIssue]  # a subclass

    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    cls.__init__ = __init__  # type: ignore[method-assign]


def transposed(state_SN: Tensor) -> Tensor:
    """Return a new contiguous (N, S). Twice as fast as `state_SN.T.contiguous()` for many environments."""
    state_NS = state_SN.new_empty(state_SN.shape[1], state_SN.shape[0])
    state_NS.T.copy_(state_SN)
    return state_NS


def _move(dynamics: Dynamics, state_SN: Tensor, control: Tree, mask_N: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Step the environments where `mask_N` is True, or all if it is None. Returns state, reward and terminated."""
    moved_SN, reward_N, terminated_N = dynamics(state_SN, control)
    if mask_N is None:
        return moved_SN, reward_N, terminated_N
    return torch.where(mask_N, moved_SN, state_SN), torch.where(mask_N, reward_N, 0.0), terminated_N & mask_N


def _truncated(steps_N: Any, limit: int, mask_N: Any) -> Any:
    """Return which episodes reached the limit, as a tensor or an array."""
    return steps_N >= limit if mask_N is None else (steps_N >= limit) & mask_N


def _masked(
    dynamics: Dynamics,
    observe: Observe,
    limit: int,
    state_SN: Tensor,
    steps_N: Tensor,
    place_N: Tensor,
    start_PQ: Tensor,
    control: Tree,
    mask_N: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return state, steps, place, observation, reward, terminated, truncated and final observation after a step."""
    state_SN, reward_N, terminated_N = _move(dynamics, state_SN, control, mask_N)
    steps_N = steps_N + (1 if mask_N is None else mask_N.to(torch.int64))
    truncated_N = _truncated(steps_N, limit, mask_N)
    ending_N = torch.maximum(terminated_N.to(torch.float32), truncated_N.to(torch.float32))
    ended_N = ending_N > 0  # compiled code would store `terminated_N | truncated_N` bytewise, at twice the time
    place_N = place_N + ending_N.to(torch.int64)
    start_NQ = start_PQ[place_N]
    final_observation = observe(state_SN).T.contiguous()
    observation = torch.where(
        ended_N[:, None], start_NQ[:, -final_observation.shape[1] :].to(final_observation.dtype), final_observation
    )
    pairs = zip(start_NQ[:, : len(state_SN)].unbind(1), state_SN.unbind(), strict=True)
    state_SN = torch.stack([torch.where(ended_N, new_N, old_N) for new_N, old_N in pairs])  # keeps the layout (S, N)
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
