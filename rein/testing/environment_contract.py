"""Test suite for environments. Example::

    class TestMyEnvironment(EnvironmentContract):
        def make(self, num_envs, seed):
            return MyEnvironment(num_envs=num_envs, seed=seed)

Make the episodes short enough that some end within `steps` random steps.

For an environment of multi-agent worlds, `make(num_envs, seed)` returns `num_envs` worlds. The tests then also check
the rules of `rein.protocols.Worlds`.

Shapes: T steps, N rows (environments, or agents of all worlds), W worlds, O one observation, A one action.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import agents_per_world, check_observation, check_time_step
from rein.errors import ReinError
from rein.ops.random import episode_seeds
from rein.ops.trees import leaves, map_tree
from rein.protocols import Environment, missing_names
from rein.spaces import ACTION_MASK, children, choices, entry
from rein.spaces.conversion import Codec
from rein.testing.stateful import check_equal, check_plain, copy_state, first_difference
from rein.types import Group, TimeStep, Tree

_SEED = 11


class _Rollout(NamedTuple):
    """Rollout of random actions. Entry t of a list belongs to step t."""

    start: Tree  # (N, *O) observation of the reset
    actions: list[Tree]  # (N, *A) each
    time_steps: list[TimeStep]
    seeds: list[Tensor]  # (N,) each: episode seeds before step t, and after the last step


class EnvironmentContract:
    """Base class of the tests of environments. Subclasses are named `Test...` and define `make`.

    The random actions honour action masks.
    """

    num_envs = 4  # number of environments or worlds
    steps = 200  # number of random steps; an episode must end within them
    different_starts = 2  # smallest number of different first observations among all rows

    def make(self, num_envs: int, seed: int | None) -> Any:
        """Return new environments, or `num_envs` worlds; built without a seed if `seed` is None."""
        raise NotImplementedError

    def test_implements_environment_protocol(self) -> None:
        """Attributes have the types of the protocol, and the config is JSON."""
        environment = self.make(self.num_envs, _SEED)
        assert not (missing := missing_names(environment, Environment)), f"missing: {', '.join(missing)}"
        if hasattr(environment, "worlds"):
            self._check_worlds(environment)
        else:
            assert environment.num_envs == self.num_envs, f"num_envs is {environment.num_envs}, not {self.num_envs}"
        assert environment.seed == _SEED, f"seed is {environment.seed}, not {_SEED}"
        for name in ("single_observation_space", "single_action_space"):
            assert isinstance(getattr(environment, name), spaces.Space), f"{name} is not a gymnasium space"
        assert isinstance(environment.replayable, bool), "replayable is not a bool"
        config = environment.config
        assert json.loads(json.dumps(config)) == config, f"config does not survive a round trip through JSON: {config}"

    def test_returned_data_fits_spaces(self) -> None:
        """Checks structure, shapes, dtypes, device, finite numbers and the bounds of every Box."""
        environment = self._make(self.num_envs, _SEED)
        space, rollout = environment.single_observation_space, self._rollout(environment)
        check_observation(rollout.start, environment.num_envs, space)
        check_bounds(rollout.start, space)
        for time_step in rollout.time_steps:
            check_time_step(time_step, environment.num_envs, space)
            check_bounds(time_step.observation, space)
            check_bounds(time_step.final_observation, space)
            for path, leaf in leaves(time_step):
                assert leaf.device.type == environment.device.type, f"{path} is on {leaf.device}"

    def test_returned_tensors_never_change(self) -> None:
        """Every step returns new tensors."""
        environment, returned, copies = self._make(self.num_envs, _SEED), [], []
        returned.append(environment.reset())
        copies.append(copy_state(returned[0]))
        for action in self._actions(environment):
            returned += [environment.apply_action(action), environment.episode_seeds]
            copies += [copy_state(item) for item in returned[-2:]]
        environment.reset()
        difference = first_difference(copies, returned)
        assert difference is None, f"a returned tensor changed later: {difference}; return new tensors"

    def test_apply_action_does_not_change_action(self) -> None:
        """The agent records the action afterwards."""
        environment = self._make(self.num_envs, _SEED)
        environment.reset()
        for action in self._actions(environment):
            before = copy_state(action)
            environment.apply_action(action)
            assert first_difference(before, action) is None, "apply_action changed its argument"

    def test_new_episode_begins_in_the_step_that_ends_one(self) -> None:
        """The episode seed changes exactly in the step that ends an episode, or the last episode of a world."""
        environment = self._make(self.num_envs, _SEED)
        rollout, ends = self._rollout(environment), _Ends(environment)
        for (before_N, after_N), time_step in zip(pairwise(rollout.seeds), rollout.time_steps, strict=True):
            over_N, is_known = ends.after(time_step), bool((after_N >= 0).any())
            assert not is_known or torch.equal((before_N != after_N).cpu(), over_N), (
                "a seed changed without the end of an episode, or the opposite"
            )

    def test_agents_that_have_left_repeat_their_last_observation(self) -> None:
        """Rows of these agents are not valid, end no episode and have reward 0 until their world resets.

        Their actions have no effect.
        """
        environment, twin = (self._make(self.num_envs, _SEED) for _ in range(2))
        if not hasattr(environment, "worlds"):
            return
        rollout, ends = self._rollout(environment), _Ends(environment)
        current, first = rollout.start, rollout.actions[0]
        twin.reset()
        for time_step, action in zip(rollout.time_steps, rollout.actions, strict=True):
            left_N = ends.left.clone()
            over_N = ends.after(time_step)
            assert torch.equal(time_step.valid.cpu(), ~left_N), "a row is not valid exactly while its agent has left"
            gone = rows_of(time_step, left_N)
            still = not any(x.any() for x in (gone.reward, gone.terminated, gone.truncated))
            assert still, f"the row of an agent that has left has a reward or ended: {gone}"
            check_same(time_step.observation, current, left_N & ~over_N, "the observation of an agent that has left")
            current = time_step.observation
            gone_N = left_N.to(environment.device)
            other = map_tree(lambda a, b, m=gone_N: torch.where(m.view(-1, *[1] * (a.ndim - 1)), b, a), action, first)
            difference = first_difference(time_step, twin.apply_action(other))
            assert difference is None or not environment.replayable, (
                f"the action of an agent that has left changes {difference}"
            )

    def test_final_observation_equals_observation_within_episode(self) -> None:
        """`final_observation` is therefore the next observation in every row."""
        for time_step in self._rollout(self._make(self.num_envs, _SEED)).time_steps:
            on_N = ~(time_step.terminated | time_step.truncated)
            pair = time_step.final_observation, time_step.observation
            check_same(*pair, on_N, "the final observation of an unfinished episode")

    def test_environments_with_one_seed_start_differently(self) -> None:
        """Every environment has a separate random stream."""
        environment = self._make(self.num_envs, _SEED)
        start = environment.reset()
        seeds = environment.episode_seeds.tolist()
        assert not environment.replayable or len(set(seeds)) == self.num_envs, f"episode seeds repeat: {seeds}"
        rows = [rows_of(start, torch.tensor([index])) for index in range(environment.num_envs)]
        different = [row for k, row in enumerate(rows) if all(first_difference(row, x) for x in rows[:k])]
        count, wanted = len(different), self.different_starts
        assert count >= wanted, f"{environment.num_envs} rows have {count} different starts, fewer than {wanted}"

    def test_same_seed_gives_same_rollout(self) -> None:
        """The seed determines everything that is random. Another seed gives other episodes."""
        environments = [self._make(self.num_envs, seed) for seed in (_SEED, _SEED, _SEED + 1)]
        one, same, other = map(self._rollout, environments)
        if environments[0].replayable:
            check_equal(one, same, "two rollouts with one seed")
            assert not torch.equal(one.seeds[0], other.seeds[0]), "another seed gives the same episodes"

    def test_streams_do_not_depend_on_num_envs(self) -> None:
        """Environment i behaves the same for every `num_envs`."""
        environment = self._make(self.num_envs, _SEED)
        many = self._rollout(environment)
        for count in (1, 2):
            fewer = self._make(count, _SEED)
            few = self._rollout(fewer)
            if environment.replayable:
                first_rows = rows_of(many, torch.arange(fewer.num_envs))
                check_equal(few, first_rows, f"num_envs={count} and num_envs={self.num_envs}")

    def test_episode_seeds_follow_seed_environment_and_episode(self) -> None:
        """The k-th episode of environment or world i has the seed `rein.ops.random.episode_seeds(seed, i, k)`."""
        environment = self._make(self.num_envs, _SEED)
        count_N, ends = torch.zeros(environment.num_envs, dtype=torch.int64), _Ends(environment)
        assert (environment.episode_seeds == -1).all(), "episode_seeds is not -1 before the first reset"
        for _ in range(2):
            environment.reset()
            ends.left[:] = False
            for action in [None, *self._actions(environment)]:
                if action is not None:
                    count_N += ends.after(environment.apply_action(action))
                _check_seeds(environment, count_N)
            count_N += 1  # reset begins the next episode

    def test_reset_with_seed_restarts_streams(self) -> None:
        """The environment then equals one built with that seed."""
        environment, fresh = self._make(self.num_envs, _SEED), self._make(self.num_envs, _SEED + 1)
        self._rollout(environment)
        starts = environment.reset(seed=_SEED + 1), fresh.reset()
        assert environment.seed == _SEED + 1, f"after reset(seed={_SEED + 1}), seed is {environment.seed}"
        assert torch.equal(environment.episode_seeds, fresh.episode_seeds), "reset(seed=) does not begin at episode 0"
        assert not environment.replayable or first_difference(*starts) is None, "reset(seed=) starts another episode"

    def test_loaded_environment_continues_bit_for_bit(self) -> None:
        """A state saved within an episode gives 50 equal steps, or new episodes if not replayable."""
        environment, loaded = self._make(self.num_envs, _SEED), self._make(self.num_envs, _SEED + 1)
        actions = self._actions(environment, 63)
        environment.reset()
        for action in actions[:13]:
            environment.apply_action(action)
        check_plain(environment.state_dict())
        loaded.load_state_dict(copy_state(environment.state_dict()))
        if isinstance(loaded, _ValidActions):
            loaded.observation = environment.observation
        if not environment.replayable:
            loaded.reset()
            return
        for k, action in enumerate(actions[13:], start=1):
            check_equal(environment.apply_action(action), loaded.apply_action(action), f"step {k} after loading")
            assert torch.equal(environment.episode_seeds, loaded.episode_seeds), f"other episode seeds after {k} steps"

    def test_seed_and_actions_reproduce_episode(self) -> None:
        """`reset_to(episode_seeds)` and the same actions reproduce rewards, ends and observations under any seed."""
        environment = self._make(self.num_envs, _SEED)
        if environment.replayable:
            rollout = self._rollout(environment)
            for index in range(self.num_envs):
                second = self._check_replay(rollout, index, 0)
                self._check_replay(rollout, index, second)

    def test_reseed_works_only_before_first_reset(self) -> None:
        """`training_loop(seed=)` seeds environments that were built without a seed."""
        environment, built = self._make(self.num_envs, None), self._make(self.num_envs, _SEED)
        assert environment.seed is None, f"seed is {environment.seed}, not None, without a seed"
        environment.reseed(_SEED)
        environment.reset()
        built.reset()
        assert torch.equal(environment.episode_seeds, built.episode_seeds), "reseed(seed) differs from a build with it"
        check_refused(lambda: environment.reseed(_SEED), "reseed after the first reset")

    def test_invalid_actions_raise(self) -> None:
        """Acting before the first reset and actions for too many environments raise an error."""
        environment = self._make(self.num_envs, _SEED)
        action = self._actions(environment, 1)[0]
        check_refused(lambda: environment.apply_action(action), "acting before the first reset")
        environment.reset()
        environment.apply_action(action)
        longer = map_tree(lambda tensor: torch.cat([tensor, tensor[:1]]), action)
        check_refused(
            lambda: environment.apply_action(longer), f"{environment.num_envs + 1} actions for {environment.num_envs}"
        )

    def test_reset_where_leaves_other_rows_unchanged(self) -> None:
        """`reset_where(mask)`, if present, begins the next episodes in the mask and leaves other rows unchanged."""
        environment, twin, fresh = (self._make(self.num_envs, _SEED) for _ in range(3))
        if not hasattr(environment, "reset_where"):
            return
        environment.reset()
        twin.reset()
        ends = _Ends(environment)
        mask_N, count_N = ends.index % 2 == 1, torch.zeros(environment.num_envs, dtype=torch.int64)
        for k, action in enumerate(self._actions(environment), start=1):
            time_step, untouched = environment.apply_action(action), twin.apply_action(action)
            count_N += ends.after(time_step)
            if environment.replayable:
                check_same(time_step, untouched, ~mask_N, f"after a reset of other rows, step {k}")
            if k % 5 == 0:
                observation = environment.reset_where(mask_N.to(environment.device))
                count_N += mask_N
                ends.left[mask_N] = False
                check_same(observation, time_step.observation, ~mask_N, "a row outside of the mask")
                if environment.replayable:
                    begun = fresh.reset_to(environment.episode_seeds)
                    check_same(observation, begun, mask_N, "the first observation of a row that was reset")
            _check_seeds(environment, count_N)

    def test_apply_action_where_leaves_other_rows_unchanged(self) -> None:
        """`apply_action_where(action, mask)`, if present: two partial steps equal one full step."""
        environment, twin = (self._make(self.num_envs, _SEED) for _ in range(2))
        if not hasattr(environment, "apply_action_where"):
            return
        current, _ = environment.reset(), twin.reset()
        even_N = (_Ends(environment).index % 2 == 0).to(environment.device)
        for k, action in enumerate(self._actions(environment), start=1):
            whole = twin.apply_action(action)
            for mask_N in (even_N, ~even_N):
                part = environment.apply_action_where(action, mask_N)
                stayed = rows_of(part, ~mask_N)
                still = not any(x.any() for x in (stayed.valid, stayed.reward, stayed.terminated, stayed.truncated))
                assert still, f"a row that was not stepped is valid, has a reward or ended: {stayed}"
                for observation in (part.observation, part.final_observation):
                    check_same(observation, current, ~mask_N, "the observation of a row that was not stepped")
                if environment.replayable:
                    check_same(part, whole, mask_N, f"partial step {k}")
                current = part.observation
            assert torch.equal(environment.episode_seeds, twin.episode_seeds), f"other episode seeds after {k} steps"

    def test_close_twice(self) -> None:
        """`close` may be called twice."""
        environment = self._make(self.num_envs, _SEED)
        environment.reset()
        environment.close()
        environment.close()

    def _make(self, num_envs: int, seed: int | None) -> Any:
        """Return new environments. If they have action masks, their invalid actions are replaced by valid ones."""
        environment = self.make(num_envs, seed)
        has_masks = entry(environment.single_observation_space, ACTION_MASK) is not None
        return _ValidActions(environment) if has_masks else environment

    def _actions(self, environment: Any, steps: int | None = None) -> list[Tree]:
        return random_actions(environment, steps or self.steps)

    def _rollout(self, environment: Any) -> _Rollout:
        rollout = _Rollout(environment.reset(), self._actions(environment), [], [environment.episode_seeds])
        for action in rollout.actions:
            rollout.time_steps.append(environment.apply_action(action))
            rollout.seeds.append(environment.episode_seeds)
        ends = sum(int((step.terminated | step.truncated).sum()) for step in rollout.time_steps)
        assert ends, f"no episode ended in {self.steps} random steps; increase `steps`, or shorten the episodes"
        return rollout

    def _check_worlds(self, environment: Any) -> None:
        """Check the attributes of an environment of worlds."""
        worlds, rows = environment.worlds, environment.num_envs
        assert worlds == self.num_envs, f"worlds is {worlds}, not {self.num_envs}"
        assert rows % worlds == 0, f"num_envs is {rows}, which is not a multiple of {worlds} worlds"
        for name, group in environment.groups.items():
            assert isinstance(group, Group), f"groups[{name!r}] is not a rein.types.Group"
            row_R = group.rows
            assert len(row_R.unique()) == len(row_R) and bool(((row_R >= 0) & (row_R < rows)).all()), (
                f"groups[{name!r}].rows are not different rows below {rows}: {row_R}"
            )

    def _check_replay(self, rollout: _Rollout, index: int, begin: int) -> int:
        """Replay the episode of environment or world `index` that began before step `begin`.

        Returns the step after its end.
        """
        environment = self._make(1, _SEED + 1)
        rows = torch.arange(environment.num_envs) + index * environment.num_envs
        first, ends = environment.reset_to(rows_of(rollout.seeds[begin], rows)), _Ends(environment)
        expected = rollout.time_steps[begin - 1].observation if begin else rollout.start
        check_equal(rows_of(expected, rows), first, "the first observation of a replayed episode")
        for t in range(begin, self.steps):
            time_step = environment.apply_action(rows_of(rollout.actions[t], rows))
            expected = rows_of(rollout.time_steps[t], rows)
            left_N = ends.left.clone()
            over = bool(ends.after(expected).any())
            pair = [x._replace(observation=None) if over else x for x in (expected, time_step)]
            if over:  # the final observation of an agent that has left is the first of the next episode
                pair = [rows_of(x, ~left_N) for x in pair]
            check_equal(*pair, f"step {t - begin + 1} of a replayed episode")
            if over:
                return t + 1
        return self.steps


class _ValidActions:
    """Environments whose invalid actions are replaced by valid ones. The replacement depends on the mask only."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.observation: Tree = None  # the current observation

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name in ("reset", "reset_to", "reset_where"):
            return functools.partial(self._begin, method)
        return functools.partial(self._step, method) if name in ("apply_action", "apply_action_where") else method

    def _begin(self, method: Callable[..., Tree], *args: Any, **kwargs: Any) -> Tree:
        self.observation = method(*args, **kwargs)
        return self.observation

    def _step(self, method: Callable[..., TimeStep], action: Tree, *args: Any) -> TimeStep:
        if self.observation is not None:
            mask = self.observation[ACTION_MASK]
            action = valid_actions(action, mask, self._inner.single_action_space)
        time_step = method(action, *args)
        self.observation = time_step.observation
        return time_step


def valid_actions(action: Tree, mask: Tree, space: spaces.Space[Any]) -> Tree:
    """Return actions (N, *A) in which each invalid choice is replaced by a valid one, if the mask has one."""
    inner = children(space)
    if inner is not None:
        return {k: valid_actions(x, mask[k], inner[k]) if k in mask else x for k, x in action.items()}
    if len(action) != len(mask):  # refused by the environment
        return action
    low = torch.as_tensor(getattr(space, "start", getattr(space, "low", 0)), device=action.device)
    index_NK, columns = (action - low).reshape(len(action), -1), []
    for index_N, valid_NC in zip(index_NK.unbind(1), (mask != 0).split(choices(space)[0], 1), strict=True):
        count_N = valid_NC.sum(1)
        order_NC = valid_NC.to(torch.int8).argsort(dim=1, descending=True, stable=True)  # the valid ones first
        other_N = order_NC.gather(1, (index_N % count_N.clamp(min=1))[:, None])[:, 0]
        keep_N = valid_NC.gather(1, index_N[:, None])[:, 0] | (count_N == 0)
        columns.append(torch.where(keep_N, index_N, other_N))
    return (torch.stack(columns, 1).reshape(action.shape) + low).to(action.dtype)


class _Ends:
    """Finds the steps in which an environment, or a whole world, begins a new episode."""

    def __init__(self, environment: Any) -> None:
        agents = agents_per_world(environment)
        self.index = torch.arange(environment.num_envs) // agents  # (N,) environment or world of each row
        self.left = torch.zeros(environment.num_envs, dtype=torch.bool)  # (N,) whether the row waits for its world
        self._agents = agents

    def after(self, time_step: TimeStep) -> Tensor:
        """Return the rows (N,) that begin a new episode in this step."""
        left_N = self.left | (time_step.terminated | time_step.truncated).cpu()
        over_N = left_N.view(-1, self._agents).all(1).repeat_interleave(self._agents)
        self.left = left_N & ~over_N
        return over_N


def check_environment(make: Callable[[int, int | None], Any], *, num_envs: int = 4, steps: int = 200) -> None:
    """Run all tests of `EnvironmentContract` on the environments that `make(num_envs, seed)` returns.

    An episode must end within `steps` random steps. Raises AssertionError at the first test that fails; a note of the
    error names the test.

    Example:
        >>> check_environment(lambda num_envs, seed: MyEnvironment(num_envs=num_envs, seed=seed))
    """
    suite = EnvironmentContract()
    suite.make, suite.num_envs, suite.steps = make, num_envs, steps  # type: ignore[method-assign]
    for name in vars(EnvironmentContract):
        if name.startswith("test_"):
            try:
                getattr(suite, name)()
            except AssertionError as error:
                error.add_note(f"check_environment: {name}")
                raise


def _check_seeds(environment: Any, count_N: Tensor) -> None:
    index_N = _Ends(environment).index
    got_N, expected_N = environment.episode_seeds.cpu(), episode_seeds(_SEED, index_N, count_N)
    is_known = environment.replayable or not (got_N == -1).all()
    assert not is_known or torch.equal(got_N, expected_N), f"episode_seeds {got_N}, expected {expected_N}"


_REFUSALS = (ReinError, RuntimeError, ValueError)


def random_actions(environment: Any, steps: int) -> list[Tree]:
    """Return `steps` random actions (N, *A). Row i does not depend on N."""
    streams = []
    for index in range(environment.num_envs):
        space = copy.deepcopy(environment.single_action_space)
        space.seed(index)
        streams.append([space.sample() for _ in range(steps)])
    codec = Codec("action", environment.single_action_space)
    return [map_tree(lambda x: x.to(environment.device), codec.stack(v)) for v in zip(*streams, strict=True)]


def rows_of(tree: Any, which: Tensor) -> Any:
    """Return the rows of every tensor in a tree, selected by indices or by a mask (N,)."""
    return map_tree(lambda tensor: tensor[which.to(tensor.device)], tree)


def check_same(one: Any, other: Any, which: Tensor, what: str) -> None:
    """Raise AssertionError, whose message begins with `what`, if two trees differ by a bit in these rows."""
    check_equal(rows_of(one, which), rows_of(other, which), what)


def check_bounds(observation: Tree, space: spaces.Space[Any]) -> None:
    """Raise AssertionError if an observation is outside the bounds of a Box."""
    for key, child in (children(space) or {}).items():
        check_bounds(observation[key], child)
    if isinstance(space, spaces.Box):
        value = observation.cpu().double()
        low, high = (torch.as_tensor(bound).double() for bound in (space.low, space.high))
        slack = 1e-5 * torch.maximum(low.abs(), high.abs()).nan_to_num(posinf=0.0).clamp(min=1.0)
        outside = (value < low - slack) | (value > high + slack)
        assert not outside.any(), f"the observation has {value[outside][0]}, outside of {space}"


def check_refused(call: Callable[[], Any], what: str) -> None:
    """Raise AssertionError if `call` raises none of the errors of rejected arguments."""
    try:
        call()
    except _REFUSALS:
        return
    raise AssertionError(f"{what} raised no error")
