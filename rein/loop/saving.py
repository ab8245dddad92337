"""Saving and loading the state of a loop, gradients included, and the search for state that a checkpoint would omit."""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from rein.loop.state import HALT_EPOCH, EpochRecord, State
from rein.ops.trees import leaves, load_plain_state, map_tree, namedtuples, pack, plain_state, unpack

if TYPE_CHECKING:
    from rein.loop.loop import Loop


FORMAT = 2


def _stateful(loop: Loop) -> Iterator[tuple[str, Any]]:
    return ((name, part) for name, part in loop.parts.items() if has_state(part))


def save(loop: Loop) -> dict[str, Any]:
    """Return the state of the run and of all owned parts; see `Loop.state_dict`."""
    state = loop.state
    for prepare in loop.before_saving:
        prepare(state)
    return {
        "format": FORMAT,
        "epoch": state.epoch,
        "iteration": state.iteration,
        "total_iterations": state.total_iterations,
        "epochs_ended": state.clocks.epochs,
        "epoch_open": state.epoch_open,
        # a halt of the open epoch is saved; a halt of the run is not
        "halt_epoch": state.epoch_open and state._halt_requested,
        "postponed": state._postponed,
        "epoch_began": loop.epoch_began,
        "step_cut": loop.step_cut,
        "step_state": pack(state.step_state, loop.codecs),
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
    """Load `saved` into `loop`; see `Loop.load_state_dict`."""
    if saved.get("format") != FORMAT:
        raise ValueError(f"this state has format version {saved.get('format')!r}; this rein reads version {FORMAT}")
    own, loaded = dict(_stateful(loop)), saved["parts"]
    if strict and set(own) != set(loaded):
        missing, extra = sorted(set(loaded) - set(own)), sorted(set(own) - set(loaded))
        raise ValueError(
            f"parts of the loop and the state differ: missing in the loop {missing}, missing in the state {extra}"
        )
    missing = [f"{name}: the loop has no such part" for name in loaded if name not in own]
    missing += [f"{name}: the state has no such part" for name in own if name not in loaded]
    left: list[str] = []
    # parts without a configuration track the others, so they load last
    for name in sorted(own, key=lambda name: not hasattr(own[name], "config")):
        if name in loaded and left and not hasattr(own[name], "config"):
            left.append(f"{name}: skipped, because it depends on a part that did not fit")
        elif name in loaded:
            left += _load_part(name, own[name], loaded[name], strict)
    load_gradients(own, {} if missing or left else saved.get("gradients", {}))
    state = loop.state
    _load_counters(state, saved)
    types = loop.step_state_types | namedtuples(state.step_state)
    state.step_state = unpack(_copied(saved["step_state"]), types, loop.codecs)
    loop.metrics.load_state_dict(saved["metrics"])
    state.history.clear()
    state.history.extend(EpochRecord(**record) for record in saved["history"])
    for record in state.history:
        loop.metrics.declare(*record.metrics)
    state.memory.clear()
    state.memory.update(unpack(_copied(saved["memory"])))
    state.times = dict(saved["times"])
    loop.epoch_began = float(saved["epoch_began"])
    loop.step_cut = bool(saved.get("step_cut", False)) and not left
    if left:  # the open epoch may depend on a part that did not fit: start a new epoch
        state._epoch, state._iteration, state._epoch_open, state._halts = state._epochs_ended, 0, False, {}
        state.step_state, state._postponed = None, None
    for event in loop.events.values():
        event.recount()
    return missing + left


def _load_part(name: str, part: Any, saved: Any, strict: bool) -> list[str]:
    """Load one part. Without `strict`, a part that does not fit stays unchanged, and the reason is returned."""
    before = {} if strict else _copied(state_of(part))
    try:
        load_state(part, saved)
    except Exception as error:  # custom parts may raise anything
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
    """Give the named tuples of a loaded step_state the types in `like` or `types`. A file stores only their names."""
    return unpack(pack(step_state), {**types, **namedtuples(like)})


KINDS = {"Counter": Counter, "dict": dict}  # types of mappings whose keys are integers


def has_state(part: Any) -> bool:
    """Return whether the part has a state to save."""
    return hasattr(part, "state_dict") or isinstance(part, torch.Generator)


def state_of(part: Any) -> Mapping[str, Any]:
    """Return the `state_dict` of a part with string keys, or the state of a generator."""
    if isinstance(part, torch.Generator):
        return {"state": part.get_state()}
    if isinstance(part, torch.optim.Optimizer):
        return plain_state(part)  # type: ignore[arg-type]  # torch calls the argument `state_dict`
    if isinstance(part, LRScheduler):
        return _to_text_keys(part.state_dict())
    return part.state_dict()


def load_state(part: Any, state: Mapping[str, Any]) -> None:
    """Load the result of `state_of`. Raises the part's own exception if the state does not fit."""
    if isinstance(part, torch.Generator):
        part.set_state(state["state"].cpu())
    elif isinstance(part, torch.optim.Optimizer):
        load_plain_state(part, state)  # type: ignore[arg-type]  # see above
    elif isinstance(part, LRScheduler):
        part.load_state_dict(_to_integer_keys(state))
    else:
        part.load_state_dict(state)


def _to_text_keys(value: Any) -> Any:
    """Convert the integer keys of a scheduler's state to strings. MultiStepLR keys its milestones by epoch."""
    if isinstance(value, list):
        return [_to_text_keys(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    entries = {key: _to_text_keys(entry) for key, entry in value.items()}
    if isinstance(value, Counter) or any(isinstance(key, int) for key in value):
        kind = "Counter" if isinstance(value, Counter) else "dict"
        return {"integer_keys": kind, "entries": {str(key): entry for key, entry in entries.items()}}
    return entries


def _to_integer_keys(value: Any) -> Any:
    """The inverse of `_to_text_keys`."""
    if isinstance(value, list):
        return [_to_integer_keys(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"integer_keys", "entries"}:
        entries = {int(key): _to_integer_keys(entry) for key, entry in value["entries"].items()}
        return KINDS[value["integer_keys"]](entries)
    return {key: _to_integer_keys(entry) for key, entry in value.items()}


_MOST_OF_PART = 10_000  # objects visited inside a part; larger parts are data
_PLAIN = (str, bytes, int, float, complex, type(None), type, ModuleType, FunctionType)
_PLAIN += (np.ndarray, np.generic, torch.Generator, torch.device)


def save_gradients(parts: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return the gradients of all parameters in the parts, by part and path. Parameters without a gradient are omitted.

    Sparse gradients become dense. A parameter that several parts share is saved once.
    """
    seen: set[int] = set()
    saved: dict[str, dict[str, Tensor]] = {}
    for name, part in parts.items():
        for path, parameter in _parameters(part):
            if parameter.grad is not None and id(parameter) not in seen:
                gradient = parameter.grad.detach()
                saved.setdefault(name, {})[path] = gradient.to_dense() if gradient.is_sparse else gradient
            seen.add(id(parameter))
    return saved


def load_gradients(parts: Mapping[str, Any], saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Set the saved gradients and clear all others. Raises ValueError for an unknown parameter."""
    parameters_of = {name: dict(_parameters(part)) for name, part in parts.items()}
    for name, parameters in parameters_of.items():
        if unknown := sorted(saved.get(name, {}).keys() - parameters.keys()):
            raise ValueError(
                f"the state has gradients of {', '.join(unknown)} of the part {name!r}, which has no such parameters: "
                "build the part as in the saved run"
            )
        for parameter in parameters.values():
            parameter.grad = None
    for name, gradients in saved.items():
        for path, gradient in gradients.items():
            parameter = parameters_of[name][path]
            parameter.grad = gradient.to(parameter.device, parameter.dtype, copy=True)


def _parameters(part: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of all modules and optimizers in a part, with their paths; nearest first.

    Only the direct attributes of rein's own parts are visited. These parts keep no gradients between iterations, but a
    custom step may accumulate gradients in the networks of an agent.
    """
    flat = type(part).__module__.startswith("rein.")
    seen: set[int] = set()
    waiting = collections.deque([("", part)])
    while waiting and len(seen) < _MOST_OF_PART:
        path, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.requires_grad and value.is_leaf:
                yield path, value
        elif isinstance(value, nn.Module):
            yield from ((_join(path, name), parameter) for name, parameter in value.named_parameters())
        elif value is part or not flat:
            children = itertools.islice(_children(value), _MOST_OF_PART)
            waiting.extend((_join(path, name), child) for name, child in children if not isinstance(child, _PLAIN))


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, torch.optim.Optimizer):
        return [("param_groups", value.param_groups)]
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple | collections.deque):
        return enumerate(value)
    return attributes(value).items()


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object from its dictionary and its slots, without calling properties."""
    values = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()) if not isinstance(getattr(kind, "__slots__", ()), str) else ():
            try:
                values[name] = object.__getattribute__(value, name)
            except (AttributeError, TypeError):  # not set, or copied from another class, as in arrays of JAX
                continue
    return values


_MOST_OF_PARTS = 100_000  # objects visited inside all parts; larger parts are data


def unowned(loop: Loop) -> list[str]:
    """Return one line for each stateful object that the step or a handler uses directly and that no part contains.

    A function uses its closure variables, its defaults, and the global variables that it names. It also uses the
    arguments of a `functools.partial` and the `self` of a bound method. An object with `__call__` uses its attributes.
    Objects that these refer to are not visited.
    """
    owned = _inside(loop.parts.values()) | {id(own) for own in (loop, loop.metrics, loop.state.clocks)}
    functions = [("the step", inspect.unwrap(loop.step))]
    functions += [(f"a handler of {e.name}", f) for e in loop.events.values() for f in (*e.wiring, *e.handlers)]
    used = [(where, name, value, _seeds(f)) for where, f in functions for name, value in _used(f)]
    owned |= {id(value) for *_, value, seeds in used if seeds and isinstance(value, torch.Generator)}
    lines: dict[int, str] = {}
    for where, name, value, _ in used:
        if id(value) not in owned and _has_state(value):
            lines.setdefault(id(value), f"{type(value).__qualname__} {name!r} in {where}")
    return list(lines.values())


def _seeds(function: Any) -> bool:
    """Return whether a function seeds its generators, so that their state need not be saved."""
    code = getattr(getattr(function, "func", function), "__code__", None)
    return code is not None and "manual_seed" in code.co_names


def _has_state(value: Any) -> bool:
    if isinstance(value, torch.Generator):  # `torch_generators` saves torch's own generators
        return value is not torch.default_generator and value not in torch.cuda.default_generators
    if isinstance(value, type | ModuleType):
        return False
    if not all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    try:
        return any(True for _ in leaves(value.state_dict()))
    except Exception:  # if the state cannot be read, assume that it is not empty
        return True


def _used(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a function uses directly, with their names."""
    if isinstance(function, functools.partial):
        yield from ((type(value).__name__, value) for value in function.args)
        yield from function.keywords.items()
        yield from _used(function.func)
    elif isinstance(function, MethodType):
        yield "self", function.__self__
        yield from _used(function.__func__)
    elif isinstance(function, FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # a variable that is not assigned yet
                continue
        yield from ((type(value).__name__, value) for value in function.__defaults__ or ())
        yield from (function.__kwdefaults__ or {}).items()
        if (function.__module__ or "").partition(".")[0] != "rein":
            yield from ((name, function.__globals__[name]) for name in _globals(function))
    else:  # an object with `__call__`
        yield "self", function
        yield from attributes(function).items()


def _globals(function: FunctionType) -> set[str]:
    """Return the names of the global variables that a function reads. Attribute names are excluded."""
    read = {str(line.argval) for line in dis.get_instructions(function) if line.opname == "LOAD_GLOBAL"}
    return read & function.__globals__.keys()


def _inside(parts: Iterable[Any]) -> set[int]:
    """Return the ids of all objects in the parts, found through attributes and plain containers."""
    seen: set[int] = set()
    waiting = collections.deque(parts)
    while waiting and len(seen) < _MOST_OF_PARTS:
        value = waiting.popleft()
        if id(value) in seen or isinstance(value, Tensor | str | int | float | type | ModuleType | FunctionType):
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple | set | frozenset | collections.deque):
            waiting.extend(value)
        elif isinstance(value, MethodType):
            waiting.append(value.__self__)
        else:
            waiting.extend(attributes(value).values())
    return seen
