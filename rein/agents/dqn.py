"""Deep Q-learning from replay.

Shapes: B rows of a batch, A actions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rein.agents.base.learner import Batch
from rein.agents.base.value_agent import ValueAgent
from rein.networks.encoder import Features, NetworkFactory, inputs_of
from rein.networks.q_networks import OnlineAndTarget, QNetwork
from rein.ops.losses import huber
from rein.ops.values import td_target
from rein.options import option
from rein.replay.replay import Sample


class DQN(ValueAgent):
    """Deep Q-network (Mnih et al. 2015), with double Q-learning by default (van Hasselt et al. 2016).

    Target::

        y = r + gamma * Q'(s', argmax_a Q(s', a))    with `double`
        y = r + gamma * max_a Q'(s', a)              otherwise
        y = r                                        at a terminal state

    The target network Q' moves toward Q by `tau` every `target_frequency` updates; `tau=1` copies Q. The options
    `n_step`, `prioritized` and `dueling` add most extensions of Rainbow (Hessel et al. 2018).

    Images are processed by a CNN, other observations are flattened. The action space must be Discrete. Action masks are
    supported: only valid actions are taken, and maxima are over the valid actions of the next observation.
    """

    dueling: bool = option(default=False)
    layer_norm: bool = option(default=False)
    network: NetworkFactory | None = option(default=None)

    def build_networks(self, generator: torch.Generator) -> OnlineAndTarget[QNetwork]:
        """Build the Q-network, its target network and the learner."""
        shape = self.options("hidden", "activation", "layer_norm", "dueling", "encoder", "network")
        shape |= self.options("normalize_observation", "scale_images")
        network = QNetwork(self.observation_space, self.action_space, generator, **shape)
        return self.online_and_target(network, "values", td_loss)

    def batch(self, sample: Sample, weight_B: Tensor | None = None) -> Batch:
        """Return a batch with targets and importance weights for a sample of the replay."""
        online = self.networks.online
        target_B = self._target(sample, online.preprocess(sample.next_observation))
        features = inputs_of(online.preprocess(sample.observation)).features
        return Batch(features, self.network_action(sample.action), target=target_B, weight=weight_B)

    @torch.no_grad()
    def _target(self, sample: Sample, next_features: Features) -> Tensor:
        target_BA = self.networks.target(next_features)
        if self.double:
            best_B1 = self.networks.online(next_features).argmax(1, keepdim=True)
            next_value_B = target_BA.gather(1, best_B1).squeeze(1)
        else:
            next_value_B = target_BA.amax(1)
        return td_target(sample.reward, sample.terminated, next_value_B, sample.discount)


def td_loss(
    networks: QNetwork, batch: Batch, delta: float | None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the mean Huber loss of TD errors, or half the mean squared error if `delta` is None.

    The metrics contain the absolute errors `td_error` (M,).

    Source: Mnih et al. 2015. They clip the error to [-1, 1], which is equivalent to delta = 1.
    """
    value_M = networks(batch.features).gather(1, batch.action.unsqueeze(1)).squeeze(1)
    error_M = value_M - batch.target
    loss_M = huber(error_M, delta)
    loss = (loss_M if batch.weight is None else loss_M * batch.weight).mean()
    metrics = {"td_error": error_M.detach().abs()}
    if report:
        metrics |= {"value_loss": loss.detach(), "action_value": value_M.detach().mean()}
    return loss, metrics
