"""`jax.pmap` and `jax.shard_map` on forced CPU devices, against the float64 oracle."""

import jax
import pytest

from tests.parity.cases import CASES, assert_compressed, assert_same
from tests.parity.jax_driver import run


@pytest.mark.parametrize(("driver", "replicas"), [("pmap", 4), ("shard_map", 3), ("shard_map_vma", 2)])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(case: str, driver: str, replicas: int) -> None:
    updates, errors = run(case, driver, jax.devices()[:replicas])
    assert_same(case, replicas, updates, errors)
    assert_compressed(case, replicas)
