"""The face of an environment that is a `Simulation`: its state is numbers, and its dynamics are a function of them.

Shapes: S numbers of the state of one environment, N environments, O one observation, A one action.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rein.foreign_names import ENVIRONMENT_ATTRIBUTES, check_keywords, explain
from rein.ops.devices import checked_device
from rein.rollout.contract import check_rows_of
from rein.rollout.frames import Frame
from rein.rollout.simulation import Physics, Simulation
from rein.types import TimeStep


@explain(ENVIRONMENT_ATTRIBUTES)
class SimulatedEnvironment(ABC):
    """N environments of one physics; a subclass adds its constructor and the picture of a state.

    `options` are what `config` tells beside `num_envs`, `seed` and `device`: `max_episode_steps` and `compile`, if they
    are not given.
    """

    replayable = True

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "__init__" in vars(cls):
            cls.__init__ = check_keywords(cls.__init__)  # type: ignore[method-assign]

    def __init__(
        self,
        physics: Physics,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        num_envs: int,
        seed: int | None,
        max_episode_steps: int | None,
        device: torch.device | str,
        compile: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.device = checked_device(device)
        self.max_episode_steps = max_episode_steps
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self._options = {"max_episode_steps": max_episode_steps, "compile": compile} if options is None else options
        self._simulation = Simulation(
            type(self).__name__,
            physics,
            action_space,
            num_envs=num_envs,
            seed=seed,
            max_episode_steps=max_episode_steps,
            device=self.device,
            compile=compile,
        )
        self.num_envs = self._simulation.num_envs

    @abstractmethod
    def _draw(self, state: list[float]) -> Frame:
        """A picture of one state (S,)."""

    def _watch(self, observation: Tensor) -> None:  # noqa: B027  # may be left as it is
        """Called with what is observed (N, *O) after every reset and step, for a subclass that keeps some of it."""

    @property
    def seed(self) -> int | None:
        """The seed of all streams; None until given, drawn at the first reset if it never was."""
        return self._simulation.seed

    @property
    def episode_seeds(self) -> Tensor:
        """(N,) int64: what each environment's current episode was reset with; -1 before the first reset."""
        return self._simulation.episode_seeds

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return {"num_envs": self.num_envs, **self._options, "seed": self.seed, "device": str(self.device)}

    def reset(self, seed: int | None = None) -> Tensor:
        """Begin the next episode of every environment; `seed` starts all streams anew. Returns the observation."""
        return self._begun(self._simulation.reset(seed))

    def reset_to(self, episode_seeds: Tensor) -> Tensor:
        """Begin the episodes that these seeds (N,) give, for a replay; what follows them follows the streams."""
        return self._begun(self._simulation.reset_to(episode_seeds))

    def reset_where(self, mask: Tensor) -> Tensor:
        """Begin the next episode where `mask` (N,) is True; returns the current observation of all.

        Raises RuntimeError before the first reset.
        """
        return self._begun(self._simulation.reset_where(mask))

    def apply_action(self, action: Tensor) -> TimeStep:
        """Step every environment with `action` (N, *A).

        Raises RuntimeError before the first reset and EnvironmentContractError for what is no action.
        """
        return self._stepped(self._simulation.apply_action(action))

    def apply_action_where(self, action: Tensor, mask: Tensor) -> TimeStep:
        """Step where `mask` (N,) is True; the other rows stay as they are, and are not valid.

        Raises RuntimeError before the first reset, EnvironmentContractError for what is no action, in any row, and
        ValueError for what is no mask.
        """
        check_rows_of("apply_action_where", mask, self.num_envs, torch.bool)
        return self._stepped(self._simulation.apply_action(action, mask))

    def render(self, index: int = 0) -> Frame:
        """An RGB frame (height, width, 3) of one environment."""
        return self._draw(self._simulation.state_of(index))

    def reseed(self, seed: int) -> None:
        """Take `seed` for all streams; RuntimeError after the first reset."""
        self._simulation.reseed(seed)

    def close(self) -> None:  # noqa: B027  # may be left as it is
        """Nothing to release."""

    def state_dict(self) -> dict[str, Any]:
        """The state of every environment, and its episode."""
        return self._simulation.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; ValueError for another number of environments."""
        self._simulation.load_state_dict(state)

    def _begun(self, observation: Tensor) -> Tensor:
        self._watch(observation)
        return observation

    def _stepped(self, time_step: TimeStep) -> TimeStep:
        self._watch(time_step.observation)
        return time_step
