"""Reserved entries of Dict observations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rein.networks.encoder import Inputs, Preprocessor
from rein.networks.heads import check_mask
from rein.spaces import visible, visible_space

CPU = torch.device("cpu")
VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
MASK = spaces.Box(0, 1, (4,), np.int8)
HIDDEN = spaces.Box(-1.0, 1.0, (2,), np.float32)


def test_single_remaining_entry_is_the_observation() -> None:
    space = spaces.Dict({"observation": VECTOR, "action_mask": MASK, "critic_observation": HIDDEN})
    assert visible_space(space) == VECTOR
    x = torch.zeros(5, 3)
    assert visible({"observation": x, "action_mask": torch.ones(5, 4), "critic_observation": torch.ones(5, 2)}) is x


def test_several_remaining_entries_stay_a_dict() -> None:
    assert visible_space(spaces.Dict({"a": VECTOR, "b": VECTOR, "action_mask": MASK})) == spaces.Dict(
        {"a": VECTOR, "b": VECTOR}
    )
    assert visible_space(spaces.Dict({"a": VECTOR})) == spaces.Dict({"a": VECTOR})


def test_observations_of_reserved_entries_only_are_refused() -> None:
    with pytest.raises(ValueError, match="only reserved entries \\(action_mask\\): add an entry"):
        visible_space(spaces.Dict({"action_mask": MASK}))


def test_preprocessor_separates_features_mask_and_critic_observation() -> None:
    space = spaces.Dict({"observation": VECTOR, "action_mask": MASK, "critic_observation": HIDDEN})
    observation = {
        "observation": torch.randn(5, 3),
        "action_mask": torch.tensor([[1, 0, 0, 1]], dtype=torch.int8).expand(5, 4),
        "critic_observation": torch.randn(5, 2),
    }
    inputs = Preprocessor(space, CPU, masks=True, critic=True)(observation)
    assert isinstance(inputs, Inputs)
    assert torch.equal(inputs.features, observation["observation"])
    assert inputs.action_mask.dtype == torch.bool
    assert inputs.action_mask[0].tolist() == [True, False, False, True]
    assert inputs.critic is not None
    assert torch.equal(inputs.critic, observation["critic_observation"])
    assert torch.equal(Preprocessor(space, CPU)(observation), observation["observation"])


@pytest.mark.parametrize("kind", [spaces.Dict, spaces.Tuple])
def test_single_remaining_entry_may_be_a_dict(kind: type) -> None:
    parts = spaces.Dict({"a": VECTOR, "b": HIDDEN}) if kind is spaces.Dict else spaces.Tuple((VECTOR, HIDDEN))
    first, second = "ab" if kind is spaces.Dict else "01"
    inner = {first: torch.randn(5, 3), second: torch.randn(5, 2)}
    whole = {"observation": inner, "critic_observation": torch.randn(5, 2)}
    space = spaces.Dict({"observation": parts, "critic_observation": HIDDEN})
    preprocess = Preprocessor(space, CPU, normalize=True)
    preprocess.update(whole)
    expected = preprocess.normalizer(torch.cat([inner[first], inner[second]], 1))  # type: ignore[misc]
    for observation in (whole, inner, {"observation": inner}):
        assert torch.equal(preprocess(observation), expected)


def test_critic_observations_are_normalized_like_observations() -> None:
    space = spaces.Dict({"observation": HIDDEN, "critic_observation": HIDDEN})
    x = torch.randn(64, 2) * 3.0 + 1.0
    preprocess = Preprocessor(space, CPU, normalize=True, critic=True)
    preprocess.update({"observation": x, "critic_observation": x})
    inputs = preprocess({"observation": x, "critic_observation": x})
    assert isinstance(inputs, Inputs)
    assert inputs.critic is not None
    assert torch.equal(inputs.features, inputs.critic)
    assert abs(float(inputs.critic.mean())) < 0.1


@pytest.mark.parametrize(
    ("mask", "actions"),
    [
        (MASK, spaces.Discrete(4)),
        (spaces.MultiBinary(5), spaces.MultiDiscrete([2, 3])),
        (spaces.MultiBinary(4), spaces.MultiBinary(2)),
        (spaces.Dict({"move": MASK}), spaces.Dict({"move": spaces.Discrete(4), "amount": VECTOR})),
        (spaces.Tuple((MASK,)), spaces.Tuple((spaces.Discrete(4), VECTOR))),
    ],
)
def test_fitting_masks_are_accepted(mask: spaces.Space, actions: spaces.Space) -> None:
    check_mask(mask, actions)


@pytest.mark.parametrize(
    ("mask", "actions"),
    [
        (MASK, spaces.Discrete(5)),
        (MASK, VECTOR),
        (MASK, spaces.Dict({"move": spaces.Discrete(4)})),
        (spaces.Dict({"jump": MASK}), spaces.Dict({"move": spaces.Discrete(4)})),
    ],
)
def test_other_masks_are_refused(mask: spaces.Space, actions: spaces.Space) -> None:
    with pytest.raises(ValueError, match="action_mask"):
        check_mask(mask, actions)
