"""CUDA graphs without a GPU: a step's operations are recorded and made again on the same memory, as a graph does, while the host stands still."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.dry import on_a_device
from gradwire import Algorithm, AllReduce, LocalSGD, PowerSGD, WireDtype
from gradwire.core.algorithm import State
from gradwire.core.protocol import mean
from gradwire.torch_backend import DataParallel, PeriodicModelAverager, ZeroOptimizer, local_sgd
from gradwire.torch_backend.engine import cuda_graphs
from gradwire.torch_backend.engine.driver import Driver, specs_of
from tests.torch.training import hooked, sgd

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


class Driven:
    """A driver that takes the branch for devices, with gradients in two calls, as two buckets bring them."""

    def __init__(self, algorithm: Algorithm) -> None:
        parameters = {name: torch.empty(shape) for name, shape in SHAPES.items()}
        with on_a_device():
            self.driver = Driver(
                algorithm, specs_of(parameters), torch.device("cpu"), dist.group.WORLD, message_bytes=0
            )
        self.gradients = {name: torch.zeros(shape) for name, shape in SHAPES.items()}

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for x in self.gradients.values():
            x.normal_(generator=generator)

    def step(self) -> None:
        names = list(self.gradients)
        for half in (names[:2], names[2:]):
            self.driver.add({n: self.gradients[n] for n in half}, first=half == names[:2], last=half == names[2:])

    def found(self) -> dict[str, Tensor]:
        memory = self.driver.memory.own()["tensors"]
        flat = {f"{name}/{key}": x for name, m in memory.items() for key, x in m.items()}
        return flat | {name: x.clone() for name, x in self.gradients.items()}


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Say whether a graph is being captured."""

    def say(now: bool) -> None:
        monkeypatch.setattr(cuda_graphs, "capturing", lambda: now)
        monkeypatch.setattr("gradwire.torch_backend.engine.driver.capturing", lambda: now)

    return say


class Replacing:
    """A plain algorithm that returns memory of its own making."""

    per_replica = frozenset[str]()
    start_step = 0
    cycle = 1

    def __repr__(self) -> str:
        return "Replacing()"

    def init(self, ops: Any, specs: Any) -> Any:
        return State({}, {n: {"sum": ops.zeros(s.shape, s.dtype)} for n, s in specs.items()})

    async def step(self, ops: Any, gradients: Any, state: Any, step: Any) -> Any:
        new = {n: {"sum": state.tensors[n]["sum"] + await mean(g)} for n, g in gradients.items()}
        return {n: m["sum"] * 0.5 for n, m in new.items()}, State({}, new)


@pytest.mark.parametrize(
    "algorithm",
    [
        AllReduce(),
        PowerSGD(1),
        PowerSGD(4),
        PowerSGD(2, start_step=1),
        PowerSGD(2, error_feedback=False),
        PowerSGD(2, square=True),
        WireDtype(PowerSGD(4), "bfloat16"),
        Replacing(),
    ],
    ids=repr,
)
def test_a_replay_is_a_step(algorithm: Algorithm, capturing: Callable[[bool], None]) -> None:
    replayed, eager = both = Driven(algorithm), Driven(algorithm)

    def fill(seed: int, wide: float | None = None) -> None:
        for each in both:
            each.fill(seed)
            if wide is not None:
                each.gradients["wide"][3, 5] = wide

    for seed in range(2):
        fill(seed)
        for each in both:
            each.step()
    fill(2)
    capturing(True)
    with Graph() as graph:
        replayed.step()
    capturing(False)
    eager.step()
    for seed in range(3, 7):
        fill(seed, float("inf") if seed == 4 else None)  # which no memory takes in
        graph.replay()
        eager.step()
        torch.testing.assert_close(replayed.found(), eager.found(), rtol=0, atol=0, equal_nan=True, msg=f"{seed}")
    assert replayed.driver.stats().skipped_steps == eager.driver.stats().skipped_steps
    fill(7)  # and steps that are not replayed go on from there
    for each in both:
        each.step()
    torch.testing.assert_close(replayed.found(), eager.found(), rtol=0, atol=0)


class Training:
    """A model under a wrapper, and whole steps of it: forward, backward, optimizer."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 24))
        with on_a_device():
            self.wrapped = wrap(self.model)
        self.optimizer = sgd(self.model)
        self.x = torch.zeros(16, 30)

    def step(self, x: Tensor) -> None:
        self.x.copy_(x)
        self.optimizer.zero_grad(set_to_none=False)
        self.wrapped(self.x).square().mean().backward()
        self.optimizer.step()


def under_ddp(model: nn.Module) -> nn.Module:
    return hooked(model, PowerSGD(2), cap=0.002, gradient_as_bucket_view=True)[0]


def under_data_parallel(model: nn.Module) -> nn.Module:
    return DataParallel(model, PowerSGD(2), bucket_cap_mb=0.002, first_bucket_mb=0.002)


@pytest.mark.parametrize("wrap", [under_ddp, under_data_parallel])
def test_a_replay_of_a_whole_step_trains(wrap: Any, capturing: Callable[[bool], None]) -> None:
    replayed, eager = Training(wrap), Training(wrap)
    inputs = torch.randn(8, 16, 30)
    for x in inputs[:3]:
        for each in (replayed, eager):
            each.step(x)
    replayed.x.copy_(inputs[3])
    capturing(True)
    with Graph() as graph:  # which runs as well, unlike a real capture
        replayed.step(replayed.x)
    capturing(False)
    eager.step(inputs[3])
    start = [p.detach().clone() for p in eager.model.parameters()]
    for x in inputs[4:]:
        replayed.x.copy_(x)
        graph.replay()
        eager.step(x)
    for before, p, q in zip(start, eager.model.parameters(), replayed.model.parameters(), strict=True):
        assert not torch.equal(before, p)
        assert torch.equal(p, q)


def test_a_replay_works_in_memory_of_its_own(capturing: Callable[[bool], None]) -> None:
    """Memory of a graph outlives what steps in between ask for."""
    driven = Driven(PowerSGD(4))
    driven.step()
    before = driven.driver.collectives.scratch
    capturing(True)
    driven.step()
    assert driven.driver.collectives.scratch is not before


class ByParity(Replacing):
    async def step(self, ops: Any, gradients: Any, state: Any, step: Any) -> Any:
        averages, state = await super().step(ops, gradients, state, step)
        return (averages if step % 2 else {n: x * 2.0 for n, x in averages.items()}), state


@pytest.mark.parametrize(
    ("algorithm", "steps", "message"),
    [
        (PowerSGD(2, warm_start=False), 2, "warm_start=False"),
        (WireDtype(PowerSGD(2, warm_start=False), "bfloat16"), 2, "warm_start=False"),
        (PowerSGD(2, half_step=True), 2, "half_step=True"),
        (PowerSGD(2, start_step=4), 3, "start_step=4"),
        (PowerSGD(2, start_step=4), 4, "take at least 5 steps"),
        (PowerSGD(2), 0, "take at least 1 steps"),
        (ByParity(), 1, r"Replacing\(\) does something else in each step"),
    ],
    ids=repr,
)
def test_what_rests_on_the_host_is_refused(
    algorithm: Algorithm, steps: int, message: str, capturing: Callable[[bool], None]
) -> None:
    driven = Driven(algorithm)
    for _ in range(steps):
        driven.step()
    before = driven.found()
    capturing(True)
    with pytest.raises(RuntimeError, match=message):
        driven.step()
    capturing(False)
    torch.testing.assert_close(driven.found(), before, rtol=0, atol=0)
    driven.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, "grad_scaler="),
        ({"find_unused_parameters": True}, "find_unused_parameters=True"),
        ({}, None),
    ],
)
def test_under_ddp(options: Any, message: str | None, capturing: Any) -> None:
    ddp, handle = hooked(nn.Linear(30, 40), PowerSGD(2), **options)

    def backward() -> None:
        ddp(torch.randn(4, 30)).square().sum().backward()

    backward()
    backward()
    capturing(True)
    with nullcontext() if message is None else pytest.raises(RuntimeError, match=message):
        backward()
    assert message or handle.stats().steps == 3


def test_the_first_pass_of_data_parallel_is_refused(capturing: Any) -> None:
    module = DataParallel(nn.Linear(30, 40), PowerSGD(2))
    capturing(True)
    with pytest.raises(RuntimeError, match="take at least 1 steps"):
        module(torch.randn(4, 30)).square().sum().backward()


def test_schedules_and_sharded_optimizers_are_refused(capturing: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = sgd(model)
    local_sgd(model, optimizer, LocalSGD(period=2))
    model(torch.randn(2, 4)).sum().backward()
    capturing(True)
    with pytest.raises(RuntimeError, match=r"LocalSGD\(.*cannot be captured in a CUDA graph"):
        optimizer.step()
    averager = PeriodicModelAverager(period=2)
    with pytest.raises(RuntimeError, match="PeriodicModelAverager"):
        averager.average_parameters(list(model.parameters()))
    capturing(False)
    zero = ZeroOptimizer(nn.Linear(4, 4).named_parameters(), torch.optim.SGD, lr=0.1)
    capturing(True)
    with pytest.raises(RuntimeError, match="sharded optimizer"):
        zero.step()
