"""Weights of agents as safetensors files, which load into a new agent.

The header holds the class of the agent, its spaces and its options as JSON. Files are not trusted, so that the name of
the class is only looked up among rein's own agents.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rein.agents.base.agent import Agent
from rein.agents.base.agent_state import PER_ENVIRONMENT
from rein.errors import CheckpointError, NonFiniteError, optional_import
from rein.files import decode_json, followed, open_file
from rein.networks.finite_parameters import check_parameters
from rein.networks.named_weights import load_named_weights, named_weights
from rein.spaces.space_json import describe_build
from rein.store.checkpoint_file import Checkpoint, describe_part, versions

FORMAT = 1  # incremented when an older rein could not load the file
_HEADER = 4 << 20  # maximum bytes of names, shapes and description; safetensors takes 30 times as much memory for them
_TENSORS = 10_000  # maximum number
_NEEDED = "safetensors files need safetensors: pip install safetensors"


def encode_weights(agent: Agent, source: Agent) -> bytes:
    """Return the file of the weights of `agent`, described as `source`, of which it is a copy."""
    with optional_import(_NEEDED):
        from safetensors.torch import save
    about = {"format": FORMAT, "versions": versions(), **describe_part(source), "build": describe_build(source)}
    weights = {name: weight.contiguous() for name, weight in named_weights(_networks(agent)).items()}
    content = save(weights, {"format": "pt", "rein": json.dumps(about)})
    _check_header(content)
    _check(len(weights), _TENSORS, "tensors")
    return content


def _check_header(start: bytes) -> None:
    _check(int.from_bytes(start[:8], "little"), _HEADER, "bytes of names and metadata")


def _check(count: int, most: int, what: str) -> None:
    """Raise ValueError if a file has a larger count than is read."""
    if count > most:
        raise ValueError(f"it has {count:,} {what}; at most {most:,} are read")


def read_weights(path: Path) -> Checkpoint:
    """Read the weights of a file, by their names, and the description of their agent.

    Raises CheckpointError if the file is missing or damaged, or if `rein.export` has not written it.
    """
    with optional_import(_NEEDED):
        from safetensors import SafetensorError, safe_open
    path = followed(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        with open_file(path) as start:
            _check_header(start.read(8))
        with safe_open(path, "pt") as file:
            _check(len(file.keys()), _TENSORS, "tensors")
            about = decode_json((file.metadata() or {}).get("rein", "null"))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dictionary
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as a safetensors file: {error}") from error
    if not isinstance(about, dict):
        raise CheckpointError(f"{path}: was not written by rein.export, so it does not describe an agent")
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{path}: has format version {about.get('format')!r:.80}; this rein reads {FORMAT}")
    return Checkpoint(path, weights, about)


def load_weights(agent: Agent, checkpoint: Checkpoint) -> None:
    """Load the weights that `read_weights` read.

    Raises CheckpointError if they do not fit the agent, or if one is NaN or infinite.
    """
    try:
        load_named_weights(_networks(agent), checkpoint.state)
        check_parameters(agent, "Export an earlier checkpoint")
    except NonFiniteError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: does not fit {type(agent).__name__}: {error}") from error


def _networks(agent: Agent) -> dict[str, nn.Module | Tensor]:
    """Return the networks and tables of an agent by their attributes."""
    public: dict[str, Any] = {name: value for name, value in vars(agent).items() if not name.startswith("_")}
    return {
        name: value
        for name, value in public.items()
        if isinstance(value, nn.Module | Tensor) and name not in PER_ENVIRONMENT
    }
