"""Elo ratings of players from the results of their games.

Shapes: P players.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def elo_ratings(score_PP: Tensor, prior_draws: float = 0.0) -> Tensor:
    """Return the maximum-likelihood Elo ratings (P,) float64, with mean 0.

    `score_PP[i, j]` is the number of points of player i against player j: 1 for a win, 0.5 for a draw. The model is
    `E[score] = 1 / (1 + 10 ** ((rating_j - rating_i) / 400))`, that of Bradley & Terry 1952, in which a draw counts as
    half a win. `prior_draws` are added to each pair that has played, which keeps all ratings finite.

    Raises ValueError if the ratings are not finite: if a group of players has won all games against the others, or has
    played none.
    """
    score_PP = score_PP.double()
    score_PP = score_PP + prior_draws / 2.0 * (score_PP + score_PP.T > 0.0)
    games_PP, players = score_PP + score_PP.T, len(score_PP)
    beaten_PP = (
        torch.linalg.matrix_power(
            (score_PP > 0.0).double() + torch.eye(players, dtype=torch.float64, device=score_PP.device), players
        )
        > 0.0
    )
    if not bool(beaten_PP.all()):  # directly, or by way of other players
        raise ValueError(
            "elo_ratings: players who won or lost all games against others have no finite rating; give prior_draws=1"
        )
    rating_P = torch.zeros(players, dtype=torch.float64, device=score_PP.device)
    for _ in range(100):  # Newton's method: the log likelihood is concave
        expected_PP = torch.sigmoid(rating_P[:, None] - rating_P)
        gradient_P = (score_PP - games_PP * expected_PP).sum(1)
        weight_PP = games_PP * expected_PP * (1.0 - expected_PP)
        hessian_PP = torch.diag(weight_PP.sum(1)) - weight_PP
        # the sum of the ratings is free: adding a constant matrix fixes it at 0
        step_P = torch.linalg.solve(hessian_PP + 1.0 / players, gradient_P)
        largest = float(step_P.abs().max())
        rating_P = rating_P + step_P * min(1.0, 2.0 / max(largest, 1e-12))
        if largest < 1e-10:
            break
    return rating_P * (400.0 / math.log(10.0))
