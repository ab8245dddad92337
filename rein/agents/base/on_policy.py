"""Policy-gradient loss, and the base class of PPO, A2C and IMPALA: an actor-critic that learns from full rollouts.

Shapes: T steps of a rollout, N environments, B = T * N rows, C features of a carry, M rows of a minibatch (for
sequences, T steps of N environments), K rows of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rein.accelerators import find
from rein.agents.base.agent import cast_action
from rein.agents.base.learner import Batch
from rein.agents.base.network_agent import NetworkAgent
from rein.agents.base.optimizers import Adam
from rein.networks.actor_critic import ActorCritic, CoreFactory
from rein.networks.encoder import Features, NetworkFactory, inputs_of
from rein.networks.heads import ContinuousHead
from rein.networks.normalizers import RewardNormalizer
from rein.ops.distributions import Distribution
from rein.ops.losses import clipped_surrogate, clipped_value_loss
from rein.ops.statistics import masked_mean
from rein.ops.trees import map_tree
from rein.options import finite, flag, not_negative, option
from rein.replay.rollout import Rollout
from rein.schedules import Schedule
from rein.types import Transition, Tree


class Trace(NamedTuple):
    """Columns of a rollout from which `gae` computes advantages, (T, N) each."""

    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    value: Tensor
    next_value: Tensor  # of the true next observation
    valid: Tensor | None


METRICS = ("policy_loss", "value_loss", "entropy", "ratio", "approx_kl", "clip_fraction")


class Coefficients(NamedTuple):
    """Weights and clip ranges of `policy_loss`."""

    clip: float | Tensor | None  # clip range of the ratio; None for the plain policy gradient
    value: float | Tensor
    entropy: float | Tensor
    value_clip: float | Tensor | None = None


def policy_loss(
    networks: ActorCritic, batch: Batch, coefficients: Coefficients, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the policy-gradient loss of PPO, A2C and IMPALA. The metrics are those of `report_metrics`.

    The loss is::

        loss = surrogate + c_value * value loss - c_entropy * entropy

    The surrogate is clipped. If the clip range is None, it is -A log pi, whose gradient is the policy gradient (Sutton
    et al. 2000).

    For networks of rein, `accelerate.closed_form.policy_gradient` computes the gradient of this loss without calling
    it. Set REIN_PLAIN=1 for a breakpoint here.

    Source: Schulman et al. 2017, equation 9.
    """
    distribution, value_M = networks.distribution_and_value(batch.features, batch.carry, batch.reset)
    log_prob_M = distribution.log_prob(batch.sample)
    surrogate_M, value_loss_M = _surrogate(log_prob_M, batch, coefficients), _value_loss(value_M, batch, coefficients)
    if isinstance(coefficients.value, Tensor):  # alpha= would copy it to the CPU
        loss_M = torch.addcmul(surrogate_M, value_loss_M, coefficients.value)
    else:
        loss_M = torch.add(surrogate_M, value_loss_M, alpha=coefficients.value)
    if isinstance(coefficients.entropy, Tensor) or coefficients.entropy != 0.0:
        loss_M = loss_M - coefficients.entropy * distribution.entropy()
    metrics = report_metrics(distribution, log_prob_M, value_M, batch, coefficients) if report else {}
    return masked_mean(loss_M, batch.valid), metrics


@torch.no_grad()
def report_metrics(
    distribution: Distribution, log_prob_M: Tensor, value_M: Tensor, batch: Batch, coefficients: Coefficients
) -> dict[str, Tensor]:
    """Return the terms of the loss and measures of the change of the policy, as means over valid rows.

    For continuous actions, `log_std` is the log standard deviation, also averaged over dimensions.
    """
    rows = report_rows(distribution, log_prob_M, value_M, batch, coefficients)
    stacked_KM = torch.stack([row.float() for row in rows.values()])  # one mean instead of six
    return dict(zip(rows, _means(stacked_KM, batch.valid).unbind(), strict=True))


def report_rows(
    distribution: Distribution, log_prob_M: Tensor, value_M: Tensor, batch: Batch, coefficients: Coefficients
) -> dict[str, Tensor]:
    """Return the values of `report_metrics` for each row, (M,) each. All tensors may have further leading axes."""
    clip = math.inf if coefficients.clip is None else coefficients.clip
    moved = clipped_surrogate(log_prob_M, batch.log_prob, batch.advantage, clip)
    losses = _surrogate(log_prob_M, batch, coefficients), _value_loss(value_M, batch, coefficients)
    values = (*losses, distribution.entropy(), moved.ratio, moved.approx_kl, moved.clipped)
    rows: dict[str, Tensor] = dict(zip(METRICS, values, strict=True))
    if (log_std := getattr(distribution, "log_std", None)) is not None:  # (A,), or (M, A) if it depends on the state
        rows["log_std"] = log_std.mean(-1).expand_as(log_prob_M)
    return rows


def _surrogate(log_prob_M: Tensor, batch: Batch, coefficients: Coefficients) -> Tensor:
    if coefficients.clip is None:
        return -batch.advantage * log_prob_M
    return clipped_surrogate(log_prob_M, batch.log_prob, batch.advantage, coefficients.clip).loss


def _value_loss(value_M: Tensor, batch: Batch, coefficients: Coefficients) -> Tensor:
    if coefficients.value_clip is None:
        return (value_M - batch.target).square().mul(0.5)
    return clipped_value_loss(value_M, batch.value, batch.target, coefficients.value_clip)


def _means(x_KM: Tensor, valid_M: Tensor | None) -> Tensor:
    """Return `masked_mean` of each of K rows, (K,)."""
    if valid_M is None:
        return x_KM.flatten(1).mean(1)
    return torch.where(valid_M, x_KM, 0.0).flatten(1).sum(1) / valid_M.sum().clamp(min=1)


HEAD_OPTIONS = ("normalize_observation", "squash", "log_std", "state_dependent_std")
NETWORK_OPTIONS = ("hidden", "activation", "shared", "core", "encoder", "scale_images", *HEAD_OPTIONS)


def check_enough(agent: object, advantage: Tensor) -> None:
    """Raise ValueError if an update has a single row, since its standardized advantage is 0."""
    if advantage.numel() < 2:
        raise ValueError(
            f"{type(agent).__name__}(normalize_advantage=True): an update has one row only; use more environments, a "
            "longer rollout or fewer minibatches, or normalize_advantage=False"
        )


class RolloutAgent(NetworkAgent):
    """Base class of agents that learn from full rollouts."""

    rollout_steps: int = option(default=32)
    normalize_reward: bool = option(default=False)

    def build_rollout(self) -> None:
        """Build the rollout and the normalizer of its rewards."""
        self.rollout = Rollout(self.rollout_steps)
        self._program = find("rollout_update", self)
        self.reward_normalizer = RewardNormalizer(self.gamma) if self.normalize_reward else None

    @staticmethod
    def default_optimizer(parameters: Iterable[Any]) -> Any:
        """Return Adam with epsilon 1e-5, the usual value for policy-gradient methods (Huang et al. 2022)."""
        return Adam(parameters, eps=1e-5)

    def observe_reset(self, observation: Tree, mask: Tensor) -> None:
        """End the episodes of the environments in `mask` (N,), which were reset outside a step."""
        if self.reward_normalizer is not None and not len(self.rollout):
            self.reward_normalizer.observe_reset(mask)
        self.rollout.observe_reset(mask)

    def optimize_model(self) -> dict[str, Tensor]:
        """Update with the rollout if it is full, and return metrics."""
        if not self.rollout.full:
            return {}
        self.compare_processes()
        self.set_learning_rates()
        metrics = dict((self._program or self.update)(self.rollout))
        rollout = self.rollout
        self.networks.preprocess.update(rollout.flat("observation"), rollout.flat("valid"))  # type: ignore[attr-defined]
        rollout.clear()
        return metrics

    def rewards(self) -> Tensor:
        """Return the rewards (T, N) of the rollout, normalized if `normalize_reward` is set."""
        return self.rollout.rewards(self.reward_normalizer, self.gamma)


class OnPolicyAgent(RolloutAgent):
    """Base class of on-policy actor-critics. Subclasses implement `update`, which is called with a full rollout.

    The methods `rewards()`, `next_values(values)` and `batch(advantages, targets, valid)` convert the rollout to a
    batch for `self.learners["networks"].step(batch, coefficients)`.
    """

    learning_rate: float | Schedule = option(default=3e-4)
    value_coefficient: float = option(
        default=0.5, check=not_negative, fixed=True, help="weight of the value loss, which is half the squared error"
    )
    entropy_coefficient: float | Schedule = option(
        default=0.0, check=not_negative, help="weight of the entropy bonus; a number or a schedule"
    )
    max_grad_norm: float | None = option(default=0.5)
    hidden: Sequence[int] = option(default=(64, 64))
    activation: str = option(default="tanh")
    shared: bool = option(default=False, check=flag, fixed=True, help="share the hidden layers of actor and critic")
    core: CoreFactory | None = option(default=None)
    network: NetworkFactory | None = option(
        default=None,
        fixed=True,
        help="factory (observation_space, action_space, generator) of a custom actor-critic; forward(observation) "
        "returns the outputs of the policy and the values",
    )
    squash: bool | str = option(
        default=False,
        fixed=True,
        help='squash continuous actions into their bounds instead of clipping them; "ball" squashes their norm',
    )
    log_std: float = option(
        default=0.0, check=finite, fixed=True, help="initial log standard deviation of continuous actions"
    )
    state_dependent_std: bool = option(
        default=False, check=flag, fixed=True, help="make the standard deviation an output of the network"
    )

    reports = (*METRICS, "grad_norm", "explained_variance")

    def build(self, generator: torch.Generator) -> None:
        """Build the actor-critic, its learner and the rollout."""
        kind: Any = ActorCritic
        names: Sequence[str] = NETWORK_OPTIONS
        if self.network is not None:
            from rein.networks.custom_networks import CustomActorCritic

            kind, names = CustomActorCritic, ("network", *HEAD_OPTIONS)
        self.networks = kind(self.observation_space, self.action_space, generator, **self.options(*names))
        if isinstance(self.networks.policy_head, ContinuousHead):
            self.reports = (*type(self).reports, "log_std")  # type: ignore[misc]
        self._learner = self.add_learner("networks", self.networks, policy_loss)
        self._graph = find("graph", self.networks.step, self.device) if self.compile else None  # type: ignore[arg-type]
        self.build_rollout()
        self.first_carry: Tensor | None = None  # (N, C) before the first step of the rollout
        self.carry_reset: Tensor | None = None  # (N,) whether the carry was zeroed before the current step
        self._next_carry: Tensor | None = None  # (N, C) after the current step
        self._selected: tuple[Any, Any] = None, None  # action and extras of the current step

    def act(self, observation: Tree, explore: bool | float) -> Tree:
        """Return the mode of the policy, or a sample if `explore` is set; (N, ...)."""
        x = self._preprocessed(observation)
        distribution, self.carry = self.networks.policy(x, self.carry)
        sample = distribution.sample(self.generator) if explore else distribution.mode()
        return self.networks.policy_head.to_action(distribution, sample)

    def _preprocessed(self, observation: Tree) -> Features:
        """Return a preprocessed observation. Creates the carry of recurrent networks if there is none."""
        x = self.networks.preprocess(observation)
        if self.networks.carry_size and self.carry is None:
            rows = inputs_of(x).features.shape[0]
            self.carry = torch.zeros(rows, self.networks.carry_size, dtype=torch.float32, device=self.device)
        return x

    def select_action(self, observation: Tree) -> tuple[Tree, dict[str, Tree]]:
        """Sample an action. Returns it with `value`, `log_prob` and, if it differs from the action, `sample`."""
        with torch.no_grad():
            distribution, value_N = self._evaluate(observation)
            action, extras = self._chosen(distribution, value_N, distribution.sample(self.generator))
            self._selected = action, dict(extras)
            return action, extras

    def choose(self, observation: Tree, noise: Tree) -> tuple[Tree, dict[str, Tree]]:
        """Compute `select_action` as a pure function of the noise of the samples. Only for networks without a core."""
        distribution, value_N, _ = self.networks.step(self.networks.preprocess(observation))
        return self._chosen(distribution, value_N, distribution.sample_from(noise))

    def _chosen(self, distribution: Distribution, value_N: Tensor, sample: Tree) -> tuple[Tree, dict[str, Tree]]:
        """Return the action and the extras of a sample."""
        action = self.networks.policy_head.to_action(distribution, sample)
        return action, _extras(distribution, value_N, sample, action)

    def _evaluate(self, observation: Tree) -> tuple[Distribution, Tensor]:
        """Return the distribution and the values. The carry advances in `record_observation`."""
        begins = self.carry is None
        x = self._preprocessed(observation)
        if begins and self.carry is not None:
            self.carry_reset = torch.ones(len(self.carry), dtype=torch.bool, device=self.device)
        distribution, value_N, self._next_carry = (self._graph or self.networks.step)(x, self.carry)
        return distribution, value_N

    def record_observation(self, transition: Transition) -> None:
        """Add a transition to the rollout.

        If another program selected the action, its value and log probability are computed here. A `log_prob` in the
        extras of the transition is kept.
        """
        action, extras = self._selected
        if action is None or action is not transition.action:
            transition = self.completed(transition, extras or {})
        self._selected = None, None
        if self._next_carry is None or self.carry_reset is None:
            self.rollout.append(transition)
        else:
            if not len(self.rollout):
                self.first_carry = self.carry
            self.rollout.append(transition, reset=self.carry_reset, next_carry=self._next_carry)
            self._reset_carry(transition.terminated | transition.truncated | ~transition.valid, self._next_carry)
        self.env_steps += len(transition.reward)

    def completed(self, transition: Transition, ours: Mapping[str, Tree]) -> Transition:
        """Return a transition with the extras of an action that this agent did not select.

        `ours` are the extras of the action that the agent selected and that was replaced, which do not apply.
        """
        transition = transition._replace(action=cast_action(transition.action, self.action_space))
        computed = self._evaluate_action(transition)
        theirs = {name: x for name, x in transition.extras.items() if not _is_ours(x, ours.get(name))}
        theirs = _typed(theirs, {"sample": transition.action, **computed})
        return transition._replace(extras={**computed, **theirs, "value": computed["value"]})

    def _evaluate_action(self, transition: Transition) -> dict[str, Tree]:
        """Return the extras of an action that this agent did not select."""
        with torch.no_grad():
            distribution, value_N = self._evaluate(transition.observation)
            sample = self.networks.policy_head.from_action(distribution, transition.action)
            _, extras = self._chosen(distribution, value_N, sample)
            if self.networks.preprocess.masks:
                _check_allowed(extras["log_prob"], transition.valid)
            return extras

    def _reset_carry(self, mask_N: Tensor, carry_NC: Tensor) -> None:
        """Set the carry, zeroed in the environments of the mask."""
        self.carry = carry_NC.masked_fill(mask_N.unsqueeze(1), 0.0)
        self.carry_reset = mask_N

    def observe_reset(self, observation: Tree, mask: Tensor) -> None:
        """End the episodes and zero the carry of the environments in `mask` (N,), which were reset outside a step."""
        super().observe_reset(observation, mask)
        if self.carry is not None and self.carry_reset is not None:
            self._reset_carry(mask | self.carry_reset, self.carry)

    def next_values(self, value_TN: Tensor) -> Tensor:
        """Return the values (T, N) of the true next observations, given the values of the observations."""
        networks = self.networks

        def value_of(observation: Tree, carry: Tensor | None = None) -> Tensor:
            return networks.value(networks.preprocess(observation), carry)

        return self.rollout.next_values(value_TN, value_of, *(("next_carry",) if networks.carry_size else ()))

    def trace(self, rollout: Rollout, reward_TN: Tensor) -> Trace:
        """Return the columns of a full rollout with these rewards."""
        ends, value_TN = (rollout["terminated"], rollout["truncated"]), rollout["value"]
        return Trace(reward_TN, *ends, value_TN, self.next_values(value_TN), rollout.valid())

    def batch(self, advantage_TN: Tensor, target_TN: Tensor, valid_TN: Tensor | None) -> Batch:
        """Return the rollout as rows, or as sequences if the networks are recurrent."""
        rollout, recurrent = self.rollout, self.networks.carry_size > 0
        take = rollout.__getitem__ if recurrent else rollout.flat
        shaped = (lambda x: x) if recurrent else torch.flatten
        features = self.networks.preprocess(rollout.flat("observation"))
        return Batch(
            features=map_tree(lambda x: x.unflatten(0, advantage_TN.shape), features) if recurrent else features,
            sample=take("sample" if "sample" in rollout else "action"),
            log_prob=take("log_prob"),
            value=take("value"),
            advantage=shaped(advantage_TN),
            target=shaped(target_TN),
            valid=None if valid_TN is None else shaped(valid_TN),
            reset=take("reset") if recurrent else None,
            carry=self.first_carry if recurrent else None,
        )

    def coefficients(self) -> Coefficients:
        """Return the current weights of the terms of the loss."""
        return Coefficients(None, self.value_coefficient, self.entropy_coefficient(**self.counts))  # type: ignore[operator]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned. Raises ValueError if the options of the agent differ."""
        super().load_state_dict(state)
        self._selected = (None, None)
        self._next_carry = None


def _extras(distribution: Distribution, value_N: Tensor, sample: Tree, action: Tree) -> dict[str, Tree]:
    extras = {"value": value_N, "log_prob": distribution.log_prob(sample)}
    return extras if sample is action else extras | {"sample": sample}


def _check_allowed(log_prob_N: Tensor, valid_N: Tensor) -> None:
    """Raise ValueError if a valid row has an action that its mask does not allow."""
    masked_N = (log_prob_N < torch.finfo(log_prob_N.dtype).min / 4) & valid_N
    if bool(masked_N.any()):
        raise ValueError(
            f"the action of environment {int(masked_N.nonzero()[0])} is not valid according to its action_mask: "
            "choose a valid action"
        )


def _is_ours(value: Tree, ours: Tree) -> bool:
    """Return whether a value equals an extra of this agent. Copies, other dtypes and other devices count as equal."""
    if value is ours or ours is None:
        return value is ours
    if isinstance(value, Mapping) and isinstance(ours, Mapping):
        return value.keys() == ours.keys() and all(_is_ours(value[name], ours[name]) for name in ours)
    if not isinstance(value, Tensor) or not isinstance(ours, Tensor):
        return False
    return value.shape == ours.shape and torch.equal(value.to(ours), ours)


def _typed(extras: Mapping[str, Tree], like: Mapping[str, Tree]) -> dict[str, Tree]:
    """Cast extras to the dtypes of the entries of `like` with the same name."""
    shared = {name: x for name, x in extras.items() if name in like and isinstance(x, Tensor | Mapping)}
    return {**extras, **{name: map_tree(_cast, x, like[name]) for name, x in shared.items()}}


def _cast(x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype)
