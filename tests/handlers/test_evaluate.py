"""Evaluation during training.

Shapes: N environments, E episodes.
"""

from __future__ import annotations

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
from rein.handlers.evaluate_every import evaluate_every
from rein.handlers.monitor import early_stop
from rein.handlers.record_solved import record_solved
from rein.loop import Loop
from rein.loop.state import State
from rein.ops.random import episode_seeds, integers
from rein.store.checkpoint_file import read_checkpoint
from rein.store.checkpoint_folder import Checkpoints
from rein.types import TimeStep


class Countdown:
    """Environment with episodes of 1 to 9 steps, depending on the seed. The reward is the action."""

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
    """Policy with a constant action."""

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
    found = ("return", "length", *(f"return_{what}" for what in ("median", "iqm", "std", "min", "max")))
    return {f"{name}_{what}" for what in found}


def found(loop: Loop) -> list[dict[str, float]]:
    """Return the metrics of each epoch."""
    return [dict(record.metrics) for record in loop.state.history]


def test_metrics_are_means_over_whole_episodes() -> None:
    loop = make()
    loop.run()
    for metrics in found(loop):
        assert metrics["evaluation_return"] == 2 * metrics["evaluation_length"]  # each step is worth the action
        assert 1 <= metrics["evaluation_length"] <= 9
        assert (5 * metrics["evaluation_length"]) % 1 == pytest.approx(0)  # a mean over five episodes
    assert len({metrics["evaluation_length"] for metrics in found(loop)}) > 1  # new episodes each time


def test_name_event_filters_and_step_limit() -> None:
    loop = make(name="short", every=2, max_episode_steps=1)
    evaluate_every(loop, Always(1), Countdown(), episodes=2, name="middle", event="iteration_completed", once=4)
    loop.run()
    assert [set(metrics) for metrics in found(loop)] == [
        set(),
        metrics_of("short") | metrics_of("middle"),
        *[set(), metrics_of("short")] * 2,
    ]
    assert [metrics["short_length"] for metrics in found(loop)[1::2]] == [1.0] * 3


def test_evaluation_does_not_affect_training() -> None:
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


def test_environment_error_ends_the_run_and_names_the_handler() -> None:
    class Broken(Countdown):
        def apply_action(self, action: Tensor) -> TimeStep:
            raise RuntimeError("out of order")

    loop = Loop(lambda state: None, iterations=1)
    evaluate_every(loop, Always(0), Broken(), episodes=1)
    with pytest.raises(RuntimeError, match="out of order") as error:
        loop.run()
    assert any("on epoch_ended, epoch 1" in note for note in error.value.__notes__)
    assert loop.state.status == "failed"


def test_on_failure_drop_logs_the_error_and_continues(caplog: pytest.LogCaptureFixture) -> None:
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


def test_standard_deviation_and_extremes_of_returns_are_reported() -> None:
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


def test_events_fire_for_each_evaluation_and_each_of_its_episodes() -> None:
    loop, seen = make(epochs=2, episodes=5), []
    events = ("evaluation_started", "evaluation_episode_completed", "evaluation_completed")
    for name in events:
        loop.event(name).attach(lambda state, name=name: seen.append((name, state.evaluation)))
    state = loop.run()
    assert [name for name, _ in seen] == 2 * [events[0], *[events[1]] * 5, events[2]]
    assert [len(found.result.seed) for _, found in seen] == 2 * [0, 1, 2, 3, 4, 5, 5]
    assert [found.epoch for _, found in seen] == [1] * 7 + [2] * 7
    assert {(found.name, found.clocks["iterations"]) for _, found in seen[7:]} == {("evaluation", 6)}
    *_, (_, last), (_, whole) = seen
    assert last.result.episode_return.tolist() == whole.result.episode_return.tolist()
    assert whole.result.median_return == state.metrics["evaluation_return_median"]
    assert whole.result.iqm_return == state.metrics["evaluation_return_iqm"]
    assert state.evaluation is None


def test_handler_of_an_episode_can_end_the_evaluation() -> None:
    loop = make(epochs=3, episodes=6)
    count, whole = [], []
    loop.evaluation_episode_completed(lambda state: count.append(len(state.evaluation.result.seed)))
    loop.evaluation_episode_completed(once=2)(lambda state: loop.stop("enough"))
    loop.evaluation_completed(lambda state: whole.append(state.epoch))
    state = loop.run()
    assert (count, whole, state.reason) == ([1, 2], [], "enough")
    assert math.isnan(state.metrics["evaluation_return"])


@pytest.mark.parametrize("event", ["evaluation_step_completed", "evaluation_episode_completed"])
def test_error_of_an_event_handler_ends_the_run_with_on_failure_drop(event: str) -> None:
    loop = make(on_failure="drop")

    @loop.event(event)
    def broken(state: State) -> None:
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        loop.run()


def test_steps_of_an_evaluation_fire_with_their_data() -> None:
    loop, counted, rewards = make(epochs=1, episodes=5), 0, 0.0

    @loop.evaluation_step_completed
    def collect(state: State) -> None:
        nonlocal counted, rewards
        step = state.evaluation.step_state
        counted += int(step.active.sum())
        rewards += float(step.time_step.reward[step.active].sum())

    ended = []
    loop.evaluation_completed(lambda state: ended.append(state.evaluation.result))
    loop.run()
    assert counted == int(ended[0].episode_length.sum())
    assert rewards == pytest.approx(float(ended[0].episode_return.sum()))


@pytest.mark.parametrize("step", [1, 3, 20])
def test_resumed_evaluation_fires_each_event_once(step: int) -> None:
    def make_counting() -> tuple[Loop, Asking, list[Any]]:
        loop, environment, seen = Loop(lambda state: None, epochs=3, iterations=3), Asking(), []
        evaluate_every(loop, Always(2), environment, episodes=5)
        loop.evaluation_started(lambda state: seen.append(("started", state.epoch)))
        loop.evaluation_episode_completed(lambda state: seen.append(int(state.evaluation.result.seed[-1])))
        return loop, environment, seen

    whole, _, expected = make_counting()
    whole.run()
    loop, environment, seen = make_counting()
    environment.left, environment.ask = step, lambda: loop.interrupt("enough")
    loop.run()
    other, _, rest = make_counting()
    other.load_state_dict(loop.state_dict())
    other.run()
    assert seen + rest == expected


def evaluated_at(loop: Loop) -> list[int]:
    """Return a list that collects the iterations at which the loop is evaluated."""
    seen: list[int] = []
    loop.evaluation_completed(lambda state: seen.append(state.total_iterations))
    return seen


@pytest.mark.parametrize(("epochs", "expected"), [(5, [15]), (7, [15, 21])])
def test_at_end_evaluates_unless_just_evaluated(epochs: int, expected: list[int]) -> None:
    loop = make(epochs=epochs, every=5, at_end=True)
    seen = evaluated_at(loop)
    state = loop.run()
    assert seen == expected
    assert set(state.metrics) == metrics_of("evaluation")
    loop.run()  # no epochs are left
    assert seen == expected


@pytest.mark.parametrize(("ask", "expected"), [(Loop.stop, 1), (Loop.interrupt, 0)])
@pytest.mark.parametrize(("event", "once", "iterations"), [("iteration_completed", 8, 8), ("epoch_ended", 2, 6)])
def test_at_end_evaluates_halted_but_not_interrupted_runs(
    event: str, once: int, iterations: int, ask: Any, expected: int
) -> None:
    loop = make(every=5, at_end=True)
    seen = evaluated_at(loop)
    loop.event(event).attach(lambda state: ask(loop, "enough"), once=once)
    assert loop.run().status == "halted"
    assert seen == [iterations] * expected


def test_final_checkpoint_contains_the_final_evaluation(tmp_path: Path) -> None:
    loop = make(epochs=3, every=0, at_end=True)
    checkpoint(loop, Checkpoints(tmp_path), keep_best=("evaluation_return", "max"))
    state = loop.run()
    (best,) = (tmp_path / "best").glob("*.h5")
    assert read_checkpoint(best).about["metrics"]["evaluation_return"] == state.metrics["evaluation_return"]


def test_same_episodes_repeats_episodes_after_resuming_too() -> None:
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


def test_same_episodes_needs_a_replayable_environment() -> None:
    with pytest.raises(ValueError, match=r"same_episodes=True\): Countdown cannot repeat an episode"):
        make(same_episodes=True)


class Asking(Countdown):
    """Environment that calls `ask` in a chosen step, as a signal or another thread could."""

    left = 0
    ask: Any = staticmethod(lambda: None)

    def apply_action(self, action: Tensor) -> TimeStep:
        self.left -= 1
        if self.left == 0:
            self.ask()
        return super().apply_action(action)


def before(loop: Loop, event: str) -> None:
    """Attach a handler that counts its calls. A postponed firing must not call it again."""

    @loop.event(event)(every=1)
    def count(state: State) -> None:
        state.memory["counted"] = state.memory.get("counted", 0) + 1


@pytest.mark.default_cases(every=3)
@pytest.mark.parametrize("step", [1, 3, 20, 40])
@pytest.mark.parametrize(
    "event", ["epoch_started", "iteration_completed", "epoch_completed", "epoch_ended", "epoch_halted"]
)
def test_interrupted_evaluation_is_finished_by_the_resumed_run(event: str, step: int) -> None:
    def make_asking() -> tuple[Loop, Asking, list[Any]]:
        loop, environment, seen = Loop(lambda state: None, epochs=12, iterations=3), Asking(), []
        if event == "epoch_halted":
            loop.iteration_completed(every=3)(State.halt_epoch)
        before(loop, event)
        evaluate_every(loop, Always(2), environment, episodes=5, event=event, every=2)
        early_stop(loop, "evaluation_return", mode="max", patience=1, event=event, every=2)
        record_solved(loop, "evaluation_return", 10.0, stop=False, event=event, every=2)
        loop.evaluation_completed(
            lambda state: seen.append((state.total_iterations, dict(state.memory["evaluations"])))
        )
        return loop, environment, seen

    whole, _, expected = make_asking()
    whole.run()
    assert whole.state.reason is not None and "solved" in whole.state.memory, "both rules must take effect"
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
    for values in (memory, expected_memory):
        values["solved"] = {**values["solved"], "seconds": 0.0}
    assert memory == expected_memory
    assert found(other) == found(whole)


@pytest.mark.parametrize("event", ["epoch_ended", "iteration_completed", "sampled"])
def test_stop_discards_the_current_evaluation(event: str) -> None:
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
    assert (environment.left, other.left) == (0, 0), "no step is played after the stop, in either evaluation"
    assert math.isnan(state.metrics["evaluation_return"]) and math.isnan(state.metrics["other_return"])
    assert environment.state_dict() == before
    assert "evaluations" not in state.memory
    assert loop.run().reason != "enough", "the next run continues, because patience is not exhausted"


def test_stop_ends_an_evaluation_after_an_earlier_halt() -> None:
    loop, environment = Loop(lambda state: None, epochs=4, iterations=3), Asking()
    evaluate_every(loop, Always(2), environment, episodes=5)
    loop.iteration_completed(once=3)(lambda state: loop.stop("first"))
    environment.left, environment.ask = 3, lambda: loop.stop("second")
    state = loop.run()
    assert (environment.left, state.reason) == (0, "first")
    assert math.isnan(state.metrics["evaluation_return"])


def test_halt_in_the_final_event_keeps_later_evaluations() -> None:
    loop = Loop(lambda state: None, epochs=2, iterations=3)
    for name in ("evaluation", "hard"):
        evaluate_every(loop, Always(2), Countdown(), episodes=5, every=0, at_end=True, name=name)
    loop.evaluation_completed(once=1)(lambda state: state.halt_loop("solved"))
    with pytest.warns(RuntimeWarning, match="ignored"):
        state = loop.run()
    assert not math.isnan(state.metrics["hard_return"])


def test_observers_see_a_postponed_epoch_end_once() -> None:
    loop, environment, seen = Loop(lambda state: None, epochs=2, iterations=3), Asking(), []
    evaluate_every(loop, Always(2), environment, episodes=5)
    loop.epoch_ended.observe(lambda loop, state: seen.append(state.epoch))
    environment.left, environment.ask = 3, lambda: loop.interrupt("enough")
    loop.run()
    assert seen == []
    loop.run()
    assert seen == [1, 2]


@pytest.mark.parametrize("ask", [Loop.stop, Loop.interrupt])
def test_next_run_finishes_an_evaluation_at_the_end(ask: Any) -> None:
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
def test_interrupt_waits_for_an_evaluation_within_an_iteration(event: str) -> None:
    loop = Loop(lambda state: loop.emit("sampled"), epochs=4, iterations=3)
    loop.define("sampled")
    environment = Asking()
    evaluate_every(loop, Always(2), environment, episodes=5, event=event)
    environment.left, environment.ask = 3, lambda: loop.interrupt("enough")
    state = loop.run()
    assert (state.reason, state.total_iterations, state.memory["evaluations"]["number"]) == ("enough", 1, 1)


def test_next_run_of_the_loop_finishes_an_interrupted_evaluation() -> None:
    whole, loop, environment = make(), Loop(lambda state: None, epochs=6, iterations=3), Asking()
    whole.run()
    evaluate_every(loop, Always(2), environment, episodes=5)
    environment.left, environment.ask = 20, lambda: loop.interrupt("enough")
    assert loop.run().status == "halted"
    assert loop.state.epoch_open
    assert loop.run().status == "completed"
    assert found(loop) == found(whole)


def test_interrupted_evaluation_without_its_handler_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    loop, environment = Loop(lambda state: None, epochs=2, iterations=3), Asking()
    evaluate_every(loop, Always(2), environment, episodes=5)
    environment.left, environment.ask = 3, lambda: loop.interrupt("enough")
    loop.run()
    other = Loop(lambda state: None, epochs=2, iterations=3)
    other.own("evaluation_environment", Countdown())
    other.load_state_dict(loop.state_dict())
    assert other.run().status == "completed"
    assert "is no longer attached" in caplog.text


def test_same_episodes_changes_with_the_number_of_episodes(caplog: pytest.LogCaptureFixture) -> None:
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
    assert "evaluation: the number of episodes changed from 3 to 5" in caplog.text
    assert len(other.state.memory["evaluation/seeds"]) == 5


def test_epoch_in_which_a_handler_halts_is_evaluated() -> None:
    loop, environment = Loop(lambda state: None, epochs=3, iterations=3), Countdown()
    loop.epoch_ended(lambda state: state.halt_loop("enough"))
    evaluate_every(loop, Always(2), environment, episodes=5)
    loop.run()
    assert found(loop)[0]["evaluation_return"] > 0.0


def test_training_environment_is_rejected() -> None:
    loop = Loop(lambda state: None)
    training = loop.own("environment", Countdown())
    with pytest.raises(ValueError, match="the loop already uses it as 'environment'; create another"):
        evaluate_every(loop, Always(0), training, episodes=1)


def test_two_evaluations_need_two_names() -> None:
    loop = make()
    with pytest.raises(ValueError, match=r"'evaluation_environment'.*already"):
        evaluate_every(loop, Always(0), Countdown(), episodes=1)
    evaluate_every(loop, Always(0), Countdown(), episodes=1, name="hard")
    assert set(loop.parts) == {"evaluation_environment", "hard_environment"}


@pytest.mark.parametrize("options", [{"episodes": 0}, {"on_failure": "ignore"}, {"event": "epoch_end"}, {"every": -1}])
def test_invalid_options_raise_and_attach_nothing(options: dict[str, Any]) -> None:
    loop = Loop(lambda state: None)
    with pytest.raises(ValueError, match=r"give 1 or more|expected \"raise\"|no event|must be 1 or more"):
        evaluate_every(loop, Always(0), Countdown(), **{"episodes": 5, **options})
    assert not loop.parts
    assert not any(event.handlers for event in loop.events.values())
