"""`rein export`: export a run to other formats."""

from __future__ import annotations

from collections.abc import Sequence

import tyro

from rein.cli.options import arguments_of
from rein.cli.output import say
from rein.cli.rebuild import environment_of, part_type
from rein.integrations.minari import export_minari, spec_of
from rein.store.reader import Run, open_run


def main(arguments: Sequence[str]) -> None:
    """Run `rein export`."""
    export(**arguments_of(export, "rein export", arguments))


def export(
    run: tyro.conf.Positional[str],
    to: tuple[str, str],
    environment: str | None = None,
    author: str | None = None,
    description: str | None = None,
) -> None:
    """Export every ended episode of a run as a Minari dataset. Values are not changed.

    Args:
        run: folder of the run, or one of its trajectory files.
        to: `minari` and the id of the new dataset: `--to minari cartpole/ppo-v0`. It is written to the folder in
            MINARI_DATASETS_PATH, by default ~/.minari/datasets.
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
    finally:
        getattr(made, "close", lambda: None)()
    about = {"author": author, "description": description, "algorithm_name": part_type(found, "agent") or None}
    dataset = export_minari(found, dataset_id, *spaces, environment=spec, **about)
    say(
        f"exported {dataset.total_episodes:,} episodes with {dataset.total_steps:,} steps "
        f"to {dataset.storage.data_path}"
    )
    left = _transitions(found) - dataset.total_steps
    if left:
        say(f"omitted {left:,} steps of episodes that are unfinished or whose beginning was not stored")
    say(f'load it with: minari.load_dataset("{dataset_id}")')


def _transitions(run: Run) -> int:
    """Return the number of valid rows of a run."""
    if "valid" not in run.fields:
        return next((shape[0] * shape[1] for _, shape in run.fields.values()), 0)
    return sum(int(trajectory.fields["valid"].sum()) for trajectory in run if trajectory.fields)
