"""Train agents on a simulated device and on the CPU, and print the differences as JSON."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from stand_in_device import NAME, stand_in, waits
from torch.utils._python_dispatch import _disable_current_modes

import rein
from rein.agents.a2c import A2C
from rein.agents.awac import AWAC
from rein.agents.ddpg import DDPG
from rein.agents.discrete_sac import DiscreteSAC
from rein.agents.dqn import DQN
from rein.agents.impala import IMPALA
from rein.agents.iql import IQL
from rein.agents.iqn import IQN
from rein.agents.ppo import PPO
from rein.agents.pqn import PQN
from rein.agents.recurrent_dqn import RecurrentDQN
from rein.agents.sac import SAC
from rein.agents.td3 import TD3
from rein.envs.cartpole import CartPole
from rein.envs.gridworld import Gridworld
from rein.envs.navigation import Navigation
from rein.envs.pendulum import Pendulum
from rein.handlers.checkpoint import checkpoint
from rein.networks.recurrent import GRU, LSTM
from rein.ops.trees import map_tree
from rein.store.hdf5 import HDF5Store
from rein.training.training_loop import training_loop

ROLLOUT: dict[str, Any] = {"rollout_steps": 4, "hidden": (8,)}
REPLAY: dict[str, Any] = {"batch_size": 4, "learning_starts": 8, "capacity": 200, "hidden": (8,)}
SEQUENCES: dict[str, Any] = {"sequence_length": 3, "burn_in": 1}
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ppo": (PPO, CartPole, {"minibatches": 2, **ROLLOUT}),
    "ppo, continuous": (PPO, Pendulum, {"normalize_observation": True, "normalize_reward": True, **ROLLOUT}),
    "ppo, recurrent": (PPO, CartPole, {"core": functools.partial(LSTM, features=8), "minibatches": 2, **ROLLOUT}),
    "ppo, torch's AdamW": (PPO, CartPole, {"optimizer": torch.optim.AdamW, **ROLLOUT}),
    "ppo, worlds": (PPO, functools.partial(Navigation, early_leave=True, max_episode_steps=5), ROLLOUT),
    "a2c": (A2C, CartPole, ROLLOUT),
    "impala": (IMPALA, CartPole, ROLLOUT),
    "pqn": (PQN, CartPole, {"minibatches": 2, **ROLLOUT}),
    "dqn": (DQN, CartPole, {"prioritized": True, "n_step": 3, "dueling": True, **REPLAY}),
    "iqn": (IQN, Gridworld, REPLAY),
    "recurrent dqn": (RecurrentDQN, CartPole, {"core": functools.partial(GRU, features=8), **SEQUENCES, **REPLAY}),
    "sac": (SAC, Pendulum, {"prioritized": True, **REPLAY}),
    "discrete sac": (DiscreteSAC, CartPole, REPLAY),
    "td3": (TD3, Pendulum, REPLAY),
    "ddpg": (DDPG, Pendulum, REPLAY),
    "awac": (AWAC, Pendulum, REPLAY),
    "iql": (IQL, Pendulum, REPLAY),
}
RESUMED = ("ppo, continuous", "dqn")


def loop_of(case: str, device: str, epochs: int, store: Any = None) -> rein.Loop:
    """Build a loop with four environments and six steps per epoch."""
    kind, environment, options = CASES[case]
    stepped = environment(4, seed=0, device=device)
    spaces = stepped.single_observation_space, stepped.single_action_space
    return training_loop(
        kind(*spaces, seed=0, device=device, **options), stepped, store, seed=0, epochs=epochs, iterations=6
    )


def learned(loop: rein.Loop) -> dict[str, torch.Tensor]:
    """Return the parameters, on the CPU."""
    return {name: value.detach().cpu() for name, value in loop.parts["agent"].networks.state_dict().items()}


def trained(case: str, device: str) -> tuple[dict[str, torch.Tensor], int, int]:
    """Train for four epochs. Returns the parameters and the waits, within iterations and between epochs.

    The waits of the first epoch are not counted.
    """
    loop, seen, between = loop_of(case, device, 4), 0, 0

    @loop.epoch_ended
    def read(state: rein.State) -> None:
        assert len(dict(state.metrics)) >= 4  # as loggers do

    @loop.iteration_started
    def begin(state: rein.State) -> None:
        nonlocal between
        between += waits.total() if state.epoch > 2 and state.iteration == 0 else 0
        waits.clear()

    @loop.iteration_completed
    def count(state: rein.State) -> None:
        nonlocal seen
        seen += waits.total() if state.epoch > 1 else 0
        waits.clear()

    with _disable_current_modes():  # the simulated device does not support all operations on the CPU
        host_policy = loop.parts["agent"].policy(device="cpu")
    loop.run()
    observation = loop.state.step_state.observation
    acted = loop.parts["agent"].policy().select_action(observation)[0]
    on_host = host_policy.select_action(map_tree(lambda x: x.cpu(), observation))[0]
    assert torch.allclose(on_host, acted.cpu(), atol=1e-6), "a policy on the host must follow the agent"
    assert all(leaf.device.type == device for leaf in (acted, *loop.parts["agent"].networks.parameters()))
    return learned(loop), seen, between


def resumed(case: str, folder: Path) -> dict[str, torch.Tensor]:
    """Train for two epochs, and for two more in a new loop; return the parameters."""
    for epochs in (2, 4):
        store = HDF5Store(folder / "run", exist="resume")
        loop = loop_of(case, NAME, epochs, store)
        checkpoint(loop, store)
        if epochs == 4:
            rein.resume(loop, folder / "run")
        loop.run()
    rein.save(loop.parts["agent"], folder / "agent.h5")
    other = loop_of(case, NAME, 4)
    rein.load(other.parts["agent"], folder / "agent.h5")
    return learned(other)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference of two parameters."""
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one if one[name].numel())


def main() -> None:
    """Print the distance between CPU and device of each case, and, for some, between a resumed and a full run."""
    report: dict[str, Any] = {}
    for case in sys.argv[1:] or CASES:
        host, *_ = trained(case, "cpu")
        with stand_in():
            there, waited, between = trained(case, NAME)
            report[case] = {"distance": distance(host, there), "waited": waited, "between": between}
            if case in RESUMED:
                with tempfile.TemporaryDirectory() as folder:
                    report[case]["resumed"] = distance(there, resumed(case, Path(folder)))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
