"""Some of the rows of a batch whose columns all lie along the rows."""

from __future__ import annotations

from typing import Any, TypeVar

Batch = TypeVar("Batch", bound=tuple[Any, ...])


def take_rows(batch: Batch, index: Any) -> Batch:
    """Some of the rows, a slice or a tensor of their numbers; a column that is None stays so."""
    columns = (None if column is None else column[index] for column in batch)
    return type(batch)(*columns)  # type: ignore[arg-type]  # columns in their order
