from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rein.ops.random import generator
from rein.testing import StatefulContract
from rein.testing.stateful import check_plain, copy_state, first_difference


class Walker:
    """Correct stateful part: a random walk of three coordinates with a count."""

    def __init__(self) -> None:
        self.generator = generator(0, "walker")
        self.position, self.count, self.notes = torch.zeros(3), 0, {"path": [], "name": "walker", "best": None}

    def step(self) -> torch.Tensor:
        self.position = self.position + torch.randn(3, generator=self.generator)
        self.count += 1
        return self.position * self.count

    def state_dict(self) -> dict[str, Any]:
        state = self.generator.get_state()
        return {"position": self.position, "count": self.count, "generator": state, "notes": self.notes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.state_dict():
            if name not in state:
                raise ValueError(f"the state lacks {name}")
        for name in ("position", "generator"):
            if state[name].shape != self.state_dict()[name].shape:
                raise ValueError(f"{name} has the wrong shape {tuple(state[name].shape)}")
        self.position, self.count = state["position"].clone(), state["count"]
        self.generator.set_state(state["generator"])
        self.notes = copy_state(state["notes"])


class ForgetsItsGenerator(Walker):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "generator": self.generator.get_state()})


class ForgetsItsCountLately(Walker):
    """Equal for the first 43 steps, so the contract must compare many."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "count": 0})

    def step(self) -> torch.Tensor:
        super().step()
        return self.position * (self.count > 50)


class KeepsAnOrderedDictionary(Walker):
    """Returns an OrderedDict, as `torch.nn.Module.state_dict` does."""

    def state_dict(self) -> dict[str, Any]:
        return collections.OrderedDict(super().state_dict())


class TestAnOrderedDictionary(StatefulContract):
    def make(self) -> Any:
        return KeepsAnOrderedDictionary()

    def step(self, walker: Any) -> Any:
        return walker.step()


class KeepsATuple(Walker):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "notes": {"path": (1, 2)}}


class KeepsTensorOfState(Walker):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.position = state["position"]


class KeepsListOfState(Walker):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "notes": self.notes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.notes = state["notes"]

    def step(self) -> torch.Tensor:
        self.notes["path"].append(self.count)
        return super().step()


class AcceptsAnyShape(Walker):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "generator": state["generator"].reshape(-1)[:5056]})


class FillsMissingEntries(Walker):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**self.state_dict(), **state})


class RaisesWithoutName(Walker):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            super().load_state_dict(state)
        except ValueError as error:
            raise ValueError("bad state") from error


class TestWalker(StatefulContract):
    def make(self) -> Walker:
        return Walker()

    def step(self, part: Walker) -> torch.Tensor:
        return part.step()


CONTINUES = "test_loaded_part_continues_bit_for_bit"
PLAIN = "test_state_needs_no_pickle"
COPIES = "test_loading_copies_state"
INCOMPLETE = "test_incomplete_state_raises"
SHAPE = "test_state_of_wrong_shape_raises"


@pytest.mark.parametrize(
    ("broken", "test", "message"),
    [
        (ForgetsItsGenerator, CONTINUES, "step 1 after loading differs at tree"),
        (ForgetsItsCountLately, CONTINUES, "step 44 after loading differs at tree"),
        (KeepsATuple, PLAIN, "state.notes.path is a tuple"),
        (KeepsTensorOfState, COPIES, "load_state_dict keeps tree.position"),
        (KeepsListOfState, COPIES, "load_state_dict keeps tree.notes"),
        (FillsMissingEntries, INCOMPLETE, "a state without 'position' was loaded without an error"),
        (RaisesWithoutName, INCOMPLETE, "a state without 'position' does not name 'position'"),
        (AcceptsAnyShape, SHAPE, "a state whose generator has one element more was loaded without an error"),
        (RaisesWithoutName, SHAPE, "does not name 'generator'"),
    ],
)
def test_broken_part_fails_contract(broken: Callable[[], Walker], test: str, message: str) -> None:
    class Contract(TestWalker):
        def make(self) -> Walker:
            return broken()

    with pytest.raises(AssertionError) as failure:
        getattr(Contract(), test)()
    assert message in str(failure.value)


@pytest.mark.parametrize("value", [(1,), np.float64(1.0), np.zeros(2), {1: 2}, {"a": [{3.0}]}, torch.Size([1])])
def test_check_plain_rejects_values_that_need_pickle(value: object) -> None:
    with pytest.raises(AssertionError):
        check_plain({"value": value})


def test_check_plain_accepts_plain_values() -> None:
    check_plain({"a": [1, 1.5, "x", True, None, torch.zeros(2), {"b": {}}]})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (1, 1.0),
        (1, True),
        ({"a": 1}, {"b": 1}),
        ([1, 2], [1]),
        (None, 1),
    ],
)
def test_first_difference_finds_every_difference(one: object, other: object) -> None:
    assert first_difference(one, other) is not None


@pytest.mark.parametrize(
    "tree", [torch.tensor([float("nan"), 1.0]), float("nan"), np.array([np.nan]), {"a": [1, {"b": True}]}, None]
)
def test_first_difference_of_copy_is_none(tree: object) -> None:
    assert first_difference(tree, copy_state(tree)) is None
