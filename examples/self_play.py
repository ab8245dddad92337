"""Self-play: PPO learns tic-tac-toe against its own snapshots, and a tournament compares the snapshots."""

import copy

import rein

game = rein.envs.TicTacToe()
agent = rein.PPO(
    game, gamma=1.0, rollout_steps=16, learning_rate=2e-3, entropy_coefficient=0.02, hidden=(128, 128), seed=0
)
pool = rein.OpponentPool(agent, size=4)
environment = rein.SelfPlay(game, num_envs=128, opponents=pool, seed=0)
loop = rein.training_loop(agent, environment, iterations=32)
policies = {"random": rein.episodes.RandomPolicy(game.single_action_space, seed=0)}


@loop.epoch_ended(every=2)
def add_snapshot(state):
    pool.add()


@loop.epoch_ended(every=4)
def keep_policy(state):
    policies[f"epoch {state.epoch}"] = copy.deepcopy(agent).policy(deterministic=False)


loop.run(epochs=12)

result = rein.tournament(policies, game, episodes=500)
print(result)
print({name: round(rating) for name, rating in result.elo.items()})
