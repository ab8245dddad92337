"""SAC in the Turtleworld: turn and walk to a target."""

from __future__ import annotations

from rein.agents.sac import SAC
from rein.envs.turtleworld import Turtleworld
from rein.handlers.evaluate_every import evaluate_every as evaluate
from rein.handlers.solved import solved
from rein.loop import Loop
from rein.ops.random import stream_seed
from rein.protocols import Store
from rein.training.training_loop import training_loop


def turtleworld_sac(
    store: Store | None = None,
    *,
    num_envs: int = 8,
    target_x: float = 2.0,
    target_y: float = 4.0,
    learning_rate: float = 1e-3,
    gamma: float = 0.98,
    batch_size: int = 256,
    hidden: tuple[int, ...] = (64, 64),
    learning_starts: int = 1_000,
    update_to_data: float = 0.5,
    seed: int = 0,
    epochs: int = 50,
    iterations: int = 200,
    evaluate_every: int = 2,
    device: str = "cpu",
    stop_when_solved: bool = True,
) -> Loop:
    """SAC in the Turtleworld: solved at a mean greedy return of at least -110; walking straight ahead has -107.

    Args:
        store: where trajectories go.
        num_envs: turtles at once.
        target_x: where the target is, 0 to 5.
        target_y: where the target is, 0 to 5; turtles start at 0.
        learning_rate: of Adam.
        gamma: discount factor.
        batch_size: transitions of an update.
        hidden: features of the hidden layers, of actor and critics each.
        learning_starts: env steps before the first update, acted at random.
        update_to_data: updates for each env step.
        seed: of everything random.
        epochs: epochs at most.
        iterations: steps of every turtle in an epoch.
        evaluate_every: epochs from one evaluation of 100 episodes to the next.
        device: where turtles and networks are.
        stop_when_solved: end the run when it is solved.
    """
    targets = [(target_x, target_y)]
    environment = Turtleworld(num_envs, targets, seed=seed, device=device)
    agent = SAC(
        environment.single_observation_space,
        environment.single_action_space,
        learning_rate=learning_rate,
        gamma=gamma,
        batch_size=batch_size,
        hidden=hidden,
        learning_starts=learning_starts,
        update_to_data=update_to_data,
        capacity=num_envs * iterations * epochs,
        seed=seed,
        device=device,
    )
    loop = training_loop(agent, environment, store, seed=seed, epochs=epochs, iterations=iterations)
    proving_ground = Turtleworld(100, targets, seed=stream_seed(seed, "evaluation"), device=device)
    evaluate(loop, agent.policy(), proving_ground, episodes=100, every=evaluate_every)
    solved(loop, "evaluation_return", at_least=-110.0, stop=stop_when_solved)
    return loop
