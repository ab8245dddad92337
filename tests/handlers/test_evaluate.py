"""Shapes: N environments, E episodes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.cartpole import CartPole
from rein.episodes import evaluate as play
from rein.handlers.checkpoint import checkpoint
from rein.handlers.early_stop import early_stop
from rein.handlers.evaluate_every import evaluate_every
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.loop.state import State
from rein.ops.random import episode_seeds, integers
from rein.store.checkpoint_file import read_checkpoint
from rein.store.checkpoint_folder import Checkpoints
from rein.types import TimeStep


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
    evaluate_every(loop, Always(2), Countdown(), **{"episodes": 5, **options})
    return loop


def metrics_of(name: str) -> set[str]:
    return {f"{name}_{what}" for what in ("return", "length", "return_std", "return_min", "return_max")}


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
    assert seen == [metrics_of("evaluation")]


def test_name_event_filters_and_step_limit_are_the_users() -> None:
    loop = make(name="short", every=2, max_episode_steps=1)
    evaluate_every(loop, Always(1), Countdown(), episodes=2, name="middle", event="iteration_completed", once=4)
    loop.run()
    assert [set(metrics) for metrics in found(loop)] == [
        set(),
        metrics_of("short") | metrics_of("middle"),
        *[set(), metrics_of("short")] * 2,
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
            evaluate_every(loop, Always(2), Countdown(), episodes=5)
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
    evaluate_every(loop, Always(0), Broken(), episodes=1)
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
    evaluate_every(loop, Always(1), Broken(), episodes=2, on_failure="drop")
    assert loop.run().status == "completed"
    failed = [not metrics for metrics in found(loop)]
    assert any(failed) and not all(failed)
    assert caplog.text.count("evaluation failed in epoch") == sum(failed)
    assert "out of order" in caplog.text


def test_the_spread_of_the_returns_is_reported_with_their_mean() -> None:
    loop = make(epochs=1, episodes=7)
    state = loop.run()
    latest = state.memory["evaluations"]
    returns = 2.0 * play(Always(2), Countdown(), 7).episode_length
    assert (
        state.metrics["evaluation_return_std"]
        == latest["return_std"]
        == pytest.approx(float(returns.std(correction=0)))
    )
    assert state.metrics["evaluation_return_min"] == latest["return_min"] == returns.min()
    assert state.metrics["evaluation_return_max"] == latest["return_max"] == returns.max()


def evaluated_at(loop: Loop) -> list[int]:
    """The iterations after which the loop is evaluated, from now on."""
    seen: list[int] = []
    loop.evaluated(lambda state: seen.append(state.total_iterations))
    return seen


@pytest.mark.parametrize(("epochs", "expected"), [(5, [15]), (7, [15, 21])])
def test_a_run_is_evaluated_where_it_ends_unless_it_just_was(epochs: int, expected: list[int]) -> None:
    loop = make(epochs=epochs, every=5, at_end=True)
    seen = evaluated_at(loop)
    state = loop.run()
    assert seen == expected
    assert set(state.metrics) == metrics_of("evaluation")
    loop.run()  # nothing is left to run
    assert seen == expected


@pytest.mark.parametrize(("ask", "expected"), [(Loop.stop, 1), (Loop.interrupt, 0)])
@pytest.mark.parametrize(("event", "once", "iterations"), [("iteration_completed", 8, 8), ("epoch_ended", 2, 6)])
def test_a_run_that_is_halted_is_evaluated_where_it_ends_and_one_that_is_interrupted_is_not(
    event: str, once: int, iterations: int, ask: Any, expected: int
) -> None:
    loop = make(every=5, at_end=True)
    seen = evaluated_at(loop)
    loop.event(event).attach(lambda state: ask(loop, "enough"), once=once)
    assert loop.run().status == "halted"
    assert seen == [iterations] * expected


def test_a_checkpoint_of_the_end_knows_what_the_evaluation_there_found(tmp_path: Path) -> None:
    loop = make(epochs=3, every=0, at_end=True)
    checkpoint(loop, Checkpoints(tmp_path), keep_best=("evaluation_return", "max"))
    state = loop.run()
    (best,) = (tmp_path / "best").glob("*.h5")
    assert read_checkpoint(best).about["metrics"]["evaluation_return"] == state.metrics["evaluation_return"]


def test_the_episodes_may_be_the_same_each_time_and_are_in_a_resumed_run() -> None:
    def make_same() -> Loop:
        loop = Loop(lambda state: None, epochs=4, iterations=3)
        policy = Always(1)
        policy.select_action = lambda observation: ((observation[:, 2] > 0).long(), {})  # type: ignore  # a stub
        evaluate_every(loop, policy, CartPole(num_envs=2, seed=0), episodes=5, same_episodes=True)
        return loop

    whole, first, second = make_same(), make_same(), make_same()
    whole.run()
    first.run(epochs=2)
    second.load_state_dict(first.state_dict())
    second.run()
    assert found(whole) == found(second) == [found(whole)[0]] * 4


def test_episodes_that_cannot_be_begun_again_cannot_be_the_same() -> None:
    with pytest.raises(ValueError, match=r"same_episodes=True\): Countdown cannot begin an episode again"):
        make(same_episodes=True)


class Asking(Countdown):
    """Asks in the step of one's choice, as a signal or another thread may at any time."""

    left, ask = 0, staticmethod(lambda: None)

    def apply_action(self, action: Tensor) -> TimeStep:
        self.left -= 1
        if self.left == 0:
            self.ask()
        return super().apply_action(action)


def before(loop: Loop, event: str) -> None:
    """Attach a handler whose calls are counted: a firing that was postponed does not call it again."""

    @loop.event(event)(every=1)
    def count(state: State) -> None:
        state.memory["counted"] = state.memory.get("counted", 0) + 1


@pytest.mark.parametrize("step", [1, 3, 20, 40])
@pytest.mark.parametrize(
    "event", ["epoch_started", "iteration_completed", "epoch_completed", "epoch_ended", "epoch_halted"]
)
def test_an_interrupt_in_the_middle_of_an_evaluation_changes_nothing_of_a_run_that_goes_on(
    event: str, step: int
) -> None:
    def make_asking() -> tuple[Loop, Asking, list[Any]]:
        loop, environment, seen = Loop(lambda state: None, epochs=12, iterations=3), Asking(), []
        if event == "epoch_halted":
            loop.iteration_completed(every=3)(State.halt_epoch)
        before(loop, event)
        evaluate_every(loop, Always(2), environment, episodes=5, event=event, every=2)
        early_stop(loop, "evaluation_return", mode="max", patience=1, event=event, every=2)
        solved(loop, "evaluation_return", 10.0, stop=False, event=event, every=2)
        loop.evaluated(lambda state: seen.append((state.total_iterations, dict(state.memory["evaluations"]))))
        return loop, environment, seen

    whole, _, expected = make_asking()
    whole.run()
    assert whole.state.reason is not None and "solved" in whole.state.memory, "or there is nothing to be seen"
    loop, environment, seen = make_asking()
    environment.left, environment.ask = step, lambda: loop.interrupt("enough")
    state = loop.run()
    assert (state.status, state.reason) == ("halted", "enough")
    assert environment.left == 0, "no step is played after the interrupt"
    assert len(seen) < len(expected)
    other, _, rest = make_asking()
    other.load_state_dict(loop.state_dict())
    other.run()
    assert seen + rest == expected
    assert (other.state.epoch, other.state.reason) == (whole.state.epoch, whole.state.reason)
    memory, expected_memory = dict(other.state.memory), dict(whole.state.memory)
    for said in (memory, expected_memory):
        said["solved"] = {**said["solved"], "seconds": 0.0}
    assert memory == expected_memory
    assert found(other) == found(whole)


@pytest.mark.parametrize("event", ["epoch_ended", "iteration_completed", "sampled"])
def test_stop_ends_an_evaluation_at_its_next_step_and_discards_it(event: str) -> None:
    loop = Loop(lambda state: loop.emit("sampled"), epochs=4, iterations=3)
    loop.define("sampled")
    environment, other = Asking(), Asking()
    evaluate_every(loop, Always(2), environment, episodes=5, event=event, at_end=True)
    evaluate_every(loop, Always(2), other, episodes=5, event=event, name="other", at_end=True)
    early_stop(loop, "evaluation_return", mode="max", patience=0, event=event)
    before = environment.state_dict()
    environment.left, environment.ask = 3, lambda: loop.stop("enough")
    state = loop.run()
    assert (state.status, state.reason) == ("halted", "enough")
    assert (environment.left, other.left) == (0, 0), "no step is played after the stop, here or in another evaluation"
    assert math.isnan(state.metrics["evaluation_return"]) and math.isnan(state.metrics["other_return"])
    assert environment.state_dict() == before
    assert "evaluations" not in state.memory
    assert loop.run().reason != "enough", "and the next run goes on: patience has not run out"


def test_stop_ends_an_evaluation_that_follows_an_earlier_halt() -> None:
    loop, environment = Loop(lambda state: None, epochs=4, iterations=3), Asking()
    evaluate_every(loop, Always(2), environment, episodes=5)
    loop.iteration_completed(once=3)(lambda state: loop.stop("first"))
    environment.left, environment.ask = 3, lambda: loop.stop("second")
    state = loop.run()
    assert (environment.left, state.reason) == (0, "first")
    assert math.isnan(state.metrics["evaluation_return"])


def test_a_halt_by_a_handler_in_the_final_event_keeps_later_evaluations() -> None:
    loop = Loop(lambda state: None, epochs=2, iterations=3)
    for name in ("evaluation", "hard"):
        evaluate_every(loop, Always(2), Countdown(), episodes=5, every=0, at_end=True, name=name)
    loop.evaluated(once=1)(lambda state: state.halt_loop("solved"))
    with pytest.warns(RuntimeWarning, match="ignored"):
        state = loop.run()
    assert not math.isnan(state.metrics["hard_return"])


def test_observers_are_told_once_of_an_epoch_end_that_an_interrupt_postponed() -> None:
    loop, environment, seen = Loop(lambda state: None, epochs=2, iterations=3), Asking(), []
    evaluate_every(loop, Always(2), environment, episodes=5)
    loop.epoch_ended.observe(lambda loop, state: seen.append(state.epoch))
    environment.left, environment.ask = 3, lambda: loop.interrupt("enough")
    loop.run()
    assert seen == []
    loop.run()
    assert seen == [1, 2]


@pytest.mark.parametrize("ask", [Loop.stop, Loop.interrupt])
def test_an_evaluation_at_the_end_of_a_run_ends_early_and_is_done_by_the_next_run(ask: Any) -> None:
    def make_at_end() -> tuple[Loop, Asking]:
        loop, environment = Loop(lambda state: None, epochs=2, iterations=3), Asking()
        evaluate_every(loop, Always(2), environment, episodes=5, every=0, at_end=True)
        return loop, environment

    whole, _ = make_at_end()
    whole.run()
    loop, environment = make_at_end()
    environment.left, environment.ask = 3, lambda: ask(loop, "enough")
    loop.run()
    assert environment.left == 0 and "evaluations" not in loop.state.memory
    other, _ = make_at_end()
    other.load_state_dict(loop.state_dict())
    other.run()
    assert other.state.memory["evaluations"] == whole.state.memory["evaluations"]


@pytest.mark.parametrize("event", ["iteration_started", "sampled"])
def test_an_interrupt_waits_for_an_evaluation_in_the_middle_of_an_iteration(event: str) -> None:
    loop = Loop(lambda state: loop.emit("sampled"), epochs=4, iterations=3)
    loop.define("sampled")
    environment = Asking()
    evaluate_every(loop, Always(2), environment, episodes=5, event=event)
    environment.left, environment.ask = 3, lambda: loop.interrupt("enough")
    state = loop.run()
    assert (state.reason, state.total_iterations, state.memory["evaluations"]["number"]) == ("enough", 1, 1)


def test_an_interrupted_evaluation_goes_on_in_the_next_run_of_the_same_loop() -> None:
    whole, loop, environment = make(), Loop(lambda state: None, epochs=6, iterations=3), Asking()
    whole.run()
    evaluate_every(loop, Always(2), environment, episodes=5)
    environment.left, environment.ask = 20, lambda: loop.interrupt("enough")
    assert loop.run().status == "halted"
    assert loop.state.epoch_open
    assert loop.run().status == "completed"
    assert found(loop) == found(whole)


def test_an_interrupted_evaluation_that_is_gone_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    loop, environment = Loop(lambda state: None, epochs=2, iterations=3), Asking()
    evaluate_every(loop, Always(2), environment, episodes=5)
    environment.left, environment.ask = 3, lambda: loop.interrupt("enough")
    loop.run()
    other = Loop(lambda state: None, epochs=2, iterations=3)
    other.own("evaluation_environment", Countdown())
    other.load_state_dict(loop.state_dict())
    assert other.run().status == "completed"
    assert "is no longer attached" in caplog.text


def test_the_same_episodes_are_others_when_there_are_to_be_more(caplog: pytest.LogCaptureFixture) -> None:
    def make_same(episodes: int) -> Loop:
        loop = Loop(lambda state: None, epochs=2, iterations=3)
        policy = Always(1)
        policy.select_action = lambda observation: ((observation[:, 2] > 0).long(), {})  # type: ignore  # a stub
        evaluate_every(loop, policy, CartPole(num_envs=2, seed=0), episodes=episodes, same_episodes=True)
        return loop

    loop, other = make_same(3), make_same(5)
    loop.run(epochs=1)
    other.load_state_dict(loop.state_dict())
    other.run()
    assert "evaluation had 3 episodes and has 5: it begins new ones" in caplog.text
    assert len(other.state.memory["evaluation/seeds"]) == 5


def test_an_epoch_that_a_handler_ends_the_run_with_is_evaluated() -> None:
    loop, environment = Loop(lambda state: None, epochs=3, iterations=3), Countdown()
    loop.epoch_ended(lambda state: state.halt_loop("enough"))
    evaluate_every(loop, Always(2), environment, episodes=5)
    loop.run()
    assert found(loop)[0]["evaluation_return"] > 0.0


def test_the_environment_of_the_training_is_refused() -> None:
    loop = Loop(lambda state: None)
    training = loop.own("environment", Countdown())
    with pytest.raises(ValueError, match="this is the loop's own 'environment'; build another"):
        evaluate_every(loop, Always(0), training, episodes=1)


def test_two_evaluations_need_two_names() -> None:
    loop = make()
    with pytest.raises(ValueError, match=r"'evaluation_environment'.*already"):
        evaluate_every(loop, Always(0), Countdown(), episodes=1)
    evaluate_every(loop, Always(0), Countdown(), episodes=1, name="hard")
    assert set(loop.parts) == {"evaluation_environment", "hard_environment"}


@pytest.mark.parametrize("options", [{"episodes": 0}, {"on_failure": "ignore"}, {"event": "epoch_end"}, {"every": -1}])
def test_nonsense_fails_where_it_is_written_and_leaves_nothing_behind(options: dict[str, Any]) -> None:
    loop = Loop(lambda state: None)
    with pytest.raises(ValueError, match=r"give 1 or more|give \"raise\"|no event|must be 1 or more"):
        evaluate_every(loop, Always(0), Countdown(), **{"episodes": 5, **options})
    assert not loop.parts
    assert not any(event.handlers for event in loop.events.values())
