"""Tests of FrameStack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rein.envs.wrappers.observations import FrameStack
from rein.envs.wrappers.time import TimeLimit
from rein.ops.trees import leaves, map_tree
from rein.testing.stateful import first_difference


def actions(steps: int, num_envs: int) -> Tensor:
    return torch.rand(steps, num_envs, 2, generator=torch.Generator().manual_seed(1))


def row(tree: Any, index: int) -> Any:
    return map_tree(lambda x: x[index], tree)


def window(frames: list[Any], length: int) -> Any:
    """Return the last `length` observations of an episode, padded with the first one."""
    frames = [frames[0]] * length + frames
    return map_tree(lambda *last: torch.stack(last), *frames[-length:])


@pytest.mark.parametrize("observation", ["vector", "image", "tree"])
@pytest.mark.parametrize("length", [1, 2, 4, 9])
def test_stack_contains_the_last_observations_of_its_episode(clockwork: Any, observation: str, length: int) -> None:
    plain, stacked = clockwork(5, 0, observation), FrameStack(clockwork(5, 0, observation), length)
    first = plain.reset()
    episodes = [[row(first, i)] for i in range(5)]
    start = stacked.reset()
    assert first_difference([window(e, length) for e in episodes], [row(start, i) for i in range(5)]) is None
    for action in actions(40, 5):
        inner, outer = plain.apply_action(action), stacked.apply_action(action)
        for i, episode in enumerate(episodes):
            episode.append(row(inner.final_observation, i))
            assert first_difference(window(episode, length), row(outer.final_observation, i)) is None
            if inner.terminated[i] or inner.truncated[i]:
                episode[:] = [row(inner.observation, i)]
            assert first_difference(window(episode, length), row(outer.observation, i)) is None


def test_partial_reset_restarts_only_its_stacks(clockwork: Any) -> None:
    inside, outside = FrameStack(TimeLimit(clockwork(6), 4), 3), TimeLimit(FrameStack(clockwork(6), 3), 4)
    assert torch.equal(inside.reset(), outside.reset())
    for action in actions(40, 6):
        assert first_difference(inside.apply_action(action), outside.apply_action(action)) is None


@pytest.mark.parametrize("observation", ["vector", "tree"])
def test_rows_that_are_not_stepped_keep_their_stack(clockwork: Any, observation: str) -> None:
    environment = FrameStack(clockwork(6, 0, observation), 3)
    before = environment.reset()
    for k, action in enumerate(actions(20, 6)):
        mask = torch.arange(6).add(k).remainder(3) == 0
        time_step = environment.apply_action_where(action, mask)
        for i in (~mask).nonzero().flatten().tolist():
            assert first_difference(row(before, i), row(time_step.observation, i)) is None
            assert first_difference(row(before, i), row(time_step.final_observation, i)) is None
        for i in mask.nonzero().flatten().tolist():
            assert first_difference(row(before, i), row(time_step.final_observation, i)) is not None
        before = time_step.observation


class NextStepReset:
    """Wrapper that emulates Gymnasium's mode NEXT_STEP: an invalid row follows each end."""

    def __init__(self, inner: Any) -> None:
        self.inner, self._waits_N = inner, torch.zeros(inner.num_envs, dtype=torch.bool)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def apply_action(self, action: Tensor) -> Any:
        step = self.inner.apply_action_where(action, ~self._waits_N)
        self._waits_N = step.terminated | step.truncated
        observation = torch.where(self._waits_N[:, None], step.final_observation, step.observation)
        return step._replace(observation=observation)


def test_invalid_row_begins_a_new_stack(clockwork: Any) -> None:
    environment = FrameStack(NextStepReset(clockwork(6)), 3)  # type: ignore[arg-type]  # a partial stub
    environment.reset()
    resets = 0
    for action in actions(40, 6):
        step = environment.apply_action(action)
        stack = step.observation[~step.valid]
        resets += len(stack)
        assert (stack[:, :, 1] == 0).all()  # three times the first observation of the new episode
        assert torch.equal(stack, step.final_observation[~step.valid])
        on = step.valid & ~(step.terminated | step.truncated)
        assert torch.equal(step.observation[on], step.final_observation[on])
    assert resets > 10


def test_stack_of_a_dict_space_is_in_its_space(clockwork: Any) -> None:
    environment = FrameStack(clockwork(3, 0, "tree"), 2)
    observation = dict(leaves(environment.reset()))
    shapes = {path: tuple(tensor.shape) for path, tensor in observation.items()}
    assert shapes == {"image": (3, 2, 2, 3), "inner.0": (3, 2), "inner.1": (3, 2, 2), "vector": (3, 2, 3)}
    assert observation["image"].dtype is torch.uint8
    assert environment.single_observation_space["inner"][0].start.tolist() == [5, 5]  # type: ignore[index]  # a Dict


def test_length_below_one_raises(clockwork: Any) -> None:
    with pytest.raises(ValueError, match=r"FrameStack\(length=0\): give 1 or more"):
        FrameStack(clockwork(2), 0)
