"""What is public is described, and the examples in descriptions of the core run as they are printed."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import gradwire
import gradwire.core
from gradwire.core.ops import Ops

PACKAGES = ("gradwire", "gradwire.jax_backend", "gradwire.testing", "gradwire.torch_backend")
MODULES = [
    module.name
    for module in pkgutil.walk_packages(gradwire.core.__path__, "gradwire.core.")
    if not module.name.startswith("gradwire.core.api")
]
WITH_EXAMPLES = [name for name in MODULES if ">>> " in (inspect.getsource(importlib.import_module(name)))]


def public(package):
    """Path → each public function, class, method and property of a package."""
    module = importlib.import_module(package)
    for name in module.__all__:
        item = getattr(module, name)
        yield f"{package}.{name}", item
        if inspect.isclass(item) and item.__module__.startswith("gradwire."):
            for key in vars(item):
                member = inspect.getattr_static(item, key)
                if not key.startswith("_") and (isinstance(member, property) or inspect.isroutine(member)):
                    yield f"{package}.{name}.{key}", getattr(item, key)


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_public_is_described(package):
    lacking = [
        path
        for path, item in public(package)
        if not (inspect.getdoc(item) or "").strip()
        and not (
            "Ops." in path and inspect.getdoc(getattr(Ops, path.split(".")[-1]))
        )  # kernels mean the same in every framework
    ]
    assert not lacking, f"write a docstring: {lacking}"


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run_as_they_are_printed(name):
    failed, tried = doctest.testmod(importlib.import_module(name), verbose=False)
    assert tried
    assert not failed


#: What they say is measured: an example would not say the same twice. A page shows them.
MEASURED = {"Advice", "Probe", "advise"}


def test_every_public_name_of_the_core_has_an_example():
    items = {name: getattr(gradwire, name) for name in gradwire.__all__ if name not in MEASURED}
    lacking = [
        name
        for name, item in items.items()
        if not (inspect.isclass(item) and issubclass(item, Exception)) and ">>> " not in inspect.getdoc(item)
    ]
    assert not lacking, f"show how to call: {lacking}"
