"""Packages of `make test-compat`: how to make an environment of each, and which agent trains in it.

The packages are installed in separate environments, so each function imports its own package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Case(NamedTuple):
    """Environment of one package. `package` is its name on the package index."""

    package: str
    requirements: tuple[str, ...]
    code: str  # how to make the environments, for the table
    make: Callable[[int, int], Any]  # `num_envs` and `seed` to environments of rein
    agent: str
    num_envs: int
    resumes: bool  # whether a resumed run equals an uninterrupted one; otherwise it begins new episodes
    replays: bool  # whether seed and actions reproduce an episode
    limits: str


CASES: dict[str, Case] = {}


def case(
    package: str,
    code: str,
    *,
    requirements: tuple[str, ...] = (),
    agent: str = "PPO",
    num_envs: int = 4,
    resumes: bool = True,
    replays: bool = True,
    limits: str = "",
) -> Callable[[Callable[[int, int], Any]], Callable[[int, int], Any]]:
    """Decorator: add the function, which makes the environments of a package, to CASES."""

    def add(make: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
        required = requirements or (package,)
        CASES[package] = Case(package, required, code, make, agent, num_envs, resumes, replays, limits)
        return make

    return add


@case("minigrid", '`rein.make(lambda: ImgObsWrapper(gymnasium.make("MiniGrid-Empty-5x5-v0")))`')
def minigrid(num_envs: int, seed: int) -> Any:
    import gymnasium
    from minigrid.wrappers import ImgObsWrapper

    import rein

    def make() -> Any:
        return ImgObsWrapper(gymnasium.make("MiniGrid-Empty-5x5-v0", max_steps=40))

    return rein.make(make, num_envs, seed)


@case("highway-env", '`rein.make("highway_env:highway-fast-v0")`', num_envs=2)
def highway(num_envs: int, seed: int) -> Any:
    import rein

    return rein.make("highway_env:highway-fast-v0", num_envs, seed, config={"vehicles_count": 5, "duration": 10})


@case("flappy-bird-gymnasium", '`rein.make("flappy_bird_gymnasium:FlappyBird-v0", use_lidar=False)`')
def flappy_bird(num_envs: int, seed: int) -> Any:
    import rein

    return rein.make("flappy_bird_gymnasium:FlappyBird-v0", num_envs, seed, use_lidar=False)


@case(
    "gymnasium-robotics",
    '`rein.make("gymnasium_robotics:FetchReach-v4")`',
    requirements=("gymnasium-robotics", "mujoco<3.9"),
    agent="SAC",
    num_envs=2,
    limits="needs `mujoco<3.9`",
)
def robotics(num_envs: int, seed: int) -> Any:
    import rein

    return rein.make("gymnasium_robotics:FetchReach-v4", num_envs, seed)


@case(
    "shimmy",
    '`rein.make("shimmy:dm_control/cartpole-balance-v0")`',
    requirements=("shimmy[dm-control]", "mujoco<4", "packaging"),
    agent="SAC",
    num_envs=2,
    limits="for dm_control; needs `mujoco<4` and `packaging`",
)
def dm_control(num_envs: int, seed: int) -> Any:
    import rein

    return rein.make("shimmy:dm_control/cartpole-balance-v0", num_envs, seed, max_episode_steps=40)


@case(
    "vizdoom",
    '`rein.make(lambda: Screen(gymnasium.make("vizdoom.gymnasium_wrapper:VizdoomBasic-v1")))`',
    num_envs=2,
    limits="a wrapper reduces the screen of 240 x 320 pixels",
)
def vizdoom(num_envs: int, seed: int) -> Any:
    import gymnasium
    from gymnasium.wrappers import TransformObservation

    import rein

    def make() -> Any:
        env = gymnasium.make("vizdoom.gymnasium_wrapper:VizdoomBasic-v1", frame_skip=4)
        space = gymnasium.spaces.Box(0, 255, (60, 80, 3), "uint8")
        return TransformObservation(env, lambda observation: observation["screen"][::4, ::4], space)

    return rein.make(make, num_envs, seed)


@case(
    "envpool",
    '`rein.make(envpool.make_gymnasium("CartPole-v1", num_envs=8, seed=0))`',
    resumes=False,
    replays=False,
    limits="`seed=` of `rein.make` has no effect",
)
def envpool(num_envs: int, seed: int) -> Any:
    import envpool

    import rein

    return rein.make(envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, seed=seed), num_envs, seed)


@case(
    "gymnax",
    '`rein.JaxEnvironment(*gymnax.make("CartPole-v1"), num_envs=8)`',
    requirements=("gymnax", "six"),
    limits="needs `six`, which it does not install",
    replays=False,
)
def gymnax(num_envs: int, seed: int) -> Any:
    import gymnax

    import rein

    return rein.JaxEnvironment(*gymnax.make("CartPole-v1"), num_envs=num_envs, seed=seed)


@case(
    "brax",
    '`rein.JaxEnvironment(brax.envs.create("inverted_pendulum", auto_reset=False), num_envs=8)`',
    agent="SAC",
    replays=False,
)
def brax(num_envs: int, seed: int) -> Any:
    import brax.envs

    import rein

    env = brax.envs.create("inverted_pendulum", backend="spring", episode_length=40, auto_reset=False)
    return rein.JaxEnvironment(env, num_envs=num_envs, seed=seed)


@case(
    "mjlab",
    "`rein.TensorEnvironment(ManagerBasedRlEnv(cfg, device))` with `cfg.auto_reset = False`",
    num_envs=2,
    resumes=False,
    replays=False,
    limits="on a CPU, the first start compiles kernels",
)
def mjlab(num_envs: int, seed: int) -> Any:
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.tasks.registry import load_env_cfg

    import rein

    cfg = load_env_cfg("Mjlab-Cartpole-Balance")
    cfg.scene.num_envs, cfg.auto_reset, cfg.episode_length_s = num_envs, False, 1.0
    return rein.TensorEnvironment(ManagerBasedRlEnv(cfg, device="cpu"), seed=seed)


@case("mpe2", "`rein.PettingZooEnvironment(simple_spread_v3.parallel_env, worlds=8)`", num_envs=2)
def mpe2(num_envs: int, seed: int) -> Any:
    from mpe2 import simple_spread_v3

    import rein

    return rein.PettingZooEnvironment(simple_spread_v3.parallel_env, worlds=num_envs, seed=seed)


@case(
    "pettingzoo",
    "`rein.SelfPlay(connect_four_v3.env, num_envs=8)`",
    requirements=("pettingzoo", "pygame-ce"),
    limits="needs `pygame-ce`, which the extra `classic` installs",
)
def pettingzoo(num_envs: int, seed: int) -> Any:
    from pettingzoo.classic import connect_four_v3

    import rein

    return rein.SelfPlay(connect_four_v3.env, num_envs, seed=seed)
