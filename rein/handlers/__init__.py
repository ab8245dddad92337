"""Handlers, each a function of a loop. The names are in `__init__.pyi`; docs/handlers.md shows each in use."""

from rein.lazy import export

export(__name__)
