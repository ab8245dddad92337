"""What every agent does that learns from replay: act, keep what came of it, and learn from what is kept, now and then.

Shapes: N environments, B rows of a batch.
"""

from __future__ import annotations

import abc
import secrets
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.buffers.prioritized import PrioritizedReplay
from rein.buffers.replay import Replay
from rein.learning.action_type import as_own
from rein.learning.adam import Adam
from rein.learning.episode_returns import EpisodeReturns
from rein.learning.exploration import Plateau
from rein.learning.learner import Gradient, Learner, Loss
from rein.learning.options import (
    Adjustable,
    Configurable,
    Scheduled,
    above_zero,
    adjustable,
    at_least_one,
    fraction,
    layers,
    refuse_unknown,
    whole,
)
from rein.learning.random_action import random_action
from rein.learning.replay_options import HOW, REPLAY_DEFAULTS
from rein.learning.seeding import seed_anew
from rein.learning.update import describe_optimizer, set_learning_rate
from rein.ops.devices import checked_device
from rein.ops.parallel import processes, rank
from rein.ops.polyak import polyak_
from rein.ops.products import largest_matrix
from rein.ops.random import checked_seed, generator, restore
from rein.types import Transition, Tree

Networks = TypeVar("Networks", bound=nn.Module)


class ReplayAgent(Configurable, abc.ABC, Generic[Networks]):
    """Networks, their learners and a replay. A subclass makes the networks, acts by them, and says what an update is.

    After `learning_starts` env_steps, each `train_frequency` of them are followed by a round of as many updates as
    `update_to_data` makes of them; what does not make a whole update is kept for the next round.
    """

    reports: tuple[str, ...] = ()  # the metrics of `optimize_model`
    loaded = False  # whether a state was: what came with it is not drawn anew for a seed
    gamma: Adjustable = Adjustable(fraction)
    batch_size: Adjustable = Adjustable(at_least_one)
    learning_rate: Scheduled = Scheduled()
    priority_beta: Scheduled = Scheduled(high=1.0)
    values = True  # whether it learns from rewards and from what came after
    exploration: Any = None  # how much, an `Amount`: by a schedule or by what the returns are like

    @torch.inference_mode(False)  # inference tensors cannot be trained
    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        defaults: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """`defaults` are the agent's own options as they are; `options` those of `ReplayOptions` that are set."""
        self.observation_space, self.action_space = observation_space, action_space
        refuse_unknown(self, options, {**REPLAY_DEFAULTS, **defaults})
        self._options = options = {**REPLAY_DEFAULTS, **defaults, **options}
        self.device = checked_device(options["device"])
        self.learning_rate = options["learning_rate"]
        self._check(options)
        self.seed: int | None = None
        self.env_steps = self.updates = 0
        seed = checked_seed(options["seed"])
        self._build(secrets.randbits(31) if seed is None else seed)
        for name, learner in self.learners.items():
            own = f"{name}_learning_rate"
            rates = {own: getattr(self, own, None) or self.learning_rate, "learning_rate": self.learning_rate}
            learner.check_learning_rate(own if hasattr(self, own) else "learning_rate", rates)
        self.seed, self._built = seed, True

    def _check(self, options: dict[str, Any]) -> None:
        """Refuse what is nonsense, and make whole numbers of those that are meant to be."""
        for name in ("capacity", "train_frequency", "n_step", "target_frequency"):
            options[name] = at_least_one(self, name, options[name])
        options["learning_starts"] = whole(self, "learning_starts", options["learning_starts"])
        options["hidden"] = layers(self, options["hidden"])
        if options["update_to_data"] is None:
            raise ValueError(f"{type(self).__name__}(update_to_data=None): give a number above 0")
        for name in ("tau", "priority_alpha"):
            options[name] = fraction(self, name, options[name])
        for name in ("max_grad_norm", "update_to_data"):
            options[name] = above_zero(self, name, options[name])
        if (episodes := options["train_frequency_episodes"]) is not None:
            options["train_frequency_episodes"] = at_least_one(self, "train_frequency_episodes", episodes)
            if processes() > 1:  # which have other episodes each, and would learn at other times
                why = "the processes would not learn equally often; give train_frequency"
                raise ValueError(f"{type(self).__name__}(train_frequency_episodes={episodes}): {why}")
        own_rates = [name for name in ("actor_learning_rate", "temperature_learning_rate") if name in options]
        for name in ("gamma", "batch_size", "priority_beta", *own_rates):
            setattr(self, name, options[name])

    def _build(self, seed: int) -> None:
        self._root = seed
        self._generator = generator(seed, "agent", rank(), device=self.device)
        self.replay = self._make_replay()
        self.learners: dict[str, Learner] = {}
        self._followed: list[tuple[list[Tensor], list[Tensor]]] = []
        self.networks = self._make_networks(generator(seed, "networks", device=self.device))
        self.largest_matrix = largest_matrix(self.networks)
        self._returns = EpisodeReturns() if isinstance(self.exploration, Plateau) else None
        self._since = 0  # env_steps, or episodes, since the last round of updates
        self._owed = 0.0  # updates that were not whole yet

    def _make_replay(self) -> Replay:
        options = self._options
        how = {"storage": options["storage"], "device": self.device}
        if not options["prioritized"]:
            return Replay(options["capacity"], **how)
        how |= {"alpha": options["priority_alpha"], "normalize": options["priority_normalize"]}
        return PrioritizedReplay(options["capacity"], **how)

    @abc.abstractmethod
    def _make_networks(self, drawn: torch.Generator) -> Networks:
        """The networks, in one module with an `encoder`; and with `learner`, who learns which of them."""

    @abc.abstractmethod
    def _explore(self, observation: Tree) -> Tensor:
        """The action (N, ...) to learn from."""

    @abc.abstractmethod
    def _update(self, sample: Any, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Learn from what `_sample` drew; what is worth knowing, to `report`, and the errors (B,) of its rows."""

    def learner(self, name: str, networks: nn.Module, loss: Loss, gradient: Gradient | None = None) -> Learner:
        """A `Learner` that trains these networks on this loss, or its gradient if that is written out."""
        how = {option: self._options[option] for option in HOW}
        how["closed_form"] = gradient
        self.learners[name] = Learner(networks, loss, self._options["optimizer"] or Adam, **how)
        return self.learners[name]

    @torch.inference_mode(False)
    def reseed(self, seed: int) -> None:
        """Take `seed` and draw anew what was not loaded; RuntimeError after the first step, or update."""
        if not self.loaded and (self.env_steps or self.updates or len(self.replay)):
            done = f"{self.env_steps} env steps and {self.updates} updates, and holds {len(self.replay)} transitions"
            raise RuntimeError(f"reseed({seed}): the agent has taken {done}: it would forget them")
        seed_anew(self, seed)

    @property
    def counts(self) -> dict[str, int]:
        """What schedules run on."""
        return {"env_steps": self.env_steps, "updates": self.updates}

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return {
            "observation_space": str(self.observation_space),
            "action_space": str(self.action_space),
            **self._described_options(),
            **adjustable(self),
            "optimizer": describe_optimizer(next(iter(self.learners.values())).optimizer),
            "device": str(self.device),
            "seed": self.seed,
        }

    @torch.no_grad()
    def select_action(self, observation: Tree) -> tuple[Tensor, dict[str, Tensor]]:
        """An action to learn from: a random one before `learning_starts`, then one of the policy that explores."""
        if self.env_steps < self._options["learning_starts"]:
            return random_action(self.action_space, observation, self._generator), {}
        return self._explore(observation), {}

    def record_observation(self, transition: Transition) -> None:
        """Keep it."""
        action = as_own(transition.action, self.action_space)
        self.replay.append(transition._replace(action=action, extras=self._kept(transition)))
        if self._options["normalize_observation"]:  # the processes share its statistics before the first update
            self._compare_processes(next(iter(self.learners.values())), num_envs=self.replay.num_envs)
        self.networks.encoder.update(transition.observation, transition.valid)  # type: ignore[operator, union-attr]  # an Encoder, which nn.Module does not declare
        self.env_steps += len(transition.reward)
        ended_N = transition.terminated | transition.truncated
        steps = min(len(transition.reward), self.env_steps - self._options["learning_starts"])
        if steps > 0 and (self._owed or self.updates or len(self.replay)):  # of nothing there is nothing to learn later
            self._owed += steps * self._options["update_to_data"]
            episodes = self._options["train_frequency_episodes"] is not None
            self._since += int((ended_N & transition.valid).sum()) if episodes else steps
        self._forget(ended_N | ~transition.valid)
        if self._returns is not None:
            self.exploration.observe(self._returns.add(transition))

    def _kept(self, transition: Transition) -> dict[str, Tensor]:
        """What else to keep of this step, (N, ...) each. For agents that learn from more than transitions."""
        return {}

    def observe_reset(self, observation: Tree, mask: Tensor) -> None:
        """No return reaches over a reset, and no noise."""
        self.replay.observe_reset(mask)
        self._forget(mask)
        if self._returns is not None:
            self._returns.observe_reset(mask)

    def _forget(self, mask_N: Tensor) -> None:  # most have nothing to forget
        """These environments begin new episodes. For agents whose acting remembers."""

    def optimize_model(self) -> dict[str, Tensor]:
        """A round of updates, if it is time; what is worth knowing of the last one."""
        frequency = self._options["train_frequency_episodes"] or self._options["train_frequency"]
        updates = int(self._owed + 1e-6)  # ten times 0.1 is one
        if self._since < frequency or updates < 1 or not len(self.replay):
            return {}
        self._since = 0
        self._owed -= updates
        return self.learn(updates)

    def learn(self, updates: int) -> dict[str, Tensor]:
        """That many updates from the replay as it is; what is worth knowing of the last one."""
        updates = whole(self, "learn: updates", updates)
        self._compare_processes(next(iter(self.learners.values())), num_envs=self.replay.num_envs)
        metrics: dict[str, Tensor] = {}
        for name, learner in self.learners.items():
            set_learning_rate(learner.optimizer, self._rate(name))
        for last in range(updates - 1, -1, -1):
            sample, weight_B = self._sample()
            metrics, error_B = self._update(sample, weight_B, report=not last)
            if isinstance(self.replay, PrioritizedReplay):
                self.replay.update(sample.row, error_B)
            self.updates += 1
            if self.updates % self._options["target_frequency"] == 0:
                for targets, networks in self._followed:
                    polyak_(targets, networks, self._options["tau"])
        return metrics

    def _rate(self, learner: str) -> float:
        """The learning rate of this learner now: by an option of its own where the agent has one and it is not None."""
        own = getattr(self, f"{learner}_learning_rate", None)
        return (self.learning_rate if own is None else own)(**self.counts)

    def _sample(self) -> tuple[Any, Tensor | None]:
        how = {"n_step": self._options["n_step"], "gamma": self.gamma}
        sample = self.replay.sample(self.batch_size, self._generator, **how)
        if not isinstance(self.replay, PrioritizedReplay):
            return sample, None
        beta = self.priority_beta(**self.counts)
        return sample, self.replay.weights(sample.probability, beta)  # type: ignore[arg-type]  # of such a replay

    def follow(self, targets: nn.Module, networks: nn.Module) -> None:
        """From now on these targets move toward networks of the same shape: by `tau`, every `target_frequency`."""
        self._followed.append(([*targets.parameters()], [*networks.parameters()]))

    def state_dict(self) -> dict[str, Any]:
        """Networks, optimizers, generator, counts and the replay."""
        return {
            "networks": dict(self.networks.state_dict()),
            "optimizers": {name: learner.state_dict() for name, learner in self.learners.items()},
            "generator": self._generator.get_state(),
            "replay": self.replay.state_dict(),
            "env_steps": self.env_steps,
            "updates": self.updates,
            "since": self._since,
            "owed": self._owed,
            "returns": None if self._returns is None else self._returns.state_dict(),
            "seed": self._root,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError for that of an agent with other options."""
        self._check_state(state)
        self.networks.load_state_dict(state["networks"])
        self.replay.load_state_dict(state["replay"])
        for name, learner in self.learners.items():
            learner.load_state_dict(state["optimizers"][name])
        restore(self._generator, state["generator"])
        self.env_steps, self.updates = int(state["env_steps"]), int(state["updates"])
        self._since, self._owed = int(state["since"]), float(state["owed"])
        self._root, self.loaded = int(state["seed"]), True
        if ((returns := state["returns"]) is None) != (self._returns is None):
            raise ValueError(f"returns of episodes are {returns is not None} in the state, and the opposite here")
        if self._returns is not None:
            self._returns.load_state_dict(returns)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """ValueError for the state of an agent with other options, before anything is taken over."""
        mine = {path: tuple(value.shape) for path, value in self.networks.state_dict().items()}
        given = {path: tuple(value.shape) for path, value in state["networks"].items()}
        if mine != given:
            differ = sorted(path for path in {*mine, *given} if mine.get(path) != given.get(path))
            raise ValueError(f"the networks are of another shape in the state: {', '.join(differ)}")
        if state["optimizers"].keys() != self.learners.keys():
            raise ValueError(f"the state is of {', '.join(state['optimizers'])}; here learn {', '.join(self.learners)}")
        prioritized = isinstance(self.replay, PrioritizedReplay)
        if state["replay"]["filled"] and ("priorities" in state["replay"]) != prioritized:
            raise ValueError(f"prioritized is {not prioritized} in the state, and the opposite here")
