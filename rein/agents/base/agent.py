"""Base class of agents.

Shapes: N environments, B rows.
"""

from __future__ import annotations

import abc
import copy
import functools
import re
import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

import attrs
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.agents.base.agent_state import check_state, has_state, load_state, public_state, save_state
from rein.agents.base.optimizers import set_learning_rate
from rein.errors import AgentMeta, explain, hints
from rein.networks.heads import check_mask
from rein.ops.parallel import rank
from rein.ops.random import checked_seed, generator
from rein.ops.trees import checked_device, leaves
from rein.options import (
    as_json,
    declared,
    document,
    in_unit_interval,
    option,
    options_of,
    refuse_hidden,
    refuse_unknown,
)
from rein.schedules import Schedule
from rein.spaces import ACTION_MASK, CRITIC_OBSERVATION, children, entry, is_continuous
from rein.types import Group, Transition, Tree

if TYPE_CHECKING:
    from rein.agents.base.policies import AgentPolicy
    from rein.agents.base.summary import Summary

_MOST_WRAPPERS = 20  # around an environment
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


def environment_name(description: Any) -> str | None:
    """Return the Gymnasium id or the class of an environment, without its wrappers, from its type and configuration."""
    for _ in range(_MOST_WRAPPERS):
        match description:
            case {"config": {"inner": inner}}:
                description = inner
            case {"config": {"id": str(name)}}:
                return name
            case {"type": str(name)}:
                return name.rpartition(".")[2]
            case _:
                break
    return None


@explain("AGENT_METHODS")
class Agent(_HasOptions, metaclass=AgentMeta):
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

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "update" in vars(cls):
            cls.update = _in_training_mode(cls.update)  # type: ignore[method-assign]

    def __attrs_post_init__(self) -> None:
        self._environment_name: str | None = None  # for the model card of an export
        if self.action_space is None and isinstance(self.observation_space, Group):
            _, self.observation_space, self.action_space = self.observation_space
        if self.action_space is None and hasattr(self.observation_space, "single_action_space"):
            environment = self.observation_space
            self.observation_space = environment.single_observation_space
            self.action_space = environment.single_action_space
            description = {"type": type(environment).__name__, "config": getattr(environment, "config", {})}
            self._environment_name = environment_name(description)
            if hasattr(environment, "num_envs"):  # not a game, whose number of environments is not known
                self.check_num_envs(environment.num_envs)
        if hasattr(self.observation_space, "single_action_space"):
            raise TypeError(
                f"{type(self).__name__}(environment, {self.action_space!r}): options are keyword arguments, "
                "for example learning_rate=3e-4"
            )
        for name in ("observation_space", "action_space"):
            if not isinstance(space := getattr(self, name), spaces.Space):
                raise TypeError(f"{type(self).__name__}({name}={space!r}): {hints().instead_of(space)}")
            children(space)  # raises for a space whose values cannot be tensors
        both_spaces: tuple[Any, Any] = (self.observation_space, self.action_space)
        try:
            self.check_spaces(*both_spaces)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}: {error}; use {hints().agents_for(*both_spaces)}") from None
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
        self._rewritten: Any = None  # receives transitions instead of the replay, see `rein.rewrite_episodes`
        self.env_steps = self.updates = 0
        self._start(secrets.randbits(31) if self.seed is None else self.seed)

    def _start(self, seed: int) -> None:
        """Build the agent and start its random streams from `seed`."""
        self._root_seed = seed
        vars(self).update(copy.deepcopy(self._stateful_options))  # agents never share noise or normalizers
        self.last_transition: Transition | None = None  # recorded, not yet learned
        self._refilled_at = 0  # env steps at which a replay that was loaded without its rows has been refilled
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
        return self._rewritten or attributes.get("rollout", attributes.get("replay"))

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
            ready = len(replay) and self.env_steps >= max(getattr(self, "learning_starts", 0), self._refilled_at)
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
        from rein.agents.base.policies import AgentPolicy

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
            self._root_seed = seed
            self.generator = generator(seed, "agent", rank(), device=self.device)
        vars(self)["seed"] = seed

    def summary(self) -> Summary:
        """Return a table of all parameters with their layers, shapes and counts. Print it to see the table."""
        from rein.agents.base.summary import Summary

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
        attributes = self._state()
        if differ := sorted({*attributes, "seed"} ^ {*state}):
            raise ValueError(f"{type(self).__name__}: entries of the state and the agent differ: {', '.join(differ)}")
        for name, value in attributes.items():
            check_state(f"{type(self).__name__}.{name}", value, state[name])
        for name, value in attributes.items():
            vars(self)[name] = load_state(value, state[name], torch.device(self.device))
        self._root_seed = int(state["seed"])
        self._loaded = True
        self._refilled_at = 0
        replay: Any = vars(self).get("replay")
        if self._rewritten is None and hasattr(replay, "filled") and replay.filled < max(replay.slots, 1):  # not full
            recorded = replay.filled * replay.num_envs
            missing = min(getattr(self, "learning_starts", 0), self.env_steps, replay.capacity) - recorded
            self._refilled_at = self.env_steps + max(missing, 0)

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


def share_parameters(before: nn.Module, after: nn.Module) -> None:
    """Make `before` share the parameters and buffers of `after`, so that policies built on `before` stay current."""
    for old, new in ((before.parameters(), after.parameters()), (before.buffers(), after.buffers())):
        for shared, current in zip(old, new, strict=True):
            current.requires_grad_(shared.requires_grad)
            shared.data = current.data


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
