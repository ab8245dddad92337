"""Hooks that users register on parameters and modules fire in every update of every agent."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rein
from rein.agents.base.learner import Batch

ROLLOUT = {"hidden": (8,), "rollout_steps": 8}
REPLAY = {"hidden": (8,), "batch_size": 8, "capacity": 200, "learning_starts": 0}
CASES: dict[str, tuple[Any, Any, dict[str, Any], list[str]]] = {  # last item: modules whose forward is called
    "PPO": (rein.PPO, rein.envs.CartPole, ROLLOUT, ["hidden", "policy_head.linear", "value_head"]),
    "PPO, continuous": (rein.PPO, rein.envs.Pendulum, ROLLOUT, ["hidden", "policy_head.linear", "value_head"]),
    "PPO, parts": (rein.PPO, rein.envs.CartPole, {**ROLLOUT, "micro_batch": 2, "threads": 2}, ["hidden"]),
    "PQN": (rein.PQN, rein.envs.CartPole, ROLLOUT, ["hidden", "head"]),
    "DQN": (rein.DQN, rein.envs.CartPole, REPLAY, ["online.hidden", "online.head"]),
    "IQN": (rein.IQN, rein.envs.CartPole, REPLAY, ["online.head"]),
    "DDPG": (rein.DDPG, rein.envs.Pendulum, REPLAY, ["actor.hidden", "critics", "critics.hidden"]),
    "TD3": (rein.TD3, rein.envs.Pendulum, REPLAY, ["actor.hidden", "critics", "critics.hidden"]),
    "SAC": (rein.SAC, rein.envs.Pendulum, REPLAY, ["actor.hidden", "critics", "critics.hidden"]),
    "DiscreteSAC": (rein.DiscreteSAC, rein.envs.CartPole, REPLAY, ["actor.hidden", "critics.hidden"]),
    "AWAC": (rein.AWAC, rein.envs.Pendulum, REPLAY, ["actor.hidden", "critics", "critics.hidden"]),
    "IQL": (rein.IQL, rein.envs.Pendulum, REPLAY, ["actor.hidden", "critics", "critics.hidden", "state_value.hidden"]),
    "BC": (rein.BC, rein.envs.Pendulum, REPLAY, ["actor.hidden"]),
}


def build(case: str, **options: Any) -> tuple[Any, rein.Loop]:
    kind, world, defaults, _ = CASES[case]
    environment = world(num_envs=2, seed=0)
    spaces = environment.single_observation_space, environment.single_action_space
    agent = kind(*spaces, seed=0, **defaults, **options)
    return agent, rein.training_loop(agent, environment, iterations=16)


def learned(agent: Any) -> dict[str, Tensor]:
    """Return the trained parameters by name."""
    named = agent.networks.named_parameters()
    return {name: p for name, p in named if p.requires_grad and not name.startswith("target")}


@pytest.mark.default_cases(every=3)
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("case", CASES)
def test_hook_on_a_parameter_fires(case: str, kind: str) -> None:
    agent, loop = build(case)
    fired = set()
    for name, parameter in learned(agent).items():
        getattr(parameter, kind)(lambda _, name=name: fired.add(name))
    loop.run()
    assert fired == learned(agent).keys()


@pytest.mark.default_cases(every=4)
@pytest.mark.parametrize("kind", ["register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # observations require no gradient
def test_hook_on_a_module_fires_in_updates(case: str, kind: str) -> None:
    agent, loop = build(case)
    fired, names = set(), CASES[case][3]
    for name in names:

        def hook(*_: Any, name: str = name) -> None:
            if torch.is_grad_enabled() or kind == "register_full_backward_hook":
                fired.add(name)

        getattr(agent.networks.get_submodule(name), kind)(hook)
    loop.run()
    assert fired == set(names)


@pytest.mark.default_cases(every=3)
@pytest.mark.parametrize("case", CASES)
def test_loss_hook_replaces_the_minimized_loss(case: str) -> None:
    agent, loop = build(case)
    before = {name: p.detach().clone() for name, p in learned(agent).items()}
    seen = set()

    def scaled(name: str, loss: Tensor, batch: Batch) -> Tensor:
        assert loss.requires_grad and batch.size > 0
        seen.add(name)
        return loss * 0.0

    for name, learner in agent.learners.items():
        learner.on_loss = functools.partial(scaled, name)
    loop.run()
    assert agent.updates and seen == agent.learners.keys()
    for name, parameter in learned(agent).items():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("case", ["PPO", "SAC", "DQN"])
def test_read_only_hooks_change_rounding_only(case: str) -> None:
    (hooked, loop), (plain, other) = build(case), build(case)
    seen: list[Tensor] = []
    for parameter in learned(hooked).values():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    loop.run()
    other.run()
    assert seen
    torch.testing.assert_close(learned(hooked), learned(plain), atol=1e-6, rtol=1e-5)
    assert all(parameter.grad is None for parameter in hooked.networks.parameters())


def test_hook_can_zero_gradients_until_removed() -> None:
    agent, loop = build("PPO, parts")
    before = {name: p.detach().clone() for name, p in learned(agent).items()}

    def zero(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.zero_()

    handles = [parameter.register_post_accumulate_grad_hook(zero) for parameter in learned(agent).values()]
    loop.run(epochs=1)
    torch.testing.assert_close(dict(learned(agent)), before, atol=0.0, rtol=0.0)
    for handle in handles:
        handle.remove()
    loop.run(epochs=2)
    assert all(not torch.equal(p, before[name]) for name, p in learned(agent).items())


@pytest.mark.parametrize("case", ["PPO", "SAC"])
def test_hooks_fire_with_compile(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a compiled function was called")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: refuse)
    agent, loop = build(case, compile=True)
    fired = set()
    for name, module in agent.networks.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_, name=name: fired.add(name))
    for parameter in learned(agent).values():
        parameter.register_hook(lambda _: None)
    loop.run()
    assert fired
