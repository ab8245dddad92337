"""Networks that learn beside a slower copy of them."""

from __future__ import annotations

import copy
from typing import Generic, TypeVar

from torch import nn

from rein.networks.encoder import Encoder
from rein.networks.q_network import QNetwork
from rein.networks.quantile_network import QuantileNetwork
from rein.networks.recurrent_q import RecurrentQNetwork

Network = TypeVar("Network", QNetwork, QuantileNetwork, RecurrentQNetwork)


class OnlineAndTarget(nn.Module, Generic[Network]):
    """A network that learns, `online`, and a slower copy of it, `target`, which has no gradient."""

    def __init__(self, online: Network) -> None:
        super().__init__()
        self.online: Network = online
        self.target: Network = copy.deepcopy(online).requires_grad_(False)

    @property
    def encoder(self) -> Encoder:
        """The one whose statistics count."""
        return self.online.encoder
