"""The doctor finds what is planted in JAX, and nothing else: in compiled kernels, messages and
algorithms, under each map."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gradwire import AllReduce, PowerSGD, Quantize, Sign, WireDtype
from gradwire.core.simulate.doctor.kernels import hostile
from gradwire.core.simulate.doctor.report import OK, Section
from gradwire.jax_backend.doctor import machine
from gradwire.jax_backend.doctor.checks import MAPS, check_kernels, check_messages, check_methods
from gradwire.jax_backend.ops.kernels import JaxOps

CODES = WireDtype(AllReduce(), "int8")


@pytest.fixture(autouse=True)
def traced_anew():
    jax.clear_caches()
    yield
    jax.clear_caches()


def faults_of(check, *arguments, **options):
    rows = []
    check(Section("here", rows.append, time.monotonic() + 250), *arguments, **options)
    assert rows
    return {row.check: row.detail for row in rows if row.verdict != OK}


@pytest.mark.parametrize("driver", MAPS)
def test_messages_are_right_here(driver):
    assert faults_of(check_messages, driver, jax.devices()[:3]) == {}


@pytest.mark.parametrize(
    ("driver", "algorithm"),
    [
        ("pmap", CODES),
        ("shard_map", Sign()),
        pytest.param("pmap", PowerSGD(2), marks=pytest.mark.slow),
        pytest.param("shard_map", Quantize("float8_e4m3fn"), marks=pytest.mark.slow),
        pytest.param("shard_map", PowerSGD(2, half_step=True), marks=pytest.mark.slow),
    ],
)
def test_algorithms_are_right_here(driver, algorithm):
    assert faults_of(check_methods, driver, jax.devices()[:2], [algorithm]) == {}


@pytest.mark.slow
def test_kernels_are_right_here():
    assert faults_of(check_kernels, quick=True) == {}


def saturating(patch):
    """What an H100 made of a conversion out of range."""
    patch.setattr(
        JaxOps, "nearest_bytes", lambda ops, x, *, out=None: jnp.full(x.shape, 255, jnp.uint8)
    )


def one_wrong_scale(patch):
    right = JaxOps.scales

    def scales(ops, x, largest, *, signed=False):
        scale, reciprocal = right(ops, x, largest, signed=signed)
        return scale.at[scale.shape[0] // 2].multiply(1.25), reciprocal

    patch.setattr(JaxOps, "scales", scales)


def swallowed(patch):
    right = JaxOps.max_abs
    patch.setattr(
        JaxOps, "max_abs", lambda ops, x: right(ops, jnp.nan_to_num(x, posinf=1.0, neginf=1.0))
    )


def swapped(patch):
    """Rows of a gather in another order than that of the devices."""
    right = lax.all_gather

    def flipped(*given, **options):
        return jax.tree.map(lambda x: jnp.flip(x, 0), right(*given, **options))

    patch.setattr(lax, "all_gather", flipped)


def ten_bits(patch):
    """Products as of TF32."""
    right = JaxOps.matmul

    def matmul(ops, x, y, *, out=None):
        return right(ops, *(lax.reduce_precision(jnp.asarray(z), 8, 10) for z in (x, y)), out=out)

    patch.setattr(JaxOps, "matmul", matmul)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (saturating, "codec int8"),
        (one_wrong_scale, "codec int8"),
        (swallowed, "max_abs"),
        (ten_bits, "matmul"),
    ],
)
def test_what_is_planted_in_kernels_is_found(plant, check, monkeypatch):
    plant(monkeypatch)
    monkeypatch.setattr("gradwire.jax_backend.doctor.checks.kernels.checks", few(check))
    found = faults_of(check_kernels, quick=True)
    assert any(each.startswith(check) for each in found)


def few(check):
    """The checks of that name alone: each is compiled."""
    from gradwire.core.simulate.doctor.kernels import checks

    found = {name: each for name, each in checks(quick=True).items() if name.startswith(check)}
    return lambda quick: found


@pytest.mark.parametrize("plant", [saturating, one_wrong_scale])
def test_what_is_planted_is_found_in_algorithms(plant, monkeypatch):
    plant(monkeypatch)
    assert list(faults_of(check_methods, "pmap", jax.devices()[:2], [CODES])) == [repr(CODES)]


def test_another_order_of_devices_is_found(monkeypatch):
    swapped(monkeypatch)
    (detail,) = faults_of(check_messages, "shard_map", jax.devices()[:3]).values()
    assert detail.startswith("gather on replica 0 of 3 is [200.0, ")


def test_hostile_rows_are_of_all_kinds():
    x = hostile((64, 128))
    assert (x[2] == 0).all()
    assert np.isnan(x[14]).sum() == np.isinf(x[17]).sum() == 1
    assert (np.abs(x[20]) == np.float32(1e38)).all()
    assert np.ptp(np.log2(np.abs(x[21:]).max(1))) > 60


def test_hardware_that_nobody_has_tried(monkeypatch):
    assert machine.unseen() == ""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert machine.unseen() == "TPU"
