"""Base class of agents that learn from replay, and its options.

Shapes: N environments, B rows of a batch, E episodes that ended.
"""

from __future__ import annotations

import abc
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypedDict, TypeVar

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.agents.base.actions import as_own
from rein.agents.base.exploration import Plateau, random_action
from rein.agents.base.learner import Gradient, Learner, Loss
from rein.agents.base.optimizers import Adam, Guard, OptimizerFactory, describe_optimizer, set_learning_rate
from rein.agents.base.options import (
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
from rein.agents.base.seeding import seed_anew
from rein.networks.encoder import StemFactory
from rein.ops.backend import largest_matrix
from rein.ops.devices import checked_device
from rein.ops.parallel import processes, rank
from rein.ops.random import checked_seed, generator, restore
from rein.ops.values import polyak_
from rein.replay.prioritized import PrioritizedReplay
from rein.replay.replay import Replay
from rein.schedules import Schedule
from rein.types import Transition, Tree


class ReplayOptions(TypedDict, total=False):
    """What the agents share that learn from replay, with the defaults where an agent does not say otherwise.

    Args:
        learning_rate: of all optimizers, but for those with an option of their own; a number or a schedule. 3e-4.
        gamma: discount factor. 0.99.
        capacity: transitions kept. 1,000,000.
        batch_size: transitions of an update. 256.
        learning_starts: env_steps before the first update, in which actions are drawn uniformly. 1,000.
        train_frequency: env_steps between two rounds of updates. 1.
        train_frequency_episodes: episodes that end between two rounds of updates, in place of env_steps. None.
        update_to_data: updates for each env_step. 1.
        n_step: rewards before the value of what came next. 1.
        tau: how far targets move toward the networks, from not at all (0) to copies (1). 0.005.
        target_frequency: updates between two such moves. 1.
        prioritized: sample by the size of the last error (Schaul et al. 2016). False.
        priority_alpha: how much the size counts, from uniform (0) to proportional (1). 0.6.
        priority_beta: how much the weights of the loss make up for that, up to entirely (1); a number or a schedule.
            0.4.
        priority_normalize: which weight of the loss is 1: the largest of the "batch", or of the whole "buffer".
            "batch".
        hidden: features of the hidden layers. (256, 256).
        activation: "relu", "tanh", "silu" or "gelu". "relu".
        stem: makes, of (observation_space, generator), a network of your own before the hidden layers, as
            `rein.networks.encoder.stem_for` says. None for convolutions where there are images.
        normalize_observation: by the mean and deviation of all observations so far. False.
        scale_images: divide bytes of images by 255; see "Images" in docs/agents.md. True.
        max_grad_norm: global norm that gradients are clipped to. None for no clipping.
        storage: of the replay: "memory", or "memmap" for a file. "memory".
        optimizer: makes one of parameters. None for Adam.
        guard: asked before every step of an optimizer with (metrics, gradients); False skips the step. None.
        micro_batch: rows whose gradient is computed at once: changes speed and memory, not the result. None: 4,096 on
            the host, all elsewhere.
        compile: compile the losses: seconds at the first update. False.
        precision: of matrix products in the update: "float32" or "bfloat16". "float32".
        seed: of everything random. None until `training_loop(seed=)` gives it.
        device: where the networks and the replay are. "cpu".
    """

    learning_rate: float | Schedule
    gamma: float
    capacity: int
    batch_size: int
    learning_starts: int
    train_frequency: int
    train_frequency_episodes: int | None
    update_to_data: float
    n_step: int
    tau: float
    target_frequency: int
    prioritized: bool
    priority_alpha: float
    priority_beta: float | Schedule
    priority_normalize: str
    hidden: Sequence[int]
    activation: str
    stem: StemFactory | None
    normalize_observation: bool
    scale_images: bool
    max_grad_norm: float | None
    storage: str
    optimizer: OptimizerFactory | None
    guard: Guard | None
    micro_batch: int | None
    compile: bool
    precision: str
    seed: int | None
    device: torch.device | str


REPLAY_DEFAULTS: ReplayOptions = {
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "capacity": 1_000_000,
    "batch_size": 256,
    "learning_starts": 1_000,
    "train_frequency": 1,
    "train_frequency_episodes": None,
    "update_to_data": 1.0,
    "n_step": 1,
    "tau": 0.005,
    "target_frequency": 1,
    "prioritized": False,
    "priority_alpha": 0.6,
    "priority_beta": 0.4,
    "priority_normalize": "batch",
    "hidden": (256, 256),
    "activation": "relu",
    "stem": None,
    "normalize_observation": False,
    "scale_images": True,
    "max_grad_norm": None,
    "storage": "memory",
    "optimizer": None,
    "guard": None,
    "micro_batch": None,
    "compile": False,
    "precision": "float32",
    "seed": None,
    "device": "cpu",
}
HOW = ("max_grad_norm", "guard", "micro_batch", "compile", "precision")


class EpisodeReturns:
    """Sums of rewards over the episodes of N environments."""

    def __init__(self) -> None:
        self._sum_N: Tensor | None = None

    def add(self, transition: Transition) -> Tensor:
        """Take in one step; the returns (E,) of the episodes that ended in it."""
        if self._sum_N is None:
            self._sum_N = torch.zeros_like(transition.reward, dtype=torch.float64)
        self._sum_N += torch.where(transition.valid, transition.reward, 0.0)
        ended_N = (transition.terminated | transition.truncated) & transition.valid
        return_E = self._sum_N[ended_N]
        self._sum_N.masked_fill_(ended_N, 0.0)
        return return_E

    def observe_reset(self, mask_N: Tensor) -> None:
        """The episodes of these environments were left, and count for nothing."""
        if self._sum_N is not None:
            self._sum_N.masked_fill_(mask_N, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The sums of the episodes that go on."""
        return {"sum": self._sum_N}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._sum_N = None if state["sum"] is None else state["sum"].clone()


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
