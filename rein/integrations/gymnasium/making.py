"""Making environments by id, spec or factory, with errors that say what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import gymnasium
from gymnasium.envs.registration import EnvSpec

from rein.foreign_names import OPTIONS

Source = str | EnvSpec | Callable[..., gymnasium.Env[Any, Any]]

_EXTRAS = {"atari": "ale-py", "box2d": "Box2D", "mujoco": "MuJoCo"}


def make(source: Source, make_kwargs: Mapping[str, Any], by_id: Callable[..., Any] = gymnasium.make) -> Any:
    """What the factory `source`, or `by_id(source)`, gives; `ALE/...` needs no import of ale-py beforehand.

    Raises ValueError for an id that Gymnasium does not know, and ImportError, which says what to install, where a
    package is missing.
    """
    given: Any = source
    if isinstance(given, gymnasium.Env):
        raise TypeError("give what makes environments, not one that is made: `lambda: gymnasium.make(...)`, or an id")
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
        if not isinstance(source, str) or source in gymnasium.registry:  # it is known: something else is wrong
            raise
        raise ValueError(f"unknown environment {source!r}; {_hint(source, error)}") from error


def _check_made(source: Source, made: Any) -> None:
    """Raise TypeError if a factory returned something that is not an environment of Gymnasium."""
    if not all(hasattr(made, name) for name in ("step", "reset", "observation_space", "action_space")):
        what = repr(made) if made is None or isinstance(made, str) else f"a {type(made).__name__}"
        hint = "; it is an environment of rein already, so use it as it is" if hasattr(made, "apply_action") else ""
        raise TypeError(f"{name_of(source)} returned {what}, and must return a gymnasium.Env{hint}")


def _explain_keyword(source: Source, make_kwargs: Mapping[str, Any], error: TypeError) -> None:
    """Raise TypeError with rein's name if the environment refused a keyword that another library uses."""
    for name in make_kwargs:
        ours = next(iter(OPTIONS.get(name, ())), "")
        if ours in ("num_envs", "seed") and f"'{name}'" in str(error):
            raise TypeError(f"{name_of(source)}: there is no option {name}; use {ours}") from error


def name_of(source: Source) -> str:
    """Return the id of an environment, or module and name of a factory. Raises TypeError for anything else."""
    if not isinstance(source, str | EnvSpec) and not callable(source) and not isinstance(source, gymnasium.Env):
        raise TypeError(
            f"expected the id of an environment or a function that makes one, got a {type(source).__name__}; give one "
            "function, and num_envs= to have several environments"
        )
    if isinstance(source, str):
        return source
    if isinstance(source, EnvSpec):
        return source.id
    return f"{source.__module__}:{getattr(source, '__qualname__', source)}"


def as_json(value: Any) -> Any:
    """The value if JSON has it, else what it looks like."""
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _register_atari(source: str) -> None:
    try:
        import ale_py  # its import registers them
    except ImportError as error:
        _refuse_without("atari", source, error)
    gymnasium.register_envs(ale_py)


def _refuse_without(extra: str, source: Source, error: Exception) -> NoReturn:
    more = " opencv-python-headless" if extra == "atari" else ""  # which AtariPreprocessing shrinks frames with
    raise ImportError(f'{name_of(source)} needs {_EXTRAS[extra]}: pip install "gymnasium[{extra}]"{more}') from error


def _hint(source: str, error: Exception) -> str:
    known = {name.lower(): name for name in gymnasium.registry}
    close = [known[name] for name in difflib.get_close_matches(source.lower(), known, n=3)]
    return f"did you mean {' or '.join(close)}?" if close else f"{error} gymnasium.pprint_registry() lists all"
