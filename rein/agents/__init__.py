"""Agents, one file per algorithm; the names are in `__init__.pyi`."""

from rein.lazy import export

export(__name__)
