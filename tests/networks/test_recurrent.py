"""Recurrent cores: steps against sequences, resets, and comparison with torch's cores.

Shapes: T steps, N environments, I inputs, H features, C size of the carry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rein.networks import recurrent
from rein.networks.recurrent import GRU, LSTM, Core, MinimalGRU
from rein.ops.random import generator

Kind = type[LSTM] | type[GRU] | type[MinimalGRU]

CORES = (LSTM, GRU, MinimalGRU)
LAYERS = pytest.mark.parametrize("layers", [1, 2])
N, I, H = 4, 3, 5  # noqa: E741  # I inputs
LENGTHS = (1, 2, 3, 4, 7, 8, 9, 16, 37)  # around powers of two, the edge cases of the scan
PRECISION = {torch.float32: 1e-6, torch.float64: 1e-12}

Gradients = dict[str, Tensor]
Run = Callable[[Core, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "numbers"), dtype=torch.float64)


def make(kind: Kind, dtype: torch.dtype = torch.float64, layers: int = 1) -> Core:
    """Return a core with random parameters, none of them zero."""
    core = kind(I, H, generator(0, "agent"), layers).to(dtype)
    with torch.no_grad():
        for index, parameter in enumerate(core.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=index) / H**0.5)
    return core


def resets(steps: int, seed: int = 0) -> Tensor:
    reset_TN = numbers(steps, N, seed=100 + seed) < -0.8
    reset_TN[:, 0] = False  # one environment without resets,
    reset_TN[:, 1] = True  # one with a reset at every step,
    reset_TN[0, 2] = True  # one that begins with a reset
    return reset_TN


def in_steps(core: Core, x_TNI: Tensor, carry_NC: Tensor, reset_TN: Tensor) -> tuple[Tensor, Tensor]:
    y_TNH = []
    for x_NI, reset_N in zip(x_TNI, reset_TN, strict=True):
        y_NH, carry_NC = core.step(x_NI, torch.where(reset_N.unsqueeze(1), 0.0, carry_NC))
        y_TNH.append(y_NH)
    return torch.stack(y_TNH), carry_NC


def as_sequence(core: Core, x_TNI: Tensor, carry_NC: Tensor, reset_TN: Tensor) -> tuple[Tensor, Tensor]:
    return core.sequence(x_TNI, carry_NC, reset_TN)


def learn(run: Run, core: Core, steps: int, reset_TN: Tensor) -> tuple[Tensor, Tensor, Gradients]:
    """Return the results of a run, and the gradients of a loss with a different weight for each number."""
    dtype = next(core.parameters()).dtype
    x_TNI = numbers(steps, N, core.inputs, seed=1).to(dtype).requires_grad_()
    carry_NC = numbers(N, core.carry_size, seed=2).to(dtype).requires_grad_()
    y_TNH, last_NC = run(core, x_TNI, carry_NC, reset_TN)
    weigh = numbers(*y_TNH.shape, seed=3).to(dtype), numbers(*last_NC.shape, seed=4).to(dtype)
    loss = (y_TNH * weigh[0]).sum() + (last_NC * weigh[1]).sum()
    wanted = {"x": x_TNI, "carry": carry_NC, **dict(core.named_parameters())}
    gradients = torch.autograd.grad(loss, list(wanted.values()))
    return y_TNH.detach(), last_NC.detach(), dict(zip(wanted, gradients, strict=True))


def assert_same(result: Any, expected: Any, precision: float) -> None:
    """Assert equality relative to the largest number of each tensor."""
    if isinstance(expected, dict):
        assert result.keys() == expected.keys()
        for name, one in expected.items():
            assert_same(result[name], one, precision)
    elif isinstance(expected, tuple):
        for left, right in zip(result, expected, strict=True):
            assert_same(left, right, precision)
    else:
        assert result.dtype == expected.dtype
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(result / scale, expected / scale, rtol=0.0, atol=precision)


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("steps", LENGTHS)
@LAYERS
@pytest.mark.parametrize("kind", CORES)
def test_sequence_matches_steps_in_results_and_gradients(
    kind: Kind, layers: int, steps: int, dtype: torch.dtype
) -> None:
    core, reset_TN = make(kind, dtype, layers), resets(steps)
    expected = learn(in_steps, core, steps, reset_TN)
    assert_same(learn(as_sequence, core, steps, reset_TN), expected, PRECISION[dtype])


@pytest.mark.parametrize("run", [in_steps, as_sequence])
@LAYERS
@pytest.mark.parametrize("kind", CORES)
def test_gradients_match_finite_differences(kind: Kind, layers: int, run: Run) -> None:
    core, reset_TN = make(kind, layers=layers), resets(6)
    inputs = numbers(6, N, I, seed=1).requires_grad_(), numbers(N, core.carry_size, seed=2).requires_grad_()

    def outputs(x_TNI: Tensor, carry_NC: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return run(core, x_TNI, carry_NC, reset_TN)

    assert torch.autograd.gradcheck(outputs, (*inputs, *core.parameters()), fast_mode=True)


@LAYERS
@pytest.mark.parametrize("kind", CORES)
def test_arguments_are_not_modified(kind: Kind, layers: int) -> None:
    core = make(kind, layers=layers)
    arguments = numbers(8, N, I, seed=1), numbers(N, core.carry_size, seed=2), resets(8)
    before = [argument.clone() for argument in arguments]
    core.sequence(*arguments)
    core.step(arguments[0][0], arguments[1])
    for argument, was in zip(arguments, before, strict=True):
        assert torch.equal(argument, was)


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
def test_lstm_matches_torch(dtype: torch.dtype) -> None:
    core, cell = make(LSTM, dtype), nn.LSTMCell(I, H, dtype=dtype)
    state = core.state_dict()
    cell.load_state_dict(
        {
            "weight_ih": state["input_weight"],
            "weight_hh": state["hidden_weight"],
            "bias_ih": state["bias"],
            "bias_hh": torch.zeros(4 * H),
        }
    )

    def by_torch(core: Core, x_TNI: Tensor, carry_NC: Tensor, reset_TN: Tensor) -> tuple[Tensor, Tensor]:
        h_NH, c_NH = carry_NC.split(H, 1)
        y_TNH = []
        for x_NI in x_TNI:
            h_NH, c_NH = cell(x_NI, (h_NH, c_NH))
            y_TNH.append(h_NH)
        return torch.stack(y_TNH), torch.cat([h_NH, c_NH], 1)

    assert_equal_without_resets(core, by_torch, PRECISION[dtype])


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
def test_gru_matches_torch(dtype: torch.dtype) -> None:
    core, cell = make(GRU, dtype), nn.GRUCell(I, H, dtype=dtype)
    state = core.state_dict()
    cell.load_state_dict(
        {
            "weight_ih": state["input_weight"],
            "weight_hh": state["hidden_weight"],
            "bias_ih": state["bias"],
            "bias_hh": torch.cat([torch.zeros(2 * H), state["hidden_bias"]]),
        }
    )

    def by_torch(core: Core, x_TNI: Tensor, carry_NC: Tensor, reset_TN: Tensor) -> tuple[Tensor, Tensor]:
        y_TNH = []
        for x_NI in x_TNI:
            carry_NC = cell(x_NI, carry_NC)
            y_TNH.append(carry_NC)
        return torch.stack(y_TNH), carry_NC

    assert_equal_without_resets(core, by_torch, PRECISION[dtype])


def assert_equal_without_resets(core: Core, run: Run, precision: float) -> None:
    dtype, results = next(core.parameters()).dtype, []
    x_TNI = numbers(7, N, I, seed=1).to(dtype).requires_grad_()
    carry_NC = numbers(N, core.carry_size, seed=2).to(dtype).requires_grad_()
    for one in (run, as_sequence):
        y_TNH, last_NC = one(core, x_TNI, carry_NC, torch.zeros(7, N, dtype=torch.bool))
        gradients = torch.autograd.grad(y_TNH.square().sum() + last_NC.sum(), (x_TNI, carry_NC))
        results.append((y_TNH.detach(), last_NC.detach(), *gradients))
    assert_same(results[1], results[0], precision)


def test_minimal_gru_moves_from_the_carry_toward_the_new_value() -> None:
    core = make(MinimalGRU)
    x_NI, carry_NH = numbers(N, I, seed=1), numbers(N, H, seed=2)
    weight_z, weight_n = core.get_parameter("weight").split(H)
    bias_z, bias_n = core.get_parameter("bias").split(H)
    z_NH = torch.sigmoid(x_NI @ weight_z.T + bias_z)
    expected_NH = (1 - z_NH) * carry_NH + z_NH * (x_NI @ weight_n.T + bias_n)
    y_NH, next_NH = core.step(x_NI, carry_NH)
    torch.testing.assert_close(y_NH, expected_NH)
    torch.testing.assert_close(next_NH, expected_NH)


@pytest.mark.parametrize("steps", [16, 64, 256])
def test_scan_takes_fewer_operations_than_steps(steps: int) -> None:
    keep_TNH, new_TNH = numbers(steps, 1, 1).sigmoid(), numbers(steps, 1, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        recurrent.linear_recurrence(keep_TNH, new_TNH, keep_TNH[0])
    operations = sum(event.count for event in profile.key_averages() if event.key in ("aten::addcmul_", "aten::mul_"))
    assert operations <= 3 * (steps.bit_length() - 1) + 1


@pytest.mark.parametrize("kind", CORES)
def test_layers_are_stacked_cores(kind: Kind) -> None:
    drawn = generator(3, "agent")
    cores = [kind(inputs, H, drawn) for inputs in (I, H, H)]
    stacked = kind(I, H, generator(3, "agent"), layers=3)
    assert stacked.carry_size == 3 * cores[0].carry_size
    x_TNI, carry_NC, reset_TN = numbers(9, N, I).float(), numbers(N, stacked.carry_size, seed=1).float(), resets(9)
    y_TNH, last_NC = stacked.sequence(x_TNI, carry_NC, reset_TN)
    expected_TNH, lasts = x_TNI, []
    for core, of_core_NC in zip(cores, carry_NC.chunk(3, 1), strict=True):
        expected_TNH, last = core.sequence(expected_TNH, of_core_NC, reset_TN)
        lasts.append(last)
    assert torch.equal(y_TNH, expected_TNH)
    assert torch.equal(last_NC, torch.cat(lasts, 1))


@pytest.mark.parametrize("kind", CORES)
def test_single_layer_keeps_its_parameter_names(kind: Kind) -> None:
    names = {
        LSTM: ["input_weight", "hidden_weight", "bias"],
        GRU: ["input_weight", "hidden_weight", "bias", "hidden_bias"],
        MinimalGRU: ["weight", "bias"],
    }
    assert [*kind(I, H, generator(0, "agent")).state_dict()] == names[kind]
    assert [*kind(I, H, generator(0, "agent"), layers=2).state_dict()][len(names[kind]) :] == [
        f"above.{name}" for name in names[kind]
    ]


@pytest.mark.parametrize("kind", CORES)
@pytest.mark.parametrize("layers", [0, -1, 1.5])
def test_less_than_one_layer_is_rejected(kind: Kind, layers: Any) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__}\(layers={layers}\): give a whole number, 1 or more"):
        kind(I, H, generator(0, "agent"), layers=layers)


@pytest.mark.parametrize("kind", CORES)
def test_each_gate_is_initially_orthogonal(kind: Kind) -> None:
    core = kind(H, H, generator(0, "agent"))
    for name, parameter in core.named_parameters():
        if name.endswith("weight"):
            for gate_HH in parameter.split(H):
                torch.testing.assert_close(gate_HH @ gate_HH.T, torch.eye(H), rtol=0.0, atol=1e-5)


def test_forget_gate_bias_is_initially_one() -> None:
    core = LSTM(I, H, generator(0, "agent"))
    input_gate, forget_gate, new, output_gate = core.bias.split(H)
    assert (forget_gate == 1).all()
    assert not torch.cat([input_gate, new, output_gate]).any()


@pytest.mark.parametrize("kind", CORES)
def test_parameters_are_drawn_only_from_the_generator(kind: Kind) -> None:
    before = torch.get_rng_state()
    one, same, other = (kind(I, H, generator(seed, "agent")) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name))
        assert torch.equal(parameter, other.get_parameter(name)) == (not name.endswith("weight"))
    weights = [parameter for name, parameter in one.named_parameters() if name.endswith("weight")]
    gates = [gate for weight in weights for gate in weight.split(H)]
    assert not any(torch.equal(a, b) for i, a in enumerate(gates) for b in gates[:i])


@pytest.mark.parametrize("kind", CORES)
def test_arguments_of_wrong_size_are_rejected(kind: Kind) -> None:
    core = kind(I, H, generator(0, "agent"))
    carry_NC, reset_TN = torch.zeros(N, core.carry_size), torch.zeros(2, N, dtype=torch.bool)
    for call in (
        lambda: core.step(torch.zeros(N, I + 1), carry_NC),
        lambda: core.sequence(torch.zeros(2, N, I + 1), carry_NC, reset_TN),
    ):
        with pytest.raises(ValueError, match=f"{kind.__name__} expects {I} inputs"):
            call()
    for wrong in (torch.zeros(N, core.carry_size + 1), torch.zeros(1, core.carry_size)):
        with pytest.raises(ValueError, match=rf"expects a carry \({N}, {core.carry_size}\)"):
            core.step(torch.zeros(N, I), wrong)
        with pytest.raises(ValueError, match=rf"expects a carry \({N}, {core.carry_size}\)"):
            core.sequence(torch.zeros(2, N, I), wrong, reset_TN)
    with pytest.raises(ValueError, match=rf"\(2, {N}\), got \(2, 1\)"):
        core.sequence(torch.zeros(2, N, I), carry_NC, reset_TN[:, :1])


@pytest.mark.default_cases("LSTM-1-as_sequence", "GRU-1-in_steps", "MinimalGRU-2-in_steps", "MinimalGRU-1-as_sequence")
@pytest.mark.filterwarnings(
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
)  # raised by torch
@pytest.mark.parametrize("run", [in_steps, as_sequence])
@LAYERS
@pytest.mark.parametrize("kind", CORES)
def test_core_compiles_to_one_graph(kind: Kind, layers: int, run: Run) -> None:
    torch.compiler.reset()  # earlier compilations count towards a limit
    core, reset_TN = make(kind, layers=layers), resets(3)

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(_: Core, x_TNI: Tensor, carry_NC: Tensor, reset_TN: Tensor) -> tuple[Tensor, Tensor]:
        return run(core, x_TNI, carry_NC, reset_TN)

    assert_same(learn(compiled, core, 3, reset_TN), learn(run, core, 3, reset_TN), 1e-12)
