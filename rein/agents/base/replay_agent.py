"""Base class of agents that learn from a replay.

Shapes: N environments, B rows of a batch, E episodes that ended.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.accelerators import find
from rein.agents.base.action_noise import AdaptiveExploration, random_action
from rein.agents.base.agent import cast_action
from rein.agents.base.network_agent import NetworkAgent
from rein.networks.heads import count_actions
from rein.ops.trees import map_tree
from rein.ops.values import polyak_
from rein.options import above_zero, at_least_one, in_unit_interval, not_below_zero, one_of, option
from rein.replay.replay import Replay, Sample
from rein.schedules import Schedule
from rein.types import Transition, Tree


def _below_one(value: Any) -> float:
    if in_unit_interval(value) == 1.0:
        raise ValueError("give a number below 1; to learn from recorded data only, fill the replay with it")
    return float(value)


class ReplayAgent(NetworkAgent):
    """Base class of off-policy agents with a replay. Subclasses implement `build_networks`, `act` and `update_from`.

    After `learning_starts` env steps, the agent trains every `train_frequency` env steps, with `update_to_data` updates
    per env step. Fractions of an update are carried over to the next round of updates.
    """

    capacity: int = option(default=1_000_000, check=at_least_one, fixed=True, help="transitions in the replay")
    batch_size: int = option(default=256, check=at_least_one, help="transitions per update")
    learning_starts: int = option(
        default=1_000, check=not_below_zero, fixed=True, help="env steps with random actions before the first update"
    )
    train_frequency: int = option(default=1, check=at_least_one, fixed=True, help="env steps per round of updates")
    update_to_data: float = option(default=1.0, check=above_zero, fixed=True, help="updates per env step")
    n_step: int = option(default=1, check=at_least_one, fixed=True, help="steps of n-step returns")
    tau: float = option(
        default=0.005,
        check=in_unit_interval,
        fixed=True,
        help="fraction by which target networks move toward the networks; 1 copies them",
    )
    target_frequency: int = option(
        default=1, check=at_least_one, fixed=True, help="updates per step of the target networks"
    )
    prioritized: bool = option(
        default=False, fixed=True, help="sample transitions in proportion to their last error (Schaul et al. 2016)"
    )
    priority_alpha: float = option(
        default=0.6, check=in_unit_interval, fixed=True, help="exponent of priorities: 0 samples uniformly"
    )
    priority_beta: float | Schedule = option(
        default=0.4, check=in_unit_interval, help="exponent of importance weights; a number or a schedule"
    )
    hindsight: Any = option(
        default=None,
        fixed=True,
        help="rein.replay.Hindsight(compute_reward), for observations with goals (Andrychowicz et al. 2017)",
    )
    storage: str = option(
        default="memory",
        check=one_of("memory", "memmap"),
        fixed=True,
        help='"memory", or "memmap" for a memory-mapped file',
    )

    demonstration_fraction: float = option(
        default=0.5,
        check=_below_one,
        help="fraction of each batch that comes from the demonstrations of rein.fill_replay, if there are any",
    )

    values = True  # whether the agent learns from rewards and next observations
    exploration: Any = None  # amount of exploration, if it is adaptive or follows a schedule

    def build(self, generator: torch.Generator) -> None:
        """Build the replay, the networks and their learners."""
        self.replay = self.build_replay()
        self._followed: list[tuple[list[Tensor], list[Tensor]]] = []
        self.networks: Any = self.build_networks(generator)
        self.episode_returns = EpisodeReturns() if isinstance(self.exploration, AdaptiveExploration) else None
        self.steps_since_update = 0  # env steps
        self.updates_owed = 0.0

    def build_replay(self) -> Any:
        """Build the replay."""
        settings: dict[str, Any] = {"storage": self.storage, "device": self.device}
        if self.prioritized:
            settings["alpha"] = self.priority_alpha
        if self.hindsight is not None:
            return self.hindsight.build(self.capacity, **settings)
        if not self.prioritized:
            return Replay(self.capacity, **settings)
        from rein.replay.prioritized import PrioritizedReplay

        return PrioritizedReplay(self.capacity, **settings)

    @abc.abstractmethod
    def build_networks(self, generator: torch.Generator) -> nn.Module:
        """Build all networks as one module with an `encoder`, and their learners with `add_learner`."""

    def explore(self, observation: Tree) -> Tensor:
        """Return an exploring action (N, ...) for training."""
        return self.act(observation, True)

    @abc.abstractmethod
    def update_from(self, sample: Any, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Update the networks with a batch. Returns metrics (all of them if `report` is set) and row errors (B,)."""

    def follow(self, targets: nn.Module, networks: nn.Module) -> None:
        """Register target networks: `targets` move toward `networks` by `tau` every `target_frequency` updates."""
        self._followed.append(([*targets.parameters()], [*networks.parameters()]))

    @torch.no_grad()
    def select_action(self, observation: Tree) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a random action before `learning_starts` env steps, and an exploring action after that."""
        if self.env_steps < self.learning_starts:
            return random_action(self.action_space, observation, self.generator), {}
        return self.explore(observation), {}

    def record_observation(self, transition: Transition) -> None:
        """Add a transition to the replay."""
        action = cast_action(transition.action, self.action_space)
        self._memory.append(transition._replace(action=action, extras=self.recorded_extras(transition)))
        if self.normalize_observation:  # processes exchange its statistics before the first update
            self.compare_processes(num_envs=self.replay.num_envs)
        self.networks.preprocess.update(transition.observation, transition.valid)
        self.env_steps += len(transition.reward)
        ended_N = transition.terminated | transition.truncated
        first = max(self.learning_starts, self._refilled_at)
        steps = min(len(transition.reward), self.env_steps - first)
        if steps > 0 and (self.updates_owed or self.updates or len(self.replay)):
            self.updates_owed += steps * self.update_to_data
            self.steps_since_update += steps
        self.begin_episodes(ended_N | ~transition.valid)
        if self.episode_returns is not None:
            self.exploration.observe(self.episode_returns.add(transition))

    def recorded_extras(self, transition: Transition) -> dict[str, Tensor]:
        """Return additional tensors (N, ...) to record with a transition."""
        return {}

    def observe_reset(self, observation: Tree, mask: Tensor) -> None:
        """End the episodes of the environments in `mask` (N,), which were reset outside a step."""
        self._memory.observe_reset(mask)
        self.begin_episodes(mask)
        if self.episode_returns is not None:
            self.episode_returns.observe_reset(mask)

    def begin_episodes(self, mask_N: Tensor) -> None:
        """Start new episodes in the environments of `mask_N`. Override if acting depends on earlier steps."""

    def optimize_model(self) -> dict[str, Tensor]:
        """Run a round of updates if one is due. Returns the metrics of the last update."""
        updates = self.due_updates
        if not updates:
            return {}
        self.begin_round(updates)
        return self.learn(updates)

    @property
    def due_updates(self) -> int:
        """Number of updates of the round that is due; 0 if no round is due."""
        updates = int(self.updates_owed + 1e-6)  # ten times 0.1 rounds to one
        return updates if self.steps_since_update >= self.train_frequency and updates > 0 and len(self.replay) else 0

    def begin_round(self, updates: int) -> None:
        """Count a round of updates as made."""
        self.steps_since_update = 0
        self.updates_owed -= updates

    def learn(self, updates: int) -> dict[str, Tensor]:
        """Make `updates` updates from the replay. Returns the metrics of the last update."""
        try:
            updates = not_below_zero(updates)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}.learn({updates!r}): {error}") from None
        self.compare_processes(num_envs=self.replay.num_envs)
        metrics: dict[str, Tensor] = {}
        self.set_learning_rates()
        update = find("update", self) or self.update
        for last in range(updates - 1, -1, -1):
            metrics = update(self.sample(), report=not last)
        return metrics

    def update(self, batch: Any, report: bool = True) -> dict[str, Tensor]:
        """Make one update with a batch from `sample`. Also updates the target networks if an update is due."""
        sample, weight_B = batch
        metrics, error_B = self.update_from(sample, weight_B, report)
        if hasattr(self.replay, "weights"):  # it is prioritized
            self.replay.update(sample.row, error_B[: sample.row.shape[-1]])  # without those of demonstrations
        self.updates += 1
        if self.updates % self.target_frequency == 0:
            for targets, networks in self._followed:
                polyak_(targets, networks, self.tau)
        return metrics

    def sample(self) -> tuple[Any, Tensor | None]:
        """Sample a batch. Returns it with its importance weights (B,), which are None without `prioritized`.

        If there are demonstrations, they are the last rows. Their weights are 1, and `row` has only the other rows.
        """
        demonstrations = vars(self).get("demonstrations")
        further = 0 if demonstrations is None else int(self.demonstration_fraction * self.batch_size)
        settings: dict[str, Any] = {"n_step": self.n_step, "gamma": self.gamma}
        sample = self.replay.sample(self.batch_size - further, self.generator, **settings)
        weight_B = self.importance(sample.probability)
        if further:
            sample = _joined(sample, demonstrations.sample(further, self.generator, **settings))  # type: ignore[union-attr]  # not None
            weight_B = None if weight_B is None else torch.cat((weight_B, torch.ones_like(sample.reward[-further:])))
        return sample, weight_B

    def importance(self, probability_B: Tensor | None) -> Tensor | None:
        """Return the importance weights (B,) of rows with these sampling probabilities; None for None."""
        if probability_B is None:
            return None
        return self.replay.weights(probability_B, self.priority_beta(**self.counts))  # type: ignore[operator]

    def reseed(self, seed: int) -> None:
        """Start all random streams from `seed`. Raises RuntimeError if the agent has recorded or learned anything."""
        if not self.loaded and (self.env_steps or self.updates or len(self.replay)):
            done = f"{self.env_steps} env steps, {self.updates} updates and {len(self.replay)} recorded transitions"
            raise RuntimeError(f"reseed({seed}): a new seed would discard {done} of the agent; build a new agent")
        super().reseed(seed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned. Raises ValueError, before any change, if options differ."""
        self._check_state(state)
        vars(self).pop("demonstrations", None)
        if (rows := state.get("demonstrations")) is not None:
            self.demonstrations = self.demonstration_replay(int(rows["slots"]) * int(rows["num_envs"]))
        super().load_state_dict(state)

    def demonstration_replay(self, rows: int) -> Replay:
        """Return an empty replay for demonstrations."""
        return Replay(rows, storage=self.storage, device=self.device)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if state["learners"].keys() != self.learners.keys():
            raise ValueError(
                f"the learners differ: {', '.join(state['learners'])} in the state, {', '.join(self.learners)} here"
            )
        prioritized = hasattr(self.replay, "weights")
        if state["replay"]["filled"] and ("priorities" in state["replay"]) != prioritized:
            raise ValueError(f"prioritized is {not prioritized} in the state, but {prioritized} here")


def _joined(sample: Sample, further: Sample) -> Sample:
    """Return a sample followed by another one. Row numbers and probabilities are those of the first."""
    before, after = (each._replace(row=None, probability=None) for each in (sample, further))
    columns = map_tree(lambda x, y: torch.cat((x, y)) if isinstance(x, Tensor) else x, before, after)
    return columns._replace(row=sample.row, probability=sample.probability)


class DiscreteActions:
    """Mixin that converts actions of a Discrete space to indices that start at 0."""

    action_space: spaces.Discrete

    @classmethod
    def check_spaces(cls, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        """Raise ValueError unless the action space is Discrete."""
        count_actions(action_space)

    @property
    def first_action(self) -> int:
        """The smallest action."""
        return int(self.action_space.start)

    def network_action(self, action_B: Tensor) -> Tensor:
        """Return recorded actions of any dtype as indices (B,) int64."""
        index_B = action_B.long()
        return index_B - self.first_action if self.first_action else index_B


class EpisodeReturns:
    """Running sums of rewards over the episodes of N environments."""

    def __init__(self) -> None:
        self._sum_N: Tensor | None = None

    def add(self, transition: Transition) -> Tensor:
        """Add one step and return the returns (E,) of the episodes that ended."""
        if self._sum_N is None:
            self._sum_N = torch.zeros_like(transition.reward, dtype=torch.float64)
        self._sum_N += torch.where(transition.valid, transition.reward, 0.0)
        ended_N = (transition.terminated | transition.truncated) & transition.valid
        return_E = self._sum_N[ended_N]
        self._sum_N.masked_fill_(ended_N | transition.truncated, 0.0)
        return return_E

    def observe_reset(self, mask_N: Tensor) -> None:
        """Discard the running sums of these environments."""
        if self._sum_N is not None:
            self._sum_N.masked_fill_(mask_N, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the running sums."""
        return {"sum": self._sum_N}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self._sum_N = None if state["sum"] is None else state["sum"].clone()
