"""Signals at random moments of `rein train`: documented exit codes, messages and files, and an exact resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rein
from rein.store.checkpoint_file import read_checkpoint
from tests import programs

SIGNALLED = Path(__file__).with_name("signalled.py")


def ran(folder: Path, kind: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    done = programs.run(SIGNALLED, folder, kind, count, seed)
    return [json.loads(line) for line in done.stdout.splitlines()]


def table(run: Path) -> torch.Tensor:
    latest = (run / "checkpoints/latest").read_text().strip()
    return read_checkpoint(run / "checkpoints" / latest).state["parts"]["agent"]["table"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    ran(folder, "NONE", 0)
    return folder / "run"


KINDS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129, "SIGXCPU": 152, "SIGUSR1": 0, "SIGUSR2": 0, "TWICE": 130}


@pytest.mark.default_cases("SIGTERM-143", "TWICE-130")
@pytest.mark.parametrize(("kind", "status"), KINDS.items())
def test_signal_ends_or_saves_the_run_without_loss(tmp_path, scale, whole, kind, status):
    count = scale(10, 2)
    reports = ran(tmp_path, kind, count)
    assert len(reports) == count
    obeyed = 0
    for number, one in enumerate(reports):
        run = tmp_path / str(number) / "run"
        where = f"{kind} {number}: {one}"
        assert one["status"] in (status, 0), where  # 0 if the run ended first
        obeyed += one["status"] == status
        assert one["resumed"] == 0, where
        if one["status"] and kind != "TWICE":
            assert one["text"].removesuffix("\x1b[?25h").rstrip().endswith(f"continue with: rein resume {run}"), where
            assert f"rein: {kind}: the run ends after this iteration and is saved" in one["text"], where
        if kind == "TWICE":
            assert one["seconds"] < 1, where
        if one["terminal"]:
            assert one["text"].rfind("\x1b[?25h") >= one["text"].rfind("\x1b[?25l"), f"the cursor stays hidden: {where}"
        assert torch.equal(table(run), table(whole)), where
        assert rein.open_run(run).epochs["number"].tolist() == list(range(1, 25)), where
        assert not list(run.rglob(".*.tmp-*")), where
    assert obeyed >= count * 2 // 3
    print(f"{kind}: {obeyed} of {count} ended with {status}, {count} of {count} as without it in the end")
