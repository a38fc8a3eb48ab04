"""A communication hook's step as on a device, without a device and without arithmetic: which
kernels it would launch.

    with on_a_device():
        step = gradwire_step(gpt(12, 768, 50_257, 1024), PowerSGD(4), cap_mib=25)
    for _ in range(3):  # the first steps make memory
        with Kernels() as seen:
            step.run()
    print(seen.kernels, step.all_reduces, seen.waits)

`Kernels` looks at every aten operation and does not run those that would be kernels: what they
would return is memory nobody has written to, so the gradients of a GPT take no time and, untouched,
no memory. `Kernels(compute=True)` runs them as well.

What counts: views, `empty` and its kind, and what only asks about a tensor launch nothing; of other
operations of torch `launched` says how many kernels they are, by a table that a GPU has shown; each
of gradwire's own is one. All-reduces are not in it. Tensors are on the CPU, so a whole tensor that
goes to the host (`tolist`, `cpu`) is not seen as a wait; a single number is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from gradwire import Algorithm
from gradwire.core.plan.dry_run import dry_run
from gradwire.torch_backend.advise.method_cost import _Clock, _Exchange, _Groups
from gradwire.torch_backend.ddp.hook import CommHook
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.engine.groups.point_to_point import Exchange
from gradwire.torch_backend.engine.step import MESSAGE_BYTES, MESSAGE_BYTES_ON_DEVICE
from gradwire.torch_backend.ops.fused import TorchFused
from gradwire.torch_backend.ops.kernels import TorchOps

MIB = 1 << 20
#: Make memory, or ask about a tensor: nothing is launched. Views are recognized by their schema.
FREE = (
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "set_",
        "is_set_to",
    }
    | {
        "is_same_size",
        "is_pinned",
        "record_stream",
        "_unsafe_view",
        "_reshape_alias",
        "lift_fresh",
        "lift",
        "detach",
    }
    | {
        "promote_types",
        "sym_size",
        "sym_stride",
        "sym_numel",
        "sym_storage_offset",
        "_has_compatible_shallow_copy_type",
    }
)
#: In place, without a look at what was there.
FILLS = {"copy_", "zero_", "fill_", "normal_", "_foreach_copy_", "_foreach_zero_"}
#: The host reads what the device has computed, and waits for it.
WAITS = {
    "_local_scalar_dense",
    "item",
    "equal",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
}
#: Of those, what makes a bool of a tensor.
FLAGS = {"_local_scalar_dense", "item", "is_nonzero"}


# --- kernels of an operation: read off what torch's profiler saw of gradwire's hook on an H100,
# torch 2.11, CUDA 13 ---

#: Kernels of each call.
CALLS = {
    "linalg_solve_triangular": 4,  # a copy, two pointers, the solver
    "linalg_qr": 19,
    "topk": 10,
    "index_put_": 26,  # bounds of both indices, a sort of them, then the sums
}
#: Of a Cholesky factor: a copy, pointers, two for what it says of its success, the factor, a
#: triangle. Larger ones take three more.
CHOLESKY, LARGER_CHOLESKY, LARGE = 6, 9, 16
#: cuBLAS divides a sum among processors, and adds their parts up in a second kernel, where the
#: product is thin and the sum long.
THIN, LONG = 32, 512
#: Tensors that `cat` copies in one kernel.
CAT = 128
#: Of `_foreach_*` (ATen/native/cuda/MultiTensorApply.cuh): elements of a chunk, chunks of a launch,
#: and tensors of a launch by how many lists there are.
CHUNK, CHUNKS, TENSORS = 1 << 16, 320, {1: 110, 2: 64, 3: 48, 4: 36}


def launched(name: str, args: Any, kwargs: Any, result: Any) -> int:
    """Of a call of `aten::name`.

    Args:
        args, kwargs: of the call.
        result: what it returned.
    """
    if name in CALLS:
        return CALLS[name]
    if name == "linalg_cholesky_ex":
        return LARGER_CHOLESKY if args[0].shape[-1] > LARGE else CHOLESKY
    if name in ("mm", "bmm"):
        n, long, m = args[0].shape[-2], args[0].shape[-1], args[1].shape[-1]
        return 2 if min(n, m) <= THIN and long >= LONG and long > max(n, m) else 1
    if name == "cat":
        tensors = [x for x in args[0] if x.numel()]
        casts = any(x.dtype != result.dtype for x in tensors)
        return len(tensors) if casts else max(1, math.ceil(len(tensors) / CAT))
    if name.startswith("_foreach_"):
        return _foreach(name, args, result)
    return 1


def _foreach(name: str, args: Any, result: Any) -> int:
    """Launches of as many chunks and tensors as fit into one; or one for each tensor, where dtypes
    or strides are mixed."""
    # a number of each tensor, and a kernel that adds up what is found of its chunks
    if name == "_foreach_norm":
        return 1 + _foreach("", args[:1], None)
    lists: list[Any] = [
        x for x in (*args, result) if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)
    ]
    lists = [x for i, x in enumerate(lists) if not any(x is before for before in lists[:i])]
    first = lists[0]
    for each in lists:
        if any(
            x.dtype != first[0].dtype or x.stride() != y.stride()
            for x, y in zip(each, first, strict=True)
        ):
            return len(first)
    launches = chunks = tensors = 0
    for x in first:
        tensors += 1
        left = math.ceil(x.numel() / CHUNK)
        while left:
            taken = min(left, CHUNKS - chunks)
            left, chunks = left - taken, chunks + taken
            if chunks == CHUNKS:
                launches, chunks, tensors = launches + 1, 0, int(left > 0)
        if tensors == TENSORS[min(len(lists), max(TENSORS))]:
            launches, chunks, tensors = launches + 1, 0, 0
    return max(1, launches + bool(chunks))


class Kernels(TorchDispatchMode):
    """Counts the kernels that operations would launch on a device; within the context, in this
    thread.

    Args:
        compute: run them too. Otherwise their results are memory that nobody has written to, and a
            flag that the host reads is true.

    Attributes:
        by_name: kernels by the operation that launches them.
        operations: all that were dispatched, views too: what the host does.
        waits: how often the host would have waited for the device: it read a number.
        nbytes: what the operations read and write, each of their tensors once; of an expanded axis
            one element.
    """

    def __init__(self, *, compute: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.compute = compute
        self.by_name: Counter[str] = Counter()
        self.operations = 0
        self.waits = 0
        self.nbytes = 0

    @property
    def kernels(self) -> int:
        return self.by_name.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        self.operations += 1
        if name in WAITS:
            self.waits += 1
            if not self.compute and name in FLAGS and args[0].dtype == torch.bool:
                return True  # in memory that nobody has written to, another each time
            return func(*args, **kwargs)
        if name in FREE or _is_view(func):
            return func(*args, **kwargs)
        result = func(*args, **kwargs) if self.compute else _unwritten(func, args, kwargs)
        self.by_name[name] += launched(name, args, kwargs, result)
        self.nbytes += _moved(func, args, kwargs, result)
        return result


def _is_view(func: Any) -> bool:
    """It returns its argument's memory and writes nothing."""
    returned = [r.alias_info for r in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def _unwritten(func: Any, args: Any, kwargs: Any) -> Any:
    """What `func` returns, of the right shapes and strides, in memory that it has not written
    to."""
    written = [
        args[i] if i < len(args) else kwargs[argument.name]
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if written:  # in place, or with `out=`; `_foreach_*_` returns nothing
        return (
            None
            if not func._schema.returns
            else written[0]
            if len(written) == 1
            else tuple(written)
        )
    with _disable_current_modes():
        on_meta, named = tree_map_only(Tensor, lambda x: _empty_like(x, "meta"), (args, kwargs))
        if "device" in named:
            named["device"] = torch.device("meta")
        return tree_map_only(Tensor, lambda x: _empty_like(x, "cpu"), func(*on_meta, **named))


def _moved(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes that are read and written."""
    moved, writes = 0, False
    # of the rows that something is added to, and no others
    if func._schema.name.split("::")[1] == "index_add_":
        _, _, index, source = args
        return _bytes_of(index) + 3 * _bytes_of(source)
    for i, argument in enumerate(func._schema.arguments):
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        nbytes = sum(_bytes_of(x) for x in tree_leaves(given) if isinstance(x, Tensor))
        written = argument.alias_info is not None and argument.alias_info.is_write
        writes = writes or written
        # What is only written to: `out=`, and what is filled. Other operations in place read it
        # first.
        read = not written or not (argument.kwarg_only or func._schema.name.split("::")[1] in FILLS)
        moved += nbytes * (written + read)
    return (
        moved
        if writes
        else moved + sum(_bytes_of(x) for x in tree_leaves(result) if isinstance(x, Tensor))
    )


def _bytes_of(x: Tensor) -> int:
    """Elements of a stride of several count as if nothing lay between them, which flatters what
    reads single bytes of words."""
    return (
        math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.itemsize
        if x.numel()
        else 0
    )


def _empty_like(x: Tensor, device: str) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


@contextmanager
def on_a_device(*, fused: bool = False) -> Iterator[None]:
    """Drivers made within take the branch for devices, on tensors of the CPU. `fused`: with the
    kernels in Triton, which count as what their schemas say; to compute, they need Triton's
    interpreter."""
    original = TorchOps.__init__

    def init(self: TorchOps, device: torch.device) -> None:
        original(self, device)
        self.host_knows = False
        self.truth = _unknown  # type: ignore[method-assign]
        self.fused = TorchFused(self) if fused else None
        self.multiplies_together = fused

    with mock.patch.object(TorchOps, "__init__", init):
        yield


def _unknown(ok: Tensor) -> None:
    """What the host knows of a flag on a device."""


class _Arrived(Work):
    """A message that is there at once."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class PretendedGroup(dist.ProcessGroup):
    """A process group of so many ranks, of which only this one exists: messages come back as they
    are."""

    def __init__(self, ranks: int = 8) -> None:
        super().__init__(0, ranks)  # type: ignore[call-arg]
        self._ranks = ranks
        self.all_reduces = 0
        self.nbytes = 0

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Arrived:  # type: ignore[override]
        self.all_reduces += 1
        self.nbytes += sum(x.numel() * x.element_size() for x in tensors)
        return _Arrived(tensors)

    def size(self) -> int:
        return self._ranks

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return "pretended"


@dataclass
class PretendedBucket:
    """What DDP hands to a hook."""

    _index: int
    _last: bool
    _buffer: Tensor
    _parameters: list[Tensor]
    _gradients: list[Tensor]

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        return self._gradients


def buckets_of(
    parameters: Mapping[str, Tensor], cap_mib: float, device: torch.device | str = "cpu"
) -> list[PretendedBucket]:
    """Buckets as DDP makes them of these parameters, from the last one to the first, after the
    first step. 25 is DDP's default, with a first bucket of 1 MiB."""
    reversed_ = list(parameters.values())[::-1]
    limits = [MIB, 25 * MIB] if cap_mib == 25 else [int(cap_mib * MIB)]
    members, _ = torch._C._distributed_c10d._compute_bucket_assignment_by_size(reversed_, limits)
    buckets = []
    for index, bucket in enumerate(members):
        own = [reversed_[i] for i in bucket]
        buffer = torch.empty(sum(p.numel() for p in own), dtype=own[0].dtype, device=device)
        parts = torch.split(buffer, [p.numel() for p in own])
        gradients = [part.view(p.shape) for part, p in zip(parts, own, strict=True)]
        buckets.append(PretendedBucket(index, index == len(members) - 1, buffer, own, gradients))
    return buckets


@dataclass
class Step:
    """A hook and the buckets of a step.

    Attributes:
        hook: as it is registered with DDP.
        buckets: in the order in which DDP hands them over.
        group: counts the all-reduces.
        synchronized: how often the hook called `torch.cuda.synchronize`, all steps together.
        steps: so many were run.
    """

    hook: Callable[[Any], Any]
    buckets: list[PretendedBucket]
    group: PretendedGroup
    synchronized: int = field(default=0)
    steps: int = field(default=0)

    def run(self) -> None:
        self.steps += 1
        for bucket in self.buckets:
            self.hook(bucket)

    @property
    def all_reduces(self) -> int:
        """All steps together."""
        return self.group.all_reduces


def _parameters(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}


class ImaginedGroups(_Groups):
    """So many replicas, of which the others send what this one sends: for what is gathered and
    exchanged. That is not counted."""

    in_one_process = False  # nothing is compiled for a processor, which here stands for a device

    def __init__(self, replicas: int = 8) -> None:
        super().__init__(replicas, _Clock(torch.device("cpu")))
        self.whole = PretendedGroup(replicas)

    def exchange(self, groups: Any, device: torch.device) -> Exchange:
        return _NotCounted(self.whole, self._clock)


class _NotCounted(_Exchange):
    def _copied(self, own: Tensor, others: Sequence[Tensor]) -> list[Any]:
        return []


def gradwire_step(
    shapes: Mapping[str, tuple[int, ...]],
    algorithm: Algorithm,
    cap_mib: float = 25,
    dtype: torch.dtype = torch.float32,
    replicas: int = 8,
    **options: Any,
) -> Step:
    """gradwire's hook, with DDP buckets of `cap_mib`; to be made `on_a_device()`. `options`: those
    of `Driver`."""
    parameters, groups = _parameters(shapes, dtype), ImaginedGroups(replicas)
    remembers = bool(dry_run(algorithm, specs_of(parameters), groups.whole.size()).memory.tensors)
    options.setdefault("message_bytes", MESSAGE_BYTES_ON_DEVICE if remembers else MESSAGE_BYTES)
    with Kernels():  # memory that nobody writes to is not taken
        driver = Driver(algorithm, specs_of(parameters), torch.device("cpu"), groups, **options)
    handle = CommHook(driver, parameters, None)
    return Step(
        lambda bucket: handle.hook(None, bucket), buckets_of(parameters, cap_mib), groups.whole
    )


def torch_step(
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    cap_mib: float = 25,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Step:
    """torch's powerSGD_hook likewise. Its third step is the first that compresses. `options`: those
    of `PowerSGDState`."""
    parameters, group = _parameters(shapes, dtype), PretendedGroup()
    state = torchs.PowerSGDState(
        group, matrix_approximation_rank=rank, start_powerSGD_iter=2, **options
    )

    def synchronize(device: Any = None) -> None:
        step.synchronized += 1

    def hook(bucket: Any) -> Any:
        # By hand, since this is timed: `mock.patch` takes longer than the hook.
        before = torch.cuda.is_available, torch.cuda.synchronize
        torch.cuda.is_available, torch.cuda.synchronize = _always, synchronize
        try:
            return torchs.powerSGD_hook(state, bucket)
        finally:
            torch.cuda.is_available, torch.cuda.synchronize = before

    step = Step(hook, buckets_of(parameters, cap_mib), group)
    return step


def _always() -> bool:
    return True
