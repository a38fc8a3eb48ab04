"""Donation: what was given away holds NaN under `PoisonOps`. What uses it then fails: `test_testing` has such an algorithm."""

import numpy as np
import pytest

from gradwire.core.protocol import mean
from gradwire.core.simulate import NumpyOps, PoisonOps, lock_step


def arrays():
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(4, 4)), "y": rng.normal(size=(4, 4)), "thin": rng.normal(size=(2, 4))}


KERNELS = {
    "add": lambda ops, x, y, thin: ops.add(x, y, out=x),
    "divide": lambda ops, x, y, thin: ops.divide(x, y, out=x),
    "matmul": lambda ops, x, y, thin: ops.matmul(y, y, out=x),
    "subtract_product": lambda ops, x, y, thin: ops.subtract_product(y, thin, thin, out=x),
    "where": lambda ops, x, y, thin: ops.where(y > 0, y, 0.0, out=x),
    "where_lazy, true": lambda ops, x, y, thin: ops.where_lazy(np.array(True), lambda out: ops.add(y, y, out=out), x),
    "where_lazy, false": lambda ops, x, y, thin: ops.where_lazy(np.array(False), lambda out: y, x),
    "add_each": lambda ops, x, y, thin: ops.add_each([x], [y])[0],
    "scale_each": lambda ops, x, y, thin: ops.scale_each([x], y[0, 0])[0],
    "where_each, true": lambda ops, x, y, thin: ops.where_each(np.array(True), [y], [x])[0],
    "where_each, false": lambda ops, x, y, thin: ops.where_each(np.array(False), [y], [x])[0],
    "orthonormalize": lambda ops, x, y, thin: ops.orthonormalize(x[None], 0.0)[0],
    "set_row": lambda ops, x, y, thin: ops.set_row(x[None], 1, thin[None, :1])[0],
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_donated_array_is_poisoned_and_the_result_is_right(kernel):
    a, b = arrays(), arrays()
    usual = kernel(NumpyOps(), **a)
    poisoned = kernel(PoisonOps(), **b)
    np.testing.assert_array_equal(poisoned, usual)
    assert np.isnan(b["x"]).all()
    assert not np.shares_memory(poisoned, b["x"])
    # What was not donated is as it was.
    for name in ("y", "thin"):
        np.testing.assert_array_equal(b[name], arrays()[name])


def test_a_donated_payload_is_poisoned():
    kept = []

    async def program():
        x = np.ones(3)
        kept.append(x)
        return await mean(x, out=x)

    (result, _) = lock_step([program(), program()], PoisonOps())
    np.testing.assert_array_equal(result, np.ones(3))
    assert all(np.isnan(x).all() for x in kept)
