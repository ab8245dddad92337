"""Making environments by id, spec or factory, with errors that say what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import gymnasium
from gymnasium.envs.registration import EnvSpec

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
        return source(**make_kwargs) if callable(source) else by_id(source, **make_kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        extra = re.search(r"gymnasium\[(\w+)\]", str(error))
        if extra is None or extra[1] not in _EXTRAS:
            raise
        _refuse_without(extra[1], source, error)
    except gymnasium.error.Error as error:
        if not isinstance(source, str) or source in gymnasium.registry:  # it is known: something else is wrong
            raise
        raise ValueError(f"unknown environment {source!r}; {_hint(source, error)}") from error


def name_of(source: Source) -> str:
    """What a person calls it."""
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
