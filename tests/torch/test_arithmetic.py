"""The arithmetic is the algorithm's own, whatever the user has switched on around the backward
pass; and it allocates nothing large, and messages copy little."""

import itertools
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.dry import on_a_device
from gradwire import AllReduce, PowerSGD, Quantize, WireDtype
from gradwire.core.protocol.reductions import Reduce
from gradwire.torch_backend import ZeroOptimizer
from gradwire.torch_backend.advise.compare.opaque import OpaqueReplicas
from gradwire.torch_backend.engine.collectives import Reducing
from gradwire.torch_backend.ops import full_precision
from gradwire.torch_backend.ops.full_precision import plain_arithmetic
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.ops.workspace import Scratch
from gradwire.torch_backend.setup.consistency import require_same_on_all_ranks
from tests.torch.compare import same_bits
from tests.torch.models import loss_on, mlp
from tests.torch.training import Trace, distance, hooked, train

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def precision():
    """Of products, as the user has set it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield "medium"
    torch.set_float32_matmul_precision(before)


#: What an algorithm saw while it ran, by the function that looks.
seen = []


@dataclass(frozen=True, kw_only=True, repr=False)
class Watching(PowerSGD):
    look: Callable[[Any, Any], Any]

    async def compress(self, ops, name, x, memory, at):
        if isinstance(ops, TorchOps):  # else its bytes are counted
            seen.append(self.look(ops, x.reshape((x.shape[0], -1))))
        return await super().compress(ops, name, x, memory, at)


def arithmetic(ops, x):
    """Precision of products, autocast, and what a product in float32 comes out as."""
    product = ops.matmul(x, x.mT)
    return (
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("cpu"),
        ops.dtype_of(product),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_round_backward_leaves_products_in_float32(dtype, precision):
    ddp, _ = hooked(mlp(40, 36, 32, 28), Watching(rank=2, look=arithmetic))
    seen.clear()
    trace = Trace()
    for step in range(5):
        # Torch advises to leave autocast before backward, and many do not. Its cache of cast
        # weights lasts as long as the context.
        with torch.autocast("cpu", dtype=dtype):
            one = train(ddp, loss_on(40), [step])
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") == dtype
        trace.local += one.local
        trace.given += one.given
    assert set(seen) == {("highest", False, "float32")}
    assert torch.get_float32_matmul_precision() == precision
    # Gradients of an autocast forward pass are coarse, but what happens to them afterwards is not.
    assert distance(PowerSGD(rank=2), [trace]) < 3e-5


#: Ways to ask for fast products that torch advises from 2.9 on, after which the older function
#: raises; and one that it replaces.
SETTINGS = {
    "everything": (torch.backends, "fp32_precision", "tf32"),
    "cuda": (torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "cpu": (torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "allow_tf32": (torch.backends.cuda.matmul, "allow_tf32", True),
}
MATMUL = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


@pytest.fixture(params=SETTINGS)
def fast_products(request):
    """The setting's name."""
    backend, option, value = SETTINGS[request.param]
    convolutions = torch.backends.cudnn.conv, torch.backends.cudnn.conv.fp32_precision
    for each in MATMUL:
        each.fp32_precision = "none"
    setattr(backend, option, value)
    yield request.param
    if option == "allow_tf32":
        torch.backends.cuda.matmul.allow_tf32 = False
    for each in (torch.backends, *MATMUL):
        each.fp32_precision = "none"
    convolutions[0].fp32_precision = convolutions[1]
    assert torch.get_float32_matmul_precision() == "highest"


def precisions(*_):
    return [backend.fp32_precision for backend in MATMUL]


def test_fast_products_of_the_user_are_left_out_and_come_back(fast_products):
    before = precisions()
    assert {"tf32", "bf16"} & set(before)
    ddp, _ = hooked(mlp(40, 36), Watching(rank=2, look=precisions))
    seen.clear()
    train(ddp, loss_on(40), 2)
    assert not {"tf32", "bf16"} & {each for pair in seen for each in pair}
    assert len(seen) == 2
    assert precisions() == before
    with pytest.raises(RuntimeError, match="a mistake"), plain_arithmetic(torch.device("cpu")):
        raise RuntimeError("a mistake")
    assert precisions() == before
    if fast_products == "everything":  # was set for all kinds of operations, and still is
        torch.backends.fp32_precision = "ieee"
        assert precisions() == ["ieee", "ieee"]


def test_settings_are_set_again_in_turns(fast_products):
    users, before = full_precision.arithmetic(torch.device("cpu")), precisions()
    with plain_arithmetic(torch.device("cpu")):
        plain, within = full_precision.arithmetic(torch.device("cpu")), precisions()
        for again, expected in ((users, before), (plain, within), (users, before), (plain, within)):
            again()
            assert precisions() == expected
    assert precisions() == before


def test_a_users_step_in_compare_runs_as_the_user_has_set_it(fast_products):
    """And what the method computes in between as always. Each replica waits there for the other."""
    users, x, models = [], torch.ones(4, 40), [mlp(40, 36) for _ in range(2)]

    def now():
        return (
            precisions(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.tensor(0).device,
        )

    def make(replica, replicas):
        model = models[replica]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            users.append(now())
            loss = model(x).square().mean()
            loss.backward()
            users.append(now())
            optimizer.step()
            return loss

        return model, optimizer, step

    seen.clear()
    with torch.autocast("cpu", torch.float16), torch.device("meta"):
        before = now()
        replicas = OpaqueReplicas(make, Watching(rank=2, look=precisions), 2, 0)
        for _ in range(2):
            replicas.step()
        assert users == [before] * 8
        assert now() == before
    assert len(seen) == 4
    assert not {"tf32", "bf16"} & {each for pair in seen for each in pair}


@pytest.mark.parametrize("rank", [1, 4, 16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n", [701, 704], ids=["prime", "in blocks"])
def test_large_products_equal_those_in_float64(n, rank, transposed):
    ops, m = TorchOps(torch.device("cpu")), 307
    random = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        """So small that sums of products are exact in float32, in whatever order a machine adds
        them up."""
        return torch.randint(-9, 10, shape, generator=random).float()

    x = integers(m, n).mT if transposed else integers(n, m)
    p, q = integers(rank, n), integers(rank, m)
    before = x.clone()
    assert torch.equal(
        ops.matmul(q, x.mT, out=torch.empty(rank, n)).double(), q.double() @ x.double().mT
    )
    assert torch.equal(ops.matmul(p, x, out=torch.empty(rank, m)).double(), p.double() @ x.double())
    out = torch.full_like(x, float("nan"))
    rest = ops.subtract_product(x, p, q, out=out)
    assert rest.data_ptr() == out.data_ptr()
    assert torch.equal(rest.double(), x.double() - p.double().mT @ q.double())
    assert same_bits(x, before)
    assert torch.equal(ops.subtract_product(x, p, q, out=x).double(), rest.double())


#: Larger than what is computed a few rows at a time.
WIDTH = 1024
SPARING = [
    *(WireDtype(AllReduce(), dtype) for dtype in ("int8", "bfloat16")),
    WireDtype(AllReduce(), "int8", stochastic=True),
    *(Quantize("int4"), Quantize("int8", stochastic=True), PowerSGD(4)),
]


@pytest.mark.parametrize("algorithm", SPARING, ids=repr)
def test_a_step_allocates_nothing_as_large_as_a_gradient(algorithm):
    ddp, _ = hooked(
        nn.Linear(WIDTH, WIDTH, bias=False), algorithm, cap=25, gradient_as_bucket_view=True
    )
    x = torch.randn(2, WIDTH)

    def step():
        ddp.zero_grad(set_to_none=False)
        ddp(x).sum().backward()

    for _ in range(3):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # profilers have some of their own
        with torch.profiler.profile(profile_memory=True) as profile:
            step()
    large = [e.name for e in profile.events() if e.self_cpu_memory_usage > 2 * WIDTH**2]
    assert set(large) == {"aten::mm"}  # autograd's, which proves that large ones are seen


REDUCED = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
QUICK = "allow_fp16_accumulation"


def reduced():
    """What torch knows of them. Its version 2.9 has no parts."""
    options = (*REDUCED, *(f"{name}_split_k" for name in REDUCED), QUICK)
    found = {name: getattr(torch.backends.cuda.matmul, name, None) for name in options}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize("allowed", [True, False, (False, False)], ids=str)
def test_sums_of_half_precision_on_cuda_are_whole(allowed):
    """The options are there without a device."""
    if isinstance(allowed, tuple) and f"{REDUCED[0]}_split_k" not in reduced():
        pytest.skip("this torch has one part")
    matmul, device = torch.backends.cuda.matmul, torch.device("cuda")
    before = reduced()
    try:
        for name in REDUCED:
            setattr(matmul, name, allowed)
        matmul.allow_fp16_accumulation = allowed is True
        given = reduced()
        with plain_arithmetic(device):
            assert not any(
                value for name, value in reduced().items() if not name.endswith("split_k")
            )
        assert reduced() == given
        with pytest.raises(RuntimeError, match="a mistake"), plain_arithmetic(device):
            raise RuntimeError("a mistake")
        assert reduced() == given
        with plain_arithmetic(torch.device("cpu")):
            assert reduced() == given
    finally:
        for name in REDUCED:
            setattr(matmul, name, (before[name], before.get(f"{name}_split_k", True)))
        matmul.allow_fp16_accumulation = before[QUICK]


# Orthonormal rows of factors whose rows depend on each other, judged by singular values in float64,
# on the branch for devices.

#: Matrices of one shape.
BATCH = 50
#: What rounding leaves undecided, in parts of a row's norm: float32 rounds to 6e-8, and a row is a
#: sum of many.
FLOOR = 2e-6
#: Of a row that comes after nearly dependent ones so much may be lost, which error feedback
#: returns; in one of so many draws.
MOST, SELDOM = 1e-3, 1000


def deficient(r, n, g):
    """A factor of gradients with fewer rows that are not zero."""
    k = int(torch.randint(1, r + 1, (), generator=g))
    gradient = torch.zeros(BATCH, n, 48)
    gradient[:, :k] = torch.randn(BATCH, min(k, n), 48, generator=g)
    return torch.randn(BATCH, r, 48, generator=g) @ gradient.mT


def low_rank(r, n, g):
    k = int(torch.randint(1, r + 1, (), generator=g))
    return torch.randn(BATCH, r, k, generator=g) @ torch.randn(BATCH, k, n, generator=g)


def graded(r, n, g):
    """Singular values down to the floor, or below it."""
    left = torch.linalg.qr(torch.randn(BATCH, r, r, generator=g, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(BATCH, n, min(r, n), generator=g, dtype=torch.float64))[0]
    values = torch.logspace(
        0, -9 * float(torch.rand((), generator=g)), min(r, n), dtype=torch.float64
    )
    return (left[..., : min(r, n)] * values) @ right.mT


#: Others: tests/parity/test_kernels.py.
KINDS = (deficient, low_rank, graded)


def drawn(kind, dtype, seed):
    """(BATCH, r, n) of this dtype, of any scale."""
    g = torch.Generator().manual_seed(seed)
    r = int(torch.randint(1, 65 if seed % 2 else 9, (), generator=g))
    n = int(torch.randint(max(1, r // 2), 3 * r + 40, (), generator=g))
    scale = 10.0 ** (40 * float(torch.rand((), generator=g)) - 20)
    return (kind(r, n, g).double() * scale).to(dtype)


def judged(x, rows):
    """How far each matrix is from orthonormal or zero rows, what part of a row of `x` it does not
    span, and how much of that rounding explains."""
    x, rows = x.double(), rows.double()
    kept = torch.diag_embed(rows.any(-1).double())
    wrong = (rows @ rows.mT - kept).abs().amax((-1, -2))
    x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-300)
    lost = torch.linalg.vector_norm(x - x @ rows.mT @ rows, dim=-1).amax(-1)
    values = torch.linalg.svdvals(x)
    # The directions of a matrix that is known up to FLOOR are known up to that over the least of
    # its singular values that are above it.
    least = torch.where(values > FLOOR, values, torch.inf).amin(-1)
    return wrong, lost, (FLOOR / least).clamp_min(FLOOR)


def orthonormal(x):
    return TorchOps(torch.device("cpu")).orthonormalize_each([x], [], 0.0)[0]


@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(1000, 1009), marks=pytest.mark.slow)], ids=str
)
def test_rows_are_orthonormal_or_zero_and_span_the_factor(seeds):
    found = []
    for seed, kind, dtype in itertools.product(seeds, KINDS, (torch.float32, torch.bfloat16)):
        x = drawn(kind, dtype, seed)
        with on_a_device():
            rows = orthonormal(x.float())  # bfloat16 would round the result to 4e-3
        wrong, lost, explained = judged(x, rows)
        where = kind.__name__, dtype, seed
        assert wrong.max() <= 1e-5, where
        assert (lost <= torch.maximum(explained, torch.tensor(MOST))).all(), where
        found.append(lost > explained)
    assert torch.cat(found).double().mean() <= 1 / SELDOM


def test_bfloat16_is_rounded_once():
    for seed in range(4):
        x = drawn(deficient, torch.bfloat16, seed)
        with on_a_device():
            rows, exact = orthonormal(x), orthonormal(x.float())
        assert rows.dtype == torch.bfloat16
        assert ((rows.float() - exact).abs() <= exact.abs() / 256).all()


# Messages: what travels from where it lies, and objects by the parameters' device. These need not
# be the current device: NCCL refuses two ranks on one GPU.


def parts(flat):
    return [flat[:6].view(2, 3), flat[6:6], flat[6:7], flat[7:10]]


@pytest.fixture
def send(alone):
    def send(*arrays, donated=True, **options):
        return Reducing(
            Reduce(arrays, (donated,) * len(arrays)), dist.group.WORLD, Scratch(), **options
        )

    return send


def test_arrays_side_by_side_travel_from_where_they_are(send):
    flat = torch.arange(10.0)
    for first, arrays in ((0, parts(flat)), (6, parts(flat)[1:]), (0, [flat.view(5, 2)])):
        sent = send(*arrays)
        (message,) = sent.messages
        assert message.flat.data_ptr() == flat[first:].data_ptr()
        assert message.flat.tolist() == list(range(first, 10))
        assert all(a is b for a, b in zip(sent.wait(), arrays, strict=True))


def neighbours():
    """Two storages that are neighbours in memory by chance."""
    memory = np.arange(10, dtype=np.float32)
    arrays = [torch.from_numpy(memory[:4]), torch.from_numpy(memory[4:])]
    assert arrays[0].data_ptr() + 16 == arrays[1].data_ptr()
    return arrays


PACKED = {
    "in another order": lambda: parts(torch.arange(10.0))[::-1],
    "with a gap": lambda: parts(torch.arange(10.0))[::3],
    "transposed": lambda: [torch.arange(10.0).view(5, 2).T],
    "neighbours by chance": neighbours,
    "of another dtype": lambda: [torch.arange(4, dtype=torch.int32).view(torch.float32)],
    "not donated": lambda: parts(torch.arange(10.0)),
}


@pytest.mark.parametrize("case", PACKED)
def test_others_are_packed_and_left_alone(send, case):
    arrays = PACKED[case]()
    before = [a.clone() for a in arrays]
    sent = send(*arrays, donated=case != "not donated")
    (message,) = sent.messages
    assert message.flat.dtype == torch.float32
    if case != "of another dtype":
        assert not {a.untyped_storage().data_ptr() for a in arrays} & {
            message.flat.untyped_storage().data_ptr()
        }
        message.flat.add_(100)
        for a, b, answer in zip(arrays, before, sent.wait(), strict=True):
            assert torch.equal(a, b)
            assert torch.equal(answer, b + 100)


def test_a_residual_is_computed_once_before_anybody_waits(alone, monkeypatch):
    events = []

    class Work:
        def wait(self):
            events.append("waits")

    monkeypatch.setattr(
        dist, "all_reduce", lambda *args, **kwargs: events.append("sends") or Work()
    )
    request = Reduce(
        (torch.ones(3),),
        (False,),
        overlap=(SimpleNamespace(compute=lambda: events.append("works")),),
    )
    sent = Reducing(request, dist.group.WORLD, Scratch())
    assert events == ["sends"]
    sent.wait()
    assert events == ["sends", "works", "waits"]


DEVICE = torch.device("cuda", 3)


class Parameter:
    """All that is asked of a parameter here."""

    device, dtype = DEVICE, torch.float32

    def is_contiguous(self):
        return True


@pytest.fixture
def devices(monkeypatch):
    """The device that is current during each collective of objects; there is no CUDA, so switching
    to it only leaves a note."""
    current, seen = [None], []

    @contextmanager
    def switched(device):
        current.append(device)
        yield
        current.pop()

    def noting(function):
        def call(*args, **kwargs):
            seen.append(current[-1])
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(torch.cuda, "device", switched)
    for name in ("all_gather_object", "gather_object", "broadcast_object_list"):
        monkeypatch.setattr(dist, name, noting(getattr(dist, name)))
    return seen


def agreement(group):
    require_same_on_all_ranks(group, {"setting": "1"}, {}, device=DEVICE)


def consolidated(group):
    optimizer = ZeroOptimizer(
        mlp(4, 4).named_parameters(), torch.optim.SGD, lr=1, process_group=group
    )
    optimizer._own.parameters = {"p": Parameter()}
    optimizer.consolidated_state_dict()
    optimizer.consolidated_state_dict(to=None)


@pytest.mark.parametrize(("send", "times"), [(agreement, 1), (consolidated, 2)])
def test_objects_travel_by_the_parameters_device(alone, devices, send, times):
    send(alone)
    assert devices[-times:] == [DEVICE] * times
