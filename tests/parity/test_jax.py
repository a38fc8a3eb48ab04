"""`jax.pmap` and `jax.shard_map` on forced CPU devices, and two real JAX processes, against the float64 oracle."""

import pickle
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.launch import jax_processes
from tests.methods import METHODS
from tests.parity.cases import SHAPES, STEPS, assert_compressed, assert_same
from tests.parity.jax_driver import run

#: Compiling is what takes the time: every method under pmap, under the other drivers those whose programs differ in kind.
DIFFERENT = ["half_step", "start_step", "all_reduce_buckets", "int8", "top_k"]
#: Of the same program as "rank_2" but for numbers.
ALIKE = ["rank_1", "rank_4", "rank_deficient", "no_error_feedback", "sometimes_zero", "views_cold_start"]
SLOW = [
    *((case, "pmap", 4) for case in ALIKE),
    *((case, "shard_map", 3) for case in DIFFERENT),
    *((case, "shard_map", 3) for case in ("rank_2", "cold_start", "square", "rank_by_name", "views", "sometimes_zero")),
    *((case, "shard_map_vma", 2) for case in ("rank_2", "all_reduce", "views", "max_norm", "sign")),
]
ROWS = [
    *((case, "pmap", 4) for case in METHODS if case not in ALIKE),
    *((case, "shard_map_vma", 3) for case in DIFFERENT),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW),
]
PROCESSES = ["half_step", "top_k"]


@pytest.mark.parametrize(("case", "driver", "replicas"), ROWS)
def test_equals_the_oracle(case, driver, replicas):
    updates, memory = run(case, driver, jax.devices()[:replicas])
    for step in range(STEPS):
        assert_same(case, step, updates[step], memory[step])
    assert_compressed(case, replicas)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    jax_processes(Path(__file__).with_name("jax_worker.py"), 2, str(folder), *PROCESSES, timeout=250)
    return [pickle.loads((folder / f"{i}.pkl").read_bytes()) for i in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", PROCESSES)
def test_two_processes_equal_the_oracle(two_processes, case):
    (updates, first), (others, second) = (t[case] for t in two_processes)
    assert all(np.array_equal(a[n], b[n]) for a, b in zip(updates, others, strict=True) for n in SHAPES)
    for step in range(STEPS):
        assert_same(case, step, updates[step], [*first[step], *second[step]])
    assert_compressed(case, 2)
