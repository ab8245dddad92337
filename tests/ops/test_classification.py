from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rein.ops.classification import (
    accuracy,
    false_negatives,
    false_positives,
    precision,
    recall,
    specificity,
    top_k_accuracy,
    true_negatives,
    true_positives,
)

PREDICTION = torch.tensor([0.8, 0.6, 0.4, 0.2, 0.8, 0.2, 0.2])
TARGET = torch.tensor([1, 0, 1, 1, 0, 1, 0])


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("count", "expected"), [(true_positives, 1), (false_negatives, 3), (true_negatives, 1), (false_positives, 2)]
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_each_row_is_counted_once(count: Callable[..., Tensor], expected: int, dtype: torch.dtype) -> None:
    assert count(PREDICTION, TARGET.to(dtype)) == expected


def test_fractions_match_the_counts() -> None:
    prediction, target = drawn(0, 200), drawn(1, 200) > 0.3
    tp, fp, tn, fn = (
        count(prediction, target).item() for count in (true_positives, false_positives, true_negatives, false_negatives)
    )
    assert tp + fp + tn + fn == 200
    assert precision(prediction, target).item() == pytest.approx(tp / (tp + fp))
    assert recall(prediction, target).item() == pytest.approx(tp / (tp + fn))
    assert specificity(prediction, target).item() == pytest.approx(tn / (tn + fp))
    assert accuracy(prediction, target).item() == pytest.approx((tp + tn) / 200)


def test_prediction_at_the_threshold_is_negative() -> None:
    assert true_positives(torch.tensor([0.5, 0.50001]), torch.tensor([1, 1])) == 1
    assert accuracy(torch.tensor([0.0, 0.1]), torch.tensor([0, 1]), threshold=0.0) == 1.0


@pytest.mark.parametrize(
    ("fraction", "predicted", "positive"), [(precision, 0, 1), (recall, 1, 0), (specificity, 1, 1)]
)
def test_fraction_without_rows_is_nan(fraction: Callable[..., Tensor], predicted: int, positive: int) -> None:
    assert math.isnan(fraction(torch.full((3,), predicted), torch.full((3,), positive)).item())


@pytest.mark.parametrize("column", [False, True])
def test_column_of_two_classes_is_read_as_rows(column: bool) -> None:
    """Comparing (B, 1) with (B,) would broadcast to all pairs."""
    prediction = PREDICTION.unsqueeze(1)
    assert accuracy(prediction, TARGET.unsqueeze(1) if column else TARGET).item() == pytest.approx(2 / 7)


def slow_accuracy(prediction: Tensor, target: Tensor, k: int) -> float:
    """Return the fraction of rows whose target is among the first `k` sorted scores."""
    rows = zip(prediction.reshape(-1, prediction.shape[-1]).tolist(), target.flatten().tolist(), strict=True)
    hits = [t in sorted(range(len(scores)), key=lambda c: -scores[c])[:k] for scores, t in rows]
    return sum(hits) / len(hits)


@pytest.mark.parametrize("shape", [(50, 4), (10, 5, 3)])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_accuracy_matches_sorting(shape: tuple[int, ...], k: int) -> None:
    prediction, target = drawn(2, *shape), (drawn(3, *shape[:-1]) * shape[-1]).long()
    one_hot = torch.nn.functional.one_hot(target, shape[-1])
    for given in (target, one_hot, one_hot.float()):
        assert top_k_accuracy(prediction, given, k).item() == pytest.approx(slow_accuracy(prediction, target, k))
        assert accuracy(prediction, given).item() == pytest.approx(slow_accuracy(prediction, target, 1))


def test_k_of_all_classes_gives_one_except_for_nan() -> None:
    assert top_k_accuracy(drawn(4, 9, 3), torch.arange(9) % 3, k=3) == 1.0
    assert top_k_accuracy(torch.full((2, 6), math.nan), torch.tensor([0, 1])) == 0.0


@pytest.mark.parametrize(
    ("prediction", "target", "text"),
    [
        (torch.zeros(3, 4), torch.zeros(4, dtype=torch.int64), r"predictions \(3, 4\) of 4 classes and targets \(4,\)"),
        (torch.zeros(3, 4), torch.zeros(3), "give integer class indices"),
        (torch.zeros(3), torch.zeros(3, 2), r"predictions \(3,\) of two classes and targets \(3, 2\)"),
    ],
)
def test_shapes_that_do_not_match_are_rejected(prediction: Tensor, target: Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        accuracy(prediction, target)


def test_k_of_zero_is_rejected() -> None:
    with pytest.raises(ValueError, match="give 1 or more"):
        top_k_accuracy(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), k=0)
