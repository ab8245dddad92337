"""Hindsight experience replay for goal-conditioned environments.

Shapes: S slots, N environments, B rows of a batch, V of them with another goal, n steps, E ends of episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from rein.ops.trees import map_tree
from rein.ops.values import n_step as n_step_returns
from rein.options import Check, in_unit_interval, one_of
from rein.replay.prioritized import PrioritizedReplay
from rein.replay.replay import Replay, Sample
from rein.replay.storage import Packing

Compute = Callable[[Any, Any, Any], Any]
_ACHIEVED, _DESIRED = "achieved_goal", "desired_goal"


def _checked(check: Check) -> Any:
    def validate(hindsight: object, field: attrs.Attribute[Any], value: Any) -> None:
        try:
            check(value)
        except ValueError as error:
            raise ValueError(f"Hindsight({field.name}={value!r}): {error}") from None

    return validate


@attrs.frozen(eq=False)
class Hindsight:
    """Hindsight experience replay (Andrychowicz et al. 2017): learn also from goals that were reached by chance.

    Pass it to an agent with a replay: `rein.DQN(env, hindsight=Hindsight(compute_reward))`. Observations are a Dict
    with the entries `observation`, `achieved_goal` and `desired_goal`, as in Gymnasium-Robotics.

    In `ratio` of the rows of each batch, the desired goal is replaced by an achieved goal of the same episode: that of
    a uniformly drawn step from this one to the last ("future"), or that of the last step ("final"). In an open episode,
    the newest step is the last. The rewards of these rows are computed for the new goal. Stored rows do not change.

    The functions are called with NumPy arrays of goals (R, ...) and an empty info, and return an array (R,). They are
    not saved: pass them again when you load the agent.

    Args:
        compute_reward: function (achieved_goal, desired_goal, info) that returns rewards, where `achieved_goal` is that
            after the step, such as `gymnasium.make(...).unwrapped.compute_reward`.
        strategy: "future" or "final".
        ratio: fraction of rows with another goal; k / (k + 1) for k new goals per recorded one.
        compute_terminated: function like `compute_reward` that returns whether a step is terminal. By default a row
            keeps its recorded flag.
    """

    compute_reward: Compute
    strategy: str = attrs.field(default="future", kw_only=True, validator=_checked(one_of("future", "final")))
    ratio: float = attrs.field(default=0.8, kw_only=True, validator=_checked(in_unit_interval))
    compute_terminated: Compute | None = attrs.field(default=None, kw_only=True)

    @property
    def config(self) -> dict[str, Any]:
        """Names of the functions, and the other options, as JSON."""
        name, terminated = (getattr(f, "__name__", None) for f in (self.compute_reward, self.compute_terminated))
        return {
            "function": name,
            "strategy": self.strategy,
            "ratio": float(self.ratio),
            "compute_terminated": terminated,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Hindsight:
        """Return the object itself: a copied agent must not copy the environment of a method."""
        return self

    def build(self, capacity: int, **options: Any) -> HindsightReplay:
        """Return a replay. `options` are those of `Replay`, or with `alpha` those of `PrioritizedReplay`."""
        kind = PrioritizedHindsightReplay if "alpha" in options else HindsightReplay
        return kind(capacity, self, **options)


class HindsightReplay(Replay):
    """`Replay` whose samples have other goals in some rows, see `Hindsight`.

    The slot of the last row of each episode is found by the episode's number. Numbers are counted per environment.
    """

    def __init__(self, capacity: int, hindsight: Hindsight, **options: Any) -> None:
        super().__init__(capacity, **options)
        self.hindsight = hindsight
        empty = torch.zeros(0, 0, dtype=torch.int32, device=self.device)
        self._episode_SN = empty  # number of the episode of each row
        self._end_EN = empty  # slot of the last row of each episode, by its number modulo E = S + 1; -1 if it is open
        self._open_N = empty.flatten()  # number of the episode of the next row

    def sample(
        self, batch_size: int, generator: torch.Generator, *, n_step: int = 1, gamma: float = 0.99, **options: Any
    ) -> Sample:
        """Sample as `Replay.sample` does, with other goals in the first rows of the batch."""
        sample = super().sample(batch_size, generator, n_step=n_step, gamma=gamma, **options)
        count = round(self.hindsight.ratio * batch_size)
        return self._relabelled(sample, sample.row[:count], generator, n_step, gamma) if count else sample

    def _relabelled(
        self, sample: Sample, row_V: Tensor, generator: torch.Generator, n_step: int, gamma: float
    ) -> Sample:
        """Replace the goals of the first V rows of a sample, which is a copy, and what depends on them."""
        goal_V = self._later_goals(row_V, generator)
        index_nV, recorded_nV = self._ahead(row_V, n_step)
        goals = self._achieved[index_nV.flatten()], goal_V.repeat(n_step, *(1 for _ in goal_V.shape[1:]))
        reward, terminated, truncated, valid = self._flags(index_nV)
        ended = terminated | truncated  # the episode ended there also for goals for which the step is not terminal
        reward = self._computed("compute_reward", *goals).to(reward.dtype).view(index_nV.shape)
        if self.hindsight.compute_terminated is not None:
            terminated = self._computed("compute_terminated", *goals).bool().view(index_nV.shape)
        changed: dict[str, Any] = {"reward": reward[0], "terminated": terminated[0]}
        if n_step > 1:  # a new terminal state ends the window earlier
            window = n_step_returns(reward, terminated, ended, valid & recorded_nV, gamma=gamma)
            changed = {"reward": window.return_, "terminated": window.terminated, "discount": window.discount}
            changed |= self._rows(self._later(row_V, window.last), ("next_observation",))
        for name, value in changed.items():
            map_tree(lambda kept_B, new_V: kept_B[: len(row_V)].copy_(new_V), getattr(sample, name), value)
        for observation in (sample.observation, sample.next_observation):
            observation[_DESIRED][: len(row_V)] = goal_V  # type: ignore[index]  # a Dict
        return sample

    def _later_goals(self, row_V: Tensor, generator: torch.Generator) -> Tensor:
        """Return goals (V, ...) that were achieved in the episodes of these rows, in their step or later."""
        slot_V, env_V = row_V // self.num_envs, row_V % self.num_envs
        end_V = self._end_EN[self._episode_SN[slot_V, env_V].long() % len(self._end_EN), env_V].long()
        ahead_V = (torch.where(end_V < 0, self.next_slot - 1, end_V) - slot_V) % self.slots
        if self.hindsight.strategy == "future":
            drawn_V = torch.rand(len(row_V), generator=generator, dtype=torch.float64, device=self.device)
            ahead_V = (drawn_V * (ahead_V + 1)).long()
        return self._achieved[self._later(row_V, ahead_V)]

    @property
    def _achieved(self) -> Tensor:
        """Achieved goals after each row, (R, ...)."""
        return self._columns["next_observation", _ACHIEVED].flatten(0, 1)

    def _computed(self, name: str, achieved: Tensor, desired: Tensor) -> Tensor:
        result = getattr(self.hindsight, name)(achieved.numpy(force=True), desired.numpy(force=True), {})
        if np.shape(result) != (len(achieved),):
            raise ValueError(
                f"Hindsight({name}=...) returned the shape {np.shape(result)}, expected ({len(achieved)},); use a "
                "function that computes many goals at once"
            )
        return torch.from_numpy(np.asarray(result)).to(self.device)

    def observe_reset(self, mask: Tensor) -> None:
        """See `Replay.observe_reset`."""
        super().observe_reset(mask)
        if self.filled:
            newest = (self.next_slot - 1) % self.slots
            (env_E,) = (mask & (self._episode_SN[newest] == self._open_N)).nonzero(as_tuple=True)
            self._end(self._open_N[env_E], env_E, torch.full_like(env_E, newest))
            self._open_N[env_E] += 1

    def _end(self, episode_E: Tensor, env_E: Tensor, slot_E: Tensor) -> None:
        """Record the last slots of episodes, and that the next episodes are open."""
        for following, slot in ((1, torch.full_like(slot_E, -1)), (0, slot_E)):
            self._end_EN[(episode_E.long() + following) % len(self._end_EN), env_E] = slot.int()

    def _take(self, packing: Packing, slots: int) -> None:
        paths = {place.path for place in packing.places}
        if missing := [name for name in (_ACHIEVED, _DESIRED) if ("next_observation", name) not in paths]:
            raise ValueError(
                f"Hindsight: the observations have no {' and '.join(missing)}; they must be a Dict with the entries "
                "observation, achieved_goal and desired_goal"
            )
        super()._take(packing, slots)
        self._episode_SN = torch.zeros(slots, self.num_envs, dtype=torch.int32, device=self.device)
        self._end_EN = torch.full((slots + 1, self.num_envs), -1, dtype=torch.int32, device=self.device)
        self._open_N = torch.zeros(self.num_envs, dtype=torch.int32, device=self.device)

    def _drawable(self, first: int, count: int) -> Tensor:
        new = slice(first, first + count)
        terminated_SN, truncated_SN, valid_SN = (
            self._columns[name,][new] for name in ("terminated", "truncated", "valid")
        )
        over_SN = terminated_SN | truncated_SN | ~valid_SN
        number_SN = over_SN.cumsum(0)
        self._episode_SN[new] = self._open_N + number_SN - over_SN.long()
        slot_E, env_E = over_SN.nonzero(as_tuple=True)
        last_E = (first + slot_E - (~valid_SN[slot_E, env_E]).long()) % self.slots  # an invalid row is in no episode
        self._end(self._episode_SN[new][slot_E, env_E], env_E, last_E)
        self._open_N += over_SN.sum(0)
        return super()._drawable(first, count)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Replay.load_state_dict`."""
        self._end_EN.fill_(-1)
        self._open_N.zero_()
        super().load_state_dict(state)


class PrioritizedHindsightReplay(HindsightReplay, PrioritizedReplay):
    """`HindsightReplay` with the sampling of `PrioritizedReplay`."""
