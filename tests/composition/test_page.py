"""The page says what the tests try, and methods that begin without a dense start have a
substitute."""

import numpy as np
import pytest

from gradwire import AllReduce, Quantize, Simulator, WireDtype
from tests.composition.scenario import FEATURES
from tests.composition.table import BEGIN, DOORS, END, PAGE, page_with, rendered
from tests.composition.test_doors_in_jax import CELLS as IN_JAX
from tests.composition.test_doors_in_torch import CELLS as IN_TORCH
from tests.composition.test_two_levels_in_torch import CELLS as OF_TWO_LEVELS
from tests.methods import EVERY, VARIANTS


def test_the_page_has_the_table():
    assert PAGE.read_text().count(BEGIN) == PAGE.read_text().count(END) == 1
    assert PAGE.read_text() == page_with(rendered()), (
        "python -m tests.composition.table writes it anew"
    )


def test_every_method_is_tried_at_every_door():
    tried = {parameters.values[:2] for parameters in [*IN_TORCH, *OF_TWO_LEVELS, *IN_JAX]}
    refused = {(door, "all_reduce_buckets") for door in ("ddp", "data_parallel", "zero")}
    variants = {(door, case) for door in DOORS if door != "ddp" for case in VARIANTS}
    assert tried | refused | variants == {(door, case) for door in DOORS for case in EVERY}
    assert {parameters.values[2] for parameters in IN_TORCH} == set(FEATURES)


@pytest.mark.parametrize("dtype", ["int8", "e3m0", "bfloat16"])
def test_quantize_without_memory_is_the_wire_dtype_with_a_dense_start(dtype):
    shapes, rng = {"w": (24, 16), "b": (24,)}, np.random.default_rng(0)
    sims = [
        Simulator(algorithm, shapes, 3, dtype="float32")
        for algorithm in (
            Quantize(dtype, error_feedback=False, start_step=2),
            WireDtype(AllReduce(), dtype),
        )
    ]
    for step in range(4):
        given = [
            {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()} for _ in range(3)
        ]
        late, coded = (sim.step(given) for sim in sims)
        if step < 2:
            np.testing.assert_allclose(
                late["w"], np.mean([g["w"] for g in given], axis=0), rtol=1e-5, atol=1e-6
            )
        assert all(np.array_equal(late[n], coded[n]) == (step >= 2) for n in shapes)
