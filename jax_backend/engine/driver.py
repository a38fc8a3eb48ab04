"""The driver: runs an algorithm inside a traced function, over a mapped axis.

A request about any number of arrays is one collective of `jax.lax` on a list of them per dtype,
which XLA joins. Gradients lie in that list as they are: packing them would cost a copy of the
model, and would gather whole what the compiler has sharded. What an algorithm makes for the wire,
factors and the small tensors beside them, is packed into a flat array first: left to XLA, the two
messages of a PowerSGD step came out as four or five all-reduces. The parts of vectors, reduced or
gathered, have a collective each.

Where the compiler divides a replica among the devices of a slice
(`gradwire.jax_backend.axes.auto_axes`), each device sends another part of that flat array.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from gradwire.core.kernels.arrays import group_by, message_key
from gradwire.core.protocol import run
from gradwire.core.protocol.control_requests import Branch, OptimizerStep, StepIsFinite, Watch
from gradwire.core.protocol.exchanges import AllToAll, Gather
from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.halves import AllGather, ReduceScatter
from gradwire.core.protocol.local_requests import LocalNorm, ReplicaIndex, WorldSize
from gradwire.core.protocol.programs import Program, Request, UnknownRequest
from gradwire.core.protocol.reductions import Reduce, SumScalar
from gradwire.jax_backend.axes.auto_axes import (
    Exchange,
    compiler_axes,
    parted,
    slice_size,
    wide_on_cpu,
)
from gradwire.jax_backend.axes.cpu_hosts import between_cpu_hosts, in_short_pieces
from gradwire.jax_backend.axes.mapped_axis import (
    AxisName,
    axes_of,
    is_manual,
    tracked,
    vary,
    vary_if_tracked,
    varying_axes,
)
from gradwire.jax_backend.axes.replica_groups import Peers, mean_by_sum, peers_of
from gradwire.jax_backend.ops.kernels import JaxOps
from gradwire.jax_backend.ops.packing import FLAT, FLAT_TO_ROWS, ROWS, Layout, divided_rows

T = TypeVar("T")
Side = Callable[[], tuple[Any, jax.Array]]
Shapes = frozenset[tuple[int, ...]]
#: How arrays of a message are packed, and which: by their numbers.
Piece = tuple[Layout, list[int]]

GATHERS_INVARYING = "to" in inspect.signature(lax.all_gather).parameters

#: Of what is watched, arrays from this size on, in bytes, are worth a place of their own in a
#: message.
LARGE = 1 << 20

#: What is sent by all devices of a slice and needs to be sent by one of them is left alone if all
#: of it is less than this part of a message.
NEGLIGIBLE = 100

#: A sharded optimizer: (gradients of this replica's pieces by name, whether the step counts or
#: None) → what it makes of them.
Optimizer = Callable[[dict[str, jax.Array], jax.Array | None], dict[str, jax.Array]]


def drive(
    program: Program[T],
    axis_name: AxisName,
    optimizer: Optimizer | None = None,
    *,
    given: Mapping[str, jax.Array] | None = None,
    across: tuple[str, ...] = (),
) -> T:
    """Run a program over JAX arrays to its end, and return what it returned.

    Args:
        program: a coroutine.
        axis_name: the mapped axis over which its averages run; must be bound.
        optimizer: of a program that has one (`gradwire.core.zero.sharded_step.Zero`).
        given: the gradients or parameters that it averages. Arrays of their shapes may be divided
            among the devices of a slice in any way, which JAX does not tell, and stay so.
        across: axes along which devices hold pieces of one replica, each of them running the
            program.
    """
    return drive_watched(program, axis_name, optimizer, given=given, across=across)[0]


def drive_watched(
    program: Program[T],
    axis_name: AxisName,
    optimizer: Optimizer | None = None,
    *,
    given: Mapping[str, jax.Array] | None = None,
    across: tuple[str, ...] = (),
) -> tuple[T, jax.Array]:
    """`drive`, and whether all watched averages were finite: a bool scalar, equal on all
    replicas."""
    shapes = frozenset(tuple(x.shape) for x in (given or {}).values() if x.ndim > 1)
    driver = _Driver(axis_name, jnp.asarray(True), optimizer, shapes, across)
    return run(program, driver.answer), driver.finite


class _Driver:
    """Performs requests; `finite` tells whether all watched answers so far were finite."""

    def __init__(
        self,
        axis_name: AxisName,
        finite: jax.Array,
        optimizer: Optimizer | None = None,
        given: Shapes = frozenset(),
        across: tuple[str, ...] = (),
    ) -> None:
        self.axis_name = axis_name
        self.finite = finite
        self.optimizer = optimizer
        self.given = given
        self.across = frozenset(across)
        #: Whether a replica is divided among devices by the compiler.
        self.in_slices = bool(compiler_axes()) and is_manual(axis_name)

    def answer(self, request: Request) -> tuple[Any, ...]:
        if refusal := why_not(request, self.optimizer is not None):
            raise UnknownRequest(f"the JAX driver cannot answer {refusal}")
        return request.answer() if request.local else _METHODS[type(request)](self, request)

    def _reduce(self, request: Reduce[jax.Array]) -> tuple[jax.Array, ...]:
        def combined(arrays: list[jax.Array]) -> list[jax.Array]:
            return self._reduce_arrays(arrays, request.op, request.groups)

        # What is not watched, an average that an algorithm makes nothing of, is not packed either:
        # that would be its only copy.
        arrays, packs = request.arrays, request.watched
        if self.in_slices:
            pieces = partial(_pieces_of_slices, arrays, self.given, packs)
        else:
            pieces = partial(_pieces, arrays, FLAT) if packs else partial(_each, arrays)
        return self._message(arrays, pieces, combined, watched=request.watched)

    def _message(
        self,
        arrays: Sequence[jax.Array],
        pieces_of: Callable[[list[int]], list[Piece]],
        send: Exchange,
        *,
        rows: tuple[int, ...] = (),
        watched: bool = False,
    ) -> tuple[jax.Array, ...]:
        """The answers about some arrays, sent in one message for each dtype.

        Args:
            arrays: of any dtypes and shapes.
            pieces_of: the numbers of arrays of one dtype → which of them are packed together, and
                how.
            send: arrays of one dtype → what comes of each.
            rows: how many rows an answer has more than its array, as the beginning of a shape.
            watched: whether the algorithm wants to know if the answers are finite.
        """
        shapes = [(*rows, *x.shape) for x in arrays]
        answers = [
            x if x.size else jnp.zeros(shape, x.dtype)
            for x, shape in zip(arrays, shapes, strict=True)
        ]
        sent = [i for i, x in enumerate(arrays) if x.size]
        for members in group_by(sent, [message_key(arrays[i]) for i in sent]):
            pieces = pieces_of(members)
            results = send([layout.pack([arrays[i] for i in piece]) for layout, piece in pieces])
            received = [layout.received(x) for (layout, _), x in zip(pieces, results, strict=True)]
            for x in received if watched else ():
                self._watch(x)
            for (layout, piece), x in zip(pieces, received, strict=True):
                for i, answer in zip(
                    piece, layout.unpack(x, [shapes[i] for i in piece]), strict=True
                ):
                    answers[i] = answer
        return tuple(answers)

    def _reduce_arrays(
        self, arrays: list[jax.Array], op: str, groups: Groups | None
    ) -> list[jax.Array]:
        peers = peers_of(groups, self.axis_name, ranked=False)
        own = vary_if_tracked(arrays, self.axis_name)
        if not peers.axes:
            return own

        def total(xs: list[jax.Array]) -> list[jax.Array]:
            return wide_on_cpu(partial(peers.exchange, lax.psum), xs)

        if op == "sum":
            return total(own)
        if op == "mean":
            return mean_by_sum(total, own, peers.count(own[0].dtype))
        largest = wide_on_cpu(partial(peers.exchange, lax.pmax), own)
        # JAX takes the maximum in a group to be that of all.
        return largest if peers.groups is None else vary_if_tracked(largest, self.axis_name)

    def _watch(self, *arrays: jax.Array) -> None:
        floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
        self.finite = self.finite & JaxOps().all_finite(*floats) if floats else self.finite

    def _watch_each(self, request: Watch[jax.Array]) -> tuple[jax.Array, ...]:
        self._watch(*request.arrays)
        return request.arrays

    def _sum_scalar(self, request: SumScalar[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(self._reduce_arrays([request.array], "sum", None))

    def _gather(self, request: Gather[jax.Array]) -> tuple[jax.Array, ...]:
        peers = peers_of(request.groups, self.axis_name)
        send = self._on_each_device(lambda arrays: self._gather_arrays(arrays, peers), 0, 1)
        pieces = partial(_pieces, request.arrays, FLAT_TO_ROWS)
        return self._message(
            request.arrays, pieces, send, rows=(peers.size,), watched=request.watched
        )

    def _on_each_device(self, send: Exchange, kept: int, added: int) -> Exchange:
        """`send`; if there are slices, of a part on each of their devices."""
        return (
            parted(send, kept, added, check_vma=tracked(self.axis_name)) if self.in_slices else send
        )

    def _gather_arrays(self, arrays: list[jax.Array], peers: Peers) -> list[jax.Array]:
        if not peers.axes:
            return [x[None] for x in arrays]
        told: dict[str, Any] = {}
        if tracked(self.axis_name):
            arrays = vary(arrays, peers.axes)
            # Then JAX must be told that the result is the same on all replicas.
            if peers.groups is None:
                if not GATHERS_INVARYING:
                    raise NotImplementedError(
                        "an all-gather under jax.shard_map(check_vma=True) needs JAX 0.9; pass"
                        " check_vma=False to jax.shard_map"
                    )
                told = {"to": "invarying"}
        return in_short_pieces(partial(peers.exchange, lax.all_gather, **told), arrays)

    def _all_to_all(self, request: AllToAll[jax.Array]) -> tuple[jax.Array, ...]:
        peers = peers_of(request.groups, self.axis_name)
        if not request.counts:
            request.require_rows(peers.size)
        rows = (
            [x.reshape((peers.size, -1)) for x in request.arrays]
            if request.counts
            else request.arrays
        )

        def exchanged(pieces: list[jax.Array]) -> list[jax.Array]:
            own = vary_if_tracked(pieces, self.axis_name)
            if not peers.axes:
                return own
            return peers.exchange(lax.all_to_all, own, 0, 0, tiled=True)

        answers = self._message(
            rows, partial(_pieces, rows, ROWS), self._on_each_device(exchanged, 1, 0)
        )
        return tuple(x.reshape((-1,)) for x in answers) if request.counts else answers

    def _reduce_scatter(self, request: ReduceScatter[jax.Array]) -> tuple[jax.Array, ...]:
        peers = peers_of(request.groups, self.axis_name)

        def scattered(xs: list[jax.Array]) -> list[jax.Array]:
            if not between_cpu_hosts():
                return wide_on_cpu(partial(peers.exchange, lax.psum_scatter, tiled=True), xs)
            return in_short_pieces(summed, xs)

        def summed(xs: list[jax.Array]) -> list[jax.Array]:
            return [
                x.sum(0, keepdims=True)
                for x in peers.exchange(lax.all_to_all, xs, 0, 0, tiled=True)
            ]

        def part(x: jax.Array) -> jax.Array:
            if not x.size:
                return jnp.zeros_like(x)
            own = [vary_if_tracked(x.reshape((peers.size, -1, *_behind(x))), self.axis_name)]
            means = (
                mean_by_sum(self._on_each_device(scattered, 1, 0), own, peers.size)
                if peers.axes
                else own
            )
            return means[0].reshape((-1, *x.shape[1:]))

        return tuple(part(x) for x in request.arrays)

    def _all_gather(self, request: AllGather[jax.Array]) -> tuple[jax.Array, ...]:
        peers = peers_of(request.groups, self.axis_name)
        send = self._on_each_device(lambda arrays: self._gather_arrays(arrays, peers), 0, 1)
        # Nothing is the same on all replicas, and x is not known to be.
        return tuple(
            (
                send([x.reshape((-1, *_behind(x)))])[0].reshape((-1, *x.shape[1:]))
                if x.size
                else jnp.zeros(x.shape, x.dtype)
            )
            for x in request.arrays
        )

    def _world_size(self, request: WorldSize) -> tuple[int]:
        return (peers_of(request.groups, self.axis_name).size,)

    def _replica_index(self, request: ReplicaIndex) -> tuple[jax.Array]:
        return (peers_of(request.groups, self.axis_name).index(),)

    def _local_norm(self, request: LocalNorm[jax.Array]) -> tuple[jax.Array]:
        # Of a parameter that is divided over another axis too, all parts belong to the replica.
        own = frozenset(axes_of(self.axis_name))
        divided: dict[frozenset[str], list[jax.Array]] = {}
        for x in request.arrays:
            divided.setdefault(varying_axes(x) - own | self.across, []).append(x)
        norms = [request.ops.norm_of_all(divided.pop(frozenset(), []))]
        for along, members in divided.items():
            square = jnp.square(request.ops.norm_of_all(members))
            norms.append(jnp.sqrt(lax.psum(square, tuple(sorted(along)))))  # type: ignore[no-untyped-call]
        return (norms[0] if len(norms) == 1 else request.ops.norm_of_all(norms),)

    def _step_is_finite(self, request: StepIsFinite) -> tuple[jax.Array]:
        # Parameters that are divided over another axis are finite or not in each part: all of them
        # must decide alike.
        others = tuple(sorted(varying_axes(self.finite) | self.across))
        if others:
            self.finite = lax.psum((~self.finite).astype(jnp.int32), others) == 0  # type: ignore[no-untyped-call]
        return (self.finite,)

    def _branch(self, request: Branch[Any]) -> tuple[Any]:
        def side(start: Callable[..., Program[Any]]) -> Side:
            def traced() -> tuple[Any, jax.Array]:
                driver = _Driver(
                    self.axis_name, self.finite, self.optimizer, self.given, tuple(self.across)
                )
                return run(start(*request.operands), driver.answer), driver.finite

            return traced

        then, otherwise = side(request.then), side(request.otherwise)
        if request.phase is None or tracked(self.axis_name):
            then, otherwise = _alike(then, otherwise)
        answer, self.finite = lax.cond(request.predicate, then, otherwise)
        return (answer,)

    def _optimizer_step(self, request: OptimizerStep[jax.Array]) -> tuple[dict[str, jax.Array]]:
        assert self.optimizer is not None  # see `why_not`
        return (self.optimizer(request.pieces, request.ok),)


#: How each kind of request is performed, besides those that are `local`: the only list of them
#: here.
_METHODS: dict[type[Request], Callable[[_Driver, Any], tuple[Any, ...]]] = {
    AllGather: _Driver._all_gather,
    AllToAll: _Driver._all_to_all,
    Branch: _Driver._branch,
    Gather: _Driver._gather,
    LocalNorm: _Driver._local_norm,
    OptimizerStep: _Driver._optimizer_step,
    Reduce: _Driver._reduce,
    ReduceScatter: _Driver._reduce_scatter,
    ReplicaIndex: _Driver._replica_index,
    StepIsFinite: _Driver._step_is_finite,
    SumScalar: _Driver._sum_scalar,
    Watch: _Driver._watch_each,
    WorldSize: _Driver._world_size,
}


def why_not(request: Request, has_optimizer: bool = False) -> str | None:
    """What about this request the driver cannot answer, and the advice, in words. None: it can."""
    kind = type(request)
    if not (isinstance(request, Request) and request.local) and kind not in _METHODS:
        return kind.__name__ if isinstance(request, Request) else repr(request)
    if kind is OptimizerStep and not has_optimizer:
        return (
            f"{kind.__name__} where no optimizer is given to it; gradwire.jax_backend.zero1 divides"
            " an optimizer among the replicas"
        )
    unequal = next((parts for parts in getattr(request, "counts", ()) if len(set(parts)) > 1), None)
    if unequal is not None:
        return (
            f"{kind.__name__} in parts of {unequal}: in JAX the parts of all replicas have one"
            " length; fill them up with zeros"
        )
    return None


def _behind(x: jax.Array) -> tuple[int, ...]:
    """The axes of an array behind the first, if it travels as it lies: what goes to CPU hosts is
    cut, as a vector."""
    return () if between_cpu_hosts() else x.shape[1:]


def _each(arrays: Sequence[jax.Array], members: list[int]) -> list[Piece]:
    """Each of these arrays by itself."""
    return [(FLAT, [i]) for i in members]


def _pieces(arrays: Sequence[jax.Array], layout: Layout, members: list[int]) -> list[Piece]:
    """These arrays, all of one dtype: the small ones packed, the large ones each by itself."""
    packed: dict[frozenset[str], list[int]] = {}
    alone = []
    for i in members:
        x = arrays[i]
        if x.nbytes < LARGE:
            # Under `check_vma=True` what is packed comes to vary wherever one piece of it does.
            packed.setdefault(varying_axes(x), []).append(i)
        else:
            alone.append([i])
    return [(layout, piece) for piece in (*packed.values(), *alone)]


def _pieces_of_slices(
    arrays: Sequence[jax.Array], given: Shapes, packs: bool, members: list[int]
) -> list[Piece]:
    """`_pieces` of replicas that are divided among the devices of a slice, each of which sends
    another part of what is equal on all of them.

    What is `given`, of two axes and more, travels as it lies: a part on each device if the
    parameter is sharded, else all of it on each. So do vectors where nothing else is packed, unless
    sending them several times would make the message longer by more than a hundredth.
    """
    devices = slice_size()
    lying = [i for i in members if tuple(arrays[i].shape) in given]
    equal = [i for i in members if tuple(arrays[i].shape) not in given]
    surplus = (devices - 1) * sum(arrays[i].nbytes for i in equal)
    if not packs and NEGLIGIBLE * surplus < sum(arrays[i].nbytes for i in members):
        return _each(arrays, members)
    return _each(arrays, lying) + _pieces(arrays, divided_rows(devices), equal)


def _alike(then: Side, otherwise: Side) -> tuple[Side, Side]:
    """Both sides of a branch with results of one structure and type, as `lax.cond` demands: zeros
    for what a dictionary lacks on one of them, and every array marked as varying where it varies on
    either side."""
    # Traced once, and not again as `lax.cond` calls them: branches lie in branches.
    then, otherwise = jax.jit(then, inline=True), jax.jit(otherwise, inline=True)
    first, second = jax.eval_shape(then), jax.eval_shape(otherwise)
    return lambda: _completed(then(), second), lambda: _completed(otherwise(), first)


def _completed(mine: Any, other: Any) -> Any:
    """What one side returns, given the shapes of what the `other` does."""
    if isinstance(mine, dict) and isinstance(other, dict):
        lacking = {key: value for key, value in other.items() if key not in mine}
        zeros = jax.tree.map(lambda x: vary(jnp.zeros(x.shape, x.dtype), varying_axes(x)), lacking)
        return zeros | {
            key: _completed(value, other.get(key, value)) for key, value in mine.items()
        }
    if isinstance(mine, tuple) and isinstance(other, tuple) and len(mine) == len(other):
        parts = [_completed(*pair) for pair in zip(mine, other, strict=True)]
        return type(mine)(*parts) if hasattr(mine, "_fields") else tuple(parts)
    flat: list[tuple[list[Any], Any]] = [jax.tree.flatten(mine), jax.tree.flatten(other)]
    (values, structure), (likes, wanted) = flat
    if structure != wanted:
        return mine  # `lax.cond` says it better.
    marked = [vary(x, varying_axes(like)) for x, like in zip(values, likes, strict=True)]
    return jax.tree.unflatten(structure, marked)
