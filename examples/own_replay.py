"""A replay in an agent of your own: Q-learning by a small network (Mnih et al. 2013), in all that rein asks of one."""

import torch
from torch import nn

import rein
from rein.envs.gridworld import Gridworld
from rein.networks.mlp import MLP, orthogonal_linear
from rein.ops.exploration import epsilon_greedy
from rein.ops.random import generator, restore
from rein.ops.trees import load_plain_state, plain_state
from rein.ops.values import td_target
from rein.replay.replay import Replay


class Remembering:
    """Learns from 64 of the last 10,000 transitions in every step."""

    reports = ("value_loss",)
    device = torch.device("cpu")

    def __init__(self, observation_space, action_space, *, epsilon=0.2, gamma=0.9, learning_starts=500, seed=None):
        self.observation_space, self.action_space = observation_space, action_space
        self.epsilon, self.gamma, self.learning_starts, self.seed = epsilon, gamma, learning_starts, seed
        self.env_steps = self.updates = 0
        self._build(0 if seed is None else seed)

    @property
    def config(self):
        return {name: getattr(self, name) for name in ("epsilon", "gamma", "learning_starts", "seed")}

    def _build(self, seed):
        self.generator, drawn = generator(seed, "agent"), generator(seed, "networks")
        inputs, actions = self.observation_space.shape[0], int(self.action_space.n)
        self.network = nn.Sequential(MLP(inputs, (64,), "relu", drawn), orthogonal_linear(64, actions, 1.0, drawn))
        self.optimizer = torch.optim.Adam(self.network.parameters(), 5e-3)
        self.replay = Replay(capacity=10_000)

    def reseed(self, seed):
        if self.env_steps:
            raise RuntimeError(f"reseed({seed}): {self.env_steps} env steps have been taken already")
        self.seed = seed
        self._build(seed)

    @torch.no_grad()
    def select_action(self, observation):
        return epsilon_greedy(self.network(observation), self.epsilon, self.generator), {}

    def record_observation(self, transition):
        self.replay.append(transition)  # rows that are not valid are kept and never drawn
        self.env_steps += len(transition.reward)

    def observe_reset(self, observation, mask):
        self.replay.observe_reset(mask)  # no return of several steps reaches over it

    def optimize_model(self):
        if self.env_steps < self.learning_starts or not len(self.replay):
            return {}
        sample = self.replay.sample(64, self.generator, n_step=3, gamma=self.gamma)
        with torch.no_grad():  # `discount` is gamma ** 3, or of fewer steps where the episode ended before
            next_value = self.network(sample.next_observation).amax(1)
            target = td_target(sample.reward, sample.terminated, next_value, sample.discount)
        value = self.network(sample.observation).gather(1, sample.action.unsqueeze(1)).squeeze(1)
        loss = nn.functional.smooth_l1_loss(value, target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.updates += 1
        return {"value_loss": loss.detach()}

    def policy(self, deterministic=True):
        return Acting(self, 0.0 if deterministic else self.epsilon)

    def state_dict(self):
        return {
            "network": dict(self.network.state_dict()),
            "optimizer": plain_state(self.optimizer),
            "generator": self.generator.get_state(),
            "replay": self.replay.state_dict(),  # a checkpoint writes its rows once, in shards
            "counts": [self.env_steps, self.updates],
        }

    def load_state_dict(self, state):
        self.network.load_state_dict(state["network"])
        load_plain_state(self.optimizer, state["optimizer"])
        restore(self.generator, state["generator"])
        self.replay.load_state_dict(state["replay"])
        self.env_steps, self.updates = state["counts"]


class Acting:
    """Acts by the agent's network as it is at any time, at random as often as `epsilon` says."""

    def __init__(self, agent, epsilon):
        self.agent, self.epsilon, self.generator = agent, epsilon, generator(agent.seed or 0, "policy")

    @torch.no_grad()
    def select_action(self, observation):
        return epsilon_greedy(self.agent.network(observation), self.epsilon, self.generator), {}

    def reset(self, mask=None):
        """Nothing to forget: an action depends on the observation alone."""


if __name__ == "__main__":
    environment = Gridworld(num_envs=8, observation="vector", seed=0, max_episode_steps=30)
    agent = Remembering(environment.single_observation_space, environment.single_action_space, seed=0)
    rein.train(agent, environment, epochs=5, iterations=200, seed=0)
    proving_ground = Gridworld(num_envs=50, observation="vector", seed=1, max_episode_steps=30)
    greedy = rein.evaluate(agent.policy(), proving_ground, episodes=50)
    print(f"after {agent.env_steps} env steps and {agent.updates} updates: {greedy.mean_return:.1f}; the best is -11.2")
