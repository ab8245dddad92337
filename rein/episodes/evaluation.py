"""Evaluate a policy on whole episodes.

Shapes: N environments, E episodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import SUCCESS, agents_per_world, check_range, checked_count, where_rows
from rein.episodes.finite import check_finite_observation
from rein.episodes.random_policy import RandomPolicy
from rein.episodes.recorder import Recorder
from rein.episodes.step import check_part, step_active
from rein.errors import NonFiniteError, check_keywords
from rein.ops.statistics import interquartile_mean
from rein.ops.trees import map_tree, to_device
from rein.protocols import AgentProtocol, Environment, Policy, Replayable, missing_names
from rein.spaces import children, visible_space
from rein.spaces.masks import check_masks
from rein.types import StepState, Tree

_DTYPES = (torch.float64, torch.int64, torch.bool)


class Evaluation(NamedTuple):
    """Result of `evaluate`, one entry per episode, in the order in which the episodes began."""

    episode_return: Tensor  # (E,) float64, sum of raw rewards
    episode_length: Tensor  # (E,) int64
    terminated: Tensor  # (E,) bool
    truncated: Tensor  # (E,) bool, by the environment or by the step limit
    seed: Tensor  # (E,) int64, seed of the episode; -1 if unknown
    success: Tensor  # (E,) int64, 1 for success and 0 for failure; -1 if the environment does not report it
    info: Mapping[str, Tensor]  # (E, ...) infos of the last steps, see the option `info` of `rein.make`

    def __repr__(self) -> str:
        if not len(self.seed):
            return "Evaluation(0 episodes)"
        spread = f"{self.std_return:.5g} ({self.min_return:.5g} to {self.max_return:.5g})"
        rate = "" if math.isnan(self.success_rate) else f", success_rate {self.success_rate:.5g}"
        return (
            f"Evaluation({len(self.seed)} episodes, mean_return {self.mean_return:.5g} +- {spread}, "
            f"mean_length {self.mean_length:.5g}{rate})"
        )

    @property
    def mean_return(self) -> float:
        """Mean return."""
        return float(self.episode_return.mean())

    @property
    def mean_length(self) -> float:
        """Mean length."""
        return float(self.episode_length.double().mean())

    @property
    def std_return(self) -> float:
        """Population standard deviation of the returns; 0 for one episode."""
        return float(self.episode_return.std(correction=0))

    @property
    def min_return(self) -> float:
        """Lowest return."""
        return float(self.episode_return.min())

    @property
    def max_return(self) -> float:
        """Highest return."""
        return float(self.episode_return.max())

    @property
    def median_return(self) -> float:
        """Median of the returns."""
        return float(self.episode_return.quantile(0.5))

    @property
    def iqm_return(self) -> float:
        """Interquartile mean of the returns: the mean without the lowest and the highest quarter."""
        return float(interquartile_mean(self.episode_return.unsqueeze(1)))

    @property
    def success_rate(self) -> float:
        """Fraction of successful episodes, as `success_rate` of Stable-Baselines3; NaN if no success is reported."""
        return float(self.success[self.success >= 0].double().mean())

    def world_returns(self, environment: Environment) -> Tensor:
        """Return the sums of the returns of all agents of each multi-agent world, (K,) float64.

        `environment` is the one that was evaluated.
        """
        return self.episode_return.view(-1, agents_per_world(environment)).sum(1)

    def group_returns(self, environment: Any) -> dict[str, Tensor]:
        """Return the returns of the agents of each group by name, float64. `environment` is the one evaluated."""
        row_E = torch.arange(len(self.seed), device=self.seed.device) % environment.num_envs
        return {
            name: self.episode_return[torch.isin(row_E, group.rows.to(row_E))]
            for name, group in environment.groups.items()
        }


class EvaluationEvent(NamedTuple):
    """An evaluation during training: `state.evaluation` in the handlers of its events."""

    name: str  # prefix of its metrics
    epoch: int  # epoch of the evaluated parameters
    clocks: Mapping[str, float]  # clocks of the evaluated parameters
    result: Evaluation  # episodes so far, the newest last; all of them in `evaluation_completed`
    step_state: StepState | None = None  # in `evaluation_step_completed`: the step; `active` is True where it counts


@check_keywords
def evaluate(
    policy: Policy | AgentProtocol,
    environment: Environment,
    episodes: int,
    *,
    max_episode_steps: int | None = 10_000,
    recorder: Recorder | None = None,
    episode_seeds: Tensor | None = None,
) -> Evaluation:
    """Play `episodes` episodes with a policy, or with the greedy policy of an agent.

    Each environment plays exactly one episode per round, and all environments start a round together. This avoids a
    bias toward short episodes. Do not use the environments elsewhere during the call.

    Success is the entry `is_success` or `success` of the info of an episode's last step, as in Stable-Baselines3. Other
    entries are in `info` of the result, for those that `rein.make(..., info={"distance": 0.0})` names.

    Args:
        policy: Policy or agent.
        environment: Environment with N rows.
        episodes: Number of episodes, E. In multi-agent worlds each agent has an episode, and E is rounded up to whole
            worlds.
        max_episode_steps: Truncate episodes after this number of steps. None sets no limit.
        recorder: Records all episodes.
        episode_seeds: Seeds (E,) of the episodes to play, in environments that are `Replayable`. Default: new episodes
            in each call.

    Raises:
        ValueError: If `episodes` or `max_episode_steps` is below 1, if the number of seeds differs from `episodes`, or
            if the policy has spaces of other shapes than the environment.
        TypeError: If `policy` is not a policy, if `episodes` is not an integer, or if seeds are given and the
            environment is not `Replayable`.
        NonFiniteError: If a reward or an observation that the policy acts on is NaN or infinite. Observations are not
            checked for a `RandomPolicy`, which does not use them.
    """
    acting, episodes = checked_arguments("evaluate", policy, environment, episodes, max_episode_steps)
    if episode_seeds is not None:
        if episode_seeds.shape != (episodes,):
            shape = tuple(episode_seeds.shape)
            raise ValueError(f"evaluate(episode_seeds=...): expected shape ({episodes},), got {shape}")
        if missing_names(environment, Replayable):
            kind = type(environment).__name__
            raise TypeError(f"evaluate(episode_seeds=...): {kind} has no reset_to(episode_seeds)")
    options: dict[str, Any] = {"max_episode_steps": max_episode_steps, "recorder": recorder}
    rounds = range(0, episodes, environment.num_envs)
    return joined(
        [play_round(acting, environment, done, episodes, episode_seeds=episode_seeds, **options) for done in rounds]
    )


def joined(rounds: Sequence[Evaluation]) -> Evaluation:
    """Return the episodes of several rounds as one evaluation."""
    return map_tree(lambda *columns: torch.cat(columns), *rounds)


def empty_evaluation() -> Evaluation:
    """Return the evaluation of no episodes."""
    real, integer, flag = (torch.zeros(0, dtype=dtype, device="cpu") for dtype in _DTYPES)
    return Evaluation(real, integer, flag, flag, integer, integer, {})


def checked_arguments(
    caller: str, policy: Any, environment: Environment, episodes: int, max_episode_steps: int | None
) -> tuple[Any, int]:
    """Return the policy that acts, and the number of episodes rounded up to whole multi-agent worlds.

    Raises TypeError or ValueError as `evaluate` does.
    """
    acting = greedy_policy(policy)
    check_parts(acting, environment)
    count = checked_count(f"{caller}(episodes={episodes!r})", episodes)
    if max_episode_steps is not None and max_episode_steps < 1:
        raise ValueError(f"{caller}(max_episode_steps={max_episode_steps}): expected at least 1, or None for no limit")
    agents = agents_per_world(environment)
    return acting, -(-count // agents) * agents


def greedy_policy(policy: Any) -> Any:
    """Return the greedy policy of an agent, and any other object unchanged."""
    return policy if isinstance(policy, type) or not hasattr(policy, "policy") else policy.policy()


def check_parts(policy: Any, environment: Any) -> None:
    """Raise TypeError or ValueError unless the arguments are a policy and an environment that fit together.

    Policies without `observation_space` and `action_space` fit every environment. The message suggests a fix.
    """
    if missing_names(policy, Policy):
        hint = ""
        if not missing_names(environment, Policy):
            hint = "; pass the policy first and the environment second"
        elif callable(policy):
            hint = (
                "; pass an object with select_action(observation) -> (action, extras) and reset(mask=None), such as "
                "rein.episodes.RandomPolicy"
            )
        raise TypeError(f"evaluate(policy, ...): {type(policy).__name__} is not a Policy{hint}")
    check_part("evaluate", environment, Environment)
    for name in ("observation_space", "action_space"):
        acts_in, space = getattr(policy, name, None), getattr(environment, f"single_{name}")
        if acts_in is not None and _form(acts_in) != _form(space):
            raise ValueError(
                f"evaluate: the spaces differ: the {name.replace('_', ' ')} of the policy is {acts_in}, and that of "
                f"the environment is {space}; build the environment as for training, with the same wrappers"
            )


def _form(space: spaces.Space[Any]) -> Any:
    """Return the names, shapes and numbers of choices in a space, without reserved entries and bounds of numbers."""
    space = visible_space(space)
    if isinstance(space, spaces.Dict) and len(space) == 1:  # `visible_space` replaces it if there are reserved entries
        (space,) = space.values()
    if (inner := children(space)) is not None:
        return {name: _form(part) for name, part in inner.items()}
    return space.shape, *(np.asarray(getattr(space, name, -1)).tolist() for name in ("n", "nvec", "start"))


@torch.inference_mode(False)  # training may use the environments afterwards
@torch.no_grad()
def play_round(
    policy: Policy,
    environment: Any,
    done: int,
    episodes: int,
    *,
    max_episode_steps: int | None,
    recorder: Recorder | None = None,
    episode_seeds: Tensor | None = None,
    check: Callable[[], None] | None = None,
    stepped: Callable[[StepState], None] | None = None,
) -> Evaluation:
    """Play one episode in every environment, and return those that are counted: at most `episodes` - `done`.

    Steps of an environment after the end of its episode are not counted. `episode_seeds` are the seeds of all
    `episodes`. `check` is called before each action, and may raise an error that ends the round. `stepped` is
    called after each step.
    """
    index_N = torch.arange(done, done + environment.num_envs, device=environment.device)
    if episode_seeds is None:
        observation = environment.reset()
    else:
        observation = environment.reset_to(episode_seeds[index_N % episodes])
    check_range(observation, environment.single_observation_space)
    policy.reset()
    played = _play(policy, environment, observation, index_N < episodes, max_episode_steps, recorder, check, stepped)
    return map_tree(lambda column: column[: episodes - done], played)


def _play(
    policy: Policy,
    environment: Any,
    observation: Tree,
    counted_N: Tensor,
    max_episode_steps: int | None,
    recorder: Recorder | None,
    check: Callable[[], None] | None,
    stepped: Callable[[StepState], None] | None,
) -> Evaluation:
    """Play from the first observation (N, *O). `counted_N` is False for surplus episodes of the last round."""
    device, num_envs = environment.device, environment.num_envs
    policy_device, space = getattr(policy, "device", device), environment.single_observation_space
    return_N = torch.zeros(num_envs, dtype=torch.float64, device=device)
    length_N = torch.zeros(num_envs, dtype=torch.int64, device=device)
    terminated_N = torch.zeros(num_envs, dtype=torch.bool, device=device)
    truncated_N, active_N = terminated_N.clone(), ~terminated_N
    info: dict[str, Any] = {}
    seed_N, options = environment.episode_seeds.clone(), getattr(environment, "episode_options", None)
    restarts = getattr(environment, "restarts", 0)
    steps, observed = 0, not isinstance(policy, RandomPolicy)
    if recorder is not None:
        recorder.begin()
    while bool(active_N.any()):  # waits for the device in each step
        if check is not None:
            check()
        if observed:
            check_finite_observation(observation, active_N, f"evaluation, step {steps}")
        action, extras = policy.select_action(to_device(observation, policy_device))
        action = to_device(action, device)
        time_step = step_active(environment, action, active_N)
        check_range(time_step.observation, space, step=steps)
        valid_N = time_step.valid & active_N
        check_masks(observation, space, environment.single_action_space, valid_N, waits=steps == 0)
        return_N += torch.where(valid_N, time_step.reward.double(), 0.0)
        length_N += valid_N
        lost_N = time_step.truncated & ~time_step.valid & active_N
        if getattr(environment, "restarts", 0) != restarts:  # a worker failed: its environments play other episodes
            restarts = environment.restarts
            return_N, length_N = return_N.masked_fill(lost_N, 0.0), length_N.masked_fill(lost_N, 0)
            seed_N = torch.where(lost_N, environment.episode_seeds, seed_N)
        steps += 1
        terminated_N |= time_step.terminated & valid_N
        truncated_N |= time_step.truncated & valid_N
        if steps == max_episode_steps:
            truncated_N |= active_N & ~terminated_N
        if recorder is not None:
            flags = valid_N & counted_N, (truncated_N & valid_N | lost_N) & counted_N
            recorder.record(observation, action, to_device(extras or {}, device), time_step, *flags, seed_N, options)
        if stepped is not None:
            stepped(StepState(observation, valid_N & counted_N, action, extras, time_step))
        ended_N = terminated_N | truncated_N
        info |= {name: where_rows(active_N, x, info.get(name, x)) for name, x in time_step.info.items()}
        active_N = active_N & ~ended_N
        observation = time_step.observation
        policy.reset((time_step.terminated | time_step.truncated).to(policy_device))
    if recorder is not None:
        recorder.end(observation)
    _check_returns(return_N, seed_N, counted_N)
    return Evaluation(return_N, length_N, terminated_N, truncated_N, seed_N, _success_of(info, length_N), info)


def _success_of(info: Mapping[str, Tensor], like_N: Tensor) -> Tensor:
    """Return the success that infos report, (N,) int64; -1 if it is unknown."""
    success_N = torch.full_like(like_N, -1)
    for name in reversed(SUCCESS):
        if name in info:
            reported_N = info[name].reshape(success_N.shape).long()
            success_N = torch.where(reported_N >= 0, reported_N, success_N)
    return success_N


def _check_returns(return_N: Tensor, seed_N: Tensor, counted_N: Tensor) -> None:
    """Raise NonFiniteError if a counted return is NaN or infinite."""
    if wrong := (~return_N.isfinite() & counted_N).nonzero().flatten().tolist():
        n = wrong[0]
        raise NonFiniteError(
            f"evaluate: a reward of environment {n} is not finite: the return of the episode with seed "
            f"{int(seed_N[n])} is {float(return_N[n])}"
        )
