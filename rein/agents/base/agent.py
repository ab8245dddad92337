"""Base class of agents.

Shapes: N environments, B rows.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

import attrs
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein import foreign_names
from rein.agents.base.exploration import random_choices
from rein.agents.base.optimizers import set_learning_rate
from rein.agents.base.options import (
    as_json,
    declared,
    document,
    in_unit_interval,
    option,
    options_of,
    refuse_hidden,
    refuse_unknown,
)
from rein.agents.base.state import check_state, has_state, load_state, public_state, save_state
from rein.agents.base.summary import Summary
from rein.networks.encoder import children
from rein.networks.heads import check_mask, choices, is_continuous
from rein.networks.normalizers import RewardNormalizer
from rein.networks.reserved import ACTION_MASK, CRITIC_OBSERVATION, entry, mask_of
from rein.ops.parallel import rank
from rein.ops.random import checked_seed, generator, own_state, restore_own
from rein.ops.trees import checked_device, leaves, map_tree
from rein.schedules import Schedule
from rein.types import Group, Transition, Tree

PER_ENVIRONMENT = ("carry", "first_carry", "carry_reset")  # tensors of an agent that are not parameters
BATCH_SIZE = 64  # of agents with a replay and without the option `batch_size`


@dataclass_transform(kw_only_default=True, field_specifiers=(option, attrs.field))
class _HasOptions:
    """Class whose annotated `option(...)` attributes become keyword arguments of the constructor."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        attrs.define(cls, slots=False, eq=False, repr=False, field_transformer=declared)
        refuse_hidden(cls)
        document(cls)

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **options: Any) -> Any:
            """Raise TypeError for unknown options before the constructor runs."""
            refuse_unknown(cls, options)
            return super().__new__(cls)


@foreign_names.explain(foreign_names.AGENT_METHODS)
class Agent(_HasOptions, abc.ABC):
    """Base class of agents. Subclasses declare options and implement `build`, `act` and `update`.

    - `build(generator)` creates networks, optimizers and memory and assigns them to attributes. It runs when the agent
      is constructed, and again if a seed is given later. Initialize parameters with `generator`.
    - `act(observation, explore)` returns a distribution or an action (N, ...), optionally as a pair with a dictionary
      of tensors (N, ...) to record. It runs without gradients. Draw random numbers from `self.generator`.
    - `update(batch)` learns from a batch and returns metrics as tensors without gradients, which become metrics of the
      epoch. The type of the batch depends on the attributes that `build` assigns:

      - `self.rollout`: the full rollout.
      - `self.replay`: a sample of `batch_size` rows (default 64), at every step after `learning_starts` env steps
        (default 0). The options `n_step` and `gamma` are passed to the replay if the agent has them.
      - neither: the last `Transition`.

    - If the option `learning_rate` is a schedule, its current value is set in every optimizer before each `update`.
    - Modules are in evaluation mode, and in training mode during `update`. Modules that are in evaluation mode after
      `build` stay in it.

    The state of an agent is every attribute without a leading underscore that is not an option: modules, optimizers,
    generators, objects with `state_dict`, tensors, numbers, None, and dictionaries and lists of these. It is saved with
    the run and restored bit for bit.

    Args:
        env: Environment, group of a multi-agent environment, or observation space of one environment.
        action_space: Action space of one environment, if `env` is a space.
    """

    observation_space: Any = attrs.field(alias="env", kw_only=False)
    action_space: Any = attrs.field(default=None, kw_only=False)
    seed: int | None = option(default=None, check=checked_seed, fixed=True, help="seed of all random streams")
    device: Any = option(default="cpu", check=checked_device, fixed=True, help="device of networks and memory")

    has_critic: ClassVar[bool] = True  # False if action values select the actions
    reports: ClassVar[tuple[str, ...]] = ()  # metrics of `update` that exist before it is first called, as NaN
    stacked: ClassVar[Any] = None  # class that computes agents of exactly this class together, in a `Population`

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "update" in vars(cls):
            cls.update = _in_training_mode(cls.update)  # type: ignore[method-assign]

    def __attrs_post_init__(self) -> None:
        if self.action_space is None and isinstance(self.observation_space, Group):
            _, self.observation_space, self.action_space = self.observation_space
        if self.action_space is None and hasattr(self.observation_space, "single_action_space"):
            environment = self.observation_space
            self.observation_space = environment.single_observation_space
            self.action_space = environment.single_action_space
            if hasattr(environment, "num_envs"):  # not a game, whose number of environments is not known
                self.check_num_envs(environment.num_envs)
        if hasattr(self.observation_space, "single_action_space"):
            raise TypeError(
                f"{type(self).__name__}(environment, {self.action_space!r}): options are keyword arguments, "
                "for example learning_rate=3e-4"
            )
        for name in ("observation_space", "action_space"):
            if not isinstance(space := getattr(self, name), spaces.Space):
                raise TypeError(f"{type(self).__name__}({name}={space!r}): {_instead_of(space)}")
            children(space)  # raises for a space whose values cannot be tensors
        given: tuple[Any, Any] = (self.observation_space, self.action_space)
        try:
            self.check_spaces(*given)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}: {error}; use {_agents_for(*given)}") from None
        if (mask := entry(self.observation_space, ACTION_MASK)) is not None:
            check_mask(mask, self.action_space)  # type: ignore[arg-type]  # a space, see above
        if not self.has_critic and entry(self.observation_space, CRITIC_OBSERVATION) is not None:
            raise ValueError(
                f"{type(self).__name__} has no separate critic, so it cannot use the entry {CRITIC_OBSERVATION!r} of "
                f"{self.observation_space}: use an agent with an actor and a critic, such as PPO or DiscreteSAC, or "
                "remove the entry"
            )
        self._config = self._describe()
        options = {name: getattr(self, name) for name in options_of(type(self))}
        self._stateful_options = {name: value for name, value in options.items() if has_state(value)}
        self._loaded = False
        self.env_steps = self.updates = 0
        self._start(secrets.randbits(31) if self.seed is None else self.seed)

    def _start(self, seed: int) -> None:
        """Build the agent and start its random streams from `seed`."""
        self._root_seed = seed
        vars(self).update(copy.deepcopy(self._stateful_options))  # agents never share noise or normalizers
        self.last_transition: Transition | None = None  # recorded, not yet learned
        self.learners: dict[str, Any] = {}
        self.carry: Tensor | None = None  # (N, C) memory of a recurrent agent
        self.generator = generator(seed, "agent", rank(), device=self.device)
        self._build(generator(seed, "networks", device=self.device))
        replay, rows = vars(self).get("replay"), getattr(self, "batch_size", BATCH_SIZE)
        if rows > (capacity := getattr(replay, "capacity", rows)):
            raise ValueError(
                f"{type(self).__name__}: batch_size={rows} is larger than the capacity of the replay, {capacity}; give "
                "a smaller batch_size= or a larger capacity="
            )
        # parts in training mode; they are in evaluation mode except in `update`, so that acting never changes them
        modules = (leaf for value in vars(self).values() for _, leaf in leaves(value) if isinstance(leaf, nn.Module))
        self._trained = [*dict.fromkeys(part for module in modules for part in module.modules() if part.training)]
        for part in self._trained:
            vars(part)["training"] = False

    def _build(self, generator: torch.Generator) -> None:
        """Call `build` on the device of the agent. Raises MemoryError if its tensors do not fit."""
        try:
            with torch.device(self.device), torch.inference_mode(False):  # inference tensors cannot be trained
                self.build(generator)
        except (RuntimeError, ValueError) as error:
            if not re.search("allocate memory|out of memory|[Oo]verflow", str(error)):
                raise
            raise MemoryError(
                f"{type(self).__name__}: networks or a table for the observation space {self.observation_space} and "
                f"the action space {self.action_space} do not fit into memory; use smaller networks or spaces"
            ) from error

    @abc.abstractmethod
    def build(self, generator: torch.Generator) -> None:
        """Create networks, optimizers and memory."""

    @abc.abstractmethod
    def act(self, observation: Tree, explore: bool | float) -> Any:
        """Return a distribution or an action (N, ...), optionally with a dictionary of tensors to record."""

    @abc.abstractmethod
    def update(self, batch: Any, /) -> Mapping[str, Tensor]:
        """Learn from a full rollout, a replay sample or a transition, and return metrics."""

    @classmethod
    def check_spaces(cls, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        """Raise ValueError for spaces that agents of this class do not support. By default, all are supported."""

    def check_num_envs(self, num_envs: int) -> None:  # an optional hook
        """Raise ValueError if the options do not fit the number of environments. By default, all fit."""

    @property
    def loaded(self) -> bool:
        """Whether a state was loaded. If so, `reseed` keeps the parameters."""
        return self._loaded

    @loaded.setter
    def loaded(self, loaded: bool) -> None:
        self._loaded = loaded

    @property
    def counts(self) -> dict[str, int]:
        """The counts that schedules depend on."""
        return {"env_steps": self.env_steps, "updates": self.updates}

    def select_action(self, observation: Tree) -> tuple[Tree, dict[str, Tensor]]:
        """Return an exploring action (N, ...) and the tensors to record with it."""
        with torch.no_grad():
            return self._sampled(self.act(observation, True), True)

    def _sampled(self, result: Any, explore: bool | float) -> tuple[Tree, dict[str, Tensor]]:
        """Return action and extras, given the result of `act`."""
        action, extras = result if type(result) is tuple else (result, {})
        if hasattr(action, "log_prob"):
            action = action.sample(self.generator) if explore else action.mode()
        return action, extras

    def record_observation(self, transition: Transition) -> None:
        """Add one transition of each environment to the memory."""
        if (memory := self._memory) is None:
            self.last_transition = transition
        else:
            memory.append(transition)
        self.env_steps += len(transition.reward)

    @property
    def _memory(self) -> Any:
        attributes = vars(self)
        return attributes.get("rollout", attributes.get("replay"))

    def observe_reset(self, observation: Tree, mask: Tensor) -> None:
        """End the current episodes of the environments in `mask` (N,), which were reset outside a step."""
        if (memory := self._memory) is not None:
            memory.observe_reset(mask)

    def optimize_model(self) -> dict[str, Tensor]:
        """Call `update` if a batch is available, and return its metrics."""
        if (batch := self._batch()) is None:
            return {}
        before = self.updates
        self.set_learning_rates()
        metrics = dict(self.update(batch))
        if self.updates == before:
            self.updates += 1
        if (rollout := vars(self).get("rollout")) is not None:
            rollout.clear()
        return metrics

    def _batch(self) -> Any:
        attributes = vars(self)
        if (rollout := attributes.get("rollout")) is not None:
            return rollout if rollout.full else None
        if (replay := attributes.get("replay")) is not None:
            ready = len(replay) and self.env_steps >= getattr(self, "learning_starts", 0)
            return self.sample() if ready else None
        transition, self.last_transition = self.last_transition, None
        return transition

    def sample(self) -> Any:
        """Sample a batch from `self.replay`."""
        settings = {name: getattr(self, name) for name in ("n_step", "gamma") if hasattr(self, name)}
        return self.replay.sample(getattr(self, "batch_size", BATCH_SIZE), self.generator, **settings)  # type: ignore[attr-defined]

    def set_learning_rates(self) -> None:
        """Set the learning rate of every optimizer to the current value of the option `learning_rate`."""
        if isinstance(rate := getattr(self, "learning_rate", None), Schedule):
            for value in vars(self).values():
                if hasattr(value, "param_groups"):
                    set_learning_rate(value, rate(**self.counts))

    def policy(
        self, deterministic: bool = True, *, epsilon: float | None = None, device: torch.device | str | None = None
    ) -> AgentPolicy:
        """Return a policy that uses the current parameters of the agent. Acting with it does not change the agent.

        Args:
            deterministic: Whether to act greedily. Otherwise, the policy explores as much as the agent.
            epsilon: Probability of a random action instead, for discrete actions. Random actions are uniform over the
                valid actions.
            device: Device on which the policy acts, by default that of the agent. On another device the policy has a
                copy of the parameters, which is updated when the agent has learned.

        Raises:
            ValueError: If `epsilon` is not from 0 to 1, or if the actions are not discrete.
        """
        if epsilon is not None:
            called = f"{type(self).__name__}.policy(epsilon={epsilon!r})"
            if children(self.action_space) is not None or is_continuous(self.action_space):
                raise ValueError(
                    f"{called}: random actions need a Discrete, MultiDiscrete or MultiBinary action space, got "
                    f"{self.action_space}; use deterministic=False to explore"
                )
            try:
                epsilon = in_unit_interval(epsilon)
            except ValueError as error:
                raise ValueError(f"{called}: {error}") from None
        return AgentPolicy(self, not deterministic, device, epsilon)

    def reseed(self, seed: int) -> None:
        """Start all random streams from `seed`. Loaded parameters are kept.

        Raises RuntimeError if the agent has already recorded transitions.
        """
        seed = checked_seed(seed)  # type: ignore[assignment]
        if self.env_steps and not self._loaded:
            raise RuntimeError(f"reseed({seed}): the agent has already recorded {self.env_steps} env steps")
        if not self._loaded:
            before = {name: value for name, value in vars(self).items() if isinstance(value, nn.Module)}
            self._start(seed)
            for name, module in before.items():
                share_parameters(module, getattr(self, name))
        elif not self.env_steps:
            self._root_seed, self.generator = seed, generator(seed, "agent", rank(), device=self.device)
        vars(self)["seed"] = seed

    def summary(self) -> Summary:
        """Return a table of all parameters with their layers, shapes and counts. Print it to see the table."""
        return Summary(self)

    @property
    def config(self) -> dict[str, Any]:
        """The spaces and the initial options of the agent, as JSON."""
        return {**self._config, "seed": self.seed, "device": str(self.device)}

    def _describe(self) -> dict[str, Any]:
        """Return the spaces and the current options, as JSON."""
        options = {name: as_json(getattr(self, name)) for name in options_of(type(self))}
        return {
            "observation_space": str(self.observation_space),
            "action_space": str(self.action_space),
            **options,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state: every public attribute that is not an option, and the seed."""
        state = {name: save_state(value) for name, value in self._state().items()}
        return {**state, "seed": self._root_seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned. Raises ValueError, before any change, if options differ."""
        mine = self._state()
        if differ := sorted({*mine, "seed"} ^ {*state}):
            raise ValueError(f"{type(self).__name__}: entries of the state and the agent differ: {', '.join(differ)}")
        for name, value in mine.items():
            check_state(f"{type(self).__name__}.{name}", value, state[name])
        for name, value in mine.items():
            vars(self)[name] = load_state(value, state[name], torch.device(self.device))
        self._root_seed, self._loaded = int(state["seed"]), True

    def _state(self) -> dict[str, Any]:
        skip = {name for name in options_of(type(self)) if not has_state(getattr(self, name))}
        return public_state(self, skip | {"observation_space", "action_space"})

    def __repr__(self) -> str:
        options = {name: (getattr(self, name), option.default) for name, option in options_of(type(self)).items()}
        changed = {name: value for name, (value, default) in options.items() if as_json(value) != as_json(default)}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


def _in_training_mode(update: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of `update`: set the modules of the agent to training mode during the call."""

    @functools.wraps(update)
    def learn(agent: Agent, *arguments: Any, **options: Any) -> Any:
        changed = [part for part in agent._trained if not part.training]  # none if a subclass calls `super().update`
        for part in changed:
            vars(part)["training"] = True  # `part.training = True` takes ten times as long
        try:
            return update(agent, *arguments, **options)
        finally:
            for part in changed:
                vars(part)["training"] = False

    return learn


def _instead_of(value: Any) -> str:
    """Return what to pass instead of an object that is neither an environment nor a space."""
    if isinstance(value, str) and value.endswith("Policy"):
        return "rein needs no policy name; give an environment first, and options such as hidden= by keyword"
    if isinstance(value, str) or hasattr(value, "unwrapped"):
        return "give an environment that rein.make(id_or_factory, num_envs) returns"
    return "give an environment, or the observation space and the action space of one environment"


def _agents_for(observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> str:
    """Return the names of the agents of rein that support these spaces."""
    package: Any = sys.modules["rein.agents"]  # imports its agents when they are read
    names = []
    for name in package.__all__:
        kind = getattr(package, name)
        if isinstance(kind, type) and issubclass(kind, Agent) and not kind.__module__.startswith("rein.agents.base."):
            with contextlib.suppress(ValueError):
                kind.check_spaces(observation_space, action_space)
                names.append(name)
    return " or ".join([", ".join(names[:-1]), *names[-1:]])


@foreign_names.explain(foreign_names.POLICY_METHODS)
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
        self.observation_space, self.action_space = agent.observation_space, agent.action_space
        self._agent = self._source = agent
        if self.device != agent.device:
            self._agent = _builder(agent, self.device)()
        self._explore, self._epsilon = explore, epsilon
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
        agent = self._current()
        saved = agent.generator, agent.carry
        rows = len(next(leaf for _, leaf in leaves(observation)))
        carry = self.carry if self.carry is not None and len(self.carry) == rows else None
        agent.generator, agent.carry = self._generator or agent.generator, carry
        try:
            action, _ = agent._sampled(agent.act(observation, self._explore), self._explore)
            return action if self._epsilon is None else self._mixed(action, observation, self._epsilon), {}
        finally:
            self.carry = agent.carry
            agent.generator, agent.carry = saved

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
            agent.env_steps, agent.updates = source.env_steps, source.updates
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
        return functools.partial(_built_policy, _builder(self._source, device), self._explore, self._epsilon)

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the parameters and counters of the agent on the CPU. `load_snapshot` loads it."""
        source = self._source
        found = map_tree(lambda x: x.detach().to("cpu", copy=True), parameters_of(source))
        return {"parameters": found, "env_steps": source.env_steps, "updates": source.updates}

    def load_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """Act with the parameters and counters of a `snapshot` of the same policy."""
        load_parameters(self._agent, snapshot["parameters"])
        self._agent.env_steps, self._agent.updates = snapshot["env_steps"], snapshot["updates"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generator and the carry. Networks are part of the agent's state."""
        return {"generator": own_state(self._generator), "carry": self.carry}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises ValueError if one of the policies is greedy and the other one explores.
        """
        restore_own(self._generator, state["generator"])
        self.carry = None if state["carry"] is None else state["carry"].to(self.device, copy=True)


def _builder(agent: Agent, device: torch.device) -> Callable[[], Agent]:
    """Return a function that builds an agent with the same options on a device."""
    options: dict[str, Any] = {name: getattr(agent, name) for name in options_of(type(agent))} | {"device": device}
    return functools.partial(type(agent), agent.observation_space, agent.action_space, **options)


def _built_policy(build: Callable[[], Agent], explore: bool, epsilon: float | None) -> AgentPolicy:
    return AgentPolicy(build(), explore, epsilon=epsilon)


def snapshot(agent: Any, shared: Iterable[Any] = ()) -> Any:
    """Return a copy of an agent that can act, without its data and learners. `shared` objects are not copied."""
    parts = [getattr(agent, name, None) for name in ("replay", "rollout", "_graph")]
    memo: dict[int, Any] = {id(part): None for part in (*parts, *agent.learners.values()) if part is not None}
    memo |= {id(agent.learners): {}, **{id(part): part for part in shared if part is not None}}
    for value in vars(agent).values():
        if isinstance(value, torch.Generator):
            memo[id(value)] = value.clone_state()
    return copy.deepcopy(agent, memo)


def parameters_of(agent: Agent) -> dict[str, list[Tensor]]:
    """Return the parameters and buffers of each module of an agent, and its other tensors for acting, by attribute."""
    found = {}
    for name, value in vars(agent).items():
        if name.startswith("_"):
            continue
        if isinstance(value, nn.Module):
            found[name] = [tensor.data for tensor in (*value.parameters(), *value.buffers())]
        elif isinstance(value, Tensor) and name not in PER_ENVIRONMENT:
            found[name] = [value]
    return found


def load_parameters(agent: Agent, parameters: Mapping[str, list[Tensor]]) -> None:
    """Copy the result of `parameters_of`, for an agent with the same options, into this agent."""
    mine = parameters_of(agent)
    for name, tensors in parameters.items():
        if name not in mine:  # a tensor that the agent created later
            vars(agent)[name] = tensors[0].to(agent.device, copy=True)
            continue
        for copied, current in zip(mine[name], tensors, strict=True):
            copied.copy_(current)


@torch.no_grad()
def copy_learned(source: Agent, target: Agent) -> None:
    """Copy networks, tables, optimizers and normalizers to an agent with the same options of networks, in place.

    The target keeps its counts, its random streams, and all data of its own environments.
    """
    given, kept = parameters_of(source), parameters_of(target)
    shapes = [{name: [x.shape for x in tensors] for name, tensors in each.items()} for each in (given, kept)]
    if shapes[0] != shapes[1]:
        raise ValueError("the networks of the two agents have different shapes, so one cannot be copied to the other")
    load_parameters(target, given)
    mine, theirs = vars(target), vars(source)
    pairs: list[tuple[Any, Any]] = [(target.learners[name], learner) for name, learner in source.learners.items()]
    pairs += [(mine[name], value) for name, value in theirs.items() if hasattr(value, "param_groups")]
    for copied, current in pairs:
        load_state(copied, save_state(current), torch.device(target.device))  # copies the tensors
    if isinstance(normalizer := theirs.get("reward_normalizer"), RewardNormalizer):
        running = mine["reward_normalizer"].state_dict()["running_return"]
        mine["reward_normalizer"].load_state_dict({**normalizer.state_dict(), "running_return": running})


def share_parameters(before: nn.Module, after: nn.Module) -> None:
    """Make `before` share the parameters and buffers of `after`, so that policies built on `before` stay current."""
    for old, new in ((before.parameters(), after.parameters()), (before.buffers(), after.buffers())):
        for mine, theirs in zip(old, new, strict=True):
            theirs.requires_grad_(mine.requires_grad)
            mine.data = theirs.data


def cast_action(action: Tree, space: spaces.Space[Any]) -> Tree:
    """Cast a recorded action to the agent's action dtype: int64, or float32 for a floating-point Box.

    All rows of a run then have the same dtype, even if another program selected some of the actions. Floating-point
    values for discrete actions are returned unchanged.
    """
    inner = children(space)
    if inner is not None:
        return {name: cast_action(action[name], part) for name, part in inner.items()}
    if not isinstance(action, Tensor):  # offline data is checked later
        return action
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        return action.float()
    return action if action.is_floating_point() else action.long()
