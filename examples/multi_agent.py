"""Train different policies for the groups of a multi-agent environment: two chasers and a runner."""

from typing import ClassVar

import torch
from gymnasium import spaces

import rein


class Chase(rein.envs.SimulatedWorlds):
    """Two chasers and a faster runner in a square arena. They see their position and the vectors to the others.

    The reward of the runner is the distance to the nearest chaser, and that of both chasers is minus this distance.
    """

    agents = 3
    agent_groups: ClassVar = {"runner": (0,), "chasers": (1, 2)}
    single_observation_space = spaces.Box(-4.0, 4.0, (6,))
    single_action_space = spaces.Box(-1.0, 1.0, (2,))
    initial_range = ((-2.0, 2.0), (-2.0, 2.0))

    def dynamics(self, state, action):
        """Move by at most 0.15 (runner) or 0.1 (chasers) per axis, and stay in the arena."""
        speed_A1 = torch.tensor([[0.15], [0.1], [0.1]])
        moved_WA2 = (state.permute(1, 2, 0) + speed_A1 * action.clamp(-1.0, 1.0)).clamp(-2.0, 2.0)
        distance_W1 = (moved_WA2[:, 1:] - moved_WA2[:, :1]).norm(dim=2).amin(1, keepdim=True)
        reward_WA = torch.cat([distance_W1, -distance_W1, -distance_W1], 1)
        return moved_WA2.permute(2, 0, 1), reward_WA, torch.zeros_like(reward_WA, dtype=torch.bool)

    def observe(self, state):
        """Return the position of each agent, and the vectors to the next agent and to the one after it."""
        return torch.cat([state, *(state.roll(-shift, 2) - state for shift in (1, 2))])


def make_agent(environment, seed):
    """Return an agent with PPO for each group."""
    options = {"learning_rate": 1e-3, "gamma": 0.95, "rollout_steps": 32, "minibatches": 4}
    return rein.MultiAgent(
        environment, {name: rein.PPO(x, **options) for name, x in environment.groups.items()}, seed=seed
    )


def runner_return(runner, chasers):
    """Return the mean return of the runner of one agent against the chasers of another agent."""
    environment = Chase(worlds=64, seed=1, max_episode_steps=50)
    agents = {"runner": runner.agents["runner"], "chasers": chasers.agents["chasers"]}
    result = rein.evaluate(rein.MultiAgent(environment, agents), environment, episodes=192)
    return float(result.group_returns(environment)["runner"].mean())


if __name__ == "__main__":
    environment = Chase(worlds=32, seed=0, max_episode_steps=50)
    initial, agent = make_agent(environment, seed=1), make_agent(environment, seed=0)
    rein.train(agent, environment, epochs=20, iterations=64, progress=False)
    print("mean return of the runner")
    print(f"both untrained: {runner_return(initial, initial):.1f}, both trained: {runner_return(agent, agent):.1f}")
    print(f"chasers trained: {runner_return(initial, agent):.1f}, runner trained: {runner_return(agent, initial):.1f}")
