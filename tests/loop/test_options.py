"""Options of a loop (strict, compile, debug), owned parts, repr, and copying."""

from __future__ import annotations

import copy
import logging
import pickle
import re
from typing import Any, NamedTuple

import pytest
import torch

import rein


def nothing(state: rein.State) -> None:
    return None


class Inner(NamedTuple):
    camera: torch.Tensor


class Outer(NamedTuple):
    observation: Inner
    total: Any = 0


def drifting(second: Any) -> Any:
    """Return a step that returns Outer first and `second` afterwards."""
    return lambda state: second if state.iteration else Outer(Inner(torch.zeros(2, 3)))


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (
            Outer(Inner(torch.zeros(2, 4))),
            "observation.camera was (2, 3) torch.float32 on cpu and is (2, 4) torch.float",
        ),
        (
            Outer(Inner(torch.zeros(2, 3).double())),
            "observation.camera was (2, 3) torch.float32 on cpu and is (2, 3) torc",
        ),
        (Outer(Inner(torch.zeros(2, 3, device="meta"))), "torch.float32 on cpu and is (2, 3) torch.float32 on meta"),
        (Outer(Inner(torch.zeros(2, 3)), 0.5), "total was int and is float"),
        (Outer(Inner(torch.zeros(2, 3)), None), "total was int and is absent"),
        (Outer(Inner(torch.zeros(2, 3)), {"a": 1}), "total was int and is absent; total.a was absent and is int"),
        (
            3,
            "on cpu and is absent; total was int and is absent; it was absent and is int",
        ),
    ],
)
def test_strict_names_the_path_that_changed_in_step_state(second: Any, text: str) -> None:
    with pytest.raises(TypeError, match=re.escape("strict: step_state drifted: ")) as raised:
        rein.Loop(drifting(second), strict=True).run(iterations=3)
    assert text in str(raised.value)
    assert raised.value.__notes__[0].endswith("epoch 1, iteration 1")
    rein.Loop(drifting(second)).run(iterations=3)


def test_strict_allows_other_values() -> None:
    loop = rein.Loop(
        lambda state: Outer(Inner(torch.full((2, 3), float(state.iteration))), state.iteration), strict=True
    )
    assert loop.run(epochs=2, iterations=3, init=None).step_state.total == 2


def test_debug_logs_every_event_with_the_elapsed_time(caplog: pytest.LogCaptureFixture) -> None:
    loop = rein.Loop(lambda state: loop.emit("phase"), debug=True)
    loop.define("phase")
    with caplog.at_level(logging.INFO, "rein"):
        loop.run(iterations=1)
    assert [record.name for record in caplog.records] == ["rein"] * 8
    parsed = [re.fullmatch(r"(\w+) epoch=(\d) iteration=(\d) \+(\d+\.\d{6}) s", message) for message in caplog.messages]
    assert [match and match.groups()[:3] for match in parsed] == [
        ("started", "0", "0"),
        ("epoch_started", "1", "0"),
        ("iteration_started", "1", "0"),
        ("phase", "1", "0"),
        ("iteration_completed", "1", "1"),
        ("epoch_completed", "1", "1"),
        ("epoch_ended", "1", "1"),
        ("completed", "1", "1"),
    ]


def test_nothing_is_logged_without_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "rein"):
        rein.Loop(nothing).run(iterations=1)
    assert caplog.messages == []


def test_compile_passes_its_options_to_the_compiler() -> None:
    graphs = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(module)
        return module.forward

    def step(state: rein.State) -> torch.Tensor:
        return state.step_state * 2 + 1

    loop = rein.Loop(step, compile={"backend": backend}, strict=True)
    final = loop.run(iterations=4, init=torch.zeros(3))
    assert torch.equal(final.step_state, torch.full((3,), 15.0))
    assert len(graphs) == 1, "compiled once for all iterations"
    assert repr(loop).startswith("Loop(test_compile_passes"), "the step keeps its name"


class Saved:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


class Configured:
    config: dict[str, Any] = {}  # noqa: RUF012  # never modified


def test_own_accepts_parts_with_state_or_configuration() -> None:
    loop, part, configured = rein.Loop(nothing), Saved(), Configured()
    assert loop.own("agent", part) is part
    assert loop.own("environment", configured) is configured
    assert loop.parts == {"agent": part, "environment": configured}
    with pytest.raises(ValueError, match="own\\('agent'\\): the loop already owns a part with this name"):
        loop.own("agent", Saved())
    with pytest.raises(TypeError, match="own\\('x'\\): int has neither state_dict/load_state_dict nor config"):
        loop.own("x", 3)


def test_repr_shows_handlers_metrics_and_parts() -> None:
    loop = rein.Loop(nothing, epochs=3)
    loop.epoch_ended(nothing)
    loop.metric("loss", "loss")
    loop.own("agent", Saved())
    assert repr(loop).splitlines() == [
        "Loop(nothing, epochs=3, iterations=None)",
        "  epoch_ended: nothing",
        "  metrics: loss",
        "  parts: agent=Saved",
    ]
    assert repr(loop.epoch_ended) == "Event('epoch_ended', handlers=[nothing])"


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_loop_cannot_be_copied_or_pickled(duplicate: Any) -> None:
    loop = rein.Loop(nothing)
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: build a new one and load loop.state_dict\(\)"):
        duplicate(loop)
    assert loop.run(iterations=1).status == "completed"


def test_metrics_and_memory_can_be_copied() -> None:
    loop = rein.Loop(lambda state: {"x": torch.tensor(1.0)})
    loop.metric("x", "x")
    loop.run(iterations=2)
    assert dict(copy.deepcopy(loop.state.metrics)) == {"x": 1.0}


def test_endless_run_warns_first(caplog: pytest.LogCaptureFixture) -> None:
    warning = "neither data nor iterations: an epoch ends only when the step halts it"

    def step(state: rein.State) -> None:
        if state.iteration == 3:
            state.halt_epoch()

    loop = rein.Loop(step)
    loop.epoch_ended(nothing)
    loop.run(epochs=2)
    assert caplog.text.count(warning) == 1
    loop.run([1], epochs=3)
    loop.run(epochs=4, iterations=2)
    loop.iteration_completed(nothing)  # it could halt
    loop.run(epochs=5)
    assert caplog.text.count(warning) == 1


@pytest.mark.parametrize("data", [[[1, 2], [3, 4]], iter([[1, 2], [3, 4]]), None])
def test_function_as_init_gets_the_first_batch_once(data: Any) -> None:
    loop, batches, calls = rein.Loop(lambda state: [*state.step_state, 1], iterations=2), [], []
    loop.iteration_completed(lambda state: batches.append(state.batch))

    def init(batch: Any) -> list[int]:
        calls.append(batch)
        return [len(batch or ())]

    assert loop.run(data, epochs=1, init=init).step_state == [0 if data is None else 2, 1, 1]
    assert batches == ([None, None] if data is None else [[1, 2], [3, 4]]) and calls == batches[:1]
    resumed = rein.Loop(lambda state: [*state.step_state, 1], iterations=2)
    resumed.load_state_dict(loop.state_dict())
    assert resumed.run([[5]] * 2, epochs=2, init=init).step_state[-2:] == [1, 1]
    assert len(calls) == 1


def test_other_init_of_a_continued_run_is_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warning = "run(init=...) is ignored: the run continues"
    loop, init = rein.Loop(lambda state: state.step_state + 1, iterations=2), 300
    for epochs in (1, 2):
        loop.run(epochs=epochs, init=init)
    loop.run(epochs=3)
    assert warning not in caplog.text
    assert loop.run(epochs=4, init=50).step_state == 308
    assert caplog.text.count(warning) == 1
    resumed = rein.Loop(lambda state: state.step_state + 1, iterations=2)
    resumed.load_state_dict(loop.state_dict())
    assert resumed.run(epochs=5, init=0).step_state == 310
    assert caplog.text.count(warning) == 1
