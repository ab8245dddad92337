"""Weights of networks under conventional names, with one matrix (outputs, inputs) per layer, as in PyTorch's modules.

Stacked networks are separated. Layers are numbered as in `nn.Sequential(Linear, activation, Linear, ...)`, so that
`actor.0.weight` is the first layer of the actor and `actor.2.weight` the second one. LSTM and GRU have the names of
`nn.LSTM` and `nn.GRU`. Target networks are left out.

Shapes: K networks, I inputs, H features of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rein.networks.actor_critic import ActorCritic
from rein.networks.custom_networks import CustomActorCritic
from rein.networks.heads import ProductHead
from rein.networks.mlp import Stack
from rein.networks.normalizers import ObservationNormalizer
from rein.networks.off_policy import (
    ActionValues,
    Actor,
    ContinuousNetworks,
    Critics,
    CustomActor,
    DiscreteActor,
    DiscreteNetworks,
    StateValue,
)
from rein.networks.q_networks import DuelingHead, OnlineAndTarget
from rein.networks.recurrent import GRU, LSTM
from rein.ops.trees import by_name

Parts = tuple[Tensor, ...]  # views of parameters, which are concatenated along the first dimension
Names = list[tuple[str, Parts]]


def named_weights(modules: Mapping[str, nn.Module | Tensor]) -> dict[str, Tensor]:
    """Return copies of the parameters and buffers of modules, given by their attributes, under conventional names.

    Raises ValueError if two of them would have the same name.
    """
    return {name: torch.cat(parts) if parts[0].ndim else parts[0].clone() for name, parts in _named(modules).items()}


@torch.no_grad()
def load_named_weights(modules: Mapping[str, nn.Module | Tensor], weights: Mapping[str, Tensor]) -> None:
    """Copy the result of `named_weights` into modules of the same sizes. Raises ValueError, before any change."""
    names = _named(modules)
    if differ := sorted(names.keys() ^ weights.keys()):
        raise ValueError(f"the names of the weights differ: {', '.join(differ)[:200]}")
    for name, weight in named_weights(modules).items():
        if weight.shape != weights[name].shape or weight.dtype != weights[name].dtype:
            expected, got = (f"{tuple(x.shape)} {x.dtype}" for x in (weight, weights[name]))
            raise ValueError(f"{name}: expected {expected}, got {got}")
    for name, parts in names.items():
        weight = weights[name]
        for part, values in zip(parts, weight.split([*map(len, parts)]) if weight.ndim else [weight], strict=True):
            part.copy_(values)
    for module in modules.values():
        for part in module.modules() if isinstance(module, nn.Module) else ():
            if isinstance(part, ObservationNormalizer):
                part.load_state_dict(part.state_dict())  # recompute the buffers that depend on the moments


def _named(modules: Mapping[str, nn.Module | Tensor]) -> dict[str, Parts]:
    """Return the weights of modules by their attributes. The attribute `networks` adds no prefix."""
    names: Names = []
    for name, module in modules.items():
        if isinstance(module, Tensor):
            names.append((name, (module,)))
        else:
            names += _walk(module, "" if name == "networks" else name)
    return by_name((name, tuple(part.detach() for part in parts)) for name, parts in names)


def _walk(module: nn.Module, prefix: str) -> Names:
    rule = next((rule for kind, rule in _RULES.items() if isinstance(module, kind)), None)
    names, done = rule(module, prefix) if rule is not None else ([], set[str]())
    own = {*module.state_dict()}
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if name in own and name not in done:
            names.append((_join(prefix, name), (tensor,)))
    for name, child in module.named_children():
        if name not in done:
            names += _walk(child, _join(prefix, name))
    return names


def _join(*names: Any) -> str:
    return ".".join(str(name) for name in names if name != "")


def _linear(prefix: str, weight: Tensor, bias: Tensor) -> Names:
    return [(f"{prefix}.weight", (weight,)), (f"{prefix}.bias", (bias,))]


def _layers(prefix: str, stack: Any, k: int = 0) -> Names:
    """Return the layers of network k of a stack."""
    names: Names = []
    for layer, (weight, bias) in enumerate(zip(stack.weights, stack.biases, strict=True)):
        names += _linear(_join(prefix, 2 * layer), weight[k].t(), bias[k, 0])
    return names


def _last(prefix: str, stack: Any) -> str:
    """Return the name of the layer after a stack."""
    return _join(prefix, 2 * len(stack.weights))


def _head(head: Any, prefix: str, log_std: str) -> Names:
    """Return the last layers of a policy, and log standard deviations that are parameters."""
    if isinstance(head, ProductHead):
        names: Names = []
        for name, part in zip(head.names, head.heads, strict=True):
            names += _head(part, f"{prefix}.{name}", f"{log_std}.{name}")
        return names
    names = _walk(head.linear, prefix)
    return [*names, (log_std, (head.log_std,))] if hasattr(head, "log_std") else names


def _stack(module: Any, prefix: str) -> tuple[Names, set[str]]:
    names: Names = []
    for k in range(module.members):
        names += _layers(prefix if module.members == 1 else _join(prefix, k), module, k)
    return names, {"weights", "biases"}


def _actor_critic(module: Any, prefix: str) -> tuple[Names, set[str]]:
    actor, critic, shared = (_join(prefix, name) for name in ("actor", "critic", "shared"))
    one = module.hidden.members == 1 and module.critic_hidden is None
    stacks = {shared: (module.hidden, 0)} if one else {actor: (module.hidden, 0)}
    if not one:
        stacks[critic] = (module.hidden, 1) if module.critic_hidden is None else (module.critic_hidden, 0)
    names: Names = []
    for name, (stack, k) in stacks.items():
        names += _layers(name, stack, k)
    for name, core in zip(stacks, module.cores, strict=False):
        names += _walk(core, f"{name}_core")
    separate = one or len(module.cores) > 0
    head = f"{actor}_head" if separate else _last(actor, module.hidden)
    names += _head(module.policy_head, head, _join(prefix, "log_std"))
    names += _walk(module.value_head, f"{critic}_head" if separate else _last(critic, module.hidden))
    return names, {"hidden", "critic_hidden", "cores", "policy_head", "value_head"}


def _custom_actor_critic(module: Any, prefix: str) -> tuple[Names, set[str]]:
    return _head(module.policy_head, _join(prefix, "actor_head"), _join(prefix, "log_std")), {"policy_head"}


def _with_head(module: Any, prefix: str) -> tuple[Names, set[str]]:
    """Return hidden layers and the last layer of networks with the attributes `hidden` and `head`."""
    head = getattr(module.head, "linear", module.head)
    return _layers(prefix, module.hidden) + _walk(head, _last(prefix, module.hidden)), {"hidden", "head"}


def _critics(module: Any, prefix: str) -> tuple[Names, set[str]]:
    discrete, names = isinstance(module, ActionValues), Names()
    for k in range(len(module.weight)):
        name, weight, bias = _join(prefix, k), module.weight[k], module.bias[k]
        names += _layers(name, module.hidden, k)
        names += _linear(_last(name, module.hidden), weight.t() if discrete else weight, bias[0] if discrete else bias)
    return names, {"hidden", "weight", "bias"}


def _dueling(module: Any, prefix: str) -> tuple[Names, set[str]]:
    weight, bias = module.linear.weight, module.linear.bias
    names = _linear(_join(prefix, "value"), weight[:1], bias[:1])
    return names + _linear(_join(prefix, "advantage"), weight[1:], bias[1:]), {"linear"}


def _lstm(module: Any, prefix: str) -> tuple[Names, set[str]]:
    return _recurrent(module, prefix, lambda core: (torch.zeros_like(core.bias),))


def _gru(module: Any, prefix: str) -> tuple[Names, set[str]]:
    return _recurrent(module, prefix, lambda core: (torch.zeros_like(core.bias[core.features :]), core.hidden_bias))


def _recurrent(module: Any, prefix: str, hidden_bias: Callable[[Any], Parts]) -> tuple[Names, set[str]]:
    names, layer, core = Names(), 0, module
    while core is not None:
        own = {"weight_ih": core.input_weight, "weight_hh": core.hidden_weight, "bias_ih": core.bias}
        names += [(_join(prefix, f"{name}_l{layer}"), (weight,)) for name, weight in own.items()]
        names.append((_join(prefix, f"bias_hh_l{layer}"), hidden_bias(core)))
        core, layer = core.above, layer + 1
    return names, {"input_weight", "hidden_weight", "bias", "hidden_bias", "above"}


def _without(*names: str) -> Callable[[Any, str], tuple[Names, set[str]]]:
    return lambda module, prefix: ([], {*names})


def _online(module: Any, prefix: str) -> tuple[Names, set[str]]:
    return _walk(module.online, prefix), {"online", "target"}


_RULES: dict[type[nn.Module], Callable[[Any, str], tuple[Names, set[str]]]] = {
    Stack: _stack,
    LSTM: _lstm,
    GRU: _gru,
    DuelingHead: _dueling,
    ActorCritic: _actor_critic,
    CustomActorCritic: _custom_actor_critic,
    CustomActor: _without(),
    Actor: _with_head,
    DiscreteActor: _with_head,
    StateValue: _with_head,
    Critics: _critics,
    ActionValues: _critics,
    ContinuousNetworks: _without("target_critics", "target_actor"),
    DiscreteNetworks: _without("target_critics"),
    OnlineAndTarget: _online,
}
