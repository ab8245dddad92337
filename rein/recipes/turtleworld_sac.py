"""SAC on the Turtleworld: turn and walk to a target."""

from __future__ import annotations

from rein.agents.sac import SAC
from rein.envs.turtleworld import Turtleworld
from rein.loop import Loop
from rein.recipes.recipe import Builder, recipe


@recipe(
    Turtleworld,
    SAC,
    computed=["possible_targets"],
    num_envs=8,
    learning_rate=1e-3,
    gamma=0.98,
    hidden=(64, 64),
    update_to_data=0.5,
    capacity=80_000,
    epochs=50,
    iterations=200,
)
def turtleworld_sac(
    build: Builder, target_x: float = 2.0, target_y: float = 4.0, evaluate_every: int = 2, stop_when_solved: bool = True
) -> Loop:
    """SAC on the Turtleworld: solved at a mean greedy return of at least -110. Walking straight ahead gives -107.

    Args:
        target_x: x coordinate of the target, 0 to 5.
        target_y: y coordinate of the target, 0 to 5; turtles start at 0.
    """
    targets = [(target_x, target_y)]
    environment = build.environment(possible_targets=targets)
    agent = build.agent(environment)
    return build.evaluated_loop(
        agent, environment, 100, at_least=-110.0, every=evaluate_every, stop=stop_when_solved, possible_targets=targets
    )
