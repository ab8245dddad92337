"""A custom environment: a cart on a line must stop at the origin. PPO learns it."""

import torch
from gymnasium import spaces

import rein


class Cart(rein.envs.SimulatedEnvironment):
    """Carts on a line, driven by a force in [-1, 1]. State and observation are position and velocity.

    The reward is minus the distance to the origin. An episode terminates beyond a distance of 3.
    """

    single_observation_space = spaces.Box(-float("inf"), float("inf"), (2,))
    single_action_space = spaces.Box(-1.0, 1.0, (1,))
    initial_range = ((-1.0, 1.0), (0.0, 0.0))  # a random position, at rest

    def __init__(self, num_envs=16, *, power=1.0, seed=None, max_episode_steps=50, device="cpu"):
        self.power = power
        super().__init__(num_envs, seed=seed, max_episode_steps=max_episode_steps, device=device)

    def dynamics(self, state, action):
        """Accelerate for 0.1 s."""
        position, velocity = state  # (N,) each
        velocity = velocity + 0.1 * self.power * action[:, 0].clamp(-1.0, 1.0)
        position = position + 0.1 * velocity
        reward = -position.abs()
        terminated = position.abs() > 3.0
        return torch.stack([position, velocity]), reward, terminated


if __name__ == "__main__":
    environment = Cart(num_envs=64, seed=0)
    agent = rein.PPO(environment, seed=0, learning_rate=3e-3, minibatches=4, update_epochs=10)
    before = rein.evaluate(agent, Cart(num_envs=64, seed=1), episodes=64).mean_return
    rein.train(agent, environment, epochs=30, iterations=64, progress=False)
    after = rein.evaluate(agent, Cart(num_envs=64, seed=1), episodes=64).mean_return
    print(f"mean return before training: {before:.1f}, after: {after:.1f}")
