"""Files that are laid out as rein does it and say what cannot be: more `KINDS`, added to those of `odd_layouts.py`."""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from typing import Any

import h5py
import numpy as np

LAYOUTS = runpy.run_path(str(Path(__file__).with_name("odd_layouts.py")))
KINDS, EPISODES, ODD, TABLES = (LAYOUTS[name] for name in ("KINDS", "EPISODES", "ODD", "TABLES"))
kind, parts_of, pick, put, retyped, with_rows = (
    LAYOUTS[name] for name in ("kind", "parts_of", "pick", "put", "retyped", "with_rows")
)


@kind
def _a_scalar(file: Any, draw: random.Random) -> None:
    put(file, pick(file, draw), shape=(), dtype=draw.choice(["f4", "i8", "?"]))


@kind
def _many_dimensions(file: Any, draw: random.Random) -> None:
    name = pick(file, draw)
    put(file, name, shape=(*file[name].shape[:1], *([1] * 31)), dtype="i8")


@kind
def _another_length(file: Any, draw: random.Random) -> None:
    name = pick(file, draw)
    data = file[name][()]
    put(
        file, name, data=np.concatenate([data, data[-1:]]) if draw.random() < 0.5 else data[:-1], shape=None, dtype=None
    )


@kind
def _an_empty_table(file: Any, draw: random.Random) -> None:
    for path in parts_of(file, h5py.Dataset):
        if path.startswith(draw.choice(["/entry/epochs/", "/entry/episodes/"])):
            put(file, path, shape=(0, *file[path].shape[1:]), dtype=file[path].dtype)


@kind
def _something_missing(file: Any, draw: random.Random) -> None:
    del file[draw.choice([*parts_of(file, h5py.Dataset), *parts_of(file, h5py.Group), "/entry", "/entry/episodes"])]


@kind
def _a_group_for_a_dataset(file: Any, draw: random.Random) -> None:
    name = pick(file, draw)
    del file[name]
    file.create_group(name)


@kind
def _groups_with_data_for_fields(file: Any, draw: random.Random) -> None:
    name = draw.choice(["valid", "terminated", "truncated", "reward", "action"])
    file.move(f"/entry/trajectory/{name}", "/entry/kept")
    file.create_group(f"/entry/trajectory/{name}")
    file.move("/entry/kept", f"/entry/trajectory/{name}/{draw.choice(['x', name, 'observation'])}")


@kind
def _fields_of_another_kind(file: Any, draw: random.Random) -> None:
    name = f"/entry/trajectory/{draw.choice(['valid', 'terminated', 'truncated', 'reward', 'action'])}"
    shape = draw.choice([(), (2,), (1,), (0,), (3, 4)])
    put(file, name, shape=(*file[name].shape, *shape), dtype=draw.choice(["?", "i8", "f4", "u1"]))
    file[name][...] = draw.choice([0, 1, 5])


@kind
def _flags_of_one_dimension_more(file: Any, draw: random.Random) -> None:
    for name in ("valid", "terminated", "truncated"):
        path = f"/entry/trajectory/{name}"
        put(file, path, data=np.ones((*file[path].shape, 2), bool), shape=None, dtype=None)


@kind
def _episodes_of_no_environment(file: Any, draw: random.Random) -> None:
    file["/entry/episodes/environment"][...] = draw.choice([-(2**63), -(2**40), -1000])


@kind
def _an_empty_group(file: Any, draw: random.Random) -> None:
    name = draw.choice([*parts_of(file, h5py.Group), "/entry/epochs", "/entry/episodes", "/entry/trajectory"])
    del file[name]
    file.create_group(name)


@kind
def _a_dataset_for_a_group(file: Any, draw: random.Random) -> None:
    name = draw.choice([*parts_of(file, h5py.Group), "/entry", "/entry/epochs", "/entry/trajectory"])
    del file[name]
    file[name] = np.arange(2)


@kind
def _odd_numbers_of_epochs(file: Any, draw: random.Random) -> None:
    file[f"/entry/epochs/{draw.choice(TABLES)}"][draw.choice([0, 1])] = draw.choice(ODD)


@kind
def _odd_numbers_of_episodes(file: Any, draw: random.Random) -> None:
    column = file[f"/entry/episodes/{draw.choice(EPISODES)}"]
    column[draw.randrange(len(column))] = draw.choice(ODD)


@kind
def _odd_numbers_everywhere(file: Any, draw: random.Random) -> None:
    """In columns that no check compares with another, and alike in all rows, so that differences are small."""
    for name in draw.sample(EPISODES, 3):
        file[f"/entry/episodes/{name}"][...] = draw.choice(ODD)
    first = draw.choice([2**62, 2**63 - 4, -(2**63), -(2**62)])
    file["/entry/epochs/first_step"][...] = [first, first + 2]


@kind
def _odd_parts(file: Any, draw: random.Random) -> None:
    for name in ("part", "parts"):
        file[f"/entry/epochs/{name}"][...] = draw.choice(ODD)


@kind
def _many_epochs_of_nothing(file: Any, draw: random.Random) -> None:
    count = draw.choice([10**3, 10**4])
    rows = int(file["/entry/epochs/length"][:].sum())
    for path in [path for path in parts_of(file, h5py.Dataset) if path.startswith("/entry/epochs/")]:
        data = file[path][:1]
        put(file, path, data=np.repeat(data, count, axis=0) if data.nbytes < 100 else data, shape=None, dtype=None)
    file["/entry/epochs/number"][...] = np.arange(1, count + 1)
    file["/entry/epochs/length"][...] = [rows] + [0] * (count - 1)
    file["/entry/epochs/first_row"][...] = [0] + [rows] * (count - 1)


@kind
def _numbers_that_are_none(file: Any, draw: random.Random) -> None:
    for name in ("episodes/return", "epochs/metrics/loss", "epochs/clocks/seconds", "trajectory/reward"):
        file[f"/entry/{name}"][...] = draw.choice([np.nan, np.inf, -np.inf, 1e308])


@kind
def _odd_text(file: Any, draw: random.Random) -> None:
    texts = [b"\xff\xfe\x80", b"\x1b[2Jfail", b"", b"halted\n\nrein: all is well"]
    put(file, "/entry/epochs/status", data=np.array([draw.choice(texts)] * 2, "S40"), shape=None, dtype=None)


@kind
def _long_text(file: Any, draw: random.Random) -> None:
    _many_epochs_of_nothing(file, draw)
    count = len(file["/entry/epochs/number"])
    options = dict(chunks=(count // 10,), compression="gzip", data=None)
    put(file, "/entry/epochs/status", shape=(count,), dtype=f"S{draw.choice([100, 9999])}", **options)
    file["/entry/epochs/status"][...] = b"halted"


@kind
def _observations_without_rows_of_them(file: Any, draw: random.Random) -> None:
    del file["/entry/trajectory/observation"]
    for name in ("epochs/next_observation", "episodes/final_observation"):
        del file[f"/entry/{name}"]
        file[f"/entry/{name}"] = np.zeros(draw.choice([(0, 3), (2, 3), (1,), (6, 2), ()]), "f4")


@kind
def _odd_names(file: Any, draw: random.Random) -> None:
    names = [b"\xff\xfe", b"\x1b[2J", b"a" * 5000, b"\n\n", b"..%2F..%2F", b"%FF%00", "\u202e[bold]".encode()]
    group = file[draw.choice(["/entry/trajectory", "/entry/epochs/metrics", "/entry/epochs/clocks"])]
    old = next(name for name in group if isinstance(group[name], h5py.Dataset))
    group.id.links.move(old.encode(), group.id, draw.choice(names))


@kind
def _a_huge_attribute(file: Any, draw: random.Random) -> None:
    file[pick(file, draw)].attrs["text"] = "x" * 60000
    file["entry"].attrs.create("words", ["a", "b"] * 1000, dtype=h5py.string_dtype())


@kind
def _one_dataset_in_many_places(file: Any, draw: random.Random) -> None:
    file["entry/trajectory/big"] = np.zeros((*file["entry/trajectory/reward"].shape, 2_000), np.float32)
    for number in range(draw.choice([10, 90, 200])):
        file[f"entry/trajectory/{number}"] = file["entry/trajectory/big"]


@kind
def _two_trees_of_one_name(file: Any, draw: random.Random) -> None:
    """Observations that fit in none of the places where they come again."""
    for place in draw.sample(["trajectory/observation", "epochs/next_observation", "episodes/final_observation"], 2):
        del file[f"entry/{place}"]
        if draw.random() < 0.5:
            file[f"entry/{place}"] = np.zeros(
                draw.choice([(6, 3), (0, 3), (2, 3), (6,)]), draw.choice(["f4", "S3", "?"])
            )
