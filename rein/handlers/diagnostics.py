"""Report the norms of parameters and gradients for each part of an agent's networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rein.agents.base.summary import named_parameters
from rein.loop import Loop
from rein.loop.state import State
from rein.ops.statistics import global_norm


def diagnostics(loop: Loop, agent: Any, **filters: Any) -> None:
    """Report the norms of parameters and gradients as metrics `<part>_norm` and `<part>_grad_norm`.

    Parts are the modules of `agent.networks`, such as `actor` and `critics`, or the modules that are attributes of the
    agent. Parts without trainable parameters, such as target networks, are left out. `<part>_norm` is the Euclidean
    norm of all parameters at the end of the epoch. `<part>_grad_norm` is the mean norm of the gradients over the
    updates of the epoch, before clipping. It is reported if the agent trains the part with a learner.

    Args:
        loop: Loop to attach to.
        agent: Agent that the loop trains.
        **filters: Filters of the epochs to report, such as `every=10`. Other epochs cost nothing.
    """
    norms = loop.own("diagnostics", _Norms(agent))
    for part in {path.partition(".")[0] for path in named_parameters(agent)}:
        loop.metrics.declare(f"{part}_norm", f"{part}_grad_norm")
    loop.started.attach(norms.attach)
    loop.epoch_started(**filters)(norms.begin)
    loop.on("epoch_completed", "epoch_halted")(norms.report)  # before handlers of epoch_ended read it


class _Norms:
    """Sums of gradient norms in the current epoch, by part."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._parts: dict[int, str] = {}  # part of each trainable parameter, by the id of the parameter
        self._active = False  # whether this epoch is reported
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def attach(self, state: State) -> None:
        """Find the parts and watch the learners. Handler of `started`."""
        self._parts = {id(p): path.partition(".")[0] for path, p in named_parameters(self._agent).items()}
        for learner in getattr(self._agent, "learners", {}).values():
            learner.on_gradients = self.add

    def begin(self, state: State) -> None:
        """Start the sums of an epoch. Handler of `epoch_started`."""
        self._active, self._sums, self._counts = True, {}, {}

    @torch.no_grad()
    def add(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Add the norms of the gradients of one update."""
        if not self._active:
            return
        gradients_of: dict[str, list[Tensor]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                gradients_of.setdefault(self._parts[id(parameter)], []).append(gradient)
        for part, part_gradients in gradients_of.items():
            norm = global_norm(part_gradients)
            self._sums[part] = self._sums[part] + norm if part in self._sums else norm
            self._counts[part] = self._counts.get(part, 0) + 1

    @torch.no_grad()
    def report(self, state: State) -> None:
        """Set the metrics of the epoch. Handler of the end of the epoch."""
        if not self._active:
            return
        self._active = False
        parameters_of: dict[str, list[Tensor]] = {}
        for path, parameter in named_parameters(self._agent).items():
            if parameter.requires_grad or not isinstance(parameter, nn.Parameter):
                parameters_of.setdefault(path.partition(".")[0], []).append(parameter)
        for part, parameters in parameters_of.items():
            state.metrics[f"{part}_norm"] = global_norm(parameters)
            if part in self._sums:
                state.metrics[f"{part}_grad_norm"] = self._sums[part] / self._counts[part]

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the current epoch."""
        return {"active": self._active, "sums": dict(self._sums), "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self._active, self._sums, self._counts = state["active"], dict(state["sums"]), dict(state["counts"])
