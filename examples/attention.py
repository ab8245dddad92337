"""A custom network: attention over a set of items. PPO learns to select the item that is farthest from the others."""

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

import rein

ITEMS = 6  # maximum number


class FindOutlier(gymnasium.Env):
    """A set of 3 to 6 random points. Selecting the point that is farthest from their mean has reward 1.

    The points have random places in `items`, and `present` is 1 for these places. An episode has one step.
    """

    observation_space = spaces.Dict({"items": spaces.Box(-1.0, 1.0, (ITEMS, 2)), "present": spaces.MultiBinary(ITEMS)})
    action_space = spaces.Discrete(ITEMS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        count = self.np_random.integers(3, ITEMS + 1)
        present = self.np_random.permutation(ITEMS) < count
        items = self.np_random.uniform(-1.0, 1.0, (ITEMS, 2)).astype(np.float32) * present[:, None]
        self.observation = {"items": items, "present": present.astype(np.int8)}
        distance = np.linalg.norm(items - items.sum(0) / count, axis=1)
        self.farthest = np.where(present, distance, 0.0).argmax()
        return self.observation, {}

    def step(self, action):
        return self.observation, float(action == self.farthest), True, False, {}


class SetNetwork(torch.nn.Module):
    """Attention over the items that are present; a logit for each item, and the value of the set."""

    def __init__(self, observation_space, action_space, generator, features=32):
        super().__init__()
        self.embed = torch.nn.Linear(observation_space["items"].shape[1], features)
        self.attention = torch.nn.MultiheadAttention(features, num_heads=2, batch_first=True)
        self.hidden = torch.nn.Sequential(torch.nn.Linear(features, 64), torch.nn.ReLU())
        self.logit, self.value = torch.nn.Linear(64, 1), torch.nn.Linear(64, 1)

    def forward(self, observation):  # -> logits (B, items), values (B,)
        absent = observation["present"] == 0  # (B, items)
        x = self.embed(observation["items"])
        attended, _ = self.attention(x, x, x, key_padding_mask=absent, need_weights=False)
        x = self.hidden(x + attended)
        logits = self.logit(x).squeeze(-1).masked_fill(absent, -1e9)
        return logits, self.value(x.mean(1)).squeeze(-1)


def success_rate(agent):
    """Evaluate the greedy policy on new sets."""
    return rein.evaluate(agent, rein.make(FindOutlier, num_envs=100, seed=1), episodes=500).mean_return


if __name__ == "__main__":
    environment = rein.make(FindOutlier, num_envs=128, seed=0)
    agent = rein.PPO(environment, network=SetNetwork, learning_rate=3e-3, rollout_steps=4, seed=0)
    print(f"before training: {success_rate(agent):.0%} of the sets")
    rein.train(agent, environment, env_steps=30_000, progress=False)
    print(f"after {agent.env_steps:,} sets: {success_rate(agent):.0%}")
