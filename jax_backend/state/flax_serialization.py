"""The one type of a state that `flax.serialization` would not know."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from gradwire.jax_backend.state.types import MARK, Record


def know_flax() -> None:
    """Let `flax.serialization` take a `Record`, which is no NamedTuple. Its field is stored, what it says of the set-up is not."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is None:
        return  # Nobody can call it then.
    known: dict[Any, Any] = getattr(serialization, "_STATE_DICT_REGISTRY", {})
    if Record in known:
        return

    def to_dict(record: Record) -> dict[str, Any]:
        return {MARK: serialization.to_state_dict(record.per_replica)}

    def from_dict(record: Record, stored: dict[str, Any]) -> Record:
        rows = serialization.from_state_dict(record.per_replica, stored[MARK], name=MARK)
        return dataclasses.replace(record, per_replica=rows)

    serialization.register_serialization_state(Record, to_dict, from_dict, override=True)
