"""Saving and loading the state of a loop and of its parts, as dictionaries and lists that a file can hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from rein.loop.gradients import load_gradients, save_gradients
from rein.loop.state import HALT_EPOCH, EpochRecord, State
from rein.ops.trees import load_plain_state, map_tree, namedtuples, pack, plain_state, unpack

if TYPE_CHECKING:
    from rein.loop.loop import Loop

FORMAT = 1


def _stateful(loop: Loop) -> Iterator[tuple[str, Any]]:
    return ((name, part) for name, part in loop.parts.items() if has_state(part))


def save(loop: Loop) -> dict[str, Any]:
    """The state of the run and of every part that the loop owns; see `Loop.state_dict`."""
    state = loop.state
    return {
        "format": FORMAT,
        "epoch": state.epoch,
        "iteration": state.iteration,
        "total_iterations": state.total_iterations,
        "epochs_ended": state.clocks.epochs,
        "epoch_open": state.epoch_open,
        # that the open epoch is to end is part of where it stands; that the run was to be stopped is not
        "halt_epoch": state.epoch_open and state._cut,
        "postponed": state._postponed,
        "epoch_began": loop.epoch_began,
        "step_cut": loop.step_cut,
        "step_state": pack(state.step_state),
        "metrics": loop.metrics.state_dict(),
        "history": [dict(record._asdict(), metrics=dict(record.metrics)) for record in state.history],
        "clocks": state.clocks.state_dict(),
        "counts": {name: value for name, value in state.counts.items() if name != "started"},
        "memory": pack(state.memory),
        "times": dict(state.times),
        "parts": {name: state_of(part) for name, part in _stateful(loop)},
        "gradients": save_gradients(dict(_stateful(loop))),
    }


@torch.inference_mode(False)
def load(loop: Loop, saved: Mapping[str, Any], strict: bool = True) -> list[str]:
    """Make `loop` stand where `saved` was taken; see `Loop.load_state_dict`."""
    if saved.get("format") != FORMAT:
        raise ValueError(f"this state has format {saved.get('format')!r}; this version of rein reads format {FORMAT}")
    mine, theirs = dict(_stateful(loop)), saved["parts"]
    if strict and set(mine) != set(theirs):
        missing, extra = sorted(set(theirs) - set(mine)), sorted(set(mine) - set(theirs))
        raise ValueError(f"the loop's parts are not those of the state: missing {missing}, not in the state {extra}")
    missing = [f"{name}: the loop has no such part" for name in theirs if name not in mine]
    missing += [f"{name}: the state has no such part" for name in mine if name not in theirs]
    left: list[str] = []
    for name in sorted(mine, key=lambda name: not hasattr(mine[name], "config")):  # last, what keeps the books of them
        if name in theirs and left and not hasattr(mine[name], "config"):
            left.append(f"{name}: it goes with what did not fit")
        elif name in theirs:
            left += _load_part(name, mine[name], theirs[name], strict)
    load_gradients(mine, {} if missing or left else saved.get("gradients", {}))
    state = loop.state
    _load_counters(state, saved)
    state.step_state = unpack(_copied(saved["step_state"]), loop.step_state_types | namedtuples(state.step_state))
    loop.metrics.load_state_dict(saved["metrics"])
    state.history.clear()
    state.history.extend(EpochRecord(**record) for record in saved["history"])
    state.memory.clear()
    state.memory.update(unpack(_copied(saved["memory"])))
    state.times = dict(saved["times"])
    loop.epoch_began = float(saved["epoch_began"])
    loop.step_cut = bool(saved.get("step_cut", False)) and not left
    if left:  # what the open epoch stood on may be among it: the run goes on with an epoch of its own
        state._epoch, state._iteration, state._epoch_open, state._halts = state._epochs_ended, 0, False, {}
        state.step_state, state._postponed = None, None
    for event in loop.events.values():
        event.recount()
    return missing + left


def _load_part(name: str, part: Any, saved: Any, strict: bool) -> list[str]:
    """Load one part; where it does not fit and need not, it stays as it was, and why is returned."""
    before = {} if strict else _copied(state_of(part))
    try:
        load_state(part, saved)
    except Exception as error:  # a part of somebody else may raise anything
        if strict:
            error.add_note(f"in the loop's part {name!r}")
            raise
        load_state(part, before)
        return [f"{name}: {error}"]
    return []


def _copied(tree: Any) -> Any:
    return map_tree(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def _load_counters(state: State, saved: Mapping[str, Any]) -> None:
    state._epoch, state._iteration = int(saved["epoch"]), int(saved["iteration"])
    state._total_iterations, state._epochs_ended = int(saved["total_iterations"]), int(saved["epochs_ended"])
    state._epoch_open = bool(saved["epoch_open"])
    state._halts = {HALT_EPOCH: None} if saved["halt_epoch"] else {}
    state.status, state._epoch_status, state.batch, state._requests = None, None, None, []
    state._postponed = saved.get("postponed")
    state.clocks.load_state_dict(saved["clocks"])
    state.counts.clear()
    state.counts.update(saved["counts"])


def retype(step_state: Any, like: Any, types: Mapping[str, type]) -> Any:
    """Give the named tuples of a loaded step_state the types in `like` or `types`: a file has names, not types."""
    return unpack(pack(step_state), {**types, **namedtuples(like)})


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
