"""Save torch's global generators and the generators of DataLoaders with the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rein.loop import Loop
from rein.loop.state import State
from rein.ops.trees import checked_device


def torch_generators(
    loop: Loop, device: torch.device | str | None = None, *, generators: Sequence[torch.Generator] = ()
) -> None:
    """Own torch's global generators, of the CPU and of `device` if that is a GPU, so that resumed runs reproduce.

    Use it for dropout and DataLoaders, which draw from global generators. Parts of rein have separate generators and do
    not need it.

    `generators` are saved in the same way. Pass those of `DataLoader(..., generator=)`, and draw from them only in the
    data; otherwise a resumed run silently uses another order. A run resumed within an epoch restores the generators of
    the beginning of the epoch, iterates the data again, and skips the batches already used. A DataLoader therefore
    shuffles as before.

    Two cases are not reproduced. If a dataset draws in the main process between steps, the rest of that epoch differs.
    The workers of `DataLoader(..., persistent_workers=True)` restart their generators.

    Raises:
        TypeError: If an element of `generators` is not a torch.Generator.
        ValueError: If the loop already owns a part `torch_generators`, or if a loaded state has another number of
            `generators`.
    """
    generators = list(generators)
    if wrong := [type(one).__name__ for one in generators if not isinstance(one, torch.Generator)]:
        raise TypeError(f"torch_generators(generators=[...]): expected torch.Generator objects, got {', '.join(wrong)}")
    part = TorchGenerators(None if device is None else checked_device(device), generators)
    loop.own("torch_generators", part)

    def begin(state: State) -> None:
        part.begin(state, loop.iterates_anew)
        for inner in _within(loop):  # starts later, when other code has used torch's global generators
            inner.leave_global()

    loop.started.wire(begin)
    for event in (loop.iteration_started, loop.epoch_completed, loop.epoch_halted, loop.epoch_ended):
        event.wire(part.restore)  # the open epoch continues or ends
    loop.epoch_started.wire(part.remember, last=True)  # after all handlers have drawn


def _within(loop: Loop) -> Iterator[TorchGenerators]:
    """Return the `TorchGenerators` of all loops inside this one."""
    for part in loop.parts.values():
        if isinstance(part, Loop):
            yield from (inner for inner in part.parts.values() if isinstance(inner, TorchGenerators))
            yield from _within(part)


class TorchGenerators:
    """State of `torch_generators`: generators at the start of the epoch, and generators to restore later."""

    def __init__(self, device: torch.device | None, generators: Sequence[torch.Generator] = ()) -> None:
        self._cuda = device if device is not None and device.type == "cuda" else None
        self._generators = {f"given_{place}": generator for place, generator in enumerate(generators)}
        self._epoch_began: dict[str, Tensor] | None = None
        self._waiting: dict[str, Tensor] | None = None  # states to restore after the skipped batches

    def begin(self, state: State, anew: bool) -> None:
        """Return to the start of the open epoch, if its data is iterated again."""
        if anew and state.epoch_open and self._epoch_began is not None:
            # before the first batch, the epoch starts again and nothing has to be restored later
            self._waiting = {**self._read(), **(self._waiting or {})} if state.iteration else None
            self._write(self._epoch_began)
        elif self._waiting is not None:
            self._write(self._waiting)
            self._waiting = None

    def restore(self, state: State) -> None:
        """Restore the generators as they were when the run was left. Handler of the first event after `begin`.

        A generator that the data has used since `begin` is already right: a sampler draws once more at its end, which
        may be with the batch just fetched.
        """
        if self._waiting is not None and self._epoch_began is not None:
            for name, generator in self._generators.items():
                if not torch.equal(generator.get_state().cpu(), self._epoch_began[name].cpu()):
                    self._waiting[name] = generator.get_state()
            self._write(self._waiting)
            self._waiting = None

    def remember(self, state: State) -> None:
        """Store the generators' states at the start of an epoch. Handler of `epoch_started`."""
        self._epoch_began = self._read()

    def leave_global(self) -> None:
        """Do not restore torch's global generators, which an outer loop has already restored."""
        if self._waiting is not None:
            self._waiting = {name: state for name, state in self._waiting.items() if name in self._generators}

    def _read(self) -> dict[str, Tensor]:
        states = {"host": torch.get_rng_state()}
        if self._cuda is not None:
            states["cuda"] = torch.cuda.get_rng_state(self._cuda)
        return {**states, **{name: generator.get_state() for name, generator in self._generators.items()}}

    def _write(self, generators: Mapping[str, Tensor]) -> None:
        if "host" in generators:
            torch.set_rng_state(generators["host"].cpu())
        if self._cuda is not None and "cuda" in generators:
            torch.cuda.set_rng_state(generators["cuda"].cpu(), self._cuda)
        for name, generator in self._generators.items():
            generator.set_state(generators[name].cpu())

    def state_dict(self) -> dict[str, Any]:
        """Return the current states and those at the start of the epoch."""
        return {"now": {**self._read(), **(self._waiting or {})}, "epoch_began": self._epoch_began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict` when the run starts.

        Raises ValueError if the number of `generators` differs.
        """
        saved = sum(name.startswith("given_") for name in state["now"])
        if saved != len(self._generators):
            raise ValueError(
                f"the saved state has {saved} generators besides torch's global ones, "
                f"and the loop has {len(self._generators)}; "
                "pass the same generators=[...] of the DataLoaders to torch_generators or trainer"
            )
        self._waiting, began = dict(state["now"]), state["epoch_began"]
        self._epoch_began = None if began is None else dict(began)
