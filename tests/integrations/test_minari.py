"""Tests of MinariData: transitions, environment and normalized scores."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import gymnasium
import minari
import numpy as np
import pytest
import torch
from gymnasium import spaces
from minari.data_collector.episode_buffer import EpisodeBuffer

import rein
from rein.agents.bc import BC
from rein.agents.iql import IQL
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.handlers.evaluate_every import evaluate_every
from rein.integrations.minari import MinariData, report_score
from rein.training.offline import fill_replay, offline_loop

PAGE = (Path(__file__).parents[2] / "docs/tutorials/offline.md").read_text(encoding="utf-8")
pytestmark = [  # warnings of Minari about the datasets of these tests
    pytest.mark.filterwarnings("ignore:`eval_env` is set to None:UserWarning"),
    pytest.mark.filterwarnings("ignore:env_spec is None:UserWarning"),
]

SMALL: dict[str, Any] = {"hidden": (8,), "batch_size": 8, "capacity": 4096, "seed": 0}


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary folder for the datasets of a test."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


ABOUT = {"algorithm_name": "random", "author": "me", "author_email": "me", "code_permalink": "none", "description": "x"}


def collect(name: str, environment: Any, episodes: int, steps: int, **about: Any) -> Any:
    """Create a dataset of `episodes` episodes of at most `steps` steps with random actions."""
    environment.action_space.seed(0)
    buffers = []
    for number in range(episodes):
        observations, actions, ends, ended = [environment.reset(seed=number)[0]], [], [], False
        while not ended and len(actions) < steps:
            actions.append(environment.action_space.sample())
            observation, *end, _ = environment.step(actions[-1])
            observations.append(observation)
            ends.append(end)
            ended = end[1] or end[2]
        rewards, terminations, truncations = (list(column) for column in zip(*ends, strict=True))
        columns = {"rewards": rewards, "terminations": terminations, "truncations": truncations}
        buffers.append(EpisodeBuffer(id=number, observations=observations, actions=actions, **columns, infos={}))
    environment.close()
    return minari.create_dataset_from_buffers(name, buffers, env=environment, **{**ABOUT, **about})


def cartpole(**about: Any) -> Any:
    return collect("cartpole/test-v0", gymnasium.make("CartPole-v1"), 5, 15, **about)


def whole(data: MinariData, size: int = 1 << 16) -> list[Any]:
    return list(data.chunks(size))


def test_terminated_and_truncated_episodes_are_distinguished(datasets):
    dataset = cartpole()
    (found,) = whole(MinariData(dataset))
    last = torch.from_numpy(np.cumsum([len(episode) for episode in dataset.iterate_episodes()]) - 1)
    fell = torch.tensor([bool(episode.terminations[-1]) for episode in dataset.iterate_episodes()])
    assert fell.any()
    assert not fell.all()
    assert torch.equal(found.terminated[last], fell)
    assert torch.equal(found.truncated[last], ~fell)
    assert found.terminated.sum() + found.truncated.sum() == len(last)


def test_chunks_contain_whole_episodes(datasets):
    data = MinariData(cartpole())
    parts, (together,) = whole(data, 20), whole(data)
    assert len(parts) > 1
    assert all(bool((part.terminated | part.truncated)[-1]) for part in parts)
    assert torch.equal(torch.cat([part.observation for part in parts]), together.observation)


def test_episodes_can_be_selected_or_filtered(datasets):
    dataset = cartpole()
    lengths = [len(episode) for episode in dataset.iterate_episodes()]
    assert len(whole(MinariData(dataset, [3, 1]))[0].reward) == lengths[1] + lengths[3]
    some = dataset.filter_episodes(lambda episode: bool(episode.terminations[-1]))
    assert len(whole(MinariData(some))[0].reward) == sum(len(episode) for episode in some.iterate_episodes())
    with pytest.raises(ValueError, match="no episode 7; the dataset has 5"):
        MinariData(dataset, [1, 7])


def test_evaluation_uses_the_environment_of_the_dataset(datasets):
    data = MinariData(cartpole(ref_min_score=10.0, ref_max_score=500.0))
    environment = GymnasiumEnvironment(data.environment_spec, num_envs=2, seed=1)
    agent = BC(environment.single_observation_space, environment.single_action_space, **SMALL)
    loop = offline_loop(agent, data, epochs=4, iterations=2)
    evaluate_every(loop, agent.policy(), environment, episodes=2, every=2)
    report_score(loop, data)
    said: list[dict[str, float]] = []
    loop.epoch_ended.attach(lambda state: said.append(dict(state.metrics)))
    loop.run()
    assert ["evaluation_score" in metrics for metrics in said] == [False, True, False, True]
    score = 100.0 * (said[-1]["evaluation_return"] - 10.0) / 490.0
    assert said[-1]["evaluation_score"] == pytest.approx(score)


def test_continuous_actions_are_converted_and_learned(datasets):
    data = MinariData(collect("pendulum/test-v0", gymnasium.make("Pendulum-v1"), 2, 30))
    agent = IQL(data.observation_space, data.action_space, **SMALL)
    assert fill_replay(agent, data) == 60
    assert agent.replay.columns["action"].dtype == torch.float32
    assert not agent.replay.columns["terminated"].any()
    assert data.environment_spec.id == "Pendulum-v1"
    agent.learn(2)


def test_environment_spec_is_the_evaluation_environment(datasets):
    data = MinariData(cartpole(eval_env="CartPole-v0"))
    assert data.dataset.env_spec.id == "CartPole-v1"
    assert data.environment_spec.id == "CartPole-v0"


def test_reference_scores_are_normalized_to_0_and_100(datasets):
    data = MinariData(cartpole(ref_min_score=-50.0, ref_max_score=150.0))
    assert [data.normalized_score(x) for x in (-50.0, 150.0, 50.0, 250.0)] == [0.0, 100.0, 50.0, 150.0]
    assert data.reference_scores == (-50.0, 150.0)


def test_missing_metadata_raises(datasets):
    buffer = EpisodeBuffer(
        id=0,
        observations=[np.zeros(2), np.ones(2)],
        actions=[np.zeros(1, np.float32)],
        rewards=[1.0],
        terminations=[False],
        truncations=[False],
        infos={},
    )
    box = {"observation_space": spaces.Box(-1.0, 1.0, (2,), np.float64), "action_space": spaces.Box(-1.0, 1.0, (1,))}
    dataset = minari.create_dataset_from_buffers("nothing/known-v0", [buffer], **box, **ABOUT)
    data = MinariData(dataset)
    assert data.reference_scores is None
    with pytest.raises(ValueError, match="nothing/known-v0 has no reference scores"):
        data.normalized_score(1.0)
    with pytest.raises(ValueError, match="names no environment"):
        _ = data.environment_spec
    (found,) = whole(data)
    assert found.observation.dtype == torch.float32
    assert found.truncated.tolist() == [True]  # without a recorded end, the episode is truncated


def test_missing_minari_raises_with_install_instructions(monkeypatch):
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ImportError, match=r"pip install minari pillow \("):
        MinariData("cartpole/test-v0")


def test_missing_dataset_raises_the_error_of_minari(datasets):
    with pytest.raises(FileNotFoundError):
        MinariData("cartpole/none-v0")


def test_documentation_example_runs(datasets):
    collect("mujoco/halfcheetah/medium-v0", gymnasium.make("Pendulum-v1"), 3, 50, ref_min_score=-1e3, ref_max_score=0.0)
    text = PAGE[PAGE.index("## Minari") :]
    (program,) = re.findall(r"^```{code-block} python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    program = program.replace("epochs=100", "epochs=1, iterations=5")
    names: dict[str, Any] = {"rein": rein}
    exec(compile(program, "docs/tutorials/offline.md", "exec"), names)
    metrics = names["loop"].state.metrics
    assert metrics["evaluation_score"] == pytest.approx(100.0 + metrics["evaluation_return"] / 10.0)
