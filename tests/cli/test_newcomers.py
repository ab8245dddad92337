"""Mistakes of users of other libraries: each error is one line with the mistake and a fix."""

import contextlib
import functools
import inspect
import re

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein import foreign_names
from rein.agents.dqn import DQN
from rein.agents.iql import IQL
from rein.agents.ppo import PPO
from rein.agents.q_learning import QLearning
from rein.agents.sac import SAC
from rein.cli import main
from rein.cli.arguments import parse_options
from rein.cli.catalog import recipe_names
from rein.envs.cartpole import CartPole
from rein.envs.gridworld import Gridworld
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.envs.pendulum import Pendulum
from rein.handlers.evaluate_every import evaluate_every as evaluate_during
from rein.handlers.record_solved import record_solved
from rein.handlers.stop_at import stop_at
from rein.recipes.cartpole_ppo import cartpole
from rein.training.offline import offline_loop
from rein.training.saved_agents import own_agents
from rein.training.supervised import train_step
from tests import programs
from tests.workers import in_workers

VECTOR, BUTTONS = spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2)
NAMED = spaces.Dict({"position": spaces.Box(-1.0, 1.0, (2,)), "velocity": spaces.Box(-1.0, 1.0, (2,))})

COMMANDS = [  # words, and a part of the error message
    ("trian cartpole", "did you mean rein train"),
    ("learn cartpole", "rein train"),
    ("eval RUN", "rein evaluate"),
    ("train --algo ppo --env CartPole-v1", "give --agent as well"),
    ("train cartpol", "'cartpole'"),
    ("train CartPole-v1", "'cartpole'"),
    ("train cartpole_ppo", "'cartpole'"),
    ("train dqn", "'cartpole-dqn'"),
    ("train my_module", "my_module:make_loop"),
    ("train no_such_module:make", "no_such_module"),
    ("train json:make", "no function 'make'"),
    ("train cartpole --lr 1e-3", "--learning-rate"),
    ("train cartpole --total_timesteps=1000", "--env-steps"),
    ("train cartpole --gama 0.9", "--gamma"),
    ("train cartpole --capture-video", "rein evaluate RUN --video"),
    ("train cartpole --algo ppo", "--agent NAME"),
    ("train cartpole 1000", "1000"),
    ("train cartpole --device gpu", "'gpu'"),
    ("train cartpole --env-steps many", "whole number"),
    ("train cartpole --env-steps", "--env-steps"),
    ("train cartpole --env-steps 0", "1 or more"),
    ("train cartpole --epochs 0", "1 or more"),
    ("train cartpole --learning-rate fast", "'fast'"),
    ("train cartpole --learning-rate -1", "learning_rate=-1.0"),
    ("train cartpole --hidden", "one value or more"),
    ("train cartpole --hidden 64,64", "separated by spaces"),
    ("train cartpole --gamma 5", "from 0 to 1"),
    ("train cartpole --num-envs 0", "1 or more"),
    ("train cartpole --threads 0", "1 to"),
    ("train cartpole --threads 999999999", "1 to"),
    ("train gridworld --target-x 9", "9"),
    ("train cartpole --resume", "--run"),
    ("train cartpole --run RUN", "rein resume"),
    ("resume nowhere", "cannot be resumed"),
    ("resume RUN --gamma 0.5", "leave out --gamma"),
    ("evaluate nowhere", "not the folder of a run"),
    ("evaluate RUN --episodes 0", "1 or more"),
    ("show nowhere", "does not exist"),
    ("plot RUN --metric loss", "policy_loss"),
    ("replay RUN", "--episode"),
    ("list cartpole", "cartpole"),
    ("show a b", "options: b"),
    ("compact RUN", "compact: NEW is missing"),
    ("compact a b c", "options: c"),
    ("compact --fast new", "no option --fast"),
    ("evaluate RUN --fps 12", "--video"),
    ("evaluate RUN --render human", "CartPole was not built with render_mode='human'"),
    ("evaluate RUN --render human --video films", "cannot be combined"),
    ("evaluate RUN --best --checkpoint RUN", "cannot be combined"),
    ("export RUN --to csv mine", "--to csv mine: give minari and the id of a dataset"),
    ("export RUN --to minari", "--to minari: give minari and the id of a dataset"),
    ("export RUN --to", "--to"),
    ("export RUN --to onnx policy.pt2", "must end in .onnx"),
    ("export RUN --to onnx a.onnx b.onnx", "give minari"),
    ("export RUN --to onnx --author me", "--author has no effect"),
    ("export RUN --to onnx --env unknown_module:make", "unknown_module"),
    ("plot RUN --field action", "give the number of an episode with --episode N"),
    ("plot RUN --episode 1 --field no_such", "no field 'no_such'; the fields are action"),
    ("plot RUN --episode 99999", "no episode 99999; "),
    ("plot RUN --paths --values", "give one of"),
    ("plot RUN --paths", "need a run in the Gridworld, not in rein.envs.cartpole.CartPole"),
    ("plot RUN RUN --values", "need a single run, got 2"),
    ("plot RUN --output curves.nothing", "nothing"),
    ("plot RUN --x learning_rate", "Population"),
    ("replay RUN --episode 99999", "no episode 99999; "),
    ("replay RUN --episode 1 2 --video film.mp4", "a video shows one episode"),
    ("replay RUN --episode 1 --video no/such/film.mp4", "the folder no/such does not exist"),
    ("replay RUN --episode 1 --env cartpole", "did you mean CartPole-v0"),
    ("replay RUN --episode 1 --video video.txt", ".mp4"),
    ("replay RUN --episode 1 --video video", ".mp4"),
    ("replay RUN --episode 1 --video video.mp4 --fps 0", "--fps 0"),
    ("replay RUN --episode 1 --fps 10", "--video"),
    ("train gridworld --checkpoint-every -1", "--checkpoint-every -1"),
    ("train gridworld --seeds 0-x", "0-9"),
    ("train gridworld --seeds 0-1 --seed 3", "give one of the two"),
    ("train gridworld --seeds 0-1 --jobs 0", "--jobs 0"),
    ("train gridworld --seeds 0-1 --lr 3", "--learning-rate"),
    ("train gridworld --seeds 0-1 --run .", "exists"),
    ("train gridworld --seeds 0-1 --resume", "--run"),
    ("train gridworld --jobs 2", "--seeds"),
    ("train --config missing.toml", "missing.toml"),
    ("train --config", "--config needs a value"),
    ("train --config --quiet", "--config needs a value"),
    ("train --config a --like b", "one of the two"),
    ("train --like missing", "repeated"),
    ("train --env CartPol-v1 --agent ppo", "did you mean CartPole-v0"),
    ("train --env no_module:make --agent ppo", "no module named 'no_module'"),
    ("train --env math:nothing --agent ppo", "math has no function 'nothing'"),
    ("train --env CartPole-v1 --agent pp0", "did you mean 'ppo'"),
    ("train --env CartPole-v1 --agent math:sin", "rein.Agent"),
    ("train --agent ppo", "give --env as well"),
    ("train --env CartPole-v1 --agnet ppo", "did you mean --agent?"),
    ("train --evn CartPole-v1 --agent ppo", "did you mean --env?"),
    ("train --env CartPole-v1 --agent ppo --env-step 9", "did you mean --env-steps?"),
    ("train --env CartPole-v1 --agent ppo --num-env 9", "did you mean --num-envs?"),
    ("train --env CartPole-v1 --agent ppo --learning-rat 1", "did you mean --learning-rate?"),
    ("train --env CartPole-v1 --agent ppo --worker 1", "did you mean --workers?"),
    ("train --env CartPole-v1 --agent ppo --log tensorbord", "tensorbord"),
    ("train cartpole --env CartPole-v1", "give either a recipe"),
    ("resume RUN --env CartPole-v1", "give both --env and --agent"),
    ("sweep gridworld", "--param"),
    ("sweep gridworld --param gamma=0..1 --param gamma=0..1", "twice"),
    ("sweep gridworld --param gamma=0..1 --gamma 0.5", "twice"),
    ("sweep gridworld --param gamma=0..1 --trials 0", "--trials 0"),
    ("sweep gridworld --param gamma=0..1 --run RUN --resume", "remove it"),
    ("sweep gridworld --param gamma=0..1 --run RUN", "not the folder of a sweep"),
    ("sweep gridworld --param gamma=0..1 --gama 0.5", "--gamma"),
    ("tune gridworld", "rein sweep"),
    ("fly", "unknown command 'fly'; the commands are train, resume, sweep, evaluate, list, runs, show, "),
    ("train zzz", f"choose one of {', '.join(recipe_names())}."),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run."""
    folder = tmp_path_factory.mktemp("newcomers") / "run"
    words = ["train", "cartpole", "--num-envs", "4", "--iterations", "40", "--epochs", "2", "--minibatches", "2"]
    main([*words, "--quiet", "--run", str(folder)])
    return folder


@pytest.mark.parametrize(("words", "keyword"), COMMANDS)
def test_command_line_mistake_is_explained_in_one_line(words, keyword, run, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([str(run) if word == "RUN" else word for word in words.split()])
    output = capfd.readouterr().err
    assert ended.value.code == 1
    assert (output.count("\n"), output[:6]) == (1, "rein: ")
    assert keyword in output
    assert not [*tmp_path.glob("runs/*")]


def agent(kind=PPO, action_space=BUTTONS, **options):
    return kind(VECTOR, action_space, **options)


def on_cartpole(**options):
    environment = CartPole(2)
    return PPO(environment.single_observation_space, environment.single_action_space, **options)


def single():
    return gymnasium.make("CartPole-v1")


def loop(**options):
    return rein.training_loop(on_cartpole(rollout_steps=4), CartPole(2), iterations=4, **options)


def options_read_run(agent):
    """Return the options in the `run.json` of an agent."""
    return {name: value for name, value in agent.config.items() if not name.endswith("_space")}


def stored():
    """Return a short run."""
    made = loop(store="stored", epochs=1)
    made.run()
    made.parts["store"].close()
    return rein.open_run("stored")


class Forgetful(gymnasium.Env):
    """Environment whose observations lack a key of the space."""

    observation_space, action_space = NAMED, BUTTONS

    def reset(self, *, seed=None, options=None):
        return {"position": np.zeros(2, np.float32)}, {}

    def step(self, action):
        return {"position": np.zeros(2, np.float32)}, 0.0, False, False, {}


class WithoutSeed(Forgetful):
    """Environment with the interface of Gym."""

    def reset(self):
        return {"position": np.zeros(2, np.float32)}


class WithoutSpaces(gymnasium.Env):
    """Environment that declares no space."""


class WithoutActionSpace(gymnasium.Env):
    """Environment that declares only the space of its observations."""

    observation_space = VECTOR


class Counting:
    """World of PettingZoo with two agents, whose actions begin at 1."""

    possible_agents = ("first", "second")

    def observation_space(self, name):
        return VECTOR

    def action_space(self, name):
        return spaces.Discrete(2 if name == "first" else 3, start=1)

    def close(self):
        pass

    reset = step = close


def step_closed(environment):
    environment.reset()
    environment.close()
    environment.apply_action(torch.zeros(2, dtype=torch.int64))


def assign_handler():
    loop().epoch_ended = print


def lbfgs_step():
    model = torch.nn.Linear(2, 1)
    train_step(model, torch.nn.functional.mse_loss, torch.optim.LBFGS(model.parameters()))


API = {  # mistake, and a part of the error message
    "PPO('MlpPolicy', env)": (lambda: PPO("MlpPolicy", CartPole(2)), "no policy name"),
    "PPO(gymnasium env)": (lambda: PPO(single()), "rein.make"),
    "PPO('CartPole-v1')": (lambda: PPO("CartPole-v1"), "rein.make"),
    "PPO(env, **config)": (lambda: PPO(CartPole(2), **on_cartpole().config), "rein.load_agent"),
    "PPO(env, **options)": (lambda: PPO(CartPole(2), **options_read_run(on_cartpole())), "rein.load_agent"),
    "PPO(env, minibatches > rows)": (lambda: PPO(CartPole(2), rollout_steps=4, minibatches=9), "8 rows"),
    "Population(PPO, minibatches > rows)": (
        lambda: rein.Population(PPO, CartPole(4), learners=2, rollout_steps=4, minibatches=9),
        "8 rows",
    ),
    "Population(learners='2')": (lambda: rein.Population(PPO, CartPole(2), learners="2"), "'2'"),
    "recipe(learners='2')": (lambda: cartpole(learners="2"), "'2'"),
    "PPO()": (PPO, "'env'"),
    "PPO(policy=)": (lambda: agent(policy="MlpPolicy"), "hidden="),
    "PPO(lr=)": (lambda: agent(lr=1e-3), "learning_rate"),
    "QLearning(alpha=)": (lambda: QLearning(BUTTONS, BUTTONS, alpha=0.1), "learning_rate"),
    "PPO(batch_size=)": (lambda: agent(batch_size=64), "minibatches"),
    "SAC(network=)": (lambda: SAC(VECTOR, VECTOR, network=torch.nn.Linear), "use actor"),
    "PPO(verbose=)": (lambda: agent(verbose=1), "rein.handlers"),
    "SAC(ent_coef=)": (lambda: SAC(VECTOR, VECTOR, ent_coef=0.1), "temperature"),
    "SAC for discrete actions": (lambda: agent(SAC), "IQN, PPO, PQN, Rainbow or RecurrentDQN"),
    "IQL for discrete actions": (lambda: agent(IQL), "DiscreteSAC"),
    "DQN for continuous actions": (
        lambda: DQN(VECTOR, VECTOR),
        "use A2C, AWAC, BC, CrossQ, DDPG, IMPALA, IQL, PPO, SAC, TD3 or TQC",
    ),
    "QLearning for vectors": (lambda: agent(QLearning), "DQN"),
    "optimizer='adam'": (lambda: agent(optimizer="adam"), "torch.optim"),
    "optimizer of other parameters": (lambda: agent(optimizer=torch.optim.Adam([torch.zeros(1)])), "torch.optim"),
    "optimizer=LBFGS": (lambda: agent(optimizer=torch.optim.LBFGS), "LBFGS"),
    "optimizer=LBFGS, supervised": (lbfgs_step, "LBFGS"),
    "PPO(device='gpu')": (lambda: agent(device="gpu"), 'device="cuda"'),
    "DQN(device='auto')": (lambda: agent(DQN, device="auto"), 'device="cpu"'),
    "PPO(hidden=64)": (lambda: agent(hidden=64), "(64, 64)"),
    "PPO(activation=nn.ReLU)": (lambda: agent(activation=torch.nn.ReLU), "relu"),
    "PPO(gamma='0.9')": (lambda: agent(gamma="0.9"), "from 0 to 1"),
    "PPO(seed='a')": (lambda: agent(seed="a"), "integer"),
    "Dict({}) observations": (lambda: PPO(spaces.Dict({}), BUTTONS), "empty space"),
    "agent.learn": (lambda: agent().learn(total_timesteps=1000), "rein.train"),
    "agent.act": (lambda: agent().act(None), "'explore'"),
    "PPO.load": (lambda: PPO.load("agent"), "rein.load_agent"),
    "observation without a key": (
        lambda: PPO(NAMED, BUTTONS).policy().select_action({"position": torch.zeros(1, 2)}),
        "'velocity'",
    ),
    "train(total_timesteps=)": (lambda: rein.train(on_cartpole(), CartPole(2), total_timesteps=9), "env_steps"),
    "train(callback=)": (lambda: rein.train(on_cartpole(), CartPole(2), env_steps=9, callback=print), "handlers"),
    "train without a limit": (lambda: rein.train(on_cartpole(), CartPole(2)), "env_steps"),
    "training_loop(total_timesteps=)": (lambda: loop(total_timesteps=9), "env_steps"),
    "training_loop(env, agent)": (lambda: rein.training_loop(CartPole(2), on_cartpole()), "swapped"),
    "PPO(actions, observations)": (
        lambda: rein.training_loop(
            PPO(CartPole(1).single_action_space, CartPole(1).single_observation_space), CartPole(2)
        ),
        "swapped",
    ),
    "training_loop(PPO, env)": (lambda: rein.training_loop(PPO, CartPole(2)), "PPO(...)"),
    "training_loop(agent, gymnasium env)": (
        lambda: rein.training_loop(on_cartpole(), single()),
        "rein.make",
    ),
    "training_loop(agent, 'CartPole-v1')": (
        lambda: rein.training_loop(on_cartpole(), "CartPole-v1"),
        "rein.make",
    ),
    "training_loop(agent, env, 3)": (lambda: rein.training_loop(on_cartpole(), CartPole(2), 3), "HDF5Store"),
    "offline_loop(n_epochs=)": (lambda: offline_loop(SAC(VECTOR, VECTOR), n_epochs=1), "use epochs"),
    "evaluate(policy, gymnasium env)": (
        lambda: rein.evaluate(on_cartpole().policy(), single(), 1),
        "rein.make",
    ),
    "evaluate(policy, gymnasium vector env)": (
        lambda: rein.evaluate(on_cartpole().policy(), gymnasium.make_vec("CartPole-v1", 1), 1),
        "rein.make(environment)",
    ),
    "evaluate in another environment": (lambda: rein.evaluate(on_cartpole(), Gridworld(1), 1), "spaces differ"),
    "evaluate_every in another environment": (
        lambda: evaluate_during(loop(), on_cartpole(), Pendulum(1), episodes=1),
        "spaces differ",
    ),
    "evaluate(env, policy)": (lambda: rein.evaluate(CartPole(1), on_cartpole().policy(), 1), "policy first"),
    "evaluate(n_eval_episodes=)": (
        lambda: rein.evaluate(on_cartpole().policy(), CartPole(1), n_eval_episodes=1),
        "use episodes",
    ),
    "evaluate(episodes=1.5)": (lambda: rein.evaluate(on_cartpole().policy(), CartPole(1), 1.5), "integer"),
    "handlers.evaluate(loop, policy, gymnasium env)": (
        lambda: evaluate_during(loop(), on_cartpole().policy(), single(), episodes=1),
        "rein.make",
    ),
    "CartPole(n_envs=)": (lambda: CartPole(n_envs=4), "num_envs"),
    "CartPole(num_envs=0)": (lambda: CartPole(0), "1 or more"),
    "env.step": (lambda: CartPole(1).step(0), "apply_action"),
    "env.action_space": (lambda: GymnasiumEnvironment("CartPole-v1").action_space, "single_action_space"),
    "rein.make('Pong')": (lambda: rein.make("Pong"), "ALE/Pong-v5"),
    "rein.make('PongNoFrameskip-v4')": (lambda: rein.make("PongNoFrameskip-v4"), "ALE/Pong-v5"),
    "unknown id": (lambda: GymnasiumEnvironment("CartPol-v1"), "CartPole-v1"),
    "GymnasiumEnvironment(action_masks=)": (
        lambda: GymnasiumEnvironment("CartPole-v1", action_masks=True),
        "use action_mask",
    ),
    "GymnasiumEnvironment(env)": (lambda: GymnasiumEnvironment(single()), "lambda"),
    "GymnasiumEnvironment([make])": (lambda: GymnasiumEnvironment([single]), "num_envs="),
    "factory that returns nothing": (lambda: GymnasiumEnvironment(lambda: None), "returned None"),
    "factory that returns an id": (lambda: GymnasiumEnvironment(lambda: "CartPole-v1"), "'CartPole-v1'"),
    "factory of rein's environments": (lambda: GymnasiumEnvironment(CartPole), "use it directly"),
    "factory that returns nothing, processes": (
        lambda: in_workers(functools.partial(int, 1)),
        "gymnasium.Env",
    ),
    "observation of a Dict without a key": (lambda: GymnasiumEnvironment(Forgetful).reset(), "velocity"),
    "old reset(self)": (lambda: rein.make(WithoutSeed).reset(), "def reset(self, *, seed=None, options=None)"),
    "environment without spaces": (lambda: rein.make(WithoutSpaces), "observation_space"),
    "environment without an action space": (lambda: rein.make(WithoutActionSpace), "action_space"),
    "make(mode='foo')": (lambda: rein.make("CartPole-v1", mode="foo"), "'processes', 'threads' or 'sync'"),
    "step after close, Gymnasium": (lambda: step_closed(rein.make("CartPole-v1", 2)), "closed"),
    "step after close": (lambda: step_closed(CartPole(2)), "closed"),
    "Discrete(start=1) in PettingZoo": (lambda: rein.PettingZooEnvironment(Counting), "must start at 0"),
    "loop.epoch_ended = handler": (assign_handler, "loop.epoch_ended(handler)"),
    "loop.epoch_end": (lambda: loop().epoch_end, "epoch_ended"),
    "loop.add_event_handler": (lambda: loop().add_event_handler, "loop.on"),
    "loop.run(max_epochs=)": (lambda: loop().run(max_epochs=3), "use epochs"),
    "loop.run(10)": (lambda: loop().run(10), "iterable"),
    "handler without the state": (lambda: loop().epoch_ended(lambda: None), "state"),
    "handler is a number": (lambda: loop().epoch_ended(3), "function"),
    "epoch_ended(every_n=)": (lambda: loop().epoch_ended(every_n=3), "every"),
    "state.env_steps": (lambda: loop().state.env_steps, "state.clocks.env_steps"),
    "state.metrics[name] = text": (lambda: loop().state.metrics.update(note="text"), "'note'"),
    "stop_at(timesteps=)": (lambda: stop_at(loop(), timesteps=3), "use env_steps"),
    "rein.Ppo": (lambda: rein.Ppo, "rein.PPO"),
    "rein.A3C": (lambda: rein.A3C, "rein.A2C"),
    "rein.handlers.EvalCallback": (lambda: rein.handlers.EvalCallback, "rein.evaluate_every"),
    "run.episodes['returns']": (lambda: stored().episodes["returns"], "return, "),
    "run.epochs['metrics']['loss']": (lambda: stored().epochs["metrics"]["loss"], "policy_loss"),
    "rein.HDF5store": (lambda: rein.HDF5store, "rein.HDF5Store"),
    "open_run of nothing": (lambda: rein.open_run("nowhere"), "does not exist"),
    "load_agent of nothing": (lambda: rein.load_agent("nowhere"), "no checkpoint"),
}


@pytest.mark.parametrize("mistake", API)
def test_python_mistake_is_explained_in_one_line(mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name, spec in gymnasium.registry.items() if "ale_py" in str(spec.entry_point)]:
        monkeypatch.delitem(gymnasium.registry, name)  # of another test in this process
    call, keyword = API[mistake]
    with pytest.raises((rein.ReinError, TypeError, ValueError, AttributeError, KeyError, RuntimeError)) as raised:
        call()
    assert keyword in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
@pytest.mark.parametrize(
    "build",
    [
        agent,
        functools.partial(agent, DQN),
        functools.partial(QLearning, BUTTONS, BUTTONS),
        CartPole,
        Gridworld,
        functools.partial(rein.Loop, lambda state: None),
    ],
)
def test_missing_device_gives_the_same_message_everywhere(build):
    with pytest.raises(ValueError, match='device="cuda": torch finds no such device on this machine; use device="cpu"'):
        build(device="cuda")


def test_env_steps_accept_an_exponent(tmp_path, capsys):
    main(["train", "cartpole", "--num-envs", "4", "--env-steps", "1e2", "--quiet", "--run", str(tmp_path / "run")])
    output = capsys.readouterr().out
    assert "env_steps has reached 100" in output
    assert "not solved: episode_return_100 has no value at the end (threshold 475)" in output


def test_unsolved_run_records_its_last_value(tmp_path, capsys):
    made = loop(epochs=1)
    record_solved(made, "policy_loss", at_least=1e9)
    state = made.run()
    assert state.memory["unsolved/policy_loss 1000000000.0"]["value"] == state.history[-1].metrics["policy_loss"]


def test_folder_name_is_printed_only_for_valid_options(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/cartpole").mkdir(parents=True)
    with pytest.raises(SystemExit):
        main(["train", "cartpole", "--gamma", "5"])
    assert "exists" not in capsys.readouterr().err
    main(["train", "cartpole", "--num-envs", "4", "--env-steps", "64", "--quiet"])
    assert "runs/cartpole exists; this run goes to runs/cartpole-2" in capsys.readouterr().err


def test_unreported_metric_warns_once(caplog):
    made = loop(epochs=3)
    made.metric("mine", "polcy_loss")
    made.run()
    messages = [record.message for record in caplog.records if "mine" in record.message]
    assert len(messages) == 1
    assert "'polcy_loss'" in messages[0]
    assert "policy_loss" in messages[0].replace("polcy_loss", "")


def test_open_run_without_finished_files_raises(tmp_path):
    with (
        contextlib.closing(rein.HDF5Store(tmp_path / "run")) as store,
        pytest.raises(rein.errors.StoreError, match="no file is finished"),
    ):
        rein.open_run(store.path)


@pytest.mark.parametrize("exist", ["error", "resume", "new"])
def test_store_on_a_file_raises(tmp_path, exist):
    (tmp_path / "a_file").write_text("text")
    with pytest.raises(rein.errors.StoreError, match="is a file"):
        rein.HDF5Store(tmp_path / "a_file", exist)


def test_contracts_need_pytest():
    code = "import sys; sys.modules['pytest'] = None; import rein.testing"
    done = programs.run("-c", code, check=False)
    assert done.stderr.splitlines()[-1].startswith("ImportError: rein.testing needs pytest")


def test_options_in_hints_exist():
    functions = [*own_agents().values(), *(getattr(rein, name) for name in ("training_loop", "make", "evaluate"))]
    known = {option for function in functions for option in inspect.signature(function).parameters}
    known |= set(parse_options(cartpole, "x", [])) | {"max_episode_steps", "action_mask"}
    assert {option for options in foreign_names.OPTIONS.values() for option in options} - known == set()


@pytest.mark.parametrize("instead", foreign_names.EXPORTS.values())
def test_names_in_hints_exist(instead):
    for name in re.findall(r"rein\.([\w.]+)", instead):
        functools.reduce(getattr, name.split("."), rein)


def test_agents_in_a_hint_can_be_built():
    with pytest.raises(ValueError, match="use") as raised:
        QLearning(VECTOR, VECTOR)
    names = re.split(", | or ", str(raised.value).partition("; use ")[2])
    assert len(names) == 11
    for name in names:
        agent(getattr(rein, name), action_space=VECTOR)


def test_names_of_other_libraries_are_hidden_from_completion():
    made = agent()
    assert not {"learn", "predict", "save", "load"} & {*dir(made)}
    assert not hasattr(made, "learn")
