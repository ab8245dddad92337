"""Games between policies: table of results and Elo ratings.

Shapes: P policies, N games.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rein.envs.base.games import Game, Games
from rein.episodes.evaluation import greedy_policy
from rein.ops.elo import elo_ratings
from rein.ops.random import stream_seed
from rein.protocols import Policy


class Tournament(NamedTuple):
    """Results of `tournament`. Print it to see a table."""

    names: tuple[str, ...]
    wins: Tensor  # (P, P) int64, games that the row's policy won against the column's
    draws: Tensor  # (P, P) int64

    @property
    def losses(self) -> Tensor:
        """Games that the row's policy lost against the column's, (P, P) int64."""
        return self.wins.T

    @property
    def elo(self) -> dict[str, float]:
        """Elo rating of each policy, with mean 0.

        One draw between each pair is added, so that the rating of a policy that won all its games is finite.
        """
        rating_P = elo_ratings(self.wins + 0.5 * self.draws, prior_draws=1.0)
        return dict(zip(self.names, rating_P.tolist(), strict=True))

    def __repr__(self) -> str:
        elo, width = self.elo, max(map(len, self.names))
        lines = [f"{'':{width}}  {'wins':>6} {'draws':>6} {'losses':>6} {'Elo':>6}"]
        for i, name in enumerate(self.names):
            counts = (int(x[i].sum()) for x in (self.wins, self.draws, self.losses))
            lines.append(f"{name:{width}}  {' '.join(f'{count:6}' for count in counts)} {elo[name]:6.0f}")
        return "\n".join(lines)


def tournament(policies: Mapping[str, Any], game: Game, episodes: int = 100, *, seed: int = 0) -> Tournament:
    """Play games between all pairs of policies. The player with the higher return wins a game.

    Each policy is the first player in half of the games of a pair. Agents play with their greedy policies. Two policies
    without randomness play the same two games again and again: give `agent.policy(deterministic=False)` to sample
    actions.

    Args:
        policies: policies or agents by name, at least two.
        game: game of two players, a `rein.envs.TurnBasedGame` or a `rein.envs.PettingZooGame`.
        episodes: games of each pair, rounded up to an even number.
        seed: seed of the starts of the games.
    """
    if len(policies) < 2 or episodes < 1:
        raise ValueError(f"tournament: give at least two policies and one episode, got {len(policies)} and {episodes}")
    names, acting = tuple(policies), [greedy_policy(policy) for policy in policies.values()]
    wins_PP = torch.zeros(len(names), len(names), dtype=torch.int64, device="cpu")
    draws_PP = torch.zeros_like(wins_PP)
    seed_N = torch.tensor(
        [stream_seed(seed, "tournament", n) for n in range(-(-episodes // 2))], dtype=torch.int64, device="cpu"
    )
    games = game.games(len(seed_N), torch.device("cpu"))
    with torch.inference_mode(False), torch.no_grad():
        for i in range(len(names)):
            for j in range(len(names)):
                if i != j:
                    result_N = _play(games, (acting[i], acting[j]), seed_N)
                    wins_PP[i, j] += int((result_N > 0).sum())
                    wins_PP[j, i] += int((result_N < 0).sum())
                    draws = int((result_N == 0).sum())
                    draws_PP[i, j] += draws
                    draws_PP[j, i] += draws
    games.close()
    return Tournament(names, wins_PP, draws_PP)


def _play(games: Games, players: tuple[Policy, Policy], seed_N: Tensor) -> Tensor:
    """Return the results (N,) of games: the return of the first player minus that of the second player."""
    row_N = torch.arange(len(seed_N), device="cpu")
    result_N = torch.zeros(len(seed_N), dtype=torch.float32, device="cpu")
    open_N = torch.ones_like(seed_N, dtype=torch.bool)
    games.begin(row_N, seed_N)
    for player in players:
        player.reset()
    while bool(open_N.any()):
        player_N = games.player
        observation = games.observe(row_N, player_N)
        for number, player in enumerate(players):
            if bool((turn_N := open_N & (player_N == number)).any()):
                action_N, _ = player.select_action(observation)
                row_R = turn_N.nonzero().flatten()
                reward_R2, terminated_R, truncated_R = games.play(row_R, action_N[row_R])
                result_N[row_R] += reward_R2[:, 0] - reward_R2[:, 1]
                open_N[row_R] = ~(terminated_R | truncated_R)
    return result_N
