"""Filling a replay with transitions that were recorded before.

Shapes: B rows one after the other, S slots in time, N environments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rein.buffers.replay import Replay
from rein.ops.trees import leaves, map_tree
from rein.types import Transition, Tree


def pairs(chunks: Iterable[Transition]) -> Iterator[tuple[Transition, Transition | None]]:
    """Each chunk with the one after it; None after the last. Those without rows are left out."""
    before: Transition | None = None
    for chunk in chunks:
        if chunk.reward is not None and not len(chunk.reward):
            continue
        if before is not None:
            yield before, chunk
        before = chunk
    if before is not None:
        yield before, None


def together(chunks: Iterable[Transition]) -> Transition:
    """All of them as one. Raises ValueError where there are none."""
    first, *rest = list(chunks) or [None]
    if first is None:
        raise ValueError("there are no transitions to fill a replay with")
    return map_tree(lambda *columns: torch.cat(columns), first, *rest)


def extend(replay: Replay, transitions: Transition, num_envs: int = 1, following: Transition | None = None) -> int:
    """Append transitions (B, ...) that were recorded one after the other; returns how many of them are valid.

    They become the rows of `num_envs` environments, each of which has a stretch of them. A row whose next observation
    is not the observation of the row after it is marked as truncated, so no n-step return reaches into another episode,
    environment or stretch. After the last row of one environment comes `following`, if that is appended next. What the
    agent said along with its actions is not kept.

    Raises ValueError for transitions that lack a field or differ from those before, for another number of environments
    than before, and where the replay is too small: what is recorded is not to be overwritten unseen.
    """
    replay.flush()
    rows = _columns(transitions)
    if not len(rows["reward"]):
        return 0
    rows = map_tree(lambda column: _stretches(column.to(replay.device), num_envs), rows)
    count, padding = len(rows["reward"]), -len(transitions.reward) % num_envs
    if padding:
        rows["valid"] = rows["valid"].clone()
        rows["valid"][count - padding :, -1] = False
    after = following.observation if following is not None and num_envs == 1 else None
    rows["truncated"] = rows["truncated"] | ~(rows["terminated"] | _followed(rows, after))
    _make_room(replay, rows, count, num_envs)
    for first, last in _turns(replay, count):
        replay._write(map_tree(lambda column, a=first, b=last: column[a:b], rows), last - first)
    return int(rows["valid"].sum())


def _columns(transitions: Transition) -> dict[str, Tree]:
    row = transitions._asdict()
    row.pop("extras")
    if absent := [name for name, column in row.items() if column is None]:
        raise ValueError(f"the transitions have no {', '.join(absent)}: record, or ask for, every field")
    row["reward"] = row["reward"].to(torch.float32)
    return row


def _stretches(column_B: Tensor, num_envs: int) -> Tensor:
    """(S, N, ...), each environment with a stretch of the rows; the last row is repeated where there are too few."""
    if num_envs == 1:
        return column_B.unsqueeze(1)
    slots = -(-len(column_B) // num_envs)
    row_NS = torch.arange(slots * num_envs, device=column_B.device).clamp_(max=len(column_B) - 1)
    return column_B[row_NS.view(num_envs, slots).t()]


def _followed(rows: Mapping[str, Tree], following: Tree = None) -> Tensor:
    """(S, N) bool: whether what comes after a row is what the next slot begins with, the last one with `following`."""
    found = torch.zeros_like(rows["truncated"])
    found[:-1] = True
    if following is not None:
        is_last = map_tree(lambda b, a: torch.equal(a[-1, 0], b[0]), following, rows["next_observation"])
        found[-1] = all(same for _, same in leaves(is_last))
    equal = map_tree(lambda b, a: b[1:] == a[:-1], rows["observation"], rows["next_observation"])
    for _, same in leaves(equal):
        found[:-1] &= same.flatten(2).all(2) if same.ndim > 2 else same
    return found


def _make_room(replay: Replay, rows: dict[str, Any], count: int, num_envs: int) -> None:
    first = map_tree(lambda column: column[0], rows)
    if replay._packing is None:
        replay._allocate(first)
    if replay.num_envs != num_envs:
        raise ValueError(f"the replay holds rows of {replay.num_envs} environments: give num_envs={replay.num_envs}")
    replay._packed().check(first)
    if replay.filled + count > replay.slots:
        raise ValueError(
            f"the replay has room for {replay.slots * num_envs:,} transitions, and there are at least "
            f"{(replay.filled + count) * num_envs:,}: build the agent with a larger capacity"
        )


def _turns(replay: Replay, count: int) -> Iterator[tuple[int, int]]:
    """Which of the slots that are to come are written at once: a ring has an end."""
    first = 0
    while first < count:
        last = min(count, first + replay.slots - replay.next_slot)
        yield first, last
        first = last
