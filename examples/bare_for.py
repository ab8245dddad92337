"""Run the five phases of a step in a custom `for` loop, without events."""

import rein

environment = rein.envs.Gridworld(num_envs=64, seed=0)
agent = rein.QLearning(environment, learning_rate=0.5, seed=0)

state = rein.State(step_state=rein.StepState(environment.reset()))
for _ in range(500):
    state.step_state = rein.batch_step(state, agent, environment)

print(state.clocks)
print(rein.evaluate(agent, rein.envs.Gridworld(num_envs=50, seed=1), episodes=50).mean_return)
