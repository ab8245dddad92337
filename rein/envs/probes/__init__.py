"""Probes: small environments with known optimal returns, each of which tests one part of an algorithm.

The exported names are in `__init__.pyi`.
"""

from rein.lazy import export

export(__name__)
