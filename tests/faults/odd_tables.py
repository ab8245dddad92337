"""Trajectory files with a valid layout and invalid tables. Adds functions to `KINDS` of `odd_layouts.py`."""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from typing import Any

import numpy as np

LAYOUTS = runpy.run_path(str(Path(__file__).with_name("odd_layouts.py")))
KINDS, EPISODES, ODD, TABLES, kind = (LAYOUTS[name] for name in ("KINDS", "EPISODES", "ODD", "TABLES", "kind"))


@kind
def _a_scalar(file: Any, draw: random.Random) -> None:
    file.put(file.pick(draw), np.zeros((), draw.choice(["f4", "i8", "?"])))


@kind
def _another_length(file: Any, draw: random.Random) -> None:
    data = file.read(path := file.pick(draw))
    file.put(path, np.concatenate([data, data[-1:]]) if draw.random() < 0.5 else data[:-1])


@kind
def _an_empty_table(file: Any, draw: random.Random) -> None:
    for path in [*file.datasets]:
        if path.startswith(draw.choice(["epochs/", "episodes/"])):
            file.put(path, file.read(path)[:0])


@kind
def _something_missing(file: Any, draw: random.Random) -> None:
    file.remove(draw.choice([*file.datasets, *file.groups()]))


@kind
def _a_group_for_a_dataset(file: Any, draw: random.Random) -> None:
    path = file.pick(draw)
    file.datasets[f"{path}/{draw.choice(['x', '', path])}"] = file.datasets.pop(path)


@kind
def _groups_with_data_for_fields(file: Any, draw: random.Random) -> None:
    name = draw.choice(["valid", "terminated", "truncated", "reward", "action"])
    kept = file.datasets.pop(f"trajectory/{name}")
    file.datasets[f"trajectory/{name}/{draw.choice(['x', name, 'observation'])}"] = kept


@kind
def _fields_of_another_kind(file: Any, draw: random.Random) -> None:
    path = f"trajectory/{draw.choice(['valid', 'terminated', 'truncated', 'reward', 'action'])}"
    shape = (*file.datasets[path]["shape"], *draw.choice([(), (2,), (1,), (0,), (3, 4)]))
    file.put(path, np.full(shape, draw.choice([0, 1, 5]), draw.choice(["?", "i8", "f4", "u1"])))


@kind
def _flags_of_one_dimension_more(file: Any, draw: random.Random) -> None:
    for name in ("valid", "terminated", "truncated"):
        path = f"trajectory/{name}"
        file.put(path, np.ones((*file.datasets[path]["shape"], 2), bool))


@kind
def _flags_that_are_neither_true_nor_false(file: Any, draw: random.Random) -> None:
    shape = file.datasets["trajectory/valid"]["shape"]
    file.put("trajectory/valid", np.full(shape, 2, np.uint8), packed=draw.random() < 0.5)
    file.datasets["trajectory/valid"]["dtype"] = "|b1"


@kind
def _episodes_with_negative_environments(file: Any, draw: random.Random) -> None:
    file.set("episodes/environment", draw.choice([-(2**63), -(2**40), -1000]))


@kind
def _an_empty_group(file: Any, draw: random.Random) -> None:
    file.remove(draw.choice([*file.groups(), "epochs", "episodes", "trajectory"]))


@kind
def _a_dataset_for_a_group(file: Any, draw: random.Random) -> None:
    path = draw.choice([path for path in file.groups() if "/" in path])
    file.remove(path)
    file.put(path, np.arange(2))


@kind
def _odd_numbers_of_epochs(file: Any, draw: random.Random) -> None:
    file.set(f"epochs/{draw.choice(TABLES)}", draw.choice(ODD), draw.choice([0, 1]))


@kind
def _odd_numbers_of_episodes(file: Any, draw: random.Random) -> None:
    path = f"episodes/{draw.choice(EPISODES)}"
    file.set(path, draw.choice(ODD), draw.randrange(len(file.read(path))))


@kind
def _odd_numbers_everywhere(file: Any, draw: random.Random) -> None:
    """Set equal values in all rows of some columns, so that differences between rows stay small."""
    for name in draw.sample(EPISODES, 3):
        file.set(f"episodes/{name}", draw.choice(ODD))
    first = draw.choice([2**62, 2**63 - 4, -(2**63), -(2**62)])
    file.set("epochs/first_step", [first, first + 2])


@kind
def _odd_parts(file: Any, draw: random.Random) -> None:
    for name in ("part", "parts"):
        file.set(f"epochs/{name}", draw.choice(ODD))


@kind
def _many_empty_epochs(file: Any, draw: random.Random) -> None:
    count = draw.choice([10**3, 10**4])
    rows = int(file.read("epochs/length").sum())
    for path in [path for path in file.datasets if path.startswith("epochs/")]:
        data = file.read(path)[:1]
        file.put(path, np.repeat(data, count, axis=0) if data.nbytes < 100 else data)
    file.set("epochs/number", np.arange(1, count + 1))
    file.set("epochs/length", [rows] + [0] * (count - 1))
    file.set("epochs/first_row", [0] + [rows] * (count - 1))


@kind
def _nonfinite_numbers(file: Any, draw: random.Random) -> None:
    for name in ("episodes/return", "epochs/metrics/loss", "epochs/clocks/seconds", "trajectory/reward"):
        file.set(name, draw.choice([np.nan, np.inf, -np.inf, 1e308]))


@kind
def _odd_text(file: Any, draw: random.Random) -> None:
    texts = [b"\xff\xfe\x80", b"\x1b[2Jfail", b"", b"halted\n\nrein: all is well"]
    file.put("epochs/status", np.array([draw.choice(texts)] * 2, "S40"))


@kind
def _long_text(file: Any, draw: random.Random) -> None:
    _many_empty_epochs(file, draw)
    count = len(file.read("epochs/number"))
    file.put("epochs/status", np.full(count, b"halted", f"S{draw.choice([100, 9999])}"), packed=True)


@kind
def _observations_only_in_tables(file: Any, draw: random.Random) -> None:
    file.remove("trajectory/observation")
    for path in ("epochs/next_observation", "episodes/final_observation"):
        file.remove(path)
        file.put(path, np.zeros(draw.choice([(0, 3), (2, 3), (1,), (6, 2), ()]), "f4"))


@kind
def _odd_names(file: Any, draw: random.Random) -> None:
    names = ["\udcff\udcfe", "\x1b[2J", "a" * 5000, "\n\n", "..%2F..%2F", "%FF%00", "\u202e[bold]", "", "."]
    group = draw.choice(["trajectory", "epochs/metrics", "epochs/clocks"])
    old = next(
        path for path in file.datasets if path.startswith(f"{group}/") and path.count("/") == group.count("/") + 1
    )
    file.datasets[f"{group}/{draw.choice(names)}"] = file.datasets.pop(old)


@kind
def _one_dataset_in_many_places(file: Any, draw: random.Random) -> None:
    big = np.zeros((*file.datasets["trajectory/reward"]["shape"], 2_000), np.float32)
    file.put("trajectory/big", big, packed=draw.random() < 0.5)
    for number in range(draw.choice([10, 90, 200])):
        file.datasets[f"trajectory/{number}"] = file.datasets["trajectory/big"]


@kind
def _two_trees_of_one_name(file: Any, draw: random.Random) -> None:
    """Give observations different types or shapes in fields and tables."""
    for path in draw.sample(["trajectory/observation", "epochs/next_observation", "episodes/final_observation"], 2):
        file.remove(path)
        if draw.random() < 0.5:
            file.put(path, np.zeros(draw.choice([(6, 3), (0, 3), (2, 3), (6,)]), draw.choice(["f4", "S3", "?"])))
