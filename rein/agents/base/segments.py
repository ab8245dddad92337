"""Learning from whole sequences, those more often that have more to teach, with advantages that are kept up to date.

Shapes: T steps of a rollout, N environments, S of them drawn for a minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

from rein.agents.base.learner import Batch
from rein.networks.actor_critic import ActorCritic
from rein.ops.returns import VTrace, vtrace
from rein.schedules import Schedule, as_schedule

_LEAST = 1e-6  # of the largest rate: what a sequence without any advantage is drawn with
_LOG_RATIO = 20.0  # beyond which a ratio is as good as 0, or as infinity, and can still be divided by


@attrs.frozen
class Segments:
    """How `PPO` draws and weighs the sequences of environments, instead of passing over all rows.

    For each update, environments are drawn one after another, none twice, with probabilities proportional to

        p_n = (sum over t of |A_tn|) ** alpha

    among those that are left; alpha = 0 draws all alike. What an environment is drawn for too often it is made up for
    by its weight: its standardized advantages are multiplied by q_n ** -beta, divided by the mean of that in the
    minibatch. q_n is the probability with which it came to be drawn, given the others: in proportion to p_n, as in the
    paper, where few are drawn among many, and 1 where all are. beta = 1 makes up for all, 0 for nothing; the paper
    anneals to 1: `linear(0.2, 1.0, updates=...)`. Dividing by the mean, not by the largest, leaves the policy its
    weight against value and entropy, which are not weighed.

    After the update the networks are asked again about these sequences, and their values and advantages become those of
    V-trace for the policy that there is now. `rho_clip` and `c_clip` bound its ratios. The advantages are not weighed
    by the ratio rho_t of their own step, for the surrogate of PPO is. Bootstraps stay those of the round's beginning.

    Sources: Schaul et al. 2016 ("Prioritized experience replay"), 3.3 and 3.4; Espeholt et al. 2018, 4.1.
    """

    alpha: float = 0.8
    beta: Schedule = attrs.field(default=as_schedule(0.2), converter=as_schedule)
    rho_clip: float = 1.0
    c_clip: float = 1.0

    def __attrs_post_init__(self) -> None:
        if not 0.0 <= self.alpha < float("inf"):
            raise ValueError(f"Segments(alpha={self.alpha}): give a number from 0 (all alike) up")
        least, most = self.beta.bounds
        if not 0.0 <= least <= most <= 1.0:
            raise ValueError(f"Segments(beta=...) goes from {least} to {most}: stay within 0 (no weights) and 1")
        for name in ("rho_clip", "c_clip"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"Segments({name}={getattr(self, name)}): give a positive number, or infinity")

    @property
    def config(self) -> dict[str, object]:
        """What it was built with, as JSON."""
        clips = {"rho_clip": self.rho_clip, "c_clip": self.c_clip}
        return {
            "alpha": self.alpha,
            "beta": self.beta.config,
            **{name: "inf" if clip == float("inf") else clip for name, clip in clips.items()},
        }


class Trace(NamedTuple):
    """Of a rollout, what V-trace needs and learning does not change; (T, N) each."""

    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    next_value: Tensor  # which stays what it is where an episode was cut and in the last row
    valid: Tensor | None


class SegmentSampler:
    """A rollout whose sequences are drawn, learned from and looked at again.

    Advantages and targets are its own copies. The batch stays as it was, and with it what the clips of PPO refer to.
    """

    def __init__(
        self, segments: Segments, networks: ActorCritic, batch: Batch, trace: Trace, *, gamma: float, lambda_: float
    ) -> None:
        """`batch` is the rollout as rows (T * N, ...), or for recurrent networks as it is (T, N, ...)."""
        self._segments, self._networks, self._batch, self._trace = segments, networks, batch, trace
        self._gamma, self._lambda = gamma, lambda_
        self.advantage_TN = batch.advantage.reshape(trace.reward.shape).clone()
        self.target_TN = batch.target.reshape(trace.reward.shape).clone()

    def minibatches(
        self, count: int, generator: torch.Generator, counts: Mapping[str, int]
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Yield `count` of N // count sequences each, with what weighs their advantages; an update is made in between.

        `counts` is where the schedule of beta stands. Raises ValueError for less than `count` sequences.
        """
        (steps, num_envs), beta = self.advantage_TN.shape, self._segments.beta(**counts)
        if count > num_envs:
            raise ValueError(f"minibatches={count} of whole sequences: there are {num_envs} environments to draw from")
        for _ in range(count):
            rate_N = priorities(self.advantage_TN, self._segments.alpha)
            index_S, chance_S = draw_without_replacement(rate_N, num_envs // count, generator)
            weight_S = chance_S.pow(-beta)
            drawn, weight_TS = self.rows(index_S), (weight_S / weight_S.mean()).expand(steps, -1)
            yield drawn, weight_TS.reshape(drawn.shape)
            self.revise(index_S, drawn)

    def rows(self, index_S: Tensor) -> Batch:
        """The sequences of these environments, as they are to be learned from now."""
        if self._batch.reset is not None:
            drawn = self._batch.rows(index_S)
        else:  # row t of environment n is t * N + n
            steps, num_envs = self.advantage_TN.shape
            first_T1 = num_envs * torch.arange(steps, device=index_S.device).unsqueeze(1)
            drawn = self._batch.rows((first_T1 + index_S).flatten())
        shape = drawn.shape
        advantage, target = self.advantage_TN[:, index_S].reshape(shape), self.target_TN[:, index_S].reshape(shape)
        return drawn._replace(advantage=advantage, target=target)

    @torch.no_grad()
    def revise(self, index_S: Tensor, drawn: Batch) -> None:
        """Ask the networks as they are now about drawn sequences, and correct their advantages and targets."""
        trace = Trace(*(None if column is None else column[:, index_S] for column in self._trace))  # type: ignore[arg-type]  # columns in their order, None for none
        distribution, value = self._networks.look(drawn.features, drawn.carry, drawn.reset)
        log_ratio_TS = (distribution.log_prob(drawn.sample) - drawn.log_prob).view_as(trace.reward)
        found = self._corrected(trace, log_ratio_TS.clamp(-_LOG_RATIO, _LOG_RATIO), value.view_as(trace.reward))
        self.advantage_TN[:, index_S], self.target_TN[:, index_S] = found.advantage, found.target

    def _corrected(self, trace: Trace, log_ratio_TS: Tensor, value_TS: Tensor) -> VTrace:
        cut_TS = trace.truncated.clone()
        cut_TS[-1] = True
        next_value_TS = torch.where(cut_TS, trace.next_value, value_TS.roll(-1, 0))
        rho_clip, c_clip = self._segments.rho_clip, self._segments.c_clip
        found = vtrace(
            log_ratio_TS,
            trace.reward,
            trace.terminated,
            trace.truncated,
            value_TS,
            next_value_TS,
            trace.valid,
            gamma=self._gamma,
            lambda_=self._lambda,
            rho_clip=rho_clip,
            c_clip=c_clip,
        )
        own_TS = found.advantage / log_ratio_TS.exp().clamp(max=rho_clip)  # the surrogate has this factor already
        return VTrace(found.target, own_TS if trace.valid is None else torch.where(trace.valid, own_TS, 0.0))


def priorities(advantage_TN: Tensor, alpha: float) -> Tensor:
    """(sum over t of |A|) ** alpha over the largest of them, (N,); none is below a millionth. Invalid rows are 0."""
    rate_N = advantage_TN.abs().sum(0).pow(alpha)
    rate_N = rate_N / rate_N.max().clamp(min=torch.finfo(rate_N.dtype).tiny)
    return rate_N.clamp(min=_LEAST)


def draw_without_replacement(rate_N: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `count` of N, none twice, in proportion to their rates among those left; where (S,), and their chances (S,).

    Each rings after an exponential time, and those that ring first are drawn. Given when the first of the others rings,
    at time tau, one of rate r was to be drawn with the chance 1 - exp(-r tau): sums of what is drawn, over its chance,
    are unbiased for sums over all. No number is fetched, and rates need not sum to 1.

    Sources: Efraimidis & Spirakis 2006; Cohen & Kaplan 2007 (bottom-k sketches, rank conditioning).
    """
    time_N = torch.empty_like(rate_N).exponential_(generator=generator) / rate_N
    first = time_N.topk(min(count + 1, len(rate_N)), largest=False)
    index_S = first.indices[:count]
    if count == len(rate_N):
        return index_S, torch.ones_like(rate_N)
    return index_S, -torch.expm1(-rate_N[index_S] * first.values[count])
