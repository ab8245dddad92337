"""One step of all environments in five phases, and the check that agent, environment and store fit together.

Shapes: N environments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rein.envs.base.contract import check_observed, check_rows, check_time_step, check_transition
from rein.episodes.finite import FiniteData
from rein.loop.state import State
from rein.ops.trees import leaves, to_device
from rein.protocols import AgentProtocol, Environment, Store, missing_names
from rein.replay.rollout import RowBuffer
from rein.spaces.masks import check_masks
from rein.types import StepState, TimeStep, Transition, Tree

PHASES = ("action_selected", "action_applied", "observation_recorded", "model_optimized", "trajectory_persisted")


class Collected(NamedTuple):
    """Actions of N environments and their results."""

    observation: Tree  # (N, *O) on which the actions were selected
    action: Tree  # (N, *A)
    extras: Mapping[str, Tensor]
    time_step: TimeStep
    seed: Tensor | None  # (N,) int64 of the episodes to which the steps belong
    options: Sequence[Mapping[str, Any] | None] | None  # reset options of these episodes


def silent(name: str) -> None:
    """Do nothing. Default `emit` of `batch_step`, for use without a loop."""


def batch_step(
    state: State,
    agent: AgentProtocol,
    environment: Environment,
    rows: RowBuffer | None = None,
    emit: Callable[[str], None] = silent,
    finite: FiniteData | None = None,
    collect: Callable[[], Collected] | None = None,
) -> StepState:
    """Take one step: select_action, apply_action, record_observation, optimize_model, persist_trajectory.

    Args:
        state: State of the run. `state.step_state` contains the observation to act on.
        agent: Agent that selects actions and learns.
        environment: Environment with N rows.
        rows: Record of the epoch; the step is appended to it.
        emit: Called with the name of the phase after each phase. `state.step_state` then contains the values known so
            far. It is read again afterwards, so a handler can replace it with `state.step_state._replace(...)`.
        finite: Checks rewards and observations.
        collect: Returns actions that were selected elsewhere, and their results. The phases `action_selected` and
            `action_applied` are then not emitted.

    Returns:
        The next step_state. The clocks are advanced.

    Raises:
        EnvironmentContractError: If the environment, or a handler that replaced the transition, breaks the contract.
        NonFiniteError: If `finite` finds NaN or infinity.
    """
    step_state: StepState = state.step_state
    with torch.no_grad():
        if collect is None:
            action, extras = agent.select_action(step_state.observation)
            step_state = StepState(step_state.observation, step_state.active, action, extras)
            step_state = _emit(state, step_state, "action_selected", emit)
            seed_N = environment.episode_seeds if rows is not None else None  # before the step, in which episodes end
            options = getattr(environment, "episode_options", None) if rows is not None else None
            received, time_step = _apply(agent, environment, step_state)
        else:
            observation, action, extras, time_step, seed_N, options = collect()
            step_state, received = StepState(observation, None, action, extras), time_step
    first = state.clocks.vector_steps == 0  # checks that wait for the device
    if first:
        check_time_step(time_step, environment.num_envs, environment.single_observation_space, finite=False)
    else:
        check_rows(time_step, environment.num_envs)
        check_observed(time_step, environment.single_observation_space, int(state.clocks.vector_steps))
    spaces = environment.single_observation_space, environment.single_action_space
    check_masks(step_state.observation, *spaces, time_step.valid, waits=first)
    concluded = _conclude(state, step_state, time_step)
    step_state = _emit(state, concluded, "action_applied", emit) if collect is None else concluded
    transition: Transition = step_state.transition  # type: ignore[assignment]  # set by _conclude
    if step_state is not concluded:
        check_transition(transition, environment.num_envs)
    if finite is not None:
        finite.check_step(state, received, step_state)
    agent.record_observation(transition)
    if finite is not None:
        finite.check_full(state)
    clocks = state.clocks
    clocks.env_steps, clocks.vector_steps = agent.env_steps, clocks.vector_steps + 1
    clocks.advance(episodes=((transition.terminated | transition.truncated) & transition.valid).sum())
    step_state = _emit(state, step_state, "observation_recorded", emit)
    metrics = agent.optimize_model()
    if type(metrics) is not dict and metrics is not None and not isinstance(metrics, Mapping):
        name = f"{type(agent).__name__}.optimize_model()"
        raise TypeError(f"{name} returned {_described(metrics)}; it must return a dictionary of metrics")
    clocks.updates = agent.updates
    step_state = _emit(state, step_state._replace(metrics=metrics), "model_optimized", emit)
    if rows is not None:
        persist_trajectory(state, rows, seed_N, options)
    step_state = _emit(state, step_state, "trajectory_persisted", emit)
    return step_state._replace(observation=time_step.observation)  # the observation of the next step


def _emit(state: State, step_state: StepState, event: str, emit: Callable[[str], None]) -> StepState:
    state.step_state = step_state
    emit(event)
    return state.step_state


def _apply(agent: AgentProtocol, environment: Environment, step_state: StepState) -> tuple[TimeStep, TimeStep]:
    """Step the environments. Returns the result on their device and on the agent's."""
    if agent.device == environment.device:
        time_step = step_active(environment, step_state.action, step_state.active)
        return time_step, time_step
    action, active_N = to_device((step_state.action, step_state.active), environment.device)
    time_step = step_active(environment, action, active_N)
    # a non-blocking copy is ordered before later operations only if its target is a GPU
    return time_step, to_device(time_step, agent.device, non_blocking=agent.device.type == "cuda")


def step_active(environment: Environment, action: Tree, active: Tensor | None) -> TimeStep:
    """Step the environments for which `active` (N,) is True, or all of them if it is None.

    Environments without `steps_separately` step all rows, because stepping only some of them would take longer.
    """
    if active is None or not getattr(environment, "steps_separately", False) or bool(active.all()):
        return environment.apply_action(action)
    return environment.apply_action_where(action, active)  # type: ignore[attr-defined]  # see `PartlySteppable`


def _conclude(state: State, step_state: StepState, time_step: TimeStep) -> StepState:
    """Add the transition of this step and, in an episodic epoch, the episodes that are still active."""
    terminated_N, truncated_N, valid_N = time_step.terminated, time_step.truncated, time_step.valid
    active_N = step_state.active
    if active_N is not None:
        # steps of an environment after the end of its episode are invalid in this epoch
        valid_N = valid_N & active_N
        terminated_N, truncated_N = terminated_N & valid_N, truncated_N & valid_N
        if state.iteration + 1 == state.max_iterations:  # the last step of the epoch truncates open episodes
            truncated_N = truncated_N | (valid_N & ~terminated_N)
        active_N = active_N & ~(terminated_N | truncated_N)
    transition = Transition(
        step_state.observation,
        step_state.action,
        time_step.reward,
        terminated_N,
        truncated_N,
        time_step.final_observation,
        valid_N,
        step_state.extras or {},
    )
    return step_state._replace(time_step=time_step, transition=transition, active=active_N)


def persist_trajectory(
    state: State, rows: RowBuffer, seed_N: Tensor | None, options: Sequence[Mapping[str, Any] | None] | None = None
) -> None:
    """Append this step to the rows of the epoch, in memory. `write_trajectories` passes the epoch to the store.

    The raw reward is included from the first step in which a handler changed the reward. `seed_N` (N,) are the seeds of
    the episodes to which the step belongs, and `options` their reset options.
    """
    step_state: StepState = state.step_state
    transition: Any = step_state.transition
    derived = {}
    if rows.everything and rows.derive is not None:
        derived = rows.derive(state)
        _check_derived(derived, len(transition.reward))
    if rows.length == 0:
        _check_names(transition.extras, derived)
    row: dict[str, Tree] = {}
    if rows.everything:
        row = {
            **transition.extras,
            "observation": transition.observation,
            "action": transition.action,
            "next_observation": transition.next_observation,
            "seed": seed_N,
        }
    row["reward"], row["valid"] = transition.reward, transition.valid
    row["terminated"], row["truncated"] = transition.terminated, transition.truncated
    raw_reward_N = step_state.time_step.reward if step_state.time_step is not None else transition.reward
    if raw_reward_N is not transition.reward and rows.length:
        rows.add_copy("raw_reward", of="reward")
    if raw_reward_N is not transition.reward or "raw_reward" in rows:
        row["raw_reward"] = raw_reward_N
    if derived:
        row.update(derived)
    rows.append(row)
    if options is not None:
        record_options(rows, options, (row["terminated"] | row["truncated"]) & row["valid"])


def record_options(rows: RowBuffer, options: Sequence[Mapping[str, Any] | None], ended_N: Tensor) -> None:
    """Record the reset options of the episodes that ended in the last row, `ended_N` (N,)."""
    for environment in ended_N.nonzero().flatten().tolist():
        if options[environment] is not None:
            rows.options[rows.length - 1, environment] = json.dumps(options[environment])


def _check_derived(derived: Any, num_envs: int) -> None:
    """Raise TypeError or ValueError if `state_to_trajectory` did not return fields (N, ...)."""
    if not isinstance(derived, Mapping):
        raise TypeError(
            f"state_to_trajectory returned {_described(derived)}; it must return a dictionary of tensors (N, ...)"
        )
    for path, leaf in leaves(derived):
        if not isinstance(leaf, Tensor):
            raise TypeError(f"state_to_trajectory: {path} is {_described(leaf)}; expected a tensor ({num_envs}, ...)")
        if leaf.shape[:1] != (num_envs,):
            raise ValueError(
                f"state_to_trajectory: {path} has shape {tuple(leaf.shape)}; expected one row for each of the "
                f"{num_envs} environments, ({num_envs}, ...)"
            )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}"


def _check_names(extras: Mapping[str, Tree], derived: Mapping[str, Tree]) -> None:
    reserved = {*Transition._fields, "raw_reward", "seed"}
    for source, fields in (("the agent's extras", extras), ("state_to_trajectory", derived)):
        if taken := reserved & set(fields):
            raise ValueError(
                f"{source}: the names {', '.join(sorted(taken))} are reserved for fields that rein stores; rename them"
            )


def check_fit(agent: AgentProtocol, environment: Environment, store: Store | None) -> None:
    """Raise TypeError if a part lacks something of its protocol, and ValueError if the spaces do not match."""
    if missing_names(agent, AgentProtocol) and not missing_names(environment, AgentProtocol):
        raise TypeError("training_loop: agent and environment are swapped; pass the agent first")
    check_part("training_loop", agent, AgentProtocol)
    check_part("training_loop", environment, Environment)
    if store is not None:
        check_part("training_loop", store, Store)
    pairs = (
        ("observations", agent.observation_space, environment.single_observation_space),
        ("actions", agent.action_space, environment.single_action_space),
    )
    for values, agent_space, space in pairs:
        if agent.observation_space == environment.single_action_space != agent.action_space:
            raise ValueError("training_loop: the agent's spaces are swapped; pass the observation space first")
        if agent_space != space:
            raise ValueError(
                f"training_loop: the agent was created for {values} in {agent_space}, but those of the environment are "
                f"in {space}; create it with environment.single_observation_space and environment.single_action_space"
            )
    check_held(environment, store)


def check_part(caller: str, part: Any, protocol: type) -> None:
    """Raise TypeError if `part` lacks a method or an attribute of the protocol. The message suggests a fix."""
    if isinstance(part, type):
        raise TypeError(f"{caller}: {part.__name__} is a class; pass an instance, {part.__name__}(...)")
    absent = missing_names(part, protocol)
    if not absent:
        return
    kind = type(part).__name__
    hint = f"it lacks {', '.join(absent)}"
    if protocol is Environment and hasattr(part, "step"):
        vector = hasattr(part, "single_observation_space")
        hint = f"build Gymnasium environments with rein.make({'environment' if vector else 'id_or_factory, num_envs'})"
        hint += ", and wrap simulators of torch tensors with rein.TensorEnvironment(environment)" if vector else ""
    elif protocol is Environment and isinstance(part, str):
        hint = f"pass rein.make({part!r}, num_envs)"
    elif protocol is Store:
        hint = f"pass the path of a new run or a rein.HDF5Store; {hint}"
    raise TypeError(f"{caller}: {kind} is not a valid {protocol.__name__.removesuffix('Protocol')}; {hint}")


def check_held(environment: Environment, store: Store | None) -> None:
    """Raise ValueError if the store cannot hold the spaces of the environment.

    Stores with `check_spaces` raise here instead of after the first epoch. Other stores are not checked.
    """
    if check := getattr(store, "check_spaces", None):
        check({"observation": environment.single_observation_space, "action": environment.single_action_space})
