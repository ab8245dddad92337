"""Evaluate a policy during training."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rein.episodes import Evaluation, EvaluationEvent, Recorder
from rein.episodes import evaluate as play
from rein.episodes.evaluation import check_parts, empty_evaluation, greedy_policy, in_whole_worlds
from rein.episodes.step import check_held
from rein.errors import WorkerError
from rein.loop import Loop
from rein.loop.engine import Interruptible, Unfinished
from rein.loop.events import Event
from rein.loop.info import run_info
from rein.loop.state import INTERRUPT, State
from rein.ops.trees import map_tree, to_device
from rein.protocols import AgentProtocol, Environment, Policy, Stateful, Store, missing_names
from rein.types import Tree

if TYPE_CHECKING:
    from rein.episodes.evaluation_process import Answer, EvaluationProcess

logger = logging.getLogger("rein")

_FOUND = {  # metric -> attribute of the evaluation
    "return": "mean_return",
    "length": "mean_length",
    "return_median": "median_return",
    "return_iqm": "iqm_return",
    "return_std": "std_return",
    "return_min": "min_return",
    "return_max": "max_return",
}
_MOMENT = 0.05  # seconds between two checks for an interrupt while a result is awaited
_EVENTS = ("evaluation_started", "evaluation_episode_completed", "evaluation_completed")


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

    The event `evaluation_started` fires first. `evaluation_episode_completed` fires for each episode, after the round
    in which every environment plays one episode. `evaluation_completed` fires last. Their handlers read the name, the
    clocks and the results per episode from `state.evaluation`, a `rein.EvaluationEvent`. `state.memory["evaluations"]`
    describes the latest evaluation: `number` (counted over the whole run and all evaluations), `name`, `episodes`, and
    the metrics without their prefix.

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
    other parameters. Attach handlers that read the metrics, such as `early_stop` and `solved`, with
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
    acting: Policy = greedy_policy(policy)
    check_parts(acting, environment)
    if on_failure not in ("raise", "drop"):
        raise ValueError(f'evaluate_every(on_failure={on_failure!r}): expected "raise" or "drop"')
    if episodes < 1:
        raise ValueError(f"evaluate_every(episodes={episodes}): expected at least 1")
    _check_free(loop, environment, store)
    check_held(environment, store)
    if same_episodes and not (environment.replayable and hasattr(environment, "reset_to")):
        kind = type(environment).__name__
        raise ValueError(
            f"evaluate_every(same_episodes=True): {kind} cannot repeat an episode, because it is not replayable"
        )
    loop.event(event)(**filters)  # raises for wrong filters before the loop owns anything
    process = _process_of(acting, environment, store) if background else None
    loop.own(f"{name}_environment", environment)
    if not missing_names(acting, Stateful) and process is None:
        loop.own(f"{name}_policy", acting)
    recorder = None if store is None else _record(loop, environment, store, name)
    episodes = in_whole_worlds(environment, episodes)
    options = {"episodes": episodes, "max_episode_steps": max_episode_steps, "recorder": recorder}
    report = _Report(loop, environment, name)
    if process is not None:
        del options["recorder"]
        asked = _Background(acting, environment, process, options, report, on_failure == "drop", same_episodes)
        loop.own(f"{name}_background", asked).attach(loop, event, at_end, **filters)
        return
    evaluator = _Evaluator(acting, environment, options, report, on_failure == "drop", same_episodes)
    if at_end:
        loop.on("completed", "halted")(evaluator.evaluate_end)

    def evaluate_policy(state: State) -> None:
        evaluator.evaluate(state)

    evaluator.work.attach(loop, event, evaluate_policy, **filters)


class _Report:
    """Sets the metrics of an evaluation and fires its events."""

    def __init__(self, loop: Loop, environment: Any, name: str) -> None:
        self.name, self._environment = name, environment
        self._started, self._ended, self._completed = (loop.events.get(n) or loop.define(n) for n in _EVENTS)
        loop.metrics.declare(*(f"{name}_{metric}" for metric in [*self._names(), "success_rate"]))

    def start(self, state: State) -> None:
        """Fire `evaluation_started`."""
        self._fire(self._started, state, empty_evaluation(), state.epoch, state.clocks.as_dict())

    def episodes(self, state: State, result: Evaluation, new: int, epoch: int, clocks: Mapping[str, float]) -> None:
        """Fire `evaluation_episode_completed` for the `new` last episodes of `result`."""
        if self._ended.listened_to:
            count = len(result.seed)
            for stop in range(count - new + 1, count + 1):
                self._fire(self._ended, state, Evaluation(*(column[:stop] for column in result)), epoch, clocks)

    def complete(self, state: State, result: Evaluation, epoch: int, clocks: Mapping[str, float]) -> None:
        """Set the metrics and `state.memory["evaluations"]`, and fire `evaluation_completed`."""
        found = {what: getattr(result, attribute) for what, attribute in _FOUND.items()}
        if not math.isnan(result.success_rate):
            found["success_rate"] = result.success_rate
        number = state.memory.get("evaluations", {"number": 0})["number"] + 1
        state.memory["evaluations"] = {"number": number, "name": self.name, **found, "episodes": len(result.seed)}
        if hasattr(self._environment, "worlds"):
            found["world_return"] = float(result.world_returns(self._environment).mean())
            returns = result.group_returns(self._environment)
            found |= {f"return_{group}": float(returns_E.mean()) for group, returns_E in returns.items()}
        self._set(state, found)
        self._fire(self._completed, state, result, epoch, clocks)

    def discard(self, state: State) -> None:
        """Set the metrics to NaN."""
        self._set(state, dict.fromkeys(self._names(), math.nan))

    def _names(self) -> list[str]:
        """Return the names of the metrics that every evaluation has, without the prefix."""
        names = [*_FOUND]
        if hasattr(self._environment, "worlds"):
            names += ["world_return", *(f"return_{group}" for group in self._environment.groups)]
        return names

    def _set(self, state: State, found: Mapping[str, float]) -> None:
        for key, value in found.items():
            state.metrics[f"{self.name}_{key}"] = value

    def _fire(self, event: Event, state: State, result: Evaluation, epoch: int, clocks: Mapping[str, float]) -> None:
        if event.listened_to:
            before, state._evaluation = state._evaluation, EvaluationEvent(self.name, epoch, clocks, result)
            try:
                event.fire(state)
            finally:
                state._evaluation = before


class _Evaluator:
    """Plays the episodes and reports the result."""

    def __init__(
        self,
        policy: Policy,
        environment: Environment,
        options: dict[str, Any],
        report: _Report,
        drops: bool,
        same_episodes: bool,
    ) -> None:
        self._policy, self._environment, self._options, self._report = policy, environment, options, report
        self._drops, self._same_episodes = drops, same_episodes
        # keys of state.memory: iteration and seeds of the latest evaluation, rounds of an interrupted one
        self._at, self._seeds, self._rounds = (f"{report.name}/{what}" for what in ("iterations", "seeds", "rounds"))
        self.work = Interruptible()

    def evaluate(self, state: State) -> None:
        """Play the episodes, set the metrics and fire the events."""
        if state._left:
            self._report.discard(state)
            return
        self.work.begin(state)
        try:
            result = self._play(state)
        except Unfinished:
            self.work.leave(state)
            self._report.discard(state)
            return
        if result is None:
            return
        state.memory[self._at] = state.total_iterations
        if self._same_episodes:
            state.memory[self._seeds] = result.seed.tolist()
        self._report.complete(state, result, state.epoch, state.clocks.as_dict())

    def evaluate_end(self, state: State) -> None:
        """Evaluate at the end of a run, unless the current state was just evaluated. Handler of the final events."""
        goes_on = state.epoch_open or state._left or INTERRUPT in state.halts
        if not goes_on and state.memory.get(self._at) != state.total_iterations:
            self.evaluate(state)

    def _play(self, state: State) -> Evaluation | None:
        """Play the remaining rounds, each one episode per environment. Return None if one failed and is dropped.

        Raises `Unfinished` if interrupted.
        """
        episodes, device = self._options["episodes"], self._environment.device
        seeds = _chosen_seeds(state, self._report.name, episodes) if self._same_episodes else None
        seed_E = None if seeds is None else torch.tensor(seeds, dtype=torch.int64, device=device)
        columns = state.memory.pop(self._rounds, None)  # {} if the first round was interrupted
        result = to_device(Evaluation(**columns), device) if columns else empty_evaluation()
        if columns is None:
            self._report.start(state)
        policy = _Leaving(self._policy, self._environment, lambda: self.work.check(state))
        while (done := len(result.seed)) < episodes:
            options = {**self._options, "episodes": min(self._environment.num_envs, episodes - done)}
            if seed_E is not None:
                options["episode_seeds"] = seed_E[done : done + options["episodes"]]
            parts: list[Any] = [self._policy, self._environment, self._options["recorder"]]
            parts = [part for part in parts if _has_state(part)]
            before = [_copied(part.state_dict()) for part in parts]
            try:
                played = play(policy, self._environment, **options)
            except Unfinished:
                for part, saved in zip(parts, before, strict=True):
                    part.load_state_dict(saved)
                if INTERRUPT in state.halts:
                    state.memory[self._rounds] = to_device(result, torch.device("cpu"))._asdict() if done else {}
                raise
            except Exception as error:  # raised or logged, depending on on_failure
                recorder = self._options["recorder"]
                if not self._drops or (recorder is not None and recorder.failure is error):
                    raise
                message = "%s failed in epoch %d; its metrics are dropped and training continues"
                logger.exception(message, self._report.name, state.epoch)
                return None
            result = Evaluation(*(torch.cat(both) for both in zip(result, played, strict=True))) if done else played
            self._report.episodes(state, result, len(played.seed), state.epoch, state.clocks.as_dict())
        return result


class _Background:
    """Requests evaluations from a process and reports their results. Part of the loop."""

    def __init__(
        self,
        policy: Any,
        environment: Environment,
        process: EvaluationProcess,
        options: dict[str, Any],
        report: _Report,
        drops: bool,
        same_episodes: bool,
    ) -> None:
        self._policy, self._environment, self._process = policy, environment, process
        self._options, self._report, self._drops, self._same_episodes = options, report, drops, same_episodes
        self._at, self._seeds = (f"{report.name}/{what}" for what in ("iterations", "seeds"))
        self._pending: dict[str, Any] | None = None  # evaluation without a result: parameters, epoch, clocks, seeds
        self._state: Any = None  # states of policy and environment after the latest evaluation
        self._work, self._warned = Interruptible(), False

    def attach(self, loop: Loop, event: str, at_end: bool, **filters: Any) -> None:
        """Attach the handlers."""

        @loop.started.wire
        def begin(state: State) -> None:
            loop.cleanups.append(self._process.close)
            if self._pending is not None:  # the previous run ended before the result
                self._send()

        @loop.epoch_ended
        def collect(state: State) -> None:
            if self._pending is not None and (answer := self._process.answer()) is not None:
                self._take(state, answer)

        @loop.on("completed", "halted")
        def finish(state: State) -> None:
            if not (state.epoch_open or state._left or INTERRUPT in state.halts):
                with contextlib.suppress(Unfinished):  # the next run repeats the evaluation
                    self._finish(state, at_end)

        def request(state: State) -> None:
            if not state._left:
                try:
                    self._work.begin(state)
                    self._await(state)
                    self._request(state)
                except Unfinished:
                    self._work.leave(state)

        self._work.attach(loop, event, request, **filters)

    def _finish(self, state: State, at_end: bool) -> None:
        self._work.begin(state)
        self._await(state)
        if at_end and state.memory.get(self._at) != state.total_iterations:
            self._request(state)
            self._await(state)

    def _request(self, state: State) -> None:
        """Request an evaluation of the current parameters."""
        self._report.start(state)
        state.memory[self._at] = state.total_iterations
        seeds = _chosen_seeds(state, self._report.name, self._options["episodes"]) if self._same_episodes else None
        self._pending = {
            "snapshot": self._policy.snapshot(),
            "epoch": state.epoch,
            "clocks": state.clocks.as_dict(),
            "seeds": seeds,
        }
        self._send()

    def _send(self) -> None:
        pending: Any = self._pending
        seeds = pending["seeds"]
        device, state = self._environment.device, self._state
        seed_E = None if seeds is None else torch.tensor(seeds, dtype=torch.int64, device=device)
        if state is None and self._policy.device == device:  # states of generators depend on the device
            state = [to_device(self._policy.state_dict(), torch.device("cpu")), None]
        self._process.request(pending["snapshot"], state, {**self._options, "episode_seeds": seed_E})

    def _await(self, state: State) -> None:
        """Wait for the result of the pending evaluation, if there is one. Raises `Unfinished` if interrupted."""
        if self._pending is None:
            return
        if (answer := self._process.answer()) is None and state.status == "running" and not self._warned:
            message = "%s: training waits for the previous evaluation; evaluate less often, or play fewer episodes"
            logger.warning(message, self._report.name)
            self._warned = True
        while answer is None:
            self._work.check(state)
            answer = self._process.answer(_MOMENT)
        self._take(state, answer)

    def _take(self, state: State, answer: Answer) -> None:
        """Report a result. An evaluation whose process has died is lost."""
        pending: Any = self._pending
        self._pending, name, epoch = None, self._report.name, pending["epoch"]
        if answer.result is not None:
            self._state, result = answer.state, answer.result
            if self._same_episodes:
                state.memory[self._seeds] = result.seed.tolist()
            self._report.episodes(state, result, len(result.seed), epoch, pending["clocks"])
            self._report.complete(state, result, epoch, pending["clocks"])
            return
        self._process.close()  # its environment may be in the middle of an episode
        if answer.error is None:
            message = "%s of epoch %d is lost, because its process has ended (%s); the next one starts a new process"
            logger.warning(message, name, epoch, answer.ending)
        elif self._drops:
            logger.error("%s of epoch %d failed; its metrics are dropped:\n%s", name, epoch, answer.error)
        else:
            raise WorkerError(f"{name} of epoch {epoch} failed in its process:\n{answer.error}")

    def state_dict(self) -> dict[str, Any]:
        """Return the pending evaluation, and the states of policy and environment after the latest one."""
        return {"pending": self._pending, "state": self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned. The next run repeats its pending evaluation."""
        self._process.close()
        self._pending, self._state = state["pending"], state["state"]


def _process_of(policy: Any, environment: Environment, store: Store | None) -> EvaluationProcess:
    from rein.episodes.evaluation_process import EvaluationProcess  # imports packages that few runs need

    if store is not None:
        raise ValueError("evaluate_every(background=True, store=...): episodes are recorded only without background")
    if not hasattr(policy, "builder"):
        raise TypeError(
            f"evaluate_every(background=True): the process cannot build {type(policy).__name__}; give a subclass of "
            "rein.Agent or its policy"
        )
    return EvaluationProcess(policy.builder(environment.device), environment)


def _chosen_seeds(state: State, name: str, episodes: int) -> list[int] | None:
    """Return the seeds of the first evaluation, which are to be repeated, or None before it."""
    seeds = state.memory.get(f"{name}/seeds", ())
    if len(seeds) == episodes:
        return seeds
    if seeds:
        message = "%s: the number of episodes changed from %d to %d, so new episodes are played"
        logger.warning(message, name, len(seeds), episodes)
    return None


class _Leaving:
    """Policy that calls `check` before it selects an action."""

    def __init__(self, policy: Policy, environment: Environment, check: Callable[[], None]) -> None:
        self.device = getattr(policy, "device", environment.device)
        self.reset, self._select, self._check = policy.reset, policy.select_action, check

    def select_action(self, observation: Tree) -> tuple[Tree, Mapping[str, Tensor]]:
        """Select an action unless `check` raises."""
        self._check()
        return self._select(observation)


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _copied(tree: Any) -> Any:
    return map_tree(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def _check_free(loop: Loop, environment: Environment, store: Store | None) -> None:
    """Raise ValueError if the loop already uses the environment or the store."""
    for taken, part in loop.parts.items():
        if part is environment:
            raise ValueError(
                f"evaluate_every(environment=...): the loop already uses it as {taken!r}; create another environment"
            )
        if store is not None and _writes_to(part, store):
            raise ValueError(
                f"evaluate_every(store=...): {taken!r} of the loop already writes to this folder; use another one"
            )


def _writes_to(part: Any, store: Any) -> bool:
    folder = getattr(store, "path", None)
    return part is store or (folder is not None and getattr(part, "path", None) == folder)


def _record(loop: Loop, environment: Environment, store: Any, name: str) -> Recorder:
    """Return a recorder that writes the episodes to `store`. The loop owns both."""
    loop.own(f"{name}_store", store)
    recorder = loop.own(f"{name}_recorder", Recorder(store, environment.num_envs))
    if hasattr(store, "write_run"):  # a run folder, described with these environments

        @loop.started.wire
        def write_run(state: State) -> None:
            info = run_info(loop)
            mine = {kind: info["parts"][f"{name}_{kind}"] for kind in ("environment", "store")}
            store.write_run({**info, "parts": {**info["parts"], **mine}})

    def flush_store(state: State) -> None:
        store.flush()

    for event in (loop.completed, loop.halted, loop.failed):
        event.wire(flush_store)
    return recorder
