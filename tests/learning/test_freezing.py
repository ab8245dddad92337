"""Parameters with `requires_grad=False` do not change, for every way to compute the gradient of the others."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import rein
from rein.accelerate.fast_learner import FastLearner
from rein.agents.base.actor_and_critics import critic_loss
from rein.agents.base.data_parallel import average
from rein.agents.base.learner import Batch
from rein.envs.probes import Corridor
from rein.networks.off_policy import Critics, Layers
from rein.networks.recurrent import GRU
from rein.ops.random import generator
from rein.testing.stateful import copy_state, first_difference


class CustomEncoder(torch.nn.Sequential):
    """Encoder of the single number that a `Corridor` observes."""

    features = 4

    def __init__(self, space: Any, drawn: torch.Generator) -> None:
        super().__init__(torch.nn.Linear(1, 4), torch.nn.Tanh())


ROLLOUT: dict[str, Any] = {"rollout_steps": 4, "hidden": (8,)}
REPLAY: dict[str, Any] = {"hidden": (8,), "batch_size": 8, "capacity": 200, "learning_starts": 0, "tau": 0.5}
SEQUENCES: dict[str, Any] = {**REPLAY, "sequence_length": 4, "burn_in": 0, "learning_starts": 16}
HALF = {"precision": "bfloat16"}
DECAY: Any = {"optimizer": functools.partial(torch.optim.AdamW, weight_decay=0.1)}
CASES: dict[str, tuple[Any, bool, str, dict[str, Any]]] = {  # kind, whether actions are continuous, frozen part
    "PPO": (rein.PPO, False, "hidden", ROLLOUT),
    "PPO, a head": (rein.PPO, True, "value_head", ROLLOUT),
    "PPO, a number": (rein.PPO, True, "policy_head.log_std", ROLLOUT),
    "PPO, half": (rein.PPO, True, "hidden", ROLLOUT | HALF),
    "PPO, a core": (rein.PPO, False, "cores", ROLLOUT | {"core": functools.partial(GRU, features=4), "minibatches": 1}),
    "PPO, an encoder": (rein.PPO, True, "encoder", ROLLOUT | {"encoder": CustomEncoder}),
    "PPO, behind an encoder": (rein.PPO, True, "hidden", ROLLOUT | {"encoder": CustomEncoder}),
    "PPO, parts": (rein.PPO, False, "hidden", ROLLOUT | {"micro_batch": 2, "threads": 2}),
    "PPO, decay": (rein.PPO, False, "hidden", ROLLOUT | DECAY),
    "A2C": (rein.A2C, True, "hidden", ROLLOUT),
    "IMPALA": (rein.IMPALA, True, "policy_head", ROLLOUT),
    "PQN": (rein.PQN, False, "hidden", ROLLOUT),
    "DQN": (rein.DQN, False, "online.hidden", REPLAY),
    "DQN, dueling": (rein.DQN, False, "online.hidden", REPLAY | {"dueling": True}),
    "DQN, an encoder": (rein.DQN, False, "online.encoder", REPLAY | {"encoder": CustomEncoder}),
    "DQN, half": (rein.DQN, False, "online.head", REPLAY | HALF),
    "IQN": (rein.IQN, False, "online.embedding", REPLAY),
    "RecurrentDQN": (rein.RecurrentDQN, False, "online.hidden", SEQUENCES),
    "DDPG": (rein.DDPG, True, "actor", REPLAY),
    "DDPG, decay": (rein.DDPG, True, "actor.hidden", REPLAY | DECAY),
    "TD3": (rein.TD3, True, "critics", REPLAY),
    "SAC": (rein.SAC, True, "actor", REPLAY),
    "SAC, a part": (rein.SAC, True, "critics.hidden", REPLAY),
    "SAC, an encoder": (rein.SAC, True, "critics.encoder", REPLAY | {"encoder": CustomEncoder}),
    "SAC, temperature": (rein.SAC, True, "temperature", REPLAY),
    "SAC, half": (rein.SAC, True, "actor", REPLAY | HALF),
    "DiscreteSAC": (rein.DiscreteSAC, False, "actor", REPLAY),
    "BC": (rein.BC, True, "actor.hidden", REPLAY),
    "AWAC": (rein.AWAC, True, "actor", REPLAY),
    "IQL": (rein.IQL, True, "state_value", REPLAY),
}


def made(kind: Any, continuous: bool, **options: Any) -> tuple[Any, Corridor]:
    environment = Corridor(2, length=3, continuous=continuous, seed=0, max_episode_steps=8)
    spaces_of = environment.single_observation_space, environment.single_action_space
    return kind(*spaces_of, **{"seed": 0, "learning_rate": 1e-2, **options}), environment


def split(agent: Any, frozen: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return copies of the frozen parameters and of the other learned parameters."""
    parameters = {name: x for name, x in agent.networks.named_parameters() if "target" not in name}
    chosen = {name for name in parameters if name.startswith(frozen)}
    assert chosen
    copies = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    return {name: copies[name] for name in chosen}, {name: copies[name] for name in copies.keys() - chosen}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    return [name for name in before if not torch.equal(before[name], after[name])]


def freeze(agent: Any, frozen: str, free: bool = False) -> None:
    for name, parameter in agent.networks.named_parameters():
        if name.startswith(frozen):
            parameter.requires_grad_(free)


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("case", CASES)
def test_parameters_frozen_during_a_run_do_not_change(case: str) -> None:
    """Neither gradients, momentum nor weight decay change frozen parameters, until they are unfrozen."""
    kind, continuous, frozen, options = CASES[case]
    agent, environment = made(kind, continuous, **options)
    rein.train(agent, environment, env_steps=32)  # the optimizer has momentum now
    frozen_before, rest = split(agent, frozen)
    updates = agent.updates
    freeze(agent, frozen)
    final = rein.train(agent, environment, env_steps=32)
    assert agent.updates > updates and {*agent.reports} <= {*final.metrics}
    frozen_after, after_rest = split(agent, frozen)
    assert moved(frozen_before, frozen_after) == []
    assert moved(rest, after_rest)
    freeze(agent, frozen, free=True)
    rein.train(agent, environment, env_steps=32)
    assert moved(frozen_before, split(agent, frozen)[0])


@pytest.mark.parametrize("case", ["PPO", "PQN", "DQN, dueling", "DDPG, decay", "SAC", "SAC, half", "BC"])
def test_updates_with_all_parameters_frozen_change_nothing(case: str) -> None:
    kind, continuous, _, options = CASES[case]
    calls: list[int] = []
    agent, environment = made(kind, continuous, **options, guard=lambda metrics, gradients: calls.append(1) is None)
    rein.train(agent, environment, env_steps=32)
    freeze(agent, "")
    before, updates, times = split(agent, ""), agent.updates, len(calls)
    optimizers = copy_state({name: value for name, value in agent.state_dict().items() if name == "learners"})
    final = rein.train(agent, environment, env_steps=32)
    assert agent.updates > updates and {*agent.reports} <= {*final.metrics}
    assert moved(before[0], split(agent, "")[0]) == [] and len(calls) == times
    after = {name: value for name, value in agent.state_dict().items() if name == "learners"}
    assert optimizers and first_difference(optimizers, after) is None


def test_targets_still_follow_frozen_networks() -> None:
    agent, environment = made(rein.DDPG, True, **{**REPLAY, "tau": 0.05})
    rein.train(agent, environment, env_steps=32)
    freeze(agent, "actor")
    pair = [*agent.networks.target_actor.parameters()], [*agent.networks.actor.parameters()]
    apart = [float((a - b).detach().norm()) for a, b in zip(*pair, strict=True)]
    rein.train(agent, environment, env_steps=128)
    closer = [float((a - b).detach().norm()) for a, b in zip(*pair, strict=True)]
    assert all(now < 0.1 * then for now, then in zip(closer, apart, strict=True))


def test_parameters_stay_frozen_when_the_loop_sets_the_seed() -> None:
    agent, environment = made(rein.DDPG, True, **REPLAY, seed=None)
    freeze(agent, "actor")
    loop = rein.training_loop(agent, environment, seed=3, iterations=16)
    before = split(agent, "actor")[0]
    loop.run()
    assert agent.updates and moved(before, split(agent, "actor")[0]) == []


M, F, A = 24, 3, 2


def critics_and_batch() -> tuple[Critics, Batch]:
    critics = Critics(2, F, A, Layers((8, 8), "relu", generator(0, "networks")))
    columns = [torch.randn(M, *shape, generator=generator(1, "rows", len(shape))) for shape in ((F,), ())]
    return critics, Batch(columns[0], columns[0][:, :A].tanh(), target=columns[1])


def step(frozen: list[str], **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters and the metrics after a step of SGD with learning rate 1."""
    critics, batch = critics_and_batch()
    for name, parameter in critics.named_parameters():
        parameter.requires_grad_(name not in frozen)
    sgd: Any = functools.partial(torch.optim.SGD, lr=1.0)
    learner = FastLearner(critics, critic_loss, sgd, max_grad_norm=None, **options)
    metrics = learner.step(batch, None)
    return {name: x.detach().clone() for name, x in critics.named_parameters()}, metrics


@pytest.mark.parametrize("options", [{}, {"micro_batch": 5}, {"micro_batch": 5, "threads": 2}], ids=str)
@pytest.mark.parametrize("kept", [0, 1, 3])
def test_other_parameters_change_as_without_freezing(kept: int, options: dict[str, Any]) -> None:
    initial = {name: x.detach().clone() for name, x in critics_and_batch()[0].named_parameters()}
    frozen = [name for place, name in enumerate(initial) if place % 4 == kept]
    whole, metrics = step([], **options)
    part, part_metrics = step(frozen, **options)
    for name, parameter in part.items():
        torch.testing.assert_close(parameter, initial[name] if name in frozen else whole[name], rtol=1e-5, atol=1e-6)
        assert name not in frozen or torch.equal(parameter, initial[name])
    assert metrics.keys() == part_metrics.keys() and part_metrics["grad_norm"] < metrics["grad_norm"]


@pytest.mark.filterwarnings("ignore:.*autograd functions are all static")  # raised by torch
def test_freezing_during_a_run_works_with_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a fast backend that traces the same program."""
    torch._dynamo.reset()
    back_end = functools.partial(torch.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", back_end)
    ended = []
    for compile in (False, True):
        critics, batch = critics_and_batch()
        sgd: Any = functools.partial(torch.optim.SGD, lr=0.1)
        how: dict[str, Any] = {"max_grad_norm": 1.0, "compile": compile}
        learner = FastLearner(critics, critic_loss, sgd, **how)
        for part, free in (("", True), ("hidden", False), ("hidden", True), ("", False)):
            frozen = critics.get_submodule(part).requires_grad_(free)
            before = copy_state(frozen.state_dict())
            learner.step(batch, None)
            assert (first_difference(before, copy_state(frozen.state_dict())) is None) == (not free)
        ended.append(dict(critics.state_dict()))
    torch.testing.assert_close(*ended, rtol=1e-5, atol=1e-6)


def test_average_without_gradients_needs_no_communication() -> None:
    rows = torch.ones(3)
    assert average([None, None], {"td_error": rows}, 3) == ([None, None], {"td_error": rows})
