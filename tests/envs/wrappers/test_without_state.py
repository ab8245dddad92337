"""Tests of wrappers around environments without a state: training, checkpoints and resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import rein
from rein.agents.dqn import DQN
from rein.envs.gridworld import Gridworld
from rein.envs.wrappers.observations import FlattenObservation, FrameStack
from rein.envs.wrappers.rewards import ClipReward, ScaleReward, SignReward
from rein.envs.wrappers.time import FrameSkip, TimeLimit
from rein.handlers.checkpoint import checkpoint
from rein.protocols import Stateful

STATE = ("state_dict", "load_state_dict")


class Forgetful(Gridworld):
    """Gridworld without a state."""

    state_dict = load_state_dict = property()  # type: ignore[assignment]  # hides the methods


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda inner: inner,
    "scale_reward": lambda inner: ScaleReward(inner, 2.0),
    "clip_reward": ClipReward,
    "sign_reward": SignReward,
    "flatten_observation": FlattenObservation,
    "frame_skip": lambda inner: FrameSkip(inner, 2),
    "frame_stack": lambda inner: FrameStack(inner, 3),
    "time_limit": lambda inner: TimeLimit(inner, 7),
    "frame_stack in time_limit in scale_reward": lambda inner: ScaleReward(TimeLimit(FrameStack(inner, 3), 7), 2.0),
    "scale_reward in frame_stack": lambda inner: FrameStack(ScaleReward(inner, 2.0), 3),
}


def made(kind: type[Gridworld], wrapper: str) -> Any:
    return WRAPPERS[wrapper](kind(2, [(2, 4), (4, 4)], seed=5, observation="vector"))


def saved_in(folder: Path, wrapper: str) -> rein.Loop:
    environment = made(Forgetful, wrapper)
    spaces = environment.single_observation_space, environment.single_action_space
    agent = DQN(*spaces, learning_starts=8, batch_size=4, capacity=100, hidden=(8,), seed=0)
    loop = rein.training_loop(agent, environment, seed=0)
    checkpoint(loop, rein.Checkpoints(folder))
    return loop


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapper_has_a_state_only_if_the_inner_environment_has_one(wrapper: str) -> None:
    assert [hasattr(made(Forgetful, wrapper), name) for name in STATE] == [False, False]
    assert [hasattr(made(Gridworld, wrapper), name) for name in STATE] == [True, True]


def test_missing_state_error_names_the_innermost_environment() -> None:
    with pytest.raises(AttributeError, match="'Forgetful' object has no "):
        made(Forgetful, "frame_stack in time_limit in scale_reward").state_dict()


def test_custom_wrapper_can_extend_the_state() -> None:
    class Counted(ScaleReward):
        count = 0

        def state_dict(self) -> dict[str, Any]:
            return {"scaled": super().state_dict(), "count": self.count}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            super().load_state_dict(state["scaled"])
            self.count = state["count"]

    counted, loaded = (Counted(made(Gridworld, "frame_stack"), 2.0) for _ in range(2))
    counted.reset()
    counted.count = 4
    part: Stateful = FrameStack(counted, 2)  # for type checkers
    FrameStack(loaded, 2).load_state_dict(part.state_dict())
    assert loaded.count == 4


def test_custom_wrapper_can_call_state_dict_of_its_base_class() -> None:
    class Doubled(FrameStack):
        def state_dict(self) -> dict[str, Any]:
            return {"twice": FrameStack.state_dict(self)}

    doubled = Doubled(made(Gridworld, "scale_reward"), 2)
    doubled.reset()
    assert set(doubled.state_dict()["twice"]) == {"inner", "stack"}


def test_record_video_has_a_state_only_if_the_inner_environment_has_one(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    from rein.envs.wrappers.record_video import RecordVideo

    kinds = {kind: RecordVideo(made(kind, "frame_stack"), tmp_path) for kind in (Forgetful, Gridworld)}
    assert [hasattr(kinds[Forgetful], name) for name in STATE] == [False, False]
    assert [hasattr(kinds[Gridworld], name) for name in STATE] == [True, True]


@pytest.mark.default_cases("none", "frame_stack", "frame_stack in time_limit in scale_reward")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_run_without_environment_state_resumes_with_new_episodes(
    wrapper: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert saved_in(tmp_path, wrapper).run(epochs=2, iterations=10).status == "completed"
    loop = saved_in(tmp_path, wrapper)
    rein.resume(loop, tmp_path)
    seen: list[torch.Tensor] = []
    loop.action_selected.attach(lambda state: seen.append(state.step_state.observation))
    final = loop.run(epochs=4, iterations=10)
    assert (final.status, final.total_iterations) == ("completed", 40)
    assert "were not saved; new episodes begin" in caplog.text
    if "frame_stack" in wrapper:  # the stack does not contain earlier observations
        assert torch.equal(seen[0], seen[0][:, :1].expand_as(seen[0]))
