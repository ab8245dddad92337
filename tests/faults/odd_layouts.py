"""Files that HDF5 lays out as rein never does: links, storage, sizes, types. `KINDS` are changes of one idea each."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

Change = Callable[[Any, random.Random], None]

NAME = "000001-000002.h5"
ODD = (-(2**63), -(2**40), -1, 0, 1, 7, 2**31, 2**40, 2**62, 2**63 - 1)
TABLES = ("number", "first_row", "length", "first_step", "part", "parts")
EPISODES = ("id", "environment", "first_step", "last_step", "seed", "length", "epoch")

KINDS: dict[str, Change] = {}


def kind(change: Change) -> Change:
    """Have a function among `KINDS`, by its name."""
    KINDS[change.__name__.strip("_").replace("_", " ")] = change
    return change


def parts_of(file: Any, kind: type) -> list[str]:
    """The paths of all datasets, or groups, that are read back."""
    found: list[str] = []
    for root in ("epochs", "episodes", "trajectory"):
        group = file["entry"][root]
        group.visititems(lambda name, node, g=group: found.append(f"{g.name}/{name}") if type(node) is kind else None)
    return found


def pick(file: Any, draw: random.Random) -> str:
    """A dataset."""
    return draw.choice(parts_of(file, h5py.Dataset))


def put(file: Any, name: str, **options: Any) -> None:
    """Another dataset in the place of one."""
    shape = file[name].shape
    del file[name]
    file.create_dataset(name, **({"shape": shape, "dtype": "f4"} | options))


def retyped(file: Any, draw: random.Random, dtype: Any) -> None:
    """Another type, of the same shape."""
    name = pick(file, draw)
    put(file, name, shape=file[name].shape, dtype=dtype)


@kind
def _external_link(file: Any, draw: random.Random) -> None:
    name = draw.choice([pick(file, draw), "/entry", "/entry/epochs", "/entry/trajectory"])
    del file[name]
    file[name] = h5py.ExternalLink(draw.choice(["/etc/passwd", "/dev/zero", NAME, "../../outside.h5"]), "/entry")


@kind
def _soft_link(file: Any, draw: random.Random) -> None:
    name = pick(file, draw)
    file.move(name, "/entry/kept")
    file[name] = h5py.SoftLink(draw.choice(["/entry/kept", "/nowhere", name, "."]))


@kind
def _soft_links_in_a_circle(file: Any, draw: random.Random) -> None:
    names = [f"/entry/trajectory/{letter}" for letter in "abc"]
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        file[name] = h5py.SoftLink(other)


@kind
def _a_group_in_itself(file: Any, draw: random.Random) -> None:
    group = draw.choice(["/entry/trajectory", "/entry/epochs/metrics", "/entry/trajectory/observation"])
    file[f"{group}/again"] = file[draw.choice([group, "/entry", "/"])]


@kind
def _two_groups_in_each_other(file: Any, draw: random.Random) -> None:
    one, other = (file["entry/trajectory"].create_group(name) for name in ("one", "other"))
    one["other"], other["one"] = other, one


@kind
def _more_paths_than_groups(file: Any, draw: random.Random) -> None:
    group = file["entry/trajectory"]
    for depth in range(draw.choice([12, 20, 40])):
        inner = group.create_group(f"group{depth}")
        group["other"] = inner
        group = inner


@kind
def _deep_groups(file: Any, draw: random.Random) -> None:
    file["entry/trajectory"].create_group("/".join("g" * draw.choice([31, 33, 400])))


@kind
def _many_groups(file: Any, draw: random.Random) -> None:
    for number in range(draw.choice([500, 3000])):
        file["entry/trajectory"].create_group(f"{number}")


@kind
def _data_in_another_file(file: Any, draw: random.Random) -> None:
    name = pick(file, draw)
    shape, dtype = file[name].shape, file[name].dtype
    size = max(1, int(np.prod(shape)) * dtype.itemsize)
    put(file, name, shape=shape, dtype=dtype, external=[(draw.choice(["/etc/passwd", "/dev/zero"]), 0, size)])


@kind
def _virtual_data(file: Any, draw: random.Random) -> None:
    name = pick(file, draw)
    shape, dtype = file[name].shape, file[name].dtype
    layout = h5py.VirtualLayout(shape, dtype)
    layout[...] = h5py.VirtualSource(draw.choice([".", "/etc/passwd", NAME]), name, shape)
    del file[name]
    file.create_virtual_dataset(name, layout)


@kind
def _a_huge_shape_without_data(file: Any, draw: random.Random) -> None:
    name = pick(file, draw)
    put(file, name, shape=(draw.choice([2**31, 2**40]), *file[name].shape[1:]), dtype="f4")


@kind
def _a_huge_shape_in_chunks(file: Any, draw: random.Random) -> None:
    name = pick(file, draw)
    shape = (draw.choice([2**31, 2**40]), *file[name].shape[1:])
    put(file, name, shape=shape, dtype=draw.choice(["f4", "i8", "?"]), chunks=(2**20, *shape[1:]), compression="gzip")


@kind
def _a_huge_chunk(file: Any, draw: random.Random) -> None:
    name = pick(file, draw)
    chunk = (2**26, *([1] * (len(file[name].shape) - 1)))
    put(file, name, shape=file[name].shape, dtype="i8", chunks=chunk, maxshape=(None, *file[name].shape[1:]))


def with_rows(file: Any, rows: int, fields: dict[str, Any]) -> None:
    """One epoch of so many rows and no episode, with these fields in the place of all."""
    for table in ("epochs", "episodes"):
        for path in [path for path in parts_of(file, h5py.Dataset) if path.startswith(f"/entry/{table}/")]:
            data = file[path][: 1 if table == "epochs" else 0]
            put(file, path, shape=data.shape, dtype=data.dtype, data=data)
    file["entry/epochs/length"][0] = rows
    for name in list(file["entry/trajectory"]):
        del file["entry/trajectory"][name]
    for table, name in (("epochs", "next_observation"), ("episodes", "final_observation")):
        del file[f"entry/{table}/{name}"]
    for name, options in fields.items():
        file["entry/trajectory"].create_dataset(name, **options)


@kind
def _rows_of_no_environment(file: Any, draw: random.Random) -> None:
    rows = draw.choice([2**20, 2**34, 2**40])
    with_rows(file, rows, {"reward": dict(shape=(rows, 0), dtype="f4")})


@kind
def _environments_without_a_byte(file: Any, draw: random.Random) -> None:
    rows, envs = draw.choice([(2**20, 2**10), (2**40, 3), (1, 2**60), (2**39, 2**40)])
    with_rows(file, rows, {"reward": dict(shape=(rows, envs, 0), dtype="f4")})


@kind
def _rows_that_take_more_to_count_than_to_hold(file: Any, draw: random.Random) -> None:
    rows = draw.choice([3, 6, 40]) << 20
    data = dict(shape=(rows, 1), dtype="?", chunks=(rows // 4, 1), compression="gzip", data=np.zeros((rows, 1), bool))
    with_rows(file, rows, {"terminated": data})


@kind
def _nothing_in_the_last_dimension(file: Any, draw: random.Random) -> None:
    shape = file["entry/trajectory/reward"].shape
    file["entry/trajectory"].create_dataset("nothing", (*shape, draw.choice([0, 2**50]), 0), "f8")


@kind
def _a_bomb(file: Any, draw: random.Random) -> None:
    rows = file["entry/trajectory/reward"].shape[0]
    data = np.zeros((rows, 3, (draw.choice([20, 140]) << 20) // rows // 3), np.uint8)
    file["entry/trajectory"].create_dataset("bomb", data=data, chunks=(rows, *data.shape[1:]), compression="gzip")


@kind
def _another_filter(file: Any, draw: random.Random) -> None:
    how = draw.choice([dict(compression="lzf"), dict(fletcher32=True), dict(scaleoffset=3), dict(shuffle=True)])
    put(file, "/entry/trajectory/action", data=file["entry/trajectory/action"][()], dtype=None, **how)


@kind
def _a_chunk_that_skips_a_filter(file: Any, draw: random.Random) -> None:
    data = file["entry/trajectory/action"][()]
    put(file, "/entry/trajectory/action", shape=data.shape, dtype="i8", chunks=data.shape, compression="gzip")
    file["entry/trajectory/action"].id.write_direct_chunk((0, 0), data.tobytes(), filter_mask=1)


@kind
def _a_chunk_of_noise(file: Any, draw: random.Random) -> None:
    data = file["entry/trajectory/action"][()]
    put(file, "/entry/trajectory/action", shape=data.shape, dtype="i8", chunks=data.shape, compression="gzip")
    file["entry/trajectory/action"].id.write_direct_chunk((0, 0), draw.randbytes(draw.choice([1, 500])))


@kind
def _chunks_that_are_missing(file: Any, draw: random.Random) -> None:
    name = draw.choice(["/entry/trajectory/action", "/entry/trajectory/valid", "/entry/epochs/number"])
    shape, dtype = file[name].shape, file[name].dtype
    put(
        file, name, shape=shape, dtype=dtype, chunks=tuple(max(1, n // 2) for n in shape), maxshape=(None,) * len(shape)
    )
    file[name][:1] = 1


@kind
def _compact_storage(file: Any, draw: random.Random) -> None:
    name = pick(file, draw)
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.COMPACT)
    space, h5type = h5py.h5s.create_simple((2,)), h5py.h5t.NATIVE_INT64
    del file[name]
    h5py.h5d.create(file.id, name.encode(), h5type, space, plist)


@kind
def _text_of_any_length(file: Any, draw: random.Random) -> None:
    retyped(file, draw, h5py.string_dtype())


@kind
def _numbers_of_any_length(file: Any, draw: random.Random) -> None:
    retyped(file, draw, h5py.vlen_dtype(np.int64))


@kind
def _references(file: Any, draw: random.Random) -> None:
    retyped(file, draw, draw.choice([h5py.ref_dtype, h5py.regionref_dtype]))


@kind
def _a_compound(file: Any, draw: random.Random) -> None:
    retyped(file, draw, np.dtype(draw.choice(["i4,f4", "c8", "i8,(3,3)f8"])))


@kind
def _an_enumeration(file: Any, draw: random.Random) -> None:
    retyped(file, draw, h5py.enum_dtype({"RED": 0, "GREEN": 42}, basetype=draw.choice(["i1", "i8"])))


@kind
def _arrays_in_a_type(file: Any, draw: random.Random) -> None:
    retyped(file, draw, np.dtype((draw.choice(["f4", "i8"]), draw.choice([(2,), (1000, 1000)]))))


@kind
def _opaque(file: Any, draw: random.Random) -> None:
    retyped(file, draw, np.dtype(f"V{draw.choice([1, 8, 4000])}"))


@kind
def _times(file: Any, draw: random.Random) -> None:
    retyped(file, draw, h5py.opaque_dtype(np.dtype("M8[s]")))


@kind
def _another_type_of_number(file: Any, draw: random.Random) -> None:
    retyped(file, draw, draw.choice([">i8", ">f4", "f2", "f8", "i1", "u8", "?", "S7", "S9999", "f4"]))


@kind
def _a_float_that_nobody_has(file: Any, draw: random.Random) -> None:
    name, h5type = pick(file, draw), h5py.h5t.IEEE_F32LE.copy()
    h5type.set_ebias(draw.choice([3, 100]))
    space = h5py.h5s.create_simple(file[name].shape)
    del file[name]
    h5py.h5d.create(file.id, name.encode(), h5type, space)


@kind
def _a_type_in_the_place_of_data(file: Any, draw: random.Random) -> None:
    name = pick(file, draw)
    del file[name]
    file[name] = np.dtype("f8")


@kind
def _no_dataspace(file: Any, draw: random.Random) -> None:
    name = pick(file, draw)
    del file[name]
    file[name] = h5py.Empty("f4")
