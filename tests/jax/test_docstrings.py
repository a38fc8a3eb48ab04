"""The examples in the docstrings of the JAX backend run as they are printed, on one device."""

import doctest
import importlib
from pathlib import Path

import pytest

import gradwire.jax_backend

ROOM = Path(next(iter(gradwire.jax_backend.__path__)))
MODULES = [f"gradwire.jax_backend.{path.stem}" for path in sorted(ROOM.glob("*.py")) if ">>> " in path.read_text()]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run_as_they_are_printed(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name), verbose=False)
    assert tried
    assert not failed
