"""`rein export` of episodes to Minari, and of policies."""

import csv

import minari
import numpy as np
import pytest

import rein
from rein.agents.ppo import PPO
from rein.cli import main
from rein.envs.cartpole import CartPole
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.integrations.minari import spec_of


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


@pytest.mark.parametrize(
    ("make", "name", "steps"),
    [
        (lambda: GymnasiumEnvironment("CartPole-v1", num_envs=2, seed=0), "CartPole-v1", 500),
        (lambda: rein.make("Pendulum-v1", num_envs=2, seed=0, g=9.0, max_episode_steps=30), "Pendulum-v1", 30),
        (lambda: CartPole(num_envs=2, seed=0, max_episode_steps=20), "CartPole-v1", 20),
        (lambda: rein.envs.MountainCar(num_envs=2, seed=0, max_episode_steps=9), "MountainCar-v0", 9),
        (lambda: rein.envs.Acrobot(num_envs=2, seed=0, max_episode_steps=9), "Acrobot-v1", 9),
    ],
    ids=["id", "options", "native", "mountain car", "acrobot"],
)
def test_dataset_recovers_the_gymnasium_environment(tmp_path, make, name, steps):
    path = train(tmp_path / "run", make())
    main(["export", str(path), "--to", "minari", "mine-v0"])
    dataset = minari.load_dataset("mine-v0")
    environment = dataset.recover_environment()
    assert (environment.spec.id, environment.spec.max_episode_steps) == (name, steps)
    assert getattr(environment.unwrapped, "g", 9.0) == 9.0
    assert environment.observation_space == dataset.observation_space
    assert environment.action_space == dataset.action_space


def test_dataset_of_a_changed_environment_does_not_name_it():
    assert spec_of(rein.envs.wrappers.FrameSkip(CartPole(num_envs=2, seed=0), 2)) is None
    assert spec_of(GymnasiumEnvironment("FrozenLake-v1", desc=["SF", "FG"])) is None  # its config has only the repr


@pytest.mark.parametrize(
    ("to", "text"),
    [
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


def test_worlds_are_exported_by_agent_or_together(tmp_path, capsys):
    worlds = rein.envs.Navigation(3, 2, early_leave=True, seed=0, max_episode_steps=13)
    path = tmp_path / "run"
    agent, store = PPO(worlds, rollout_steps=40, minibatches=2, hidden=(8,), seed=0), rein.HDF5Store(path, max_epochs=2)
    loop = rein.training_loop(agent, worlds, store, seed=0, iterations=40)

    @loop.action_selected
    def steer(state):
        """Move agents 1 straight to their targets, so that they leave early."""
        straight = (3.0 * state.step_state.observation[:, 2:4]).clamp(-1.0, 1.0)
        action = state.step_state.action.clone()
        action[1::2] = straight[1::2]
        state.step_state = state.step_state._replace(action=action)

    loop.run(epochs=3)
    store.close()
    run = rein.open_run(path)
    assert not run.field("valid").all()  # agents have left early
    main(["export", str(path), "--to", "minari", "worlds/all-v0"])
    main(["export", str(path), "--to", "minari", "worlds/second-v0", "--agent", "1"])
    output = capsys.readouterr().out
    ids, environments = run.episodes["id"], run.episodes["environment"]
    for name, chosen in (("all", ids), ("second", ids[environments % 2 == 1])):
        dataset = minari.load_dataset(f"worlds/{name}-v0")
        assert dataset.total_episodes == len(chosen) > 3
        for exported, id in zip(dataset.iterate_episodes(), chosen.tolist(), strict=True):
            stored = run.episode(id)
            assert np.array_equal(exported.rewards, stored.fields["reward"])
            assert np.array_equal(exported.observations[:-1], stored.fields["observation"])
            assert np.array_equal(exported.observations[-1], stored.final_observation)
            assert np.array_equal(exported.actions, stored.fields["action"])
        valid = run.field("valid")[:, (slice(None) if name == "all" else slice(1, None, 2))]
        assert f"omitted {valid.sum() - dataset.total_steps} steps" in output
    with pytest.raises(SystemExit):
        main(["export", str(path), "--to", "minari", "worlds/third-v0", "--agent", "2"])
    assert "--agent 2: the worlds of this run have the agents 0 to 1" in capsys.readouterr().err


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A run whose checkpoint was saved after an evaluation."""
    path = tmp_path_factory.mktemp("runs") / "run"
    environment, test = CartPole(num_envs=3, seed=0), CartPole(num_envs=2, seed=1)
    agent = PPO(environment.single_observation_space, environment.single_action_space, hidden=(8,), seed=0)
    loop = rein.training_loop(agent, environment, path, seed=0, iterations=40)
    rein.evaluate_every(loop, agent, test, episodes=2, every=1)
    rein.checkpoint(loop, event="evaluation_completed")
    loop.run(epochs=2)
    return path


def test_policy_is_exported_next_to_the_run(evaluated, capsys):
    main(["export", str(evaluated), "--to", "safetensors"])
    assert "policy.safetensors, with the model card" in capsys.readouterr().out
    loaded, policy = rein.load_policy(evaluated / "policy.safetensors"), rein.load_policy(evaluated)
    observation = CartPole(num_envs=9, seed=2).reset()
    assert loaded.select_action(observation)[0].equal(policy.select_action(observation)[0])


def test_model_card_names_environment_and_evaluated_return(evaluated, tmp_path, capsys):
    with (evaluated / "evaluations.csv").open() as file:
        value = float([*csv.DictReader(file)][-1]["return"])
    main(["export", str(evaluated / "checkpoints"), "--to", "pt2", str(tmp_path / "mine.pt2")])
    card = (tmp_path / "mine.md").read_text()
    assert "| environment | CartPole |" in card
    assert f"| mean evaluated return | {value:.6g} |" in card
    assert 'torch.export.load("mine.pt2")' in card


def test_agent_of_a_file_is_exported_beside_the_file(evaluated, tmp_path):
    rein.save(rein.load_agent(evaluated), tmp_path / "agent.h5")
    main(["export", str(tmp_path / "agent.h5"), "--to", "safetensors"])
    assert (tmp_path / "policy.safetensors").is_file()
    assert "environment | not recorded" in (tmp_path / "policy.md").read_text()
