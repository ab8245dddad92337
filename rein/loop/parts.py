"""What a part of a loop is saved as: plain dictionaries and lists with string keys, which a file can hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from rein.learning.update import load_plain_state, plain_state

KINDS = {"Counter": Counter, "dict": dict}  # of a mapping whose keys are whole numbers


def has_state(part: Any) -> bool:
    """Whether the part has a state that is saved."""
    return hasattr(part, "state_dict") or isinstance(part, torch.Generator)


def state_of(part: Any) -> Mapping[str, Any]:
    """Its `state_dict`, that of an optimizer or a scheduler of torch with keys of text; where a generator stands."""
    if isinstance(part, torch.Generator):
        return {"state": part.get_state()}
    if isinstance(part, torch.optim.Optimizer):
        return plain_state(part)  # type: ignore[arg-type]  # theirs has another name for an argument
    if isinstance(part, LRScheduler):
        return _with_text_keys(part.state_dict())
    return part.state_dict()


def load_state(part: Any, state: Mapping[str, Any]) -> None:
    """The inverse of `state_of`. Raises what the part raises for a state that does not fit."""
    if isinstance(part, torch.Generator):
        part.set_state(state["state"].cpu())
    elif isinstance(part, torch.optim.Optimizer):
        load_plain_state(part, state)  # type: ignore[arg-type]  # as above
    elif isinstance(part, LRScheduler):
        part.load_state_dict(_with_their_keys(state))
    else:
        part.load_state_dict(state)


def _with_text_keys(value: Any) -> Any:
    """A scheduler's state for a file: MultiStepLR, alone or inside of another, counts its milestones by epoch."""
    if isinstance(value, list):
        return [_with_text_keys(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    entries = {key: _with_text_keys(entry) for key, entry in value.items()}
    if isinstance(value, Counter) or any(isinstance(key, int) for key in value):
        kind = "Counter" if isinstance(value, Counter) else "dict"
        return {"integer_keys": kind, "entries": {str(key): entry for key, entry in entries.items()}}
    return entries


def _with_their_keys(value: Any) -> Any:
    """The inverse of `_with_text_keys`."""
    if isinstance(value, list):
        return [_with_their_keys(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"integer_keys", "entries"}:
        entries = {int(key): _with_their_keys(entry) for key, entry in value["entries"].items()}
        return KINDS[value["integer_keys"]](entries)
    return {key: _with_their_keys(entry) for key, entry in value.items()}
