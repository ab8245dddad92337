"""Optimizers, schedulers and generators owned by a loop: saved without pickle and resumed exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import rein
from rein.handlers.checkpoint import checkpoint

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "Rprop": torch.optim.Rprop,  # has a tuple in its settings but not in its state
}


def adversaries(kind: str = "Adam") -> rein.Loop:
    """Return a loop with two models, an optimizer for each, and noise from a generator."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    makes, judges = OPTIMIZERS[kind](maker.parameters()), OPTIMIZERS[kind](judge.parameters())
    generator = torch.Generator().manual_seed(1)

    def step(state: rein.State) -> dict[str, Any]:
        made = maker(torch.randn(4, 2, generator=generator))
        judges.zero_grad()
        judge_loss = nn.functional.softplus(judge(made.detach())).mean()
        judge_loss.backward()
        judges.step()
        makes.zero_grad()
        maker_loss = nn.functional.softplus(-judge(made)).mean()
        maker_loss.backward()
        makes.step()
        return {"maker_loss": maker_loss.detach(), "judge_loss": judge_loss.detach()}

    loop = rein.Loop(step, epochs=4, iterations=3)
    for name in ("maker_loss", "judge_loss"):
        loop.metric(name, name)
    parts = {"maker": maker, "judge": judge, "makes": makes, "judges": judges, "generator": generator}
    for name, part in parts.items():
        assert loop.own(name, part) is part
    return loop


def losses(loop: rein.Loop) -> list[dict[str, float]]:
    return [dict(record.metrics) for record in loop.state.history]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_optimizers_resume_exactly_from_a_file(kind: str, tmp_path: Path) -> None:
    whole, first, second = adversaries(kind), adversaries(kind), adversaries(kind)
    whole.run()
    checkpoint(first, rein.Checkpoints(tmp_path))
    first.iteration_completed(once=8)(lambda state: first.interrupt())
    first.run()
    rein.resume(second, tmp_path)
    assert second.state.total_iterations == 8
    second.run()
    assert losses(second) == losses(whole)
    for name in ("maker", "judge"):
        pairs = zip(second.parts[name].parameters(), whole.parts[name].parameters(), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)


def test_loaded_optimizer_does_not_share_memory_with_the_saved_state() -> None:
    first, second = adversaries(), adversaries()
    first.run(epochs=2)
    saved = first.state_dict()
    expected = saved["parts"]["makes"]["state"]["0"]["exp_avg"].clone()
    second.load_state_dict(saved)
    second.run()
    assert torch.equal(saved["parts"]["makes"]["state"]["0"]["exp_avg"], expected)


class Table(lr_scheduler.LRScheduler):
    """Custom scheduler with settings by epoch, in dictionaries and in a list."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factors, self.further = {0: 1.0, 2: 0.3}, [{4: 0.1}, {"of": {}}]
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        factor = {**self.factors, **self.further[0]}.get(self.last_epoch)
        return [group["lr"] * (factor or 1.0) for group in self.optimizer.param_groups]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3, 3]),
    "none": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, []),
    "in another": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.5), lr_scheduler.MultiStepLR(optimizer, [1, 2])], [2]
    ),
    "in a chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.MultiStepLR(optimizer, [2, 4])]
    ),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "somebody's": Table,
}


def scheduled(kind: str) -> tuple[rein.Loop, list[float]]:
    """Return a loop that records the learning rate of its steps; a scheduler changes it after each epoch."""
    torch.manual_seed(0)
    rates: list[float] = []
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(state: rein.State) -> None:
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    loop = rein.Loop(step, epochs=6, iterations=2)
    scheduler = SCHEDULERS[kind](optimizer)
    for name, part in {"model": model, "optimizer": optimizer, "scheduler": scheduler}.items():
        loop.own(name, part)
    loop.epoch_ended(lambda state: scheduler.step())
    return loop, rates


@pytest.mark.default_cases(every=2)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the warning depends on the interruption
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # raised by torch's SequentialLR
@pytest.mark.parametrize("left_at", [1, 5, 8])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_scheduler_resumes_exactly_from_a_file(kind: str, left_at: int, tmp_path: Path) -> None:
    whole, expected = scheduled(kind)
    whole.run()
    first, before = scheduled(kind)
    checkpoint(first, rein.Checkpoints(tmp_path))
    first.iteration_completed(once=left_at)(lambda state: first.interrupt())
    first.run()
    second, after = scheduled(kind)
    rein.resume(second, tmp_path)
    second.run()
    assert before + after == expected
    assert second.parts["scheduler"].state_dict() == whole.parts["scheduler"].state_dict()


def test_scheduler_milestones_keep_integer_keys_after_a_resume() -> None:
    first, second = scheduled("MultiStepLR")[0], scheduled("none")[0]
    saved = first.state_dict()
    assert saved["parts"]["scheduler"]["milestones"] == {"integer_keys": "Counter", "entries": {"1": 1, "3": 2}}
    second.load_state_dict(saved)
    milestones = second.parts["scheduler"].milestones
    assert (type(milestones), milestones) == (Counter, Counter([1, 3, 3]))


def test_optimizer_of_other_parameters_is_rejected_or_skipped() -> None:
    first, second = adversaries(), rein.Loop(lambda state: None)
    first.run(epochs=1)
    for name, part in first.parts.items():
        second.own(name, torch.optim.SGD([torch.zeros(1)] * 1) if name == "makes" else part)
    with pytest.raises(ValueError, match="parameter group") as caught:
        second.load_state_dict(first.state_dict())
    assert "in the loop's part 'makes'" in caught.value.__notes__
    assert second.load_state_dict(first.state_dict(), strict=False)[0].startswith("makes: ")


def test_taken_name_of_a_part_raises_with_a_hint() -> None:
    loop = rein.Loop(lambda state: None)
    loop.own("noise", torch.Generator())
    with pytest.raises(ValueError, match=r"a part with this name, Generator; .*\(plug-ins accept name="):
        loop.own("noise", torch.Generator())


def test_numpy_numbers_are_saved_as_numbers(tmp_path: Path) -> None:
    import numpy as np

    loop, resumed = (rein.Loop(lambda state: {"x": np.float64(state.iteration)}) for _ in range(2))
    loop.started(lambda state: state.memory.update(best=np.float32(1.5), at=np.int64(3), found=np.bool_(True)))
    checkpoint(loop, rein.Checkpoints(tmp_path))
    loop.run(iterations=2)
    rein.resume(resumed, tmp_path)
    assert resumed.state.memory == {"best": 1.5, "at": 3, "found": True}
    assert [type(value) for value in resumed.state.memory.values()] == [float, int, bool]
    assert resumed.state.step_state == {"x": 1.0}


def test_part_with_a_slot_of_another_class_is_searched(tmp_path: Path) -> None:
    class Original:
        __slots__ = ("value",)

    class Copy:  # arrays of JAX are such objects
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    Copy.__slots__ = ("value",)  # type: ignore[attr-defined]
    Copy.value = Original.__dict__["value"]  # type: ignore[attr-defined]
    loop = rein.Loop(lambda state: None, epochs=1, iterations=1)
    loop.own("copy", Copy())
    checkpoint(loop, rein.Checkpoints(tmp_path))
    loop.run()
    assert len(list(tmp_path.glob("*.h5"))) == 1
