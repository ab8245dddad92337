"""Environments: native tasks in torch, which step N environments at once on any device, and adapters for Gymnasium.

The exported names are in `__init__.pyi`.
"""

from rein.lazy import export

export(__name__)
