"""Agents with custom networks: options `network`, `actor`, `critic` and `value`."""

from __future__ import annotations

import copy
import functools
import re
import runpy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import rein
from rein.envs.gridworld import Gridworld
from rein.envs.probes import Corridor, Reach
from rein.errors import CheckpointError
from rein.networks import policy_outputs
from rein.networks.custom_networks import CustomActorCritic
from rein.ops.random import generator
from rein.ops.trees import leaves
from rein.testing import AgentContract
from rein.testing.stateful import copy_state, first_difference
from tests.envs.masked_grid import MaskedGrid

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples/attention.py"))
BOX = spaces.Box(-1.0, 1.0, (2,))


def flat(observation: Any) -> Tensor:
    return torch.cat([x.reshape(len(x), -1).float() for _, x in leaves(observation)], 1)


class Policy(nn.Module):
    """Outputs of a policy; `outputs` of them for each dimension of a Box."""

    def __init__(self, observation_space: Any, action_space: Any, generator: Any, *, deterministic: bool = False):
        super().__init__()
        outputs = policy_outputs(action_space, state_dependent_std=not deterministic)
        self.layers = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, outputs))

    def forward(self, observation: Any) -> Tensor:
        return self.layers(flat(observation))


class Value(nn.Module):
    """Value of a state, or of a state and an action."""

    def __init__(self, observation_space: Any, action_space: Any, generator: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, observation: Any, *others: Tensor) -> Tensor:
        return self.layers(torch.cat((flat(observation), *others), 1)).squeeze(1)


class ActorCritic(nn.Module):
    """Outputs of a policy and value."""

    def __init__(self, observation_space: Any, action_space: Any, generator: Any, *, spread: bool = False) -> None:
        super().__init__()
        self.policy = Policy(observation_space, action_space, generator, deterministic=not spread)
        self.value = Value(observation_space, action_space, generator)

    def forward(self, observation: Any) -> tuple[Tensor, Tensor]:
        return self.policy(observation), self.value(observation)


class Quantiles(Value):
    """Three quantiles of a value."""

    def forward(self, *arguments: Any) -> Tensor:
        return super().forward(*arguments).unsqueeze(-1) + torch.arange(3.0)


Q = functools.partial(Policy, deterministic=True)
Deterministic = Q

ROLLOUT: dict[str, Any] = {"rollout_steps": 4}
REPLAY: dict[str, Any] = {"batch_size": 8, "capacity": 200, "learning_starts": 0}
CONTINUOUS: dict[str, Any] = {"actor": Policy, "critic": Value}
KINDS: dict[str, tuple[Any, bool, dict[str, Any]]] = {  # kind, whether actions are continuous, options
    "PPO": (rein.PPO, False, ROLLOUT | {"network": ActorCritic}),
    "PPO, parts": (rein.PPO, True, ROLLOUT | {"network": ActorCritic, "micro_batch": 2, "threads": 2}),
    "PPO, half": (rein.PPO, True, ROLLOUT | {"network": ActorCritic, "precision": "bfloat16"}),
    "PPO, spread": (
        rein.PPO,
        True,
        ROLLOUT | {"network": functools.partial(ActorCritic, spread=True), "state_dependent_std": True},
    ),
    "PPO, segments": (
        rein.PPO,
        True,
        ROLLOUT | {"network": ActorCritic, "segments": rein.PrioritizedSegments(), "squash": True},
    ),
    "A2C": (rein.A2C, True, ROLLOUT | {"network": ActorCritic}),
    "IMPALA": (rein.IMPALA, False, ROLLOUT | {"network": ActorCritic}),
    "PQN": (rein.PQN, False, ROLLOUT | {"network": Q}),
    "DQN": (rein.DQN, False, REPLAY | {"network": Q, "prioritized": True}),
    "SAC": (rein.SAC, True, REPLAY | CONTINUOUS),
    "SAC, actor": (rein.SAC, True, REPLAY | {"hidden": (8,), "actor": Policy}),
    "SAC, critic": (rein.SAC, True, REPLAY | {"hidden": (8,), "critic": Value, "normalize_observation": True}),
    "TQC": (rein.TQC, True, REPLAY | {"actor": Policy, "critic": Quantiles, "quantiles": 3, "dropped_quantiles": 1}),
    "CrossQ": (rein.CrossQ, True, REPLAY | {**CONTINUOUS, "actor_frequency": 1}),
    "TD3": (rein.TD3, True, REPLAY | {"actor": Deterministic, "critic": Value, "noise": 1.0}),
    "DDPG": (rein.DDPG, True, REPLAY | {"actor": Deterministic, "critic": Value, "noise": 1.0}),
    "AWAC": (rein.AWAC, True, REPLAY | CONTINUOUS),
    "IQL": (rein.IQL, True, REPLAY | CONTINUOUS | {"value": Value}),
    "IQL, value": (rein.IQL, True, REPLAY | {"hidden": (8,), "value": Value}),
    "DiscreteSAC": (rein.DiscreteSAC, False, REPLAY | {"actor": Policy, "critic": Q}),
    "DiscreteSAC, critic": (rein.DiscreteSAC, False, REPLAY | {"hidden": (8,), "critic": Q}),
}


def made(case: str, **options: Any) -> tuple[Any, Corridor]:
    kind, continuous, defaults = KINDS[case]
    environment = Corridor(4, length=3, continuous=continuous, seed=0, max_episode_steps=8)
    spaces_of = environment.single_observation_space, environment.single_action_space
    return kind(*spaces_of, **{"seed": 0, **defaults, **options}), environment


class _WithNetworks(AgentContract):
    steps, num_envs = 32, 4
    case: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}

    def make(self, seed):
        kind, _, defaults = KINDS[self.case]
        environment = self.environment(1, 0)
        return kind(environment, seed=seed, **{**defaults, **self.options})

    def environment(self, num_envs, seed) -> Any:
        if KINDS[self.case][1]:
            return Reach(num_envs=num_envs, seed=seed, dimensions=2, max_episode_steps=7)
        return Gridworld(num_envs=num_envs, seed=seed, max_episode_steps=9)


ONLINE = {"learning_starts": 8, "update_to_data": 0.25}


class TestPQN(_WithNetworks):
    case = "PQN"
    options: ClassVar[dict[str, Any]] = {"update_epochs": 2, "minibatches": 2, "epsilon": 0.3}


@pytest.mark.slow
class TestSAC(_WithNetworks):
    case = "SAC"
    options: ClassVar[dict[str, Any]] = ONLINE


@pytest.mark.slow
class TestAttention(AgentContract):
    """The example: a Dict observation with a padding mask, and attention."""

    steps, num_envs = 16, 4

    def make(self, seed):
        environment = self.environment(1, 0)
        return rein.PPO(environment, network=EXAMPLE["SetNetwork"], rollout_steps=4, minibatches=2, seed=seed)

    def environment(self, num_envs, seed):
        return rein.make(EXAMPLE["FindOutlier"], num_envs=num_envs, seed=seed)


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("case", KINDS)
def test_networks_are_seeded_and_trained(case: str) -> None:
    before = torch.get_rng_state()
    agent, environment = made(case)
    again = made(case)[0]
    assert torch.equal(torch.get_rng_state(), before)
    initial = {name: x.detach().clone() for name, x in agent.networks.named_parameters()}
    assert all(torch.equal(x, initial[name]) for name, x in again.networks.named_parameters())
    rein.train(agent, environment, env_steps=48)
    assert agent.updates
    same = [name for name, x in agent.networks.named_parameters() if torch.equal(x, initial[name])]
    assert same == []


@pytest.mark.parametrize("case", ["SAC", "DiscreteSAC"])
def test_critics_differ_and_targets_are_copies(case: str) -> None:
    networks = made(case)[0].networks
    one, other = (critic.layers[0].weight for critic in networks.critics.networks)
    target = networks.target_critics.networks[0].layers[0].weight
    assert not torch.equal(one, other)
    assert torch.equal(target, one) and target is not one and not target.requires_grad


def test_threads_do_not_change_the_result() -> None:
    agents = []
    for threads in (1, 2):
        agent, environment = made("PPO, parts", threads=threads)
        rein.train(agent, environment, env_steps=64)
        agents.append(dict(agent.networks.state_dict()))
    assert first_difference(*agents) is None


class Fixed(nn.Module):
    """Network that returns the observation as outputs of the policy, and its last number as value."""

    def __init__(self, observation_space: Any, action_space: Any, generator: Any) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return observation + self.shift, observation[:, -1]


def test_outputs_become_a_distribution_over_every_component() -> None:
    action_space = spaces.Dict(
        {
            "choice": spaces.Discrete(3),
            "force": BOX,
            "pair": spaces.MultiDiscrete([2, 4]),
            "flags": spaces.MultiBinary(2),
        }
    )
    names = [*action_space.spaces]
    widths = {"choice": 3, "flags": 4, "force": 4, "pair": 6}
    columns = [widths[name] for name in names]
    assert policy_outputs(action_space, state_dependent_std=True) == 17
    space = spaces.Box(-9.0, 9.0, (17,))
    networks = CustomActorCritic(space, action_space, generator(0, "test"), network=Fixed, state_dependent_std=True)
    x = torch.randn(5, 17, generator=generator(1, "test"))
    distribution, value = networks(networks.preprocess(x))
    assert torch.equal(value, x[:, -1])
    parts = dict(zip(names, x.double().split(columns, 1), strict=True))
    action = {
        "choice": torch.tensor([0, 1, 2, 0, 1]),
        "force": torch.linspace(-0.5, 0.5, 10).view(5, 2),
        "pair": torch.tensor([[0, 3], [1, 2], [0, 1], [1, 0], [0, 0]]),
        "flags": torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0], [0, 1]]),
    }
    mean, log_std = parts["force"].chunk(2, 1)
    expected = torch.distributions.Normal(mean, log_std.exp()).log_prob(action["force"].double()).sum(1)
    for logits, chosen in (
        (parts["choice"], action["choice"]),
        (parts["pair"][:, :2], action["pair"][:, 0]),
        (parts["pair"][:, 2:], action["pair"][:, 1]),
        (parts["flags"][:, :2], action["flags"][:, 0]),
        (parts["flags"][:, 2:], action["flags"][:, 1]),
    ):
        expected = expected + torch.distributions.Categorical(logits=logits).log_prob(chosen)
    sample = networks.policy_head.from_action(distribution, action)
    torch.testing.assert_close(distribution.log_prob(sample).double(), expected)


@pytest.mark.parametrize(
    ("space", "outputs", "with_std"),
    [
        (spaces.Discrete(4), 4, 4),
        (spaces.MultiDiscrete([2, 3]), 5, 5),
        (spaces.MultiBinary(3), 6, 6),
        (spaces.Box(0, 2, (2,), np.int64), 6, 6),
        (spaces.Box(-1.0, 1.0, (2, 3)), 6, 12),
        (spaces.Tuple((spaces.Discrete(2), BOX)), 4, 6),
    ],
    ids=str,
)
def test_policy_outputs(space: spaces.Space[Any], outputs: int, with_std: int) -> None:
    assert policy_outputs(space) == outputs
    assert policy_outputs(space, state_dependent_std=True) == with_std


def test_network_equal_to_the_default_learns_the_same() -> None:
    """The default network, given as a custom network, has the same parameters after training up to rounding."""

    class Same(nn.Module):
        def __init__(self, observation_space: Any, action_space: Any, generator: Any) -> None:
            super().__init__()
            self.inner = default

        def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
            actor, critic = self.inner.hidden(observation)
            return self.inner.policy_head.linear(actor), self.inner.value_head(critic).squeeze(-1)

    agent, environment = made("A2C", network=None, hidden=(8,))
    default = copy.deepcopy(agent.networks)
    rein.train(agent, environment, env_steps=96)
    custom, environment = made("A2C", network=Same)
    rein.train(custom, environment, env_steps=96)
    learned = dict(agent.networks.named_parameters())
    for name, x in custom.networks.network.inner.named_parameters():
        if "log_std" not in name:
            torch.testing.assert_close(x, learned[name], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(custom.networks.policy_head.log_std, agent.networks.policy_head.log_std)


class Recorder(nn.Module):
    """Network that keeps its last observation."""

    def __init__(self, observation_space: Any, action_space: Any, generator: Any) -> None:
        super().__init__()
        self.space, self.weight = observation_space, nn.Parameter(torch.zeros(()))

    def forward(self, observation: Any) -> tuple[Tensor, Tensor]:
        self.seen = observation
        rows = len(next(leaf for _, leaf in leaves(observation)))
        return torch.zeros(rows, 2) + self.weight, torch.zeros(rows) + self.weight


TREE = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (40, 40, 3), np.uint8),
        "cell": spaces.Discrete(4, start=3),
        "set": spaces.Dict({"items": spaces.Box(-1.0, 1.0, (5, 2)), "present": spaces.MultiBinary(5)}),
    }
)
OBSERVATION = {
    "camera": torch.full((3, 40, 40, 3), 7, dtype=torch.uint8),
    "cell": torch.tensor([3, 4, 6]),
    "set": {"items": torch.linspace(-1.0, 1.0, 30).view(3, 5, 2), "present": torch.ones(3, 5, dtype=torch.int8)},
}


def test_network_receives_observations_unchanged() -> None:
    agent = rein.PPO(TREE, spaces.Discrete(2), network=Recorder)
    assert agent.networks.network.seen["cell"].tolist() == [3, 3]  # the trial has valid numbers
    assert agent.networks.network.space == TREE
    agent.policy().select_action(OBSERVATION)
    assert first_difference(agent.networks.network.seen, OBSERVATION) is None


def test_normalization_changes_floating_point_numbers_only() -> None:
    agent = rein.PPO(TREE, spaces.Discrete(2), network=Recorder, normalize_observation=True)
    agent.networks.preprocess.update(OBSERVATION)
    agent.policy().select_action(OBSERVATION)
    seen = agent.networks.network.seen
    items = OBSERVATION["set"]["items"]
    expected = (items - items.mean(0)) / items.var(0, correction=0).add(1e-8).sqrt()
    torch.testing.assert_close(seen["set"]["items"], expected, rtol=1e-3, atol=1e-3)
    seen["set"]["items"] = items
    assert first_difference(seen, OBSERVATION) is None


def test_observation_without_first_dimension_is_rejected() -> None:
    agent = rein.PPO(BOX, spaces.Discrete(2), network=ActorCritic)
    with pytest.raises(ValueError, match=r"got one of shape \(2,\) for Box.*add a first dimension of 1"):
        agent.policy().select_action(torch.zeros(2))


class Wrong(nn.Module):
    """Network that returns the given value."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found, self.weight = found, nn.Parameter(torch.zeros(()))

    def forward(self, *arguments: Any) -> Any:
        return self.found


def wrong(found: Any) -> Any:
    return lambda observation_space, action_space, generator: Wrong(found)


ROWS, TABLE = torch.zeros(2), torch.zeros(2, 2)
OUTPUTS = r"outputs of the policy \(2, 2\), values \(2,\)"


@pytest.mark.parametrize(
    ("case", "options", "got", "expected"),
    [
        (
            "PPO",
            {"network": wrong(torch.zeros(2, 2))},
            r"\(2, 2\) of torch.float32",
            r"outputs of the policy \(2, 2\), va",
        ),
        (
            "PPO",
            {"network": wrong((torch.zeros(2, 3), ROWS))},
            r"\(2, 3\) of",
            r"outputs of the policy \(2, 2\), values",
        ),
        ("PPO", {"network": wrong((TABLE, torch.zeros(2, 1)))}, r".*\(2, 1\) of", OUTPUTS),
        ("PPO", {"network": wrong((TABLE, ROWS.double()))}, r".*\(2,\) of torch.float64", OUTPUTS),
        ("PPO", {"network": wrong([TABLE, ROWS])}, "a list", OUTPUTS),
        ("DQN", {"network": wrong(torch.zeros(2, 3))}, r"\(2, 3\) of", r"action values \(2, 2\) of .*Discrete\(2\)"),
        ("PQN", {"network": wrong((TABLE, ROWS))}, "a tuple", r"action values \(2, 2\)"),
        ("SAC", {"actor": Deterministic}, r"\(2, 1\) of", r"means and log standard deviations \(2, 2\)"),
        ("SAC", {"critic": wrong(torch.zeros(2, 1))}, r"\(2, 1\) of", r"values \(2,\) of"),
        ("TD3", {"actor": Policy}, r"\(2, 2\) of", r"actions before tanh \(2, 1\)"),
        ("IQL", {"value": wrong(torch.zeros(2, 1))}, r"\(2, 1\) of", r"values \(2,\)"),
        ("DiscreteSAC", {"critic": wrong(ROWS)}, r"\(2,\) of", r"action values \(2, 2\)"),
    ],
)
def test_wrong_output_is_rejected(case: str, options: dict[str, Any], got: str, expected: str) -> None:
    with pytest.raises(
        ValueError, match=rf"with two observations, \(2, 1\) of .*returned {got}.*; expected {expected}"
    ):
        made(case, **options)


def test_error_in_the_trial_notes_the_arguments() -> None:
    with pytest.raises(RuntimeError) as raised:
        made("SAC", critic=lambda *given: nn.Bilinear(1, 3, 1))
    expected = "critic: Bilinear was called with two observations, (2, 1) of torch.float32 and (2, 1) of torch.float32"
    assert raised.value.__notes__ == [expected]


@pytest.mark.parametrize(
    ("case", "option"), [("PPO", "network"), ("DQN", "network"), ("SAC", "actor"), ("SAC", "critic")]
)
def test_invalid_factory_is_rejected(case: str, option: str) -> None:
    call = rf"pass a factory that is called as {option}\(observation_space, action_space, generator\)"
    with pytest.raises(TypeError, match=f"{option} is a module: {call}"):
        made(case, **{option: nn.Linear(1, 1)})
    with pytest.raises(TypeError, match=f"{option} is 'mlp': {call}"):
        made(case, **{option: "mlp"})
    with pytest.raises(TypeError, match=rf"{option}: expected a torch\.nn\.Module from the factory, got int"):
        made(case, **{option: lambda *given: 3})


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_dropout_is_rejected_unless_its_rate_is_zero(rate: float) -> None:
    def factory(*given: Any) -> nn.Module:
        module = ActorCritic(*given)
        module.policy.layers.append(nn.Dropout(rate))
        return module

    if not rate:
        made("PPO", network=factory)
        return
    with pytest.raises(ValueError, match="network: ActorCritic contains Dropout, whose output"):
        made("PPO", network=factory)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("PPO", {"hidden": (8,)}),
        ("PPO", {"shared": True}),
        ("PPO, spread", {"log_std": -1.0}),
        ("DQN", {"dueling": True}),
        ("SAC", {"activation": "tanh"}),
        ("IQL", {"encoder": Policy}),
    ],
)
def test_options_of_replaced_networks_are_rejected(case: str, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=rf"\({name}=.*{name} has no effect with (network|actor=.*critic)="):
        made(case, **options)


def test_summary_lists_the_layers() -> None:
    assert "critics.networks.1.layers.0  Linear" in str(made("SAC")[0].summary())


def attention(seed: int = 0) -> tuple[Any, Any]:
    environment = rein.make(EXAMPLE["FindOutlier"], num_envs=16, seed=0)
    options = {"learning_rate": 3e-3, "rollout_steps": 4, "minibatches": 2}
    return rein.PPO(environment, network=EXAMPLE["SetNetwork"], seed=seed, **options), environment


def test_loading_needs_the_factory_again(tmp_path: Path) -> None:
    agent, environment = attention()
    assert agent.config["network"] == "SetNetwork"
    rein.save(agent, tmp_path / "agent.h5")
    observation = environment.reset()
    with pytest.raises(CheckpointError, match=r"cannot describe network=SetNetwork; pass network= to load_agent"):
        rein.load_agent(tmp_path / "agent.h5")
    policy = rein.load_policy(tmp_path / "agent.h5", network=EXAMPLE["SetNetwork"])
    assert torch.equal(policy.select_action(observation)[0], agent.policy().select_action(observation)[0])
    partial = functools.partial(EXAMPLE["SetNetwork"], features=16)
    rein.save(rein.PPO(environment, network=partial), tmp_path / "partial.h5")
    with pytest.raises(CheckpointError, match=r"cannot describe network=SetNetwork; pass network= to load_agent"):
        rein.load_agent(tmp_path / "partial.h5")


@pytest.mark.slow
def test_attention_is_exported() -> None:
    class Greedy(nn.Module):
        def __init__(self, agent: Any) -> None:
            super().__init__()
            self.networks, self.act = agent.networks, agent.act

        def forward(self, observation: Any) -> Tensor:
            return self.act(observation, False)

    agent, environment = attention()
    observation = environment.reset()
    batch = torch.export.Dim("batch")
    shapes = {"observation": {name: {0: batch} for name in observation}}
    program = torch.export.export(Greedy(agent), (observation,), dynamic_shapes=shapes).module()
    few = {name: x[:5] for name, x in observation.items()}
    assert torch.equal(program(few), agent.policy().select_action(few)[0])


def test_page_shows_the_network_of_the_example() -> None:
    root = Path(__file__).parents[2]
    (shown,) = re.findall(
        r"^```python\n(class SetNetwork.*?)^```$", (root / "docs/how_to/custom_networks.md").read_text(), re.M | re.S
    )
    assert shown.strip() in (root / "examples/attention.py").read_text()
    assert len([line for line in shown.splitlines() if line.strip()]) <= 25


@pytest.mark.slow
def test_attention_learns_to_compare_items(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "examples/attention.py"), run_name="__main__")
    before, after = (int(number) for number in re.findall(r"(\d+)%", capsys.readouterr().out))
    assert before < 50 and after > 85


@pytest.mark.default_cases("PPO", "DQN")
@pytest.mark.parametrize("case", ["PPO", "DQN", "PQN", "DiscreteSAC", "DiscreteSAC, critic"])
def test_network_takes_valid_actions_only(case: str) -> None:
    environment = MaskedGrid(num_envs=8, seed=0)
    kind, _, options = KINDS[case]
    agent = kind(environment, **options, seed=0)
    rein.train(agent, environment, env_steps=256)
    assert agent.updates and not environment.invalid_actions
    shapes = {name: tuple(x.shape) for name, x in agent.networks.named_parameters() if name.endswith("layers.0.weight")}
    assert shapes and {*shapes.values()} == {(8, 4)}  # the mask is not an input


def test_actor_counts_a_row_without_valid_actions_as_unmasked() -> None:
    environment = MaskedGrid(num_envs=8, seed=0)
    kind, _, options = KINDS["DiscreteSAC"]
    networks, observation = kind(environment, **options, seed=0).networks, environment.reset()
    observation["action_mask"] = torch.zeros_like(observation["action_mask"])
    free = {"observation": observation["observation"]}
    found, expected = (networks.actor(networks.preprocess(x)).log_probs for x in (observation, free))
    assert torch.equal(found, expected)


class Asymmetric(ActorCritic):
    """Network whose values depend on the critic observation (B, 3), which a deployed policy lacks."""

    def forward(self, observation: Any, critic_observation: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if critic_observation is None:
            critic_observation = torch.zeros(len(observation), 3)
        return self.policy(observation), self.value(observation, critic_observation)


PRIVILEGED = spaces.Dict({"observation": BOX, "critic_observation": spaces.Box(-1.0, 1.0, (3,))})


@pytest.mark.parametrize("case", ["PPO", "SAC", "IQL", "TD3"])
def test_critic_observation_is_the_last_argument_of_values(case: str) -> None:
    kind, _, options = KINDS[case]
    options = {**options, "network": Asymmetric} if case == "PPO" else options
    agent = kind(PRIVILEGED, BOX, seed=0, **options)
    seen = {"observation": torch.rand(4, 2), "critic_observation": torch.rand(4, 3)}
    for _ in range(4):
        action, extras = agent.select_action(seen)
        no = torch.zeros(4, dtype=torch.bool)
        agent.record_observation(rein.Transition(seen, action, torch.ones(4), no, no, seen, ~no, extras))
        agent.optimize_model()
    assert agent.updates
    networks = agent.networks
    x, other = networks.preprocess(seen), networks.preprocess({**seen, "critic_observation": torch.zeros(4, 3)})
    if case == "PPO":
        assert not torch.equal(networks.value(x), networks.value(other))
    else:
        assert not torch.equal(networks.critics(x, action), networks.critics(other, action))
    acting = agent.policy().select_action
    assert torch.equal(acting(seen)[0], acting({"observation": seen["observation"]})[0])


def normalized(factory: Any) -> Any:
    """Return a factory whose modules have spectral normalization, which changes buffers in training mode."""

    def build(*given: Any) -> nn.Module:
        module = factory(*given)
        for layer in [layer for layer in module.modules() if type(layer) is nn.Linear]:
            spectral_norm(layer)
        return module

    return build


@pytest.mark.parametrize("case", ["PPO, parts", "DQN", "SAC", "TD3"])
def test_spectral_norm_changes_only_when_the_agent_learns(case: str) -> None:
    factories = {name: value for name, value in KINDS[case][2].items() if callable(value)}
    agent, environment = made(case, **{name: normalized(value) for name, value in factories.items()})
    buffers = dict(agent.networks.named_buffers())

    def check_acting() -> None:
        before = copy_state(buffers)
        for policy in (agent.policy(), agent.policy(deterministic=False)):
            rein.evaluate(policy, environment, episodes=4)
        agent.select_action(environment.reset())
        agent.observe_reset(environment.reset(), torch.ones(4, dtype=torch.bool))
        assert first_difference(before, buffers) is None

    check_acting()
    before = copy_state(buffers)
    rein.train(agent, environment, env_steps=48)
    assert first_difference(before, buffers) is not None
    check_acting()


class Modes(rein.Agent):
    """Agent that records the modes of its modules."""

    def build(self, generator: torch.Generator) -> None:
        self.layers = nn.Sequential(nn.Linear(1, 2), nn.Dropout(0.5))
        self.more = {"norms": [nn.BatchNorm1d(1)]}
        self.fixed = nn.BatchNorm1d(1).eval()
        self._seen: list[tuple[str, list[bool]]] = []

    def _record(self, what: str) -> None:
        modules = (*self.layers.modules(), *self.more["norms"], self.fixed)
        self._seen.append((what, [module.training for module in modules]))

    def act(self, observation: Any, explore: Any) -> Any:
        self._record("act")
        return torch.zeros(len(observation), dtype=torch.int64)

    def update(self, batch: Any) -> dict[str, Tensor]:
        self._record("update")
        return {}


class MoreModes(Modes):
    def update(self, batch: Any) -> dict[str, Tensor]:
        super().update(batch)
        self._record("update")
        raise ArithmeticError


def test_modules_are_in_training_mode_only_in_update() -> None:
    environment = Corridor(4, length=3, seed=0)
    agent = MoreModes(environment, seed=0)
    with pytest.raises(ArithmeticError):
        rein.train(agent, environment, env_steps=4)
    rein.evaluate(agent, environment, episodes=1)
    expected = {"act": [False] * 5, "update": [True] * 4 + [False]}
    assert [what for what, _ in agent._seen[:4]] == ["act", "update", "update", "act"]
    assert all(modes == expected[what] for what, modes in agent._seen)
