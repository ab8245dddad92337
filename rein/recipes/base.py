"""Recipes: functions that build a loop and accept all options of its environment, agent and run as keyword arguments.

Example::

    @recipe(CartPole, PPO, num_envs=128, gamma=0.98, epochs=100, iterations=64)
    def cartpole(build: Builder, stop_when_solved: bool = True) -> Loop:
        '''PPO on CartPole-v1: solved at a mean return of 475.'''
        environment = build.environment()
        agent = build.agent(environment)
        loop = build.loop(agent, environment)
        solved(loop, "episode_return_100", at_least=475.0, stop=stop_when_solved)
        return loop

    loop = cartpole(store, num_envs=64, clip=0.1)

The decorated function accepts a store, and its other parameters as keyword arguments. It also accepts the options of
the environment, the agent and the run (`seed`, `device`, `epochs`, `iterations`). A parameter replaces an option of the
same name. The signature and the docstring list all options, and the command line derives its flags from them.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_type_hints

import attrs

from rein.agents.base.options import options_of
from rein.envs.gymnasium.adapter import GymnasiumEnvironment
from rein.foreign_names import refuse_unknown
from rein.loop import Loop
from rein.ops.random import stream_seed
from rein.protocols import Store
from rein.training.training_loop import training_loop

RUN = {"seed": 0, "device": "cpu", "epochs": 1, "iterations": 128}
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
    "rollout_steps": "vector steps per rollout; None for one rollout per epoch",
    "evaluate_every": "epochs between evaluations of the greedy policy",
    "evaluation_episodes": "episodes per evaluation",
    "stop_when_solved": "stop the run when the task is solved",
}
_LEFT_OUT = ("threads",)  # option of agents; on the command line, --threads sets torch's number of threads

Parameters = dict[str, inspect.Parameter]


@attrs.frozen
class Builder:
    """Builds the parts of a recipe with the options of the recipe or its caller.

    Keyword arguments of the methods override these options.
    """

    options: Mapping[str, Any]
    store: Store | None
    environment_class: Callable[..., Any]
    agent_class: type[Any]

    def environment(self, **replaced: Any) -> Any:
        """Build the environment."""
        return self.environment_class(**self._of(_environment_options(self.environment_class), replaced))

    def evaluation_environment(self, num_envs: int, **replaced: Any) -> Any:
        """Build an environment for evaluation, with a different seed than the training environment."""
        seed = stream_seed(self.options["seed"], "evaluation")
        return self.environment(num_envs=num_envs, seed=seed, **replaced)

    def agent(self, environment: Any, agent_class: type[Any] | None = None, **replaced: Any) -> Any:
        """Build the agent, of the class `agent_class` if given. Options that this class does not have are ignored."""
        agent_class = agent_class or self.agent_class
        known = _agent_options(agent_class)
        if "rollout_steps" in known and self.options.get("rollout_steps") is None:
            replaced = {"rollout_steps": self.options["iterations"], **replaced}
        return agent_class(environment, **self._of(known, replaced))

    def loop(self, agent: Any, environment: Any, **options: Any) -> Loop:
        """Build the training loop. `options` are passed to `rein.training_loop`.

        If the recipe has an option `env_steps`, the number of epochs is computed from it and rounded up.
        """
        run = {name: self.options[name] for name in ("seed", "epochs", "iterations") if name in self.options}
        if "env_steps" in self.options:
            run["epochs"] = -(-self.options["env_steps"] // (run["iterations"] * environment.num_envs))
        return training_loop(agent, environment, self.store, **(run | options))

    def _of(self, known: Collection[str], replaced: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name in known} | dict(replaced)


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
        known = {**declared, **run, **parts, **run, **declared}  # the first two set the order, the last two the values
        known = {name: parameter for name, parameter in known.items() if name not in computed}
        refuse_unknown(f"@recipe of {function.__name__}", defaults, known)
        parameters = {
            name: parameter.replace(kind=parameter.KEYWORD_ONLY, default=defaults.get(name, parameter.default))
            for name, parameter in known.items()
        }
        always = {name: parameters[name].default for name in (*run, *declared, *defaults)}

        @functools.wraps(function)
        def build(store: Store | None = None, **options: Any) -> Loop:
            refuse_unknown(function.__name__, options, parameters)
            options = always | options
            builder = Builder(options, store, make, agent)
            return function(builder, **{name: options[name] for name in declared})

        store = inspect.Parameter(
            "store", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=Store | None
        )
        signature = inspect.Signature([store, *parameters.values()], return_annotation=Loop)
        build.__signature__ = signature  # type: ignore[attr-defined]
        build.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        text = inspect.getdoc(function) or function.__name__
        build.__doc__ = _document(text, signature.parameters, agent, getattr(make, "func", make))
        return build

    return decorate


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _environment_options(make: Callable[..., Any]) -> Parameters:
    parameters = inspect.signature(make, eval_str=True).parameters.values()
    return {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD and p.default is not p.empty}


def _agent_options(agent: type[Any]) -> Parameters:
    types = get_type_hints(agent)
    options = {name: field for name, field in options_of(agent).items() if name not in _LEFT_OUT}
    found = {name: _parameter(name, field.default, types[name]) for name, field in options.items()}
    if "rollout_steps" in found:
        found["rollout_steps"] = _parameter("rollout_steps", None, int | None)
    return found


def _document(text: str, names: Collection[str], agent: type[Any], environment: Any) -> str:
    """Return the docstring of a recipe with a line for each option that it does not describe."""
    missing = [name for name in names if not re.search(rf"^    {name}: ", text, re.MULTILINE)]
    lines = [f"    {name}: {_help(name, agent, environment)}." for name in missing]
    return "\n".join([text if "Args:\n" in text else f"{text}\n\nArgs:", *lines])


def _help(name: str, agent: type[Any], environment: Any) -> str:
    """Return the help text of an option: from `HELP`, the agent, or the docstring of the environment."""
    if name in HELP:
        return HELP[name]
    if name in options_of(agent):
        return options_of(agent)[name].metadata["help"]
    for part in inspect.getmro(environment) if inspect.isclass(environment) else [environment]:
        if found := re.search(rf"^ +{name}: (.+?)\.?$", inspect.getdoc(part) or "", re.MULTILINE):
            return found[1]
    return "option of the environment"
