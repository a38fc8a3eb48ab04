"""The examples in the docstrings of the torch backend run as they are printed, in a group of one rank."""

import doctest
import importlib
from pathlib import Path

import pytest

import gradwire.torch_backend

ROOM = Path(next(iter(gradwire.torch_backend.__path__)))
MODULES = [
    ".".join(("gradwire", "torch_backend", *path.relative_to(ROOM).with_suffix("").parts))
    for path in sorted(ROOM.rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run_as_they_are_printed(name: str, alone: object) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name), verbose=False)
    assert tried
    assert not failed
