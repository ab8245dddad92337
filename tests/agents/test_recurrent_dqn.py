"""Recurrent DQN: contract tests, carries, targets, and a task that requires memory.

Shapes: T learned steps, P burn-in steps, B sequences, N environments, C features of a carry.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import rein
from rein.envs.probes import Memory
from rein.networks.recurrent import GRU, LSTM, MinimalGRU
from rein.ops.random import generator
from rein.ops.trees import leaves
from rein.replay.sequences import Clips
from rein.schedules import linear
from rein.testing.stateful import first_difference
from tests.agents.steps import drive

CORES = {kind.__name__: functools.partial(kind, features=6) for kind in (LSTM, GRU, MinimalGRU)}
CORES["two layers"] = functools.partial(MinimalGRU, features=6, layers=2)
SMALL: dict[str, Any] = {
    "core": CORES["LSTM"],
    "sequence_length": 4,
    "burn_in": 2,
    "hidden": (8,),
    "batch_size": 8,
    "learning_starts": 8,
    "capacity": 200,
    "update_to_data": 0.25,
    "tau": 0.1,
}
N = 6


def fitted(environment: Any, **options: Any) -> rein.RecurrentDQN:
    spaces = environment.single_observation_space, environment.single_action_space
    return rein.RecurrentDQN(*spaces, **{**SMALL, **options})


def untrained(**options: Any) -> rein.RecurrentDQN:
    """Return an agent that has acted without learning, so that recorded carries fit its networks."""
    agent = fitted(Memory(1, seed=0), seed=0, train_frequency=10_000, **options)
    with torch.no_grad():  # make the target network differ
        for parameter in agent.networks.target.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator(1, "targets")))
    drive(agent, 40)
    return agent


def step_through(network: Any, agent: rein.RecurrentDQN, clips: Clips, b: int) -> tuple[list[Tensor], list[int]]:
    """Return the values of the valid steps of clip b and of the last next observation, computed step by step."""
    steps = clips.valid[:, b].nonzero().flatten().tolist()
    carry, values = clips.begin["carry"][b : b + 1], []
    for t in steps:
        value, carry = network.step(agent.networks.preprocess(clips.observation[t, b : b + 1]), carry)
        values.append(value[0])
    last = clips.next_observation[steps[-1], b : b + 1]
    return [*values, network.step(agent.networks.preprocess(last), carry)[0][0]], steps


OPTIONS: list[dict[str, Any]] = [{"core": core} for core in CORES.values()]
OPTIONS += [{"burn_in": 0}, {"double": False}, {"dueling": True, "normalize_observation": True}]


@pytest.mark.parametrize("options", OPTIONS)
def test_targets_and_values_match_step_by_step_computation(options: dict[str, Any]) -> None:
    """Both networks start from the recorded carry and run through the burn-in steps."""
    agent = untrained(**options)
    clips, _ = agent.sample()
    batch = agent.batch(clips)
    value_TBA = agent.networks.online.sequence(batch.features, batch.carry)
    burn_in = agent.replay.before
    checked = 0
    with torch.no_grad():
        for b in range(agent.batch_size):
            online, steps = step_through(agent.networks.online, agent, clips, b)
            target, _ = step_through(agent.networks.target, agent, clips, b)
            for k, t in enumerate(steps):
                if t < burn_in:
                    continue
                best = (online if options.get("double", True) else target)[k + 1].argmax()
                bootstrap = 0.0 if clips.terminated[t, b] else agent.gamma * target[k + 1][best]
                torch.testing.assert_close(batch.target[t - burn_in, b], clips.reward[t, b] + bootstrap)
                torch.testing.assert_close(value_TBA[t - burn_in, b], online[k])
                checked += 1
    assert checked == int(batch.valid.sum()) > 0


@pytest.mark.parametrize("core", CORES)
def test_recorded_carry_matches_recomputed_carry(core: str) -> None:
    agent = untrained(core=CORES[core], sequence_length=8, burn_in=3, batch_size=64)
    clips = agent.replay.clips(64, generator(0, "clips"), fields=("carry",), begin=("carry",))
    kept, online = clips.fields["carry"], agent.networks.online
    steps, rows = (clips.valid[1:] & clips.valid[:-1]).nonzero(as_tuple=True)
    assert len(steps) > 64
    with torch.no_grad():
        after = online.step(online.preprocess(clips.observation[steps, rows]), kept[steps, rows])[1]
    torch.testing.assert_close(after, kept[steps + 1, rows])
    at_start = agent.replay._step_SN.view(-1)[clips.row] == 0
    assert (kept[at_start] == 0.0).all()
    assert (kept[clips.valid & ~at_start] != 0.0).any(1).all()


@pytest.mark.parametrize("core", CORES)
def test_reset_clears_the_carry(core: str) -> None:
    """An episode end, an invalid row and a reset outside a step clear the carry. Environment 3 keeps its carry."""
    no, yes = torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)
    found = []
    for past in (-1.0, 1.0):
        agent = fitted(Memory(1, seed=0), seed=0, core=CORES[core], learning_starts=6)
        observation = torch.full((4, 3), past)
        for t in range(3):  # random actions before learning_starts
            action, extras = agent.select_action(observation)
            ended, valid = no.clone(), yes.clone()
            if t == 2:
                ended[0], valid[1] = True, False
            row = (observation, action, torch.zeros(4), ended, no, observation, valid, extras)
            agent.record_observation(rein.Transition(*row))
        agent.select_action(observation)  # not followed by record_observation
        agent.observe_reset(observation, torch.tensor([False, False, True, False]))
        found.append(agent.state_dict()["carry"])
    assert (found[0] == found[1]).all(1).tolist() == [True, True, True, False]
    assert (found[0] == 0.0).all(1).tolist() == [True, True, True, False]


def test_external_actions_advance_the_carry() -> None:
    agents = [fitted(Memory(1, seed=0), seed=0) for _ in range(2)]
    no, observation = torch.zeros(4, dtype=torch.bool), torch.rand(4, 3, generator=generator(0, "rows"))
    for k, agent in enumerate(agents):
        for _ in range(2):
            action = torch.ones(4, dtype=torch.int64)
            if k:
                agent.select_action(observation)
            agent.record_observation(rein.Transition(observation, action, torch.zeros(4), no, no, observation, ~no, {}))
    one, other = (agent.state_dict()["carry"] for agent in agents)
    assert (one != 0.0).any(1).all()
    assert torch.equal(one, other)


def test_extra_select_action_does_not_change_the_carry() -> None:
    agents = [fitted(Memory(1, seed=0), seed=0, learning_starts=0) for _ in range(2)]
    no, observation = torch.zeros(4, dtype=torch.bool), torch.rand(4, 3, generator=generator(0, "rows"))
    for extra_call, agent in enumerate(agents):
        action, _ = agent.select_action(observation)
        if extra_call:
            agent.select_action(torch.zeros_like(observation))
        agent.record_observation(rein.Transition(observation, action, torch.zeros(4), no, no, observation, ~no, {}))
    one, other = (agent.state_dict()["carry"] for agent in agents)
    assert (one != 0.0).any(1).all() and torch.equal(one, other)


def test_step_recorded_after_reset_updates_the_carry() -> None:
    agent = fitted(Memory(1, seed=0), seed=0, learning_starts=0)
    no, observation = torch.zeros(4, dtype=torch.bool), torch.rand(4, 3, generator=generator(0, "rows"))
    for reset in (False, True):
        action, _ = agent.select_action(observation)
        if reset:
            agent.observe_reset(observation, ~no)
        agent.record_observation(rein.Transition(observation, action, torch.zeros(4), no, no, observation, ~no, {}))
        carry = agent.state_dict()["carry"]
        assert (carry != 0.0).any(1).all()


def test_padding_has_no_effect() -> None:
    agent = untrained(sequence_length=8, burn_in=3)
    clips, _ = agent.sample()
    hidden = ~clips.valid
    assert hidden[:3].any() and hidden[3:].any()
    flat = hidden.unsqueeze(-1)
    garbage = clips._replace(
        observation=torch.where(flat, 1e3, clips.observation),
        next_observation=torch.where(flat, -1e3, clips.next_observation),
        reward=clips.reward.masked_fill(hidden, 1e6),
        terminated=clips.terminated ^ hidden,
        action=torch.where(hidden, 1 - clips.action, clips.action),
    )
    learned = []
    for each in (clips, garbage):
        other = untrained(sequence_length=8, burn_in=3)
        other.learners["values"].optimizer.param_groups[0]["lr"] = 0.1
        metrics, error_B = other.update_from(each, None, True)
        learned.append((dict(other.networks.state_dict()), metrics, error_B))
    for (path, one), (_, two) in zip(*(leaves(each) for each in learned), strict=True):
        torch.testing.assert_close(one, two, msg=path)


@pytest.mark.parametrize("options", OPTIONS)
def test_observation_after_termination_has_no_effect_even_if_nan(options: dict[str, Any]) -> None:
    first = untrained(**options)
    clips, _ = first.sample()
    assert clips.terminated[first.replay.before :].any()
    over = clips.terminated.unsqueeze(-1)
    learned = []
    for after in (0.5, torch.nan):
        agent = untrained(**options)
        each = clips._replace(next_observation=torch.where(over, after, clips.next_observation))
        metrics, error_B = agent.update_from(each, None, True)
        learned.append((dict(agent.networks.state_dict()), metrics, error_B))
    assert all(torch.isfinite(value).all() for _, value in leaves(learned[1]))
    assert first_difference(*learned) is None


def test_burn_in_updates_the_carry_without_gradient() -> None:
    agent = untrained(sequence_length=2, burn_in=4, batch_size=32)
    clips, _ = agent.sample()
    batch = agent.batch(clips)
    assert not any(part.requires_grad for part in batch if part is not None)
    assert batch.size == 32 and len(batch.target) == 2
    shorter_than_burn_in = clips.first < 4
    assert shorter_than_burn_in.any() and not shorter_than_burn_in.all()
    same = (batch.carry == clips.begin["carry"]).all(1)
    assert torch.equal(same, ~shorter_than_burn_in)


@pytest.mark.default_cases("24")
@pytest.mark.parametrize("micro_batch", [1, 12, 24])
def test_micro_batches_of_sequences_change_rounding_only(micro_batch: int) -> None:
    def run(**options: Any) -> Any:
        agent = fitted(Memory(1, seed=0), seed=0, **options)
        drive(agent, 20)
        return agent

    whole, parts = run(), run(micro_batch=micro_batch)
    assert whole.updates == parts.updates > 10
    for one, other in zip(whole.networks.parameters(), parts.networks.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5)


def test_action_space_start_is_respected() -> None:
    agent = rein.RecurrentDQN(spaces.Box(0.0, 1.0, (3,)), spaces.Discrete(2, start=5), **SMALL, seed=0)
    drive(agent, 10)
    assert set(agent.replay.columns["action"].flatten().tolist()) == {5, 6}
    assert set(agent.batch(agent.sample()[0]).action.flatten().tolist()) == {0, 1}
    assert agent.policy().select_action(torch.rand(9, 3))[0].min() >= 5


def test_learns_from_images() -> None:
    agent = rein.RecurrentDQN(spaces.Box(0, 255, (3, 36, 36), "uint8"), spaces.Discrete(2), **SMALL, seed=0)
    drawn, no = generator(0, "images"), torch.zeros(2, dtype=torch.bool)
    reported: dict[str, Tensor] = {}
    for _ in range(8):
        image = torch.randint(256, (2, 3, 36, 36), generator=drawn, dtype=torch.uint8)
        action, _ = agent.select_action(image)
        agent.record_observation(rein.Transition(image, action, torch.ones(2), no, no, image, ~no, {}))
        reported = agent.optimize_model() or reported
    assert set(reported) == set(rein.RecurrentDQN.reports)


MEMORY: dict[str, Any] = {
    "hidden": (16,),
    "batch_size": 32,
    "learning_rate": 1e-2,
    "gamma": 0.9,
    "learning_starts": 100,
    "train_frequency": 16,
    "update_to_data": 1 / 16,
    "tau": 0.05,
    "epsilon": linear(1.0, 0.05, env_steps=1600),
    "capacity": 10_000,
    "seed": 0,
}


def recalled(kind: Any, steps: int, **options: Any) -> float:
    environment = Memory(16, cues=4, delay=2, seed=0)
    agent = kind(environment.single_observation_space, environment.single_action_space, **{**MEMORY, **options})
    rein.train(agent, environment, epochs=1, iterations=steps)
    return rein.evaluate(agent.policy(), Memory(256, cues=4, delay=2, seed=1), 256).mean_return


@pytest.mark.default_cases("MinimalGRU-1")
@pytest.mark.parametrize("burn_in", [0, 1])
@pytest.mark.parametrize("kind", [LSTM, MinimalGRU])
def test_solves_memory_task(kind: Any, burn_in: int) -> None:
    core = functools.partial(kind, features=16)
    assert recalled(rein.RecurrentDQN, 200, core=core, sequence_length=4, burn_in=burn_in) >= 0.95


@pytest.mark.slow
def test_options_of_r2d2_solve_memory_task() -> None:
    options: dict[str, Any] = {"n_step": 3, "prioritized": True, "value_rescaling": True}
    core = functools.partial(MinimalGRU, features=16)
    assert recalled(rein.RecurrentDQN, 200, core=core, sequence_length=4, burn_in=1, **options) >= 0.95


def test_dqn_without_core_stays_at_chance() -> None:
    assert abs(recalled(rein.DQN, 200) - 0.25) < 0.1
