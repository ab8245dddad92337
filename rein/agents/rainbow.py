"""Rainbow: distributional deep Q-learning with noisy layers.

Shapes: B rows of a batch, A actions, Z atoms, E numbers of noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rein.agents.base.action_noise import Amount
from rein.agents.base.learner import Batch
from rein.agents.base.value_agent import ValueAgent
from rein.networks.encoder import inputs_of
from rein.networks.q_networks import CategoricalQNetwork, OnlineAndTarget
from rein.ops.return_distributions import categorical_divergence, categorical_target
from rein.options import at_least_two, finite, not_negative, option
from rein.replay.replay import Sample
from rein.schedules import Schedule
from rein.spaces import mask_of
from rein.types import Tree


def categorical_loss(
    networks: CategoricalQNetwork, batch: Batch, noise_E: Tensor | None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the mean KL divergence of predicted from target probabilities.

    The metrics contain the divergence of each row as `td_error` (B,).
    """
    log_prob_BZ = _of_action(networks.log_probs(batch.features, noise_E), batch.action)
    loss_B = categorical_divergence(log_prob_BZ, batch.target)
    loss = (loss_B if batch.weight is None else loss_B * batch.weight).mean()
    metrics = {"td_error": loss_B.detach()}
    if report:
        value_B = (log_prob_BZ.detach().exp() * networks.support).sum(1)
        metrics |= {"value_loss": loss.detach(), "action_value": value_B.mean()}
    return loss, metrics


def _of_action(value_BAZ: Tensor, action_B: Tensor) -> Tensor:
    return value_BAZ.gather(1, action_B.view(-1, 1, 1).expand(-1, 1, value_BAZ.shape[2])).squeeze(1)


class Rainbow(ValueAgent):
    """Rainbow (Hessel et al. 2018): DQN with double Q-learning, dueling, priorities, n steps, C51 and noisy layers.

    Target and loss, with probabilities p(s, a) of the atoms z::

        y = projection of r + gamma * z with p'(s', a*),  or of r at a terminal state
        a* = argmax_a sum_z z p_z(s', a)
        L = KL(y || p(s, a))

    Returns outside of `value_min` to `value_max` are clamped, so choose both for the task. Noise of a learned size in
    the weights explores instead of random actions. Each step and each network of an update draw it once for all rows.
    Greedy policies have no noise. Priorities are divergences. The option `huber` has no effect.

    The target network p' moves toward p by `tau` every `target_frequency` updates. Images are processed by a CNN
    without noise, other observations are flattened. The action space must be Discrete. Action masks are supported: only
    valid actions are taken, and maxima are over the valid actions of the next observation.
    """

    learning_rate: float | Schedule = option(default=5e-4)
    epsilon: float | Amount = option(default=0.0)
    n_step: int = option(default=3)
    prioritized: bool = option(default=True)
    priority_alpha: float = option(default=0.5)
    dueling: bool = option(default=True)
    atoms: int = option(default=51, check=at_least_two, fixed=True, help="number of returns with a probability")
    value_min: float = option(default=-10.0, check=finite, fixed=True, help="smallest return")
    value_max: float = option(default=10.0, check=finite, fixed=True, help="largest return")
    noise_std: float = option(
        default=0.5,
        check=not_negative,
        fixed=True,
        help="initial standard deviation of weights, times the square root of the number of inputs",
    )

    def build_networks(self, generator: torch.Generator) -> OnlineAndTarget[CategoricalQNetwork]:
        """Build the network of probabilities, its target network and the learner."""
        if not self.value_min < self.value_max:
            raise ValueError(f"Rainbow(value_min={self.value_min}): give less than value_max={self.value_max}")
        shape = self.options("hidden", "activation", "encoder", "normalize_observation", "scale_images")
        shape |= self.options("dueling", "noise_std", "atoms")
        shape["value_range"] = self.value_min, self.value_max
        network = CategoricalQNetwork(self.observation_space, self.action_space, generator, **shape)
        return self.online_and_target(network, "probabilities", categorical_loss)

    def act(self, observation: Tree, explore: bool | float) -> Tensor:
        """Return greedy actions (N,) without noise, or with noise if `explore` is True."""
        online = self.networks.online
        noise_E = self.coefficients() if explore is True else None
        return self.choose(online(online.preprocess(observation), noise_E), explore, mask_of(observation))

    def coefficients(self) -> Tensor:
        """Draw noise (E,) of a network."""
        size = self.networks.online.noise_size
        return torch.randn(size, generator=self.generator, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def batch(self, sample: Sample, weight_B: Tensor | None = None) -> Batch:
        """Return a batch with target probabilities and importance weights for a sample of the replay."""
        online, target = self.networks.online, self.networks.target
        next_x = online.preprocess(sample.next_observation)
        best_B = (online if self.double else target)(next_x, self.coefficients()).argmax(1)
        prob_BAZ = target.log_probs(inputs_of(next_x).features, self.coefficients()).exp()
        ended_B, discount = sample.terminated, sample.discount
        return Batch(
            features=inputs_of(online.preprocess(sample.observation)).features,
            action=self.network_action(sample.action),
            target=categorical_target(_of_action(prob_BAZ, best_B), online.support, sample.reward, ended_B, discount),
            weight=weight_B,
        )
