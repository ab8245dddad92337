"""Metrics: accumulation, reset per epoch, and storage."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rein
from rein.loop.metrics import Metrics, ema

REDUCED = {"mean": 2.0, "sum": 6.0, "min": 1.0, "max": 3.0, "last": 3.0, "median": 2.0}


def run(values: list[Any], reduce: Any = "mean", epochs: int = 1, **options: Any) -> rein.State:
    """Return the final state of a run whose metric `x` takes these values in each epoch."""
    loop = rein.Loop(lambda state: {"x": state.batch}, **options)
    loop.metric("x", "x", reduce)
    return loop.run(values, epochs=epochs)


@pytest.mark.parametrize("reduce", REDUCED)
@pytest.mark.parametrize("number", [float, int, torch.tensor, np.float32, lambda x: torch.tensor([x])])
def test_reductions_of_numbers_and_tensors_are_equal(reduce: str, number: Any) -> None:
    final = run([number(2), number(1), number(3)], reduce)
    assert final.metrics["x"] == REDUCED[reduce]
    assert type(final.metrics["x"]) is float


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_mean_equals_the_mean_of_the_values(values: list[float]) -> None:
    assert run(values).metrics["x"] == pytest.approx(sum(values) / len(values), abs=1e-6)
    assert run([torch.tensor(v, dtype=torch.float64) for v in values]).metrics["x"] == pytest.approx(
        sum(values) / len(values), abs=1e-6
    )


def test_long_sum_of_float32_is_accumulated_in_float64() -> None:
    assert run([torch.tensor(16_777_216.0), *[torch.tensor(1.0)] * 50], "sum").metrics["x"] == 16_777_266.0


def test_custom_reduction_receives_accumulated_value_and_count() -> None:
    calls = []

    def product(accumulated: float | None, value: float, count: int) -> float:
        calls.append((accumulated, value, count))
        return value if accumulated is None else accumulated * value

    assert run([2.0, 3.0, 4.0], product).metrics["x"] == 24.0
    assert calls == [(None, 2.0, 0), (2.0, 3.0, 1), (6.0, 4.0, 2)]


def test_median_of_tensors_and_numbers() -> None:
    assert run([torch.tensor(2.0), 1.0, 3.0], "median").metrics["x"] == 2.0


@pytest.mark.parametrize("number", [float, torch.tensor])
def test_median_of_an_even_number_of_values_is_resumed_within_an_epoch(number: Any) -> None:
    def build() -> rein.Loop:
        loop = rein.Loop(lambda state: {"x": number(state.batch)})
        loop.metric("x", "x", reduce=("median", "max"))
        return loop

    loop, values = build(), [4.0, 1.0, 9.0, 3.0]
    loop.iteration_completed(once=2)(lambda state: loop.interrupt())
    loop.run(values)
    saved = loop.state_dict()
    for again in (loop, build()):
        if again is not loop:
            again.load_state_dict(saved)
        assert dict(again.run(values).metrics) == {"x_median": 3.5, "x_max": 9.0}


def test_exponential_moving_average_starts_at_the_first_value() -> None:
    assert run([4.0, 8.0], ema(0.25)).metrics["x"] == 5.0
    with pytest.raises(ValueError, match=r"ema\(alpha=0\): the weight of the newest value must be in \(0, 1\]"):
        ema(0)


def test_mean_counts_only_iterations_that_reported() -> None:
    assert run([1.0, None, 3.0, None]).metrics["x"] == 2.0
    loop = rein.Loop(lambda state: {"x": 5.0} if state.iteration == 2 else {})
    loop.metric("x", "x")
    assert loop.run(iterations=10).metrics["x"] == 5.0


@pytest.mark.parametrize("reduce", REDUCED)
def test_unreported_metric_is_nan(reduce: str) -> None:
    final = run([None, None], reduce)
    assert math.isnan(final.metrics["x"]) and math.isnan(final.history[-1].metrics["x"])


def test_metrics_reset_in_each_epoch_also_after_a_halt() -> None:
    loop, begun = rein.Loop(lambda state: {"x": 1.0}), []
    loop.metric("x", "x", "sum")
    loop.epoch_started(lambda state: begun.append(state.metrics["x"]))
    loop.iteration_completed(once=3)(rein.State.halt_epoch)
    final = loop.run(epochs=3, iterations=5)
    assert [record.metrics["x"] for record in final.history] == [3.0, 5.0, 5.0]
    assert all(math.isnan(x) for x in begun)


def test_metrics_of_the_last_epoch_are_readable_after_the_run() -> None:
    assert run([1.0, 3.0], epochs=2).metrics["x"] == 2.0


@pytest.mark.parametrize("source", [lambda state: state.step_state["x"] * 2, "x"])
def test_source_is_a_key_or_a_function_of_the_state(source: Any) -> None:
    loop = rein.Loop(lambda state: {"x": 1.5})
    loop.metric("y", source)
    assert loop.run(iterations=2).metrics["y"] == (1.5 if source == "x" else 3.0)


class Reporting(NamedTuple):
    metrics: dict[str, float] | None
    x: float = 7.0


def test_key_is_looked_up_in_the_metrics_of_the_step_state() -> None:
    for step_state, expected in ((Reporting({"x": 1.0}), 1.0), (Reporting({}), math.nan), (Reporting(None), math.nan)):
        loop = rein.Loop(lambda state, step_state=step_state: step_state)
        loop.metric("x", "x")
        assert loop.run(iterations=1).metrics["x"] == pytest.approx(expected, nan_ok=True)


def test_values_stay_detached_tensors_until_read() -> None:
    weight = torch.ones((), requires_grad=True)
    loop = rein.Loop(lambda state: {"x": weight * 2})
    loop.metric("x", "x")
    final = loop.run(epochs=2, iterations=3)
    kept = final.metrics._accumulators["x"].accumulated  # type: ignore[attr-defined]  # private access
    assert isinstance(kept, torch.Tensor) and not kept.requires_grad
    frozen = final.history[-1].metrics
    assert isinstance(frozen._values["x"], torch.Tensor)  # type: ignore[attr-defined]  # private access
    assert frozen["x"] == 2.0 and dict(frozen) == {"x": 2.0}


def test_value_that_is_not_one_number_raises_with_the_name() -> None:
    with pytest.raises(
        ValueError, match=r"metric 'x' has shape \(3,\); a metric must be one number per iteration: reduce it"
    ):
        run([torch.zeros(3)])
    for wrong in ("high", [1.0, 2.0], {"a": 1}, np.zeros(2)):
        with pytest.raises(TypeError, match="metric 'x': expected one number per iteration, got"):
            run([wrong])


def test_handler_can_assign_a_metric_for_this_epoch() -> None:
    loop = rein.Loop(lambda state: {"x": 1.0})
    loop.metric("x", "x")

    @loop.epoch_ended(every=2)
    def score(state: rein.State) -> None:
        state.metrics["score"] = torch.tensor(state.epoch)
        state.metrics["x"] = 9

    final = loop.run(epochs=3, iterations=1)
    assert [dict(record.metrics) for record in final.history] == [{"x": 1.0}, {"x": 9.0, "score": 2.0}, {"x": 1.0}]
    assert "score" not in final.metrics
    with pytest.raises(KeyError, match="no metric 'score' in this epoch; the metrics are: x"):
        final.metrics["score"]
    assert final.metrics.get("score", -1.0) == -1.0


def test_assigned_value_must_be_one_number() -> None:
    metrics = Metrics()
    with pytest.raises(ValueError, match=r"metrics\['x'\]: a metric must be one number, got a tensor of shape \(2,\)"):
        metrics["x"] = torch.zeros(2)
    with pytest.raises((TypeError, ValueError)):
        metrics["x"] = "high"
    metrics["x"] = torch.ones(1, requires_grad=True)
    assert metrics["x"] == 1.0
    del metrics["x"]
    assert len(metrics) == 0


def test_metric_can_be_computed_when_read() -> None:
    loop, value = rein.Loop(lambda state: None), [1.0]
    loop.metrics.compute("computed", lambda: value[0])
    assert loop.run(iterations=1).history[-1].metrics["computed"] == 1.0
    value[0] = 2.0
    assert loop.state.metrics["computed"] == 2.0
    assert loop.state.history[-1].metrics["computed"] == 1.0


def test_metric_added_within_an_epoch_starts_there() -> None:
    loop = rein.Loop(lambda state: {"x": float(state.iteration)})
    loop.iteration_completed(once=2)(lambda state: loop.metric("x", "x", "min"))
    assert loop.run(iterations=4).metrics["x"] == 2.0


def test_history_keeps_the_last_thousand_epochs() -> None:
    final = run([1.0], epochs=1002)
    assert [final.history[0].epoch, final.history[-1].epoch, len(final.history)] == [3, 1002, 1000]


def test_invalid_metric_raises_immediately() -> None:
    loop = rein.Loop(lambda state: None)
    loop.metric("x", "x")
    with pytest.raises(ValueError, match="the loop already has a metric 'x'; choose another name"):
        loop.metric("x", "y")
    with pytest.raises(
        ValueError, match="metric 'y': unknown reduce='mode'; use mean, sum, min, max, last, median or a func"
    ):
        loop.metric("y", "y", reduce="mode")
    with pytest.raises(
        TypeError, match="metric 'y': source must be a key of the step's metrics or a function of the state"
    ):
        loop.metric("y", 3)  # type: ignore[arg-type]  # invalid on purpose
    with pytest.raises(TypeError, match="metric 'y': reduce must be a name or a function, got None"):
        loop.metric("y", "y", reduce=None)  # type: ignore[arg-type]  # invalid on purpose
    with pytest.raises(TypeError, match="the name of a metric must be a string, got 3"):
        loop.metric(3, "y")  # type: ignore[arg-type]  # invalid on purpose
    assert list(loop.metrics) == ["x"]


@pytest.mark.parametrize("name", [0, None, b"loss", ("a", 1)])
def test_metric_name_must_be_a_string(name: Any) -> None:
    with pytest.raises(TypeError, match="the name of a metric must be a string, got"):
        Metrics()[name] = 1.0


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800"])
def test_metric_name_that_files_cannot_store_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="files cannot store it"):
        Metrics()[name] = 1.0
    with pytest.raises(ValueError, match="files cannot store it"):
        Metrics().accumulate(name, "x")


@pytest.mark.parametrize("reduce", ["min", "max"])
@pytest.mark.parametrize("number", [float, torch.tensor])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_extreme_with_a_nan_is_nan_at_any_place(reduce: str, number: Any, place: int) -> None:
    values = [1.0, 3.0]
    values.insert(place, math.nan)
    assert math.isnan(run([number(value) for value in values], reduce=reduce).metrics["x"])


def test_metrics_behave_like_a_mapping() -> None:
    final = run([2.0])
    final.metrics["assigned"] = 3
    assert dict(final.metrics) == {"x": 2.0, "assigned": 3.0}
    assert repr(final.metrics) == "Metrics({'x': 2.0, 'assigned': 3.0})"
    assert ("x" in final.metrics, "assigned" in final.metrics, "z" in final.metrics) == (True, True, False)
    assert repr(final.history[-1].metrics) == "{'x': 2.0}"


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("reduce", "expected"),
    [("mean", 2.5), ("sum", 5.0), ("min", 2.0), ("max", 3.0), ("last", 3.0), (ema(0.5), 2.5), (lambda a, x, n: x, 3.0)],
)
def test_tensor_modified_later_keeps_its_reported_value(reduce: Any, expected: float, kind: torch.dtype) -> None:
    learned = torch.nn.Parameter(torch.tensor(1.0, dtype=kind))

    @rein.Loop
    def loop(state: rein.State) -> None:
        with torch.no_grad():
            learned.add_(1.0)

    loop.metric("x", lambda state: learned, reduce)
    loop.epoch_ended(lambda state: state.metrics.__setitem__("at_end", learned))
    final = loop.run(epochs=2, iterations=2)
    assert [final.history[0].metrics[name] for name in ("x", "at_end")] == [expected, 3.0]


@pytest.mark.parametrize("returned", [None, "1", torch.ones(2), (1.0, 2)])
def test_result_of_reduce_is_checked_in_the_first_iteration(returned: Any) -> None:
    loop = rein.Loop(lambda state: None, iterations=5)
    loop.metric("x", lambda state: 1.0, reduce=lambda accumulated, value, count: returned)
    with pytest.raises(TypeError, match=r"metric 'x': reduce returned .*; return one number"):
        loop.run()
    assert loop.state.iteration == 1


def test_mean_is_weighted() -> None:
    loop = rein.Loop(lambda state: {"loss": float(state.batch)})
    loop.metric("loss", "loss", weight=lambda state: state.batch)
    assert loop.run([1, 2, 3]).metrics["loss"] == pytest.approx((1 + 4 + 9) / 6)


def test_weight_of_other_reduction_raises() -> None:
    with pytest.raises(ValueError, match="weight"):
        rein.Loop(lambda state: None).metric("loss", "loss", "sum", weight=lambda state: 1.0)


def test_mean_with_zero_weights_is_nan() -> None:
    loop = rein.Loop(lambda state: {"loss": 1.0})
    loop.metric("loss", "loss", weight=lambda state: 0.0)
    assert math.isnan(loop.run([1, 2]).metrics["loss"])


def reading(metric: str, epochs: int = 3) -> rein.Loop:
    """Return a loop with the metrics `episode_return` and, from epoch 2 on, `success`, in which an option names one."""
    loop = rein.Loop(lambda state: None, epochs=epochs, iterations=1)
    loop.metric("episode_return", lambda state: 1.0)
    loop.metrics.read_by("the option", metric)

    @loop.epoch_ended(when=lambda state: state.epoch > 1)
    def assign(state: rein.State) -> None:
        state.metrics["success"] = 1.0

    return loop


@pytest.mark.parametrize("name", ["episode_retrun", "Episode-Return", "return", "ep_rew_mean", "reward"])
def test_name_that_resembles_a_metric_raises_after_the_first_epoch(name: str) -> None:
    loop = reading(name)
    with pytest.raises(ValueError, match="did you mean 'episode_return'"):
        loop.run()
    assert loop.state.epoch == 1


def test_other_unknown_name_warns_at_once_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    reading("accuracy").run()
    assert caplog.text.count("the option: no epoch has had a metric 'accuracy' so far") == 2


def test_name_that_is_read_from_the_second_run_on_is_checked_there() -> None:
    loop = reading("accuracy")
    loop.run(epochs=1)
    loop.metrics.read_by("the option", "ep_return")
    with pytest.raises(ValueError, match="did you mean 'episode_return'"):
        loop.run(epochs=3)


def test_loop_without_metrics_warns_of_a_name_at_once_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    loop = rein.Loop(lambda state: None, epochs=3, iterations=1)
    loop.metrics.read_by("the option", "accuracy")
    loop.run()
    assert caplog.text.count("no epoch has had a metric 'accuracy' so far; the metrics are none") == 2


def test_metric_that_comes_later_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    reading("success").run()
    assert caplog.text.count("no epoch has had a metric") == 1


def test_declared_metric_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    loop = reading("success", epochs=1)
    loop.metrics.declare("success")
    loop.run()
    assert "no epoch has had" not in caplog.text


def test_metrics_of_earlier_epochs_are_known_after_a_resume(caplog: pytest.LogCaptureFixture) -> None:
    saved = reading("episode_return")
    saved.run()
    resumed = reading("success", epochs=4)
    resumed.load_state_dict(saved.state_dict())
    caplog.clear()
    resumed.run(epochs=4)
    assert "no epoch has had" not in caplog.text
