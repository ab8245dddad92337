"""`profile`: traces of torch.profiler."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rein
from rein.episodes import PHASES
from tests import programs


def make() -> rein.Loop:
    return rein.Loop(lambda state: {"loss": torch.ones(4, 4) @ torch.ones(4, 4)}, iterations=8)


def steps_in(path: Path) -> set[str]:
    events: list[Any] = json.loads(path.read_text())["traceEvents"]
    return {event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")}


def test_trace_has_chosen_iterations_and_their_operations(tmp_path: Path) -> None:
    loop, path = make(), tmp_path / "new" / "trace.json"
    rein.handlers.profile(loop, path, skip=3, iterations=2)
    loop.run()
    assert steps_in(path) == {"ProfilerStep#3", "ProfilerStep#4"}
    assert "aten::mm" in path.read_text()


def test_trace_has_a_span_for_each_phase(tmp_path: Path) -> None:
    environment, path = rein.envs.CartPole(2, seed=0), tmp_path / "trace.json"
    loop = rein.training_loop(rein.PPO(environment, seed=0), environment, iterations=6)

    @loop.observation_recorded
    def handler(state: rein.State) -> None:
        with torch.profiler.record_function("handler"):
            pass

    rein.handlers.profile(loop, path, skip=2, iterations=2)
    loop.run(epochs=1)
    events: list[Any] = json.loads(path.read_text())["traceEvents"]
    spans = sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") == "user_annotation")
    first = [(begin, length, name) for begin, length, name in spans if begin < spans[0][0] + spans[0][1]]
    begin, *_ = next(span for span in first if span[-1] == "handler")
    assert [name for *_, name in first if name in PHASES] == [*PHASES]
    assert [name for start, length, name in first[1:] if start < begin < start + length] == ["observation_recorded"]


def test_run_that_ends_early_writes_its_iterations(tmp_path: Path) -> None:
    loop, path = make(), tmp_path / "trace.json"
    rein.handlers.profile(loop, path, skip=6, iterations=10)
    loop.run()
    assert {"ProfilerStep#6", "ProfilerStep#7"} <= steps_in(path)


def test_run_that_fails_writes_its_iterations(tmp_path: Path) -> None:
    loop, path = make(), tmp_path / "trace.json"
    rein.handlers.profile(loop, path, skip=1)

    @loop.iteration_completed(once=4)
    def fail(state: rein.State) -> None:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        loop.run()
    assert steps_in(path)


@pytest.mark.parametrize("option", ["skip", "iterations"])
def test_zero_raises(option: Any) -> None:
    with pytest.raises(ValueError, match=option):
        rein.handlers.profile(make(), **{option: 0})


def test_second_profile_at_the_same_time_raises(tmp_path: Path) -> None:
    loop = make()
    rein.handlers.profile(loop, tmp_path / "a.json", skip=1, iterations=2)
    rein.handlers.profile(loop, tmp_path / "b.json", skip=1, iterations=2)
    with pytest.raises(RuntimeError, match="another"):
        loop.run()


def test_run_shorter_than_the_skipped_iterations_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = make()
    rein.handlers.profile(loop, tmp_path / "trace.json", skip=10)
    loop.run()
    assert "no trace" in caplog.text
    assert not (tmp_path / "trace.json").exists()


CUT = """
import resource, sys
import torch
import rein
from rein.errors import StoreError

resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # like a full disk
loop = rein.Loop(lambda state: {"loss": torch.ones(4, 4) @ torch.ones(4, 4)}, iterations=8)
rein.handlers.profile(loop, sys.argv[1], skip=1, iterations=2)
try:
    loop.run()
except StoreError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of the system")
def test_full_disk_raises_and_keeps_the_previous_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("{}")
    output = programs.run("-c", CUT, tmp_path / "trace.json").stdout
    assert output.startswith(f"{tmp_path / 'trace.json'}: ")
    assert "disk" in output
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("trace.json", "{}")]


def test_trace_can_be_compressed(tmp_path: Path) -> None:
    loop, path = make(), tmp_path / "trace.json.gz"
    rein.handlers.profile(loop, path, skip=1, iterations=2)
    loop.run()
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
