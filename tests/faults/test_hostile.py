"""Untrusted checkpoints: damage is detected before parsing, and code from a file is never executed."""

from __future__ import annotations

import ast
import hashlib
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

import rein
from rein.errors import CheckpointError
from rein.store import checkpoint_file
from rein.store.checkpoint_file import look, read_checkpoint, write_checkpoint
from rein.store.format.sealed import USER_BLOCK, user_block
from rein.store.format.state_codec import TRAILER_LENGTH, find_texts
from rein.store.loading import load, save

ROOT = Path(rein.__file__).parent


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    history = [{"epoch": n, "metrics": {"episode_return": float(n)}} for n in range(1, 30)]
    state = {"parts": {"agent": {"table": torch.randn(50, 4), "step": 7}}, "history": history, "format": 1}
    write_checkpoint(tmp_path / "whole.h5", state, {"kind": "run", "total_iterations": 1, "epochs_ended": 1})
    return (tmp_path / "whole.h5").read_bytes()


def mutant(whole: bytes, draw: random.Random) -> bytes:
    """Flip a bit, truncate, zero a block, copy a block or insert bytes."""
    kind, at = draw.randrange(5), draw.randrange(len(whole))
    if kind == 0:
        return whole[:at] + bytes([whole[at] ^ (1 << draw.randrange(8))]) + whole[at + 1 :]
    if kind == 1:
        return whole[:at]
    size = draw.randrange(1, 600)
    if kind == 2:
        return whole[:at] + bytes(len(whole[at : at + size])) + whole[at + size :]
    if kind == 3:
        other = draw.randrange(len(whole))
        return whole[:at] + whole[other : other + size] + whole[at + size :]
    return whole[:at] + draw.randbytes(size) + whole[at:]


def sealed(content: bytes) -> bytes:
    """Return the file with a correct hash."""
    image = content[USER_BLOCK:]
    return user_block(len(image), hashlib.sha256(image).hexdigest()) + image


def test_every_mutant_is_detected_before_parsing(tmp_path, whole, scale, monkeypatch):
    parsed: list[Any] = []
    monkeypatch.setattr(checkpoint_file, "decode_state", lambda content: parsed.append(content))
    draw, path, count = random.Random(0), tmp_path / "mutant.h5", 0
    while count < scale(2000, 300):
        content = mutant(whole, draw)
        if content == whole:
            continue
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"mutant\.h5: "):
            read_checkpoint(path)
        count += 1
    assert parsed == []
    print(f"mutants: {count} of {count} detected before parsing")


def test_mutants_with_a_correct_hash_only_raise(tmp_path, whole, scale, monkeypatch):
    """HDF5's parser, which such files can crash, is never called."""
    monkeypatch.setattr(h5py, "File", lambda *a, **k: pytest.fail("a checkpoint was given to HDF5's parser"))
    draw, path, raised = random.Random(1), tmp_path / "hostile.h5", 0
    count = scale(2000, 300)
    start = find_texts(whole[-TRAILER_LENGTH:])[0][0]
    for number in range(count):
        content = mutant(whole, draw)
        if number % 2:  # in the JSON texts, which are the most sensitive
            content = whole[:start] + mutant(whole[start:], draw)
        path.write_bytes(sealed(content))
        look(path)
        try:
            read_checkpoint(path)
        except CheckpointError as error:
            raised += 1
            assert str(path) in str(error)
    assert raised > count // 10
    print(f"hostile files with a correct hash: {count}, {raised} refused, the others harmless")


def payloads() -> list[bytes]:
    """Return pickles that create a file when loaded, in several protocols and containers."""

    class Bomb:
        def __init__(self, call: Any, *arguments: Any) -> None:
            self.call, self.arguments = call, arguments

        def __reduce__(self) -> Any:
            return self.call, self.arguments

    bombs = [
        Bomb(os.system, "touch exploded"),
        Bomb(eval, "open('exploded', 'w')"),
        Bomb(exec, "open('exploded', 'w')"),
    ]
    wrapped = [lambda b: b, lambda b: [b], lambda b: {"state": b}]
    return [pickle.dumps(wrap(b), protocol) for b in bombs for wrap in wrapped for protocol in (0, 2, 5)][:20]


def test_pickle_payloads_are_not_executed(tmp_path, whole, monkeypatch):
    monkeypatch.chdir(tmp_path)
    everything = payloads()
    assert len(everything) == 20
    start, length = find_texts(whole[-TRAILER_LENGTH:])[1]
    for payload in everything:
        text = payload.decode("latin-1")
        places = [
            payload,
            sealed(bytes(USER_BLOCK) + payload),
            sealed(whole[:start] + payload.ljust(length)[:length] + whole[start + length :]),
        ]
        for content in places:
            (tmp_path / "bomb.h5").write_bytes(content)
            with pytest.raises(CheckpointError):
                read_checkpoint(tmp_path / "bomb.h5")
            look(tmp_path / "bomb.h5")
        write_checkpoint(tmp_path / "bomb.h5", {"text": text, text: [text]}, {"text": text})
        assert read_checkpoint(tmp_path / "bomb.h5").state == {"text": text, text: [text]}
    assert not (tmp_path / "exploded").exists()
    pickle.loads(everything[0])  # check that the payloads work
    assert (tmp_path / "exploded").exists()


READS_CODE = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "pandas"}
CALLS_CODE = {
    ("torch", "load"),
    ("torch", "save"),
    ("jit", "load"),
    ("package", "PackageImporter"),
    ("", "exec"),
    ("", "eval"),
}


def code_from_data(source: str) -> list[str]:
    """Return the imports and calls of a module that could execute code from a file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in names if name.split(".")[0] in READS_CODE]
        elif isinstance(node, ast.Call):
            base = getattr(getattr(node.func, "value", None), "id", "") or getattr(
                getattr(node.func, "value", None), "attr", ""
            )
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if (base, name) in CALLS_CODE or (base == "" and ("", name) in CALLS_CODE):
                found.append(f"{base}.{name}")
            found += [
                k.arg for k in node.keywords if k.arg == "allow_pickle" and getattr(k.value, "value", 1) is not False
            ]
    return found


def test_no_module_of_rein_executes_code_from_files():
    sources = {path: path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}
    assert len(sources) > 50
    assert {path: found for path, source in sources.items() if (found := code_from_data(source))} == {}


@pytest.mark.parametrize(
    "source",
    [
        *["import pickle", "from pickle import loads", "def f():\n    import joblib", "eval('1')"],
        *["import torch\ntorch.load('x')", "import numpy as np\nnp.load('x', allow_pickle=True)"],
    ],
)
def test_unsafe_calls_are_detected(source):
    assert code_from_data(source)


def test_untrusted_checkpoint_loads_or_raises(tmp_path, whole, scale):
    """A file with a correct hash and format but invalid content raises an error with the path."""

    class Part:
        def __init__(self) -> None:
            self.config: dict[str, Any] = {}
            self.table = torch.zeros(50, 4)

        def state_dict(self) -> dict[str, Any]:
            return {"table": self.table, "step": 0}

        def load_state_dict(self, state: Any) -> None:
            self.table.copy_(state["table"])
            int(state["step"])

    save(Part(), tmp_path / "part.h5")
    makes: list[Callable[[], Any]] = [dict, lambda: {"table": 1}, lambda: {"table": torch.zeros(2), "step": None}]
    for make in makes:
        write_checkpoint(tmp_path / "odd.h5", make(), {"kind": "part", "config": {}})
        with pytest.raises(CheckpointError, match=r"odd\.h5: does not fit Part"):
            load(Part(), tmp_path / "odd.h5")
    loop = rein.Loop(lambda state: None)
    loop.own("store", rein.HDF5Store(tmp_path / "run"))
    (tmp_path / "run/checkpoints").mkdir()
    odd = tmp_path / "run/checkpoints/odd.h5"
    abouts: list[dict[str, Any]] = [{"kind": "run"}, {"kind": "run", "parts": 3}, {"kind": ["part"]}, {"kind": None}]
    for about in [*abouts, {"versions": [1], "parts": {}, "threads": {}}, {"total_iterations": []}]:
        for state in ({"parts": {"agent": 3}}, {"parts": 3}, {"format": 1, "parts": []}, {"format": 1, "epoch": "x"}):
            write_checkpoint(odd, state, about)
            with pytest.raises(CheckpointError, match=r"odd\.h5: "):
                load(Part(), odd)
            for strict in (True, False):
                with pytest.raises(CheckpointError, match=r"odd\.h5: "):
                    rein.resume(loop, odd, strict=strict)
    loop.parts["store"].close()
