"""What has been sent, counted."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.core.deprecated import old_attribute


@dataclass
class Sent:
    """What this rank has handed to the collective library, in the unit of `gradwire.core.plan.traffic.Traffic`."""

    collectives: int = 0
    nbytes: int = 0
    elements: int = 0


@dataclass(frozen=True)
class Stats:
    """What this rank has handed to the collective library since registration. Payloads are counted once: a ring all-reduce of n bytes
    sends 2(W-1)/W · n over each link. What sends half of that counts n/2, as in a plan.

    Attributes:
        steps: finished steps, without those that were discarded.
        skipped_steps: those in which some rank's gradient held inf or NaN, so that no memory was changed. Algorithms without memory
            do not look, and count none.
        collectives: messages: all-reduces, and whatever else an algorithm asks for.
        bytes_sent: payload bytes.
        dense_bytes: what the gradients were in full.
    """

    steps: int
    skipped_steps: int
    collectives: int
    bytes_sent: int
    dense_bytes: int

    @property
    def compression_ratio(self) -> float:
        """How many times fewer bytes than uncompressed."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    ratio = old_attribute("ratio", "compression_ratio")
