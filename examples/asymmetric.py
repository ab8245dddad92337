"""An asymmetric critic: the actor sees noisy measurements, and the critics also see the true state. SAC learns it."""

import math

import torch
from gymnasium import spaces

import rein

PLANE = spaces.Box(-float("inf"), float("inf"), (2,))


class NoisyReach(rein.envs.SimulatedEnvironment):
    """Reach a goal in the plane whose relative position is measured with Gaussian noise.

    An action moves by at most `speed` along each axis. The reward is minus the distance to the goal. An observation
    contains the measurement and the true position.
    """

    single_observation_space = spaces.Box(-float("inf"), float("inf"), (4,))
    single_action_space = spaces.Box(-1.0, 1.0, (2,))

    def __init__(self, num_envs=4, *, noise=1.0, speed=0.3, seed=None, max_episode_steps=20, device="cpu"):
        self.noise, self.speed = noise, speed
        super().__init__(num_envs, seed=seed, max_episode_steps=max_episode_steps, device=device)

    def initial_state(self, seeds):
        """Draw the goal and the noise of all steps, since an episode is determined by its seed and its actions."""
        rows = 2 * (self.max_episode_steps + 1)
        variable = torch.arange(2 + 2 * rows, device=seeds.device)[:, None]
        goal, radius, angle = rein.ops.random.uniform(seeds, variable).split([2, rows, rows])
        normal = (-2.0 * (1.0 - radius).log()).sqrt() * (2.0 * math.pi * angle).cos()
        return torch.cat([2.0 * goal - 1.0, torch.zeros_like(goal[:1]), self.noise * normal])

    def observe(self, state):
        goal, step, noise = state[:2], state[2].long(), state[3:].unflatten(0, (-1, 2))
        return torch.cat([goal + noise[step, :, torch.arange(len(step))].T, goal])

    def dynamics(self, state, action):
        goal = state[:2] - self.speed * action.T.clamp(-1.0, 1.0)
        state = torch.cat([goal, state[2:3] + 1.0, state[3:]])
        return state, -goal.norm(dim=0), torch.zeros(self.num_envs, dtype=torch.bool)


class Sensors(rein.envs.wrappers.Wrapper):
    """Observe the measurement only. With `privileged`, the true position is the critic observation."""

    def __init__(self, inner, privileged):
        self.inner, self.privileged = inner, privileged

    @property
    def single_observation_space(self):
        return spaces.Dict(observation=PLANE, critic_observation=PLANE) if self.privileged else PLANE

    def _begin(self, observation, mask):
        measured, true = observation.split(2, 1)
        return {"observation": measured, "critic_observation": true} if self.privileged else measured

    def _step(self, action, mask):
        step = self._step_inner(action, mask)
        first, last = self._begin(step.observation, mask), self._begin(step.final_observation, mask)
        return step._replace(observation=first, final_observation=last)


def mean_return(agent, **options):
    """Evaluate the greedy policy of an agent without the critic observation."""
    environment = Sensors(NoisyReach(256, seed=1_000_000, **options), privileged=False)
    return rein.evaluate(agent.policy(), environment, episodes=256).mean_return


if __name__ == "__main__":
    for privileged in (True, False):
        environment = Sensors(NoisyReach(seed=0), privileged)
        agent = rein.SAC(
            environment,
            hidden=(64, 64),
            learning_rate=1e-3,
            batch_size=128,
            learning_starts=256,
            gamma=0.95,
            update_to_data=0.5,
            seed=0,
        )
        rein.train(agent, environment, env_steps=2_000, progress=False)
        print(f"critic observation: {privileged}, mean return: {mean_return(agent):.1f}")
