"""Rewrite finished episodes before an agent with a replay learns from them.

Shapes: T steps of an episode, N environments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rein.loop import Loop
from rein.ops.parallel import processes
from rein.ops.trees import leaves, map_tree
from rein.replay.rollout import RowBuffer
from rein.types import Transition, Tree

Fields = dict[str, Tree]
Rewrite = Callable[[list[Fields]], Sequence[Mapping[str, Tree]]]


def rewrite_episodes(loop: Loop, function: Rewrite) -> None:
    """Let the agent learn from episodes that `function` returns, instead of those that were played.

    Example::

        rein.rewrite_episodes(loop, lambda episodes: [e for e in episodes if len(e["reward"]) >= 10])

    `function(episodes)` is called in each step in which episodes ended. Each episode is a dictionary of tensors
    (T, ...), or of trees of them: `observation`, `action`, `reward`, `terminated`, `truncated`, `next_observation`, and
    the fields that the agent records. They are copies, which the function may change. It returns a list of any number
    of episodes of any length, with the same fields, shapes and dtypes. An episode that does not end with a terminated
    or truncated step is truncated there.

    The replay receives the transitions of an episode when it has ended, and stores them in order, as those of a single
    environment. `learning_starts` and updates count env steps as before. An episode that was cut off by a reset outside
    a step is not learned. Stores, statistics and `state.episodes_completed` have the episodes that were played.

    The steps of open episodes are saved with the run. The function is not saved: call `rewrite_episodes` again before
    you resume.

    Raises:
        ValueError: if the agent has no replay, if its replay has rows of several environments, if the episodes of the
            loop are rewritten already, if there are several processes, or, during the run, if the function returns
            other fields.
    """
    agent: Any = loop.parts.get("agent")
    name = type(agent).__name__
    if not hasattr(agent, "_rewritten") or not hasattr(agent, "replay") or "environment" not in loop.parts:
        raise ValueError(
            f"rewrite_episodes: {name} does not learn from the environments of a loop with a replay; use an agent such "
            "as DQN or SAC, or change rewards in a handler of action_applied"
        )
    if agent._rewritten is not None:
        raise ValueError(f"rewrite_episodes: the episodes of this {name} are rewritten already; combine the functions")
    if len(agent.replay) and getattr(agent.replay, "num_envs", 1) > 1:  # rewritten episodes are those of one
        raise ValueError(f"rewrite_episodes: the replay of this {name} is not empty; call it before the first run")
    if processes() > 1:
        raise ValueError("rewrite_episodes: episodes end at different times in different processes; use one process")
    agent._rewritten = loop.own("rewritten_episodes", RewrittenEpisodes(agent, function))


class RewrittenEpisodes:
    """Holds the transitions of open episodes, and gives those of finished episodes to the replay of an agent."""

    def __init__(self, agent: Any, function: Rewrite) -> None:
        self._agent, self._function = agent, function
        self._rows = RowBuffer()
        self._begin_N = torch.zeros(0, dtype=torch.int64, device="cpu")  # row in which the open episode began

    def append(self, transition: Transition) -> None:
        """Add one transition of each environment. Called instead of the method of the replay."""
        row = transition._asdict()
        row |= row.pop("extras")
        valid_N, truncated_N = row.pop("valid"), row["truncated"]
        ended_N = row["terminated"] | truncated_N
        if not len(self._begin_N):
            self._begin_N = torch.zeros(len(valid_N), dtype=torch.int64, device="cpu")
        self._rows.append(row)
        finished = [self._episode(n) for n in (ended_N & valid_N).nonzero().flatten().tolist()]
        self._begin_N[(ended_N | ~valid_N).cpu()] = self._rows.length
        self._forget()
        if finished:
            self._learn(finished)

    def observe_reset(self, mask: Tensor) -> None:
        """Discard the open episodes of the environments in `mask` (N,), which were reset outside a step."""
        if len(self._begin_N):
            self._begin_N[mask.cpu()] = self._rows.length
            self._forget()

    def _episode(self, environment: int) -> Fields:
        first = int(self._begin_N[environment])
        return map_tree(lambda rows: rows[first:, environment].clone(), self._rows.fields())

    def _forget(self) -> None:
        """Remove the rows before all open episodes, once they are half of all rows."""
        first = int(self._begin_N.min())
        if first == self._rows.length:
            self._rows.clear()
        elif 2 * first >= self._rows.length:
            rest = map_tree(lambda rows: rows[first:], self._rows.fields())
            self._rows.load_state_dict({"length": self._rows.length - first, "fields": rest})
        else:
            return
        self._begin_N -= first

    def _learn(self, finished: list[Fields]) -> None:
        form = _form(finished[0])
        for episode in self._function(finished):
            if not isinstance(episode, Mapping) or _form(episode) != form:
                got = _form(episode) if isinstance(episode, Mapping) else type(episode).__name__
                raise ValueError(
                    f"rewrite_episodes: the function must return episodes with the fields {form}, got {got}"
                )
            lengths = {len(x) for _, x in leaves(episode)}
            if len(lengths) > 1:
                raise ValueError(
                    f"rewrite_episodes: the fields of an episode have different numbers of steps: {sorted(lengths)}"
                )
            self._append(dict(episode), *lengths)

    def _append(self, episode: Fields, steps: int) -> None:
        flags: Any = {name: episode.pop(name).clone() for name in ("terminated", "truncated")}
        if steps:
            flags["truncated"][-1] |= ~flags["terminated"][-1]
        names = [name for name in Transition._fields if name in episode]
        valid = torch.ones(1, dtype=torch.bool, device=self._agent.device)
        for step in range(steps):
            row = map_tree(lambda x, step=step: x[step : step + 1], {**episode, **flags})
            transition = {name: row.pop(name) for name in (*names, *flags)}
            self._agent.replay.append(Transition(**transition, valid=valid, extras=row))

    def state_dict(self) -> dict[str, Any]:
        """Return the transitions of open episodes."""
        return {"rows": self._rows.state_dict(), "begin": self._begin_N}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._rows.load_state_dict(state["rows"])
        self._begin_N = state["begin"].clone()


def _form(episode: Mapping[str, Tree]) -> dict[str, Any]:
    """Return dtype and shape of a step, by field."""
    return {
        path: (x.dtype, tuple(x.shape[1:])) if isinstance(x, Tensor) else type(x).__name__
        for path, x in leaves(episode)
    }
