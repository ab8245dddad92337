"""`rein.export`: policies as ONNX models, torch.export programs and safetensors files."""

from __future__ import annotations

import builtins
import functools
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from gymnasium import spaces
from torch import Tensor, nn

import rein
from rein.errors import CheckpointError, NonFiniteError
from rein.integrations.export import Facts, model_card
from rein.networks.actor_critic import ActorCritic
from rein.networks.recurrent import GRU, LSTM
from rein.types import Tree
from tests.integrations.export_cases import BOX, CASES, THREE, VECTOR, built, flat, sampled

SIZES = (1, 2, 5, 13, 32, 64)  # numbers of observations
EVERY = [(agent, case) for agent, cases in CASES.items() for case in cases]


def recorded(agent: Any, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Return episodes of observations with the actions of the policy, and the inputs that exported policies need."""
    policy, found = agent.policy(), list[dict[str, Any]]()
    for size in SIZES * rounds:
        policy.reset()
        for step in range(steps):
            observation = sampled(agent.observation_space, size, seed=len(found))
            action, _ = policy.select_action(observation)
            carry = None if policy.carry is None else tuple(policy.carry.shape)
            shown, inputs = needed(observation)
            found.append({"observation": shown, "inputs": inputs, "action": action, "carry": carry, "begin": step == 0})
    return found


def needed(observation: Tree) -> tuple[Tree, dict[str, Tensor]]:
    """Return the argument of a program and the inputs of an ONNX model."""
    if isinstance(observation, Tensor) or not {"action_mask", "critic_observation"} & observation.keys():
        return observation, flat(observation)
    shown = {name: part for name, part in observation.items() if name != "critic_observation"}
    visible = {name: part for name, part in shown.items() if name != "action_mask"}
    inputs = flat(next(iter(visible.values())) if len(visible) == 1 else visible)
    return shown, inputs | (flat(shown["action_mask"], "action_mask") if "action_mask" in shown else {})


def differences(agents: dict[str, Any], folder: Path, steps: int, rounds: int) -> dict[str, list[float]]:
    """Return the largest differences of the exported policies, in a process that cannot import rein."""
    for name, agent in agents.items():
        (folder / name).mkdir()
        rein.export(agent.policy(), folder / name / "policy.onnx")
        rein.export(agent.policy(), folder / name / "policy.pt2")
        torch.save(recorded(agent, steps, rounds), folder / name / "steps.pt")
    program = [sys.executable, "-I", "-W", "ignore", str(Path(__file__).with_name("check_exported.py"))]
    result = subprocess.run([*program, *(str(folder / name) for name in agents)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads(result.stdout.splitlines()[-1])
    return {name: found[str(folder / name)] for name in agents}


def test_exported_policies_act_equally_without_rein(tmp_path: Path) -> None:
    agents = {"masked hybrid": built("PPO", "masked hybrid")}
    found = differences(agents, tmp_path, steps=2, rounds=1)
    assert max(max(pair) for pair in found.values()) < 1e-5, found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("agent", CASES)
def test_every_exported_policy_acts_equally_without_rein(agent: str, tmp_path: Path) -> None:
    agents = {case: built(agent, case) for case in CASES[agent]}
    found = differences(agents, tmp_path, steps=3, rounds=3)  # 1,053 observations
    print(f"{agent}: {len(found)} cases, largest differences", *map(max, zip(*found.values(), strict=True)))
    assert max(max(pair) for pair in found.values()) < 1e-5, found


@pytest.mark.default_cases(every=4)
@pytest.mark.parametrize(("agent", "case"), EVERY)
def test_safetensors_load_into_rein_with_equal_actions(agent: str, case: str, tmp_path: Path) -> None:
    mine = built(agent, case)
    rein.export(mine, tmp_path / "policy.safetensors")
    policy, loaded = mine.policy(), rein.load_policy(tmp_path / "policy.safetensors")
    for size in (1, 20, 20, 20):
        observation = sampled(mine.observation_space, size, seed=size)
        expected, found = policy.select_action(observation)[0], loaded.select_action(observation)[0]
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def weights_of(agent: Any, folder: Path) -> dict[str, Tensor]:
    rein.export(agent, folder / "policy.safetensors")
    return safetensors.torch.load_file(folder / "policy.safetensors")


def of(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}."): x for name, x in weights.items() if name.startswith(f"{prefix}.")}


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_weights_fit_a_sequential_module(part: str, tmp_path: Path) -> None:
    agent = built("PPO", "box")
    outputs = {"actor": 2, "critic": 1}[part]
    module = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
    module.load_state_dict(of(weights_of(agent, tmp_path), part))
    observation = sampled(VECTOR, 30, seed=0)
    distribution, value = agent.networks(agent.networks.preprocess(observation))
    expected = distribution.mean if part == "actor" else value.unsqueeze(1)
    torch.testing.assert_close(module(observation), expected, rtol=1e-5, atol=1e-5)


def test_weights_of_several_critics_are_separate(tmp_path: Path) -> None:
    agent = built("SAC", "vector")
    weights, networks = weights_of(agent, tmp_path), agent.networks
    x = torch.randn(20, 6)
    for k, expected in enumerate(networks.critics(x[:, :4], x[:, 4:])):
        module = nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
        module.load_state_dict(of(weights, f"critics.{k}"))
        torch.testing.assert_close(module(x).squeeze(1), expected, rtol=1e-5, atol=1e-5)
    assert not [name for name in weights if "target" in name]


@pytest.mark.parametrize(("mine", "torchs"), [(LSTM, nn.LSTM), (GRU, nn.GRU)])
def test_weights_of_a_core_fit_the_module_of_torch(mine: Any, torchs: Any, tmp_path: Path) -> None:
    agent = rein.RecurrentDQN(
        VECTOR, THREE, core=functools.partial(mine, features=8, layers=2), hidden=(), capacity=100, seed=0
    )
    for parameter in agent.networks.parameters():
        nn.init.normal_(parameter, 0.0, 0.5, generator=torch.Generator().manual_seed(parameter.numel()))
    module = torchs(4, 8, num_layers=2)
    module.load_state_dict(of(weights_of(agent, tmp_path), "core"))
    core, x = agent.networks.online.core, torch.randn(5, 3, 4)
    expected, _ = core.sequence(x, torch.zeros(3, core.carry_size), torch.zeros(5, 3, dtype=torch.bool))
    torch.testing.assert_close(module(x)[0], expected, rtol=1e-5, atol=1e-6)


def test_names_of_inputs_and_outputs_are_in_the_model_card(tmp_path: Path) -> None:
    agent = built("PPO", "masked LSTM")
    rein.export(agent, tmp_path / "policy.pt2", environment="Maze-v0", mean_return=12.5)
    card = (tmp_path / "policy.md").read_text()
    assert card.startswith("---\nlibrary_name: rein\n")
    for row in (
        "| input | `observation` | (N, 4) | float32 |",
        "| input | `action_mask` | (N, 3) | int8 |",
        "| input | `carry` | (N, 64) | float32 |",
        "| output | `action` | (N,) | int64 |",
        "| output | `next_carry` | (N, 64) | float32 |",
        "| environment | Maze-v0 |",
    ):
        assert row in card
    assert "value: 12.5" in card and "torch.export.load" in card and "load_policy" not in card
    rein.export(agent, tmp_path / "policy.safetensors")
    card = (tmp_path / "policy.md").read_text()
    assert "torch.export.load" in card and "load_policy" in card and "not recorded" in card


def test_texts_cannot_add_markup_or_metadata_to_the_model_card(tmp_path: Path) -> None:
    name = "x\n---\n# <script>`| [a](b)\nlicense: mit"
    rein.export(built("PPO", "vector"), tmp_path / "policy.safetensors", environment=name, mean_return=1.0)
    lines = (tmp_path / "policy.md").read_text().splitlines()
    assert lines.count("---") == 2 and not [line for line in lines if "<" in line or line.startswith("license")]


def test_export_does_not_replace_files_of_other_programs(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(ValueError, match="another name"):
        rein.export(built("PPO", "vector"), tmp_path / "README.safetensors")
    assert [*tmp_path.iterdir()] == [tmp_path / "README.md"] and (tmp_path / "README.md").read_text() == "mine"


def test_export_leaves_the_agent_unchanged(tmp_path: Path) -> None:
    agent = built("PPO", "masked LSTM")
    observation = sampled(agent.observation_space, 4, seed=0)
    agent.select_action(observation)
    before = {name: x.clone() for name, x in agent.networks.state_dict().items()}
    carry, generator = agent.carry, agent.generator.get_state()
    rein.export(agent, tmp_path / "policy.pt2")
    assert agent.carry is carry and torch.equal(agent.generator.get_state(), generator)
    assert all(torch.equal(x, before[name]) for name, x in agent.networks.state_dict().items())


def test_program_contains_no_paths_and_no_weights_of_critics(tmp_path: Path) -> None:
    agent = rein.SAC(VECTOR, BOX, capacity=100, batch_size=8, hidden=(8,), critics=50, seed=0)
    rein.export(agent, tmp_path / "policy.pt2")
    content = (tmp_path / "policy.pt2").read_bytes()
    assert b".py" not in content.replace(b".pyi", b"")
    constants: dict[str, Any] = torch.export.load(tmp_path / "policy.pt2").constants
    weights = sum(x.numel() for x in constants.values())
    assert weights < 200  # 50 critics have more than 2,000


class Custom(rein.Agent):
    """Custom agent with an actor and a critic as separate attributes."""

    def build(self, generator: torch.Generator) -> None:
        self.actor = rein.networks.actor(self.observation_space, self.action_space, generator=generator)
        self.baseline = rein.networks.critic(self.observation_space, generator=generator)

    def act(self, observation: Tree, explore: bool | float) -> Any:
        return self.actor(observation), {"value": self.baseline(observation)}

    def update(self, batch: Any, /) -> dict[str, Tensor]:
        return {}


class Branching(Custom):
    def act(self, observation: Tree, explore: bool | float) -> Any:
        if float(observation.sum()) > 0.0:
            return self.actor(observation)
        return self.actor(-observation)


class Fixed(Custom):
    def act(self, observation: Tree, explore: bool | float) -> Any:
        return self.actor(observation + torch.zeros(len(observation), 1))


class Unknown(Custom):
    def act(self, observation: Tree, explore: bool | float) -> Any:
        return self.actor(torch.special.bessel_j0(observation))


def test_custom_agent_is_exported(tmp_path: Path) -> None:
    agent = Custom(VECTOR, THREE, seed=0)
    rein.export(agent, tmp_path / "policy.pt2")
    weights, observation = weights_of(agent, tmp_path), sampled(VECTOR, 7, seed=0)
    found = torch.export.load(tmp_path / "policy.pt2").module()(observation)
    assert torch.equal(found, agent.policy().select_action(observation)[0])
    assert {"actor.hidden.0.weight", "actor.head.linear.weight", "baseline.head.weight"} <= weights.keys()
    with pytest.raises(CheckpointError, match="load_file"):
        rein.load_policy(tmp_path / "policy.safetensors")


@pytest.mark.parametrize(
    ("kind", "text"), [(Branching, r"if float\(observation.sum"), (Fixed, r"observation.shape\[0\]")]
)
def test_operation_that_cannot_be_exported_is_named(kind: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        rein.export(kind(VECTOR, THREE, seed=0), tmp_path / "policy.pt2")
    assert not [*tmp_path.iterdir()]


def test_operation_without_onnx_form_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bessel_j0"):
        rein.export(Unknown(VECTOR, THREE, seed=0), tmp_path / "policy.onnx")
    assert not [*tmp_path.iterdir()]


DOTTED = spaces.Dict({"x": spaces.Dict({"y": spaces.Discrete(2)}), "x.y": spaces.Discrete(3)})
DOTTED_BOX = spaces.Dict({"x": spaces.Dict({"y": VECTOR}), "x.y": VECTOR})


@pytest.mark.parametrize("suffix", ["safetensors", "pt2", "onnx"])
@pytest.mark.parametrize("spaces_of", [(VECTOR, DOTTED), (VECTOR, DOTTED_BOX), (DOTTED, THREE)])
def test_keys_with_dots_that_give_equal_names_are_refused(spaces_of: Any, suffix: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dot"):
        rein.export(rein.PPO(*spaces_of, hidden=(4,), seed=0), tmp_path / f"policy.{suffix}")
    assert not [*tmp_path.iterdir()]


def test_policy_with_dots_in_keys_loads_with_equal_actions(tmp_path: Path) -> None:
    agent = rein.PPO(VECTOR, spaces.Dict({"x.y": BOX, "x": spaces.Dict({"z": THREE})}), hidden=(4,), seed=0)
    rein.export(agent, tmp_path / "policy.safetensors")
    observation = sampled(VECTOR, 50, seed=0)
    theirs, mine = (
        flat(policy.select_action(observation)[0])
        for policy in (rein.load_policy(tmp_path / "policy.safetensors"), agent.policy())
    )
    assert theirs.keys() == mine.keys() and all(torch.equal(theirs[name], mine[name]) for name in mine)


def test_weights_of_two_actors_of_a_custom_agent_are_separate(tmp_path: Path) -> None:
    class Two(Custom):
        def build(self, generator: torch.Generator) -> None:
            super().build(generator)
            self.networks, self.other = (ActorCritic(VECTOR, BOX, generator, hidden=(4,)) for _ in range(2))

    agent = Two(VECTOR, THREE, seed=0)
    agent.other.policy_head.log_std.data.fill_(1.0)
    weights = weights_of(agent, tmp_path)
    assert weights["log_std"].eq(0.0).all() and weights["other.log_std"].eq(1.0).all()


def test_model_card_has_a_variable_for_each_tensor(tmp_path: Path) -> None:
    inputs, outputs = ["observation.a_b", "observation.a.b", "action_mask"], ["action.mask", "action.a-b", "action.a b"]
    given, found = (dict.fromkeys(names, torch.zeros(2)) for names in (inputs, outputs))
    (tmp_path / "policy.onnx").touch()
    card = model_card(tmp_path / "policy.onnx", Facts("PPO", (VECTOR, THREE), given, found))
    code = card.split("```python\n")[1].split("```")[0]
    left, right = code.splitlines()[-1].split(" = session.run(None, {")
    variables = [*left.split(", "), *(part.split(": ")[1] for part in right.removesuffix("})").split(", "))]
    assert len({*variables}) == 6 and all(map(str.isidentifier, variables))


@pytest.mark.parametrize("suffix", ["safetensors", "pt2", "onnx"])
def test_parameters_that_are_not_finite_are_not_exported(suffix: str, tmp_path: Path) -> None:
    agent = rein.PPO(VECTOR, THREE, hidden=(4,), seed=0)
    agent.networks.value_head.bias.data.fill_(math.nan)
    with pytest.raises(NonFiniteError, match=r"value_head\.bias"):
        rein.export(agent, tmp_path / f"policy.{suffix}")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["policy", "policy.h5", "policy.ONNX"])
def test_unknown_suffix_raises(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="suffix"):
        rein.export(built("PPO", "vector"), tmp_path / name)


def test_exploring_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="greedy"):
        rein.export(built("PPO", "vector").policy(deterministic=False), tmp_path / "policy.pt2")


def test_other_policies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="object"):
        rein.export(object(), tmp_path / "policy.pt2")  # type: ignore[arg-type]


def test_model_card_names_the_environment_that_the_agent_knows(tmp_path: Path) -> None:
    environment = rein.envs.wrappers.ScaleReward(rein.make("CartPole-v1", num_envs=2, seed=0), 2.0)
    agent = rein.PPO(environment, hidden=(8,), seed=0)
    loop = rein.training_loop(agent, environment, store=tmp_path / "run", epochs=1, iterations=2)
    rein.checkpoint(loop)
    loop.run()
    for policy in (agent, rein.load_policy(tmp_path / "run")):
        rein.export(policy, tmp_path / "policy.pt2")
        assert "| environment | CartPole-v1 |" in (tmp_path / "policy.md").read_text()


@pytest.mark.parametrize(("suffix", "package"), [("onnx", "onnxscript"), ("safetensors", "safetensors.torch")])
def test_missing_package_is_named(suffix: str, package: str, tmp_path: Path, monkeypatch: Any) -> None:
    original = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == package:
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install (onnx|safetensors)"):
        rein.export(built("PPO", "vector"), tmp_path / f"policy.{suffix}")


def changed(
    path: Path, metadata: dict[str, str] | None = None, weights: Mapping[str, Tensor] = {}, leave: Iterable[str] = ()
) -> Path:
    """Rewrite a safetensors file with other metadata or weights."""
    with safetensors.safe_open(path, "pt") as file:
        found = file.metadata() if metadata is None else metadata
    every = {**safetensors.torch.load_file(path), **weights}
    safetensors.torch.save_file({name: x for name, x in every.items() if name not in leave}, path, found)
    return path


def edited(path: Path, **changes: Any) -> Path:
    with safetensors.safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["rein"])
    return changed(path, {"rein": json.dumps({**about, **changes})})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rein.export(rein.PPO(VECTOR, THREE, hidden=(8,), seed=0), tmp_path / "policy.safetensors")
    return tmp_path / "policy.safetensors"


BUILD = {"observation_space": {"space": "Discrete", "n": 3, "start": 0, "dtype": "int64"}}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda path: changed(path, {}), "was not written by rein.export"),
        (lambda path: changed(path, {"rein": "[1]"}), "was not written by rein.export"),
        (lambda path: changed(path, {"rein": "{"}), "cannot be read"),
        (lambda path: changed(path, {"rein": "[" * 10_000}), "cannot be read"),
        (lambda path: edited(path, format=99), "version 99"),
        (lambda path: edited(path, build=None), "does not describe its agent"),
        (lambda path: edited(path, build={"class": "os.system", **BUILD}), "'os.system' is not an agent of rein"),
        (lambda path: edited(path, build={"class": ["rein"]}), "is not an agent of rein"),
        (lambda path: edited(path, config={"hidden": [10**9]}), "larger than"),
        (lambda path: changed(path, leave=["actor.0.weight"]), "actor.0.weight"),
        (lambda path: changed(path, weights={"more": torch.zeros(1)}), "more"),
        (lambda path: changed(path, weights={"actor.0.weight": torch.zeros(8, 5)}), "actor.0.weight: expected"),
        (lambda path: changed(path, weights={"actor.0.weight": torch.zeros(8, 4).double()}), "float64"),
        (lambda path: changed(path, weights={"actor.0.weight": torch.full((8, 4), math.nan)}), "not finite"),
        (lambda path: changed(path, weights={str(n): torch.zeros(0) for n in range(10_001)}), "at most 10,000"),
        (lambda path: changed(path, {"rein": "[]" + " " * (5 << 20)}), "bytes of names and metadata"),
        (lambda path: path.write_bytes(b"\xff" * 100), "cannot be read"),
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), "cannot be read"),
        (lambda path: path.unlink(), "no such file"),
    ],
)
def test_wrong_safetensors_file_is_refused(change: Any, text: str, file: Path) -> None:
    change(file)
    with pytest.raises(CheckpointError, match=text):
        rein.load_policy(file)


@pytest.mark.parametrize("limit", ["_HEADER", "_TENSORS"])
def test_safetensors_file_beyond_the_limits_is_not_written(limit: str, file: Path, monkeypatch: Any) -> None:
    """Such a file could not be loaded."""
    monkeypatch.setattr(f"rein.integrations.weights_file.{limit}", 5)
    before = file.read_bytes()
    with pytest.raises(ValueError, match="at most"):
        rein.export(rein.PPO(VECTOR, THREE, hidden=(8,), seed=1), file)
    assert file.read_bytes() == before


def test_policy_of_custom_networks_loads_with_the_same_function(tmp_path: Path) -> None:
    class Network(nn.Module):
        def __init__(self, observation_space: spaces.Space, action_space: spaces.Space, generator: Any) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
            output = self.layer(observation)
            return output[:, :3], output[:, 3]

    agent = rein.PPO(VECTOR, THREE, network=Network, seed=0)
    rein.export(agent, tmp_path / "policy.safetensors")
    with pytest.raises(CheckpointError, match="network"):
        rein.load_policy(tmp_path / "policy.safetensors")
    loaded, x = rein.load_policy(tmp_path / "policy.safetensors", network=Network), sampled(VECTOR, 9, seed=0)
    assert torch.equal(loaded.select_action(x)[0], agent.policy().select_action(x)[0])
