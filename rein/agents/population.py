"""Several independent learners of one algorithm in one process.

Shapes: S learners, N environments of a learner, R = S * N rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rein.accelerators import find
from rein.agents.base.agent import Agent
from rein.agents.base.policies import copy_learned
from rein.errors import explain
from rein.ops.parallel import processes
from rein.ops.random import checked_seed
from rein.ops.trees import leaves, map_tree
from rein.options import as_json, options_of
from rein.protocols import Policy
from rein.types import Transition, Tree


class Population:
    """S agents of one class that learn independently, each in its own environments, with its own seed and options.

    Learner i has the rows i * N to (i + 1) * N - 1 of an environment with S * N rows. It learns as an agent that trains
    alone in these environments would. PPO, A2C, SAC, TD3, DDPG and DQN with multilayer perceptrons of equal shapes
    compute all learners together, which is faster for small networks. Their results differ from those of single agents
    by rounding.

    A metric `x` is the mean over the learners, and `x_per_learner` (S,) has their values. The metric
    `learner_return/<i>` is the mean return of the last 100 training episodes of learner i. `env_steps` and `updates`
    count those of one learner, and so do schedules.

    Example::

        env = rein.make("CartPole-v1", num_envs=16 * 8, seed=0)
        agent = rein.Population(rein.PPO, env, learners=16, learning_rate=np.geomspace(1e-4, 1e-2, 16), seed=0)
        rein.train(agent, env, "runs/rates", env_steps=100_000)
        best = agent.agent(3)  # an ordinary PPO

    Args:
        kind: class of the agents, such as `rein.PPO`.
        env: environment with S * N rows.
        learners: number of learners S.
        seed: seed of the first learner, of which the others have the following numbers, or a list of all seeds.
        options: options of the agents. A list or array of S values has one for each learner, except for options that
            are lists themselves, such as `hidden`.

    Raises:
        TypeError: if `kind` is not a subclass of `rein.Agent`, or for an unknown option.
        ValueError: if the rows of the environment or a list of values cannot be split into S parts.
    """

    def __init__(
        self,
        kind: type[Agent],
        env: Any,
        *,
        learners: int,
        seed: int | Iterable[int] | None = None,
        **options: Any,
    ) -> None:
        if not (isinstance(kind, type) and issubclass(kind, Agent)):
            raise TypeError(f"Population({kind!r}): give a class of agents, such as rein.PPO")
        if not hasattr(env, "num_envs"):
            raise TypeError(f"Population(env={env!r}): give an environment of rein with S * N rows, see rein.make")
        if not isinstance(learners, int | np.integer) or learners < 1:
            raise ValueError(f"Population(learners={learners!r}): give a whole number, 1 or more")
        if env.num_envs % learners:
            raise ValueError(
                f"Population(learners={learners}): {env.num_envs} environments cannot be split into {learners} equal "
                "parts; give num_envs=learners * environments of a learner"
            )
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self.kind = kind
        self._options = options
        self._seeds = [checked_seed(learner_seed) for learner_seed in seed] if isinstance(seed, Iterable) else None
        if self._seeds is not None:
            options = {**options, "seed": self._seeds}
        each = [_options_of(kind, options, number, learners) for number in range(learners)]
        self._agents: list[Any] = [
            kind(self.observation_space, self.action_space, **agent_options) for agent_options in each
        ]
        for agent in self._agents:
            agent.check_num_envs(env.num_envs // learners)
        self._frozen: dict[int, Any] = {}  # greedy policies of the learners that no longer learn
        self._active = together(self._agents)
        # JSON values that all processes of a group must have in common, because learners step according to them
        self.decisions: dict[str, Any] = {}
        self._selected: tuple[Any, Any] = (None, {}), None  # action and extras, and those of the learners that learn
        self.seed: int | None = None
        if self._seeds is not None:
            self.seed = self._seeds[0]
        elif seed is not None:
            self.reseed(seed)  # type: ignore[arg-type]  # an int, see above

    @property
    def num_learners(self) -> int:
        """Number of learners S."""
        return len(self._agents)

    @property
    def device(self) -> torch.device:
        """Device of the agents."""
        return torch.device(self._agents[0].device)

    @property
    def env_steps(self) -> int:
        """Number of recorded rows of one learner."""
        return max(agent.env_steps for agent in self._agents)

    @property
    def updates(self) -> int:
        """Number of updates of one learner."""
        return max(agent.updates for agent in self._agents)

    @property
    def loaded(self) -> bool:
        """Whether a state was loaded. If so, `reseed` keeps the parameters."""
        return self._agents[0].loaded

    @loaded.setter
    def loaded(self, loaded: bool) -> None:
        for agent in self._agents:
            agent.loaded = loaded

    @property
    def learners(self) -> dict[str, Any]:
        """Learners of all agents, by names such as `3/networks`."""
        return {f"{i}/{name}": one for i, agent in enumerate(self._agents) for name, one in agent.learners.items()}

    @property
    def reports(self) -> tuple[str, ...]:
        """Metrics that exist before the first update, as NaN."""
        return self._agents[0].reports

    @property
    def config(self) -> dict[str, Any]:
        """The class, the spaces, the seed and the options, as JSON. Options that differ are lists."""
        configs = [agent.config for agent in self._agents]
        first = configs[0]
        differ = {
            name: [config[name] for config in configs] for name in first if any(c[name] != first[name] for c in configs)
        }
        seed = self.seed if self._seeds is None else self._seeds
        return {**first, **differ, "agent": self.kind.__name__, "learners": len(self._agents), "seed": seed}

    @property
    def differing_options(self) -> dict[str, list[Any]]:
        """The values of all learners for the initial options in which they differ, as JSON, without the seed."""
        configs = [agent.config for agent in self._agents]
        values = {name: [config[name] for config in configs] for name in configs[0] if name != "seed"}
        return {name: each for name, each in values.items() if any(value != each[0] for value in each)}

    @property
    def common_options(self) -> Sequence[str]:
        """Options that must stay the same for all learners, because the learners are computed together."""
        return self._active.common

    def agent(self, learner: int) -> Any:
        """Return the agent of one learner, an ordinary agent that continues to learn with the population."""
        return self._agents[learner]

    @property
    def frozen(self) -> set[int]:
        """Learners that no longer learn."""
        return {*self._frozen}

    def freeze(self, learners: int | np.integer[Any] | Iterable[int]) -> None:
        """Let learners act greedily from now on, without recording and learning. Only `copy_learner` changes them.

        In a group of processes, all processes must freeze the same learners between the same updates. Otherwise, the
        next update raises ValueError in all of them.

        Raises ValueError for a number that is not that of a learner, and if no learner would be left.
        """
        chosen = {int(learners)} if isinstance(learners, int | np.integer) else {int(number) for number in learners}
        if unknown := sorted(chosen - {*range(len(self._agents))}):
            raise ValueError(f"freeze({unknown}): the learners are 0 to {len(self._agents) - 1}")
        if len(self.frozen | chosen) == len(self._agents):
            raise ValueError("freeze: no learner would be left; end the run with state.halt_loop(reason)")
        remaining = [i for i, number in enumerate(self._numbers.tolist()) if number not in chosen]
        self._frozen |= {number: self._agents[number].policy() for number in chosen - self.frozen}
        self._active.keep(remaining)
        self._selected = (None, {}), None

    def copy_learner(self, source: int, target: int) -> None:
        """Copy networks, optimizers and normalizers of a learner to another one, in place.

        The target keeps its options, counts, random streams, and recorded transitions.
        """
        copy_learned(self._agents[source], self._agents[target])

    def select_action(self, observation: Tree) -> tuple[Tree, dict[str, Tree]]:
        """Return the exploring actions (R, ...) of all learners, and the tensors to record with them."""
        if not self._frozen:
            return self._active.select_action(observation)
        action, extras = self._active.select_action(self._of_active(observation))
        parts = split((action, extras), len(self._active.agents))
        zeros, rest = map_tree(torch.zeros_like, parts[0][1]), iter(parts)
        chosen = [
            (self._frozen[number].select_action(rows)[0], zeros) if number in self._frozen else next(rest)
            for number, rows in enumerate(split(observation, len(self._agents)))
        ]
        self._selected = joined(chosen), (action, extras)
        return self._selected[0]

    def record_observation(self, transition: Transition) -> None:
        """Give each learner the transitions of its rows."""
        if not self._frozen:
            self._active.record_observation(transition)
            return
        ended = transition.terminated | transition.truncated | ~transition.valid
        for number, ended_N in enumerate(split(ended, len(self._agents))):
            if number in self._frozen:
                self._frozen[number].reset(ended_N)
        ((action, extras), ours), self._selected = self._selected, ((None, {}), None)
        active_rows = self._of_active(transition)
        if ours is not None and transition.action is action:
            own_extras = {name: ours[1][name] for name, x in transition.extras.items() if x is extras.get(name)}
            active_rows = active_rows._replace(action=ours[0], extras={**active_rows.extras, **own_extras})
        self._active.record_observation(active_rows)

    def observe_reset(self, observation: Tree, mask: Tensor) -> None:
        """End the current episodes of the rows in `mask` (R,), which were reset outside a step."""
        for number, mask_N in enumerate(split(mask, len(self._agents))):
            if number in self._frozen:
                self._frozen[number].reset(mask_N)
        self._active.observe_reset(*self._of_active((observation, mask)))

    def optimize_model(self) -> dict[str, Tensor]:
        """Let every learner learn if its update is due. Returns means over learners, and the metrics of each."""
        if processes() > 1:
            for learner in self.learners.values():
                learner.decisions = {**self.decisions, "frozen learners": sorted(self._frozen)}
        metrics: dict[str, Tensor] = {}
        for name, value_K in self._active.optimize_model().items():
            value_S = torch.full((len(self._agents),), math.nan, dtype=torch.float32, device=self.device)
            value_S[self._numbers] = value_K.detach().float()
            metrics[f"{name}_per_learner"] = value_S
            metrics[name] = value_K.detach().float().nanmean()
        return metrics

    def policy(self, deterministic: bool = True, **options: Any) -> PopulationPolicy:
        """Return a policy of all rows, or of an environment with S equal parts, that uses the current parameters.

        `options` are passed to the method `policy` of every agent, such as `epsilon`.
        """
        return PopulationPolicy(self, [agent.policy(deterministic, **options) for agent in self._agents])

    def reseed(self, seed: int) -> None:
        """Set the seeds of the agents that were built without one to `seed`, `seed` + 1, and so on.

        Raises RuntimeError if an agent has already recorded transitions.
        """
        if self._seeds is not None:
            return
        self.seed = seed = checked_seed(seed)  # type: ignore[assignment]
        for number, agent in enumerate(self._agents):
            agent.reseed(seed + number)
        self._active = together(self._agents)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all agents."""
        frozen = {str(number): policy.state_dict() for number, policy in self._frozen.items()}
        states = [agent.state_dict() for agent in self._agents]
        for number, entries in zip(self._numbers.tolist(), self._active.entries(), strict=True):
            states[number] |= entries
        return {"agents": states, "frozen": frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned. Raises ValueError for another number of learners."""
        if len(state["agents"]) != len(self._agents):
            raise ValueError(f"Population: the state has {len(state['agents'])} learners, not {len(self._agents)}")
        for agent, agent_state in zip(self._agents, state["agents"], strict=True):
            agent.load_state_dict(agent_state)
        self._frozen = {int(number): self._agents[int(number)].policy() for number in state["frozen"]}
        for number, policy in self._frozen.items():
            policy.load_state_dict(state["frozen"][str(number)])
        self._active = together(self._agents)  # as before learners were frozen, after which others may be alike
        self._active.keep(self._numbers.tolist())
        self._active.load_entries([state["agents"][number] for number in self._numbers.tolist()])
        self._selected = (None, {}), None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for copies, with what the agents that are computed together share."""
        return {**vars(self), "_active": self._active.entries()}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        """Stack the parameters of the copied agents again."""
        vars(self).update(attributes)
        self._active = together(self._agents)
        self._active.keep(self._numbers.tolist())
        self._active.load_entries(attributes["_active"])

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise AttributeError for options of the learners, which each learner has itself."""
        if name != "seed" and name in options_of(vars(self).get("kind", Agent)):
            raise AttributeError(f"Population.{name}: set the option of a learner, population.agent(i).{name} = value")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        options = "".join(f", {name}={as_json(value)!r}" for name, value in self._options.items())
        return f"Population({self.kind.__name__}, learners={len(self._agents)}{options})"

    @property
    def _numbers(self) -> Tensor:
        """Numbers of the learners that learn."""
        numbers = [number for number in range(len(self._agents)) if number not in self._frozen]
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _of_active(self, tree: Any) -> Any:
        """Return the rows of the learners that learn."""
        if not self._frozen:
            return tree
        parts = split(tree, len(self._agents))
        return joined([part for number, part in enumerate(parts) if number not in self._frozen])


@explain("POLICIES_METHODS")
class PopulationPolicy:
    """Policies of the learners of a `Population`, as one policy of S equal parts of rows."""

    def __init__(self, population: Population, policies: Sequence[Policy]) -> None:
        """Create a policy from those of all learners."""
        self.device = population.device
        self.observation_space = population.observation_space
        self.action_space = population.action_space
        self._population = population
        self.policies = list(policies)

    def __repr__(self) -> str:
        return f"PopulationPolicy({self._population!r})"

    def select_action(self, observation: Tree) -> tuple[Tree, dict[str, Tensor]]:
        """Return an action (R, ...) for an observation (R, ...)."""
        parts = zip(self.policies, split(observation, len(self.policies)), strict=True)
        return joined([policy.select_action(part)[0] for policy, part in parts]), {}

    def reset(self, mask: Tensor | None = None) -> None:
        """Start new episodes in the rows of `mask` (R,), or in all rows."""
        masks = [None] * len(self.policies) if mask is None else split(mask, len(self.policies))
        for policy, mask_N in zip(self.policies, masks, strict=True):
            policy.reset(mask_N)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all policies."""
        return {"policies": [policy.state_dict() for policy in self.policies]}  # type: ignore[attr-defined]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        for policy, policy_state in zip(self.policies, state["policies"], strict=True):
            policy.load_state_dict(policy_state)  # type: ignore[attr-defined]


class SeparateAgents:
    """S agents, each with its part of the rows. Base class of agents that are computed together."""

    common: Sequence[str] = ()  # options whose values must stay the same for all agents

    def __init__(self, agents: Sequence[Any]) -> None:
        self.agents = list(agents)
        self.device = torch.device(agents[0].device)
        # action and extras of all rows, and those of each agent
        self._selected: tuple[Any, Mapping[str, Any], list[Any]] = None, {}, []

    def select_action(self, observation: Tree) -> tuple[Tree, dict[str, Tree]]:
        """Return the exploring actions (R, ...) of all agents, and the tensors to record with them."""
        parts = zip(self.agents, split(observation, len(self.agents)), strict=True)
        chosen = [agent.select_action(part) for agent, part in parts]
        action = joined([part for part, _ in chosen])
        extras = {name: joined([more[name] for _, more in chosen]) for name in chosen[0][1]}
        self._selected = action, extras, chosen
        return action, extras

    def record_observation(self, transition: Transition) -> None:
        """Give each agent the transitions of its rows."""
        (action, extras, chosen), self._selected = self._selected, (None, {}, [])
        selected = action is not None and transition.action is action
        added = {name: x for name, x in transition.extras.items() if x is not extras.get(name)}
        transition = transition._replace(action=None if selected else transition.action, extras=added)
        for number, (agent, part) in enumerate(zip(self.agents, split(transition, len(self.agents)), strict=True)):
            own_action, selected_extras = chosen[number] if chosen else (None, {})
            own_extras = {name: x for name, x in selected_extras.items() if name in extras and name not in added}
            part = part._replace(extras={**own_extras, **part.extras})
            agent.record_observation(part._replace(action=own_action) if selected else part)

    def observe_reset(self, observation: Tree, mask: Tensor) -> None:
        """End the current episodes of the rows in `mask` (R,), which were reset outside a step."""
        both = split((observation, mask), len(self.agents))
        for agent, (rows, mask_N) in zip(self.agents, both, strict=True):
            agent.observe_reset(rows, mask_N)

    def optimize_model(self) -> dict[str, Tensor]:
        """Let every agent learn if its update is due. Returns metrics (S,)."""
        of_agents = [agent.optimize_model() for agent in self.agents]
        settings: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        metrics: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for of_agent in of_agents for name in of_agent):
            numbers = [of_agent.get(name, math.nan) for of_agent in of_agents]  # numbers or tensors
            metrics[name] = torch.stack([torch.as_tensor(x, **settings).detach().mean() for x in numbers])
        return metrics

    def keep(self, numbers: Sequence[int]) -> None:
        """Continue with these agents only."""
        self.agents = [self.agents[number] for number in numbers]
        self._selected = None, {}, []

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries of the state of each agent that are stored here instead of in the agent."""
        return [{} for _ in self.agents]

    def load_entries(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load these entries from the states of the agents."""
        self._selected = None, {}, []


def split(tree: Any, parts: int) -> list[Any]:
    """Return equal parts of the rows of a tree. Raises ValueError if there are none."""
    size = rows_of_part(tree, parts)
    return [map_tree(lambda x, i=i: x[i * size : (i + 1) * size], tree) for i in range(parts)]


def rows_of_part(tree: Any, parts: int) -> int:
    """Return the number of rows of one of equal parts of a tree. Raises ValueError if there are none."""
    rows = len(next(leaf for _, leaf in leaves(tree)))
    if rows % parts:
        raise ValueError(f"Population: {rows} rows cannot be split into {parts} equal parts")
    return rows // parts


def joined(parts: Sequence[Tree]) -> Tree:
    """Return the rows of all parts."""
    return map_tree(lambda *x: torch.cat(x), *parts)


def _options_of(kind: type[Agent], values: Mapping[str, Any], number: int, learners: int) -> dict[str, Any]:
    """Return the options of one learner. Raises ValueError for a list of another length."""
    declared, options = options_of(kind), {}
    for name, value in values.items():
        takes_list = name in declared and isinstance(declared[name].default, list | tuple)
        if isinstance(value, list | np.ndarray) and not takes_list:
            if len(value) != learners:
                raise ValueError(
                    f"Population({name}={value!r}): give one value, or one for each of the {learners} learners"
                )
            value = (value.tolist() if isinstance(value, np.ndarray) else value)[number]
        options[name] = value
    return options


def together(agents: Sequence[Any]) -> SeparateAgents:
    """Return the agents as one, computed together if their class and their options allow it."""
    kind = find("agents", type(agents[0]))
    return kind(agents) if kind is not None and kind.supports(agents) else SeparateAgents(agents)
