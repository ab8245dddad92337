"""Policies of agents, and copies of what an agent needs to act.

Shapes: N environments, C numbers of a carry.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.agents.base.action_noise import random_choices
from rein.agents.base.agent_state import PER_ENVIRONMENT, load_state, save_state
from rein.errors import explain
from rein.networks.normalizers import RewardNormalizer
from rein.ops.random import generator, own_state, restore_own
from rein.ops.trees import checked_device, leaves, map_tree, to_device
from rein.options import options_of
from rein.spaces import CRITIC_OBSERVATION, choices, entry, mask_of
from rein.spaces.masks import check_masks
from rein.spaces.numpy_values import Values
from rein.types import Tree

if TYPE_CHECKING:
    from rein.agents.base.agent import Agent


@explain("POLICY_METHODS")
class AgentPolicy:
    """Greedy or exploring policy of an agent.

    The policy uses the current networks and statistics of the agent. Acting does not change the agent, since the policy
    has its own generator and carry.
    """

    def __init__(
        self, agent: Agent, explore: bool, device: torch.device | str | None = None, epsilon: float | None = None
    ) -> None:
        """Create a policy. `explore` is passed to `agent.act`."""
        self.device = agent.device if device is None else checked_device(device)
        self.observation_space = agent.observation_space
        self.action_space = agent.action_space
        self._agent = self._source = agent
        if self.device != agent.device:
            self._agent = build_on(agent, self.device)()
        self._explore = explore
        self._epsilon = epsilon
        self._version = -1  # number of updates of the copied parameters
        greedy = not explore and epsilon is None
        self._generator = None if greedy else generator(agent._root_seed, "policy", device=self.device)
        self.carry: Tensor | None = None  # (N, C) memory of a recurrent agent

    def __repr__(self) -> str:
        epsilon = "" if self._epsilon is None else f", epsilon={self._epsilon}"
        return f"AgentPolicy({self._agent!r}, explore={self._explore}{epsilon})"

    @torch.no_grad()
    def select_action(self, observation: Tree) -> tuple[Tree, dict[str, Tensor]]:
        """Return an action (N, ...) for an observation (N, ...)."""
        current = self._current()
        agent = object.__new__(type(current))  # shares everything with the agent, and has its own memory
        vars(agent).update(vars(current), carry=self._carry_for(observation))
        if self._generator is not None:
            vars(agent)["generator"] = self._generator
        action, _ = agent._sampled(agent.act(observation, self._explore), self._explore)
        self.carry = agent.carry
        return action if self._epsilon is None else self._mixed(action, observation, self._epsilon), {}

    def predict(self, observation: Any) -> Any:
        """Return the action for one observation, or for each of a batch, in the format of the environment.

        Observations and actions are NumPy arrays and numbers, or dictionaries and tuples of these, as in
        `gymnasium.Env.step`. Entries of a batch have a first dimension N, as in `gymnasium.vector`. The action is a
        value of the action space. If observations have the entry `action_mask`, the action is valid.

        A recurrent policy remembers earlier calls until `reset`, or until the number of observations changes. Threads
        may share a policy without memory. Otherwise give each thread or conversation its own `copy.copy(policy)`.

        Raises:
            ValueError: If the observation has a wrong shape or dtype, lacks an entry, or is outside of a Discrete
                space. The message states what was expected.
            EnvironmentContractError: If a mask has no valid action.

        Example:
            >>> observation, info = env.reset()  # of gymnasium.make
            >>> observation, reward, terminated, truncated, info = env.step(policy.predict(observation))
        """
        observations, actions = self._values
        tree, is_one = observations.read(observation)
        check_masks(tree, self.observation_space, self.action_space)
        if self.device.type != "cpu":
            tree = to_device(tree, self.device)
        return actions.write(self.select_action(tree)[0], is_one)

    @functools.cached_property
    def _values(self) -> tuple[Values, Values]:
        """Converters of observations without the entry that only critics see, and of actions."""
        seen = self.observation_space
        if entry(seen, CRITIC_OBSERVATION) is not None:
            seen = spaces.Dict({key: part for key, part in seen.spaces.items() if key != CRITIC_OBSERVATION})
        return Values("observation", seen), Values("action", self.action_space)

    def _carry_for(self, observation: Tree) -> Tensor | None:
        """Return the carry, or None if it is of another number of environments."""
        if self.carry is None:
            return None
        return self.carry if len(next(leaf for _, leaf in leaves(observation))) == len(self.carry) else None

    def _mixed(self, action: Tensor, observation: Tree, epsilon: float) -> Tensor:
        """Return actions (N, ...), each replaced by a random valid one with probability `epsilon`."""
        space, drawn = self._agent.action_space, self._generator
        assert drawn is not None
        if (mask_NL := mask_of(observation)) is None:
            mask_NL = torch.ones((len(action), sum(choices(space)[0])), dtype=torch.bool, device=self.device)
        random = random_choices(space, mask_NL, drawn).to(action.dtype)
        u_N = torch.rand(len(action), generator=drawn, dtype=torch.float32, device=self.device)
        return torch.where((u_N < epsilon).view(-1, *[1] * (action.ndim - 1)), random, action)

    def _current(self) -> Agent:
        """Return the agent that acts, with the current parameters."""
        agent, source = self._agent, self._source
        if agent is not source and source.updates != self._version:
            load_parameters(agent, parameters_of(source))
            agent.env_steps = source.env_steps
            agent.updates = source.updates
            self._version = source.updates
        return agent

    def frozen_agent(self) -> Agent:
        """Return a copy of the agent on the CPU that can act, without its data and learners.

        Raises ValueError unless the policy is greedy.
        """
        if self._generator is not None:
            raise ValueError(
                f"{self!r}: only greedy policies can be exported; use agent.policy(), which does not explore"
            )
        on_cpu = self.device.type == "cpu"
        return snapshot((self if on_cpu else AgentPolicy(self._source, False, "cpu"))._current())

    def reset(self, mask: Tensor | None = None) -> None:
        """Start new episodes in the environments of `mask` (N,), or in all environments."""
        if self.carry is not None:
            self.carry = None if mask is None else self.carry.masked_fill(mask.unsqueeze(1), 0.0)

    def builder(self, device: torch.device) -> Callable[[], AgentPolicy]:
        """Return a function that builds this policy on a device with its own agent, for another process."""
        return functools.partial(_built_policy, build_on(self._source, device), self._explore, self._epsilon)

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the parameters and counters of the agent on the CPU. `load_snapshot` loads it."""
        source = self._source
        parameters = map_tree(lambda x: x.detach().to("cpu", copy=True), parameters_of(source))
        return {"parameters": parameters, "env_steps": source.env_steps, "updates": source.updates}

    def load_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """Act with the parameters and counters of a `snapshot` of the same policy."""
        load_parameters(self._agent, snapshot["parameters"])
        self._agent.env_steps = snapshot["env_steps"]
        self._agent.updates = snapshot["updates"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generator and the carry. Networks are part of the agent's state."""
        return {"generator": own_state(self._generator), "carry": self.carry}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises ValueError if one of the policies is greedy and the other one explores.
        """
        restore_own(self._generator, state["generator"])
        self.carry = None if state["carry"] is None else state["carry"].to(self.device, copy=True)


def build_on(agent: Agent, device: torch.device) -> Callable[[], Agent]:
    """Return a function that builds an agent with the same options on a device."""
    options: dict[str, Any] = {name: getattr(agent, name) for name in options_of(type(agent))} | {"device": device}
    return functools.partial(type(agent), agent.observation_space, agent.action_space, **options)


def _built_policy(build: Callable[[], Agent], explore: bool, epsilon: float | None) -> AgentPolicy:
    return AgentPolicy(build(), explore, epsilon=epsilon)


def snapshot(agent: Any, shared: Iterable[Any] = ()) -> Any:
    """Return a copy of an agent that can act, without its data and learners. `shared` objects are not copied."""
    names = ("replay", "demonstrations", "rollout", "_graph", "_rewritten")
    parts = [getattr(agent, name, None) for name in names]
    memo: dict[int, Any] = {id(part): None for part in (*parts, *agent.learners.values()) if part is not None}
    memo |= {id(agent.learners): {}, **{id(part): part for part in shared if part is not None}}
    for value in vars(agent).values():
        if isinstance(value, torch.Generator):
            memo[id(value)] = value.clone_state()
    return copy.deepcopy(agent, memo)


def parameters_of(agent: Agent) -> dict[str, list[Tensor]]:
    """Return the parameters and buffers of each module of an agent, and its other tensors for acting, by attribute."""
    tensors = {}
    for name, value in vars(agent).items():
        if name.startswith("_"):
            continue
        if isinstance(value, nn.Module):
            tensors[name] = [tensor.data for tensor in (*value.parameters(), *value.buffers())]
        elif isinstance(value, Tensor) and name not in PER_ENVIRONMENT:
            tensors[name] = [value]
    return tensors


def load_parameters(agent: Agent, parameters: Mapping[str, list[Tensor]]) -> None:
    """Copy the result of `parameters_of`, for an agent with the same options, into this agent."""
    own = parameters_of(agent)
    for name, tensors in parameters.items():
        if name not in own:  # a tensor that the agent created later
            vars(agent)[name] = tensors[0].to(agent.device, copy=True)
            continue
        for copied, current in zip(own[name], tensors, strict=True):
            copied.copy_(current)


@torch.no_grad()
def copy_learned(source: Agent, target: Agent) -> None:
    """Copy networks, tables, optimizers and normalizers to an agent with the same options of networks, in place.

    The target keeps its counts, its random streams, and all data of its own environments.
    """
    source_parameters, target_parameters = parameters_of(source), parameters_of(target)
    shapes = [
        {name: [x.shape for x in tensors] for name, tensors in each.items()}
        for each in (source_parameters, target_parameters)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError("the networks of the two agents have different shapes, so one cannot be copied to the other")
    load_parameters(target, source_parameters)
    target_attributes, source_attributes = vars(target), vars(source)
    pairs: list[tuple[Any, Any]] = [(target.learners[name], learner) for name, learner in source.learners.items()]
    pairs += [
        (target_attributes[name], value) for name, value in source_attributes.items() if hasattr(value, "param_groups")
    ]
    for copied, current in pairs:
        load_state(copied, save_state(current), torch.device(target.device))  # copies the tensors
    if isinstance(normalizer := source_attributes.get("reward_normalizer"), RewardNormalizer):
        running = target_attributes["reward_normalizer"].state_dict()["running_return"]
        target_attributes["reward_normalizer"].load_state_dict({**normalizer.state_dict(), "running_return": running})
