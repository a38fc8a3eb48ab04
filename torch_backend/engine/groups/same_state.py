"""A check before the first step that all ranks are in the same state. Else they would send what
does not belong together, and their weights would part unnoticed."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.core.text.wording import some
from gradwire.torch_backend.engine.groups.barrier import Meeting

logger = logging.getLogger("gradwire")

#: Why ranks may not come to compare their states.
LOADED_BY_SOME = (
    "They have not come to their backward pass, or have loaded no state in the middle of training"
    " where others have. Load the same state on every rank"
)


def require_same_state(
    meeting: Meeting, step: int, algorithm: str, loaded: str, obstacle: str = "", kernels: str = ""
) -> bool:
    """Compare with all ranks: for the first step after registration, and after a state was loaded.
    Later steps need not.

    Ranks compare at their meeting and not by a collective, because some may have no reason to:
    those that have loaded nothing in the middle of training, where others have. Those would be
    handed the others' gradients; so they wait, and raise when nobody comes.

    `loaded` is a digest of the state that this rank has loaded, as far as all ranks have to have
    the same; "" if none. `obstacle`: why this rank cannot take part, where no registration has
    compared that. `kernels`: what this rank has compiled.

    Returns:
        Whether all ranks have the same kernels: then all may use them. False where nobody can be
            asked.

    Raises:
        RuntimeError: on every rank, if they differ, or one has an obstacle; it says which rank is
            where. On some, if the others do not compare.
    """
    card = json.dumps([step, algorithm, loaded, obstacle, kernels])
    everyone = meeting.come(
        "the first backward pass after registration or loading", LOADED_BY_SOME, card
    )
    if obstacle:
        raise RuntimeError(obstacle)
    cards = [json.loads(card) for card in everyone]
    if refused := [
        f"rank {rank} cannot take part: {card[3]}" for rank, card in enumerate(cards) if card[3]
    ]:
        raise RuntimeError(refused[0])
    if len({tuple(card[:3]) for card in cards}) > 1:
        raise RuntimeError(
            _disagreement([(step, algorithm, loaded) for step, algorithm, loaded, *_ in cards])
        )
    if not cards:
        return meeting.alone or meeting.store is not None
    of_ranks = [card[4] or "none" for card in cards]
    if meeting.rank == 0:
        logger.warning(
            "ranks have compiled different kernels for the processor (%s): all run without them,"
            " with more passes over memory. Install the same gradwire[cpu] on every rank",
            _by_rank(of_ranks),
        )
    return False


def _disagreement(everyone: Sequence[tuple[int, str, str]]) -> str:
    """What to say of ranks whose (step, algorithm, digest of what was loaded) are not all equal."""
    steps, algorithms, loaded = zip(*everyone, strict=True)
    if len(set(steps)) > 1:
        what, where = "step", _by_rank(steps)
    elif len(set(algorithms)) > 1:
        what, where = "algorithm", _by_rank(algorithms)
    else:
        others = [rank for rank, digest_there in enumerate(loaded) if digest_there != loaded[0]]
        what, where = (
            "state",
            f"ranks [{some(others, 8)}] have loaded another one than rank 0, or none",
        )
    return (
        f"ranks differ in {what} ({where}), and would average what does not belong together. Load"
        " the same state on every rank: state_dict() and gathered_state_dict(to=None) give one"
        " that serves all, from a file that every rank can read; or load it on none"
    )


def _by_rank(values: Sequence[Any]) -> str:
    others = [rank for rank, value in enumerate(values) if value != values[0]]
    return some([0, *others], 9, lambda rank: f"rank {rank}: {values[rank]}")


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """A digest of all bits, for a comparison between ranks. On CUDA the host waits."""
    found = hashlib.sha256()
    for x in tensors.values():
        found.update(x.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()[:16]
