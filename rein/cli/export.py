"""`rein export`: a run for others to read."""

from __future__ import annotations

from collections.abc import Sequence

import tyro

from rein.cli.options import arguments_of
from rein.cli.output import say
from rein.cli.rebuild import environment_of, part_type
from rein.integrations.minari import export_minari, spec_of
from rein.store.reader import Run, open_run


def main(arguments: Sequence[str]) -> None:
    """The command `rein export`."""
    export(**arguments_of(export, "rein export", arguments))


def export(
    run: tyro.conf.Positional[str],
    to: tuple[str, str],
    environment: str | None = None,
    author: str | None = None,
    description: str | None = None,
) -> None:
    """Make a dataset of Minari of every episode of a run that has ended, of the same values.

    Args:
        run: the folder of the run, or one of its trajectory files.
        to: `minari` and the id of the new dataset: `--to minari cartpole/ppo-v0`. It goes to the folder that
            MINARI_DATASETS_PATH names, by default ~/.minari/datasets.
        environment: what returns the environment (or the loop) of the run, as my_module:make, where run.json does not
            say how to build it again: its spaces are needed.
        author: who made it.
        description: what it is.
    """
    kind, dataset_id = to
    if kind != "minari":
        raise ValueError(f"--to {kind}: `minari` is what there is: --to minari cartpole/ppo-v0")
    found = open_run(run)
    made = environment_of(found, environment)
    try:
        spaces, spec = (made.single_observation_space, made.single_action_space), spec_of(made)
    finally:
        getattr(made, "close", lambda: None)()
    about = {"author": author, "description": description, "algorithm_name": part_type(found, "agent") or None}
    dataset = export_minari(found, dataset_id, *spaces, environment=spec, **about)
    say(f"{dataset.total_episodes:,} episodes of {dataset.total_steps:,} steps are in {dataset.storage.data_path}")
    left = _transitions(found) - dataset.total_steps
    if left:
        say(f"{left:,} steps of episodes that have not ended, or whose beginning was not stored, were left out")
    say(f'read it with: minari.load_dataset("{dataset_id}")')


def _transitions(run: Run) -> int:
    """The valid rows of a run."""
    if "valid" not in run.fields:
        return next((shape[0] * shape[1] for _, shape in run.fields.values()), 0)
    return sum(int(trajectory.fields["valid"].sum()) for trajectory in run if trajectory.fields)
