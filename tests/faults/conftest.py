"""Size of the fault tests: a fast selection by default, all of them in `make test-faults`."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def scale() -> Callable[[int, int], int]:
    """Return `scale(full, fast)`: the first value in `make test-faults`, which sets REIN_FAULTS, else the second."""
    full = bool(os.environ.get("REIN_FAULTS"))
    return lambda many, few: many if full else few
