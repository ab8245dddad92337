"""DQN with and without a recurrent core on a task that requires memory."""

from __future__ import annotations

from rein.agents.dqn import DQN
from rein.agents.recurrent_dqn import RecurrentDQN
from rein.envs.probes.memory import Memory
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe
from rein.recipes.tasks import core_factory


@recipe(
    Memory,
    RecurrentDQN,
    computed=["hidden"],
    num_envs=32,
    cues=4,
    delay=8,
    learning_rate=1e-2,
    gamma=0.95,
    sequence_length=10,
    burn_in=0,
    batch_size=32,
    capacity=50_000,
    train_frequency=32,
    update_to_data=1.0 / 32.0,
    tau=0.05,
    epsilon=0.05,
    epsilon_env_steps=10_000,
    epochs=50,
    iterations=50,
)
def memory_dqn(
    build: Builder, core: str = "lstm", features: int = 64, evaluate_every: int = 1, stop_when_solved: bool = True
) -> Loop:
    """Recurrent DQN on Memory: solved at 95 % correct answers. Without memory, answers are random (try --core none).

    Args:
        core: recurrent core: lstm, gru or mingru; none for DQN, a network without memory.
        features: units of the hidden layer and of the core.
    """
    environment = build.environment()
    factory = core_factory(core, features)
    if factory is None:
        agent = build.agent(environment, DQN, hidden=(features,))
    else:
        agent = build.agent(environment, hidden=(features,), core=factory)
    return build.evaluated_loop(agent, environment, 100, at_least=0.95, every=evaluate_every, stop=stop_when_solved)
