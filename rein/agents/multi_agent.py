"""Different agents for the groups of a multi-agent environment.

Shapes: N rows, R rows of a group, W worlds, A agents of a world.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rein.errors import explain
from rein.ops.random import checked_seed, stream_seed
from rein.ops.trees import leaves, map_tree
from rein.protocols import AgentProtocol, Policy
from rein.spaces import children
from rein.types import Group, Transition, Tree


class MultiAgent:
    """Agents that learn independently, one for each group of a multi-agent environment.

    Each agent gets the rows of its group, without the padding that gives all rows the same spaces. The agents of a
    group share one policy. With PPO this is IPPO (de Witt et al. 2020).

    Metrics have the name of the group as a prefix, such as `adversary/policy_loss`. Schedules of an agent count its own
    rows and updates; `env_steps` and `updates` of the `MultiAgent` are the sums over its agents.

    Example::

        agent = rein.MultiAgent(
            env,
            {"adversary": rein.PPO(env.groups["adversary"]), "agent": rein.PPO(env.groups["agent"], gamma=0.95)},
        )

    Args:
        env: multi-agent environment with `groups`.
        agents: agent of each group, built from `env.groups[name]`.
        seed: random seed of the agents that were built without one.

    Raises:
        ValueError: if the groups do not contain each row once, if a group has no agent, or if the spaces of an agent
            are not those of its group.
    """

    def __init__(self, env: Any, agents: Mapping[str, AgentProtocol], *, seed: int | None = None) -> None:
        groups: Mapping[str, Group] = getattr(env, "groups", {})
        if groups.keys() != agents.keys():
            raise ValueError(
                f"MultiAgent: the groups of the environment are {_listed(groups)}, but agents were given for "
                f"{_listed(agents)}; give one agent for each group"
            )
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self._agents_per_world = env.num_envs // env.worlds
        self._members = {name: _members(group.rows, self._agents_per_world) for name, group in groups.items()}
        members = sorted(member for group_members in self._members.values() for member in group_members)
        if members != [*range(self._agents_per_world)]:
            raise ValueError(f"MultiAgent: each agent of a world must be in exactly one group, got {self._members}")
        for name, agent in agents.items():
            _check_agent(name, agent, groups[name])
        devices = {agent.device for agent in agents.values()}
        if len(devices) > 1 or len({id(agent) for agent in agents.values()}) < len(agents):
            raise ValueError("MultiAgent: the agents of groups must be different objects on one device")
        self.agents: dict[str, Any] = dict(agents)
        self.device: torch.device = devices.pop()
        self._rows: dict[int, dict[str, Tensor]] = {}  # rows of each group, by the number of rows
        self._selected: tuple[Any, Mapping[str, Any], dict[str, Any]] = None, {}, {}
        self._drawn = {name: agent.seed is None for name, agent in self.agents.items()}
        self.seed: int | None = None
        if seed is not None:
            self.reseed(seed)

    @property
    def env_steps(self) -> int:
        """Number of recorded rows of all agents."""
        return sum(agent.env_steps for agent in self.agents.values())

    @property
    def updates(self) -> int:
        """Number of updates of all agents."""
        return sum(agent.updates for agent in self.agents.values())

    @property
    def loaded(self) -> bool:
        """Whether a state was loaded. If so, `reseed` keeps the parameters."""
        return any(getattr(agent, "loaded", False) for agent in self.agents.values())

    @loaded.setter
    def loaded(self, loaded: bool) -> None:
        for agent in self.agents.values():
            agent.loaded = loaded

    @property
    def learners(self) -> dict[str, Any]:
        """Learners of all agents, by names such as `adversary/networks`."""
        return self._named(lambda agent: getattr(agent, "learners", {}))

    @property
    def reports(self) -> tuple[str, ...]:
        """Metrics that exist before the first update, as NaN."""
        return tuple(self._named(lambda agent: dict.fromkeys(getattr(agent, "reports", ()))))

    @property
    def config(self) -> dict[str, Any]:
        """The spaces, the seed, and the options of each agent, as JSON."""
        return {
            "observation_space": str(self.observation_space),
            "action_space": str(self.action_space),
            "seed": self.seed,
            "device": str(self.device),
            "agents": {name: {"type": type(agent).__name__, **_options(agent)} for name, agent in self.agents.items()},
        }

    def select_action(self, observation: Tree) -> tuple[Tree, dict[str, Tree]]:
        """Return the exploring actions (N, ...) of all agents, and the tensors to record with them."""
        rows, chosen = self._rows_of(observation), {}
        for name, agent in self.agents.items():
            chosen[name] = agent.select_action(_taken(observation, rows[name], agent.observation_space))
        action = _joined({name: action for name, (action, _) in chosen.items()}, rows, self.action_space)
        names = dict.fromkeys(key for _, extras in chosen.values() for key in extras)
        extras = {
            key: _joined(
                {name: group_extras[key] for name, (_, group_extras) in chosen.items() if key in group_extras}, rows
            )
            for key in names
        }
        self._selected = action, extras, chosen
        return action, extras

    def record_observation(self, transition: Transition) -> None:
        """Give each agent the transitions of its rows."""
        (action, extras, chosen), rows = self._selected, self._rows_of(transition.observation)
        self._selected = None, {}, {}
        selected = action is not None and transition.action is action
        for name, agent in self.agents.items():
            row_R, group_extras = rows[name], chosen[name][1] if chosen else {}
            part = map_tree(lambda x, row_R=row_R: x[row_R], transition._replace(action=None, extras={}))
            agent.record_observation(
                part._replace(
                    observation=_unpadded(part.observation, agent.observation_space),
                    next_observation=_unpadded(part.next_observation, agent.observation_space),
                    # the same objects as selected, by which agents recognize their action
                    action=chosen[name][0] if selected else _taken(transition.action, row_R, agent.action_space),
                    extras={
                        key: group_extras[key]
                        if value is extras.get(key)
                        else map_tree(lambda x, row_R=row_R: x[row_R], value)
                        for key, value in transition.extras.items()
                        if key in group_extras or value is not extras.get(key)
                    },
                )
            )

    def observe_reset(self, observation: Tree, mask: Tensor) -> None:
        """End the current episodes of the rows in `mask` (N,), which were reset outside a step."""
        rows = self._rows_of(observation)
        for name, agent in self.agents.items():
            agent.observe_reset(_taken(observation, rows[name], agent.observation_space), mask[rows[name]])

    def optimize_model(self) -> dict[str, Any]:
        """Let every agent learn if its update is due. Returns the metrics with the prefix of the group."""
        return self._named(lambda agent: agent.optimize_model())

    def policy(self, deterministic: bool = True, **options: Any) -> MultiAgentPolicy:
        """Return a policy of all rows that uses the current parameters of the agents.

        `options` are passed to the method `policy` of every agent, such as `epsilon`.
        """
        policies = {name: agent.policy(deterministic, **options) for name, agent in self.agents.items()}
        return MultiAgentPolicy(self, policies)

    def reseed(self, seed: int) -> None:
        """Set the seeds of all agents that were built without a seed, each from `seed` and its group.

        Raises RuntimeError if an agent has already recorded transitions.
        """
        seed = checked_seed(seed)  # type: ignore[assignment]
        for name, agent in self.agents.items():
            if self._drawn[name]:
                agent.reseed(stream_seed(seed, name))
        self.seed = seed

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all agents."""
        return {"agents": {name: agent.state_dict() for name, agent in self.agents.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned. Raises ValueError for other groups or other options of an agent."""
        if state["agents"].keys() != self.agents.keys():
            raise ValueError(
                f"MultiAgent: the groups of the state are {_listed(state['agents'])}, not {_listed(self.agents)}"
            )
        for name, agent in self.agents.items():
            agent.load_state_dict(state["agents"][name])
        self._selected = None, {}, {}

    def __repr__(self) -> str:
        return f"MultiAgent({self.agents!r})"

    def _named(self, of: Callable[[Any], Mapping[str, Any]]) -> dict[str, Any]:
        return {f"{name}/{key}": value for name, agent in self.agents.items() for key, value in of(agent).items()}

    def _rows_of(self, observation: Tree) -> dict[str, Tensor]:
        """Return the rows of each group. An evaluation may have another number of worlds than the training.

        Raises ValueError for rows that are not those of whole worlds.
        """
        num_envs = len(next(leaf for _, leaf in leaves(observation)))
        if num_envs not in self._rows:
            if num_envs % self._agents_per_world:
                raise ValueError(
                    f"MultiAgent: expected rows of whole worlds of {self._agents_per_world} agents, got {num_envs} "
                    "rows; agents[name].policy() is the policy of one group"
                )
            first_W1 = torch.arange(0, num_envs, self._agents_per_world, device=self.device)[:, None]
            self._rows[num_envs] = {
                name: (first_W1 + torch.tensor(members, dtype=torch.int64, device=self.device)).flatten()
                for name, members in self._members.items()
            }
        return self._rows[num_envs]


@explain("POLICIES_METHODS")
class MultiAgentPolicy:
    """Policies of the groups of a `MultiAgent`, as one policy of all rows."""

    def __init__(self, agent: MultiAgent, policies: Mapping[str, Policy]) -> None:
        """Create a policy from those of all groups."""
        self.device = agent.device
        self.observation_space = agent.observation_space
        self.action_space = agent.action_space
        self._agent = agent
        self.policies = dict(policies)

    def __repr__(self) -> str:
        return f"MultiAgentPolicy({self.policies!r})"

    def select_action(self, observation: Tree) -> tuple[Tree, dict[str, Tensor]]:
        """Return an action (N, ...) for an observation (N, ...)."""
        agent, rows = self._agent, self._agent._rows_of(observation)
        actions = {
            name: policy.select_action(_taken(observation, rows[name], agent.agents[name].observation_space))[0]
            for name, policy in self.policies.items()
        }
        return _joined(actions, rows, agent.action_space), {}

    def reset(self, mask: Tensor | None = None) -> None:
        """Start new episodes in the rows of `mask` (N,), or in all rows."""
        rows = {} if mask is None else self._agent._rows_of(mask)
        for name, policy in self.policies.items():
            policy.reset(None if mask is None else mask[rows[name]])

    def builder(self, device: torch.device) -> Callable[[], MultiAgentPolicy]:
        """Return a function that builds this policy on a device with its own agents, for another process.

        Raises TypeError if an agent is not a `rein.Agent`.
        """
        agent, builders = copy.copy(self._agent), {}
        for name, policy in self.policies.items():
            if not hasattr(policy, "builder"):
                kind = type(agent.agents[name]).__name__
                raise TypeError(f"{name!r} is a {kind}, which cannot be built again; use a subclass of rein.Agent")
            builders[name] = policy.builder(device)  # type: ignore[attr-defined]  # see above
        agent.agents = {}
        agent.device = device
        agent._rows = {}
        agent._selected = (None, {}, {})
        return functools.partial(_built_policy, agent, builders)

    def snapshot(self) -> dict[str, Any]:
        """Return the snapshots of the policies of all groups. `load_snapshot` loads them."""
        return {name: policy.snapshot() for name, policy in self.policies.items()}  # type: ignore[attr-defined]

    def load_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """Act with the parameters of a `snapshot` of the same policies."""
        for name, policy in self.policies.items():
            policy.load_snapshot(snapshot[name])  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the policies that have one."""
        policies = {name: policy for name, policy in self.policies.items() if hasattr(policy, "state_dict")}
        return {name: policy.state_dict() for name, policy in policies.items()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        for name in self.state_dict():
            self.policies[name].load_state_dict(state[name])  # type: ignore[attr-defined]


def _built_policy(agent: MultiAgent, builders: Mapping[str, Callable[[], Any]]) -> MultiAgentPolicy:
    policies = {name: build() for name, build in builders.items()}
    agent.agents = {name: policy._agent for name, policy in policies.items()}
    return MultiAgentPolicy(agent, policies)


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names)) or "empty"


def _options(agent: Any) -> dict[str, Any]:
    return {name: value for name, value in agent.config.items() if name not in ("seed", "device")}


def _members(row_R: Tensor, agents: int) -> list[int]:
    """Return the agents of a world, 0 to A - 1, to which these rows belong."""
    return sorted({row % agents for row in row_R.tolist()})


def _check_agent(name: str, agent: Any, group: Group) -> None:
    pairs = (
        ("observation_space", agent.observation_space, group.observation_space),
        ("action_space", agent.action_space, group.action_space),
    )
    for which, agent_space, group_space in pairs:
        if agent_space != group_space:
            raise ValueError(
                f"MultiAgent: the {which} of the agent of {name!r} is {agent_space}, but that of the group is "
                f"{group_space}; build the agent with {type(agent).__name__}(env.groups[{name!r}])"
            )


def _taken(value: Tree, row_R: Tensor, space: spaces.Space[Any]) -> Tree:
    """Return the rows of a group without padding."""
    return _unpadded(map_tree(lambda x: x[row_R], value), space)


def _unpadded(value: Tree, space: spaces.Space[Any]) -> Tree:
    if isinstance(value, Mapping):
        if (inner := children(space)) is not None:
            return {key: _unpadded(value[key], part) for key, part in inner.items()}
        return _unpadded(value["observation"], space)  # without the mask of actions that other groups have
    if isinstance(value, Tensor) and isinstance(space, spaces.Box | spaces.MultiBinary) and len(space.shape) == 1:
        return value[:, : space.shape[0]]
    return value


def _joined(parts: Mapping[str, Tree], rows: Mapping[str, Tensor], space: Any = None) -> Tree:
    """Return all rows (N, ...), given those of groups. Vectors are padded with zeros, and missing rows are zeros."""
    first = next(iter(parts.values()))
    if isinstance(first, Mapping):
        return {key: _joined({name: part[key] for name, part in parts.items()}, rows) for key in first}
    num_envs = sum(map(len, rows.values()))
    shape = first.shape[1:]
    if len(shape) == 1:
        size = max(part.shape[1] for part in parts.values())
        shape = (size if space is None else space.shape[0],)
    joined = first.new_zeros((num_envs, *shape))
    for name, part in parts.items():
        if part.ndim == 2:
            joined[rows[name], : part.shape[1]] = part
        else:
            joined[rows[name]] = part
    return joined
