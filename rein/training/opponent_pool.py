"""Pool of the last snapshots of an agent, the opponents in self-play."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rein.agents.base.policies import snapshot
from rein.envs.base.contract import checked_count
from rein.types import Tree


class OpponentPool:
    """The last `size` snapshots of an agent, which are its opponents in `rein.SelfPlay`.

    Snapshots sample their actions. The pool is empty at first, and all opponents then move at random. The pool is saved
    with the state of its `SelfPlay`.

    Example::

        game = rein.envs.TicTacToe()
        agent = rein.PPO(game, seed=0)
        pool = rein.OpponentPool(agent, size=10)
        env = rein.SelfPlay(game, num_envs=64, opponents=pool, seed=0)
        loop = rein.training_loop(agent, env)

        @loop.epoch_ended(every=5)
        def addsnapshot(state):
            pool.add()

    Args:
        agent: agent that learns.
        size: largest number of snapshots. A new snapshot then replaces the oldest one, also in open episodes.
    """

    def __init__(self, agent: Any, size: int = 10) -> None:
        self.agent, self.size = agent, checked_count(f"OpponentPool(size={size!r})", size)
        self.added = 0  # snapshots so far
        self._snapshots: list[Any] = []
        self._policies: list[Any] = []

    def add(self) -> None:
        """Add a snapshot of the agent with its current parameters."""
        self._put(self.added % self.size, snapshot(self.agent))
        self.added += 1

    def __len__(self) -> int:
        return len(self._policies)

    def select_action(self, index: int, observation: Tree, carry: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the actions (R,) of one snapshot, and its next carry (R, C); None if it is not recurrent."""
        policy = self._policies[index]
        policy.carry = carry
        action, _ = policy.select_action(observation)
        return action, policy.carry

    def state_dict(self) -> dict[str, Any]:
        """Return all snapshots and the states of their policies."""
        return {
            "added": self.added,
            "agents": [opponent.state_dict() for opponent in self._snapshots],
            "policies": [policy.state_dict() for policy in self._policies],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._snapshots, self._policies = [], []
        for index, saved in enumerate(state["agents"]):
            opponent = snapshot(self.agent)
            opponent.load_state_dict(saved)
            self._put(index, opponent)
            self._policies[index].load_state_dict(state["policies"][index])
        self.added = state["added"]

    def _put(self, index: int, snapshot: Any) -> None:
        self._snapshots[index : index + 1] = [snapshot]
        self._policies[index : index + 1] = [snapshot.policy(deterministic=False)]

    def __repr__(self) -> str:
        return f"OpponentPool({self.agent!r}, size={self.size})"
