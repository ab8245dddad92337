"""Trajectory files with a layout that rein never writes. Each function in `KINDS` makes one change."""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from rein.store.format.layout import encode
from rein.store.format.sealed import USER_BLOCK, user_block

ODD = (-(2**63), -(2**40), -1, 0, 1, 7, 2**31, 2**40, 2**62, 2**63 - 1)
JUNK: tuple[Any, ...] = (None, True, -1, 0, 10**30, 0.5, "", "x", [], {}, [1], {"x": 1}, [[]])
TABLES = ("number", "first_row", "length", "first_step", "part", "parts")
EPISODES = ("id", "environment", "first_step", "last_step", "seed", "length", "epoch")
ACTION, REWARD = "trajectory/action", "trajectory/reward"


def sealed(content: bytes) -> bytes:
    """Return a file with a correct hash."""
    image = content[USER_BLOCK:]
    return user_block(len(image), hashlib.sha256(image).hexdigest()) + image


class File:
    """Trajectory file whose data and layout can be changed."""

    def __init__(self, whole: bytes) -> None:
        length = int(whole[-19:-1])
        end = len(whole) - len(encode({})) + 2  # of the layout's JSON
        self.layout: dict[str, Any] = json.loads(whole[end - length : end])
        self.data = bytearray(whole[: end - length])
        self.datasets: dict[str, Any] = self.layout["datasets"]

    def pick(self, draw: random.Random) -> str:
        """Return the path of a dataset."""
        return draw.choice([*self.datasets])

    def groups(self) -> list[str]:
        """Return the paths of all groups."""
        parts = [path.split("/") for path in self.datasets]
        return sorted({"/".join(names[:depth]) for names in parts for depth in range(1, len(names))})

    def read(self, path: str) -> np.ndarray:
        """Return the entries of a dataset with at most one chunk."""
        described = self.datasets[path]
        dtype, shape = np.dtype(described["dtype"]), described["shape"]
        if "chunk" not in described:
            count = int(np.prod(shape))
            return np.frombuffer(self.data, dtype, count, described["offset"]).reshape(shape).copy()
        ((offset, length),) = described["chunks"]
        raw = np.frombuffer(zlib.decompress(self.data[offset : offset + length]), np.uint8)
        return np.ascontiguousarray(raw.reshape(dtype.itemsize, -1).T).view(dtype).reshape(shape)

    def add(self, data: bytes) -> list[int]:
        """Append bytes. Returns their offset and length."""
        self.data += bytes(-len(self.data) % 64)
        self.data += data
        return [len(self.data) - len(data), len(data)]

    def put(self, path: str, array: np.ndarray, packed: bool = False) -> None:
        """Replace a dataset. With `packed`, the new one is compressed as one chunk."""
        shape = [*array.shape]
        described: dict[str, Any] = {"shape": shape, "dtype": array.dtype.str}
        if packed:
            raw = np.frombuffer(array.tobytes(), np.uint8).reshape(-1, array.itemsize)
            place = self.add(zlib.compress(raw.T.tobytes(), 1))
            described |= {"chunk": shape, "filters": ["shuffle", "gzip"], "chunks": [place]}
        else:
            described["offset"] = self.add(array.tobytes())[0]
        self.datasets[path] = described

    def set(self, path: str, value: Any, index: Any = ...) -> None:
        """Change entries of a dataset."""
        array = self.read(path)
        array[index] = value
        self.put(path, array)

    def remove(self, path: str) -> None:
        """Remove a dataset, or all datasets of a group."""
        for name in [name for name in self.datasets if name == path or name.startswith(f"{path}/")]:
            del self.datasets[name]

    def whole(self, layout: Any = None) -> bytes:
        """Return the file with a correct hash."""
        return sealed(bytes(self.data) + encode(self.layout if layout is None else layout))


Change = Callable[[File, random.Random], None]
KINDS: dict[str, Change] = {}


def kind(change: Change) -> Change:
    """Register a function in `KINDS` by its name."""
    KINDS[change.__name__.strip("_").replace("_", " ")] = change
    return change


@kind
def _odd_offsets(file: File, draw: random.Random) -> None:
    file.datasets[draw.choice([path for path in file.datasets if "offset" in file.datasets[path]])]["offset"] = (
        draw.choice([*ODD, len(file.data), len(file.data) - 1, 511, 10**30])
    )


@kind
def _datasets_that_overlap(file: File, draw: random.Random) -> None:
    one, other = (draw.choice([p for p in file.datasets if "offset" in file.datasets[p]]) for _ in range(2))
    file.datasets[one]["offset"] = file.datasets[other]["offset"]


@kind
def _offsets_that_are_not_aligned(file: File, draw: random.Random) -> None:
    array = file.read(path := file.pick(draw))
    file.data += bytes(-len(file.data) % 64) + bytes(draw.randrange(1, 64))
    file.datasets[path] = {"shape": [*array.shape], "dtype": array.dtype.str, "offset": len(file.data)}
    file.data += array.tobytes()


@kind
def _odd_shapes(file: File, draw: random.Random) -> None:
    described = file.datasets[file.pick(draw)]
    shape = described["shape"]
    shape[draw.randrange(len(shape))] = draw.choice([*ODD, 10**30])


@kind
def _a_huge_shape(file: File, draw: random.Random) -> None:
    described = file.datasets[file.pick(draw)]
    described["shape"] = [draw.choice([2**31, 2**40]), *described["shape"][1:]]


@kind
def _a_huge_shape_of_no_bytes(file: File, draw: random.Random) -> None:
    described = file.datasets[file.pick(draw)]
    described["shape"] = [draw.choice([2**31, 2**40]), *described["shape"][1:], 0]


@kind
def _a_huge_shape_in_chunks(file: File, draw: random.Random) -> None:
    path = file.pick(draw)
    shape = [draw.choice([2**31, 2**40]), *file.datasets[path]["shape"][1:]]
    file.datasets[path] |= {"shape": shape, "chunk": [2**20, *shape[1:]], "filters": ["shuffle", "gzip"], "chunks": []}


@kind
def _a_huge_chunk(file: File, draw: random.Random) -> None:
    array = file.read(path := file.pick(draw))
    file.put(path, array, packed=True)
    file.datasets[path]["chunk"] = [draw.choice([2**20, 2**26, 2**40]), *array.shape[1:]]


@kind
def _small_chunks(file: File, draw: random.Random) -> None:
    array = file.read(path := file.pick(draw))
    file.put(path, array, packed=True)
    file.datasets[path]["chunk"] = [1] * array.ndim


@kind
def _a_chunk_in_several_places(file: File, draw: random.Random) -> None:
    array = file.read(path := file.pick(draw))
    file.put(path, array, packed=True)
    rows = draw.choice([2, 100, 5000])
    file.datasets[path]["shape"] = [rows * array.shape[0], *array.shape[1:]]
    file.datasets[path]["chunks"] *= rows


@kind
def _odd_chunks(file: File, draw: random.Random) -> None:
    described = file.datasets[ACTION]
    described["chunks"] = draw.choice([[], [[512, 0]], [[0, 1 << 40]], [[600, -1]], {}, "ab", [["a", "b"]], [[1]], 7])


@kind
def _odd_chunk_shapes(file: File, draw: random.Random) -> None:
    described = file.datasets[ACTION]
    described["chunk"] = draw.choice([[], [0, 0], [-1, 3], [1], [2**62, 2**62], None, "xx", [True, True]])


@kind
def _a_chunk_of_noise(file: File, draw: random.Random) -> None:
    file.put(ACTION, file.read(ACTION), packed=True)
    file.datasets[ACTION]["chunks"] = [file.add(draw.randbytes(draw.choice([1, 500])))]


@kind
def _a_chunk_of_too_few_or_too_many_bytes(file: File, draw: random.Random) -> None:
    array = file.read(ACTION)
    file.put(ACTION, array, packed=True)
    size = array.nbytes + draw.choice([-1, 1, 8, 1 << 20])
    file.datasets[ACTION]["chunks"] = [file.add(zlib.compress(bytes(max(0, size))))]


@kind
def _a_chunk_that_never_ends(file: File, draw: random.Random) -> None:
    file.put(ACTION, file.read(ACTION), packed=True)
    packer = zlib.compressobj()
    file.datasets[ACTION]["chunks"] = [file.add(packer.compress(bytes(1 << 22)) + packer.flush(zlib.Z_SYNC_FLUSH))]


@kind
def _other_filters(file: File, draw: random.Random) -> None:
    filters = draw.choice([[], ["gzip"], ["lzf"], ["gzip", "shuffle"], None, "gzip", [1, 2]])
    file.put(ACTION, file.read(ACTION), packed=True)
    file.datasets[ACTION]["filters"] = filters


@kind
def _a_bomb(file: File, draw: random.Random) -> None:
    rows, envs = file.datasets[REWARD]["shape"]
    file.put("trajectory/bomb", np.zeros((rows, envs, (draw.choice([20, 140]) << 20) // rows // envs), np.uint8), True)


@kind
def _a_bomb_of_many_chunks(file: File, draw: random.Random) -> None:
    rows, envs = file.datasets[REWARD]["shape"]
    size = (draw.choice([5, 20, 50]) << 20) // rows // envs
    packed = zlib.compress(bytes(size), 1)
    file.datasets["trajectory/bomb"] = {
        "shape": [rows, envs, size],
        "dtype": "|u1",
        "chunk": [1, 1, size],
        "filters": ["shuffle", "gzip"],
        "chunks": [file.add(packed) for _ in range(rows * envs)],
    }


@kind
def _a_bomb_with_a_small_declared_size(file: File, draw: random.Random) -> None:
    file.put(ACTION, file.read(ACTION), packed=True)
    file.datasets[ACTION]["chunks"] = [file.add(zlib.compress(bytes(200 << 20), 1))]


@kind
def _other_types(file: File, draw: random.Random) -> None:
    types = ["|O", "|V8", "<c8", "<M8[s]", "<U9", "|S0", "|S99999", "<f16", "i4,f4", "", "x", "<i9", ">i8", "(3,)<f4"]
    file.datasets[file.pick(draw)]["dtype"] = draw.choice(types)


@kind
def _another_type_of_number(file: File, draw: random.Random) -> None:
    dtype = np.dtype(draw.choice([">i8", ">f4", "f2", "f8", "i1", "u8", "?", "S7", "S9999", "f4"]))
    path = file.pick(draw)
    file.put(path, np.zeros(file.datasets[path]["shape"], dtype))


@kind
def _junk_for_a_value(file: File, draw: random.Random) -> None:
    described = file.datasets[file.pick(draw)]
    described[draw.choice([*described])] = draw.choice(JUNK)


@kind
def _junk_for_a_dataset(file: File, draw: random.Random) -> None:
    file.datasets[file.pick(draw)] = draw.choice(JUNK)


@kind
def _junk_for_all_datasets(file: File, draw: random.Random) -> None:
    file.layout["datasets"] = draw.choice(JUNK)


@kind
def _a_value_missing(file: File, draw: random.Random) -> None:
    described = file.datasets[file.pick(draw)]
    del described[draw.choice([*described])]


@kind
def _nested_too_deeply(file: File, draw: random.Random) -> None:
    nested: Any = []
    for _ in range(draw.choice([50, 150, 900])):
        nested = [nested]
    file.layout["more"] = nested


@kind
def _deep_groups(file: File, draw: random.Random) -> None:
    file.put("trajectory/" + "g/" * draw.choice([31, 33, 400]) + "x", file.read(REWARD))


@kind
def _many_datasets(file: File, draw: random.Random) -> None:
    shape = file.datasets[REWARD]["shape"]
    for number in range(draw.choice([500, 3000])):
        file.datasets[f"trajectory/{number}"] = {"shape": [*shape, 0], "dtype": "<f4", "offset": 0}


@kind
def _many_dimensions(file: File, draw: random.Random) -> None:
    path = file.pick(draw)
    file.put(path, np.zeros((*file.datasets[path]["shape"][:1], *([1] * draw.choice([31, 32, 60])))))


@kind
def _other_roots(file: File, draw: random.Random) -> None:
    file.put(draw.choice(["x", "", "/", "entry/trajectory/x", "../x", "trajectory"]), file.read(REWARD))


@kind
def _noise_in_the_place_of_hdf5(file: File, draw: random.Random) -> None:
    file.data[USER_BLOCK : USER_BLOCK + 96] = draw.randbytes(96)


@kind
def _only_a_layout(file: File, draw: random.Random) -> None:
    del file.data[draw.choice([USER_BLOCK, len(file.data) // 2]) :]


def with_rows(file: File, rows: int) -> None:
    """Reduce the file to one epoch of `rows` rows without episodes and fields."""
    for path in [path for path in file.datasets if path.startswith(("epochs/", "episodes/"))]:
        file.put(path, file.read(path)[: 1 if path.startswith("epochs/") else 0])
    file.set("epochs/length", rows)
    for path in ("trajectory", "epochs/next_observation", "episodes/final_observation"):
        file.remove(path)


@kind
def _rows_without_environments(file: File, draw: random.Random) -> None:
    with_rows(file, rows := draw.choice([2**20, 2**34, 2**40]))
    file.datasets[REWARD] = {"shape": [rows, 0], "dtype": "<f4", "offset": 0}


@kind
def _environments_without_data(file: File, draw: random.Random) -> None:
    rows, envs = draw.choice([(2**20, 2**10), (2**40, 3), (1, 2**60), (2**39, 2**40)])
    with_rows(file, rows)
    file.datasets[REWARD] = {"shape": [rows, envs, 0], "dtype": "<f4", "offset": 0}


@kind
def _many_rows_in_few_bytes(file: File, draw: random.Random) -> None:
    with_rows(file, rows := draw.choice([3, 6, 40]) << 20)
    file.put("trajectory/terminated", np.zeros((rows, 1), bool), packed=True)


@kind
def _nothing_in_the_last_dimension(file: File, draw: random.Random) -> None:
    shape = file.datasets[REWARD]["shape"]
    file.datasets["trajectory/nothing"] = {"shape": [*shape, draw.choice([0, 2**50]), 0], "dtype": "<f8", "offset": 0}
