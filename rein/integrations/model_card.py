"""Model cards: Markdown files with YAML metadata that describe exported policies, as on Hugging Face.

Texts may come from files that are not trusted, so that they are written on one line, without markup.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
from gymnasium import spaces
from torch import Tensor

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
    given = ", ".join(f'"{_plain(name)}": {variables[name]}' for name in facts.inputs)
    found = ", ".join(variables[name] for name in facts.outputs)
    imports = zeros = ""
    if recurrent:
        imports = "import numpy\n"
        zeros = f"carry = numpy.zeros((N, {facts.inputs['carry'].shape[1]}), numpy.float32)\n"
    return {
        ".onnx": (
            "With onnxruntime and NumPy arrays:",
            f"{imports}import onnxruntime\n\n"
            f'session = onnxruntime.InferenceSession("{onnx}")\n{zeros}'
            f"{found}{',' if len(facts.outputs) == 1 else ''} = session.run(None, {{{given}}})",
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
    found: dict[str, str] = {}
    for name in names:
        variable = "".join(c if c.isalnum() else "_" for c in name)
        while variable in found.values():
            variable += "_"
        found[name] = variable
    return found | ({"next_carry": "carry"} if "next_carry" in found else {})
