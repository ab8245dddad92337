"""Classification metrics: fractions and counts over a batch of (prediction, target).

- Two classes: a prediction (B,) or (B, 1) is positive if it is above `threshold`, a target if it is above 0.5.
- C classes: a prediction (B, C) holds a score per class. A target is a class index (B,) or one-hot (B, C).

B may be any number of dimensions; classes are the last dimension.

Counts can be summed over batches. Fractions cannot be averaged over batches of different sizes: compute precision,
recall and specificity of a data set from its counts.
"""

from __future__ import annotations

from torch import Tensor


def accuracy(prediction: Tensor, target: Tensor, threshold: float = 0.5) -> Tensor:
    """Return the fraction of rows whose predicted class is correct, (). The first of equal scores is predicted.

    For logits of two classes use `threshold=0.0`. Raises ValueError if the shapes do not match.
    """
    if prediction.ndim > 1 and prediction.shape[-1] > 1:
        return (prediction.argmax(-1) == _classes(prediction, target)).float().mean()
    positive_B, is_positive_B = _binary(prediction, target, threshold)
    return (positive_B == is_positive_B).float().mean()


def top_k_accuracy(prediction_BC: Tensor, target: Tensor, k: int = 5) -> Tensor:
    """Return the fraction of rows in which fewer than `k` classes score higher than the target class, ().

    NaN counts as the highest score. Raises ValueError for `k` below 1 or if the shapes do not match.
    """
    if k < 1:
        raise ValueError(f"top_k_accuracy(k={k}): give 1 or more")
    score_B1 = prediction_BC.gather(-1, _classes(prediction_BC, target).unsqueeze(-1))
    higher_B = (~(prediction_BC <= score_B1)).sum(-1)
    return (higher_B < k).float().mean()


def true_positives(prediction: Tensor, target: Tensor, threshold: float = 0.5) -> Tensor:
    """Return the number of positive rows predicted as positive, () int64."""
    positive_B, is_positive_B = _binary(prediction, target, threshold)
    return (positive_B & is_positive_B).sum()


def false_positives(prediction: Tensor, target: Tensor, threshold: float = 0.5) -> Tensor:
    """Return the number of negative rows predicted as positive, () int64."""
    positive_B, is_positive_B = _binary(prediction, target, threshold)
    return (positive_B & ~is_positive_B).sum()


def true_negatives(prediction: Tensor, target: Tensor, threshold: float = 0.5) -> Tensor:
    """Return the number of negative rows predicted as negative, () int64."""
    positive_B, is_positive_B = _binary(prediction, target, threshold)
    return (~positive_B & ~is_positive_B).sum()


def false_negatives(prediction: Tensor, target: Tensor, threshold: float = 0.5) -> Tensor:
    """Return the number of positive rows predicted as negative, () int64."""
    positive_B, is_positive_B = _binary(prediction, target, threshold)
    return (~positive_B & is_positive_B).sum()


def precision(prediction: Tensor, target: Tensor, threshold: float = 0.5) -> Tensor:
    """Return true positives / (true positives + false positives), (); NaN without predicted positives."""
    positive_B, is_positive_B = _binary(prediction, target, threshold)
    return (positive_B & is_positive_B).sum() / positive_B.sum()


def recall(prediction: Tensor, target: Tensor, threshold: float = 0.5) -> Tensor:
    """Return true positives / (true positives + false negatives), (); NaN without positives. Also: sensitivity."""
    positive_B, is_positive_B = _binary(prediction, target, threshold)
    return (positive_B & is_positive_B).sum() / is_positive_B.sum()


def specificity(prediction: Tensor, target: Tensor, threshold: float = 0.5) -> Tensor:
    """Return true negatives / (true negatives + false positives), (); NaN without negatives."""
    positive_B, is_positive_B = _binary(prediction, target, threshold)
    return (~positive_B & ~is_positive_B).sum() / (~is_positive_B).sum()


def _binary(prediction: Tensor, target: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return which rows are predicted as positive and which are positive, (B,) bool each."""
    flat_B, target_B = (x.squeeze(-1) if x.ndim > 1 and x.shape[-1] == 1 else x for x in (prediction, target))
    if flat_B.shape != target_B.shape:
        raise ValueError(
            f"predictions {tuple(prediction.shape)} of two classes and targets {tuple(target.shape)} do not match: "
            "give one prediction and one target per row"
        )
    return flat_B > threshold, target_B > 0.5


def _classes(prediction_BC: Tensor, target: Tensor) -> Tensor:
    """Return the class index of each target, (B,) int64."""
    if target.shape == prediction_BC.shape:
        return target.argmax(-1)
    if target.shape != prediction_BC.shape[:-1] or target.is_floating_point():
        raise ValueError(
            f"predictions {tuple(prediction_BC.shape)} of {prediction_BC.shape[-1]} classes and targets "
            f"{tuple(target.shape)} of {target.dtype} do not match: give integer class indices "
            f"{tuple(prediction_BC.shape[:-1])} or one-hot {tuple(prediction_BC.shape)}"
        )
    return target.long()
