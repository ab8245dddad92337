"""Stored episodes are reproduced bit by bit, and differences are found."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
import rein.envs
from rein.cli import main
from rein.cli.rebuild import NOT_REBUILT, Described, environment_of, own_environments
from rein.envs.cartpole import CartPole
from rein.envs.gridworld import Gridworld
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.envs.wrappers.observations import FrameStack
from rein.envs.wrappers.record_video import RecordVideo
from rein.envs.wrappers.rewards import ClipReward
from rein.envs.wrappers.wrapper import Wrapper
from rein.episodes.episode_replay import clip, replay
from rein.ops.trees import leaves
from tests.workers import in_workers

NATIVE = {
    name: kind
    for name, kind in own_environments().items()
    if not issubclass(kind, Wrapper) and not inspect.isabstract(kind) and not kind.__name__.startswith("_")
}


class Random(rein.Agent):
    """Agent that acts at random, also beyond bounds, and does not learn."""

    def build(self, generator: torch.Generator) -> None: ...

    def act(self, observation: Any, explore: bool | float) -> torch.Tensor:
        rows = len(next(iter(leaves(observation)))[1])
        if isinstance(self.action_space, spaces.Discrete):
            return torch.randint(int(self.action_space.n), (rows,), generator=self.generator)
        return torch.rand(rows, *self.action_space.shape, generator=self.generator) * 2.4 - 1.2

    def update(self, batch: Any) -> dict[str, torch.Tensor]:
        return {}


def record(environment: Any, path: Path, episodes: int, **options: Any) -> rein.Run:
    """Return a run with at least this number of episodes, acting at random."""
    store = rein.HDF5Store(path, exist="error")
    loop = rein.training_loop(
        Random(environment, seed=0), environment, store, seed=0, iterations=50, epochs=None, **options
    )

    @loop.epoch_ended
    def enough(state: rein.State) -> None:
        if state.clocks.episodes >= episodes:
            state.halt_loop("enough")

    loop.run()
    store.close()
    return rein.open_run(path)


def all_of(run: rein.Run, count: int) -> list[Any]:
    return [run.episode(number) for number in run.episodes["id"][:count].tolist()]


def agree(run: rein.Run, count: int) -> None:
    """Check that these episodes are reproduced in the rebuilt environment, with all fields compared."""
    episodes = all_of(run, count)
    assert len(episodes) == count
    assert all(episode.final_observation is not None for episode in episodes)  # compared only if present
    results = replay(environment_of(run), episodes, run=run)
    assert [result.id for result in results] == [episode.id for episode in episodes]
    assert [result.difference for result in results] == [None] * count
    assert {result.compared for result in results} == {("observation", "reward", "terminated", "truncated")}


def test_every_native_environment_is_tested() -> None:
    """Counts all concrete environments except wrappers, including those that cannot be replayed."""
    found = set()
    for module in pkgutil.walk_packages(rein.envs.__path__, "rein.envs."):
        if module.name.startswith(NOT_REBUILT):
            continue
        for name, kind in vars(importlib.import_module(module.name)).items():
            own = inspect.isclass(kind) and kind.__module__ == module.name and hasattr(kind, "apply_action")
            if own and not (issubclass(kind, Wrapper) or inspect.isabstract(kind) or name.startswith("_")):
                found.add(f"{module.name}.{name}")
    assert found == NATIVE.keys()
    assert {"CartPole", "Gridworld", "Pendulum", "Acrobot", "Turtleworld", "Memory"} <= {
        k.__name__ for k in NATIVE.values()
    }


@pytest.mark.default_cases(every=3)
@pytest.mark.parametrize("name", NATIVE)
def test_native_episodes_are_reproduced(name: str, tmp_path: Path) -> None:
    kind = NATIVE[name]
    limit = {"max_episode_steps": 20} if "max_episode_steps" in inspect.signature(kind).parameters else {}
    agree(record(kind(**{count_option(kind): 8}, seed=3, **limit), tmp_path / "run", 40), 40)


def count_option(kind: Any) -> str:
    return "worlds" if "worlds" in inspect.signature(kind).parameters else "num_envs"


@pytest.mark.default_cases("CartPole-v1-500")
@pytest.mark.parametrize(("name", "limit"), [("CartPole-v1", 500), ("Taxi-v4", 30), ("HalfCheetah-v5", 10)])
def test_gymnasium_episodes_are_reproduced(name: str, limit: int, tmp_path: Path) -> None:
    environment = GymnasiumEnvironment(name, num_envs=8, seed=3, max_episode_steps=limit)
    agree(record(environment, tmp_path / "run", 40), 40)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NATIVE)
def test_long_native_episodes_are_reproduced(name: str, tmp_path: Path) -> None:
    agree(record(NATIVE[name](**{count_option(NATIVE[name]): 8}, seed=3), tmp_path / "run", 20), 20)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["CartPole-v1", "Taxi-v4", "HalfCheetah-v5"])
def test_long_gymnasium_episodes_are_reproduced(name: str, tmp_path: Path) -> None:
    agree(record(GymnasiumEnvironment(name, num_envs=8, seed=3), tmp_path / "run", 20), 20)


def test_wrappers_except_record_video_are_rebuilt(tmp_path: Path) -> None:
    inside = ClipReward(CartPole(num_envs=4, seed=0), -0.5, 0.5)
    run = record(FrameStack(RecordVideo(inside, tmp_path / "videos", every=10**6), 3), tmp_path / "run", 20)
    built = environment_of(run)
    assert (type(built), type(built.inner), type(built.inner.inner)) == (FrameStack, ClipReward, CartPole)
    agree(run, 20)


@pytest.mark.parametrize("observation", ["cell", "vector"])
def test_size_of_a_gridworld_is_rebuilt(observation: str, tmp_path: Path) -> None:
    environment = Gridworld(4, [(1, 0), (8, 0)], seed=0, size=9, observation=observation, max_episode_steps=30)
    run = record(environment, tmp_path / "run", 20)
    assert environment_of(run).size == 9
    agree(run, 20)


def test_episode_cut_by_training_is_reproduced(tmp_path: Path) -> None:
    run = record(Gridworld(8, seed=0), tmp_path / "run", 30, episodic=True)
    cut = ~run.episodes["terminated"]
    assert cut.any()
    assert all(result.difference is None for result in replay(environment_of(run), all_of(run, len(cut))))


def test_raw_reward_is_compared_if_rewards_were_shaped(tmp_path: Path) -> None:
    environment, store = CartPole(num_envs=2, seed=0), rein.HDF5Store(tmp_path / "run")
    loop = rein.training_loop(Random(environment, seed=0), environment, store, iterations=100)

    @loop.on("action_applied")
    def shape(state: rein.State) -> None:
        transition = state.step_state.transition
        state.step_state = state.step_state._replace(transition=transition._replace(reward=transition.reward * 7.0))

    loop.run()
    store.close()
    (result,) = replay(environment_of(rein.open_run(store.path)), all_of(rein.open_run(store.path), 1))
    assert result.difference is None
    assert "raw_reward" in result.compared and "reward" not in result.compared


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> rein.Run:
    return record(CartPole(num_envs=4, seed=1), tmp_path_factory.mktemp("cartpole") / "run", 12)


def changed(episode: Any, name: str, step: int, change: Any) -> Any:
    """Return the episode with another value at a step of a field."""
    values = np.array(episode.fields[name])
    values[step] = change(values[step])
    return episode._replace(fields={**episode.fields, name: values})


def next_float(x: np.ndarray) -> np.ndarray:
    return np.nextafter(x, np.float32(np.inf), dtype=np.float32)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("observation", next_float),
        ("reward", next_float),
        ("terminated", np.logical_not),
        ("truncated", np.logical_not),
        ("action", lambda action: 1 - action),
    ],
)
def test_change_of_one_bit_is_found(cartpole: rein.Run, name: str, change: Any) -> None:
    episodes = all_of(cartpole, 12)
    step = 4
    other = changed(episodes[5], name, step, change)
    results = replay(environment_of(cartpole), [*episodes[:5], other, *episodes[6:]])
    assert [result.difference is None for result in results] == [k != 5 for k in range(12)]
    difference = results[5].difference
    assert difference is not None
    if name == "action":  # its effect appears in the next observation
        assert (difference.step, difference.field) == (step + 1, "observation")
    else:
        assert (difference.step, difference.field) == (step, name)
        assert 0.0 < difference.amount <= 1.0


def test_final_observation_is_compared(cartpole: rein.Run) -> None:
    episode = cartpole.episode(0)
    other = episode._replace(final_observation=next_float(np.array(episode.final_observation)))
    (result,) = replay(environment_of(cartpole), [other])
    assert result.difference is not None
    assert (result.difference.step, result.difference.field) == (episode.length - 1, "final_observation")


def test_negative_zero_differs_from_zero() -> None:
    environment = Gridworld(1, [(0, 1)], seed=0, observation="vector", start_columns=1)
    seed = torch.tensor([5])
    seen = environment.reset_to(seed)
    stored = {"observation": seen.numpy(), "action": np.array([0])}
    assert seen[0, 0] == 0.0
    episode = type("Stored", (), dict(id=0, environment=0, seed=5, length=1, fields=stored, final_observation=None))
    assert replay(environment, [episode])[0].difference is None
    stored["observation"] = np.where(stored["observation"] == 0.0, np.float32(-0.0), stored["observation"])
    difference = replay(environment, [episode])[0].difference
    assert difference is not None and difference.amount == 0.0


def test_names_with_dots_are_distinguished() -> None:
    environment, seed = Gridworld(1, [(0, 1)], seed=0, observation="vector", start_columns=1), torch.tensor([5])

    class Split(Wrapper):
        """The same board twice, under names that are equal when joined by a dot."""

        inner = environment

        def reset_to(self, seeds: torch.Tensor) -> Any:
            return self.split(environment.reset_to(seeds))

        def apply_action(self, action: Any) -> Any:
            step = environment.apply_action(action)
            return step._replace(
                **{name: self.split(getattr(step, name)) for name in ("observation", "final_observation")}
            )

        @staticmethod
        def split(seen: Any) -> Any:
            return {"a.b": seen, "a": {"b": seen}}

    seen = environment.reset_to(seed).numpy()
    for dotted, nested, differs in ((seen, seen, False), (seen + 1, seen, True), (seen, seen + 1, True)):
        stored = {"observation": {"a.b": dotted, "a": {"b": nested}}, "action": np.array([0])}
        episode = type("Stored", (), dict(id=0, environment=0, seed=5, length=1, fields=stored, final_observation=None))
        assert (replay(Split(), [episode])[0].difference is not None) == differs


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda e: e._replace(seed=-1), "its seed is unknown"),
        (lambda e: e._replace(fields={k: v for k, v in e.fields.items() if k != "action"}), "actions were not stored"),
        (lambda e: e._replace(fields={**e.fields, "observation": e.fields["observation"][:, :2]}), "of shape"),
        (lambda e: e._replace(fields={**e.fields, "observation": {"camera": e.fields["observation"]}}), "camera"),
    ],
)
def test_episode_that_cannot_be_replayed_raises(cartpole: rein.Run, change: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replay(environment_of(cartpole), [change(cartpole.episode(0))])


def test_environment_that_is_not_replayable_raises(cartpole: rein.Run) -> None:
    environment = GymnasiumEnvironment("CartPole-v1", replayable=False)
    with pytest.raises(ValueError, match="not replayable"):
        replay(environment, [cartpole.episode(0)])


def test_command_prints_that_episodes_agree(cartpole: rein.Run, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(cartpole.path), "--episode", "3", "7"])
    first, second = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    length = cartpole.episode(3).length
    assert first == f"episode 3: {length} steps replayed; observations and rewards agree bit by bit"
    assert second.startswith("episode 7: ")


def edited(run: rein.Run, folder: Path, change: Any) -> Path:
    """Return a copy of a run with a changed `run.json`."""
    (folder / "trajectories").mkdir(parents=True)
    for file in run.files:
        (folder / "trajectories" / file.name).write_bytes(file.read_bytes())
    info = run.info
    change(info["parts"])
    (folder / "run.json").write_text(json.dumps(info))
    return folder


def test_command_prints_the_difference_and_fails(cartpole: rein.Run, tmp_path: Path, capsys: Any) -> None:
    def shorten(parts: Any) -> None:
        parts["environment"]["config"]["max_episode_steps"] = 2

    with pytest.raises(SystemExit) as ended:
        main(["replay", str(edited(cartpole, tmp_path / "run", shorten)), "--episode", "3"])
    assert ended.value.code == 1
    output = capsys.readouterr().out
    assert re.fullmatch(r"episode 3: differs .* at step 1 \(of \d+ steps, from 0\): truncated by 1\n", output)


def frames_of(film: Path, environment: Any) -> np.ndarray:
    """Return all frames of a video. (imageio's reader leaves its pipes open.)"""
    environment.reset()
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", film, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    pixels = subprocess.run(command, capture_output=True, check=True).stdout
    return np.frombuffer(pixels, np.uint8).reshape(-1, *environment.render(0).shape)


@pytest.mark.parametrize("source", ["native", "adapter"])
def test_video_has_a_frame_per_step(source: str, tmp_path: Path, capsys: Any) -> None:
    make: Any = {"native": CartPole, "adapter": lambda **how: GymnasiumEnvironment("CartPole-v1", **how)}[source]
    run = record(make(num_envs=2, seed=0), tmp_path / "run", 4)
    film = tmp_path / "film.mp4"
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(run.path), "--episode", "2", "--video", str(film)])
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"video: {film}"
    frames = frames_of(film, environment_of(run, render_mode="rgb_array"))
    assert len(frames) == run.episode(2).length
    assert not np.array_equal(frames[0], frames[-1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["film.mp4", "run"]


@pytest.fixture(scope="module")
def in_processes(tmp_path_factory: pytest.TempPathFactory) -> rein.Run:
    """Run whose environments had a process each."""
    environment = in_workers("CartPole-v1", 2, 5, max_episode_steps=30)
    run = record(environment, tmp_path_factory.mktemp("in_processes") / "run", 8)
    environment.close()
    return run


def test_run_in_processes_is_replayed(in_processes: rein.Run, tmp_path: Path, capsys: Any) -> None:
    assert isinstance(environment_of(in_processes), GymnasiumEnvironment)
    agree(in_processes, 8)
    words = ["replay", str(in_processes.path), "--episode", "2", "--video", str(tmp_path / "video.mp4")]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert "agree bit by bit" in capsys.readouterr().out


def test_vector_environment_with_autoreset_is_not_rebuilt(in_processes: rein.Run, tmp_path: Path) -> None:
    def set_autoreset(parts: Any) -> None:
        parts["environment"]["config"]["autoreset_mode"] = "NextStep"

    run = rein.open_run(edited(in_processes, tmp_path / "run", set_autoreset))
    with pytest.raises(ValueError, match="autoreset mode 'NextStep'"):
        environment_of(run)


@pytest.mark.parametrize(
    ("kind", "config", "named"),
    [
        ("pettingzoo.PettingZooEnvironment", {"id": "mpe2:parallel_env"}, "PettingZooEnvironment of mpe2:parallel_env"),
        ("tensors.TensorEnvironment", {"env": "mjlab.Env"}, "TensorEnvironment of mjlab.Env"),
        ("jax.JaxEnvironment", {"env": "brax.Ant"}, "JaxEnvironment of brax.Ant"),
    ],
)
def test_adapter_is_named_if_it_is_not_rebuilt(kind: str, config: Any, named: str, tmp_path: Path) -> None:
    run = Described(tmp_path, {"parts": {"environment": {"type": f"rein.envs.{kind}", "config": config}}})
    with pytest.raises(ValueError, match=f"a {named}, cannot be built from run.json alone; name a function .*--env"):
        environment_of(run)


def test_video_uses_the_frame_rate_of_the_environment_or_option(cartpole: rein.Run, tmp_path: Path) -> None:
    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    for words, fps in (([], "50 fps"), (["--fps", "12"], "12 fps")):
        with pytest.raises(SystemExit):
            main(["replay", str(cartpole.path), "--episode", "1", "--video", str(tmp_path / "video.mp4"), *words])
        text = subprocess.run([ffmpeg, "-i", str(tmp_path / "video.mp4")], capture_output=True, text=True).stderr
        assert f" {fps}" in text


def test_video_without_its_extra_raises(cartpole: rein.Run, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(cartpole.path), "--episode", "3", "--video", str(tmp_path / "film.mp4")])
    assert ended.value.code == 1
    assert "pip install imageio imageio-ffmpeg" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


EVIL = "raise SystemExit('the file chose what to run')"


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts.update(environment={"type": "evil.make", "config": {}}),
        lambda parts: parts.update(environment={"type": "subprocess.Popen", "config": {"args": "true"}}),
        lambda parts: parts.update(environment={"type": "rein.envs.cartpole.torch", "config": {}}),
        lambda parts: parts.update(environment={"type": "rein.cli.play.evaluate", "config": {}}),
        lambda parts: parts.update(environment=adapter("evil:CartPole-v1")),
        lambda parts: parts.update(environment=adapter("GymV26Environment-v0")),
        lambda parts: parts.update(environment=adapter("CartPole-v1", wrapper="<function f at 0x1>")),
        lambda parts: parts.update(environment=["what"], recipe={"config": {"name": "evil:make", "options": {}}}),
        lambda parts: parts.clear(),
        lambda parts: parts["environment"]["config"].update(no_such_option=1),
    ],
)
def test_file_cannot_choose_code(change: Any, cartpole: rein.Run, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = rein.open_run(edited(cartpole, tmp_path / "run", change))
    with pytest.raises(ValueError, match="--env my_module:make"):
        environment_of(run)


def adapter(name: str, **make_kwargs: Any) -> dict[str, Any]:
    config = {"id": name, "num_envs": 1, "seed": 0, "info": {}, "replayable": True, "make_kwargs": make_kwargs}
    return {"type": "rein.envs.gymnasium.adapter.GymnasiumEnvironment", "config": config}


def test_recipe_rebuilds_an_unknown_environment(cartpole: rein.Run, tmp_path: Path) -> None:
    def unknown(parts: Any) -> None:
        parts["environment"]["type"] = "my_module.CartPole"
        parts["recipe"] = {"config": {"name": "cartpole", "options": {"num_envs": 10**12, "hidden": [8]}, "given": []}}

    run = rein.open_run(edited(cartpole, tmp_path / "run", unknown))
    built = environment_of(run)
    assert built.num_envs == 4  # from the stored data, not from the file
    assert replay(built, [run.episode(0)])[0].difference is None


@pytest.mark.parametrize("returns", ["environment", "rein.training_loop(Agent(environment), environment)"])
def test_environment_option_names_a_function(
    returns: str, cartpole: rein.Run, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    agent = "lambda e: rein.agents.ppo.PPO(e.single_observation_space, e.single_action_space)"
    made = "environment = CartPole(num_envs=4)"
    source = f"import rein, rein.agents.ppo\nfrom rein.envs.cartpole import CartPole\nAgent = {agent}\n"
    (tmp_path / "the_module.py").write_text(f"{source}def make():\n    {made}\n    return {returns}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "the_module", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(cartpole.path), "--episode", "1", "--env", "the_module:make"])
    assert ended.value.code == 0
    assert "agree bit by bit" in capsys.readouterr().out


def test_episode_is_replayed_in_its_row(cartpole: rein.Run) -> None:
    """Rows that have finished continue with other actions, which does not affect the other rows."""
    episodes = {episode.environment: episode for episode in all_of(cartpole, 12)}  # the last one of each environment
    watched: list[Any] = []

    class Watched(CartPole):
        def apply_action(self, action: torch.Tensor) -> Any:
            watched.append(action.clone())
            return super().apply_action(action)

    replay(Watched(num_envs=4), list(episodes.values()))
    played = torch.stack(watched).numpy()
    assert sorted(episodes) == [0, 1, 2, 3]
    assert len(played) == max(episode.length for episode in episodes.values())
    for row, episode in episodes.items():
        assert np.array_equal(played[: episode.length, row], episode.fields["action"])


def test_clip_has_a_frame_for_each_state_of_the_episode(tmp_path: Path) -> None:
    run = record(Gridworld(num_envs=2, seed=0, max_episode_steps=6), tmp_path / "run", 4)
    environment = Gridworld(num_envs=2, max_episode_steps=6)
    frames, episode = clip(environment, run.episode(3))
    assert frames.dtype == np.uint8 and len(frames) == episode.length == len(episode.fields["observation"])
    environment.reset_to(torch.tensor([episode.seed] * 2))
    assert np.array_equal(frames[0], environment.render(episode.environment))
    with pytest.raises(ValueError, match="differs"):
        clip(Gridworld(num_envs=2, max_episode_steps=2), run.episode(3))
