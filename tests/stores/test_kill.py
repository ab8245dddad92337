"""A busy writer is killed at random moments: nothing that was acknowledged is lost, nothing half-written has a name."""

import json
import subprocess
import sys

from rein.ops.random import stream_seed
from rein.stores.files import verify
from rein.stores.folder import list_files
from rein.stores.hdf5 import HDF5Store
from rein.stores.reader import open_run
from rein.testing.store import assert_equal, make_trajectory

KILLS = 8

# Imports once and forks for each kill. The child writes epochs and says after each flush which one is safe.
FORK_SERVER = """
import json, os, random, signal, sys, time
import torch
from rein.stores.hdf5 import HDF5Store
from rein.testing.store import make_trajectory

def write(path, acknowledged):
    store = HDF5Store(path, max_epochs=2)
    for epoch in range(1, 100_000):
        store.append(make_trajectory(epoch, steps=50, num_envs=8))
        if epoch % 3 == 0:
            store.flush()
            os.write(acknowledged, epoch.to_bytes(4, "little"))

folder, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
moments, torch_threads = random.Random(seed), torch.set_num_threads(1)
for number in range(kills):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        write(f"{folder}/{number}", writing)
        os._exit(0)
    os.close(writing)
    os.read(reading, 4)  # it is under way
    time.sleep(moments.random() * 0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    said = b""
    while more := os.read(reading, 4096):
        said += more
    os.close(reading)
    last = int.from_bytes(said[-4:], "little") if said else 3
    print(json.dumps({"pid": child, "acknowledged": last}), flush=True)
"""


def test_a_writer_that_is_killed_loses_nothing_it_has_acknowledged(tmp_path):
    arguments = [sys.executable, "-c", FORK_SERVER, str(tmp_path), str(KILLS), str(stream_seed(0, "kill"))]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    killed = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(killed) == KILLS
    for number, one in enumerate(killed):
        folder = tmp_path / str(number) / "trajectories"
        finished = list_files(folder)
        for path in finished:
            verify(path)
        run = open_run(tmp_path / str(number))
        epochs = list(run.epochs["number"])
        assert epochs == list(range(1, len(epochs) + 1)) and len(epochs) >= one["acknowledged"]
        for epoch in (1, epochs[-1]):
            assert_equal([run.trajectory(epoch)], [make_trajectory(epoch, steps=50, num_envs=8)])
        left = {path.name for path in folder.iterdir()} - {path.name for path in finished}
        assert len(left) <= 1 and all(name.endswith(f".tmp-{one['pid']}") for name in left)
        HDF5Store(tmp_path / str(number), exist="resume").close()
        assert sorted(folder.iterdir()) == sorted(finished)


def test_a_torn_write_is_found_wherever_the_file_was_cut(tmp_path):
    """What a loss of power can leave under a final name: found before anything is parsed, and named."""
    store = HDF5Store(tmp_path / "run", max_epochs=1)
    for epoch in (1, 2):
        store.append(make_trajectory(epoch, steps=50, num_envs=8))
    store.close()
    last = list_files(store.path / "trajectories")[-1]
    whole = last.read_bytes()
    for length in range(0, len(whole), 4096):
        for torn in (whole[:length], whole[:length].ljust(len(whole), b"\0")):
            last.write_bytes(torn)
            try:
                verify(last)
            except Exception as error:
                assert type(error).__name__ == "StoreError" and last.name in str(error)
            else:
                raise AssertionError(f"cut at {length}, and not found")
