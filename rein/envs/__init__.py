"""Environments: native tasks on tensors, N at once on any device, and adapters. The names are in `__init__.pyi`."""

from rein.lazy import export

export(__name__)
