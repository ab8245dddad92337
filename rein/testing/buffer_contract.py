"""Test suite for replay buffers. Example::

    class TestMyBuffer(BufferContract):
        def make(self, capacity):
            return MyBuffer(capacity)

The buffers get transitions of `make_transition`: nested observations, uint8 images and integers. The reward of a row is
its number.

Shapes: N environments, B rows of a sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rein.ops.random import generator, hash_bits
from rein.ops.trees import leaves, map_tree, to_device
from rein.protocols import Buffer, missing_names
from rein.testing.stateful import CountedContract, check_equal, copy_state, first_difference
from rein.types import Transition

FIELDS = ("observation", "action", "reward", "terminated", "next_observation")
BAD_ROWS: dict[str, Callable[[Transition], Transition]] = {
    "another shape": lambda row: row._replace(action=row.action.unsqueeze(1)),
    "another dtype": lambda row: row._replace(reward=row.reward.double()),
    "missing field": lambda row: row._replace(observation={"camera": row.observation["camera"]}),
    "additional nested field": lambda row: row._replace(observation={**row.observation, "more": row.reward}),
    "additional field": lambda row: row._replace(extras={"value": row.reward}),
    "no nested fields": lambda row: row._replace(observation=row.reward),
    "one environment": lambda row: map_tree(lambda x: x[:1], row),
    "one environment less": lambda row: map_tree(lambda x: x[:-1], row),
    "different numbers of environments": lambda row: row._replace(action=row.action[:-1]),
}


class BufferContract:
    """Base class of the tests of a replay buffer. Subclasses are named `Test...` and define `make`."""

    num_envs = 3
    uniform = True  # False if new rows have different sampling probabilities
    distinct = True  # False if the buffer cannot sample without replacement
    device = "cpu"  # device of the buffer

    def make(self, capacity: int) -> Any:
        """Return a new buffer for `capacity` transitions."""
        raise NotImplementedError

    def test_all_rows_are_sampled_unchanged(self) -> None:
        """Every row is sampled eventually, with its values, dtypes and shapes."""
        buffer = self._filled(20, range(9))
        self._assert_holds(buffer, range(9))

    def test_len_counts_valid_transitions(self) -> None:
        """`len` is the number of valid transitions."""
        buffer = self.make(10 * self.num_envs)
        assert missing_names(buffer, Buffer) == []
        assert len(buffer) == 0
        for step in range(25):
            self._append(buffer, step, self._mask(step))
            held = range(max(0, step - 9), step + 1)
            assert len(buffer) == sum(int(self._mask(past).sum()) for past in held)

    def test_invalid_rows_are_never_sampled(self) -> None:
        """Holds for any number of later rows and at any position in the ring."""
        for steps in (1, 4, 13, 31):
            buffer = self._filled(12, range(steps), self._mask)
            self._assert_holds(buffer, range(max(0, steps - 12), steps), self._mask)

    def test_overwritten_invalid_rows_have_no_effect(self) -> None:
        """After invalid rows are overwritten, all rows are sampled."""

        def early(step: int) -> Tensor:
            return self._mask(step) | (step >= 5)

        self._assert_holds(self._filled(12, range(40), early), range(28, 40))

    def test_oldest_rows_are_overwritten(self) -> None:
        """A capacity that is not a multiple of N is rounded down to whole steps."""
        for steps in (7, 8, 15, 21, 50):
            buffer = self.make(7 * self.num_envs + self.num_envs // 2)
            for step in range(steps):
                self._append(buffer, step)
                self._sample(buffer, 2, step)
            self._assert_holds(buffer, range(steps - 7, steps))

    def test_appends_without_sampling_overwrite_oldest_rows(self) -> None:
        """A buffer may defer writes until the next sample."""
        for steps in (7, 60, 64, 65, 200):
            self._assert_holds(self._filled(7, range(steps)), range(steps - 7, steps))

    def test_capacity_below_one_step_holds_one_step(self) -> None:
        """The buffer keeps the newest step of all environments."""
        buffer = self.make(1)
        for step in range(5):
            self._append(buffer, step)
        self._assert_holds(buffer, range(4, 5))

    def test_rows_are_sampled_uniformly(self) -> None:
        """Chi-square test of 20,000 samples: partly full, past the end of the ring, and with invalid rows."""
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

    def test_sampling_without_replacement_has_no_duplicates(self) -> None:
        """A batch of all rows has each row once. A larger batch raises ValueError."""
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

    def test_sampling_from_empty_buffer_raises(self) -> None:
        """Raises ValueError, for an empty buffer and for one with invalid rows only."""
        hidden = self._filled(10, range(3), lambda step: torch.zeros(self.num_envs, dtype=torch.bool))
        for buffer in (self.make(10), hidden):
            assert len(buffer) == 0
            with pytest.raises(ValueError, match=r"append|valid|row"):
                buffer.sample(1, self._generator(0))

    def test_samples_depend_on_generator_only(self) -> None:
        """Equal generators give equal samples. torch's global generator is neither read nor changed."""
        buffer, other = (self._filled(10, range(17), self._mask) for _ in range(2))
        position = torch.get_rng_state()
        one = self._sample(buffer, 50, 1)
        torch.rand(1)
        assert first_difference(one, self._sample(other, 50, 1)) is None
        assert first_difference(one, self._sample(buffer, 50, 2)) is not None
        torch.set_rng_state(position)
        self._sample(buffer, 50, 1)
        assert torch.equal(position, torch.get_rng_state()), "the buffer uses torch's global generator"

    @pytest.mark.parametrize("kind", BAD_ROWS)
    def test_row_with_other_fields_raises(self, kind: str) -> None:
        """Append raises ValueError. Earlier rows are kept, and later rows can be appended."""
        if kind == "one environment" and self.num_envs == 1:
            return
        for steps in (1, 3, 9):
            buffer = self._filled(20, range(steps))
            with pytest.raises(ValueError, match=r"."):
                buffer.append(BAD_ROWS[kind](self._transition(steps)))
            self._append(buffer, steps)
            self._assert_holds(buffer, range(steps + 1))

    def test_reset_outside_a_step_keeps_rows(self) -> None:
        """The rows and their values are kept."""
        buffer = self.make(10 * self.num_envs)
        for step in range(17):
            buffer.observe_reset(torch.arange(self.num_envs, device=self.device) % 2 == step % 2)
            self._append(buffer, step, self._mask(step))
        self._assert_holds(buffer, range(7, 17), self._mask)

    def test_sample_is_a_copy(self) -> None:
        """Writing to a sample does not change the buffer."""
        buffer = self._filled(10, range(17))
        for _, leaf in leaves(self._sample(buffer, 50, 0)):
            leaf.zero_()
        self._assert_holds(buffer, range(7, 17))

    def test_state_fulfills_stateful_contract(self) -> None:
        """A state loaded into a new buffer continues bit for bit, saved at any time; see `StatefulContract`."""

        def never(step: int) -> Tensor:
            return torch.ones(self.num_envs, dtype=torch.bool)

        def early(step: int) -> Tensor:  # the invalid rows are overwritten later
            return self._mask(step) | (step >= 5)

        def contract(valid: Callable[[int], Tensor], steps: int) -> CountedContract:
            def step(buffer: Any, k: int) -> dict[str, Any]:
                self._append(buffer, k, valid(k))
                return self._sample(buffer, 8, k + 1) if len(buffer) else {}

            return CountedContract(lambda: self.make(12 * self.num_envs), step, steps)

        for valid in (never, self._mask, early):
            for steps in (1, 7, 12):
                contract(valid, steps).test_loaded_part_continues_bit_for_bit()
            contract(valid, 33).check()

    def test_state_of_other_capacity_raises(self) -> None:
        """Loading a state of another capacity raises ValueError."""
        state = copy_state(self._filled(10, range(17)).state_dict())
        with pytest.raises(ValueError, match=r"."):
            self.make(11 * self.num_envs).load_state_dict(state)

    def _transition(self, step: int, valid_N: Tensor | None = None) -> Transition:
        return to_device(make_transition(step, self.num_envs, valid_N), self.device)

    def _mask(self, step: int) -> Tensor:
        """Return which environments are valid in a step: about two thirds, and sometimes none."""
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
        """Check that exactly the valid rows of these steps are sampled, with their values."""
        expected = {}
        for step in steps:
            row = rows_of(self._transition(step))
            for n in range(self.num_envs):
                if valid is None or valid(step)[n]:
                    expected[step * self.num_envs + n] = map_tree(lambda x, n=n: x[n], row)
        assert len(buffer) == len(expected)
        sample, sampled = self._sample(buffer, 40 * max(1, len(expected)), 3), {}
        for place, number in enumerate(sample["reward"].long().tolist()):
            sampled[number] = map_tree(lambda x, place=place: x[place], sample)
            assert number in expected, f"row {number} was sampled; expected one of {sorted(expected)}"
        for number, row in expected.items():
            assert number in sampled, f"row {number} was never sampled"
            check_equal(row, sampled[number], f"row {number}")


def make_transition(step: int, num_envs: int, valid_N: Tensor | None = None) -> Transition:
    """Return a step of N environments. The reward (N,) is step * N + n; other fields are hashed from it."""
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
    """Return the fields of a sample or transition that are compared, by name."""
    return {name: getattr(sample, name) for name in FIELDS}
