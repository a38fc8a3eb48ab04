"""A run of skipped steps, noticed where the host has a state in its hands: a training step would
need a call of the host in its program, which `jax.export` refuses, and for which accelerators wait.

The state counts steps, and those that were skipped. Where both have grown by as many since it was
last seen, all between were skipped.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np

from gradwire.core.state.skipped_steps import SAID_AFTER, SKIPPED_AVERAGES, RunOfSkips
from gradwire.jax_backend.state.types import DataParallelState, LocalSGDState, known_number

#: States of so many models are told apart.
REMEMBERED = 64


def note_skipped_steps(tree: Any) -> None:
    """Look at the counts of all states of `average_gradients` and `local_sgd` in a tree, of arrays.
    The host waits for them. Warns in the log, once a run."""
    for state in jax.tree.leaves(tree, is_leaf=_is_state):
        if not _is_state(state):
            continue
        of_local, averages = isinstance(state, LocalSGDState), state
        if isinstance(
            state, LocalSGDState
        ):  # of which each replica may have refused others, if it has outer parameters of its own
            averages = state.averages
            happened, skipped = known_number(state.arrived), _largest(averages.account.skipped)
        else:
            happened, skipped = known_number(state.step), known_number(state.account.skipped)
        if happened is not None and skipped is not None:
            _run_of(of_local, jax.tree.structure(state), *averages.configuration).seen(
                happened, skipped
            )


@lru_cache(maxsize=REMEMBERED)
def _run_of(of_local: bool, structure: Any, configuration: str) -> RunOfSkips:
    said = (SAID_AFTER, SKIPPED_AVERAGES) if of_local else ()
    return RunOfSkips(configuration, jax.process_index(), *said)


def _is_state(x: Any) -> bool:
    return isinstance(x, (DataParallelState, LocalSGDState))


def _largest(x: Any) -> int | None:
    """What `known_number` says of a count that each replica of this process has for itself."""
    if known_number(x) is None or not isinstance(x, jax.Array):
        return known_number(x)
    return max(int(np.max(np.asarray(shard.data))) for shard in x.addressable_shards)
