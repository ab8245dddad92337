"""What agents work out before they learn from it: targets, advantages, weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rein.ops.products import fast_products

Method = TypeVar("Method", bound=Callable[..., Any])


def without_gradient(method: Method) -> Method:
    """A method of a `ReplayAgent` by which no gradient goes, its products made as those of a `Learner` are."""

    @functools.wraps(method)
    def run(agent: Any, *given: Any, **named: Any) -> Any:
        with torch.no_grad(), fast_products(agent.batch_size * agent.largest_matrix):
            return method(agent, *given, **named)

    return run  # type: ignore[return-value]  # which takes what `method` takes
