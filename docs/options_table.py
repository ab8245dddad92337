"""Sphinx directive `options`: the options of an agent as a table, from their declarations.

Its argument is the class, for example `rein.PPO`.
"""

from __future__ import annotations

import importlib
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from rein.options import options_of

HEADER = ("option", "type", "default", "meaning")


def rows(kind: type) -> list[tuple[str, str, Any, str, bool]]:
    """Return name, type, default, help and whether it is fixed. Options of the class come before inherited ones."""
    options = options_of(kind)
    names: dict[str, None] = {}
    for base in kind.__mro__:
        names |= dict.fromkeys(name for name in vars(base).get("__annotations__", ()) if name in options)
    found = (options[name] for name in names)
    return [(each.name, str(each.type), each.default, each.metadata["help"], each.metadata["fixed"]) for each in found]


class OptionsTable(Directive):
    """Table of the options of the class that the argument names."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        module, _, name = self.arguments[0].rpartition(".")
        group = nodes.tgroup("", cols=len(HEADER))
        group += [nodes.colspec(colwidth=width) for width in (22, 18, 14, 46)]
        group += nodes.thead("", _row(*(nodes.paragraph(text=title) for title in HEADER)))
        body = nodes.tbody()
        for option, kind, default, meaning, fixed in rows(getattr(importlib.import_module(module), name)):
            label = nodes.paragraph("", "", nodes.literal(text=option), nodes.Text("" if fixed else " *"))
            values = (nodes.paragraph("", "", nodes.literal(text=text)) for text in (kind, repr(default)))
            body += _row(label, *values, nodes.paragraph(text=meaning))
        group += body
        note = nodes.paragraph(text="* can be assigned during a run, for example ")
        note += [nodes.literal(text="agent.learning_rate = 1e-4"), nodes.Text(".")]
        return [nodes.table("", group, classes=["options"]), note]


def _row(*cells: nodes.Node) -> nodes.row:
    return nodes.row("", *(nodes.entry("", cell) for cell in cells))


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("options", OptionsTable)
    return {"parallel_read_safe": True}
