"""`profile`: traces of torch.profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rein


def make() -> rein.Loop:
    return rein.Loop(lambda state: {"loss": torch.ones(4, 4) @ torch.ones(4, 4)}, iterations=8)


def steps_in(path: Path) -> set[str]:
    events: list[Any] = json.loads(path.read_text())["traceEvents"]
    return {event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")}


def test_trace_has_chosen_iterations_and_their_operations(tmp_path: Path) -> None:
    loop, path = make(), tmp_path / "new" / "trace.json"
    rein.profile(loop, path, skip=3, iterations=2)
    loop.run()
    assert steps_in(path) == {"ProfilerStep#3", "ProfilerStep#4"}
    assert "aten::mm" in path.read_text()


def test_run_that_ends_early_writes_its_iterations(tmp_path: Path) -> None:
    loop, path = make(), tmp_path / "trace.json"
    rein.profile(loop, path, skip=6, iterations=10)
    loop.run()
    assert {"ProfilerStep#6", "ProfilerStep#7"} <= steps_in(path)


def test_run_that_fails_writes_its_iterations(tmp_path: Path) -> None:
    loop, path = make(), tmp_path / "trace.json"
    rein.profile(loop, path, skip=1)

    @loop.iteration_completed(once=4)
    def fail(state: rein.State) -> None:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        loop.run()
    assert steps_in(path)


@pytest.mark.parametrize("option", ["skip", "iterations"])
def test_zero_raises(option: Any) -> None:
    with pytest.raises(ValueError, match=option):
        rein.profile(make(), **{option: 0})


def test_second_profile_at_the_same_time_raises(tmp_path: Path) -> None:
    loop = make()
    rein.profile(loop, tmp_path / "a.json", skip=1, iterations=2)
    rein.profile(loop, tmp_path / "b.json", skip=1, iterations=2)
    with pytest.raises(RuntimeError, match="another"):
        loop.run()


def test_run_shorter_than_the_skipped_iterations_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = make()
    rein.profile(loop, tmp_path / "trace.json", skip=10)
    loop.run()
    assert "no trace" in caplog.text
    assert not (tmp_path / "trace.json").exists()
