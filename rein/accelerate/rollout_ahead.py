"""Whole rollouts of on-policy agents in simulated environments as one program.

Shapes: T steps of a rollout, N environments, P episode seeds, Q numbers that describe the start of an episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rein.accelerate.compiled import Program, fuses, lowered
from rein.agents.base.on_policy import OnPolicyAgent, RolloutAgent
from rein.envs.base.simulation import SimulatedEnvironment
from rein.envs.base.worlds import SimulatedWorlds
from rein.episodes.finite import FiniteData
from rein.episodes.step import PHASES, persist_trajectory
from rein.loop import Loop
from rein.loop.state import State
from rein.ops.trees import leaves, map_tree
from rein.options import options_of
from rein.replay.rollout import RowBuffer
from rein.types import StepState, TimeStep, Transition, Tree

AGENT_METHODS = {
    "select_action": OnPolicyAgent,
    "choose": OnPolicyAgent,
    "record_observation": OnPolicyAgent,
    "optimize_model": RolloutAgent,
}
COLUMNS = ("observation", "action", "reward", "terminated", "truncated", "next_observation", "valid")


def can_run_ahead(agent: Any, environment: Any) -> bool:
    """Return whether an agent acts and an environment steps by the pure functions that a program contains."""
    if not (isinstance(agent, OnPolicyAgent) and isinstance(environment, SimulatedEnvironment)):
        return False
    kind: Any = type(environment)
    return (
        agent.compile
        and all(getattr(type(agent), name) is getattr(owner, name) for name, owner in AGENT_METHODS.items())
        and not agent.networks.carry_size
        and agent.guard is None
        and kind.apply_action is SimulatedEnvironment.apply_action
        and kind.watch is SimulatedEnvironment.watch
        and kind._step in (SimulatedEnvironment._step, SimulatedWorlds._step)
        and agent.device == environment.device
    )


class _Rollout(NamedTuple):
    """A rollout that a program has computed."""

    tensors: tuple[Tensor, ...]  # of the environment before the first step
    end: tuple[Tensor, ...]  # of the environment after the last step
    start_PQ: Tensor
    observation: Tree  # after the last step
    rows: Sequence[dict[str, Tree]]  # (N, ...) fields of each step
    ended: Sequence[Tensor]  # () number of episodes that ended in each step
    seed_TN: Tensor
    generator: Tensor  # state of the generator of the agent before the first step
    networks: list[Tensor]  # parameters and buffers
    changes: int  # in place of the networks before the rollout
    inputs: list[Any]  # everything else on which the steps depend


class RolloutAhead:
    """Computes a whole rollout as one program at its first step. Each step of the loop then shows views of its rows.

    Parameters are constant within a rollout, so that results, events and their order are those of ordinary steps.
    Ordinary steps are taken if something needs work on the host in each step, see `_is_plain`, and if the epoch ends
    before the rollout does.

    If the run is saved or halted within a rollout, or if a handler changes parameters or options, the environment and
    the random numbers go back to the state of the current step: the recorded actions are repeated from the start of the
    rollout. The remaining steps of this rollout are ordinary ones.
    """

    def __init__(self, loop: Loop, agent: Any, environment: Any, rows: RowBuffer, finite: FiniteData | None) -> None:
        self.rollouts = 0  # computed by programs
        self._loop, self._agent, self._environment, self._rows, self._finite = loop, agent, environment, rows, finite
        self._options = tuple(options_of(type(agent)))
        self._program = Program(self._computed, agent.device)
        self._lowered: dict[Any, Any] = {}  # one step, compiled for these parameters
        self._distribution: Any = None  # draws the noise of a step; only its shape matters
        self._current: _Rollout | None = None
        self._shown: StepState | None = None  # result of the last step
        for event in (loop.epoch_completed, loop.epoch_halted, loop.completed, loop.halted, loop.failed):
            event.wire(self.settle)
        loop.before_saving.append(self.settle)

    def step(self, state: State) -> StepState | None:
        """Take a step of a rollout that a program computes. Returns None if an ordinary step must be taken."""
        if self._current is not None and not self._continues(state):
            self.settle(state)
        if self._current is None:
            if not self._can_begin(state):
                return None
            self._begin(state)
        return self._show(state)

    @torch.no_grad()
    def settle(self, state: State) -> None:
        """Set the environment and the random numbers to the state of the current step."""
        current, self._current = self._current, None
        if current is None:
            return
        agent, tensors = self._agent, current.tensors
        agent.generator.set_state(current.generator)
        for row in current.rows[: len(agent.rollout)]:
            tensors, _ = self._environment.advance(tensors, current.start_PQ, row["action"])
            self._distribution.noise(agent.generator)
        self._environment.set_tensors(tensors)

    def _is_plain(self) -> bool:
        """Return whether nothing needs work on the host in each step."""
        agent, events = self._agent, self._loop.events
        learner = agent.learners["networks"]
        return (
            not any(events[name].listened_to for name in (*PHASES, "episodes_completed"))
            and getattr(agent, "target_kl", None) is None
            and getattr(agent, "segments", None) is None
            and learner.on_gradients is None
            and learner.processes == 1
            and not learner.is_hooked()
        )

    def _can_begin(self, state: State) -> bool:
        rollout = self._agent.rollout
        left = rollout.steps if state.max_iterations is None else state.max_iterations - state.iteration
        return (
            not len(rollout)
            and left >= rollout.steps
            and "log_prob" in rollout  # the first steps are ordinary ones, in which everything is checked
            and "raw_reward" not in self._rows
            and self._is_plain()
        )

    def _continues(self, state: State) -> bool:
        """Return whether the next row shows the next step: nothing on which it depends has changed."""
        current: Any = self._current
        same = all(one is other for one, other in zip(self._inputs(), current.inputs, strict=True))
        changes = sum(x._version for x in current.networks)
        return state.step_state is self._shown and same and changes == current.changes and self._is_plain()

    def _inputs(self) -> list[Any]:
        agent = self._agent
        options = [getattr(agent, name) for name in self._options]
        return [*options, *self._environment.tensors(), agent.networks, agent.rollout]

    @torch.no_grad()
    def _begin(self, state: State) -> None:
        """Compute a rollout."""
        agent, environment, rollout = self._agent, self._environment, self._agent.rollout
        observation = state.step_state.observation
        if self._distribution is None:
            self._distribution, _ = agent.networks.policy(agent.networks.preprocess(observation))
        generator = agent.generator.get_state()
        drawn = [self._distribution.noise(agent.generator) for _ in range(rollout.steps)]
        noise = map_tree(lambda *x: torch.stack(x), *drawn)
        seed_P, start_PQ = environment.cover(rollout.steps)
        tensors = map_tree(Tensor.clone, environment.tensors())  # ordinary steps change some in place
        pointers = [x.data_ptr() for x in agent.networks.parameters()]
        end, place_T, observation, ended_T = self._program(
            tensors, start_PQ, observation, noise, [rollout.generation, *pointers]
        )
        seed_TN = environment.seeds_at(place_T, seed_P)
        rows, ended = rows_of(map_tree(lambda x: x[: rollout.steps], rollout.memory)), ended_T.unbind()
        networks = [*agent.networks.parameters(), *agent.networks.buffers()]
        inputs = networks, sum(x._version for x in networks), self._inputs()
        self._current = _Rollout(tensors, end, start_PQ, observation, rows, ended, seed_TN, generator, *inputs)
        self._shown = state.step_state
        self.rollouts += 1

    def _computed(
        self, tensors: Sequence[Tensor], start_PQ: Tensor, observation: Tree, noise: Tree, memory: Any
    ) -> tuple[Any, ...]:
        """Write the rows of all steps to the memory of the rollout.

        Returns the tensors of the environment after the last step, the places of episodes (T, ...), the last
        observation, and the number of episodes that ended in each step (T,).
        """
        rollout, places, ended = self._agent.rollout, [], []
        step: Any = self._advanced
        if fuses(start_PQ.device):
            inputs = tuple(tensors), start_PQ, observation, map_tree(lambda x: x[0], noise)
            if (key := tuple(memory)) not in self._lowered:
                self._lowered[key] = lowered(self._advanced, inputs)
            step = self._lowered[key]
        for t in range(rollout.steps):
            places.append(tensors[-1])
            noise_t = map_tree(lambda x, t=t: x[t], noise)
            tensors, row, observation = step(tuple(tensors), start_PQ, observation, noise_t)
            values = [leaf for name in rollout.memory for _, leaf in leaves(row[name])]
            torch._foreach_copy_([leaf[t] for _, leaf in leaves(rollout.memory)], values)
            ended.append((row["terminated"] | row["truncated"]) & row["valid"])
        return tensors, torch.stack(places), observation, torch.stack(ended).sum(1)

    @torch.no_grad()
    def _advanced(
        self, tensors: tuple[Tensor, ...], start_PQ: Tensor, observation: Tree, noise: Tree
    ) -> tuple[Any, dict[str, Tree], Tree]:
        """Compute one step: the tensors of the environment, the row, and the next observation."""
        action, extras = self._agent.choose(observation, noise)
        tensors, time_step = self._environment.advance(tensors, start_PQ, action)
        ends = time_step.terminated, time_step.truncated
        columns = observation, action, time_step.reward, *ends, time_step.final_observation, time_step.valid
        return tensors, {**dict(zip(COLUMNS, columns, strict=True)), **extras}, time_step.observation

    def _show(self, state: State) -> StepState:
        """Take the step whose row is the next one, in the order of `rein.episodes.batch_step`."""
        agent, rollout, clocks = self._agent, self._agent.rollout, state.clocks
        current: Any = self._current
        t = len(rollout)
        row = dict(current.rows[t])
        columns = {name: row.pop(name) for name in COLUMNS}
        is_last = t == rollout.steps - 1
        observation = current.observation if is_last else current.rows[t + 1]["observation"]
        ends = columns["terminated"], columns["truncated"]
        received = TimeStep(observation, columns["reward"], *ends, columns["next_observation"], columns["valid"], {})
        transition = Transition(**columns, extras=row)
        shown = StepState(columns["observation"], None, columns["action"], row, received, transition)
        state.step_state = shown
        rollout.count_written()
        agent.env_steps += len(columns["reward"])
        if is_last:  # before the update, which may raise
            self._environment.set_tensors(current.end)
            self._current = None
        if self._finite is not None:
            self._finite.check_full(state)
        clocks.env_steps, clocks.vector_steps = agent.env_steps, clocks.vector_steps + 1
        clocks.advance(episodes=current.ended[t])
        state.step_state = shown = shown._replace(metrics=agent.optimize_model())
        clocks.updates = agent.updates
        if t == 0:
            persist_trajectory(state, self._rows, current.seed_TN[0])
            after = map_tree(lambda x: x[1 : rollout.steps], {**rollout.memory, "seed": current.seed_TN})
            self._rows.write_ahead(after)
        else:
            self._rows.count_written()
        self._shown = shown._replace(observation=observation)
        return self._shown


def rows_of(fields: Mapping[str, Tree]) -> list[dict[str, Tree]]:
    """Return views (N, ...) of each row of fields (T, N, ...)."""
    columns = {name: rows_of(x) if isinstance(x, Mapping) else x.unbind() for name, x in fields.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
