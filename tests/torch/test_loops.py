"""What numba compiles for processors: against NumPy in float64 on hostile input, in steps beside
torch's operations, and where nothing can be compiled."""

import importlib.util
import itertools
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from gradwire import AllReduce, PowerSGD, Quantize, Sign, TopK, WireDtype, diloco
from gradwire import torch_backend as gw
from gradwire.core.codecs import CODECS
from gradwire.core.kernels.payloads import LowRank, Residual
from gradwire.core.ops import Spec
from gradwire.core.simulate import NumpyOps
from gradwire.torch_backend.advise.compare.one_process import World
from gradwire.torch_backend.advise.method_cost import method_cost
from gradwire.torch_backend.cpu import codes, compiled, largest, pool, signs, thin
from gradwire.torch_backend.cpu.sums import Sum, value_of
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.ops.kernels import TorchOps
from tests.launch import LIMIT
from tests.torch.models import mlp
from tests.torch.ranks import Cases

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="numba is not installed"
)
CPU = torch.device("cpu")
THINNED = PowerSGD(2, stacked={"stack": 1})
THIN = [(name, torch.float32) for name in compiled.THIN]
CODES = [(name, torch.float32) for name in compiled.CODES]
SIGNS = [(name, torch.float32) for name in compiled.SIGNS]
LARGEST = [(name, torch.float32) for name in compiled.LARGEST]
cases = Cases(__file__, ranks=2)


@contextmanager
def everything_compiled():
    """Also for models and tensors that are too small to gain by it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "LEAST", 0)
        patch.setattr(compiled, "LARGE", 1)
        patch.setattr(thin, "PER_THREAD", 1)
        yield patch


@pytest.fixture
def ops():
    made = TorchOps(CPU)
    with everything_compiled():
        made.loops = compiled.prepare(THIN + CODES)
        yield made


def numbers(kind, shape, seed=0):
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    if kind == "zeros":
        return x * 0
    if kind == "equal rows":
        return np.broadcast_to(x[:1], shape).copy()
    if kind == "overflow":  # of their sum: then some means are
        return np.sign(x) * np.float32(2e38)
    if kind in ("huge", "denormal"):
        return x * np.float32(1e37 if kind == "huge" else 1e-41)
    if kind == "halves":
        return np.round(4 * x).clip(-16, 16) / 2
    if kind in ("nan", "inf") and x.size:
        x.reshape(-1)[x.size // 2] = float(kind)
    return x


@pytest.mark.parametrize("kind", ["usual", "zeros", "equal rows", "huge", "denormal", "nan", "inf"])
@pytest.mark.parametrize(
    ("n", "m", "r"), [(1, 1, 1), (3, 64, 1), (5, 65, 2), (7, 320, 3), (9, 257, 4), (4, 600, 4)]
)
def test_sums_and_projections_are_those_of_numpy(ops, kind, n, m, r):
    """Each sum to what float32 can hold, and what is not finite where it is not there."""
    x, y, q = numbers(kind, (n, m)), numbers("usual", (n, m), 1), numbers("usual", (r, m), 2)
    total, p = torch.from_numpy(x.copy()), np.zeros((r, n), np.float32)
    found = ops.add_each([total], [torch.from_numpy(y)], multiplied=True)[0]
    assert isinstance(found, Sum)
    assert found.mT.shape == (m, n)
    np.copyto(p, ops.matmul(torch.from_numpy(q), found.mT).numpy())
    np.testing.assert_array_equal(total.numpy(), x + y)
    assert found.value.data_ptr() == total.data_ptr()  # and is not added twice
    np.testing.assert_array_equal(total.numpy(), x + y)
    with np.errstate(invalid="ignore", over="ignore"):
        wide = (x + y).astype(float)
        expected, size = q.astype(float) @ wide.T, np.abs(q).astype(float) @ np.abs(wide).T
    finite = np.isfinite(expected)
    assert (np.isfinite(p) == finite).all() or kind == "huge"  # whose partial sums may overflow
    some = finite & np.isfinite(p)
    assert (np.abs(p[some] - expected[some]) <= 1e-5 * size[some] + 1e-44 * m).all()


@pytest.mark.parametrize("kind", ["usual", "zeros", "equal rows", "huge", "denormal"])
@pytest.mark.parametrize(
    ("shape", "r"), [((1, 1), 1), ((5, 33), 2), ((4, 70), 4), ((6, 5), 5), ((3, 4, 130), 4)]
)
def test_what_is_left_and_received_is_that_of_numpy(ops, kind, shape, r):
    x, stack = numbers(kind, shape), shape[:-2]
    p, q, s, t = (
        numbers("usual", (*stack, r, k), i) for i, k in enumerate([shape[-2], shape[-1]] * 2)
    )
    place, error = torch.from_numpy(x.copy()), torch.zeros(shape)
    sent, received = (
        LowRank(*map(torch.from_numpy, (p, q))),
        LowRank(*map(torch.from_numpy, (s, t))),
    )
    ok = torch.ones((), dtype=torch.bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LowRank, "dense", None)  # it is a loop that does it
        (after,), (dense,) = ops.settle(ok, ok, [Residual(ops, place)], [sent], [error], [received])
    assert (after.data_ptr(), dense.data_ptr()) == (error.data_ptr(), place.data_ptr())
    wide = [each.astype(float) for each in (p, q, s, t)]
    product, size = wide[0].mT @ wide[1], np.abs(wide[0].mT) @ np.abs(wide[1])
    np.testing.assert_array_less(
        np.abs(error.numpy() - (x - product)), 1e-5 * (size + np.abs(x)) + 1e-30
    )
    np.testing.assert_allclose(dense.numpy(), wide[2].mT @ wide[3], rtol=1e-4, atol=1e-4)


def test_a_step_that_is_not_finite_leaves_the_error_alone(ops):
    x, p, q = torch.full((4, 8), torch.inf), torch.ones(2, 4), torch.ones(2, 8)
    error, no = torch.arange(32.0).view(4, 8), torch.zeros((), dtype=torch.bool)
    (after,), (dense,) = ops.settle(
        no, no, [Residual(ops, x)], [LowRank(p, q)], [error], [LowRank(p, q)]
    )
    assert dense.isnan().all()
    assert torch.equal(after, torch.arange(32.0).view(4, 8))


@pytest.mark.parametrize(
    "kind", ["usual", "zeros", "equal rows", "huge", "denormal", "nan", "inf", "halves"]
)
@pytest.mark.parametrize("name", ["int8", "int4", "float8_e4m3fn", "e3m0"])
@pytest.mark.parametrize(("rows", "block"), [(1, 8), (5, 24), (3, 128), (2, 264)])
def test_codes_and_their_means_are_those_of_numpy_bit_for_bit(ops, name, kind, rows, block):
    """Of three replicas. What a code is in a row of NaN is not said, nor which NaN its scale is."""
    reference, codec = NumpyOps(), replace(CODECS[name], block=block)
    each = [numbers(kind if i == 1 else "usual", (rows, block), i) for i in range(3)]
    with np.errstate(invalid="ignore", over="ignore"):
        fields = [codec.encode(reference, x) for x in each]
        expected_alone = codec.decode(reference, *fields[0])
        both = [np.stack(own) for own in zip(*fields, strict=True)]
        mean = reference.decode_mean(codec, *both)
        again, lost = reference.encode_mean(codec, *both, keeps=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(codec), "encode", None)  # it is loops that do it
        patch.setattr(type(codec), "decode", None)
        found = [ops.encode_rows(codec, torch.from_numpy(x)) for x in each]
        given = list(map(torch.from_numpy, both))
        means, alone = (
            ops.decode_mean(codec, *given),
            ops.decode_rows(codec, *(x[0] for x in given)),
        )
        (codes, scales), left = ops.encode_mean(codec, *given, keeps=True)
        (unkept, _), nothing = ops.encode_mean(codec, *given, keeps=False)
    assert nothing is None
    sure = np.isfinite(again[1])[:, 0]
    np.testing.assert_array_equal(means.numpy(), mean)
    np.testing.assert_array_equal(alone.numpy(), expected_alone)
    np.testing.assert_array_equal(scales.numpy(), again[1])
    np.testing.assert_array_equal(codes.numpy()[sure], again[0][sure])
    np.testing.assert_array_equal(unkept.numpy()[sure], again[0][sure])
    np.testing.assert_array_equal(left.numpy()[sure], lost[sure])
    for (own, own_scales), (expected, expected_scales) in zip(found, fields, strict=True):
        np.testing.assert_array_equal(own_scales.numpy(), expected_scales)
        sure = np.isfinite(expected_scales)[:, 0]
        np.testing.assert_array_equal(own.numpy()[sure], expected[sure])


@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_signs_of_replicas_are_added_to_the_same_bits(ops, replicas, monkeypatch):
    """On any number of threads; what fills no block, and numbers of short rows, are torch's."""
    called: list[str] = []
    monkeypatch.setattr(signs, "LEAST", 1)
    monkeypatch.setattr(
        signs, "compiled", lambda *loop: called.append(loop[0]) or compiled.compiled(*loop)
    )
    rng, plain = np.random.default_rng(0), TorchOps(CPU)
    ops.loops = compiled.prepare(SIGNS)
    shapes = [(37, 192), (5, 64), (300,), (3, 67)]
    for sharing in ([(1, 1), (1, 1), (1,), (1, 1)], [(37, 1), (5, 1), (1,), (3, 1)]):
        count = sum(map(np.prod, sharing))
        above, below = (
            torch.from_numpy(rng.normal(size=(replicas, count)).astype(np.float32))
            for _ in range(2)
        )
        each = [
            plain.pack_signs(
                [torch.from_numpy(rng.normal(size=s).astype(np.float32)) for s in shapes], sharing
            )
            for _ in range(replicas)
        ]
        every = [torch.stack(own) for own in zip(*each, strict=True)]
        given = every, [above], [below * -1e30], shapes, sharing
        assert all(map(torch.equal, ops.sum_of_signs(*given), plain.sum_of_signs(*given)))
    assert len(called) == 2  # for each of these, all that fills blocks


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["usual", "zeros", "halves", "huge", "denormal", "nan", "inf"])
@pytest.mark.parametrize(
    ("n", "m", "k"),
    [(1, 1, 1), (3, 64, 64), (5, 65, 2), (7, 4096, 64), (40, 7, 3), (2, 9000, 8999)],
)
def test_the_largest_of_rows_are_those_that_a_stable_sort_puts_first(n, m, k, kind, threads):
    """Of equal ones the first; NaN is as large as inf."""
    x = numbers(kind, (n, m))
    size = np.where(np.isfinite(x), np.abs(x), np.inf)
    expected = np.sort(np.argsort(-size, axis=1, kind="stable")[:, :k], axis=1)
    before = torch.get_num_threads()
    with everything_compiled() as patch:
        patch.setattr(largest, "PER_THREAD", 1)
        torch.set_num_threads(threads)
        try:
            loops = compiled.prepare(LARGEST)
            index, values = largest.largest(loops, torch.from_numpy(x), k)
        finally:
            torch.set_num_threads(before)
    np.testing.assert_array_equal(index.numpy(), expected)
    np.testing.assert_array_equal(values.numpy(), np.take_along_axis(x, expected, axis=1))


def test_any_number_of_threads_comes_to_the_same_bits(ops):
    q, x, y = (
        torch.from_numpy(numbers("usual", shape, i))
        for i, shape in enumerate([(4, 300), (37, 300), (37, 300)])
    )
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            (total,) = ops.add_each([x.clone()], [y], multiplied=True)
            found.append(ops.matmul(q, total.mT))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_each_row_is_done_once_where_no_more_threads_can_be_started(monkeypatch):
    """As in a container that limits them: what was handed on before is waited for."""
    done, threads = np.zeros(12), ThreadPoolExecutor(2)

    class Full:
        asked = 0

        def submit(self, work):
            self.asked += 1
            threads.submit(work)
            if self.asked == 2:  # Python has queued it by then
                raise RuntimeError("can't start new thread")

    full = Full()
    monkeypatch.setattr(pool, "_threads", lambda number: full)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)

    def loop(begin, end):
        time.sleep(0.02)
        done[begin:end] += 1

    pool.over_rows(len(done), 1, loop)
    assert (done == 1).all()
    threads.shutdown()
    assert (done == 1).all()

    def fail(begin, end):
        raise ArithmeticError("of a loop")

    with pytest.raises(ArithmeticError):
        pool.over_rows(len(done), 1, fail)


def test_what_is_sent_as_it_is_has_been_added():
    """A tensor of one large block, which in codes would be no shorter on four ranks."""
    shapes, algorithm = {"one": (128, 128), "many": (300, 256)}, Quantize("int8", block=1 << 15)
    found = [together(4, algorithm, loops=loops, shapes=shapes) for loops in (False, True)]
    for (plain, expected), (driver, averages) in zip(*found, strict=True):
        assert driver.ops.loops
        for mine, other in zip(
            [*averages, *driver.memory.errors()], [*expected, *plain.memory.errors()], strict=True
        ):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["strides", "float16", "vector", "integers of torch's"])
def test_what_no_loop_takes_is_added_at_once(ops, how):
    x = {
        "strides": torch.ones(8, 6).mT,
        "float16": torch.ones(6, 8).half(),
        "vector": torch.ones(9),
    }.get(how, torch.ones(6, 8).double())
    (found,) = ops.add_each([x], [torch.ones_like(x)], multiplied=True)
    assert found is x
    assert (x == 2).all()


def test_gradients_and_errors_are_added_as_they_are_coded(ops, monkeypatch):
    """Each by itself, and joined where they lie side by side, small ones among them; and once."""
    codec = CODECS["int4"]
    monkeypatch.setattr(codes, "SUMMED", 512)
    rng, sizes = np.random.default_rng(0), (128, 1024, 256, 512, 2048, 384)
    for joins in (True, False):
        x, *errors = (
            torch.from_numpy(rng.normal(size=n).astype(np.float32)) for n in (sum(sizes), *sizes)
        )
        parts = list(torch.split(x, sizes) if joins else map(torch.clone, torch.split(x, sizes)))
        expected = x + torch.cat(errors)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "add_", None)  # it is the loop that adds
            found = ops.add_each(parts, errors, coded=True)
            rows = (
                ops.rows([y.reshape((-1, 128)) for y in found], 1, donated=True) if joins else None
            )
            assert [isinstance(y, Sum) for y in found] == [n >= 512 for n in sizes]
            each = [rows.reshape((-1, 128))] if joins else [y.reshape((-1, 128)) for y in found]
            coded = [ops.encode_rows(codec, y) for y in each]
        for field, right in zip(
            zip(*coded, strict=True), ops.encode_rows(codec, expected.view(-1, 128)), strict=True
        ):
            assert torch.equal(torch.cat(field), right)
        assert torch.equal(torch.cat([value_of(y) for y in found]), expected)
        assert torch.equal(torch.cat(parts), expected)


def test_sums_that_no_loop_codes_are_added_first(ops, monkeypatch):
    monkeypatch.setattr(codes, "SUMMED", 1)
    for reads in (
        lambda y: ops.encode_rows(CODECS["int2"], y.reshape((8, 128)))[0],
        lambda y: ops.pad(y.reshape((-1,)), 1030),
        lambda y: ops.rows([y.reshape((1, -1)), torch.ones(1, 128)], 1, donated=True),
    ):
        (found,) = ops.add_each([torch.ones(1024)], [torch.ones(1024)], coded=True)
        assert isinstance(found, Sum)
        assert torch.equal(reads(found), reads(torch.full((1024,), 2.0)))


def test_views_of_a_sum_share_what_was_added():
    x, y = torch.zeros(4, 6), torch.ones(4, 6)
    whole = Sum(x, y)
    cut, turned = whole.reshape((2, 12)), whole.mT
    assert (cut.shape, turned.shape, turned.reshape((24,)).shape) == ((2, 12), (6, 4), (24,))
    assert (cut.value == 1).all()
    assert (whole.mT.mT.value == 1).all()


def test_small_models_and_other_devices_compile_nothing():
    specs = specs_of({"w": torch.empty(1 << 20, 1, device="meta")})
    assert not compiled.loops_for(PowerSGD(2), specs, torch.device("meta"))
    assert not compiled.loops_for(PowerSGD(2), specs_of({"w": torch.empty(64, 64)}), CPU)


@pytest.mark.parametrize(
    "algorithm",
    [THINNED, Quantize("int4"), Sign(), TopK(4, per=40), diloco(2, compressor=Quantize("int4"))],
    ids=lambda each: type(each).__name__,
)
def test_what_a_method_costs_is_measured_with_loops(algorithm, monkeypatch):
    """As it trains: an advice would find it several times as slow without."""
    ran, made = set(), compiled.compiled
    for module in (thin, codes, signs, largest):

        def noted(name, dtype):
            ran.add(name)
            return made(name, dtype)

        monkeypatch.setattr(module, "compiled", noted)
    with everything_compiled():
        method_cost(algorithm, {n: Spec(s, "float32") for n, s in SHAPES.items()}, 3, CPU)
    assert ran


def test_replicas_in_one_process_have_loops():
    every = together(2)
    assert all(driver.ops.loops.made == set(THIN) for driver, _ in every)
    assert all(map(torch.equal, *(averages for _, averages in every)))


def test_where_nothing_may_be_written_it_compiles_all_the_same(monkeypatch):
    from numba.core import caching

    compiled.compiled.cache_clear()
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    try:
        assert compiled.prepare(THIN[1:])
    finally:
        compiled.compiled.cache_clear()


def test_without_numba_there_is_nothing_and_no_word_of_it(monkeypatch, caplog):
    compiled._numba.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    try:
        assert not compiled.prepare(THIN)
    finally:
        compiled._numba.cache_clear()
    assert not caplog.records


ELSEWHERE = """
import multiprocessing, os, sys, threading
import torch
from gradwire.torch_backend.cpu import compiled, pool, thin
from gradwire.torch_backend.cpu.sums import Sum
assert "numba" not in sys.modules
thin.PER_THREAD = 1
def projected():
    torch.set_num_threads(2)
    out = torch.empty(4, 64)
    assert thin.project(torch.ones(4, 256), Sum(torch.ones(64, 256), torch.ones(64, 256)).mT, out)
    return float(out.sum())
def in_thread(found):
    found.append(projected())
def in_process():
    assert compiled.prepare([("add_and_project", torch.float32)])
    sys.exit(0 if projected() == 4 * 64 * 512 else 1)
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, i):
        return projected()
if __name__ == "__main__":
    if os.environ.get("NUMBA_DISABLE_JIT") == "1":
        assert not compiled.prepare([("add_and_project", torch.float32)])
        sys.exit(0)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    # Several compile at once, and keep it in one folder, in which nothing is yet.
    os.environ["NUMBA_CACHE_DIR"] = sys.argv[1]
    spawned = [multiprocessing.get_context("spawn").Process(target=in_process) for _ in range(2)]
    [child.start() for child in spawned]
    in_time = [child.join(200) for child in spawned]
    assert [child.exitcode for child in spawned] == [0, 0]
    assert os.listdir(sys.argv[1])
    assert compiled.prepare([("add_and_project", torch.float32)])
    assert projected() == 4 * 64 * 512
    found = []
    threads = [threading.Thread(target=in_thread, args=(found,)) for _ in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: found.append(projected()))
    x.sum().backward()
    assert found == [4 * 64 * 512] * 5
    child = multiprocessing.get_context("fork").Process(target=in_process)
    child.start(), child.join(60)
    assert child.exitcode == 0, child.exitcode
    loaded = list(torch.utils.data.DataLoader(Rows(), num_workers=1, batch_size=None))
    assert loaded == [4 * 64 * 512] * 2 and projected() == 4 * 64 * 512
"""


@pytest.mark.parametrize(
    "environment", [{}, {"NUMBA_DISABLE_JIT": "1"}], ids=["threads and forks", "told not to"]
)
def test_in_a_process_of_its_own(environment, tmp_path):
    """On one CPU, whose home may not be written to, and which imports numba when something is
    compiled, not before: spawned processes that compile at once, threads, autograd's hooks, forks,
    and workers of a `DataLoader`."""
    (script := tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    (cache := tmp_path / "cache").mkdir()
    environment = {**os.environ, "HOME": "/nowhere", "XDG_CACHE_HOME": "/nowhere", **environment}
    command = [sys.executable, str(script), str(cache)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert ran.returncode == 0, ran.stdout + ran.stderr


TORCH_ALONE = """
import sys
import torch
import torch.distributed as dist
if sys.argv[1] == "not installed":
    sys.modules["numba"] = sys.modules["llvmlite"] = None
from gradwire import AllReduce, PowerSGD, Quantize, WireDtype
from gradwire.torch_backend.engine.driver import Driver, specs_of  # what all doors lead to
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.zeros(1024, 1024))  # as large as a model for which loops are compiled
for algorithm in (PowerSGD(2), Quantize("int8"), WireDtype(AllReduce(), "int8")):
    driver = Driver(algorithm, specs_of({"weight": weight}), torch.device("cpu"), dist.group.WORLD)
    before = weight.detach().clone()
    (weight * torch.randn(1024, 1).mm(torch.randn(1, 1024))).sum().backward()
    gradient = weight.grad.clone()
    driver.add({"weight": weight.grad}, first=True, last=True)
    with torch.no_grad():
        weight -= weight.grad
    weight.grad = None
    assert not driver.ops.loops
    assert torch.dist(before - weight, gradient) < 0.02 * gradient.norm(), algorithm
assert not [name for name, module in sys.modules.items() if name.startswith(("numba", "llvmlite")) and module]
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("numba", "lines"), [("not installed", 0), ("broken", 1)])
def test_torch_alone_trains_without_numba(numba, lines, tmp_path):
    """As `pip install 'gradwire[torch]'` leaves it: nothing is said. One that cannot be imported is
    named, once in a process."""
    (script := tmp_path / "alone.py").write_text(TORCH_ALONE)
    if numba == "broken":
        (tmp_path / "numba").mkdir()
        (tmp_path / "numba" / "__init__.py").write_text(
            "raise ImportError('made for another NumPy')"
        )
    ran = subprocess.run(
        [sys.executable, str(script), numba], capture_output=True, text=True, timeout=LIMIT
    )
    assert ran.returncode == 0, ran.stderr
    said = [line for line in ran.stderr.splitlines() if "loops" in line or "numba" in line]
    assert len(said) == lines
    assert all(
        "without its compiled loops" in line and "made for another NumPy" in line for line in said
    )


# --- between ranks


SHAPES = {"w": (24, 40), "large": (130, 128), "stack": (3, 16, 8), "odd": (13, 21), "b": (7,)}
#: Whose rows of codes lie side by side.
EVEN = {"w": (24, 160), "large": (130, 128), "stack": (3, 16, 8), "last": (129, 128)}


def trained(group, rank, algorithm=THINNED, *, loops=True, kind="usual", shapes=SHAPES):
    """What a driver makes of three steps, and what it is left with."""
    with everything_compiled() as patch:
        if not loops:
            patch.setattr(compiled, "_numba", lambda: None)
        return steps_of(group, rank, algorithm, kind=kind, shapes=shapes)


def together(replicas, algorithm=THINNED, *, loops=True, shapes=SHAPES):
    """The same of replicas in one process."""
    world = World(replicas)
    with everything_compiled() as patch:
        if not loops:
            patch.setattr(compiled, "_numba", lambda: None)
        return world.on_each(
            lambda rank: steps_of(world.groups(rank), rank, algorithm, shapes=shapes)
        )


def steps_of(group, rank, algorithm, *, kind="usual", shapes=SHAPES):
    """Gradients lie in one vector, as in DDP's buckets."""
    parameters = {name: torch.empty(shape) for name, shape in shapes.items()}
    driver = Driver(algorithm, specs_of(parameters), CPU, group)
    averages = []
    for step in range(3):
        drawn = [
            numbers(kind if step == 1 else "usual", s, 10 * step + rank) for s in shapes.values()
        ]
        flat = torch.from_numpy(np.concatenate([x.reshape(-1) for x in drawn]))
        parts = torch.split(flat, [x.size for x in drawn])
        given = {n: part.view(s) for (n, s), part in zip(shapes.items(), parts, strict=True)}
        driver.add(given, first=True, last=True)
        averages += [x.clone() for x in given.values()]
    return driver, averages


@cases.case
def test_a_step_with_loops_is_that_without(world):
    given = world.group, world.rank
    (plain, expected), (driver, found) = trained(*given, loops=False), trained(*given)
    assert driver.ops.loops.made == set(THIN)
    assert driver.stats().compiled_loops == driver.ops.loops.card
    assert not plain.ops.loops
    assert plain.stats().compiled_loops == ""
    assert world.agree(found)
    errors = zip(driver.memory.errors(), plain.memory.errors(), strict=True)
    for mine, other in itertools.chain(zip(found, expected, strict=True), errors):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


CODED = [
    Quantize("int8"),
    Quantize("int4"),
    Quantize("int8", block=24),
    Quantize("int4", stochastic=True),
    WireDtype(AllReduce(), "int8"),
    Quantize("float8_e4m3fn"),
    Quantize("e3m0"),
    Sign(),
    Sign(per="row", magnitudes=2),
    TopK(4, per=(8, 8)),
    TopK(3, per=40, bits=8),
]


def same_codes(group, rank, kind="usual"):
    """Steps with loops, and those without, come to the same bits, of averages and of errors; but
    for what NaN they are."""
    for algorithm, shapes in itertools.product(CODED, (SHAPES, EVEN)):
        (plain, expected), (driver, found) = (
            trained(group, rank, algorithm, loops=loops, kind=kind, shapes=shapes)
            for loops in (False, True)
        )
        own = {Sign: SIGNS, TopK: LARGEST}.get(type(algorithm), CODES)
        assert driver.ops.loops.made == set(own)
        for mine, other in zip(
            [*found, *driver.memory.errors()], [*expected, *plain.memory.errors()], strict=True
        ):
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


class Looks(Quantize):
    """It looks at what it averages."""

    def compress_together(self, ops, x, memory, context):
        assert not any(isinstance(each, Sum) for each in x.values())
        return super().compress_together(ops, x, memory, context)


def test_a_method_made_of_one_that_codes_is_given_tensors(alone):
    driver, _ = trained(alone, 0, Looks("int8"), shapes=EVEN)
    assert driver.ops.loops


@pytest.mark.parametrize("kind", ["usual", "huge", "nan"])
def test_a_replica_alone_sends_the_same_codes_with_loops(alone, kind):
    same_codes(alone, 0, kind)


@cases.case
def test_two_send_the_same_codes_with_loops(world):
    for kind in ("usual", "nan", "overflow"):
        same_codes(world.group, world.rank, kind)


def strided(x):
    """In an order that is not that of rows, as DDP's gradients have where parameters do."""
    return x.to(memory_format=torch.channels_last) if x.ndim == 4 else x.mT.contiguous().mT


#: Tensors beside one that loops take: of other dtypes, and in another order.
MIXED = {
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "float64": lambda x: x.double(),
    "strides": strided,
    "strides of float16": lambda x: strided(x.half()),
}


def steps_beside(group, algorithm, made, *, loops):
    """Averages and errors of three steps of mixed tensors, as floats, and the driver."""
    shapes, found = (
        {"matrix": (130, 128), "kernel": (16, 32, 8, 8), "thin": (2, 8200), "usual": (132, 128)},
        [],
    )
    with everything_compiled() as patch:
        if not loops:
            patch.setattr(compiled, "_numba", lambda: None)
        for step in range(3):
            given = {
                name: torch.from_numpy(numbers("usual", s, step)) for name, s in shapes.items()
            }
            given = {name: x if name == "usual" else made(x) for name, x in given.items()}
            if not step:
                driver = Driver(algorithm, specs_of(given), CPU, group)
            before = {name: (x.stride(), x.data_ptr()) for name, x in given.items()}
            driver.add(given, first=True, last=True)
            assert before == {name: (x.stride(), x.data_ptr()) for name, x in given.items()}
            found += [x.double() for x in given.values()]
    return [*found, *(x.double() for x in driver.memory.errors())], driver


@pytest.mark.parametrize(("tensors", "calls"), [(1, 3), (64, 0)])
def test_small_tensors_are_settled_together(alone, tensors, calls, monkeypatch):
    """A loop for each of thousands takes longer to call than to run."""
    monkeypatch.setattr(compiled, "LEAST", 0)
    settled, right = [], codes.settle
    monkeypatch.setattr(codes, "settle", lambda *given: settled.append(given) or right(*given))
    shape = (compiled.LARGE // tensors // 32, 32)
    for step in range(3):
        given = {f"{i}": torch.from_numpy(numbers("usual", shape, i)) for i in range(tensors)}
        if not step:
            driver = Driver(Quantize("int8"), specs_of(given), CPU, alone)
        driver.add(given, first=True, last=True)
    assert driver.ops.loops
    assert len(settled) == calls


@pytest.mark.parametrize("algorithm", [PowerSGD(2), Quantize("int8")], ids=repr)
def test_gradients_in_other_strides_are_taken_as_rows(alone, algorithm, monkeypatch):
    sizes = {"settle": [], "settle_codes": []}

    def noting(name, dtype):
        def loop(*given):
            sizes.get(name, []).append((given[-1] - given[-2]) * given[0].shape[1])
            return right(*given)

        right = compiled.compiled(name, dtype)
        return loop

    monkeypatch.setattr(thin, "compiled", noting)
    monkeypatch.setattr(codes, "compiled", noting)
    steps_beside(alone, algorithm, strided, loops=True)
    assert sum(map(sum, sizes.values())) >= 3 * (130 * 128 + 16 * 32 * 64 + 132 * 128)


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("algorithm", [PowerSGD(2), Quantize("int8"), Quantize("int4")], ids=repr)
def test_tensors_of_16_bits_and_other_strides_come_out_as_without_loops(alone, algorithm, kind):
    """Which loops take those that they have no form for is left to torch's operations; what lies
    beside them is taken."""
    (expected, plain), (found, driver) = (
        steps_beside(alone, algorithm, MIXED[kind], loops=loops) for loops in (False, True)
    )
    wide = {torch.float32} | (
        {torch.float64} if kind == "float64" and isinstance(algorithm, PowerSGD) else set()
    )
    names = compiled.THIN if isinstance(algorithm, PowerSGD) else compiled.CODES
    assert driver.ops.loops.made == set(itertools.product(names, wide))
    assert not plain.ops.loops
    exact = isinstance(algorithm, Quantize)
    for mine, other in zip(found, expected, strict=True):
        near = (
            {"rtol": 0, "atol": 0} if exact else {"rtol": 0, "atol": 0.02 if "16" in kind else 1e-4}
        )
        torch.testing.assert_close(mine, other, **near)


def weights_after(world, kind, *, loops):
    """Those of a small model after four steps of what has no card to compare: it uses the loops
    that come to torch's bits."""
    model = mlp(40, 24, 5, seed=3)
    with everything_compiled() as patch:
        if not loops:
            patch.setattr(compiled, "_numba", lambda: None)
        if kind == "ZeroOptimizer":
            optimizer = gw.ZeroOptimizer(
                model.named_parameters(),
                torch.optim.SGD,
                lr=0.1,
                wire_dtype="int8",
                average_gradients=True,
                process_group=world.group,
            )
            made, stats = optimizer._step.collectives.ops.loops, optimizer.stats
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            handle = gw.local_sgd(
                model, optimizer, diloco(2, compressor=Quantize("int4")), process_group=world.group
            )
            made, stats = handle._ops.loops, handle.stats
        assert made.made == (set(CODES) if loops else set())
        assert stats().compiled_loops == made.card
        for step in range(4):
            optimizer.zero_grad()
            model(
                torch.from_numpy(numbers("usual", (6, 40), 10 * step + world.rank))
            ).square().sum().backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@cases.case
def test_zero_and_local_sgd_send_the_same_codes_with_loops(world):
    for kind in ("ZeroOptimizer", "local_sgd"):
        assert all(
            map(torch.equal, *(weights_after(world, kind, loops=loops) for loops in (False, True)))
        )


@cases.case
def test_ranks_that_have_compiled_other_loops_all_use_none(world):
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("gradwire")
    logger.addHandler(handler)
    try:
        driver, found = trained(world.group, world.rank, loops=world.rank == 0)
    finally:
        logger.removeHandler(handler)
    assert not driver.ops.loops
    assert len(told) == (world.rank == 0)
    assert all("rank 1: none" in each and "gradwire[cpu]" in each for each in told)
    _, expected = trained(world.group, world.rank, loops=False)
    assert all(map(torch.equal, found, expected))
    assert world.agree(found)
