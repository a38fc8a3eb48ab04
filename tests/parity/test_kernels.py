"""Every kernel of `core/ops.py` means the same in NumPy, torch and JAX, traced or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (bfloat16 in NumPy)
import numpy as np
import pytest
import torch

from gradwire.core.kernels.gram_schmidt import gram_schmidt, refresh
from gradwire.core.simulate import NumpyOps, PoisonOps
from gradwire.jax_backend.ops import JaxOps
from gradwire.torch_backend.kernels import TorchOps
from gradwire.torch_backend.scratch import Scratch

Run = Callable[[Callable[..., Any], dict[str, np.ndarray]], np.ndarray]


def _copies(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k: v.copy() for k, v in arrays.items()}


def in_numpy(kernel, arrays):
    return np.asarray(kernel(NumpyOps(), **_copies(arrays)))


def in_poison(kernel, arrays):
    return np.asarray(kernel(PoisonOps(), **_copies(arrays)))


def _tensor(x: np.ndarray) -> torch.Tensor:
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def _from_tensor(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.int16).numpy().view("bfloat16") if x.dtype == torch.bfloat16 else x.numpy()


def in_torch(kernel, arrays):
    return _from_tensor(kernel(TorchOps(torch.device("cpu")), **{k: _tensor(v) for k, v in arrays.items()}))


def in_torch_scratch(kernel, arrays):
    """Twice in the same memory: the second time it is dirty."""
    ops, memory = TorchOps(torch.device("cpu")), Scratch()
    for _ in range(2):
        memory.rewind()
        with ops.scratch(memory):
            result = kernel(ops, **{k: _tensor(v) for k, v in arrays.items()})
    return _from_tensor(result)


def in_torch_unseen(kernel, arrays):
    """As on an accelerator, where the host does not look at what is computed."""
    ops = TorchOps(torch.device("cpu"))
    ops._host_knows = False
    return _from_tensor(kernel(ops, **{k: _tensor(v) for k, v in arrays.items()}))


def in_jax(kernel, arrays):
    return np.asarray(kernel(JaxOps(), **{k: jnp.asarray(v) for k, v in arrays.items()}))


def in_jit(kernel, arrays):
    return np.asarray(jax.jit(lambda a: kernel(JaxOps(), **a))(arrays))


FRAMEWORKS: list[Run] = [in_poison, in_torch, in_torch_scratch, in_torch_unseen, in_jax, in_jit]


#: Half precision where it makes a difference; each kernel is compiled once only.
SETTINGS = [
    pytest.param(run, dtype, id=f"{run.__name__}-{dtype}")
    for run in FRAMEWORKS
    for dtype in ("float32", "bfloat16", "float16")
    if dtype == "float32" or run in (in_poison, in_torch, in_torch_unseen, in_jax)
]
#: What a matrix of six rows holds.
FIVE_COLUMNS = [(2, 3), (), (3, 0), (2, 1, 2), (11,)]
#: May be views, or an argument itself.
VIEWS = ("where, true", "where, false", "nan_unless, true", "rows_before", "rows of one", "row_of", "row_of, padded")
#: By contract; the others donate what they are given as `out`.
DONATE = (
    *("set_row", "orthonormalize", "orthonormalize, epsilon", "add_each, first", "add_each, last"),
    *("where_each, true", "where_each, false", "where_each, neighbours"),
    *("scale_each, first", "scale_each, last"),
)


def arrays(dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"x": (6, 5), "y": (6, 5), "p": (2, 6), "q": (2, 5), "batch": (3, 4, 7), "v": (9,)}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def true(ops, x):
    return ops.all_finite(x)


def false(ops, x):
    return ops.all_finite(x * float("nan"))


KERNELS: dict[str, Callable[..., Any]] = {
    "add": lambda ops, x, y, **_: ops.add(x, y),
    "add, out": lambda ops, x, y, **_: ops.add(x, y, out=x),
    "divide": lambda ops, x, y, **_: ops.divide(x, ops.where(y > 0, y, 2.0)),
    "divide, out": lambda ops, batch, **_: ops.divide(batch, ops.norm(batch), out=batch),
    "matmul": lambda ops, x, q, **_: ops.matmul(q, x.mT),
    "matmul, out": lambda ops, x, y, p, q, **_: ops.matmul(p.mT, q, out=x),
    "matmul, batch": lambda ops, batch, **_: ops.matmul(batch, batch.mT),
    "subtract_product": lambda ops, x, p, q, **_: ops.subtract_product(x, p, q),
    "subtract_product, out": lambda ops, x, y, p, q, **_: ops.subtract_product(x, p, q, out=y),
    "subtract_product, batch": lambda ops, batch, **_: ops.subtract_product(
        batch[:, :3], ops.row(batch, 3)[:, :, :3], ops.row(batch, 2)
    ),
    "where, true": lambda ops, x, y, **_: ops.where(true(ops, x), x, y),
    "where, false": lambda ops, x, y, **_: ops.where(false(ops, x), x, y),
    "where, false, number": lambda ops, x, **_: ops.where(false(ops, x), x, float("nan")),
    "where, false, out": lambda ops, x, y, **_: ops.where(false(ops, x), y, x, out=x),
    "where, each, number, out": lambda ops, x, y, **_: ops.where(y > 0, x, 0.0, out=x),
    "where, each, out": lambda ops, x, y, **_: ops.where(y > 0, x, y, out=y),
    "where_lazy, true": lambda ops, x, y, **_: ops.where_lazy(true(ops, x), lambda out: ops.add(x, x, out=out), y),
    "where_lazy, false": lambda ops, x, y, **_: ops.where_lazy(false(ops, x), lambda out: ops.add(x, x, out=out), y),
    "add_each, first": lambda ops, x, y, p, q, **_: ops.add_each([x, p], [y, p * 2.0])[0],
    "add_each, last": lambda ops, x, y, p, q, **_: ops.add_each([x, p], [y, p * 2.0])[1],
    "add_each, of nothing": lambda ops, x, **_: ops.stack([x, *ops.add_each([], [])]),
    "where_each, true": lambda ops, x, y, p, **_: ops.where_each(true(ops, x), [p, x], [p * 2.0, y])[1],
    "where_each, false": lambda ops, x, y, p, **_: ops.where_each(false(ops, x), [p, x], [p * 2.0, y])[1],
    "where_each, neighbours": lambda ops, batch, x, **_: ops.stack(
        ops.where_each(true(ops, x), [batch[0], batch[1], batch[2]], list(ops.stack([batch[2]] * 3)))
    ),
    "nan_unless, true": lambda ops, x, y, **_: ops.nan_unless(true(ops, x), [x, y])[1],
    "nan_unless, false": lambda ops, x, y, **_: ops.nan_unless(false(ops, x), [x, y])[1],
    "all_finite, true": lambda ops, x, **_: ops.all_finite(x),
    "all_finite, false": lambda ops, x, **_: ops.all_finite(x[2] * float("inf")),
    "all_finite, empty": lambda ops, v, **_: ops.all_finite(v[:0]),
    "max_abs": lambda ops, batch, **_: ops.max_abs(batch),
    "max_abs, empty": lambda ops, v, **_: ops.max_abs(v[:0].reshape((1, 0))),
    "norm": lambda ops, batch, **_: ops.norm(batch),
    "norm_of_all": lambda ops, x, v, batch, **_: ops.norm_of_all([x, v, batch, v[:0]]),
    "norm_of_all, of nothing": lambda ops, **_: ops.norm_of_all([]),
    "scale_each, first": lambda ops, x, v, **_: ops.scale_each([x, v], ops.norm_of_all([v]))[0],
    "scale_each, last": lambda ops, x, v, **_: ops.scale_each([x, v], ops.norm_of_all([v]))[1],
    "loop": lambda ops, x, **_: ops.loop(6, lambda i, z: ops.add(z, ops.row(x, i)), x),
    "rows_before": lambda ops, batch, **_: ops.rows_before(batch, 2)[:, :2],
    "set_row": lambda ops, batch, **_: ops.set_row(batch, 1, ops.row(batch, 3) * 2.0),
    "stack": lambda ops, x, y, **_: ops.stack([x, y, x]),
    "stack of one": lambda ops, x, **_: ops.stack([x]),
    "pad": lambda ops, v, **_: ops.pad(v, 12),
    "rows": lambda ops, x, v, q, **_: ops.rows([x, v, q[:0], q[1]], 4),
    "rows of one": lambda ops, x, **_: ops.rows([x], 2),
    "rows, join": lambda ops, x, v, **_: ops.rows([v, x], 1),
    "rows, of nothing": lambda ops, v, **_: ops.rows([v[:0]], 3),
    "from_rows, first": lambda ops, x, **_: ops.from_rows(x, FIVE_COLUMNS)[0],
    "from_rows, scalar": lambda ops, x, **_: ops.from_rows(x, FIVE_COLUMNS)[1],
    "from_rows, nothing": lambda ops, x, **_: ops.from_rows(x, FIVE_COLUMNS)[2],
    "from_rows, last": lambda ops, x, **_: ops.from_rows(x, FIVE_COLUMNS)[3],
    "from_rows, out": lambda ops, x, y, p, v, **_: ops.from_rows(x, [(9,), (2, 6), (1, 5)], out=[v, p, y[:1]])[0],
    "from_rows, last out": lambda ops, x, y, p, v, **_: ops.from_rows(x, [(9,), (2, 6), (1, 5)], out=[v, p, y[:1]])[2],
    "from_rows, many": lambda ops, batch, **_: ops.stack(
        ops.from_rows(ops.rows([batch[0], batch[1], batch[2]] * 4, 3), [batch[0].shape] * 12)
    ),
    "row_of": lambda ops, x, **_: ops.row_of(x, 3, 1),
    "row_of, padded": lambda ops, v, **_: ops.row_of(v, 4, 2),
    "row_of, padding alone": lambda ops, v, **_: ops.row_of(v[:2], 4, 3),
    "row_of, nothing": lambda ops, v, **_: ops.row_of(v[:0], 4, 1),
    "zeros": lambda ops, x, **_: ops.zeros((2, 3), ops.dtype_of(x)),
    "cast": lambda ops, x, **_: ops.cast(ops.cast(x, "float32"), "float16"),
    "constant": lambda ops, x, **_: ops.constant(("k",), lambda: ops.zeros((2,), "float32")),
    "refresh": lambda ops, x, p, q, v, **_: refresh(ops, ops.set_row(ops.stack([x, x]), 1, ops.zeros((2, 1, 5), ops.dtype_of(x))), ops.stack([x, x])),
    "gram_schmidt": lambda ops, batch, **_: gram_schmidt(ops, batch),
    "gram_schmidt, out": lambda ops, batch, **_: gram_schmidt(ops, batch, out=batch),
    "orthonormalize": lambda ops, batch, **_: ops.orthonormalize(batch, 0.0),
    "orthonormalize_each, first": lambda ops, batch, p, **_: ops.orthonormalize_each([batch[0], p, batch[2]], [], 0.0)[0],
    "orthonormalize_each, second": lambda ops, batch, p, **_: ops.orthonormalize_each([batch[0], p, batch[2]], [], 0.0)[1],
    "orthonormalize_each, last": lambda ops, batch, p, **_: ops.orthonormalize_each([batch[0], p, batch[2]], [], 0.0)[2],
    "orthonormalize_each, stack": lambda ops, batch, p, **_: ops.orthonormalize_each([batch[1], batch, p], [], 0.0)[1],
    "orthonormalize_each, beside a stack": lambda ops, batch, **_: ops.orthonormalize_each([batch, batch[1]], [], 0.0)[1],
    "orthonormalize_each, stack and fresh": lambda ops, x, batch, **_: ops.orthonormalize_each(
        [ops.set_row(ops.stack([batch[0], batch[1], batch[2]]), 1, ops.zeros((3, 1, 7), ops.dtype_of(x)))], [ops.stack([batch[1], batch[2], batch[0]])], 0.0
    )[0],
    "orthonormalize_each, fresh": lambda ops, x, p, q, **_: ops.orthonormalize_each(
        [ops.set_row(ops.stack([p]), 1, ops.zeros((1, 1, 6), ops.dtype_of(x)))[0], q], [x.mT[3:], x[4:]], 0.0
    )[0],
    "orthonormalize_each, not finite": lambda ops, x, p, q, **_: ops.orthonormalize_each(
        [ops.cast(p * float("nan"), ops.dtype_of(p)), q], [x.mT[3:], x[4:]], 0.0
    )[0],
    "orthonormalize_each, epsilon": lambda ops, batch, p, **_: ops.orthonormalize_each([batch[0], p], [], 0.5)[1],
    "orthonormalize, epsilon": lambda ops, batch, **_: ops.orthonormalize(batch, 0.5),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(("run", "dtype"), SETTINGS)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_kernels_agree_with_numpy(request, run, kernel, dtype):
    expected = in_numpy(kernel, arrays(dtype))
    if run in (in_jax, in_jit) and "float16" in (dtype, expected.dtype.name):
        request.getfixturevalue("float16_in_jax")
    result = run(kernel, arrays(dtype))
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 4e-2}.get(expected.dtype.name, 0)
    np.testing.assert_allclose(result.astype(float), expected.astype(float), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "kernel", [k for k in KERNELS if not k.endswith("out") and "lazy" not in k and k not in DONATE]
)
def test_without_out_nothing_is_overwritten(kernel):
    """In torch, where it could be."""
    given = {k: _tensor(v) for k, v in arrays("float32").items()}
    result = KERNELS[kernel](TorchOps(torch.device("cpu")), **given)
    if result.dtype == torch.float32 and kernel not in VIEWS:
        result.fill_(7.0)  # nor is the result a view of an argument
    for name, value in arrays("float32").items():
        np.testing.assert_array_equal(given[name].numpy(), value)


def hard_matrices() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    usual = rng.normal(size=(2, 6, 20))
    dependent = usual.copy()
    dependent[:, 3:] = dependent[:, :3] + dependent[:, 1:2]
    bad = usual.copy()
    bad[0, 2, 5], bad[1, 0, 0] = np.nan, np.inf
    zeros = usual.copy()
    zeros[:, 4] = 0
    ill = usual * np.geomspace(1, 1e-5, 6)[:, None]
    near = usual.copy()
    near[:, 5] = near[:, 0] + 1e-3 * near[:, 5]
    return {
        "usual": usual, "zero rows": zeros, "all zero": usual * 0, "dependent": dependent, "not finite": bad, "ill scaled": ill,
        "nearly dependent": near, "1e-30": usual * 1e-30, "1e30": usual * 1e30, "dependent, 1e-30": dependent * 1e-30,
        "dependent, 1e30": dependent * 1e30, "more rows than columns": usual[:, :, :4], "one column": usual[:, :, :1],
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("run", FRAMEWORKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", hard_matrices())
def test_orthonormal_rows_agree_on_hard_input(run, name):
    given = {"x": hard_matrices()[name].astype(np.float32)}

    def each(ops, x):
        return ops.stack(ops.orthonormalize_each([x[0], x[1]], [], 0.0))

    expected = in_numpy(each, given)
    rows = run(each, given)
    assert np.isfinite(rows).all()
    # Which rows are dependent is decided alike, and the others are the same up to the conditioning.
    np.testing.assert_array_equal(np.abs(rows).max(-1) > 0, np.abs(expected).max(-1) > 0)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-3 if name == "nearly dependent" else 2e-6)
