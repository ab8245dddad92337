"""`rein export`: export a run to other formats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from rein.cli.experiment import Experiment
from rein.cli.rebuild import (
    Described,
    agent_of,
    environment_of,
    made_by,
    num_envs_of,
    part_type,
)
from rein.cli.terminal import say
from rein.envs.base.contract import agents_per_world
from rein.files import short
from rein.integrations import export as policies
from rein.integrations.export import card_path
from rein.integrations.minari import export_minari, spec_of
from rein.store.checkpoint_file import look
from rein.store.loading import part_at
from rein.store.reader import Run, open_run

_POLICIES = tuple(suffix[1:] for suffix in policies.ENCODERS)


def export(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    to: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FORMAT [PATH|ID]")],
    agent: int | None = None,
    env: str | None = None,
    author: str | None = None,
    description: str | None = None,
) -> None:
    """Export the policy of a run to ONNX, torch.export or safetensors, or its episodes as a Minari dataset.

    Args:
        run: folder of the run. A policy may also come from a checkpoint or a file of `rein.save`, and episodes from one
            trajectory file.
        to: `onnx`, `pt2` or `safetensors`, and optionally the path of the file: `--to onnx policy.onnx`. By default
            the file is `policy.onnx` in the folder of the run. Or `minari` and the id of the new dataset:
            `--to minari cartpole/ppo-v0`. It is written to the folder in MINARI_DATASETS_PATH, by default
            ~/.minari/datasets.
        agent: for Minari, number of an agent of multi-agent worlds (0 to A - 1). Default: the episodes of all agents.
        env: my_module:make, a function that returns the environment or the loop of the run. Needed only if
            the files of the run cannot describe the environment, whose spaces are exported to Minari, or the agent.
        author: author of the dataset.
        description: description of the dataset.
    """
    kind = to[0]
    names = to[1:]
    if kind == "minari" and len(names) == 1:
        _export_episodes(run, names[0], agent, env, author, description)
    elif kind in _POLICIES and len(names) <= 1:
        for name, value in {"agent": agent, "author": author, "description": description}.items():
            if value is not None:
                raise ValueError(f"--{name} has no effect with --to {kind}; remove it")
        _export_policy(Path(run).expanduser(), kind, names, env)
    else:
        raise ValueError(
            f"--to {' '.join(to)}: give minari and the id of a dataset, such as --to minari cartpole/ppo-v0, or "
            f"{', '.join(_POLICIES)} and optionally a path, such as --to onnx policy.onnx"
        )


def _export_policy(run: Path, kind: str, names: Sequence[str], named: str | None) -> None:
    saved = part_at(run)
    folder = next((folder for folder in (run, *run.parents) if (folder / "run.json").is_file()), None)
    path = Path(names[0]).expanduser() if names else (folder or run.parent) / f"policy.{kind}"
    if path.suffix != f".{kind}":
        raise ValueError(f"--to {kind} {path}: the name of the file must end in .{kind}")
    described = None if folder is None else Described.of(folder)
    made = None if named is None else made_by(described or Described(run, {}), named)
    agent = agent_of(saved, described, made, "cpu", "export", f'rein.export(agent, "policy.{kind}")')
    metrics: Any = (look(saved.path) or {}).get("metrics")
    mean_return = metrics.get("evaluation_return") if isinstance(metrics, Mapping) else None
    policies.export(
        agent,
        path,
        mean_return=mean_return if isinstance(mean_return, float) and math.isfinite(mean_return) else None,
    )
    say(f"exported the policy of {short(saved.path)} to {short(path)}, with the model card {short(card_path(path))}")


def _export_episodes(
    run: str, dataset_id: str, agent: int | None, env: str | None, author: str | None, description: str | None
) -> None:
    stored = open_run(run)
    made = environment_of(stored, Experiment(None, env), command="export")
    try:
        spaces = (made.single_observation_space, made.single_action_space)
        spec = spec_of(made)
        rows = None if agent is None else _rows_of(agent, agents_per_world(made), num_envs_of(stored))
    finally:
        getattr(made, "close", lambda: None)()
    about = {"author": author, "description": description, "algorithm_name": part_type(stored, "agent") or None}
    dataset = export_minari(stored, dataset_id, *spaces, environment=spec, rows=rows, **about)
    say(
        f"exported {dataset.total_episodes:,} episodes with {dataset.total_steps:,} steps "
        f"to {dataset.storage.data_path}"
    )
    left = _transitions(stored, rows) - dataset.total_steps
    if left:
        say(f"omitted {left:,} steps of episodes that are unfinished or whose beginning was not stored")
    say(f'load it with: minari.load_dataset("{dataset_id}")')


def _rows_of(agent: int, agents: int, num_envs: int) -> range:
    """Return the rows of one agent in all worlds. Raises ValueError if worlds have no such agent."""
    if not 0 <= agent < agents:
        raise ValueError(f"--agent {agent}: the worlds of this run have the agents 0 to {agents - 1}")
    return range(agent, num_envs, agents)


def _transitions(run: Run, rows: range | None) -> int:
    """Return the number of valid rows of a run, in all or in some of its environments."""
    if "valid" not in run.fields:
        return next((shape[0] * (shape[1] if rows is None else len(rows)) for _, shape in run.fields.values()), 0)
    chosen = slice(None) if rows is None else slice(rows.start, rows.stop, rows.step)
    return sum(int(trajectory.fields["valid"][:, chosen].sum()) for trajectory in run if trajectory.fields)
