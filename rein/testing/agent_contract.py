"""Test suite for agents. Example::

    class TestMyAgent(AgentContract):
        def make(self, seed):
            return MyAgent(observation_space, action_space, seed=seed)

        def environment(self, num_envs, seed):
            return Gridworld(num_envs=num_envs, seed=seed)

Make the agent small enough that it learns within `steps` steps of `num_envs` environments.

Shapes: N environments.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rein.envs.base.contract import check_action
from rein.errors import EnvironmentContractError
from rein.ops.trees import leaves, map_tree, to_device
from rein.protocols import AgentProtocol, Environment, Policy, missing_names
from rein.spaces import mask_of
from rein.spaces.conversion import Codec
from rein.testing.environment_contract import valid_actions
from rein.testing.stateful import CountedContract, check_equal, copy_state, first_difference
from rein.types import Transition

Change = Callable[[Transition], Transition]


class AgentContract:
    """Base class of the tests of an agent. Subclasses are named `Test...` and define `make` and `environment`."""

    num_envs = 8
    steps = 60
    bootstraps = True  # False for an agent that does not learn from next observations

    def make(self, seed: int | None) -> Any:
        """Return a new agent, built without a seed if `seed` is None."""
        raise NotImplementedError

    def environment(self, num_envs: int, seed: int) -> Environment:
        """Return environments for the agent. Some episodes must end within `steps` steps."""
        raise NotImplementedError

    def learned(self, agent: Any) -> Any:
        """Return the tensors that learning changes: the parameters of all modules of the agent.

        For an agent without modules, these are the floating-point tensors of its state. Override this method if they
        contain other data.
        """
        modules = {name: value for name, value in vars(agent).items() if isinstance(value, nn.Module)}
        if modules:
            return {name: dict(module.named_parameters()) for name, module in modules.items()}
        tensors = ((path, leaf) for path, leaf in leaves(agent.state_dict()) if isinstance(leaf, Tensor))
        return {path: tensor for path, tensor in tensors if tensor.is_floating_point()}

    def test_implements_agent_protocol(self) -> None:
        """The agent and its policy implement the protocols, counts start at 0, and the config is JSON."""
        agent = self.make(0)
        assert missing_names(agent, AgentProtocol) == []
        assert missing_names(agent.policy(), Policy) == []
        assert (agent.seed, agent.env_steps, agent.updates) == (0, 0, 0)
        json.dumps(agent.config, allow_nan=False)

    def test_actions_are_in_action_space(self) -> None:
        """Actions of the agent and its policies have N rows in the action space and require no gradient.

        Action masks allow them.
        """
        agent = self.make(0)
        for transition in self._stream()[:10]:
            for actor in (agent, agent.policy(), agent.policy(deterministic=False)):
                action, extras = actor.select_action(transition.observation)
                for path, tensor in leaves({"action": action, "extras": dict(extras)}):
                    assert len(tensor) == self.num_envs, f"{path} has {len(tensor)} rows, not {self.num_envs}"
                    assert not tensor.requires_grad, f"{path} requires a gradient; use torch.no_grad in select_action"
                try:
                    check_action(action, self.num_envs, agent.action_space)
                except EnvironmentContractError as error:
                    raise AssertionError(str(error)) from error
                for row in Codec("action", agent.action_space).split(action, self.num_envs):
                    assert agent.action_space.contains(row), f"{row} is not in {agent.action_space}"
                if (mask := mask_of(transition.observation)) is not None:
                    difference = first_difference(action, valid_actions(action, mask, agent.action_space))
                    assert difference is None, f"the action mask does not allow the action {action}"

    def test_first_reset_does_not_change_actions(self) -> None:
        """A new agent acts and learns the same with and without a call of `observe_reset` at the first reset."""
        stream, notified, other = self._stream(), self.make(0), self.make(0)
        notified.observe_reset(stream[0].observation, torch.ones_like(stream[0].valid))
        for transition in stream:
            acts = []
            for agent in (notified, other):
                action, extras = agent.select_action(transition.observation)
                agent.record_observation(transition._replace(action=action, extras=extras))
                agent.optimize_model()
                acts.append((action, extras))
            check_equal(*acts)

    def test_metrics_are_finite_and_detached(self) -> None:
        """The agent reports metrics within the contract's steps, all finite and without a gradient."""
        reported = [item for metrics in self._learning(self.make(0)) for item in metrics.items()]
        assert reported, f"optimize_model reported nothing in {self.steps} steps; make a smaller agent"
        for name, value in reported:
            value = torch.as_tensor(value)
            assert not value.requires_grad, f"metric {name!r} requires a gradient; detach it"
            assert torch.isfinite(value).all(), f"metric {name!r} is {value}"

    def test_counts_env_steps_and_updates(self) -> None:
        """A step counts N env_steps. `updates` increases exactly if `optimize_model` returns metrics."""
        agent, before = self.make(0), 0
        for k, metrics in enumerate(self._learning(agent), start=1):
            assert agent.env_steps == k * self.num_envs, (
                f"{agent.env_steps} env_steps after {k} of {self.num_envs} rows"
            )
            grown = agent.updates - before
            assert bool(grown) == bool(metrics), f"updates increased by {grown}, but the metrics are {dict(metrics)}"
            before = agent.updates
        assert isinstance(agent.env_steps, int)
        assert isinstance(agent.updates, int)

    def test_learning_changes_parameters(self) -> None:
        """Otherwise the tests that compare parameters are meaningless."""
        agent = self.make(0)
        before = copy_state(self.learned(agent))
        self._drive(agent)
        assert first_difference(before, self.learned(agent)) is not None

    def test_invalid_rows_change_no_parameters(self) -> None:
        """An agent that gets only invalid rows does not change."""
        agent = self.make(0)
        before = copy_state(self.learned(agent))
        self._drive(agent, change=lambda t: t._replace(valid=torch.zeros_like(t.valid)))
        check_equal(before, self.learned(agent))

    def test_content_of_invalid_rows_is_ignored(self) -> None:
        """Two agents learn the same if they differ only in rewards and ends of invalid rows."""

        def hide(transition: Transition) -> Transition:
            return transition._replace(valid=torch.arange(self.num_envs, device=transition.valid.device) % 2 == 0)

        def garbage(transition: Transition) -> Transition:
            hidden = hide(transition)
            return hidden._replace(
                reward=torch.where(hidden.valid, hidden.reward, 1e6),
                terminated=torch.where(hidden.valid, hidden.terminated, ~hidden.terminated),
            )

        check_equal(*(self.learned(self._drive(self.make(0), change=change)) for change in (hide, garbage)))

    def test_terminated_row_does_not_bootstrap(self) -> None:
        """The next observation of a terminated row does not matter."""
        ended = [_terminate, lambda t: _other_next_observation(_terminate(t))]
        check_equal(*(self.learned(self._drive(self.make(0), change=change)) for change in ended))

    def test_truncated_row_bootstraps(self) -> None:
        """The next observation of a truncated row matters, and truncation differs from termination."""
        ended = [_truncate, lambda t: _other_next_observation(_truncate(t)), _terminate]
        one, other, terminated = (self.learned(self._drive(self.make(0), change=change)) for change in ended)
        for changed, by in ((other, "another next observation"), (terminated, "termination")):
            differs = first_difference(one, changed) is not None
            message = f"{by} {'changes' if differs else 'does not change'} what is learned from a truncated row"
            assert differs == self.bootstraps, f"{message}; set bootstraps = {differs} if this is intended"

    def test_policy_does_not_change_agent(self) -> None:
        """Acting and resetting leave the agent unchanged, for deterministic and sampling policies."""
        agent = self._drive(self.make(0))
        before = copy_state(agent.state_dict())
        for deterministic in (True, False):
            policy = agent.policy(deterministic=deterministic)
            policy.reset()
            for transition in self._stream():
                policy.select_action(transition.observation)
                policy.reset(transition.terminated | transition.truncated)
        check_equal(before, agent.state_dict())

    def test_policy_follows_parameters(self) -> None:
        """A policy created before learning and loading acts like one created afterwards."""
        agent, other = self.make(0), self._drive(self.make(1))
        policy = agent.policy()
        self._drive(agent)
        check_equal(self._acts(policy), self._acts(agent.policy()))
        agent.load_state_dict(copy_state(other.state_dict()))
        check_equal(self._acts(policy), self._acts(other.policy()))

    def test_same_seed_gives_same_state(self) -> None:
        """Another seed gives other parameters. torch's global generator is neither read nor changed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            one, position = self._drive(self.make(0)), torch.get_rng_state()
            torch.manual_seed(1)
            assert torch.equal(position, torch.get_rng_state()), "the agent uses torch's global generator"
            torch.manual_seed(2)
            same, different = self._drive(self.make(0)), self._drive(self.make(1))
        check_equal(one.state_dict(), same.state_dict())
        assert first_difference(self.learned(one), self.learned(different)) is not None, (
            "seeds 0 and 1 give equal results"
        )

    def test_reseed_equals_building_with_seed(self) -> None:
        """Holds before the first step, for agents built without a seed or with another one."""
        built = self.make(5)
        for agent in (self.make(None), self.make(6)):
            agent.reseed(5)
            assert agent.seed == 5
            check_equal(built.state_dict(), agent.state_dict())
        assert self.make(None).seed is None
        check_equal(self._drive(built).state_dict(), self._drive(agent).state_dict())

    def test_reseed_after_first_step_raises(self) -> None:
        """Reseeding would discard the learned parameters."""
        agent = self._drive(self.make(0), steps=1)
        try:
            agent.reseed(1)
        except RuntimeError:
            return
        raise AssertionError("reseed(1) after a step did not raise RuntimeError")

    def test_state_fulfills_stateful_contract(self) -> None:
        """A state saved during a run and loaded into a new agent continues bit for bit; see `StatefulContract`."""
        stream = self._stream()

        def step(agent: Any, k: int) -> Any:
            transition = stream[k % len(stream)]
            return dict(_learn(agent, transition)), agent.select_action(transition.observation)

        CountedContract(lambda: self.make(0), step).check()

    def _stream(self) -> list[Transition]:
        """Return transitions of random actions, with action None. They are the same for all agents."""
        environment = self.environment(self.num_envs, 0)
        space = copy.deepcopy(environment.single_action_space)
        space.seed(0)
        codec = Codec("action", space)
        observation, stream = environment.reset(), []
        for _ in range(self.steps):
            action = to_device(codec.stack([space.sample() for _ in range(self.num_envs)]), environment.device)
            if (mask := mask_of(observation)) is not None:
                action = valid_actions(action, mask, space)
            now = environment.apply_action(action)
            ends = now.reward, now.terminated, now.truncated, now.final_observation, now.valid
            stream.append(Transition(observation, None, *ends, {}))
            observation = now.observation
        environment.close()
        return stream

    def _learning(self, agent: Any, change: Change | None = None) -> Iterator[Mapping[str, Any]]:
        """Let the agent act and learn on the stream, and yield the metrics of each step."""
        for transition in self._stream():
            yield _learn(agent, transition if change is None else change(transition))

    def _drive(self, agent: Any, change: Change | None = None, steps: int | None = None) -> Any:
        """Let the agent learn on the stream, and return it."""
        for _ in itertools.islice(self._learning(agent, change), steps):
            pass
        return agent

    def _acts(self, policy: Policy) -> list[Any]:
        policy.reset()
        return [policy.select_action(transition.observation) for transition in self._stream()]


def _learn(agent: Any, transition: Transition) -> Mapping[str, Any]:
    """Run one step of the agent. Its action replaces the action that the environments received."""
    action, extras = agent.select_action(transition.observation)
    agent.record_observation(transition._replace(action=action, extras=extras))
    return agent.optimize_model()


def _terminate(transition: Transition) -> Transition:
    yes = torch.ones_like(transition.terminated)
    return transition._replace(terminated=yes, truncated=~yes)


def _truncate(transition: Transition) -> Transition:
    yes = torch.ones_like(transition.truncated)
    return transition._replace(terminated=~yes, truncated=yes)


def _other_next_observation(transition: Transition) -> Transition:
    """Give each row the next observation of its neighbor; a single row gets its own observation."""
    if len(transition.reward) == 1:
        return transition._replace(next_observation=transition.observation)
    return transition._replace(next_observation=map_tree(lambda x: x.roll(1, dims=0), transition.next_observation))
