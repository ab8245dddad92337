from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.testing import AgentContract
from rein.types import Transition


class TestCorrectAgent(AgentContract):
    kind: Callable[..., Any] = QLearning

    def make(self, seed: int | None) -> Any:
        board = Gridworld(num_envs=1)
        return type(self).kind(board.single_observation_space, board.single_action_space, epsilon=0.3, seed=seed)

    def environment(self, num_envs: int, seed: int) -> Gridworld:
        return Gridworld(num_envs=num_envs, seed=seed, max_episode_steps=9)


class ActsOutsideActionSpace(QLearning):
    def select_action(self, observation: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        action, extras = super().select_action(observation)
        return action + 1, extras


class ActsWithGradient(QLearning):
    def select_action(self, observation: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return super().select_action(observation)[0], {"value": torch.zeros(len(observation), requires_grad=True)}


class ReportsNaN(QLearning):
    def optimize_model(self) -> dict[str, Any]:
        return {name: float("nan") for name in super().optimize_model()}


class ReportsGradient(QLearning):
    def optimize_model(self) -> dict[str, Any]:
        return {name: torch.zeros((), requires_grad=True) for name in super().optimize_model()}


class CountsVectorSteps(QLearning):
    def record_observation(self, transition: Transition) -> None:
        steps = self.env_steps
        super().record_observation(transition)
        self.env_steps = steps + 1


class ReportsNoMetrics(QLearning):
    def optimize_model(self) -> dict[str, Any]:
        super().optimize_model()
        return {}


class NeverLearns(QLearning):
    def record_observation(self, transition: Transition) -> None:
        super().record_observation(transition._replace(valid=torch.zeros_like(transition.valid)))


class LearnsFromInvalidRows(QLearning):
    def record_observation(self, transition: Transition) -> None:
        super().record_observation(transition._replace(valid=torch.ones_like(transition.valid)))


class BootstrapsTerminatedRows(QLearning):
    def record_observation(self, transition: Transition) -> None:
        super().record_observation(transition._replace(terminated=torch.zeros_like(transition.terminated)))


class TreatsTruncationAsTermination(QLearning):
    def record_observation(self, transition: Transition) -> None:
        super().record_observation(transition._replace(terminated=transition.terminated | transition.truncated))


class IsItsOwnPolicy(QLearning):
    def policy(self, deterministic: bool = True) -> Any:
        return self

    def reset(self, mask: Tensor | None = None) -> None:
        pass


class ReturnsCopyAsPolicy(QLearning):
    def policy(self, deterministic: bool = True) -> Any:
        policy = super().policy(deterministic)
        policy._agent = copy.deepcopy(self)
        return policy


class UsesGlobalGenerator(QLearning):
    def select_action(self, observation: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.randint(4, (len(observation),)), {}


class IgnoresItsSeed(QLearning):
    def build(self, generator: torch.Generator) -> None:
        self.generator.seed()
        super().build(generator)


class ReseedsAttributeOnly(QLearning):
    def reseed(self, seed: int) -> None:
        vars(self)["seed"] = seed


class ReseedsAtAnyTime(QLearning):
    def reseed(self, seed: int) -> None:
        self.env_steps = 0
        super().reseed(seed)


class ForgetsItsGenerator(QLearning):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({**state, "generator": self.generator.get_state()})


class ForgetsItsCounts(QLearning):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.updates = 0


class HasNoUpdates(QLearning):
    updates = property(lambda self: None, lambda self, value: None)


INVALID_CONTENT = "test_content_of_invalid_rows_is_ignored"
INVALID_ROWS = "test_invalid_rows_change_no_parameters"
TERMINATED = "test_terminated_row_does_not_bootstrap"
TRUNCATED = "test_truncated_row_bootstraps"
STATE = "test_state_fulfills_stateful_contract"


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (HasNoUpdates, "test_implements_agent_protocol"),
        (ActsOutsideActionSpace, "test_actions_are_in_action_space"),
        (ActsWithGradient, "test_actions_are_in_action_space"),
        (ReportsNaN, "test_metrics_are_finite_and_detached"),
        (ReportsGradient, "test_metrics_are_finite_and_detached"),
        (ReportsNoMetrics, "test_metrics_are_finite_and_detached"),
        (ReportsNoMetrics, "test_counts_env_steps_and_updates"),
        (CountsVectorSteps, "test_counts_env_steps_and_updates"),
        (NeverLearns, "test_learning_changes_parameters"),
        (LearnsFromInvalidRows, INVALID_ROWS),
        (LearnsFromInvalidRows, INVALID_CONTENT),
        (BootstrapsTerminatedRows, TERMINATED),
        (BootstrapsTerminatedRows, TRUNCATED),
        (TreatsTruncationAsTermination, TRUNCATED),
        (IsItsOwnPolicy, "test_policy_does_not_change_agent"),
        (ReturnsCopyAsPolicy, "test_policy_follows_parameters"),
        (UsesGlobalGenerator, "test_same_seed_gives_same_state"),
        (IgnoresItsSeed, "test_same_seed_gives_same_state"),
        (ReseedsAttributeOnly, "test_reseed_equals_building_with_seed"),
        (ReseedsAtAnyTime, "test_reseed_after_first_step_raises"),
        (ForgetsItsGenerator, STATE),
        (ForgetsItsCounts, STATE),
    ],
)
def test_broken_agent_fails_contract(kind: type, test: str) -> None:
    contract = type("Broken", (TestCorrectAgent,), {"kind": kind})()
    with pytest.raises(AssertionError):
        getattr(contract, test)()


def test_agent_may_declare_that_it_does_not_bootstrap() -> None:
    class Myopic(QLearning):
        def record_observation(self, transition: Transition) -> None:
            super().record_observation(transition._replace(terminated=torch.ones_like(transition.terminated)))

    contract = type("Bandit", (TestCorrectAgent,), {"kind": Myopic, "bootstraps": False})()
    getattr(contract, TRUNCATED)()
    contract.bootstraps = True
    with pytest.raises(AssertionError):
        getattr(contract, TRUNCATED)()
