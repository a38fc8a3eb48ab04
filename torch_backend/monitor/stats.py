"""What has been sent, counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gradwire.core.advise.choosing.methods import Chosen
from gradwire.torch_backend.monitor.timers import Times


@dataclass
class Sent:
    """What this rank has handed to the collective library, in the unit of
    `gradwire.core.plan.traffic.Traffic`.

    Attributes:
        within: with two levels, those of `nbytes` that stay inside the node.
        beside: with two levels, what the other ranks of the node send to other nodes.
        dense_bytes: what the gradients were in full.
    """

    collectives: int = 0
    nbytes: int = 0
    elements: int = 0
    within: int = 0
    beside: int = 0
    dense_bytes: int = 0

    @property
    def between(self) -> int:
        """What leaves the node: with two levels of all its ranks together, which share its link;
        with one what this rank sends."""
        return self.nbytes - self.within + self.beside

    def count_from(self, other: Sent) -> None:
        """Go on from what another has counted."""
        for f in fields(self):
            setattr(self, f.name, getattr(other, f.name))

    @classmethod
    def of_state(cls, saved: Any) -> Sent:
        """What a saved state says was sent until then: the fields by name. Raises ValueError for
        anything else."""
        names = {f.name for f in fields(cls)}
        if (
            not isinstance(saved, Mapping)
            or saved.keys() != names
            or not all(_is_count(n) for n in saved.values())
        ):
            raise ValueError(
                f"sent={saved!r} in the state must be numbers of {', '.join(sorted(names))}"
            )
        return cls(**saved)


def _is_count(n: Any) -> bool:
    return type(n) is int and n >= 0


@dataclass(frozen=True)
class Stats:
    """What this rank has handed to the collective library since registration, or since the
    beginning of the run that a loaded state is of. Payloads are counted once: a ring all-reduce of
    n bytes sends 2(W-1)/W · n over each link. What sends half of that counts n/2, as in a plan.

    Examples:
        >>> from gradwire.torch_backend import Stats
        >>> counts = {"steps": 10, "skipped_steps": 0, "collectives": 20}
        >>> sizes = {"bytes_sent": 1_000, "dense_bytes": 50_000}
        >>> stats = Stats(**counts, **sizes, step_seconds=0.25, compress_seconds=0.0625)
        >>> stats.compression_ratio, stats.compress_share
        (50.0, 0.25)

    Attributes:
        steps: finished steps, without those that were discarded.
        skipped_steps: those in which some rank's gradient held inf or NaN, so that no memory was
            changed. Uncompressed averages of floats as they are, also those before the algorithm's
            start, are not looked at, and count none.
        collectives: messages: all-reduces, and whatever else an algorithm asks for.
        bytes_sent: payload bytes.
        within_bytes: with two levels, those of `bytes_sent` that stay inside the node; else 0.
        between_bytes: with two levels, what all ranks of this node send to other nodes together;
            whose link they share. None: one level.
        dense_bytes: what the gradients were in full.
        step_seconds: of the last 50 steps, from the first gradients of a step to those of the next.
            (Of local SGD: from one step of the optimizer to the next, and of a whole cycle of its
            schedule if that is longer.) What took ten times as long as usual was a pause, for an
            evaluation or a checkpoint, and is not in it.
        compress_seconds: of that, the time in which this rank compressed: quantizing, packing,
            launching messages, and writing averages back. Without the optimizer's step, which a
            `ZeroOptimizer` takes in between.
        wait_seconds: of that, the time in which it did nothing but wait for messages; on a device,
            in which its stream did.
        local_error_norms: (step, 2-norm of this rank's compression error after it) of each
            hundredth step, the last 20: whether the error grows. In units of gradients, without the
            scale of a loss scaler.
        skipped_averages: of local SGD with outer parameters, averages in which some replica's
            difference held inf or NaN, so that all went back to the outer parameters of that
            fragment.
        replayed_steps: of this algorithm on this rank, as CUDA graphs of what lies between two
            messages; see `Handle.replay`.
        graph_bytes: memory of those graphs, in which eager steps would work as well.
        compiled_loops: which loops numba has compiled for this algorithm on this processor, and all
            ranks use; "" if there are none.
        choices: of `gradwire.Auto`, which method was chosen from which step on.

    Two of them are equal if all but the times is, and but for how much was replayed, and compiled.
    Times are 0.0 where none has been noted: before there were two steps, and under a CUDA graph.
    """

    steps: int
    skipped_steps: int
    collectives: int
    bytes_sent: int
    dense_bytes: int
    step_seconds: float = field(default=0.0, compare=False)
    compress_seconds: float = field(default=0.0, compare=False)
    wait_seconds: float = field(default=0.0, compare=False)
    local_error_norms: tuple[tuple[int, float], ...] = ()
    within_bytes: int = 0
    between_bytes: int | None = None
    skipped_averages: int = 0
    replayed_steps: int = field(default=0, compare=False)
    graph_bytes: int = field(default=0, compare=False)
    compiled_loops: str = field(default="", compare=False)
    choices: tuple[Chosen, ...] = ()

    @classmethod
    def of(
        cls,
        times: Times,
        steps: int,
        skipped_steps: int,
        sent: Sent,
        local_error_norms: tuple[tuple[int, float], ...] = (),
    ) -> Stats:
        """The statistics of what has been noted."""
        spent = times.step_seconds, times.compress_seconds, times.wait_seconds
        levels = (sent.within, sent.between) if sent.within or sent.beside else ()
        return cls(
            steps,
            skipped_steps,
            sent.collectives,
            sent.nbytes,
            sent.dense_bytes,
            *spent,
            local_error_norms,
            *levels,
        )

    @property
    def compression_ratio(self) -> float:
        """`dense_bytes / bytes_sent`: how many times fewer bytes than uncompressed; 1.0 if nothing
        was sent. With two levels between nodes, `dense_bytes / between_bytes`, as in a plan."""
        sent = self.bytes_sent if self.between_bytes is None else self.between_bytes
        return self.dense_bytes / sent if sent else 1.0

    @property
    def within_ratio(self) -> float:
        """`dense_bytes / within_bytes`: with two levels, how many times fewer bytes inside the
        node; 1.0 if none were sent there."""
        return self.dense_bytes / self.within_bytes if self.within_bytes else 1.0

    @property
    def compress_share(self) -> float:
        """The share of a step that is spent compressing; 0.0 if no times are known."""
        return self.compress_seconds / self.step_seconds if self.step_seconds else 0.0

    def scalars(self) -> dict[str, float]:
        """What a tracker draws: name → number. Times are in milliseconds; those that nobody has
        noted are left out."""
        found = {
            name: float(getattr(self, name))
            for name in ("steps", "skipped_steps", "bytes_sent", "compression_ratio")
        }
        if self.step_seconds:
            found |= {
                f"{part}_ms": 1e3 * float(getattr(self, f"{part}_seconds"))
                for part in ("step", "compress", "wait")
            }
        if self.local_error_norms:
            found["local_error_norm"] = self.local_error_norms[-1][1]
        if self.choices:
            found["chosen_method"] = float(self.choices[-1].number)
        return found
