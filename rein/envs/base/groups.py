"""Observation groups of Isaac Lab, mjlab and MuJoCo Playground as entries of an observation."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from rein.spaces import CRITIC_OBSERVATION
from rein.types import Tree

OBSERVATION = "observation"
_ACTOR_GROUPS, _CRITIC_GROUP = ("policy", "actor"), "critic"  # of Isaac Lab and mjlab
_PLAYGROUND = {"state": OBSERVATION, "privileged_state": CRITIC_OBSERVATION}


class ObservationGroups:
    """Renames the observation groups of the actor and the critic.

    The groups `policy` and `actor` become the entry `observation`, and `critic` becomes `critic_observation`. In
    MuJoCo Playground, these groups are called `state` and `privileged_state`. Other entries keep their names. A
    dictionary with only one of the actor's groups becomes the observation itself.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.space = space
        self._only: str | None = None  # the group that is the whole observation
        self._names: dict[str, str] = {}
        if not isinstance(space, spaces.Dict):
            return
        actor = next((name for name in _ACTOR_GROUPS if name in space.spaces), None)
        if actor is not None and len(space.spaces) == 1:
            self._only, self.space = actor, space[actor]
            return
        names = {} if actor is None else {actor: OBSERVATION, _CRITIC_GROUP: CRITIC_OBSERVATION}
        if _PLAYGROUND.keys() <= space.spaces.keys():
            names = _PLAYGROUND
        if names:
            self._names = {name: names.get(name, name) for name in space.spaces}
            self.space = spaces.Dict({self._names[name]: part for name, part in space.spaces.items()})

    def __call__(self, observation: Tree) -> Tree:
        """Return the observation with renamed entries. Entries that are not in the space are left out."""
        if self._only is not None:
            return observation[self._only]
        if self._names:
            return {new: observation[name] for name, new in self._names.items()}
        return observation
