"""Known answers on JAX's devices: what compiled programs make of them, which doors look, and where
nothing can be looked at."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gradwire.jax_backend as gw
from gradwire import AllReduce, LocalSGD, PowerSGD, Quantize, Sign, Spec, WireDtype, diloco
from gradwire.core.simulate import self_check as looked_at
from gradwire.core.simulate.self_check import VARIABLE
from gradwire.jax_backend.advise.compare import run
from gradwire.jax_backend.engine import self_check as here
from gradwire.jax_backend.ops.kernels import JaxOps
from tests.methods import METHODS
from tests.parity.cases import SHAPES

AXIS = "data"
PARAMS = {"w": jnp.zeros((32, 16)), "b": jnp.zeros(16)}
QUICK = ("rank_2", "quantize")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(looked_at, "_found", {})
    monkeypatch.setattr(here, "_noted", {})
    monkeypatch.setenv(VARIABLE, "always")


@pytest.fixture
def looks(monkeypatch):
    """What was looked at, in place of the look: everything is found to be wrong."""
    seen = []

    def look(algorithm, specs, replicas, place, steps_of):
        seen.append((algorithm, {spec.dtype for spec in specs.values()}, replicas))
        return f"{algorithm!r} is wrong on {place.kind}"

    monkeypatch.setattr(here, "self_check", look)
    return seen


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in METHODS],
)
def test_compiled_programs_are_right(name):
    here.check_here(METHODS[name].algorithm, {each: Spec(shape) for each, shape in SHAPES.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rank_2", "half_step", "wire_int8", "top_k", "sign"])
def test_compiled_programs_are_right_in_bfloat16(name):
    here.check_here(
        METHODS[name].algorithm, {each: Spec(shape, "bfloat16") for each, shape in SHAPES.items()}
    )


def saturating(ops, x, *, out=None):
    return jnp.full(x.shape, 255, jnp.uint8)


MATMUL = JaxOps.matmul


def short(ops, x, y, *, out=None):
    """Of 10 bits, as TF32 has it."""
    return lax.reduce_precision(MATMUL(ops, x, y, out=out), 8, 10)


@pytest.mark.parametrize(
    ("algorithm", "kernel", "wrong", "what"),
    [
        (
            Quantize("int8"),
            "nearest_bytes",
            saturating,
            "the average of 'matrix', float32\\[256, 512\\], in step 0",
        ),
        pytest.param(PowerSGD(2), "matmul", short, "the average of", marks=pytest.mark.slow),
    ],
    ids=["saturating", "short mantissas"],
)
def test_a_kernel_that_is_wrong_when_compiled_is_refused_by_init(
    monkeypatch, algorithm, kernel, wrong, what
):
    monkeypatch.setattr(JaxOps, kernel, wrong)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"computes wrong numbers on cpu .*{what}") as refused:
            gw.average_gradients(algorithm, axis_name=AXIS).init(PARAMS)
    assert f"jax {jax.__version__}" in str(refused.value)


def test_it_looks_once(caplog):
    caplog.set_level("INFO", "gradwire")
    for _ in range(2):
        tx = gw.average_gradients(Sign(), axis_name=AXIS)
        state = tx.init(PARAMS)
        gw.replicate(state, jax.devices()[:1], axis_name=AXIS)
        gw.distribute(state, jax.make_mesh((2,), (AXIS,)), AXIS)
    assert sum("self-check of" in line for line in caplog.messages) == 1


DOORS = {
    "average_gradients": (lambda: gw.average_gradients(Sign(), axis_name=AXIS), Sign()),
    "power_sgd": (lambda: gw.power_sgd(2, axis_name=AXIS), PowerSGD(2)),
    "two levels": (lambda: gw.power_sgd(2, axis_name=AXIS, within=2), PowerSGD(2)),
    "optax.chain": (
        lambda: optax.chain(gw.power_sgd(2, axis_name=AXIS), optax.sgd(0.1)),
        PowerSGD(2),
    ),
    "local_sgd": (
        lambda: gw.local_sgd(
            optax.sgd(0.1), LocalSGD(2, compressor=Quantize("int8")), axis_name=AXIS
        ),
        Quantize("int8"),
    ),
    "zero1": (
        lambda: gw.zero1(optax.sgd(0.1), axis_name=AXIS, replicas=2, wire_dtype="int8"),
        WireDtype(AllReduce(), "int8"),
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_each_door_looks_at_its_algorithm(looks, door):
    make, algorithm = DOORS[door]
    with pytest.raises(ValueError, match="is wrong on cpu"):
        make().init(PARAMS)
    assert looks == [(algorithm, {"float32"}, 1)]


def test_compare_looks_where_init_could_not(looks):
    def make(wrap):
        state = jax.jit(wrap(optax.sgd(0.1)).init)(PARAMS)
        return gw.Training((PARAMS, state), lambda state, batch: (state, 0.0), lambda *_: [])

    with pytest.raises(ValueError, match="is wrong on cpu"):
        run(make, Sign(), 2, 1, 0, (), lambda: None)
    assert looks == [(Sign(), {"float32"}, 1)]


TRACED = {
    "eval_shape": lambda tx: jax.eval_shape(tx.init, PARAMS),
    "eval_shape of what is known": lambda tx: jax.eval_shape(
        lambda: tx.init({"w": np.zeros((32, 16), np.float32)})
    ),
    "jit": lambda tx: jax.jit(tx.init)(PARAMS),
    "ahead of time": lambda tx: jax.jit(tx.init).lower(jax.eval_shape(lambda: PARAMS)).compile(),
    "shard_map": lambda tx: jax.jit(
        jax.shard_map(
            lambda p: tx.init(p).step,
            mesh=jax.make_mesh((2,), (AXIS,)),
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        )
    )(PARAMS),
    "vmap": lambda tx: jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS)(
        {"w": jnp.ones((2, 8, 4))}
    ),
}


@pytest.mark.parametrize("way", TRACED)
def test_where_init_is_traced_nothing_is_looked_at(looks, way):
    TRACED[way](gw.average_gradients(Sign(), axis_name=AXIS))
    assert looks == []


@pytest.mark.parametrize("place", ["distribute", "replicate"])
def test_a_state_that_is_put_on_devices_catches_up(looks, place):
    state = jax.jit(gw.average_gradients(Sign(), axis_name=AXIS).init)(PARAMS)
    mesh = jax.make_mesh((2,), (AXIS,))
    put = {
        "distribute": lambda state: gw.distribute(state, mesh, AXIS),
        "replicate": lambda state: gw.replicate(state, jax.devices()[:2], axis_name=AXIS),
    }[place]
    if place == "distribute":
        jax.eval_shape(put, state)
        assert looks == []
    with pytest.raises(ValueError, match="is wrong on cpu"):
        put(state)
    assert [algorithm for algorithm, *_ in looks] == [Sign()]


def test_settings_of_the_user_have_no_part_in_it_and_stay():
    mesh = jax.make_mesh((2, 2), ("x", AXIS))
    with (
        jax.debug_nans(True),
        jax.debug_infs(True),
        jax.transfer_guard("disallow"),
        jax.set_mesh(mesh),
    ):
        here.check_here(WireDtype(AllReduce(), "int8"), {"w": Spec((4, 4))})
        assert jax.config.jax_debug_nans
        assert jax.sharding.get_abstract_mesh().axis_names == ("x", AXIS)
    assert looked_at._found == {next(iter(looked_at._found)): ""}


def test_no_accelerator_is_not_looked_at(monkeypatch, looks):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(here, "self_check", looked_at.self_check)
    monkeypatch.setattr(looked_at, "_looked", lambda *_: pytest.fail("it looks"))
    gw.average_gradients(Sign(), axis_name=AXIS).init(PARAMS)


def test_diloco_without_a_compressor_has_nothing_to_look_at(looks):
    gw.local_sgd(optax.sgd(0.1), diloco(2), axis_name=AXIS).init(PARAMS)
    assert looks == []


def test_whoever_takes_another_algorithm_meets_the_refused_one_no_more(monkeypatch):
    def look(algorithm, specs, replicas, place, steps_of):
        return "it is wrong" if algorithm == Sign() else None

    monkeypatch.setattr(here, "self_check", look)
    params = {"w": jnp.zeros((64, 64))}
    with pytest.raises(ValueError, match="it is wrong"):
        gw.average_gradients(Sign(), axis_name=AXIS).init(params)
    state = gw.power_sgd(2, axis_name=AXIS).init(params)
    gw.distribute(state, jax.make_mesh((1,), (AXIS,)), AXIS)
    gw.replicate(state, jax.devices()[:1], axis_name=AXIS)
