"""CUDA graphs without a GPU: a step's operations are recorded and made again on the same memory, as
a graph does, while the host stands still."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.dry import on_a_device
from gradwire import Algorithm, AllReduce, LocalSGD, PowerSGD, WireDtype
from gradwire.core.algorithm import State
from gradwire.core.protocol import mean
from gradwire.torch_backend import PeriodicModelAverager, ZeroOptimizer, local_sgd
from gradwire.torch_backend.engine import cuda_graphs
from tests.parity.given import GivenGradients
from tests.torch.compare import same_bits
from tests.torch.training import hooked, paralleled, sgd

pytestmark = pytest.mark.usefixtures("alone")

SHAPES = {"w": (40, 30), "b": (40,), "again": (40, 30), "wide": (24, 48), "conv": (16, 8, 3, 3)}


class Graph(TorchDispatchMode):
    """Runs operations and keeps them, with the memory they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, result in self._operations:
                again = func(*args, **kwargs)
                for x, y in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(x, Tensor) and x.data_ptr() != y.data_ptr():
                        x.copy_(y)  # a graph's results lie where they lay


under_ddp = partial(hooked, cap=0.002, message_bytes=0, gradient_as_bucket_view=True)
under_data_parallel = partial(paralleled, cap=0.002, message_bytes=0)


class Stepped:
    """A wrapper that takes the branch for devices, its handle, and gradients that lie where they
    lie."""

    def __init__(self, algorithm: Algorithm, wrap: Any = under_ddp) -> None:
        self.model = GivenGradients({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        with on_a_device():
            self.wrapped, self.handle = wrap(self.model, algorithm)
        self.gradients = {name: torch.zeros(shape) for name, shape in SHAPES.items()}

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for x in self.gradients.values():
            x.normal_(generator=generator)

    def step(self) -> None:
        self.model.zero_grad(set_to_none=False)
        self.wrapped(self.gradients).backward()

    def found(self) -> dict[str, Tensor]:
        memory = self.handle.rank_state_dict()["tensors"]
        flat = {f"{name}/{key}": x for name, m in memory.items() for key, x in m.items()}
        return flat | {name: p.grad.clone() for name, p in self.model.named_parameters()}


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Say whether a graph is being captured."""
    monkeypatch.setattr("gradwire.torch_backend.engine.driver.capturable", lambda device: True)

    def say(now: bool) -> None:
        monkeypatch.setattr(cuda_graphs, "capturing", lambda: now)
        monkeypatch.setattr("gradwire.torch_backend.engine.step.capturing", lambda: now)

    return say


class Replacing(AllReduce):
    """A plain algorithm that returns memory of its own making."""

    def __repr__(self) -> str:
        return "Replacing()"

    def init(self, ops: Any, specs: Any) -> Any:
        return State({}, {n: {"sum": ops.zeros(s.shape, s.dtype)} for n, s in specs.items()})

    async def step(self, ops: Any, gradients: Any, state: Any, step: Any) -> Any:
        new = {n: {"sum": state.tensors[n]["sum"] + await mean(g)} for n, g in gradients.items()}
        return {n: m["sum"] * 0.5 for n, m in new.items()}, State({}, new)


REPLAYED = {
    "DataParallel, AllReduce": (AllReduce(), under_data_parallel),
    "DataParallel, PowerSGD": (PowerSGD(4), under_data_parallel),
    "a dense start": (PowerSGD(2, start_step=1), under_ddp),
    "no error": (PowerSGD(2, error_feedback=False), under_ddp),
    "square": (PowerSGD(2, square=True), under_ddp),
    "bfloat16": (WireDtype(PowerSGD(4), "bfloat16"), under_ddp),
    "of its own making": (Replacing(), under_ddp),
}


@pytest.mark.parametrize("name", REPLAYED)
def test_a_replay_is_a_step(name: str, capturing: Callable[[bool], None]) -> None:
    replayed, eager = both = Stepped(*REPLAYED[name]), Stepped(*REPLAYED[name])

    def fill(seed: int, wide: float | None = None) -> None:
        for each in both:
            each.fill(seed)
            if wide is not None:
                each.gradients["wide"][3, 5] = wide

    for seed in range(3):  # buckets are rebuilt after the first
        fill(seed)
        for each in both:
            each.step()
    fill(3)
    capturing(True)
    with Graph() as graph:  # which runs as well, unlike a real capture
        replayed.step()
    capturing(False)
    eager.step()
    for seed in range(4, 8):
        fill(seed, float("inf") if seed == 5 else None)  # which no memory takes in
        graph.replay()
        eager.step()
        torch.testing.assert_close(
            replayed.found(), eager.found(), rtol=0, atol=0, equal_nan=True, msg=f"{seed}"
        )
    assert replayed.handle.stats().skipped_steps == eager.handle.stats().skipped_steps
    fill(8)  # and steps that are not replayed go on from there
    for each in both:
        each.step()
    torch.testing.assert_close(replayed.found(), eager.found(), rtol=0, atol=0)


def test_a_replay_works_in_memory_of_its_own(capturing: Callable[[bool], None]) -> None:
    """Memory of a graph outlives what steps in between ask for."""
    stepped = Stepped(PowerSGD(4))
    stepped.step()
    before = stepped.handle._driver.collectives.scratch
    capturing(True)
    stepped.step()
    assert stepped.handle._driver.collectives.scratch is not before


class ByParity(Replacing):
    async def step(self, ops: Any, gradients: Any, state: Any, step: Any) -> Any:
        averages, state = await super().step(ops, gradients, state, step)
        return (averages if step % 2 else {n: x * 2.0 for n, x in averages.items()}), state


REFUSED = [
    (PowerSGD(2, warm_start=False), 2, "warm_start=False"),
    (WireDtype(PowerSGD(2, warm_start=False), "bfloat16"), 2, "warm_start=False"),
    (PowerSGD(2, half_step=True), 2, "half_step=True"),
    (PowerSGD(2, start_step=4), 3, "start_step=4"),
    (PowerSGD(2, start_step=4), 4, "take at least 5 steps"),
    (PowerSGD(2), 0, "take at least 1 steps"),
    (ByParity(), 1, r"Replacing\(\) does something else in each step"),
]


@pytest.mark.parametrize(("algorithm", "steps", "message"), REFUSED, ids=repr)
def test_what_rests_on_the_host_is_refused(
    algorithm: Algorithm, steps: int, message: str, capturing: Callable[[bool], None]
) -> None:
    stepped = Stepped(algorithm, under_data_parallel)
    for _ in range(steps):
        stepped.step()
    before = stepped.handle.rank_state_dict()
    capturing(True)
    with pytest.raises(RuntimeError, match=message):
        stepped.step()
    capturing(False)
    assert same_bits(stepped.handle.rank_state_dict(), before)
    stepped.step()


@pytest.mark.parametrize("option", ["grad_scaler", "find_unused_parameters"])
def test_options_that_rest_on_the_host_are_refused(option: str, capturing: Any) -> None:
    options = {option: torch.amp.GradScaler("cpu") if option == "grad_scaler" else True}
    ddp, _ = hooked(nn.Linear(30, 40), PowerSGD(2), **options)
    for now in (False, True):
        capturing(now)
        with pytest.raises(RuntimeError, match=f"{option}=") if now else nullcontext():
            ddp(torch.randn(4, 30)).square().sum().backward()


def test_schedules_and_sharded_optimizers_are_refused(capturing: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer, averager = sgd(model), PeriodicModelAverager(period=2)
    local_sgd(model, optimizer, LocalSGD(period=2))
    zero = ZeroOptimizer(nn.Linear(4, 4).named_parameters(), torch.optim.SGD, lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    capturing(True)
    for call, named in (
        (optimizer.step, r"LocalSGD\(.*cannot be captured in a CUDA graph"),
        (lambda: averager.average_parameters(list(model.parameters())), "PeriodicModelAverager"),
        (zero.step, "sharded optimizer"),
    ):
        with pytest.raises(RuntimeError, match=named):
            call()


class Cuda:
    """What torch does with pools of memory when captures begin and end, and what CUDA does when one
    has been broken (`aten/src/ATen/cuda/CUDAGraph.cpp`, `c10/cuda/CUDACachingAllocator.cpp`)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.underway: list[tuple[int, Any]] = []
        self.users: dict[Any, int] = {}
        self.device, self.broken, self.pools = 0, False, iter(range(1, 100))
        cuda = self

        class Captures:
            ended = False

            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                if cuda.users.get(pool) == 0:
                    raise RuntimeError("INTERNAL ASSERT FAILED: use_count > 0")
                assert capture_error_mode == "thread_local"
                self.place = cuda.device, pool
                cuda.underway.append(self.place)
                cuda.users[pool] = cuda.users.get(pool, 0) + 1

            def capture_end(self) -> None:
                if cuda.broken:
                    cuda.broken = False
                    raise RuntimeError("operation failed due to a previous error during capture")
                cuda.underway.remove(self.place)
                self.ended = True

            def __del__(self) -> None:
                if self.ended:
                    cuda.users[self.place[1]] -= 1

        def end(device: int, pool: Any) -> None:
            if (device, pool) not in self.underway:
                raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
            self.underway.remove((device, pool))

        def release(device: int, pool: Any) -> None:
            self.users[pool] -= 1

        @contextmanager
        def on(stream: int) -> Iterator[None]:
            before, self.device = self.device, stream
            try:
                yield
            finally:
                self.device = before

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Captures)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: device.index)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(self.pools)))
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: self.segments)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)

    @property
    def segments(self) -> list[dict[str, Any]]:
        return [{"segment_pool_id": pool, "total_size": 1000 * n} for pool, n in self.users.items()]


@pytest.mark.parametrize("index", [0, 1])
def test_captures_leave_the_allocator_of_their_device_as_it_was(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture that waits for the device, one that fails on the host, and one of a pool whose
    graphs are all gone."""
    cuda = Cuda(monkeypatch)
    graphs = cuda_graphs.CudaGraphs(torch.device("cuda", index))

    def failing(*, broken: bool) -> None:
        with graphs.capture():
            assert cuda.underway[0][0] == index
            cuda.broken = broken
            raise ValueError("told")

    def fails(*, broken: bool) -> None:
        with pytest.raises(ValueError, match="told"):
            failing(broken=broken)
        gc.collect()

    assert graphs.nbytes == 0
    for broken in (True, False):
        fails(broken=broken)
        assert (cuda.underway, sum(cuda.users.values())) == ([], 0)
    kept = []
    for _ in range(2):
        with graphs.capture() as graph:
            kept.append(graph)
    fails(broken=True)
    assert (cuda.underway, sum(cuda.users.values()), graphs.nbytes) == ([], 2, 2000)
    with pytest.raises(RuntimeError, match="previous error"), graphs.capture():
        cuda.broken = True
    del graph
    kept.clear()
    gc.collect()
    with graphs.capture():
        pass
    assert (cuda.underway, cuda.device) == ([], 0)
