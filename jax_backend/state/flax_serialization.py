"""The one type of a state that `flax.serialization` would not know, made known to it whenever it is
imported: before this module, or after a state was made or loaded."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from gradwire.jax_backend.state.types import MARK, Record

SERIALIZATION = "flax.serialization"


def know_flax() -> None:
    """Let `flax.serialization` take a `Record`, which is no NamedTuple, from now on or from its
    import on. The field of a record is stored, what it says of the set-up is not."""
    if SERIALIZATION in sys.modules:
        _register(sys.modules[SERIALIZATION])
    else:
        sys.meta_path.insert(0, _AtItsImport())


class _AtItsImport(MetaPathFinder):
    """Finds `flax.serialization` as it would be found, once, and registers the record in it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != SERIALIZATION:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(Loader):
    """What loads the module, and registers the record in it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register(module)


def _register(serialization: Any) -> None:
    def to_dict(record: Record) -> dict[str, Any]:
        return {MARK: serialization.to_state_dict(record.per_replica)}

    def from_dict(record: Record, stored: dict[str, Any]) -> Record:
        rows = serialization.from_state_dict(record.per_replica, stored[MARK], name=MARK)
        return dataclasses.replace(record, per_replica=rows)

    serialization.register_serialization_state(Record, to_dict, from_dict, override=True)
