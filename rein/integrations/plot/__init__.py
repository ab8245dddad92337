"""Pictures with matplotlib: learning curves with bands over seeds, fields of episodes, paths and values on a board.

Every function draws on axes that it is given, so what they draw goes into any figure. The extra is `plot`.
"""

from rein.integrations.plot.curves import Band, Curve, band, curve_of, draw_curves
from rein.integrations.plot.fields import draw_field
from rein.integrations.plot.figures import has_screen, make_figure
from rein.integrations.plot.gridworld import draw_paths, draw_values

__all__ = [
    "Band",
    "Curve",
    "band",
    "curve_of",
    "draw_curves",
    "draw_field",
    "draw_paths",
    "draw_values",
    "has_screen",
    "make_figure",
]
