"""How much is done: a fast selection with the other tests, all of it in `make test-faults`."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def scale() -> Callable[[int, int], int]:
    """`scale(full, fast)`: the first in `make test-faults`, which sets REIN_FAULTS, the second otherwise."""
    full = bool(os.environ.get("REIN_FAULTS"))
    return lambda many, few: many if full else few
