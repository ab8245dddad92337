"""Adapter for vector environments whose `reset` and `step` take and return torch tensors.

Shapes: N environments, O one observation, A one action.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import (
    CLOSED,
    check_action,
    check_begun,
    check_open,
    ends_episodes,
    representation,
    where_rows,
)
from rein.envs.base.seeding import UNKNOWN
from rein.errors import EnvironmentContractError, explain
from rein.ops.random import checked_seed, stream_seed
from rein.ops.trees import leaves, map_tree
from rein.spaces.conversion import ObservationGroups, dtypes_of, gymnasium_space
from rein.types import TimeStep, Tree

FinalObservation = Literal["step", "info", "previous"]
_KEYS = ("final_obs", "final_observation")  # of Isaac Lab and of ManiSkill


@explain("ENVIRONMENT_ATTRIBUTES")
class TensorEnvironment:
    """Adapter for vector environments of torch tensors: Isaac Lab, mjlab, ManiSkill and custom simulators.

    Tensors stay on the device of the environment. The adapter copies nothing to the host.

    `env.reset(seed=)` returns `(observation, info)`, and `env.step(action)` returns `(observation, reward, terminated,
    truncated, info)` with tensors `(N, ...)`. `env` or `env.unwrapped` has the attributes `num_envs`, `device`,
    `single_observation_space` and `single_action_space`.

    The observation group `policy` or `actor` becomes the observation, and `critic` becomes the entry
    `critic_observation`. Other groups are further entries of the observation.

    If `env.cfg.is_finite_horizon` is True, truncated episodes count as terminated, as in RSL-RL.

    Args:
        env: vector environment.
        seed: random seed. The environment gets one seed per reset, derived from it.
        final_observation: source of the observation before an automatic reset, from which agents bootstrap truncated
            episodes.

            - `"step"`: `env` does not reset itself. `step` returns the final observation, and the adapter then calls
              `env.reset(env_ids=indices)`, or `env.reset(options={"env_idx": indices})` if `reset` has no argument
              `env_ids`. The indices of ended episodes wait for the device once per step.
            - `"info"`: `info["final_obs"]` or `info["final_observation"]`, `(N, *O)`, in a step in which an episode
              ends.
            - `"previous"`: the final observation is not available. The observation before the last step replaces it.

            By default, the adapter selects `"step"` for mjlab with `cfg.auto_reset=False`, `"info"` for Isaac Lab with
            `cfg.compute_final_obs=True` and for `ManiSkillVectorEnv`, and `"previous"` for a finite horizon.

    Raises:
        ValueError: if the environment does not declare a source of final observations.
        TypeError: if `env` lacks one of these members, if its `reset` cannot reset single environments although
            `final_observation="step"` needs this, or if a space cannot be converted to tensors.
    """

    replayable = False  # all environments share one random stream

    def __init__(self, env: Any, seed: int | None = None, *, final_observation: FinalObservation | None = None) -> None:
        _check_members(env)
        self.env = env
        config = getattr(_attribute(env, "unwrapped"), "cfg", None)
        self._finite_horizon = bool(getattr(config, "is_finite_horizon", False))
        if final_observation is None:
            final_observation = _declared(env, config)
        if final_observation is None and self._finite_horizon:
            final_observation = "previous"
        if final_observation not in ("step", "info", "previous"):
            raise ValueError(_unknown(env, config, final_observation))
        self.final_observation: FinalObservation = final_observation
        self.num_envs = int(_attribute(env, "num_envs"))
        self.device = torch.device(_attribute(env, "device"))
        self._groups = ObservationGroups(gymnasium_space(_attribute(env, "single_observation_space")))
        self.single_observation_space: spaces.Space[Any] = self._groups.space
        self.single_action_space: spaces.Space[Any] = gymnasium_space(_attribute(env, "single_action_space"))
        self._dtypes = dtypes_of(self.single_observation_space)
        self._by_ids = "env_ids" in inspect.signature(env.reset).parameters
        if final_observation == "step" and not self._by_ids:
            _check_partial_reset(env)
        self._seed_N = torch.full((self.num_envs,), UNKNOWN, dtype=torch.int64, device=self.device)
        self._valid_N = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self._action_shape = (self.num_envs, *(self.single_action_space.shape or ()))
        self._on_host = self.device.type == "cpu"
        self._checked = False
        self.seed = checked_seed(seed)
        self._resets = 0
        self._observation: Tree = None
        self._ended: str | None = None  # the error that ended the episodes, or CLOSED

    @property
    def episode_seeds(self) -> Tensor:
        """(N,) int64: -1, because single episodes have no seed."""
        return self._seed_N

    @property
    def awaits_reset(self) -> bool:
        """Whether `reset` must be called before a step: before the first reset, and after a resume."""
        return self._observation is None or self._ended is not None

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON values."""
        kind = type(_attribute(self.env, "unwrapped"))
        return {
            "env": f"{kind.__module__}.{kind.__qualname__}",
            "num_envs": self.num_envs,
            "seed": self.seed,
            "final_observation": self.final_observation,
        }

    def reset(self, seed: int | None = None) -> Tree:
        """Begin a new episode of every environment. `seed` restarts the random stream. Returns the observation."""
        check_open(type(self).__name__, "reset", self._ended)
        if seed is not None:
            self.seed, self._resets = checked_seed(seed), 0
        if self.seed is None:
            self.seed = secrets.randbits(31)
        self._observation = None  # if `reset` raises, it must be called again
        observation, _ = self.env.reset(seed=stream_seed(self.seed, "environment", self._resets))
        self._resets += 1
        self._observation, self._ended = self._observed(observation, copy=True), None
        return self._observation

    def apply_action(self, action: Tree) -> TimeStep:
        """Step every environment with actions `(N, *A)`.

        Raises RuntimeError before the first reset and EnvironmentContractError for an action of another shape. The
        first step also checks the kinds of the returned tensors and, on the CPU, the values of the action.
        """
        check_begun(type(self).__name__, "apply_action", self._observation is not None, self._ended)
        unseen = self._on_host and not self._checked  # on another device, reading the values would wait
        if unseen or not isinstance(action, Tensor) or action.shape != self._action_shape:
            check_action(action, self.num_envs, self.single_action_space)
        return self._step(action)

    @ends_episodes
    def _step(self, action: Tree) -> TimeStep:
        previous = self._observation
        # the environment may modify its argument, and reuse the tensors that it returns
        observation, reward, terminated, truncated, info = self.env.step(map_tree(Tensor.clone, action))
        if not self._checked:
            _check_returned(self, observation, reward, terminated, truncated)
            self._checked = True
        observation = final = self._observed(observation, copy=True)
        reward_N, terminated_N, truncated_N = _new(reward, torch.float32), terminated.clone(), truncated.clone()
        # on another device, reading the flags would wait; NumPy takes half the time of torch
        if not self._on_host or np.count_nonzero(terminated_N.numpy()) or np.count_nonzero(truncated_N.numpy()):
            ended_N = terminated_N | truncated_N
            observation, final = self._conclude(observation, previous, ended_N, info)
            if self._finite_horizon:
                terminated_N, truncated_N = ended_N, torch.zeros_like(ended_N)
        self._observation = observation
        return TimeStep(observation, reward_N, terminated_N, truncated_N, final, self._valid_N.clone(), {})

    def reseed(self, seed: int) -> None:
        """Set the random seed. Raises RuntimeError after the first reset."""
        if self._resets:
            raise RuntimeError(f"reseed({seed}): episodes have begun with seed {self.seed}; call reset(seed={seed})")
        self.seed = checked_seed(seed)

    def close(self) -> None:
        """Close the environment. A second call does nothing."""
        self._observation = None
        if self._ended is not CLOSED:
            self._ended = CLOSED
            self.env.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and the number of resets. The state within an episode is not available."""
        return {"seed": self.seed, "resets": self._resets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the seed and the number of resets. `reset` must be called next, and begins new episodes."""
        self.seed, self._resets, self._observation = state["seed"], state["resets"], None

    def __repr__(self) -> str:
        return representation(self, type(_attribute(self.env, "unwrapped")).__name__, f"num_envs={self.num_envs}")

    def _observed(self, observation: Tree, copy: bool) -> Tree:
        """Return an observation of the environment as an observation of the space. `copy` makes new tensors."""
        return map_tree(_new if copy else Tensor.to, self._groups(observation), self._dtypes)

    def _conclude(
        self, observation: Tree, previous: Tree, ended_N: Tensor, info: Mapping[str, Any]
    ) -> tuple[Tree, Tree]:
        """Return the current observation and the final one in a step in which an episode may have ended."""
        if self.final_observation == "previous":
            return observation, where_rows(ended_N, previous, observation)
        if self.final_observation == "info":
            final = next((info[key] for key in _KEYS if key in info), None)
            if final is not None:
                return observation, where_rows(ended_N, self._observed(final, copy=False), observation)
            if self._on_host:
                raise EnvironmentContractError(
                    f"{self}: an episode has ended, but info has no entry {' or '.join(_KEYS)}; return it, or use "
                    'final_observation="previous"'
                )
            return observation, observation
        index_R = ended_N.nonzero().squeeze(1)
        if not len(index_R):
            return observation, observation
        begun, _ = self.env.reset(**({"env_ids": index_R} if self._by_ids else {"options": {"env_idx": index_R}}))
        return where_rows(ended_N, self._observed(begun, copy=False), observation), observation


def _attribute(env: Any, name: str) -> Any:
    """Return an attribute of an environment, or of the environment in its wrappers."""
    if name == "unwrapped":
        return getattr(env, name, env)
    return getattr(env, name) if hasattr(env, name) else getattr(env.unwrapped, name)


def _check_members(env: Any) -> None:
    """Raise TypeError if a vector environment lacks a member that the adapter uses."""
    names = "num_envs", "device", "single_observation_space", "single_action_space", "reset", "step"
    if isinstance(env, type):
        raise TypeError(f"TensorEnvironment: got the class {env.__name__}; pass an instance")
    if missing := [name for name in names if not (hasattr(env, name) or hasattr(_attribute(env, "unwrapped"), name))]:
        raise TypeError(
            f"TensorEnvironment: {type(env).__name__} is not a vector environment of tensors, because it lacks "
            f"{', '.join(missing)}; use rein.make for environments of Gymnasium"
        )


def _check_partial_reset(env: Any) -> None:
    """Raise TypeError if `reset` accepts no indices."""
    parameters = inspect.signature(env.reset).parameters.values()
    if not any(parameter.name == "options" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise TypeError(
            f'TensorEnvironment({type(env).__name__}, final_observation="step"): reset must have an argument env_ids '
            "or options, with the indices of the environments to reset"
        )


def _check_returned(environment: Any, observation: Tree, reward: Any, terminated: Any, truncated: Any) -> None:
    """Check that a step returned tensors, and bool tensors for the ends of episodes."""
    flags = {"terminated": terminated, "truncated": truncated}
    for name, value in (*leaves(observation, "observation"), ("reward", reward), *flags.items()):
        if not isinstance(value, Tensor) or (name in flags and value.dtype is not torch.bool):
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            kind = "a bool tensor" if name in flags else "a tensor"
            raise EnvironmentContractError(f"{environment}: step must return {name} as {kind}, got {got}")


def _declared(env: Any, config: Any) -> FinalObservation | None:
    """Return the source of final observations that an environment declares, or None."""
    if getattr(config, "auto_reset", None) is False:  # mjlab
        return "step"
    if getattr(config, "compute_final_obs", False):  # Isaac Lab
        return "info"
    if hasattr(env, "ignore_terminations"):  # ManiSkillVectorEnv
        return "info" if env.auto_reset else "step"
    return None


def _unknown(env: Any, config: Any, value: Any) -> str:
    name = f"TensorEnvironment({type(env).__name__}, final_observation={value!r})"
    if value is not None:
        return f'{name}: give "step", "info" or "previous"'
    advice = ""
    if hasattr(config, "auto_reset"):
        advice = "set cfg.auto_reset=False before you create the environment, or "
    elif hasattr(config, "compute_final_obs"):
        advice = "set cfg.compute_final_obs=True before you create the environment, or "
    return (
        f"{name}: the environment resets itself and does not declare a final observation, from which agents bootstrap "
        f'truncated episodes; {advice}pass final_observation="step", "info" or "previous"'
    )


def _new(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a new tensor of the dtype. `clone` takes half the time of `to`."""
    return tensor.clone() if tensor.dtype is dtype else tensor.to(dtype)
