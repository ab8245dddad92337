"""Episodes that handlers of `episodes_completed` receive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rein
from rein.ops.trees import map_tree

ITERATIONS = 7  # shorter than most episodes


def make_loop(store: Any = None, **options: Any) -> tuple[rein.Loop, list[Any]]:
    env = rein.envs.CartPole(4, seed=0)
    agent = rein.PPO(env, rollout_steps=16, hidden=(8,), seed=0)
    loop = rein.training_loop(agent, env, store, iterations=ITERATIONS, **options)
    found: list[Any] = []

    @loop.episodes_completed
    def collect(state: rein.State) -> None:
        found.extend(state.episodes_completed)

    return loop, found


def assert_same(one: Any, other: Any) -> None:
    others = one._replace(fields={}, final_observation=None), other._replace(fields={}, final_observation=None)
    assert others[0] == others[1]
    assert one.fields.keys() == other.fields.keys()
    map_tree(np.testing.assert_array_equal, one.fields, other.fields)
    np.testing.assert_array_equal(one.final_observation, other.final_observation)


def test_completed_episodes_equal_stored_episodes(tmp_path: Any) -> None:
    loop, found = make_loop(tmp_path / "run")
    loop.run(epochs=20)
    run = rein.open_run(tmp_path / "run")
    assert len(found) == len(run.episodes["id"]) > 8
    assert max(episode.length for episode in found) > 2 * ITERATIONS
    for episode in found:
        assert_same(episode, run.episode(episode.id))


def test_episode_is_shown_in_one_line() -> None:
    loop, found = make_loop()
    loop.run(epochs=20)
    assert repr(found[0]).startswith(f"Episode(id=0, environment={found[0].environment}, seed={found[0].seed}, return ")
    assert "\n" not in repr(found[0])


def test_completed_episodes_do_not_depend_on_a_store(tmp_path: Any) -> None:
    (stored, with_store), (bare, without) = make_loop(tmp_path / "run"), make_loop()
    stored.run(epochs=20)
    bare.run(epochs=20)
    assert len(with_store) == len(without)
    for one, other in zip(with_store, without, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("cut", [2 * ITERATIONS, 2 * ITERATIONS + 3], ids=["between epochs", "within an epoch"])
def test_episodes_open_at_a_resume_are_complete(cut: int) -> None:
    whole, expected = make_loop()
    whole.run(epochs=20)
    first, before = make_loop()
    first.iteration_completed(once=cut)(lambda state: first.interrupt("test"))
    first.run(epochs=20)
    second, after = make_loop()
    second.load_state_dict(first.state_dict())
    second.run(epochs=20)
    assert len(before) + len(after) == len(expected)
    for one, other in zip([*before, *after], expected, strict=True):
        assert_same(one, other)


def test_kept_episodes_do_not_change_later() -> None:
    loop, found = make_loop()
    loop.run(epochs=5)
    copies = [map_tree(np.copy, episode.fields) for episode in found]
    loop.run(epochs=20)
    assert copies
    for episode, copy in zip(found, copies, strict=False):
        map_tree(np.testing.assert_array_equal, episode.fields, copy)


@pytest.mark.parametrize("stored", [False, True])
def test_episodes_begun_before_attaching_are_omitted(stored: bool, tmp_path: Any) -> None:
    whole, expected = make_loop()
    whole.run(epochs=20)
    env = rein.envs.CartPole(4, seed=0)
    agent = rein.PPO(env, rollout_steps=16, hidden=(8,), seed=0)
    loop = rein.training_loop(agent, env, tmp_path / "run" if stored else None, iterations=ITERATIONS)
    found: list[Any] = []

    @loop.iteration_completed(once=3 * ITERATIONS + 2)
    def attach(state: rein.State) -> None:
        loop.episodes_completed(lambda state: found.extend(state.episodes_completed))

    loop.run(epochs=20)
    first_kept = ITERATIONS * (3 if stored else 4)
    complete = [episode for episode in expected if episode.first_step >= first_kept]
    assert len(expected) > len(complete) > 4
    assert len(found) == len(complete)
    for one, other in zip(found, complete, strict=True):
        assert_same(one, other)


def test_episodes_are_complete_if_rewards_are_shaped_later() -> None:
    loop, found = make_loop()

    @loop.action_applied(after=2 * ITERATIONS)
    def shape(state: rein.State) -> None:
        transition = state.step_state.transition
        state.step_state = state.step_state._replace(transition=transition._replace(reward=transition.reward * 2))

    loop.run(epochs=20)
    assert any(episode.first_step < 2 * ITERATIONS < episode.last_step for episode in found)
    for episode in found:
        assert {len(field) for field in episode.fields.values()} == {episode.length}
        assert episode.episode_return == episode.fields.get("raw_reward", episode.fields["reward"]).sum()


def test_other_events_see_no_episodes() -> None:
    loop, _ = make_loop()
    seen = []
    loop.iteration_completed(lambda state: seen.extend(state.episodes_completed))
    loop.run(epochs=10)
    assert seen == []


def test_no_rows_are_kept_without_a_handler() -> None:
    env = rein.envs.CartPole(2, seed=0)
    loop = rein.training_loop(rein.PPO(env, seed=0), env)
    loop.run(epochs=3, iterations=ITERATIONS)
    assert loop.parts["episodes"].state_dict() == {"earlier": {}}
    assert "observation" not in loop.parts["rows"].fields()
