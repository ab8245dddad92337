"""`rein verify`: intact runs have no problems, and damage is reported by file and reason."""

import errno
import hashlib
import os
import random
import shutil

import numpy as np
import pytest
import torch

import rein
from rein.agents.q_learning import QLearning
from rein.cli import main
from rein.envs.gridworld import Gridworld
from rein.errors import StoreError
from rein.handlers.checkpoint import checkpoint
from rein.ops.random import stream_seed
from rein.ops.trees import map_tree
from rein.store.checkpoint_file import read_checkpoint, write_checkpoint
from rein.store.compact import compact
from rein.store.folder import list_files
from rein.store.format.sealed import USER_BLOCK, user_block
from rein.store.format.trajectory_writer import compose_trajectories
from rein.store.hdf5 import HDF5Store
from rein.store.reader import open_run
from rein.store.verify import verify_run
from rein.testing.store import make_trajectory

MUTANTS = 8


def train(path, episodic=False, epochs=5, resumed=None, **options):
    environment = Gridworld(num_envs=3, seed=0)
    agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
    store = HDF5Store(path, **{"max_epochs": 1, **options})
    loop = rein.training_loop(agent, environment, store, seed=0, episodic=episodic)
    checkpoint(loop, store, every=2)
    if resumed is not None:
        rein.resume(loop, resumed)
    loop.run(epochs=epochs, iterations=60)
    store.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "run"
    train(path)
    return path


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def files(run):
    return list_files(run / "trajectories")


def problems_of(path):
    """Return the problems as (file name, reason)."""
    return [(file.name, reason) for file, reason in verify_run(path).problems]


def rewrite(file, change):
    """Replace the only epoch in a file by `change(epoch)`, with a valid hash."""
    (trajectory,) = open_run(file)
    fields = {name: np.array(field) for name, field in trajectory.fields.items()}
    episodes = map_tree(np.array, trajectory.episodes)
    changed = change(trajectory._replace(fields=fields, episodes=episodes))
    file.write_bytes(compose_trajectories([changed]))


def with_table(trajectory, name, index, value):
    getattr(trajectory.episodes, name)[index] = value
    return trajectory


def end_of(trajectory, index=0):
    """Return row and environment in which an episode ended."""
    table = trajectory.episodes
    return int(table.last_step[index]) - trajectory.first_step, int(table.environment[index])


def with_end(trajectory, name, value):
    trajectory.fields[name][end_of(trajectory)] = value
    return trajectory


def without_episode(trajectory):
    return trajectory._replace(episodes=map_tree(lambda column: column[1:], trajectory.episodes))


@pytest.mark.parametrize("episodic", [False, True])
def test_intact_run_has_no_problems_in_parts_or_compacted(tmp_path, episodic):
    train(tmp_path / "run", episodic, max_bytes=2000)
    assert any("part" in file.name for file in files(tmp_path / "run"))
    found = verify_run(tmp_path / "run")
    assert found.problems == []
    assert found.epochs == 5
    assert found.episodes == len(open_run(tmp_path / "run").episodes["id"]) > 0
    compact(tmp_path / "run", tmp_path / "compacted")
    assert verify_run(tmp_path / "compacted").problems == []


def test_command_prints_a_summary_and_sets_the_status(run, capsys):
    main(["verify", str(run)])
    text = capsys.readouterr().out
    assert text.endswith("no problems\n") and text.count("\n") == 1
    assert (
        "11 files of" in text and "5 epochs" in text
    )  # 5 trajectories, 3 checkpoints, run.json, metrics.csv, metrics.h5
    damaged = files(run)[1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(run)])
    first, *_, last = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1
    assert first.startswith(f"{damaged}: was truncated or extended")
    assert last.endswith("problems in 2")  # the next file reports the missing epoch


@pytest.mark.parametrize("what", ["trajectories/000003-000003.h5", "checkpoints/epoch-000004.h5", "metrics.h5"])
def test_flipped_bit_is_found_in_every_kind_of_file(run, what):
    content = bytearray((run / what).read_bytes())
    content[len(content) // 2] ^= 4
    (run / what).write_bytes(content)
    name = what.rpartition("/")[2]
    reason = "is damaged: its SHA-256 is not the one in its user block"
    assert (name, reason) in problems_of(run)
    assert problems_of(run / what) == [(name, reason)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: with_table(t, "length", 0, 10**6), "has a length that does not fit its steps"),
        (
            lambda t: with_table(t, "length", -1, t.episodes.length[-1] - 1),
            "has another number of rows than its length",
        ),
        (lambda t: with_table(t, "episode_return", -1, 7.5), "has another return than the sum of its rewards"),
        (lambda t: with_table(t, "environment", 0, 3), "has an environment outside 0 to 2"),
        (lambda t: with_table(t, "last_step", 0, 10**6), "ended in a step that is not in its epoch"),
        (lambda t: with_table(t, "first_step", 0, 10**6), "ends before it begins"),
        (lambda t: with_end(t, "valid", False), "ended in a row that is not valid"),
        (lambda t: with_end(t, "terminated", False), "has another terminated in the rows than in the table"),
        (lambda t: with_end(t, "truncated", True), "has another truncated in the rows than in the table"),
        (without_episode, "but is not in the table of episodes"),
        (lambda t: t._replace(status="odd"), "has an epoch with the status 'odd'"),
        (lambda t: t._replace(epoch=9), "has the epochs of a file with the name 000009-000009.h5"),
        (lambda t: with_table(t, "id", 0, 10**6), "has episodes whose ids do not increase"),
        (lambda t: t._replace(first_step=t.first_step + 10**5), "but the file before ends at step"),
    ],
)
def test_tables_that_contradict_their_rows_are_found(run, change, reason):
    rewrite(files(run)[2], change)
    assert any(reason in reason_found for _, reason_found in problems_of(run)), problems_of(run)


def test_episode_without_an_end_is_found(run):
    def change(trajectory):
        trajectory.episodes.terminated[0] = trajectory.episodes.truncated[0] = False
        return trajectory

    rewrite(files(run)[2], change)
    assert [
        (name, "is neither terminated nor truncated" in reason_found) for name, reason_found in problems_of(run)
    ] == [("000003-000003.h5", True)]


def test_missing_and_duplicate_epochs_are_found(run):
    files(run)[2].unlink()
    assert problems_of(run) == [("000004-000004.h5", "epoch 3 is missing before epoch 4")]
    files(run)[2].unlink()
    assert problems_of(run) == [("000005-000005.h5", "epochs 3 to 4 are missing before epoch 5")]
    (run / "trajectories/000006-000006.h5").write_bytes(files(run)[0].read_bytes())
    found = dict(problems_of(run)[::-1])
    assert found["000006-000006.h5"].startswith("has the epochs of a file with the name 000001-000001.h5")
    assert ("000006-000006.h5", "has epoch 1 after epoch 5") in problems_of(run)


@pytest.mark.parametrize(
    ("which", "reason"), [(0, "but the part before it is missing"), (-1, "the next part is missing")]
)
def test_missing_part_of_an_epoch_is_found(tmp_path, which, reason):
    train(tmp_path / "run", max_bytes=2000)
    parts = [file for file in files(tmp_path / "run") if file.name.startswith("000005")]
    assert len(parts) > 2
    parts[which].unlink()
    assert any(reason in reason_found for _, reason_found in problems_of(tmp_path / "run"))


def test_checkpoint_newer_than_the_trajectories_is_found(run):
    for file in files(run)[3:]:
        file.unlink()
    reasons = [reason_found for name, reason_found in problems_of(run) if name == "epoch-000004.h5"]
    assert reasons == ["needs epochs up to 4, but the trajectories end with epoch 3"]
    assert not [reason_found for name, reason_found in problems_of(run) if name == "epoch-000002.h5"]


def test_contents_of_checkpoints_are_checked(run):
    saved = run / "checkpoints/epoch-000004.h5"
    (run / "checkpoints/latest").write_text("epoch-000009.h5\n")
    assert problems_of(run) == [("latest", "names 'epoch-000009.h5', which does not exist")]
    _, state, about = read_checkpoint(saved)
    write_checkpoint(saved, state, {**about, "format": 999})
    assert "this rein reads version" in dict(problems_of(run))["epoch-000004.h5"]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("metrics.csv", lambda text: text[:-3], "ends within line 6, which the next start of the run removes"),
        ("metrics.csv", lambda text: text.replace("\n3,", "\n7,"), "line 4: epoch 7 comes after epoch 2"),
        ("metrics.csv", lambda text: text.replace("\n3,", "\nx,"), "line 4: 'x' is not a number"),
        ("metrics.csv", lambda text: text.replace("\n3,", "\n3,4,"), "line 4"),
        ("metrics.csv", lambda text: text.replace("epoch", "era"), "has no column 'epoch'"),
        ("metrics.csv", lambda text: text[: text.index("\n4,") + 1], "epoch 3, but the trajectories end with epoch 5"),
        ("metrics.csv", lambda text: text[: text.index("\n") + 1], "epoch 0, but the trajectories end with epoch 5"),
        (
            "metrics.csv",
            lambda text: text.replace(text[text.index("\n1,") : text.index("\n3,")], ""),
            "begins with epoch 3",
        ),
        ("run.json", lambda text: text[:50], "has invalid content"),
        ("run.json", lambda text: "[" * 100_000, "has invalid content"),
        ("run.json", lambda text: "[]", "a JSON object was expected"),
    ],
)
def test_metrics_and_run_json_are_checked(run, name, change, reason):
    (run / name).write_text(change((run / name).read_text()))
    ((found, reason_found),) = problems_of(run)
    assert (found, reason in reason_found) == (name, True), reason_found


def sealed(content):
    image = content[USER_BLOCK:]
    return user_block(len(image), hashlib.sha256(image).hexdigest()) + image


def test_hostile_files_with_valid_hashes_are_reported(run):
    draw = random.Random(stream_seed(0, "mutants"))
    whole = bytearray(files(run)[0].read_bytes())
    for number in range(6, 6 + MUTANTS):
        mutant = bytearray(whole)
        for _ in range(20):
            at = draw.randrange(USER_BLOCK, 6000)
            mutant[at : at + 8] = draw.randbytes(8)
        (run / f"trajectories/{number:06d}-{number:06d}.h5").write_bytes(sealed(bytes(mutant)))
    for number in (100, 200):  # among valid files
        (run / f"trajectories/{number:06d}-{number:06d}.h5").write_bytes(sealed(bytes(512) + draw.randbytes(3000)))
    (run / "checkpoints/epoch-000009.h5").write_bytes(sealed(bytes(512) + draw.randbytes(3000)))
    os.mkfifo(run / "trajectories/000300-000300.h5")
    (run / "trajectories/000400-000400.h5").mkdir()
    reported = {name for name, _ in problems_of(run)}
    assert {f"{number:06d}-{number:06d}.h5" for number in (*range(6, 6 + MUTANTS), 100, 200, 300, 400)} <= reported
    assert "epoch-000009.h5" in reported
    assert not {file.name for file in files(run)[:5]} & reported


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("as_read", [True, False])
def test_lack_of_system_resources_is_not_reported_as_damage(run, monkeypatch, code, as_read):
    def refuse(path):
        lack = OSError(code, os.strerror(code))
        if not as_read:
            raise lack
        raise StoreError(f"{path}: cannot be read: {lack.strerror}") from lack

    monkeypatch.setattr("rein.store.format.sealed.verify", refuse)
    with pytest.raises(StoreError, match=f"000001-000001.h5: cannot be .*: {os.strerror(code)}"):
        verify_run(run)


def test_read_error_of_the_disk_is_reported(run, monkeypatch):
    def refuse(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("rein.store.format.sealed.verify", refuse)
    assert (files(run)[0].name, f"cannot be read: {os.strerror(errno.EIO)}") in problems_of(run)


def test_single_file_can_be_checked(run):
    for file in [*run.rglob("*.h5"), run / "metrics.csv", run / "run.json"]:
        found = verify_run(file)
        assert (found.files, found.problems) == (1, []), file
    assert verify_run(files(run)[2]).epochs == 1


def test_missing_run_raises(tmp_path):
    with pytest.raises(StoreError, match="is neither the folder of a run"):
        verify_run(tmp_path)
    with pytest.raises(StoreError, match="is neither the folder of a run"):
        verify_run(tmp_path / "none")


def test_unknown_fields_and_integer_rewards_are_accepted(tmp_path):
    """Stores keep any fields; unknown ones are not compared."""
    store = HDF5Store(tmp_path / "run")
    trajectory = make_trajectory(1)
    flags = {name: torch.zeros(6, 3, dtype=torch.bool) for name in ("terminated", "truncated")}
    fields = {**trajectory.fields, **flags, "reward": torch.ones(6, 3, dtype=torch.int64)}
    none = map_tree(lambda column: column[:0], trajectory.episodes)._replace(final_observation=None)
    store.append(trajectory._replace(fields=fields, episodes=none))
    store.close()
    assert verify_run(tmp_path / "run").problems == []


@pytest.mark.parametrize("options", [{}, {"every": 0}])
def test_missing_metrics_file_is_found(tmp_path, options):
    run = tmp_path / "run"
    train(run, **options)
    assert problems_of(run) == []
    (run / "metrics.csv").unlink()
    assert problems_of(run) == [("metrics.csv", "is missing, but metrics.h5 was made from it")]


def test_run_continued_in_another_folder_starts_with_a_later_epoch(run, tmp_path):
    train(tmp_path / "other", epochs=7, resumed=run)
    lines = (tmp_path / "other/metrics.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["epoch", "6", "7"]
    assert problems_of(tmp_path / "other") == []


@pytest.mark.parametrize("gone", [1, 3, 5])
@pytest.mark.parametrize("saved", [True, False])
def test_missing_oldest_files_are_found(run, gone, saved):
    first = files(run)[0]
    for file in files(run)[:gone]:
        file.unlink()
    if not saved:
        shutil.rmtree(run / "checkpoints")
    expected = f"epoch{'s' * (gone > 1)} 1{f' to {gone}' * (gone > 1)} of metrics.csv"
    assert [name for name, reason_found in problems_of(run) if reason_found.startswith(expected)] == [
        files(run)[0].name if gone < 5 else first.parent.name
    ]


def test_missing_oldest_files_are_found_without_metrics(run):
    for name in ("metrics.csv", "metrics.h5"):
        (run / name).unlink()
    assert problems_of(run) == []
    files(run)[0].unlink()
    ((name, reason_found),) = problems_of(run)
    assert name == "000002-000002.h5" and reason_found.startswith("begins with step 60 and episode")


@pytest.mark.parametrize("options", [{"every": 2}, {"keep_best": (3, "episode_return", "max")}])
def test_missing_files_are_found_if_only_some_epochs_are_stored(tmp_path, options):
    train(tmp_path / "run", epochs=6, **options)
    assert problems_of(tmp_path / "run") == []
    files(tmp_path / "run")[0].unlink()
    assert any("missing" in reason_found for _, reason_found in problems_of(tmp_path / "run"))
    for file in files(tmp_path / "run"):
        file.unlink()
    assert any("missing" in reason_found for _, reason_found in problems_of(tmp_path / "run"))


def test_run_without_finished_files_has_no_problems(tmp_path):
    store = HDF5Store(tmp_path / "run")
    environment = Gridworld(num_envs=3, seed=0)
    agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
    loop = rein.training_loop(agent, environment, store, seed=0)
    seen = []
    loop.epoch_started(once=3)(lambda state: seen.append(problems_of(tmp_path / "run")))
    loop.run(epochs=3, iterations=60)
    store.close()
    assert seen == [[]]


def test_resume_warns_about_missing_trajectory_files(run, caplog):
    for file in files(run)[:2]:
        file.unlink()
    train(run, epochs=7, resumed=run, exist="resume")
    warnings = [text for text in caplog.messages if "has no trajectory" in text]
    assert warnings == [
        f"{run}/trajectories: has no trajectory of epochs 1 to 2; the run continues after epoch 5 without"
    ]
