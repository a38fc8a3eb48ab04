"""A run of skipped steps, noticed where the host has a state in its hands: a training step would need a call of the host in its program, which `jax.export`
refuses, and for which accelerators wait.

The state counts steps, and those that were skipped. Where both have grown by as many since it was last seen, all between were skipped.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax

from gradwire.core.state.skipped_steps import RunOfSkips
from gradwire.jax_backend.state.types import DataParallelState, known_number

#: States of so many models are told apart.
REMEMBERED = 64


def note_skipped_steps(tree: Any) -> None:
    """Look at the counts of all states of `average_gradients` in a tree, of arrays. The host waits for them. Warns in the log, once a run."""
    for state in jax.tree.leaves(tree, is_leaf=_is_state):
        if _is_state(state):
            steps, skipped = known_number(state.step), known_number(state.account.skipped)
            if steps is not None and skipped is not None:
                _run_of(jax.tree.structure(state), *state.configuration).seen(steps, skipped)


@lru_cache(maxsize=REMEMBERED)
def _run_of(structure: Any, configuration: str) -> RunOfSkips:
    return RunOfSkips(configuration, jax.process_index())


def _is_state(x: Any) -> bool:
    return isinstance(x, DataParallelState)
