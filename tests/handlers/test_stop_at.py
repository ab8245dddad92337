from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rein.agents.dqn import DQN
from rein.envs.cartpole import CartPole
from rein.handlers.stop_at import stop_at
from rein.loop import Loop
from rein.loop.state import CLOCKS, State
from rein.training.offline import offline_loop
from rein.training.supervised import trainer
from rein.training.training_loop import training_loop


def advance(state: State) -> None:
    """Advance the clocks: eight environments, an update every second step, an episode every fourth."""
    n = state.total_iterations
    state.clocks.advance(env_steps=8, vector_steps=1, updates=n % 2, episodes=int(n % 4 == 3))


def make(*metric: str, **options: Any) -> Loop:
    """Return a loop with ten iterations per epoch, whose metric `score` is the number of the epoch."""
    loop = Loop(advance, epochs=100, iterations=10)
    loop.metric("score", lambda state: state.epoch, reduce="last")
    stop_at(loop, *metric, **options)
    return loop


@pytest.mark.parametrize(
    ("clock", "limit", "iterations"),
    [("env_steps", 100, 13), ("vector_steps", 17, 17), ("updates", 9, 18), ("episodes", 3, 12), ("iterations", 25, 25)],
)
def test_run_stops_at_the_first_iteration_that_reaches_the_limit(clock: str, limit: int, iterations: int) -> None:
    final = make(**{clock: limit}).run()
    assert final.status == "halted"
    assert final.total_iterations == iterations
    assert getattr(final.clocks, clock) >= limit


def test_run_stops_after_a_number_of_epochs() -> None:
    final = make(epochs=3).run()
    assert (final.epoch, final.iteration, final.clocks.epochs, final.status) == (3, 10, 3, "halted")


def test_remaining_uses_the_nearest_limit() -> None:
    loop, seen = make(env_steps=160, updates=40), []
    stop_at(loop, env_steps=320)
    stop_at(loop, vector_steps=math.inf)
    loop.iteration_completed(every=5)(lambda state: seen.append(state.remaining))
    loop.run(epochs=None)
    assert seen == [0.75, 0.5, 0.25, 0.0]
    loop, seen = make(env_steps=1600), []  # 200 iterations: the epochs end the run earlier
    loop.epoch_ended(lambda state: seen.append(state.remaining))
    loop.run(epochs=4)
    assert seen == [0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize(("clock", "limit"), [("env_steps", 240), ("iterations", 30), ("epochs", 3)])
def test_clock_limit_replaces_the_default_of_one_epoch(clock: str, limit: Any) -> None:
    loop = Loop(advance, iterations=10)
    stop_at(loop, **{clock: limit})
    assert loop.run().total_iterations == 30


def test_clock_limit_does_not_replace_explicit_epochs() -> None:
    loop = Loop(advance, epochs=1, iterations=10)
    stop_at(loop, env_steps=240)
    assert loop.run().total_iterations == 10
    loop = Loop(advance, iterations=10)
    stop_at(loop, env_steps=240)
    assert loop.run(epochs=2).total_iterations == 20


def test_metric_rule_and_infinite_limit_keep_the_default_of_one_epoch() -> None:
    loop = Loop(advance, iterations=10)
    loop.metric("score", lambda state: state.epoch, reduce="last")
    stop_at(loop, "score", at_least=2, env_steps=math.inf)
    assert loop.run().total_iterations == 10


def test_clock_limit_replaces_the_default_of_training_loops() -> None:
    environment = CartPole(num_envs=2, seed=0)
    spaces = environment.single_observation_space, environment.single_action_space
    agent = DQN(*spaces, capacity=100, learning_starts=0, batch_size=2, hidden=(4,), seed=0)
    loop = training_loop(agent, environment, iterations=4)
    stop_at(loop, env_steps=32)
    assert loop.run().total_iterations == 16
    loop = offline_loop(agent, iterations=1, updates_per_iteration=1)
    stop_at(loop, iterations=3)
    assert loop.run().total_iterations == 3
    model = torch.nn.Linear(1, 1)
    loop = trainer(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]  # the argument names differ
    stop_at(loop, iterations=3)
    assert loop.run([(torch.ones(1, 1), torch.ones(1, 1))]).total_iterations == 3


def test_run_stops_after_a_number_of_seconds() -> None:
    loop = Loop(lambda state: None, epochs=None, iterations=10)
    stop_at(loop, seconds=0.01)
    assert loop.run().clocks.seconds >= 0.01


def test_clock_can_hold_a_tensor() -> None:
    loop = Loop(lambda state: state.clocks.advance(episodes=torch.tensor(2)), iterations=100)
    stop_at(loop, episodes=9)
    assert loop.run().total_iterations == 5


@pytest.mark.parametrize("bound", [{"at_least": 4}, {"at_least": 3.5}])
def test_run_stops_when_the_metric_reaches_at_least(bound: dict[str, float]) -> None:
    final = make("score", **bound).run()
    assert (final.epoch, final.status) == (4, "halted")
    assert final.reason == f"score has reached 4, which is >= {bound['at_least']}"


def test_run_stops_when_the_metric_reaches_at_most() -> None:
    loop = Loop(lambda state: None, epochs=10, iterations=1)
    loop.metric("loss", lambda state: 1 / state.epoch)
    stop_at(loop, "loss", at_most=0.25)
    assert loop.run().epoch == 4


def test_nan_never_reaches_a_bound() -> None:
    loop = Loop(lambda state: None, epochs=3, iterations=1)
    loop.metric("loss", lambda state: math.nan)
    stop_at(loop, "loss", at_most=1)
    stop_at(loop, "loss", at_least=-1)
    assert loop.run().status == "completed"


def test_metric_is_read_at_the_given_event() -> None:
    loop = Loop(lambda state: None, epochs=3, iterations=10)
    loop.metric("sum", lambda state: 1, reduce="sum")
    stop_at(loop, "sum", at_least=4, event="iteration_completed")
    assert loop.run().total_iterations == 4


def test_first_rule_reached_gives_the_reason() -> None:
    assert make(env_steps=10_000, updates=5).run().reason == "updates has reached 5"
    assert make("score", at_least=2, iterations=1_000).run().reason == "score has reached 2, which is >= 2"
    assert make("score", at_least=50, env_steps=1_000).run().reason == "env_steps has reached 1,000"


RULES: list[tuple[tuple[str, ...], dict[str, Any]]] = [((), {"env_steps": 300}), (("score",), {"at_least": 4})]


@pytest.mark.parametrize(("metric", "rule"), RULES)
@pytest.mark.parametrize("saved_at", range(1, 41, 3))
def test_resumed_run_stops_at_the_same_iteration(metric: tuple[str, ...], rule: dict[str, Any], saved_at: int) -> None:
    whole, first, second = make(*metric, **rule), make(*metric, **rule), make(*metric, **rule)
    whole.run()

    @first.iteration_completed(once=saved_at)
    def interrupt(state: State) -> None:
        first.interrupt()

    first.run()
    second.load_state_dict(first.state_dict())
    second.run()
    assert second.state.total_iterations == whole.state.total_iterations
    assert (second.state.status, second.state.reason) == (whole.state.status, whole.state.reason)
    assert [r._replace(seconds=0) for r in second.state.history] == [r._replace(seconds=0) for r in whole.state.history]


@pytest.mark.parametrize(("metric", "rule"), RULES)
def test_stopped_run_halts_immediately_when_run_again(metric: tuple[str, ...], rule: dict[str, Any]) -> None:
    first, second = make(*metric, **rule), make(*metric, **rule)
    stopped = first.run()
    iterations, reason = stopped.total_iterations, stopped.reason
    second.load_state_dict(first.state_dict())
    for loop in (first, second):
        final = loop.run()
        assert (final.total_iterations, final.status, final.reason) == (iterations, "halted", reason)


def test_stopped_run_continues_with_a_higher_limit() -> None:
    first, further = make("score", at_least=3, env_steps=10_000), make("score", at_least=6, env_steps=20_000)
    first.run()
    further.load_state_dict(first.state_dict())
    assert further.run().epoch == 6


def test_unknown_clock_raises_and_lists_the_clocks() -> None:
    with pytest.raises(ValueError, match=r"stop_at\(weeks=5\): unknown clock") as error:
        make(weeks=5)
    assert all(clock in str(error.value) for clock in CLOCKS)


@pytest.mark.parametrize("limit", [0, -1, math.nan])
def test_limit_must_be_above_zero(limit: float) -> None:
    with pytest.raises(ValueError, match="expected a limit above 0"):
        make(env_steps=limit)


@pytest.mark.parametrize(
    ("metric", "options"),
    [((), {}), (("score",), {}), (("score",), {"at_least": 1, "at_most": 2}), ((), {"at_least": 1, "env_steps": 5})],
)
def test_metric_needs_exactly_one_bound(metric: tuple[str, ...], options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="at_least= "):
        make(*metric, **options)


def test_misspelled_metric_raises_after_the_first_epoch() -> None:
    loop = make("socre", at_least=1)
    with pytest.raises(ValueError, match="did you mean 'score'"):
        loop.run()
    assert loop.state.epoch == 1
