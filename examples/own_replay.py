"""A custom agent with a replay: double DQN (van Hasselt et al. 2016) on CartPole, with an optimizer of torch.optim."""

import copy

import torch

import rein
from rein.ops.exploration import epsilon_greedy
from rein.ops.values import polyak_, td_target


class DoubleDQN(rein.Agent):
    """Makes one update from a sample of the replay after every step of the environments."""

    learning_rate: float | rein.Schedule = rein.option(default=2e-3, help="step size of Adam; a number or a schedule")
    epsilon: rein.Schedule = rein.option(
        default=rein.schedules.linear(1.0, 0.05, env_steps=10_000), help="probability of a random action"
    )
    gamma: float = rein.option(default=0.98, help="discount factor")
    n_step: int = rein.option(default=3, help="steps of n-step returns")
    batch_size: int = rein.option(default=128, help="transitions per update")
    learning_starts: int = rein.option(default=1_000, help="env steps before the first update")
    tau: float = rein.option(default=0.01, help="step of the target network toward the online network")

    def build(self, generator):
        self.online = rein.networks.q_network(self.observation_space, self.action_space, generator=generator)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.online.parameters())
        self.replay = rein.replay.Replay(100_000, device=self.device)

    def act(self, observation, explore):
        value = self.online(observation)
        return epsilon_greedy(value, self.epsilon(**self.counts), self.generator) if explore else value.argmax(1)

    def update(self, sample):
        with torch.no_grad():
            best = self.online(sample.next_observation).argmax(1, keepdim=True)
            next_value = self.target(sample.next_observation).gather(1, best).squeeze(1)
            target = td_target(sample.reward, sample.terminated, next_value, sample.discount)
        value = self.online(sample.observation).gather(1, sample.action.unsqueeze(1)).squeeze(1)
        loss = torch.nn.functional.smooth_l1_loss(value, target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        polyak_([*self.target.parameters()], [*self.online.parameters()], self.tau)
        return {"value_loss": loss.detach()}


def mean_return(agent):
    """Evaluate the greedy policy."""
    return rein.evaluate(agent, rein.envs.CartPole(num_envs=20, seed=1), episodes=20).mean_return


if __name__ == "__main__":
    environment = rein.envs.CartPole(num_envs=8, seed=0)
    agent = DoubleDQN(environment, seed=0)
    print(f"before: {mean_return(agent):.0f} of 500")
    rein.train(agent, environment, epochs=10, iterations=300)
    print(f"after {agent.env_steps} env steps and {agent.updates} updates: {mean_return(agent):.0f} of 500")
