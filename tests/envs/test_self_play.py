"""Self-play in turn-based games, the pool of opponents, and tournaments."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import rein
from rein.episodes.random_policy import RandomPolicy
from rein.errors import EnvironmentContractError
from rein.testing import EnvironmentContract
from rein.testing.stateful import copy_state, first_difference

GAME = rein.envs.TicTacToe()


def played(*moves: int) -> tuple[torch.Tensor, float, bool]:
    """Return the state, the reward of the last move, and whether the game is over."""
    state, reward, over = GAME.initial_state(torch.zeros(1, dtype=torch.int64)), torch.zeros(1), torch.zeros(1).bool()
    for move in moves:
        assert not over
        state, reward, over = GAME.play(state, torch.tensor([move]))
    return state, float(reward), bool(over)


class TestSelfPlay(EnvironmentContract):
    steps = 60

    def make(self, num_envs: int, seed: int | None) -> Any:
        return rein.SelfPlay(GAME, num_envs, seed=seed)


@pytest.mark.parametrize(
    ("moves", "reward", "over"),
    [
        ((4, 0), 0.0, False),
        ((0, 3, 1, 4, 2), 1.0, True),
        ((8, 0, 7, 3, 2, 6), 1.0, True),
        ((0, 1, 2, 4, 3, 5, 7, 6, 8), 0.0, True),
        ((0, 1, 2, 3, 4, 5, 7, 6, 8), 1.0, True),
    ],
)
def test_tic_tac_toe_ends_with_a_line_or_a_full_board(moves: tuple[int, ...], reward: float, over: bool) -> None:
    assert played(*moves)[1:] == (reward, over)


def test_observation_is_that_of_the_player_to_move() -> None:
    seen = GAME.observe(played(4, 0, 8)[0])
    assert seen["observation"].nonzero()[:, 1].tolist() == [0, 9 + 4, 9 + 8]
    assert seen["action_mask"].tolist() == [[0, 1, 1, 1, 0, 1, 1, 1, 0]]


def test_opponents_move_first_in_half_of_the_games() -> None:
    env = rein.SelfPlay(GAME, 1000, seed=0)
    marks_N = env.reset()["observation"].sum(1)
    assert torch.equal(marks_N, env.seats)
    assert 440 < int(marks_N.sum()) < 560


def test_rewards_agree_with_the_board() -> None:
    env = rein.SelfPlay(GAME, 200, seed=0)
    observation, policy, results = env.reset(), RandomPolicy(GAME.single_action_space, seed=0), []
    for _ in range(30):
        action, _ = policy.select_action(observation)
        step = env.apply_action(action)
        assert not step.reward[~step.terminated].any()
        results += step.reward[step.terminated].tolist()
        observation = step.observation
    shares = [results.count(x) / len(results) for x in (1.0, 0.0, -1.0)]
    assert shares == pytest.approx([0.436, 0.127, 0.436], abs=0.04)  # exact for two random players: 0.4365, 0.1270


def test_invalid_move_raises() -> None:
    env = rein.SelfPlay(GAME, 2, seed=0)
    taken = env.reset()["action_mask"][:, 0] == 0
    env.apply_action(torch.where(taken, 1, 0))
    with pytest.raises(EnvironmentContractError, match="expected a move that action_mask allows, got 0"):
        env.apply_action(torch.zeros(2, dtype=torch.int64))


def recurrent(seed: int) -> Any:
    return rein.PPO(
        GAME, rollout_steps=8, hidden=(16,), core=functools.partial(rein.networks.LSTM, features=8), seed=seed
    )


def self_play(size: int = 3, memory: bool = False) -> Any:
    agent = recurrent(0) if memory else rein.PPO(GAME, rollout_steps=8, hidden=(16,), seed=0)
    pool = rein.OpponentPool(agent, size)
    env = rein.SelfPlay(GAME, 16, opponents=pool, seed=0)
    loop = rein.training_loop(agent, env, seed=0, iterations=10)
    loop.epoch_ended(lambda state: pool.add())
    return agent, pool, env, loop


def test_pool_keeps_the_last_snapshots() -> None:
    agent, pool, env, loop = self_play()
    loop.run(epochs=5)
    assert len(pool) == 3
    assert env.replayable is False
    observation = env.reset()
    last = agent.policy(deterministic=False).select_action(observation)[0]
    actions = [pool.select_action(index, observation, None)[0] for index in range(3)]
    assert {*env._opponent_N.tolist()} == {-1, 0, 1, 2}
    assert all(action.shape == last.shape for action in actions)
    newest = pool._snapshots[4 % 3]
    assert first_difference(newest.networks.state_dict(), agent.networks.state_dict()) is None
    assert first_difference(pool._snapshots[0].networks.state_dict(), agent.networks.state_dict()) is not None


@pytest.mark.default_cases("False")
@pytest.mark.parametrize("memory", [False, True])
def test_run_with_snapshots_resumes_bit_for_bit(memory: bool) -> None:
    whole, _, env, loop = self_play(memory=memory)
    loop.run(epochs=6)
    _, _, _, first = self_play(memory=memory)
    first.run(epochs=4)
    state = copy_state(first.state_dict())
    again, _, env_again, second = self_play(memory=memory)
    second.load_state_dict(state)
    second.run(epochs=6)
    assert first_difference(whole.state_dict(), again.state_dict()) is None
    assert first_difference(env.state_dict(), env_again.state_dict()) is None


class Greedy:
    """Greedy policies of two recurrent agents as opponents, with a record of their moves."""

    def __init__(self) -> None:
        self.policies = [recurrent(seed).policy() for seed in range(2)]
        self.moves: list[tuple[int, Any, torch.Tensor]] = []

    def __len__(self) -> int:
        return 2

    def select_action(self, index: int, observation: Any, carry: torch.Tensor | None) -> Any:
        self.policies[index].carry = carry
        action, _ = self.policies[index].select_action(observation)
        self.moves.append((index, observation, action))
        return action, self.policies[index].carry

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_recurrent_opponent_plays_as_its_policy_plays_alone() -> None:
    opponents = Greedy()
    env = rein.SelfPlay(GAME, 1, opponents=opponents, seed=0)
    observation = env.reset()
    for _ in range(40):
        observation = env.apply_action(observation["action_mask"].argmax(1)).observation
    alone, without_memory = Greedy().policies, []
    for index, observation, action in opponents.moves:
        policy = alone[index]
        if not observation["observation"][:, :9].any():  # its first move of the game
            policy.reset()
        assert torch.equal(policy.select_action(observation)[0], action)
        forgetful = recurrent(index).policy().select_action(observation)[0]
        without_memory.append(torch.equal(forgetful, action))
    assert {index for index, _, _ in opponents.moves} == {0, 1}
    assert not all(without_memory)


def test_recurrent_opponents_have_a_carry_for_each_game() -> None:
    env = rein.SelfPlay(GAME, 6, opponents=Greedy(), seed=0)
    observation = env.reset()
    singles = [rein.SelfPlay(GAME, 1, opponents=Greedy(), seed=9) for _ in range(6)]
    seen = [single.reset_to(seed[None]) for single, seed in zip(singles, env.episode_seeds, strict=True)]
    going = set(range(6))
    while going:
        step = env.apply_action(observation["action_mask"].argmax(1))
        for n in sorted(going):
            single = singles[n].apply_action(seen[n]["action_mask"].argmax(1))
            assert torch.equal(step.final_observation["observation"][n], single.final_observation["observation"][0])
            seen[n] = single.observation
        going -= set(step.terminated.nonzero().flatten().tolist())
        observation = step.observation


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_agent_never_loses_to_random_and_elo_rises_over_snapshots() -> None:
    """Snapshots are taken after 16,384, 131,072, 524,288 and 2,949,120 env steps."""
    rate, entropy = (
        rein.schedules.linear(2e-3, 1e-4, env_steps=3_000_000),
        rein.schedules.linear(0.05, 0.003, env_steps=3_000_000),
    )
    settings: dict[str, Any] = {"rollout_steps": 16, "update_epochs": 6, "hidden": (256, 256), "activation": "relu"}
    settings |= {"learning_rate": rate, "entropy_coefficient": entropy, "gamma": 1.0}
    agent = rein.PPO(GAME, seed=0, **settings)
    pool = rein.OpponentPool(agent, size=1)
    env = rein.SelfPlay(GAME, 256, opponents=pool, seed=0)
    loop = rein.training_loop(agent, env, seed=0, iterations=64)
    loop.epoch_ended(lambda state: pool.add())
    policies: dict[str, Any] = {"random": RandomPolicy(GAME.single_action_space, seed=0)}
    for epochs in (1, 8, 32, 180):
        loop.run(epochs=epochs)
        snapshot = rein.PPO(GAME, seed=1, **settings)
        snapshot.load_state_dict(copy_state(agent.state_dict()))
        policies[f"after epoch {epochs}"] = snapshot.policy(deterministic=False)
    assert int((rein.evaluate(agent, rein.SelfPlay(GAME, 100, seed=7), 1000).episode_return < 0).sum()) == 0
    elo = rein.tournament(policies, GAME, 1000).elo
    assert [*elo.values()] == sorted(elo.values())


def test_tournament_counts_each_pair() -> None:
    policies = {name: RandomPolicy(GAME.single_action_space, seed=k) for k, name in enumerate("abc")}
    result = rein.tournament(policies, GAME, 50)
    games = result.wins + result.losses + result.draws
    assert games.tolist() == [[0, 50, 50], [50, 0, 50], [50, 50, 0]]
    assert str(result).splitlines()[0].split() == ["wins", "draws", "losses", "Elo"]
