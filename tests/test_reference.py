"""Every public name is described, in a docstring and in the reference of the site, and the examples
of docstrings run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import gradwire
from gradwire.core.ops import Ops
from tests.launch import ROOT

#: Modules whose `__all__` is public → their page.
MODULES = {
    "gradwire": "gradwire",
    "gradwire.jax_backend": "jax_backend",
    "gradwire.testing": "requests",
    "gradwire.torch_backend": "torch_backend",
    "gradwire.torch_backend.integrations": "torch_backend",
}
#: What is measured: an example would not say the same twice.
MEASURED = {"Advice", "Comparison", "Probe", "advise", "compare", "doctor"}


def public(package: str) -> Iterator[tuple[str, Any]]:
    """Path → each public function, class, method and property of a package."""
    module = importlib.import_module(package)
    for name in module.__all__:
        item = getattr(module, name)
        yield f"{package}.{name}", item
        if inspect.isclass(item) and item.__module__.startswith("gradwire."):
            for key in vars(item):
                member = inspect.getattr_static(item, key)
                if not key.startswith("_") and (
                    isinstance(member, property) or inspect.isroutine(member)
                ):
                    yield f"{package}.{name}.{key}", getattr(item, key)


def test_every_public_name_is_described_once_and_none_that_is_gone() -> None:
    texts = [page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md")]
    names = [name for text in texts for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]
    assert len(names) == len(set(names))
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), (
            f"{name} is in docs/reference and nowhere else"
        )
    for module in MODULES:
        exported = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
        assert not exported - set(names), "add to docs/reference"
        for path, item in public(module):
            # Kernels mean the same in every framework.
            said = inspect.getdoc(item) or (
                "Ops." in path and inspect.getdoc(getattr(Ops, path.split(".")[-1]))
            )
            assert said, f"write a docstring: {path}"
    for name in {*gradwire.__all__} - MEASURED:
        item = getattr(gradwire, name)
        exception = inspect.isclass(item) and issubclass(item, Exception)
        assert exception or ">>> " in inspect.getdoc(item), f"show how to call {name}"


FILES = [
    file
    for room in ("core", "torch_backend", "jax_backend")
    for file in sorted((ROOT / room).rglob("*.py"))
]
EXAMPLES = [
    str(f.relative_to(ROOT)) for f in FILES if re.search(r"^ *>>> ", f.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("file", EXAMPLES)
def test_the_examples_of_docstrings_run_as_they_are_printed(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a group of one rank, and on one device."""
    name = f"gradwire.{file.removesuffix('.py').removeprefix('core/api/').replace('/', '.')}".removesuffix(
        ".__init__"
    )
    if file.startswith("torch_backend/"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        failed, tried = doctest.testmod(importlib.import_module(name), verbose=False)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert tried
    assert not failed, capsys.readouterr().out  # with the file and the line
