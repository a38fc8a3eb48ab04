"""A codec that a user writes, in one file: simulator, torch, JAX and plans send 3 bits."""

from dataclasses import dataclass

import numpy as np
import pytest

from gradwire import AllReduce, Quantize, Simulator, WireDtype, plan
from gradwire.core.codecs import CODECS, Codec, Scaled, register_codec
from gradwire.testing import check
from tests.torch.ranks import Cases

cases = Cases(__file__, ranks=2)
SHAPES = {"w": (24, 40), "b": (9,)}
#: Of float32 rounded once more or less, and not of a code that is another one: those are a third of
#: the largest element apart.
CLOSE = 1e-5


@dataclass(frozen=True)
class ThreeBits(Scaled):
    """Whole multiples of the scale, -3 to 3."""

    bits = 3
    largest = 3.0
    dithers = True

    def codes(self, ops, y, dither):
        return ops.nearest_bytes(y if dither is None else ops.add(y, dither, out=y)) & 7

    def values(self, ops, codes):
        return ops.cast(ops.view_as(codes ^ 4, "int8") - 4, "float32")


@pytest.fixture
def registered():
    register_codec("own3")(ThreeBits)
    yield
    del CODECS["own3"]


def methods():
    return {"quantize": Quantize("own3"), "wire": WireDtype(AllReduce(), "own3", block=16)}


def gradients(step):
    rng = np.random.default_rng(step)
    return [{n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()} for _ in range(2)]


def expected(algorithm):
    simulator = Simulator(algorithm, SHAPES, 2, dtype="float32")
    return [simulator.step(gradients(step)) for step in range(3)]


def require_close(algorithm, found):
    for given, right in zip(found, expected(algorithm), strict=True):
        for name in SHAPES:
            np.testing.assert_allclose(np.asarray(given[name]), right[name], rtol=0, atol=CLOSE)


@cases.each({"quantize": "quantize", "wire": "wire"})
def averaged(world, name):
    import torch

    from gradwire.torch_backend import Averager

    register_codec("own3")(ThreeBits)
    averager = Averager(
        methods()[name], {n: torch.zeros(s) for n, s in SHAPES.items()}, world.group
    )
    own = [gradients(step)[world.rank] for step in range(3)]
    return [
        {n: x.clone() for n, x in averager({n: torch.from_numpy(x) for n, x in g.items()}).items()}
        for g in own
    ]


@pytest.mark.parametrize("name", ["quantize", "wire"])
def test_torch_sends_it_as_the_simulator_does(results, name, registered):
    for found in results(f"averaged[{name}]"):
        require_close(methods()[name], found)


@pytest.mark.parametrize("name", ["quantize", "wire"])
def test_jax_sends_it_as_the_simulator_does(name, registered):
    import jax

    from gradwire.jax_backend import average_gradients

    tx = average_gradients(methods()[name], axis_name="data")
    state = jax.vmap(
        lambda _: tx.init({n: np.zeros(s, np.float32) for n, s in SHAPES.items()}), axis_name="data"
    )(np.zeros(2))
    step, found = jax.jit(jax.vmap(tx.update, axis_name="data")), []
    for number in range(3):
        given = {n: np.stack([g[n] for g in gradients(number)]) for n in SHAPES}
        updates, state = step(given, state)
        found.append({n: x[0] for n, x in updates.items()})
    require_close(methods()[name], found)


def test_it_keeps_every_promise_and_plans_count_three_bits_and_a_scale(registered):
    check(Quantize("own3"))
    planned = plan({"w": (512, 512)}, Quantize("own3"))
    assert planned.wire_bytes / planned.dense_bytes == (3 + 32 / 128) / 32
    Quantize("own3", stochastic=True)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
def test_codes_of_any_number_of_bits_fill_their_bytes(bits):
    from gradwire.core.codecs.codec import _pack, _unpack
    from gradwire.core.simulate import NumpyOps

    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 24)).astype(np.uint8)
    packed = _pack(NumpyOps(), codes, bits)
    assert packed.shape == (3, 3 * bits)
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(_unpack(NumpyOps(), packed, bits), codes)


def test_what_is_no_codec_and_a_name_that_is_taken_are_refused(registered):
    with pytest.raises(ValueError, match=r"'int8'.*Integers has this name"):
        register_codec("int8")(ThreeBits)
    with pytest.raises(TypeError, match="subclass of Codec"):
        register_codec("int5")(dict)
    with pytest.raises(TypeError, match="abstract"):
        register_codec("int5")(Codec)
    for bits in (0, 9, 3.0):
        with pytest.raises(ValueError, match=rf"bits={bits}; codes have 1 to 8 bits"):
            register_codec("int5")(type("Wide", (ThreeBits,), {"bits": bits}))
    assert "int5" not in CODECS
    with pytest.raises(ValueError, match="'int5'"):
        Quantize("int5")
    assert register_codec("own3")(ThreeBits) is ThreeBits  # a cell that runs again
