"""Deep Q-learning from replay with a recurrent network.

Shapes: T steps that are learned from, P burn-in steps before them, B sequences, N environments, F features,
C features of a carry, A actions.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Unpack

import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.exploration import Amount, Plateau, as_amount
from rein.agents.base.options import above_zero, at_least_one, whole
from rein.agents.base.policies import RecurrentValuePolicy, exploring
from rein.agents.base.replay_agent import ReplayAgent, ReplayOptions
from rein.networks.actor_critic import CoreFactory
from rein.networks.recurrent import LSTM
from rein.networks.recurrent_q import RecurrentQNetwork
from rein.networks.target import OnlineAndTarget
from rein.ops.backend import without_gradient
from rein.ops.exploration import epsilon_greedy
from rein.ops.losses import huber
from rein.ops.random import generator
from rein.ops.statistics import masked_mean
from rein.ops.trees import map_tree
from rein.ops.values import td_target
from rein.replay.sequences import Clips, SequenceReplay
from rein.schedules import linear
from rein.types import Transition, Tree


class SequenceBatch(NamedTuple):
    """Sequences that are learned from, each within one episode."""

    features: Tensor  # (T, B, F) what the encoder made of the observations
    carry: Tensor  # (B, C) what was remembered before the first of them
    action: Tensor  # (T, B) int64, counted from 0
    target: Tensor  # (T, B) of the value of the action
    valid: Tensor  # (T, B) bool

    @property
    def value(self) -> Tensor:
        """(T, B) one number for each row."""
        return self.target

    @property
    def size(self) -> int:
        """How many sequences there are."""
        return self.target.shape[1]

    def rows(self, index: Any) -> SequenceBatch:
        """Some of the sequences: a slice or a tensor of their numbers."""
        features, carry, *others = self
        return SequenceBatch(features[:, index], carry[index], *(column[:, index] for column in others))


def sequence_td_loss(
    networks: RecurrentQNetwork, batch: SequenceBatch, delta: float | None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean of `td_loss` of `rein.agents.base.value_loss` over valid steps, and `td_error` (B,) of each sequence."""
    value_TBA = networks.sequence(batch.features, batch.carry)
    value_TB = value_TBA.gather(2, batch.action.unsqueeze(2)).squeeze(2)
    error_TB = value_TB - batch.target
    loss_TB = huber(error_TB, delta)
    loss = masked_mean(loss_TB, batch.valid)
    size_TB = torch.where(batch.valid, error_TB.detach().abs(), 0.0)
    metrics = {"td_error": size_TB.sum(0) / batch.valid.sum(0).clamp(min=1)}
    if report:
        metrics |= {"value_loss": loss.detach(), "action_value": masked_mean(value_TB.detach(), batch.valid)}
    return loss, metrics


EPSILON = linear(1.0, 0.05, env_steps=10_000)
CORE = functools.partial(LSTM, features=64)


class RecurrentDQN(ReplayAgent[OnlineAndTarget[RecurrentQNetwork]]):
    """Recurrent deep Q-network, with double targets (van Hasselt et al. 2016).

        y = r + gamma * Q'(h', argmax_a Q(h, a)) of the next step, and r alone at an end

    h and h' are what Q and its targets Q' remember of the episode. It is learned from sequences of `sequence_length`
    steps, which begin anywhere in an episode and end with it at the latest. Before them, up to `burn_in` steps go
    through both networks without a gradient, from the carry that was acted with at the first of those: it is as old as
    the networks that made it, and these steps make up for that.

    Sources: Hausknecht & Stone 2015 (DRQN, its random updates); Kapturowski et al. 2019 (R2D2), section 3, without its
    rescaling of values, its priorities and its n-step returns.

    Args:
        observation_space: of one environment; an image goes through convolutions, all else is flattened to a vector.
        action_space: Discrete.
        core: makes what remembers, of `rein.networks.recurrent`: functools.partial(LSTM, features=64), or with
            `layers=2` two of them, one above the other.
        sequence_length: steps that are learned from together; `batch_size` is the number of such sequences.
        burn_in: steps before these.
        epsilon: probability of a random action; a number, a schedule or a `Plateau` of `rein.agents.base.exploration`.
        double: choose the next action by the networks, and let the targets say what it is worth.
        dueling: learn the value of a state and what each action adds to it (Wang et al. 2016).
        huber: where the loss turns from quadratic to linear; None for the squared error.
        **options: those of `rein.agents.base.replay_agent.ReplayOptions`, without `n_step` and `prioritized`; here
            learning_rate is 1e-3, batch_size 32, hidden (64,) and max_grad_norm 10 by default.

    Raises ValueError for spaces that do not fit and numbers out of their range, TypeError for unknown options.
    """

    reports = ("value_loss", "action_value", "grad_norm", "epsilon")
    replay: SequenceReplay
    exploration: Amount

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        core: CoreFactory = CORE,
        sequence_length: int = 20,
        burn_in: int = 10,
        epsilon: float | Amount = EPSILON,
        double: bool = True,
        dueling: bool = False,
        huber: float | None = 1.0,
        **options: Unpack[ReplayOptions],
    ) -> None:
        huber = above_zero(self, "huber", huber)
        sequence_length = at_least_one(self, "sequence_length", sequence_length)
        burn_in = whole(self, "burn_in", burn_in)
        if options.get("n_step", 1) != 1 or options.get("prioritized"):
            raise ValueError("RecurrentDQN: it learns from returns of one step, and draws all sequences alike")
        low, high = as_amount(epsilon).bounds
        if not 0.0 <= low <= high <= 1.0:
            raise ValueError(f"RecurrentDQN: epsilon goes from {low} to {high}; it is between 0 and 1")
        own = {
            "core": core,
            "sequence_length": sequence_length,
            "burn_in": burn_in,
            "epsilon": epsilon,
            "double": double,
            "dueling": dueling,
            "huber": huber,
        }
        defaults = {"learning_rate": 1e-3, "hidden": (64,), "batch_size": 32, "max_grad_norm": 10.0}
        super().__init__(observation_space, action_space, own, {**defaults, **options})

    def _build(self, seed: int) -> None:
        super()._build(seed)
        self._carry: Tensor | None = None  # (N, C) before the step that is being taken
        self._next_carry: Tensor | None = None  # after it, once its observation was looked at
        self._said: Tensor | None = None  # the action of that step

    def _make_replay(self) -> SequenceReplay:
        options = self._options
        how = {"before": options["burn_in"], "storage": options["storage"], "device": self.device}
        return SequenceReplay(options["capacity"], options["sequence_length"], **how)

    def _make_networks(self, drawn: torch.Generator) -> OnlineAndTarget[RecurrentQNetwork]:
        options = self._options
        names = ("core", "hidden", "activation", "dueling", "stem", "normalize_observation", "scale_images")
        shape = {name: options[name] for name in names}
        networks = OnlineAndTarget(RecurrentQNetwork(self.observation_space, self.action_space, drawn, **shape))
        self._learner = self.learner("values", networks.online, sequence_td_loss)
        self.follow(networks.target, networks.online)
        self._first_action = int(self.action_space.start)  # type: ignore[attr-defined]  # the networks want Discrete
        self.exploration = copy.deepcopy(as_amount(options["epsilon"]))  # one of its own, at its beginning
        return networks

    def _explore(self, observation: Tree) -> Tensor:
        self._said = self._choose(self._look(observation), self._generator) + self._first_action
        return self._said

    @torch.no_grad()
    def _look(self, observation: Tree) -> Tensor:
        """The values (N, A) now; that this will have been seen is settled in `record_observation`."""
        online = self.networks.online
        x = online.encoder(observation)
        if self._carry is None:
            self._carry = torch.zeros(len(x), online.carry_size, dtype=torch.float32, device=self.device)
        value_NA, self._next_carry = online.step(x, self._carry)
        return value_NA

    def _choose(self, value_NA: Tensor, drawing: torch.Generator) -> Tensor:
        return epsilon_greedy(value_NA, self.exploration(**self.counts), drawing)

    def record_observation(self, transition: Transition) -> None:
        """Keep it, with what was remembered before it; somebody else may have acted, or chance."""
        if self._next_carry is None or self._said is not transition.action:  # or we were asked, reset or loaded since
            self._look(transition.observation)
        self._said = None
        super().record_observation(transition)

    def _kept(self, transition: Transition) -> dict[str, Tensor]:
        return {"carry": self._carry}  # type: ignore[dict-item]  # the observation was looked at

    def observe_reset(self, observation: Tree, mask: Tensor) -> None:
        """No sequence reaches over a reset, and no memory."""
        self._next_carry = None
        super().observe_reset(observation, mask)

    def _forget(self, mask_N: Tensor) -> None:
        carry = self._carry if self._next_carry is None else self._next_carry
        if carry is not None:
            self._carry, self._next_carry = carry.masked_fill(mask_N.unsqueeze(1), 0.0), None

    def _sample(self) -> tuple[Clips, None]:
        return self.replay.clips(self.batch_size, self._generator, begin=("carry",)), None

    def _update(self, sample: Clips, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        batch = self.batch(sample)
        metrics = self._learner.step(batch, self._options["huber"], report=report)
        if report:
            metrics["epsilon"] = torch.as_tensor(
                self.exploration(**self.counts), dtype=torch.float32, device=self.device
            )
        return metrics, metrics.pop("td_error")

    @without_gradient
    def batch(self, clips: Clips) -> SequenceBatch:
        """What is learned from clips: their steps after the warm-up, with the targets of their values."""
        warm = self.replay.before
        seen, features = self._features(clips).tensor_split([warm])
        online_carry, target_carry = (
            networks.warm_up(seen, clips.begin["carry"], clips.valid[:warm])
            for networks in (self.networks.online, self.networks.target)
        )
        next_value_TB = self._next_values(features, online_carry, target_carry)
        return SequenceBatch(
            features=features[:-1],
            carry=online_carry,
            action=clips.action[warm:].long() - self._first_action,
            target=td_target(clips.reward[warm:], clips.terminated[warm:], next_value_TB, self.gamma),
            valid=clips.valid[warm:],
        )

    def _features(self, clips: Clips) -> Tensor:
        """Of the observations (P + T + 1, B, F) of all steps, and of what came after the last one; 0 after an end.

        What comes after an end is no step of a sequence and may be anything, even NaN. A loss that does not count its
        value would still send 0 * NaN back to the parameters.
        """
        warm, (steps, rows) = self.replay.before, clips.valid.shape
        observation = map_tree(
            lambda before, after: torch.cat((before[: warm + 1], after[warm:])).flatten(0, 1),
            clips.observation,
            clips.next_observation,
        )
        features = self.networks.encoder(observation).unflatten(0, (steps + 1, rows))
        ended = clips.terminated[warm:].reshape(-1, rows, *(1 for _ in features.shape[2:]))
        features[warm + 1 :].masked_fill_(ended, 0)  # in memory of its own: the observations were put together here
        return features

    def _next_values(self, features: Tensor, online_carry: Tensor, target_carry: Tensor) -> Tensor:
        """(T, B) of what came next, of which every step of an episode knows all that was before."""
        value_TBA = self.networks.target.sequence(features, target_carry)[1:]
        if not self._options["double"]:
            return value_TBA.amax(2)
        best_TB1 = self.networks.online.sequence(features, online_carry)[1:].argmax(2, keepdim=True)
        return value_TBA.gather(2, best_TB1).squeeze(2)

    def policy(self, deterministic: bool = True, *, epsilon: float | None = None) -> RecurrentValuePolicy:
        """The greedy policy of the networks as they are at any time; as it explores where not `deterministic`.

        With an `epsilon`, from 0 to 1, it is greedy but for so many random actions.
        """
        explore = exploring(self, self._choose, epsilon)
        own = None if deterministic and epsilon is None else generator(self._root, "policy", device=self.device)
        return RecurrentValuePolicy(self.networks.online, self._first_action, explore, own, self.device)

    def state_dict(self) -> dict[str, Any]:
        """What every agent with a replay has, what it remembers, and how it explores, where that adapts."""
        how = {"exploration": self.exploration.state_dict()} if isinstance(self.exploration, Plateau) else {}
        return {**super().state_dict(), "carry": self._carry, **how}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError for that of an agent with other options."""
        super().load_state_dict(state)
        if isinstance(self.exploration, Plateau):
            self.exploration.load_state_dict(state["exploration"])
        self._carry = None if state["carry"] is None else state["carry"].to(self.device, copy=True)
        self._next_carry = None
