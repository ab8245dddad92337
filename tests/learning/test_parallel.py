"""Data-parallel learning: one pair of processes for all comparisons, and one pair for each kind of failure.

The processes run this file as `python test_parallel.py CASE FILE`, with the environment variables of torchrun.

Shapes: M rows of a minibatch, T steps, N environments, F features.
"""

from __future__ import annotations

import datetime
import functools
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gymnasium import spaces
from torch import Tensor

import rein
from rein.agents.base.data_parallel import CHECK_EVERY, mean_of_processes, process_group
from rein.agents.base.learner import Batch, Learner
from rein.agents.base.on_policy import Coefficients, policy_loss
from rein.agents.base.optimizers import Adam
from rein.networks.actor_critic import ActorCritic
from rein.networks.normalizers import ObservationNormalizer, RewardNormalizer
from rein.ops.parallel import gather_from_processes, rank
from rein.ops.random import generator
from rein.schedules import constant, linear, piecewise
from rein.testing.stateful import first_difference
from tests import programs

pytestmark = pytest.mark.timeout(1800)  # processes wait at most 600 s for each other; the rest is for a busy machine

M, F = 60, 3
SHARES = slice(0, 40), slice(40, 60)  # rows of each process
ENVIRONMENTS = slice(0, 3), slice(3, 8)
COEFFICIENTS = Coefficients(0.2, 0.5, 0.01)
FROZEN = "hidden", "value_head", ""  # parts of the networks; "" means all
REPLAY = {"capacity": 500, "learning_starts": 12, "batch_size": 8, "update_to_data": 0.25, "hidden": (8,)}
OTHERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "DQN": (
        rein.DQN,
        rein.envs.CartPole,
        {**REPLAY, "prioritized": True, "n_step": 2, "tau": 0.1, "normalize_observation": True},
    ),
    "IQN": (rein.IQN, rein.envs.CartPole, {**REPLAY, "target_frequency": 3, "tau": 1.0}),
    "RecurrentDQN": (rein.RecurrentDQN, rein.envs.CartPole, {**REPLAY, "sequence_length": 4, "burn_in": 2}),
    "SAC": (rein.SAC, rein.envs.Pendulum, REPLAY),
    "TD3": (rein.TD3, rein.envs.Pendulum, REPLAY),
    "DiscreteSAC": (rein.DiscreteSAC, rein.envs.CartPole, REPLAY),
    "AWAC": (rein.AWAC, rein.envs.Pendulum, REPLAY),
    "IQL": (rein.IQL, rein.envs.Pendulum, REPLAY),
    "BC": (rein.BC, rein.envs.Pendulum, REPLAY),
    "PQN": (rein.PQN, rein.envs.CartPole, {"rollout_steps": 8, "hidden": (8,)}),
    "A2C": (rein.A2C, rein.envs.CartPole, {"rollout_steps": 2, "hidden": (8,)}),
    "IMPALA": (rein.IMPALA, rein.envs.CartPole, {"rollout_steps": 2, "hidden": (8,)}),
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "numbers"))


def batch(masked: bool) -> Batch:
    columns = [numbers(M, seed=seed) for seed in range(2, 6)]
    valid = numbers(M, seed=6) < 0.5 if masked else None
    named = dict(zip(("log_prob", "value", "advantage", "target"), columns, strict=True))
    return Batch(numbers(M, F), sample=(numbers(M, seed=1) > 0.0).long(), **named, valid=valid)


def stepped(rows: Batch, share: slice, frozen: str | None = None) -> dict[str, Any]:
    """Return parameters, metrics and the metrics passed to the guard after a step with a clipped gradient."""
    shown: dict[str, Tensor] = {}
    networks = ActorCritic(spaces.Box(-1.0, 1.0, (F,)), spaces.Discrete(2), generator(0, "networks"), hidden=(8,))
    sgd: Any = functools.partial(torch.optim.SGD, lr=1.0)
    if frozen is not None:
        networks.get_submodule(frozen).requires_grad_(False)

    def guard(metrics: Any, gradients: list[Tensor]) -> bool:
        shown.update(metrics)
        return bool(torch.isfinite(metrics["grad_norm"]))

    metrics = Learner(networks, policy_loss, sgd, max_grad_norm=0.2, guard=guard).step(rows.rows(share), COEFFICIENTS)
    return {"networks": dict(networks.state_dict()), "metrics": metrics, "shown": shown}


def moments(share: slice) -> dict[str, Any]:
    """Return the states of both normalizers after two batches, and the scaled rewards of the second batch."""
    observations, rewards = ObservationNormalizer(F, "cpu"), RewardNormalizer(0.9)
    scaled_TN = torch.zeros(0)
    for seed in (0, 10):
        x_TNF, valid_TN = 5.0 + numbers(4, 8, F, seed=seed), numbers(4, 8, seed=seed + 1) < 1.0
        observations.update(x_TNF[:, share], valid_TN[:, share])
        reward_TN, ended_TN = numbers(4, 8, seed=seed + 2), numbers(4, 8, seed=seed + 3) > 1.0
        scaled_TN = rewards.scale(reward_TN[:, share], ended_TN[:, share], valid_TN[:, share])
    state = rewards.state_dict()
    del state["running_return"]
    return {"observations": dict(observations.state_dict()), "rewards": state, "scaled": scaled_TN}


def make_loop(seed: int = 0, num_envs: int = 6, **options: Any) -> rein.Loop:
    environment = rein.envs.CartPole(num_envs, seed=10 * seed + rank())
    defaults = {"rollout_steps": 8, "hidden": (8,), "normalize_observation": True, "normalize_reward": True}
    agent = rein.PPO(
        environment.single_observation_space, environment.single_action_space, seed=seed, **defaults | options
    )
    return rein.training_loop(agent, environment)


def other_loop(name: str, num_envs: int = 6, **options: Any) -> rein.Loop:
    kind, world, defaults = OTHERS[name]
    environment = world(num_envs, seed=rank())
    agent = kind(environment.single_observation_space, environment.single_action_space, seed=0, **defaults | options)
    return rein.training_loop(agent, environment)


def ran(loop: rein.Loop, epochs: int) -> dict[str, Any]:
    loop.run(epochs=epochs, iterations=8)
    state = loop.state_dict()
    return {"agent": state["parts"]["agent"], "environment": state["parts"]["environment"]}


def seeded_by_the_loop() -> dict[str, Any]:
    environment = rein.envs.CartPole(6)
    agent = rein.PPO(
        environment.single_observation_space, environment.single_action_space, rollout_steps=8, hidden=(8,)
    )
    loop = rein.training_loop(agent, environment, seed=3)
    return ran(loop, epochs=1) | {"seeds": (agent.seed, environment.seed)}


def resumed() -> dict[str, Any]:
    """Return the same run, resumed in new objects after the second epoch."""
    first, second = make_loop(), make_loop()
    first.run(epochs=2, iterations=8)
    second.load_state_dict(first.state_dict())
    return ran(second, epochs=4)


PER_PROCESS: list[dict[str, Any]] = [{}, {"micro_batch": 5, "threads": 2, "guard": lambda metrics, gradients: True}]
FALLING = {"learning_rate": linear(1e-3, 0.0, env_steps=10_000)}
LATE = {
    "learning_rate": piecewise(constant(1e-3, env_steps=300), constant(1e-4))
}  # constant during the first three updates
SLOWER = {"optimizer": functools.partial(Adam, eps=1e-3)}
DIFFERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {  # agent, options, options of process 1, message
    "learning_rate": ("PPO", {}, {"learning_rate": 1e-4}, "learning_rate"),
    "max_grad_norm": ("PPO", {}, {"max_grad_norm": 0.1}, "max_grad_norm"),
    "an option of the optimizer": ("PPO", {}, SLOWER, "optimizer"),
    "num_envs under a schedule by env steps": ("PPO", FALLING, {"num_envs": 11}, "learning_rate"),
    "gamma": ("PPO", {}, {"gamma": 0.9}, "gamma"),
    "update_epochs": ("PPO", {}, {"update_epochs": 5}, "update_epochs"),
    "normalize_reward": ("PPO", {}, {"normalize_reward": False}, "normalize_reward"),
    "minibatches of PQN": ("PQN", {}, {"minibatches": 2}, "minibatches"),
    "normalize_observation of DQN": ("DQN", {}, {"normalize_observation": False}, "normalize_observation"),
    "num_envs of DQN": ("DQN", {}, {"num_envs": 7}, "num_envs"),
    "an option of the actor's optimizer": ("SAC", {}, {"optimizer": SLOWER["optimizer"]}, "optimizer"),
    "actor_learning_rate": ("SAC", {}, {"actor_learning_rate": 1e-4}, "actor_learning_rate"),
    "tau": ("SAC", {}, {"tau": 0.5}, "tau"),
}
LATER_DIFFERENCES = (
    "num_envs under a late schedule",
    "a learning rate that is assigned",
    "a parameter that is changed",
)


def run_with_different_options(name: str, number: int) -> tuple[str, int]:
    """Return the error message if options differ, and the number of updates before the error."""
    kind, options, other, _ = DIFFERS[name]
    options = options | (other if number == 1 else {})
    loop = make_loop(**options) if kind == "PPO" else other_loop(kind, **options)
    message = error_of(lambda: loop.run(epochs=20, iterations=8))
    return message, loop.parts["agent"].updates


def run_with_later_difference(name: str, number: int) -> tuple[str, int]:
    """Return the same if the processes start to differ after the first update."""
    late = name == LATER_DIFFERENCES[0]
    options: dict[str, Any] = LATE if late else {}
    loop = make_loop(num_envs=11 if late and number == 1 else 6, **options)
    agent = loop.parts["agent"]

    @loop.epoch_ended(once=2)
    def change(state: rein.State) -> None:
        if name == LATER_DIFFERENCES[1] and number == 1:
            agent.learning_rate = 1e-4
        if name == LATER_DIFFERENCES[2] and number == 1:
            with torch.no_grad():
                next(agent.networks.parameters()).view(-1)[0].add_(1e-3)

    message = error_of(lambda: loop.run(epochs=20, iterations=8))
    return message, agent.updates


def error_of(of: Callable[[], Any]) -> str:
    try:
        of()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def relations() -> dict[str, Any]:
    """Return the results of one process of a pair without failures."""
    early = make_loop()
    with process_group() as group:
        poisoned = batch(masked=False)
        if group.rank == 1:
            poisoned.advantage[-1] = torch.nan
        found: dict[str, Any] = {
            "group": tuple(group),
            "stepped": {masked: stepped(batch(masked), SHARES[group.rank]) for masked in (False, True)},
            "frozen": {part: stepped(batch(False), SHARES[group.rank], part) for part in FROZEN},
            "poisoned": stepped(poisoned, SHARES[group.rank]),
            "moments": moments(ENVIRONMENTS[group.rank]),
            "run": ran(make_loop(), epochs=4),
            "again": ran(make_loop(), epochs=4),
            "resumed": resumed(),
            "seeded by the loop": seeded_by_the_loop(),
            "uneven": ran(make_loop(num_envs=6 + 5 * group.rank), epochs=2),
            "others": {name: ran(other_loop(name), epochs=2)["agent"] for name in OTHERS},
            "stopped": ran(make_loop(target_kl=1e-4, update_epochs=50, learning_rate=1e-3), epochs=2),
            "mean": mean_of_processes(float(group.rank)),
            "gathered": gather_from_processes(torch.tensor([group.rank, 5])),
            "another seed": error_of(lambda: ran(make_loop(seed=group.rank), epochs=1)),
            "another shape": error_of(lambda: ran(make_loop(shared=group.rank == 1), epochs=1)),
            "built too early": error_of(lambda: ran(early, epochs=1)),
            "per process": ran(make_loop(**PER_PROCESS[group.rank]), epochs=2),
            "populations": {case: train_population(case, group.rank) for case in POPULATIONS},
        }
        found["differs"] = {name: run_with_different_options(name, group.rank) for name in DIFFERS}
        found["later"] = {name: run_with_later_difference(name, group.rank) for name in LATER_DIFFERENCES}
    return found | {"after": tuple(process_group_of_one())}


# what each process does with a population -> message of both processes
POPULATIONS = {
    "all freeze learner 0": "no error",
    "one freezes learner 0": "frozen learners is [] in process 0 and [0] in process 1",
    "all replace learners": "no error",
    "one replaces learners": "population_based_training is None in process 0",
    "all replace learners in different epochs": "'every': 2",
}


def train_population(case: str, number: int) -> dict[str, Any]:
    """Return the error, the networks and the learning rates of a population."""
    environment = rein.envs.CartPole(8, seed=number)
    options: dict[str, Any] = {"rollout_steps": 4, "minibatches": 1, "hidden": (4,), "seed": 0}
    agent = rein.Population(rein.PPO, environment, learners=4, learning_rate=[1e-3, 2e-3, 3e-3, 4e-3], **options)
    loop, takes_part = rein.training_loop(agent, environment), number == 1 or case.startswith("all")
    if takes_part and "freeze" in case:
        loop.epoch_ended(once=2)(lambda state: agent.freeze(0))
    elif takes_part:
        rein.handlers.population_based_training(
            loop, {"learning_rate": (1e-4, 1e-2)}, every=2 + number * ("different" in case)
        )
    error = error_of(lambda: loop.run(epochs=6, iterations=8))
    agents = [agent.agent(learner) for learner in range(4)]
    rates = [one.learning_rate() for one in agents]
    return {"error": error, "networks": [dict(one.networks.state_dict()) for one in agents], "rates": rates}


def process_group_of_one() -> Any:
    del os.environ["RANK"]
    with process_group() as group:
        return group


def endless() -> None:
    """Process 1 exits silently or hangs while process 0 continues learning."""
    hangs = sys.argv[1] == "hangs"
    with process_group() as group:
        loop = make_loop()

        @loop.epoch_ended(once=2)
        def fail(state: rein.State) -> None:
            if group.rank == 1 and hangs:
                time.sleep(3600.0)  # until the test ends
            if group.rank == 1:
                os._exit(7)
            if hangs:  # shorten the timeout only now, since both processes may have been slow so far
                dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=0.5))

        loop.run(epochs=10_000, iterations=8)


def started(case: str, folder: Path) -> list[programs.Program]:
    """Start two processes and return them in the order of their ranks."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return [
        programs.Program(__file__, case, folder / str(number), env=shared | {"RANK": str(number)})
        for number in range(2)
    ]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of two processes."""
    folder = tmp_path_factory.mktemp("pair")
    ended = [process.wait() for process in started("relations", folder)]
    assert [done.returncode for done in ended] == [0, 0], "\n".join(done.stderr for done in ended)
    return [torch.load(folder / str(number), weights_only=False) for number in range(2)]


@pytest.mark.parametrize("masked", [False, True], ids=["all rows", "some rows"])
def test_step_with_two_shares_equals_step_with_the_whole_batch(pair: list[dict[str, Any]], masked: bool) -> None:
    whole = stepped(batch(masked), slice(None))
    assert whole["metrics"]["grad_norm"] > 0.2, "nothing was clipped"
    for found in pair:
        torch.testing.assert_close(found["stepped"][masked], whole, atol=1e-6, rtol=1e-5)
    assert first_difference(pair[0]["stepped"], pair[1]["stepped"]) is None


@pytest.mark.parametrize("part", FROZEN)
def test_frozen_parameters_do_not_change_in_any_process(pair: list[dict[str, Any]], part: str) -> None:
    whole = stepped(batch(False), slice(None), part)
    for found in pair:
        torch.testing.assert_close(found["frozen"][part], whole, atol=1e-6, rtol=1e-5)
    assert first_difference(pair[0]["frozen"], pair[1]["frozen"]) is None


def test_non_finite_update_is_skipped_in_all_processes(pair: list[dict[str, Any]]) -> None:
    untouched = ActorCritic(spaces.Box(-1.0, 1.0, (F,)), spaces.Discrete(2), generator(0, "networks"), hidden=(8,))
    for found in pair:
        assert not torch.isfinite(found["poisoned"]["shown"]["policy_loss"])
        assert first_difference(found["poisoned"]["networks"], dict(untouched.state_dict())) is None


def test_normalizers_share_statistics(pair: list[dict[str, Any]]) -> None:
    whole = moments(slice(None))
    for found, share in zip(pair, ENVIRONMENTS, strict=True):
        expected = whole | {"scaled": whole["scaled"][:, share]}
        torch.testing.assert_close(found["moments"], expected, atol=1e-6, rtol=1e-6)
    for name in ("observations", "rewards"):
        assert first_difference(pair[0]["moments"][name], pair[1]["moments"][name]) is None


@pytest.mark.parametrize("run", ["run", "uneven", "stopped"])
def test_processes_have_equal_networks_and_different_experience(pair: list[dict[str, Any]], run: str) -> None:
    one, other = (found[run]["agent"] for found in pair)
    for shared in ("networks", "learners", "updates"):
        assert first_difference(one[shared], other[shared]) is None
    assert first_difference(one["generator"], other["generator"]) is not None
    assert first_difference(pair[0][run]["environment"], pair[1][run]["environment"]) is not None


@pytest.mark.parametrize("name", OTHERS)
def test_all_agents_stay_equal_in_all_processes(pair: list[dict[str, Any]], name: str) -> None:
    one, other = (found["others"][name] for found in pair)
    assert one["updates"] == other["updates"] >= 8
    replays = "replay" in one
    for shared in ("networks", "learners"):
        assert first_difference(one[shared], other[shared]) is None, shared
    for separate in ("generator", "replay") if replays else ("generator",):
        assert first_difference(one[separate], other[separate]) is not None, separate


def test_temperature_is_shared_and_priorities_are_not(pair: list[dict[str, Any]]) -> None:
    logs = [found["others"]["SAC"]["networks"]["temperature.log"] for found in pair]
    assert torch.equal(*logs) and float(logs[0]) != 0.0
    priorities = [found["others"]["DQN"]["replay"]["priorities"] for found in pair]
    assert first_difference(*priorities) is not None


def test_reward_statistics_are_shared_and_running_returns_are_not(pair: list[dict[str, Any]]) -> None:
    one, other = (found["run"]["agent"]["reward_normalizer"] for found in pair)
    assert float(one["rows"]) == 2 * 4 * 8 * 6  # processes, epochs, steps, environments
    assert first_difference(one | {"running_return": None}, other | {"running_return": None}) is None
    assert not torch.equal(one["running_return"], other["running_return"])


def test_target_kl_stops_all_processes_after_the_same_pass(pair: list[dict[str, Any]]) -> None:
    updates = [found["stopped"]["agent"]["updates"] for found in pair]
    assert updates[0] == updates[1] < 2 * 50 * 4


def test_run_is_reproducible(pair: list[dict[str, Any]]) -> None:
    for found in pair:
        assert first_difference(found["run"], found["again"]) is None


def test_processes_resume_exactly(pair: list[dict[str, Any]]) -> None:
    for found in pair:
        assert first_difference(found["run"], found["resumed"]) is None


def test_loop_seed_gives_equal_agents_and_different_episodes(pair: list[dict[str, Any]]) -> None:
    one, other = (found["seeded by the loop"] for found in pair)
    assert (one["seeds"], other["seeds"][0]) == ((3, 3), 3)
    assert other["seeds"][1] != 3
    assert first_difference(one["agent"]["networks"], other["agent"]["networks"]) is None
    assert first_difference(one["environment"], other["environment"]) is not None


def test_process_0_has_the_episodes_of_a_single_process_run(pair: list[dict[str, Any]]) -> None:
    alone = seeded_by_the_loop()
    assert pair[0]["seeded by the loop"]["seeds"] == alone["seeds"] == (3, 3)
    assert first_difference(pair[0]["seeded by the loop"]["environment"], alone["environment"]) is None


def test_env_steps_count_one_process(pair: list[dict[str, Any]]) -> None:
    assert [found["uneven"]["agent"]["env_steps"] for found in pair] == [2 * 8 * 6, 2 * 8 * 11]


@pytest.mark.parametrize(("mistake", "named"), [("another seed", "the same seed"), ("another shape", "shared is")])
def test_different_networks_are_rejected(pair: list[dict[str, Any]], mistake: str, named: str) -> None:
    for found in pair:
        assert found[mistake].startswith("ValueError")
        assert named in found[mistake]


@pytest.mark.parametrize("name", DIFFERS)
def test_different_options_are_rejected_before_the_first_update(pair: list[dict[str, Any]], name: str) -> None:
    for found in pair:
        message, updates = found["differs"][name]
        assert message.startswith("ValueError")
        assert f"{DIFFERS[name][3]} is" in message
        assert updates == 0


@pytest.mark.parametrize("name", LATER_DIFFERENCES)
def test_later_differences_are_rejected_at_the_next_check(pair: list[dict[str, Any]], name: str) -> None:
    for found in pair:
        message, updates = found["later"][name]
        assert message.startswith("ValueError")
        assert "differ" in message
        assert updates == CHECK_EVERY


def test_options_of_a_single_process_can_differ(pair: list[dict[str, Any]]) -> None:
    one, other = (found["per process"]["agent"] for found in pair)
    assert first_difference(one["networks"], other["networks"]) is None


def test_agent_built_outside_the_group_is_rejected(pair: list[dict[str, Any]]) -> None:
    for found in pair:
        assert found["built too early"].startswith("RuntimeError")
        assert "with process_group()" in found["built too early"]


def test_processes_exchange_values(pair: list[dict[str, Any]]) -> None:
    for number, found in enumerate(pair):
        assert found["group"] == (number, 2)
        assert found["mean"] == 0.5
        assert found["gathered"].tolist() == [[0, 5], [1, 5]]
        assert found["after"] == (0, 1)


@pytest.mark.parametrize(("case", "message"), POPULATIONS.items(), ids=POPULATIONS)
def test_processes_decide_together_which_learners_learn(pair: list[dict[str, Any]], case: str, message: str) -> None:
    one, other = (found["populations"][case] for found in pair)
    assert message in one["error"] and message in other["error"]
    if message == "no error":
        assert first_difference(one["networks"], other["networks"]) is None
        assert one["rates"] == other["rates"]
        assert ("replace" in case) == (one["rates"] != [1e-3, 2e-3, 3e-3, 4e-3])


def test_restoring_checkpoints_separately_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rein.handlers.guards.processes", lambda: 2)
    with pytest.raises(ValueError, match="group"):
        rein.handlers.guard_updates(make_loop(), rein.handlers.UpdateGuard("return"), saver=object())


@pytest.mark.default_cases("dies")
@pytest.mark.parametrize("case", ["dies", "hangs"])
def test_waiting_process_raises_if_the_other_process_ends_or_hangs(case: str, tmp_path: Path) -> None:
    waiting, failing = started(case, tmp_path)
    try:
        done = waiting.wait()
    finally:
        failing.kill()
        failing.wait()
    assert done.returncode == 1
    assert "RuntimeError" in done.stderr
    assert "process 0 of 2 waited for the others" in done.stderr


def test_process_group_without_torchrun_has_one_process() -> None:
    with process_group() as group:
        assert tuple(group) == (0, 1)
        assert mean_of_processes(3.0) == 3.0


def test_timeout_is_passed_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(dist, "init_process_group", lambda timeout: given.append(timeout))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with process_group(timeout=2.5):
        pass
    assert given == [datetime.timedelta(seconds=2.5)]


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_invalid_timeout_is_rejected(timeout: float) -> None:
    with pytest.raises(ValueError, match="positive number of seconds"), process_group(timeout=timeout):
        pass


if __name__ == "__main__":
    if sys.argv[1] == "relations":
        torch.save(relations(), sys.argv[2])
    else:
        endless()
