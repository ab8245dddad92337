"""Shape the reward between two phases of a step. The agent learns the shaped reward; statistics use the raw reward."""

import rein

environment = rein.envs.Gridworld(num_envs=16, seed=0)
agent = rein.QLearning(environment, learning_rate=0.5, seed=0)
store = rein.MemoryStore()
loop = rein.training_loop(agent, environment, store)


@loop.action_applied
def add_bonus(state):
    transition = state.step_state.transition
    reward = transition.reward + 10.0 * transition.terminated
    state.step_state = state.step_state._replace(transition=transition._replace(reward=reward))


state = loop.run(epochs=5, iterations=200)
fields = store.trajectories[-1].fields
print("mean raw return of the last epoch:", state.history[-1].metrics["episode_return"])
print("largest shaped reward:", fields["reward"].max(), "largest raw reward:", fields["raw_reward"].max())
