"""What all pictures share: a figure, whether there is a screen for it, colours, and text that may be anybody's."""

from __future__ import annotations

from typing import Any

# Okabe & Ito 2008: told apart by eyes of every kind; the line styles tell them apart without colour
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
SCALE = "cividis"  # of one hue to eyes of every kind, from dark to light
_PAPER = ("agg", "cairo", "pdf", "pgf", "ps", "svg", "template")  # backends that have no window


def make_figure(width: float, height: float, *, on_screen: bool = False) -> Any:
    """A figure of that size in inches; one that `matplotlib.pyplot.show()` shows, if `on_screen`.

    Raises ImportError without the extra `plot`.
    """
    _require()
    if on_screen:
        from matplotlib import pyplot

        return pyplot.figure(figsize=(width, height), layout="constrained")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def has_screen() -> bool:
    """Whether matplotlib can open a window here. Raises ImportError without the extra `plot`."""
    _require()
    from matplotlib import pyplot

    return pyplot.get_backend().lower() not in _PAPER


def readable(text: str) -> str:
    """Text from a file as a label: nothing in it is a formula to matplotlib, and all of it can be shown."""
    return "".join(character if character.isprintable() else "?" for character in text).replace("$", r"\$")


def short_number(value: float, _: Any = None) -> str:
    """A number as an axis of large counts says it: 1500000 is 1.5M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"


def _require() -> None:
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from error
