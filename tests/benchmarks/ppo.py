"""Measure PPO and compare it with other libraries: `python tests/benchmarks/ppo.py solve throughput adapter`.

`solve`: whole processes, including the start of Python, until the last 100 training episodes of CartPole-v1 have a mean
return of 475. `throughput`: a large rollout of native CartPoles and its updates. `adapter`: Gymnasium's CartPole-v1
with batches of 256. Each row is a child process with one thread on one core. Rows take turns, so load of the machine
affects all equally; compare ratios. Times are CPU times unless they are labeled as wall times.

Needs Stable-Baselines3 (dependency group `bench`). PureJaxRL is included if `--purejaxrl` is a checkout of it and
`PYTHONPATH` a folder with JAX: `pip install --target FOLDER jax==0.10.2 flax==0.12.8 gymnax==0.0.9 distrax==0.1.9`.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from measuring import ALONE, CORES, Sample, pinned, run_workers
from sizes import size

PARTS = "solve", "throughput", "adapter"
SHAPE = {"num_envs": size(2048, 8), "rollout_steps": size(128, 8), "minibatches": 4}
COMPILING = size({"eager": {}, "compile": {"compile": True}}, {"eager": {}})
SEEDS, REPEATS, MICRO_BATCH = size(5, 1), size(5, 1), size(2048, 8)
SOLVE_OPTIONS = size([], ["--epochs", "2"])
PEERS = Path(__file__).with_name("ppo_peers.py")
SB3 = importlib.util.find_spec("stable_baselines3") is not None
SB3_MISSING = "not installed: pip install stable-baselines3==2.9.2"


class Row(NamedTuple):
    """Result of a worker: rates in env steps per second, other values in CPU seconds."""

    rate: float
    wall_rate: float
    begin: float
    compile: float


def row_of(samples: list[Sample]) -> Row:
    built, first, *rounds = samples
    cpu, wall = (statistics.median(getattr(one, clock) for one in rounds) for clock in ("cpu", "wall"))
    return Row(first.steps / cpu, first.steps / wall, built.cpu, first.cpu - cpu)


def measure(specs: Mapping[str, tuple[Any, ...]], repeats: int) -> dict[str, Row | str]:
    """Return the result or the error of each worker (name, options, cores, processes) by label."""
    found = run_workers(PEERS, specs, repeats)
    return {label: samples if isinstance(samples, str) else row_of(samples) for label, samples in found.items()}


def solve(seeds: int, **_: Any) -> None:
    print("CartPole-v1, CPU seconds of a whole process until 100 training episodes have a mean of 475 (env steps)")
    line("seed", "rein train", "SB3, tuned", "ratio")
    found: dict[str, list[tuple[float, int | None]]] = {"rein": [], "sb3": []}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            own = ["-m", "rein", "train", "cartpole", "--seed", str(seed), "--run", f"{folder}/run", "--quiet"]
            commands = {"rein": [*own, *SOLVE_OPTIONS], "sb3": [str(PEERS), "sb3_solve", json.dumps({"seed": seed})]}
            for who in sorted(found, reverse=seed % 2 == 1):  # alternate the order, so that drift affects both
                if who == "rein" or SB3:
                    found[who].append(whole_process(commands[who], folder))
            if not list(Path(folder).glob("run/trajectories/*.h5")):
                raise SystemExit(f"rein train wrote no trajectories to {folder}/run")
        line(seed, *(cell(*found[who][-1]) if found[who] else SB3_MISSING for who in found), ratio(found, -1))
    line("median", *(cell(*medians(runs)) if runs else "" for runs in found.values()), ratio(found, None))
    print()


def whole_process(words: list[str], folder: str) -> tuple[float, int | None]:
    """Run `python words`; return its CPU seconds, and the env steps until it was solved, or None if it was not."""
    with tempfile.TemporaryFile("w+") as out, pinned(1):
        process = subprocess.Popen([sys.executable, *words], cwd=folder, env=os.environ | ALONE, stdout=out)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(words)} failed with status {process.returncode}")
        out.seek(0)
        solved = re.search(r"^solved: .* after ([\d,]+) env steps", out.read(), re.MULTILINE)
    return used.ru_utime + used.ru_stime, int(solved[1].replace(",", "")) if solved else None


def medians(runs: list[tuple[float, int | None]]) -> tuple[float, int | None]:
    steps = [solved for _, solved in runs if solved is not None]
    every = round(statistics.median(steps)) if len(steps) == len(runs) else None
    return statistics.median(cpu for cpu, _ in runs), every


def cell(cpu: float, env_steps: int | None) -> str:
    return f"{cpu:.2f} ({env_steps:,})" if env_steps else f"{cpu:.2f} NOT SOLVED"


def ratio(found: Mapping[str, list[tuple[float, int | None]]], place: int | None) -> str:
    """Return the ratio of SB3 to rein for one run, or for the medians if `place` is None."""
    if not found["sb3"]:
        return ""
    mine, theirs = (medians(runs) if place is None else runs[place] for runs in found.values())
    return f"{theirs[0] / mine[0]:.2f}x"


def throughput(repeats: int, micro_batch: list[int], purejaxrl: Path | None, **_: Any) -> None:
    for epochs in size((4, 1), (2,)):
        shape = SHAPE | {"update_epochs": epochs}
        specs: dict[str, Any] = {how: ("rein", shape | options, 1) for how, options in COMPILING.items()}
        for rows_of_part, (how, options) in itertools.product(micro_batch, COMPILING.items()):
            parts = {"micro_batch": rows_of_part}
            specs[f"{how}, micro_batch={rows_of_part}"] = "rein", shape | options | parts, 1
        if len(CORES) > 1:
            shapes = {how: shape | options for how, options in COMPILING.items()}
            specs |= {f"{how}, threads=2": ("rein", shapes[how] | {"threads": 2}, 2) for how in shapes}
            specs |= {f"{how}, two processes": ("rein", shapes[how], 2, 2) for how in shapes}
        if purejaxrl:
            specs["PureJaxRL"] = "purejaxrl", shape | {"checkout": str(purejaxrl.resolve())}, 1
        print(f"{SHAPE['num_envs']:,} CartPoles x {SHAPE['rollout_steps']} steps, ", end="")
        print(f"{epochs} x {SHAPE['minibatches']} updates, two networks of 64 x 64; medians of {repeats} rounds")
        rows = measure(specs, repeats)
        rows.setdefault("PureJaxRL", "not installed: see --purejaxrl")
        table(rows, "eager", "PureJaxRL")
        second_core(rows)
        print()


def adapter(repeats: int, **_: Any) -> None:
    print(f"8 of Gymnasium's CartPole-v1, 32 steps, 20 updates of the whole batch; medians of {repeats} rounds")
    specs: dict[str, Any] = {"rein": ("adapter", {}, 1)} | ({"SB3": ("sb3", {}, 1)} if SB3 else {})
    rows = measure(specs, repeats)
    rows.setdefault("SB3", SB3_MISSING)
    table(rows, "rein", "SB3")
    print()


def table(rows: Mapping[str, Row | str], base: str, peer: str) -> None:
    line("", "env steps per CPU s", f"of {base}", f"of {peer}", "imports, building s", "compiling s")
    for label, row in rows.items():
        if isinstance(row, str):
            print(f"  {label:>26}  {row}")
            continue
        shares = [share(row, rows[other]) for other in (base, peer)]
        compiling = f"{row.compile:.1f}" if label == "PureJaxRL" or "compile" in label else ""
        line(label, f"{row.rate:,.0f}", *shares, f"{row.begin:.1f}", compiling)


def share(row: Row, of: Row | str) -> str:
    return "" if isinstance(of, str) else f"{row.rate / of.rate:.2f}x"


def second_core(rows: Mapping[str, Row | str]) -> None:
    """Print the speedup of a second core, for two threads and for two processes."""
    for label, how in itertools.product(COMPILING, ("threads=2", "two processes")):
        one, two = rows[label], rows.get(f"{label}, {how}", "")
        if isinstance(one, Row) and isinstance(two, Row):
            wall = f"{one.wall_rate:,.0f} to {two.wall_rate:,.0f} env steps per wall s"
            print(f"  {label}, a second core, {how}: {wall}, {two.wall_rate / one.wall_rate:.2f}x; ", end="")
            print(f"CPU time {one.rate / two.rate:.2f}x")


def line(what: Any, *cells: str) -> None:
    print(f"  {what!s:>26}" + "".join(f"{text:>21}" for text in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure PPO, and compare it with other libraries.")
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of runs of `solve`")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="number of rounds of `throughput` and `adapter`")
    parser.add_argument(
        "--micro-batch", type=int, nargs="*", default=[MICRO_BATCH], help="sizes for further rows of `throughput`"
    )
    parser.add_argument("--purejaxrl", type=Path, help="a checkout of github.com/luchris429/purejaxrl")
    options = vars(parser.parse_args())
    parts = options.pop("parts") or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    for name in parts:
        {"solve": solve, "throughput": throughput, "adapter": adapter}[name](**options)


if __name__ == "__main__":
    main()
