"""Shape a reward between two phases of a step: the agent learns the shaped one, statistics keep the raw one."""

import rein

environment = rein.envs.Gridworld(num_envs=16, seed=0)
agent = rein.QLearning(environment, learning_rate=0.5, seed=0)
store = rein.MemoryStore()
loop = rein.training_loop(agent, environment, store)


@loop.action_applied
def pay_for_arriving(state):
    known = state.step_state
    reward = known.transition.reward + 10.0 * known.transition.terminated
    state.step_state = known._replace(transition=known.transition._replace(reward=reward))


state = loop.run(epochs=5, iterations=200)
fields = store.trajectories[-1].fields
print("mean raw return of the last epoch:", state.history[-1].metrics["episode_return"])
print("largest reward learned from:", fields["reward"].max(), "largest raw one:", fields["raw_reward"].max())
