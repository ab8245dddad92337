"""Handlers, each a function of a loop. docs/reference/handlers.md shows each in use."""

from rein.lazy import export

export(__name__)
