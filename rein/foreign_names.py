"""Names of other libraries and rein's names for the same things.

Agents, functions and the command line use it to explain an unknown option, method or command. The names come from
Stable-Baselines3, CleanRL, TorchRL, RLlib, Tianshou, PyTorch Lightning and ignite.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import sys
from collections.abc import Iterable
from typing import Any

# rein's options -> options of other libraries. The first one that exists in the called function is suggested.
_OPTIONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("learning_rate",), "lr step_size critic_lr q_lr"),
    (("actor_learning_rate", "learning_rate"), "actor_lr policy_lr"),
    (("gamma",), "discount discount_factor gamma_"),
    (("temperature", "learning_rate"), "alpha"),
    (("gae_lambda",), "lmbda lam lambda_"),
    (("rollout_steps", "n_step", "iterations"), "n_steps"),
    (("rollout_steps", "iterations"), "num_steps frames_per_batch rollout_length"),
    (("minibatches",), "batch_size num_minibatches n_minibatches"),
    (("minibatches", "batch_size"), "mini_batch_size minibatch_size"),
    (("update_epochs", "epochs"), "n_epochs num_epochs num_sgd_iter ppo_epochs"),
    (("epochs",), "update_epochs max_epochs epoch"),
    (("iterations",), "epoch_length steps_per_epoch"),
    (("clip",), "clip_range clip_coef clip_param clip_epsilon eps_clip"),
    (("value_clip",), "clip_range_vf clip_vloss vf_clip_param clip_value clip_value_loss"),
    (("entropy_coefficient", "temperature"), "ent_coef entropy_coef entropy_coeff"),
    (("value_coefficient",), "vf_coef value_coef vf_loss_coeff critic_coeff"),
    (("normalize_advantage",), "norm_adv"),
    (("max_grad_norm",), "grad_clip clip_grad_norm gradient_clip_val"),
    (("normalize_observation",), "norm_obs"),
    (("normalize_reward",), "norm_reward"),
    (("capacity",), "buffer_size memory_size replay_size"),
    (("learning_starts",), "start_steps init_random_frames"),
    (("train_frequency",), "train_freq"),
    (("update_to_data",), "gradient_steps utd_ratio"),
    (("tau",), "polyak"),
    (("target_frequency",), "target_update_interval target_network_frequency"),
    (("actor_frequency",), "policy_delay policy_frequency"),
    (("noise",), "action_noise exploration_noise"),
    (("target_noise",), "target_policy_noise"),
    (("target_noise_clip",), "noise_clip"),
    (("epsilon",), "exploration_fraction exploration_initial_eps exploration_final_eps eps start_e end_e"),
    (("hidden",), "net_arch hidden_sizes hidden_size hidden_dim layers"),
    (("activation",), "activation_fn"),
    (("encoder",), "features_extractor_class features_extractor"),
    (("actor", "encoder"), "network"),
    (("network", "encoder"), "actor"),
    (("network",), "critic"),
    (("network", "critic"), "q_network"),
    (("action_mask",), "action_masks"),
    (("num_envs",), "n_envs nenvs num_workers"),
    (("episodes",), "n_eval_episodes num_episodes eval_episodes"),
    (("env_steps", "max_episode_steps"), "max_steps"),
    (("max_episode_steps",), "time_limit"),
    (("env_steps",), "total_timesteps timesteps num_timesteps n_timesteps total_frames total_steps num_env_steps"),
    (("seed",), "random_seed"),
    (("device",), "cuda use_cuda gpu"),
    (("threads",), "num_threads"),
    (("checkpoint_every",), "save_freq"),
    (("run",), "log_dir logdir output exp_name run_name name"),
)
OPTIONS: dict[str, tuple[str, ...]] = {name: options for options, names in _OPTIONS for name in names.split()}

# Option whose meaning differs from the suggested option -> how to translate its value.
NOTES: dict[str, str] = {
    "batch_size": "the number of minibatches in a pass: rollout_steps * num_envs / batch_size",
    "minibatch_size": "the number of minibatches in a pass: rollout_steps * num_envs / minibatch_size",
    "exploration_fraction": "a schedule: linear(1.0, 0.05, env_steps=10_000)",
    "exploration_initial_eps": "a schedule: linear(1.0, 0.05, env_steps=10_000)",
    "exploration_final_eps": "a schedule: linear(1.0, 0.05, env_steps=10_000)",
    "clip_vloss": "the clip range, which is clip_coef in CleanRL: value_clip=0.2",
    "vf_clip_param": "the clip range of the value; RLlib clips the squared error instead",
    "gradient_steps": "updates for each env step",
    "net_arch": "a tuple of layer sizes: (64, 64)",
    "activation_fn": "a name: tanh, relu, silu or gelu",
}

_NETWORKS = "give hidden=(64, 64), activation=, encoder=, or custom networks directly"
_HANDLERS = "attach handlers to the loop that rein.training_loop returns, as in @loop.epoch_ended"
_VIDEO = "run `rein evaluate RUN --video FOLDER` afterwards"
_SCHEDULE = "give a schedule, as in learning_rate=linear(3e-4, 0.0, env_steps=100_000)"

# Option without an equivalent option in rein -> what to do instead.
INSTEAD: dict[str, str] = {
    "observation_space": "give the environment first; rein.load_agent(path) builds the agent of a run again",
    "policy": _NETWORKS,
    "policy_kwargs": _NETWORKS,
    "env": "give the environment to rein.train or rein.training_loop",
    "total_timesteps": "use rein.train(..., env_steps=100_000), or stop_at(loop, env_steps=100_000)",
    "eval_env": "attach rein.handlers.evaluate_every to the loop",
    "verbose": "attach rein.handlers.progress or rein.handlers.log to the loop",
    "log_interval": "attach rein.handlers.log to the loop",
    "progress_bar": "attach rein.handlers.progress to the loop",
    "callback": _HANDLERS,
    "callbacks": _HANDLERS,
    "tensorboard_log": "attach a rein.handlers.loggers.TensorBoardLogger to the loop",
    "track": "attach a rein.handlers.loggers.WandbLogger to the loop",
    "wandb": "attach a rein.handlers.loggers.WandbLogger to the loop",
    "capture_video": _VIDEO,
    "render": _VIDEO,
    "algo": "the recipe chooses the algorithm; without a recipe, use --env ID --agent NAME",
    "env_id": "the recipe chooses the environment; without a recipe, use --env ID --agent NAME",
    "anneal_lr": _SCHEDULE,
    "lr_schedule": _SCHEDULE,
    "use_sde": "rein has no state-dependent exploration of this kind",
}

# Metric -> rein's metric.
METRICS: dict[str, str] = {
    **dict.fromkeys(
        ("return", "reward", "ep_return", "ep_reward", "ep_rew_mean", "rollout/ep_rew_mean"), "episode_return"
    ),
    **dict.fromkeys(("episode_reward", "episodic_return", "charts/episodic_return", "score"), "episode_return"),
    **dict.fromkeys(("episode_reward_mean", "mean_reward", "reward_mean", "train/mean_reward"), "episode_return"),
    **dict.fromkeys(("eval/mean_reward", "eval_return", "eval_reward", "test_return"), "evaluation_return"),
    **dict.fromkeys(("length", "ep_len_mean", "rollout/ep_len_mean", "episodic_length"), "episode_length"),
    **dict.fromkeys(("eval/mean_ep_length", "eval_length"), "evaluation_length"),
    **dict.fromkeys(("success_rate", "eval/success_rate", "rollout/success_rate"), "evaluation_success_rate"),
    "lr": "learning_rate",
    "train/learning_rate": "learning_rate",
    "train/loss": "loss",
    "val_loss": "validation_loss",
}

AGENT_METHODS: dict[str, str] = {
    **dict.fromkeys(
        ("learn", "train", "fit", "collect_rollouts", "set_env"), "rein.train(agent, environment, env_steps=100_000)"
    ),
    **dict.fromkeys(
        ("predict", "act", "choose_action", "get_action", "compute_single_action"),
        "agent.policy().predict(observation)",
    ),
    "update": "rein.train(agent, environment, env_steps=100_000), or agent.optimize_model() in a custom loop",
    "get_action_and_value": "agent.select_action(observation)",
    "save": 'rein.save(agent, "agent.h5")',
    "load": 'rein.load_agent("agent.h5")',
    "evaluate": "rein.evaluate(agent.policy(), environment, episodes=10)",
    "get_env": "the environment that you give to rein.train",
    "set_parameters": "rein.load(agent, path)",
    "get_parameters": "agent.state_dict()",
    "parameters": "agent.networks.parameters()",
    "to": "device= of the constructor",
}

POLICY_METHODS: dict[str, str] = {
    **dict.fromkeys(("act", "choose_action", "get_action", "compute_single_action"), "predict(observation)"),
    "forward": "select_action(observation), which returns the action and extras",
}

POLICIES_METHODS: dict[str, str] = {
    "predict": "policies[name].predict(observation), with the number of a learner or the name of a group",
}

ENVIRONMENT_ATTRIBUTES: dict[str, str] = {
    "step": "apply_action(action), which returns a rein.TimeStep",
    "observation_space": "single_observation_space",
    "action_space": "single_action_space",
}

LOOP_METHODS: dict[str, str] = {
    "add_event_handler": "loop.on(name)(handler), or @loop.epoch_ended",
    "add_callback": "loop.on(name)(handler), or @loop.epoch_ended",
    "terminate": "loop.stop()",
    "fit": "loop.run()",
    "learn": "loop.run()",
    "train": "loop.run()",
}

_VECTOR = 'rein.make("CartPole-v1", num_envs=8)'
_NORMALIZED = "the options normalize_observation=True and normalize_reward=True of an agent"

# Class or function of another library -> rein's way to do the same.
EXPORTS: dict[str, str] = {
    "A3C": "rein.A2C, or rein.IMPALA with collection=rein.Asynchronous()",
    "APPO": "rein.IMPALA with collection=rein.Asynchronous()",
    "BaseCallback": "a function of the state, attached with @loop.epoch_ended",
    "CheckpointCallback": "rein.checkpoint",
    "Callback": "a function of the state, attached with @loop.epoch_ended",
    "DummyVecEnv": _VECTOR,
    "DoubleDQN": "rein.DQN, in which double=True is the default",
    "EarlyStopping": "rein.early_stop",
    "EvalCallback": "rein.evaluate_every",
    "MaskablePPO": "rein.PPO, and rein.make(id, action_mask=True)",
    "ModelCheckpoint": "rein.checkpoint",
    "Monitor": "the metrics episode_return and episode_length, which every training loop has",
    "PrioritizedReplayBuffer": "rein.replay.PrioritizedReplay",
    "ProgressBarCallback": "rein.progress",
    "QRDQN": "rein.IQN",
    "RecurrentPPO": "rein.PPO with core=",
    "ReplayBuffer": "rein.replay.Replay",
    "RolloutBuffer": "rein.replay.Rollout",
    "StopTrainingOnNoModelImprovement": "rein.early_stop",
    "StopTrainingOnRewardThreshold": "rein.record_solved",
    "SubprocVecEnv": 'rein.make("CartPole-v1", num_envs=8, workers=8)',
    "SyncVectorEnv": _VECTOR,
    "AsyncVectorEnv": 'rein.make("CartPole-v1", num_envs=8, workers=8)',
    "TRPO": "rein.PPO",
    "Trainer": "rein.training_loop, or rein.train",
    "VecNormalize": _NORMALIZED,
    "evaluate_policy": "rein.evaluate",
    "make_vec": _VECTOR,
    "make_vec_env": _VECTOR,
}

COMMANDS: dict[str, str] = {
    "learn": "train",
    "run": "train",
    "fit": "train",
    "enjoy": "evaluate",
    "eval": "evaluate",
    "test": "evaluate",
    "play": "evaluate",
    "tune": "sweep",
    "search": "sweep",
    "optimize": "sweep",
    "continue": "resume",
    "restart": "resume",
    "info": "show",
    "ls": "list",
    "recipes": "list",
    "curves": "plot",
    "check": "verify",
    "version": "--version",
}


def unknown_option(caller: str, name: str, option_names: list[str], flags: bool) -> str:
    """Return the message about an option that a function or a command does not have."""
    return f"{caller}: there is no option {written(name, flags)}{suggestion(name, option_names, flags)}"


def missing_attribute(owner: str, name: str, table: str) -> str:
    """Return the message about an attribute that a class does not have. `table` is a name of a dictionary above."""
    instead = globals()[table].get(name)
    return f"{owner} has no {name}; use {instead}" if instead else f"{owner!r} object has no attribute {name!r}"


def written(name: str, flags: bool) -> str:
    """Return the name as in Python, or as a flag of the command line."""
    return f"--{name.replace('_', '-')}" if flags else name


def suggestion(name: str, names: list[str], flags: bool = False) -> str:
    """Return the end of a message about an unknown name: rein's name for it, the closest one, or all `names`."""
    for option in OPTIONS.get(name, ()):
        if option in names:
            return f"; use {written(option, flags)}" + (f" ({NOTES[name]})" if name in NOTES else "")
    if name in INSTEAD:
        return f"; {INSTEAD[name]}"
    if near := difflib.get_close_matches(name, names, 1):
        return f"; did you mean {written(near[0], flags)}?"
    return f". Its options are {', '.join(written(option, flags) for option in names)}"


def similar_metric(name: str, metric_names: Iterable[str]) -> str | None:
    """Return the known metric that a wrong name probably means, or None."""
    plain = {re.sub(r"[^a-z0-9]+", "_", metric.lower()): metric for metric in sorted(metric_names)}
    if METRICS.get(name) in plain.values():
        return METRICS[name]
    near = difflib.get_close_matches(re.sub(r"[^a-z0-9]+", "_", name.lower()), plain, 1, cutoff=0.75)
    return plain[near[0]] if near else None


def instead_of(value: Any) -> str:
    """Return what to pass instead of an object that is neither an environment nor a space."""
    if isinstance(value, str) and value.endswith("Policy"):
        return "rein needs no policy name; give an environment first, and options such as hidden= by keyword"
    if isinstance(value, str) or hasattr(value, "unwrapped"):
        return "give an environment that rein.make(id_or_factory, num_envs) returns"
    return "give an environment, or the observation space and the action space of one environment"


def agents_for(observation_space: Any, action_space: Any) -> str:
    """Return the names of the agents of rein that support these spaces."""
    package: Any = sys.modules["rein.agents"]  # imports its agents when they are read
    names = []
    for name in package.__all__:
        kind = getattr(package, name)
        if (
            isinstance(kind, type)
            and hasattr(kind, "check_spaces")
            and not kind.__module__.startswith("rein.agents.base.")
        ):
            with contextlib.suppress(ValueError):
                kind.check_spaces(observation_space, action_space)
                names.append(name)
    return " or ".join([", ".join(names[:-1]), *names[-1:]])
