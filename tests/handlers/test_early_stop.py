from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rein.handlers.early_stop import EarlyStop, early_stop
from rein.handlers.monitor import monitor, reduce_learning_rate
from rein.loop import Loop

NAN, INF = math.nan, math.inf


def make(values: Sequence[float], **options: Any) -> Loop:
    """A loop of one iteration an epoch, whose metric `loss` is the epoch's value."""
    loop = Loop(lambda state: None, epochs=len(values), iterations=1)
    loop.metric("loss", lambda state: values[state.epoch - 1], reduce="last")
    early_stop(loop, "loss", **{"mode": "min", **options})
    return loop


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
@pytest.mark.parametrize("patience", [0, 1, 2, 5])
def test_a_metric_that_only_worsens_stops_after_patience_and_one_more(mode: str, sign: int, patience: int) -> None:
    final = make([sign * n for n in range(20)], patience=patience, mode=mode).run()
    assert final.status == "halted"
    assert final.epoch == 1 + patience + 1  # the first value is the best


def test_an_improvement_gives_full_patience_again() -> None:
    values = [5.0, 6.0, 6.0, 4.0, 9.0, 9.0, 9.0, 1.0]
    final = make(values, patience=2).run()
    assert final.epoch == 7


def test_a_metric_that_keeps_improving_never_stops() -> None:
    assert make([-n for n in range(50)], patience=0).run().status == "completed"


def test_an_equal_value_is_no_improvement() -> None:
    assert make([1.0, 1.0, 1.0], patience=1).run().epoch == 3


def test_the_best_value_is_what_counts_and_not_the_last() -> None:
    assert make([1.0, 9.0, 8.0, 7.0, 6.0], patience=2).run().epoch == 4


@pytest.mark.parametrize(("mode", "sign"), [("min", -1), ("max", 1)])
def test_less_than_min_delta_is_no_improvement(mode: str, sign: int) -> None:
    creeping = [sign * n for n in range(10)]
    assert make(creeping, mode=mode, patience=1, min_delta=0.5).run().status == "completed"
    # 0, then 2 which is more than 1.5 better, then 4 and so on: one firing without improvement at a time
    assert make(creeping, mode=mode, patience=1, min_delta=1.5).run().status == "completed"
    assert make(creeping, mode=mode, patience=0, min_delta=1.5).run().epoch == 2


def test_nan_after_a_number_is_no_improvement() -> None:
    assert make([3.0, NAN, NAN, 1.0], patience=1).run().epoch == 3
    assert make([NAN, 3.0, NAN, 2.0, NAN, 1.0], patience=1).run().status == "completed"


def test_nan_before_the_first_number_does_not_count_toward_patience(caplog: pytest.LogCaptureFixture) -> None:
    final = make([NAN, NAN, NAN, NAN, 5.0, 4.0, 6.0, 6.0], patience=1).run()
    assert (final.epoch, final.status) == (8, "halted")
    assert make([NAN] * 5, patience=0).run().status == "completed"


@pytest.mark.parametrize(("patience", "nans", "warned"), [(3, 2, 0), (3, 3, 1), (3, 9, 1), (0, 1, 1)])
def test_a_metric_that_stays_nan_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, patience: int, nans: int, warned: int
) -> None:
    make([NAN] * nans, patience=patience).run()
    assert caplog.text.count("loss has been NaN") == warned


def test_the_direction_must_be_given() -> None:
    loop = Loop(lambda state: None)
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for attach in (early_stop, lambda *a: monitor(*a, print), lambda loop, of: reduce_learning_rate(loop, sgd, of)):
        with pytest.raises(TypeError, match="mode"):
            attach(loop, "episode_return")
    assert not loop.parts


def test_an_infinite_first_value_can_be_improved_on() -> None:
    assert make([INF, 3.0, 4.0], patience=0, min_delta=0.1).run().epoch == 3


def test_the_reason_says_what_did_not_improve() -> None:
    assert make([1.0, 2.0, 3.0], patience=1).run().reason == "loss has not improved 2 times in a row; its best is 1"


def test_best_and_since_can_be_read_after_each_epoch() -> None:
    loop, seen = make([3.0, 2.0, 5.0, 1.0]), []
    part = loop.parts["early_stop/loss"]
    loop.epoch_ended(lambda state: seen.append((part.best, part.since)))
    loop.run()
    assert seen == [(3.0, 0), (2.0, 0), (2.0, 1), (1.0, 0)]


def test_handlers_after_the_one_that_stops_run_all_the_same() -> None:
    loop, seen = make([1.0, 2.0, 3.0], patience=0), []
    loop.epoch_ended(lambda state: seen.append(state.epoch))
    loop.run()
    assert seen == [1, 2]


def test_filters_say_which_epochs_count() -> None:
    assert make([0.0] * 40, patience=1, every=10).run().epoch == 30


VALUES = [5.0, 6.0, 4.0, NAN, 4.5, 4.5, 4.5, 1.0, 1.0]


@pytest.mark.parametrize("saved_at", range(1, 8))
def test_a_resumed_run_stops_where_an_uninterrupted_one_does(saved_at: int) -> None:
    whole = make(VALUES).run()
    assert (whole.epoch, whole.status) == (7, "halted")
    first = make(VALUES)
    first.run(epochs=saved_at)
    second = make(VALUES)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    resumed = second.run()
    assert (resumed.epoch, resumed.status, resumed.reason) == (whole.epoch, whole.status, whole.reason)
    assert second.parts["early_stop/loss"].state_dict() == {"best": 4.0, "since": 4}


def test_a_stopped_run_goes_on_with_more_patience_or_a_count_of_zero() -> None:
    first = make([1.0] * 10, patience=1)
    assert first.run().epoch == 3
    patient = make([1.0] * 10, patience=5)
    patient.load_state_dict(first.state_dict())
    assert patient.run().epoch == 7
    first.parts["early_stop/loss"].since = 0
    assert first.run().epoch == 5


def test_two_on_one_name_are_an_error_and_two_on_two_names_count_apart() -> None:
    loop = make([1.0, 0.5, 0.4, 0.3, 0.2], patience=9)
    with pytest.raises(ValueError, match="already owns a part with this name"):
        early_stop(loop, "loss", mode="min")
    early_stop(loop, "loss", mode="min", min_delta=0.25, patience=1, name="plateau")
    assert set(loop.parts) == {"early_stop/loss", "plateau"}
    assert loop.run().epoch == 4  # 0.5 is better by more than 0.25, 0.4 and 0.3 are not


def test_a_metric_that_is_not_there_is_an_error_at_the_first_firing() -> None:
    loop = Loop(lambda state: None, epochs=5, iterations=1)
    loop.metric("loss", lambda state: 0.0)
    early_stop(loop, "accuracy", mode="max")
    with pytest.raises(KeyError, match="no metric 'accuracy' in this epoch; there are: loss") as error:
        loop.run()
    assert loop.state.epoch == 1
    assert any("EarlyStop.check on epoch_ended" in note for note in error.value.__notes__)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "maximum"}, 'give "min" or "max"'),
        ({"patience": -1}, "give a whole number, 0 or more"),
        ({"patience": 2.5}, "give a whole number, 0 or more"),
        ({"min_delta": -0.1}, "give 0 or more"),
        ({"min_delta": NAN}, "give 0 or more"),
        ({"event": "epoch_end"}, "no event 'epoch_end'"),
        ({"every": -1}, "must be 1 or more"),
    ],
)
def test_nonsense_fails_where_it_is_written_and_leaves_nothing_behind(options: dict[str, Any], text: str) -> None:
    loop = Loop(lambda state: None)
    with pytest.raises(ValueError, match=text):
        early_stop(loop, "loss", **{"mode": "min", **options})
    assert not loop.parts
    assert not any(event.handlers for event in loop.events.values())


def test_its_configuration_is_json() -> None:
    part = EarlyStop("loss", 3, "min", 0.0)
    assert json.loads(json.dumps(part.config)) == {"metric": "loss", "patience": 3, "mode": "min", "min_delta": 0.0}
