"""Parameters that are compressed as one stack come out as each does by itself."""

import numpy as np
import pytest

from gradwire.core.algorithms.compressor import StepContext
from gradwire.core.algorithms.power_sgd import PowerSGD
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.ops import Spec
from gradwire.core.programs import run
from gradwire.core.requests import Reduce

OPS = NumpyOps()


def answer(request):
    """Of one replica."""
    return request.arrays if isinstance(request, Reduce) else request.answer()


@pytest.mark.parametrize("shape", [(12, 16), (2, 12, 16), (4, 3, 16)])
@pytest.mark.parametrize("half_step", [False, True])
@pytest.mark.parametrize("phase", [0, 1])
def test_a_stack_is_its_members(shape, half_step, phase):
    stacked = {"*": 1} if shape[0] == 2 else {}
    algorithm = PowerSGD(2, half_step=half_step, stacked=stacked, transpose=("*",), min_compression_rate=0.1)
    names = ("a", "b", "c")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, *shape))
    memory = {name: algorithm.memory(OPS, name, Spec(shape, "float64")) for name in names}
    memory["b"]["q"] = 0 * memory["b"]["q"]  # lost, and drawn anew by the name of each
    for own in memory.values():
        if half_step and phase == 1:
            own["p"] = rng.standard_normal(own["p"].shape)
    context = StepContext(0, phase if half_step else 0)
    together = {key: np.stack([memory[name][key] for name in names]) for key in memory["a"]}
    assert len({algorithm.alike(name, shape, memory[name]) for name in names}) == 1
    sent, received, after = run(algorithm.compress_stack(OPS, names, x, together, context), answer)
    for i, name in enumerate(names):
        own_sent, own_received, own_after = run(algorithm.compress(OPS, name, x[i], memory[name], context), answer)
        for stack, own in ((sent, own_sent), (received, own_received)):
            dense = (stack.p.mT @ stack.q).reshape(x.shape)[i]
            np.testing.assert_allclose(dense, (own.p.mT @ own.q).reshape(shape), rtol=1e-9, atol=1e-12)
        for key, value in own_after.items():
            np.testing.assert_allclose(after[key][i], value, rtol=1e-9, atol=1e-12)
