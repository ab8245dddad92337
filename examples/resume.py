"""Interrupt a run within an epoch and resume it in new objects. The result equals that of an uninterrupted run."""

import torch

import rein


def make_loop():
    environment = rein.envs.Gridworld(num_envs=8, seed=0)
    agent = rein.QLearning(environment, learning_rate=0.5, seed=0)
    return rein.training_loop(agent, environment)


whole = make_loop()
whole.run(epochs=10, iterations=25)

first = make_loop()
first.iteration_completed(once=137)(lambda state: first.interrupt("power failure"))
state = first.run(epochs=10, iterations=25)
print(f"{state.status} in epoch {state.epoch}, iteration {state.iteration}: {state.reason}")
saved = first.state_dict()

second = make_loop()
second.load_state_dict(saved)
second.run(epochs=10, iterations=25)
print("bitwise equal:", torch.equal(whole.parts["agent"].table, second.parts["agent"].table))
