from __future__ import annotations

import io
import math

import pytest

from rein.handlers.log import log
from rein.handlers.output import table
from rein.handlers.record_solved import record_solved
from rein.loop import Loop
from rein.loop.state import State


def lines(loop: Loop, epochs: int = 1, iterations: int = 1, **options: object) -> list[str]:
    """Return the lines that `log(loop, **options)` writes during a run."""
    file = io.StringIO()
    log(loop, file=file, **options)  # type: ignore[arg-type]  # each test's own options
    loop.run(epochs=epochs, iterations=iterations)
    return file.getvalue().splitlines()


def test_default_table_has_counters_and_all_metrics() -> None:
    def step(state: State) -> None:
        state.clocks.advance(env_steps=64)
        state.metrics["episode_return"] = -10.25

    loop = Loop(step)
    loop.metric("loss", lambda state: 1 / 3)
    written = lines(loop, epochs=3, iterations=200)
    assert written[-3:] == [
        "epoch 3  iteration 200  env_steps 38,400",
        "  train  episode_return  -10.25",
        "  loss   loss            0.3333",
    ]
    assert len(written) == 9


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (475.0, "475"),
        (-0.5, "-0.5"),
        (12345.678, "12,346"),
        (1.25e-7, "1.25e-07"),
        (1e300, "1e+300"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_short_and_readable(value: float, text: str) -> None:
    loop = Loop(lambda state: None)
    loop.metric("value", lambda state: value, reduce="last")
    assert lines(loop) == ["epoch 1  iteration 1", f"  train  value  {text}"]


METRICS = {"episode_return": 475.0, "entropy": 0.5, "policy_loss": -0.001, "value_loss": 12.5, "kl": math.nan}
METRICS |= {"updates_per_second": 1234.5, "mine/score": 3.0, "evaluation_return": 500.0}


@pytest.mark.parametrize("width", [20, 60, 80, 140])
def test_table_groups_metrics_and_fits_the_width(width: int) -> None:
    title, *rows = table("epoch 1", METRICS, width).splitlines()
    assert title == "epoch 1"
    assert [row.split()[0] for row in rows if row[2] != " "] == ["train", "evaluation", "loss", "time", "mine"]
    assert (len(rows) == 5) == (width >= 60), "one row per group if two columns fit"
    assert max(map(len, rows)) <= max(width, 40)
    assert "kl" not in "".join(rows)
    assert len({row.index(text) for row in rows for text in ("policy", "return ", "updates/s") if text in row}) <= 2


@pytest.mark.parametrize(("stops", "last"), [(1, "not solved"), (3, "solved")])
def test_last_line_says_whether_the_target_was_reached(stops: int, last: str) -> None:
    loop = Loop(lambda state: None)
    loop.metric("score", lambda state: state.epoch)
    record_solved(loop, "score", at_least=2.5)
    written = lines(loop, epochs=stops)
    assert written[-1].endswith(f": {last}")
    assert "after 0:00" in written[-1]


def test_custom_message_event_and_filters() -> None:
    loop = Loop(lambda state: None)
    written = lines(
        loop, iterations=9, message=lambda state: f"at {state.iteration}", event="iteration_completed", every=4
    )
    assert written == ["at 4", "at 8"]


def test_standard_output_is_resolved_when_writing(capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop(lambda state: None)
    log(loop)
    loop.run(iterations=1)
    assert capsys.readouterr().out == "epoch 1  iteration 1\n"


def test_each_line_is_flushed() -> None:
    class Pipe(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    pipe = Pipe()
    loop = Loop(lambda state: None)
    log(loop, file=pipe)
    loop.run(iterations=1)
    assert pipe.flushed == "epoch 1  iteration 1\n"


def test_error_in_message_ends_the_run() -> None:
    loop, ends = Loop(lambda state: None), []
    log(loop, lambda state: str(state.metrics["los"]))
    loop.metric("loss", lambda state: 0.0)
    loop.on("completed", "halted", "failed")(lambda state: ends.append(state.status))
    with pytest.raises(KeyError, match="no metric 'los' in this epoch; the metrics are: loss") as error:
        loop.run(iterations=1)
    assert ends == ["failed"]
    assert any("on epoch_ended, epoch 1" in note for note in error.value.__notes__)


def test_message_must_return_a_string() -> None:
    loop = Loop(lambda state: None)
    log(loop, lambda state: None)  # type: ignore[arg-type, return-value]  # wrong on purpose
    with pytest.raises(TypeError, match="returned None; it must return a string"):
        loop.run(iterations=1)


class Broken(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "No space left"), ValueError("closed"), KeyError()])
def test_write_error_does_not_end_the_run(caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    loop = Loop(lambda state: None)
    log(loop, file=Broken(error))
    assert loop.run(epochs=3, iterations=1).status == "completed"
    assert caplog.text.count("could not be written") == 1


def test_characters_outside_the_encoding_are_escaped() -> None:
    data = io.BytesIO()
    loop = Loop(lambda state: None)
    loop.metric("\N{GREEK SMALL LETTER LAMDA}", lambda state: 1.0)
    log(loop, file=io.TextIOWrapper(data, encoding="ascii"))
    assert loop.run(iterations=1).status == "completed"
    assert data.getvalue() == b"epoch 1  iteration 1\n  train  \\u03bb  1\n"


def test_invalid_options_raise() -> None:
    loop = Loop(lambda state: None)
    with pytest.raises(TypeError, match="expected a function of the state that returns a line, got 'epoch'"):
        log(loop, "epoch")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="no event 'epoch_end'; did you mean"):
        log(loop, event="epoch_end")
    with pytest.raises(TypeError, match="unknown filter"):
        log(loop, often=3)
    assert not any(event.handlers for event in loop.events.values())
