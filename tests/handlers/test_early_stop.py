from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rein.handlers.monitor import EarlyStop, early_stop, monitor, reduce_learning_rate
from rein.loop import Loop

NAN, INF = math.nan, math.inf


def make(values: Sequence[float], **options: Any) -> Loop:
    """Return a loop with one iteration per epoch, whose metric `loss` takes these values."""
    loop = Loop(lambda state: None, epochs=len(values), iterations=1)
    loop.metric("loss", lambda state: values[state.epoch - 1], reduce="last")
    early_stop(loop, "loss", **{"mode": "min", **options})
    return loop


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
@pytest.mark.parametrize("patience", [0, 1, 2, 5])
def test_worsening_metric_stops_after_patience_plus_one(mode: str, sign: int, patience: int) -> None:
    final = make([sign * n for n in range(20)], patience=patience, mode=mode).run()
    assert final.status == "halted"
    assert final.epoch == 1 + patience + 1  # the first value is the best


@pytest.mark.parametrize(("mode", "sign"), [("min", -1), ("max", 1)])
def test_changes_below_min_delta_are_ignored(mode: str, sign: int) -> None:
    creeping = [sign * n for n in range(10)]
    assert make(creeping, mode=mode, patience=1, min_delta=0.5).run().status == "completed"
    # the best values are 0, 2, 4, ...: one firing without improvement between them
    assert make(creeping, mode=mode, patience=1, min_delta=1.5).run().status == "completed"
    assert make(creeping, mode=mode, patience=0, min_delta=1.5).run().epoch == 2


def test_nan_after_a_number_is_not_an_improvement() -> None:
    assert make([3.0, NAN, NAN, 1.0], patience=1).run().epoch == 3
    assert make([NAN, 3.0, NAN, 2.0, NAN, 1.0], patience=1).run().status == "completed"


def test_nan_before_the_first_number_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    final = make([NAN, NAN, NAN, NAN, 5.0, 4.0, 6.0, 6.0], patience=1).run()
    assert (final.epoch, final.status) == (8, "halted")
    assert make([NAN] * 5, patience=0).run().status == "completed"


@pytest.mark.parametrize(("patience", "nans", "warned"), [(3, 2, 0), (3, 3, 1), (3, 9, 1), (0, 1, 1)])
def test_constant_nan_warns_once(caplog: pytest.LogCaptureFixture, patience: int, nans: int, warned: int) -> None:
    make([NAN] * nans, patience=patience).run()
    assert caplog.text.count("loss has been NaN") == warned


def test_mode_is_required() -> None:
    loop = Loop(lambda state: None)
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for attach in (early_stop, lambda *a: monitor(*a, print), lambda loop, of: reduce_learning_rate(loop, sgd, of)):
        with pytest.raises(TypeError, match="mode"):
            attach(loop, "episode_return")
    assert not loop.parts


def test_infinite_first_value_can_be_improved() -> None:
    assert make([INF, 3.0, 4.0], patience=0, min_delta=0.1).run().epoch == 3


def test_halt_reason_names_the_metric() -> None:
    assert (
        make([1.0, 2.0, 3.0], patience=1).run().reason == "loss has not improved 2 times in a row; its best value is 1"
    )


def test_best_and_since_are_readable_after_each_epoch() -> None:
    loop, seen = make([3.0, 2.0, 5.0, 1.0]), []
    part = loop.parts["early_stop/loss"]
    loop.epoch_ended(lambda state: seen.append((part.best, part.since)))
    loop.run()
    assert seen == [(3.0, 0), (2.0, 0), (2.0, 1), (1.0, 0)]


def test_filters_select_the_epochs_that_count() -> None:
    assert make([0.0] * 40, patience=1, every=10).run().epoch == 30


VALUES = [5.0, 6.0, 4.0, NAN, 4.5, 4.5, 4.5, 1.0, 1.0]


@pytest.mark.parametrize("saved_at", range(1, 8))
def test_resumed_run_stops_at_the_same_epoch(saved_at: int) -> None:
    whole = make(VALUES).run()
    assert (whole.epoch, whole.status) == (7, "halted")
    first = make(VALUES)
    first.run(epochs=saved_at)
    second = make(VALUES)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    resumed = second.run()
    assert (resumed.epoch, resumed.status, resumed.reason) == (whole.epoch, whole.status, whole.reason)
    assert second.parts["early_stop/loss"].state_dict() == {"best": 4.0, "since": 4}


def test_stopped_run_continues_with_more_patience_or_zero_count() -> None:
    first = make([1.0] * 10, patience=1)
    assert first.run().epoch == 3
    patient = make([1.0] * 10, patience=5)
    patient.load_state_dict(first.state_dict())
    assert patient.run().epoch == 7
    first.parts["early_stop/loss"].since = 0
    assert first.run().epoch == 5


def test_two_rules_need_two_names() -> None:
    loop = make([1.0, 0.5, 0.4, 0.3, 0.2], patience=9)
    with pytest.raises(ValueError, match="already owns a part with this name"):
        early_stop(loop, "loss", mode="min")
    early_stop(loop, "loss", mode="min", min_delta=0.25, patience=1, name="plateau")
    assert set(loop.parts) == {"early_stop/loss", "plateau"}
    assert loop.run().epoch == 4  # 0.5 is better by more than 0.25, 0.4 and 0.3 are not


def test_firings_before_the_metric_has_a_value_are_not_counted() -> None:
    loop = Loop(lambda state: None, epochs=20, iterations=1)
    loop.metrics.declare("accuracy")

    @loop.epoch_ended(every=3)
    def score(state: Any) -> None:
        state.metrics["accuracy"] = 1.0

    early_stop(loop, "accuracy", mode="max", patience=1)
    assert loop.run().epoch == 9  # the best value in epoch 3, and two others in epochs 6 and 9


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "maximum"}, 'expected "min"'),
        ({"patience": -1}, "expected an integer of at least 0"),
        ({"patience": 2.5}, "expected an integer of at least 0"),
        ({"min_delta": -0.1}, "expected at least 0"),
        ({"min_delta": NAN}, "expected at least 0"),
        ({"event": "epoch_end"}, "no event 'epoch_end'"),
        ({"every": -1}, "must be 1 or more"),
    ],
)
def test_invalid_options_raise_and_attach_nothing(options: dict[str, Any], text: str) -> None:
    loop = Loop(lambda state: None)
    with pytest.raises(ValueError, match=text):
        early_stop(loop, "loss", **{"mode": "min", **options})
    assert not loop.parts
    assert not any(event.handlers for event in loop.events.values())


def test_config_is_json() -> None:
    part = EarlyStop("loss", 3, "min", 0.0)
    assert json.loads(json.dumps(part.config)) == {"metric": "loss", "patience": 3, "mode": "min", "min_delta": 0.0}
