"""Three products of bfloat16 are enough for PowerSGD on a TPU: they are emulated here, where the
program for a TPU would take them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from gradwire import PowerSGD
from gradwire.jax_backend import average_gradients
from gradwire.jax_backend.ops.kernels import JaxOps
from tests.bounds import noting, relative
from tests.jax.replicas import AXIS, Replicas

#: Two that are a stack, one whose error is not added to it, and one whose factors are no thin ones.
SHAPES = {"a0": (24, 16), "a1": (24, 16), "large": (256, 256), "thick": (192, 384)}
RANKS = {"a*": 2, "large": 4, "thick": 18}
STEPS = 6


@pytest.fixture(autouse=True)
def traced_anew():
    yield
    jax.clear_caches()


def for_a_tpu(monkeypatch, products):
    """What is traced for a TPU, with products at "high" as so many products of bfloat16. Not a cast
    and back, which XLA takes for superfluous."""
    jax.clear_caches()
    exact = lax.dot_general

    def parts(x):
        first = lax.reduce_precision(x, 8, 7)
        return first, lax.reduce_precision(x - first, 8, 7)

    def dot_general(x, y, numbers, *, precision, **options):
        if precision != lax.Precision.HIGH:
            return exact(x, y, numbers, precision=precision, **options)
        pairs = [
            (a, b) for i, a in enumerate(parts(x)) for j, b in enumerate(parts(y)) if i + j < 2
        ][:products]
        return sum(
            exact(a, b, numbers, precision=lax.Precision.HIGHEST, **options) for a, b in pairs
        )

    def platform_dependent(*arrays, default, tpu=None, **others):
        return (tpu or default)(*arrays)

    monkeypatch.setattr(lax, "dot_general", dot_general)
    monkeypatch.setattr(lax, "platform_dependent", platform_dependent)


def gradients(ranks, seed, scale):
    """Of two replicas, each of so low a rank."""
    rng = np.random.default_rng(seed)

    def matrix(name, n, m):
        left, right = (rng.standard_normal((side, ranks[name])) for side in (n, m))
        return np.float32(scale * left @ right.T)

    return [{name: matrix(name, *shape) for name, shape in SHAPES.items()} for _ in range(2)]


def missed(products, monkeypatch):
    """In parts of the gradients: what averages of low rank, small and huge, are wrong by; and what
    is neither sent nor remembered of those of full rank."""
    algorithm = PowerSGD(RANKS, min_compression_rate=1.0)
    with monkeypatch.context() as patch:
        for_a_tpu(patch, products)
        start = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
        run = Replicas(average_gradients(algorithm, axis_name=AXIS), start, 2, "vmap")
        low, lost, size, half = (
            0.0,
            0.0,
            dict.fromkeys(SHAPES, 0.0),
            {"a0": 1, "a1": 1, "large": 2, "thick": 9},
        )
        for seed, scale in enumerate((1.0, 0.0, 1e15)):
            given = gradients(half, seed, scale)
            got = run.update(given)
            for name in SHAPES:
                mean = (given[0][name] + given[1][name]) / 2
                size[name] = max(
                    size[name], np.linalg.norm(mean)
                )  # after zeros, what was left of the step before is sent
                low = max(low, np.linalg.norm(got[name] - mean) / size[name])

        def errors():
            own = run.global_state().local.per_replica["error"]
            return {name: np.mean(np.float64(own[name]), axis=0) for name in SHAPES}

        given, before, sent = (
            gradients(dict.fromkeys(SHAPES, 192), 3, 1e15),
            errors(),
            dict.fromkeys(SHAPES, 0.0),
        )
        for _ in range(STEPS):
            got = run.update(given)
            sent = {name: sent[name] + np.float64(got[name]) for name in SHAPES}
        for name, after in errors().items():
            mean = STEPS * (np.float64(given[0][name]) + given[1][name]) / 2
            kept = mean + before[name] - after
            lost = max(lost, np.linalg.norm(sent[name] - kept) / np.linalg.norm(mean))
    return low, lost


def test_three_products_of_bfloat16_are_enough_and_one_is_not(monkeypatch):
    low, lost = missed(3, monkeypatch)
    assert low < 1e-3
    assert lost < 2e-5
    low, lost = missed(1, monkeypatch)
    assert low > 1e-2
    assert lost > 2e-4


def test_rows_are_made_orthonormal_exactly(monkeypatch):
    """Gram-Schmidt's own products are exact: those of rows that are nearly dependent need it."""
    for_a_tpu(monkeypatch, 3)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((1, 1, 256)) + 1e-5 * rng.standard_normal((2, 8, 256))
    [basis] = JaxOps().orthonormalize_each([jnp.asarray(rows, jnp.float32)], [], 0.0)
    basis = np.asarray(basis, np.float64)
    assert noting(float(np.abs(basis @ basis.swapaxes(1, 2) - np.eye(8)).max())) < 2e-5
    assert relative(rows @ basis.swapaxes(1, 2) @ basis, rows) < 4e-6  # nothing but rows is in it


def test_only_a_tpu_takes_less_than_the_highest_precision():
    tx = average_gradients(PowerSGD(RANKS, min_compression_rate=1.0), axis_name=AXIS)
    given = {name: jnp.zeros((2, *shape)) for name, shape in SHAPES.items()}
    state = tx.init({name: x[0] for name, x in given.items()})
    step = jax.jit(jax.vmap(lambda g: tx.update(g, state)[0], axis_name=AXIS))
    for platform, fewer in (("cpu", False), ("cuda", False), ("tpu", True)):
        text = export.export(step, platforms=[platform])(given).mlir_module()
        assert "HIGHEST" in text
        assert ("precision = [HIGH," in text) == fewer
