"""What the kernels in Triton compute, beside NumPy and torch. `test_triton.py` runs this file in a
process of its own: under Triton's interpreter, which has to be asked for before Triton is imported;
on a GPU, if there is one, compiled.
"""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils._pytree import tree_map_only

from benchmarks.dry import on_a_device
from gradwire import AllReduce, PowerSGD, Quantize, Sign, WireDtype
from gradwire.core.codecs.integers import Integers
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.kernels.payloads import Coded, LowRank
from gradwire.torch_backend.ops import factors, fused
from gradwire.torch_backend.ops.addresses import side_by_side
from gradwire.torch_backend.ops.fused import TorchFused
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.ops.orthonormalize import orthonormalized_unseen
from tests.torch.compare import relative, same_bits, weights
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import hooked, train

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* encountered in:RuntimeWarning"
)  # of the interpreter, and of the oracle

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FUSED = TorchFused(TorchOps(DEVICE))
CODEC, NUMPY, LARGEST = Integers(), NumpyOps(), 127.0
YES, NO = (torch.tensor(ok, device=DEVICE) for ok in (True, False))
#: Numbers in a block, widths of blocks. Half of float32's numbers are smaller than 1e-19, and some
#: subnormal.
NUMBERS = st.floats(width=32) | st.sampled_from(
    [0.0, -0.0, 1e-45, -1e-40, 3.4e38, math.inf, math.nan, 0.5, 1.5, 126.5, 127.0]
)
SHAPES = st.tuples(st.integers(1, 40), st.sampled_from([8, 16, 24, 64, 128]))
QUICK = settings(max_examples=25)


def on_device(x):
    return torch.from_numpy(np.ascontiguousarray(x)).to(DEVICE)


def rows(shape, seed=0):
    """Rows of all magnitudes."""
    generator = np.random.default_rng(seed)
    size = np.exp2(generator.integers(-60, 60, (*shape[:-1], 1)))
    return (generator.standard_normal(shape) * size).astype(np.float32)


def coded(shape, seed=0):
    """Codes and scales, as sent."""
    width = shape[-1]
    codes, scales = CODEC.encode(NUMPY, rows(shape, seed).reshape(-1, width))
    return codes.reshape(shape), scales.reshape(*shape[:-1], 1)


def assert_codes(found, x):
    """Those of the oracle; of rows with inf or NaN the scale alone counts."""
    codes, scales = CODEC.encode(NUMPY, x.copy())
    finite = np.isfinite(scales[:, 0])
    np.testing.assert_array_equal(found[1].cpu().numpy(), scales)
    np.testing.assert_array_equal(found[0].cpu().numpy()[finite], codes[finite])


@QUICK
@given(SHAPES.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=NUMBERS)))
def test_codes_are_those_of_numpy(x):
    assert_codes(FUSED.quantized(on_device(x), LARGEST), x)


@pytest.mark.parametrize("shape", [(1, 128), (300, 128), (3, 4096)])
def test_codes_of_many_programs(shape):
    x = rows(shape)
    x[0] = 0
    assert_codes(FUSED.quantized(on_device(x), LARGEST), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_codes_of_other_floats_are_those_of_them_in_float32(dtype):
    x = on_device(rows((30, 64))).clamp(-60_000, 60_000).to(dtype)
    assert_codes(FUSED.quantized(x, LARGEST), x.float().cpu().numpy())


def test_halves_are_rounded_to_the_even_code():
    x = np.arange(-128, 128, dtype=np.float32)[None] / 2
    x[0, 0] = 127
    codes, scales = FUSED.quantized(on_device(x), LARGEST)
    assert scales.item() == 1.0
    np.testing.assert_array_equal(codes.cpu().numpy().view(np.int8), np.rint(x).astype(np.int8))


@QUICK
@given(SHAPES, st.integers(3, 9), st.booleans())
def test_the_mean_of_all_replicas_is_coded_as_by_numpy(shape, replicas, keeps):
    codes, scales = coded((replicas, *shape))
    total = CODEC.decode(NUMPY, codes[0], scales[0])
    for i in range(1, replicas):
        total = total + CODEC.decode(NUMPY, codes[i], scales[i])
    mean = total * np.float32(1 / replicas)
    *found, lost = FUSED.quantize_mean_of_codes(
        on_device(codes), on_device(scales), LARGEST, keeps=keeps
    )
    assert_codes(found, mean)
    assert (lost is not None) == keeps
    if lost is not None:
        rounded = CODEC.decode(NUMPY, *(each.cpu().numpy() for each in found))
        np.testing.assert_array_equal(lost.cpu().numpy(), (mean - rounded) * np.float32(-replicas))


@QUICK
@given(SHAPES, st.data())
def test_what_was_sent_is_subtracted_if_the_step_is_finite(shape, data):
    count, width = shape
    codes, scales = coded(shape)
    first = data.draw(st.integers(0, count))
    lost = rows((data.draw(st.integers(0, count - first)), width), 1)
    n = count * width - data.draw(st.integers(0, width - 1))  # the last row may be filled up
    x, before = rows((1, n), 2)[0], rows((1, n), 3)[0]
    taken = CODEC.decode(NUMPY, codes, scales)
    taken[first : first + len(lost)] += lost
    for ok, expected in ((NO, before), (YES, x - taken.ravel()[:n])):
        y = on_device(before)
        sent = Coded(CODEC, on_device(codes), on_device(scales), on_device(lost), first)
        FUSED.subtract_decoded_if(ok, [on_device(x)], [sent], [y])
        np.testing.assert_array_equal(y.cpu().numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_averages_are_decoded_where_they_belong_or_nan(dtype):
    """Three in a bucket, of which the last row of the second is filled up; one elsewhere, of
    columns."""
    codes, scales = (on_device(x) for x in coded((20, 16)))
    scales = scales.clamp(1e-3, 1.0)
    bucket = torch.zeros(16 * 12 + 1, dtype=dtype, device=DEVICE)
    sizes, firsts = [16 * 4, 16 * 5 - 3, 16 * 3], [(0, 4), (4, 9), (9, 12)]
    places = [*bucket[1:].split([*sizes, 3])[:3], torch.zeros(16, 8, dtype=dtype, device=DEVICE).mT]
    parts = [slice(*rows) for rows in [*firsts, (12, 20)]]
    everything = CODEC.decode(NUMPY, codes.cpu().numpy(), scales.cpu().numpy())
    for ok in (YES, NO):
        found = FUSED.decoded_each(
            ok, [codes[part] for part in parts], [scales[part] for part in parts], places
        )
        for x, place, part in zip(found, places, parts, strict=True):
            assert x is place
            expected = torch.from_numpy(everything[part]).reshape(-1)[: x.numel()].to(dtype)
            assert torch.equal(x.cpu().reshape(-1), expected) if ok is YES else x.isnan().all()
    assert not bucket[:1].any()
    assert not bucket[-3:].any()


#: Of several matrices at a time: a tile and less, more, a stack, rows and columns, one that is not
#: aligned between two that are.
SHAPES_OF_PRODUCTS = [
    ((33, 130), 1),
    ((64, 128), 4),
    ((3, 17, 29), 2),
    ((5, 1), 1),
    ((1, 7), 1),
    ((40, 208), 33),
]
#: Parts of a rounding of the result, or of the sum. The interpreter cuts bfloat16 off where a
#: device rounds.
CLOSE = {torch.float32: 4e-6, torch.float64: 1e-14, torch.float16: 1e-3, torch.bfloat16: 8e-3}
#: The interpreter takes seconds for each dtype.
HERE = [torch.float32, torch.bfloat16] if DEVICE.type == "cpu" else list(CLOSE)


@pytest.mark.parametrize("dtype", HERE, ids=str)
def test_products_are_subtracted_and_multiplied_out_if_the_step_is_finite(dtype):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)

    xs, sent, before = [], [], []
    for (*stack, n, m), rank in SHAPES_OF_PRODUCTS:
        # Factors are slices of messages: rows apart, or columns.
        p, q = random(*stack, n, rank + 1)[..., :rank].mT, random(*stack, rank, m + 3)[..., :m]
        xs.append(random(*stack, n, m))
        sent.append(LowRank(p, q))
        before.append(random(*stack, n, m))
    rests, dense = ([x.clone() for x in before] for _ in range(2))
    FUSED.subtract_products_if(NO, xs, sent, rests)
    assert all(map(same_bits, rests, before))
    FUSED.subtract_products_if(YES, xs, sent, rests)
    FUSED.products_or_nan(YES, sent, dense)
    for x, (p, q), rest, whole in zip(xs, sent, rests, dense, strict=True):
        product, size = p.double().mT @ q.double(), p.double().abs().mT @ q.double().abs()
        assert (
            (rest.double() - (x.double() - product)).abs() / (x.double().abs() + size)
        ).max() < CLOSE[dtype]
        assert ((whole.double() - product).abs() / size).max() < CLOSE[dtype]
    FUSED.products_or_nan(NO, sent, dense)
    assert all(x.isnan().all() for x in dense)
    FUSED.copy_if(NO, xs, before)
    FUSED.copy_if(YES, rests, before)
    assert all(map(same_bits, rests, before))


def test_what_is_computed_of_one_does_not_depend_on_what_is_beside_it():
    """Nor on their order: buckets decide that, which are rebuilt."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(48, 160), (16, 32), (7, 5)]
    xs = [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]
    sent = [
        LowRank(*(torch.randn(3, n, generator=generator).to(DEVICE) for n in shape))
        for shape in shapes
    ]
    alone = [torch.zeros_like(x) for x in xs]
    for own in zip(xs, sent, alone, strict=True):
        FUSED.subtract_products_if(YES, *([each] for each in own))
    backwards = [torch.zeros_like(x) for x in xs]
    FUSED.subtract_products_if(YES, xs[::-1], sent[::-1], backwards[::-1])
    assert all(map(same_bits, alone, backwards))


def test_what_is_too_large_is_not_finite_where_numpys_is_not():
    """One operation for a product and its sum may make inf where two make NaN. In any order of the
    sum these are the same."""
    generator = np.random.default_rng(0)
    x = generator.choice(
        np.float32([0, 1, -2, np.inf, np.nan]), (33, 130), p=[0.3, 0.3, 0.3, 0.05, 0.05]
    )
    p, q = (generator.choice(np.float32([-1, 0, 1]), (4, n)) for n in (33, 130))
    p[2], q[2] = (generator.choice(np.float32([1, 1e30, -1e30]), n) for n in (33, 130))
    total = np.zeros_like(x)
    for column, row in zip(p, q, strict=True):
        total = total + column[:, None] * row
    y = on_device(np.zeros_like(x))
    FUSED.subtract_products_if(YES, [on_device(x)], [LowRank(on_device(p), on_device(q))], [y])
    found, expected = y.cpu().numpy(), x - total
    finite = np.isfinite(expected)
    assert 0.3 < finite.mean() < 0.7
    np.testing.assert_array_equal(np.isfinite(found), finite)
    np.testing.assert_array_equal(found[finite], expected[finite])


def test_an_error_that_does_not_lie_side_by_side_is_written_as_well():
    x, q = torch.ones(6, 4, device=DEVICE), torch.ones(1, 4, device=DEVICE)
    y = torch.zeros(4, 6, device=DEVICE).mT
    FUSED.subtract_products_if(YES, [x], [LowRank(torch.ones(1, 6, device=DEVICE), 3 * q)], [y])
    assert torch.equal(y, x - 3)
    FUSED.copy_if(YES, [x], [y])
    assert torch.equal(y, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_vectors_are_added_multiplied_and_looked_at_all_at_once(dtype, monkeypatch):
    if DEVICE.type == "cpu":  # the interpreter looks at all blocks that there could be
        monkeypatch.setattr(fused, "SEEN", 2 * fused.VECTOR)
    generator = torch.Generator().manual_seed(0)

    def whole(*shape):  # numbers that every dtype here has, and so has their sum
        return torch.randint(-64, 64, shape, generator=generator).to(dtype).to(DEVICE)

    shapes = [(1,), (5, 7), (2048,), (3, 1000), (48,)]
    xs, ys = ([whole(*shape) for shape in shapes] for _ in range(2))
    sums = [x + y for x, y in zip(xs, ys, strict=True)]
    FUSED.add_each(xs, ys)
    assert all(map(same_bits, xs, sums))
    if dtype != torch.float64:
        flat = torch.empty(sum(x.numel() for x in xs), dtype=dtype, device=DEVICE)
        FUSED.multiplied_copies(
            flat.split([x.numel() for x in xs]), [x.reshape(-1) for x in xs], 0.25
        )
        assert same_bits(flat, torch.cat([x.reshape(-1) for x in xs]) * 0.25)
    large = torch.finfo(dtype).max
    for broken, i, place in (
        (math.nan, 0, 0),
        (math.inf, 2, 2047),
        (-math.inf, 3, 2500),
        (large, 4, 3),
        (-large, 3, 0),
    ):
        seen = [*xs, torch.ones(0, device=DEVICE)]
        seen[i] = seen[i].clone()
        seen[i].view(-1)[place] = broken
        assert all(x.all() for x in FUSED.are_finite(seen)) == math.isfinite(broken)
    rows = torch.full((3, 17_001), math.nan, dtype=dtype, device=DEVICE)
    rows[:, 1:] = 0
    assert all(x.all() for x in FUSED.are_finite([rows[:, 1:]]))
    for place in ((0, 1), (2, 17_000)):
        rows[place] = math.inf
        assert not all(x.all() for x in FUSED.are_finite([rows[:, 1:], *xs]))
        rows[place] = 1


@pytest.mark.parametrize(
    ("n", "bits"), [(1, 1), (5, 3), (1100, 12), (2049, 13), (640, 8), (77, 15)]
)
def test_integers_are_packed_as_by_numpy(n, bits):
    numbers = np.random.default_rng(bits).integers(0, 1 << bits, (3, n)).astype(np.int32)
    packed = np.stack([NUMPY.pack_integers(x, bits) for x in numbers])
    for x, data in zip(numbers, packed, strict=True):
        np.testing.assert_array_equal(FUSED.pack_integers(on_device(x), bits).cpu().numpy(), data)
    wide = torch.zeros(3, packed.shape[1] + 5, dtype=torch.uint8, device=DEVICE)
    wide[:, 2:-3] = on_device(packed)
    np.testing.assert_array_equal(
        FUSED.unpack_integers(wide[:, 2:-3], bits, n).cpu().numpy(), numbers
    )


@pytest.mark.parametrize("shape", [(1, 1), (5, 16), (300, 3), (3, 40, 17)])
def test_rows_are_taken_where_they_lie(shape):
    generator = np.random.default_rng(0)
    whole = generator.integers(0, 256, (*shape[:-1], shape[-1] + 7)).astype(np.uint8)
    x = on_device(whole)[..., 3 : shape[-1] + 3]  # as parts of messages do
    rows = whole[..., 3 : shape[-1] + 3].reshape(-1, shape[-1])
    index = generator.integers(0, len(rows), 2 * len(rows) + 1).astype(np.int32)
    found = FUSED.take_rows(x, on_device(index))
    np.testing.assert_array_equal(found.cpu().numpy(), rows[index])


@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (3, 7), (40, 64), (2, 3000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_elements_are_searched_in_the_order_of_their_magnitudes(shape, dtype):
    x = on_device(rows(shape)).to(dtype)
    x.view(-1)[::3] = x.view(-1)[0]
    x[0, -1], x[-1, 0] = math.nan, -math.inf
    if shape[1] > 5:
        x[0, 2], x[0, 4] = -0.0, 0.0
    size = x.float().abs().nan_to_num(nan=math.inf, posinf=math.inf).cpu().numpy()
    keys = FUSED.search_keys(x).cpu().numpy()
    first = np.argsort(-size, axis=1, kind="stable")
    np.testing.assert_array_equal(np.argsort(-keys, axis=1), first)
    assert all(len(set(row)) == shape[1] for row in keys)


#: Numbers that are added up at a time where the kernels are interpreted, whatever is filled up: no
#: fewer than of a tile.
SHORT = 256 if DEVICE.type == "cpu" else factors.PART
#: Factors and matrices, and whether these are stored column by column: a few rows, and as many as
#: products of tiles are for; sums of more than one part; stacks.
PRODUCTS = [
    ((4, 96), 64, True),
    ((4, 96), 64, False),
    ((3, 2500), 17, True),
    ((2, 3, 40), 24, False),
    ((2, 3, 40), 24, True),
]
PRODUCTS += [
    ((1, 5), 7, False),
    ((2, 3), 1, False),
    ((4, 1), 9, True),
    ((20, 70), 33, True),
    ((20, 2100), 16, False),
]


@pytest.mark.parametrize("dtype", HERE, ids=str)
def test_all_factors_are_multiplied_with_their_matrices(dtype, monkeypatch):
    """And what comes out of one does not depend on what is beside it."""
    monkeypatch.setattr(factors, "PART", SHORT)
    ops, generator = TorchOps(DEVICE), torch.Generator().manual_seed(0)
    ops.host_knows = False

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)

    xs, ys = [], []
    for (*stack, r, k), m, along in PRODUCTS:
        if r >= 16 and dtype == torch.bfloat16 and DEVICE.type == "cpu":
            continue  # of which the interpreter multiplies the bits
        xs.append(random(*stack, r, k + 1)[..., :k])
        ys.append(random(*stack, m, k).mT if along else random(*stack, k, m))
    found = factors.multiplied(ops, xs, ys)
    for x, y, product in zip(xs, ys, found, strict=True):
        size = x.double().abs() @ y.double().abs()
        assert product.dtype == dtype
        assert ((product.double() - x.double() @ y.double()).abs() / size).max() < CLOSE[dtype]
    some = slice(2, None, 2)
    assert all(map(same_bits, factors.multiplied(ops, xs[some], ys[some]), found[some]))
    assert side_by_side(found) is not None  # to be sent as they are


def hard_factors(dtype):
    """Of several ranks, lengths and strides, in stacks; of all magnitudes; with rows that depend on
    others, clearly or nearly, rows that are zero or not finite."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    dependent, near, broken = random(4, 130), random(4, 90), random(4, 60)
    dependent[2] = dependent[0] + 1e-7 * random(130)
    dependent[3] = 0
    near[3] = near[0] + 1e-4 * random(90)
    broken[1, 3], broken[2, 5] = math.nan, math.inf
    found = [
        random(4, 1100),
        random(2, 4, 77),
        random(5, 3, 50)[:, :, ::2],
        random(1, 40),
        random(6, 5) * 1e-20,
    ]
    return [x.to(dtype) for x in (*found, random(9, 33), dependent, near, broken)]


#: Refreshed rows take the path of all others too.
ROWS = [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)]


@pytest.mark.parametrize(
    ("dtype", "refreshes"), ROWS[: 1 if DEVICE.type == "cpu" else None], ids=str
)
def test_rows_are_orthonormal_as_without_the_kernels(dtype, refreshes):
    """And what comes out of one does not depend on what is beside it."""
    ops = TorchOps(DEVICE)
    ops.host_knows = False
    given = hard_factors(dtype)
    fresh = [
        torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(dtype) for x in given
    ]
    on = [[x.to(DEVICE) for x in xs] for xs in (given, fresh if refreshes else [])]
    found = factors.orthonormalized(ops, *on)
    for x, wanted in zip(found, orthonormalized_unseen(ops, *on), strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x, wanted, rtol=0, atol=1e-6 if dtype == torch.float32 else 8e-3)
    assert all(x.isfinite().all() for x in found)
    backwards = factors.orthonormalized(ops, on[0][:3:-1], on[1][:3:-1])
    assert all(map(same_bits, backwards[::-1], found[4:]))


def test_a_compiled_program_may_hold_them():
    def program(ok, x, y):
        torch.ops.gradwire.copy_if(ok, [x * 2], out=[y])
        return y + 1

    x = torch.arange(5.0, device=DEVICE)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(YES, x, torch.zeros_like(x)), x * 2 + 1)
    assert torch.equal(compiled(NO, x, torch.zeros_like(x)), torch.ones_like(x))


cases = Cases(__file__, ranks=3)
#: Whether all of it comes out bit for bit.
WHOLE_STEPS = {
    "int8": (WireDtype(AllReduce(), "int8"), True),
    "int8 in short blocks": (Quantize("int8", block=24), True),
    "quantize": (Quantize("int8"), True),
    "quantize, in half of what is kept": (Quantize("int8", error_feedback=0.5), True),
    "low rank": (PowerSGD(2), False),
    "low rank in int8, error that decays": (
        WireDtype(PowerSGD(2, error_feedback=0.9), "int8"),
        False,
    ),
    "signs": (Sign(), False),  # a mean magnitude is rounded otherwise
}


def nan_at(at):
    def loss(model, rank, step):
        y = loss_on(40)(lambda x: model(x.to(DEVICE)).cpu(), rank, step)
        return y * math.nan if step == at and rank == 1 else y

    return loss


def trained(algorithm, world):
    """What the optimizer is given in four steps, of which the third is not finite; what is
    remembered before that, after it and in the end. The kernels are given what lies on the device,
    or, if they are interpreted, on the host."""
    ddp, handle = hooked(mlp(40, 36, 28).to(DEVICE), algorithm, world.group, message_bytes=0)
    given, memories = [], []
    for steps in ([0, 1], [2], [3]):
        before = weights(ddp.module)
        given += train(ddp, nan_at(2), steps, local=False).given
        memories.append(on_host(handle.rank_state_dict()["tensors"]))
        if steps == [2]:
            ddp.module.load_state_dict(before)
    return on_host(given), memories


def on_host(tensors):
    return tree_map_only(torch.Tensor, lambda x: x.to("cpu", copy=True), tensors)


@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="kernels that are compiled take no tensors of the CPU"
)
@cases.each(WHOLE_STEPS, slow=WHOLE_STEPS.keys() - {"int8", "quantize", "low rank", "signs"})
def test_whole_steps_are_those_without_the_kernels(world, variant):
    """On the host, where they are interpreted; else on the device, since products and sums of all
    elements are rounded otherwise there."""
    algorithm, exact = variant
    with pytest.MonkeyPatch.context() as patch, on_a_device(fused=True):
        # The interpreter looks at all blocks that there could be, of which these tensors have two,
        # and adds up all numbers of a part, of which these rows have 40.
        patch.setattr(fused, "SEEN", 2 * fused.VECTOR)
        patch.setattr(factors, "PART", SHORT)
        given, memories = trained(algorithm, world)
    with nullcontext() if DEVICE.type == "cpu" else on_a_device():
        expected, expected_memories = trained(algorithm, world)
    assert same_bits(memories[0], memories[1])
    for step, (found, wanted) in enumerate(zip(given, expected, strict=True)):
        assert world.agree({name: x.nan_to_num() for name, x in found.items()})
        for name, x in found.items():
            assert torch.equal(x.isnan(), wanted[name].isnan())
            if exact:
                assert same_bits(x.nan_to_num(), wanted[name].nan_to_num()), (step, name)
            elif step != 2:
                assert relative(x, wanted[name]) < 1e-4
    if exact:
        assert same_bits(memories[-1], expected_memories[-1])
