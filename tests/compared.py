"""A training in a file that is edited between two comparisons: `gradwire.compare` never mixes the
two."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from gradwire import PowerSGD, Sign, compare


def loaded(file: Path) -> Any:
    """The module of a file as it is now. Python takes what it has compiled, where a file was
    written in the same second and is as long."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "dont_write_bytecode", True):
        spec.loader.exec_module(module)
    return module


def made_by(file: Path) -> Any:
    """`make` of a file."""
    return loaded(file).make


def require_no_mixture(folder: Path, text: str, *edits: tuple[str, str]) -> None:
    """Compare, edit something that matters, and compare with a method more: everything is of the
    training as it is then. A comment does not matter."""
    file, output = folder / "edited_training.py", folder / "comparison.json"
    options: dict[str, Any] = {"replicas": 2, "steps": 6, "seeds": 1, "training": "mine"}
    first = [PowerSGD(1, min_compression_rate=1)]
    file.write_text(text)
    compare(made_by(file), first, output=output, **options)
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
        file.write_text(text)
        found = compare(made_by(file), [*first, Sign()], output=output, **options)
        anew = compare(made_by(file), [*first, Sign()], **options)
        assert found.as_dict() == anew.as_dict(), new
        assert "are made anew" in found.runs.notes[0], new
    file.write_text("# a comment\n" + text)
    again = compare(made_by(file), [*first, Sign()], output=output, **options)
    assert again.runs.notes[0].startswith(f"Taken from {output}: plain (seeds 0); PowerSGD(rank=1")
    assert again.as_dict() == found.as_dict()
