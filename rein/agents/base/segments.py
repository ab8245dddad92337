"""Prioritized sampling of whole sequences for PPO, with advantages that are updated between minibatches.

Shapes: T steps of a rollout, N environments, S environments of a minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import torch
from torch import Tensor

from rein.agents.base.learner import Batch
from rein.agents.base.on_policy import Trace
from rein.networks.actor_critic import ActorCritic
from rein.networks.custom_networks import CustomActorCritic
from rein.ops.returns import VTrace, vtrace
from rein.schedules import Schedule, as_schedule

_SMALLEST_RATE = 1e-6  # relative to the largest rate, so that sequences with zero advantages can be drawn
_LOG_RATIO = 20.0  # bound of log ratios; their exponentials are finite and nonzero


@attrs.frozen
class PrioritizedSegments:
    """Option `segments` of `PPO`: prioritized sampling of whole sequences instead of shuffled rows.

    For each update, environments n are drawn without replacement, with probabilities proportional to::

        p_n = (sum over t of |A_tn|) ** alpha

    Importance weights correct for sampling some environments more often. Standardized advantages are multiplied by
    `q_n ** -beta`, divided by its mean over the minibatch. q_n is the conditional probability that environment n was
    drawn, given the other environments. It is proportional to p_n, as in the paper, if few of many environments are
    drawn, and 1 if all are drawn. Division by the mean instead of the maximum keeps the balance between the policy loss
    and the losses of value and entropy, which are not weighted.

    After the update, values and advantages of these sequences are recomputed with V-trace for the current policy.
    Advantages omit the factor rho_t of their step, since the surrogate of PPO contains it. Bootstrap values are not
    recomputed.

    Sources: Schaul et al. 2016 ("Prioritized experience replay"), sections 3.3 and 3.4; Espeholt et al. 2018, section
    4.1.

    Args:
        alpha: Exponent of priorities; 0 samples uniformly.
        beta: Exponent of importance weights, a number or a schedule: 0 for no correction, 1 for full correction. The
            paper anneals it to 1, for example with `linear(0.2, 1.0, updates=...)`.
        rho_clip: Bound of the importance weights of TD errors in V-trace.
        c_clip: Bound of the importance weights of the trace in V-trace.
    """

    alpha: float = 0.8
    beta: Schedule = attrs.field(default=as_schedule(0.2), converter=as_schedule)
    rho_clip: float = 1.0
    c_clip: float = 1.0

    def __attrs_post_init__(self) -> None:
        if not 0.0 <= self.alpha < float("inf"):
            raise ValueError(f"alpha={self.alpha}: give a finite number, 0 (uniform sampling) or more")
        low, high = self.beta.bounds
        if not 0.0 <= low <= high <= 1.0:
            raise ValueError(f"beta: the values range from {low} to {high}; give values from 0 to 1")
        for name in ("rho_clip", "c_clip"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name}={getattr(self, name)}: give a positive number, or infinity")

    @property
    def config(self) -> dict[str, object]:
        """The arguments of the constructor, as JSON."""
        clips = {"rho_clip": self.rho_clip, "c_clip": self.c_clip}
        return {
            "alpha": self.alpha,
            "beta": self.beta.config,
            **{name: "inf" if clip == float("inf") else clip for name, clip in clips.items()},
        }


class SegmentSampler:
    """Samples sequences of a rollout and updates their advantages and targets.

    Advantages and targets are copies. The batch does not change, since the clip ranges of PPO refer to its values.
    """

    def __init__(
        self,
        segments: PrioritizedSegments,
        networks: ActorCritic | CustomActorCritic,
        batch: Batch,
        trace: Trace,
        *,
        gamma: float,
        lambda_: float,
    ) -> None:
        """Create a sampler. `batch` has rows (T * N, ...), or sequences (T, N, ...) for recurrent networks."""
        self._segments = segments
        self._networks = networks
        self._batch = batch
        self._trace = trace
        self._gamma = gamma
        self._lambda = lambda_
        self.advantage_TN = batch.advantage.reshape(trace.reward.shape).clone()
        self.target_TN = batch.target.reshape(trace.reward.shape).clone()

    def minibatches(
        self, count: int, generator: torch.Generator, counts: Mapping[str, int]
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Yield `count` minibatches of N // count sequences, with the weights of their advantages.

        The caller updates the networks before the next minibatch. `counts` are the arguments of the schedule of beta.
        Raises ValueError if N is less than `count`.
        """
        (steps, num_envs), beta = self.advantage_TN.shape, self._segments.beta(**counts)
        if count > num_envs:
            raise ValueError(
                f"minibatches={count}: minibatches of whole sequences require at least {count} environments, "
                f"got {num_envs}"
            )
        for _ in range(count):
            rate_N = priorities(self.advantage_TN, self._segments.alpha)
            index_S, chance_S = draw_without_replacement(rate_N, num_envs // count, generator)
            weight_S = chance_S.pow(-beta)
            drawn, weight_TS = self.rows(index_S), (weight_S / weight_S.mean()).expand(steps, -1)
            yield drawn, weight_TS.reshape(drawn.shape)
            self.revise(index_S, drawn)

    def rows(self, index_S: Tensor) -> Batch:
        """Return the sequences of these environments with their current advantages and targets."""
        if self._batch.reset is not None:
            drawn = self._batch.rows(index_S)
        else:  # step t of environment n is row t * N + n
            steps, num_envs = self.advantage_TN.shape
            first_T1 = num_envs * torch.arange(steps, device=index_S.device).unsqueeze(1)
            drawn = self._batch.rows((first_T1 + index_S).flatten())
        shape = drawn.shape
        advantage, target = self.advantage_TN[:, index_S].reshape(shape), self.target_TN[:, index_S].reshape(shape)
        return drawn._replace(advantage=advantage, target=target)

    @torch.no_grad()
    def revise(self, index_S: Tensor, drawn: Batch) -> None:
        """Recompute the advantages and targets of drawn sequences with the current networks."""
        trace = Trace(*(None if column is None else column[:, index_S] for column in self._trace))  # type: ignore[arg-type]  # columns in order
        distribution, value = self._networks.distribution_and_value(drawn.features, drawn.carry, drawn.reset)
        log_ratio_TS = (distribution.log_prob(drawn.sample) - drawn.log_prob).view_as(trace.reward)
        corrected = self._corrected(trace, log_ratio_TS.clamp(-_LOG_RATIO, _LOG_RATIO), value.view_as(trace.reward))
        self.advantage_TN[:, index_S], self.target_TN[:, index_S] = corrected.advantage, corrected.target

    def _corrected(self, trace: Trace, log_ratio_TS: Tensor, value_TS: Tensor) -> VTrace:
        cut_TS = trace.truncated.clone()
        cut_TS[-1] = True
        next_value_TS = torch.where(cut_TS, trace.next_value, value_TS.roll(-1, 0))
        rho_clip, c_clip = self._segments.rho_clip, self._segments.c_clip
        corrected = vtrace(
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
        advantage_TS = corrected.advantage / log_ratio_TS.exp().clamp(
            max=rho_clip
        )  # the surrogate contains this factor
        if trace.valid is not None:
            advantage_TS = torch.where(trace.valid, advantage_TS, 0.0)
        return VTrace(corrected.target, advantage_TS)


def priorities(advantage_TN: Tensor, alpha: float) -> Tensor:
    """Return (sum over t of abs A) ** alpha, divided by its maximum, clamped to at least 1e-6; (N,).

    Advantages of invalid rows must be 0.
    """
    rate_N = advantage_TN.abs().sum(0).pow(alpha)
    rate_N = rate_N / rate_N.max().clamp(min=torch.finfo(rate_N.dtype).tiny)
    return rate_N.clamp(min=_SMALLEST_RATE)


def draw_without_replacement(rate_N: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `count` of N items without replacement, with probabilities proportional to `rate_N`.

    Returns indices (S,) and conditional inclusion probabilities (S,). Each item gets an exponential time with its rate,
    and the smallest times are drawn. Given the smallest time tau of the other items, an item of rate r is drawn with
    probability 1 - exp(-r tau). Sums over drawn items, divided by these probabilities, are unbiased estimates of sums
    over all items. Rates need not sum to 1. The function does not synchronize with the device.

    Sources: Efraimidis & Spirakis 2006; Cohen & Kaplan 2007 (bottom-k sketches, rank conditioning).
    """
    time_N = torch.empty_like(rate_N).exponential_(generator=generator) / rate_N
    first = time_N.topk(min(count + 1, len(rate_N)), largest=False)
    index_S = first.indices[:count]
    if count == len(rate_N):
        return index_S, torch.ones_like(rate_N)
    return index_S, -torch.expm1(-rate_N[index_S] * first.values[count])
