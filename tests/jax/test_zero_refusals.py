"""What cannot be sharded is refused at `init`, by the name of the primitive; what is called wrongly, while it is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradwire.jax_backend as gw
from tests.jax.replicas import AXIS, mesh_of, refused

PARAMS = {"w": jnp.ones((6, 4)), "b": jnp.ones(5)}


def sharded(inner, **options):
    return gw.zero1(inner, **{"axis_name": AXIS, "replicas": 4} | options)


def stateless(function):
    return optax.stateless(lambda updates, params: jax.tree.map(function, updates))


def scaled(factor):
    return stateless(lambda u: u * factor(u))


#: Transformation → the primitive by which it mixes elements.
MIXING = {
    "clip_by_global_norm": (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), "reduce_sum"),
    "adafactor": (optax.adafactor(0.1), "reduce_sum"),
    "adafactor, factored alone": (
        optax.adafactor(0.1, clipping_threshold=None, multiply_by_parameter_scale=False, min_dim_size_to_factor=4),
        "reduce_sum",
    ),
    "muon": (optax.contrib.muon(0.1), "transpose"),
    "lamb": (optax.lamb(0.1), "reduce_sum"),
    "lars": (optax.lars(0.1), "reduce_sum"),
    "novograd": (optax.novograd(0.1), "reduce_sum"),
    "sm3": (optax.sm3(0.1), "reduce_max"),
    "prodigy": (optax.contrib.prodigy(), "dot_general"),
    "adaptive_grad_clip": (optax.adaptive_grad_clip(0.1), "reduce_sum"),
    "clip_by_block_rms": (optax.clip_by_block_rms(0.1), "reduce_sum"),
    "centralize": (optax.centralize(), "reduce_sum"),
    "noisy_sgd": (optax.noisy_sgd(0.1, key=0), "random_bits"),
    "zero_nans": (optax.zero_nans(), "reduce_or"),
    "apply_if_finite": (optax.apply_if_finite(optax.adam(0.1), 3), "reduce_and"),
    "flatten": (optax.flatten(optax.adam(0.1)), "concatenate"),
    "skipped when not finite": (
        optax.MultiSteps(optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite),
        "reduce_sum",
    ),
    "position": (scaled(lambda u: jnp.arange(u.size).reshape(u.shape)), "iota"),
    "an array of constants": (
        optax.stateless(lambda u, p: {"w": u["w"] * np.eye(6, 4), "b": u["b"]}),
        "an array of constants",
    ),
    "sorted": (stateless(lambda u: jnp.sort(u)), "sort"),
    "transposed": (stateless(lambda u: u.T.reshape(u.shape)), "transpose"),
    "a loop": (stateless(lambda u: jax.lax.fori_loop(0, 9, lambda i, x: jnp.roll(x, i), u)), "scan"),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_elements_is_named(name):
    inner, primitive = MIXING[name]
    with refused(primitive, "check=False"):
        sharded(inner).init(PARAMS)


def test_the_message_says_what_and_where_and_how():
    fix = "clip_by_global_norm(max_norm, axis_name='data')"
    with refused("(reduce_sum, in the update of 'b')", fix, "averaged=True"):
        sharded(optax.clip_by_global_norm(1.0)).init(PARAMS)
    with refused("(reduce_or, in the state 'found_nan.b')"):
        sharded(optax.zero_nans()).init(PARAMS)


def test_a_scalar_parameter_is_no_number_for_the_others():
    params = PARAMS | {"s": jnp.ones(())}
    sharded(optax.stateless(lambda u, p: u | {"s": u["s"] * p["s"]})).init(params)
    for where in ("w", "b"):
        meets = optax.stateless(lambda u, p, where=where: u | {where: u[where] * p["s"]})
        with refused("in the update of", repr(where)):
            sharded(meets).init(params)


def kept(of):
    """Scales by a state of its own, made from a parameter by `init`."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(of, params),
        lambda updates, state, params=None: (jax.tree.map(lambda u, s: u * s, updates, state), state),
    )


#: Ways to scale by the number of inputs, as muP does; and a branch and a mask.
BY_SHAPE = {
    "branch": scaled(lambda u: 2.0 if u.shape[0] == 6 else 1.0),
    "mask": optax.masked(optax.add_decayed_weights(0.1), lambda p: jax.tree.map(lambda x: x.shape[0] > 5, p)),
    "literal": scaled(lambda u: 1 / u.shape[-1]),
    "NumPy's full": scaled(lambda u: np.full(u.shape, 1 / u.shape[0], np.float32)),
    "full_like": scaled(lambda u: jnp.full_like(u, 1 / u.shape[0])),
    "an array of the shape": scaled(lambda u: 1 / jnp.asarray(u.shape)[0]),
    "counted": scaled(lambda u: 1 / jnp.ones(u.shape).sum()),
    "counted by a product": scaled(lambda u: 1 / jnp.prod(np.asarray(u.shape))),
    "state, full_like": kept(lambda x: jnp.full_like(x, 1 / x.shape[0])),
    "state, a scalar": kept(lambda x: jnp.float32(1 / x.shape[0])),
    "state, NumPy's scalar": kept(lambda x: np.float32(1 / x.shape[0])),
    "state, full of no axes": kept(lambda x: jnp.full((), 1 / x.shape[0])),
    "state, counted": kept(lambda x: 1 / jnp.ones_like(x).sum()),
}


@pytest.mark.parametrize("name", BY_SHAPE)
def test_what_is_decided_by_shape(name):
    inner = optax.chain(BY_SHAPE[name], optax.sgd(0.1))
    with refused("the shape of a parameter", "check=False"):
        sharded(inner).init(PARAMS)
    with refused("the shape of a parameter", "check=False"):
        jax.eval_shape(sharded(inner).init, PARAMS)


def test_what_knows_no_shape_passes():
    """Rates by name, numbers in the state, counters, schedules."""
    rates = {"w": 0.5, "b": np.full((), 0.25, np.float32)}
    by_name = optax.stateless(lambda u, p: jax.tree.map(lambda x, rate: x * rate, u, rates))
    schedule = optax.join_schedules([optax.constant_schedule(0.1), optax.cosine_decay_schedule(0.1, 9)], [5])
    for inner in (
        by_name,
        kept(lambda x: jnp.full_like(x, 0.5)),
        kept(lambda x: jnp.float32(x.ndim)),
        optax.adamw(schedule),
    ):
        sharded(optax.chain(inner, optax.sgd(0.1))).init(PARAMS)


def test_what_evaluates_the_loss_by_itself():
    with refused("value_fn", "optax.lbfgs", "check=False", error=TypeError):
        sharded(optax.lbfgs()).init(PARAMS)


def test_a_state_of_another_shape():
    first = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros((2, *p.shape)), params),
        lambda updates, state, params: (updates, jax.tree.map(lambda s, u: s + u[None], state, updates)),
    )
    with refused("state", "'b'"):
        sharded(first).init(PARAMS)


@pytest.mark.parametrize("name", ["clip_by_global_norm", "lamb", "zero_nans", "position"])
def test_check_false_lets_it_pass(name):
    tx = sharded(MIXING[name][0], check=False)
    state = tx.init(PARAMS)
    specs = gw.partition_specs(state, AXIS)
    step = jax.shard_map(
        lambda g, s: tx.update(g, s, g), mesh=mesh_of(4), in_specs=(P(), specs), out_specs=(P(), specs), check_vma=False
    )
    after = jax.eval_shape(step, PARAMS, state)[1]
    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, state)


def test_what_cannot_be_traced_says_how_to_go_on():
    needy = optax.GradientTransformationExtraArgs(
        lambda p: optax.EmptyState(), lambda u, s, p=None, *, needed, **_: (jax.tree.map(lambda x: x * needed, u), s)
    )
    with refused("needed", "check=False", error=TypeError):
        sharded(needy).init(PARAMS)
    assert sharded(needy, check=False).init(PARAMS).pieces.per_replica == {}
