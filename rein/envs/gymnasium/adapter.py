"""Adapter for Gymnasium environments: N environments that are stepped one by one, with one seed per episode.

Shapes: N environments.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from torch import Tensor

from rein.envs.base.contract import (
    check_action,
    check_observation,
    check_rows_of,
    checked_count,
    checked_num_envs,
    representation,
    restored,
)
from rein.envs.base.options import Options, ResetOptions, as_keywords
from rein.envs.base.seeding import HostEpisodeSeeds
from rein.envs.base.step_checks import (
    CLOSED,
    RESET,
    STEP,
    check_begun,
    check_open,
    check_parts,
    ended_flags,
    ends_episodes,
    missing_values,
    rewards_of,
    wanted_infos,
)
from rein.envs.gymnasium.history import ActionHistory, put_actions, zeros
from rein.envs.gymnasium.masks import warn_of_mask, with_mask
from rein.errors import EnvironmentContractError, explain, hints
from rein.ops.trees import leaves, map_tree
from rein.spaces import ACTION_MASK, entry
from rein.spaces.conversion import Codec
from rein.spaces.masks import check_masks
from rein.types import TimeStep, Tree

Source = str | EnvSpec | Callable[..., gymnasium.Env[Any, Any]]

_EXTRAS = {"atari": "ale-py", "box2d": "Box2D", "mujoco": "MuJoCo"}
_VERSION = re.compile(r"-v\d+$")
_ATARI = re.compile(r"ALE/\w+-v\d+")
_BUILT_IN = "gymnasium.envs."  # module prefix of the entry points that a file may choose


def make(source: Source, make_kwargs: Mapping[str, Any], by_id: Callable[..., Any] = gymnasium.make) -> Any:
    """Return `source()` of a factory, or `by_id(source)` of an id. Imports ale-py for ids that begin with `ALE/`.

    Raises ValueError for an id that Gymnasium does not know, and ImportError with installation instructions if a
    package is missing.
    """
    given: Any = source
    if isinstance(given, gymnasium.Env):
        raise TypeError(
            "expected an id or a function that makes environments, such as `lambda: gymnasium.make(...)`, got an"
            " environment"
        )
    if isinstance(source, str) and "ALE/" in source:
        _register_atari(source)
    try:
        made = source(**make_kwargs) if callable(source) else by_id(source, **make_kwargs)
        _check_made(source, made)
        return made
    except TypeError as error:
        _explain_keyword(source, make_kwargs, error)
        raise
    except gymnasium.error.DependencyNotInstalled as error:
        extra = re.search(r"gymnasium\[(\w+)\]", str(error))
        if extra is None or extra[1] not in _EXTRAS:
            raise
        _refuse_without(extra[1], source, error)
    except gymnasium.error.Error as error:
        if not isinstance(source, str) or source in gymnasium.registry:  # the id is known: the error has another cause
            raise
        raise ValueError(f"unknown environment {source!r}; {_hint(source, error)}") from error


def _check_made(source: Source, made: Any) -> None:
    """Raise TypeError if a factory returned an object that is not a Gymnasium environment, or lacks a space."""
    missing = [name for name in ("step", "reset", "observation_space", "action_space") if not hasattr(made, name)]
    if missing and isinstance(made, gymnasium.Env):
        raise TypeError(
            f"{name_of(source)} returned an environment without {' and '.join(missing)}; set it in the class or in"
            " __init__, such as self.action_space = gymnasium.spaces.Discrete(2)"
        )
    if missing:
        what = repr(made) if made is None or isinstance(made, str) else f"a {type(made).__name__}"
        hint = "; it is already an environment of rein, so use it directly" if hasattr(made, "apply_action") else ""
        raise TypeError(f"{name_of(source)} returned {what}, and must return a gymnasium.Env{hint}")


def _explain_keyword(source: Source, make_kwargs: Mapping[str, Any], error: TypeError) -> None:
    """Raise TypeError with rein's name of an option if the environment refused the name of another library."""
    for name in make_kwargs:
        ours = next(iter(hints().OPTIONS.get(name, ())), "")
        if ours in ("num_envs", "seed", "action_mask") and f"'{name}'" in str(error):
            raise TypeError(f"{name_of(source)}: there is no option {name}; use {ours}") from error


def _explain_reset(name: str, error: Exception) -> None:
    """Raise TypeError with instructions if `reset` takes no seed or no options, as in Gym before version 0.26."""
    if isinstance(error, TypeError) and "reset() got an unexpected keyword argument" in str(error):
        raise TypeError(
            f"{name}: {error}. Define `def reset(self, *, seed=None, options=None)`, call `super().reset(seed=seed)`"
            " first, draw random numbers from `self.np_random`, and return `observation, {}`"
        ) from error


def name_of(source: Source) -> str:
    """Return the id of an environment, or module and name of a factory. Raises TypeError for anything else."""
    if not isinstance(source, str | EnvSpec) and not callable(source) and not isinstance(source, gymnasium.Env):
        raise TypeError(
            f"expected the id of an environment or a function that makes one, got a {type(source).__name__}; give one "
            "function, and num_envs= for several environments"
        )
    if isinstance(source, str):
        return source
    if isinstance(source, EnvSpec):
        return source.id
    return f"{source.__module__}:{getattr(source, '__qualname__', source)}"


def as_json(value: Any) -> Any:
    """Return the value if it is None, bool, int, float or str, and otherwise its `repr`."""
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _register_atari(source: str) -> None:
    try:
        import ale_py
    except ImportError as error:
        _refuse_without("atari", source, error)
    gymnasium.register_envs(ale_py)


def _refuse_without(extra: str, source: Source, error: Exception) -> NoReturn:
    more = " opencv-python-headless" if extra == "atari" else ""  # for AtariPreprocessing
    raise ImportError(f'{name_of(source)} needs {_EXTRAS[extra]}: pip install "gymnasium[{extra}]"{more}') from error


def _hint(source: str, error: Exception) -> str:
    name, ids = _VERSION.sub("", source).lower(), list(gymnasium.registry)
    close = difflib.get_close_matches(name, [_VERSION.sub("", known).lower() for known in ids], n=3)
    if similar := [known for known in ids if _VERSION.sub("", known).lower() in close]:
        return f"did you mean {' or '.join(similar)}?"
    game = re.sub("(NoFrameskip|Deterministic)?$", "", _VERSION.sub("", source))
    atari = "" if "/" in source else f"; if it is a game of Atari, its id is 'ALE/{game}-v5'"
    return f"{error} gymnasium.pprint_registry() lists all ids{atari}"


logger = logging.getLogger(__name__)


@explain("ENVIRONMENT_ATTRIBUTES")
class GymnasiumEnvironment:
    """N environments of `gymnasium.make(id_or_factory, **make_kwargs)`, or of a function that returns an environment.

    Episode k of environment i equals, bit for bit, the episode of a single environment with the same actions after
    `reset(seed=episode_seeds(seed, i, k))`. Rewards are converted to float32.

    The actions of open episodes are kept so that a resumed run can repeat them, up to `max_replay_steps` per episode.
    If an episode is longer than that, a run that is resumed within it begins new episodes.

    Args:
        info: entries of the infos to store, with the default for steps without them, such as `{"success": False}`. The
            default also defines dtype and shape.
        action_mask: add `info["action_mask"]` to the observation as the entry `action_mask`, so that agents choose
            valid actions only. An observation that is not a Dict becomes the entry `observation`. False omits the
            warning about an unused mask.
        replayable: whether a seed and actions reproduce an episode. False, for instance, if it depends on a clock.
        max_replay_steps: steps of an open episode that a resumed run can repeat.

    Raises:
        ValueError: if Gymnasium does not know the id, or if the environments have different spaces.
        TypeError: if a space cannot be converted to tensors, or if `info` is not a dictionary of numbers.
    """

    steps_separately = True  # stepping a part of the environments costs less than stepping all

    @torch.inference_mode(False)  # inference tensors cannot be modified outside of inference mode
    def __init__(
        self,
        id_or_factory: Source,
        num_envs: int = 1,
        seed: int | None = None,
        *,
        info: Mapping[str, Any] | None = None,
        action_mask: bool | None = None,
        replayable: bool = True,
        max_replay_steps: int = 1_000_000,
        _first: int = 0,  # number of the first environment, if they are a part of a larger number
        **make_kwargs: Any,
    ) -> None:
        self._first = _first
        self.num_envs = num_envs = checked_num_envs(num_envs)
        self._info = missing_values(info)
        max_replay_steps = checked_count(f"max_replay_steps={max_replay_steps!r}", max_replay_steps)
        self.replayable = replayable
        self.device = torch.device("cpu")
        self._name = name_of(id_or_factory)
        self._make_kwargs = make_kwargs
        options = {"info": info, "action_mask": action_mask, "replayable": replayable, **make_kwargs}
        self._build = functools.partial(
            GymnasiumEnvironment, id_or_factory, max_replay_steps=max_replay_steps, **options
        )
        self._seeds = HostEpisodeSeeds(num_envs, seed, _first)
        self._options = ResetOptions(num_envs)
        self._envs: list[Any] = _make_all(id_or_factory, make_kwargs, range(_first, _first + num_envs))
        self._action_mask = action_mask
        if action_mask:
            self._envs = [with_mask(environment, self._name) for environment in self._envs]
        self.single_observation_space = self._envs[0].observation_space
        self.single_action_space = self._envs[0].action_space
        self._observations = Codec("observation", self.single_observation_space)
        self._actions = Codec("action", self.single_action_space)
        self._observation: Tree = None  # the current observation; None before a reset
        self._ended: str | None = None  # the error that ended the episodes, or CLOSED
        self._no_flags_3N = np.array([[False], [False], [True]]).repeat(num_envs, 1)  # terminated, truncated, valid
        kept = max_replay_steps if replayable else 0
        self._history = ActionHistory(self._name, self.single_action_space, num_envs, kept)
        self._checked = False
        self._sent: list[int] = []  # environments that `receive` steps
        self._to_take: Tree = None  # (N, *A) their actions
        self._place = np.full(2, -1, np.int64)  # the environment that is stepped or reset, and its episode seed
        self._warns = action_mask is None and ACTION_MASK not in self._info
        self._warns = self._warns and entry(self.single_observation_space, ACTION_MASK) is None

    @property
    def seed(self) -> int | None:
        """Random seed of all environments; None until given or drawn at the first reset."""
        return self._seeds.seed

    @property
    def episode_seeds(self) -> Tensor:
        """(N,) int64: seeds of the current episodes; -1 before the first reset."""
        return self._seeds.current

    @property
    def episode_options(self) -> list[dict[str, Any] | None] | None:
        """Options with which the current episodes began, one entry for each environment; None if none were set."""
        return self._options.current

    def set_options(
        self, options: Options | Sequence[Options | None] | None, environments: Iterable[int] | None = None
    ) -> None:
        """Set the options that `reset` of an environment gets, for a curriculum.

        They are used from the next reset on, also after the end of an episode, and do not affect the current episodes.
        They are stored with each episode and saved in checkpoints.

        Args:
            options: dictionary of numbers, strings, lists and dictionaries for all chosen environments, a list with one
                dictionary for each, or None for no options.
            environments: indices of the environments. By default all.

        Raises:
            TypeError: if the options are not JSON values.
            ValueError: if an index is out of range, or if the list has another length.
        """
        self._options.set(options, environments)

    @property
    def awaits_reset(self) -> bool:
        """Whether `reset` must be called before a step: before the first reset, and after a resume without episodes."""
        return self._observation is None

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON values."""
        return {
            "id": self._name,
            "num_envs": self.num_envs,
            "seed": self.seed,
            "info": {key: missing.tolist() for key, missing in self._info.items()},
            "action_mask": self._action_mask,
            "replayable": self.replayable,
            "make_kwargs": {key: as_json(value) for key, value in self._make_kwargs.items()},
        }

    def reset(self, seed: int | None = None) -> Tree:
        """Begin the next episode of every environment, from episode 0 if `seed` is given. Returns the observation."""
        check_open(self._name, "reset", self._ended)
        if seed is not None:
            self._seeds.restart(seed)
        return self._begin([self._seeds.advance(index) for index in range(self.num_envs)])

    def reset_to(self, episode_seeds: Tensor, options: Sequence[Options | None] | None = None) -> Tree:
        """Begin the episodes with these seeds (N,), for a replay. Later episodes are seeded as usual.

        `options` are the reset options of these episodes. By default they are those of `set_options`.
        """
        check_open(self._name, "reset_to", self._ended)
        seeds = self._seeds.override(episode_seeds)
        if options is not None:
            self._options.override(options)
        return self._begin(seeds, options is not None)

    def reset_where(self, mask: Tensor) -> Tree:
        """Begin the next episode where `mask` (N,) is True. Returns the current observation of all environments.

        Raises RuntimeError before the first reset.
        """
        check_begun(self._name, "reset_where", self._observation is not None, self._ended)
        check_rows_of("reset_where", mask, self.num_envs, torch.bool)
        row_R = mask.nonzero().flatten()
        if len(row_R):
            self._observation = with_rows(self._observation, row_R, self._begin_rows(row_R.tolist()))
        return self._observation

    def apply_action(self, action: Tree) -> TimeStep:
        """Step every environment with actions `(N, *A)`.

        Raises RuntimeError before the first reset, and EnvironmentContractError for an action or a result that does not
        fit its space. Exceptions of an environment get a note with the environment, the episode seed and the step.
        After such an error, some environments have been stepped and others have not, and `reset` must be called.
        """
        self._check(action)
        return self._advance(action, range(self.num_envs))

    def send(self, action: Tree, rows: Sequence[int]) -> None:
        """Set the actions `(R, *A)` of the environments `rows` (R,), which the next `receive` steps.

        Raises RuntimeError before the first reset and for an environment that was sent already, ValueError for a row
        that does not exist, and EnvironmentContractError for actions of another shape.
        """
        check_begun(self._name, "send", self._observation is not None, self._ended)
        check_sent(rows, self.num_envs, self._sent)
        if self._to_take is None:
            self._to_take = zeros(self.single_action_space, (self.num_envs,))
        put_actions(self._to_take, np.array(rows, np.int64), action)
        self._sent += rows

    def receive(self, timeout: float | None = None) -> tuple[list[int], TimeStep]:
        """Step the environments that were sent. Returns them (R,), and their R rows.

        `timeout` has no effect; environments in workers have it. Raises RuntimeError if none was sent, and the errors
        of `apply_action`.
        """
        check_begun(self._name, "receive", self._observation is not None, self._ended)
        rows, self._sent = self._sent, []
        if not rows:
            raise RuntimeError(f"{self._name}: call send() before receive()")
        return rows, self._advance(map_tree(torch.from_numpy, self._to_take), rows)

    def apply_action_where(self, action: Tree, mask: Tensor) -> TimeStep:
        """Step the environments where `mask` (N,) is True, with their rows of `action`: `(N, *A)`.

        The other rows are not `valid`. Their reward is 0, and their observations do not change. Raises the errors of
        `apply_action`, and ValueError if `mask` has another shape or dtype.
        """
        self._check(action)
        check_rows_of("apply_action_where", mask, self.num_envs, torch.bool)
        row_R, still = mask.nonzero().flatten(), no_step(self._observation, self.num_envs, self._info)
        time_step = map_tree(torch.clone, still)
        if len(row_R):
            time_step = with_rows(still, row_R, self._step(action, row_R.tolist()))
        self._observation = time_step.observation
        return time_step

    @property
    def render_mode(self) -> str | None:
        """Render mode with which the environments were built."""
        return self._envs[0].render_mode

    @property
    def render_fps(self) -> float | None:
        """Frames per second in the metadata of the environment, or None."""
        return self._envs[0].metadata.get("render_fps")

    def render(self, index: int = 0) -> Any:
        """Return an RGB frame of one environment. Raises ValueError unless built with `render_mode="rgb_array"`."""
        check_open(self._name, "render", self._ended)
        environment = self._envs[index]
        if environment.render_mode != "rgb_array":
            mode = environment.render_mode
            raise ValueError(f"{self._name}: built with render_mode={mode!r}; give render_mode='rgb_array'")
        return environment.render()

    def reseed(self, seed: int) -> None:
        """Set the random seed. Raises RuntimeError after the first reset."""
        self._seeds.reseed(seed)

    def close(self) -> None:
        """Close every environment. A second call does nothing."""
        self._observation, self._ended = None, CLOSED
        while self._envs:
            self._envs.pop().close()

    def state_dict(self) -> dict[str, Any]:
        """Return the seeds of the current episodes and, if they are replayable, their actions so far."""
        return {
            "seeds": self._seeds.state_dict(),
            "options": self._options.state_dict(),
            "observation": self._observation,
            **self._history.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Reset with the saved seeds and repeat the actions. Without saved actions, `reset` must be called next.

        Raises ValueError for the state of other environments, and EnvironmentContractError if a repeated episode
        differs from the saved one.
        """
        check_open(self._name, "load_state_dict", self._ended)
        self._seeds.load_state_dict(state["seeds"])
        self._options.load_state_dict(state["options"])
        self._observation = None
        if not can_repeat(self._name, state, self.num_envs, self.replayable):
            return
        saved, actions, steps = state["observation"], state["actions"], state["steps"].tolist()
        episodes = enumerate(zip(steps, actions, strict=True))
        replayed = [self._replay(index, *episode) for index, episode in episodes]
        observation = self._observed(replayed, range(self.num_envs))
        self._check_replay(observation, saved)
        self._observation = observation

    def __repr__(self) -> str:
        return representation(self, repr(self._name), f"num_envs={self.num_envs}")

    def _check(self, action: Tree) -> None:
        check_begun(self._name, "apply_action", self._observation is not None, self._ended)
        if self._sent:
            raise RuntimeError(f"{self._name}: call receive() before apply_action()")
        if not self._checked:
            check_action(action, self.num_envs, self.single_action_space)
            check_observation(self._observation, self.num_envs, self.single_observation_space)
            self._checked = True

    def _advance(self, action: Tree, rows: Sequence[int]) -> TimeStep:
        """Step environments as `_step` does, and update the current observation. A range has all rows."""
        time_step = self._step(action, rows)
        if isinstance(rows, range):
            self._observation = time_step.observation
        else:
            row_R = torch.tensor(rows, dtype=torch.int64, device="cpu")
            self._observation = with_rows(self._observation, row_R, time_step.observation)
        return time_step

    def _step(self, action: Tree, rows: Sequence[int]) -> TimeStep:
        """Step the environments in `rows` (R,) with their rows of `action`: `(N, *A)`. Returns R rows."""
        return self._step_each(action, self._actions.split(action, self.num_envs), rows)

    @ends_episodes
    def _step_each(self, action: Tree, actions: Sequence[Any], rows: Sequence[int]) -> TimeStep:
        results, numbers = self._results(actions, rows), self._numbers(rows)
        self._history.append(action, rows)
        try:
            observations, rewards, terminateds, truncateds, infos = zip(*results, strict=True)
        except (TypeError, ValueError):  # a result does not have five parts
            for number, result in zip(numbers, results, strict=True):
                check_parts(f"environment {number} of {self._name}", "step", result, STEP)
            raise
        observation = final_observation = self._observations.stack(observations, numbers)
        flags_3R = self._no_flags_3N[:, : len(rows)].copy()
        ended_2R = ended_flags(terminateds, truncateds, numbers)
        if ended_2R is not None:
            flags_3R[:2] = ended_2R
            observation = self._begin_where(ended_2R[0] | ended_2R[1], list(observations), rows)
        self._check_masks(observation, rows)
        terminated_R, truncated_R, valid_R = torch.from_numpy(flags_3R).unbind()
        return TimeStep(
            observation=observation,
            reward=torch.from_numpy(rewards_of(rewards, numbers)),
            terminated=terminated_R,
            truncated=truncated_R,
            final_observation=final_observation,
            valid=valid_R,
            info={key: wanted_infos(infos, key, missing, numbers) for key, missing in self._info.items()},
        )

    def _results(self, actions: Sequence[Any], rows: Sequence[int]) -> list[Any]:
        """Return the results of `step` of the environments in `rows`."""
        results: list[Any] = []
        place = self._place
        try:
            for index in rows:
                place[0], place[1] = index, self._seeds.of(index)
                result = self._envs[index].step(actions[index])
                results.append(result)
            place[0] = -1
        except Exception as error:  # re-raised with a note
            index = rows[len(results)]
            self._note(error, index, f", step {self._history.steps(index)}")
            raise
        return results

    def _observed(self, observations: Sequence[Any], rows: Sequence[int]) -> Tree:
        """Return the observations of the environments in `rows` (R,) as new tensors `(R, *O)`."""
        observation = self._observations.stack(observations, self._numbers(rows))
        self._check_masks(observation, rows)
        return observation

    def _check_masks(self, observation: Tree, rows: Sequence[int]) -> None:
        numbers = self._numbers(rows)
        check_masks(observation, self.single_observation_space, self.single_action_space, rows=numbers)

    def part(self, rows: range) -> Callable[[], GymnasiumEnvironment]:
        """Return a function that builds the environments `rows` alone, with the same episode seeds."""
        return functools.partial(self._build, len(rows), self.seed, _first=rows.start)

    def _numbers(self, rows: Sequence[int]) -> Sequence[int]:
        """Return the numbers of the environments in `rows` (R,) for messages."""
        return [self._first + row for row in rows] if self._first else rows

    @ends_episodes
    def _begin(self, seeds: Sequence[int], again: bool = False) -> Tree:
        self._sent = []
        begun = [self._begin_one(index, seed, again) for index, seed in enumerate(seeds)]
        self._observation, self._ended = self._observed(begun, range(self.num_envs)), None
        return self._observation

    @ends_episodes
    def _begin_rows(self, rows: Sequence[int]) -> Tree:
        return self._observed([self._begin_one(row, self._seeds.advance(row)) for row in rows], rows)

    def _begin_where(self, ended_R: np.ndarray[Any, Any], observations: list[Any], rows: Sequence[int]) -> Tree:
        for place in ended_R.nonzero()[0].tolist():
            observations[place] = self._begin_one(rows[place], self._seeds.advance(rows[place]))
        return self._observations.stack(observations, self._numbers(rows))

    def _begin_one(self, index: int, seed: int, again: bool = False) -> Any:
        """Begin an episode with the next options of the environment, or with `again` with its current options."""
        self._history.clear(index)
        self._place[:] = index, seed
        options = self._options.of(index) if again else self._options.begin(index)
        try:
            result = self._envs[index].reset(seed=seed, **as_keywords(options))
        except Exception as error:  # re-raised with a note
            self._note(error, index, ", in its reset")
            _explain_reset(self._name, error)
            raise
        check_parts(f"environment {self._first + index} of {self._name}", "reset", result, RESET)
        if self._warns:
            self._warns = False
            warn_of_mask(self._name, result[1])
        self._place[0] = -1
        return result[0]

    def _replay(self, index: int, steps: int, taken: Tree) -> Any:
        for path, leaf in leaves(taken, f"actions.{index}"):
            if len(leaf) != steps:
                raise ValueError(f"{path}: the state has {len(leaf)} actions, but {steps} steps were taken")
        observation = self._begin_one(index, self._seeds.of(index), again=True)
        actions = self._actions.split(taken, steps)
        step = -1
        try:
            for action in actions:
                step += 1
                observation, *_ = self._envs[index].step(action)
        except Exception as error:  # re-raised with a note
            self._note(error, index, f", step {step}, repeated by the resume")
            raise
        self._history.restore(index, taken, steps)
        return observation

    def _note(self, error: Exception, index: int, when: str) -> None:
        seed = self._seeds.of(index)
        error.add_note(f"in environment {self._first + index} of {self._name}, episode seed {seed}{when}")

    def _check_replay(self, replayed: Tree, saved: Tree) -> None:
        for (path, value), (_, before) in zip(leaves(replayed, "observation"), leaves(saved), strict=True):
            same = value == restored({path: before}, path, value)
            wrong = (~same.reshape(self.num_envs, -1).all(1)).nonzero().flatten().tolist()
            if wrong:
                number = self._first + wrong[0]
                raise EnvironmentContractError(
                    f"{self._name}: seed and actions did not reproduce {path} of environment {number}, so it is not"
                    " replayable; give replayable=False, and a resumed run begins new episodes"
                )


def _takes_index(source: Source) -> bool:
    """Return whether a factory has a parameter `index` without a default."""
    try:
        parameter = inspect.signature(source).parameters.get("index")  # type: ignore[arg-type]
    except (TypeError, ValueError):  # an id, or a function without a signature
        return False
    return parameter is not None and parameter.default is parameter.empty


def _make_all(source: Source, make_kwargs: Mapping[str, Any], numbers: range) -> list[gymnasium.Env[Any, Any]]:
    """Make the environments with these numbers. The checks of Gymnasium run in the first one only.

    Raises ValueError if a factory returns the same object twice, or if the environments have different spaces.
    """
    by_index = _takes_index(source)

    def make_one(number: int) -> Any:
        return make(source, {"index": number, **make_kwargs} if by_index else make_kwargs)

    first = make_one(numbers[0])
    if first.spec is not None and not callable(source):
        spec = source if isinstance(source, EnvSpec) else gymnasium.registry[first.spec.id]
        source = dataclasses.replace(spec, order_enforce=False, disable_env_checker=True)
    made = [first, *map(make_one, numbers[1:])]
    if len({id(environment.unwrapped) for environment in made}) < len(numbers):
        raise ValueError(f"{name_of(source)} returned the same environment twice; it must make a new one in each call")
    for kind in ("observation_space", "action_space"):
        for index, environment in enumerate(made):
            if getattr(environment, kind) != getattr(first, kind):
                raise ValueError(
                    f"{name_of(source)}: environment 0 has the {kind} {getattr(first, kind)}, environment {index}"
                    f" {getattr(environment, kind)}; all environments must have equal spaces"
                )
    return made


def check_sent(rows: Sequence[int], num_envs: int, sent: Collection[int]) -> None:
    """Check the environments of a `send`, while those in `sent` were not received.

    Raises ValueError for a row that does not exist, and RuntimeError for one that was sent twice.
    """
    if wrong := [row for row in rows if not 0 <= row < num_envs]:
        raise ValueError(f"send(rows=...): got {wrong[0]}, but there are {num_envs} environments")
    twice = [row for row in rows if row in sent]
    if twice or len({*rows}) < len(rows):
        raise RuntimeError(f"send(rows={[*rows]}): an environment was sent twice; call receive() first")


def no_step(observation: Tree, num_envs: int, info: Mapping[str, np.ndarray[Any, Any]]) -> TimeStep:
    """Return the result of N environments that were not stepped. Its tensors may share memory."""
    nothing_N = torch.zeros(num_envs, dtype=torch.bool, device="cpu")
    missing = {key: torch.from_numpy(value) for key, value in info.items()}
    return TimeStep(
        observation=observation,
        reward=torch.zeros(num_envs, dtype=torch.float32, device="cpu"),
        terminated=nothing_N,
        truncated=nothing_N,
        final_observation=observation,
        valid=nothing_N,
        info={key: value.expand(num_envs, *value.shape) for key, value in missing.items()},
    )


def can_repeat(name: str, state: Mapping[str, Any], num_envs: int, replayable: bool) -> bool:
    """Return whether the open episodes of a state can be repeated. The reason against it is logged.

    Raises ValueError for the state of another number of environments.
    """
    steps_N = restored(state, "steps", torch.empty(num_envs, dtype=torch.int64, device="cpu"))
    if state["observation"] is None:
        return False
    if not replayable:
        logger.warning("%s is not replayable: open episodes are lost, and reset() begins new ones", name)
    elif bool((steps_N < 0).any()):
        logger.warning(
            "%s: an open episode was longer than max_replay_steps, so its actions were not saved; reset() begins new"
            " episodes",
            name,
        )
    return replayable and bool((steps_N >= 0).all())


def with_rows(tree: Any, row_R: Tensor, new: Any) -> Any:
    """Return a copy of `tree` (N, ...) with the rows `row_R` (R,) replaced by `new` (R, ...)."""
    return map_tree(lambda x, new_R: x.index_copy(0, row_R, new_R), tree, new)


def rebuild(config: Mapping[str, Any], num_envs: int, *, render_mode: str | None = None) -> GymnasiumEnvironment:
    """Build `num_envs` environments from the `config` of an adapter, with this render mode.

    The config of `GymnasiumWorkers`, or of a `GymnasiumVectorEnvironment` with autoreset mode DISABLED, also gives a
    `GymnasiumEnvironment`. Its episodes are the same bit for bit, and it can replay them.

    The config is not trusted, because an id can name a module to import. Only the built-in environments of Gymnasium
    and Atari are built. Raises ValueError for all others, and for options that JSON cannot represent.
    """
    mode = config.get("autoreset_mode", AutoresetMode.DISABLED.value)
    if mode != AutoresetMode.DISABLED.value:
        raise ValueError(f"the vector environment resets its episodes itself (autoreset mode {mode!r})")
    name, options, info = config.get("id"), config.get("make_kwargs"), config.get("info")
    if not isinstance(name, str) or not _is_known(name):
        raise ValueError(f"{name!r} is not a built-in environment of Gymnasium")
    options = options if isinstance(options, Mapping) else {}
    for key, value in options.items():
        if isinstance(value, str) and value.startswith("<"):  # the `repr` of an object
            raise ValueError(f"the option {key} of {name} was {value}, which a file cannot store")
    infos = info if isinstance(info, Mapping) else {}
    if render_mode is not None:
        options = {**_camera(name, options), **options, "render_mode": render_mode}
    return GymnasiumEnvironment(name, num_envs, info=infos, action_mask=bool(config.get("action_mask")), **options)


def _camera(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option for a camera that follows the robot in MuJoCo environments, or no options."""
    spec = gymnasium.registry.get(name)
    of_mujoco = spec is not None and str(spec.entry_point).startswith(f"{_BUILT_IN}mujoco.")
    return {"camera_name": "track"} if of_mujoco and options.get("camera_id") is None else {}


def _is_known(name: str) -> bool:
    if _ATARI.fullmatch(name):
        return True
    spec = gymnasium.registry.get(name)
    return spec is not None and isinstance(spec.entry_point, str) and spec.entry_point.startswith(_BUILT_IN)
