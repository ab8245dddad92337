"""What a run trains: a recipe, or an environment and an agent that the user names."""

from __future__ import annotations

import functools
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

import rein.agents
from rein.agents.base.agent import Agent
from rein.cli.catalog import find, import_from, is_recipe, search_working_directory, suggestion
from rein.envs.gymnasium.adapter import GymnasiumEnvironment, is_built_in
from rein.lazy import exports_of
from rein.loop import Loop
from rein.options import options_of
from rein.recipes.recipe import Builder, recipe

_NAME = re.compile(r"[\w.:/-]+")  # printed in a command for the user to copy
_ROLLOUT, _EPOCH = 128, 1_000  # vector steps per epoch, with a rollout and with a replay


@attrs.frozen
class Experiment:
    """Recipe, or environment and agent, by names.

    The environment is a Gymnasium id or module:function, the agent one of rein or module:Class.
    """

    recipe: str | None = None
    env: str | None = None
    agent: str | None = None

    @classmethod
    def of(cls, config: Any) -> Experiment:
        """Return the experiment in a file. Raises KeyError or TypeError if its names are missing or no texts."""
        names = ("env", "agent") if "env" in config else ("name",)
        values = [config[name] for name in names]
        if not all(isinstance(value, str) for value in values):
            raise TypeError(f"expected texts as {' and '.join(names)}")
        return cls(None, *values) if len(values) > 1 else cls(*values)

    @property
    def name(self) -> str:
        """Name for people and for the folder of the run."""
        return f"{self.env}-{self.agent}" if self.recipe is None else self.recipe

    @property
    def words(self) -> list[str]:
        """Words of the command line that name the experiment."""
        flags = [("--env", self.env), ("--agent", self.agent)]
        named = [word for flag, value in flags if value is not None for word in (flag, value)]
        return named if self.recipe is None else [self.recipe]

    @property
    def config(self) -> dict[str, str]:
        """Names as JSON."""
        parts = {"env": self.env, "agent": self.agent} if self.recipe is None else {}
        return {"name": self.name, **{key: value for key, value in parts.items() if value is not None}}

    @property
    def function(self) -> Callable[..., Any]:
        """Function that builds the loop. Imports the modules in the names."""
        if self.recipe is not None:
            return find(self.recipe)
        assert self.env is not None and self.agent is not None
        return _trainer(self.env, self.agent)

    @property
    def foreign_words(self) -> list[str]:
        """Words that name code outside of rein, which a file cannot choose."""
        return Experiment(**dict(self._foreign())).words

    def check(self, advice: str) -> None:
        """Raise ValueError unless the experiment is a recipe, or has both an environment and an agent."""
        if not self.words:
            raise ValueError(advice)
        if self.recipe is None and self.env is None:
            raise ValueError(f"--agent {self.agent}: give --env as well, such as --env CartPole-v1")
        if self.recipe is None and self.agent is None:
            raise ValueError(f"--env {self.env}: give --agent as well, such as --agent ppo")

    def completed(self, typed: Experiment, file: Path, command: str, after: str = "") -> Experiment:
        """Return this experiment, which `file` names, with the names that the user has typed instead.

        Raises ValueError if a name that only the file contains is of other code than that of rein or Gymnasium: a file
        never chooses code. The message has the complete command: `command`, the names and `after`.
        """
        if typed.recipe is not None or None not in (typed.env, typed.agent):
            return typed
        if self.recipe is not None and typed.words:
            raise ValueError(f"{file}: has the recipe {self.recipe!r:.200}; to replace it, give both --env and --agent")
        merged = Experiment(self.recipe, typed.env or self.env, typed.agent or self.agent)
        foreign = {kind: name for kind, name in merged._foreign() if name not in typed.words}
        if foreign:
            kinds = {"env": "environment"}
            what = " and ".join(f"the {kinds.get(kind, kind)} {name!r:.200}" for kind, name in foreign.items())
            verb, pronoun = ("is", "it") if len(foreign) == 1 else ("are", "them")
            words = [*typed.words, *Experiment(**foreign).words]
            shown = shlex.join(words) if all(map(_NAME.fullmatch, words)) else "my_module:name"
            raise ValueError(
                f"{file}: {what} {verb} not part of rein, and a file never chooses which code runs; "
                f"name {pronoun} on the command line: {command} {shown}{after}"
            )
        return merged

    def _foreign(self) -> Iterator[tuple[str, str]]:
        """Yield kind and name of each part that is not of rein, Gymnasium or Atari."""
        if self.recipe is not None and not is_recipe(self.recipe):
            yield "recipe", self.recipe
        if self.env is not None and not is_built_in(self.env):
            yield "env", self.env
        if self.agent is not None and _normal(self.agent) not in _agent_classes():
            yield "agent", self.agent


@functools.cache
def _trainer(env: str, agent: str) -> Callable[..., Loop]:
    """Return a recipe that trains the agent in the environment."""
    kind = _agent(agent)
    steps = _ROLLOUT if "rollout_steps" in options_of(kind) else _EPOCH

    @recipe(environment_maker(env), kind, num_envs=1, iterations=steps)
    def train(build: Builder, env_steps: int = 100_000) -> Loop:
        environment = build.environment()
        return build.loop(build.agent(environment), environment)

    train.__doc__ = f"Train {kind.__name__} in {env}.\n\n{(train.__doc__ or '').partition(chr(10))[2].lstrip()}"
    return train


def environment_maker(name: str) -> Callable[..., Any]:
    """Return the class or function that makes environments of rein from a Gymnasium id or `module:function`.

    A function without a parameter `num_envs` makes one environment of Gymnasium.
    """
    search_working_directory()
    module, _, attribute = name.partition(":")
    if not attribute.isidentifier():  # also an id with a module that registers it, such as my_envs:Maze-v0
        return functools.partial(GymnasiumEnvironment, name)
    made = import_from(module, attribute)
    makes_several = "num_envs" in inspect.signature(made).parameters
    return made if makes_several or hasattr(made, "apply_action") else functools.partial(GymnasiumEnvironment, made)


def _agent(name: str) -> type[Any]:
    module, colon, attribute = name.partition(":")
    if colon:
        search_working_directory()
        kind = import_from(module, attribute)
    else:
        classes = _agent_classes()
        if _normal(name) not in classes:
            nearest = suggestion(name, agent_names())
            raise ValueError(f"--agent {name}: unknown agent; {nearest} For a custom agent use my_module:Class")
        kind = getattr(rein.agents, classes[_normal(name)])
    if not (inspect.isclass(kind) and issubclass(kind, Agent)):
        raise TypeError(f"--agent {name}: is not a class derived from rein.Agent; train such an agent with rein.train")
    return kind


def agent_names() -> list[str]:
    """Return the names of rein's algorithms for `--agent`."""
    return sorted(name.lower() for name in _agent_classes().values())


@functools.cache
def _agent_classes() -> dict[str, str]:
    """Return rein's algorithms: lower-case name -> name of the class."""
    composed = ("MultiAgent", "Population")  # of other agents
    return {
        _normal(name): name
        for name, module in exports_of("rein.agents").items()
        if module.startswith("rein.agents.") and not module.startswith("rein.agents.base.") and name not in composed
    }


def _normal(name: str) -> str:
    return re.sub("[-_]", "", name).lower()
