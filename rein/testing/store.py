"""Test suite for stores. Example::

    class TestMyStore(StoreContract):
        def make(self, path):
            return MyStore(path)

        def read(self, store):
            return [...]

Shapes: T steps, N environments, E episodes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rein.errors import StoreError
from rein.ops.random import stream_seed
from rein.ops.trees import leaves, map_tree
from rein.protocols import Store, missing_names
from rein.testing.stateful import check_equal, check_plain, copy_state
from rein.types import Episodes, Trajectory


class StoreContract:
    """Base class of the tests of a store. Subclasses are named `Test...` and define `make` and `read`.

    The stores get trajectories of `make_trajectory`: nested observations, several dtypes, and epochs without rows.
    """

    def make(self, path: Path) -> Any:
        """Return a new store. A store on the path of a closed store must continue its run."""
        raise NotImplementedError

    def read(self, store: Any) -> list[Trajectory]:
        """Return all epochs in order. `store` was flushed and may be closed."""
        raise NotImplementedError

    def test_implements_store_protocol(self, tmp_path: Path) -> None:
        """The store implements the protocol, and its config is JSON."""
        store = self.make(tmp_path / "run")
        assert missing_names(store, Store) == []
        json.dumps(store.config, allow_nan=False)
        store.close()

    def test_trajectories_are_read_back_equal(self, tmp_path: Path) -> None:
        """Epochs of any length are equal to the bit."""
        expected = [make_trajectory(epoch, steps=steps) for epoch, steps in enumerate((5, 1, 0, 20, 7), start=1)]
        assert_equal(self._read_back(tmp_path, expected), expected)

    def test_skipped_epoch_is_kept_without_fields(self, tmp_path: Path) -> None:
        """Holds among other epochs and alone."""
        skipped = [make_trajectory(epoch, steps=0)._replace(fields={}, next_observation=None) for epoch in (1, 3)]
        expected = [skipped[0], make_trajectory(2), skipped[1]]
        assert_equal(self._read_back(tmp_path / "among", expected), expected)
        assert_equal(self._read_back(tmp_path / "alone", skipped), skipped)

    def test_fields_may_change_between_epochs(self, tmp_path: Path) -> None:
        """Fields, dtypes and the number of environments may change."""
        expected = [make_trajectory(1), make_trajectory(2, num_envs=5)]
        expected.append(with_fields(expected[1]._replace(epoch=3), value=torch.zeros(6, 5)))
        expected.append(with_fields(expected[1]._replace(epoch=4), value=torch.zeros(6, 5, dtype=torch.int8)))
        assert_equal(self._read_back(tmp_path, expected), expected)

    def test_metrics_may_change_between_epochs(self, tmp_path: Path) -> None:
        """Metric names may have any characters, such as the slashes of TensorBoard names."""
        expected = [make_trajectory(epoch) for epoch in (1, 2, 3)]
        expected[0] = expected[0]._replace(metrics={})
        expected[1] = expected[1]._replace(
            metrics={"loss": 1.0, "loss/policy": 2.5, "..": 3.0, "a %2F b": float("nan")}
        )
        assert_equal(self._read_back(tmp_path, expected), expected)

    def test_append_copies_trajectory(self, tmp_path: Path) -> None:
        """Training overwrites the rows with the next epoch while the store still writes them."""
        store, expected = self.make(tmp_path / "run"), make_trajectory(1)
        lent = map_tree(copy_state, expected)
        store.append(lent)
        for _, leaf in leaves(lent):
            if isinstance(leaf, torch.Tensor):
                leaf.zero_()
            elif isinstance(leaf, np.ndarray):
                leaf.fill(0)
        store.close()
        assert_equal(self.read(store), [expected])

    def test_invalid_rows_are_blank(self, tmp_path: Path) -> None:
        """Invalid rows are NaN for floats, 0 for integers and False for booleans. Valid rows are unchanged."""
        expected = make_trajectory(1)
        valid_TN = expected.fields["valid"].clone()
        valid_TN[2, 0] = valid_TN[4, 1] = False
        (stored,) = self._read_back(tmp_path, [with_fields(expected, valid=valid_TN)])
        mask_TN = valid_TN.numpy()
        original = dict(leaves(expected.fields))
        for path, field in leaves(stored.fields):
            blank = field[~mask_TN]
            assert np.isnan(blank).all() if field.dtype.kind == "f" else not blank.any(), path
            assert np.array_equal(field[mask_TN], original[path].numpy()[mask_TN]), path

    def test_half_precision_is_stored_as_single(self, tmp_path: Path) -> None:
        """Viewers cannot show half precision. No value changes."""
        expected = make_trajectory(1)
        reward_TN = expected.fields["reward"]
        half = {"half": reward_TN.to(torch.float16), "brain": reward_TN.to(torch.bfloat16)}
        (stored,) = self._read_back(tmp_path, [with_fields(expected, **half)])
        for name, tensor in half.items():
            assert np.array_equal(stored.fields[name], tensor.float().numpy()), name

    def test_flushed_epochs_can_be_read(self, tmp_path: Path) -> None:
        """Holds while the store is open, and again after further epochs."""
        store, expected = self.make(tmp_path / "run"), [make_trajectory(epoch) for epoch in (1, 2, 3)]
        for count in (1, 2, 3):
            store.append(expected[count - 1])
            store.flush()
            assert_equal(self.read(store), expected[:count])
        store.close()
        assert_equal(self.read(store), expected)

    def test_close_twice(self, tmp_path: Path) -> None:
        """Holds for an empty store."""
        store = self.make(tmp_path / "run")
        store.close()
        store.close()

    def test_append_after_close_raises(self, tmp_path: Path) -> None:
        """Raises StoreError."""
        store = self.make(tmp_path / "run")
        store.close()
        with pytest.raises(StoreError, match="closed"):
            store.append(make_trajectory(1))

    def test_repeated_epoch_raises(self, tmp_path: Path) -> None:
        """An epoch out of order raises ValueError and changes nothing."""
        store, expected = self.make(tmp_path / "run"), [make_trajectory(1), make_trajectory(2)]
        for trajectory in expected:
            store.append(trajectory)
        with pytest.raises(ValueError, match="epoch 2 after"):
            store.append(expected[1])
        store.close()
        assert_equal(self.read(store), expected)

    @pytest.mark.parametrize(
        "field", ["text", 1.0, torch.zeros(3), torch.zeros(6, 4), torch.zeros(6, 3, dtype=torch.cfloat)]
    )
    def test_unsupported_field_raises_with_name(self, tmp_path: Path, field: Any) -> None:
        """`append` raises ValueError in the calling thread."""
        store, expected = self.make(tmp_path / "run"), make_trajectory(1)
        with pytest.raises(ValueError, match="odd_one"):
            store.append(with_fields(expected, odd_one=field))
        store.close()

    def test_resumed_store_has_no_gap_and_no_duplicate(self, tmp_path: Path) -> None:
        """Loading a state removes the epochs that were appended after it was saved, and the run continues."""
        first, expected = self.make(tmp_path / "run"), [make_trajectory(epoch) for epoch in (1, 2, 3, 4, 5)]
        for trajectory in expected[:3]:
            first.append(trajectory)
        state = copy_state(first.state_dict())
        check_plain(state)
        for trajectory in expected[3:]:
            first.append(trajectory)
        first.close()
        second, new = self.make(tmp_path / "run"), [make_trajectory(epoch, seed=1) for epoch in (4, 5, 6)]
        second.load_state_dict(state)
        for trajectory in new:
            second.append(trajectory)
        second.close()
        assert_equal(self.read(second), expected[:3] + new)

    def _read_back(self, path: Path, trajectories: list[Trajectory]) -> list[Trajectory]:
        store = self.make(path / "run")
        for trajectory in trajectories:
            store.append(trajectory)
        store.close()
        return self.read(store)


def make_trajectory(epoch: int, *, steps: int = 6, num_envs: int = 3, seed: int = 0) -> Trajectory:
    """Return an epoch of random tensors of several dtypes, determined by the arguments.

    Every environment ends an episode in the last step, if there is one.
    """
    random = np.random.default_rng(stream_seed(seed, "trajectory", epoch))

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape, np.float32))

    def observation(*lead: int) -> dict[str, Any]:
        camera = torch.from_numpy(random.integers(0, 256, (*lead, 4, 5, 3), np.uint8))
        return {"state": normal(*lead, 2), "camera": {"left": camera, "depth": normal(*lead, 4, 5).double()}}

    lead, first_step, count = (steps, num_envs), 1000 * epoch, num_envs if steps else 0
    flags = {name: torch.from_numpy(random.random(lead) < 0.3) for name in ("terminated", "truncated")}
    episodes = Episodes(
        id=np.arange(count) + 100 * epoch,
        environment=np.arange(count),
        first_step=np.full(count, first_step - 3),
        last_step=np.full(count, first_step + steps - 1),
        seed=random.integers(0, 2**31, count),
        episode_return=random.standard_normal(count),
        length=np.full(count, steps + 3),
        terminated=np.ones(count, bool),
        truncated=np.zeros(count, bool),
        final_observation=observation(count),
    )
    action = torch.from_numpy(random.integers(-5, 5, lead))
    fields = {"observation": observation(*lead), "action": action, "reward": normal(*lead), **flags}
    return Trajectory(
        epoch=epoch,
        status="completed" if epoch % 2 else "halted",
        first_step=first_step,
        fields=fields | {"valid": torch.ones(lead, dtype=torch.bool)},
        next_observation=observation(num_envs),
        episodes=episodes,
        metrics={"episode_return": float(epoch), "loss": float("nan")},
        clocks={"env_steps": float(first_step * num_envs), "seconds": 0.25 * epoch},
    )


def with_fields(trajectory: Trajectory, **fields: Any) -> Trajectory:
    """Return the epoch with added or replaced fields."""
    return trajectory._replace(fields={**trajectory.fields, **fields})


def assert_equal(stored: list[Trajectory], expected: list[Trajectory]) -> None:
    """Assert that trajectories have equal values, dtypes and shapes. NaN equals NaN."""
    assert [t.epoch for t in stored] == [t.epoch for t in expected]
    for actual, wanted in zip(stored, expected, strict=True):
        check_equal(_compared(actual, wanted), _compared(wanted, wanted), f"epoch {wanted.epoch}")


def _compared(trajectory: Trajectory, wanted: Trajectory) -> dict[str, Any]:
    """Return the parts of a trajectory that are compared with `wanted`, as arrays and text."""
    episodes = trajectory.episodes._asdict()
    if not len(wanted.episodes.id):
        del episodes["final_observation"]
    trees: dict[str, Any] = {"episodes": episodes}
    if wanted.fields:
        trees |= {"fields": trajectory.fields, "next_observation": trajectory.next_observation}
    numbers = {
        name: {key: repr(float(getattr(trajectory, name)[key])) for key in getattr(wanted, name)}
        for name in ("metrics", "clocks")
    }
    return {"status": trajectory.status, "first_step": trajectory.first_step, **numbers, **map_tree(_array, trees)}


def _array(leaf: Any) -> np.ndarray:
    return leaf.numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf)
