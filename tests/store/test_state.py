"""Encoded states round-trip bit for bit, open in viewers, and are safe to read from untrusted files."""

from __future__ import annotations

import functools
import json
import math
import warnings

import h5py
import numpy as np
import pytest
import torch

from rein.store.format.sealed import USER_BLOCK
from rein.store.format.state_codec import _DTYPES, TRAILER_LENGTH, decode_state, encode_state, find_texts, snapshot
from rein.testing.stateful import first_difference


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return random bits, including NaN payloads, negative zeros and subnormal numbers."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def round_trip(state: object) -> object:
    return decode_state(bytearray(encode_state(state, {})))[0]


@pytest.mark.parametrize("name", _DTYPES)
def test_every_dtype_round_trips_bit_for_bit(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        state = {str(shape): random_bits(_DTYPES[name], shape) for shape in ((), (0, 3), (5,), (2, 3, 4))}
        for given in (state, snapshot(state)):
            assert first_difference(state, round_trip(given)) is None


def test_all_numeric_torch_dtypes_are_supported():
    known = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    odd = {str(dtype).removeprefix("torch.") for dtype in known - set(_DTYPES.values())}
    assert all(name.startswith(("q", "bits", "uint", "int", "float4")) for name in odd), odd


def test_tensor_views_round_trip():
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "expanded": torch.ones(1).expand(5),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(2)).detach(),
    }
    assert first_difference(state, round_trip(state)) is None


def test_arrays_numbers_strings_and_unusual_names_round_trip():
    state = {
        "arrays": [np.arange(6, dtype=np.uint16).reshape(2, 3), np.array(3.0, np.float16), np.arange(5)[::-1]],
        "numbers": [math.nan, math.inf, -math.inf, -0.0, 5e-324, 10**40, True, None, -1],
        "texts": ["", "é\ud800\n", "$tensor"],
        "$tensor": {"$float": "nan", "$array": {"$tensor": torch.ones(2)}},
        "": {"": torch.zeros(1), "..": torch.ones(1), ".": {}, "a/b": {"%": torch.ones(1)}, "%": torch.zeros(1)},
        "empty": [[], {}, [{}]],
    }
    back = round_trip(state)
    assert first_difference(state, back) is None
    assert json.dumps(state["numbers"]) == json.dumps(back["numbers"])
    assert list(back) == list(state)


def test_snapshot_does_not_change_with_the_state():
    tensor, array, items = torch.ones(3), np.ones(3), [1]
    held = snapshot({"tensor": tensor, "array": array, "items": items})
    tensor += 1
    array += 1
    items.append(2)
    assert first_difference(round_trip(held), {"tensor": torch.ones(3), "array": np.ones(3), "items": [1]}) is None


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": (1, 2)}}, r"state\.a\.b is a tuple.*pack"),
        ({"a": [object()]}, r"state\.a\.0 is a object"),
        ({"a": {1: 2}}, r"state\.a has the key 1; keys must be strings, such as str\(key\)$"),
        ({"parts": {"adam": {1: 2}}}, r"has the key 1.*plain_state rewrites an optimizer's"),
        ({"a": np.complex64(1)}, r"state\.a is a complex64"),
        ({"a": np.array(["x"])}, r"state\.a is an array of <U1"),
        ({"a": torch.eye(2).to_sparse()}, r"state\.a is a tensor of torch.float32, torch.sparse_coo"),
    ],
)
def test_unsupported_values_raise_with_their_path(state, words):
    with pytest.raises(TypeError, match=words):
        encode_state(state, {})


def test_h5py_reads_the_same_numbers(tmp_path):
    state = {"agent": {"weight": torch.randn(3, 4), "mask": torch.tensor([True, False])}, "step": 3}
    path = tmp_path / "state.h5"
    path.write_bytes(encode_state(state, {"who": "me"}))
    with h5py.File(path) as file:
        entry = file["entry"]
        assert np.array_equal(entry["state/agent/weight"], state["agent"]["weight"])
        assert entry["state/agent/mask"][()].tolist() == [True, False]
        assert json.loads(entry["about/data"][()]) == {"who": "me"}
        assert json.loads(entry["structure/data"][()])["step"] == 3


def opened_with(path):
    """Return name and values of the signal that a viewer draws when it opens the file."""
    with h5py.File(path) as file:
        view = file[file.attrs["default"]]
        view = view[view.attrs["default"]]
        return view.attrs["signal"], view[view.attrs["signal"]][()]


def test_only_weights_are_marked_as_images(tmp_path):
    path = tmp_path / "state.h5"
    state = {"weight": torch.ones(4, 3), "kernel": torch.ones(8, 4, 3, 3), "bias": torch.ones(4)}
    path.write_bytes(encode_state({**state, "row": torch.ones(1, 4), "table": torch.ones(4, 3).long()}, {}))
    with h5py.File(path) as file:
        marked = {name: dataset.attrs.get("interpretation") for name, dataset in file["entry/state"].items()}
    assert marked == {"weight": "image", "kernel": "image", "bias": None, "row": None, "table": None}


def test_default_plot_is_learning_curve_or_largest_tensor(tmp_path):
    path = tmp_path / "state.h5"
    history = [{"epoch": n, "metrics": {"loss": 1.0, "episode_return": float(n)}} for n in (1, 2, 3)]
    path.write_bytes(encode_state({"history": history, "x": torch.ones(5)}, {}))
    name, values = opened_with(path)
    assert (name, values.tolist()) == ("episode_return", [1.0, 2.0, 3.0])
    for state in ({"history": history[:1], "x": torch.ones(5), "y": torch.ones(2)}, {"x": torch.ones(5)}):
        path.write_bytes(encode_state(state, {}))
        assert opened_with(path)[1].shape == (5,)
    path.write_bytes(encode_state({"history": []}, {}))
    with h5py.File(path) as file:
        assert "default" not in file["entry"].attrs


def rewritten(content: bytes, change) -> bytearray:
    """Return the file with another structure and matching trailer, as an attacker could write it."""
    _, (offset, length) = find_texts(bytes(content[-TRAILER_LENGTH:]))
    structure = json.loads(bytes(content[offset : offset + length]))
    text = json.dumps(change(structure)).encode()
    about = find_texts(bytes(content[-TRAILER_LENGTH:]))[0]
    start = len(content)
    trailer = f"#rein-state about {about[0]:018d} {about[1]:018d} structure {start:018d} {len(text):018d}\n"
    return bytearray(content + text + trailer.encode())


def hostile():
    def set_to(**values):
        return lambda structure: {"x": {"$tensor": {**structure["x"]["$tensor"], **values}}}

    return {
        "outside": set_to(offset=10**15),
        "in the user block": set_to(offset=0),
        "negative": set_to(offset=-8),
        "huge": set_to(shape=[2**62, 2**62]),
        "negative shape": set_to(shape=[-1]),
        "boolean shape": set_to(shape=[True]),
        "not a list": set_to(shape="4"),
        "many dimensions": set_to(shape=[1] * 100),
        "unknown dtype": set_to(dtype="no_such"),
        "code as dtype": set_to(dtype="__class__"),
        "unhashable dtype": set_to(dtype=["float32"]),
        "unknown device": set_to(device="no_such"),
        "device of wrong type": set_to(device=3),
        "no description": lambda structure: {"x": {"$tensor": 3}},
        "missing keys": lambda structure: {"x": {"$tensor": {}}},
        "not a number": lambda structure: {"x": {"$float": "1e5"}},
        "repeated": lambda structure: {"x": [structure["x"]] * 100_000},
    }


@pytest.mark.parametrize("name", hostile())
def test_hostile_structure_raises(name):
    content = bytes(encode_state({"x": torch.ones(400)}, {}))
    with pytest.raises(ValueError, match=r"tensor|structure|shape|number"):
        decode_state(rewritten(content, hostile()[name]))


def test_state_is_refused_if_the_reader_would_refuse_its_levels():
    def tree(levels):
        return functools.reduce(lambda inner, _: {"a": inner}, range(levels), torch.ones(2))

    decode_state(bytearray(encode_state(tree(96), {})))
    with pytest.raises(ValueError, match="levels"):
        encode_state(tree(97), {})


def test_deep_nesting_and_invalid_json_raise():
    content = bytes(encode_state({"x": torch.ones(4)}, {}))
    deep = rewritten(content, lambda structure: 0)
    text = b"[" * 200_000
    about = find_texts(bytes(deep[-TRAILER_LENGTH:]))[0]
    for bad in (text, b"{", b"NaN", b"\xff\xfe", b""):
        trailer = f"#rein-state about {about[0]:018d} {about[1]:018d} structure {len(content):018d} {len(bad):018d}\n"
        with pytest.raises(ValueError, match="JSON"):
            decode_state(bytearray(content + bad + trailer.encode()))
    with pytest.raises(ValueError, match="not a checkpoint"):
        decode_state(bytearray(content[:-1]))


def test_loaded_tensors_share_no_memory_with_the_file():
    content = bytearray(encode_state({"x": torch.ones(4)}, {}))
    state, _ = decode_state(content)
    content[USER_BLOCK:] = bytes(len(content) - USER_BLOCK)
    assert state["x"].tolist() == [1.0] * 4


def test_state_with_too_many_values_is_not_written(monkeypatch):
    """Such a file could not be read."""
    monkeypatch.setattr("rein.files._VALUES", 1000)
    assert round_trip([0] * 900) == [0] * 900
    with pytest.raises(ValueError, match="at most 1,000 are allowed"):
        encode_state([0] * 1001, {})
