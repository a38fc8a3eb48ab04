"""How many kernels and messages a step takes on a device, and what the host waits for: ceilings,
counted without a device; and the counter."""

import time

import pytest
import torch
import torch.distributed as dist

import gradwire
from benchmarks.dry import Kernels, PretendedGroup, Step, gradwire_step, on_a_device
from benchmarks.shapes import elements, gpt
from gradwire import (
    AllReduce,
    LocalSGD,
    PowerSGD,
    Quantize,
    Sign,
    Spec,
    TopK,
    TwoLevel,
    Weighted,
    WireDtype,
    diloco,
)
from gradwire.core.advise.probe import Level, Probe
from gradwire.core.algorithms.shared.weighing import Weighing
from gradwire.torch_backend.advise.method_cost import message_groups, method_cost
from gradwire.torch_backend.advise.step_time import step_compute
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.ops.workspace import Scratch

GPT_125M = gpt(12, 768, 50_257, 1024)
GPT_1_3B = gpt(24, 2048, 50_257, 2048)


def made(shapes, algorithm, cap_mib=25.0, *, fused=False, **options) -> Step:
    """A step in which everything is warm."""
    with on_a_device(fused=fused):
        step = gradwire_step(shapes, algorithm, cap_mib, **options)
    for _ in range(2):
        with Kernels():
            step.run()
    return step


def counted(step: Step) -> tuple[int, int, int]:
    """Kernels, all-reduces, waits of the host."""
    before = step.all_reduces
    with Kernels() as seen:
        step.run()
    return seen.kernels, step.all_reduces - before, seen.waits


#: Of GPT-125M, whose buckets of 25 MiB are 13: with the kernels in Triton, or without; kernels,
#: all-reduces, and bytes that are read and written for each element. An H100 launched 575 kernels
#: at rank 4 and 1,132 at rank 32, with Triton.
STEPS = {
    "rank 4": (PowerSGD(4), False, 660, 2, 4 * 11.3),
    "rank 4, Triton": (PowerSGD(4), True, 33, 2, 4 * 8.3),
    "rank 32, Triton": (PowerSGD(32), True, 68, 8, 37),
    "rank 32": (PowerSGD(32), False, 800, 8, 53),
    "int8": (WireDtype(AllReduce(), "int8"), False, 430, 0, 52),
    "int8, Triton": (WireDtype(AllReduce(), "int8"), True, 134, 0, 18),
    "quantize": (Quantize("int8"), False, 600, 0, 106),
    "quantize, Triton": (Quantize("int8"), True, 150, 0, 41),
    "top k": (TopK(64), False, 650, 0, 175),
    "top k, Triton": (TopK(64), True, 291, 0, 165),
    "sign, Triton": (Sign(), True, 156, 0, 72),
}


@pytest.mark.parametrize(
    ("algorithm", "fused", "ceiling", "messages", "nbytes"), STEPS.values(), ids=STEPS
)
def test_a_step_of_a_gpt_with_the_buckets_of_ddp(
    algorithm, fused, ceiling, messages, nbytes
) -> None:
    step = made(GPT_125M, algorithm, fused=fused)
    before = step.all_reduces
    with Kernels() as seen:
        step.run()
    assert seen.kernels <= ceiling
    assert step.all_reduces - before == messages
    assert seen.nbytes <= nbytes * elements(GPT_125M)
    assert seen.waits == 0


@pytest.mark.parametrize(
    ("dtype", "ceiling", "messages"), [(torch.float32, 266, 50), (torch.bfloat16, 168, 26)]
)
def test_rows_of_a_large_model_are_made_orthonormal_in_four_batches(
    dtype, ceiling, messages
) -> None:
    """Of its memory when the first group begins; and of what has arrived in three, one of which
    travels while the next computes. With Triton, at rank 32."""
    step = made(GPT_1_3B, PowerSGD(32), fused=True, dtype=dtype)
    before = step.all_reduces
    with Kernels() as seen:
        step.run()
    assert seen.by_name["grams"] == seen.by_name["second_products"] == 4
    assert seen.kernels <= ceiling
    assert step.all_reduces - before == messages


#: Of all kinds of method: what many replicas send is unpacked and added up at once.
AT_SCALE = [PowerSGD(4), TopK(16), TopK(16, bits=2), Sign(), Quantize("int8"), Quantize("int4")]
AT_SCALE += [
    WireDtype(inner, dtype)
    for inner, dtype in ((AllReduce(), "int8"), (PowerSGD(4), "int8"), (AllReduce(), "bfloat16"))
]


#: And by weight, and in nodes, where nothing is done tensor by tensor but what the method does.
BY_WEIGHT = [Weighted(each) for each in AT_SCALE]
IN_NODES = [TwoLevel(each, within=4) for each in (PowerSGD(4), Sign())]


@pytest.mark.parametrize("algorithm", [*AT_SCALE, *BY_WEIGHT, *IN_NODES], ids=repr)
def test_what_the_host_dispatches_does_not_grow_with_replicas(algorithm, monkeypatch) -> None:
    """Of 40 small tensors on the CPU, 60 operations and 25 a tensor; and, on a device with Triton,
    60 launches and 5 a tensor, in nodes none. By weight, 80 more."""
    monkeypatch.setattr(Weighing, "_counted", lambda self, total: True)  # nothing is computed
    shapes = {str(i): (64, 64) if i % 2 else (64,) for i in range(40)}
    constant = 140 if algorithm in BY_WEIGHT else 60
    for replicas in (8, 64) if algorithm in BY_WEIGHT else (8, 64, 512):
        step = gradwire_step(shapes, algorithm, replicas=replicas)
        for _ in range(2):
            with Kernels():
                step.run()
        with Kernels() as seen:
            step.run()
        assert seen.operations <= constant + 25 * len(shapes), replicas
        with on_a_device(fused=True):
            step = gradwire_step(shapes, algorithm, replicas=replicas)
        with Kernels():
            step.run()
        each = 0 if algorithm in IN_NODES else 5
        assert counted(step)[0] <= constant + each * len(shapes), replicas


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", AT_SCALE, ids=repr)
def test_4096_replicas_take_not_an_operation_more_than_512(algorithm) -> None:
    shapes, found = {str(i): (64, 64) if i % 2 else (64,) for i in range(40)}, []
    for replicas in (512, 4096):
        step = gradwire_step(shapes, algorithm, replicas=replicas)
        for _ in range(3):
            with Kernels() as seen:
                step.run()
        found.append(seen.operations)
    assert found[1] <= found[0], found
    assert found[1] <= 60 + 25 * len(shapes), found


def test_what_is_in_float64_lies_in_memory_that_p_and_q_share() -> None:
    ops, scratch = TorchOps(torch.device("cpu")), Scratch()
    ops.host_knows = False
    generator = torch.Generator().manual_seed(0)
    factors, taken = [], set()
    with ops.scratch(scratch):
        for n in (4096, 512):
            rows = torch.randn(4, n, generator=generator)
            factors.append(ops.orthonormalize_each([rows], [], 0.0)[0])
            taken.add(scratch.brief._bytes.numel())
    assert taken == {2 * 4 * 4096 * 8}  # the rows, and what the first pass makes of them
    assert not any(dtype == torch.float64 for dtype, _ in scratch._pools)
    for found in factors:  # which do not lie in it
        torch.testing.assert_close(found @ found.mT, torch.eye(4), rtol=0, atol=3e-5)


def test_the_number_of_kernels_does_not_grow_with_the_rank() -> None:
    """And clipping is a handful of kernels, however many tensors there are."""
    shapes = gpt(2, 768, 10_000, 1024)
    methods = PowerSGD(2), PowerSGD(16), PowerSGD(2, max_norm=1.0)
    two, many, clipped = (
        counted(made(shapes, method, 100_000.0, message_bytes=1 << 40)) for method in methods
    )
    assert two[0] == many[0]
    assert clipped[0] - two[0] < 20 < len(shapes)
    assert clipped[2] == 0


@pytest.mark.parametrize("algorithm", [PowerSGD(4), PowerSGD(4, half_step=True)])
def test_a_pass_that_is_discarded_lets_the_host_wait_for_nothing_more(algorithm) -> None:
    gradients = {name: torch.zeros(shape) for name, shape in gpt(4, 64, 500, 32).items()}
    with on_a_device():
        driver = Driver(algorithm, specs_of(gradients), torch.device("cpu"), PretendedGroup())
    scalars, waits = dict(driver.memory.state.shared), []
    for driver.discarding in (False, False, False, True, True):
        with Kernels() as seen:
            driver.add(gradients, first=True, last=True)
        waits.append(seen.waits)
    assert waits[4] == waits[2]
    # the very ones that are foreseen
    assert all(driver.memory.state.shared[key] is x for key, x in scalars.items())


@pytest.mark.parametrize(
    ("device", "start_step", "worth"),
    [("cpu", 0, 1 << 20), ("cuda", 0, 4 << 20), ("cuda", 1, 1 << 20)],
)
def test_messages_are_larger_where_kernels_count(device, start_step, worth) -> None:
    """But not while steps are dense: to share a message, buckets would have to be copied."""
    algorithm, specs = PowerSGD(1, start_step=start_step), {"w": Spec((512, 512), "float32")}
    driver = Driver(algorithm, specs, torch.device("cpu"), PretendedGroup())
    driver.ops.device = torch.device(device)
    assert driver._worth_a_message() == worth


@pytest.mark.parametrize("read", [lambda x: x.item(), bool, lambda x: torch.equal(x, x)])
def test_a_number_that_the_host_reads_is_a_wait(read) -> None:
    with Kernels() as seen:
        read(torch.ones(()))
    assert seen.waits == 1


def test_the_counter_counts_operations_and_nothing_else() -> None:
    x, y, out = torch.ones(4, 6), torch.ones(6, 4), torch.zeros(4, 6)
    with Kernels(compute=True) as seen:
        z = x.view(-1)[3:].as_strided((2, 2), (2, 1)).mT.unsqueeze(0).expand(3, 2, 2).detach()
        torch.empty_like(x).data_ptr()
        assert not z.is_set_to(x)
        assert z.is_contiguous() is False
    assert seen.kernels == 0 == seen.waits
    with Kernels(compute=True) as seen:
        torch._foreach_add_([x, x], [x, x])
        torch.matmul(x, y)
        x.copy_(x + 1)
        torch.cat([x.reshape(-1), y.reshape(-1)])
    assert dict(seen.by_name) == {"_foreach_add_": 1, "mm": 1, "add": 1, "copy_": 1, "cat": 1}
    before = x.clone()
    with Kernels():  # which computes nothing
        assert x.mul_(2) is x
        assert torch.add(x, x, out=out) is out
    assert torch.equal(x, before)
    assert not out.any()


#: What is called → kernels that an H100 launched for it.
SEVERAL = {
    "a long sum, divided": (lambda: torch.ones(4, 4096) @ torch.ones(4096, 64), 2),
    "a short one": (lambda: torch.ones(4, 64) @ torch.ones(64, 4096), 1),
    "cat": (lambda: torch.cat([torch.ones(2)] * 50), 1),
    "cat of more than a launch takes": (lambda: torch.cat([torch.ones(2)] * 146), 2),
    "cat into another dtype": (
        lambda: torch.cat([torch.ones(2)] * 12, out=torch.zeros(24, dtype=torch.float64)),
        12,
    ),
    "_foreach_add_ of 124 million elements": (
        lambda: torch._foreach_add_([big := torch.empty(50, 2_480_000)[0]] * 50, [big] * 50),
        6,
    ),
    "_foreach_copy_ of 96 vectors": (
        lambda: torch._foreach_copy_([torch.ones(3)] * 96, [torch.zeros(3)] * 96),
        2,
    ),
    "_foreach_mul of mixed dtypes": (
        lambda: torch._foreach_mul([torch.ones(2), torch.ones(2, dtype=torch.float64)], 2.0),
        2,
    ),
    "a Cholesky factor": (lambda: torch.linalg.cholesky_ex(torch.eye(4)), 6),
    "a larger one": (lambda: torch.linalg.cholesky_ex(torch.eye(32)), 9),
    "a triangle solved": (
        lambda: torch.linalg.solve_triangular(torch.eye(4), torch.eye(4), upper=False),
        4,
    ),
}


@pytest.mark.parametrize(("call", "kernels"), SEVERAL.values(), ids=SEVERAL)
def test_an_operation_counts_as_the_kernels_that_a_gpu_launches_for_it(call, kernels) -> None:
    with Kernels() as made_first:
        call()
    made = {
        name: n for name, n in made_first.by_name.items() if name not in ("ones", "zeros", "eye")
    }
    assert sum(made.values()) == kernels


def test_numbers_are_made_once_unless_they_take_much_memory() -> None:
    """By the branch for a device. Constants of whole steps: tests/emulated/test_ways.py."""
    ops = TorchOps(torch.device("cpu"))
    ops.host_knows = False
    assert ops.numbers(8, torch.int64) is ops.numbers(8, torch.int64)
    assert len(ops.numbers(1 << 20, torch.int64)) == 1 << 20
    assert not any(kept.numel() > 1 << 16 for kept in ops._constants.values())


# --- what a method costs on one device: its own program and the messages of its plan, with nobody
# at the other end ---

SPECS = {"a": Spec((96, 64)), "b": Spec((64,)), "c": Spec((64, 96)), "d": Spec((32, 8, 3, 3))}
REPLICAS = 4
METHODS = [
    AllReduce(),
    PowerSGD(2, start_step=10),
    PowerSGD(2, half_step=True),
    WireDtype(AllReduce(), "int8"),
    TopK(64, per=(32, 32)),
    Sign(),
    TwoLevel(PowerSGD(2), 2),
    diloco(4, compressor=PowerSGD(2)),
    diloco(4, fragments=2),
]


@pytest.mark.parametrize("algorithm", METHODS, ids=repr)
def test_a_method_is_measured(algorithm):
    assert not dist.is_initialized()
    cost = method_cost(algorithm, SPECS, REPLICAS, torch.device("cpu"))
    assert len(cost.steps) == (1 if isinstance(algorithm, LocalSGD) else algorithm.cycle)
    assert all(group.compute > 0 for step in cost.steps for group in step)
    assert cost.messages


def test_gradients_are_averaged_in_the_groups_of_the_hook():
    specs = {str(i): Spec((512, 512)) for i in range(60)}  # 1 MiB each
    cpu = torch.device("cpu")
    assert [len(names) for names in message_groups(AllReduce(), specs, 2, cpu)] == [1, 25, 25, 9]
    assert [len(names) for names in message_groups(PowerSGD(4), specs, 2, cpu)] == [60]
    # Of a model of several groups, in some of which a pattern matches nothing.
    assert method_cost(PowerSGD({"0": 4, "*": 0}), specs, 2, cpu).compute > 0
    cost = method_cost(AllReduce(), specs, 2, cpu)
    assert [group.ready >> 20 for group in cost.steps[0]] == [1, 26, 51, 60]
    assert [group.messages[0].nbytes >> 20 for group in cost.steps[0]] == [1, 25, 25, 9]


def test_what_imagined_replicas_cost_is_not_counted(monkeypatch):
    copied = torch.Tensor.copy_

    def slow(self, *args, **options):
        time.sleep(0.02 * (self.dtype == torch.uint8))
        return copied(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", slow)
    assert method_cost(Sign(), {"a": Spec((8, 8))}, 40, torch.device("cpu")).compute < 0.02 * 39


@pytest.mark.parametrize("passes", [1, 3])
def test_when_gradients_are_ready_is_seen(passes):
    """Of several backward passes in the last."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4))
    model[0].bias.requires_grad_(False)
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), []

    def train_step():
        steps.append(0)
        optimizer.zero_grad()
        for _ in range(passes):
            model(torch.ones(4, 16)).sum().backward()
        optimizer.step()

    compute = step_compute(train_step)
    times, made = zip(*compute.arrivals, strict=True)
    last = 4 * (32 * 4 + 4)
    assert made[-1] == last + 4 * 16 * 32
    assert len(made) == 3
    assert made[1] <= last + 4 * 16 * 32
    assert list(times) == sorted(times)
    assert 0 < times[-1] < compute.seconds
    before = len(steps)
    train_step()
    assert len(steps) == before + 1
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_an_advice_has_the_threads_of_the_probe():
    """One of each rank that `torchrun` has started, though here may be more."""
    samples, seen = ((1 << 20, 1e-3),), []
    level = Level("all", 2, samples, samples, 1.0)
    probe = Probe("torch", "cpu, 1 thread each", 2, 1, (level,), threads=1)

    def train_step():
        seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        gradwire.advise(torch.nn.Linear(8, 8), probe, train_step, algorithms=[Sign()])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
