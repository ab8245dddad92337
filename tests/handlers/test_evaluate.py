"""Shapes: N environments, E episodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rein.handlers.evaluate import evaluate
from rein.loop import Loop
from rein.ops.random import episode_seeds, integers
from rein.types import State, TimeStep


class Countdown:
    """Episodes of 1 to 9 steps, as their seed says; each step is worth the action."""

    single_observation_space = spaces.Discrete(10)
    single_action_space = spaces.Discrete(3)
    device = torch.device("cpu")
    replayable = True

    def __init__(self, num_envs: int = 2, seed: int = 0) -> None:
        self.num_envs = num_envs
        self.seed: int | None = seed
        self._index_N = torch.arange(num_envs)
        self._episode_N = torch.full((num_envs,), -1)
        self._left_N = torch.zeros(num_envs, dtype=torch.int64)

    @property
    def config(self) -> dict[str, Any]:
        return {"num_envs": self.num_envs, "seed": self.seed}

    @property
    def episode_seeds(self) -> Tensor:
        return episode_seeds(self.seed or 0, self._index_N, self._episode_N)

    def reset(self, seed: int | None = None) -> Tensor:
        self._begin(torch.ones(self.num_envs, dtype=torch.bool))
        return self._left_N.clone()

    def apply_action(self, action: Tensor) -> TimeStep:
        final_N = self._left_N - 1
        terminated_N = final_N == 0
        self._left_N = final_N.clone()
        self._begin(terminated_N)
        false_N = torch.zeros_like(terminated_N)
        return TimeStep(self._left_N.clone(), action.float(), terminated_N, false_N, final_N, ~false_N, {})

    def _begin(self, mask_N: Tensor) -> None:
        self._episode_N = self._episode_N + mask_N
        self._left_N = torch.where(mask_N, 1 + integers(self.episode_seeds, 0, 9), self._left_N)

    def reseed(self, seed: int) -> None:
        self.seed = seed

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"episode": self._episode_N.tolist(), "left": self._left_N.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._episode_N, self._left_N = torch.tensor(state["episode"]), torch.tensor(state["left"])


class Always:
    """A policy that knows one action."""

    def __init__(self, action: int) -> None:
        self.action = action

    def select_action(self, observation: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        return torch.full_like(observation, self.action), {}

    def reset(self, mask: Tensor | None = None) -> None: ...


def make(epochs: int = 6, **options: Any) -> Loop:
    loop = Loop(lambda state: None, epochs=epochs, iterations=3)
    evaluate(loop, Always(2), Countdown(), **{"episodes": 5, **options})
    return loop


def found(loop: Loop) -> list[dict[str, float]]:
    """The metrics of each epoch."""
    return [dict(record.metrics) for record in loop.state.history]


def test_means_over_whole_episodes_are_metrics_of_the_epoch() -> None:
    loop = make()
    loop.run()
    for metrics in found(loop):
        assert metrics["evaluation_return"] == 2 * metrics["evaluation_length"]  # each step is worth the action
        assert 1 <= metrics["evaluation_length"] <= 9
        assert (5 * metrics["evaluation_length"]) % 1 == pytest.approx(0)  # of five episodes
    assert len({metrics["evaluation_length"] for metrics in found(loop)}) > 1  # new episodes each time


def test_handlers_attached_after_it_see_the_metrics() -> None:
    loop, seen = make(epochs=1), []
    loop.epoch_ended(lambda state: seen.append(set(state.metrics)))
    loop.run()
    assert seen == [{"evaluation_return", "evaluation_length"}]


def test_name_event_filters_and_step_limit_are_the_users() -> None:
    loop = make(name="short", every=2, max_episode_steps=1)
    evaluate(loop, Always(1), Countdown(), episodes=2, name="middle", event="iteration_completed", once=4)
    loop.run()
    assert [set(metrics) for metrics in found(loop)] == [
        set(),
        {"short_return", "short_length", "middle_return", "middle_length"},
        *[set(), {"short_return", "short_length"}] * 2,
    ]
    assert [metrics["short_length"] for metrics in found(loop)[1::2]] == [1.0] * 3


def test_training_goes_on_as_if_nothing_had_been_evaluated() -> None:
    def trained(evaluated: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        training = Countdown(num_envs=4, seed=3)

        def step(state: State) -> Tensor:
            time_step = training.apply_action(torch.randint(3, (4,)))
            state.clocks.advance(env_steps=4)
            return state.step_state + time_step.reward + time_step.observation

        loop = Loop(step, epochs=4, iterations=5)
        loop.own("environment", training)
        training.reset()
        if evaluated:
            evaluate(loop, Always(2), Countdown(), episodes=5)
        final = loop.run(init=torch.zeros(4))
        clocks = {name: value for name, value in final.clocks.as_dict().items() if name != "seconds"}
        return final.step_state.tolist(), training.state_dict(), clocks, torch.get_rng_state().tolist()

    assert trained(True) == trained(False)


@pytest.mark.parametrize("saved_at", [1, 3, 5])
def test_a_resumed_run_evaluates_on_the_same_episodes(saved_at: int) -> None:
    whole, first, second = make(), make(), make()
    whole.run()
    first.run(epochs=saved_at)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.run()
    assert found(second) == found(whole)


def test_what_the_environment_raises_ends_the_run_and_says_where() -> None:
    class Broken(Countdown):
        def apply_action(self, action: Tensor) -> TimeStep:
            raise RuntimeError("out of order")

    loop = Loop(lambda state: None, iterations=1)
    evaluate(loop, Always(0), Broken(), episodes=1)
    with pytest.raises(RuntimeError, match="out of order") as error:
        loop.run()
    assert any("on epoch_ended, epoch 1" in note for note in error.value.__notes__)
    assert loop.state.status == "failed"


def test_what_it_raises_may_be_dropped_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Countdown):
        def apply_action(self, action: Tensor) -> TimeStep:
            if int(self._episode_N.max()) == 2:
                raise RuntimeError("out of order")
            return super().apply_action(action)

    loop = Loop(lambda state: None, epochs=4, iterations=1)
    evaluate(loop, Always(1), Broken(), episodes=2, on_failure="drop")
    assert loop.run().status == "completed"
    failed = [not metrics for metrics in found(loop)]
    assert any(failed) and not all(failed)
    assert caplog.text.count("evaluation failed in epoch") == sum(failed)
    assert "out of order" in caplog.text


def test_the_environment_of_the_training_is_refused() -> None:
    loop = Loop(lambda state: None)
    training = loop.own("environment", Countdown())
    with pytest.raises(ValueError, match="this is the loop's own 'environment'; build another"):
        evaluate(loop, Always(0), training, episodes=1)


def test_two_evaluations_need_two_names() -> None:
    loop = make()
    with pytest.raises(ValueError, match=r"'evaluation_environment'.*already"):
        evaluate(loop, Always(0), Countdown(), episodes=1)
    evaluate(loop, Always(0), Countdown(), episodes=1, name="hard")
    assert set(loop.parts) == {"evaluation_environment", "hard_environment"}


@pytest.mark.parametrize("options", [{"episodes": 0}, {"on_failure": "ignore"}, {"event": "epoch_end"}, {"every": -1}])
def test_nonsense_fails_where_it_is_written_and_leaves_nothing_behind(options: dict[str, Any]) -> None:
    loop = Loop(lambda state: None)
    with pytest.raises(ValueError, match=r"give 1 or more|give \"raise\"|no event|cannot be -1"):
        evaluate(loop, Always(0), Countdown(), **{"episodes": 5, **options})
    assert not loop.parts
    assert not any(event.handlers for event in loop.events.values())
