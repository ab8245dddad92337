"""Replace bad learners of a population by changed copies of good ones."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from rein.agents.base.data_parallel import mean_of_processes
from rein.agents.population import Population
from rein.errors import refuse_unknown
from rein.loop import Loop
from rein.loop.state import State
from rein.ops.random import generator, restore
from rein.options import as_json, checked, options_of
from rein.schedules import as_schedule

logger = logging.getLogger("rein")

_NAME = "population_based_training"


def population_based_training(
    loop: Loop,
    bounds: Mapping[str, tuple[float, float]],
    *,
    fraction: float = 0.25,
    factors: Sequence[float] = (0.8, 1.25),
    resample_probability: float = 0.25,
    event: str = "epoch_ended",
    name: str = _NAME,
    **filters: Any,
) -> None:
    """Replace the worst learners of a population by changed copies of the best ones when `event` fires.

    Example::

        agent = rein.Population(rein.PPO, env, learners=16, learning_rate=np.geomspace(1e-4, 1e-2, 16), seed=0)
        loop = rein.training_loop(agent, env, "runs/pbt")
        rein.handlers.population_based_training(loop, {"learning_rate": (1e-4, 1e-2)}, every=20)

    Learners are compared by the metric `learner_return/<i>`, in a group of processes by its mean over them. Each of the
    worst ones copies networks, optimizers, normalizers and the options in `bounds` from a random one of the best,
    unless that one has no higher return. Then each of these options is multiplied by one of the factors at random, or
    replaced by a random value. The mean return of the copy is computed from its next episodes only. The copy is not
    compared before it has finished one.

    The copy keeps its counts, its random streams, its environments, and its replay or unfinished rollout. It therefore
    learns from data of both policies for a while. Let `every` fall on the end of a rollout to avoid this with on-policy
    agents. Frozen learners can be copied, but are not replaced.

    At the end of each epoch, the metric `<option>/<i>` is the value of learner i, and `copied_from/<i>` is the number
    of the learner that it copied in this epoch, or NaN. The values and the random generator are saved as the part
    `name`, so a resumed run equals an uninterrupted one.

    Args:
        loop: Loop of a `rein.Population`.
        bounds: Lowest and highest value of each option to change. Integer options stay integers.
        fraction: Share of the learners that is replaced, and share that can be copied. At least one of each.
        factors: Factors by which an option is multiplied.
        resample_probability: Probability of a random value within the bounds instead, on a logarithmic scale if the
            lower bound is above 0.
        event: Name of the event.
        name: Name of the part.
        **filters: Filters of the event, such as `every=10`.

    Raises:
        TypeError: If the agent is not a population, for an unknown option, or if an option is not a number, for
            example a schedule.
        ValueError: If a number or a bound is out of range, if an option cannot change during a run, or if learners
            differ in such an option. Also if learners that are computed together cannot differ in an option.

    Source: Jaderberg et al. 2017, "Population based training of neural networks".
    """
    population = loop.parts.get("agent")
    if not isinstance(population, Population):
        raise TypeError(f"{_NAME}: expected a loop of a rein.Population, got one of {type(population).__name__}")
    attach = loop.event(event)(**filters)
    checked = {option: _checked(population, option, *ends) for option, ends in bounds.items()}
    part = loop.own(
        name,
        PopulationBasedTraining(population, loop.parts["statistics"], checked, fraction, factors, resample_probability),
    )
    filtered = {filter_name: as_json(value) for filter_name, value in filters.items()}
    population.decisions[name] = {**part.config, "event": event, "filters": filtered}
    attach(part.evolve)
    loop.epoch_ended.attach(part.report)
    loop.started.attach(part.restore)


@attrs.define(eq=False)
class PopulationBasedTraining:
    """State of `population_based_training`."""

    population: Population
    statistics: Any
    bounds: Mapping[str, tuple[float, float]]
    fraction: float
    factors: Sequence[float]
    resample_probability: float
    generator: torch.Generator = attrs.field(init=False)
    loaded: Mapping[str, list[float]] | None = attrs.field(default=None, init=False)  # assigned when the run starts

    def __attrs_post_init__(self) -> None:
        if not self.bounds:
            raise ValueError(f'{_NAME}(bounds={{}}): give an option, such as {{"learning_rate": (1e-4, 1e-2)}}')
        if not 0 < self.fraction <= 0.5:
            raise ValueError(f"{_NAME}(fraction={self.fraction}): expected a number above 0, at most 0.5")
        if not self.factors or not all(0 < factor < math.inf for factor in self.factors):
            raise ValueError(f"{_NAME}(factors={self.factors}): expected numbers above 0")
        if not 0 <= self.resample_probability <= 1:
            raise ValueError(
                f"{_NAME}(resample_probability={self.resample_probability}): expected a number from 0 to 1"
            )
        if self.population.num_learners < 2:
            raise ValueError(f"{_NAME}: the population has a single learner; give learners=2 or more")
        if differ := self._fixed_that_differ():
            raise ValueError(
                f"{_NAME}: the learners differ in {', '.join(differ)}, which a copy cannot take over; give one value"
            )
        self.values()  # raises for a value that is not a number
        self.generator = generator(self.population.seed or 0, _NAME)

    def _fixed_that_differ(self) -> list[str]:
        agents = [self.population.agent(number) for number in range(self.population.num_learners)]
        fixed = [name for name, option in options_of(self.population.kind).items() if option.metadata["fixed"]]
        values_of = {name: [as_json(getattr(agent, name)) for agent in agents] for name in fixed if name != "seed"}
        return [name for name, values in values_of.items() if any(value != values[0] for value in values)]

    def values(self) -> dict[str, list[float]]:
        """Return the current values of all learners for each option."""
        agents = [self.population.agent(number) for number in range(self.population.num_learners)]
        return {option: [_number(option, getattr(agent, option)) for agent in agents] for option in self.bounds}

    def evolve(self, state: State) -> None:
        """Replace the worst learners. Handler of the event."""
        if not self.population.updates:  # the first update checks that all processes of a group do this
            return
        names = [f"learner_return/{number}" for number in range(self.population.num_learners)]
        returns = [mean_of_processes(state.metrics[name]) for name in names]
        ranked = sorted((value, number) for number, value in enumerate(returns) if not math.isnan(value))
        count = max(1, int(len(returns) * self.fraction))
        if len(ranked) < 2 * count:  # too few learners have a return
            return
        best = [number for _, number in ranked[-count:]]
        for value, target in ranked[:count]:
            source = best[self._below(count)]
            if target not in self.population.frozen and returns[source] > value:
                self._replace(state, target, source, returns)

    def _replace(self, state: State, target: int, source: int, returns: Sequence[float]) -> None:
        self.population.copy_learner(source, target)
        self.statistics.forget_returns(target)
        changes: list[str] = []
        for option, values in self.values().items():
            value = self._changed(option, values[source])
            setattr(self.population.agent(target), option, value)
            changes.append(f"{option} {values[target]:.4g} -> {value:.4g}")
        state.metrics[f"copied_from/{target}"] = source
        message = "epoch %d: learner %d (return %.5g) copies learner %d (return %.5g): %s"
        logger.info(message, state.epoch, target, returns[target], source, returns[source], ", ".join(changes))

    def _changed(self, option: str, value: float) -> float:
        """Return a value multiplied by a random factor or replaced by a random one, within the bounds."""
        low, high = self.bounds[option]
        factor, share = self.factors[self._below(len(self.factors))], self._uniform()
        if self._uniform() >= self.resample_probability:
            value = value * factor
        elif low > 0:
            value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        else:
            value = low + share * (high - low)
        value = min(max(value, low), high)
        kind = str(options_of(self.population.kind)[option].type)
        return round(value) if "int" in kind and "float" not in kind else value

    def _uniform(self) -> float:
        return float(torch.rand((), generator=self.generator, dtype=torch.float64, device="cpu"))

    def _below(self, stop: int) -> int:
        return int(torch.randint(stop, (), generator=self.generator, dtype=torch.int64, device="cpu"))

    def report(self, state: State) -> None:
        """Set the metrics of all learners. Handler of `epoch_ended`."""
        for option, values in self.values().items():
            for number, value in enumerate(values):
                state.metrics[f"{option}/{number}"] = value
        for number in range(self.population.num_learners):
            if (key := f"copied_from/{number}") not in state.metrics:
                state.metrics[key] = math.nan

    def restore(self, state: State) -> None:
        """Assign the loaded values. Handler of `started`, after all parts are loaded and set up."""
        for option, values in (self.loaded or {}).items():
            for number, value in enumerate(values):
                setattr(self.population.agent(number), option, value)
        self.loaded = None

    @property
    def config(self) -> dict[str, Any]:
        """Options as JSON."""
        bounds = {option: list(ends) for option, ends in self.bounds.items()}
        settings = {"fraction": self.fraction, "factors": list(self.factors)}
        return {"bounds": bounds, **settings, "resample_probability": self.resample_probability}

    def state_dict(self) -> dict[str, Any]:
        """Return the values of all learners and the state of the generator."""
        values = self.values() if self.loaded is None else self.loaded
        return {"values": values, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`. The values are assigned when the run starts."""
        self.loaded = {option: list(values) for option, values in state["values"].items()}
        restore(self.generator, state["generator"])


def _checked(population: Population, option: str, low: float, high: float) -> tuple[float, float]:
    """Return the bounds of an option. Raises TypeError or ValueError if the option cannot change within them."""
    options, kind = options_of(population.kind), population.kind.__name__
    refuse_unknown(_NAME, [option], options)
    if options[option].metadata["fixed"]:
        free = ", ".join(name for name, field in options.items() if not field.metadata["fixed"])
        raise ValueError(f"{_NAME}: {option} of {kind} cannot change during a run; the options that can are {free}")
    if option in population.common_options:
        raise ValueError(
            f"{_NAME}: {option} must be the same for learners that are computed together; give different values to "
            f"Population({option}=...), so that each learner is computed alone"
        )
    if not (low < high and math.isfinite(high - low)):
        raise ValueError(f"{_NAME}({option}=({low}, {high})): expected two numbers, the lower one first")
    for bound in (low, high):
        checked(population.agent(0), options[option], bound)
    return low, high


def _number(option: str, value: Any) -> float:
    try:
        schedule = as_schedule(value)
    except (TypeError, ValueError):
        raise TypeError(f"{_NAME}: {option} is {value!r}; give a number to each learner") from None
    if schedule.clock is not None:
        raise TypeError(f"{_NAME}: {option} follows a schedule over {schedule.clock}; give a number to each learner")
    return schedule()
