"""Every public name has an entry in the API reference, and every entry is a name that exists."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

ENTRY = re.compile(r"^\.\. auto(?:class|function|exception):: ([\w.]+)$", re.MULTILINE)
ENTRIES = [name for page in sorted(DOCS.rglob("*.md")) for name in ENTRY.findall(page.read_text(encoding="utf-8"))]
STUBS = ["rein", "rein.agents", "rein.handlers", "rein.envs", "rein.envs.wrappers", "rein.envs.probes", "rein.networks"]
STUBS += ["rein.replay"]


def public_names(module: str) -> list[str]:
    stub = (ROOT / Path(*module.split(".")) / "__init__.pyi").read_text(encoding="utf-8")
    names = re.findall(r"^from [\w.]+ import \w+ as (\w+)$", stub, re.MULTILINE)
    return [name for name in names if not inspect.ismodule(getattr(importlib.import_module(module), name))]


def resolve(entry: str) -> object:
    module, _, name = entry.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", STUBS)
def test_public_names_have_an_entry(module: str) -> None:
    documented = {id(resolve(entry)) for entry in ENTRIES}
    names = public_names(module)
    assert names
    assert [name for name in names if id(resolve(f"{module}.{name}")) not in documented] == []


def test_entries_are_unique() -> None:
    assert sorted(set(ENTRIES)) == sorted(ENTRIES)
