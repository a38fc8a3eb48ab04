"""Which replicas take part in a round: torchft's quorum, and what gradwire has to know of its
members besides.

A round is `meet`, messages, `vote`. A lost replica fails the messages of one round at most; the
vote is then no, and the next quorum is without it.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.protocol.groups import Groups
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.groups.point_to_point import Exchange
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.monitor.stats import Sent
from gradwire.torch_backend.ops.kernels import TorchOps

logger = logging.getLogger("gradwire")
T = TypeVar("T")

#: What a message that does not come is reported by: c10d's errors are RuntimeErrors, those of its
#: stores and sockets these others.
LOST = (RuntimeError, TimeoutError, ConnectionError)


@dataclass(frozen=True)
class Card:
    """What a replica says of itself when the quorum has changed.

    Attributes:
        asks: for what it was made.
        steps: how far it has come.
        counts: its own work does in this round. It has none where it has just come.
    """

    asks: str
    steps: int
    counts: bool


@dataclass(frozen=True)
class Present:
    """The members of a round.

    Attributes:
        steps: from where all go on.
        counts: the work of this replica does.
        trained: somebody's does, so there is something to average.
        all_count: everybody's does.
    """

    steps: int
    counts: bool = True
    trained: bool = True
    all_count: bool = True


class Quorum:
    """The present members.

    Args:
        manager: a torchft `Manager`.
        asks: what this replica was made for; that of all has to be the same.
        device: of the parameters.

    Attributes:
        healed: this replica has just received a state from another one.
        groups, collectives: of the present members; to be asked for after `meet`.
        sent: by this replica, so far.
    """

    def __init__(self, manager: Any, asks: str, device: torch.device) -> None:
        self.manager, self.asks, self.device = manager, asks, device
        self.healed = False
        self.sent = Sent()
        self._known: Any = None
        self._groups: ProcessGroups | None = None
        self._collectives: Collectives | None = None

    @property
    def groups(self) -> ProcessGroups:
        assert self._groups is not None
        return self._groups

    @property
    def collectives(self) -> Collectives:
        assert self._collectives is not None
        return self._collectives

    def meet(self, steps: int, *, joining: bool) -> Present | None:
        """Wait for the others. None where that failed: the vote will be no.

        Args:
            steps: how far this replica has come.
            joining: it has not taken part in a round yet.

        Raises:
            ValueError: this replica was made for something else than the others are. Its manager
                has been shut down, so that nobody waits for it.
            RuntimeError: there is no quorum, as `Manager.start_quorum` says.
        """
        manager = self.manager
        self.healed = False
        manager.start_quorum()  # a state of another replica is taken over in there
        if manager.errored() is not None:
            return None
        mine = Card(self.asks, steps, counts=not (joining or self.healed))
        if manager._quorum_id == self._known:
            return Present(steps)
        self._known = None
        cards = self.attempt(lambda: _told(mine, manager._pg, self.device))
        if cards is None or not self._agree(mine, cards):
            return None
        self._groups = _Members(manager._pg, manager.participating_rank() or 0)
        self._collectives = Collectives(self._groups, TorchOps(self.device))
        self._collectives.sent = self.sent
        self._known = manager._quorum_id
        counting = [card for card in cards if card.counts]
        leading = max(card.steps for card in counting or cards)
        return Present(leading, mine.counts, bool(counting), len(counting) == len(cards))

    def attempt(self, send: Callable[[], T]) -> T | None:
        """What takes messages; None if one does not come, or nobody counts, and then the vote will
        be no."""
        try:
            return send()
        except torch.OutOfMemoryError:
            raise
        except LOST as error:
            logger.warning("A round fails: %s", error)
            self.manager.report_error(error)
            return None

    def vote(self) -> bool:
        """Whether this round counts: everything has come, here. Where it does not for one replica
        and does for another, the next quorum makes the former equal to the latter."""
        return bool(self.manager.should_commit())

    def _agree(self, mine: Card, cards: list[Card]) -> bool:
        """Whether all ask for the same. Those that do not, go."""
        first = next((card for card in cards if card.counts), cards[0])
        if mine.asks != first.asks:
            self.manager.shutdown(wait=False)
            raise ValueError(
                f"this replica asks for {mine.asks}, and the others train with {first.asks}; start"
                " it with the same options"
            )
        others = {card.asks for card in cards} - {mine.asks}
        if others:
            error = ValueError(
                f"a replica has come that asks for {min(others)}, and this one for {mine.asks}"
            )
            logger.warning("A round fails: %s", error)
            self.manager.report_error(error)
        return not others


class _Members(ProcessGroups):
    """The group of a quorum, in which torchft has given this replica a number."""

    def __init__(self, whole: dist.ProcessGroup, rank: int) -> None:
        super().__init__(whole)
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    def exchange(self, groups: Groups | None, device: torch.device) -> Exchange:
        return Exchange(self[groups], device, self._rank)


def _told(mine: Card, group: dist.ProcessGroup, device: torch.device) -> list[Card]:
    """The cards of all members, by the one gather that all groups of torchft have under each torch:
    `all_gather_object` uses another since torch 2.15."""
    written = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8).to(device)
    sizes = [
        torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(
        sizes, torch.tensor([written.numel()], dtype=torch.int64, device=device), group=group
    )
    counts = [int(size) for size in sizes]
    cards = [torch.zeros(max(counts), dtype=torch.uint8, device=device) for _ in counts]
    dist.all_gather(
        cards, torch.nn.functional.pad(written, (0, max(counts) - written.numel())), group=group
    )
    return [
        pickle.loads(card[:n].cpu().numpy().tobytes())
        for card, n in zip(cards, counts, strict=True)
    ]


def on_host(x: Tensor) -> Tensor:
    """A copy on the CPU."""
    return x.detach().to("cpu", copy=True)
