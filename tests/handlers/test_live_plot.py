from __future__ import annotations

import base64
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import rein

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Stand-in for the kernel of a notebook: all states of the display."""
    states: list[dict[str, str]] = []
    handle = SimpleNamespace(update=lambda bundle, raw: states.append(bundle))

    def display(bundle: dict[str, str], raw: bool, display_id: bool) -> Any:
        states.append(bundle)
        return handle

    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object, version_info=(9, 0)))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    return states


def make() -> rein.Loop:
    loop = rein.Loop(lambda state: state.clocks.advance(env_steps=10), epochs=4, iterations=2)
    loop.metric("episode_return", lambda state: math.nan if state.epoch == 2 else float(state.epoch))
    return loop


def curves(figure: Any) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each plot, by the name in its title."""
    return {axes.get_title(loc="left").split()[0]: axes.lines[0].get_xydata().tolist() for axes in figure.axes}


def test_each_metric_has_a_curve_without_nan() -> None:
    loop = make()

    def late(state: rein.State) -> None:
        if state.epoch >= 3:
            state.metrics["late"] = 5.0

    figure = rein.handlers.live_plot(loop, ["episode_return", "late", "never"])
    loop.epoch_ended(late)  # after the plot
    loop.run()
    assert curves(figure) == {"episode_return": [[20, 1], [60, 3], [80, 4]], "late": [[60, 5], [80, 5]]}


def test_clock_and_filters_select_the_points() -> None:
    loop = make()
    figure = rein.handlers.live_plot(loop, "episode_return", clock="epochs", every=2)
    loop.run()
    assert curves(figure) == {"episode_return": [[4, 4]]}


def test_notebook_shows_one_image_that_is_replaced(notebook: list[dict[str, str]]) -> None:
    loop = make()
    rein.handlers.live_plot(loop, seconds=0.0)
    loop.run()
    assert len(notebook) == 6, "at the start, after each epoch, and at the end"
    assert all(base64.b64decode(state["image/png"]).startswith(b"\x89PNG") for state in notebook)


def test_drawing_is_limited_by_time(notebook: list[dict[str, str]]) -> None:
    loop = make()
    rein.handlers.live_plot(loop, seconds=1e6)
    loop.run()
    assert len(notebook) == 3, "at the start, after the first epoch, and at the end"


def test_unknown_clock_and_missing_metrics_raise() -> None:
    with pytest.raises(ValueError, match="unknown clock"):
        rein.handlers.live_plot(make(), clock="steps")
    with pytest.raises(ValueError, match="metrics"):
        rein.handlers.live_plot(make(), [])
