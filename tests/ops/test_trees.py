"""Trees: structure, leaves, and packing for files without types."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rein.ops.trees import (
    is_namedtuple,
    leaves,
    map_tree,
    namedtuples,
    pack,
    signature_drift,
    to_device,
    tree_signature,
    unpack,
)


class Inner(NamedTuple):
    camera: Any
    position: Any = None


class Outer(NamedTuple):
    observation: Any
    rest: Any = ()


TYPES = {"Inner": Inner, "Outer": Outer}
VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
TREES = st.recursive(
    VALUES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(Inner, inner, inner)
        | st.builds(Outer, inner, inner)
    ),
    max_leaves=12,
)


def without_tuples(tree: Any) -> bool:
    """Return whether a file with lists, dictionaries and values can store it."""
    if isinstance(tree, dict):
        return all(isinstance(key, str) and without_tuples(value) for key, value in tree.items())
    return all(map(without_tuples, tree)) if isinstance(tree, list) else not isinstance(tree, tuple)


def sorted_keys(tree: Any) -> Any:
    """Return the tree with the keys of every dictionary in another order, as a file may return them."""
    if isinstance(tree, dict):
        return {key: sorted_keys(tree[key]) for key in sorted(tree)}
    return [sorted_keys(value) for value in tree] if isinstance(tree, list) else tree


@given(TREES)
def test_packed_tree_has_no_tuples_and_unpacks_with_its_types(tree: Any) -> None:
    packed = pack(tree)
    assert without_tuples(packed)
    for loaded in (unpack(packed, TYPES), unpack(sorted_keys(packed), TYPES), unpack(packed, namedtuples(tree))):
        assert loaded == tree
        assert tree_signature(loaded) == tree_signature(tree)
        assert namedtuples(loaded) == namedtuples(tree)


@given(TREES)
def test_unknown_named_tuples_keep_names_and_fields(tree: Any) -> None:
    loaded = unpack(pack(tree))
    assert loaded == tree
    assert {name: kind._fields for name, kind in namedtuples(loaded).items()} == {
        name: kind._fields for name, kind in namedtuples(tree).items()
    }


def test_type_with_the_same_name_but_other_fields_is_not_used() -> None:
    other = collections.namedtuple("Inner", ["lidar"])
    loaded = unpack(pack(Inner(1, 2)), {"Inner": other})
    assert not isinstance(loaded, other)
    assert (loaded.camera, loaded.position) == (1, 2)


def test_name_in_a_file_cannot_choose_code() -> None:
    for name in ("os.system", "x: __import__('os')", "class", ""):
        with pytest.raises(ValueError):
            unpack({"__namedtuple__": name, "__fields__": {"a": 1}})


@given(TREES)
def test_map_tree_keeps_structure_and_places_of_leaves(tree: Any) -> None:
    assert map_tree(lambda leaf: leaf, tree) == tree
    paths = map_tree(lambda leaf, path: (str(path),), tree, map_tree(lambda leaf: "here", tree))
    assert [path for path, _ in leaves(map_tree(lambda leaf: 0, tree))] == [path for path, _ in leaves(tree)]
    assert namedtuples(paths) == namedtuples(tree)


def test_map_tree_combines_several_trees() -> None:
    first, second = Outer({"a": 1}, (2, [3])), Outer({"a": 10}, (20, [30]))
    assert map_tree(lambda x, y: x + y, first, second) == Outer({"a": 11}, (22, [33]))
    with pytest.raises(ValueError):
        map_tree(lambda x, y: x + y, (1, 2), (1,))


def test_none_is_an_empty_place_and_a_string_is_a_leaf() -> None:
    assert map_tree(lambda leaf: 7, {"a": None, "b": "text", "c": {}}) == {"a": None, "b": 7, "c": {}}
    assert list(leaves({"a": None, "b": "text"})) == [("b", "text")]


def test_path_reads_like_attributes() -> None:
    tree = Outer(Inner({"left": 1, 0: 2}, [3]), (4,))
    assert dict(leaves(tree)) == {
        "observation.camera.left": 1,
        "observation.camera.0": 2,
        "observation.position.0": 3,
        "rest.0": 4,
    }
    assert dict(leaves(5)) == {"": 5}


def test_only_named_tuples_are_named_tuples() -> None:
    assert is_namedtuple(Inner(1))
    assert not is_namedtuple((1,)) and not is_namedtuple(Inner) and not is_namedtuple({"_fields": 1})


def test_to_device_moves_tensors_and_keeps_other_leaves() -> None:
    moved = to_device(Outer(torch.zeros(2), {"a": "text", "b": None}), "meta")
    assert moved.observation.device.type == "meta"
    assert moved.rest == {"a": "text", "b": None}


def test_signature_contains_shapes_dtypes_devices_and_types() -> None:
    assert tree_signature(Outer(torch.zeros(2, 3), [1, "x", None])) == {
        "observation": "(2, 3) torch.float32 on cpu",
        "rest.0": "int",
        "rest.1": "str",
    }


def test_signature_drift_names_only_the_changes() -> None:
    before = tree_signature({"a": torch.zeros(2), "b": 1, "c": 2})
    after = tree_signature({"a": torch.zeros(3), "b": 1, "d": 2})
    assert signature_drift(before, after) == (
        "a was (2,) torch.float32 on cpu and is (3,) torch.float32 on cpu; c was int and is absent; "
        "d was absent and is int"
    )
    assert signature_drift(before, before) == ""
    assert signature_drift(tree_signature(1), tree_signature("x")) == "it was int and is str"
