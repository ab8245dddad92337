"""An agent of your own: a one-step actor-critic (Sutton & Barto 2018, 13.5), in all that rein asks of an agent."""

import torch
from torch import nn

import rein
from rein.envs.cartpole import CartPole
from rein.networks.mlp import MLP, orthogonal_linear
from rein.ops.distributions import Categorical
from rein.ops.random import generator, restore
from rein.ops.statistics import masked_mean
from rein.ops.trees import load_plain_state, plain_state
from rein.ops.values import td_target


class ActorCritic:
    """Learns from each transition once, as it comes."""

    reports = ("value_loss", "entropy")  # metrics of `optimize_model` that every epoch shall have
    device = torch.device("cpu")

    def __init__(self, observation_space, action_space, *, learning_rate=1e-3, gamma=0.98, seed=None):
        self.observation_space, self.action_space = observation_space, action_space
        self.learning_rate, self.gamma, self.seed = learning_rate, gamma, seed
        self.env_steps = self.updates = 0
        self.transition = None
        self._build(0 if seed is None else seed)

    @property
    def config(self):
        return {"learning_rate": self.learning_rate, "gamma": self.gamma, "seed": self.seed}

    def _build(self, seed):
        self.generator = generator(seed, "agent")  # never torch's global one: others draw from that
        drawn = generator(seed, "networks")
        inputs, hidden = self.observation_space.shape[0], (64, 64)
        self.network = nn.ModuleDict()
        for name, outputs, gain in (("actor", int(self.action_space.n), 0.01), ("critic", 1, 1.0)):
            head = orthogonal_linear(hidden[-1], outputs, gain, drawn)
            self.network[name] = nn.Sequential(MLP(inputs, hidden, "tanh", drawn), head)
        self.optimizer = torch.optim.Adam(self.network.parameters(), self.learning_rate)

    def reseed(self, seed):
        if self.env_steps:
            raise RuntimeError(f"reseed({seed}): {self.env_steps} env steps have been taken already")
        self.seed = seed
        self._build(seed)

    def evaluate(self, observation):
        """What the policy is there, and the value (N,)."""
        logits, value = self.network["actor"](observation), self.network["critic"](observation)
        return Categorical.from_logits(logits), value.squeeze(-1)

    @torch.no_grad()
    def select_action(self, observation):
        return self.evaluate(observation)[0].sample(self.generator), {}

    def record_observation(self, transition):
        self.transition = transition
        self.env_steps += len(transition.reward)

    def observe_reset(self, observation, mask):
        """Nothing to forget: no update reaches over more than one transition."""

    def optimize_model(self):
        if self.transition is None:
            return {}
        row, self.transition = self.transition, None
        if not row.valid.any():
            return {}
        policy, value = self.evaluate(row.observation)
        with torch.no_grad():  # terminated: nothing follows; truncated: the value of what was seen last
            _, next_value = self.evaluate(row.next_observation)
            target = td_target(row.reward, row.terminated, next_value, self.gamma)
        actor_loss = masked_mean(-policy.log_prob(row.action) * (target - value.detach()), row.valid)
        value_loss = masked_mean((target - value).square(), row.valid)
        entropy = masked_mean(policy.entropy(), row.valid)
        self.optimizer.zero_grad()
        (actor_loss + value_loss - 0.01 * entropy).backward()
        self.optimizer.step()
        self.updates += 1
        return {"value_loss": value_loss.detach(), "entropy": entropy.detach()}

    def policy(self, deterministic=True):
        return Acting(self, None if deterministic else generator(self.seed or 0, "policy"))

    def state_dict(self):
        """All that its future depends on; an update never waits for the next step, so no transition is left over."""
        return {
            "network": dict(self.network.state_dict()),
            "optimizer": plain_state(self.optimizer),
            "generator": self.generator.get_state(),
            "counts": [self.env_steps, self.updates],
        }

    def load_state_dict(self, state):
        self.network.load_state_dict(state["network"])
        load_plain_state(self.optimizer, state["optimizer"])
        restore(self.generator, state["generator"])
        self.env_steps, self.updates = state["counts"]


class Acting:
    """Acts by the agent's network as it is at any time: the likeliest action, or samples by a generator of its own."""

    def __init__(self, agent, own_generator):
        self.agent, self.generator = agent, own_generator

    @torch.no_grad()
    def select_action(self, observation):
        policy, _ = self.agent.evaluate(observation)
        return (policy.mode() if self.generator is None else policy.sample(self.generator)), {}

    def reset(self, mask=None):
        """Nothing to forget: an action depends on the observation alone."""


if __name__ == "__main__":
    environment = CartPole(num_envs=64, seed=0)
    agent = ActorCritic(environment.single_observation_space, environment.single_action_space, seed=0)
    rein.train(agent, environment, epochs=20, iterations=100, seed=0)
    greedy = rein.evaluate(agent.policy(), CartPole(num_envs=20, seed=1), episodes=20)
    print(f"after {agent.env_steps} env steps and {agent.updates} updates: {greedy.mean_return:.0f} of 500")
