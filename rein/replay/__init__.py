"""Rollouts and replay buffers. The names are in `__init__.pyi`."""

from rein.lazy import export

export(__name__)
