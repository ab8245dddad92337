"""A test suite for whatever has a state: saved, loaded into a new object, it goes on as if nothing had happened.

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
    """Subclass it in a test file, name the subclass Test..., and give `make` and `step`."""

    steps_before = 7  # saved after these
    steps_after = 50  # and then equal for so many

    def make(self) -> Any:
        """A new part, always built in the same way."""
        raise NotImplementedError

    def step(self, part: Any) -> Any:
        """Advance the part by one step; returns what can be seen of it: a tree of tensors, arrays and numbers."""
        raise NotImplementedError

    def test_a_loaded_part_goes_on_bit_for_bit(self) -> None:
        """Save after some steps, make a new object, load: every step that follows is equal, and so is the state."""
        part, loaded = self._stepped(), self.make()
        loaded.load_state_dict(copy_state(part.state_dict()))
        for k in range(1, self.steps_after + 1):
            difference = first_difference(self.step(part), self.step(loaded))
            assert difference is None, f"step {k} after loading differs at {difference}"
        difference = first_difference(part.state_dict(), loaded.state_dict())
        assert difference is None, f"the state differs at {difference}, {self.steps_after} steps after loading"

    def test_its_state_needs_no_pickle(self) -> None:
        """A checkpoint holds dictionaries with string keys, lists, tensors, numbers, strings, booleans and None."""
        for part in (self.make(), self._stepped()):
            check_plain(part.state_dict())

    def test_loading_shares_no_memory_with_the_source(self) -> None:
        """What happens to a state after it was loaded is nothing to the part."""
        state, part = copy_state(self._stepped().state_dict()), self.make()
        part.load_state_dict(state)
        before = copy_state(part.state_dict())
        _spoil(state)
        difference = first_difference(before, part.state_dict())
        assert difference is None, f"load_state_dict keeps {difference} of the state that it was given: copy it"

    def test_a_state_that_lacks_something_is_refused(self) -> None:
        """The error names what is missing."""
        state = self._stepped().state_dict()
        assert state, "state_dict is empty: such a part needs no state at all"
        for name in state:
            lacking = {key: value for key, value in copy_state(state).items() if key != name}
            self._check_refused(lacking, name, f"a state without {name!r}")

    def test_a_state_of_the_wrong_shape_is_refused(self) -> None:
        """The error names the tensor: the largest one of the state, here one element longer than it was."""
        state = copy_state(self._stepped().state_dict())
        sizes = {path: leaf.numel() for path, leaf in leaves(state) if isinstance(leaf, Tensor) and leaf.numel()}
        if sizes:
            path = max(sizes, key=lambda path: sizes[path])
            longer = _replace(state, path, lambda tensor: torch.cat((tensor.reshape(-1), tensor.reshape(-1)[:1])))
            self._check_refused(longer, path.rsplit(".", 1)[-1], f"a state whose {path} has one element more")

    def _stepped(self) -> Any:
        part = self.make()
        for _ in range(self.steps_before):
            self.step(part)
        return part

    def _check_refused(self, state: Mapping[str, Any], name: str, what: str) -> None:
        try:
            self.make().load_state_dict(state)
        except Exception as error:  # any kind will do, if it names the part
            assert name in str(error), f"{what} is refused without naming {name!r}: {error!r}"
        else:
            raise AssertionError(f"{what} was loaded without an error")


def check_plain(state: Any, path: str = "state") -> None:
    """AssertionError where something stands in a state that a file without pickle cannot hold, and where."""
    if type(state) in (dict, OrderedDict):  # a module's
        for key, value in state.items():
            hint = "; rein.ops.trees.plain_state rewrites an optimizer's" if type(key) is int else ""
            assert type(key) is str, f"{path} has the key {key!r}; keys are strings{hint}"
            check_plain(value, f"{path}.{key}")
    elif type(state) is list:
        for place, value in enumerate(state):
            check_plain(value, f"{path}.{place}")
    else:
        plain = state is None or type(state) in (Tensor, torch.nn.Parameter, int, float, str, bool)
        assert plain, f"{path} is a {type(state).__name__}; rein.ops.trees.pack rewrites tuples, .tolist() numpy's"


def copy_state(state: Any) -> Any:
    """A copy that shares no memory: tensors and arrays cloned, containers new."""
    return map_tree(_copied, state)


def first_difference(one: Any, other: Any) -> str | None:
    """The path of the first leaf in which two trees differ by a bit, and how; None where they are equal."""
    a, b = dict(leaves(one, "tree")), dict(leaves(other, "tree"))
    if a.keys() != b.keys():
        path = sorted(a.keys() ^ b.keys())[0]
        return f"{path} (only in the {'first' if path in a else 'second'})"
    return next((f"{path} ({a[path]!r} and {b[path]!r})" for path in a if not _same(a[path], b[path])), None)


def _same(a: Any, b: Any) -> bool:
    """Equal to the bit, and of the same type and shape; NaN equals the same NaN."""
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


def _spoil(state: Any) -> None:
    """Change everything in a state that can be changed in place."""
    if isinstance(state, Tensor):
        state.detach().copy_(state.logical_not() if state.dtype == torch.bool else state + 1)
    elif isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            _spoil(value)
        state.clear()


def _replace(tree: Any, path: str, function: Callable[[Tensor], Tensor], here: str = "") -> Any:
    """The tree with `function` applied to the leaf at `path`."""
    if here == path:
        return function(tree)
    if isinstance(tree, dict):
        return {k: _replace(v, path, function, f"{here}.{k}" if here else k) for k, v in tree.items()}
    if isinstance(tree, list):
        return [_replace(v, path, function, f"{here}.{k}" if here else str(k)) for k, v in enumerate(tree)]
    return tree
