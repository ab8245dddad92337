"""Read hostile files with counts beyond the limits of rein, and print one line of JSON per file.

Usage: python limited.py FOLDER KIND. Makes all files of a kind first, and reads each in a fork with an address space of
1 GiB in addition to that in use, so that a file that kills its fork is identified.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import rein
import rein.cli.play
import rein.cli.plots
import rein.cli.run_folder
import rein.cli.train
import rein.store.format.state_codec
from rein.cli import main as command
from rein.cli.experiment import Experiment
from rein.cli.plans import Recipe
from rein.errors import ReinError
from rein.handlers.run_files import describe
from rein.recipes.gridworld_q_learning import gridworld
from rein.store.checkpoint_file import write_checkpoint

MEMORY = 1 << 30  # bytes in addition to those in use at the start
SECONDS = 30  # time limit per file
MANY = "|".join("1" * 2_000)  # choices

Case = tuple[str, Callable[[], Any]]  # name, and a call that reads the file


def made(folder: Path) -> Path:
    """Return the folder of a new run."""
    store = rein.HDF5Store(folder / "run", max_epochs=1)
    loop = gridworld(store, num_envs=4, iterations=20, epochs=2, stop_when_solved=False)
    loop.own("recipe", Recipe(Experiment("cartpole"), {}, []))
    describe(loop, store)
    loop.run()
    store.close()
    return folder / "run"


def configurations(folder: Path) -> Iterator[Case]:
    """Yield files for `--config`."""
    texts = {
        "a dotted key": "a" + ".a" * 30_000 + " = 1",
        "a dotted key with spaces": "a" + " . 'a'" * 10_000 + " = 1",
        "a dotted key in an inline table": "x = {a" + ".a" * 30_000 + " = 1}",
        "a dotted header": "[a" + ".a" * 30_000 + "]",
        "lists in lists": "gamma = " + "[" * 20 + "]" * 20,
        "lists beyond the recursion limit": "gamma = " + "[" * 30_000,
        "tables in tables": "gamma = " + "{a = " * 20 + "1" + "}" * 20,
        "an integer of 60,000 digits": "num_envs = 0x" + "f" * 60_000,
        "an integer in a list": "hidden = [1, 0x" + "f" * 60_000 + "]",
        "a file of 1 MB": "# comment\n" * 100_000,
        "a million learners": "learners = 1_000_000",
        "2,000 choices": f'learners = 2\nparam = ["clip={MANY}"]',
        "a range of 60,000 digits": f'learners = 2\nparam = ["clip=0..{"1" * 60_000}"]',
    }
    for number, (name, text) in enumerate(texts.items()):
        file = folder / f"{number}.toml"
        file.write_text(f'recipe = "cartpole"\n[agent]\n{text}\n')
        yield name, cli("train", "--config", file)
    os.mkfifo(folder / "pipe.toml")
    (folder / "link.toml").symlink_to("/dev/zero")
    with open(folder / "sparse.toml", "wb") as sparse:
        sparse.truncate(1 << 40)
    for name in ("pipe", "link", "sparse"):
        yield name, cli("train", "--config", folder / f"{name}.toml")


def descriptions(folder: Path) -> Iterator[Case]:
    """Yield files `run.json`, read by several commands."""
    run = made(folder)
    options = {
        "2,000 choices": {"learners": 2, "param": [f"clip={MANY}"]},
        "2,000 options": {"learners": 2, "param": [f"clip=0.1..0.{number + 2}" for number in range(2_000)]},
        "a million learners": {"learners": 1_000_000},
    }
    for name, given in options.items():
        for words in (["resume"], ["evaluate", "--episodes", "1"]):
            copy = copied(run, folder / f"{words[0]} {name}")
            info = json.loads((copy / "run.json").read_text())
            info["parts"]["recipe"]["config"]["options"] = given
            (copy / "run.json").write_text(json.dumps(info))
            state: dict[str, Any] = {"parts": {"agent": {}}}
            shutil.rmtree(copy / "checkpoints")
            (copy / "checkpoints").mkdir()
            write_checkpoint(copy / "checkpoints/epoch-000002.h5", state, {"kind": "run", "parts": {"agent": {}}})
            yield f"{name}, {words[0]}", cli(words[0], copy, *words[1:])
    whole = (run / "run.json").read_text()
    texts = {"5,000,000 lists": "[" + "[]," * 5_000_000 + "[]]", "100,000 levels": "[" * 100_000 + "]" * 100_000}
    texts["3,000,000 entries"] = "{" + '"":0,' * 3_000_000 + '"":0}'
    for name, text in texts.items():
        copy = copied(run, folder / name)
        (copy / "run.json").write_text(whole.rstrip()[:-1] + f', "more": {text}}}')
        yield name, cli("resume", copy)


def tables(folder: Path) -> Iterator[Case]:
    """Yield files `metrics.csv`."""
    run = made(folder)
    header, row = "epoch,status,env_steps", "1,completed,80"
    texts = {
        "a million columns": header + "".join(f",m{number}" for number in range(10**6)) + f"\n{row}\n",
        "20,000 columns": header + "".join(f",m{number}" for number in range(20_000)) + f"\n{row}\n" * 10,
        "a line of 50 MB": f"{header}\n{row}{',' * 50_000_000}\n",
    }
    for name, text in texts.items():
        copy = copied(run, folder / name)
        (copy / "metrics.csv").write_text(text)
        yield f"{name}, plot", cli("plot", copy, "--output", folder / "plot.png")
        yield f"{name}, verify", cli("verify", copy / "metrics.csv")


def weights(folder: Path) -> Iterator[Case]:
    """Yield safetensors files."""
    empty = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    headers = {
        "93 MB of metadata": '{"__metadata__":{"rein":"[' + "1," * 46_000_000 + '1]"}}',
        "a million metadata": '{"__metadata__":{' + '"a":"",' * 1_000_000 + '"b":""}}',
        "a million tensors": "{" + f'"a":{empty},' * 1_000_000 + f'"b":{empty}' + "}",
        "60,000 tensors": "{" + ",".join(f'"{number}":{empty}' for number in range(60_000)) + "}",
        "a space of 2,000 boxes": described({"space": "Tuple", "spaces": [[0, box(1 << 20)]] * 2_000}),
        "a space of 20,000 parts": described({"space": "Tuple", "spaces": [[0, discrete(2)]] * 20_000}),
        "a space of 2^62 actions": described(discrete(1 << 62)),
    }
    for number, (name, text) in enumerate(headers.items()):
        file = folder / f"{number}.safetensors"
        file.write_bytes(struct.pack("<Q", len(text)) + text.encode())
        yield name, lambda file=file: rein.load_policy(file)
    (folder / "length.safetensors").write_bytes(struct.pack("<Q", (1 << 64) - 1) + b"{}")
    yield "a header of 2^64 bytes", lambda: rein.load_policy(folder / "length.safetensors")
    (folder / "link.safetensors").symlink_to("/dev/zero")
    yield "a link to a device", lambda: rein.load_policy(folder / "link.safetensors")


def checkpoints(folder: Path) -> Iterator[Case]:
    """Yield checkpoints with a correct hash. Commas in strings count as values, and are written in less time."""
    many, zeros = "," * 2_000_001, torch.zeros(1 << 20)
    checked = rein.store.format.state_codec.check_values
    rein.store.format.state_codec.check_values = lambda text: None
    for name, state, about in (("structure", many, {}), ("description", "", {"more": many})):
        file = folder / f"{name}.h5"
        write_checkpoint(file, {"state": state, "tensor": zeros}, {"kind": "part", "config": {}, **about})
        yield f"2,000,000 values in the {name}", lambda file=file: rein.load_agent(file)
    rein.store.format.state_codec.check_values = checked


KINDS = {
    "config.toml": configurations,
    "run.json": descriptions,
    "metrics.csv": tables,
    "safetensors": weights,
    "checkpoint": checkpoints,
}


def described(space: Any) -> str:
    """Return a header of safetensors for an agent with this observation space."""
    build = {"class": "rein.agents.ppo.PPO", "observation_space": space, "action_space": discrete(2)}
    return json.dumps({"__metadata__": {"rein": json.dumps({"format": 1, "config": {}, "build": build})}})


def box(size: int) -> dict[str, Any]:
    return {"space": "Box", "low": 0.0, "high": 1.0, "shape": [size], "dtype": "float32"}


def discrete(n: int) -> dict[str, Any]:
    return {"space": "Discrete", "n": n, "start": 0, "dtype": "int64"}


def copied(run: Path, target: Path) -> Path:
    shutil.copytree(run, target)
    return target


def cli(*words: object) -> Callable[[], None]:
    return lambda: command([str(word) for word in words])


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the kind of the result, and its text: the message of an error, or everything that was printed."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            call()
    except ReinError as error:
        return "refused", str(error)
    except SystemExit as ended:
        return "refused" if ended.code == 1 else f"status {ended.code}", output.getvalue()
    except BaseException:
        return "another error", traceback.format_exc()
    return "read", output.getvalue()


def seconds() -> float:
    """Return the processor time of this process, which does not depend on the load of the machine."""
    return sum(os.times()[:2])


def read(call: Callable[[], Any], writing: int) -> None:
    """Read a file with limits on memory and time, and write the report."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    signal.alarm(SECONDS)
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, seconds()
    kind, text = outcome(call)
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    os.write(
        writing, json.dumps({"kind": kind, "text": text[:4000], "bytes": taken, "seconds": seconds() - begin}).encode()
    )


def main() -> None:
    """Read all files in order."""
    torch.set_num_threads(1)
    os.chdir(sys.argv[1])
    for name, call in [*KINDS[sys.argv[2]](Path(sys.argv[1]))]:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                read(call, writing)
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as report:
            found = json.loads(report.read() or "{}")
        print(json.dumps({"name": name, "died": os.waitpid(child, 0)[1], **found}), flush=True)


if __name__ == "__main__":
    main()
