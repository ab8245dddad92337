"""Adapter for environments written in JAX, with the interface of gymnax or of Brax.

JAX is imported when an environment is created.

Shapes: N environments, O one observation, A one action, P entries of the table of episode seeds.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import check_action, check_begun, checked_num_envs, representation
from rein.envs.base.seeding import EpisodeSeeds, SeededEnvironment
from rein.ops.trees import map_tree
from rein.spaces.conversion import ObservationGroups, dtypes_of, gymnasium_space
from rein.types import TimeStep, Tree


class JaxEnvironment(SeededEnvironment):
    """Adapter for environments written in JAX: gymnax, Brax, and MuJoCo Playground (MJX).

    `env` is one environment. The adapter vectorizes it with `jax.vmap` and compiles the step with `jax.jit`. Tensors
    are exchanged through DLPack, without a copy on a GPU.

    - gymnax: `env.reset(key, params)` and `env.step(key, state, action, params)`, as in gymnax 1.0 and newer.
      `params.max_steps_in_episode` is the time limit.
    - Brax: `env.reset(key)` and `env.step(state, action)` return a state with `obs`, `reward`, `done` and `info`.
      `info["truncation"]` separates truncated episodes from terminated ones. Create Brax environments with
      `auto_reset=False`, and wrap MuJoCo Playground's in Brax's `EpisodeWrapper`.

    The adapter resets environments itself: each episode begins with a different random key, and `final_observation` is
    exact. In MuJoCo Playground, `state` becomes the observation and `privileged_state` the entry `critic_observation`.

    The key of an episode is derived from its episode seed. A run repeats exactly with the same seed and `num_envs` on
    the same machine, and `state_dict` contains the complete state. Compiled code for another `num_envs` may differ in
    the last bit, so single episodes are not replayable.

    Args:
        env: environment of gymnax, Brax, MuJoCo Playground, or with one of their interfaces.
        params: parameters of a gymnax environment, by default `env.default_params`.
        num_envs: number of environments N.
        seed: random seed of all environments. By default it is drawn at the first reset.

    Raises:
        ImportError: if JAX is not installed.
        ValueError: if the environment is vectorized already or resets itself.
        TypeError: if `env` has neither interface, or if a space cannot be converted to tensors.

    Example::

        env = rein.JaxEnvironment(*gymnax.make("CartPole-v1"), num_envs=64)
        env = rein.JaxEnvironment(brax.envs.create("ant", auto_reset=False), num_envs=64)
    """

    replayable = False

    def __init__(self, env: Any, params: Any = None, num_envs: int = 16, seed: int | None = None) -> None:
        self._jax = _imported()
        if not (hasattr(env, "reset") and hasattr(env, "step")):
            raise TypeError(
                f"JaxEnvironment: expected an environment of gymnax or Brax, got {env!r:.80}; gymnax.make returns two "
                "arguments: JaxEnvironment(*gymnax.make(id))"
            )
        self.env = env
        self.num_envs = checked_num_envs(num_envs, type(self).__name__)
        interface: _Gymnax | _Brax = _Gymnax(env) if hasattr(env, "action_space") else _Brax(env)
        self.params = getattr(env, "default_params", None) if params is None else params
        observation_space, action_space = interface.spaces(self.params)
        self._groups = ObservationGroups(observation_space)
        self.single_observation_space: spaces.Space[Any] = self._groups.space
        self.single_action_space: spaces.Space[Any] = action_space
        self._dtypes = dtypes_of(self.single_observation_space)
        self._action_shape = (self.num_envs, *(self.single_action_space.shape or ()))
        self.device = torch.from_dlpack(self._jax.numpy.zeros(1)).device
        self._seeds = EpisodeSeeds(self.num_envs, seed, self.device)
        self._table: tuple[Any, Any] = None, None  # the table of episode seeds (P,), as a tensor and in JAX
        self._first, self._step = (functools.partial(compiled, interface, self.params) for compiled in _compiled())
        self._state: Any = None
        self._steps_N: Any = None
        self._checked = False

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON values."""
        kind = type(self._inner)
        return {
            "env": f"{kind.__module__}.{kind.__qualname__}",
            "params": None if self.params is None else repr(self.params),
            "num_envs": self.num_envs,
            "seed": self.seed,
        }

    def _begin(self, start: Tensor) -> Tree:
        observation, self._state = self._first(self._array(start.to(torch.int32)))
        self._steps_N = self._jax.numpy.zeros(self.num_envs, "int32")
        return self._observed(observation)

    def apply_action(self, action: Tree) -> TimeStep:
        """Step every environment with actions `(N, *A)`, and reset those whose episode ended.

        Raises RuntimeError before the first reset and EnvironmentContractError for an action of another shape. The
        values of the first action are checked, too.
        """
        check_begun(type(self).__name__, "apply_action", self._state is not None, self._ended)
        if not self._checked or not isinstance(action, Tensor) or action.shape != self._action_shape:
            check_action(action, self.num_envs, self.single_action_space)
            self._checked = True
        place_N, seed_P = self._seeds.table()
        if seed_P is not self._table[0]:
            self._table = seed_P, self._array(seed_P.to(torch.int32))
        self._state, self._steps_N, place, observation, final, reward, terminated, truncated = self._step(
            self._table[1],
            self._array(place_N.to(torch.int32)),
            self._state,
            self._steps_N,
            map_tree(self._action, action),
        )
        observation, final = self._observed(observation), self._observed(final)
        self._seeds.go_to(torch.from_dlpack(place).to(torch.int64))
        reward_N, terminated_N, truncated_N = map(torch.from_dlpack, (reward, terminated, truncated))
        valid_N = torch.ones_like(terminated_N)
        return TimeStep(observation, reward_N, terminated_N, truncated_N, final, valid_N, {})

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the episode of every environment. The state of JAX is a list of tensors."""
        leaves = None if self._state is None else self._jax.tree.leaves((self._state, self._steps_N))
        return {"seeds": self._seeds.state_dict(), "state": leaves and [_signed(x) for x in leaves]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Raises ValueError for another number of environments."""
        self._seeds.load_state_dict(state["seeds"])
        self._state = None
        if state["state"] is not None:
            _, like = self._jax.eval_shape(self._first, self._jax.numpy.zeros(self.num_envs, "int32"))
            steps = self._jax.ShapeDtypeStruct((self.num_envs,), "int32")
            parts, structure = self._jax.tree.flatten((like, steps))
            if len(parts) != len(state["state"]):
                raise ValueError(f"the state has {len(state['state'])} arrays, this environment {len(parts)}")
            arrays = [self._restored(x, part) for x, part in zip(state["state"], parts, strict=True)]
            self._state, self._steps_N = self._jax.tree.unflatten(structure, arrays)

    def __repr__(self) -> str:
        return representation(self, type(self._inner).__name__, f"num_envs={self.num_envs}")

    @property
    def _inner(self) -> Any:
        return getattr(self.env, "unwrapped", self.env)

    def _array(self, tensor: Tensor) -> Any:
        return self._jax.dlpack.from_dlpack(tensor.to(self.device).contiguous())

    def _action(self, tensor: Tensor) -> Any:
        """Return an action as a JAX array. JAX has no int64 by default."""
        tensor = tensor.detach()
        return self._array(tensor.to(torch.int32) if tensor.dtype is torch.int64 else tensor)

    def _observed(self, observation: Any) -> Tree:
        return map_tree(
            lambda dtype, x: torch.from_dlpack(x).to(dtype), self._dtypes, self._groups(_plain(observation))
        )

    def _restored(self, tensor: Tensor, like: Any) -> Any:
        """Return an array with the shape and dtype of `like`."""
        if tensor.shape != like.shape:
            raise ValueError(f"the state has an array of shape {tuple(tensor.shape)}, this environment {like.shape}")
        return self._array(tensor.clone().view(getattr(torch, str(like.dtype))))


@attrs.frozen
class _Gymnax:
    """Interface of gymnax: `reset(key, params)` and `step(key, state, action, params)`."""

    env: Any

    def spaces(self, params: Any) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Return the spaces of observations and actions."""
        return gymnasium_space(self.env.observation_space(params)), gymnasium_space(self.env.action_space(params))

    def begin(self, params: Any, key: Any) -> tuple[Any, Any]:
        """Return the first observation and the first state of an episode."""
        return self.env.reset(key, params)

    def step(self, params: Any, key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        """Return state, observation before a reset, reward, terminated and truncated."""
        returned = self.env.step(key, state, action, params)
        if len(returned) != 6 or "final_observation" not in returned[-1]:
            raise TypeError(
                f"{type(self.env).__name__}.step: expected (observation, state, reward, terminated, truncated, info) "
                'with info["final_observation"], as in gymnax 1.0 and newer'
            )
        _, state, reward, terminated, truncated, info = returned
        return state, info["final_observation"], reward, terminated, truncated


@attrs.frozen
class _Brax:
    """Interface of Brax and MuJoCo Playground: `reset(key)` and `step(state, action)` return a state."""

    env: Any

    def spaces(self, params: Any) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Return the spaces of observations and actions."""
        jax = _imported()
        state = jax.eval_shape(self.env.reset, jax.random.PRNGKey(0))
        name = f"JaxEnvironment({type(self.env).__name__})"
        if state.reward.shape:
            raise ValueError(f"{name}: the environment is vectorized already; create it without batch_size")
        if any("first_obs" in str(key) for key in state.info):
            raise ValueError(f"{name}: the environment resets itself; create it with auto_reset=False")
        return _unbounded(state.obs), spaces.Box(-1.0, 1.0, (self.env.action_size,))

    def begin(self, params: Any, key: Any) -> tuple[Any, Any]:
        """Return the first observation and the first state of an episode."""
        state = self.env.reset(key)
        return state.obs, state

    def step(self, params: Any, key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        """Return state, observation before a reset, reward, terminated and truncated."""
        state = self.env.step(state, action)
        done, truncated = state.done > 0, state.info.get("truncation", 0.0 * state.done) > 0
        return state, state.obs, state.reward, done & ~truncated, truncated


@functools.cache
def _compiled() -> tuple[Any, Any]:
    """Return `_begin` and `_step`, which JAX compiles once per interface and number of environments."""
    jax = _imported()
    return jax.jit(_begin, static_argnums=0), jax.jit(_step, static_argnums=0)


def _begin(interface: _Gymnax | _Brax, params: Any, seed_N: Any) -> tuple[Any, Any]:
    """Return first observations and states of the episodes with these seeds."""
    jax = _imported()
    key_N = jax.vmap(jax.random.PRNGKey)(seed_N)
    return jax.vmap(interface.begin, (None, 0))(params, key_N)


def _step(
    interface: _Gymnax | _Brax, params: Any, seed_P: Any, place_N: Any, state: Any, steps_N: Any, action: Any
) -> tuple[Any, ...]:
    """Step all environments, and reset those whose episode ended."""
    jax = _imported()
    where = jax.numpy.where
    key_N = jax.vmap(lambda seed, step: jax.random.fold_in(jax.random.PRNGKey(seed), step))(seed_P[place_N], steps_N)
    step = jax.vmap(interface.step, (None, 0, 0, 0))
    state, final, reward, terminated, truncated = step(params, key_N, state, action)
    terminated, truncated = terminated.astype(bool), truncated.astype(bool)
    ended_N = terminated | truncated
    place_N = place_N + ended_N

    def select(new: Any, old: Any) -> Any:
        return where(ended_N.reshape(-1, *[1] * (old.ndim - 1)), new, old).astype(old.dtype)

    def restart(current: Any) -> Any:
        return jax.tree.map(select, _begin(interface, params, seed_P[place_N]), current)

    # resets of Brax are expensive, so they are skipped in steps without an end
    observation, state = jax.lax.cond(ended_N.any(), restart, lambda current: current, (final, state))
    steps_N = where(ended_N, 0, steps_N + 1)
    return state, steps_N, place_N, observation, final, reward.astype("float32"), terminated, truncated


def _unbounded(shapes: Any) -> spaces.Space[Any]:
    """Return the space of the observations of Brax: a Box without bounds, or a Dict of these."""
    if isinstance(shapes, Mapping):
        return spaces.Dict({key: _unbounded(part) for key, part in shapes.items()})
    return spaces.Box(-float("inf"), float("inf"), shapes.shape)


def _plain(observation: Any) -> Any:
    """Return an observation as an array or as a dictionary of arrays."""
    if isinstance(observation, Mapping):
        return {key: _plain(value) for key, value in observation.items()}
    return observation


def _signed(array: Any) -> Tensor:
    """Return an array of a state as a tensor. Unsigned integers become signed, because files cannot hold them all."""
    tensor = torch.from_dlpack(array)
    unsigned = str(tensor.dtype).startswith("torch.uint")
    return tensor.view(getattr(torch, str(array.dtype).removeprefix("u"))) if unsigned else tensor


def _imported() -> Any:
    try:
        importlib.import_module("jax.dlpack")
        return importlib.import_module("jax")
    except ImportError as error:
        raise ImportError(
            'JaxEnvironment requires JAX; install it with pip install "jax[cpu]" or "jax[cuda13]"'
        ) from error
