"""A test suite for buffers that transitions are sampled from.

    class TestMyBuffer(BufferContract):
        def make(self, capacity):
            return MyBuffer(capacity)

The buffers are given what `make_transition` makes: nested observations, images of bytes, whole numbers. The reward of a
row says which one it is. Shapes: N environments, B rows of a sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from rein.ops.random import generator, hash_bits
from rein.ops.trees import leaves, map_tree, to_device
from rein.protocols import Buffer
from rein.testing.stateful import StatefulContract, copy_state, first_difference
from rein.types import Transition

FIELDS = ("observation", "action", "reward", "terminated", "next_observation")
ODD_ROWS: dict[str, Callable[[Transition], Transition]] = {
    "another shape": lambda row: row._replace(action=row.action.unsqueeze(1)),
    "another type": lambda row: row._replace(reward=row.reward.double()),
    "a field less": lambda row: row._replace(observation={"camera": row.observation["camera"]}),
    "a field more": lambda row: row._replace(observation={**row.observation, "more": row.reward}),
    "a field more beside them": lambda row: row._replace(extras={"value": row.reward}),
    "no fields": lambda row: row._replace(observation=row.reward),
    "one environment": lambda row: map_tree(lambda x: x[:1], row),
    "an environment less": lambda row: map_tree(lambda x: x[:-1], row),
    "environments that do not agree": lambda row: row._replace(action=row.action[:-1]),
}


class BufferContract:
    """Subclass it in a test file, name the subclass Test..., and give `make`."""

    num_envs = 3
    uniform = True  # False for a buffer that draws rows which were never learned from with different probabilities
    distinct = True  # False for one that cannot sample without replacement
    device = "cpu"  # where `make` builds it

    def make(self, capacity: int) -> Any:
        """A new buffer for so many transitions."""
        raise NotImplementedError

    def test_what_was_appended_comes_back_whole(self) -> None:
        """Every row sooner or later, each with the values, types and shapes that it had."""
        buffer = self._filled(20, range(9))
        self._assert_holds(buffer, range(9))

    def test_it_says_how_much_can_be_sampled(self) -> None:
        """In transitions; rows that are not valid are none."""
        buffer = self.make(10 * self.num_envs)
        assert isinstance(buffer, Buffer)
        assert len(buffer) == 0
        for step in range(25):
            self._append(buffer, step, self._mask(step))
            held = range(max(0, step - 9), step + 1)
            assert len(buffer) == sum(int(self._mask(past).sum()) for past in held)

    def test_nothing_is_sampled_that_is_not_valid(self) -> None:
        """Whatever else comes after it, and wherever it stands."""
        for steps in (1, 4, 13, 31):
            buffer = self._filled(12, range(steps), self._mask)
            self._assert_holds(buffer, range(max(0, steps - 12), steps), self._mask)

    def test_it_recovers_from_rows_that_were_not_valid(self) -> None:
        """When they are overwritten, all is as if they had never been."""

        def early(step: int) -> Tensor:
            return self._mask(step) | (step >= 5)

        self._assert_holds(self._filled(12, range(40), early), range(28, 40))

    def test_the_oldest_rows_make_room(self) -> None:
        """Of a capacity that is no multiple of the environments as much is used as makes whole steps."""
        for steps in (7, 8, 15, 21, 50):
            buffer = self.make(7 * self.num_envs + self.num_envs // 2)
            for step in range(steps):
                self._append(buffer, step)
                self._sample(buffer, 2, step)
            self._assert_holds(buffer, range(steps - 7, steps))

    def test_rows_that_come_without_being_asked_for_in_between_make_room_too(self) -> None:
        """A buffer may put off the work until somebody samples."""
        for steps in (7, 60, 64, 65, 200):
            self._assert_holds(self._filled(7, range(steps)), range(steps - 7, steps))

    def test_a_capacity_of_less_than_one_step_holds_one(self) -> None:
        """Of all environments, the newest."""
        buffer = self.make(1)
        for step in range(5):
            self._append(buffer, step)
        self._assert_holds(buffer, range(4, 5))

    def test_each_row_is_as_likely_as_any(self) -> None:
        """By a chi-square test of 20,000 draws: in part full, round the ring's end, with rows that are not valid."""
        if not self.uniform:
            return
        for steps, valid in ((5, None), (17, None), (17, self._mask)):
            buffer = self._filled(10, range(steps), valid)
            sample = buffer.sample(20_000, self._generator(steps))
            count_R = torch.unique(sample.reward, return_counts=True)[1].double()
            expected = 20_000 / len(buffer)
            statistic, freedom = float((count_R - expected).square().sum() / expected), len(buffer) - 1
            assert len(count_R) == len(buffer)
            assert statistic < freedom + 4.5 * (2.0 * freedom) ** 0.5, f"chi-square {statistic:.0f} of {freedom}"

    def test_without_replacement_no_row_comes_twice(self) -> None:
        """And all of them come where as many are asked for; more than there are is a ValueError."""
        if not self.distinct:
            with pytest.raises(ValueError, match="replacement"):
                self._filled(10, range(4)).sample(2, self._generator(0), replacement=False)
            return
        for valid in (None, self._mask):
            buffer = self._filled(10, range(17), valid)
            for batch_size in (1, len(buffer) // 2, len(buffer)):
                sample = buffer.sample(batch_size, self._generator(batch_size), replacement=False)
                assert len(sample.reward.unique()) == batch_size
            with pytest.raises(ValueError, match=str(len(buffer) + 1)):
                buffer.sample(len(buffer) + 1, self._generator(0), replacement=False)

    def test_nothing_can_be_sampled_from_nothing(self) -> None:
        """A ValueError: of an empty buffer, and of one that was given nothing valid."""
        hidden = self._filled(10, range(3), lambda step: torch.zeros(self.num_envs, dtype=torch.bool))
        for buffer in (self.make(10), hidden):
            assert len(buffer) == 0
            with pytest.raises(ValueError, match=r"append|valid|row"):
                buffer.sample(1, self._generator(0))

    def test_the_generator_decides_what_is_sampled(self) -> None:
        """The same one the same, another one something else; the global one has no say and is not drawn from."""
        buffer, other = (self._filled(10, range(17), self._mask) for _ in range(2))
        position = torch.get_rng_state()
        one = self._sample(buffer, 50, 1)
        torch.rand(1)
        assert first_difference(one, self._sample(other, 50, 1)) is None
        assert first_difference(one, self._sample(buffer, 50, 2)) is not None
        torch.set_rng_state(position)
        self._sample(buffer, 50, 1)
        assert torch.equal(position, torch.get_rng_state()), "it draws from torch's global generator"

    @pytest.mark.parametrize("odd", ODD_ROWS)
    def test_a_row_unlike_those_before_is_refused(self, odd: str) -> None:
        """By a ValueError, at once; what was there before stays, and the buffer goes on."""
        if odd == "one environment" and self.num_envs == 1:
            return
        for steps in (1, 3, 9):
            buffer = self._filled(20, range(steps))
            with pytest.raises(ValueError, match=r"."):
                buffer.append(ODD_ROWS[odd](self._transition(steps)))
            self._append(buffer, steps)
            self._assert_holds(buffer, range(steps + 1))

    def test_a_reset_outside_a_step_loses_nothing(self) -> None:
        """Neither the rows nor what stands in them."""
        buffer = self.make(10 * self.num_envs)
        for step in range(17):
            buffer.observe_reset(torch.arange(self.num_envs, device=self.device) % 2 == step % 2)
            self._append(buffer, step, self._mask(step))
        self._assert_holds(buffer, range(7, 17), self._mask)

    def test_a_sample_is_its_callers(self) -> None:
        """Whoever writes to it changes nothing that is kept."""
        buffer = self._filled(10, range(17))
        for _, leaf in leaves(self._sample(buffer, 50, 0)):
            leaf.zero_()
        self._assert_holds(buffer, range(7, 17))

    def test_its_state_fulfils_the_contract_of_states(self) -> None:
        """Saved at any time, loaded into a new buffer, it samples on bit for bit: see StatefulContract."""

        def never(step: int) -> Tensor:
            return torch.ones(self.num_envs, dtype=torch.bool)

        def early(step: int) -> Tensor:  # rows that are not valid have been there and are gone
            return self._mask(step) | (step >= 5)

        for valid in (never, self._mask, early):
            for steps in (1, 7, 12, 33):
                contract = _SampledContract(lambda valid=valid: _Sampled(self, valid))
                contract.steps_before = steps
                contract.test_a_loaded_part_goes_on_bit_for_bit()
        contract.test_its_state_needs_no_pickle()
        contract.test_loading_shares_no_memory_with_the_source()
        contract.test_a_state_that_lacks_something_is_refused()
        contract.test_a_state_of_the_wrong_shape_is_refused()

    def test_the_state_of_another_capacity_is_refused(self) -> None:
        """Its rows would not fit."""
        state = copy_state(self._filled(10, range(17)).state_dict())
        with pytest.raises(ValueError, match=r"."):
            self.make(11 * self.num_envs).load_state_dict(state)

    def _transition(self, step: int, valid_N: Tensor | None = None) -> Transition:
        return to_device(make_transition(step, self.num_envs, valid_N), self.device)

    def _mask(self, step: int) -> Tensor:
        """Which environments are valid in a step: about two of three, now and then none."""
        row_N = self.num_envs * step + torch.arange(self.num_envs)
        return (hash_bits(row_N, 7) % 3 != 0) & torch.tensor(step % 11 != 3)

    def _generator(self, seed: int) -> torch.Generator:
        return generator(seed, "test", device=self.device)

    def _append(self, buffer: Any, step: int, valid_N: Tensor | None = None) -> None:
        buffer.append(self._transition(step, valid_N))

    def _filled(self, slots: int, steps: range, valid: Callable[[int], Tensor] | None = None) -> Any:
        buffer = self.make(slots * self.num_envs)
        for step in steps:
            self._append(buffer, step, None if valid is None else valid(step))
        return buffer

    def _sample(self, buffer: Any, batch_size: int, seed: int) -> dict[str, Any]:
        return rows_of(buffer.sample(batch_size, self._generator(seed)))

    def _assert_holds(self, buffer: Any, steps: range, valid: Callable[[int], Tensor] | None = None) -> None:
        """These rows can be sampled, as they were, and no others."""
        expected = {}
        for step in steps:
            row = rows_of(self._transition(step))
            for n in range(self.num_envs):
                if valid is None or valid(step)[n]:
                    expected[step * self.num_envs + n] = map_tree(lambda x, n=n: x[n], row)
        assert len(buffer) == len(expected)
        sample, found = self._sample(buffer, 40 * max(1, len(expected)), 3), {}
        for place, number in enumerate(sample["reward"].long().tolist()):
            found[number] = map_tree(lambda x, place=place: x[place], sample)
            assert number in expected, f"row {number} was sampled, of {sorted(expected)}"
        for number, row in expected.items():
            assert number in found, f"row {number} was never sampled"
            difference = first_difference(row, found[number])
            assert difference is None, f"row {number} differs at {difference}"


class _Sampled:
    """A buffer, its generator and its place in a stream, as one part with a state."""

    def __init__(self, contract: BufferContract, valid: Callable[[int], Tensor]) -> None:
        self.buffer, self.contract, self.valid = contract.make(12 * contract.num_envs), contract, valid
        self.steps = 0

    def step(self) -> dict[str, Any]:
        self.contract._append(self.buffer, self.steps, self.valid(self.steps))
        self.steps += 1
        return self.contract._sample(self.buffer, 8, self.steps) if len(self.buffer) else {}

    def state_dict(self) -> dict[str, Any]:
        return {**self.buffer.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        self.buffer.load_state_dict({name: value for name, value in state.items() if name != "steps"})


class _SampledContract(StatefulContract):
    def __init__(self, make: Callable[[], _Sampled]) -> None:
        self._make = make

    def make(self) -> _Sampled:
        return self._make()

    def step(self, part: _Sampled) -> Any:
        return part.step()


def make_transition(step: int, num_envs: int, valid_N: Tensor | None = None) -> Transition:
    """What N environments do in a step: the reward (N,) is step * N + n, and all else is drawn by that number."""
    valid_N = torch.ones(num_envs, dtype=torch.bool) if valid_N is None else valid_N
    return _drawn(step, num_envs)._replace(valid=valid_N)


@functools.lru_cache(maxsize=1000)
def _drawn(step: int, num_envs: int) -> Transition:
    row_N = step * num_envs + torch.arange(num_envs)

    def bits(shape: tuple[int, ...], salt: int) -> Tensor:
        cell = torch.arange(int(torch.Size(shape).numel())).view(1, *shape)
        return hash_bits((row_N.view(-1, *[1] * len(shape)) * 1000 + cell).flatten(), salt).view(num_envs, *shape)

    def observation(salt: int) -> dict[str, Any]:
        image, wide = bits((4, 5, 1), salt).to(torch.uint8), bits((), salt + 1).double()
        return {"camera": image, "body": {"place": bits((3,), salt + 2).float(), "wide": wide}}

    ended_N = bits((), 9) % 4
    ends = (ended_N == 0, ended_N == 1)
    return Transition(observation(1), bits((), 5), row_N.float(), *ends, observation(4), ended_N >= 0, {})


def rows_of(sample: Any) -> dict[str, Any]:
    """What is learned from, of a sample or a transition."""
    return {name: getattr(sample, name) for name in FIELDS}
