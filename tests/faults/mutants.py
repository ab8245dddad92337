"""Mutants of trajectory files, as an attacker or a broken disk could make them. See `make_mutant`.

The functions in `KINDS` change the layout or the tables of a file, the others change bytes.
"""

from __future__ import annotations

import hashlib
import random
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rein.store.format.sealed import USER_BLOCK
from rein.store.hdf5 import HDF5Store
from rein.testing.store import make_trajectory
from rein.types import Trajectory

ODD_FILES = runpy.run_path(str(Path(__file__).with_name("odd_tables.py")))
KINDS, ODD = ODD_FILES["KINDS"], ODD_FILES["ODD"]
File, sealed = (ODD_FILES["LAYOUTS"][name] for name in ("File", "sealed"))
NAME = "000001-000002.h5"


def with_odd_block(whole: bytes, draw: random.Random) -> bytes:
    """Put an invalid user block before a valid image."""
    block, image = whole[:USER_BLOCK], whole[USER_BLOCK:]
    sha256 = hashlib.sha256(image).hexdigest().encode()
    header = b"#rein-hdf5 format %s\nlength %s\nsha256 %s\n"
    blocks = [
        block.replace(b"format 2", draw.choice([b"format 0", b"format 1", b"format 999999999", b"format -1"])),
        header % (b"2", str(draw.choice([*ODD, 10**30, len(image) + 1])).encode(), sha256),
        header % (b"2", str(len(image)).encode(), sha256.upper()),
        header % (b"2", b"0" * 10 + str(len(image)).encode(), sha256),
        header % (b"9" * 400, b"1", sha256),
        block.rstrip(b"\0") + draw.randbytes(100),
        b"",
        draw.randbytes(USER_BLOCK),
    ]
    return draw.choice(blocks)[:USER_BLOCK].ljust(draw.choice([USER_BLOCK, USER_BLOCK, 1024, 0]), b"\0") + image


def with_odd_end(whole: bytes, draw: random.Random) -> bytes:
    """Append noise, or the last line of a checkpoint or of another layout."""
    lines = [
        b"#rein-state about 600 10 structure 700 10\n",
        b"#rein-state about 000000000000000600 000000000000000010 structure 000000000000000700 000000000000000010\n",
        b"\n#rein-layout 000000000000000000\n",
        b"[" * 2000 + b"\n#rein-layout 000000000000002000\n",
        b"\n#rein-layout 999999999999999999\n",
        draw.randbytes(4096),
    ]
    return whole + draw.choice(lines)


def with_odd_bytes(whole: bytes, draw: random.Random) -> bytes:
    """Change bits and bytes; zero, copy, insert or truncate blocks. Half of the changes are near the layout."""
    content = bytearray(whole)
    for _ in range(draw.choice([1, 1, 2, 5])):
        how, at = (
            draw.randrange(6),
            draw.choice([draw.randrange(len(content)), draw.randrange(max(0, len(content) - 4000), len(content))]),
        )
        size = draw.randrange(1, 600)
        if how == 0:
            content[at] ^= 1 << draw.randrange(8)
        elif how == 1:
            content[at] = draw.randrange(256)
        elif how == 2:
            content[at : at + size] = bytes(len(content[at : at + size]))
        elif how == 3:
            other = draw.randrange(len(content))
            content[at : at + size] = content[other : other + size]
        elif how == 4:
            content[at:at] = draw.randbytes(size)
        elif len(content) > 1000:
            del content[draw.randrange(600, len(content)) :]
    return bytes(content)


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bytes": with_odd_bytes,
    "user block": with_odd_block,
    "end": with_odd_end,
}


def make_epoch(epoch: int, steps: int, num_envs: int) -> Trajectory:
    """Return an epoch with consistent rows and episodes: every environment ends its episode in the last row."""
    made = make_trajectory(epoch, steps=steps, num_envs=num_envs)
    fields: dict[str, Any] = dict(made.fields)
    terminated = fields["terminated"].new_zeros(steps, num_envs)
    fields["truncated"], fields["terminated"] = terminated.clone(), terminated
    terminated[-1] = True
    episodes = made.episodes._replace(
        first_step=made.episodes.last_step + 1 - steps,
        length=np.full(num_envs, steps),
        episode_return=fields["reward"].double().sum(0).numpy(),
    )
    return made._replace(fields=fields, episodes=episodes)


def make_bases(folder: Path) -> list[bytes]:
    """Return valid files to mutate: small ones, which are mostly metadata, and one with compressed fields."""
    made = []
    for steps, num_envs in ((3, 2), (1, 1), (300, 3)):
        store = HDF5Store(folder / f"base-{steps}")
        for epoch in (1, 2):
            store.append(make_epoch(epoch, steps, num_envs))
        store.close()
        made.append((store.path / "trajectories" / NAME).read_bytes())
    return made


def make_mutant(number: int, draw: random.Random, bases: list[bytes], path: Path) -> str:
    """Write mutant `number` to `path` and return its kind.

    Even mutants have a correct hash, odd ones the hash of their base. The first `2 * len(KINDS)` mutants are each kind
    with both hashes. After that, every second pair changes bytes.
    """
    whole = draw.choice(bases)
    if number < 2 * len(KINDS) or number % 4 < 2:
        name = [*KINDS][number // 2 % len(KINDS)] if number < 2 * len(KINDS) else draw.choice([*KINDS])
        file = File(whole)
        KINDS[name](file, draw)
        content = file.whole() if number % 2 == 0 else whole[:USER_BLOCK] + file.whole()[USER_BLOCK:]
    else:
        name = draw.choice(["bytes"] * 6 + ["user block", "end"])
        content = BYTES[name](whole, draw)
    if number % 2 == 0 and name in ("bytes", "end"):
        content = sealed(content)
    path.write_bytes(content)
    return name
