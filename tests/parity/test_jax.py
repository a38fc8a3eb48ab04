"""`jax.pmap` and `jax.shard_map` on forced CPU devices, against the float64 oracle."""

import jax
import pytest

from tests.methods import METHODS, VARIANTS
from tests.parity.cases import STEPS, assert_compressed, assert_same
from tests.parity.jax_driver import run

#: Compiling is what takes the time: every method under pmap, under the other drivers those whose programs differ in kind.
DIFFERENT = ["half_step", "start_step", "all_reduce_buckets", "int8", "top_k"]
SLOW = [
    *((case, "pmap", 4) for case in VARIANTS),
    *((case, "shard_map", 3) for case in DIFFERENT),
    *((case, "shard_map", 3) for case in ("rank_2", "cold_start", "square", "rank_by_name", "views", "sometimes_zero")),
    *((case, "shard_map_vma", 2) for case in ("rank_2", "all_reduce", "views", "max_norm", "sign")),
]
ROWS = [
    *((case, "pmap", 4) for case in METHODS if case not in VARIANTS),
    *((case, "shard_map_vma", 3) for case in DIFFERENT),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW),
]


@pytest.mark.parametrize(("case", "driver", "replicas"), ROWS)
def test_equals_the_oracle(case, driver, replicas):
    updates, memory = run(case, driver, jax.devices()[:replicas])
    for step in range(STEPS):
        assert_same(case, step, updates[step], memory[step])
    assert_compressed(case, replicas)
