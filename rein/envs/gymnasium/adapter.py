"""Adapter for Gymnasium environments, with one seed per episode.

Shapes: N environments.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from rein.envs.base.contract import checked_count, checked_num_envs
from rein.envs.host.block import Setup
from rein.envs.host.host_environment import SteppedSeparately
from rein.envs.host.pool import workers_of
from rein.envs.host.results import missing_values, with_mask
from rein.errors import hints

Source = str | EnvSpec | Callable[..., gymnasium.Env[Any, Any]]

_EXTRAS = {"atari": "ale-py", "box2d": "Box2D", "mujoco": "MuJoCo"}
_VERSION = re.compile(r"-v\d+$")
_ATARI = re.compile(r"ALE/\w+-v\d+")
_BUILT_IN = "gymnasium.envs."  # module prefix of the entry points that a file may choose


def make_one(source: Source, make_kwargs: Mapping[str, Any], by_id: Callable[..., Any] = gymnasium.make) -> Any:
    """Return `source()` of a factory, or `by_id(source)` of an id. Imports ale-py for ids that begin with `ALE/`.

    Raises ValueError for an id that Gymnasium does not know, and ImportError with installation instructions if a
    package is missing.
    """
    made: Any = source
    if isinstance(made, gymnasium.Env):
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


def is_repr(value: Any) -> bool:
    """Return whether `as_json` has replaced an option by its `repr`, from which it cannot be restored."""
    return isinstance(value, str) and value.startswith(("<", "[", "(", "{", "array(", "np."))


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
    close = difflib.get_close_matches(name, [_VERSION.sub("", registered).lower() for registered in ids], n=3)
    if similar := [registered for registered in ids if _VERSION.sub("", registered).lower() in close]:
        return f"did you mean {' or '.join(similar)}?"
    game = re.sub("(NoFrameskip|Deterministic)?$", "", _VERSION.sub("", source))
    atari = "" if "/" in source else f"; if it is a game of Atari, its id is 'ALE/{game}-v5'"
    return f"{error} gymnasium.pprint_registry() lists all ids{atari}"


class GymnasiumEnvironment(SteppedSeparately):
    """N environments of `gymnasium.make(id_or_factory, **make_kwargs)`, or of a function that returns an environment.

    Episode k of environment i equals, bit for bit, the episode of a single environment with the same actions after
    `reset(seed=episode_seeds(seed, i, k))`. Rewards are converted to float32.

    The actions of open episodes are kept so that a resumed run can repeat them, up to `max_replay_steps` per episode.
    If an episode is longer than that, a run that is resumed within it begins new episodes.

    With `workers`, K processes or threads step the environments at the same time. Worker k steps a contiguous block of
    about N / K environments, one after the other. Episodes are the same bit for bit. Use as many workers as there are
    cores for environments that compute, and more for those that wait, for instance for a network. A state can be loaded
    with another number of workers.

    If a worker fails, `on_failure` decides. A worker fails if an environment raises or returns wrong data, if its
    process ends, or if a step takes longer than `timeout`. With "raise", all workers are ended, and the error is
    raised. With "restart", a new worker begins new episodes. The lost episodes end in that step: it is truncated, not
    `valid`, and its final observation is the last observation. A restart is logged and counted in `restarts`.

    Processes ignore Ctrl-C, and end together with the main process. Threads cannot be killed: a thread that does not
    answer is abandoned, and does not prevent the end of the main process.

    Args:
        info: entries of the infos to store, with the default for steps without them, such as `{"success": False}`. The
            default also defines dtype and shape.
        action_mask: add `info["action_mask"]` to the observation as the entry `action_mask`, so that agents choose
            valid actions only. An observation that is not a Dict becomes the entry `observation`. False omits the
            warning about an unused mask.
        replayable: whether a seed and actions reproduce an episode. False, for instance, if it depends on a clock.
        max_replay_steps: steps of an open episode that a resumed run can repeat.
        workers: number of workers K, from 1 to N. By default environments are stepped one by one in this process.
        mode: "processes", the default, or "threads" for environments that cannot be pickled or that wait. Without
            workers, this and the next options are options of the environment.
        timeout: seconds that a step or reset of the environments of a worker may take. By default there is no limit.
        on_failure: "raise", the default, or "restart".
        max_restarts: number of restarts before a failure is raised, 10 by default.

    Raises:
        ValueError: if Gymnasium does not know the id, if the environments have different spaces, or for an invalid
            number of workers, mode or timeout.
        TypeError: if a space cannot be converted to tensors, or if `info` is not a dictionary of numbers.
        WorkerError: if a worker fails while it makes its environments.
    """

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
        workers: int | None = None,
        mode: Literal["processes", "threads"] | None = None,
        timeout: float | None = None,
        on_failure: Literal["raise", "restart"] | None = None,
        max_restarts: int | None = None,
        **make_kwargs: Any,
    ) -> None:
        num_envs, name = checked_num_envs(num_envs), name_of(id_or_factory)
        options: Any = {"mode": mode, "timeout": timeout, "on_failure": on_failure, "max_restarts": max_restarts}
        of_workers = workers_of(workers, make_kwargs, **options)
        setup = Setup(
            name=name,
            make=functools.partial(_make_all, id_or_factory, make_kwargs, name, bool(action_mask)),
            info=missing_values(info),
            action_mask=action_mask,
            replayable=replayable,
            max_replay_steps=checked_count(f"max_replay_steps={max_replay_steps!r}", max_replay_steps),
            config={"make_kwargs": {key: as_json(value) for key, value in make_kwargs.items()}},
        )
        super().__init__(setup, range(num_envs), seed, of_workers)


def _takes_index(source: Source) -> bool:
    """Return whether a factory has a parameter `index` without a default."""
    try:
        parameter = inspect.signature(source).parameters.get("index")  # type: ignore[arg-type]
    except (TypeError, ValueError):  # an id, or a function without a signature
        return False
    return parameter is not None and parameter.default is parameter.empty


def _make_all(source: Source, make_kwargs: Mapping[str, Any], name: str, masked: bool, numbers: range) -> list[Any]:
    """Make the environments with these numbers. The checks of Gymnasium run in the first one only."""
    by_index = _takes_index(source)

    def make_numbered(number: int) -> Any:
        return make_one(source, {"index": number, **make_kwargs} if by_index else make_kwargs)

    first = make_numbered(numbers[0])
    if first.spec is not None and not callable(source):
        spec = source if isinstance(source, EnvSpec) else gymnasium.registry[first.spec.id]
        source = dataclasses.replace(spec, order_enforce=False, disable_env_checker=True)
    made = [first, *map(make_numbered, numbers[1:])]
    return [with_mask(environment, name) for environment in made] if masked else made


def rebuild(config: Mapping[str, Any], num_envs: int, *, render_mode: str | None = None) -> GymnasiumEnvironment:
    """Build `num_envs` environments from the `config` of an adapter, with this render mode.

    The config of a `GymnasiumVectorEnvironment` with autoreset mode DISABLED also gives a `GymnasiumEnvironment`. Its
    episodes are the same bit for bit, and it can replay them.

    The config is not trusted, because an id can name a module to import. Only the built-in environments of Gymnasium
    and Atari are built. Raises ValueError for all others, and for options that JSON cannot represent.
    """
    mode = config.get("autoreset_mode", AutoresetMode.DISABLED.value)
    if mode != AutoresetMode.DISABLED.value:
        raise ValueError(f"the vector environment resets its episodes itself (autoreset mode {mode!r})")
    name, options, info = config.get("id"), config.get("make_kwargs"), config.get("info")
    if not isinstance(name, str) or not is_built_in(name):
        raise ValueError(f"{name!r} is not a built-in environment of Gymnasium")
    options = options if isinstance(options, Mapping) else {}
    for key, value in options.items():
        if is_repr(value):
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


def is_built_in(name: str) -> bool:
    """Return whether an id is one of Gymnasium's own environments or of Atari."""
    if _ATARI.fullmatch(name):
        return True
    spec = gymnasium.registry.get(name)
    return spec is not None and isinstance(spec.entry_point, str) and spec.entry_point.startswith(_BUILT_IN)
