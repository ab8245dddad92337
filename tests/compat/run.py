"""Check packages of environments, each in a virtual environment, and write the table of docs/reference/environments.md.

`make test-compat PACKAGES="minigrid brax"` selects packages; the default is all. The virtual environments, logs and
runs are in build/compat.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cases import CASES, Case

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "compat"
PAGE = ROOT / "docs" / "reference" / "environments.md"
BEGIN, END = "<!-- written by make test-compat -->", "<!-- end -->"
HEADER = "| package | environments | agent | resume | replay | limitations |\n|---|---|---|---|---|---|"
INSTALL_TIMEOUT, CHECK_TIMEOUT = 1200, 1200  # seconds
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "SDL_VIDEODRIVER": "dummy",
    "SDL_AUDIODRIVER": "dummy",
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(FOLDER / "jax"),
}


class Result(NamedTuple):
    """Result of a check; `error` is None if it passed."""

    seconds: float
    version: str
    error: str | None


def share_torch(site: Path) -> str:
    """Add torch and its CUDA libraries of the calling environment to a virtual environment. Returns its requirement.

    Each installation of torch would take 200 MB, or several GB with CUDA. The links are outside of the virtual
    environment, because pip would write through links inside of it, into the calling environment.
    """
    shared = FOLDER / "torch"
    shared.mkdir(exist_ok=True)
    for distribution in importlib.metadata.distributions():
        if re.match(r"torch$|triton$|nvidia-|cuda-", distribution.name):
            for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
                if not (shared / name).exists():
                    (shared / name).symlink_to(Path(str(distribution.locate_file(name))))
    (site / "torch.pth").write_text(str(shared))
    return f"torch=={importlib.metadata.version('torch')}"


def install(case: Case, folder: Path) -> Path:
    """Create the virtual environment of a package, or update it. Returns its Python."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        call([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder, INSTALL_TIMEOUT)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (folder / "constraints.txt").write_text(share_torch(site))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-compile"]
    shared = ["--constraint", folder / "constraints.txt", "--editable", ROOT]
    call([*pip, *shared, *case.requirements], folder, INSTALL_TIMEOUT)
    return python


def call(command: list[Any], folder: Path, timeout: float) -> None:
    """Run a command in `folder`. Raises CalledProcessError or TimeoutExpired; the output is in `folder`/log.txt."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENVIRONMENT
    with (folder / "log.txt").open("a") as log:
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=timeout, check=True)


def checked(case: Case, folder: Path) -> Result:
    """Install and check a package."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    (folder / "runs").mkdir(parents=True)
    (folder / "log.txt").unlink(missing_ok=True)
    start, version, error = time.monotonic(), "", None
    try:
        python = install(case, folder)
        for stage in ("train", "resume"):
            command = [python, Path(__file__).with_name("check.py"), case.package, folder / "runs", stage]
            call(command, folder, CHECK_TIMEOUT)
        version = json.loads((folder / "runs" / "result.json").read_text())["version"]
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as failure:
        error = str(failure)
    return Result(time.monotonic() - start, version, error)


def table(page: str, results: Mapping[str, Result]) -> str:
    """Return the page with the rows of the checked packages. Rows of other packages stay."""
    before, rest = page.split(BEGIN)
    old, after = rest.split(END)
    rows = {line.split()[1]: line for line in old.splitlines() if line.startswith("| ")}
    rows |= {package: row(CASES[package], result) for package, result in results.items()}
    lines = "\n".join(rows[package] for package in CASES if package in rows)
    return f"{before}{BEGIN}\n{HEADER}\n{lines}\n{END}{after}"


def row(case: Case, result: Result) -> str:
    """Return the row of a package in the table."""
    resume, replay = "exact" if case.resumes else "new episodes", "exact" if case.replays else "no"
    if result.error is not None:
        resume = replay = "fails"
    name = f"{case.package} {result.version}".strip()
    return f"| {name} | {case.code} | {case.agent} | {resume} | {replay} | {case.limits or '-'} |"


def main(packages: Iterable[str]) -> None:
    """Check packages one after the other. Exits with status 1 if one fails."""
    chosen = [*packages] or [*CASES]
    if unknown := [package for package in chosen if package not in CASES]:
        raise SystemExit(f"unknown packages: {', '.join(unknown)}; choose from {', '.join(CASES)}")
    results: dict[str, Result] = {}
    for package in chosen:
        results[package] = result = checked(CASES[package], FOLDER / package)
        outcome = "failed" if result.error else "passed"
        print(f"{outcome}: {package} {result.version} ({result.seconds:.0f} s)", flush=True)
        if result.error:
            log = FOLDER / package / "log.txt"
            print(result.error, *log.read_text().splitlines()[-20:], f"log: {log}", sep="\n", flush=True)
        PAGE.write_text(table(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    failed = [package for package, result in results.items() if result.error]
    print(f"{len(results) - len(failed)} of {len(results)} packages passed", *failed[:1] and [f"failed: {failed}"])
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
