from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest

import rein


def test_cores_are_unknown_without_measurable_time(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = SimpleNamespace(perf_counter=lambda: 1.0, process_time=lambda: 1.0)
    monkeypatch.setattr(sys.modules["rein.handlers.watchdog"], "time", frozen)
    loop = rein.Loop(lambda state: None, iterations=3)
    rein.handlers.resource_usage(loop)
    assert math.isnan(loop.run().history[-1].metrics["cpu_cores"])


def test_resource_usage_reports_processor_and_memory() -> None:
    loop = rein.Loop(lambda state: sum(range(1000)), epochs=4, iterations=3)
    rein.handlers.resource_usage(loop, every=2)
    loop.run()
    reported = [{"cpu_cores", "memory_gb"} <= record.metrics.keys() for record in loop.state.history]
    assert reported == [False, True, False, True]
    last = loop.state.history[-1].metrics
    assert last["cpu_cores"] >= 0 and 0.001 < last["memory_gb"] < 1000
