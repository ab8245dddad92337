"""Self-play in turn-based games with the interface of PettingZoo. `make test-compat` tests those of PettingZoo."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.episodes.random_policy import RandomPolicy
from rein.errors import EnvironmentContractError
from rein.testing import EnvironmentContract
from rein.testing.stateful import first_difference


class Nim:
    """Game of PettingZoo: players in turn take 1 to 3 of at most 12 stones, and the one who takes the last stone wins.

    Args:
        mask_in: the place of the action mask, "observation" or "info".
        again: whether a player who takes 3 stones moves again.
        limit: moves after which the game is truncated.
        players: number of players.
    """

    metadata: dict[str, Any] = {"is_parallelizable": False}  # noqa: RUF012

    def __init__(self, mask_in: str = "observation", again: bool = False, limit: int = 99, players: int = 2) -> None:
        self.mask_in, self.again, self.limit = mask_in, again, limit
        self.possible_agents = [f"player_{number}" for number in range(players)]
        self.closed = False

    def observation_space(self, name: str) -> spaces.Space[Any]:
        stones = spaces.Box(0, 12, (2,), np.int8)
        mask = {"action_mask": spaces.Box(0, 1, (3,), np.int8)} if self.mask_in == "observation" else {}
        return spaces.Dict({"observation": stones, **mask})

    def action_space(self, name: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.stones, self.moves = int(np.random.default_rng(seed).integers(5, 12, endpoint=True)), 0
        self.agents, self.turns = [*self.possible_agents], itertools.cycle(self.possible_agents)
        self.agent_selection = next(self.turns)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self._settle(None)

    def observe(self, name: str) -> dict[str, np.ndarray]:
        mask = {"action_mask": self._mask(name)} if self.mask_in == "observation" else {}
        return {"observation": np.array([self.stones, self.possible_agents.index(name)], np.int8), **mask}

    def step(self, action: int) -> None:
        name = self.agent_selection
        assert not self.terminations[name]
        assert self._mask(name)[action]
        self.stones, self.moves = self.stones - action - 1, self.moves + 1
        if action < 2 or not self.again:
            self.agent_selection = next(self.turns)
        self._settle(name)

    def _settle(self, mover: str | None) -> None:
        over = self.stones == 0
        self.rewards = {name: (1 if name == mover else -1) if over else 0 for name in self.agents}
        self.terminations = dict.fromkeys(self.agents, over)
        self.truncations = dict.fromkeys(self.agents, self.moves >= self.limit and not over)
        masks = {} if self.mask_in == "observation" else {"action_mask": self._mask(self.agent_selection)}
        self.infos = {name: masks if name == self.agent_selection else {} for name in self.agents}

    def _mask(self, name: str) -> np.ndarray:
        return ((np.arange(3) < self.stones) & (name == self.agent_selection)).astype(np.int8)

    def agent_iter(self) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("mask_in", ["observation", "info"])
class TestNim(EnvironmentContract):
    steps = 40

    @pytest.fixture(autouse=True)
    def _variant(self, mask_in: str) -> None:
        self.mask_in = mask_in

    def make(self, num_envs: int, seed: int | None) -> Any:
        return rein.SelfPlay(rein.envs.PettingZooGame(Nim, mask_in=self.mask_in), num_envs, seed=seed)


def nim(num_envs: int, seed: int = 0, **options: Any) -> Any:
    return rein.SelfPlay(rein.envs.PettingZooGame(Nim, **options), num_envs, seed=seed)


def random_steps(env: Any, steps: int) -> Iterator[Any]:
    policy, observation = RandomPolicy(env.single_action_space, seed=0), env.reset()
    for _ in range(steps):
        step = env.apply_action(policy.select_action(observation)[0])
        yield step
        observation = step.observation


def test_function_is_accepted_in_place_of_a_game() -> None:
    env = rein.SelfPlay(Nim, num_envs=3, seed=0)
    assert first_difference([*random_steps(env, 20)], [*random_steps(nim(3), 20)]) is None
    assert env.config["game"].endswith("test_pettingzoo_game:Nim")


@pytest.mark.parametrize("again", [False, True])
def test_observations_are_those_of_the_agent_when_it_is_to_move(again: bool) -> None:
    env = nim(64, again=again)
    seats: list[torch.Tensor] = []
    for step in random_steps(env, 30):
        assert torch.equal(step.observation["observation"][:, 1].long(), env.seats)
        assert step.observation["action_mask"].any(1).all()
        assert not seats or torch.equal(step.final_observation["observation"][:, 1].long(), seats[-1])
        seats.append(env.seats)
    assert 0.4 < float(torch.cat(seats).double().mean()) < 0.6


def test_reward_is_that_of_the_agent_since_its_last_move() -> None:
    for step in random_steps(nim(64), 30):
        over = step.terminated
        assert torch.equal(step.reward != 0, over)
        assert not step.final_observation["observation"][over, 0].any()
        assert {*step.reward[over].tolist()} <= {1.0, -1.0}


def test_agent_and_opponents_may_move_again() -> None:
    steps = [*random_steps(nim(64, again=True), 30)]
    before = [step.observation["observation"][:, 0] for step in steps]
    taken = [a - b.final_observation["observation"][:, 0] for a, b in zip(before, steps[1:], strict=False)]
    assert any((x == 3).any() for x in taken)  # the agent took 3 stones and is to move
    assert any((x > 6).any() for x in taken)  # the opponent moved more than once


def test_game_that_an_opponent_ends_before_the_first_move_of_the_agent_is_not_an_episode() -> None:
    env = nim(200, again=True, limit=1)
    first = env.reset()
    assert not env.seats.any()
    assert (first["observation"][:, 0] >= 5).all()


def test_truncated_games_are_truncated() -> None:
    steps = [*random_steps(nim(16, limit=3), 10)]
    assert any(step.truncated.any() for step in steps)
    for step in steps:
        assert not (step.truncated & step.terminated).any()
        assert not step.reward[step.truncated].any()


def test_game_that_its_seed_does_not_reproduce_is_refused_at_a_resume() -> None:
    starts = itertools.count()

    class Unseeded(Nim):
        def reset(self, seed: int | None = None, options: Any = None) -> None:
            super().reset(next(starts))

    env, other = (rein.SelfPlay(Unseeded, 8, seed=0) for _ in range(2))
    env.reset()
    with pytest.raises(EnvironmentContractError, match="did not reproduce observation"):
        other.load_state_dict(env.state_dict())


def test_tournament_with_players_who_move_again_counts_each_game() -> None:
    game = rein.envs.PettingZooGame(Nim, again=True)
    policies = {name: RandomPolicy(game.single_action_space, seed=k) for k, name in enumerate("ab")}
    assert int(rein.tournament(policies, game, 40).wins.sum()) == 40


def test_error_of_a_game_has_a_note_with_its_row_and_seed() -> None:
    class Failing(Nim):
        def step(self, action: int) -> None:
            raise ZeroDivisionError

    env = rein.SelfPlay(Failing, 1, seed=0)
    with pytest.raises(ZeroDivisionError) as raised:
        for _ in range(20):
            env.apply_action(env.reset()["action_mask"].argmax(1))
    assert f"episode seed {int(env.episode_seeds)}" in raised.value.__notes__[0]


class Flagged(Nim):
    """After the second move, the flags of the last player have a given value."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__()
        self.name, self.value = name, value

    def step(self, action: int) -> None:
        super().step(action)
        if self.moves == 2:
            getattr(self, self.name)["player_1"] = self.value


@pytest.mark.parametrize("value", ["False", 2, math.nan, None, np.array([True, False])])
@pytest.mark.parametrize("name", ["terminations", "truncations"])
def test_flag_that_is_not_a_boolean_raises_with_its_place(name: str, value: Any) -> None:
    env = rein.SelfPlay(rein.envs.PettingZooGame(Flagged, name=name, value=value), 1, seed=0)
    with pytest.raises(EnvironmentContractError, match=r"ated, row 0 .*'player_1'.*: expected bool") as raised:
        [*random_steps(env, 2)]
    assert f"episode seed {int(env.episode_seeds)}, move 2" in str(raised.value)


def test_games_are_not_played_after_an_exception_until_a_reset() -> None:
    class Failing(Nim):
        def step(self, action: int) -> None:
            if self.possible_agents.index(self.agent_selection) == self.moves == 1:
                raise ZeroDivisionError("no stone")
            super().step(action)

    env = rein.SelfPlay(Failing, 2, seed=0)
    with pytest.raises(ZeroDivisionError):
        [*random_steps(env, 3)]
    with pytest.raises(RuntimeError, match=r"call reset\(\).*ZeroDivisionError"):
        env.apply_action(torch.zeros(2, dtype=torch.int64))


def test_close_closes_all_environments() -> None:
    made: list[Nim] = []

    def make() -> Nim:
        made.append(Nim())
        return made[-1]

    env = rein.SelfPlay(make, 3, seed=0)
    env.close()
    env.close()
    assert len(made) == 4
    assert all(one.closed for one in made)


class Differing(Nim):
    def action_space(self, name: str) -> spaces.Space[Any]:
        return spaces.Discrete(3 if name == "player_0" else 4)


class Continuous(Nim):
    def action_space(self, name: str) -> spaces.Space[Any]:
        return spaces.Box(0.0, 1.0, (1,))


class Simultaneous(Nim):
    metadata = {"is_parallelizable": True}  # noqa: RUF012


class Parallel:
    possible_agents = ("a", "b")
    observe = None


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (functools.partial(Nim, players=3), ValueError, "game of 2 players, got 3"),
        (Parallel, TypeError, "a parallel environment, and must return an AEC environment"),
        (dict, TypeError, "must return an AEC environment"),
        (Simultaneous, TypeError, "act at the same time"),
        (Differing, TypeError, "differ"),
        (Continuous, TypeError, "Discrete from 0"),
    ],
)
def test_environment_that_is_not_a_game_of_two_players_is_refused(make: Any, error: Any, text: str) -> None:
    def made() -> Any:
        return make()

    with pytest.raises(error, match=text):
        rein.SelfPlay(made)


def test_function_that_returns_one_environment_is_refused() -> None:
    one = Nim()
    with pytest.raises(ValueError, match="the same environment twice"):
        rein.SelfPlay(lambda: one, 2)


def test_environment_in_place_of_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match="give a function"):
        rein.envs.PettingZooGame(Nim())  # type: ignore[arg-type]
