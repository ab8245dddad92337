"""Recipes: functions that build a loop and accept all options of its environment, agent and run as keyword arguments.

Example::

    @recipe(CartPole, PPO, num_envs=128, gamma=0.98, epochs=100, iterations=64)
    def cartpole(build: Builder, stop_when_solved: bool = True) -> Loop:
        '''PPO on CartPole-v1: solved at a mean return of 475.'''
        environment = build.environment()
        agent = build.agent(environment)
        return build.solved_loop(agent, environment, at_least=475.0, stop=stop_when_solved)

    loop = cartpole(store, num_envs=64, clip=0.1)

The decorated function accepts a store, and its other parameters as keyword arguments. It also accepts the options of
the environment, the agent and the run (`seed`, `device`, `epochs`, `iterations`, `learners`). A parameter replaces an
option of the same name. The signature and the docstring list all options, and the command line derives its flags from
them.

With `learners=S` above 1, the agent is a `rein.Population`, in an environment with S times as many rows. A list of S
values gives one to each learner, for the options in `build.per_learner`: those of the agent and the function that are
not lists themselves::

    loop = cartpole(store, learners=3, learning_rate=[1e-3, 3e-3, 1e-2])
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

import attrs

from rein.agents.population import Population
from rein.envs.gymnasium.adapter import GymnasiumEnvironment
from rein.errors import refuse_unknown
from rein.handlers.evaluate_every import evaluate_every
from rein.handlers.record_solved import record_solved
from rein.loop import Loop
from rein.ops.random import stream_seed
from rein.options import options_of
from rein.protocols import Store
from rein.schedules import linear
from rein.training.training_loop import training_loop

RUN = {"seed": 0, "device": "cpu", "epochs": 1, "iterations": 128, "learners": 1}
HELP = {
    "store": "store of the trajectories, or None",
    "num_envs": "number of environments",
    "worlds": "number of multi-agent worlds",
    "seed": "seed of all random streams",
    "device": "device of the agent and of environments simulated in torch",
    "compile": "compile losses and environments simulated in torch with torch.compile",
    "epochs": "maximum number of epochs",
    "env_steps": "total number of env steps",
    "iterations": "vector steps per epoch",
    "learners": "number of independent learners, each with its own seed and num_envs environments",
    "rollout_steps": "vector steps per rollout; None for one rollout per epoch",
    "evaluate_every": "epochs between evaluations of the greedy policy",
    "evaluation_episodes": "episodes per evaluation",
    "stop_when_solved": "stop the run when the task is solved",
}
_LEFT_OUT = ("threads",)  # option of agents; on the command line, --threads sets torch's number of threads

Parameters = dict[str, inspect.Parameter]


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


# options of a recipe with a default for `epsilon_env_steps`, which replace the option `epsilon` of its agent
EPSILON = {
    "epsilon": _parameter("epsilon", 0.05, float),
    "epsilon_env_steps": _parameter("epsilon_env_steps", 10_000, int),
}
EPSILON_HELP = {
    "epsilon": "final probability of a random action; decreases from 1",
    "epsilon_env_steps": "env steps over which epsilon decreases",
}


class _Agent(NamedTuple):
    """Class and options of an agent."""

    kind: type[Any]
    options: dict[str, Any]


@attrs.frozen
class Builder:
    """Builds the parts of a recipe with the options of the recipe or its caller.

    Keyword arguments of the methods override these options.
    """

    options: Mapping[str, Any]
    store: Store | None
    environment_class: Callable[..., Any]
    agent_class: type[Any]
    # function that returns the agent of each learner, given the environment of all; None for a single learner
    describe_learners: Callable[[Any], list[_Agent]] | None = None

    def environment(self, **replaced: Any) -> Any:
        """Build the environment, with rows for all learners."""
        parameters = _environment_options(self.environment_class)
        options = self._options_in(parameters, replaced)
        if self.learners > 1:
            rows = "worlds" if "worlds" in parameters else "num_envs"
            options[rows] = self.learners * options.get(rows, parameters[rows].default)
        return self.environment_class(**options)

    def evaluation_environment(self, num_envs: int, **replaced: Any) -> Any:
        """Build an environment for evaluation, with a different seed than the training environment.

        `num_envs` is rounded up to equal numbers for all learners.
        """
        seed = stream_seed(self.options["seed"], "evaluation")
        return self.environment(**{"num_envs": -(-num_envs // self.learners), "seed": seed, **replaced})

    @property
    def learners(self) -> int:
        """Number of learners."""
        return self.options["learners"]

    def agent(self, environment: Any, agent_class: type[Any] | None = None, **replaced: Any) -> Any:
        """Build the agent, of the class `agent_class` if given. Options that this class does not have are ignored.

        Returns a population if there are several learners.
        """
        if self.describe_learners is not None:
            return _population(self.describe_learners(environment), environment)
        kind, options = self.described_agent(agent_class, **replaced)
        return kind(environment, **options)

    def described_agent(self, agent_class: type[Any] | None = None, **replaced: Any) -> _Agent:
        """Return the class and the options of the agent."""
        agent_class = agent_class or self.agent_class
        agent_options = _agent_options(agent_class)
        computed: dict[str, Any] = {}
        if "rollout_steps" in agent_options and self.options.get("rollout_steps") is None:
            computed["rollout_steps"] = self.options["iterations"]
        if "epsilon" in agent_options and EPSILON.keys() <= self.options.keys():
            computed["epsilon"] = linear(1.0, self.options["epsilon"], env_steps=self.options["epsilon_env_steps"])
        return _Agent(agent_class, self._options_in(agent_options, computed | replaced))

    def loop(self, agent: Any, environment: Any, **options: Any) -> Loop:
        """Build the training loop. `options` are passed to `rein.training_loop`.

        If the recipe has an option `env_steps`, the number of epochs is computed from it and rounded up.
        """
        run = {name: self.options[name] for name in ("seed", "epochs", "iterations") if name in self.options}
        if "env_steps" in self.options:
            rows = environment.num_envs // self.learners
            run["epochs"] = -(-self.options["env_steps"] // (run["iterations"] * rows))
        return training_loop(agent, environment, self.store, **(run | options))

    def solved_loop(self, agent: Any, environment: Any, *, at_least: float, stop: bool) -> Loop:
        """Build a training loop that is solved when the last 100 episodes have a mean return of `at_least`."""
        loop = self.loop(agent, environment)
        record_solved(loop, "episode_return_100", at_least=at_least, stop=stop)
        return loop

    def evaluated_loop(
        self,
        agent: Any,
        environment: Any,
        num_envs: int,
        *,
        at_least: float,
        every: int,
        stop: bool,
        episodes: int = 100,
        **replaced: Any,
    ) -> Loop:
        """Build a training loop that is solved when the greedy policy has a mean return of `at_least`.

        The policy is evaluated every `every` epochs, in an `evaluation_environment` with the options in `replaced`.
        """
        loop = self.loop(agent, environment)
        test_environment = self.evaluation_environment(num_envs, **replaced)
        evaluate_every(loop, agent.policy(), test_environment, episodes=episodes, every=every)
        record_solved(loop, "evaluation_return", at_least=at_least, stop=stop)
        return loop

    def _options_in(self, names: Collection[str], replaced: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name in names} | dict(replaced)


class _AgentFound(Exception):  # not an error
    """Raised by `_LearnerBuilder.agent`, to end the function of a recipe before it builds further parts."""

    def __init__(self, agent: _Agent) -> None:
        super().__init__()
        self.agent = agent


@attrs.frozen
class _LearnerBuilder(Builder):
    """Builder of one learner, which finds its agent and builds nothing: other parts may write to files."""

    shared_environment: Any = None  # of all learners

    def environment(self, **replaced: Any) -> Any:
        return self.shared_environment

    def agent(self, environment: Any, agent_class: type[Any] | None = None, **replaced: Any) -> Any:
        raise _AgentFound(self.described_agent(agent_class, **replaced))


def recipe(
    environment: Callable[..., Any] | str, agent: type[Any], *, computed: Collection[str] = (), **defaults: Any
) -> Callable[[Callable[..., Loop]], Callable[..., Loop]]:
    """Decorate a function that builds a loop. Its first argument is a `Builder`.

    Args:
        environment: Class or function that creates the environment, or a Gymnasium id.
        agent: Class of the agent.
        computed: Options of the environment or the agent that the function computes. Callers cannot give them.
        defaults: Default values of the recipe for options of the environment, the agent and the run.

    Raises:
        TypeError: If no part of the recipe has one of the options in `defaults`.
    """
    make = functools.partial(GymnasiumEnvironment, environment) if isinstance(environment, str) else environment

    def decorate(function: Callable[..., Loop]) -> Callable[..., Loop]:
        declared = dict([*inspect.signature(function, eval_str=True).parameters.items()][1:])
        run = {name: _parameter(name, default, type(default)) for name, default in RUN.items()}
        if "env_steps" in declared:
            del run["epochs"]
        parts = _environment_options(make) | _agent_options(agent)
        own = declared if "epsilon_env_steps" not in defaults else declared | EPSILON
        every = {**own, **run, **parts, **run, **own}  # the first two set the order, the last two the values
        every = {name: parameter for name, parameter in every.items() if name not in computed}
        refuse_unknown(f"@recipe of {function.__name__}", defaults, every)
        parameters = {
            name: parameter.replace(kind=parameter.KEYWORD_ONLY, default=defaults.get(name, parameter.default))
            for name, parameter in every.items()
        }
        always = {name: parameters[name].default for name in (*run, *own, *defaults)}
        per_learner = {name for name in (*_agent_options(agent), *own) if name in parameters and name not in run}
        per_learner -= {name for name in per_learner if isinstance(parameters[name].default, list | tuple)}

        @functools.wraps(function)
        def build(store: Store | None = None, **options: Any) -> Loop:
            refuse_unknown(function.__name__, options, parameters)
            each = _of_learners(always | options, per_learner)

            def call(builder: Builder) -> Loop:
                return function(builder, **{name: builder.options[name] for name in declared})

            def describe_learners(environment: Any) -> list[_Agent]:
                builders = [_LearnerBuilder(one, store, make, agent, shared_environment=environment) for one in each]
                return [_find_agent(call, builder) for builder in builders]

            return call(Builder(each[0], store, make, agent, describe_learners if len(each) > 1 else None))

        store = inspect.Parameter(
            "store", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=Store | None
        )
        signature = inspect.Signature([store, *parameters.values()], return_annotation=Loop)
        build.per_learner = per_learner  # type: ignore[attr-defined]
        build.tables = _tables(parameters, make, agent)  # type: ignore[attr-defined]
        build.__signature__ = signature  # type: ignore[attr-defined]
        build.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        text = inspect.getdoc(function) or function.__name__
        build.__doc__ = _document(text, signature.parameters, agent, getattr(make, "func", make))
        return build

    return decorate


def _tables(names: Collection[str], environment: Callable[..., Any], agent: type[Any]) -> dict[str, str]:
    """Return the part, "environment" or "agent", to which options belong. Options of the run are left out."""
    parts = {"environment": _environment_options(environment), "agent": {**_agent_options(agent), **EPSILON}}
    return {name: part for part, options in parts.items() for name in options if name in names and name not in RUN}


def _find_agent(call: Callable[[Builder], Loop], builder: _LearnerBuilder) -> _Agent:
    """Return the agent that the function of a recipe builds for one learner."""
    try:
        call(builder)
    except _AgentFound as found:
        return found.agent
    raise ValueError(f"learners={builder.learners}: the recipe must build its agent with build.agent(environment)")


def _of_learners(options: Mapping[str, Any], per_learner: Collection[str]) -> list[dict[str, Any]]:
    """Return the options of each learner. Raises ValueError for a list of another length."""
    learners = options["learners"]
    if not isinstance(learners, int) or learners < 1:
        raise ValueError(f"learners={learners!r}: expected a whole number, 1 or more")
    lists = {name: value for name, value in options.items() if name in per_learner and isinstance(value, list)}
    for name, values in lists.items():
        if learners == 1 or len(values) != learners:
            raise ValueError(f"{name}={values!r:.80}: expected a single value, or one for each of {learners=}")
    return [{**options, **{name: values[i] for name, values in lists.items()}} for i in range(learners)]


def _population(agents: Sequence[_Agent], environment: Any) -> Population:
    """Build a population of these agents, which differ in options. Raises ValueError if they have other classes."""
    kind, common = agents[0]
    if any(agent.kind is not kind for agent in agents):
        raise ValueError(f"learners of {', '.join(sorted({a.kind.__name__ for a in agents}))}: expected a single class")
    options = dict(common)
    for name, value in common.items():
        values = [agent.options[name] for agent in agents]
        if any(other != value for other in values):
            options[name] = values
    return Population(kind, environment, learners=len(agents), **options)


def _environment_options(make: Callable[..., Any]) -> Parameters:
    parameters = inspect.signature(make, eval_str=True).parameters.values()
    return {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD and p.default is not p.empty}


def _agent_options(agent: type[Any]) -> Parameters:
    types = get_type_hints(agent)
    options = {name: field for name, field in options_of(agent).items() if name not in _LEFT_OUT}
    parameters = {name: _parameter(name, field.default, types[name]) for name, field in options.items()}
    if "rollout_steps" in parameters:
        parameters["rollout_steps"] = _parameter("rollout_steps", None, int | None)
    return parameters


def _document(text: str, names: Collection[str], agent: type[Any], environment: Any) -> str:
    """Return the docstring of a recipe with a line for each option that it does not describe."""
    missing = [name for name in names if not re.search(rf"^    {name}: ", text, re.MULTILINE)]
    texts = HELP | EPSILON_HELP if "epsilon_env_steps" in names else HELP
    lines = [f"    {name}: {texts.get(name) or _help(name, agent, environment)}." for name in missing]
    return "\n".join([text if "Args:\n" in text else f"{text}\n\nArgs:", *lines])


def _help(name: str, agent: type[Any], environment: Any) -> str:
    """Return the help text of an option: from the agent, or from the docstring of the environment."""
    if name in options_of(agent):
        return options_of(agent)[name].metadata["help"] or "option of the agent"
    for part in inspect.getmro(environment) if inspect.isclass(environment) else [environment]:
        if line := re.search(rf"^ +{name}: (.+?)\.?$", inspect.getdoc(part) or "", re.MULTILINE):
            return line[1]
    return "option of the environment"
