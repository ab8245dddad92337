"""Environments that somebody else steps: any `gymnasium.vector.VectorEnv`, whatever its way to reset.

Gymnasium has three ways (`gymnasium.vector.AutoresetMode`). DISABLED: rein resets what ended, in the step in which it
ended. SAME_STEP: so does the source, and it hands the final observation over in `info["final_obs"]`: for each
environment that ended an entry of an array of objects; in ale-py one array for all. NEXT_STEP: the source resets in the
step that follows, whose action it ignores; that row is no transition, so it is not `valid`.

Shapes: N environments, O one observation, A one action.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor

from rein.errors import EnvironmentContractError
from rein.foreign_names import ENVIRONMENT_ATTRIBUTES, explain
from rein.integrations.gymnasium.batches import BatchCodec, array
from rein.integrations.gymnasium.making import Source, as_json, name_of
from rein.integrations.gymnasium.opening import opened
from rein.integrations.gymnasium.results import RESET, STEP, check_parts, missing_values
from rein.integrations.gymnasium.workers import Workers, closed_on_error, in_processes
from rein.ops.trees import map_tree
from rein.rollout.contract import check_action, check_observation, checked_num_envs
from rein.rollout.seeds import UNKNOWN, HostEpisodeSeeds
from rein.rollout.spaces import Codec
from rein.types import TimeStep, Tree

logger = logging.getLogger(__name__)

_BOOL, _FLOAT = np.dtype(np.bool_), np.dtype(np.float32)


@explain(ENVIRONMENT_ATTRIBUTES)
class GymnasiumVectorEnvironment:
    """The N environments of a `gymnasium.vector.VectorEnv`, or of `gymnasium.make_vec(id, num_envs, **make_kwargs)`.

    For sources that step many at once, compiled, in processes or elsewhere. None of them is replayable: a run that is
    resumed begins new episodes. `autoreset_mode` says how the source resets where it does not say so itself; with an id
    it is asked of `make_vec`. `info` names what is wanted of the steps' infos, each with the value for steps without
    it, which also says shape and dtype: `info={"success": False}`. `close` closes the source.

    With an `AsyncVectorEnv`, whose environments live in processes of their own, a step or reset whose process died
    raises WorkerDied, and one that takes longer than `timeout` seconds WorkerTimeout; all processes are ended then.
    What is raised in a process passes through, with a note of environment and episode seed; what cannot pass between
    processes comes as a RuntimeError with its traceback, or a WorkerDied where the processes are not of `in_processes`.

    Raises ValueError for an id that Gymnasium does not know, where the autoreset mode is not known or another one and
    for a timeout where there are no processes, TypeError for a space that is no tensor and an `info` that is no
    dictionary of numbers.
    """

    replayable = False

    @torch.inference_mode(False)  # inference tensors cannot be written to outside of that mode
    def __init__(
        self,
        source: VectorEnv[Any, Any, Any] | EnvSpec | str,
        num_envs: int | None = None,
        seed: int | None = None,
        *,
        autoreset_mode: AutoresetMode | str | None = None,
        info: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        **make_kwargs: Any,
    ) -> None:
        self._info = missing_values(info)
        self._name = name_of(source) if isinstance(source, str | EnvSpec) else str(source)
        self._make_kwargs = make_kwargs
        self._environment, self._mode = opened(source, num_envs, autoreset_mode, make_kwargs)
        made_here = isinstance(source, str | EnvSpec)
        with closed_on_error(self._environment) if made_here else contextlib.nullcontext():
            self._prepare(seed, timeout)
        self._observation: Tree = None  # the current one; None where there are no episodes
        self._nobody_N = np.zeros(self.num_envs, np.bool_)
        self._resets_N = self._nobody_N  # whose next step is a reset; NEXT_STEP alone has such
        self._checked, self._closed = False, False

    def _prepare(self, seed: int | None, timeout: float | None) -> None:
        """Set up everything that depends on the source. Raises if the source does not fit."""
        self._workers = Workers(self._environment, self._name, timeout)
        self.num_envs = checked_num_envs(self._environment.num_envs)
        self.device = torch.device("cpu")
        self._seeds = HostEpisodeSeeds(self.num_envs, seed)
        self._takes_seeds = isinstance(self._environment.unwrapped, SyncVectorEnv | AsyncVectorEnv)  # one for each
        self.single_observation_space = self._environment.single_observation_space
        self.single_action_space = self._environment.single_action_space
        observations, actions = self._environment.observation_space, self._environment.action_space
        self._observations = BatchCodec("observation", self.single_observation_space, observations, self.num_envs)
        self._actions = BatchCodec("action", self.single_action_space, actions, self.num_envs)
        self._finals = Codec("info.final_obs", self.single_observation_space)

    @classmethod
    def in_processes(
        cls,
        id_or_factory: Source,
        num_envs: int,
        seed: int | None = None,
        *,
        timeout: float | None = None,
        info: Mapping[str, Any] | None = None,
        replayable: bool = False,
        **make_kwargs: Any,
    ) -> GymnasiumVectorEnvironment:
        """What `GymnasiumEnvironment` has of the same arguments, to the bit, each environment in a process of its own.

        For environments that are slow: a step waits for the slowest. It is not replayable. Ctrl-C reaches the main
        process alone, as without processes; where no handler takes it, it breaks the call off and all processes are
        ended.

        Raises ValueError and TypeError as `GymnasiumEnvironment` does, ValueError for `replayable=True`, and WorkerDied
        where a process ends at once.
        """
        if replayable:
            why = "all of them step together, so none can repeat its episode at a resume; GymnasiumEnvironment can"
            raise ValueError(f"in_processes(replayable={replayable}): {why}")
        missing = missing_values(info)  # refused before there are processes
        source = in_processes(id_or_factory, num_envs, make_kwargs, missing)
        with closed_on_error(source):
            environment = cls(source, seed=seed, timeout=timeout, info=missing)
        environment._name = environment._workers.name = name_of(id_or_factory)
        environment._make_kwargs = make_kwargs
        return environment

    @property
    def seed(self) -> int | None:
        """The seed of all streams; None until given, drawn at the first reset if it never was."""
        return self._seeds.seed

    @property
    def episode_seeds(self) -> Tensor:
        """(N,) int64: what the current episodes were reset with, if rein resets them; -1 where the source does."""
        if self._takes_seeds and self._mode is AutoresetMode.DISABLED:
            return self._seeds.current
        return torch.full((self.num_envs,), UNKNOWN, dtype=torch.int64, device="cpu")

    @property
    def awaits_reset(self) -> bool:
        """Whether there are no episodes to step: before the first reset, and after a resume."""
        return self._observation is None

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return {
            "id": self._name,
            "num_envs": self.num_envs,
            "seed": self.seed,
            "autoreset_mode": self._mode.value,
            "info": {key: missing.tolist() for key, missing in self._info.items()},
            "make_kwargs": {key: as_json(value) for key, value in self._make_kwargs.items()},
        }

    def reset(self, seed: int | None = None) -> Tree:
        """Begin new episodes everywhere; `seed` starts all streams anew. Returns the observation."""
        if seed is not None:
            self._seeds.restart(seed)
        observation, _ = self._parts("reset", RESET, seed=self._next_seeds())
        self._resets_N = self._nobody_N
        self._observation = self._observations.tensors(observation)
        return self._observation

    def apply_action(self, action: Tree) -> TimeStep:
        """Step every environment by `action` (N, *A).

        Raises RuntimeError before the first reset and EnvironmentContractError for an action or a result that does not
        fit its space.
        """
        self._check(action)
        observation, reward, terminated, truncated, info = self._parts("step", STEP, self._actions.arrays(action))
        valid_N = ~self._resets_N
        terminated_N = self._column("terminated", terminated, _BOOL) & valid_N
        truncated_N = self._column("truncated", truncated, _BOOL) & valid_N
        reward_N = np.where(valid_N, self._column("reward", reward, _FLOAT), np.float32(0.0))
        wanted = self._wanted(info, terminated_N | truncated_N)
        final_observation = self._conclude(self._observations.tensors(observation), info, terminated_N | truncated_N)
        return TimeStep(
            observation=self._observation,
            reward=torch.from_numpy(reward_N),
            terminated=torch.from_numpy(terminated_N),
            truncated=torch.from_numpy(truncated_N),
            final_observation=final_observation,
            valid=torch.from_numpy(valid_N),
            info=wanted,
        )

    @property
    def render_fps(self) -> float | None:
        """Frames per second that the source declares for its videos; None if it declares none."""
        return self._environment.metadata.get("render_fps")

    def render(self, index: int = 0) -> Any:
        """Render an RGB frame of one environment; the other processes are not asked.

        Raises ValueError unless built with `render_mode="rgb_array"`.
        """
        mode, frame = self._environment.render_mode, None
        if mode == "rgb_array":
            bare = self._environment.unwrapped
            if self._environment is bare and isinstance(bare, AsyncVectorEnv):
                frame = self._call(self._workers.render, index)
            elif self._environment is bare and isinstance(bare, SyncVectorEnv):
                frame = bare.envs[index].render()
            elif (frames := self._call(self._environment.render)) is not None:
                frame = frames[index]
        if frame is None:
            raise ValueError(f"{self._name}: built with render_mode={mode!r}; give render_mode='rgb_array'")
        return frame

    def reseed(self, seed: int) -> None:
        """Take `seed` for all streams; RuntimeError after the first reset."""
        self._seeds.reseed(seed)

    def close(self) -> None:
        """Close the source; a second time does nothing."""
        self._observation = None
        if not self._closed:
            self._closed = True
            self._workers.close()

    def state_dict(self) -> dict[str, Any]:
        """Which episodes have begun; what is within them belongs to the source."""
        return {"seeds": self._seeds.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Wait for `reset` to begin new episodes, others than have been; ValueError for another number of them."""
        self._seeds.load_state_dict(state["seeds"])
        self._observation = None
        if self._seeds.started:
            logger.warning("%s is not replayable: its open episodes are lost, reset() begins new ones", self._name)

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the source, whose processes may die of it."""
        self._workers.check()
        try:
            return method(*args, **kwargs)
        except BaseException as error:  # is explained, or raised again; KeyboardInterrupt leaves a call without answer
            self._workers.explain(error, lambda index: int(self.episode_seeds[index]))
            raise

    def _parts(self, method: str, parts: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
        result = self._call(getattr(self._environment, method), *args, **kwargs)
        check_parts(self._name, method, result, parts)
        return result

    def _check(self, action: Tree) -> None:
        if self._observation is None:
            raise RuntimeError(f"{self._name}: call reset() before apply_action()")
        if not self._checked:
            check_action(action, self.num_envs, self.single_action_space)
            check_observation(self._observation, self.num_envs, self.single_observation_space)
            self._checked = True

    def _next_seeds(self) -> Any:
        """What a reset of all is seeded with, as the source takes it: a seed for each environment, or one for all."""
        by_ale = type(self._environment.unwrapped).__module__.startswith("ale_py.")
        if not (by_ale or self._takes_seeds):
            return self._seeds.advance(0)
        seeds = [self._seeds.advance(index) for index in range(self.num_envs)]
        return np.array(seeds) if by_ale else seeds

    def _column(self, field: str, values: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        return array(field, values, dtype, (self.num_envs,))

    def _conclude(self, observation: Tree, info: Mapping[str, Any], ended_N: np.ndarray[Any, Any]) -> Tree:
        """Begin new episodes where the source does not, and keep what is seen next; returns the final observation."""
        self._observation = observation
        if self._mode is AutoresetMode.NEXT_STEP:
            self._resets_N = ended_N
        elif ended_N.any():
            if self._mode is AutoresetMode.SAME_STEP:
                return self._final_observation(observation, info, ended_N)
            self._observation = _where(ended_N, self._reset_where(ended_N), observation)
        return observation

    def _reset_where(self, ended_N: np.ndarray[Any, Any]) -> Tree:
        """DISABLED: the reset that rein does."""
        seeds = None
        if self._takes_seeds:
            seeds = [self._seeds.advance(index) if ended else None for index, ended in enumerate(ended_N.tolist())]
        options = {"reset_mask": ended_N.copy()}  # new ones each time: the call takes the mask out, and may keep it
        observation, _ = self._parts("reset", RESET, seed=seeds, options=options)
        return self._observations.tensors(observation)

    def _final_observation(self, observation: Tree, info: Mapping[str, Any], ended_N: np.ndarray[Any, Any]) -> Tree:
        """SAME_STEP: what the source hands over."""
        final = info.get("final_obs")
        if final is None:
            raise EnvironmentContractError(
                f"info.final_obs: expected from {self._name} where an episode ended, got nothing"
            )
        if not (isinstance(final, np.ndarray) and final.dtype == object):
            return _where(ended_N, self._observations.tensors(final), observation)
        row_R = ended_N.nonzero()[0]
        rows = row_R.tolist()
        final_R = self._finals.stack([final[row] for row in rows], rows)
        return map_tree(lambda x, new: x.index_copy(0, torch.from_numpy(row_R), new), observation, final_R)

    def _wanted(self, info: Mapping[str, Any], ended_N: np.ndarray[Any, Any]) -> dict[str, Tensor]:
        """What was asked for of the infos of this step: in SAME_STEP, where one ended, `info` is that of the reset."""
        if not isinstance(info, Mapping):
            raise EnvironmentContractError(f"{self._name}: info: expected a dictionary from step, got {info!r}")
        of_reset_N = ended_N if self._mode is AutoresetMode.SAME_STEP else self._nobody_N
        sources = ((info, ~of_reset_N), (info.get("final_info", {}), of_reset_N))
        wanted = {}
        for key, missing in self._info.items():
            values_N = np.broadcast_to(missing, (self.num_envs, *missing.shape)).copy()
            for source, mask_N in sources:
                if key in source:
                    there_N = mask_N & source.get(f"_{key}", True)
                    values_N[there_N] = array(f"info.{key}", source[key], missing.dtype, values_N.shape)[there_N]
            wanted[key] = torch.from_numpy(values_N)
        return wanted


def _where(mask_N: np.ndarray[Any, Any], new: Tree, old: Tree) -> Tree:
    mask = torch.from_numpy(mask_N)
    return map_tree(lambda a, b: torch.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, old)
