"""Training: connect the loop, the agent, the environments and the store.

Each function adds one aspect to a loop. Build a custom loop from a selection of them.
"""

from __future__ import annotations

import inspect
import logging
import numbers
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rein.accelerators import find
from rein.agents.base.optimizers import HINT
from rein.collection.collector import Collector
from rein.collection.first_come import FirstCome
from rein.collection.ray_actors import RayActors
from rein.envs.base.contract import check_range
from rein.episodes import PHASES, EpisodeStatistics, batch_step
from rein.episodes.episode_statistics import CompletedEpisodes
from rein.episodes.finite import FiniteData
from rein.episodes.step import check_fit, check_held
from rein.errors import check_keywords, refuse_unknown
from rein.handlers.checkpoint import save_at_end
from rein.handlers.interrupts import end_at_ctrl_c
from rein.handlers.progress import is_interactive
from rein.handlers.progress import progress as show_progress
from rein.handlers.run_files import describe, run_log
from rein.handlers.stop_at import stop_at
from rein.loop import Loop, checks
from rein.loop.events import Event
from rein.loop.filters import NOT_GIVEN
from rein.loop.state import State
from rein.networks.finite_parameters import parameter_reads
from rein.ops.parallel import rank
from rein.ops.random import checked_seed, stream_seed
from rein.ops.trees import map_tree, read_together, to_device
from rein.protocols import AgentProtocol, Environment, Store
from rein.replay.rollout import RowBuffer
from rein.schedules import Schedule
from rein.types import STEP_STATE_TYPES, StepState, Trajectory, Tree

logger = logging.getLogger("rein")

DELAYS = ("rollout_steps", "learning_starts", "train_frequency")  # options of agents
STEPS = 128  # default steps of an epoch of a continuing run


@check_keywords
@torch.inference_mode(False)
def training_loop(
    agent: AgentProtocol,
    environment: Environment,
    store: Store | str | Path | None = None,
    *,
    episodic: bool = False,
    seed: int | None = None,
    epochs: int | None = NOT_GIVEN,
    iterations: int | None = None,
    state_to_trajectory: Callable[[State], Mapping[str, Tree]] | None = None,
    check_finite: bool = True,
    strict: bool = False,
    debug: bool = False,
    collection: FirstCome | RayActors | None = None,
) -> Loop:
    """Build a loop that trains `agent` in `environment` and appends each epoch's trajectories to `store`.

    `store` is a store, or the path of a new `HDF5Store`: a number is added to the path if it exists, `runs/cartpole-2`.
    The store is `loop.parts["store"]`. The state is saved to its folder when the run ends and at the first Ctrl-C, for
    `rein evaluate`, `rein.load_policy` and `rein.resume`; `rein.checkpoint` saves it during the run, too.

    Continuing (the default): environments are reset once and live on across epochs of `iterations` steps. Episodic:
    they are reset in each epoch, each contributes exactly one episode, and the epoch halts when all have ended.
    `epochs` (1) and `iterations` are the defaults of `loop.run`; an epoch of a continuing run has 128 steps by default.
    `seed` seeds parts that were built without one (None draws one), environments differently in each process.
    `state_to_trajectory(state)` adds fields, each (N, ...), to what is stored. `check_finite` checks that rewards,
    observations, losses, gradient norms and parameters are finite and raises NonFiniteError if one is not. `strict`
    and `debug` are options of the loop; `strict` does not apply to metrics, which an agent reports only when it learns.
    `collection` steps each environment as soon as it is ready: `rein.FirstCome()`, or `rein.Asynchronous()` while the
    agent learns, or `rein.RayActors()` on other machines.

    Raises TypeError or ValueError if the parts do not fit together. The run raises RuntimeError in
    `torch.inference_mode()`.
    """
    check_fit(agent, environment, None if isinstance(store, str | Path) else store)
    if state_to_trajectory is not None and store is None:
        raise ValueError("training_loop(state_to_trajectory=...): the fields need a store, but store is None")
    drawn = [id(part) for part in seed_parts(seed, agent, environment)]
    iterations = STEPS if iterations is None and not episodic else iterations
    collector = None if collection is None else collection.collector(agent, environment)
    rows = RowBuffer(iterations, everything=store is not None, derive=state_to_trajectory)
    statistics = statistics_of(agent, environment, rows)
    completed = CompletedEpisodes(rows, statistics)
    finite = FiniteData(agent) if check_finite else None

    def step(state: State) -> StepState:
        # assigned here so that the step has ended even if a later handler raises an error
        try:
            shown = ahead and ahead.step(state)
            state.step_state = result = shown or batch_step(state, agent, environment, rows, emit, finite, collect)
        except Exception:  # the cause may be data that is not finite
            if finite is not None:
                finite.check_rollout(state)
            raise
        return _announce_ends(state, ended, completed) if ended.listened_to else result

    step.__qualname__ = "batch_step"  # shown in the repr of the loop
    checked = checks.strict(step, of=lambda step_state: step_state._replace(metrics=None)) if strict else step
    loop = Loop(checked, epochs=epochs, iterations=iterations, debug=debug, step_state_types=STEP_STATE_TYPES)
    collect = None if collector is None else collector.next_row
    emit = _emitter(loop.state, {name: loop.define(name) for name in PHASES})
    ended = loop.define("episodes_completed")
    ahead = find("rollout_program", loop, agent, environment, rows, finite, (episodic, strict, collector))
    parts = {"agent": agent, "environment": environment, "rows": rows, "statistics": statistics, "episodes": completed}
    if collector is not None:  # before the environment: its state is read first, and it pauses
        collect_with(loop, collector, episodic=episodic)
    for name, part in parts.items():
        loop.own(name, part, by_chance="seed" if id(part) in drawn else ())
    keep_open_episodes(loop, rows, completed, everything=store is not None)  # before the rows are cleared
    report_episodes(loop, rows, statistics)  # first: an unfinished step needs its row before the reset
    check_learning(loop, agent, finite, check_finite, statistics)
    reset_environments(loop, agent, collector or environment, statistics, finite, episodic=episodic)
    report_agent(loop, agent)
    if episodic:
        halt_when_all_ended(loop)
    warn_without_update(loop, agent)
    if store is not None:
        if isinstance(store, str | Path):
            store = new_store(store)
            check_held(environment, store)
        own_store(loop, store)
        write_trajectories(loop, store, rows, statistics)
    return loop


def train(
    agent: AgentProtocol,
    environment: Environment,
    store: Store | str | Path | None = None,
    *,
    epochs: int | None = None,
    env_steps: int | None = None,
    iterations: int | None = None,
    episodic: bool = False,
    seed: int | None = None,
    first_epoch: int | None = None,
    progress: bool = True,
    **options: Any,
) -> State:
    """Build a `training_loop` and run it, up to epoch `epochs` or for `env_steps` more env steps.

    `first_epoch` is the number of the first epoch, 1 by default, see `Loop.run`. `progress` shows a progress bar on a
    terminal or in a notebook. Further `options` are those of `training_loop`.

    Raises ValueError unless exactly one of `epochs` and `env_steps` is given, and TypeError for an unknown option.
    """
    names = {*inspect.signature(training_loop).parameters, "env_steps", "first_epoch", "progress"}
    refuse_unknown("train", options, names)
    if (epochs is None) == (env_steps is None):
        number = "neither" if epochs is None else "both"
        raise ValueError(
            f"train: expected one of epochs= and env_steps=, got {number}; give env_steps=100_000, for instance"
        )
    options |= {"episodic": episodic, "seed": seed, "epochs": epochs, "iterations": iterations}
    loop = training_loop(agent, environment, store, **options)
    if env_steps is not None:
        stop_at(loop, env_steps=agent.env_steps + env_steps)
    if progress and is_interactive():
        show_progress(loop)
    try:
        return loop.run(first_epoch=first_epoch)
    except KeyboardInterrupt as interrupt:
        if loop.state.status != "failed":  # as in `Loop.run`
            raise interrupt.with_traceback(None) from None
        raise


def seed_parts(seed: int | None, *parts: Any) -> list[Any]:
    """Seed every part whose `seed` is None. If `seed` is None, draw a common random seed and return these parts."""
    unseeded = [part for part in parts if part.seed is None]
    shared: Any = secrets.randbits(31) if seed is None else checked_seed(seed)
    for part in unseeded:
        others = rank() and hasattr(part, "apply_action")  # environments, whose data would equal that of process 0
        part.reseed(stream_seed(shared, "process", rank()) if others else shared)
    return unseeded if seed is None else []


def statistics_of(agent: AgentProtocol, environment: Environment, rows: RowBuffer) -> EpisodeStatistics:
    """Return statistics of episodes, also of worlds and groups of agents, and of the learners of a population."""
    return EpisodeStatistics(
        environment.num_envs,
        rows,
        worlds=getattr(environment, "worlds", 0),
        groups={name: group.rows for name, group in getattr(environment, "groups", {}).items()},
        learners=getattr(agent, "num_learners", 0),
    )


def check_learning(
    loop: Loop,
    agent: Any,
    finite: FiniteData | None,
    check_finite: bool,
    statistics: EpisodeStatistics | None = None,
) -> None:
    """Raise RuntimeError in inference mode; with `check_finite`, check updates, and parameters at the end of epochs.

    `agent` is an agent or a module. Agents list the learners of their networks in `learners`. Values of the epoch that
    are on a device, such as metrics, are read together with the checks, in one transfer.
    """

    def learners() -> list[Any]:
        return [*getattr(agent, "learners", {}).values()]

    @loop.started.wire
    def begin(state: State) -> None:
        if torch.is_inference_mode_enabled():
            raise RuntimeError("agents cannot learn in torch.inference_mode(); run the loop outside of it")
        for learner in learners():
            learner.check_finite(check_finite)

    @loop.epoch_ended.wire  # before handlers that read metrics, and those that evaluate or save the agent
    def read_epoch(state: State) -> None:
        reads = [*state.clocks.reads(), *loop.metrics.reads()]
        if statistics is not None:
            reads += statistics.reads()
        if finite is not None:
            reads += finite.reads(state)
        if check_finite:
            for learner in learners():
                reads += learner.finite_reads()
            reads += parameter_reads(agent, HINT)
        read_together(reads)


def reset_environments(
    loop: Loop,
    agent: AgentProtocol,
    environment: Environment | Collector,
    statistics: EpisodeStatistics,
    finite: FiniteData | None,
    *,
    episodic: bool,
) -> None:
    """Reset all environments once per run, or at the start of each epoch if `episodic`, and notify the agent.

    The environments are reset with a warning if their open episodes are lost. This happens if a resume could not
    restore them (`awaits_reset` is set, or they have no state), if a step failed after its action was selected, or if
    other code used the environments in between.
    """
    seeds = _LastSeeds(environment)

    def lost(state: State) -> str | None:
        if getattr(environment, "awaits_reset", False):
            return "could not be restored"
        if loop.step_cut and _acted_on(state.step_state):
            return "were in a step that failed"
        if not seeds.saved:
            return None if hasattr(environment, "load_state_dict") or not state.total_iterations else "were not saved"
        return None if seeds.are_current() else "were ended by other code that used the training environments"

    def begin(state: State, active_N: Tensor | None) -> None:
        observation = environment.reset()
        check_range(observation, environment.single_observation_space)
        observation = to_device(observation, agent.device)
        if finite is not None:
            finite.check_reset(state, observation)
        state.step_state = StepState(observation, active_N)
        statistics.observe_reset()
        agent.observe_reset(observation, torch.ones(environment.num_envs, dtype=torch.bool, device=agent.device))
        seeds.save()

    def reset_if_lost(state: State) -> None:
        if reason := lost(state):
            logger.warning("the open episodes of %s %s; new episodes begin", type(environment).__name__, reason)
            begin(state, state.step_state.active)

    for event in (loop.epoch_ended, loop.completed, loop.halted, loop.failed):
        event.wire(lambda state: seeds.save())
    if episodic:

        @loop.epoch_started.wire
        def reset_for_epoch(state: State) -> None:
            begin(state, torch.ones(environment.num_envs, dtype=torch.bool, device=agent.device))

    else:
        loop.epoch_started.wire(reset_if_lost)

    @loop.started.wire
    def reset_once(state: State) -> None:
        if loop.resumed:  # the saved seeds are outdated
            seeds.clear()
        if state.step_state is not None:
            reset_if_lost(state)
        elif not episodic:
            begin(state, None)


class _LastSeeds:
    """Episode seeds when the loop last used the environments."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self.clear()

    def clear(self) -> None:
        """Forget the seeds."""
        self.saved: tuple[Tensor, ...] = ()

    def save(self) -> None:
        """Save the seeds of the current episodes."""
        current_N = self._environment.episode_seeds
        self.saved = current_N, current_N.clone()

    def are_current(self) -> bool:
        """Return whether the seeds are still the same. A GPU is not read for the same tensor, which never changes."""
        current_N, (before_N, copy_N) = self._environment.episode_seeds, self.saved
        return (current_N is before_N and not current_N.is_cpu) or torch.equal(current_N, copy_N)


def collect_with(loop: Loop, collector: Collector, *, episodic: bool = False) -> None:
    """Register a collector, pause it when an epoch or the run ends, and report its staleness.

    Raises ValueError for episodic epochs, in which environments start together, and at the start of the run if there
    are handlers of `action_selected` or `action_applied`.
    """
    if episodic:
        raise ValueError("training_loop(collection=..., episodic=True): collection needs episodic=False")
    loop.own("collection", collector)
    loop.metric("staleness", lambda state: collector.staleness)

    @loop.started.wire
    def refuse_handlers(state: State) -> None:
        for name in ("action_selected", "action_applied"):
            if loop.event(name).handlers:
                raise ValueError(
                    f"{name} does not fire with collection=, because environments are not stepped together; attach the "
                    "handler to observation_recorded, or remove collection"
                )

    def pause(state: State) -> None:
        collector.pause()

    for event in (loop.epoch_ended, loop.completed, loop.halted):
        event.wire(pause)

    @loop.failed.wire
    def pause_after_failure(state: State) -> None:
        try:
            collector.pause()
        except Exception:  # the other handlers of `failed` must run, and the run has failed with another error
            logger.exception("an environment failed after the run")


def halt_when_all_ended(loop: Loop) -> None:
    """Halt an episodic epoch when the episodes of all environments have ended.

    The epoch completes instead if its last step had to truncate an episode because `iterations` were reached.
    """

    @loop.iteration_completed.wire
    def halt_if_all_ended(state: State) -> None:
        step_state: StepState = state.step_state
        transition, time_step = step_state.transition, step_state.time_step
        if step_state.active is None or transition is None or time_step is None:
            return
        was_cut_N = transition.truncated & ~time_step.truncated
        if not bool((step_state.active | was_cut_N).any()):
            state.halt_epoch()


def report_agent(loop: Loop, agent: Any) -> None:
    """Add the metrics that the agent reports, and set its learning rates as metrics at the end of each epoch."""
    for name in getattr(agent, "reports", ()):  # before the first update
        loop.metric(name, name)
    loop.metrics.report()

    @loop.epoch_completed.wire
    @loop.epoch_halted.wire
    def report(state: State) -> None:
        for name, rate in learning_rates(agent).items():
            state.metrics[name] = rate


def warn_without_update(loop: Loop, agent: AgentProtocol) -> None:
    """Log a warning if a run ends and the agent has never updated its parameters."""

    @loop.completed.wire
    @loop.halted.wire
    def warn(state: State) -> None:
        if agent.updates or not state.total_iterations or state.epoch_open:  # an open epoch was interrupted
            return
        reasons = [f"{name}={agent.config[name]}" for name in DELAYS if agent.config.get(name)]
        logger.warning(
            "the run ended after %s env steps (%s steps of every environment) without an update of %s%s. "
            "Run for more steps than one update needs",
            f"{agent.env_steps:,}",
            f"{state.total_iterations:,}",
            type(agent).__name__,
            f"({', '.join(reasons)})" if reasons else "",
        )


def keep_open_episodes(loop: Loop, rows: RowBuffer, completed: CompletedEpisodes, *, everything: bool) -> None:
    """Keep all fields of a step, and the rows of open episodes, if `episodes_completed` has handlers.

    `everything` keeps all fields in any case, for a store.
    """

    @loop.epoch_started.wire
    def begin_epoch(state: State) -> None:
        listened = bool(loop.episodes_completed.handlers)
        completed.begin_epoch(listened)
        rows.everything = everything or listened


def report_episodes(loop: Loop, rows: RowBuffer, statistics: EpisodeStatistics) -> None:
    """Set the metrics `episode_return` and `episode_length` of the epoch, and of the last 100 episodes as `..._100`.

    The metrics of multi-agent worlds are `world_return`, `world_length` and `return_<group>`, and those of a population
    `learner_return/<number>`.

    A step that failed after the agent had recorded it counts as an iteration, so that clocks, iterations and rows stay
    aligned. If it has no row, an invalid row is added, or the rows of the epoch begin after it.
    """

    @loop.started.wire
    def count_cut_step(state: State) -> None:
        vector_steps = state.clocks.vector_steps
        if not loop.step_cut or vector_steps != state.total_iterations + 1:
            return
        loop.count_cut_step()
        if statistics.first_row_step + rows.length == vector_steps:
            return
        if rows.length:
            before = map_tree(lambda field: field[-1], rows.fields())
            rows.append({**before, "valid": torch.zeros_like(before["valid"])})
        else:
            statistics.begin_epoch(vector_steps)

    @loop.epoch_started.wire
    def begin_rows(state: State) -> None:
        statistics.begin_epoch(state.clocks.vector_steps)
        rows.clear()

    for name in statistics.metrics:
        loop.metrics.compute(name, lambda name=name: statistics.read(name))


def new_store(path: str | Path) -> Store:
    """Return a new `HDF5Store`. A number is added to the path if it exists."""
    from rein.store.hdf5 import HDF5Store  # imports h5py, which a run without files does not need

    return HDF5Store(path, exist="new")


def own_store(loop: Loop, store: Store | str | Path) -> None:
    """Register a store, or a new one at a path. Write `run.json`, `run.log` and metrics to it if it has a folder.

    The store is flushed when the run ends, and the state is saved to it if it keeps checkpoints. The first Ctrl-C ends
    the run.
    """
    run_store: Any = new_store(store) if isinstance(store, str | Path) else store
    loop.own("store", run_store)
    if begin := getattr(run_store, "begin", None):  # first, before the store is changed
        loop.started.wire(lambda state: begin(state.clocks.epochs))
    if hasattr(run_store, "write_run"):
        from rein.handlers.record_metrics import record_metrics  # imports h5py, which `import rein` does not need

        describe(loop, run_store)
        record_metrics(loop, run_store.path)
        run_log(loop, run_store.path / "run.log")
    for event in (loop.completed, loop.halted, loop.failed):
        event.wire(lambda state: getattr(run_store, "end", run_store.flush)())
    if (checkpoints := getattr(run_store, "checkpoints", None)) is not None:
        save_at_end(loop, checkpoints)
    end_at_ctrl_c(loop, getattr(run_store, "path", None))


def write_trajectories(loop: Loop, store: Store, rows: RowBuffer, statistics: EpisodeStatistics) -> None:
    """Append each epoch to the store when it ends.

    `state.trajectory` is readable while `epoch_ended` fires.
    """
    if name := getattr(store, "read_metric", None):
        loop.metrics.read_by(f"{type(store).__name__}(keep_best={tuple(store.config['keep_best'])!r})", name)

    def write_trajectory(state: State) -> None:
        if not state.epoch_open:  # if its end was interrupted, the next run requests it again
            store.append(trajectory(state, rows, statistics))

    @loop.epoch_ended.wire
    def request_write(state: State) -> None:
        state.request(write_trajectory)  # later, because handlers of this event may still add metrics
        state._read_trajectory = lambda: trajectory(state, rows, statistics)

    def forget_trajectory(state: State) -> None:
        state._read_trajectory = None

    loop.epoch_ended.wire(forget_trajectory, last=True)


def trajectory(state: State, rows: RowBuffer, statistics: EpisodeStatistics) -> Trajectory:
    """Return the ending epoch for a store and for handlers. Its fields are views that the next epoch overwrites."""
    fields = rows.fields()
    for redundant in ("next_observation", "seed"):  # stored with the next row and with the episodes
        fields.pop(redundant, None)
    return Trajectory(
        epoch=state.epoch,
        status=str(state.epoch_status),
        first_step=statistics.first_row_step,
        fields=fields,
        next_observation=state.step_state.observation,
        episodes=statistics.episodes(),
        metrics=dict(state.metrics),
        clocks=state.clocks.as_dict(),
    )


def _announce_ends(state: State, event: Event, completed: CompletedEpisodes) -> StepState:
    """Fire `episodes_completed` if an episode ended in this step."""
    transition = state.step_state.transition
    if transition is not None and bool(((transition.terminated | transition.truncated) & transition.valid).any()):
        state._read_episodes = completed.read
        try:
            event.fire(state)
        finally:
            state._read_episodes = None
    return state.step_state


def _acted_on(step_state: StepState) -> bool:
    """Whether an action was selected from this observation. It may have been applied if the step failed."""
    ended = step_state.time_step is not None and step_state.observation is step_state.time_step.observation
    return step_state.action is not None and not ended


def _emitter(state: State, events: Mapping[str, Event]) -> Callable[[str], None]:
    def emit(name: str) -> None:
        if (event := events[name]).listened_to:
            event.fire(state)

    return emit


def learning_rates(agent: Any) -> dict[str, float]:
    """Return the current value of `learning_rate`, `actor_learning_rate` and so on, for those that are not None.

    The names of a `MultiAgent` have the prefix of a group.
    """
    if agents := getattr(agent, "agents", None):
        return {f"{name}/{key}": rate for name, part in agents.items() for key, rate in learning_rates(part).items()}
    attributes = {*getattr(agent, "__dict__", ()), *dir(type(agent))}  # dir(agent) takes more than 1 ms, see `explain`
    names = sorted(name for name in attributes if name.endswith("learning_rate") and not name.startswith("_"))
    counts = {"env_steps": agent.env_steps, "updates": agent.updates}
    values = {name: x(**counts) if isinstance(x := getattr(agent, name), Schedule) else x for name in names}
    return {name: float(value) for name, value in values.items() if isinstance(value, numbers.Real)}
