"""Deep Q-learning from replay with a recurrent network.

Shapes: T learned steps, P burn-in steps before them, B sequences, N environments, F features of an observation,
C features of a carry, A actions.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rein.agents.base.learner import Batch
from rein.agents.base.value_agent import TargetNetworkAgent
from rein.networks.actor_critic import CoreFactory
from rein.networks.encoder import Inputs, inputs_of
from rein.networks.q_networks import OnlineAndTarget, RecurrentQNetwork
from rein.networks.recurrent import LSTM
from rein.ops.losses import huber
from rein.ops.statistics import masked_mean
from rein.ops.trees import map_tree
from rein.ops.values import mask_values, rescale, sequence_priority, sequence_targets, unscale
from rein.options import at_least_one, flag, not_below_zero, option
from rein.replay.sequences import Clips, PrioritizedSequenceReplay, SequenceReplay
from rein.spaces import mask_of
from rein.types import Transition, Tree


def sequence_td_loss(
    networks: RecurrentQNetwork, batch: Batch, delta: float | None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the mean Huber loss over valid steps. The metrics contain the priority of each sequence as `td_error`."""
    valid_TB: Any = batch.valid
    value_TBA = networks.sequence(batch.features, batch.carry)  # type: ignore[arg-type]  # set for sequences
    value_TB = value_TBA.gather(2, batch.action.unsqueeze(2)).squeeze(2)
    error_TB = value_TB - batch.target
    loss_TB = huber(error_TB, delta)
    loss = masked_mean(loss_TB if batch.weight is None else loss_TB * batch.weight, valid_TB)
    metrics = {"td_error": sequence_priority(error_TB.detach(), valid_TB)}
    if report:
        metrics |= {"value_loss": loss.detach(), "action_value": masked_mean(value_TB.detach(), valid_TB)}
    return loss, metrics


CORE = functools.partial(LSTM, features=64)


class RecurrentDQN(TargetNetworkAgent):
    """Recurrent deep Q-network, with double Q-learning by default (van Hasselt et al. 2016).

    Target, with the values of the next step::

        y = r + gamma * Q'(h', argmax_a Q(h, a)),  or r at a terminal state

    h and h' are the carries of Q and of the target network Q'. The agent learns from sequences of `sequence_length`
    steps within one episode. The carry recorded while acting is out of date. Therefore both networks first process up
    to `burn_in` steps before the sequence, starting from that carry and without gradients.

    The options `n_step`, `prioritized` and `value_rescaling` complete R2D2. With the latter, Q is on the scale of
    `rein.ops.values.rescale`, and targets are computed on the scale of rewards.

    Images are processed by a CNN, other observations are flattened. The action space must be Discrete. Action masks are
    supported: only valid actions are taken, and maxima are over the valid actions of the next observation.

    Sources: Hausknecht & Stone 2015 (DRQN, random updates); Kapturowski et al. 2019 (R2D2), sections 2 and 3.
    """

    hidden: Sequence[int] = option(default=(64,))
    batch_size: int = option(default=32)
    core: CoreFactory = option(default=CORE)
    sequence_length: int = option(
        default=20, check=at_least_one, fixed=True, help="learned steps per sequence; batch_size counts sequences"
    )
    burn_in: int = option(
        default=10, check=not_below_zero, fixed=True, help="steps before a sequence that only update the carry"
    )
    dueling: bool = option(default=False)
    value_rescaling: bool = option(
        default=False, check=flag, fixed=True, help="learn the values of rein.ops.values.rescale, for large returns"
    )

    def build(self, generator: torch.Generator) -> None:
        """Build the replay of sequences, the networks and their learner."""
        if self.hindsight is not None:
            raise ValueError("RecurrentDQN does not support hindsight; leave its default")
        super().build(generator)
        self._next_carry: Tensor | None = None  # (N, C) after the current step
        self._selected: Tensor | None = None  # action of the current step

    def build_replay(self) -> SequenceReplay:
        """Build the replay of sequences."""
        settings: dict[str, Any] = {"before": self.burn_in, "storage": self.storage, "device": self.device}
        if self.prioritized:
            return PrioritizedSequenceReplay(self.capacity, self.sequence_length, alpha=self.priority_alpha, **settings)
        return SequenceReplay(self.capacity, self.sequence_length, **settings)

    def build_networks(self, generator: torch.Generator) -> OnlineAndTarget[RecurrentQNetwork]:
        """Build the Q-network, its target network and the learner."""
        shape = self.options(
            "core", "hidden", "activation", "dueling", "encoder", "normalize_observation", "scale_images"
        )
        network = RecurrentQNetwork(self.observation_space, self.action_space, generator, **shape)
        return self.online_and_target(network, "values", sequence_td_loss)

    def act(self, observation: Tree, explore: bool | float) -> Tensor:
        """Return greedy or exploring actions (N,) and advance the carry."""
        value_NA = self._values(observation)
        self.carry = self._next_carry
        self._next_carry = None
        return self.choose(value_NA, explore, mask_of(observation))

    def explore(self, observation: Tree) -> Tensor:
        """Return exploring actions (N,) for training. The carry advances in `record_observation`."""
        self._selected = self.choose(self._values(observation), True, mask_of(observation))
        return self._selected

    @torch.no_grad()
    def _values(self, observation: Tree) -> Tensor:
        """Return the values (N, A) of all actions."""
        online = self.networks.online
        x = inputs_of(online.preprocess(observation)).features
        if self.carry is None:
            self.carry = torch.zeros(x.shape[0], online.carry_size, dtype=torch.float32, device=self.device)
        value_NA, self._next_carry = online.step(x, self.carry)
        return value_NA

    def record_observation(self, transition: Transition) -> None:
        """Add a transition and the carry before it to the replay."""
        if self._next_carry is None or self._selected is not transition.action:
            self._values(transition.observation)
        self._selected = None
        super().record_observation(transition)

    def recorded_extras(self, transition: Transition) -> dict[str, Tensor]:
        """Return the carry (N, C) before the transition."""
        return {"carry": self.carry}  # type: ignore[dict-item]

    def observe_reset(self, observation: Tree, mask: Tensor) -> None:
        """End the sequences and zero the carry of the environments in `mask` (N,), which were reset outside a step."""
        self._next_carry = None
        super().observe_reset(observation, mask)

    def begin_episodes(self, mask_N: Tensor) -> None:
        """Advance the carry and zero it in the environments of `mask_N`."""
        carry = self.carry if self._next_carry is None else self._next_carry
        if carry is not None:
            self.carry = carry.masked_fill(mask_N.unsqueeze(1), 0.0)
            self._next_carry = None

    def sample(self) -> tuple[Clips, Tensor | None]:
        """Sample sequences from the replay. Returns them with importance weights (B,) if they are prioritized."""
        clips = self.replay.clips(self.batch_size, self.generator, begin=("carry",))
        return clips, self.importance(clips.probability)

    @torch.no_grad()
    def batch(self, sample: Clips, weight_B: Tensor | None = None) -> Batch:
        """Return the steps after the burn-in, with targets."""
        burn_in = self.replay.before
        features, mask, _ = self._inputs(sample)
        burn_in_features, features = features.tensor_split([burn_in])
        online_carry, target_carry = (
            networks.warm_up(burn_in_features, sample.begin["carry"], sample.valid[:burn_in])
            for networks in (self.networks.online, self.networks.target)
        )
        next_mask_TBA = None if mask is None else mask[burn_in + 1 :]
        next_value_TB = self._next_values(features, next_mask_TBA, online_carry, target_carry)
        reward, terminated, valid = (x[burn_in:] for x in (sample.reward, sample.terminated, sample.valid))
        if self.value_rescaling:
            next_value_TB = unscale(next_value_TB)
        target_TB = sequence_targets(reward, terminated, valid, next_value_TB, self.gamma, self.n_step)
        return Batch(
            features=features[:-1],
            carry=online_carry,
            action=self.network_action(sample.action[burn_in:]),
            target=rescale(target_TB) if self.value_rescaling else target_TB,
            weight=None if weight_B is None else weight_B.expand_as(reward),
            valid=valid,
        )

    def _inputs(self, sample: Clips) -> Inputs:
        """Return features (P + T + 1, B, F) and masks of all observations, including the one after the last step.

        Features after a terminal state are 0. The next observation of a terminal state may contain NaN, and 0 * NaN
        would reach the gradients even though the loss masks it.
        """
        burn_in, (steps, rows) = self.replay.before, sample.valid.shape
        observation = map_tree(
            lambda before, after: torch.cat((before[: burn_in + 1], after[burn_in:])).flatten(0, 1),
            sample.observation,
            sample.next_observation,
        )
        inputs: Inputs = map_tree(
            lambda x: x.unflatten(0, (steps + 1, rows)), inputs_of(self.networks.preprocess(observation))
        )
        features = inputs.features
        ended = sample.terminated[burn_in:].reshape(-1, rows, *(1 for _ in features.shape[2:]))
        features[burn_in + 1 :].masked_fill_(ended, 0)  # in place, since torch.cat above made a copy
        return inputs

    def _next_values(
        self, features: Tensor, next_mask_TBA: Tensor | None, online_carry: Tensor, target_carry: Tensor
    ) -> Tensor:
        """Return the values (T, B) of the next observations."""
        value_TBA = self.networks.target.sequence(features, target_carry)[1:]
        best_TBA = self.networks.online.sequence(features, online_carry)[1:] if self.double else value_TBA
        best_TB1 = mask_values(best_TBA, next_mask_TBA).argmax(2, keepdim=True)
        return value_TBA.gather(2, best_TB1).squeeze(2)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned. Raises ValueError if the options of the agent differ."""
        super().load_state_dict(state)
        self._next_carry = self._selected = None
