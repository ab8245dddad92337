"""Objects created with h5py's low-level API equal those of its high-level API."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import pytest

from rein.store.format import nexus

ARRAYS = {
    "float32": np.arange(12, dtype=np.float32).reshape(4, 3),
    "int64": np.arange(-3, 3),
    "uint8": np.arange(5, dtype=np.uint8),
    "bool": np.array([[True, False], [False, True]]),
    "bytes": np.array([b"completed", b"halted"]),
    "scalar": np.array(2.5),
    "none": np.zeros((0, 3)),
    "reversed": np.arange(6)[::-1],
    "columns first": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
}


def written(write: Callable[[Any], Any]) -> h5py.File:
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        write(file)
    return h5py.File(memory, "r")


def described(dataset: Any) -> dict[str, Any]:
    properties = dataset.id.get_create_plist()
    kind = dataset.id.get_type()
    return {
        "kind": kind.encode(),  # with byte order, character set and padding
        "shape": dataset.shape,
        "chunks": dataset.chunks,
        "filters": [properties.get_filter(i) for i in range(properties.get_nfilters())],
        "times": properties.get_obj_track_times(),
        "layout": properties.get_layout(),
        "values": dataset[()].tolist(),
    }


@pytest.mark.parametrize("name", ARRAYS)
def test_dataset_matches_create_dataset(name: str) -> None:
    def both(file: Any) -> None:
        nexus.add_dataset(file, "ours", ARRAYS[name])
        file.create_dataset("theirs", data=ARRAYS[name])

    file = written(both)
    assert described(file["ours"]) == described(file["theirs"])


@pytest.mark.parametrize("text", ["reward", "récompense", '{"a": 1}'])
def test_text_is_fixed_length_utf_8(text: str) -> None:
    data = text.encode()

    def both(file: Any) -> None:
        nexus.add_text(file, "ours", text)
        file.create_dataset("theirs", data=data, dtype=h5py.string_dtype(length=len(data)))

    file: Any = written(both)
    assert described(file["ours"]) == described(file["theirs"])
    assert file["ours"][()].decode() == text


def test_attributes_match_h5py() -> None:
    attributes: dict[str, Any] = dict(axes=["step", "."], format=1, title="größe")

    def both(file: Any) -> None:
        nexus.add_group(file, "ours", "NXdata", **attributes)
        file.create_group("theirs").attrs.update(NX_class="NXdata", **attributes)

    file: Any = written(both)
    ours, theirs = file["ours"], file["theirs"]
    assert sorted(ours.attrs) == sorted(theirs.attrs) == ["NX_class", "axes", "format", "title"]
    for name in theirs.attrs:
        a, b = (h5py.h5a.open(group.id, name.encode()) for group in (ours, theirs))  # type: ignore[attr-defined]  # no stubs
        assert a.get_type().encode() == b.get_type().encode()
        assert (a.shape, np.array(ours.attrs[name]).tolist()) == (b.shape, np.array(theirs.attrs[name]).tolist())
