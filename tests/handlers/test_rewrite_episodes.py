"""Finished episodes are rewritten before an agent with a replay sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

import rein
from rein.testing.stateful import first_difference

STEPS = 12  # longest episode


def parts(num_envs: int = 3, agent: Any = rein.DQN, **options: Any) -> tuple[Any, Any]:
    env = rein.envs.Gridworld(num_envs, seed=0, max_episode_steps=STEPS, observation="vector")
    return agent(env, hidden=(8,), learning_starts=30, seed=0, **options), env


def unchanged(episodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return episodes


def looped(function: Any = unchanged, store: Any = None, agent: Any = None, env: Any = None) -> Any:
    made = parts() if agent is None else (agent, env)
    loop = rein.training_loop(*made, store, seed=0, iterations=7)
    rein.rewrite_episodes(loop, function)
    return loop


def datasets(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all trajectories in a folder, without the wall clock and the description of the run."""
    stored: dict[str, bytes] = {}

    def add(name: str, part: Any) -> None:
        if isinstance(part, h5py.Dataset) and not name.endswith(("clocks/seconds", "run/data")):
            stored[name] = part[()].tobytes()

    for path in folder.iterdir():
        with h5py.File(path) as file:
            file.visititems(add)
    assert any(name.endswith("reward") for name in stored)
    return stored


def test_replay_gets_the_transitions_of_finished_episodes_in_order() -> None:
    seen: list[Any] = []
    loop = looped()

    @loop.episodes_completed
    def collect(state: rein.State) -> None:
        seen.extend(state.episodes_completed)

    loop.run(epochs=9)
    agent = loop.parts["agent"]
    columns = agent.replay.chronological()
    assert agent.env_steps == 9 * 7 * 3
    assert agent.replay.filled == sum(episode.length for episode in seen) < agent.env_steps
    for name in ("observation", "action", "reward", "terminated", "truncated"):
        played = torch.cat([torch.as_tensor(episode.fields[name]) for episode in seen])
        assert torch.equal(columns[name][:, 0], played)
    assert agent.updates > 0


def test_overlapping_parts_of_an_episode_are_truncated_only_at_their_ends() -> None:
    def overlapping(episodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        long = [episode for episode in episodes if len(episode["reward"]) == STEPS]
        parts = slice(0, 5), slice(2, 8)
        return [{name: column[part] for name, column in episode.items()} for episode in long for part in parts]

    loop = looped(overlapping)
    loop.run(epochs=4)
    truncated = loop.parts["agent"].replay.chronological()["truncated"][:, 0]
    assert len(truncated) > 0
    assert all(part.nonzero().flatten().tolist() == [4, 10] for part in truncated.view(-1, 11))


def test_returned_episodes_replace_those_that_were_played() -> None:
    def rewrite(episodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        kept = [episode for episode in episodes if len(episode["reward"]) >= STEPS]
        copies = [{**episode, "reward": episode["reward"] - 100.0} for episode in kept]
        return [*kept, *copies]

    plain, rewritten = looped(), looped(rewrite)
    for loop in (plain, rewritten):
        loop.run(epochs=4, iterations=7)
        loop.parts["agent"].replay.flush()
    reward = rewritten.parts["agent"].replay.columns["reward"][:, 0]
    assert len(reward) > 0
    assert len(reward) % (2 * STEPS) == 0
    assert torch.equal(reward[:STEPS] - 100.0, reward[STEPS : 2 * STEPS]) or len(reward) > 2 * STEPS
    assert int((reward < -50.0).sum()) == len(reward) // 2


def test_cut_episode_is_truncated_at_its_last_step() -> None:
    loop = looped(lambda episodes: [{name: x[:1] for name, x in episode.items()} for episode in episodes])
    loop.run(epochs=4)
    columns = loop.parts["agent"].replay.columns
    assert (columns["terminated"] ^ columns["truncated"]).all()


def test_stored_trajectories_keep_their_bytes(tmp_path: Path) -> None:
    def spoil(episodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for episode in episodes:
            episode["reward"].fill_(7.0)
            episode["observation"].zero_()
        return episodes

    agents = []
    for name in ("plain", "rewritten"):
        agent, env = parts()
        agents.append(agent)
        loop = rein.training_loop(agent, env, tmp_path / name, seed=0, iterations=7)
        if name == "rewritten":
            rein.rewrite_episodes(loop, spoil)
        agent.learn = lambda updates: {}  # equal actions
        loop.run(epochs=4)
    plain, rewritten = (datasets(tmp_path / name / "trajectories") for name in ("plain", "rewritten"))
    assert plain == rewritten
    assert agents[1].replay.columns["reward"].eq(7.0).all()


@pytest.mark.parametrize("epochs", [1, 5])
def test_run_that_ends_within_episodes_resumes_exactly(tmp_path: Path, epochs: int) -> None:
    whole = looped(store=tmp_path / "whole")
    whole.run(epochs=9)
    looped(store=tmp_path / "part").run(epochs=epochs)
    resumed = looped(store=rein.HDF5Store(tmp_path / "part", exist="resume"))
    rein.resume(resumed)
    assert resumed.parts["rewritten_episodes"].state_dict()["rows"]["length"] > 0
    resumed.run(epochs=9)
    for name in ("agent", "rewritten_episodes"):
        assert first_difference(whole.parts[name].state_dict(), resumed.parts[name].state_dict()) is None


def test_episode_cut_by_a_reset_is_not_learned() -> None:
    loop = looped()
    loop.run(iterations=5)
    agent, env = loop.parts["agent"], loop.parts["environment"]
    agent.observe_reset(env.reset(), torch.tensor([True, False, True]))
    begin_N = loop.parts["rewritten_episodes"].state_dict()["begin"]
    assert begin_N.tolist() == [5, 0, 5]


def test_recurrent_agent_gets_its_carry() -> None:
    agent, env = parts(agent=rein.RecurrentDQN, sequence_length=4, burn_in=2, batch_size=4)
    loop = looped(agent=agent, env=env)
    loop.run(epochs=9)
    assert agent.updates > 0
    assert agent.replay.columns["carry"].shape[:2] == (agent.replay.filled, 1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda episodes: [{"reward": torch.zeros(3)}], "with the fields"),
        (lambda episodes: [{**e, "reward": e["reward"].double()} for e in episodes], "float64"),
        (lambda episodes: [{**e, "reward": e["reward"][1:]} for e in episodes], "different numbers of steps"),
    ],
)
def test_wrong_episodes_raise(function: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        looped(function).run(epochs=9)


def test_agents_without_a_replay_raise() -> None:
    env = rein.envs.Gridworld(3, seed=0)
    for agent in (rein.PPO(env, seed=0), rein.QLearning(env, seed=0)):
        with pytest.raises(ValueError, match="replay"):
            rein.rewrite_episodes(rein.training_loop(agent, env), unchanged)


def test_episodes_are_rewritten_once() -> None:
    with pytest.raises(ValueError, match="combine"):
        rein.rewrite_episodes(looped(), unchanged)


def test_replay_with_rows_of_several_environments_is_refused() -> None:
    environment = rein.envs.CartPole(num_envs=2, seed=0)
    loop = rein.training_loop(rein.DQN(environment, learning_starts=100, hidden=(4,), seed=0), environment)
    loop.run(epochs=1, iterations=2)
    with pytest.raises(ValueError, match="before the first run"):
        rein.rewrite_episodes(loop, lambda episodes: episodes)
