"""Tests of `rein.load_agent`, which rebuilds an agent from its file without running code that the file chooses."""

from __future__ import annotations

import functools
import inspect
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.base.action_noise import AdaptiveExploration, GaussianNoise
from rein.agents.base.optimizers import Adam
from rein.agents.base.segments import PrioritizedSegments
from rein.agents.dqn import DQN
from rein.agents.impala import IMPALA
from rein.agents.ppo import PPO
from rein.agents.q_learning import QLearning
from rein.agents.td3 import TD3
from rein.envs.cartpole import CartPole
from rein.errors import CheckpointError
from rein.handlers.checkpoint import checkpoint
from rein.networks.recurrent import GRU, LSTM, MinimalGRU
from rein.schedules import cosine, linear
from rein.store.checkpoint_file import read_checkpoint, write_checkpoint
from rein.testing.stateful import first_difference
from rein.training.saved_agents import own_agents

BOX, TWO = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2)


def made(kind: Any) -> Any:
    """Return an agent of the class, for the first pair of spaces that it accepts."""
    for pair in ((BOX, TWO), (BOX, BOX), (TWO, TWO)):
        try:
            return kind(*pair, seed=3)
        except (ValueError, TypeError) as error:
            last_error = error
    raise last_error


def same(agent: Any, other: Any) -> bool:
    assert first_difference(agent.state_dict(), other.state_dict()) is None
    spaces_agree = agent.observation_space == other.observation_space and agent.action_space == other.action_space
    return type(agent) is type(other) and agent.config == other.config and spaces_agree


@pytest.mark.parametrize("name", own_agents())
def test_every_agent_is_rebuilt_from_its_file(name: str, tmp_path: Path) -> None:
    agent = made(own_agents()[name])
    rein.save(agent, tmp_path / "agent.h5")
    assert same(agent, rein.load_agent(tmp_path / "agent.h5"))


def test_every_agent_module_has_an_agent() -> None:
    modules = {path.stem for path in Path(inspect.getfile(PPO)).parent.glob("*.py")}
    modules -= {"__init__", "multi_agent", "population"}  # of several agents
    assert {name.split(".")[2] for name in own_agents()} == modules


UNUSUAL = [
    lambda: PPO(BOX, TWO, learning_rate=linear(1e-3, 0.0, env_steps=100), clip=cosine(0.2, 0.1, updates=9), seed=1),
    lambda: PPO(BOX, TWO, core=functools.partial(GRU, features=8), hidden=(8,), normalize_reward=True),
    lambda: PPO(BOX, TWO, segments=PrioritizedSegments(beta=linear(0.2, 1.0, updates=5), rho_clip=math.inf)),
    lambda: PPO(BOX, TWO, core=functools.partial(MinimalGRU, features=8, layers=2), hidden=(8,)),
    lambda: IMPALA(BOX, TWO, rho_clip=2.0, optimizer=None, hidden=()),
    lambda: TD3(BOX, BOX, noise=GaussianNoise(AdaptiveExploration(0.1, low=0.01, high=0.2))),
    lambda: DQN(spaces.Box(0, 255, (1, 44, 44), np.uint8), TWO, epsilon=AdaptiveExploration(0.5), prioritized=True),
    lambda: QLearning(spaces.MultiDiscrete([5, 5, 3]), TWO, epsilon=linear(1.0, 0.1, env_steps=10)),
]


@pytest.mark.parametrize("make", UNUSUAL)
def test_schedules_noises_cores_and_infinity_are_restored(make: Any, tmp_path: Path) -> None:
    agent = make()
    rein.save(agent, tmp_path / "agent.h5")
    assert same(agent, rein.load_agent(tmp_path / "agent.h5"))


def test_agent_of_run_is_restored(tmp_path: Path) -> None:
    environment = CartPole(4, seed=0)
    agent = PPO(environment.single_observation_space, environment.single_action_space, rollout_steps=8)
    store = rein.HDF5Store(tmp_path / "run")
    loop = rein.training_loop(agent, environment, store, seed=0, epochs=2, iterations=12)
    checkpoint(loop, store)
    loop.run()
    store.close()
    again = rein.load_agent(tmp_path / "run")
    observation = torch.randn(6, 4)
    assert again.env_steps == 96
    assert torch.equal(agent.select_action(observation)[0], again.select_action(observation)[0])


def test_custom_optimizer_must_be_given(tmp_path: Path) -> None:
    optimizer = functools.partial(Adam, eps=1e-3)
    agent = PPO(BOX, TWO, optimizer=optimizer)
    rein.save(agent, tmp_path / "agent.h5")
    with pytest.raises(CheckpointError, match=r"cannot describe optimizer; pass it to load_agent.*rein\.load\(agent"):
        rein.load_agent(tmp_path / "agent.h5")
    assert same(agent, rein.load_agent(tmp_path / "agent.h5", optimizer=optimizer))


def test_custom_core_must_be_given(tmp_path: Path) -> None:
    def my_core(inputs: int, generator: torch.Generator) -> LSTM:
        return LSTM(inputs, 4, generator)

    agent = PPO(BOX, TWO, core=my_core)
    rein.save(agent, tmp_path / "agent.h5")
    with pytest.raises(CheckpointError, match="cannot describe core=my_core"):
        rein.load_agent(tmp_path / "agent.h5")
    assert same(agent, rein.load_agent(tmp_path / "agent.h5", core=my_core))


class CustomEncoder(torch.nn.Linear):
    def __init__(self, space: Any, drawn: torch.Generator, *, features: int = 4) -> None:
        super().__init__(3, features)
        self.features = features


@pytest.mark.parametrize(
    "encoder", [CustomEncoder, functools.partial(CustomEncoder, features=5)], ids=["class", "partial"]
)
@pytest.mark.parametrize("kind", [PPO, DQN, TD3])
def test_custom_encoder_must_be_given(kind: Any, encoder: Any, tmp_path: Path) -> None:
    agent = kind(BOX, BOX if kind is TD3 else TWO, encoder=encoder)
    rein.save(agent, tmp_path / "agent.h5")
    with pytest.raises(CheckpointError, match="cannot describe encoder=CustomEncoder; pass encoder= to load_agent"):
        rein.load_agent(tmp_path / "agent.h5")
    assert same(agent, rein.load_agent(tmp_path / "agent.h5", encoder=encoder))


def test_core_name_as_encoder_raises(tmp_path: Path) -> None:
    """An encoder is always a custom one, so it must be given even if the file has the name of a core."""
    path = changed(tmp_path / "agent.h5", config={"encoder": {"function": "LSTM", "features": 4}})
    with pytest.raises(CheckpointError, match="cannot describe encoder=LSTM"):
        rein.load_agent(path)


def test_given_options_replace_those_of_file(tmp_path: Path) -> None:
    rein.save(PPO(BOX, TWO, guard=lambda metrics, gradients: True), tmp_path / "agent.h5")
    agent = rein.load_agent(tmp_path / "agent.h5", gamma=0.5)
    assert (agent.gamma, agent.config["guard"]) == (0.5, None)  # a guard is not loaded from the file
    with pytest.raises(CheckpointError, match="there is no option gama"):
        rein.load_agent(tmp_path / "agent.h5", gama=0.5)


def test_custom_class_raises_and_is_not_imported(tmp_path: Path) -> None:
    class PPO(rein.agents.ppo.PPO): ...

    rein.save(PPO(BOX, TWO), tmp_path / "agent.h5")
    with pytest.raises(CheckpointError, match=r"the class '.*PPO' is not an agent of rein\. Build the agent"):
        rein.load_agent(tmp_path / "agent.h5")


def changed(path: Path, agent: Any = None, **about: Any) -> Path:
    """Save an agent with a changed description, and return the path."""
    rein.save(PPO(BOX, TWO, hidden=(8, 8)) if agent is None else agent, path)
    _, state, saved = read_checkpoint(path)
    write_checkpoint(path, state, {**saved, **{key: {**saved[key], **value} for key, value in about.items()}})
    return path


@pytest.mark.parametrize("name", ["os.system", "rein.cli.main", "rein.agents.ppo.spaces", "builtins.eval", "", None, 3])
def test_other_names_are_not_called(name: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not an agent of rein"):
        rein.load_agent(changed(tmp_path / "agent.h5", build={"class": name}))


@pytest.mark.parametrize(
    "config",
    [
        {"hidden": [10**6, 10**6]},
        {"hidden": [10**12]},
        {"hidden": [1] * 20_000},
        {"core": {"function": "LSTM", "features": 1, "layers": 10**6}},
        {"core": {"function": "LSTM", "features": 10**9}},
        {"core": {"function": "system", "command": "touch exploded"}},
        {"activation": "__import__"},
        {"clip": {"clock": "env_steps", "segments": [{"curve": "os.system", "start": 1, "end": 1, "steps": 1}]}},
        {"hidden": "ab"},
        {"gamma": [1]},
    ],
    ids=json.dumps,
)
def test_malicious_config_raises_without_large_allocation(config: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"agent\.h5: the agent cannot be rebuilt: "):
        rein.load_agent(changed(tmp_path / "agent.h5", config=config))


@pytest.mark.parametrize("side", ["observation_space", "action_space"])
def test_too_large_space_raises(side: str, tmp_path: Path) -> None:
    space = {"space": "Discrete", "n": 10**9, "start": 0, "dtype": "int64"}
    with pytest.raises(CheckpointError, match=f"{side}: larger than the"):
        rein.load_agent(changed(tmp_path / "agent.h5", build={side: space}))


def test_too_many_quantiles_raise(tmp_path: Path) -> None:
    agent = rein.IQN(BOX, TWO, hidden=(8,), cosines=8)
    with pytest.raises(CheckpointError, match="action_quantiles: larger than the"):
        rein.load_agent(changed(tmp_path / "agent.h5", agent, config={"action_quantiles": 10**8}))


def test_file_without_spaces_raises(tmp_path: Path) -> None:
    file = Path(__file__).parent / "store/data/checkpoint-format-2.h5"
    found = read_checkpoint(file)
    about = {name: value for name, value in found.about.items() if name not in ("builds", "format")}
    write_checkpoint(file := tmp_path / "agent.h5", found.state, about)
    with pytest.raises(CheckpointError, match=r"has an old format .* does not describe its agent"):
        rein.load_agent(file)
