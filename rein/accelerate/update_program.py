"""Updates of PPO and A2C with a full rollout as one program.

Shapes: T steps of a rollout, N environments, E passes, M minibatches of B rows, C coefficients of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rein.accelerate.compiled import Program
from rein.agents.a2c import A2C
from rein.agents.base.learner import mean_metrics
from rein.agents.base.on_policy import Coefficients
from rein.agents.base.optimizers import Adam
from rein.agents.ppo import PPO
from rein.ops.statistics import minibatches
from rein.replay.rollout import Rollout

CONSTANTS = "gamma", "gae_lambda", "normalize_advantage", "reward_smoothing"  # options that do not change usually


def has_program(agent: Any) -> bool:
    """Return whether the updates of an agent are those of PPO or A2C, with networks and an optimizer of rein."""
    return (
        agent.compile
        and any(type(agent).update is kind.update for kind in (PPO, A2C))
        and agent.network is None
        and agent.encoder is None
        and not agent.networks.carry_size
        and agent.guard is None
        and agent.precision == "float32"
        and type(agent.learners["networks"].optimizer) is Adam
    )


class UpdateProgram:
    """Advantages and all passes over minibatches as one program, which replaces `update` of PPO or A2C.

    Orders of rows are drawn before the program. The learning rate and the coefficients of each pass are inputs on the
    device, so that schedules need no new program. The results are those of `update`.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._program = Program(self._learned, torch.device(agent.device))

    def __call__(self, rollout: Rollout) -> dict[str, Tensor]:
        """Learn from a full rollout and return the metrics."""
        agent, learner = self._agent, self._agent.learners["networks"]
        if not self._is_plain():
            return agent.update(rollout)
        rollout.dense = True
        passes, parts = getattr(agent, "update_epochs", 1), getattr(agent, "minibatches", None)
        rows = rollout["reward"].numel()
        # A2C learns from all rows in order
        orders = [] if parts is None else [minibatches(rows, parts, agent.generator) for _ in range(passes)]
        coefficients = []
        for _ in range(passes):
            coefficients.append(agent.coefficients())
            agent.updates += parts or 1
        rates = [group["lr"] for group in learner.optimizer.param_groups]
        numbers = [rates[0], *(0.0 if x is None else x for each in coefficients for x in each)]
        # does not wait: memory that is not pinned is read before the call returns
        numbers = torch.tensor(numbers, dtype=torch.float64, device="cpu").to(agent.device, non_blocking=True)
        # 0 and None select other operations
        constants = [tuple(x if x is None else x == 0.0 for x in each) for each in coefficients]
        return self._program(agent.rewards(), orders, numbers, constants, self._memory(rollout))

    def _is_plain(self) -> bool:
        """Return whether the host has nothing to do within an update."""
        agent, learner = self._agent, self._agent.learners["networks"]
        return (
            getattr(agent, "segments", None) is None
            and getattr(agent, "target_kl", None) is None
            and learner.guard is None
            and learner.on_gradients is None
            and learner.processes == 1
            and not learner.is_hooked()
        )

    def _memory(self, rollout: Rollout) -> dict[str, Any]:
        """Return everything that a captured program takes as constant: options, and the memory that it uses."""
        learner = self._agent.learners["networks"]
        return {
            **{name: getattr(self._agent, name, None) for name in CONSTANTS},
            "rollout": rollout.generation,
            "parameters": [(p.data_ptr(), p.requires_grad) for p in learner.parameters],
            "finite": learner.defer_finite(),
        }

    def _learned(
        self, reward_TN: Tensor, orders: Sequence[Tensor], numbers: Tensor, constants: Sequence[Any], memory: Any
    ) -> dict[str, Tensor]:
        """Return the mean metrics of the last pass."""
        agent, optimizer = self._agent, self._agent.learners["networks"].optimizer
        batch, _ = agent.learning_batch(agent.rollout, reward_TN)
        rate, *values = numbers.unbind()
        left = iter(values)
        group = optimizer.param_groups[0]
        before, group["lr"] = group["lr"], rate if rate.is_cpu else rate.float()
        metrics: list[dict[str, Tensor]] = []
        for number, is_zero_C in enumerate(constants):
            pairs = zip(is_zero_C, left, strict=False)
            chosen: list[Any] = [None if is_zero is None else 0.0 if is_zero else value for is_zero, value in pairs]
            coefficients = Coefficients(*chosen)
            parts = batch.shuffled(orders[number]) if orders else [batch]
            metrics = [agent.learn_from(part, coefficients, report=number == len(constants) - 1) for part in parts]
        group["lr"] = before
        return mean_metrics(metrics, batch)
