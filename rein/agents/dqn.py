"""Deep Q-learning from replay.

Shapes: B rows of a batch, A actions.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.exploration import Amount
from rein.agents.base.replay_agent import ReplayOptions
from rein.agents.base.value_agent import DEFAULTS, EPSILON, ValueAgent
from rein.agents.base.value_loss import Batch, has_closed_form, td_gradient, td_loss
from rein.networks.q_network import QNetwork
from rein.networks.target import OnlineAndTarget
from rein.ops.backend import without_gradient
from rein.ops.values import td_target
from rein.replay.replay import Sample


class DQN(ValueAgent[OnlineAndTarget[QNetwork]]):
    """Deep Q-network (Mnih et al. 2015), by default with double targets (van Hasselt et al. 2016).

        y = r + gamma * Q'(s', argmax_a Q(s', a)),  without `double` r + gamma * max_a Q'(s', a),  r alone at an end

    Q' are targets, which follow Q by `tau` every `target_frequency` updates: softly, or, with a tau of 1, as copies.
    With `n_step`, `prioritized` and `dueling` it is most of Rainbow (Hessel et al. 2018).

    Args:
        observation_space: of one environment; an image goes through convolutions, all else is flattened to a vector.
        action_space: Discrete.
        epsilon: probability of a random action; a number, a schedule or a `Plateau` of `rein.agents.base.exploration`.
        temperature: with it actions are drawn by softmax(Q / temperature), and not epsilon-greedily.
        double: choose the next action by the networks, and let the targets say what it is worth.
        dueling: learn the value of a state and what each action adds to it (Wang et al. 2016).
        layer_norm: normalize the hidden layers before their activation.
        huber: where the loss turns from quadratic to linear; None for the squared error.
        frame_stack: how many frames an observation stacks, in its first axis or else its last; the replay then keeps
            each frame once.
        **options: those of `rein.agents.base.replay_agent.ReplayOptions`; here learning_rate is 1e-3, batch_size 128,
            hidden (128, 128) and max_grad_norm 10 by default.

    Raises ValueError for spaces that do not fit and numbers out of their range, TypeError for unknown options.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        epsilon: float | Amount = EPSILON,
        temperature: float | Amount | None = None,
        double: bool = True,
        dueling: bool = False,
        layer_norm: bool = False,
        huber: float | None = 1.0,
        frame_stack: int | None = None,
        **options: Unpack[ReplayOptions],
    ) -> None:
        own = {
            "epsilon": epsilon,
            "temperature": temperature,
            "double": double,
            "dueling": dueling,
            "layer_norm": layer_norm,
            "huber": huber,
            "frame_stack": frame_stack,
        }
        super().__init__(observation_space, action_space, own, {**DEFAULTS, **options})

    def _make_networks(self, drawn: torch.Generator) -> OnlineAndTarget[QNetwork]:
        options = self._options
        shape = {name: options[name] for name in ("hidden", "activation", "layer_norm", "dueling")}
        shape |= {name: options[name] for name in ("stem", "normalize_observation", "scale_images")}
        networks = OnlineAndTarget(QNetwork(self.observation_space, self.action_space, drawn, **shape))
        gradient = td_gradient if has_closed_form(networks.online) else None
        self._learner = self.learner("values", networks.online, td_loss, gradient)
        self.follow(networks.target, networks.online)
        return networks

    def batch(self, sample: Sample, weight_B: Tensor | None = None) -> Batch:
        """What is learned from a sample."""
        online = self.networks.online
        target_B = self._target(sample, online.encoder(sample.next_observation))
        return Batch(online.encoder(sample.observation), self._taken(sample), target_B, target_B, None, weight_B)

    @without_gradient
    def _target(self, sample: Sample, next_features: Tensor) -> Tensor:
        target_BA = self.networks.target(next_features)
        if self._options["double"]:
            best_B1 = self.networks.online(next_features).argmax(1, keepdim=True)
            next_value_B = target_BA.gather(1, best_B1).squeeze(1)
        else:
            next_value_B = target_BA.amax(1)
        return td_target(sample.reward, sample.terminated, next_value_B, sample.discount)
