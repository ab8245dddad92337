"""Offline learning: filling a replay from stored data, and a loop without environments.

Shapes: N environments, T steps, B rows.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Union, runtime_checkable
from weakref import WeakSet

import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.agent import cast_action
from rein.agents.base.replay_agent import ReplayAgent
from rein.envs.base.contract import outside
from rein.envs.base.spaces import tensor_dtype
from rein.foreign_names import check_keywords
from rein.loop import Loop
from rein.loop.filters import NOT_GIVEN
from rein.loop.state import State
from rein.networks.encoder import children, tensors_of
from rein.ops.trees import leaves, map_tree, to_device
from rein.protocols import Store
from rein.replay.frames import FrameReplay
from rein.replay.prioritized import PrioritizedReplay
from rein.replay.replay import Replay
from rein.training.training_loop import check_learning, describe_run, report_agent, seed_parts
from rein.types import STEP_STATE_TYPES, StepState, Transition, Tree

if TYPE_CHECKING:
    from rein.store.datasets import Transitions
    from rein.store.reader import Run


def pairs(chunks: Iterable[Transition]) -> Iterator[tuple[Transition, Transition | None]]:
    """Each chunk with the one after it; None after the last. Those without rows are left out."""
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
    """All of them as one. Raises ValueError where there are none."""
    first, *rest = list(chunks) or [None]
    if first is None:
        raise ValueError("there are no transitions to fill a replay with")
    return map_tree(lambda *columns: torch.cat(columns), first, *rest)


def extend(replay: Replay, transitions: Transition, num_envs: int = 1, following: Transition | None = None) -> int:
    """Append transitions (B, ...) that were recorded one after the other; returns how many of them are valid.

    They become the rows of `num_envs` environments, each of which has a stretch of them. A row whose next observation
    is not the observation of the row after it is marked as truncated, so no n-step return reaches into another episode,
    environment or stretch. After the last row of one environment comes `following`, if that is appended next. What the
    agent said along with its actions is not kept.

    Raises ValueError for transitions that lack a field or differ from those before, for another number of environments
    than before, and where the replay is too small: what is recorded is not to be overwritten unseen.
    """
    replay.flush()
    rows = _columns(transitions)
    if not len(rows["reward"]):
        return 0
    rows = map_tree(lambda column: _stretches(column.to(replay.device), num_envs), rows)
    count, padding = len(rows["reward"]), -len(transitions.reward) % num_envs
    if padding:
        rows["valid"] = rows["valid"].clone()
        rows["valid"][count - padding :, -1] = False
    after = following.observation if following is not None and num_envs == 1 else None
    rows["truncated"] = rows["truncated"] | ~(rows["terminated"] | _followed(rows, after))
    _make_room(replay, rows, count, num_envs)
    for first, last in _turns(replay, count):
        replay._write(map_tree(lambda column, a=first, b=last: column[a:b], rows), last - first)
    return int(rows["valid"].sum())


def _columns(transitions: Transition) -> dict[str, Tree]:
    row = transitions._asdict()
    row.pop("extras")
    if absent := [name for name, column in row.items() if column is None]:
        raise ValueError(f"the transitions have no {', '.join(absent)}: record, or ask for, every field")
    row["reward"] = row["reward"].to(torch.float32)
    return row


def _stretches(column_B: Tensor, num_envs: int) -> Tensor:
    """(S, N, ...), each environment with a stretch of the rows; the last row is repeated where there are too few."""
    if num_envs == 1:
        return column_B.unsqueeze(1)
    slots = -(-len(column_B) // num_envs)
    row_NS = torch.arange(slots * num_envs, device=column_B.device).clamp_(max=len(column_B) - 1)
    return column_B[row_NS.view(num_envs, slots).t()]


def _followed(rows: Mapping[str, Tree], following: Tree = None) -> Tensor:
    """(S, N) bool: whether what comes after a row is what the next slot begins with, the last one with `following`."""
    found = torch.zeros_like(rows["truncated"])
    found[:-1] = True
    if following is not None:
        is_last = map_tree(lambda b, a: torch.equal(a[-1, 0], b[0]), following, rows["next_observation"])
        found[-1] = all(same for _, same in leaves(is_last))
    equal = map_tree(lambda b, a: b[1:] == a[:-1], rows["observation"], rows["next_observation"])
    for _, same in leaves(equal):
        found[:-1] &= same.flatten(2).all(2) if same.ndim > 2 else same
    return found


def _make_room(replay: Replay, rows: dict[str, Any], count: int, num_envs: int) -> None:
    first = map_tree(lambda column: column[0], rows)
    if replay._packing is None:
        replay._allocate(first)
    if replay.num_envs != num_envs:
        raise ValueError(f"the replay holds rows of {replay.num_envs} environments: give num_envs={replay.num_envs}")
    replay._packed().check(first)
    if replay.filled + count > replay.slots:
        raise ValueError(
            f"the replay has room for {replay.slots * num_envs:,} transitions, and there are at least "
            f"{(replay.filled + count) * num_envs:,}: build the agent with a larger capacity"
        )


def _turns(replay: Replay, count: int) -> Iterator[tuple[int, int]]:
    """Which of the slots that are to come are written at once: a ring has an end."""
    first = 0
    while first < count:
        last = min(count, first + replay.slots - replay.next_slot)
        yield first, last
        first = last


ITERATIONS = 100  # of an epoch, where nobody says
ROUNDING = 2.0**-9  # of a Box's width or bounds, by which actions may lie outside: what bfloat16 is off by, half less

_by_chance: WeakSet[ReplayAgent] = WeakSet()  # agents without a seed of the caller; theirs was drawn here


@runtime_checkable
class Recorded(Protocol):
    """Transitions that can be had part by part, as those of a `rein.integrations.minari.MinariData`."""

    def chunks(self) -> Iterator[Transition]:
        """All of them, (B, ...), one after the other."""
        ...


Source = Union["Run", "Transitions", Recorded, Iterable[Transition]]


@check_keywords
def offline_loop(
    agent: ReplayAgent,
    data: Source | None = None,
    store: Store | None = None,
    *,
    epochs: int | None = NOT_GIVEN,
    iterations: int | None = None,
    updates_per_iteration: int = 10,
    seed: int | None = None,
    check_finite: bool = True,
    debug: bool = False,
) -> Loop:
    """A loop that trains `agent` on what its replay holds, filled with `data` first where that is given.

        loop = offline_loop(agent, rein.open_run("runs/sac"), epochs=20)
        evaluate(loop, agent.policy(), environment, episodes=10)
        loop.run()

    An epoch has 100 iterations if not told, each of `updates_per_iteration` updates; `data` is what `fill` takes. The
    loop owns the agent, and the replay with it: a checkpoint resumes exactly, with whatever `data` there is then. The
    clock that advances is `updates`: nobody acts. Evaluation, checkpoints and early stopping are handlers, as they are
    in every loop; what the agent reports are metrics. `store` takes `run.json`, the metrics' files and checkpoints.
    `seed` seeds an agent that was built without one; `debug` is the loop's. `check_finite` checks that losses, gradient
    norms and parameters are finite and raises NonFiniteError if one is not.

    Raises TypeError for an agent that does not learn from replay; ValueError for numbers below 1, and where an agent
    that is to be seeded has learned or been filled before, which it would forget.
    """
    if not isinstance(agent, ReplayAgent):
        raise TypeError(f"offline_loop: {type(agent).__name__} does not learn from a replay, as a ReplayAgent does")
    if updates_per_iteration < 1:
        raise ValueError(f"offline_loop(updates_per_iteration={updates_per_iteration}): give 1 or more")
    if agent.seed is None and not agent.loaded and (agent.updates or len(agent.replay)):
        raise ValueError("offline_loop: to seed the agent would empty its replay; build it with a seed=")
    _seed(agent, seed)
    if data is not None:
        fill(agent, data)

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
    loop.own("agent", agent, by_chance="seed" if agent in _by_chance else ())
    report_agent(loop, agent)
    check_learning(loop, agent, None, check_finite)
    if store is not None:
        loop.own("store", store)
        describe_run(loop, store)

    @loop.started.wire
    def take_clocks(state: State) -> None:
        if not len(agent.replay):
            raise ValueError("offline_loop: there is nothing to learn from; give data=, or fill(agent, data) before")
        state.clocks.env_steps, state.clocks.updates = agent.env_steps, agent.updates

    return loop


def fill(agent: ReplayAgent, data: Source, *, num_envs: int = 1, clip: bool = False) -> int:
    """Put recorded transitions into an agent's replay; returns how many there were.

    `data` is a run (`rein.open_run(...)`), whose environments come one after the other, a part of one
    (`run.transitions(episodes=...)`), a `rein.integrations.minari.MinariData`, or any iterable of `Transition`s of rows
    (B, ...) that were recorded one after the other. To go on in N environments later, give `num_envs=N`: each of them
    then has a stretch of the rows. An observation normalizer learns of them, too. `clip=True` puts actions outside of
    the agent's Box at its bounds, as the environment did that they were recorded in through `ClipAction`.

    Raises ValueError for data without one of the fields, or of other spaces than the agent's, for numbers of valid rows
    that are not finite where the agent learns from them, for actions outside the action space (of a Box by more than
    rounding, and without `clip`), and where there is more of it than the replay's capacity; what came before may be in
    the replay then.
    """
    if not isinstance(num_envs, int) or num_envs < 1:
        raise ValueError(f"fill(num_envs={num_envs!r}): give 1 or more")
    kind, kept = type(agent).__name__, type(agent.replay).__name__
    if isinstance(agent.replay, FrameReplay):
        raise ValueError(
            f"fill: {kind}(frame_stack={agent.replay.frame_stack}) keeps each frame once, as it comes; leave "
            "frame_stack out to fill its replay with recorded stacks"
        )
    if type(agent.replay) not in (Replay, PrioritizedReplay):
        raise ValueError(f"fill: {kind} keeps its rows in a {kept}, of which recorded transitions lack parts")
    _seed(agent, None)  # to do so later would draw it anew
    chunks = _all_checked(agent, _chunks(data), clip)
    count = 0
    for chunk, following in pairs(chunks if num_envs == 1 else [together(chunks)]):
        count += extend(agent.replay, chunk, num_envs, following)
        agent.networks.preprocess.update(chunk.observation, chunk.valid)
    return count


def _seed(agent: ReplayAgent, seed: int | None) -> None:
    """Seed an agent that nobody has seeded. Raises ValueError where another seed was drawn for it here before."""
    if seed is not None and agent in _by_chance and not agent.loaded:
        raise ValueError(
            f"offline_loop(seed={seed}): seed {agent.seed} was drawn for the agent when it was filled, or by a loop "
            "before; build it with a seed="
        )
    if seed_parts(seed, agent):
        _by_chance.add(agent)


def _all_checked(agent: ReplayAgent, chunks: Iterable[Transition], clip: bool) -> Iterator[Transition]:
    rows = 0
    for chunk in chunks:
        checked = _checked(agent, chunk, rows, clip)
        rows += 0 if checked.reward is None else len(checked.reward)
        yield checked


def _checked(agent: ReplayAgent, chunk: Transition, rows: int, clip: bool) -> Transition:
    """Where the agent is, and in its types; `rows` came before it."""
    if not isinstance(chunk, Transition):
        raise ValueError(f"fill: data gives {type(chunk).__name__}, and not a Transition of rows (B, ...) each time")
    chunk = to_device(chunk._replace(extras={}), agent.device)
    chunk = map_tree(lambda column: column.float() if column.dtype is torch.float64 else column, chunk)
    # as those that it goes on with: files hold half precision as float32
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
    """ValueError for actions that the agent's policy cannot take: critics would learn there what nobody corrects."""
    if chunk.valid is None:
        return
    low, high = _bounds(agent)
    rounding = torch.maximum(high - low, torch.maximum(low.abs(), high.abs())) * ROUNDING
    wrong_B = ((chunk.action < low - rounding) | (chunk.action > high + rounding)).flatten(1).any(1)
    share = float((wrong_B & chunk.valid).sum()) / max(int(chunk.valid.sum()), 1)
    what = f"outside of {agent.action_space} ({100.0 * share:.3g}% of the rows here)"
    _refuse(wrong_B, chunk, rows, "action", what, "give fill(..., clip=True) where the environment clipped them, or ")


def _as_observed(observation: Tree, space: spaces.Space[Any]) -> Tree:
    """In the types of the agent's observations, unless whole numbers would be cut; what is of no such space stays."""
    inner = children(space)
    if inner is not None and isinstance(observation, Mapping):
        return {key: _as_observed(part, inner[key]) if key in inner else part for key, part in observation.items()}
    if inner is not None or not isinstance(observation, Tensor):
        return observation
    given, wanted = observation.dtype, tensor_dtype(space)
    fits = given.is_floating_point if wanted.is_floating_point else torch.promote_types(given, wanted) == wanted
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
    """ValueError where these are not the agent's actions or observations."""
    if chunk.action is None or chunk.observation is None:
        return  # the replay names all that is not there
    space, given = agent.action_space, tuple(chunk.action.shape[1:])
    if space.shape != given:
        raise ValueError(f"fill: the agent's actions are {space}, and those recorded of shape {given}")
    if isinstance(space, spaces.Discrete) and chunk.action.is_floating_point():
        raise ValueError(f"fill: the agent's actions are {space}, and those recorded {chunk.action.dtype}")
    agent.networks.preprocess(map_tree(lambda column: column[:1], chunk.observation))  # which says what it is to be
    if chunk.valid is not None:
        _check_numbers(agent, chunk, rows)


def _check_numbers(agent: ReplayAgent, chunk: Transition, rows: int) -> None:
    """Raise ValueError for valid rows with numbers that are not finite or not in their space."""
    space, learned = agent.action_space, {"observation": chunk.observation, "action": chunk.action}
    if agent.values:
        learned |= {"reward": chunk.reward, "next_observation": chunk.next_observation}
    for name, column in leaves(learned):
        if column.is_floating_point():
            wrong_B = ~column.isfinite().flatten(1).all(1) if column.ndim > 1 else ~column.isfinite()
            if name.startswith("next_observation"):
                wrong_B &= ~chunk.terminated  # after an end nothing is worth anything
            _refuse(wrong_B, chunk, rows, name, "not finite")
    for name in learned.keys() & {"observation", "next_observation"}:
        for path, part in tensors_of(agent.observation_space):
            value = functools.reduce(operator.getitem, path, learned[name])
            wrong = outside(value, part)  # of no rows, maybe
            wrong_B = torch.from_numpy(wrong.any(axis=tuple(range(1, wrong.ndim)))).to(value.device)
            _refuse(wrong_B, chunk, rows, ".".join((name, *path)), f"not in {part}")
    if isinstance(space, spaces.Discrete):
        action_B, low, high = chunk.action.long(), int(space.start), int(space.start) + int(space.n)
        _refuse((action_B < low) | (action_B >= high), chunk, rows, "action", f"not from {low} to {high - 1}")


def _refuse(wrong_B: Tensor, chunk: Transition, rows: int, name: str, what: str, instead: str = "") -> None:
    found = (wrong_B & chunk.valid).nonzero()
    if len(found):
        where = f"in {len(found)} transitions, the first of them number {rows + int(found[0])}"
        raise ValueError(f"fill: the {name} is {what} {where}; {instead}leave them out, or set their valid to False")
