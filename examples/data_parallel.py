"""Train data-parallel in two processes with separate environments: `torchrun --nproc-per-node 2 data_parallel.py`.

`python data_parallel.py` calls this command.
"""

import os
import subprocess
import sys

import rein
from rein.agents.base.data_parallel import mean_of_processes, process_group


def train():
    with process_group() as group:
        environment = rein.envs.CartPole(num_envs=128 // group.processes, seed=group.rank)
        agent = rein.PPO(environment, rollout_steps=32, minibatches=8, learning_rate=3e-3, seed=0)
        store = rein.HDF5Store("runs/data-parallel", exist="new") if group.rank == 0 else None
        loop = rein.training_loop(agent, environment, store)

        @loop.epoch_ended(every=10)
        def record_solved(state):
            mean = mean_of_processes(state.metrics["episode_return_100"])
            if group.rank == 0:
                print(f"epoch {state.epoch}: mean return {mean:.0f} in {group.processes} processes")
            if mean >= 150:
                state.halt_loop("solved")

        loop.run(epochs=100, iterations=32)
        if store is not None:
            store.close()


if "RANK" in os.environ:
    train()
else:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, __file__], check=True)
