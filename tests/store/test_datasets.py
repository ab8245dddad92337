"""Transitions and sequences of a run, compared with an independent record."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import rein
from rein.agents.ppo import PPO
from rein.envs.cartpole import CartPole
from rein.errors import StoreError
from rein.store import datasets as datasets_module
from rein.store.datasets import to_tensordict, to_torch
from rein.store.hdf5 import HDF5Store
from rein.store.reader import open_run
from rein.testing.store import make_trajectory, with_fields
from rein.types import Episodes, Trajectory
from tests.store.trajectory_files import write

N = 3


class Known(NamedTuple):
    """Recorded transition: its observation, which is a unique number, and the next observation."""

    observation: float
    following: float
    environment: int
    step: int
    episode: int


def simulate(
    epochs: int, steps: int, seed: int = 0, reset_at: int | None = None
) -> tuple[list[Trajectory], list[Known]]:
    """Simulate N environments whose episodes continue across epochs. Every observation is a unique number.

    All environments are reset from outside before the vector step `reset_at`.
    """
    random, counter = np.random.default_rng(seed), itertools.count(1)
    now, begun, made = [float(next(counter)) for _ in range(N)], [0] * N, [list[Known]() for _ in range(N)]
    known: list[Known] = []
    trajectories, episode = [], 0
    for epoch in range(1, epochs + 1):
        lead = (steps, N)
        observation, action = np.zeros((*lead, 2), np.float32), np.zeros(lead, np.int64)
        flags = {name: np.zeros(lead, bool) for name in ("terminated", "truncated")}
        ended: list[Any] = []
        for t in range(steps):
            step = (epoch - 1) * steps + t
            if step == reset_at:  # the transition into the reset has a next observation only at the end of an epoch
                for n in range(N):
                    if t and made[n]:
                        made[n].pop()
                    known += [k._replace(episode=-1) for k in made[n]]
                    now[n], begun[n], made[n] = float(next(counter)), step, []
            for n in range(N):
                observation[t, n], action[t, n] = (now[n], -now[n]), int(now[n]) % 5
                following, ends = float(next(counter)), random.random() < 0.15
                made[n].append(Known(now[n], following, n, step, episode))
                now[n] = following
                if ends:
                    flags["terminated" if random.random() < 0.5 else "truncated"][t, n] = True
                    ended.append((episode, n, begun[n], step, step - begun[n] + 1, t, following))
                    known += [k._replace(episode=episode) for k in made[n]]
                    episode, now[n], begun[n], made[n] = episode + 1, float(next(counter)), step + 1, []
        column = {
            name: np.array([e[i] for e in ended], np.int64) for i, name in enumerate(("id", "n", "a", "b", "length"))
        }
        at = np.array([e[5] for e in ended], int), column["n"]
        final = np.array([(e[6], -e[6]) for e in ended], np.float32).reshape(-1, 2)
        fields = {"observation": {"x": observation}, "action": action, "reward": observation[..., 0] / 2, **flags}
        trajectories.append(
            Trajectory(
                epoch=epoch,
                status="completed",
                first_step=(epoch - 1) * steps,
                fields=fields | {"valid": np.ones(lead, bool), "value": observation[..., 1]},
                next_observation={"x": np.array([(x, -x) for x in now], np.float32)},
                episodes=Episodes(
                    column["id"], column["n"], column["a"], column["b"], column["a"], final[:, 0], column["length"],
                    flags["terminated"][at], flags["truncated"][at], {"x": final},
                ),
                metrics={},
                clocks={},
            )
        )  # fmt: skip
    return trajectories, known + [k._replace(episode=-1) for n in range(N) for k in made[n]]


@pytest.fixture(scope="module")
def given() -> tuple[list[Trajectory], list[Known]]:
    return simulate(7, 11)


@pytest.fixture(params=["in memory", "mapped"])
def path(request: Any, monkeypatch: Any, tmp_path: Path, given: Any) -> Path:
    if request.param == "mapped":
        monkeypatch.setattr(datasets_module, "_SMALL", 0)
    return write(tmp_path / "run", given[0], max_epochs=2)


def pairs(batch: Any) -> list[tuple[float, float]]:
    """Return observation and next observation of every row of a batch."""
    following = batch.next_observation["x"][..., 0].reshape(-1)
    return list(zip(batch.observation["x"][..., 0].reshape(-1).tolist(), following.tolist(), strict=True))


def check_row(batch: Any) -> None:
    """Assert that all fields of a batch are from the same rows."""
    x = batch.observation["x"]
    assert torch.equal(x[..., 1], -x[..., 0]) and torch.equal(batch.extras["value"], x[..., 1])
    assert torch.equal(batch.reward, x[..., 0] / 2) and torch.equal(batch.action, x[..., 0].long() % 5)
    assert torch.equal(batch.next_observation["x"][..., 1], -batch.next_observation["x"][..., 0])
    assert batch.valid.all()


def test_transitions_are_chronological_with_correct_next_observations(path, given):
    transitions = open_run(path).transitions()
    known = sorted(given[1], key=lambda k: (k.step, k.environment))
    assert len(transitions) == len(known) == 7 * 11 * N
    everything = transitions[:]
    check_row(everything)
    assert pairs(everything) == [(k.observation, k.following) for k in known]
    assert (everything.terminated | everything.truncated).sum() == len(open_run(path).episodes["id"])


def test_batch_has_the_order_of_its_indices(path, given):
    transitions = open_run(path).transitions()
    everything, order = pairs(transitions[:]), torch.randperm(len(transitions), generator=torch.manual_seed(0))
    for indices in (order, order.numpy(), order.tolist()):
        batch = transitions[indices]
        check_row(batch)
        assert pairs(batch) == [everything[i] for i in order.tolist()]
    one = transitions[-2]
    assert one.observation["x"].shape == (2,) and one.reward.shape == ()
    assert (float(one.observation["x"][0]), float(one.next_observation["x"][0])) == everything[-2]
    chunks = list(transitions.chunks(50))
    assert [len(chunk.valid) for chunk in chunks] == [50, 50, 50, 50, 31]
    assert [pair for chunk in chunks for pair in pairs(chunk)] == everything


def test_invalid_indices_raise(path):
    transitions = open_run(path).transitions()
    for index in (len(transitions), -len(transitions) - 1, [0, len(transitions)]):
        with pytest.raises(IndexError, match=f"has {len(transitions)} elements"):
            transitions[index]
    for index in ([0.5], [True, False], 1.5, "1"):
        with pytest.raises(TypeError):
            transitions[index]


def windows(known: list[Known], length: int, stride: int, pad: bool = False) -> list[list[Known]]:
    """Find all windows row by row, with shorter ones at the ends of episodes if `pad`."""
    at = {(k.environment, k.step): k for k in known}
    episodes: list[list[Known]] = []
    for k in sorted(known, key=lambda k: (k.environment, k.step)):
        before = at.get((k.environment, k.step - 1))
        if before is None or before.following != k.observation:
            episodes.append([])
        episodes[-1].append(k)
    found = [e[i : i + length] for e in episodes for i in range(0, len(e) if pad else len(e) - length + 1, stride)]
    return sorted(found, key=lambda w: (w[0].step, w[0].environment))


@pytest.mark.parametrize(("length", "stride"), [(1, 1), (2, 1), (4, 1), (4, 3), (9, 9), (30, 1)])
def test_sequences_are_windows_of_episodes_across_files(path, given, length, stride):
    sequences = open_run(path).sequences(length, stride)
    expected = windows(given[1], length, stride)
    assert len(sequences) == len(expected) and (length == 30 or expected)
    order = torch.randperm(len(sequences), generator=torch.manual_seed(0))
    for batch, want in ((sequences[:], expected), (sequences[order], [expected[i] for i in order.tolist()])):
        assert batch.reward.shape == (len(want), length) and batch.observation["x"].shape == (len(want), length, 2)
        check_row(batch)
        assert pairs(batch) == [(k.observation, k.following) for window in want for k in window]
    crossing = [w for w in expected if w[0].step // 22 != w[-1].step // 22]
    assert crossing or length in (1, 30)


@pytest.mark.parametrize("small", [datasets_module._SMALL, 0])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 18, 20, 32, 33, 100])
def test_run_shorter_than_the_window_has_no_sequences(tmp_path, monkeypatch, length, small):
    monkeypatch.setattr(datasets_module, "_SMALL", small)
    store = HDF5Store(tmp_path / "run")
    store.append(make_trajectory(1, steps=5))  # 15 rows
    store.close()
    sequences = open_run(store.path).sequences(length, fields=["observation", "reward", "terminated"])
    assert (len(sequences) > 0) == (length == 1)
    assert sequences[:0].reward.shape == (0, length)
    if length == 1:
        assert torch.equal(sequences[0].reward, sequences[:3].reward[0])


def test_reset_outside_a_step_interrupts_sequences(tmp_path):
    for reset_at in (14, 22):  # in the middle of an epoch and a file; at the beginning of both
        trajectories, known = simulate(6, 11, seed=3, reset_at=reset_at)
        run = open_run(write(tmp_path / str(reset_at), trajectories, max_epochs=2))
        lost = {(k.environment, k.step) for k in known}
        assert len(lost) < 6 * 11 * N if reset_at == 14 else len(lost) == 6 * 11 * N
        if reset_at == 14:
            expected = [(k.observation, k.following) for k in sorted(known, key=lambda k: (k.step, k.environment))]
            assert pairs(run.transitions()[:]) == expected
        assert pairs(run.sequences(5)[:]) == [(k.observation, k.following) for w in windows(known, 5, 1) for k in w]


def test_invalid_rows_and_their_predecessors_are_dropped(tmp_path, given):
    trajectories, known = given
    valid = np.ones((11, N), bool)
    goes_on = ~(trajectories[2].fields["terminated"] | trajectories[2].fields["truncated"])
    t, n = np.argwhere(goes_on[:-1] & goes_on[1:])[4]
    valid[t + 1, n] = False
    changed = [*trajectories[:2], with_fields(trajectories[2], valid=valid), *trajectories[3:]]
    run = open_run(write(tmp_path / "run", changed, max_epochs=2))
    step = 22 + t
    left = [k for k in known if (k.environment, k.step) not in {(n, step), (n, step + 1)}]
    assert sorted(pairs(run.transitions()[:])) == sorted((k.observation, k.following) for k in left)
    assert len(run.sequences(3)) == len(windows(left, 3, 1))


def test_transitions_of_selected_episodes_and_fields(path, given):
    run = open_run(path)
    ids = run.episodes["id"][[3, 0, 9]]
    chosen = [k for k in given[1] if k.episode in ids]
    found = run.transitions(episodes=ids)
    assert sorted(pairs(found[:])) == sorted((k.observation, k.following) for k in chosen)
    assert len(run.sequences(3, episodes=ids.tolist())) == len(windows(chosen, 3, 1))
    assert len(run.transitions(episodes=[])) == 0
    batch = run.transitions(fields=["reward", "value"])[:4]
    assert batch.observation is batch.next_observation is batch.action is batch.terminated is None
    assert batch.reward.shape == (4,) and list(batch.extras) == ["value"] and batch.valid.all()
    with pytest.raises(ValueError, match=r"no field \['rewards'\]; the fields are \['action', 'observation', 'reward'"):
        run.transitions(fields=["rewards"])
    with pytest.raises(ValueError, match="must be a list of names"):
        run.transitions(fields="reward")
    with pytest.raises(ValueError, match=r"no episode 999; \d+ are stored"):
        run.transitions(episodes=[999])
    for mask in (run.episodes["return"] > 0.0, torch.ones(3, dtype=torch.bool), [0.5], "01"):
        with pytest.raises(TypeError, match=r"episodes must be ids, got .*for a mask use"):
            run.transitions(episodes=mask)  # type: ignore[arg-type]  # invalid on purpose
    with pytest.raises(ValueError, match="must be positive"):
        run.sequences(0)


def test_episode_is_joined_across_epochs_and_files(path, given):
    run = open_run(path)
    for index, id in enumerate(run.episodes["id"].tolist()):
        episode = run.episode(id)
        known = sorted((k for k in given[1] if k.episode == id), key=lambda k: k.step)
        assert (episode.id, episode.length, episode.environment) == (id, len(known), known[0].environment)
        assert episode.fields["observation"]["x"][:, 0].tolist() == [k.observation for k in known]
        assert episode.fields["action"].tolist() == [int(k.observation) % 5 for k in known]
        assert episode.final_observation["x"].tolist() == [known[-1].following, -known[-1].following]
        assert episode.terminated == run.episodes["terminated"][index]
    spans = (run.episodes["last_step"] // 22) - (run.episodes["first_step"] // 22)
    assert spans.max() == 1  # some episodes span two files
    with pytest.raises(ValueError, match="no episode 999; "):
        run.episode(999)


def test_episode_with_missing_rows_raises(path):
    run = open_run(path)
    crossing = np.flatnonzero((run.episodes["first_step"] < 22) & (run.episodes["last_step"] >= 22))[0]
    run.files[0].unlink()
    id, length = run.episodes["id"][crossing], run.episodes["length"][crossing]
    with pytest.raises(StoreError, match=f"episode {id} has only .* of its {length} transitions"):
        open_run(path).episode(id)
    assert len(open_run(path).transitions()) == 5 * 11 * N


def test_recorded_transitions_are_read_back(tmp_path):
    environment = CartPole(4, seed=0)
    agent = PPO(environment.single_observation_space, environment.single_action_space, seed=0)
    loop = rein.training_loop(agent, environment, HDF5Store(tmp_path / "run", max_epochs=2), iterations=20, seed=0)
    seen = []
    loop.observation_recorded.attach(lambda state: seen.append(state.step_state.transition))
    loop.run(epochs=7)
    everything = open_run(tmp_path / "run").transitions()[:]
    for name in ("observation", "action", "reward", "terminated", "truncated", "next_observation"):
        assert torch.equal(getattr(everything, name), torch.cat([getattr(t, name) for t in seen])), name
    assert everything.terminated.any()


METHODS = ["fork", "spawn"] if sys.platform == "linux" else ["spawn"]


@pytest.mark.default_cases("mapped-fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", ["mapped"], indirect=True)
def test_workers_read_the_same_data(path, method):
    dataset = open_run(path).sequences(3)
    expected = dataset[:]  # the parent process has also read the files
    context = multiprocessing.get_context(method)
    batches = list(DataLoader(dataset, batch_size=16, num_workers=2, multiprocessing_context=context))
    assert pairs_of(batches) == pairs(expected)
    assert torch.equal(torch.cat([batch.action for batch in batches]), expected.action)


def pairs_of(batches: list[Any]) -> list[Any]:
    return [pair for batch in batches for pair in pairs(batch)]


def test_data_loader_needs_no_collate_function(path):
    transitions = open_run(path).transitions()
    order = torch.randperm(len(transitions), generator=torch.manual_seed(0)).tolist()
    batches = list(DataLoader(transitions, batch_size=32, sampler=order))
    assert pairs_of(batches) == pairs(transitions[order])
    samples = transitions.__getitems__([5, 3])
    assert len(samples) == 2 and pairs(samples.whole) == pairs(transitions[[5, 3]])
    assert [float(sample.observation["x"][0]) for sample in samples] == [p[0] for p in pairs(samples.whole)]
    stacked = torch.utils.data.default_collate([transitions[5], transitions[3]])
    assert pairs(stacked) == pairs(samples.whole) and stacked.extras.keys() == {"value"}


def test_pickled_dataset_has_no_cached_data(path):
    transitions = open_run(path).transitions()
    before = pickle.dumps(transitions)
    expected = pairs(transitions[:])
    assert len(pickle.dumps(transitions)) == len(before)
    assert pairs(pickle.loads(before)[:]) == expected


def test_changed_file_raises_before_it_is_read(path, monkeypatch):
    monkeypatch.setattr(datasets_module, "_SMALL", 0)
    run = open_run(path)
    transitions = run.transitions()
    transitions[:]
    file = run.files[1]
    with file.open("r+b") as opened:
        opened.truncate(4096)
    with pytest.raises(StoreError, match=f"{file.name}: has changed since it was opened"):
        transitions[:]


def test_files_with_different_fields_raise(tmp_path):
    given = [make_trajectory(1), with_fields(make_trajectory(2), value=torch.zeros(6, 3))]
    run = open_run(write(tmp_path / "run", given))
    with pytest.raises(ValueError, match=r"000002-000002\.h5: the field value differs from .*000001-000001"):
        run.transitions()
    assert len(run.transitions(fields=["reward"])) == 2 * 6 * 3


def test_files_may_differ_in_number_of_environments(tmp_path):
    given = [make_trajectory(1), make_trajectory(2, num_envs=5), make_trajectory(3, num_envs=5)]
    transitions = open_run(write(tmp_path / "run", given)).transitions(fields=["reward"])
    rewards = torch.cat([trajectory.fields["reward"].reshape(-1) for trajectory in given])
    assert torch.equal(transitions[:].reward, rewards)


def test_empty_fields_and_observations_are_read(tmp_path):
    def with_nothing(tree, *lead):
        return {**tree, "nothing": torch.zeros(*lead, 0)}

    given = make_trajectory(1)
    final = with_nothing(given.episodes.final_observation, 3)
    changed = given._replace(
        fields=with_nothing(given.fields, 6, 3) | {"observation": with_nothing(given.fields["observation"], 6, 3)},
        next_observation=with_nothing(given.next_observation, 3),
        episodes=given.episodes._replace(final_observation=final),
    )
    run = open_run(write(tmp_path / "run", [changed]))
    for dataset in (run.transitions(), run.sequences(2)):
        everything = dataset[:]
        assert len(everything.valid) == len(dataset) > 0
        for tree in (everything.extras, everything.observation, everything.next_observation):
            assert tree["nothing"].shape == (*everything.reward.shape, 0)


def test_sequences_follow_one_environment_when_num_envs_changes(tmp_path):
    given = [make_trajectory(1), make_trajectory(2, num_envs=5), make_trajectory(3, num_envs=5), make_trajectory(4)]
    sequences = open_run(write(tmp_path / "run", given, max_epochs=1)).sequences(3, fields=["reward", "action"])
    stretches = [torch.cat([given[i].fields["reward"] for i in files]) for files in ((0,), (1, 2), (3,))]
    windows = {
        tuple(column[t : t + 3].tolist())
        for stretch in stretches
        for column in stretch.unbind(1)
        for t in range(len(column) - 2)
    }
    assert len(windows) == 3 * 4 + 5 * 10 + 3 * 4
    found = [tuple(rewards) for rewards in sequences[:].reward.tolist()]
    assert len(set(found)) == len(found) > 5
    assert set(found) <= windows


def test_tensors_share_no_memory_with_arrays(path):
    run = open_run(path)
    tensor = run.tensor("observation/x")
    assert np.array_equal(tensor.numpy(), run.field("observation/x"))
    fields = to_torch(run.trajectory(3).fields)
    assert torch.equal(fields["observation"]["x"], tensor[22:33])
    tensor += 1
    assert not np.array_equal(tensor.numpy(), run.field("observation/x"))


def test_missing_tensordict_raises(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(ImportError, match="pip install tensordict"):
        to_tensordict(open_run(path).transitions()[:3])


def test_sequences_of_long_episodes_and_a_warning_for_short_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trajectories, _ = simulate(7, 11)
    run = open_run(write(tmp_path / "run", trajectories))
    length_E = run.episodes["length"]
    long = length_E >= 4
    selected, expected = run.sequences(2, min_length=4), run.sequences(2, episodes=run.episodes["id"][long])
    assert 0 < len(selected) == len(expected) < len(run.sequences(2, min_length=1))
    caplog.clear()
    run.sequences(4, pad=True)
    run.sequences(4, min_length=4)
    assert caplog.text == ""
    run.sequences(4)
    assert f"{(~long).sum()} of {len(long)} episodes are shorter" in caplog.text
