"""An algorithm's memory on this rank: where it lies, and its forms outside a program.

**Own**, of this rank alone; **portable**, of all ranks, see `gradwire.core.state.checkpoint`;
**whole**, what tools save on every rank. A placement knows what belongs to whom: `Replicated` where
each rank has whole parameters, `gradwire.torch_backend.fsdp.checkpoint.Sharded` where it has blocks
of them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.algorithms.two_level import without_levels
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.state import checkpoint
from gradwire.core.state.checkpoint import StateMismatch
from gradwire.torch_backend.engine.groups.barrier import Meeting
from gradwire.torch_backend.engine.groups.nodes import inter_node_groups
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.monitor.stats import Sent
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.state.blocks import Piece, recut
from gradwire.torch_backend.state.loss_scale import (
    LossScale,
    require_all_ranks,
    require_receiver,
    to_tensors,
)
from gradwire.torch_backend.state.means import (
    counted,
    mean_over,
    mean_slices,
    means_over,
    put_together,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fitted:
    """What of a saved state has a place in a memory.

    Attributes:
        state: the arrays to take over.
        difference: what does not fit, and is left out.
        steps, scale: after how many steps it is, and in the units of which loss scale.
        digest: of what has to be the same on all ranks.
        left, sent: see `Memory`; None: the state does not say.
    """

    state: State[Tensor]
    difference: StateMismatch
    steps: int
    scale: float
    digest: str
    left: dict[int, int] | None = None
    sent: Sent | None = None


class Memory:
    """What an algorithm, or a schedule of local SGD, remembers on this rank.

    Args:
        algorithm: whose memory it is.
        state: fresh; written over in place from now on.
        placement: of what it is about.
        scaler: in whose units gradients come, if any.

    Attributes:
        algorithm, state, placement: as given.
        kind: of its saved states, see `gradwire.core.state.checkpoint.KINDS`.
        steps: finished so far.
        sent: in them, by this rank.
        scale: in whose units errors are.
        loaded: digest of what was loaded into it, "" if nothing was.
        left: of fragments whose differences are on their way, after which step they have left.
            None: there are no such.
        wait: called before the host reads or writes the memory.
        owed: errors of the method before that no step has added to gradients yet, by parameter. No
            saved state has them: it says so.
    """

    def __init__(
        self,
        algorithm: Algorithm | LocalSGD,
        state: State[Tensor],
        placement: Replicated,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.kind = "local_sgd" if isinstance(algorithm, LocalSGD) else "compressor"
        self.state = state
        self.placement = placement
        self.steps = 0
        self.sent = Sent()
        self.scale = LossScale(scaler)
        self.loaded = ""
        self.left: dict[int, int] | None = None
        self.wait: Callable[[], None] = lambda: None
        self.owed: Mapping[str, Tensor] = {}

    @property
    def per_replica(self) -> Collection[str]:
        """Names of the memories that each rank has for itself."""
        return self.algorithm.per_replica

    @property
    def identity(self) -> dict[str, Any]:
        """What a state says of itself that is of this very rank, of as many, and of this
        algorithm."""
        return {"algorithm": repr(self.algorithm), **self.placement.identity}

    def errors(self, names: Collection[str] | None = None) -> list[Tensor]:
        """What this rank has for itself, of the parameters with these names; None: of all."""
        keys = self.per_replica
        return [
            x
            for name, memory in self.state.tensors.items()
            if names is None or name in names
            for key, x in memory.items()
            if key in keys
        ]

    def own(self) -> dict[str, Any]:
        """The own form, of copies. Communicates nothing."""
        self._say_what_is_owed()
        lent = self.lent()
        tensors = {name: _copies(memory) for name, memory in lent["tensors"].items()}
        return {
            **lent,
            "shared": _copies(lent["shared"]),
            "tensors": tensors,
            **self.placement.identity,
        }

    def lent(self) -> dict[str, Any]:
        """The memory itself, as a state of one replica that does not say whose it is."""
        self.wait()
        state = {
            **checkpoint.head(self.kind, repr(self.algorithm), self.steps),
            "sent": asdict(self.sent),
            "shared": self.state.shared,
            "tensors": self.state.tensors,
        }
        if self.left is not None:
            fragments: int = self.algorithm.fragments  # type: ignore[union-attr]
            state["left"] = [self.left.get(fragment, -1) for fragment in range(fragments)]
        scale = float(self.scale.value)
        return state if scale == 1 else state | {"scale": scale}

    def whole(self, *, sliced: bool = False) -> dict[str, Any]:
        """The whole form, with the mean error; `sliced`: as tensors of which each rank has a slice.
        Every rank calls this. Raises RuntimeError if some do not."""
        self._say_what_is_owed()
        self.placement.meet("state_dict()")
        # The scale always: tools fill what a new run gives, key by key.
        return {"scale": 1.0, **self.placement.whole(self, sliced)}

    def portable(self, errors: str = "mean", to: int | None = 0) -> dict[str, Any] | None:
        """The portable form, on the CPU of rank `to` or of all, with one row of errors, their
        "mean", or "all". Every rank calls this.

        Raises:
            ValueError: an argument is none of these.
            RuntimeError: some ranks have not called it.
        """
        if errors not in ("mean", "all"):
            raise ValueError(
                f"errors={errors!r} must be 'mean', one copy, or 'all', one of each rank"
            )
        require_receiver(to, self.placement.place[1])
        self._say_what_is_owed()
        self.placement.meet("gathered_state_dict()")
        return self.placement.portable(self, errors, to)

    def _say_what_is_owed(self) -> None:
        if self.owed:
            logger.warning(
                "This state lacks the compression errors of %d parameters: those of the method"
                " before %r, which the next gradients that are finite will contain. Save it after"
                " that step, and nothing is lost",
                len(self.owed),
                self.algorithm,
            )

    def fit(self, saved: Mapping[str, Any], strict: bool = True) -> Fitted:
        """What of a state in any form has a place here. Changes nothing.

        Raises:
            ValueError: it is no such state, or another rank's; or it does not fit and `strict`.
        """
        checkpoint.require_kind(saved, self.kind, ())
        state = self.placement.given(to_tensors(saved), self)
        checkpoint.require_kind(state, self.kind, checkpoint.COMMON)
        steps, scale, name = (
            checkpoint.step_in(state),
            checkpoint.scale_in(state),
            repr(self.algorithm),
        )
        if "rank" in state:
            self.placement.require_own(state)
        elif "replicas" in state:
            checkpoint.require_portable(state)
            name, state = (
                repr(without_levels(self.algorithm)),
                recut(state, self.placement.pieces, self.state, self.per_replica),
            )
            state = self._row(state)
        loaded, difference = checkpoint.fit(state, name, self.state, self.kind)
        if difference and strict:
            raise ValueError(f"{difference}. Load it with strict=False to keep what fits")
        left, sent = _left_in(state), Sent.of_state(state["sent"]) if "sent" in state else None
        return Fitted(
            loaded,
            difference,
            steps,
            scale,
            _digest(loaded, self.state, self.per_replica),
            left,
            sent,
        )

    def take(self, found: Fitted) -> None:
        """Go on from what fits, in place."""
        if found.difference:
            logger.warning("Part of a saved state was left out: %s", found.difference)
        self.scale.follow(self.errors())  # what is not loaded keeps units of its own
        self._write(found.state)
        self.steps = found.steps
        if found.sent is not None:
            self.sent.count_from(found.sent)
        self.scale.value = found.scale
        self.scale.follow(
            [
                self.state.tensors[name][key]
                for name, memory in found.state.tensors.items()
                for key in memory
                if key in self.per_replica
            ]
        )
        # What is left of the memory before belongs to it.
        self.loaded = f"{self.loaded} {found.digest}" if found.difference else found.digest

    def continue_from(self, other: Memory) -> StateMismatch:
        """Take over the memory of another algorithm for the same parameters, as far as it fits,
        with its steps and its units. To be called on all ranks. Returns what did not fit."""
        name, before = repr(without_levels(self.algorithm)), other.lent()
        if not self.placement.keeps_rows(self.algorithm, other.algorithm):
            # Ranks that become a node go on with one error.
            # of whole parameters, or of blocks
            whole = Replicated.portable(other.placement, other, "mean", None)
            assert whole is not None
            before = self._row(whole)
        equal_now = set(other.per_replica) - set(self.per_replica)
        before["tensors"] = {
            name: {key: self._mean(x) if key in equal_now else x for key, x in memory.items()}
            for name, memory in before["tensors"].items()
        }
        before["algorithm"] = repr(without_levels(other.algorithm))
        loaded, difference = checkpoint.fit(before, name, self.state, self.kind)
        self._write(loaded)
        self.steps, self.scale, self.loaded = other.steps, other.scale, other.loaded
        self.sent.count_from(other.sent)
        return difference

    def _mean(self, x: Tensor) -> Tensor:
        """Over the replicas, of what each has had for itself and all have alike from now on."""
        return mean_over(x.to(self.placement.device), self.placement.groups.whole)

    def _row(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's row of a portable state."""
        row, rows = self.placement.row(self.algorithm)
        return checkpoint.of_replica(TorchOps(torch.device("cpu")), state, row, rows)

    def _write(self, loaded: State[Tensor]) -> None:
        self.wait()
        for key, value in loaded.shared.items():
            self.state.shared[key].copy_(value)
        for name, memory in loaded.tensors.items():
            for key, value in memory.items():
                self.state.tensors[name][key].copy_(value)


class Replicated:
    """Each rank is a replica and has whole parameters. With two levels the ranks of a node remember
    the same, and have one row among them.

    Attributes:
        groups: of the replicas.
        device: where the memory is.
        meetings: where ranks wait for each other, before they communicate.
        pieces: which blocks of parameters this rank has, in place of whole ones.
    """

    def __init__(self, groups: ProcessGroups, device: torch.device) -> None:
        self.groups, self.device = groups, device
        self.meetings = [Meeting(groups.whole)]
        self.pieces: Mapping[str, Piece] = {}

    @property
    def identity(self) -> dict[str, int]:
        """The owner of a state that this rank saves by itself."""
        return {"rank": self.groups.whole.rank(), "replicas": self.groups.whole.size()}

    @property
    def place(self) -> tuple[int, int]:
        """The number of this rank, and how many there are: shard by shard of one replica after the
        other."""
        own = self.identity
        shards = own.get("shards", 1)
        return own["rank"] * shards + own.get("shard", 0), own["replicas"] * shards

    def meet(self, subject: str) -> None:
        """Raise RuntimeError if some ranks do not come."""
        for meeting in self.meetings:
            require_all_ranks(meeting, subject, "rank_state_dict()")

    def mean_sent(self, sent: Mapping[str, int]) -> dict[str, int]:
        """What a rank has sent, on average: a state of all ranks says that. Every rank calls
        this."""
        mean = mean_over(
            torch.tensor(list(sent.values()), dtype=torch.float64, device=self.device),
            self.groups.whole,
        )
        return dict(zip(sent, map(round, mean.tolist()), strict=True))

    def require_own(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError for the state of another rank."""
        mine = self.identity
        whose = {key: state.get(key) for key in mine}
        if whose != mine:
            raise ValueError(
                f"the state is that of {_listed(whose)}, with the error of that rank; this is"
                f" {_listed(mine)}. Load what state_dict() gives, which serves every rank of any"
                " number of ranks; of the states of all ranks,"
                " gradwire.core.state.checkpoint.gather makes one"
            )

    def given(self, state: Mapping[str, Any], memory: Memory) -> Mapping[str, Any]:
        """A state in any form as a portable one, or as one of one rank. Of slices, every rank calls
        this."""
        if "local" not in state:
            return state
        whole = {
            name: {key: put_together(x) for key, x in kept.items()}
            for name, kept in state["local"].items()
        }
        return {**state, "local": whole}

    def whole(self, memory: Memory, sliced: bool) -> dict[str, Any]:
        """The form that tools save on every rank."""
        state = self.portable(memory, "slices" if sliced else "mean", None)
        assert state is not None
        return state

    def portable(self, memory: Memory, errors: str, to: int | None) -> dict[str, Any] | None:
        """The portable form, on rank `to` or on all; `errors` may also be "slices", on all, one of
        the mean each."""
        partition, members = inter_node_groups(memory.algorithm, self.groups.whole)
        state, per_replica = memory.lent(), memory.per_replica
        state["sent"] = self.mean_sent(state["sent"])
        if to is not None and to not in members:  # those of the receiver's place send it
            return None
        group = self.groups.whole if partition is None else self.groups[partition]
        to = None if to is None else members.index(to)
        receives = to is None or to == dist.get_rank(group)
        tensors = {
            name: _on_cpu({k: x for k, x in kept.items() if k not in per_replica})
            for name, kept in state["tensors"].items()
        }
        own = [
            (name, k) for name, kept in state["tensors"].items() for k in kept if k in per_replica
        ]
        memories = [state["tensors"][name][k] for name, k in own]
        weights = [counted(k, state["tensors"][name]) for name, k in own]
        if errors == "slices":
            rows = mean_slices(memories, group, self.device, weights)
        elif errors == "mean":
            rows = [x[None] for x in means_over(memories, group, self.device, to, weights)]
        else:
            rows = [_rows(x.to(self.device), group, to) for x in memories]  # ranks meet there
        local: dict[str, dict[str, Tensor]] = {}
        for (name, k), row in zip(own, rows, strict=True):
            local.setdefault(name, {})[k] = row
        if not receives:
            return None
        state |= {"algorithm": repr(without_levels(memory.algorithm)), "replicas": len(members)}
        return {**state, "shared": _on_cpu(state["shared"]), "tensors": tensors, "local": local}

    def row(self, algorithm: Any) -> tuple[int, int]:
        """Which row of a portable state is this rank's, of how many: that of its node, if the
        algorithm has two levels."""
        members = inter_node_groups(algorithm, self.groups.whole)[1]
        return members.index(self.groups.whole.rank()), len(members)

    def keeps_rows(self, algorithm: Any, before: Any) -> bool:
        """Whether what a rank remembers of the algorithm before is its own with this one too: its
        node is the rank alone, or has the same ranks."""
        groups = inter_node_groups(algorithm, self.groups.whole)[0]
        return groups is None or groups == inter_node_groups(before, self.groups.whole)[0]


def factors_side_by_side(state: State[Tensor], apart: Collection[str]) -> State[Tensor]:
    """The same memory, of which all arrays of one key and dtype are views of one array, in order:
    as they lie in a message, so that one kernel takes them all over.

    Args:
        state: fresh.
        apart: keys of memories that stay as they are, because they are large.
    """
    places: dict[tuple[str, torch.dtype], list[tuple[str, Tensor]]] = {}
    for name, memory in state.tensors.items():
        for key, x in memory.items():
            if key not in apart:
                places.setdefault((key, x.dtype), []).append((name, x))
    tensors = {name: dict(memory) for name, memory in state.tensors.items()}
    for (key, _), arrays in places.items():
        flat = torch.cat([x.reshape(-1) for _, x in arrays])
        for (name, x), piece in zip(
            arrays, torch.split(flat, [x.numel() for _, x in arrays]), strict=True
        ):
            tensors[name][key] = piece.view(x.shape)
    return State(state.shared, tensors)


def _digest(loaded: State[Tensor], current: State[Tensor], per_replica: Collection[str]) -> str:
    """The digest of what has to be the same on all ranks in a state that is about to be loaded:
    everything but per-replica memory, in the dtypes here."""
    found = hashlib.sha256()

    def note(name: str, x: Tensor, here: Tensor) -> None:
        found.update(name.encode())
        found.update(
            x.detach().to("cpu", here.dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data
        )

    for key in sorted(loaded.shared):
        note(key, loaded.shared[key], current.shared[key])
    for name in sorted(loaded.tensors):
        for key in sorted(loaded.tensors[name].keys() - set(per_replica)):
            note(f"{name}/{key}", loaded.tensors[name][key], current.tensors[name][key])
    return found.hexdigest()[:16]


def _rows(x: Tensor, group: dist.ProcessGroup, to: int | None) -> Tensor:
    """Those of all ranks, on the rank that receives them."""
    # As bytes: libraries do not know all dtypes. In C order: all ranks must mean the same.
    own = x.contiguous().reshape(-1).view(torch.uint8)
    received = None
    if to is None or to == dist.get_rank(group):
        received = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    if to is not None:
        dist.gather(own, received, dist.get_global_rank(group, to), group=group)
    elif received is not None:
        dist.all_gather(received, own, group=group)
    return (
        x
        if received is None
        else torch.stack([r.view(x.dtype).reshape(x.shape).cpu() for r in received])
    )


def _copies(memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: x.clone() for key, x in memory.items()}


def _on_cpu(memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: x.to("cpu", copy=True) for key, x in memory.items()}


def _listed(whose: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={number}" for key, number in whose.items())


def _left_in(state: Mapping[str, Any]) -> dict[int, int] | None:
    """See `Memory.left`. Raises ValueError for what is no list of steps."""
    left = state.get("left")
    if left is None:
        return None
    if not isinstance(left, list) or not all(type(step) is int for step in left):
        raise ValueError(
            f"left={left!r} in the state must be a list of steps, one for each fragment"
        )
    return {fragment: step for fragment, step in enumerate(left) if step >= 0}
