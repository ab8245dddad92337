"""Offline learning: fill a replay buffer from stored data, and train without environments.

Shapes: N environments, T steps, B rows.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Union, runtime_checkable
from weakref import WeakSet

import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.agent import cast_action
from rein.agents.base.replay_agent import ReplayAgent
from rein.envs.base.contract import outside
from rein.errors import check_keywords
from rein.loop import Loop
from rein.loop.filters import NOT_GIVEN
from rein.loop.state import State
from rein.ops.trees import leaves, map_tree, to_device
from rein.protocols import Store
from rein.replay.frames import FrameReplay
from rein.replay.prioritized import PrioritizedReplay
from rein.replay.replay import Replay
from rein.spaces import ACTION_MASK, children, tensors_of
from rein.spaces.conversion import tensor_dtype
from rein.spaces.masks import MASK_HINT, wrong_values
from rein.training.training_loop import check_learning, own_store, report_agent, seed_parts
from rein.types import STEP_STATE_TYPES, StepState, Transition, Tree

if TYPE_CHECKING:
    from rein.store.datasets import Transitions
    from rein.store.reader import Run


def pairs(chunks: Iterable[Transition]) -> Iterator[tuple[Transition, Transition | None]]:
    """Yield each chunk with the next one, or None after the last. Empty chunks are skipped."""
    before: Transition | None = None
    for chunk in chunks:
        if chunk.reward is not None and not len(chunk.reward):
            continue
        if before is not None:
            yield before, chunk
        before = chunk
    if before is not None:
        yield before, None


def together(chunks: Iterable[Transition]) -> Transition:
    """Concatenate chunks. Raises ValueError if there are none."""
    first, *rest = list(chunks) or [None]
    if first is None:
        raise ValueError("there are no transitions to fill a replay with")
    return map_tree(lambda *columns: torch.cat(columns), first, *rest)


def extend(replay: Replay, transitions: Transition, num_envs: int = 1, following: Transition | None = None) -> int:
    """Append consecutive transitions (B, ...) and return the number of valid ones. Extras are not kept.

    A row whose next observation differs from the observation of the next row becomes truncated. N-step returns
    therefore stay within one episode, environment and contiguous part of the data.

    Args:
        replay: replay buffer.
        transitions: consecutive transitions (B, ...).
        num_envs: number of environments. Each gets a contiguous part of the rows.
        following: transitions that are appended next, if any, for one environment.

    Raises:
        ValueError: if a field is missing or differs from earlier rows, if `num_envs` differs from earlier calls, or if
            the rows do not fit into the replay, which would overwrite recorded rows.
    """
    replay.flush()
    rows = _columns(transitions)
    if not len(rows["reward"]):
        return 0
    rows = map_tree(lambda column: _split_rows(column.to(replay.device), num_envs), rows)
    count, padding = len(rows["reward"]), -len(transitions.reward) % num_envs
    if padding:
        rows["valid"] = rows["valid"].clone()
        rows["valid"][count - padding :, -1] = False
    after = following.observation if following is not None and num_envs == 1 else None
    rows["truncated"] = rows["truncated"] | ~(rows["terminated"] | _is_continued(rows, after))
    _make_room(replay, rows, count, num_envs)
    for first, last in _ranges(replay, count):
        replay._write(map_tree(lambda column, a=first, b=last: column[a:b], rows), last - first)
    return int(rows["valid"].sum())


def _columns(transitions: Transition) -> dict[str, Tree]:
    row = transitions._asdict()
    row.pop("extras")
    if absent := [name for name, column in row.items() if column is None]:
        raise ValueError(f"the transitions have no {', '.join(absent)}; record or request every field")
    row["reward"] = row["reward"].to(torch.float32)
    return row


def _split_rows(column_B: Tensor, num_envs: int) -> Tensor:
    """Return (S, N, ...), with a contiguous part of the rows per environment; the last row is repeated as padding."""
    if num_envs == 1:
        return column_B.unsqueeze(1)
    slots = -(-len(column_B) // num_envs)
    row_NS = torch.arange(slots * num_envs, device=column_B.device).clamp_(max=len(column_B) - 1)
    return column_B[row_NS.view(num_envs, slots).t()]


def _is_continued(rows: Mapping[str, Tree], following: Tree = None) -> Tensor:
    """Return (S, N) bool: whether the next observation of a row is the observation of the next slot, or `following`."""
    is_continued = torch.zeros_like(rows["truncated"])
    is_continued[:-1] = True
    if following is not None:
        is_last = map_tree(lambda b, a: torch.equal(a[-1, 0], b[0]), following, rows["next_observation"])
        is_continued[-1] = all(same for _, same in leaves(is_last))
    equal = map_tree(lambda b, a: b[1:] == a[:-1], rows["observation"], rows["next_observation"])
    for _, same in leaves(equal):
        is_continued[:-1] &= same.flatten(2).all(2) if same.ndim > 2 else same
    return is_continued


def _make_room(replay: Replay, rows: dict[str, Any], count: int, num_envs: int) -> None:
    first = map_tree(lambda column: column[0], rows)
    if replay._packing is None:
        replay._allocate(first)
    if replay.num_envs != num_envs:
        raise ValueError(f"the replay has rows of {replay.num_envs} environments; use num_envs={replay.num_envs}")
    replay._packed().check(first)
    if replay.filled + count > replay.slots:
        raise ValueError(
            f"the replay has room for {replay.slots * num_envs:,} transitions, but there are at least "
            f"{(replay.filled + count) * num_envs:,}; build the agent with a larger capacity"
        )


def _ranges(replay: Replay, count: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of new slots that do not cross the end of the ring."""
    first = 0
    while first < count:
        last = min(count, first + replay.slots - replay.next_slot)
        yield first, last
        first = last


ITERATIONS = 100  # default iterations of an epoch
_MASKS = [["observation", ACTION_MASK], ["next_observation", ACTION_MASK]]
ROUNDING = 2.0**-9  # tolerance for actions, relative to the width or bounds of a Box: rounding error of bfloat16

_randomly_seeded: WeakSet[ReplayAgent] = WeakSet()  # agents whose seed was drawn here


@runtime_checkable
class Recorded(Protocol):
    """Transitions that can be read in chunks, such as `rein.integrations.minari.MinariData`."""

    def chunks(self) -> Iterator[Transition]:
        """Iterate over all transitions, (B, ...), in order."""
        ...


Source = Union["Run", "Transitions", Recorded, Iterable[Transition]]


@check_keywords
def offline_loop(
    agent: ReplayAgent,
    data: Source | None = None,
    store: Store | str | Path | None = None,
    *,
    epochs: int | None = NOT_GIVEN,
    iterations: int | None = None,
    updates_per_iteration: int = 10,
    seed: int | None = None,
    check_finite: bool = True,
    debug: bool = False,
) -> Loop:
    """Build a loop that trains `agent` on the contents of its replay buffer.

    The clock of the loop is `updates`, because no environment is stepped. The loop owns the agent and its replay, so a
    checkpoint resumes exactly, whatever `data` is then. Evaluation, checkpoints and early stopping are handlers.

    Args:
        agent: agent that learns from a replay buffer.
        data: transitions to fill the replay with first; see `fill_replay`.
        store: store for `run.json`, the files of the metrics and checkpoints, or the path of a new `HDF5Store`.
        epochs: default number of epochs of `loop.run`.
        iterations: iterations of an epoch, 100 by default.
        updates_per_iteration: updates of an iteration.
        seed: seed for an agent that was built without one.
        check_finite: whether to raise NonFiniteError if a loss, gradient norm or parameter is not finite.
        debug: option of the loop.

    Raises:
        TypeError: if the agent does not learn from a replay buffer.
        ValueError: if a number is below 1, or if an agent without a seed has learned or has rows. Seeding would
            discard them.

    Example:
        >>> loop = offline_loop(agent, rein.open_run("runs/sac"), epochs=20)
        >>> evaluate_every(loop, agent.policy(), environment, episodes=10)
        >>> loop.run()
    """
    if not isinstance(agent, ReplayAgent):
        raise TypeError(f"offline_loop: {type(agent).__name__} does not learn from a replay; use a ReplayAgent")
    if updates_per_iteration < 1:
        raise ValueError(f"offline_loop(updates_per_iteration={updates_per_iteration}): give 1 or more")
    if agent.seed is None and not agent.loaded and (agent.updates or len(agent.replay)):
        raise ValueError("offline_loop: seeding the agent would empty its replay; build it with a seed=")
    _seed(agent, seed)
    if data is not None:
        fill_replay(agent, data)

    def step(state: State) -> StepState:
        metrics = agent.learn(updates_per_iteration)
        state.clocks.updates = agent.updates
        return StepState(None, metrics=metrics)

    loop = Loop(
        step,
        epochs=epochs,
        iterations=ITERATIONS if iterations is None else iterations,
        debug=debug,
        step_state_types=STEP_STATE_TYPES,
    )
    loop.own("agent", agent, by_chance="seed" if agent in _randomly_seeded else ())
    report_agent(loop, agent)
    check_learning(loop, agent, None, check_finite)
    if store is not None:
        own_store(loop, store)

    @loop.started.wire
    def take_clocks(state: State) -> None:
        if not len(agent.replay):
            raise ValueError("offline_loop: the replay is empty; give data=, or call fill_replay(agent, data) first")
        state.clocks.env_steps, state.clocks.updates = agent.env_steps, agent.updates

    return loop


def fill_replay(
    agent: ReplayAgent, data: Source, *, num_envs: int = 1, clip: bool = False, demonstrations: bool = False
) -> int:
    """Fill an agent's replay buffer with recorded transitions, and return the number of valid ones.

    With `demonstrations`, the transitions fill a second replay, which is never overwritten and is saved with the agent.
    The fraction `demonstration_fraction` of each batch then comes from it, while the agent learns in an environment
    (RLPD, Ball et al. 2023). Earlier demonstrations are replaced.

    The statistics of an observation normalizer are updated, too.

    Args:
        agent: agent that learns from a replay buffer.
        data: a run (`rein.open_run(...)`), part of a run (`run.transitions(episodes=...)`), a
            `rein.integrations.minari.MinariData`, or an iterable of `Transition` with consecutive rows (B, ...). The
            environments of a run are read one after the other.
        num_envs: number of environments to train in later. Each gets a contiguous part of the rows.
        clip: whether to clip actions to the bounds of the agent's Box, for data recorded through `ClipAction`.
        demonstrations: whether to fill the replay of demonstrations instead.

    Raises:
        ValueError: if a field is missing, spaces differ from those of the agent, valid rows have values that are not
            finite and that the agent learns from, actions are outside of the action space (beyond rounding, without
            `clip`), or the data exceeds the capacity. Earlier chunks may be in the replay then.
    """
    if not isinstance(num_envs, int) or num_envs < 1:
        raise ValueError(f"fill_replay(num_envs={num_envs!r}): give 1 or more")
    kind, replay_kind = type(agent).__name__, type(agent.replay).__name__
    if isinstance(agent.replay, FrameReplay):
        raise ValueError(
            f"fill_replay: {kind}(frame_stack={agent.replay.frame_stack}) stores each frame once and cannot be filled "
            "with recorded stacks; omit frame_stack"
        )
    if type(agent.replay) not in (Replay, PrioritizedReplay):
        raise ValueError(f"fill_replay: {kind} has a {replay_kind}, which needs more than recorded transitions")
    _seed(agent, None)  # seeding later would empty the replay
    chunks = _all_checked(agent, _chunks(data), clip)
    replay, count = agent.replay, 0
    if demonstrations:
        chunks = [together(chunks)]
        replay = agent.demonstrations = agent.demonstration_replay(len(chunks[0].reward))
    for chunk, following in pairs(chunks if num_envs == 1 else [together(chunks)]):
        count += extend(replay, chunk, num_envs, following)
        agent.networks.preprocess.update(chunk.observation, chunk.valid)
    return count


def _seed(agent: ReplayAgent, seed: int | None) -> None:
    """Seed an agent that has no seed. Raises ValueError if a random seed was drawn for it before."""
    if seed is not None and agent in _randomly_seeded and not agent.loaded:
        raise ValueError(
            f"offline_loop(seed={seed}): the random seed {agent.seed} was drawn for the agent when it was filled or "
            "trained before; build it with a seed="
        )
    if seed_parts(seed, agent):
        _randomly_seeded.add(agent)


def _all_checked(agent: ReplayAgent, chunks: Iterable[Transition], clip: bool) -> Iterator[Transition]:
    rows = 0
    for chunk in chunks:
        checked = _checked(agent, chunk, rows, clip)
        rows += 0 if checked.reward is None else len(checked.reward)
        yield checked


def _checked(agent: ReplayAgent, chunk: Transition, rows: int, clip: bool) -> Transition:
    """Check a chunk, and convert it to the agent's device and dtypes. `rows` is the number of earlier rows."""
    if not isinstance(chunk, Transition):
        raise ValueError(f"fill_replay: data must consist of Transitions of rows (B, ...), not {type(chunk).__name__}")
    chunk = to_device(chunk._replace(extras={}), agent.device)
    chunk = map_tree(lambda column: column.float() if column.dtype is torch.float64 else column, chunk)
    # use the dtypes of later observations, because files store half precision as float32
    names = ("observation", "next_observation")
    observed = {name: _as_observed(getattr(chunk, name), agent.observation_space) for name in names}
    chunk = chunk._replace(action=cast_action(chunk.action, agent.action_space), **observed)
    _check(agent, chunk, rows)
    floating = isinstance(chunk.action, Tensor) and chunk.action.is_floating_point()
    if not isinstance(agent.action_space, spaces.Box) or not floating:
        return chunk
    if clip:
        return chunk._replace(action=chunk.action.clamp(*_bounds(agent)))
    _refuse_outside(agent, chunk, rows)
    return chunk


def _bounds(agent: ReplayAgent) -> tuple[Tensor, Tensor]:
    space: Any = agent.action_space
    low, high = (torch.as_tensor(bound, dtype=torch.float32, device=agent.device) for bound in (space.low, space.high))
    return low, high


def _refuse_outside(agent: ReplayAgent, chunk: Transition, rows: int) -> None:
    """Raise ValueError for actions outside of the Box: critics would learn values that the policy never corrects."""
    if chunk.valid is None:
        return
    low, high = _bounds(agent)
    rounding = torch.maximum(high - low, torch.maximum(low.abs(), high.abs())) * ROUNDING
    wrong_B = ((chunk.action < low - rounding) | (chunk.action > high + rounding)).flatten(1).any(1)
    share = float((wrong_B & chunk.valid).sum()) / max(int(chunk.valid.sum()), 1)
    problem = f"outside of {agent.action_space} ({100.0 * share:.3g}% of these rows)"
    _refuse(wrong_B, chunk, rows, "action", problem, "use fill_replay(..., clip=True) for clipped actions, or ")


def _as_observed(observation: Tree, space: spaces.Space[Any]) -> Tree:
    """Convert to the dtypes of the observation space, except floats to integers. Unknown structures are unchanged."""
    inner = children(space)
    if inner is not None and isinstance(observation, Mapping):
        return {key: _as_observed(part, inner[key]) if key in inner else part for key, part in observation.items()}
    if inner is not None or not isinstance(observation, Tensor):
        return observation
    dtype, wanted = observation.dtype, tensor_dtype(space)
    fits = dtype.is_floating_point if wanted.is_floating_point else torch.promote_types(dtype, wanted) == wanted
    return observation.to(wanted) if fits else observation


def _chunks(data: Source) -> Iterable[Transition]:
    from rein.store.datasets import Streams, Transitions  # imports h5py, which `import rein` does not need
    from rein.store.reader import Run

    if isinstance(data, Run):
        data = data.transitions(Streams.FIELDS)
    if isinstance(data, Transitions):
        return Streams(data).chunks()
    return data.chunks() if isinstance(data, Recorded) else data


def _check(agent: ReplayAgent, chunk: Transition, rows: int) -> None:
    """Raise ValueError if actions or observations do not fit the agent's spaces."""
    if chunk.action is None or chunk.observation is None:
        return  # the replay raises an error with all missing fields
    space, shape = agent.action_space, tuple(chunk.action.shape[1:])
    if space.shape != shape:
        raise ValueError(f"fill_replay: the actions of the agent are {space}, of the data {shape}")
    if isinstance(space, spaces.Discrete) and chunk.action.is_floating_point():
        raise ValueError(f"fill_replay: the actions of the agent are {space}, of the data {chunk.action.dtype}")
    agent.networks.preprocess(map_tree(lambda column: column[:1], chunk.observation))  # checks the structure
    if chunk.valid is not None:
        _check_numbers(agent, chunk, rows)


def _check_numbers(agent: ReplayAgent, chunk: Transition, rows: int) -> None:
    """Raise ValueError for valid rows with numbers that are not finite or not in their space."""
    space, learned = agent.action_space, {"observation": chunk.observation, "action": chunk.action}
    if agent.values:
        learned |= {"reward": chunk.reward, "next_observation": chunk.next_observation}
    for name, column in leaves(learned):
        wrong_B, problem, advice = None, "not finite", ""
        if name.split(".")[:2] in _MASKS:
            if (wrong_BA := wrong_values(column.numpy(force=True))) is not None:
                wrong_B = torch.from_numpy(wrong_BA.any(1)).to(column.device)
            problem, advice = "not a mask of 0 and 1", f"{MASK_HINT}; "
        elif column.is_floating_point():
            wrong_B = ~column.isfinite().flatten(1).all(1) if column.ndim > 1 else ~column.isfinite()
        if wrong_B is not None:
            if name.startswith("next_observation"):
                wrong_B &= ~chunk.terminated  # not used after termination
            _refuse(wrong_B, chunk, rows, name, problem, advice)
    for name in learned.keys() & {"observation", "next_observation"}:
        for path, part in tensors_of(agent.observation_space):
            value = functools.reduce(operator.getitem, path, learned[name])
            wrong = outside(value, part)  # may have no rows
            wrong_B = torch.from_numpy(wrong.any(axis=tuple(range(1, wrong.ndim)))).to(value.device)
            _refuse(wrong_B, chunk, rows, ".".join((name, *path)), f"not in {part}")
    if isinstance(space, spaces.Discrete):
        action_B, low, high = chunk.action.long(), int(space.start), int(space.start) + int(space.n)
        _refuse((action_B < low) | (action_B >= high), chunk, rows, "action", f"not from {low} to {high - 1}")


def _refuse(wrong_B: Tensor, chunk: Transition, rows: int, name: str, problem: str, advice: str = "") -> None:
    wrong_rows = (wrong_B & chunk.valid).nonzero()
    if len(wrong_rows):
        place = f"in {len(wrong_rows)} transitions, first in number {rows + int(wrong_rows[0])}"
        raise ValueError(f"fill_replay: the {name} is {problem} {place}; {advice}remove them, or set valid to False")
