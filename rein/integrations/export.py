"""Export policies to ONNX, torch.export programs and safetensors files, with model cards.

Model cards are Markdown files with YAML metadata, as on Hugging Face. Their texts may come from files that are not
trusted, so that they are written on one line, without markup.

Shapes: N observations, C numbers of a carry.
"""

from __future__ import annotations

import io
import json
import logging
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.agents.base.agent import Agent
from rein.agents.base.policies import AgentPolicy
from rein.errors import optional_import
from rein.files import absolute
from rein.integrations.weights_file import encode_weights
from rein.networks.finite_parameters import check_parameters
from rein.ops.trees import by_name, leaves, map_tree
from rein.protocols import AgentProtocol, Policy
from rein.spaces import ACTION_MASK, CRITIC_OBSERVATION, RESERVED, children, entry
from rein.spaces.conversion import layout
from rein.store.format.sealed import write_whole
from rein.types import Tree

EXAMPLES = 2  # observations with which a policy is traced


def export(
    policy: Policy | AgentProtocol,
    path: str | Path,
    *,
    environment: str | None = None,
    mean_return: float | None = None,
) -> None:
    """Write a greedy policy to a file for use in other programs, and a model card next to it.

    The suffix of `path` determines the format:

    - `.onnx`: an ONNX model, for onnxruntime and other inference engines.
    - `.pt2`: a program for `torch.export.load`, which needs PyTorch only.
    - `.safetensors`: weights with conventional names, for `rein.load_policy` and other programs.

    Models and programs contain the normalization of observations, action masks, and the scale of the action space. They
    accept any number of observations N. An existing file is replaced. The model card is a Markdown file such as
    `policy.md` for `policy.onnx`. It describes all exports of that name in the same folder.

    Inputs of an ONNX model are `observation`, or `observation.KEY` for each entry of a Dict, then `action_mask` and
    `carry` if the agent has them. Outputs are `action`, or `action.KEY` for each component of a Dict or Tuple, then
    `next_carry`. A program takes the observation as a tensor, or as a dictionary with the keys in the order of the
    observation space, and the carry as its second argument. A carry of zeros begins an episode.

    Args:
        policy: policy of `agent.policy()` or `rein.load_policy`, or an agent.
        path: file to write.
        environment: name of the environment, for the model card. Default: the environment of the agent, if it is known.
        mean_return: mean return of the policy in an evaluation, for the model card.

    Raises:
        ValueError: if the suffix is unknown, the policy explores, an operation of a custom agent cannot be exported,
            two tensors have the same name because a key contains a dot, or a file with the name of the model card was
            not written by rein.
        NonFiniteError: if a parameter is NaN or infinite.
        TypeError: if the policy is not that of one `rein.Agent`.
        ImportError: if a package of the extra `export` is missing.

    Example:
        >>> policy = rein.load_policy("runs/cartpole")
        >>> rein.export(policy, "policy.onnx", environment="CartPole-v1")
    """
    path = absolute(path)
    encode = ENCODERS.get(path.suffix)
    if encode is None:
        raise ValueError(f"{path}: unknown suffix {path.suffix!r}; use {', '.join(ENCODERS)}")
    check_card(card_path(path))
    policy = _greedy(policy)
    check_parameters(policy._source, "Nothing was exported; load an earlier checkpoint")
    exported = _Exported(policy)
    write_whole(path, encode(exported))
    about = Facts(
        algorithm=type(exported.agent).__name__,
        spaces=(exported.agent.observation_space, exported.agent.action_space),
        inputs={name: exported.inputs[name] for name in sorted(exported.inputs, key=_rank)},
        outputs=exported.outputs,
        environment=environment or policy._source._environment_name,
        mean_return=mean_return,
    )
    write_whole(card_path(path), model_card(path, about).encode())


def _greedy(policy: Any) -> AgentPolicy:
    if isinstance(policy, Agent):
        policy = policy.policy()
    if not isinstance(policy, AgentPolicy):
        raise TypeError(
            f"export({type(policy).__name__}): use a rein.Agent or its policy. Export the agents of a MultiAgent or "
            "Population one by one: policy.policies[name]"
        )
    return policy


class _Exported:
    """Agent to export, with examples of its inputs and outputs by their names."""

    def __init__(self, policy: AgentPolicy) -> None:
        self.source, self.agent = policy._source, policy.frozen_agent()
        observation = _examples(self.agent.observation_space)
        if entry(self.agent.observation_space, CRITIC_OBSERVATION) is not None:
            del observation[CRITIC_OBSERVATION]
        self.greedy = _Greedy(self.agent)
        with torch.no_grad():
            action = self.greedy(observation)
        self.arguments: tuple[Any, ...] = (observation,)
        self.inputs = by_name(_named_inputs(self.agent.observation_space, observation))
        self.outputs = by_name(leaves({"action": action}))
        if (carry := self.agent.carry) is not None:
            self.arguments = observation, torch.zeros_like(carry)
            self.inputs["carry"], self.outputs["next_carry"] = self.arguments[1], carry

    def program(self) -> torch.export.ExportedProgram:
        """Return the program of the greedy action. Raises ValueError if an operation cannot be exported."""
        batch = torch.export.Dim("batch")
        shapes = map_tree(lambda x: {0: batch}, self.arguments)
        try:
            with torch.no_grad(), warnings.catch_warnings(action="ignore", category=FutureWarning):
                program = torch.export.export(self.greedy, self.arguments, dynamic_shapes=shapes)
        except Exception as error:  # a custom agent may raise anything
            raise _refused(self.agent, error) from error
        for node in program.graph.nodes:  # they contain paths of this machine
            for name in ("stack_trace", "nn_module_stack", "source_fn_stack"):
                node.meta.pop(name, None)
        return program


class _Greedy(nn.Module):
    """Greedy action (N, ...) of an agent and, if a carry (N, C) is given, the next carry.

    The agent is in a tuple and not a submodule. The program then contains only the tensors that `act` uses.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = (agent,)

    def forward(self, observation: Tree, carry: Tensor | None = None) -> Any:
        """Return the action, or a pair of action and next carry."""
        (agent,) = self._agent
        agent.carry = carry
        action = agent._sampled(agent.act(observation, False), False)[0]
        return action if carry is None else (action, agent.carry)


def _refused(agent: Agent, error: Exception) -> ValueError:
    """Return an error that names the line of the agent that cannot be exported."""
    skipped = (str(Path(torch.__file__).parent), __file__)
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(skipped)]
    line = f", because of {own[-1].line!r} ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    hint = ""
    if "Constraints violated" in str(error):
        hint = "act fixes the number of observations: use observation.shape[0] instead of len(observation). "
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return ValueError(f"{type(agent).__name__}.act cannot be exported{line}: {hint}{reason}")


def _encode_onnx(exported: _Exported) -> bytes:
    with optional_import("ONNX files need onnx and onnxscript: pip install onnx onnxscript"):
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    program, log = exported.program(), logging.getLogger("torch.onnx._internal.exporter._registration")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns that torchvision is missing
    names: dict[str, Any] = {"input_names": [*exported.inputs], "output_names": [*exported.outputs]}
    try:
        with warnings.catch_warnings(action="ignore"):
            model = torch.onnx.export(program, **names, dynamo=True, verbose=False)
    except torch.onnx.errors.OnnxExporterError as error:
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        raise ValueError(f"{type(exported.agent).__name__}.act cannot be exported to ONNX: {reason}") from error
    finally:
        log.setLevel(level)
    proto = model.model_proto  # type: ignore[union-attr]  # None only without dynamo
    for value in (*proto.graph.input, *proto.graph.output):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param:
                dimension.dim_param = "batch"
    proto.graph.input.sort(key=lambda value: _rank(value.name))
    del proto.graph.value_info[:]  # shapes of intermediate results, by another name of the batch size
    return proto.SerializeToString()


def _encode_program(exported: _Exported) -> bytes:
    file = io.BytesIO()
    torch.export.save(exported.program(), file)
    return file.getvalue()


def _encode_weights(exported: _Exported) -> bytes:
    return encode_weights(exported.agent, exported.source)


ENCODERS: dict[str, Callable[[_Exported], bytes]] = {
    ".onnx": _encode_onnx,
    ".pt2": _encode_program,
    ".safetensors": _encode_weights,
}


def _examples(space: spaces.Space[Any]) -> Tree:
    """Return values of a space, ones if the bounds allow them."""
    inner = children(space)
    if inner is not None:
        return {name: _examples(part) for name, part in inner.items()}
    shape, dtype = layout(space)
    one: Any = np.ones(shape)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        one = space.start
    elif isinstance(space, spaces.Box):
        one = np.clip(one, space.low, space.high)
    return torch.from_numpy(np.stack([np.asarray(one).astype(dtype)] * EXAMPLES))


def _named_inputs(space: spaces.Space[Any], observation: Tree) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of an observation with its name, in the order of the observation."""
    if not isinstance(space, spaces.Dict) or not RESERVED & space.spaces.keys():
        yield from leaves({"observation": observation})
        return
    alone = len(space.spaces.keys() - RESERVED) == 1
    for name, part in observation.items():
        path = ACTION_MASK if name == ACTION_MASK else "observation" if alone else f"observation.{name}"
        yield from leaves(part, path)


def _rank(name: str) -> int:
    """Return the place of an input: observation, action mask, carry."""
    return ("observation", ACTION_MASK, "carry").index(name.partition(".")[0])


_FIRST = "---\nlibrary_name: rein\n"
_LONGEST = 200  # characters of a text


@attrs.frozen
class Facts:
    """Facts about an exported policy."""

    algorithm: str
    spaces: tuple[spaces.Space[Any], spaces.Space[Any]]  # of observations and actions
    inputs: Mapping[str, Tensor]  # examples
    outputs: Mapping[str, Tensor]
    environment: str | None = None
    mean_return: float | None = None


def card_path(path: Path) -> Path:
    """Return the path of the model card of an exported policy."""
    return path.with_suffix(".md")


def check_card(path: Path) -> None:
    """Raise ValueError if another program wrote the file at the path of a model card."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        start = file.read(len(_FIRST))
    if start != _FIRST.encode():
        raise ValueError(
            f"{path}: the model card would replace this file, which rein did not write; move it, or export the policy "
            "under another name"
        )


def model_card(path: Path, facts: Facts) -> str:
    """Return the model card of a policy that was exported to `path` and perhaps to files with other suffixes."""
    environment = None if facts.environment is None else _plain(facts.environment)
    title = f"{facts.algorithm} policy" + (f" for {environment}" if environment else "")
    table = {
        "algorithm": facts.algorithm,
        "environment": environment or "not recorded",
        "mean evaluated return": "not recorded" if facts.mean_return is None else f"{facts.mean_return:.6g}",
        "observation space": _plain(str(facts.spaces[0])),
        "action space": _plain(str(facts.spaces[1])),
    }
    rows = "".join(f"| {name} | {value} |\n" for name, value in table.items())
    tensors = "".join(
        f"| {kind} | `{_plain(name)}` | {_shape(x)} | {str(x.dtype).removeprefix('torch.')} |\n"
        for kind, named in (("input", facts.inputs), ("output", facts.outputs))
        for name, x in named.items()
    )
    notes = "N is the number of observations. Actions are the most likely ones, in the units of the action space.\n"
    if "carry" in facts.inputs:
        notes += "The carry is the memory of the policy. Zeros begin an episode; pass `next_carry` to the next step.\n"
    loading = "".join(
        f"\n{text}\n\n```python\n{code}\n```\n"
        for suffix, (text, code) in _loading(path, facts).items()
        if path.with_suffix(suffix).is_file()
    )
    return (
        f"{_metadata(facts, environment)}\n# {title}\n\n| | |\n|---|---|\n{rows}\n## Inputs and outputs\n\n"
        f"| | name | shape | dtype |\n|---|---|---|---|\n{tensors}\n{notes}\n## Load\n{loading}"
    )


def _metadata(facts: Facts, environment: str | None) -> str:
    lines = ["tags:", "- reinforcement-learning", f"- {_yaml(facts.algorithm)}"]
    if environment is not None:
        lines.append(f"- {_yaml(environment)}")
    if environment is not None and facts.mean_return is not None:
        lines += [
            "model-index:",
            f"- name: {_yaml(facts.algorithm)}",
            "  results:",
            "  - task:",
            "      type: reinforcement-learning",
            "    dataset:",
            f"      name: {_yaml(environment)}",
            f"      type: {_yaml(environment)}",
            "    metrics:",
            "    - type: mean_reward",
            f"      value: {float(facts.mean_return)!r}",
        ]
    return _FIRST + "\n".join(lines) + "\n---\n"


def _yaml(text: str) -> str:
    return json.dumps(text)  # a JSON string is valid YAML


def _plain(text: str) -> str:
    """Return a text on one line, without characters that have a meaning in Markdown."""
    plain = "".join(c if c.isprintable() and c not in "`|<>\\" else " " for c in " ".join(text.split()))
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 3]}..."


def _shape(x: Tensor) -> str:
    inner = ", ".join(map(str, x.shape[1:]))
    return f"(N, {inner})" if inner else "(N,)"


def _loading(path: Path, facts: Facts) -> dict[str, tuple[str, str]]:
    """Return a sentence and code for each format."""
    recurrent = "carry" in facts.inputs
    onnx, program, weights = (_plain(path.with_suffix(suffix).name) for suffix in (".onnx", ".pt2", ".safetensors"))
    variables = _variables((*facts.inputs, *facts.outputs))
    arguments = ", ".join(f'"{_plain(name)}": {variables[name]}' for name in facts.inputs)
    results = ", ".join(variables[name] for name in facts.outputs)
    imports = zeros = ""
    if recurrent:
        imports = "import numpy\n"
        zeros = f"carry = numpy.zeros((N, {facts.inputs['carry'].shape[1]}), numpy.float32)\n"
    return {
        ".onnx": (
            "With onnxruntime and NumPy arrays:",
            f"{imports}import onnxruntime\n\n"
            f'session = onnxruntime.InferenceSession("{onnx}")\n{zeros}'
            f"{results}{',' if len(facts.outputs) == 1 else ''} = session.run(None, {{{arguments}}})",
        ),
        ".pt2": (
            "With PyTorch. The observation is a tensor, or a dictionary of tensors:",
            f'import torch\n\npolicy = torch.export.load("{program}").module()\n'
            + (
                f"carry = torch.zeros(N, {facts.inputs['carry'].shape[1]})\naction, carry = policy(observation, carry)"
                if recurrent
                else "action = policy(observation)"
            ),
        ),
        ".safetensors": (
            "With rein:",
            f'import rein\n\npolicy = rein.load_policy("{weights}")\naction, _ = policy.select_action(observation)',
        ),
    }


def _variables(names: Iterable[str]) -> dict[str, str]:
    """Return different Python names for inputs and outputs; only the next carry replaces the carry."""
    variables: dict[str, str] = {}
    for name in names:
        variable = "".join(c if c.isalnum() else "_" for c in name)
        while variable in variables.values():
            variable += "_"
        variables[name] = variable
    return variables | ({"next_carry": "carry"} if "next_carry" in variables else {})
