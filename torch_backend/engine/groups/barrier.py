"""A place where all ranks of a group meet on the host, without a message: the store by which torch
has made the group.

A collective that some ranks never call makes the others wait until the library gives up, half an
hour with Gloo, and its message names nobody. A store can be asked who is there. It is as good for
NCCL as for Gloo, and nothing is put on a device.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from datetime import timedelta
from functools import partial
from itertools import count

import torch.distributed as dist

from gradwire.torch_backend.engine.groups.process_groups import timeout_of
from gradwire.torch_backend.engine.groups.shared_keys import (
    claimed,
    found_by_one,
    missing,
    read_all,
)
from gradwire.torch_backend.torch_internals import store_of

logger = logging.getLogger(__name__)

#: Ranks come to a checkpoint at different times: one of them may have been writing a large model
#: meanwhile. As long as NCCL waits by default.
LONGEST = timedelta(minutes=10)
#: What libraries wait if nobody has said anything: of others a user has.
BY_DEFAULT = (dist.default_pg_timeout, LONGEST)
#: Ranks that are later are named in the log, of one rank.
PATIENCE = timedelta(seconds=10)
#: How a meeting may end, for all ranks alike.
COMPLETE, GIVEN_UP = b"complete", b"given up"
#: Seconds between two looks at the store, at first and at last: between these a quarter of what was
#: waited so far.
SHORT, LONG = 0.001, 2.0


class Meeting:
    """Meetings of the ranks of one group, about one thing. To be made on all ranks, and several in
    the same order.

    Args:
        group: whose ranks meet. One rank alone need not wait; a group whose members come and go has
            no common store, and none of them waits.

    Attributes:
        store: by which they meet, None if they need not; `alone`: because there is only this rank;
            `rank`, `size` and `name` are of this rank, the group and this object in it.
        doing: what this rank waits for, or has waited for in vain; "" if nothing.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.store = _store_of(group)
        self.alone = dist.get_world_size(group) == 1
        self.doing = ""
        self._held: dict[str, int] = {}
        self._left: dict[str, list[str]] = {}
        if self.store is not None:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            self._timeout = timeout_of(group) or dist.default_pg_timeout
            self.name = f"gradwire/meeting/{self.store.add(f'gradwire/meetings/{self.rank}', 1)}"

    def come(
        self, subject: str, reason: str, card: str = "", longest: timedelta | None = None
    ) -> list[str]:
        """Wait until all ranks have come, and compare what they bring. Returns the cards of all
        ranks, in order; none if all are equal.

        Args:
            subject: what the ranks come for; each subject has meetings of its own.
            reason: what to say of ranks that do not come: why they may have stayed away, and what
                to do.
            card: what this rank brings.
            longest: how long to wait if the group was given no timeout; None, or if it was: that.

        Raises:
            RuntimeError: some ranks have not come in time. It names them. A meeting in which they
                come may follow.
        """
        store = self.store
        if store is None:
            return []
        patience = patience_of(longest, self._timeout)
        held = self._held.get(subject, 0)
        digest = hashlib.sha256(card.encode()).hexdigest()
        left: list[str] = []
        self.doing = subject
        for attempt in count():
            place = f"{self.name}/{subject}/{held}/{attempt}"
            verdict = f"{place}/verdict"
            if store.check([verdict]) and store.get(verdict) == GIVEN_UP:
                continue  # before this rank came
            cards = [f"{place}/card/{rank}" for rank in range(self.size)]
            present, equal = f"{place}/present", f"{place}/equal/{digest}"
            left += [cards[self.rank], *([verdict, present, equal] if self.rank == 0 else [])]
            store.set(cards[self.rank], card)
            store.add(equal, 1)
            if store.add(present, 1) == self.size:
                _decide(store, verdict, COMPLETE)
            if self._wait(verdict, subject, reason, cards, patience, left) == COMPLETE:
                break
            found = f"{place}/absent"
            left += [found, f"{found}/claimed/0"] if self.rank == 0 else []
            absent = json.loads(found_by_one(store, found, self.rank, partial(self._absent, cards)))
            if absent and self.rank not in absent:
                raise RuntimeError(
                    f"{subject}: rank {self.rank} has waited in vain for ranks {absent}. {reason}"
                )
            # All have come, or this rank has, too late by a hair: once more.
        self.doing = ""
        self._held[subject] = held + 1
        all_equal = int(store.get(equal)) == self.size
        everyone = [] if all_equal else [(card or b"").decode() for card in read_all(store, cards)]
        # All have come to this meeting, so nobody reads from the one before.
        for key in self._left.get(subject, []):
            store.delete_key(key)
        self._left[subject] = left
        return everyone

    def _wait(
        self,
        verdict: str,
        subject: str,
        reason: str,
        cards: list[str],
        patience: timedelta,
        left: list[str],
    ) -> bytes:
        """Until somebody has decided that the meeting is complete, or given up: this rank when it
        has waited too long. Whoever decides first, decides for all. Not `store.wait`: that keeps
        other threads of this process, NCCL's watchdog for one, from the store."""
        assert self.store is not None
        start, told = time.monotonic(), False
        while not self.store.check([verdict]):
            waited = time.monotonic() - start
            if waited > patience.total_seconds():
                _decide(self.store, verdict, GIVEN_UP)
                break
            if waited > PATIENCE.total_seconds() and not told:
                told = True
                if claimed(self.store, f"{verdict}/late", self.rank):
                    left.append(f"{verdict}/late")
                    late = self._absent(cards)
                    logger.warning(
                        "%s: rank %d waits for ranks %s. %s", subject, self.rank, late, reason
                    )
            time.sleep(
                min(max(SHORT, waited / 4), LONG, max(SHORT, patience.total_seconds() - waited))
            )
        return self.store.get(verdict)

    def _absent(self, cards: list[str]) -> str:
        assert self.store is not None
        return str(missing(self.store, cards))


def patience_of(longest: timedelta | None, timeout: timedelta) -> timedelta:
    """How long to wait in a group of this timeout: as long as a user has said, also if that is
    longer."""
    return longest if longest is not None and timeout in BY_DEFAULT else timeout


def _decide(store: dist.Store, verdict: str, what: bytes) -> None:
    """Unless that has been decided."""
    store.compare_set(verdict, "", what.decode())


def _store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """The store that all ranks of a group share; None if there are no others, or no store, as where
    members come and go."""
    store = store_of(group)
    if store is None or not 1 < dist.get_world_size(group) == len(
        dist.get_process_group_ranks(group)
    ):
        return None
    return store
