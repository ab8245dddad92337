"""Evaluate a policy during training."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch
from torch import Tensor

from rein.episodes import Evaluation, EvaluationEvent, Recorder
from rein.episodes.evaluation import checked_arguments, empty_evaluation, joined, play_round
from rein.episodes.step import check_held
from rein.errors import WorkerError
from rein.loop import Loop
from rein.loop.engine import Interruptible, Unfinished
from rein.loop.info import run_info
from rein.loop.state import INTERRUPT, State
from rein.ops.trees import map_tree, to_device
from rein.protocols import AgentProtocol, Environment, Policy, Stateful, Store, missing_names
from rein.types import StepState

if TYPE_CHECKING:
    from rein.episodes.evaluation_process import Answer

logger = logging.getLogger("rein")

_METRICS = {  # metric -> attribute of the evaluation
    "return": "mean_return",
    "length": "mean_length",
    "return_median": "median_return",
    "return_iqm": "iqm_return",
    "return_std": "std_return",
    "return_min": "min_return",
    "return_max": "max_return",
}
_CPU = torch.device("cpu")
_MOMENT = 0.05  # seconds between two checks for an interrupt while a result is awaited
_STARTED, _STEPPED = "evaluation_started", "evaluation_step_completed"
_ENDED, _COMPLETED = "evaluation_episode_completed", "evaluation_completed"
_EVENTS = (_STARTED, _STEPPED, _ENDED, _COMPLETED)


def evaluate_every(
    loop: Loop,
    policy: Policy | AgentProtocol,
    environment: Environment,
    *,
    episodes: int,
    max_episode_steps: int | None = 10_000,
    name: str = "evaluation",
    event: str = "epoch_ended",
    at_end: bool = False,
    same_episodes: bool = False,
    on_failure: Literal["raise", "drop"] = "raise",
    store: Store | None = None,
    background: bool = False,
    **filters: Any,
) -> None:
    """Evaluate a policy when `event` fires, and record metrics whose names begin with `name`.

    Example::

        rein.evaluate_every(loop, agent, rein.envs.Gridworld(num_envs=16, seed=1), episodes=100, every=10)

    The metrics are `<name>_return` and `<name>_length`, both means over the episodes, and `<name>_return_median`,
    `<name>_return_iqm` (the interquartile mean), `<name>_return_std`, `<name>_return_min` and `<name>_return_max`.
    Environments that report success also have `<name>_success_rate`, see `rein.evaluate`. Multi-agent worlds also have
    `<name>_world_return`, the mean over worlds, and `<name>_return_<group>`.

    The event `evaluation_started` fires first. `evaluation_step_completed` fires for each step of all environments,
    unless `background` is set, and again in a round that is repeated after an interrupt.
    `evaluation_episode_completed` fires for each episode, after the round in which every environment plays one episode.
    `evaluation_completed` fires last. Their handlers read the name, the clocks and the results per episode from
    `state.evaluation`, a `rein.episodes.EvaluationEvent`.
    `state.memory["evaluations"]` describes the latest evaluation: `number` (counted over the whole run and all
    evaluations), `name`, `episodes`, and the metrics without their prefix.

    Evaluation does not affect training: the policy uses a separate generator, and `environment` must not be used
    elsewhere. The loop owns the environment as `<name>_environment` and a policy with state as `<name>_policy`, so a
    resumed run evaluates like an uninterrupted one.

    `loop.stop` during an evaluation ends it at its next step. Its metrics are NaN, and the run starts no other
    evaluation. `loop.interrupt` also ends it: environment and policy return to the beginning of the round. The next run
    first finishes the evaluation and the handlers after it, so a resumed run equals an uninterrupted one. In an event
    that fires before or within a step, an evaluation cannot be interrupted and is played to the end.

    With `background`, a separate process evaluates a copy of the parameters while training continues. The results
    arrive at the end of a later epoch: its metrics are set and the events fire. `state.evaluation` and
    `evaluations.csv` have the epoch and the clocks of the evaluated parameters, and the results are those of an
    evaluation without `background`. One evaluation runs at a time; the next one waits for it. The end of the run waits
    for the last one, and a resumed run repeats one that was interrupted. If the process dies, its evaluation is lost
    with a warning, and the next evaluation starts a new process. The copied parameters act on the device of the
    environment. Do not combine `background` with `checkpoint(keep_best=...)`: when a result arrives, the agent has
    other parameters. Attach handlers that read the metrics, such as `early_stop` and `record_solved`, with
    `event="evaluation_completed"`: the metrics exist only when a result arrives, the last one after the last epoch.

    Args:
        loop: Loop to attach to.
        policy: Policy, or agent whose greedy policy is evaluated.
        environment: Environment to evaluate in, not the one of the loop.
        episodes: Number of episodes per evaluation.
        max_episode_steps: Truncate episodes after this number of steps.
        name: Prefix of the metrics and of the parts.
        event: Name of the event.
        at_end: Also evaluate in `completed` or `halted`, unless the current state was just evaluated. A run that fails
            or is interrupted is not evaluated.
        same_episodes: Play the episodes of the first evaluation each time instead of new ones.
        on_failure: "raise" ends the run if the policy or the environment raises. "drop" logs the error and continues
            training; that evaluation has no metrics.
        store: Separate store that records the episodes. Each round, in which every environment plays one
            episode, is an epoch. To record nothing else, create the training store with `every=0`.
        background: Evaluate in a separate process, without waiting for the results.
        **filters: Filters of the event, such as `every=10`.

    Raises:
        ValueError: If the environment is already a part of the loop, if a name is taken, or if `episodes` is below 1.
            Also if `same_episodes` is set and the environment is not replayable, if the store cannot hold its
            spaces, or if `background` is combined with a store.
        TypeError: If `background` is set and `policy` is not of a `rein.Agent`, or if the agent or the environment
            cannot be pickled.
    """
    acting, episodes = checked_arguments("evaluate_every", policy, environment, episodes, max_episode_steps)
    if on_failure not in ("raise", "drop"):
        raise ValueError(f'evaluate_every(on_failure={on_failure!r}): expected "raise" or "drop"')
    for taken, part in loop.parts.items():
        if part is environment:
            raise ValueError(
                f"evaluate_every(environment=...): the loop already uses it as {taken!r}; create another environment"
            )
        if store is not None and getattr(part, "path", part) == getattr(store, "path", store):
            raise ValueError(
                f"evaluate_every(store=...): {taken!r} of the loop already writes to this folder; use another one"
            )
    check_held(environment, store)
    if same_episodes and not (environment.replayable and hasattr(environment, "reset_to")):
        kind = type(environment).__name__
        raise ValueError(
            f"evaluate_every(same_episodes=True): {kind} cannot repeat an episode, because it is not replayable"
        )
    loop.event(event)(**filters)  # raises for wrong filters before the loop owns anything
    evaluator = (_Background if background else _Evaluator)(
        loop, acting, environment, store, name, episodes, max_episode_steps, at_end, same_episodes, on_failure == "drop"
    )
    evaluator.work.attach(loop, event, evaluator.evaluate, **filters)
    loop.on("completed", "halted")(evaluator.finish)


@attrs.define(eq=False, slots=False)
class _Evaluator:
    """Plays the episodes of an evaluation, sets its metrics and fires its events."""

    loop: Loop
    policy: Any
    environment: Any
    store: Any
    name: str
    episodes: int
    max_episode_steps: int | None
    at_end: bool
    same_episodes: bool
    drops_failures: bool
    recorder: Recorder | None = None
    handler_error: Exception | None = None  # of a handler of `evaluation_step_completed`

    def __attrs_post_init__(self) -> None:
        self.work = Interruptible()
        self.metrics = [*_METRICS]
        if hasattr(self.environment, "worlds"):
            self.metrics += ["world_return", *(f"return_{group}" for group in self.environment.groups)]
        self._own_parts()
        self.events = {name: self.loop.events.get(name) or self.loop.define(name) for name in _EVENTS}
        self.loop.metrics.declare(*(f"{self.name}_{metric}" for metric in [*self.metrics, "success_rate"]))

    def _own_parts(self) -> None:
        self.loop.own(f"{self.name}_environment", self.environment)
        if not missing_names(self.policy, Stateful):
            self.loop.own(f"{self.name}_policy", self.policy)
        if self.store is not None:
            self._record()

    def _record(self) -> None:
        """Record the episodes in the store, which is flushed when the run ends."""
        loop, store = self.loop, self.store
        loop.own(f"{self.name}_store", store)
        self.recorder = loop.own(f"{self.name}_recorder", Recorder(store, self.environment.num_envs))
        if hasattr(store, "write_run"):  # a run folder, described with these environments

            @loop.started.wire
            def write_run(state: State) -> None:
                info = run_info(loop)
                own_parts = {kind: info["parts"][f"{self.name}_{kind}"] for kind in ("environment", "store")}
                store.write_run({**info, "parts": {**info["parts"], **own_parts}})

        for event in (loop.completed, loop.halted, loop.failed):
            event.wire(lambda state: store.flush())

    def evaluate(self, state: State) -> None:
        """Play the episodes, set the metrics and fire the events. Handler of the event."""
        self.work.begin(state)
        try:
            if not state._left:
                self._play(state)
                return
        except Unfinished:
            self.work.leave(state)
        self._set_metrics(state, dict.fromkeys(self.metrics, math.nan))

    def finish(self, state: State) -> None:
        """Evaluate at the end of a run if this is due. Handler of the final events."""
        if _ends(state) and self._is_due(state):
            self.evaluate(state)

    def _is_due(self, state: State) -> bool:
        """Return whether the state at the end of a run is to be evaluated, and was not just evaluated."""
        return self.at_end and state.memory.get(f"{self.name}/iterations") != state.total_iterations

    def _play(self, state: State) -> None:
        """Play the remaining rounds, each one episode per environment, and report the result unless one failed.

        Raises `Unfinished` if interrupted.
        """
        seeds = self._seeds(state)
        options: dict[str, Any] = {"max_episode_steps": self.max_episode_steps, "recorder": self.recorder}
        options["check"] = functools.partial(self.work.check, state)
        if seeds is not None:
            options["episode_seeds"] = torch.tensor(seeds, dtype=torch.int64, device=self.environment.device)
        everything: list[Any] = [self.policy, self.environment, self.recorder]
        parts = [part for part in everything if not missing_names(part, Stateful)]
        columns = state.memory.pop(f"{self.name}/rounds", None)  # {} if the first round was interrupted
        rounds = [to_device(Evaluation(**columns), self.environment.device)] if columns else []
        if self.events[_STEPPED].listened_to:
            options["stepped"] = lambda step_state: self._fire_step(state, rounds, step_state)
        if columns is None:
            self._fire(_STARTED, state, self._event(state))
        while (done := sum(len(played.seed) for played in rounds)) < self.episodes:
            before = [_copied(part.state_dict()) for part in parts]
            try:
                played = play_round(self.policy, self.environment, done, self.episodes, **options)
            except Unfinished:
                for part, saved in zip(parts, before, strict=True):
                    part.load_state_dict(saved)
                if INTERRUPT in state.halts:
                    state.memory[f"{self.name}/rounds"] = to_device(joined(rounds), _CPU)._asdict() if done else {}
                raise
            except Exception as error:  # raised or logged, depending on on_failure
                of_store = self.recorder is not None and self.recorder.failure is error
                if not self.drops_failures or of_store or error is self.handler_error:
                    raise
                message = "%s failed in epoch %d; its metrics are dropped and training continues"
                logger.exception(message, self.name, state.epoch)
                return
            rounds.append(played)
            self._fire_episodes(state, self._event(state)._replace(result=joined(rounds)), len(played.seed))
        state.memory[f"{self.name}/iterations"] = state.total_iterations
        self._complete(state, self._event(state)._replace(result=joined(rounds)))

    def _seeds(self, state: State) -> list[int] | None:
        """Return the seeds of the first evaluation, which are to be repeated, or None before it."""
        seeds: list[int] = state.memory.get(f"{self.name}/seeds", []) if self.same_episodes else []
        if len(seeds) == self.episodes:
            return seeds
        if seeds:
            message = "%s: the number of episodes changed from %d to %d, so new episodes are played"
            logger.warning(message, self.name, len(seeds), self.episodes)
        return None

    def _event(self, state: State) -> EvaluationEvent:
        """Return the event of an evaluation that begins now."""
        return EvaluationEvent(self.name, state.epoch, state.clocks.as_dict(), empty_evaluation())

    def _fire(self, name: str, state: State, event: EvaluationEvent) -> None:
        if self.events[name].listened_to:
            before, state._evaluation = state._evaluation, event
            try:
                self.events[name].fire(state)
            finally:
                state._evaluation = before

    def _fire_step(self, state: State, rounds: list[Evaluation], step_state: StepState) -> None:
        """Fire `evaluation_step_completed`, and keep the error of a handler, which `on_failure` does not drop."""
        event = self._event(state)._replace(step_state=step_state)
        try:
            self._fire(_STEPPED, state, event._replace(result=joined(rounds)) if rounds else event)
        except Exception as error:
            self.handler_error = error
            raise

    def _fire_episodes(self, state: State, event: EvaluationEvent, new: int) -> None:
        """Fire `evaluation_episode_completed` for the `new` last episodes of the result."""
        if self.events[_ENDED].listened_to:
            count = len(event.result.seed)
            for stop in range(count - new + 1, count + 1):
                until = map_tree(lambda column, stop=stop: column[:stop], event.result)
                self._fire(_ENDED, state, event._replace(result=until))

    def _complete(self, state: State, event: EvaluationEvent) -> None:
        """Set the metrics and `state.memory["evaluations"]`, and fire `evaluation_completed`."""
        result = event.result
        if self.same_episodes:
            state.memory[f"{self.name}/seeds"] = result.seed.tolist()
        values = {metric: getattr(result, attribute) for metric, attribute in _METRICS.items()}
        if not math.isnan(result.success_rate):
            values["success_rate"] = result.success_rate
        number = state.memory.get("evaluations", {"number": 0})["number"] + 1
        state.memory["evaluations"] = {"number": number, "name": self.name, **values, "episodes": len(result.seed)}
        if hasattr(self.environment, "worlds"):
            values["world_return"] = float(result.world_returns(self.environment).mean())
            returns = result.group_returns(self.environment)
            values |= {f"return_{group}": float(returns_E.mean()) for group, returns_E in returns.items()}
        self._set_metrics(state, values)
        self._fire(_COMPLETED, state, event)

    def _set_metrics(self, state: State, values: Mapping[str, float]) -> None:
        state.metrics.update({f"{self.name}_{metric}": value for metric, value in values.items()})


class _Background(_Evaluator):
    """Requests evaluations from a process and reports their results. Part of the loop."""

    def _own_parts(self) -> None:
        from rein.episodes.evaluation_process import EvaluationProcess  # imports packages that few runs need

        if self.store is not None:
            raise ValueError("evaluate_every(background=True, store=...): episodes are recorded without background")
        self.process = EvaluationProcess(self.policy, self.environment)
        self.pending: Any = None  # evaluation without a result: parameters, epoch, clocks, seeds
        self.part_states: Any = None  # states of policy and environment after the latest evaluation
        self.has_warned = False
        self.loop.own(f"{self.name}_environment", self.environment)
        self.loop.own(f"{self.name}_background", self)
        self.loop.started.wire(self._begin)
        self.loop.epoch_ended.attach(self._collect)

    def _begin(self, state: State) -> None:
        self.loop.cleanups.append(self.process.close)
        if self.pending is not None:  # the previous run ended before the result
            self._send()

    def _collect(self, state: State) -> None:
        if self.pending is not None and (answer := self.process.answer()) is not None:
            self._take(state, answer)

    def evaluate(self, state: State) -> None:
        """Request an evaluation when the result of the previous one has arrived. Handler of the event."""
        if state._left:
            return
        self.work.begin(state)
        try:
            self._await(state)
            self._request(state)
        except Unfinished:
            self.work.leave(state)

    def finish(self, state: State) -> None:
        """Wait for the last result, and evaluate at the end of a run if this is due. Handler of the final events."""
        if _ends(state):
            self.work.begin(state)
            with contextlib.suppress(Unfinished):  # the next run repeats the evaluation
                self._await(state)
                if self._is_due(state):
                    self._request(state)
                    self._await(state)

    def _request(self, state: State) -> None:
        """Request an evaluation of the current parameters."""
        event = self._event(state)
        self._fire(_STARTED, state, event)
        state.memory[f"{self.name}/iterations"] = state.total_iterations
        seeds = self._seeds(state)
        clocks = {"epoch": event.epoch, "clocks": event.clocks}
        self.pending = {"snapshot": self.policy.snapshot(), **clocks, "seeds": seeds}
        self._send()

    def _send(self) -> None:
        seeds, device, states = self.pending["seeds"], self.environment.device, self.part_states
        seed_E = None if seeds is None else torch.tensor(seeds, dtype=torch.int64, device=device)
        if states is None and self.policy.device == device:  # states of generators depend on the device
            states = [to_device(self.policy.state_dict(), _CPU), None]
        options = {"episodes": self.episodes, "max_episode_steps": self.max_episode_steps, "episode_seeds": seed_E}
        self.process.request(self.pending["snapshot"], states, options)

    def _await(self, state: State) -> None:
        """Wait for the result of the pending evaluation, if there is one. Raises `Unfinished` if interrupted."""
        if self.pending is None:
            return
        if (answer := self.process.answer()) is None and state.status == "running" and not self.has_warned:
            message = "%s: training waits for the previous evaluation; evaluate less often, or play fewer episodes"
            logger.warning(message, self.name)
            self.has_warned = True
        while answer is None:
            self.work.check(state)
            answer = self.process.answer(_MOMENT)
        self._take(state, answer)

    def _take(self, state: State, answer: Answer) -> None:
        """Report a result. An evaluation whose process has died is lost."""
        pending, self.pending = self.pending, None
        epoch = pending["epoch"]
        if answer.result is not None:
            self.part_states = answer.state
            event = EvaluationEvent(self.name, epoch, pending["clocks"], answer.result)
            self._fire_episodes(state, event, len(answer.result.seed))
            self._complete(state, event)
            return
        self.process.close()  # its environment may be in the middle of an episode
        if answer.error is None:
            message = "%s of epoch %d is lost, because its process has ended (%s); the next one starts a new process"
            logger.warning(message, self.name, epoch, answer.ending)
        elif self.drops_failures:
            logger.error("%s of epoch %d failed; its metrics are dropped:\n%s", self.name, epoch, answer.error)
        else:
            raise WorkerError(f"{self.name} of epoch {epoch} failed in its process:\n{answer.error}")

    def state_dict(self) -> dict[str, Any]:
        """Return the pending evaluation, and the states of policy and environment after the latest one."""
        return {"pending": self.pending, "state": self.part_states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned. The next run repeats its pending evaluation."""
        self.process.close()
        self.pending = state["pending"]
        self.part_states = state["state"]


def _ends(state: State) -> bool:
    """Return whether a final event ends the run, so that no later run continues its epoch or evaluation."""
    return not (state.epoch_open or state._left or INTERRUPT in state.halts)


def _copied(tree: Any) -> Any:
    return map_tree(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)
