"""Agents scale byte images to [0, 1], unless `scale_images=False`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.ppo import PPO
from rein.agents.q_learning import QLearning
from rein.networks.mlp import orthogonal_linear
from rein.training.saved_agents import own_agents

SMALL, LARGE = (spaces.Box(0, 255, (side, side, 3), np.uint8) for side in (20, 40))
AGENTS = [kind for kind in own_agents().values() if kind is not QLearning]


def made(kind: Any, space: Any, **options: Any) -> Any:
    """Return an agent with discrete actions if the class supports them."""
    try:
        return kind(space, spaces.Discrete(2), seed=0, **options)
    except ValueError:
        return kind(space, spaces.Box(-1.0, 1.0, (1,)), seed=0, **options)


@pytest.mark.parametrize("kind", AGENTS, ids=lambda kind: kind.__name__)
def test_every_agent_scales_small_byte_images(kind: Any) -> None:
    seen = torch.full((2, 20, 20, 3), 255, dtype=torch.uint8)
    for options, largest in (({}, 1.0), ({"scale_images": False}, 255.0)):
        agent = made(kind, SMALL, **options)
        assert (agent.networks.preprocess(seen) == largest).all()
        assert agent.config["scale_images"] is bool(largest == 1.0)


class RecordingEncoder(torch.nn.Module):
    """Encoder that records the last observation."""

    features = 3

    def __init__(self, space: Any, generator: torch.Generator) -> None:
        super().__init__()
        self.layer = orthogonal_linear(3, 3, 1.0, generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return self.layer(x.reshape(len(x), -1)[:, :3].float())


@pytest.mark.parametrize("space", [SMALL, LARGE, spaces.Dict({"small": SMALL, "large": LARGE})], ids=str)
def test_custom_encoder_receives_unscaled_bytes(space: Any) -> None:
    agent = PPO(space, spaces.Discrete(2), seed=0, encoder=RecordingEncoder)
    seen: Any = (
        {part: torch.full((1, *one.shape), 255, dtype=torch.uint8) for part, one in space.items()}
        if isinstance(space, spaces.Dict)
        else torch.full((1, *space.shape), 255, dtype=torch.uint8)
    )
    agent.select_action(seen)
    assert (agent.networks.encoder.last == 255).all()


def test_unscaled_images_keep_their_values_in_the_cnn() -> None:
    seen = torch.randint(0, 11, (2, 40, 40, 3)).to(torch.uint8)
    scaled, codes = (PPO(LARGE, spaces.Discrete(2), seed=0, scale_images=x) for x in (True, False))
    encoder: Any = codes.networks.encoder
    encoder.load_state_dict(scaled.networks.encoder.state_dict())
    assert torch.equal(encoder(codes.networks.preprocess(seen)), encoder(seen.float()))
    assert not torch.equal(encoder(codes.networks.preprocess(seen)), encoder(scaled.networks.preprocess(seen)))


def test_saved_agent_keeps_the_option(tmp_path: Path) -> None:
    rein.save(PPO(SMALL, spaces.Discrete(2), seed=0, scale_images=False), tmp_path / "agent.h5")
    assert rein.load_agent(tmp_path / "agent.h5").config["scale_images"] is False
