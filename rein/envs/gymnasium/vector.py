"""Adapter for Gymnasium vector environments.

Shapes: N environments.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec, VectorizeMode, load_env_creator
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import TransformObservation
from torch import Tensor

from rein.envs.base.contract import SUCCESS, checked_num_envs, ends_episodes, where_rows
from rein.envs.base.seeding import UNKNOWN, HostEpisodeSeeds
from rein.envs.gymnasium.adapter import as_json, make_one, name_of
from rein.envs.host.block import About, Setup, Stepper
from rein.envs.host.episode_inputs import Options, ResetOptions, as_keywords
from rein.envs.host.host_environment import HostEnvironment
from rein.envs.host.results import (
    RESET,
    STEP,
    BatchedMasks,
    check_has_mask,
    check_parts,
    missing_masks,
    missing_values,
    reports_success,
    wanted_infos,
)
from rein.errors import EnvironmentContractError
from rein.ops.trees import map_tree
from rein.spaces import ACTION_MASK, entry
from rein.spaces.conversion import BatchCodec, Codec, array
from rein.spaces.masks import check_masks, folded, folded_space
from rein.types import TimeStep, Tree


def opened(
    source: Any, num_envs: int | None, autoreset_mode: AutoresetMode | str | None, make_kwargs: Mapping[str, Any]
) -> tuple[Any, AutoresetMode]:
    """Return the vector environment `source`, or `make_vec(source)` of an id, and its autoreset mode.

    Args:
        source: vector environment or id.
        num_envs: number of environments; must equal that of a vector environment.
        autoreset_mode: member of AutoresetMode, its name in any case, or its value.
        make_kwargs: options of `make_vec`.

    Raises:
        ValueError: if the mode is not a member, is unknown, or differs from that of the environment, or if the
            environments have different observation spaces.
        TypeError: if `num_envs` is not an integer.
    """
    mode = None if autoreset_mode is None else _parse_mode(autoreset_mode)
    if num_envs is not None:
        num_envs = checked_num_envs(num_envs)
    if isinstance(source, str | EnvSpec):
        by_id = functools.partial(_make_vec, mode)
        environment = make_one(source, {"num_envs": 1 if num_envs is None else num_envs, **make_kwargs}, by_id)
    elif not hasattr(source, "single_observation_space"):
        raise TypeError(
            f"{source!r} is not a gymnasium.vector.VectorEnv; use GymnasiumEnvironment for single environments"
        )
    elif make_kwargs:
        raise TypeError(f"{source} exists already, so it takes no options; remove {', '.join(make_kwargs)}")
    elif num_envs not in (None, source.num_envs):
        raise ValueError(f"num_envs={num_envs}: {source} has {source.num_envs} environments")
    else:
        environment = source
    made_here = isinstance(source, str | EnvSpec)
    with _closed_on_error(environment) if made_here else contextlib.nullcontext():
        return environment, _usable_mode(environment, mode)


@contextlib.contextmanager
def _closed_on_error(environment: Any) -> Iterator[None]:
    try:
        yield
    except BaseException:
        environment.close()
        raise


def _usable_mode(environment: Any, requested: AutoresetMode | None) -> AutoresetMode:
    """Return the autoreset mode, and prepare the environment for it. Raises ValueError if the mode does not work."""
    mode = _mode_of(environment, requested)
    bare = environment.unwrapped
    if isinstance(bare, SyncVectorEnv | AsyncVectorEnv):
        equal = batch_space(bare.single_observation_space, bare.num_envs)
        if bare.observation_space != equal:
            raise ValueError(
                f"{environment}: its environments have different observation spaces, batched"
                f" {bare.observation_space}; all environments must have equal spaces, batched {equal}"
            )
    if mode is AutoresetMode.SAME_STEP and isinstance(bare, SyncVectorEnv):
        _keep_final_observations(bare)
    if mode is AutoresetMode.NEXT_STEP and isinstance(bare, AsyncVectorEnv) and not bare.shared_memory:
        # after `reset`, its workers reset once more in the next step (Gymnasium 1.4)
        raise ValueError(
            f"{environment}: shared_memory=False does not work with {mode}; use shared_memory=True or another mode"
        )
    return mode


def _parse_mode(value: AutoresetMode | str) -> AutoresetMode:
    text = value.lower() if isinstance(value, str) else value
    for mode in AutoresetMode:
        if value is mode or text in (mode.name.lower(), mode.value.lower()):
            return mode
    raise ValueError(f"autoreset_mode={value!r}: give one of {_modes()}")


def _modes() -> str:
    return ", ".join(mode.name for mode in AutoresetMode)


def _make_vec(mode: AutoresetMode | None, source: str | EnvSpec, **kwargs: Any) -> Any:
    """Call `gymnasium.make_vec` with an autoreset mode, if the environment accepts one.

    Raises ValueError if it does not accept a mode and declares another one.
    """
    accepted = True
    if mode is not None:
        spec = gymnasium.spec(source) if isinstance(source, str) else source
        usual = VectorizeMode.SYNC if spec.vector_entry_point is None else VectorizeMode.VECTOR_ENTRY_POINT
        if VectorizeMode(kwargs.get("vectorization_mode") or usual) is not VectorizeMode.VECTOR_ENTRY_POINT:
            kwargs["vector_kwargs"] = {**kwargs.get("vector_kwargs", {}), "autoreset_mode": mode}
        elif accepted := _accepts_mode(spec):
            kwargs["autoreset_mode"] = mode
    environment = gymnasium.make_vec(source, **kwargs)
    declared = None if accepted else _declared_mode(environment)
    if mode is not None and declared not in (None, mode):
        environment.close()
        raise ValueError(
            f"autoreset_mode={mode.name}: the vector environment of {name_of(source)} has no option autoreset_mode, and"
            f' its mode is {declared.name}; give vectorization_mode="sync" as well'
        )
    return environment


def _accepts_mode(spec: EnvSpec) -> bool:
    """Return whether the vector entry point has the argument `autoreset_mode`; True if its signature is unknown."""
    entry: Any = spec.vector_entry_point
    if entry is None:  # refused by Gymnasium
        return True
    try:
        parameters = inspect.signature(load_env_creator(entry) if isinstance(entry, str) else entry).parameters
    except (TypeError, ValueError):  # compiled functions have no signature
        return True
    return "autoreset_mode" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _mode_of(environment: Any, requested: AutoresetMode | None) -> AutoresetMode:
    declared = _declared_mode(environment)
    mode = requested if declared is None else declared
    if mode is None:
        raise ValueError(
            f"{environment} does not declare metadata['autoreset_mode']; give autoreset_mode=, one of {_modes()}"
        )
    if requested not in (None, mode):
        raise ValueError(f"autoreset_mode={requested}: the mode of {environment} is {mode}")
    return mode


def _declared_mode(environment: Any) -> AutoresetMode | None:
    declared = None
    if environment.metadata is not VectorEnv.metadata:  # the default is shared by all classes, and ale-py modifies it
        declared = environment.metadata.get("autoreset_mode")
    if declared is None:
        declared = getattr(environment.unwrapped, "autoreset_mode", None)
    return None if declared is None else AutoresetMode(declared)


def _keep_final_observations(environment: SyncVectorEnv) -> None:
    """Copy the observations of environments that reuse one array, so that the final observation is kept.

    In SAME_STEP mode Gymnasium resets the environment before the final observation can be copied (Gymnasium#1132).
    """
    environment.envs = [TransformObservation(single, copy.deepcopy, None) for single in environment.envs]


logger = logging.getLogger(__name__)

_BOOL, _FLOAT = np.dtype(np.bool_), np.dtype(np.float32)


class _VectorBlock(Stepper):
    """Environments of a vector environment, which steps all of them at once.

    Its masks of infos are read for all environments at once, and episodes that end are reset as the autoreset mode
    demands.
    """

    def __init__(self, environment: Any, mode: AutoresetMode, setup: Setup, seed: int | None) -> None:
        self._environment, self.mode, self._setup, self._name = environment, mode, setup, setup.name
        self.num_envs = checked_num_envs(environment.num_envs)
        self.seeds, self.options = HostEpisodeSeeds(self.num_envs, seed), ResetOptions(self.num_envs)
        self._takes_seeds = isinstance(environment.unwrapped, SyncVectorEnv | AsyncVectorEnv)  # one per row
        space, action_space = environment.single_observation_space, environment.single_action_space
        self._observations = BatchCodec("observation", space, environment.observation_space, self.num_envs)
        self._actions = BatchCodec("action", action_space, environment.action_space, self.num_envs)
        self._finals = Codec("info.final_obs", space)
        self._looks_for_masks = setup.action_mask is None and ACTION_MASK not in setup.info
        self._looks_for_masks &= entry(space, ACTION_MASK) is None
        masks = missing_masks(self._name, environment, action_space) if setup.action_mask else None
        self._masks = None if masks is None else BatchedMasks(self._name, masks, self.num_envs)
        space = space if masks is None else folded_space(space, masks)
        fps = environment.metadata.get("render_fps")
        self.about = About(space, action_space, environment.render_mode, fps, [id(environment)])
        self._closed = False
        self._false_N = np.zeros(self.num_envs, np.bool_)
        self._resets_N = self._false_N  # environments whose next step is a reset; only with NEXT_STEP

    @property
    def episode_seeds(self) -> Tensor:  # type: ignore[override]  # computed
        """(N,) int64: seeds of the current episodes; -1 if the source resets its episodes itself."""
        if self._takes_seeds and self.mode is AutoresetMode.DISABLED:
            return self.seeds.current
        return torch.full((self.num_envs,), UNKNOWN, dtype=torch.int64, device="cpu")

    @ends_episodes
    def begin(self, _current: Sequence[int] | None = None, _keep_options: bool = False) -> Tree:
        seeds, all_N = self._next_seeds(), ~self._false_N
        (_, options), *others = self._groups(all_N)
        observation, info = self._parts("reset", RESET, seed=seeds, **as_keywords(options))
        self._resets_N = self._false_N
        if self._looks_for_masks:
            self._looks_for_masks, self.has_unused_masks = False, isinstance(info, Mapping) and ACTION_MASK in info
        if self._masks is not None:
            check_has_mask(self._name, info)
        self.observation = self._folded(self._observations.tensors(observation), info)
        for chosen_N, options in others:  # the call above has reset them with the options of the first group
            begun = self._reset_group(chosen_N, seeds if self._takes_seeds else None, options)
            self.observation = where_rows(torch.from_numpy(chosen_N), begun, self.observation)
        self._check_masks()
        self._ended = None
        return self.observation

    def step(self, action: Tree, _chosen: Sequence[int]) -> TimeStep:
        return self._step(self._actions.arrays(action))

    @ends_episodes
    def _step(self, actions: Any) -> TimeStep:
        observation, reward, terminated, truncated, info = self._parts("step", STEP, actions)
        valid_N = ~self._resets_N
        terminated_N = self._column("terminated", terminated, _BOOL) & valid_N
        truncated_N = self._column("truncated", truncated, _BOOL) & valid_N
        reward_N = np.where(valid_N, self._column("reward", reward, _FLOAT), np.float32(0.0))
        wanted = self._wanted(info, terminated_N | truncated_N)
        final_observation = self._conclude(self._observations.tensors(observation), info, terminated_N | truncated_N)
        self._check_masks()
        return TimeStep(
            observation=self.observation,
            reward=torch.from_numpy(reward_N),
            terminated=torch.from_numpy(terminated_N),
            truncated=torch.from_numpy(truncated_N),
            final_observation=final_observation,
            valid=torch.from_numpy(valid_N),
            info=wanted,
        )

    def render(self, index: int) -> Any:
        bare = self._environment.unwrapped
        if self._environment is bare and isinstance(bare, SyncVectorEnv):
            return bare.envs[index].render()
        frames = self._environment.render()
        return None if frames is None else frames[index]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._environment.close()

    def _parts(self, method: str, parts: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._environment, method)(*args, **kwargs)
        check_parts(self._name, method, result, parts)
        return result

    def _next_seeds(self) -> Any:
        """Return the seeds of a full reset in the form that the source takes: one per environment, or one for all."""
        by_ale = type(self._environment.unwrapped).__module__.startswith("ale_py.")
        if not (by_ale or self._takes_seeds):
            return self.seeds.advance(0)
        seeds = [self.seeds.advance(index) for index in range(self.num_envs)]
        return np.array(seeds) if by_ale else seeds

    def _column(self, field: str, values: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        return array(field, values, dtype, (self.num_envs,))

    def _conclude(self, source: Tree, info: Mapping[str, Any], ended_N: np.ndarray[Any, Any]) -> Tree:
        """Reset ended episodes if the source does not. Sets the current observation and returns the final one.

        `source` and `info` are the observation, without the entry `action_mask`, and the infos of the step.
        """
        self.observation = observation = self._folded(source, info)
        if self.mode is AutoresetMode.NEXT_STEP:
            self._resets_N = ended_N
        elif ended_N.any():
            if self.mode is AutoresetMode.SAME_STEP:
                final_observation = self._final_observation(source, info, ended_N)
                return where_rows(
                    torch.from_numpy(ended_N), self._folded(final_observation, info.get("final_info", {})), observation
                )
            self._reset_where(ended_N)
        return observation

    def _folded(self, observation: Tree, info: Any) -> Tree:
        """Return the observation with the action masks of `info`, if they are requested."""
        return observation if self._masks is None else folded(observation, self._masks.read(info))

    def _check_masks(self) -> None:
        spaces_ = self.about.observation_space, self.about.action_space
        check_masks(self.observation, *spaces_, must_act=~self._resets_N)

    def _groups(self, mask_N: np.ndarray[Any, Any]) -> list[tuple[np.ndarray[Any, Any], dict[str, Any] | None]]:
        """Begin the next options where `mask_N` is True. Returns the rows (N,) of each different options."""
        begun = {index: self.options.begin(index) for index in mask_N.nonzero()[0].tolist()}
        groups: list[tuple[np.ndarray[Any, Any], dict[str, Any] | None]] = []
        for index, options in begun.items():
            rows_N = next((rows_N for rows_N, group_options in groups if group_options == options), None)
            if rows_N is None:
                groups.append((rows_N := self._false_N.copy(), options))
            rows_N[index] = True
        return groups

    def _reset_where(self, ended_N: np.ndarray[Any, Any]) -> None:
        """Reset ended episodes in the mode DISABLED."""
        seeds = None
        if self._takes_seeds:
            seeds = [self.seeds.advance(index) if ended else None for index, ended in enumerate(ended_N.tolist())]
        for chosen_N, options in self._groups(ended_N):
            self.observation = where_rows(
                torch.from_numpy(chosen_N), self._reset_group(chosen_N, seeds, options), self.observation
            )

    def _reset_group(self, rows_N: np.ndarray[Any, Any], seeds: Any, options: dict[str, Any] | None) -> Tree:
        """Reset the environments in `rows_N` (N,) with the same options. The other rows of the result are undefined."""
        options = {**(options or {}), "reset_mask": rows_N.copy()}  # the call modifies and may keep new objects
        observation, info = self._parts("reset", RESET, seed=seeds, options=options)
        return self._folded(self._observations.tensors(observation), info)

    def _final_observation(self, observation: Tree, info: Mapping[str, Any], ended_N: np.ndarray[Any, Any]) -> Tree:
        """Return the final observations that the source returns in the mode SAME_STEP, in the rows that ended."""
        final = info.get("final_obs")
        if final is None:
            raise EnvironmentContractError(
                f"info.final_obs: {self._name} must return it in the step in which an episode ends, got None"
            )
        if not (isinstance(final, np.ndarray) and final.dtype == object):
            return self._observations.tensors(final)
        row_R = ended_N.nonzero()[0]
        rows = row_R.tolist()
        final_R = self._finals.stack([final[row] for row in rows], rows)
        return map_tree(lambda x, new: x.index_copy(0, torch.from_numpy(row_R), new), observation, final_R)

    def _wanted(self, info: Mapping[str, Any], ended_N: np.ndarray[Any, Any]) -> dict[str, Tensor]:
        """Return the requested entries of the infos. In SAME_STEP, an ended episode has the `info` of the reset."""
        if not isinstance(info, Mapping):
            raise EnvironmentContractError(f"{self._name}: info: expected a dictionary from step, got {info!r}")
        of_reset_N = ended_N if self.mode is AutoresetMode.SAME_STEP else self._false_N
        sources = ((info, ~of_reset_N), (info.get("final_info", {}), of_reset_N))
        wanted = {}
        for key, missing in self._setup.info.items():
            if reports_success(key, missing):
                wanted[key] = wanted_infos(self._success_infos(sources), key, missing, range(self.num_envs))
                continue
            values_N = np.broadcast_to(missing, (self.num_envs, *missing.shape)).copy()
            for source, mask_N in sources:
                if key in source:
                    there_N = mask_N & source.get(f"_{key}", True)
                    values_N[there_N] = array(f"info.{key}", source[key], missing.dtype, values_N.shape)[there_N]
            wanted[key] = torch.from_numpy(values_N)
        return wanted

    def _success_infos(self, sources: Any) -> list[dict[str, Any]]:
        """Return the entries of each environment that report success."""
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for source, mask_N in sources:
            for name in SUCCESS:
                if isinstance(values := source.get(name), np.ndarray) and len(values) == self.num_envs:
                    for row in (mask_N & source.get(f"_{name}", True)).nonzero()[0]:
                        infos[row][name] = values[row]
        return infos


class GymnasiumVectorEnvironment(HostEnvironment):
    """N environments of a `gymnasium.vector.VectorEnv`, or of `gymnasium.make_vec(id, num_envs, **make_kwargs)`.

    Use it for sources that step many environments at once, for instance compiled code or processes. Episodes are not
    replayable: a resumed run begins new episodes. `close` closes the source.

    The processes of Gymnasium's `AsyncVectorEnv` are not supervised. `rein.make(id, num_envs, workers=...)` has workers
    with timeouts and restart.

    Args:
        autoreset_mode: autoreset mode of a source that does not declare one. With an id it is passed to `make_vec`.
        info: entries of the infos to store, with the default for steps without them, such as `{"success": False}`. The
            default also defines dtype and shape.
        action_mask: add `info["action_mask"]` to the observation, as in `GymnasiumEnvironment`. Environments for which
            `_action_mask` is False may choose every action.

    Raises:
        ValueError: if Gymnasium does not know the id, or if the autoreset mode is unknown or differs from the declared
            one.
        TypeError: if a space cannot be converted to tensors, or if `info` is not a dictionary of numbers.
    """

    @torch.inference_mode(False)  # inference tensors cannot be modified outside of inference mode
    def __init__(
        self,
        source: VectorEnv[Any, Any, Any] | EnvSpec | str,
        num_envs: int | None = None,
        seed: int | None = None,
        *,
        autoreset_mode: AutoresetMode | str | None = None,
        info: Mapping[str, Any] | None = None,
        action_mask: bool | None = None,
        **make_kwargs: Any,
    ) -> None:
        made_here, infos = isinstance(source, str | EnvSpec), missing_values(info)
        name = name_of(source) if isinstance(source, str | EnvSpec) else str(source)
        environment, mode = opened(source, num_envs, autoreset_mode, make_kwargs)
        config = {
            "autoreset_mode": mode.value,
            "make_kwargs": {key: as_json(value) for key, value in make_kwargs.items()},
        }
        setup = Setup(name=name, info=infos, action_mask=action_mask, replayable=False, config=config)
        with _closed_on_error(environment) if made_here else contextlib.nullcontext():
            block = _VectorBlock(environment, mode, setup, seed)
            super().__init__(setup, block, block.seeds, block.options)
        self._mode = mode

    def set_options(
        self, options: Options | Sequence[Options | None] | None, environments: Iterable[int] | None = None
    ) -> None:
        """Set the options that `reset` of an environment gets, see `HostEnvironment.set_options`.

        Environments with different options are reset by separate calls. Raises ValueError if the source resets its
        episodes itself, because Gymnasium then resets without options.
        """
        if self._mode is not AutoresetMode.DISABLED:
            raise ValueError(
                f"{self._setup.name}: set_options needs the autoreset mode DISABLED, because the source resets its "
                f"episodes itself in {self._mode.name}; give autoreset_mode='DISABLED', or use rein.make(id, "
                "workers=...)"
            )
        super().set_options(options, environments)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the seed and the episode counters. `reset` must be called next, and begins new episodes.

        Raises ValueError for another number of environments.
        """
        super().load_state_dict(state)
        if self._seeds.started:
            logger.warning(
                "%s is not replayable: open episodes are lost, and reset() begins new ones", self._setup.name
            )
