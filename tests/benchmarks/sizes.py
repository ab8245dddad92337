"""Sizes of the benchmarks. They are tiny if the environment variable REIN_TINY_BENCHMARKS is set, as in their test."""

from __future__ import annotations

import os
from typing import Any


def size(full: Any, tiny: Any) -> Any:
    """Return the size of a measurement, or the tiny one. Child processes of a benchmark inherit the variable."""
    return tiny if os.environ.get("REIN_TINY_BENCHMARKS") else full
