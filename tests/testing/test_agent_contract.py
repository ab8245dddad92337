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


class TestAnAgentThatKeepsTheContract(AgentContract):
    kind: Callable[..., Any] = QLearning

    def make(self, seed: int | None) -> Any:
        board = Gridworld(num_envs=1)
        return type(self).kind(board.single_observation_space, board.single_action_space, epsilon=0.3, seed=seed)

    def environment(self, num_envs: int, seed: int) -> Gridworld:
        return Gridworld(num_envs=num_envs, seed=seed, max_episode_steps=9)


class LeavesTheActionSpace(QLearning):
    def select_action(self, observation: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        action, extras = super().select_action(observation)
        return action + 1, extras


class ActsWithAGraph(QLearning):
    def select_action(self, observation: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return super().select_action(observation)[0], {"value": torch.zeros(len(observation), requires_grad=True)}


class ReportsANumberThatIsNone(QLearning):
    def optimize_model(self) -> dict[str, Any]:
        return {name: float("nan") for name in super().optimize_model()}


class ReportsAGraph(QLearning):
    def optimize_model(self) -> dict[str, Any]:
        return {name: torch.zeros((), requires_grad=True) for name in super().optimize_model()}


class CountsStepsForRows(QLearning):
    def record_observation(self, transition: Transition) -> None:
        steps = self.env_steps
        super().record_observation(transition)
        self.env_steps = steps + 1


class CountsUpdatesThatItDoesNotMake(QLearning):
    def optimize_model(self) -> dict[str, Any]:
        super().optimize_model()
        return {}


class NeverLearns(QLearning):
    def record_observation(self, transition: Transition) -> None:
        super().record_observation(transition._replace(valid=torch.zeros_like(transition.valid)))


class LearnsFromRowsThatAreNotValid(QLearning):
    def record_observation(self, transition: Transition) -> None:
        super().record_observation(transition._replace(valid=torch.ones_like(transition.valid)))


class BootstrapsFromTheTerminalState(QLearning):
    """The ancestor's B15."""

    def record_observation(self, transition: Transition) -> None:
        super().record_observation(transition._replace(terminated=torch.zeros_like(transition.terminated)))


class TakesTruncationForTermination(QLearning):
    def record_observation(self, transition: Transition) -> None:
        super().record_observation(transition._replace(terminated=transition.terminated | transition.truncated))


class IsItsOwnPolicy(QLearning):
    def policy(self, deterministic: bool = True) -> Any:
        return self

    def reset(self, mask: Tensor | None = None) -> None:
        pass


class GivesACopyForAPolicy(QLearning):
    def policy(self, deterministic: bool = True) -> Any:
        policy = super().policy(deterministic)
        policy._agent = copy.deepcopy(self)
        return policy


class DrawsFromTheGlobalGenerator(QLearning):
    def select_action(self, observation: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.randint(4, (len(observation),)), {}


class IgnoresItsSeed(QLearning):
    def build(self, generator: torch.Generator) -> None:
        self.generator.seed()
        super().build(generator)


class ReseedsItsNameOnly(QLearning):
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


INVALID_CONTENT = "test_what_stands_in_invalid_rows_does_not_matter"
INVALID_ALONE = "test_rows_that_are_not_valid_teach_nothing"
TERMINATED = "test_a_terminated_row_does_not_look_at_its_next_observation"
TRUNCATED = "test_a_truncated_row_looks_at_its_next_observation"
STATE = "test_its_state_fulfils_the_contract_of_states"


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (HasNoUpdates, "test_it_is_an_agent"),
        (LeavesTheActionSpace, "test_actions_lie_in_the_action_space"),
        (ActsWithAGraph, "test_actions_lie_in_the_action_space"),
        (ReportsANumberThatIsNone, "test_metrics_are_finite_and_carry_no_graph"),
        (ReportsAGraph, "test_metrics_are_finite_and_carry_no_graph"),
        (CountsUpdatesThatItDoesNotMake, "test_metrics_are_finite_and_carry_no_graph"),
        (CountsUpdatesThatItDoesNotMake, "test_it_counts_env_steps_and_updates"),
        (CountsStepsForRows, "test_it_counts_env_steps_and_updates"),
        (NeverLearns, "test_learning_changes_what_is_learned"),
        (LearnsFromRowsThatAreNotValid, INVALID_ALONE),
        (LearnsFromRowsThatAreNotValid, INVALID_CONTENT),
        (BootstrapsFromTheTerminalState, TERMINATED),
        (BootstrapsFromTheTerminalState, TRUNCATED),
        (TakesTruncationForTermination, TRUNCATED),
        (IsItsOwnPolicy, "test_evaluating_a_policy_never_changes_the_agent"),
        (GivesACopyForAPolicy, "test_a_policy_follows_the_parameters"),
        (DrawsFromTheGlobalGenerator, "test_the_same_seed_gives_the_same_bits"),
        (IgnoresItsSeed, "test_the_same_seed_gives_the_same_bits"),
        (ReseedsItsNameOnly, "test_reseeding_is_being_built_with_that_seed"),
        (ReseedsAtAnyTime, "test_reseeding_is_refused_after_the_first_step"),
        (ForgetsItsGenerator, STATE),
        (ForgetsItsCounts, STATE),
    ],
)
def test_a_broken_agent_fails_the_contract(kind: type, test: str) -> None:
    contract = type("Broken", (TestAnAgentThatKeepsTheContract,), {"kind": kind})()
    with pytest.raises(AssertionError):
        getattr(contract, test)()


def test_an_agent_that_looks_at_no_next_observation_may_say_so() -> None:
    class Myopic(QLearning):
        def record_observation(self, transition: Transition) -> None:
            super().record_observation(transition._replace(terminated=torch.ones_like(transition.terminated)))

    contract = type("Bandit", (TestAnAgentThatKeepsTheContract,), {"kind": Myopic, "bootstraps": False})()
    getattr(contract, TRUNCATED)()
    contract.bootstraps = True
    with pytest.raises(AssertionError):
        getattr(contract, TRUNCATED)()
