"""Populations: several learners of one algorithm in one process."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import rein
from rein.accelerate import compiled
from rein.accelerate.stacked.on_policy_agents import AgentNoise
from rein.agents.base.learner import Learner
from rein.envs.gridworld import Gridworld
from rein.errors import NonFiniteError
from rein.networks.recurrent import GRU
from rein.ops.trees import leaves, map_tree
from rein.testing import AgentContract
from rein.testing.stateful import copy_state, first_difference
from rein.types import StepState

S, N = 3, 4
SMALL: dict[str, Any] = {"hidden": (8, 8), "rollout_steps": 4, "minibatches": 2, "update_epochs": 2}
OFF: dict[str, Any] = {"hidden": (8,), "batch_size": 8, "learning_starts": 8, "capacity": 100}
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "PPO": (rein.PPO, rein.envs.CartPole, SMALL),
    "PPO with entropy": (rein.PPO, rein.envs.CartPole, {**SMALL, "entropy_coefficient": [0.0, 0.01, 0.1]}),
    "PPO, shared layers": (rein.PPO, rein.envs.CartPole, {**SMALL, "shared": True, "activation": "relu"}),
    "PPO, normalized": (
        rein.PPO,
        rein.envs.CartPole,
        {**SMALL, "normalize_observation": True, "normalize_reward": True},
    ),
    "PPO, target_kl": (rein.PPO, rein.envs.CartPole, {**SMALL, "target_kl": [1e-9, 1e-3, 1.0]}),
    "PPO, continuous": (rein.PPO, rein.envs.Pendulum, {**SMALL, "clip": [0.1, 0.2, 0.3]}),
    "PPO, squashed": (rein.PPO, rein.envs.Pendulum, {**SMALL, "squash": True}),
    "PPO, squashed, with entropy": (
        rein.PPO,
        rein.envs.Pendulum,
        {**SMALL, "squash": True, "entropy_coefficient": [0.0, 0.01, 0.1]},
    ),
    "PPO, different activations": (rein.PPO, rein.envs.CartPole, {**SMALL, "activation": ["tanh", "relu", "tanh"]}),
    "PPO, different sharing": (rein.PPO, rein.envs.CartPole, {**SMALL, "shared": [False, True, False]}),
    "PPO, different squashing": (rein.PPO, rein.envs.Pendulum, {**SMALL, "squash": [False, True, False]}),
    "A2C": (rein.A2C, rein.envs.CartPole, {"hidden": (8, 8), "rollout_steps": 4, "gamma": [0.9, 0.95, 0.99]}),
    "recurrent PPO": (rein.PPO, rein.envs.CartPole, {**SMALL, "core": functools.partial(GRU, features=4)}),
    "IMPALA": (rein.IMPALA, rein.envs.CartPole, {"hidden": (8,), "rollout_steps": 4}),
    "PQN": (rein.PQN, rein.envs.CartPole, SMALL),
    "DQN": (rein.DQN, rein.envs.CartPole, OFF),
    "DQN, prioritized": (rein.DQN, rein.envs.CartPole, {**OFF, "prioritized": True, "n_step": 3}),
    "recurrent DQN": (rein.RecurrentDQN, rein.envs.CartPole, {**OFF, "sequence_length": 4, "burn_in": 2}),
    "IQN": (rein.IQN, rein.envs.CartPole, OFF),
    "SAC": (rein.SAC, rein.envs.Pendulum, OFF),
    "discrete SAC": (rein.DiscreteSAC, rein.envs.CartPole, OFF),
    "TD3": (rein.TD3, rein.envs.Pendulum, OFF),
    "DDPG": (rein.DDPG, rein.envs.Pendulum, OFF),
    "IQL": (rein.IQL, rein.envs.Pendulum, OFF),
    "AWAC": (rein.AWAC, rein.envs.Pendulum, OFF),
    "BC": (rein.BC, rein.envs.Pendulum, OFF),
    "Q-learning": (rein.QLearning, functools.partial(Gridworld, possible_targets=[(2, 4)]), {}),
}
TOGETHER = (
    "PPO",
    "PPO with entropy",
    "PPO, shared layers",
    "PPO, normalized",
    "PPO, continuous",
    "PPO, squashed",
    "A2C",
    "DQN",
    "DQN, prioritized",
    "SAC",
    "TD3",
    "DDPG",
)


def made(case: str, seed: int | None = 0) -> tuple[rein.Population, Any]:
    """Return a population with different learning rates, and its environment."""
    kind, environment, options = CASES[case]
    env = environment(S * N, seed=1)
    return rein.Population(kind, env, learners=S, learning_rate=[1e-3, 3e-3, 1e-2], seed=seed, **options), env


def single(case: str, learner: int) -> Any:
    """Return an agent with the seed and the options of a learner."""
    kind, environment, options = CASES[case]
    mine = {name: value[learner] if isinstance(value, list) else value for name, value in options.items()}
    return kind(environment(N, seed=1), learning_rate=[1e-3, 3e-3, 1e-2][learner], seed=learner, **mine)


def trained(population: rein.Population, env: Any, updates: int, watch: Any = None) -> list[Any]:
    """Train a population, and return the transitions of all steps and the rows in which episodes were reset."""
    loop = rein.training_loop(population, env, iterations=10**6)
    seen: list[Any] = []

    @loop.observation_recorded
    def keep(state: rein.State) -> None:
        known: StepState = state.step_state
        seen.append(map_tree(Tensor.clone, known.transition))

    @loop.iteration_completed
    def halt(state: rein.State) -> None:
        if population.updates >= updates:
            state.halt_loop("enough")

    loop.run()
    return seen


def parameters(agent: Any) -> dict[str, Tensor]:
    """Return the parameters of all networks of an agent."""
    modules = {name: value for name, value in vars(agent).items() if isinstance(value, torch.nn.Module)}
    return {f"{name}.{key}": p.detach() for name, module in modules.items() for key, p in module.named_parameters()}


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("case", CASES)
def test_each_learner_equals_a_single_agent_on_the_same_data(case: str) -> None:
    population, env = made(case)
    transitions = trained(population, env, 20)
    for learner in range(S):
        alone, rows = single(case, learner), slice(learner * N, (learner + 1) * N)
        for number, transition in enumerate(transitions):
            mine = map_tree(lambda x, rows=rows: x[rows], transition)
            if number == 0:
                alone.observe_reset(mine.observation, torch.ones(N, dtype=torch.bool))
            action, extras = alone.select_action(mine.observation)
            assert torch.allclose(action.float(), mine.action.float(), rtol=1e-3, atol=1e-4)
            alone.record_observation(mine._replace(action=action, extras=extras))
            alone.optimize_model()
        theirs = parameters(population.agent(learner))
        assert (alone.updates, alone.env_steps) == (population.agent(learner).updates, len(transitions) * N)
        for name, expected in parameters(alone).items():
            assert torch.allclose(theirs[name], expected, rtol=1e-4, atol=1e-5), name


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("case", [case for case in CASES if case != "Q-learning"])  # has no networks
def test_plain_networks_are_computed_together(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps_alone: list[Any] = []
    step = Learner.step
    monkeypatch.setattr(
        Learner, "step", lambda self, *args, **more: steps_alone.append(self) or step(self, *args, **more)
    )
    population, env = made(case)
    trained(population, env, 4)
    assert (not steps_alone) == (case in TOGETHER)


@pytest.mark.default_cases("DQN")
class TestPopulation(AgentContract):
    num_envs, steps = 6, 40

    cases: ClassVar[Any] = {"PPO": {**SMALL, "minibatches": 1}, "DQN": OFF}

    @pytest.fixture(autouse=True, params=["PPO", "DQN"])
    def _case(self, request: pytest.FixtureRequest) -> None:
        self.kind, self.options = getattr(rein, request.param), self.cases[request.param]

    def make(self, seed: int | None) -> rein.Population:
        return rein.Population(self.kind, self.environment(6, 0), learners=2, seed=seed, **self.options)

    def environment(self, num_envs: int, seed: int) -> Any:
        return rein.envs.CartPole(num_envs, seed=seed)

    def test_counts_env_steps_and_updates(self) -> None:
        agent = self.make(0)
        for k, metrics in enumerate(self._learning(agent), start=1):
            assert agent.env_steps == k * self.num_envs / 2  # the rows of one learner
            assert bool(metrics) == (agent.updates > 0 if self.kind is rein.DQN else k % 4 == 0)

    def learned(self, agent: rein.Population) -> Any:
        return {str(i): super(TestPopulation, self).learned(agent.agent(i)) for i in range(2)}


def checkpointed(case: str, folder: Path) -> rein.Loop:
    """Return a loop of 5 epochs with checkpoints, which freezes learner 1 after the second epoch."""
    population, env = made(case)
    store = rein.HDF5Store(folder, exist="resume")
    loop = rein.training_loop(population, env, store, epochs=5, iterations=6)
    loop.epoch_ended(once=2)(lambda state: population.freeze(1))
    rein.checkpoint(loop, store)
    return loop


def changed(before: Any, after: Any) -> set[str]:
    """Return the attributes in which two states of an agent differ."""
    assert before.keys() == after.keys()
    return {name for name in before if first_difference(before[name], after[name]) is not None}


@pytest.mark.default_cases("PPO", "PPO, shared layers", "recurrent PPO", "DQN", "TD3", "IMPALA")
@pytest.mark.parametrize("case", CASES)
def test_frozen_learner_keeps_its_whole_state_through_updates_and_a_resume(case: str, tmp_path: Path) -> None:
    loop = checkpointed(case, tmp_path)
    population = loop.parts["agent"]
    states: list[list[Any]] = [copy_state(population.state_dict()["agents"])]
    loop.epoch_ended(every=2)(lambda state: states.append(copy_state(population.state_dict()["agents"])))
    loop.epoch_ended(once=4)(lambda state: loop.interrupt("on purpose"))
    loop.run()
    resumed = checkpointed(case, tmp_path)
    rein.resume(resumed, tmp_path)
    resumed.run()
    states.append(resumed.parts["agent"].state_dict()["agents"])
    start, frozen, interrupted, end = states

    learned = {"updates", "env_steps", "generator"} | {"networks", "replay", "table"} & {*start[1]}
    learned |= {"learners"} if population.learners else set()
    learned |= {"reward_normalizer"} if case == "PPO, normalized" else set()
    assert learned <= changed(start[1], frozen[1])
    assert changed(frozen[1], interrupted[1]) == changed(frozen[1], end[1]) == set()
    for other in (0, 2):
        assert learned <= changed(frozen[other], interrupted[other])
        assert learned <= changed(interrupted[other], end[other])
    assert resumed.parts["agent"].frozen == {1}
    assert end[0]["updates"] > end[1]["updates"]


def test_frozen_recurrent_learner_acts_greedily_with_its_memory() -> None:
    population, env = made("recurrent PPO")
    trained(population, env, 2)
    population.freeze(1)
    policy, rows = population.agent(1).policy(), slice(N, 2 * N)
    for transition in trained(population, env, 8):
        mine = map_tree(lambda x: x[rows], transition)
        assert torch.equal(policy.select_action(mine.observation)[0], mine.action)
        policy.reset(mine.terminated | mine.truncated)
    other, _ = made("recurrent PPO")
    other.load_state_dict(copy_state(population.state_dict()))
    assert first_difference(population.state_dict(), other.state_dict()) is None
    assert other.frozen == {1}


@pytest.mark.parametrize("frozen", [[], [0]], ids=str)
def test_metrics_are_means_and_lists_of_learners_that_are_not_frozen(frozen: list[int]) -> None:
    population, env = made("PPO")
    population.freeze(frozen)
    loop = rein.training_loop(population, env, iterations=4)
    found: list[Any] = []
    loop.model_optimized(lambda state: found.append(dict(state.step_state.metrics)))
    loop.run()
    each = found[-1]["value_loss_per_learner"]
    assert each.isnan().tolist() == [learner in frozen for learner in range(S)]
    assert torch.allclose(found[-1]["value_loss"], each[len(frozen) :].mean())
    assert loop.state.metrics["value_loss"] == pytest.approx(float(each[len(frozen) :].mean()))


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("case", [case for case in CASES if "different" not in case and case != "Q-learning"])
def test_copied_learner_equals_its_source_and_keeps_its_own_data(case: str) -> None:
    population, env = made(case)
    trained(population, env, 4)
    before = copy_state(population.state_dict()["agents"])
    population.copy_learner(2, 0)
    after = population.state_dict()["agents"]
    for learner in (1, 2):
        assert first_difference(before[learner], after[learner]) is None
    for name, mine in after[0].items():
        learned = name in ("networks", "learners")
        if isinstance(mine, dict) and "running_return" in mine:
            assert torch.equal(mine.pop("mean"), before[2][name].pop("mean"))
            assert torch.equal(mine["running_return"], before[0][name]["running_return"])
        else:
            assert first_difference(mine, before[2 if learned else 0][name]) is None
    trained(population, env, 8)
    assert first_difference(population.state_dict()["agents"][0], population.state_dict()["agents"][2]) is not None


def test_copied_learner_of_a_table_equals_its_source() -> None:
    env = rein.envs.Gridworld(4, seed=0)
    population = rein.Population(rein.QLearning, env, learners=2, seed=0)
    trained(population, env, 20)
    population.copy_learner(1, 0)
    assert torch.equal(population.agent(0).table, population.agent(1).table)
    assert population.agent(0).table is not population.agent(1).table


def test_learner_return_is_the_mean_return_of_the_episodes_of_a_learner() -> None:
    population, env = made("PPO")
    loop = rein.training_loop(population, env, epochs=2, iterations=60)
    returns: list[list[float]] = [[] for _ in range(S)]

    @loop.episodes_completed
    def keep(state: rein.State) -> None:
        for episode in state.episodes_completed:
            returns[episode.environment // N].append(episode.episode_return)

    loop.run()
    for learner, mine in enumerate(returns):
        assert loop.state.metrics[f"learner_return/{learner}"] == pytest.approx(np.mean(mine[-100:]))
    loop.parts["statistics"].forget_returns(1)
    assert np.isnan(loop.state.metrics["learner_return/1"])
    assert not np.isnan(loop.state.metrics["learner_return/0"])


@pytest.mark.default_cases("DQN")
@pytest.mark.parametrize("case", ["PPO", "DQN"])
def test_resumed_run_equals_uninterrupted_run(case: str, tmp_path: Path) -> None:
    whole = checkpointed(case, tmp_path / "whole")
    whole.run()
    for at in (1, 3):  # before and after a learner is frozen
        cut = checkpointed(case, tmp_path / str(at))
        cut.epoch_ended(once=at)(lambda state, cut=cut: cut.interrupt("on purpose"))
        cut.run()
        resumed = checkpointed(case, tmp_path / str(at))
        rein.resume(resumed, tmp_path / str(at))
        resumed.run()
        assert first_difference(whole.parts["agent"].state_dict(), resumed.parts["agent"].state_dict()) is None


def test_agent_of_a_learner_acts_as_the_policy_of_its_rows() -> None:
    population, env = made("PPO")
    trained(population, env, 4)
    observation = env.reset()
    actions = population.policy().select_action(observation)[0]
    mine = population.agent(2).policy().select_action(observation[2 * N :])[0]
    assert torch.equal(actions[2 * N :], mine)


def test_arrays_give_one_value_to_each_learner() -> None:
    env = rein.envs.CartPole(6)
    rates = np.geomspace(1e-4, 1e-2, 3)
    population = rein.Population(rein.PPO, env, learners=3, learning_rate=rates, hidden=[8, 8], seed=[5, 7, 9])
    agents = [population.agent(i) for i in range(3)]
    assert [agent.learning_rate() for agent in agents] == rates.tolist()
    assert [agent.seed for agent in agents] == [5, 7, 9]
    assert {tuple(agent.hidden) for agent in agents} == {(8, 8)}
    assert population.config["learning_rate"] == rates.tolist()


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [(np.int64(3), [3, 4]), (np.arange(2), [0, 1]), (np.uint8(255), [255, 256]), (np.int8([127, 0]), [127, 0])],
)
def test_seeds_may_be_numbers_and_arrays_of_numpy(seed: Any, seeds: list[int]) -> None:
    population = rein.Population(rein.PPO, rein.envs.CartPole(2), learners=2, seed=seed)
    assert [population.agent(i).seed for i in range(2)] == seeds
    assert [type(population.agent(i).seed) for i in range(2)] == [int, int]


def test_functions_of_gradients_get_them_before_clipping() -> None:
    population, env = made("PPO")
    largest: list[float] = []
    for learner in population.learners.values():
        learner.max_grad_norm = 1e-6
        learner.on_gradients = lambda _, gradients: largest.append(max(float(g.abs().max()) for g in gradients))
    trained(population, env, 1)
    assert max(largest) > 1e-5


@pytest.mark.parametrize(
    ("change", "kind", "word"),
    [
        ({"learners": 4}, ValueError, "learners"),
        ({"learners": 0}, ValueError, "learners"),
        ({"learning_rate": [1e-3, 1e-2]}, ValueError, "learning_rate"),
        ({"learning_rat": 1e-3}, TypeError, "learning_rate"),
        ({"kind": "PPO"}, TypeError, "class"),
        ({"seed": 0.5}, TypeError, "seed"),
        ({"seed": [0, 1, 1.5]}, TypeError, "seed"),
        ({"seed": -1}, ValueError, "seed"),
    ],
)
def test_invalid_arguments_raise(change: dict[str, Any], kind: Any, word: str) -> None:
    arguments = {"kind": rein.PPO, "env": rein.envs.CartPole(6), "learners": 3, **change}
    with pytest.raises(kind, match=word):
        rein.Population(**arguments)


@pytest.mark.parametrize("learners", [3, -1, [0, 1, 2]])
def test_freezing_unknown_or_all_learners_raises(learners: Any) -> None:
    population, _ = made("PPO")
    with pytest.raises(ValueError, match="freeze"):
        population.freeze(learners)


def test_non_finite_gradient_of_one_learner_raises() -> None:
    population, env = made("PPO")
    with torch.no_grad():
        next(iter(population.agent(1).networks.value_head.parameters())).fill_(torch.nan)
    with pytest.raises(NonFiniteError):
        trained(population, env, 4)


def test_rows_that_are_not_equal_parts_raise() -> None:
    population, _ = made("PPO")
    with pytest.raises(ValueError, match="rows"):
        population.select_action(torch.zeros(S * N + 1, 4))


DIFFERENT: dict[str, Any] = {"gamma": [0.9, 0.95, 0.99], "tau": [0.005, 0.1, 1.0]}
REPLAYS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "SAC": (rein.SAC, rein.envs.Pendulum, OFF),
    "SAC, tanh": (rein.SAC, rein.envs.Pendulum, {**OFF, "hidden": (8, 8), "activation": "tanh", "max_grad_norm": 0.1}),
    "SAC, normalized": (rein.SAC, rein.envs.Pendulum, {**OFF, "normalize_observation": True}),
    "SAC, fixed temperature": (rein.SAC, rein.envs.Pendulum, {**OFF, "temperature": [0.1, 0.2, 0.3]}),
    "SAC, delayed": (rein.SAC, rein.envs.Pendulum, {**OFF, "actor_frequency": 2, "update_to_data": 0.75}),
    "SAC, different": (rein.SAC, rein.envs.Pendulum, {**OFF, **DIFFERENT, "target_entropy": [-1.0, -2.0, 0.0]}),
    "SAC, prioritized": (rein.SAC, rein.envs.Pendulum, {**OFF, "prioritized": True, "n_step": 2}),
    "TD3": (rein.TD3, rein.envs.Pendulum, {**OFF, **DIFFERENT}),
    "DDPG": (rein.DDPG, rein.envs.Pendulum, {**OFF, "actor_learning_rate": [1e-4, 1e-3, 1e-2]}),
    "DQN": (rein.DQN, rein.envs.CartPole, {**OFF, **DIFFERENT}),
    "DQN, plain": (rein.DQN, rein.envs.CartPole, {**OFF, "double": False, "huber": None, "target_frequency": 3}),
    "DQN, prioritized": (rein.DQN, rein.envs.CartPole, {**OFF, "prioritized": True, "n_step": 3}),
    "DQN, softmax": (rein.DQN, rein.envs.CartPole, {**OFF, "temperature": [0.1, 1.0, 10.0]}),
}


@pytest.mark.default_cases(
    "SAC", "SAC, normalized", "SAC, fixed temperature", "SAC, delayed", "TD3", "DDPG", "DQN", "DQN, prioritized"
)
@pytest.mark.parametrize("case", REPLAYS)
def test_learners_with_replays_are_computed_together_and_equal_single_agents(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, case, REPLAYS[case])
    population, env = made(case)
    found: list[Any] = []
    with monkeypatch.context() as within:
        within.setattr(Learner, "step", lambda *_, **__: pytest.fail("a learner makes a separate step"))
        loop = rein.training_loop(population, env, iterations=10)
        loop.model_optimized(lambda state: found.append((state.step_state.transition, state.step_state.metrics)))
        loop.run(epochs=1)
    for learner in range(S):
        alone, rows = single(case, learner), slice(learner * N, (learner + 1) * N)
        for transition, metrics in found:
            mine = map_tree(lambda x, rows=rows: x[rows], transition)
            action, _ = alone.select_action(mine.observation)
            assert torch.allclose(action, mine.action, rtol=1e-4, atol=1e-4)
            alone.record_observation(mine)
            theirs = {name: x[learner] for name, x in metrics.items() if name.endswith("_per_learner")}
            expected = alone.optimize_model()
            assert {f"{name}_per_learner" for name in expected} == theirs.keys()
            for name, value in expected.items():
                assert torch.allclose(theirs[f"{name}_per_learner"], value, rtol=1e-3, atol=1e-4), name
        theirs = parameters(population.agent(learner))
        assert (alone.updates, alone.env_steps) == (population.agent(learner).updates, len(found) * N)
        for name, expected in parameters(alone).items():
            assert torch.allclose(theirs[name], expected, rtol=1e-4, atol=1e-4), name


def test_learners_with_guards_and_replays_call_them_at_every_step() -> None:
    calls: list[int] = []
    env = rein.envs.Pendulum(S * N, seed=1)
    guard = lambda metrics, gradients: not calls.append(len(gradients))  # noqa: E731
    population = rein.Population(rein.SAC, env, learners=S, seed=0, guard=guard, **OFF)
    trained(population, env, 4)
    assert len(calls) == S * 3 * population.updates  # critics, actor and temperature


def test_learners_with_different_batch_sizes_learn() -> None:
    population, env = made("SAC")
    population.agent(1).batch_size = 4
    trained(population, env, 4)
    assert [population.agent(i).updates for i in range(S)] == [4] * S


def noise_as_on_a_gpu(learners: int) -> AgentNoise:
    """Return the noise of agents that is computed together, on the CPU."""
    env = rein.envs.CartPole(learners)
    noise = AgentNoise([rein.PPO(env, seed=seed) for seed in range(learners)])
    noise.device = torch.device("cuda")
    return noise


def test_noise_on_a_gpu_has_its_distribution_and_depends_on_the_seed_of_the_learner_and_the_step() -> None:
    noise = noise_as_on_a_gpu(4)
    uniform, normal = noise.uniform(10_000), noise.normal(10_000, 2)
    assert 0.0 <= float(uniform.min()) < float(uniform.max()) < 1.0
    assert torch.allclose(uniform.mean(1), torch.full((4,), 0.5), atol=0.02)
    assert torch.allclose(normal.mean((1, 2)), torch.zeros(4), atol=0.05)
    assert torch.allclose(normal.std((1, 2)), torch.ones(4), atol=0.05)
    assert (
        float(torch.corrcoef(torch.cat((uniform, normal[..., 0], normal[..., 1]))).fill_diagonal_(0.0).abs().max())
        < 0.05
    )
    assert torch.equal(noise_as_on_a_gpu(2).uniform(10_000), uniform[:2])
    noise.agents[0].env_steps += 4
    assert not (noise.uniform(10_000) == uniform).any()


def test_order_of_minibatches_on_a_gpu_is_a_random_permutation_of_each_learner() -> None:
    noise = noise_as_on_a_gpu(3)
    order = noise.orders(103, 4)
    assert order.shape == (3, 4, 25)
    assert all(len(mine.unique()) == 100 for mine in order)
    assert not torch.equal(order[0], order[1])
    noise.agents[0].updates += 4
    assert not torch.equal(noise.orders(103, 4), order)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ["PPO", "PPO with entropy", "PPO, continuous", "A2C", "SAC", "DQN"])
def test_cuda_graphs_change_no_result(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def learned() -> list[Tensor]:
        kind, environment, options = CASES[case]
        env = environment(S * N, seed=1, device="cuda")
        population = rein.Population(kind, env, learners=S, learning_rate=1e-3, seed=0, device="cuda", **options)
        trained(population, env, 20)
        return [p for i in range(S) for p in parameters(population.agent(i)).values()]

    graphs = learned()
    monkeypatch.setattr(compiled, "CAPTURES", {})
    assert all(torch.equal(a, b) for a, b in zip(graphs, learned(), strict=True))


def scores(agents: Sequence[Any], seed: int) -> np.ndarray:
    """Return the mean return of 8 greedy episodes of each agent, in separate environments."""
    environments = [rein.envs.CartPole(8, seed=seed + number) for number in range(len(agents))]
    pairs = zip(agents, environments, strict=True)
    return np.array([rein.evaluate(agent, env, episodes=8).mean_return for agent, env in pairs])


def kolmogorov_smirnov(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference of two empirical distribution functions."""
    both = np.concatenate([a, b])
    shares = [np.searchsorted(np.sort(x), both, side="right") / len(x) for x in (a, b)]
    return np.abs(shares[0] - shares[1]).max()


def p_value(a: np.ndarray, b: np.ndarray) -> float:
    """Return the share of random splits of both samples with a Kolmogorov-Smirnov statistic as large as theirs."""
    both, found, generator = np.concatenate([a, b]), kolmogorov_smirnov(a, b), np.random.default_rng(0)
    splits = (generator.permutation(both) for _ in range(10_000))
    larger = [kolmogorov_smirnov(split[: len(a)], split[len(a) :]) > found - 1e-9 for split in splits]
    return (1 + sum(larger)) / (1 + len(larger))


@pytest.mark.slow
def test_scores_of_learners_are_distributed_as_those_of_single_agents() -> None:
    options: dict[str, Any] = {"hidden": (32, 32), "rollout_steps": 32, "minibatches": 4, "update_epochs": 4}

    def learn(agent: Any, env: Any) -> None:
        rein.training_loop(agent, env, epochs=16, iterations=32).run()  # 4,096 env steps, before all are solved

    def together(seed: int, learning_rate: float) -> list[Any]:
        env = rein.envs.CartPole(32 * 8, seed=seed)
        population = rein.Population(rein.PPO, env, learners=32, seed=seed, learning_rate=learning_rate, **options)
        learn(population, env)
        return [population.agent(number) for number in range(32)]

    singles = []
    for seed in range(100, 132):
        env = rein.envs.CartPole(8, seed=seed)
        singles.append(rein.PPO(env, seed=seed, learning_rate=1e-3, **options))
        learn(singles[-1], env)
    population, single = scores(together(0, 1e-3), 5000), scores(singles, 7000)
    slower = scores(together(1000, 2e-4), 6000)
    print(f"p-values: {p_value(population, single):.4f}, and {p_value(single, slower):.4f} with a lower learning rate")
    assert p_value(population, single) > 0.01
    assert p_value(single, slower) < 0.001


@pytest.mark.parametrize(("name", "values"), [("minibatches", [1, 2, 2]), ("target_kl", [0.01, 0.01, 0.01])])
def test_option_that_cannot_be_computed_together_raises_if_it_is_changed_during_a_run(name: str, values: Any) -> None:
    population, env = made("PPO")
    for i, value in enumerate(values):
        setattr(population.agent(i), name, value)
    with pytest.raises(ValueError, match=name):
        trained(population, env, 4)


@pytest.mark.parametrize("case", ["PPO", "SAC"])
def test_copied_population_learns_as_the_original(case: str) -> None:
    population, env = made(case)
    trained(population, env, 4)
    other, other_env = copy.deepcopy((population, env))
    for one, its_env in ((population, env), (other, other_env)):
        trained(one, its_env, 12)
    assert first_difference(population.state_dict(), other.state_dict()) is None
    assert first_difference(parameters(population.agent(1)), parameters(other.agent(1))) is None


def test_replaced_parameters_are_used() -> None:
    population, env = made("PPO")
    parameter = population.agent(0).networks.hidden.weights[0]
    for each in population.agent(0).networks.parameters():
        each.data = torch.zeros_like(each)
    trained(population, env, 4)
    assert float(parameter.detach().abs().max()) < 0.1  # at most the updates


def test_frozen_learners_do_not_require_that_the_population_selects_the_action() -> None:
    population, env = made("PPO")
    transition = trained(population, env, 4)[-1]
    population.freeze(np.int64(1))
    before = [population.agent(i).env_steps for i in range(S)]
    population.record_observation(transition)
    assert [population.agent(i).env_steps - before[i] for i in range(S)] == [N, 0, N]


def test_options_are_set_for_a_learner_and_not_for_the_population() -> None:
    population, _ = made("PPO")
    with pytest.raises(AttributeError, match="agent"):
        population.learning_rate = 1e-2  # type: ignore[attr-defined]


def test_list_of_seeds_is_part_of_the_config() -> None:
    population = rein.Population(rein.PPO, rein.envs.CartPole(2), learners=2, seed=[5, 9])
    population.reseed(3)
    assert population.config["seed"] == [5, 9]


@pytest.mark.parametrize("case", ["PPO, normalized", "SAC"])
@pytest.mark.parametrize("plain_first", [False, True])
def test_state_loads_with_and_without_accelerators(
    case: str, plain_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, environment, options = CASES[case]

    def run(population: rein.Population, loop: rein.Loop, epochs: int) -> list[Tensor]:
        loop.run(epochs=epochs)
        return [p for i in range(S) for p in parameters(population.agent(i)).values()]

    def build(plain: bool) -> tuple[rein.Population, rein.Loop]:
        monkeypatch.setattr("rein.accelerators.PLAIN", plain)
        env = environment(S * N, seed=1)
        population = rein.Population(kind, env, learners=S, learning_rate=1e-3, seed=0, **options)
        return population, rein.training_loop(population, env, iterations=3)

    whole = run(*build(plain_first), epochs=6)
    population, loop = build(plain_first)
    run(population, loop, epochs=3)  # within a rollout
    other, resumed = build(not plain_first)
    resumed.load_state_dict(copy_state(loop.state_dict()))
    for mine, theirs in zip(run(other, resumed, epochs=6), whole, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


def test_metrics_are_those_of_a_single_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    population, env = made("PPO, continuous")
    seen: list[dict[str, Tensor]] = []
    optimize_model = population.optimize_model
    monkeypatch.setattr(population, "optimize_model", lambda: seen.append(optimize_model()) or seen[-1])
    transitions, alone = trained(population, env, 4), single("PPO, continuous", 0)
    found: dict[str, Tensor] = {}
    for transition in transitions:
        mine = map_tree(lambda x: x[:N], transition)
        action, extras = alone.select_action(mine.observation)
        alone.record_observation(mine._replace(action=action, extras=extras))
        found = alone.optimize_model()
    assert {"log_std", "entropy", "value_loss"} <= found.keys()
    for name, value in found.items():
        assert torch.allclose(seen[-1][f"{name}_per_learner"][0], value, rtol=1e-3, atol=1e-4), name


def saved_bytes(state: Any) -> int:
    """Return the size of all memory that `torch.save` writes."""
    storages = [leaf.untyped_storage() for _, leaf in leaves(state) if isinstance(leaf, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("case", ["PPO", "SAC"])
def test_saved_state_of_a_learner_has_no_memory_of_other_learners(case: str) -> None:
    population, _ = made(case)
    assert saved_bytes(population.agent(1).state_dict()) == saved_bytes(single(case, 1).state_dict())


def test_stacked_adam_equals_a_reference_in_float64() -> None:
    population, _ = made("PPO")
    stacked = population._active.learner
    rates, betas, epsilon = (1e-3, 3e-3, 1e-2), (0.9, 0.999), 1e-5
    stacked.read_options()
    for row, rate in enumerate(rates):
        stacked._rate_S1[row] = rate
    stacked._limit_S1.fill_(math.inf)
    expected, drawn = stacked.networks.flat.double(), torch.Generator().manual_seed(0)
    rate_S1 = torch.tensor(rates, dtype=torch.float64).unsqueeze(1)
    mean, square = torch.zeros_like(expected), torch.zeros_like(expected)
    for step in range(1, 4):
        before = stacked.networks.flat.double()
        gradient = torch.randn(expected.shape, generator=drawn)
        stacked.step(stacked.networks.unflatten(gradient.clone()))
        mean = mean.lerp(gradient.double(), 1 - betas[0])
        square = square.lerp(gradient.double().square(), 1 - betas[1])
        root = (square / (1 - betas[1] ** step)).sqrt() + epsilon
        change = rate_S1 / (1 - betas[0] ** step) * mean / root
        rounding = 2.0**-24 * before.abs()
        assert ((stacked.networks.flat.double() - before + change).abs() <= rounding + 1e-6 * change.abs()).all()
