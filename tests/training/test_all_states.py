"""The T + 1 states of a trajectory with T transitions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import rein


def potential(observation: torch.Tensor) -> torch.Tensor:
    return observation.square().sum(1)


def potentials(state: rein.State) -> dict[str, torch.Tensor]:
    transition = state.step_state.transition
    return {"potential": potential(transition.observation), "next_potential": potential(transition.next_observation)}


def test_fields_of_observation_and_next_observation_contain_all_states(tmp_path: Path) -> None:
    env = rein.envs.CartPole(num_envs=4, seed=0, max_episode_steps=20)
    agent = rein.PPO(env, rollout_steps=8, hidden=(8,), seed=0)
    loop = rein.training_loop(agent, env, tmp_path / "run", state_to_trajectory=potentials)
    loop.run(epochs=3, iterations=30)
    loop.parts["store"].close()
    run = rein.open_run(tmp_path / "run")
    assert run.episodes["truncated"].any() and run.episodes["terminated"].any()
    for id in run.episodes["id"]:
        episode = run.episode(id)
        states = np.concatenate([episode.fields["observation"], episode.final_observation[None]])
        expected = potential(torch.from_numpy(states)).numpy()
        assert len(states) == episode.length + 1
        assert np.array_equal(np.append(episode.fields["potential"], episode.fields["next_potential"][-1]), expected)
        assert np.array_equal(episode.fields["next_potential"], expected[1:])
    for trajectory in run:
        states = np.concatenate([trajectory.fields["observation"], trajectory.next_observation[None]])
        goes_on = ~(trajectory.fields["terminated"] | trajectory.fields["truncated"])
        following = (states[1:] ** 2).sum(2)
        assert np.allclose(trajectory.fields["next_potential"][goes_on], following[goes_on])
