"""A custom agent: REINFORCE with a learned baseline (Williams 1992) on CartPole."""

import rein
from rein.ops.returns import discounted_returns
from rein.ops.statistics import masked_mean, standardize


class Reinforce(rein.Agent):
    """Makes one step along the gradient of log pi(a | s) * (return - baseline) per rollout."""

    learning_rate: float | rein.Schedule = rein.option(default=1e-2, help="step size of Adam; a number or a schedule")
    gamma: float = rein.option(default=0.98, help="discount factor")
    rollout_steps: int = rein.option(default=16, fixed=True, help="steps of each environment per update")

    def build(self, generator):
        self.actor = rein.networks.actor(self.observation_space, self.action_space, generator=generator)
        self.baseline = rein.networks.critic(self.observation_space, generator=generator)
        self.optimizer = rein.Adam([*self.actor.parameters(), *self.baseline.parameters()])
        self.rollout = rein.replay.Rollout(self.rollout_steps)

    def act(self, observation, explore):
        return self.actor(observation)

    def update(self, rollout):
        observation, action, valid = (rollout.flat(name) for name in ("observation", "action", "valid"))
        value = self.baseline(observation)
        returns = discounted_returns(
            rollout["reward"],
            rollout["terminated"],
            rollout["truncated"],
            rollout.next_values(value, self.baseline),
            rollout["valid"],
            gamma=self.gamma,
        ).flatten()
        advantage = standardize(returns - value.detach(), valid)
        policy_loss = masked_mean(-self.actor(observation).log_prob(action) * advantage, valid)
        value_loss = masked_mean((returns - value).square(), valid)
        self.optimizer.zero_grad()
        (policy_loss + value_loss).backward()
        self.optimizer.step()
        return {"policy_loss": policy_loss.detach(), "value_loss": value_loss.detach()}


def mean_return(agent):
    """Evaluate the greedy policy."""
    return rein.evaluate(agent, rein.envs.CartPole(num_envs=20, seed=1), episodes=20).mean_return


if __name__ == "__main__":
    environment = rein.envs.CartPole(num_envs=32, seed=0)
    agent = Reinforce(environment, learning_rate=rein.schedules.linear(1e-2, 0.0, updates=200), seed=0)
    print(f"before: {mean_return(agent):.0f} of 500")
    rein.train(agent, environment, epochs=10, iterations=320)
    print(f"after {agent.env_steps} env steps and {agent.updates} updates: {mean_return(agent):.0f} of 500")
