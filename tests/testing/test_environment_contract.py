"""The suite for environments finds what it is there to find: environments broken on purpose, each in one way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
import torch

from rein.envs.gridworld import Gridworld
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.errors import EnvironmentContractError
from rein.ops.trees import map_tree
from rein.testing import EnvironmentContract, check_environment
from rein.types import TimeStep

TARGETS = [(2, 2), (1, 1), (3, 0)]


def sound(num_envs: int, seed: int | None) -> Gridworld:
    return Gridworld(num_envs, TARGETS, seed=seed, max_episode_steps=12)


class Wrapped:
    """An environment that passes everything on; what a subclass changes is its fault."""

    def __init__(self, num_envs: int, seed: int | None) -> None:
        self.inner = sound(num_envs, seed)

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


class OneBufferForAll(Wrapped):
    buffer: torch.Tensor | None = None

    def changed(self, time_step: TimeStep) -> TimeStep:
        self.buffer = time_step.observation if self.buffer is None else self.buffer.copy_(time_step.observation)
        return time_step._replace(observation=self.buffer)


class SeedsInOneBuffer(Wrapped):
    def __init__(self, num_envs: int, seed: int | None) -> None:
        super().__init__(num_envs, seed)
        self.buffer = torch.full((num_envs,), -1)

    @property
    def episode_seeds(self) -> torch.Tensor:
        return self.buffer.copy_(self.inner.episode_seeds)


class ClipsTheActionItWasGiven(Wrapped):
    def apply_action(self, action: torch.Tensor) -> TimeStep:
        return self.inner.apply_action(action.clamp_(0, 2))


class FinalObservationAfterTheReset(Wrapped):
    def changed(self, time_step: TimeStep) -> TimeStep:
        return time_step._replace(final_observation=time_step.observation)


class FinalObservationOnlyWhereItEnded(Wrapped):
    def changed(self, time_step: TimeStep) -> TimeStep:
        ended_N = time_step.terminated | time_step.truncated
        return time_step._replace(final_observation=time_step.final_observation * ended_N[:, None])


class ResetsInTheNextStep(Wrapped):
    """Gymnasium's NEXT_STEP: the final observation first, the new episode's one step later."""

    ended_N: torch.Tensor | None = None

    def changed(self, time_step: TimeStep) -> TimeStep:
        self.ended_N = time_step.terminated | time_step.truncated
        return time_step._replace(observation=time_step.final_observation)


class HidesTruncations(Wrapped):
    def changed(self, time_step: TimeStep) -> TimeStep:
        return time_step._replace(truncated=torch.zeros_like(time_step.truncated))


class AllStartAlike(Wrapped):
    def reset(self, seed: int | None = None) -> Any:
        return self.inner.reset(seed)[:1].repeat(self.inner.num_envs, 1)


class StartsFromTheGlobalGenerator(Wrapped):
    def reset(self, seed: int | None = None) -> Any:
        self.inner.reset(seed)
        return self.inner.reset_to(torch.randint(2**31, (self.inner.num_envs,)))


class SeedsByNumberOfEnvironments(Wrapped):
    def __init__(self, num_envs: int, seed: int | None) -> None:
        self.inner = sound(num_envs, None if seed is None else seed * num_envs)

    @property
    def seed(self) -> int | None:
        return None if self.inner.seed is None else self.inner.seed // self.inner.num_envs


class ResetRepeatsTheEpisode(Wrapped):
    def reset(self, seed: int | None = None) -> Any:
        again = seed is None and bool((self.inner.episode_seeds >= 0).all())
        return self.inner.reset_to(self.inner.episode_seeds) if again else self.inner.reset(seed)


class ResetIgnoresItsSeed(Wrapped):
    def reset(self, seed: int | None = None) -> Any:
        return self.inner.reset()


class ForgetsTheClock(Wrapped):
    def state_dict(self) -> dict[str, Any]:
        state = self.inner.state_dict()
        return state | {"steps": torch.zeros_like(state["steps"])}


class ForgetsTheSeed(Wrapped):
    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state | {"seeds": state["seeds"] | {"seed": 0}})


class ResetToIgnoresTheSeeds(Wrapped):
    def reset_to(self, episode_seeds: torch.Tensor) -> Any:
        return self.inner.reset()


class ReseedsAtAnyTime(Wrapped):
    def reseed(self, seed: int) -> None:
        self.inner = sound(self.inner.num_envs, seed)


class ReseedsNever(Wrapped):
    def reseed(self, seed: int) -> None:
        if (self.inner.episode_seeds >= 0).all():
            raise RuntimeError


class TakesAnyNumberOfActions(Wrapped):
    def apply_action(self, action: Any) -> TimeStep:
        return self.inner.apply_action(map_tree(lambda x: x[: self.inner.num_envs], action))


class ClosesOnce(Wrapped):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise ValueError("closed already")
        self.closed = True


class ResetsAllWhereSomeAreMeant(Wrapped):
    def reset_where(self, mask: torch.Tensor) -> Any:
        return self.inner.reset_where(torch.ones_like(mask))


class ResetsInPartWithoutTheNextSeed(Wrapped):
    def reset_where(self, mask: torch.Tensor) -> Any:
        observation = self.inner.reset_where(mask)
        return torch.where(mask[:, None], observation[:1], observation)


class ResetsTheClockOfAll(Wrapped):
    def reset_where(self, mask: torch.Tensor) -> Any:
        observation, state = self.inner.reset_where(mask), self.inner.state_dict()
        self.inner.load_state_dict(state | {"steps": torch.zeros_like(state["steps"])})
        return observation


class StepsAllWhereSomeAreMeant(Wrapped):
    def apply_action_where(self, action: torch.Tensor, mask: torch.Tensor) -> TimeStep:
        return self.inner.apply_action(action)


class HidesThatItStepsAll(Wrapped):
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


FAULTS: list[tuple[type[Wrapped], str]] = [
    (ConfigIsNoJson, "test_it_is_an_environment"),
    (RewardsInFloat64, "test_all_it_returns_fits_its_spaces"),
    (InfiniteRewards, "test_all_it_returns_fits_its_spaces"),
    (ObservationsOfAnotherDtype, "test_all_it_returns_fits_its_spaces"),
    (ObservationsOutOfRange, "test_all_it_returns_fits_its_spaces"),
    (OneBufferForAll, "test_what_was_returned_never_changes"),
    (SeedsInOneBuffer, "test_what_was_returned_never_changes"),
    (ClipsTheActionItWasGiven, "test_the_action_is_left_as_it_was"),
    (HidesTruncations, "test_a_new_episode_begins_in_the_step_that_ends_one_and_nowhere_else"),
    (FinalObservationOnlyWhereItEnded, "test_the_final_observation_is_the_observation_where_nothing_ended"),
    (FinalObservationAfterTheReset, "test_seed_and_actions_give_an_episode_again"),
    (ResetsInTheNextStep, "test_seed_and_actions_give_an_episode_again"),
    (ResetToIgnoresTheSeeds, "test_seed_and_actions_give_an_episode_again"),
    (AllStartAlike, "test_environments_under_one_seed_start_differently"),
    (StartsFromTheGlobalGenerator, "test_the_same_seed_gives_the_same_bits_and_another_seed_others"),
    (SeedsByNumberOfEnvironments, "test_an_environments_stream_does_not_depend_on_how_many_there_are"),
    (ResetRepeatsTheEpisode, "test_episode_seeds_are_those_of_seed_environment_and_episode"),
    (ResetIgnoresItsSeed, "test_a_reset_with_a_seed_begins_anew"),
    (ForgetsTheClock, "test_a_saved_environment_goes_on_bit_for_bit"),
    (ForgetsTheSeed, "test_a_saved_environment_goes_on_bit_for_bit"),
    (ReseedsAtAnyTime, "test_reseed_counts_before_the_first_reset_and_is_refused_after"),
    (ReseedsNever, "test_reseed_counts_before_the_first_reset_and_is_refused_after"),
    (TakesAnyNumberOfActions, "test_nonsense_is_refused"),
    (ResetsAllWhereSomeAreMeant, "test_a_reset_in_part_leaves_the_other_rows_as_they_are"),
    (ResetsInPartWithoutTheNextSeed, "test_a_reset_in_part_leaves_the_other_rows_as_they_are"),
    (ResetsTheClockOfAll, "test_a_reset_in_part_leaves_the_other_rows_as_they_are"),
    (StepsAllWhereSomeAreMeant, "test_a_step_in_part_leaves_the_other_rows_as_they_are"),
    (HidesThatItStepsAll, "test_a_step_in_part_leaves_the_other_rows_as_they_are"),
    (ClosesOnce, "test_it_may_be_closed_twice"),
]


def contract(make: Callable[[int, int | None], Any]) -> EnvironmentContract:
    """The suite for one way of making environments."""
    suite = EnvironmentContract()
    suite.make = make  # type: ignore[method-assign]  # for this instance
    suite.steps = 60
    return suite


@pytest.mark.parametrize(("broken", "test"), FAULTS, ids=[broken.__name__ for broken, _ in FAULTS])
def test_a_broken_environment_fails_the_test_for_its_fault(broken: type[Wrapped], test: str) -> None:
    getattr(contract(sound), test)()
    with pytest.raises((AssertionError, EnvironmentContractError, ValueError)):
        getattr(contract(broken), test)()


def test_every_test_of_the_suite_has_a_fault_that_it_finds() -> None:
    tests = {name for name in dir(EnvironmentContract) if name.startswith("test_")}
    assert tests == {test for _, test in FAULTS}


def test_an_environment_whose_episodes_never_end_says_so() -> None:
    endless = contract(lambda num_envs, seed: Gridworld(num_envs, [(4, 4)], seed=seed))
    endless.steps = 3
    with pytest.raises(AssertionError, match="no episode ended in 3 random steps"):
        endless.test_a_reset_with_a_seed_begins_anew()


class Noise(gymnasium.Env[Any, Any]):
    """Two steps of numbers that no seed decides."""

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
def test_an_environment_that_says_it_is_not_replayable_need_not_be(test: str) -> None:
    getattr(contract(lambda num_envs, seed: noise(num_envs, seed, replayable=False)), test)()


def test_an_environment_that_only_says_it_is_replayable_is_found_out() -> None:
    liar = contract(lambda num_envs, seed: noise(num_envs, seed, replayable=True))
    for test in (liar.test_seed_and_actions_give_an_episode_again, liar.test_a_saved_environment_goes_on_bit_for_bit):
        with pytest.raises((AssertionError, EnvironmentContractError)):
            test()


def test_check_environment_runs_all_tests_and_names_the_one_that_fails() -> None:
    check_environment(sound)
    with pytest.raises(AssertionError) as caught:
        check_environment(ConfigIsNoJson)
    assert caught.value.__notes__ == ["check_environment: test_it_is_an_environment"]
