"""`jax.pmap` and `jax.shard_map` on forced CPU devices, against the float64 oracle."""

import jax
import pytest

from tests.methods import METHODS, VARIANTS
from tests.parity.cases import SHAPES, STEPS, assert_compressed, assert_same
from tests.parity.jax_driver import run

#: Compiling is what takes the time: every method once, those whose programs differ in kind under another driver than the others.
DIFFERENT = ["half_step", "start_step", "all_reduce_buckets", "int8", "top_k"]
#: Of the parameters two of one shape, a tensor of four axes and two that are not compressed; all of them where views are what is tested.
FEW = ("w", "v", "conv", "b", "s")
WHOLE = ("half_step", "rank_by_name", "views", "views_half_step", "views_cold_start")
#: All of them under both maps. Variants differ from others in numbers alone.
SLOW = [
    *((case, "pmap", 4) for case in (*VARIANTS, *DIFFERENT)),
    *(
        (case, "shard_map", 3)
        for case in (*DIFFERENT, "rank_2", "cold_start", "square", "rank_by_name", "views", "sometimes_zero")
    ),
    *((case, "shard_map_vma", 2) for case in METHODS if case not in (*VARIANTS, *DIFFERENT)),
]
ROWS = [
    *((case, "pmap", 4) for case in METHODS if case not in (*VARIANTS, *DIFFERENT)),
    *((case, "shard_map_vma", 3) for case in DIFFERENT),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW),
]


@pytest.mark.parametrize(("case", "driver", "replicas"), ROWS)
def test_equals_the_oracle(case, driver, replicas):
    names = tuple(SHAPES) if case in WHOLE else FEW
    updates, memory = run(case, driver, jax.devices()[:replicas], names)
    for step in range(STEPS):
        assert_same(case, step, updates[step], memory[step], names)
    assert_compressed(case, replicas, names)
