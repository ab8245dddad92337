"""Recurrent cores. The memory of an episode, the carry, is a row of numbers that callers pass in and get back.

A core has no state. Single steps and a whole sequence compute the same numbers, so that agents act step by step and
learn from whole sequences.

Shapes: T steps in time, N environments, I inputs, H features, C size of the carry, G size of all gates together.
"""

from __future__ import annotations

import abc
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from rein.networks.mlp import orthogonal_linear


class Core(nn.Module, abc.ABC):
    """Base class of recurrent cores. A carry of zeros is the beginning of an episode."""

    def __init__(self, inputs: int, features: int, carry_size: int) -> None:
        super().__init__()
        self.inputs = inputs  # I
        self.features = features  # H
        self.carry_size = carry_size  # C: one flat row per environment

    @abc.abstractmethod
    def step(self, x_NI: Tensor, carry_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one step: the output (N, H) and the next carry (N, C), which may be the same tensor.

        Raises ValueError if the size of inputs or carry does not match.
        """

    @abc.abstractmethod
    def sequence(self, x_TNI: Tensor, carry_NC: Tensor, reset_TN: Tensor) -> tuple[Tensor, Tensor]:
        """Compute T steps: the outputs (T, N, H) and the last carry (N, C).

        If `reset_TN` (bool) is True, the carry is zeroed before that step, and no gradient flows back beyond it. Raises
        ValueError if the size of inputs, carry or resets does not match.
        """

    def _check(self, x: Tensor, carry_NC: Tensor, reset_TN: Tensor | None = None) -> None:
        if x.shape[-1] != self.inputs:
            raise ValueError(f"{type(self).__name__} expects {self.inputs} inputs, got shape {tuple(x.shape)}")
        if carry_NC.shape != (x.shape[-2], self.carry_size):
            expected = f"({x.shape[-2]}, {self.carry_size})"
            raise ValueError(f"{type(self).__name__} expects a carry {expected}, got {tuple(carry_NC.shape)}")
        if reset_TN is not None and reset_TN.shape != x.shape[:-1]:
            raise ValueError(f"expected one reset for each step, {tuple(x.shape[:-1])}, got {tuple(reset_TN.shape)}")


class LayeredCore(Core):
    """Core of one or several layers. The input of each layer is the output of the layer below, at every step.

    The carry concatenates the carries of all layers, from the first on. A subclass has the parameters of the first
    layer, the arithmetic of one layer, and a constructor with `inputs`, `features`, `generator` and `layers`.
    """

    def __init__(self, inputs: int, features: int, carry_size: int, layers: int) -> None:
        """Create a core. `carry_size` is the size for one layer. Raises ValueError for less than one layer."""
        if layers < 1 or layers != int(layers):
            raise ValueError(f"{type(self).__name__}(layers={layers}): give a whole number, 1 or more")
        super().__init__(inputs, features, int(layers) * carry_size)
        self._first_carry = carry_size
        self.above: Core | None = None  # all other layers

    def step(self, x_NI: Tensor, carry_NC: Tensor) -> tuple[Tensor, Tensor]:
        """See `Core`."""
        self._check(x_NI, carry_NC)
        if self.above is None:
            return self._step(x_NI, carry_NC)
        carry_NC, above_NC = carry_NC.tensor_split([self._first_carry], 1)
        y_NH, carry_NC = self._step(x_NI, carry_NC)
        y_NH, above_NC = self.above.step(y_NH, above_NC)
        return y_NH, torch.cat([carry_NC, above_NC], 1)

    def sequence(self, x_TNI: Tensor, carry_NC: Tensor, reset_TN: Tensor) -> tuple[Tensor, Tensor]:
        """See `Core`."""
        self._check(x_TNI, carry_NC, reset_TN)
        if self.above is None:
            return self._sequence(x_TNI, carry_NC, reset_TN)
        carry_NC, above_NC = carry_NC.tensor_split([self._first_carry], 1)
        y_TNH, carry_NC = self._sequence(x_TNI, carry_NC, reset_TN)
        y_TNH, above_NC = self.above.sequence(y_TNH, above_NC, reset_TN)
        return y_TNH, torch.cat([carry_NC, above_NC], 1)

    @abc.abstractmethod
    def _step(self, x_NI: Tensor, carry_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `step` of the first layer, with its part of the carry."""

    @abc.abstractmethod
    def _sequence(self, x_TNI: Tensor, carry_NC: Tensor, reset_TN: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `sequence` of the first layer, with its part of the carry."""


@final
class LSTM(LayeredCore):
    """Long short-term memory (Hochreiter & Schmidhuber 1997) with forget gates (Gers et al. 2000); C = 2 H per layer.

    One step computes::

        i, f, o = sigmoid(W x + U h + b)     g = tanh(W x + U h + b)
        c <- f c + i g                       h <- o tanh(c)

    The output is h, the carry is (h, c). Weights are orthogonal per gate. Biases are zero, except 1 for the forget
    gate, which makes the cell remember at first (Jozefowicz et al. 2015). Parameters are drawn from `generator`.
    """

    def __init__(self, inputs: int, features: int, generator: torch.Generator, layers: int = 1) -> None:
        super().__init__(inputs, features, 2 * features, layers)
        self.input_weight = _orthogonal(inputs, features, 4, generator)  # torch's order: i, f, g, o
        self.hidden_weight = _orthogonal(features, features, 4, generator)
        bias_G = torch.zeros(4 * features, dtype=torch.float32, device=generator.device)
        bias_G[features : 2 * features] = 1.0
        self.bias = nn.Parameter(bias_G)
        self.above = LSTM(features, features, generator, layers - 1) if layers > 1 else None

    def _step(self, x_NI: Tensor, carry_NC: Tensor) -> tuple[Tensor, Tensor]:
        h_NH, c_NH = carry_NC.chunk(2, 1)
        h_NH, c_NH = _lstm(linear(x_NI, self.input_weight, self.bias), h_NH, c_NH, self.hidden_weight)
        return h_NH, torch.cat([h_NH, c_NH], 1)

    def _sequence(self, x_TNI: Tensor, carry_NC: Tensor, reset_TN: Tensor) -> tuple[Tensor, Tensor]:
        h_NH, c_NH = carry_NC.chunk(2, 1)
        y_NH = []
        seen_TNG = linear(x_TNI, self.input_weight, self.bias)
        for seen_NG, reset_N1 in zip(seen_TNG.unbind(), reset_TN.unsqueeze(-1).unbind(), strict=True):
            h_NH, c_NH = h_NH.masked_fill(reset_N1, 0.0), c_NH.masked_fill(reset_N1, 0.0)
            h_NH, c_NH = _lstm(seen_NG, h_NH, c_NH, self.hidden_weight)
            y_NH.append(h_NH)
        return torch.stack(y_NH), torch.cat([h_NH, c_NH], 1)


@final
class GRU(LayeredCore):
    """Gated recurrent unit (Cho et al. 2014); C = H per layer.

    One step computes::

        r, z = sigmoid(W x + U h + b)     n = tanh(W x + b + r (U h + u))
        h <- (1 - z) n + z h

    The reset gate r multiplies U h and not h as in the paper, so that one product with h is enough. cuDNN
    and `torch.nn.GRU` do the same. Output and carry are h. Weights are orthogonal per gate, biases are zero. Parameters
    are drawn from `generator`.
    """

    def __init__(self, inputs: int, features: int, generator: torch.Generator, layers: int = 1) -> None:
        super().__init__(inputs, features, features, layers)
        self.input_weight = _orthogonal(inputs, features, 3, generator)  # torch's order: r, z, n
        self.hidden_weight = _orthogonal(features, features, 3, generator)
        self.bias = nn.Parameter(torch.zeros(3 * features, dtype=torch.float32, device=generator.device))
        self.hidden_bias = nn.Parameter(torch.zeros(features, dtype=torch.float32, device=generator.device))  # u
        self.above = GRU(features, features, generator, layers - 1) if layers > 1 else None

    def _step(self, x_NI: Tensor, carry_NC: Tensor) -> tuple[Tensor, Tensor]:
        seen_NG = linear(x_NI, self.input_weight, self.bias)
        h_NH = _gru(*self._split(seen_NG), carry_NC, self.hidden_weight, self.hidden_bias)
        return h_NH, h_NH

    def _sequence(self, x_TNI: Tensor, carry_NC: Tensor, reset_TN: Tensor) -> tuple[Tensor, Tensor]:
        h_NH, y_NH = carry_NC, []
        gates_TNG, new_TNH = self._split(linear(x_TNI, self.input_weight, self.bias))
        steps = zip(gates_TNG.unbind(), new_TNH.unbind(), reset_TN.unsqueeze(-1).unbind(), strict=True)
        for gates_NG, new_NH, reset_N1 in steps:
            h_NH = _gru(gates_NG, new_NH, h_NH.masked_fill(reset_N1, 0.0), self.hidden_weight, self.hidden_bias)
            y_NH.append(h_NH)
        return torch.stack(y_NH), h_NH

    def _split(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        gates, new = seen.split([2 * self.features, self.features], -1)
        return gates, new


@final
class MinimalGRU(LayeredCore):
    """Minimal GRU without a sequential loop: minGRU of Feng et al. 2024, section 3.1; C = H per layer.

    One step computes::

        z = sigmoid(W x + b)     n = V x + v
        h <- (1 - z) h + z n

    The gate depends only on the input. All gates of a sequence are therefore one product, and the rest is a linear
    recurrence. n is linear in x, as in that section. The logarithms in the paper's appendix need h > 0, which a carry
    of zeros violates; with coefficients in [0, 1] nothing overflows without them.

    Output and carry are h. Weights are orthogonal per gate, biases are zero. Parameters are drawn from `generator`. In
    one layer, only the current input decides how much of it is kept; with two or more `layers`, earlier inputs matter
    too.
    """

    def __init__(self, inputs: int, features: int, generator: torch.Generator, layers: int = 1) -> None:
        super().__init__(inputs, features, features, layers)
        self.weight = _orthogonal(inputs, features, 2, generator)  # z, n
        self.bias = nn.Parameter(torch.zeros(2 * features, dtype=torch.float32, device=generator.device))
        self.above = MinimalGRU(features, features, generator, layers - 1) if layers > 1 else None

    def _step(self, x_NI: Tensor, carry_NC: Tensor) -> tuple[Tensor, Tensor]:
        gate_NH, new_NH = linear(x_NI, self.weight, self.bias).to(carry_NC.dtype).chunk(2, -1)
        h_NH = torch.lerp(carry_NC, new_NH, gate_NH.sigmoid())
        return h_NH, h_NH

    def _sequence(self, x_TNI: Tensor, carry_NC: Tensor, reset_TN: Tensor) -> tuple[Tensor, Tensor]:
        gate_TNH, new_TNH = linear(x_TNI, self.weight, self.bias).to(carry_NC.dtype).chunk(2, -1)
        take_TNH = gate_TNH.sigmoid()
        keep_TNH = (1.0 - take_TNH).masked_fill(reset_TN.unsqueeze(-1), 0.0)
        y_TNH = linear_recurrence(keep_TNH, take_TNH * new_TNH, carry_NC)
        return y_TNH, y_TNH[-1]


def linear_recurrence(keep_TNH: Tensor, new_TNH: Tensor, carry_NH: Tensor) -> Tensor:
    """Compute h_t = keep_t h_t-1 + new_t for all t, (T, N, H), with the carry before h_0.

    The gradient is the same recurrence backwards (Martin & Cundy 2018).
    """
    h_TNH: Any = _LinearRecurrence.apply(keep_TNH, new_TNH, carry_NH)
    return h_TNH


class _LinearRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keep_TNH: Tensor, new_TNH: Tensor, carry_NH: Tensor) -> Tensor:
        h_TNH = new_TNH.clone()
        h_TNH[0].addcmul_(keep_TNH[0], carry_NH)
        _scan_(keep_TNH.clone(), h_TNH)
        ctx.save_for_backward(keep_TNH, h_TNH, carry_NH)
        return h_TNH

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch declares `*grads`
        ctx: Any, gradient_TNH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keep_TNH, h_TNH, carry_NH = ctx.saved_tensors
        reversed_TNH = gradient_TNH.flip(0)
        _scan_(torch.cat([keep_TNH[:1], keep_TNH[1:].flip(0)]), reversed_TNH)
        gradient_TNH = reversed_TNH.flip(0)
        before_TNH = torch.cat([carry_NH.unsqueeze(0), h_TNH[:-1]])
        return gradient_TNH * before_TNH, gradient_TNH, gradient_TNH[0] * keep_TNH[0]


def _scan_(reach_TNH: Tensor, x_TNH: Tensor) -> None:
    """Compute x_t <- x_t + reach_t x_t-1 from the first row to the last. Overwrites both; the first reach is ignored.

    This is the scan of Brent & Kung 1982: 3 log2(T) operations, which together do three times the work of a loop over
    T. On the way up, for d = 1, 2, 4, ..., every 2d-th row adds the d rows before it; on the way down, the rows between
    do so. `reach` is always the product of the coefficients of all rows that a row has added.
    """
    steps, d = len(x_TNH), 1
    while 2 * d <= steps:
        half, whole = slice(d - 1, steps - d, 2 * d), slice(2 * d - 1, None, 2 * d)
        x_TNH[whole].addcmul_(reach_TNH[whole], x_TNH[half])
        reach_TNH[whole].mul_(reach_TNH[half])
        d *= 2
    while d > 1:
        d //= 2
        whole, between = slice(2 * d - 1, steps - d, 2 * d), slice(3 * d - 1, None, 2 * d)
        x_TNH[between].addcmul_(reach_TNH[between], x_TNH[whole])


def _orthogonal(inputs: int, features: int, gates: int, generator: torch.Generator) -> nn.Parameter:
    """Return a weight (G, I) of several gates, orthogonal per gate. A joint orthogonal matrix would be too small."""
    each = [orthogonal_linear(inputs, features, 1.0, generator).weight.detach() for _ in range(gates)]
    return nn.Parameter(torch.cat(each))


def _lstm(seen_NG: Tensor, h_NH: Tensor, c_NH: Tensor, weight_GH: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next h and c."""
    i, f, g, o = torch.addmm(seen_NG, h_NH, weight_GH.t()).to(c_NH.dtype).chunk(4, 1)
    c_NH = torch.addcmul(i.sigmoid() * g.tanh(), f.sigmoid(), c_NH)
    return o.sigmoid() * c_NH.tanh(), c_NH


def _gru(gates_NG: Tensor, new_NH: Tensor, h_NH: Tensor, weight_GH: Tensor, bias_H: Tensor) -> Tensor:
    """Return the next h."""
    features = h_NH.shape[1]
    to_gates_NG, to_new_NH = linear(h_NH, weight_GH).to(h_NH.dtype).split([2 * features, features], 1)
    r, z = (gates_NG + to_gates_NG).sigmoid().chunk(2, 1)
    n = torch.addcmul(new_NH, r, to_new_NH + bias_H).tanh()
    return torch.lerp(n, h_NH, z)
