"""Known answers: right kernels give them, in every method, and a planted fault does not. What each
backend makes of them: beside its other tests."""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from gradwire import (
    AllReduce,
    Compressor,
    PowerSGD,
    Quantize,
    Sign,
    Spec,
    TopK,
    TwoLevel,
    WireDtype,
)
from gradwire.core.algorithms.two_level import without_levels
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.simulate import self_check as looked_at
from gradwire.core.simulate.known_answers import SHAPES, known_specs, known_steps
from gradwire.core.simulate.lock_step import lock_step
from gradwire.core.simulate.self_check import VARIABLE, Place, self_check
from tests.methods import EVERY, VARIANTS
from tests.parity.cases import SHAPES as NAMED

DEVICE, CPU = (Place(kind, "numpy", on_cpu=kind == "cpu") for kind in ("an accelerator", "cpu"))
SPECS = {name: Spec(shape) for name, shape in NAMED.items()}


@dataclass
class Kernels:
    """Steps by some kernels."""

    ops: NumpyOps
    algorithm: object
    dtype: str
    after: object = None

    def first_memory(self, specs):
        return self.algorithm.init(self.ops, specs)

    def step(self, known):
        gradients = [{name: x.astype(self.dtype) for name, x in g.items()} for g in known.gradients]
        pairs = zip(gradients, known.before, strict=True)
        programs = [
            self.algorithm.step(self.ops, g, s.map(np.array), known.number) for g, s in pairs
        ]
        results = lock_step(programs, self.ops)
        states = [s.map(np.array) for _, s in results]
        for state in states if self.after else ():
            self.after(state)
        return [averages for averages, _ in results], states


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(looked_at, "_found", {})
    monkeypatch.delenv(VARIABLE, raising=False)


def checked(algorithm, ops=None, *, after=None, replicas=2, place=DEVICE, dtype="float32"):
    specs = {name: Spec(spec.shape, dtype) for name, spec in SPECS.items()}
    return self_check(
        algorithm,
        specs,
        replicas,
        place,
        lambda what, dtype: Kernels(ops or NumpyOps(), what, dtype, after),
    )


def rows(names):
    return [
        pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else ()) for name in names
    ]


@pytest.mark.parametrize("name", rows(EVERY))
def test_right_kernels_pass(name):
    assert checked(EVERY[name].algorithm) == ""


@pytest.mark.parametrize("name", ["rank_2", "quantize"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_right_kernels_pass_in_each_dtype(name, dtype):
    assert checked(EVERY[name].algorithm, dtype=dtype, replicas=3) == ""


class Saturating(NumpyOps):
    """As an H100 did it where a conversion was out of range."""

    def nearest_bytes(self, x, *, out=None):
        return np.full(x.shape, 255, np.uint8)


class OneWrongScale(NumpyOps):
    """Of the blocks of a tensor one is decoded by twice its scale."""

    def scales(self, x, largest, *, signed=False):
        scales, reciprocals = super().scales(x, largest, signed=signed)
        if len(scales) > 20:
            scales[-20] *= 2
        return scales, reciprocals


class ShortMantissas(NumpyOps):
    """Products of numbers of which 10 bits count, as TF32 has it."""

    def matmul(self, x, y, *, out=None):
        return super().matmul(self._short(x), self._short(y), out=out)

    def _short(self, x):
        return (
            ((x.view(np.int32) + 0x1000) & ~0x1FFF).view(np.float32) if x.dtype == np.float32 else x
        )


class SwallowsInProducts(NumpyOps):
    def matmul(self, x, y, *, out=None):
        return super().matmul(np.nan_to_num(x), np.nan_to_num(y), out=out)


class SwallowsInMaxima(NumpyOps):
    def max_abs(self, x):
        return np.fmax.reduce(np.abs(np.nan_to_num(x, posinf=0)), axis=-1, keepdims=True, initial=0)


class OtherHash(NumpyOps):
    """Random numbers that no other framework draws."""

    def iota(self, n):
        return super().iota(n) + 1


@pytest.mark.parametrize(
    ("algorithm", "ops", "what"),
    [
        (Quantize("int8"), Saturating(), "the average of 'matrix'"),
        (WireDtype(PowerSGD(4), "int8"), Saturating(), "the average of"),
        (Quantize("int4", block=32), OneWrongScale(), "the average of '"),
        (WireDtype(AllReduce(), "int8"), OneWrongScale(), "the average of '"),
        (PowerSGD(4), ShortMantissas(), "the average of 'matrix'"),
        (PowerSGD(2, half_step=True), ShortMantissas(), "the average of 'matrix'"),
        (PowerSGD(4), SwallowsInProducts(), "it was swallowed"),
        (Quantize("int8"), SwallowsInMaxima(), "it was swallowed"),
        (PowerSGD(4), OtherHash(), "the memory 'q' of 'matrix'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, NumpyOps) else None,
)
@pytest.mark.parametrize("replicas", [1, 3])
def test_wrong_kernels_are_found(algorithm, ops, what, replicas):
    found = checked(algorithm, ops, replicas=replicas)
    assert what in found
    assert "computes wrong numbers on an accelerator" in found
    assert "gradwire doctor" in found
    assert f"{VARIABLE}=0" in found


@pytest.mark.parametrize(
    "algorithm", [Quantize("int8"), PowerSGD(4), TopK(8, per=64), Sign()], ids=repr
)
def test_an_error_memory_that_is_wrong_while_averages_are_right_is_found(algorithm):
    def spoil(state):
        state.tensors["ragged.1"]["error"] *= 1.5

    assert "the memory 'error' of 'ragged.1', float32[67, 129], in step 0" in checked(
        algorithm, after=spoil
    )


def test_a_factor_that_is_wrong_for_the_next_step_is_found():
    def spoil(state):
        state.tensors["matrix"]["q"] += 1e-2

    assert "the memory 'q' of 'matrix'" in checked(PowerSGD(4), after=spoil)


def test_a_phase_that_does_not_advance_is_found():
    def spoil(state):
        state.shared["phase"] = np.zeros_like(state.shared["phase"])

    assert "the shared state 'phase' in step 0 is 0 and not 1" in checked(
        PowerSGD(2, half_step=True), after=spoil
    )


def test_it_looks_once_for_each_algorithm_dtype_and_number_of_replicas(caplog):
    caplog.set_level("INFO", "gradwire")
    for algorithm, replicas in [
        (Sign(), 2),
        (Sign(), 2),
        (TwoLevel(Sign(), within=4), 2),
        (Sign(), 3),
        (Sign(), 64),
    ]:
        checked(algorithm, replicas=replicas)
    checked(Sign(), dtype="float64")
    assert sum("self-check of Sign()" in line for line in caplog.messages) == 3
    assert "on an accelerator, once (GRADWIRE_SELFCHECK=0 leaves it out)" in caplog.text


def test_a_verdict_is_remembered():
    first = checked(Quantize("int8"), Saturating())
    assert first
    assert checked(Quantize("int8"), NumpyOps()) == first


@pytest.mark.parametrize(
    ("value", "place", "looks"),
    [
        (None, CPU, False),
        (None, DEVICE, True),
        ("1", CPU, False),
        ("1", DEVICE, True),
        ("0", DEVICE, False),
        ("always", CPU, True),
    ],
)
def test_where_it_looks(monkeypatch, value, place, looks):
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert bool(checked(Quantize("int8"), Saturating(), place=place)) is looks


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "off")
    with pytest.raises(ValueError, match="GRADWIRE_SELFCHECK='off' must be 0"):
        checked(Sign())


def test_what_numpy_cannot_run_is_left_out_and_said(caplog):
    class OfTorch(Compressor):
        def memory(self, ops, name, spec):
            return {}

        async def compress(self, ops, name, x, memory, context):
            return x.sign(), x.sign(), memory

    caplog.set_level("INFO", "gradwire")
    assert checked(OfTorch(), Saturating()) == ""
    assert "NumPy, which knows the answers, cannot run it" in caplog.text


def test_a_device_that_fails_is_said_and_nothing_is_refused(caplog):
    class OutOfMemory(NumpyOps):
        def max_abs(self, x):
            raise MemoryError("out of memory")

    assert checked(Quantize("int8"), OutOfMemory()) == ""
    assert "came to no end, and nothing is known: MemoryError('out of memory')" in caplog.text


def test_the_steps_are_of_each_kind():
    """Dense ones, each phase twice, and two that are not finite."""

    @cache
    def numbers(algorithm):
        return [
            step.number for step in known_steps(algorithm, known_specs(algorithm, "float32"), 1)
        ]

    assert numbers(Sign()) == [0, 1, 2, 2]
    assert numbers(PowerSGD(2, half_step=True)) == [0, 1, 2, 3, 4, 4]
    assert numbers(PowerSGD(2, start_step=7)) == [0, 7, 8, 9, 9]
    *_, nan, inf = known_steps(Sign(), known_specs(Sign(), "float32"), 2)
    assert math.isnan(nan.gradients[-1]["matrix"][-1, -1])
    assert math.isinf(inf.gradients[-1]["matrix"][-1, -1])


def test_of_a_high_rank_matrices_are_larger_and_names_are_the_users():
    assert known_specs(PowerSGD(150), "float32")["matrix"].shape == (512, 1024)
    by_name = known_specs(
        PowerSGD({"big/*": 2, "conv": 2}), "bfloat16", SPECS | {"big/a": Spec((50_000, 4096))}
    )
    assert by_name["conv"] == Spec(NAMED["conv"], "bfloat16")
    assert by_name["big/a"].size <= 1 << 17
    assert len(by_name["big/a"].shape) == 2
    assert {name: spec.shape for name, spec in by_name.items() if name in SHAPES} == SHAPES


def test_what_all_methods_are_allowed_is_far_from_garbage():
    """An average of zeros is found in all of them."""
    for name in (
        "rank_2",
        "quantize",
        "two_bits",
        "wire_e3m0",
        "top_k",
        "sign",
        "one_bit",
        "by_chance",
    ):
        algorithm = without_levels(EVERY[name].algorithm)
        for dtype in ("float32", "bfloat16"):
            step = next(known_steps(algorithm, known_specs(algorithm, dtype), 2))
            nothing = {name: np.zeros_like(x) for name, x in step.averages.items()}
            assert "the average of" in step.wrong([nothing] * 2, step.after)
