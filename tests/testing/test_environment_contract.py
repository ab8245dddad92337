"""Tests that EnvironmentContract finds faults, with environments that each have one fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
import torch

from rein.envs.base.worlds import SimulatedWorlds
from rein.envs.gridworld import Gridworld
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.errors import EnvironmentContractError
from rein.ops.trees import map_tree
from rein.testing import EnvironmentContract, check_environment
from rein.types import TimeStep

TARGETS = [(2, 2), (1, 1), (3, 0)]


def correct(num_envs: int, seed: int | None) -> Gridworld:
    return Gridworld(num_envs, TARGETS, seed=seed, max_episode_steps=12)


class Wrapped:
    """Wrapper that forwards everything. Subclasses introduce one fault each."""

    def __init__(self, num_envs: int, seed: int | None) -> None:
        self.inner = correct(num_envs, seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def reset(self, seed: int | None = None) -> Any:
        return self.inner.reset(seed)

    def apply_action(self, action: Any) -> TimeStep:
        return self.changed(self.inner.apply_action(action))

    def changed(self, time_step: TimeStep) -> TimeStep:
        return time_step


class ConfigIsNoJson(Wrapped):
    @property
    def config(self) -> dict[str, Any]:
        return self.inner.config | {"targets": (2, 2)}


class RewardsInFloat64(Wrapped):
    def changed(self, time_step: TimeStep) -> TimeStep:
        return time_step._replace(reward=time_step.reward.double())


class InfiniteRewards(Wrapped):
    def changed(self, time_step: TimeStep) -> TimeStep:
        return time_step._replace(reward=time_step.reward / 0)


class ObservationsOfAnotherDtype(Wrapped):
    def changed(self, time_step: TimeStep) -> TimeStep:
        return time_step._replace(observation=time_step.observation.float())


class ObservationsOutOfRange(Wrapped):
    def changed(self, time_step: TimeStep) -> TimeStep:
        return time_step._replace(final_observation=time_step.final_observation + 4)


class ReusesObservationBuffer(Wrapped):
    buffer: torch.Tensor | None = None

    def changed(self, time_step: TimeStep) -> TimeStep:
        self.buffer = time_step.observation if self.buffer is None else self.buffer.copy_(time_step.observation)
        return time_step._replace(observation=self.buffer)


class ReusesSeedBuffer(Wrapped):
    def __init__(self, num_envs: int, seed: int | None) -> None:
        super().__init__(num_envs, seed)
        self.buffer = torch.full((num_envs,), -1)

    @property
    def episode_seeds(self) -> torch.Tensor:
        return self.buffer.copy_(self.inner.episode_seeds)


class ClipsActionInPlace(Wrapped):
    def apply_action(self, action: torch.Tensor) -> TimeStep:
        return self.inner.apply_action(action.clamp_(0, 2))


class FinalObservationAfterReset(Wrapped):
    def changed(self, time_step: TimeStep) -> TimeStep:
        return time_step._replace(final_observation=time_step.observation)


class FinalObservationOnlyAtEpisodeEnd(Wrapped):
    def changed(self, time_step: TimeStep) -> TimeStep:
        ended_N = time_step.terminated | time_step.truncated
        return time_step._replace(final_observation=time_step.final_observation * ended_N[:, None])


class ResetsInNextStep(Wrapped):
    """Gymnasium's `NEXT_STEP` autoreset: the observation of the new episode comes one step later."""

    ended_N: torch.Tensor | None = None

    def changed(self, time_step: TimeStep) -> TimeStep:
        self.ended_N = time_step.terminated | time_step.truncated
        return time_step._replace(observation=time_step.final_observation)


class HidesTruncations(Wrapped):
    def changed(self, time_step: TimeStep) -> TimeStep:
        return time_step._replace(truncated=torch.zeros_like(time_step.truncated))


class AllStartEqual(Wrapped):
    def reset(self, seed: int | None = None) -> Any:
        return self.inner.reset(seed)[:1].repeat(self.inner.num_envs, 1)


class UsesGlobalGenerator(Wrapped):
    def reset(self, seed: int | None = None) -> Any:
        self.inner.reset(seed)
        return self.inner.reset_to(torch.randint(2**31, (self.inner.num_envs,)))


class SeedsDependOnNumEnvs(Wrapped):
    def __init__(self, num_envs: int, seed: int | None) -> None:
        self.inner = correct(num_envs, None if seed is None else seed * num_envs)

    @property
    def seed(self) -> int | None:
        return None if self.inner.seed is None else self.inner.seed // self.inner.num_envs


class ResetRepeatsEpisode(Wrapped):
    def reset(self, seed: int | None = None) -> Any:
        again = seed is None and bool((self.inner.episode_seeds >= 0).all())
        return self.inner.reset_to(self.inner.episode_seeds) if again else self.inner.reset(seed)


class ResetIgnoresSeed(Wrapped):
    def reset(self, seed: int | None = None) -> Any:
        return self.inner.reset()


class ForgetsStepCount(Wrapped):
    def state_dict(self) -> dict[str, Any]:
        state = self.inner.state_dict()
        return state | {"steps": torch.zeros_like(state["steps"])}


class ForgetsSeed(Wrapped):
    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state | {"seeds": state["seeds"] | {"seed": 0}})


class ResetToIgnoresSeeds(Wrapped):
    def reset_to(self, episode_seeds: torch.Tensor) -> Any:
        return self.inner.reset()


class ReseedsAtAnyTime(Wrapped):
    def reseed(self, seed: int) -> None:
        self.inner = correct(self.inner.num_envs, seed)


class ReseedsNever(Wrapped):
    def reseed(self, seed: int) -> None:
        if (self.inner.episode_seeds >= 0).all():
            raise RuntimeError


class AcceptsAnyNumberOfActions(Wrapped):
    def apply_action(self, action: Any) -> TimeStep:
        return self.inner.apply_action(map_tree(lambda x: x[: self.inner.num_envs], action))


class ClosesOnce(Wrapped):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise ValueError("closed already")
        self.closed = True


class ResetWhereResetsAll(Wrapped):
    def reset_where(self, mask: torch.Tensor) -> Any:
        return self.inner.reset_where(torch.ones_like(mask))


class ResetWhereUsesOtherEpisode(Wrapped):
    def reset_where(self, mask: torch.Tensor) -> Any:
        observation = self.inner.reset_where(mask)
        return torch.where(mask[:, None], observation[:1], observation)


class ResetWhereResetsStepCounts(Wrapped):
    def reset_where(self, mask: torch.Tensor) -> Any:
        observation, state = self.inner.reset_where(mask), self.inner.state_dict()
        self.inner.load_state_dict(state | {"steps": torch.zeros_like(state["steps"])})
        return observation


class StepWhereStepsAll(Wrapped):
    def apply_action_where(self, action: torch.Tensor, mask: torch.Tensor) -> TimeStep:
        return self.inner.apply_action(action)


class StepWhereHidesOtherSteps(Wrapped):
    def apply_action_where(self, action: torch.Tensor, mask: torch.Tensor) -> TimeStep:
        before = self.inner.apply_action_where(action, torch.zeros_like(mask))
        after = self.inner.apply_action(action)
        return TimeStep(
            *(
                torch.where(mask.reshape(-1, *[1] * (new.ndim - 1)), new, old)
                for new, old in zip(after[:-1], before[:-1], strict=True)
            ),
            info={},
        )


class Runners(SimulatedWorlds):
    """Two runners in each world, who leave when they have covered a distance of 5."""

    agents = 2
    single_observation_space = gymnasium.spaces.Box(0.0, 9.0, (1,))
    single_action_space = gymnasium.spaces.Box(0.0, 1.0, (1,))
    initial_range = ((0.0, 2.0),)

    def dynamics(self, state: torch.Tensor, action: torch.Tensor) -> Any:
        state = state + action[..., 0].clamp(0.0, 1.0)
        return state, state[0].clone(), state[0] > 5.0


class Worlds(Wrapped):
    """Multi-agent worlds without a fault."""

    def __init__(self, num_envs: int, seed: int | None) -> None:
        self.inner: Any = Runners(num_envs, seed=seed, max_episode_steps=12)


class AgentsThatHaveLeftStayValid(Worlds):
    def changed(self, time_step: TimeStep) -> TimeStep:
        return time_step._replace(valid=torch.ones_like(time_step.valid))


class AgentsThatHaveLeftAreObservedAsZeros(Worlds):
    def changed(self, time_step: TimeStep) -> TimeStep:
        observation, final = (
            torch.where(time_step.valid[:, None], x, 0.0) for x in (time_step.observation, time_step.final_observation)
        )
        return time_step._replace(observation=observation, final_observation=final)


class RowsOfAWorldHaveDifferentSeeds(Worlds):
    @property
    def episode_seeds(self) -> torch.Tensor:
        return self.inner.episode_seeds + torch.arange(self.inner.num_envs) * (self.inner.episode_seeds >= 0)


class WorldsAreMiscounted(Worlds):
    @property
    def worlds(self) -> int:
        return self.inner.num_envs


FAULTS: list[tuple[type[Wrapped], str]] = [
    (ConfigIsNoJson, "test_implements_environment_protocol"),
    (RewardsInFloat64, "test_returned_data_fits_spaces"),
    (InfiniteRewards, "test_returned_data_fits_spaces"),
    (ObservationsOfAnotherDtype, "test_returned_data_fits_spaces"),
    (ObservationsOutOfRange, "test_returned_data_fits_spaces"),
    (ReusesObservationBuffer, "test_returned_tensors_never_change"),
    (ReusesSeedBuffer, "test_returned_tensors_never_change"),
    (ClipsActionInPlace, "test_apply_action_does_not_change_action"),
    (HidesTruncations, "test_new_episode_begins_in_the_step_that_ends_one"),
    (FinalObservationOnlyAtEpisodeEnd, "test_final_observation_equals_observation_within_episode"),
    (FinalObservationAfterReset, "test_seed_and_actions_reproduce_episode"),
    (ResetsInNextStep, "test_seed_and_actions_reproduce_episode"),
    (ResetToIgnoresSeeds, "test_seed_and_actions_reproduce_episode"),
    (AllStartEqual, "test_environments_with_one_seed_start_differently"),
    (UsesGlobalGenerator, "test_same_seed_gives_same_rollout"),
    (SeedsDependOnNumEnvs, "test_streams_do_not_depend_on_num_envs"),
    (ResetRepeatsEpisode, "test_episode_seeds_follow_seed_environment_and_episode"),
    (ResetIgnoresSeed, "test_reset_with_seed_restarts_streams"),
    (ForgetsStepCount, "test_loaded_environment_continues_bit_for_bit"),
    (ForgetsSeed, "test_loaded_environment_continues_bit_for_bit"),
    (ReseedsAtAnyTime, "test_reseed_works_only_before_first_reset"),
    (ReseedsNever, "test_reseed_works_only_before_first_reset"),
    (AcceptsAnyNumberOfActions, "test_invalid_actions_raise"),
    (ResetWhereResetsAll, "test_reset_where_leaves_other_rows_unchanged"),
    (ResetWhereUsesOtherEpisode, "test_reset_where_leaves_other_rows_unchanged"),
    (ResetWhereResetsStepCounts, "test_reset_where_leaves_other_rows_unchanged"),
    (StepWhereStepsAll, "test_apply_action_where_leaves_other_rows_unchanged"),
    (StepWhereHidesOtherSteps, "test_apply_action_where_leaves_other_rows_unchanged"),
    (ClosesOnce, "test_close_twice"),
    (AgentsThatHaveLeftStayValid, "test_agents_that_have_left_repeat_their_last_observation"),
    (AgentsThatHaveLeftAreObservedAsZeros, "test_agents_that_have_left_repeat_their_last_observation"),
    (RowsOfAWorldHaveDifferentSeeds, "test_episode_seeds_follow_seed_environment_and_episode"),
    (WorldsAreMiscounted, "test_implements_environment_protocol"),
]


def contract(make: Callable[[int, int | None], Any]) -> EnvironmentContract:
    """Return the contract for a function that makes environments."""
    suite = EnvironmentContract()
    suite.make = make  # type: ignore[method-assign]  # for this instance
    suite.steps = 60
    return suite


@pytest.mark.parametrize(("broken", "test"), FAULTS, ids=[broken.__name__ for broken, _ in FAULTS])
def test_broken_environment_fails_test_of_its_fault(broken: type[Wrapped], test: str) -> None:
    getattr(contract(Worlds if issubclass(broken, Worlds) else correct), test)()
    with pytest.raises((AssertionError, EnvironmentContractError, ValueError)):
        getattr(contract(broken), test)()


def test_every_contract_test_finds_a_fault() -> None:
    tests = {name for name in dir(EnvironmentContract) if name.startswith("test_")}
    assert tests == {test for _, test in FAULTS}


def test_endless_episodes_fail_with_hint() -> None:
    endless = contract(lambda num_envs, seed: Gridworld(num_envs, [(4, 4)], seed=seed))
    endless.steps = 3
    with pytest.raises(AssertionError, match="no episode ended in 3 random steps"):
        endless.test_reset_with_seed_restarts_streams()


class Noise(gymnasium.Env[Any, Any]):
    """Episodes of two steps with observations that do not depend on the seed."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset()
        self.left = 2
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self._observation(), 0.0, self.left == 0, False, {}

    def _observation(self) -> Any:
        Noise.count += 1
        return self.observation_space.low + 2 * (Noise.count * 0.618 % 1)


def noise(num_envs: int, seed: int | None, *, replayable: bool) -> GymnasiumEnvironment:
    return GymnasiumEnvironment(Noise, num_envs, seed, replayable=replayable)


@pytest.mark.parametrize("test", sorted({test for _, test in FAULTS}))
def test_non_replayable_environment_passes(test: str) -> None:
    getattr(contract(lambda num_envs, seed: noise(num_envs, seed, replayable=False)), test)()


def test_wrong_replayable_claim_fails() -> None:
    wrong = contract(lambda num_envs, seed: noise(num_envs, seed, replayable=True))
    for test in (wrong.test_seed_and_actions_reproduce_episode, wrong.test_loaded_environment_continues_bit_for_bit):
        with pytest.raises((AssertionError, EnvironmentContractError)):
            test()


def test_check_environment_names_failing_test() -> None:
    check_environment(correct)
    with pytest.raises(AssertionError) as caught:
        check_environment(ConfigIsNoJson)
    assert caught.value.__notes__ == ["check_environment: test_implements_environment_protocol"]
