"""Tests of offline_loop and fill_replay: counts, metrics, filling a replay, and exact resume."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.bc import BC
from rein.agents.dqn import DQN
from rein.agents.iql import IQL
from rein.agents.ppo import PPO
from rein.agents.sac import SAC
from rein.agents.td3 import TD3
from rein.envs.gridworld import Gridworld
from rein.envs.pendulum import Pendulum
from rein.handlers.checkpoint import checkpoint
from rein.handlers.stop_at import stop_at
from rein.ops.trees import map_tree
from rein.replay.replay import Replay
from rein.testing.stateful import copy_state, first_difference
from rein.training.offline import extend, fill_replay, offline_loop
from rein.types import Transition

BOX = spaces.Box(-1.0, 1.0, (1,), np.float32)
SMALL: dict[str, Any] = {"hidden": (8,), "batch_size": 8, "capacity": 4096}


def rows(count: int = 64, *, ends: tuple[int, ...] = (), first: float = 0.0) -> Transition:
    """Return rows of one environment whose observation counts its steps. Rows in `ends` are terminated."""
    observation = first + torch.arange(count, dtype=torch.float32).unsqueeze(1)
    terminated = torch.zeros(count, dtype=torch.bool)
    terminated[list(ends)] = True
    action = observation.clamp(-1.0, 1.0)
    no = torch.zeros_like(terminated)
    return Transition(observation, action, observation[:, 0], terminated, no, observation + 1.0, ~no, {})


def agent(kind: Any = IQL, **options: Any) -> Any:
    return kind(BOX, BOX, **{**SMALL, "seed": 0, **options})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 gridworlds with terminated and truncated episodes."""
    path = tmp_path_factory.mktemp("recorded") / "run"
    environment = Gridworld(num_envs=3, seed=0, max_episode_steps=7)
    learner = PPO(environment.single_observation_space, environment.single_action_space, hidden=(8,), seed=0)
    store = rein.HDF5Store(path)
    rein.training_loop(learner, environment, store, epochs=4, iterations=20).run()
    store.close()
    return path


def cloner(**options: Any) -> BC:
    environment = Gridworld(num_envs=1)
    given = environment.single_observation_space, environment.single_action_space
    return BC(*given, **{**SMALL, "seed": 0, **options})


def test_loop_counts_updates_and_reports_metrics():
    loop = offline_loop(agent(), [rows()], epochs=3, iterations=4, updates_per_iteration=5)
    reported: list[dict[str, float]] = []
    loop.epoch_ended.attach(lambda state: reported.append(dict(state.metrics)))
    state = loop.run()
    assert (state.clocks.updates, state.clocks.env_steps, state.clocks.iterations) == (3 * 4 * 5, 0, 12)
    assert all(set(IQL.reports) <= set(metrics) and np.isfinite(list(metrics.values())).all() for metrics in reported)


def test_iteration_runs_updates_per_iteration():
    by_hand, in_loop = agent(), agent()
    fill_replay(by_hand, [rows()])
    for _ in range(4):
        by_hand.learn(3)
    offline_loop(in_loop, [rows()], iterations=4, updates_per_iteration=3).run()
    assert first_difference(by_hand.state_dict(), in_loop.state_dict()) is None


def spaces_of(environment: Any) -> tuple[Any, Any]:
    return environment.single_observation_space, environment.single_action_space


def pendulum_rows(steps: int = 40) -> Transition:
    environment, generator = Pendulum(1, seed=0), torch.Generator().manual_seed(0)
    observation, found = environment.reset(), []
    for _ in range(steps):
        action = torch.rand(1, 1, generator=generator) * 4 - 2
        now = environment.apply_action(action)
        ends = now.reward, now.terminated, now.truncated, now.final_observation, now.valid
        found.append(Transition(observation, action, *ends, {}))
        observation = now.observation
    columns = zip(*(part[:7] for part in found), strict=True)
    return Transition(*(torch.cat(column) for column in columns), {})


def test_stop_at_updates():
    loop = offline_loop(agent(), [rows()], epochs=None, updates_per_iteration=4)
    stop_at(loop, updates=30)
    assert loop.run().clocks.updates == 32


def test_resumed_run_ends_equal_bit_for_bit(tmp_path):
    def loop_of(path: Path, exist: str, data: Any) -> Any:
        store = rein.HDF5Store(path, exist=exist)
        learner = agent(prioritized=True, normalize_observation=True)
        loop = offline_loop(learner, data, store, epochs=4, iterations=5, updates_per_iteration=2)
        checkpoint(loop, store)
        return loop

    whole = loop_of(tmp_path / "whole", "error", [rows()])
    whole.run()
    broken = loop_of(tmp_path / "broken", "error", [rows()])
    broken.iteration_completed(when=lambda state: state.total_iterations == 8)(
        lambda state: broken.interrupt("for a test")
    )
    broken.run()
    again = loop_of(tmp_path / "broken", "resume", None)  # the replay is in the checkpoint
    rein.resume(again, tmp_path / "broken")
    assert again.run().clocks.updates == 40
    ended, resumed = (loop.parts["agent"].state_dict() for loop in (whole, again))
    assert first_difference(ended, resumed) is None
    assert (tmp_path / "whole/metrics.csv").read_text().count("\n") == 5
    assert "learning_rate" in (tmp_path / "whole/run.json").read_text()


def test_seed_determines_agent():
    def learned(seed: int) -> Any:
        learner = agent(seed=None)
        offline_loop(learner, [rows()], iterations=3, seed=seed).run()
        return copy_state(learner.state_dict())

    assert first_difference(learned(1), learned(1)) is None
    assert first_difference(learned(1), learned(2)) is not None


@pytest.mark.parametrize("learned", [False, True])
def test_seed_after_filling_raises_and_no_seed_continues(learned):
    learner = agent(seed=None)
    fill_replay(learner, [rows()])
    if learned:
        offline_loop(learner, iterations=2).run()
    drawn, updates = learner.seed, learner.updates
    with pytest.raises(
        ValueError, match=rf"seed=5.*random seed {drawn} was drawn for the agent.*; build it with a seed="
    ):
        offline_loop(learner, iterations=2, seed=5)
    offline_loop(learner, iterations=2).run()
    assert (learner.seed, learner.updates) == (drawn, updates + 2 * 10)
    assert len(learner.replay) == 64


def test_agent_keeps_its_seed():
    learner = agent(seed=1)
    fill_replay(learner, [rows()])
    offline_loop(learner, iterations=2, seed=5).run()
    assert learner.seed == 1


def test_checkpoint_of_randomly_seeded_agent_resumes(tmp_path):
    for exist in ("error", "resume"):
        learner = agent(seed=None)
        fill_replay(learner, [rows()])
        store = rein.HDF5Store(tmp_path / "run", exist=exist)
        loop = offline_loop(learner, store=store, epochs=2, iterations=2)
        checkpoint(loop, store)
        if exist == "resume":
            rein.resume(loop, tmp_path / "run")
            assert learner.updates == 2 * 2 * 10
        else:
            loop.run()
        store.close()


def test_offline_agent_continues_in_environments():
    environment = Pendulum(2, seed=0)
    learner = IQL(*spaces_of(environment), **SMALL, seed=0)
    fill_replay(learner, [pendulum_rows()], num_envs=2)
    offline_loop(learner, iterations=2, updates_per_iteration=3).run()
    rein.training_loop(learner, environment, epochs=1, iterations=10).run()
    assert (learner.updates, learner.env_steps, len(learner.replay)) == (6 + 20, 20, 40 + 20)


def test_invalid_arguments_raise():
    environment = Gridworld(num_envs=1)
    with pytest.raises(TypeError, match="PPO does not learn from a replay"):
        offline_loop(PPO(environment.single_observation_space, environment.single_action_space))  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="updates_per_iteration=0"):
        offline_loop(agent(), [rows()], updates_per_iteration=0)
    with pytest.raises(ValueError, match="the replay is empty"):
        offline_loop(agent()).run()
    with pytest.raises(ValueError, match="have no reward"):
        fill_replay(agent(), [rows()._replace(reward=None)])  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="have no action, next_observation"):
        fill_replay(agent(), [rows()._replace(action=None, next_observation=None)])
    with pytest.raises(ValueError, match=r"of the data \(2,\)"):
        fill_replay(agent(), [rows()._replace(action=torch.zeros(64, 2))])
    with pytest.raises(ValueError, match="1 numbers each, got 2"):
        fill_replay(agent(), [rows()._replace(observation=torch.zeros(64, 2))])
    pictures = DQN(spaces.Box(0, 255, (4, 42, 42), np.uint8), spaces.Discrete(2), frame_stack=4, hidden=(), seed=0)
    with pytest.raises(ValueError, match=r"DQN\(frame_stack=4\) stores each frame once.*omit frame_stack"):
        fill_replay(pictures, [rows()])
    unseeded = agent(seed=None)
    extend(unseeded.replay, rows())
    with pytest.raises(ValueError, match="would empty its replay"):
        offline_loop(unseeded, seed=0)


def test_data_beyond_capacity_raises():
    assert fill_replay(agent(capacity=64), [rows()]) == 64
    with pytest.raises(ValueError, match="room for 63 transitions, but there are at least 64"):
        fill_replay(agent(capacity=63), [rows()])
    learner = agent(capacity=100)
    fill_replay(learner, [rows()])
    with pytest.raises(ValueError, match="room for 100 transitions, but there are at least 128"):
        fill_replay(learner, [rows()])
    assert len(learner.replay) == 64


def test_fill_with_run_keeps_true_next_observations(recorded):
    run, learner = rein.open_run(recorded), cloner()
    assert fill_replay(learner, run) == 3 * 4 * 20
    columns = learner.replay.columns
    assert columns["terminated"].any()
    ended = (columns["terminated"] | columns["truncated"])[:, 0]
    after, begins = columns["next_observation"][:-1, 0], columns["observation"][1:, 0]
    assert (after[~ended[:-1]] == begins[~ended[:-1]]).all()
    assert (after[ended[:-1]] != begins[ended[:-1]]).any()  # the final observation of the episode
    assert columns["reward"].sum().item() == pytest.approx(run.field("reward").sum())


def test_fill_keeps_termination_and_truncation_apart(recorded):
    run, learner = rein.open_run(recorded), cloner()
    fill_replay(learner, run)
    columns = learner.replay.columns
    terminated, truncated = run.field("terminated"), run.field("truncated")
    assert columns["terminated"].sum() == terminated.sum()
    assert not (columns["terminated"] & columns["truncated"]).any()
    at_the_end = 3  # the open episode of each environment is truncated
    assert truncated.sum() <= columns["truncated"].sum() <= truncated.sum() + at_the_end


def test_fill_with_selected_episodes(recorded):
    run, learner = rein.open_run(recorded), cloner()
    best = np.argsort(run.episodes["return"])[-4:]
    chosen = run.episodes["id"][best]
    assert fill_replay(learner, run.transitions(episodes=chosen)) == run.episodes["length"][best].sum()
    assert learner.replay.columns["reward"].sum() == pytest.approx(run.episodes["return"][best].sum())


def test_n_step_returns_stay_within_episode():
    replay = Replay(64)
    extend(replay, rows(8, ends=(3,)))
    found = replay.take(torch.arange(8), n_step=3, gamma=1.0)
    assert found.reward.tolist() == [3.0, 6.0, 5.0, 3.0, 15.0, 18.0, 13.0, 7.0]
    assert found.terminated.tolist() == [False, True, True, True, False, False, False, False]
    assert found.next_observation[:, 0].tolist() == [3.0, 4.0, 4.0, 4.0, 7.0, 8.0, 8.0, 8.0]


def test_n_step_returns_stop_at_gaps():
    """Two parts of one environment without a recorded end are concatenated."""
    replay = Replay(64)
    data = [torch.cat(pair) for pair in zip(rows(4)[:7], rows(4, first=100.0)[:7], strict=True)]
    extend(replay, Transition(*data, {}))
    found = replay.take(torch.arange(8), n_step=4, gamma=1.0)
    assert found.reward.tolist() == [6.0, 6.0, 5.0, 3.0, 406.0, 306.0, 205.0, 103.0]
    assert not found.terminated.any()


def test_n_step_returns_stop_between_calls_of_extend():
    replay = Replay(64)
    extend(replay, rows(2))
    extend(replay, rows(2, first=50.0))
    assert replay.take(torch.arange(4), n_step=2, gamma=1.0).reward.tolist() == [1.0, 1.0, 101.0, 51.0]


@pytest.mark.parametrize("count", [6, 7, 8])
def test_rows_are_split_among_environments(count):
    replay = Replay(64)
    assert extend(replay, rows(count), 3) == len(replay) == count
    drawn = replay.sample(count, torch.Generator().manual_seed(0), replacement=False)
    assert sorted(drawn.reward.tolist()) == list(range(count))
    assert replay.columns["observation"][: count // 3, 0, 0].tolist() == list(range(count // 3))
    found = replay.take(torch.arange(3), n_step=2, gamma=1.0)  # slot 0 of each environment
    slots = -(-count // 3)
    both = [first + 1 < min(count, first + slots) for first in (0, slots, 2 * slots)]  # the last part may have one row
    assert found.reward.tolist() == [f + (f + 1.0) * two for f, two in zip((0, slots, 2 * slots), both, strict=True)]


def test_other_num_envs_raises():
    replay = Replay(64)
    extend(replay, rows(6), 3)
    with pytest.raises(ValueError, match="rows of 3 environments; use num_envs=3"):
        extend(replay, rows(6), 2)


def test_rows_of_other_shape_raise_with_name():
    replay = Replay(64)
    extend(replay, rows(6))
    with pytest.raises(ValueError, match=r"action is .* but was"):
        extend(replay, rows(6)._replace(action=torch.zeros(6, 2)))
    assert extend(replay, rows(0)) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("field", ["observation", "action", "reward", "next_observation"])
def test_non_finite_values_raise_before_learning(field, value):
    bad, learner = map_tree(lambda x: x.double() if x.is_floating_point() else x.clone(), rows()), agent()
    getattr(bad, field).view(-1)[5] = value
    message = f"the {field} is not finite in 1 transitions, first in number 69"
    with pytest.raises(ValueError, match=message):
        fill_replay(learner, [rows(), bad])
    assert not len(learner.replay)
    bad.valid[5] = False
    assert fill_replay(learner, [bad]) == 63


@pytest.mark.parametrize("value", [-torch.inf, torch.nan, -1.0, 0.5])
@pytest.mark.parametrize("field", ["observation", "next_observation"])
def test_masks_of_other_numbers_than_0_and_1_raise(field, value):
    def masked(column):
        return {"observation": column, "action_mask": torch.ones(64, 3)}

    found = rows()
    found = found._replace(
        observation=masked(found.observation),
        next_observation=masked(found.next_observation),
        action=torch.zeros(64, dtype=torch.int64),
    )
    space = spaces.Dict({"observation": BOX, "action_mask": spaces.Box(-np.inf, np.inf, (3,))})
    learner = DQN(space, spaces.Discrete(3), seed=0, **SMALL)
    assert fill_replay(learner, [found]) == 64
    getattr(found, field)["action_mask"][7, 1] = value
    with pytest.raises(ValueError, match=rf"{field}.action_mask is not a mask of 0 and 1.*number 7.*mask == 0"):
        fill_replay(learner, [found])


def test_unused_values_may_be_nan():
    found = map_tree(torch.clone, rows(ends=(5,)))
    found.next_observation[5] = torch.nan  # after termination
    assert fill_replay(agent(), [found]) == 64
    found.reward[:] = torch.nan
    assert fill_replay(agent(BC), [found]) == 64
    with pytest.raises(ValueError, match="the reward is not finite in 64 transitions, first in number 0"):
        fill_replay(agent(), [found])


@pytest.mark.parametrize("action", [-1, 0, 4])
def test_discrete_actions_out_of_range_raise(action):
    space, found = spaces.Discrete(3, start=1), rows()
    chosen = torch.arange(64) % 3 + 1
    learner = BC(BOX, space, hidden=(8,), seed=0)
    assert fill_replay(learner, [found._replace(action=chosen)]) == 64
    with pytest.raises(ValueError, match=r"Discrete\(3, start=1\), of the data torch.float32"):
        fill_replay(learner, [found._replace(action=chosen.float())])
    chosen[7:9] = action
    with pytest.raises(ValueError, match="the action is not from 1 to 3 in 2 transitions, first in number 7"):
        fill_replay(learner, [found._replace(action=chosen)])


@pytest.mark.parametrize("kind", [IQL, SAC, BC])
def test_actions_outside_box_raise_or_are_clipped(kind):
    learner, found = agent(kind), map_tree(torch.clone, rows())
    found.action[7:15] = 1.5
    found.action[20] = -torch.inf
    found.valid[[7, 8, 9, 10, 20]] = False  # leaves 59 valid rows
    message = "outside of Box(-1.0, 1.0, (1,), float32) (6.78% of these rows) in 4 transitions, first in "
    with pytest.raises(ValueError, match=re.escape(message) + r"number 75; use fill_replay\(\.\.\., clip=True\)"):
        fill_replay(learner, [rows(), found])
    assert not len(learner.replay)
    assert fill_replay(learner, [found], clip=True) == 59
    assert learner.replay.columns["action"].abs().max() == 1.0
    assert torch.equal(learner.replay.columns["action"][:5, 0], found.action[:5])  # within the bounds: unchanged


def test_clipped_actions_keep_dtype_of_agent():
    learner = IQL(BOX, spaces.Box(-0.5, 0.5, (1,), np.float64), **SMALL, seed=0)
    fill_replay(learner, [map_tree(lambda x: x.double() if x.is_floating_point() else x, rows())], clip=True)
    action = learner.replay.columns["action"]
    assert (action.dtype, action.max().item()) == (torch.float32, 0.5)


def test_clipping_rejects_non_finite_actions():
    found = map_tree(torch.clone, rows())
    found.action[3] = torch.inf
    with pytest.raises(ValueError, match="the action is not finite in 1 transitions"):
        fill_replay(agent(), [found], clip=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("low", "high"), [(-0.3, 0.3), (-2.0, 2.0), (0.1, 0.7), (-1e6, 1e6), (99.0, 101.1)])
def test_actions_outside_by_rounding_are_kept(low, high, dtype):
    bounds = torch.tensor([low, high]).clamp(*((-6e4, 6e4) if dtype is torch.float16 else (low, high))).to(dtype)
    beyond = torch.nextafter(bounds.float(), torch.tensor([-torch.inf, torch.inf]))
    action = torch.cat((bounds.float(), beyond)).repeat(16).unsqueeze(1)
    learner = IQL(BOX, spaces.Box(low, high, (1,), np.float32), **SMALL, seed=0)
    assert fill_replay(learner, [rows()._replace(action=action)]) == 64
    assert torch.equal(learner.replay.columns["action"][:64, 0], action)


@pytest.mark.parametrize("kind", [SAC, TD3])
def test_recorded_actions_at_bounds_are_accepted(kind, tmp_path):
    environment = Pendulum(2, seed=0)
    learner = kind(*spaces_of(environment), **SMALL, learning_starts=8, update_to_data=1e-6, seed=0)
    with torch.no_grad():
        learner.networks.actor.head.bias.fill_(50.0)
    store = rein.HDF5Store(tmp_path / "run")
    rein.train(learner, environment, store, env_steps=400)
    store.close()
    other = IQL(*spaces_of(environment), **SMALL, seed=0)
    assert fill_replay(other, rein.open_run(tmp_path / "run")) == 400
    assert (other.replay.columns["action"].abs() == 2.0).any(), "no action was at a bound"


@pytest.mark.parametrize(("actions", "dtype"), [(256, torch.uint8), (300, torch.uint8), (128, torch.int8)])
def test_actions_may_have_small_integer_dtypes(actions, dtype):
    learner = BC(BOX, spaces.Discrete(actions), hidden=(8,), seed=0)
    assert fill_replay(learner, [rows()._replace(action=(torch.arange(64) + 64).to(dtype))]) == 64


RECORDED = [(kind, dtype) for kind in (DQN, IQL) for dtype in (torch.uint8, torch.int16, torch.int32)]
RECORDED += [(IQL, torch.float16), (IQL, torch.float64)]


@pytest.mark.parametrize(("kind", "dtype"), RECORDED)
def test_agent_continues_after_actions_of_any_dtype(kind, dtype):
    environment = Gridworld(2, seed=0) if kind is DQN else Pendulum(2, seed=0)
    learner = kind(*spaces_of(environment), **SMALL, learning_starts=0, seed=0)
    observation, action = environment.reset(), torch.ones(2, *learner.action_space.shape, dtype=dtype)
    no = torch.zeros(2, dtype=torch.bool)
    found = Transition(observation, action, torch.ones(2), no, no, observation, ~no, {})
    fill_replay(learner, [found] * 8, num_envs=2)
    rein.train(learner, environment, env_steps=8)
    assert (learner.updates, len(learner.replay)) == (8, 24)


def test_fill_updates_observation_normalizer():
    learner = agent(normalize_observation=True)
    fill_replay(learner, [rows(32), rows(32, first=32.0)])
    normalized = learner.networks.preprocess(rows(64).observation)
    assert normalized.mean().item() == pytest.approx(0.0, abs=0.01)
    assert normalized.std().item() == pytest.approx(1.0, abs=0.05)


def test_field_names_with_dots_are_distinct():
    replay, one, other = Replay(64), rows(6), rows(6, first=50.0)

    def both(name: str) -> dict[str, Any]:
        return {"a.b": getattr(one, name), "a": {"b": getattr(other, name).repeat(1, 2)}}

    data = one._replace(observation=both("observation"), next_observation=both("next_observation"))
    for rows_of, following in ((slice(0, 3), slice(3, 4)), (slice(3, 6), None)):
        after = None if following is None else map_tree(lambda x, i=following: x[i], data)
        extend(replay, map_tree(lambda x, i=rows_of: x[i], data), following=after)
    assert replay.columns["truncated"][:, 0].tolist() == [False] * 5 + [True]  # each row continues in the next one


def test_empty_observations_are_accepted():
    space = spaces.Dict({"x": BOX, "nothing": spaces.Box(-1.0, 1.0, (0,), np.float32)})
    learner, nothing = BC(space, BOX, **SMALL, seed=0), torch.zeros(64, 0)
    names = ("observation", "next_observation")
    found = rows()._replace(**{name: {"x": getattr(rows(), name), "nothing": nothing} for name in names})
    assert fill_replay(learner, [found]) == 64
    assert learner.replay.columns["truncated"].sum() == 1  # the last row


def test_observations_have_dtypes_of_space():
    """Files store half precision as float32."""
    inner = spaces.Dict({"half": spaces.Box(-9.0, 99.0, (1,), np.float16), "count": spaces.Discrete(99)})
    learner, given = BC(inner, BOX, **SMALL, seed=0), rows()
    seen = {"half": given.observation, "count": given.observation[:, 0].to(torch.uint8)}
    fill_replay(learner, [given._replace(observation=seen, next_observation=map_tree(lambda x: x + 1, seen))])
    for name in ("observation", "next_observation"):
        kept = learner.replay.columns[name]
        assert (kept["half"].dtype, kept["count"].dtype) == (torch.float16, torch.int64)
        assert kept["half"][:, 0, 0].tolist() == kept["count"][:, 0].tolist()
