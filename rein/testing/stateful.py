"""Test suite for stateful parts: a state loaded into a new object continues exactly. Example::

class TestMyBuffer(StatefulContract):
    def make(self):
        return MyBuffer(capacity=100)

    def step(self, buffer):
        buffer.append(...)
        return buffer.sample(8)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rein.ops.trees import leaves, map_tree


class StatefulContract:
    """Base class of the tests of a stateful part. Subclasses are named `Test...` and define `make` and `step`."""

    steps_before = 7  # steps before saving
    steps_after = 50  # steps that are compared after loading

    def make(self) -> Any:
        """Return a new part, always built in the same way."""
        raise NotImplementedError

    def step(self, part: Any) -> Any:
        """Advance the part by one step and return its output: a tree of tensors, arrays and numbers."""
        raise NotImplementedError

    def test_loaded_part_continues_bit_for_bit(self) -> None:
        """After loading into a new object, all later steps and the final state are equal."""
        part, loaded = self._stepped(), self.make()
        loaded.load_state_dict(copy_state(part.state_dict()))
        for k in range(1, self.steps_after + 1):
            check_equal(self.step(part), self.step(loaded), f"step {k} after loading")
        check_equal(part.state_dict(), loaded.state_dict(), f"the state after {self.steps_after} steps")

    def test_state_needs_no_pickle(self) -> None:
        """States have only dictionaries with string keys, lists, tensors, numbers, strings, booleans and None."""
        for part in (self.make(), self._stepped()):
            check_plain(part.state_dict())

    def test_loading_copies_state(self) -> None:
        """Changing a state after loading it does not change the part."""
        state, part = copy_state(self._stepped().state_dict()), self.make()
        part.load_state_dict(state)
        before = copy_state(part.state_dict())
        _overwrite(state)
        difference = first_difference(before, part.state_dict())
        assert difference is None, f"load_state_dict keeps {difference} of its argument; copy it"

    def test_incomplete_state_raises(self) -> None:
        """The error names the missing entry."""
        state = self._stepped().state_dict()
        assert state, "state_dict is empty; a part without state does not need state_dict"
        for name in state:
            incomplete = {key: value for key, value in copy_state(state).items() if key != name}
            self._check_refused(incomplete, name, f"a state without {name!r}")

    def test_state_of_wrong_shape_raises(self) -> None:
        """The largest tensor of the state gets one more element. The error must name the tensor."""
        state = copy_state(self._stepped().state_dict())
        sizes = {path: leaf.numel() for path, leaf in leaves(state) if isinstance(leaf, Tensor) and leaf.numel()}
        if sizes:
            path = max(sizes, key=lambda path: sizes[path])
            longer = _replace(state, path, lambda tensor: torch.cat((tensor.reshape(-1), tensor.reshape(-1)[:1])))
            self._check_refused(longer, path.rsplit(".", 1)[-1], f"a state whose {path} has one element more")

    def check(self) -> None:
        """Run all tests of the contract."""
        for name in vars(StatefulContract):
            if name.startswith("test_"):
                getattr(self, name)()

    def _stepped(self) -> Any:
        part = self.make()
        for _ in range(self.steps_before):
            self.step(part)
        return part

    def _check_refused(self, state: Mapping[str, Any], name: str, what: str) -> None:
        try:
            self.make().load_state_dict(state)
        except Exception as error:  # any error that names the entry
            assert name in str(error), f"the error for {what} does not name {name!r}: {error!r}"
        else:
            raise AssertionError(f"{what} was loaded without an error")


_COUNT = "contract_steps"  # unlikely to be an entry of the state of a part


class CountedPart:
    """Stateful part and the number of its steps, as one stateful part."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the part, and the number of steps."""
        return {**self.part.state_dict(), _COUNT: self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.steps = state[_COUNT]
        self.part.load_state_dict({name: value for name, value in state.items() if name != _COUNT})


class CountedContract(StatefulContract):
    """Tests of the part that `make()` returns. `step(part, k)` is step k of it."""

    def __init__(self, make: Callable[[], Any], step: Callable[[Any, int], Any], steps_before: int = 7) -> None:
        self._make, self._step = make, step
        self.steps_before = steps_before

    def make(self) -> CountedPart:
        """Return a new part."""
        return CountedPart(self._make())

    def step(self, part: CountedPart) -> Any:
        """Advance the part by one step."""
        part.steps += 1
        return self._step(part.part, part.steps - 1)


def check_plain(state: Any, path: str = "state") -> None:
    """Raise AssertionError, with the path, if a state has a value that needs pickle."""
    if type(state) in (dict, OrderedDict):  # modules return an OrderedDict
        for key, value in state.items():
            hint = "; use rein.ops.trees.plain_state for optimizers" if type(key) is int else ""
            assert type(key) is str, f"{path} has the key {key!r}; keys must be strings{hint}"
            check_plain(value, f"{path}.{key}")
    elif type(state) is list:
        for place, value in enumerate(state):
            check_plain(value, f"{path}.{place}")
    else:
        plain = state is None or type(state) in (Tensor, torch.nn.Parameter, int, float, str, bool)
        assert plain, f"{path} is a {type(state).__name__}; use rein.ops.trees.pack for tuples, .tolist() for numpy"


def copy_state(state: Any) -> Any:
    """Return a deep copy: tensors and arrays are cloned, containers are new."""
    return map_tree(_copied, state)


def check_equal(one: Any, other: Any, what: str = "a value") -> None:
    """Raise AssertionError, whose message begins with `what`, if two trees differ by a bit."""
    difference = first_difference(one, other)
    assert difference is None, f"{what} differs at {difference}"


def first_difference(one: Any, other: Any) -> str | None:
    """Return the path and the values of the first leaf in which two trees differ, or None if they are equal."""
    a, b = dict(leaves(one, "tree")), dict(leaves(other, "tree"))
    if a.keys() != b.keys():
        path = sorted(a.keys() ^ b.keys())[0]
        return f"{path} (only in the {'first' if path in a else 'second'})"
    return next((f"{path} ({a[path]!r} and {b[path]!r})" for path in a if not _same(a[path], b[path])), None)


def _same(a: Any, b: Any) -> bool:
    """Whether values, dtypes and shapes are equal to the bit. NaN equals the same NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and (not a.numel() or torch.equal(_bytes(a), _bytes(b)))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _overwrite(state: Any) -> None:
    """Change all mutable values of a state in place."""
    if isinstance(state, Tensor):
        state.detach().copy_(state.logical_not() if state.dtype == torch.bool else state + 1)
    elif isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            _overwrite(value)
        state.clear()


def _replace(tree: Any, path: str, function: Callable[[Tensor], Tensor], here: str = "") -> Any:
    """Return the tree with `function` applied to the leaf at `path`."""
    if here == path:
        return function(tree)
    if isinstance(tree, dict):
        return {k: _replace(v, path, function, f"{here}.{k}" if here else k) for k, v in tree.items()}
    if isinstance(tree, list):
        return [_replace(v, path, function, f"{here}.{k}" if here else str(k)) for k, v in enumerate(tree)]
    return tree
