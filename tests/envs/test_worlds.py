"""Multi-agent worlds: statistics, evaluation, resume, replay, wrappers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import rein
from rein.cli.rebuild import environment_of
from rein.envs.navigation import Navigation
from rein.envs.wrappers import FrameSkip, FrameStack, RecordVideo, TimeLimit
from rein.episodes.episode_replay import replay
from rein.errors import EnvironmentContractError
from rein.ops.random import uniform
from rein.testing import EnvironmentContract, StatefulContract
from rein.testing.stateful import first_difference


class Runners(rein.envs.SimulatedWorlds):
    """Three runners in each world, who leave when they have covered a distance of 3. The reward is the distance run."""

    agents = 3
    agent_groups: ClassVar = {"slow": (0, 2), "fast": (1,)}
    single_observation_space = spaces.Box(0.0, 9.0, (2,))
    single_action_space = spaces.Box(0.0, 1.0, (1,))
    initial_range = ((0.0, 2.0),)

    def dynamics(self, state: Tensor, action: Tensor) -> Any:
        speed_A = torch.tensor([0.5, 1.0, 0.5])
        step_WA = action[..., 0].clamp(0.0, 1.0) * speed_A
        moved = state + step_WA
        return moved, step_WA, moved[0] > 3.0

    def observe(self, state: Tensor) -> Tensor:
        """Return the position, and the mean position of the world."""
        a, b, c = state[0].unbind(-1)
        return torch.cat([state, ((a + b + c) / 3.0)[None, :, None].expand_as(state)])


def runners(worlds: int, seed: int | None = 0, limit: int | None = 12) -> Runners:
    return Runners(worlds, seed=seed, max_episode_steps=limit)


class TestRunners(EnvironmentContract):
    steps = 60

    @pytest.fixture(
        autouse=True,
        params=[
            runners,
            lambda *a: TimeLimit(runners(*a, limit=None), 5),
            lambda *a: FrameSkip(runners(*a), 2),
            lambda *a: FrameStack(runners(*a), 2),
        ],
        ids=["plain", "TimeLimit", "FrameSkip", "FrameStack"],
    )
    def _variant(self, request: pytest.FixtureRequest) -> None:
        self.variant = request.param

    def make(self, num_envs: int, seed: int | None) -> Any:
        return self.variant(num_envs, seed)


class TestRunnersState(StatefulContract):
    def make(self) -> Any:
        return runners(4)

    def step(self, part: Any) -> Any:
        if int(part.episode_seeds[0]) < 0:
            part.reset()
        return part.apply_action(torch.linspace(0.1, 1.0, 12)[:, None])


def agent_for(environment: Any, **options: Any) -> rein.PPO:
    options = {"rollout_steps": 16, "minibatches": 2, "update_epochs": 1, "hidden": (8,), "seed": 0, **options}
    return rein.PPO(environment, **options)


def test_metrics_equal_independent_sums() -> None:
    environment = runners(4)
    loop = rein.training_loop(agent_for(environment), environment, iterations=25)
    sums, lengths = np.zeros(12), np.zeros(4, int)
    world_sums, episodes, worlds = np.zeros(4), [], []

    @loop.iteration_completed
    def add(state: rein.State) -> None:
        time_step = state.step_state.time_step
        reward, valid = time_step.reward.double().numpy(), time_step.valid.numpy()
        ended = (time_step.terminated | time_step.truncated).numpy()
        sums[valid] += reward[valid]
        for row in np.flatnonzero(ended):
            episodes.append((row, sums[row]))
            sums[row] = 0.0
        for world in range(4):
            rows = slice(3 * world, 3 * world + 3)
            world_sums[world] += reward[rows][valid[rows]].sum()
            lengths[world] += valid[rows].any()
            if ended[rows].any() and not sums[rows].any():
                worlds.append((world_sums[world], lengths[world]))
                world_sums[world] = lengths[world] = 0

    @loop.epoch_completed
    def compare(state: rein.State) -> None:
        metrics = state.metrics
        assert metrics["episode_return"] == pytest.approx(np.mean([x for _, x in episodes]))
        assert metrics["return_fast"] == pytest.approx(np.mean([x for row, x in episodes if row % 3 == 1]))
        assert metrics["return_slow"] == pytest.approx(np.mean([x for row, x in episodes if row % 3 != 1]))
        assert metrics["world_return"] == pytest.approx(np.mean([x for x, _ in worlds]))
        assert metrics["world_length"] == pytest.approx(np.mean([n for _, n in worlds]))
        assert len(worlds) > 5
        episodes.clear()
        worlds.clear()

    state = loop.run(epochs=4)
    assert state.clocks.env_steps == 4 * 25 * 12


def test_environments_without_worlds_have_no_metrics_of_worlds() -> None:
    environment = rein.envs.CartPole(4, seed=0)
    metrics = rein.train(agent_for(environment), environment, epochs=1, iterations=16, progress=False).metrics
    assert not {"world_return", "world_length"} & set(metrics)


def test_evaluation_by_world_and_group() -> None:
    environment = runners(4)
    agent = agent_for(environment)
    result = rein.evaluate(agent, environment, episodes=20)
    assert len(result.episode_return) == 21  # whole worlds
    returns = result.episode_return.view(7, 3)
    assert torch.equal(result.world_returns(environment), returns.sum(1))
    groups = result.group_returns(environment)
    assert torch.equal(groups["fast"], returns[:, 1])
    assert torch.equal(groups["slow"], returns[:, [0, 2]].flatten())
    assert len(result.seed.unique()) == 7


def test_evaluation_during_training_has_metrics_of_worlds_and_groups() -> None:
    environment = runners(4)
    loop = rein.training_loop(agent_for(environment), environment, iterations=16)
    rein.evaluate_every(loop, loop.parts["agent"], runners(2, seed=1), episodes=10, same_episodes=True)
    metrics = [record.metrics for record in loop.run(epochs=2).history]
    for found in metrics:
        mean = (2 * found["evaluation_return_slow"] + found["evaluation_return_fast"]) / 3
        assert found["evaluation_return"] == pytest.approx(mean)
        assert found["evaluation_world_return"] == pytest.approx(3 * mean)


def test_episodic_epoch_plays_one_episode_per_agent() -> None:
    environment = runners(4)
    agent = agent_for(environment, rollout_steps=4)
    state = rein.train(agent, environment, epochs=3, episodic=True, iterations=30, progress=False)
    assert state.clocks.episodes == 36


def test_run_resumes_bit_for_bit_within_an_epoch(tmp_path: Path) -> None:
    def build(path: Path, exist: str = "error") -> rein.Loop:
        environment = Navigation(3, 2, early_leave=True, seed=0, max_episode_steps=20)
        store = rein.HDF5Store(path, exist=exist)
        loop = rein.training_loop(agent_for(environment), environment, store, iterations=30, seed=0)
        rein.checkpoint(loop, event="iteration_completed", every=44)
        return loop

    whole = build(tmp_path / "whole")
    whole.run(epochs=4)
    first = build(tmp_path / "cut")
    first.iteration_completed(once=45)(lambda state: first.interrupt())
    first.run(epochs=4)
    first.parts["store"].close()
    second = build(tmp_path / "cut", "resume")
    rein.resume(second, tmp_path / "cut")
    second.run(epochs=4)
    states = [loop.parts[part].state_dict() for part in ("agent", "environment") for loop in (whole, second)]
    assert first_difference(*states[:2]) is None
    assert first_difference(*states[2:]) is None


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> rein.Run:
    """Run with agents that leave early, long enough for episodes that cross an epoch."""
    path = tmp_path_factory.mktemp("runs") / "navigation"
    environment = Navigation(3, 4, neighbours=1, early_leave=True, seed=0, max_episode_steps=40)
    store = rein.HDF5Store(path)
    agent = agent_for(environment, log_std=0.0)
    loop = rein.training_loop(agent, environment, store, iterations=30, seed=0)

    @loop.action_selected
    def steer(state: rein.State) -> None:
        """Add noise to the way to the target, so that agents leave at different steps."""
        noise = 0.5 - uniform(torch.arange(24), state.total_iterations).view(12, 2)
        action = (2.0 * state.step_state.observation[:, 2:4]).clamp(-1.0, 1.0) + noise
        state.step_state = state.step_state._replace(action=action)

    loop.run(epochs=6)
    store.close()
    return rein.open_run(path)


def test_episodes_of_agents_are_replayed_with_their_world(stored: rein.Run) -> None:
    episodes = [stored.episode(number) for number in stored.episodes["id"].tolist()]
    lengths = {episode.length for episode in episodes}
    assert len(episodes) > 30
    assert len(lengths) > 10
    results = replay(environment_of(stored), episodes, run=stored)
    assert [result.difference for result in results] == [None] * len(episodes)
    with pytest.raises(ValueError, match="needs run="):
        replay(environment_of(stored), episodes)


def test_number_of_worlds_is_rebuilt(stored: rein.Run) -> None:
    assert environment_of(stored).worlds == 3
    assert environment_of(stored, num_envs=9).worlds == 3
    assert environment_of(stored, num_envs=1).worlds == 1


def test_video_of_an_agent_that_leaves_early_lasts_until_its_world_ends(stored: rein.Run) -> None:
    table = stored.episodes
    worlds = list(zip(table["environment"] // 4, table["seed"], strict=True))
    lasts = {world: max(n for n, w in zip(table["last_step"], worlds, strict=True) if w == world) for world in worlds}
    early = next(e for e, w in enumerate(worlds) if table["last_step"][e] < lasts[w] and worlds.count(w) == 4)
    episode, frames = stored.episode(int(table["id"][early])), []
    (result,) = replay(environment_of(stored), [episode], film=frames.append, run=stored)
    assert result.difference is None
    assert result.length == episode.length
    assert len(frames) == lasts[worlds[early]] - table["first_step"][early] + 1 > episode.length
    assert not np.array_equal(frames[-1], frames[episode.length])  # others still move


def test_recorded_video_lasts_until_the_world_ends(tmp_path: Path) -> None:
    environment = RecordVideo(Navigation(2, 2, early_leave=True, seed=0, max_episode_steps=9), tmp_path)
    environment.reset()
    state = environment.inner.state_dict()
    environment.inner.load_state_dict(state | {"left": torch.tensor([[True, False], [False, False]])})
    for k in range(9):
        assert not [*tmp_path.glob("episode-*1.mp4")], k
        environment.apply_action(torch.zeros(4, 2))
    assert [*tmp_path.glob("episode-*1.mp4")]


def test_wrong_result_of_dynamics_raises() -> None:
    class Wrong(Runners):
        def dynamics(self, state: Tensor, action: Tensor) -> Any:
            moved, reward, terminated = super().dynamics(state, action)
            return moved, reward.flatten(), terminated

    environment = Wrong(2, seed=0)
    environment.reset()
    with pytest.raises(EnvironmentContractError, match=r"expected reward as torch.float32 of shape \(2, 3\)"):
        environment.apply_action(torch.zeros(6, 1))


def test_group_with_an_agent_that_does_not_exist_is_refused() -> None:
    class Wrong(Runners):
        agent_groups: ClassVar = {"slow": (0, 1), "fast": (3,)}

    with pytest.raises(ValueError, match=r"'fast' has the agents \[3\], but a world has the agents 0 to 2"):
        Wrong(2)


def test_default_initial_state_is_uniform_and_different_for_each_agent() -> None:
    start = runners(2000).reset()[:, 0]
    assert len(start.unique()) > 5900
    assert float(start.mean()) == pytest.approx(1.0, abs=0.03)
    assert math.isclose(float(start.std()), 2 / math.sqrt(12), rel_tol=0.03)


def test_repr_shows_worlds_and_agents() -> None:
    assert repr(runners(2)).startswith("Runners(worlds=2, agents=3, ")
