import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from rein.store.format.nexus import decode_name, encode_name
from rein.store.hdf5 import HDF5Store
from rein.testing.store import make_trajectory, with_fields


def write(folder, *trajectories, info=None):
    """Write these epochs to a file and open it with h5py."""
    store = HDF5Store(folder / "run")
    if info is not None:
        store.write_run(info)
    for trajectory in trajectories:
        store.append(trajectory)
    store.close()
    (path,) = (folder / "run" / "trajectories").iterdir()
    return h5py.File(path)


def datasets(group):
    found = {}
    group.visititems(lambda name, node: found.update({name: node}) if isinstance(node, h5py.Dataset) else None)
    return found


@pytest.fixture
def file(tmp_path):
    with write(tmp_path, *(make_trajectory(epoch, steps=500, num_envs=8) for epoch in (1, 2))) as file:
        yield file


def opened(file):
    """Return the group that a viewer shows when it opens the file."""
    view = file[file.attrs["default"]]
    assert file["entry/views"][file["entry/views"].attrs["default"]] == view[view.attrs["default"]]
    return view[view.attrs["default"]]


@pytest.mark.parametrize("num_envs", [1, 3])
def test_default_plot_is_reward_if_returns_have_no_range(tmp_path, num_envs):
    """Episodes that all ended in the same step, or a single episode, would show as an empty grid."""
    trajectory = make_trajectory(1, num_envs=num_envs)
    episodes = trajectory.episodes._replace(last_step=np.full_like(trajectory.episodes.last_step, 5))
    with write(tmp_path, trajectory._replace(episodes=episodes)) as file:
        assert opened(file).name == "/entry/views/reward"
        assert "episode_return" not in file["entry/views"]


def test_metrics_are_plotted_over_two_or_more_epochs(tmp_path, file):
    metrics = file["entry/epochs/metrics"]
    assert set(file["entry/views/metrics"]) == set(metrics)
    assert len(metrics) > 0
    for key, column in metrics.items():
        view = file["entry/views/metrics"][key]
        assert view[view.attrs["signal"]] == column
        assert list(view.attrs["axes"]) == ["epoch"]
        assert view["title"][()].decode() == column.attrs["long_name"]
    with write(tmp_path / "single", make_trajectory(9)) as single:
        assert "metrics" not in single["entry/views"]


def test_every_group_has_its_nexus_class(file):
    classes = {file.name: file.attrs["NX_class"]}
    file.visititems(
        lambda _, node: classes.update({node.name: node.attrs["NX_class"]}) if isinstance(node, h5py.Group) else None
    )
    assert classes.pop("/") == "NXroot"
    assert classes.pop("/entry") == "NXentry"
    assert set(classes.values()) == {"NXcollection", "NXdata"}
    assert all(name.startswith("/entry/views/") for name, nexus_class in classes.items() if nexus_class == "NXdata")


def test_views_link_to_their_data(file):
    for name, field in datasets(file["entry/trajectory"]).items():
        view = file["entry/views"][name]
        assert view[view.attrs["signal"]] == field
        assert len(view.attrs["axes"]) == field.ndim
        assert set(view.attrs["axes"][2:]) <= {".", "row"}
        for axis, length in zip(view.attrs["axes"][:2], field.shape, strict=False):
            assert view[axis] == file["entry/axes"][axis]
            assert view[axis].shape == (length,)
        assert name.replace("/", ".") in view["title"].asstr()[()]
    assert (
        file["entry/axes/step"].attrs["units"] != file["entry/axes/env"].attrs["units"]
    )  # otherwise a map is a narrow strip


def test_views_draw_images_as_images_and_vectors_as_lines(file):
    fields = file["entry/trajectory"]
    assert fields["observation/camera/left"].attrs["interpretation"] == "rgb-image"
    assert fields["observation/camera/depth"].attrs["interpretation"] == "image"
    assert fields["observation/state"].attrs["interpretation"] == "spectrum"
    assert list(file["entry/views/observation/state"].attrs["default_slice"]) == [".", "0", "0"]
    assert "interpretation" not in fields["reward"].attrs


@pytest.mark.parametrize(("name", "dimension"), [("left", 2), ("depth", 2)])
def test_image_rows_are_counted_from_the_bottom(file, name, dimension):
    """The first row is at the top, where viewers draw the largest number."""
    view = file[f"entry/views/observation/camera/{name}"]
    picture = view[view.attrs["signal"]]
    assert [i for i, axis in enumerate(view.attrs["axes"]) if axis == "row"] == [dimension]
    assert list(view["row"]) == [*range(picture.shape[dimension])][::-1]
    assert view["row"] == file[f"entry/axes/row_{picture.shape[dimension]}"]


def test_view_of_returns_has_a_point_per_episode(file):
    """A scatter plot has two axes, each as long as the signal."""
    view, episodes = opened(file), file["entry/episodes"]
    assert (view.name, view.attrs["NX_class"], view.attrs["signal"]) == (
        "/entry/views/episode_return",
        "NXdata",
        "return",
    )
    assert view["return"] == episodes["return"]
    assert [view[axis] for axis in view.attrs["axes"]] == [episodes["last_step"], episodes["return"]]


@pytest.mark.parametrize("unknown", [False, True])
def test_default_plot_is_observation_if_rewards_are_constant(tmp_path, unknown):
    trajectory = make_trajectory(1)
    episodes = trajectory.episodes._replace(last_step=np.full_like(trajectory.episodes.last_step, 5))
    reward = torch.ones(trajectory.fields["reward"].shape)
    if unknown:
        reward[1] = torch.nan  # invalid rows
    with write(tmp_path, with_fields(trajectory._replace(episodes=episodes), reward=reward)) as file:
        assert opened(file).name.startswith("/entry/views/observation/")


def test_floats_are_raw_and_aligned_and_others_compressed(file):
    kinds = set()
    for name, field in datasets(file["entry"]).items():
        if field.dtype.kind == "f":
            assert (field.chunks, field.compression) == (None, None), name
            assert field.id.get_offset() % 64 == 0, name
        elif field.ndim > 1 and field.size * field.dtype.itemsize >= 4096:
            assert (field.compression, field.compression_opts, field.shuffle) == ("gzip", 1, True), name
            kinds.add(field.dtype)
    assert {np.dtype(bool), np.dtype(np.uint8), np.dtype(np.int64)} <= kinds


def test_files_use_only_widely_supported_features(file):
    """No half precision, variable length, compound types, scales, external or virtual storage, or soft links."""
    for name, node in datasets(file).items():
        assert node.dtype.kind in "biufS" and node.dtype.itemsize != 2, name
        assert not node.is_scale and node.external is None and not node.is_virtual, name
        assert isinstance(file.get(name, getlink=True), h5py.HardLink), name
    assert (
        Path(file.filename).read_bytes()[512:521] == b"\x89HDF\r\n\x1a\n\x00"
    )  # the superblock version that all readers support


def test_epoch_table_locates_the_rows(tmp_path):
    given = [make_trajectory(epoch, steps=steps) for epoch, steps in enumerate((4, 0, 7), start=3)]
    with write(tmp_path, *given) as file:
        epochs, rewards = file["entry/epochs"], file["entry/trajectory/reward"]
        assert list(epochs["number"]) == [3, 4, 5]
        assert list(epochs["status"].asstr()) == ["completed", "halted", "completed"]
        for k, trajectory in enumerate(given):
            first, length = epochs["first_row"][k], epochs["length"][k]
            assert np.array_equal(rewards[first : first + length], trajectory.fields["reward"])
            steps = file["entry/axes/step"][first : first + length]
            assert np.array_equal(steps, trajectory.first_step + np.arange(length))
            state = trajectory.next_observation["state"]
            assert np.array_equal(epochs["next_observation/state"][k], state)
            assert epochs["metrics/episode_return"][k] == trajectory.metrics["episode_return"]
            assert epochs["clocks/env_steps"][k] == trajectory.clocks["env_steps"]


def test_episode_table_has_the_documented_columns(file):
    names = {"id", "environment", "first_step", "last_step", "seed", "return", "length", "terminated", "truncated"}
    assert set(file["entry/episodes"]) == names | {"final_observation", "epoch"}
    assert len({len(column) for column in datasets(file["entry/episodes"]).values()}) == 1


def test_file_without_rows_has_no_default_plot(tmp_path):
    """An empty plot shows as an error."""
    with write(tmp_path, make_trajectory(1, steps=0)) as file:
        assert "default" not in file.attrs
        assert "default" not in file["entry"].attrs
        assert list(datasets(file["entry/views"])) == []


def test_single_environment_is_drawn_as_a_line(tmp_path):
    with write(tmp_path, make_trajectory(1, num_envs=1)) as file:
        assert list(file["entry/views/reward"].attrs["default_slice"]) == [".", "0"]


def test_fields_may_have_names_reserved_by_views(tmp_path):
    names = ("step", "env", "title", "episode_return", "default", "epoch", "metrics")
    extra = {name: torch.full((6, 3), number) for number, name in enumerate(names)}
    with write(tmp_path, with_fields(make_trajectory(1), **extra)) as file:
        for number, name in enumerate(names):
            view = file["entry/views"][name]
            assert (view[view.attrs["signal"]][()] == number).all()


def test_file_contains_run_information(tmp_path):
    info = {"seed": 3, "environment": "Übung"}
    with write(tmp_path, make_trajectory(1), info=info) as file:
        note = file["entry/run"]
        assert note.attrs["NX_class"] == "NXnote"
        assert note["type"].asstr()[()] == "application/json"
        assert note["data"].shape == ()
        assert json.loads(note["data"].asstr()[()]) == info


@pytest.mark.parametrize(
    "name", ["loss", "loss/policy", "a b (c)", ".", "..", "...", "50%", "%2F", "ü", "a\nb", "a\0b"]
)
def test_metric_names_round_trip_as_hdf5_names(name):
    encoded = encode_name(name)
    assert decode_name(encoded) == name
    assert "/" not in encoded and "\0" not in encoded and encoded not in (".", "..")


def test_plain_names_are_not_encoded():
    assert [encode_name(name) for name in ("episode_return", "loss (mean)", "q[0]")] == [
        "episode_return",
        "loss (mean)",
        "q[0]",
    ]
