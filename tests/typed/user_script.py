"""Script of a user. `mypy --strict` and pyright check it, and must reject the options that do not exist."""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

import torch

import rein
from rein.training.supervised import trainer


def train(run: str) -> float:
    env = rein.make("CartPole-v1", num_envs=8, seed=0)
    agent = rein.PPO(env, learning_rate=rein.schedules.linear(3e-3, 0.0, env_steps=100_000), gamma=0.98)
    loop = rein.training_loop(agent, env, store=run)
    rein.checkpoint(loop, every=10)

    @loop.epoch_ended(every=10)
    def report(state: rein.State) -> None:
        print(state.epoch, state.metrics["episode_return"])

    loop.run(epochs=40)
    result: rein.Evaluation = rein.evaluate(agent, rein.envs.CartPole(num_envs=8, seed=1), episodes=20)
    return result.mean_return


def train_supervised(run: str, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = trainer(model, torch.nn.functional.mse_loss, optimizer, run, epochs=10, precision="bfloat16", accumulate=2)
    loop.run(data)


def reject_unknown_options() -> None:
    env = rein.envs.CartPole(num_envs=8)
    rein.PPO(env, lr=1e-3)  # type: ignore[call-arg]
    rein.SAC(env, buffer_size=1000)  # type: ignore[call-arg]
