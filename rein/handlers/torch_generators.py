"""Keep torch's global generators, and those of the data, with the run, for steps and data that draw from them."""

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
    """Own torch's global generators, of the host and of `device` where that is a GPU: for dropout, and DataLoaders.

    A resumed run draws what an uninterrupted one does. Parts of rein have generators of their own and do not need it.
    `generators` are kept in the same way, from which data alone is to draw: those of `DataLoader(..., generator=)`,
    which is resumed otherwise with another order, and silently. In mid-epoch the data is iterated anew past what the
    epoch has had, with all of them as they were when the epoch began, so that a DataLoader shuffles as it did then.
    Out of its reach are a dataset that itself draws in the main process, in between the steps, which draws otherwise in
    the rest of such an epoch, and the workers of `DataLoader(..., persistent_workers=True)`, which begin anew in a
    resumed run what they draw.

    Raises TypeError for generators that are none, ValueError where the loop owns a part `torch_generators` already;
    ValueError when a saved state is loaded that is of more or fewer `generators`.
    """
    generators = list(generators)
    if wrong := [type(one).__name__ for one in generators if not isinstance(one, torch.Generator)]:
        raise TypeError(f"torch_generators(generators=[...]): give torch.Generators, not {', '.join(wrong)}")
    part = TorchGenerators(None if device is None else checked_device(device), generators)
    loop.own("torch_generators", part)

    def begin(state: State) -> None:
        part.begin(state, loop.iterates_anew)
        for inner in _within(loop):  # begins later, when others have drawn from torch's own
            inner.leave_global()

    loop.started.wire(begin)
    for event in (loop.iteration_started, loop.epoch_completed, loop.epoch_halted, loop.epoch_ended):
        event.wire(part.settle)  # the open epoch goes on, or ends
    loop.epoch_started.wire(part.remember, last=True)  # when all handlers have drawn


def _within(loop: Loop) -> Iterator[TorchGenerators]:
    """Those of the loops that this one owns, and of theirs."""
    for part in loop.parts.values():
        if isinstance(part, Loop):
            yield from (own for own in part.parts.values() if isinstance(own, TorchGenerators))
            yield from _within(part)


class TorchGenerators:
    """What `torch_generators` remembers: how they stood when the epoch began, and how they are to stand after it."""

    def __init__(self, device: torch.device | None, given: Sequence[torch.Generator] = ()) -> None:
        self._cuda = device if device is not None and device.type == "cuda" else None
        self._given = {f"given_{place}": generator for place, generator in enumerate(given)}
        self._epoch_began: dict[str, Tensor] | None = None
        self._waiting: dict[str, Tensor] | None = None  # what they are to be once the data stands where it stood

    def begin(self, state: State, anew: bool) -> None:
        """Go back to the open epoch's beginning, if there is one whose data is iterated `anew`."""
        if anew and state.epoch_open and self._epoch_began is not None:
            # of an epoch that has had nothing yet, whose data may have drawn its order all the same, nothing waits
            self._waiting = {**self._read(), **(self._waiting or {})} if state.iteration else None
            self._write(self._epoch_began)
        elif self._waiting is not None:
            self._write(self._waiting)
            self._waiting = None

    def settle(self, state: State) -> None:
        """Be what they were when the run was left; a handler.

        But one that the data has drawn from since `begin` stands right: a sampler draws once more as it finds its end,
        which may be with the element that was taken just now.
        """
        if self._waiting is not None and self._epoch_began is not None:
            for name, generator in self._given.items():
                if not torch.equal(generator.get_state().cpu(), self._epoch_began[name].cpu()):
                    self._waiting[name] = generator.get_state()
            self._write(self._waiting)
            self._waiting = None

    def remember(self, state: State) -> None:
        """Keep the generators' states as the data of an epoch begins; a handler."""
        self._epoch_began = self._read()

    def leave_global(self) -> None:
        """Torch's own stand where they stood already: what was loaded of them is to be written no more."""
        if self._waiting is not None:
            self._waiting = {name: state for name, state in self._waiting.items() if name in self._given}

    def _read(self) -> dict[str, Tensor]:
        stand = {"host": torch.get_rng_state()}
        if self._cuda is not None:
            stand["cuda"] = torch.cuda.get_rng_state(self._cuda)
        return {**stand, **{name: generator.get_state() for name, generator in self._given.items()}}

    def _write(self, generators: Mapping[str, Tensor]) -> None:
        if "host" in generators:
            torch.set_rng_state(generators["host"].cpu())
        if self._cuda is not None and "cuda" in generators:
            torch.cuda.set_rng_state(generators["cuda"].cpu(), self._cuda)
        for name, generator in self._given.items():
            generator.set_state(generators[name].cpu())

    def state_dict(self) -> dict[str, Any]:
        """As they are now, and as they were when the epoch began."""
        return {"now": {**self._read(), **(self._waiting or {})}, "epoch_began": self._epoch_began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, when the run begins. Raises ValueError for other `generators`."""
        saved = sum(name.startswith("given_") for name in state["now"])
        if saved != len(self._given):
            raise ValueError(
                f"the saved state has {saved} generators besides torch's own, and the loop {len(self._given)}: "
                "give torch_generators or trainer the same generators=[...], those of the DataLoaders"
            )
        self._waiting, began = dict(state["now"]), state["epoch_began"]
        self._epoch_began = None if began is None else dict(began)
