"""What a loop is saved as, and how one is made to stand where it was saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rein.loop import parts
from rein.loop.gradients import load_gradients, save_gradients
from rein.ops.trees import map_tree, namedtuples, pack, unpack
from rein.types import HALT_EPOCH, NAMED_TUPLES, EpochRecord, State

if TYPE_CHECKING:
    from rein.loop.loop import Loop

FORMAT = 1


def _stateful(loop: Loop) -> Iterator[tuple[str, Any]]:
    return ((name, part) for name, part in loop.parts.items() if parts.has_state(part))


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
        "parts": {name: parts.state_of(part) for name, part in _stateful(loop)},
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
    state.step_state = unpack(_copied(saved["step_state"]), NAMED_TUPLES | namedtuples(state.step_state))
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
    before = {} if strict else _copied(parts.state_of(part))
    try:
        parts.load_state(part, saved)
    except Exception as error:  # a part of somebody else may raise anything
        if strict:
            error.add_note(f"in the loop's part {name!r}")
            raise
        parts.load_state(part, before)
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


def retype(step_state: Any, like: Any) -> Any:
    """Give the NamedTuples of a loaded step_state the types that stand in `like`: a file knows names, not types."""
    return unpack(pack(step_state), NAMED_TUPLES | namedtuples(like))
