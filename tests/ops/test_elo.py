"""Elo ratings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rein.ops.elo import elo_ratings


def reference(score: np.ndarray) -> np.ndarray:
    """Return the ratings by the minorization-maximization algorithm of Hunter 2004."""
    games, strength = score + score.T, np.ones(len(score))
    for _ in range(20_000):
        strength = score.sum(1) / (games / (strength[:, None] + strength)).sum(1)
        strength /= np.exp(np.log(strength).mean())
    return 400.0 * np.log10(strength)


def test_equals_reference() -> None:
    score = np.random.default_rng(0).integers(1, 60, (5, 5)) * 0.5
    np.fill_diagonal(score, 0.0)
    score[0, 3] = score[3, 0] = 0.0  # a pair that has not played
    assert elo_ratings(torch.tensor(score)).tolist() == pytest.approx(reference(score).tolist(), abs=1e-6)


def test_two_players() -> None:
    """A player who scores 10 points to 1 is 400 points stronger."""
    a, b = elo_ratings(torch.tensor([[0.0, 10.0], [1.0, 0.0]])).tolist()
    assert (a - b, a + b) == pytest.approx((400.0, 0.0))


def test_prior_draws_make_ratings_finite() -> None:
    score = torch.tensor([[0.0, 10.0], [0.0, 0.0]])
    with pytest.raises(ValueError, match="give prior_draws=1"):
        elo_ratings(score)
    a, b = elo_ratings(score, prior_draws=1.0).tolist()
    assert a - b == pytest.approx(400.0 * math.log10(10.5 / 0.5))
