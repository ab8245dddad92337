"""`rein export`: export a run to other formats."""

from __future__ import annotations

from collections.abc import Sequence

import tyro

from rein.cli.options import arguments_of
from rein.cli.output import say
from rein.cli.rebuild import environment_of, num_envs_of, part_type
from rein.envs.base.contract import agents_per_world
from rein.integrations.minari import export_minari, spec_of
from rein.store.reader import Run, open_run


def main(arguments: Sequence[str]) -> None:
    """Run `rein export`."""
    export(**arguments_of(export, "rein export", arguments))


def export(
    run: tyro.conf.Positional[str],
    to: tuple[str, str],
    agent: int | None = None,
    environment: str | None = None,
    author: str | None = None,
    description: str | None = None,
) -> None:
    """Export every ended episode of a run as a Minari dataset. Values are not changed.

    Args:
        run: folder of the run, or one of its trajectory files.
        to: `minari` and the id of the new dataset: `--to minari cartpole/ppo-v0`. It is written to the folder in
            MINARI_DATASETS_PATH, by default ~/.minari/datasets.
        agent: number of an agent of multi-agent worlds (0 to A - 1). Default: the episodes of all agents.
        environment: my_module:make, a function that returns the environment or the loop of the run. Needed only if
            run.json cannot describe the environment, whose spaces are exported.
        author: author of the dataset.
        description: description of the dataset.
    """
    kind, dataset_id = to
    if kind != "minari":
        raise ValueError(f"--to {kind}: unknown format; use minari: --to minari cartpole/ppo-v0")
    found = open_run(run)
    made = environment_of(found, environment)
    try:
        spaces, spec = (made.single_observation_space, made.single_action_space), spec_of(made)
        rows = None if agent is None else _rows_of(agent, agents_per_world(made), num_envs_of(found))
    finally:
        getattr(made, "close", lambda: None)()
    about = {"author": author, "description": description, "algorithm_name": part_type(found, "agent") or None}
    dataset = export_minari(found, dataset_id, *spaces, environment=spec, rows=rows, **about)
    say(
        f"exported {dataset.total_episodes:,} episodes with {dataset.total_steps:,} steps "
        f"to {dataset.storage.data_path}"
    )
    left = _transitions(found, rows) - dataset.total_steps
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
