"""How often predictions are right: fractions and counts over a batch, for any data set of (prediction, target).

Two classes: a prediction (B,) or (B, 1) is positive where it is above `threshold`, and a target where it is above 0.5.
More: a prediction (B, C) is a score of each class, and a target the class (B,) or the scores of all, one-hot, (B, C).
In place of B there may be any number of dimensions; classes are on the last one.

Counts add up over batches, fractions do not: of batches of different sizes the mean is not that of the data, and
precision, recall and specificity of a whole come from its counts only.
"""

from __future__ import annotations

from torch import Tensor


def accuracy(prediction: Tensor, target: Tensor, threshold: float = 0.5) -> Tensor:
    """The fraction of rows whose class is the target's, (); of equal scores the first one is the class.

    For logits of two classes give `threshold=0.0`. Raises ValueError where the shapes do not belong together.
    """
    if prediction.ndim > 1 and prediction.shape[-1] > 1:
        return (prediction.argmax(-1) == _classes(prediction, target)).float().mean()
    positive_B, is_positive_B = _binary(prediction, target, threshold)
    return (positive_B == is_positive_B).float().mean()


def top_k_accuracy(prediction_BC: Tensor, target: Tensor, k: int = 5) -> Tensor:
    """The fraction of rows of which fewer than `k` other classes score higher than the target's, ().

    A score of NaN is higher than any. Raises ValueError for `k` below 1 and for shapes that do not belong together.
    """
    if k < 1:
        raise ValueError(f"top_k_accuracy(k={k}): give 1 or more")
    score_B1 = prediction_BC.gather(-1, _classes(prediction_BC, target).unsqueeze(-1))
    higher_B = (~(prediction_BC <= score_B1)).sum(-1)
    return (higher_B < k).float().mean()


def true_positives(prediction: Tensor, target: Tensor, threshold: float = 0.5) -> Tensor:
    """How many are positive and said to be, () int64."""
    positive_B, is_positive_B = _binary(prediction, target, threshold)
    return (positive_B & is_positive_B).sum()


def false_positives(prediction: Tensor, target: Tensor, threshold: float = 0.5) -> Tensor:
    """How many are said to be positive and are not, () int64."""
    positive_B, is_positive_B = _binary(prediction, target, threshold)
    return (positive_B & ~is_positive_B).sum()


def true_negatives(prediction: Tensor, target: Tensor, threshold: float = 0.5) -> Tensor:
    """How many are not positive and not said to be, () int64."""
    positive_B, is_positive_B = _binary(prediction, target, threshold)
    return (~positive_B & ~is_positive_B).sum()


def false_negatives(prediction: Tensor, target: Tensor, threshold: float = 0.5) -> Tensor:
    """How many are positive and not said to be, () int64."""
    positive_B, is_positive_B = _binary(prediction, target, threshold)
    return (~positive_B & is_positive_B).sum()


def precision(prediction: Tensor, target: Tensor, threshold: float = 0.5) -> Tensor:
    """Of those that are said to be positive, the fraction that is, (); NaN where there are none.

    true positives / (true positives + false positives)
    """
    positive_B, is_positive_B = _binary(prediction, target, threshold)
    return (positive_B & is_positive_B).sum() / positive_B.sum()


def recall(prediction: Tensor, target: Tensor, threshold: float = 0.5) -> Tensor:
    """Of those that are positive, the fraction that is said to be, (); NaN where there are none. Also: sensitivity.

    true positives / (true positives + false negatives)
    """
    positive_B, is_positive_B = _binary(prediction, target, threshold)
    return (positive_B & is_positive_B).sum() / is_positive_B.sum()


def specificity(prediction: Tensor, target: Tensor, threshold: float = 0.5) -> Tensor:
    """Of those that are not positive, the fraction that is not said to be, (); NaN where there are none.

    true negatives / (true negatives + false positives)
    """
    positive_B, is_positive_B = _binary(prediction, target, threshold)
    return (~positive_B & ~is_positive_B).sum() / (~is_positive_B).sum()


def _binary(prediction: Tensor, target: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Which rows are said to be positive, and which are; (B,) bool each."""
    flat_B, target_B = (x.squeeze(-1) if x.ndim > 1 and x.shape[-1] == 1 else x for x in (prediction, target))
    if flat_B.shape != target_B.shape:
        raise ValueError(
            f"predictions {tuple(prediction.shape)} of two classes and targets {tuple(target.shape)}: "
            "give one number of each for every row"
        )
    return flat_B > threshold, target_B > 0.5


def _classes(prediction_BC: Tensor, target: Tensor) -> Tensor:
    """The class of each target, (B,) int64."""
    if target.shape == prediction_BC.shape:
        return target.argmax(-1)
    if target.shape != prediction_BC.shape[:-1] or target.is_floating_point():
        raise ValueError(
            f"predictions {tuple(prediction_BC.shape)} of {prediction_BC.shape[-1]} classes and targets "
            f"{tuple(target.shape)} of {target.dtype}: give classes {tuple(prediction_BC.shape[:-1])} as integers, or "
            f"one-hot {tuple(prediction_BC.shape)}"
        )
    return target.long()
