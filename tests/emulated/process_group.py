"""A process group for tensors on `emu` that behaves as NCCL's does for tensors on CUDA.

A collective is put on a stream of the group's own and returns at once. Its result is computed by
Gloo then and there, but hidden: until a stream waits for the work, or the host does, the memory is
NaN, and whoever touches it is reported. Tensors of the CPU are refused. Where NCCL would hang, here
an error says why: if ranks launch different collectives, or one launches them from a callback of a
future.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from threading import local
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    AllToAllOptions,
    ProcessGroupGloo,
    _create_work_from_future,
)
from torch.distributed.distributed_c10d import _world
from torch.futures import Future

from tests.emulated.device import DEVICE, core, stream
from tests.emulated.watched import Launched

BACKEND = "emunccl"
#: Streams of groups, apart from the few that tests use and those that torch asks for.
_streams = count(10)

#: Of a thread that runs a callback.
_inside = local()


def _noticed(then: Any) -> Any:
    def with_notice(future: Future[Any], callback: Callable[[Future[Any]], Any]) -> Any:
        def called(done: Future[Any]) -> Any:
            before, _inside.callback = getattr(_inside, "callback", False), True
            try:
                return callback(done)
            finally:
                _inside.callback = before

        return then(future, called)

    return with_notice


torch._C.Future.then = _noticed(torch._C.Future.then)  # type: ignore[attr-defined]
torch._C.Future.add_done_callback = _noticed(torch._C.Future.add_done_callback)  # type: ignore[attr-defined]

Compute = Callable[[list[Tensor]], list[Tensor]]


class EmulatedNCCL(dist.ProcessGroup):
    """The group. Its collectives run on `stream`; all that were `launched` so far are kept, of
    which sizes that may differ between ranks are 0."""

    #: Tensors of the CPU are taken too, as by a group of "cpu:gloo,cuda:nccl".
    with_gloo = False

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = ProcessGroupGloo(store, rank, size, timeout=timeout)
        self.stream = next(_streams)
        self.launched: list[Launched] = []
        self.timeout = timeout

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return BACKEND

    @property
    def group_name(self) -> str:
        return _world.pg_names.get(self, "")

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(DEVICE.type)]  # where torch puts objects that it sends

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        options = AllreduceOptions()
        options.reduceOp = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        return self._run(
            "allreduce", tensors, tensors, lambda copies: self._reduced(copies, options), opts
        )

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        def compute(copies: list[Tensor]) -> list[Tensor]:
            self._gloo.broadcast(copies, opts).wait()
            return copies

        return self._run("broadcast", tensors, tensors, compute, opts)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._run("allgather", inputs, outputs[0], self._from_everyone, opts)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        def compute(copies: list[Tensor]) -> list[Tensor]:
            return [
                torch.cat([x.reshape(-1) for x in self._from_everyone(copies)]).view(output.shape)
            ]

        return self._run("all_gather", [given], [output], compute, opts)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        def compute(copies: list[Tensor]) -> list[Tensor]:
            (total,) = self._reduced(copies)
            if getattr(opts, "reduceOp", None) == dist.ReduceOp.AVG:
                total.div_(self.size())
            return [total.reshape(-1).chunk(self.size())[self.rank()].reshape(output.shape).clone()]

        return self._run("reduce_scatter", [given], [output], compute, opts)

    # torch 2.13 calls these by other names.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """NCCL leaves alone what the other ranks gave; here it is lost, so that nobody relies on
        it."""

        def compute(copies: list[Tensor]) -> list[Tensor]:
            mine = opts.rootRank == self.rank()
            return [x if mine else torch.full_like(x, torch.nan) for x in self._reduced(copies)]

        return self._run("reduce", tensors, tensors, compute, opts)

    def alltoall_base(
        self,
        output: Tensor,
        given: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> dist.Work:
        def compute(copies: list[Tensor]) -> list[Tensor]:
            received = torch.empty(output.shape, dtype=output.dtype, device="cpu")
            self._gloo.alltoall_base(
                received, copies[0], output_splits, input_splits, AllToAllOptions()
            ).wait()
            return [received]

        return self._run("alltoall", [given], [output], compute, opts)

    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        mine = outputs[0] if outputs else []
        return self._run(
            "gather", inputs, mine, lambda copies: self._from_everyone(copies)[: len(mine)], opts
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        self._gloo.barrier().wait()
        return self._work([])

    def _reduced(self, copies: list[Tensor], *options: AllreduceOptions) -> list[Tensor]:
        self._gloo.allreduce(copies, *options).wait()
        return copies

    def _from_everyone(self, copies: list[Tensor]) -> list[Tensor]:
        received = [torch.empty_like(copies[0]) for _ in range(self.size())]
        self._gloo.allgather([received], copies).wait()
        return received

    def _run(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        compute: Compute,
        opts: Any,
    ) -> dist.Work:
        """Launch a collective. `compute` makes the outputs' values of copies of the inputs, on the
        CPU."""
        if self.with_gloo and inputs[0].is_cpu:
            for output, value in zip(outputs, compute([x.clone() for x in inputs]), strict=True):
                output.copy_(value)
            return self._work(list(outputs))
        for tensor in (*inputs, *outputs):
            if tensor.device.type != DEVICE.type:
                raise RuntimeError(
                    f"No backend type associated with device type {tensor.device.type}"
                )
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        core.forbidden_in_a_capture("a message is sent")  # by us: NCCL would take it
        uneven = name == "alltoall"
        self.launched.append(
            Launched(name, 0 if uneven else sum(x.numel() for x in inputs), inputs[0].dtype)
        )
        self._require_the_same(self.launched[-1])
        values = compute([core.host_alias(x).clone() for x in inputs])
        # Without `async_op` NCCL runs a collective on the stream of its caller.
        asynchronous = getattr(opts, "asyncOp", True)
        at = self.stream if asynchronous else core.current_stream()
        core.wait_for(at, core.current_stream())
        for tensor in inputs:
            core.touch(tensor, False, at, name)
        for tensor in outputs:
            core.touch(tensor, True, at, name)
        core.send(name, at, list(inputs), list(outputs), [x.contiguous() for x in values])
        with stream(at):
            return self._work(list(outputs))

    def _require_the_same(self, launched: Launched) -> None:
        if getattr(_inside, "callback", False):
            raise RuntimeError(
                f"{launched} is launched from a callback: other ranks may launch something else first"
            )
        everyones = self._from_everyone(
            [torch.tensor([crc32(repr(launched).encode())], device="cpu")]
        )
        if len({int(x) for x in everyones}) > 1:
            raise RuntimeError(
                f"rank {self.rank()} launches {launched} while another launches something else"
            )

    @staticmethod
    def _work(result: list[Tensor]) -> dist.Work:
        future: Future[list[Tensor]] = Future(devices=[DEVICE])
        future.set_result(result)
        return _create_work_from_future(future)


dist.Backend.register_backend(BACKEND, EmulatedNCCL, devices=[DEVICE.type])
