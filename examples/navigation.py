"""Train one policy that all agents of a multi-agent environment share, evaluate it, and record a video of a world."""

import rein

environment = rein.envs.Navigation(worlds=32, agents=4, early_leave=True, seed=0)
agent = rein.PPO(
    environment, learning_rate=3e-3, gamma=0.97, rollout_steps=32, minibatches=8, update_epochs=4, log_std=-0.5, seed=0
)

loop = rein.training_loop(agent, environment, iterations=32)
rein.log(loop, every=10)
loop.run(epochs=80)

test_environment = rein.envs.Navigation(worlds=16, agents=4, early_leave=True, seed=1)
result = rein.evaluate(agent, test_environment, episodes=64)
print(f"return of an agent {result.mean_return:.2f}, of a world {result.world_returns(test_environment).mean():.2f}")
print(f"agents that arrived: {result.terminated.float().mean():.0%}")

film = rein.envs.wrappers.RecordVideo(rein.envs.Navigation(worlds=1, agents=4, early_leave=True, seed=2), "videos")
rein.evaluate(agent, film, episodes=4)
