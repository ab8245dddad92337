"""`rein export` to Minari."""

import minari
import numpy as np
import pytest

import rein
from rein.agents.ppo import PPO
from rein.cli import main
from rein.envs.cartpole import CartPole
from rein.envs.gymnasium import GymnasiumEnvironment


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))


def train(path, environment, loop_options=None):
    agent = PPO(environment.single_observation_space, environment.single_action_space, hidden=(8,), seed=0)
    store = rein.HDF5Store(path, max_epochs=2)
    rein.train(agent, environment, store, seed=0, epochs=3, iterations=40, **(loop_options or {}))
    store.close()
    return path


def test_export_writes_a_dataset_and_prints_omitted_steps(tmp_path, capsys):
    path = train(tmp_path / "run", CartPole(num_envs=3, seed=0))
    main(["export", str(path), "--to", "minari", "cartpole/mine-v0", "--author", "me"])
    output, run = capsys.readouterr().out, rein.open_run(path)
    dataset = minari.load_dataset("cartpole/mine-v0")
    assert dataset.total_episodes == len(run.episodes["id"]) > 3
    assert f"exported {dataset.total_episodes} episodes with {dataset.total_steps} steps" in output
    assert f"{3 * 3 * 40 - dataset.total_steps} steps of episodes that are unfinished" in output
    assert str(tmp_path / "datasets") in output
    assert dataset.storage.metadata["author"] == {"me"}
    assert dataset.storage.metadata["algorithm_name"] == "rein.agents.ppo.PPO"
    for episode, id in zip(dataset.iterate_episodes(), run.episodes["id"].tolist(), strict=True):
        assert np.array_equal(episode.rewards, run.episode(id).fields["reward"])


def test_episodic_run_is_exported_completely(tmp_path, capsys):
    path = train(tmp_path / "run", CartPole(num_envs=3, seed=0), {"episodic": True})
    main(["export", str(path), "--to", "minari", "mine-v0"])
    assert "left out" not in capsys.readouterr().out
    assert minari.load_dataset("mine-v0").total_steps == rein.open_run(path).episodes["length"].sum()


def test_dataset_names_the_gymnasium_environment(tmp_path):
    path = train(tmp_path / "run", GymnasiumEnvironment("CartPole-v1", num_envs=2, seed=0))
    main(["export", str(path), "--to", "minari", "mine-v0"])
    assert minari.load_dataset("mine-v0").env_spec.id == "CartPole-v1"


@pytest.mark.parametrize(
    ("to", "text"),
    [
        (["csv", "mine"], "--to csv: unknown format; use minari"),
        (["minari", "no version"], "no version"),
        (["minari", "twice-v0"], "twice-v0: the dataset exists already"),
    ],
)
def test_error_is_one_line(tmp_path, capsys, to, text):
    path = train(tmp_path / "run", CartPole(num_envs=3, seed=0))
    (tmp_path / "datasets/twice-v0").mkdir(parents=True)
    with pytest.raises(SystemExit) as ended:
        main(["export", str(path), "--to", *to])
    error = capsys.readouterr().err
    assert ended.value.code == 1
    assert text in error and error.count("\n") == 1
    assert not list((tmp_path / "datasets").rglob("*.hdf5"))
