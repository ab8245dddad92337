"""Train Q-learning on a Gridworld and print the action values."""

import rein

environment = rein.envs.Gridworld(num_envs=64, possible_targets=[(2, 4)], seed=0)
agent = rein.QLearning(environment, learning_rate=0.5, seed=0)

loop = rein.training_loop(agent, environment, episodic=True)
rein.log(loop, every=10)
loop.run(epochs=40, iterations=20)

for x, y in [(2, 3), (1, 4), (3, 4)]:
    up, down, right, left = agent.q_values(environment.encode(x=x, y=y, target=(2, 4)))[0].tolist()
    print(f"at ({x}, {y}): up {up:.2f}  down {down:.2f}  right {right:.2f}  left {left:.2f}")
