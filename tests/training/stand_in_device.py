"""Simulated device for machines without a GPU. Its tensors report the device and keep their data on the CPU.

As on a GPU, operations that mix its tensors with CPU tensors raise an error, except for scalars and indices. CPU
generators raise an error, and data can be read by a copy only. `waits` counts operations for which the host would wait.
In `as_program`, operations that a captured program cannot contain raise an error. The device affects the whole process,
so use it in a separate process.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


class _Backend:
    """Module of a device type, as torch requires it."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend("standin", backend_module=_Backend())
NAME = "standin"
_DEVICE, _HOST = torch.device(NAME, 0), torch.device("cpu")
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_NUMBERS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::allclose",
}  # do not return tensors
_WAITS = {*_NUMBERS, "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::repeat_interleave"}

waits: Counter[str] = Counter()
_generators: dict[int, torch.Generator] = {}  # generators of the device by their internal id; keeps them alive


class _OnDevice(torch.Tensor):
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _OnDevice:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "layout": inner.layout}
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=_DEVICE, **layout)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.detach().clone().requires_grad_(self.requires_grad))

    def __repr__(self, **options: Any) -> str:
        return f"{self.inner!r} on {NAME}"

    def tolist(self) -> Any:
        _refuse("tolist", _checking)
        waits["tolist"] += 1
        return self.inner.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        _refuse("numpy", _checking)
        if force:
            return self.cpu().numpy()
        raise TypeError(f"can't convert {NAME} device type tensor to numpy. Use Tensor.cpu()")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()


class _Generator(torch.Generator):
    """CPU generator that, if created for the device, is accepted for tensors of the device only."""

    def __new__(cls, device: Any = _HOST) -> _Generator:
        return super().__new__(cls, _HOST)

    def __init__(self, device: Any = _HOST) -> None:
        self._device = torch.device(device)
        if self._device.type == NAME:
            self._device = _DEVICE
            _generators[self._cdata] = self

    @property
    def device(self) -> torch.device:
        return self._device


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU if its tensors may be combined. Results are on the device that torch would choose."""
    name, given = func._schema.name, tree_leaves((args, kwargs))
    if _checking:
        _check_captured(func, name, args, kwargs)
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    there = [x for x in tensors if isinstance(x, _OnDevice)]
    target = kwargs.get("device")
    result_there = bool(there) if target is None else torch.device(target).type == NAME
    if name in ("aten::copy_", "aten::_foreach_copy_"):
        into, source = (x[0] if isinstance(x, (list, tuple)) else x for x in args[:2])
        result_there = isinstance(into, _OnDevice)
        waits["to the host"] += isinstance(source, _OnDevice) and not result_there
    elif name == "aten::_to_copy":
        waits["to the host"] += bool(there) and not result_there
    elif there:
        _check_devices(name, args, tensors)
        waits[name] += name in _WAITS or (name in _INDEXING and any(x.dtype == torch.bool for x in tensors[1:]))
    for generator in (x for x in given if isinstance(x, torch._C.Generator)):  # torch.Generator is patched here
        if (generator._cdata in _generators) != result_there:
            raise RuntimeError(f"{name}: a generator of another device")
    inner = tree_map_only(_OnDevice, lambda x: x.inner, (args, kwargs))
    if target is not None:
        inner[1]["device"] = _HOST
    found = func(*inner[0], **inner[1])
    if result_there and name not in _NUMBERS:
        found = tree_map_only(torch.Tensor, _OnDevice, found)
    return return_and_correct_aliasing(func, args, kwargs, found) if func._schema.is_mutable or result_there else found


_checking: list[str] = []  # names of the open `as_program` contexts
operations: Counter[str] = Counter()  # operations within `as_program`, without views
_READS = {*_NUMBERS, "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::repeat_interleave.Tensor"}


@contextlib.contextmanager
def as_program(name: str = "program") -> Iterator[None]:
    """Context manager in which operations raise RuntimeError that a captured program cannot contain.

    A program must not read values, copy from or to the host, use tensors of the host, or draw random numbers.
    """
    _checking.append(name)
    try:
        yield
    finally:
        _checking.pop()


def _refuse(operation: str, condition: Any) -> None:
    if condition:
        raise RuntimeError(f"{_checking[-1]} contains {operation}")


def _check_captured(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    there = [x for x in tensors if isinstance(x, _OnDevice)]
    _refuse(name, there and name in _READS)
    _refuse(f"{name} with a random number", torch.Tag.nondeterministic_seeded in func.tags)
    indices = [x for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor)] if name in _INDEXING else []
    _refuse(f"{name} with a boolean index", any(x.dtype == torch.bool for x in indices))
    target = kwargs.get("device")
    leaves_device = there and target is not None and torch.device(target).type != NAME
    _refuse(f"{name} to the host", leaves_device)
    enters = target is not None and torch.device(target).type == NAME
    _refuse(f"{name} with a tensor of the host", len(there) < len(tensors) and (there or enters))
    if not func.is_view and (there or enters):
        operations[name.removeprefix("aten::")] += 1


def _check_devices(name: str, args: Any, tensors: list[torch.Tensor]) -> None:
    """Raise RuntimeError if tensors of the device are combined with CPU tensors that are not scalars or indices."""
    cpu_tensors = [x for x in tensors if not isinstance(x, _OnDevice) and x.ndim]
    if name in _INDEXING and isinstance(args[0], _OnDevice):
        cpu_tensors = [x for x in args[2:3] if any(x is cpu_tensor for cpu_tensor in cpu_tensors)]
    if cpu_tensors or (name.endswith("_") and isinstance(args[0], torch.Tensor) and not isinstance(args[0], _OnDevice)):
        shapes = [(tuple(x.shape), str(x.device)) for x in tensors]
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} of {shapes}")


def _made(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap torch.tensor or torch.as_tensor to create the data on the CPU first."""

    def make(data: Any, *args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        if isinstance(data, _OnDevice):
            return data.to(device=data.device if device is None else device, **options)
        return function(data, *args, **options).to(device)

    return make


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Context manager in which the device exists."""
    with contextlib.ExitStack() as stack:
        for name in ("tensor", "as_tensor"):
            stack.enter_context(mock.patch.object(torch, name, _made(getattr(torch, name))))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(_Mode())
        yield
