"""A test suite for agents.

    class TestMyAgent(AgentContract):
        def make(self, seed):
            return MyAgent(observation_space, action_space, seed=seed)

        def environment(self, num_envs, seed):
            return Gridworld(num_envs=num_envs, seed=seed)

Make the agent so small that it learns within `steps` steps of `num_envs` environments: a test can only compare what
has happened. Shapes: N environments.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rein.ops.trees import leaves, map_tree
from rein.protocols import AgentProtocol, Environment, Policy
from rein.testing.stateful import StatefulContract, copy_state, first_difference
from rein.types import Transition

Change = Callable[[Transition], Transition]


class AgentContract:
    """Subclass it in a test file, name the subclass Test..., and give `make` and `environment`."""

    num_envs = 8
    steps = 60
    bootstraps = True  # False for an agent whose learning never looks at the next observation

    def make(self, seed: int | None) -> Any:
        """A new agent; one that was built without a seed where `seed` is None."""
        raise NotImplementedError

    def environment(self, num_envs: int, seed: int) -> Environment:
        """Environments that fit the agent, whose episodes end now and then."""
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

    def test_it_is_an_agent(self) -> None:
        """Names and first values of the protocol; a policy is a Policy."""
        agent = self.make(0)
        assert isinstance(agent, AgentProtocol)
        assert isinstance(agent.policy(), Policy)
        assert (agent.seed, agent.env_steps, agent.updates) == (0, 0, 0)
        json.dumps(agent.config, allow_nan=False)

    def test_actions_lie_in_the_action_space(self) -> None:
        """The agent's and its policies': N of them, each in the space of one environment, without a graph."""
        agent = self.make(0)
        for transition in self._stream()[:10]:
            for actor in (agent, agent.policy(), agent.policy(deterministic=False)):
                action, extras = actor.select_action(transition.observation)
                for path, tensor in leaves({"action": action, "extras": dict(extras)}):
                    assert len(tensor) == self.num_envs, f"{path} has {len(tensor)} rows for {self.num_envs}"
                    assert not tensor.requires_grad, f"{path} carries a graph: act under torch.no_grad"
                for i in range(self.num_envs):
                    row = map_tree(lambda x, i=i: x[i].cpu().numpy(), action)
                    assert agent.action_space.contains(row), f"{row} is not in {agent.action_space}"

    def test_actions_are_the_same_without_a_first_reset(self) -> None:
        """A fresh agent that is told of the first reset acts and learns as one that is not."""
        stream, told, untold = self._stream(), self.make(0), self.make(0)
        told.observe_reset(stream[0].observation, torch.ones_like(stream[0].valid))
        for transition in stream:
            acts = []
            for agent in (told, untold):
                action, extras = agent.select_action(transition.observation)
                agent.record_observation(transition._replace(action=action, extras=extras))
                agent.optimize_model()
                acts.append((action, extras))
            self._assert_equal(*acts)

    def test_metrics_are_finite_and_carry_no_graph(self) -> None:
        """And there are some: the agent has learned within the contract's steps."""
        reported = [item for metrics in self._learning(self.make(0)) for item in metrics.items()]
        assert reported, f"optimize_model has done nothing in {self.steps} steps: make a smaller agent"
        for name, value in reported:
            value = torch.as_tensor(value)
            assert not value.requires_grad, f"metric {name!r} carries a graph: detach it"
            assert torch.isfinite(value).all(), f"metric {name!r} is {value}"

    def test_it_counts_env_steps_and_updates(self) -> None:
        """N env_steps per step; updates go up exactly when optimize_model reports something."""
        agent, before = self.make(0), 0
        for k, metrics in enumerate(self._learning(agent), start=1):
            assert agent.env_steps == k * self.num_envs, (
                f"{agent.env_steps} env_steps after {k} of {self.num_envs} rows"
            )
            grown = agent.updates - before
            assert bool(grown) == bool(metrics), f"updates grew by {grown}, and the metrics are {dict(metrics)}"
            before = agent.updates
        assert isinstance(agent.env_steps, int)
        assert isinstance(agent.updates, int)

    def test_learning_changes_what_is_learned(self) -> None:
        """Without this the tests that nothing changes would say nothing."""
        agent = self.make(0)
        before = copy_state(self.learned(agent))
        self._drive(agent)
        assert first_difference(before, self.learned(agent)) is not None

    def test_rows_that_are_not_valid_teach_nothing(self) -> None:
        """An agent that sees nothing else stays as it was."""
        agent = self.make(0)
        before = copy_state(self.learned(agent))
        self._drive(agent, change=lambda t: t._replace(valid=torch.zeros_like(t.valid)))
        self._assert_equal(before, self.learned(agent))

    def test_what_stands_in_invalid_rows_does_not_matter(self) -> None:
        """Half of the rows are not valid, and their rewards and ends differ between two agents."""

        def hide(transition: Transition) -> Transition:
            return transition._replace(valid=torch.arange(self.num_envs, device=transition.valid.device) % 2 == 0)

        def garbage(transition: Transition) -> Transition:
            hidden = hide(transition)
            return hidden._replace(
                reward=torch.where(hidden.valid, hidden.reward, 1e6),
                terminated=torch.where(hidden.valid, hidden.terminated, ~hidden.terminated),
            )

        self._assert_equal(*(self.learned(self._drive(self.make(0), change=change)) for change in (hide, garbage)))

    def test_a_terminated_row_does_not_look_at_its_next_observation(self) -> None:
        """Any other next observation gives the same bits, where the task ended."""
        ended = [_terminate, lambda t: _other_next_observation(_terminate(t))]
        self._assert_equal(*(self.learned(self._drive(self.make(0), change=change)) for change in ended))

    def test_a_truncated_row_looks_at_its_next_observation(self) -> None:
        """The clock ran out and the task did not: truncation is not termination, and bootstraps."""
        ended = [_truncate, lambda t: _other_next_observation(_truncate(t)), _terminate]
        one, other, terminated = (self.learned(self._drive(self.make(0), change=change)) for change in ended)
        for changed, by in ((other, "another next observation"), (terminated, "termination")):
            looks = first_difference(one, changed) is not None
            told = f"{by} instead makes {'a' if looks else 'no'} difference to what is learned of a truncated row"
            assert looks == self.bootstraps, f"{told}; set bootstraps = {looks} if that is meant"

    def test_evaluating_a_policy_never_changes_the_agent(self) -> None:
        """Neither the greedy nor the exploring one, by acting or by being reset."""
        agent = self._drive(self.make(0))
        before = copy_state(agent.state_dict())
        for deterministic in (True, False):
            policy = agent.policy(deterministic=deterministic)
            policy.reset()
            for transition in self._stream():
                policy.select_action(transition.observation)
                policy.reset(transition.terminated | transition.truncated)
        self._assert_equal(before, agent.state_dict())

    def test_a_policy_follows_the_parameters(self) -> None:
        """One that was made before learning, and loading, acts as one made afterwards."""
        agent, other = self.make(0), self._drive(self.make(1))
        policy = agent.policy()
        self._drive(agent)
        self._assert_equal(self._acts(policy), self._acts(agent.policy()))
        agent.load_state_dict(copy_state(other.state_dict()))
        self._assert_equal(self._acts(policy), self._acts(other.policy()))

    def test_the_same_seed_gives_the_same_bits(self) -> None:
        """And another seed others; the global generator has no say in it and is not drawn from."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            one, position = self._drive(self.make(0)), torch.get_rng_state()
            torch.manual_seed(1)
            assert torch.equal(position, torch.get_rng_state()), "the agent draws from torch's global generator"
            torch.manual_seed(2)
            same, different = self._drive(self.make(0)), self._drive(self.make(1))
        self._assert_equal(one.state_dict(), same.state_dict())
        assert first_difference(self.learned(one), self.learned(different)) is not None, "seeds 0 and 1 give the same"

    def test_reseeding_is_being_built_with_that_seed(self) -> None:
        """Before the first step, for an agent that was built without a seed or with another one."""
        built = self.make(5)
        for agent in (self.make(None), self.make(6)):
            agent.reseed(5)
            assert agent.seed == 5
            self._assert_equal(built.state_dict(), agent.state_dict())
        assert self.make(None).seed is None
        self._assert_equal(self._drive(built).state_dict(), self._drive(agent).state_dict())

    def test_reseeding_is_refused_after_the_first_step(self) -> None:
        """It would throw away what was learned."""
        agent = self._drive(self.make(0), steps=1)
        try:
            agent.reseed(1)
        except RuntimeError:
            return
        raise AssertionError("reseed(1) after a step raises no RuntimeError")

    def test_its_state_fulfils_the_contract_of_states(self) -> None:
        """Saved in the middle of a run, loaded into a new agent, it goes on bit for bit: see StatefulContract."""
        contract = _DrivenContract(lambda: _Driven(self.make(0), self._stream()))
        contract.test_a_loaded_part_goes_on_bit_for_bit()
        contract.test_its_state_needs_no_pickle()
        contract.test_loading_shares_no_memory_with_the_source()
        contract.test_a_state_that_lacks_something_is_refused()
        contract.test_a_state_of_the_wrong_shape_is_refused()

    def _stream(self) -> list[Transition]:
        """What the environments say to random actions, actions left out: always the same, so agents can be compared."""
        environment = self.environment(self.num_envs, 0)
        space = copy.deepcopy(environment.single_action_space)
        space.seed(0)
        observation, stream = environment.reset(), []
        for _ in range(self.steps):
            rows = [map_tree(torch.as_tensor, space.sample()) for _ in range(self.num_envs)]
            action = map_tree(lambda *row: torch.stack(row).to(environment.device), *rows)
            now = environment.apply_action(action)
            ends = now.reward, now.terminated, now.truncated, now.final_observation, now.valid
            stream.append(Transition(observation, None, *ends, {}))
            observation = now.observation
        environment.close()
        return stream

    def _learning(self, agent: Any, change: Change | None = None) -> Iterator[Mapping[str, Any]]:
        """Let the agent act and learn along the stream; yields the metrics of each step."""
        for transition in self._stream():
            yield _learn(agent, transition if change is None else change(transition))

    def _drive(self, agent: Any, change: Change | None = None, steps: int | None = None) -> Any:
        """The agent, when it has learned along the stream."""
        for _ in itertools.islice(self._learning(agent, change), steps):
            pass
        return agent

    def _acts(self, policy: Policy) -> list[Any]:
        policy.reset()
        return [policy.select_action(transition.observation) for transition in self._stream()]

    def _assert_equal(self, one: Any, other: Any) -> None:
        difference = first_difference(one, other)
        assert difference is None, f"they differ at {difference}"


class _Driven:
    """An agent and its place in a stream, as one part with a state."""

    def __init__(self, agent: Any, stream: list[Transition]) -> None:
        self.agent, self.stream, self.position = agent, stream, 0

    def state_dict(self) -> dict[str, Any]:
        return {**self.agent.state_dict(), "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]
        self.agent.load_state_dict({name: value for name, value in state.items() if name != "position"})


class _DrivenContract(StatefulContract):
    def __init__(self, make: Callable[[], _Driven]) -> None:
        self._make = make

    def make(self) -> _Driven:
        return self._make()

    def step(self, part: _Driven) -> Any:
        transition = part.stream[part.position % len(part.stream)]
        part.position += 1
        return dict(_learn(part.agent, transition)), part.agent.select_action(transition.observation)


def _learn(agent: Any, transition: Transition) -> Mapping[str, Any]:
    """One step of the agent, whose own action takes the place of the one that the environments were given."""
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
    """Every row has the next observation of its neighbour; one that has none stays where it was."""
    if len(transition.reward) == 1:
        return transition._replace(next_observation=transition.observation)
    return transition._replace(next_observation=map_tree(lambda x: x.roll(1, dims=0), transition.next_observation))
