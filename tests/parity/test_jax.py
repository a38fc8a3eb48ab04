"""`jax.pmap` and `jax.shard_map` on forced CPU devices, against the float64 oracle."""

import jax
import numpy as np
import pytest

from tests.methods import METHODS, VARIANTS
from tests.parity.cases import SHAPES, STEPS, assert_compressed, assert_same
from tests.parity.jax_driver import run, step_of

#: Compiling is what takes the time: every method once, those whose programs differ in kind under another driver than the others. Of
#: variants those that have kernels of their own.
DIFFERENT = ["half_step", "start_step", "all_reduce_buckets", "int8", "top_k"]
NUMBERS = ["rank_1", "rank_4", "rank_deficient", "no_error_feedback", "error_decay", "sometimes_zero"]
OTHERS = [case for case in METHODS if case not in (*VARIANTS, *DIFFERENT)]
#: Of the parameters two of one shape, a tensor of four axes and two that are not compressed; all of them where views are what is tested.
FEW = ("w", "v", "conv", "b", "s")
WHOLE = ("half_step", "rank_by_name", "views", "views_half_step", "views_cold_start")
ROWS = [
    *((case, "pmap", 4) for case in OTHERS),
    *((case, "shard_map_vma", 3) for case in DIFFERENT),
    *(pytest.param(case, "shard_map", 3, marks=pytest.mark.slow) for case in VARIANTS if case not in NUMBERS),
]


@pytest.mark.parametrize(("case", "driver", "replicas"), ROWS)
def test_equals_the_oracle(case, driver, replicas):
    names = tuple(SHAPES) if case in WHOLE else FEW
    updates, memory = run(case, driver, jax.devices()[:replicas], names)
    for step in range(STEPS):
        assert_same(case, step, updates[step], memory[step], names)
    assert_compressed(case, replicas, names)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_is_typed_under_vma(case):
    """What is equal on all replicas, and what is not, as JAX knows it before XLA compiles anything."""
    names = tuple(SHAPES) if case in WHOLE else FEW
    step, params, state, placed = step_of(case, "shard_map_vma", jax.devices()[:2], names)
    given = {name: np.zeros((2, *SHAPES[name]), np.float32) for name in names}
    updates, _ = jax.eval_shape(step, params, given, placed(state))
    assert {name: x.shape for name, x in updates.items()} == {name: SHAPES[name] for name in names}
