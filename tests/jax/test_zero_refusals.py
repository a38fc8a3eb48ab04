"""What does something else on pieces than on whole parameters is refused at `init`, and nothing
else is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradwire.jax_backend as gw
from gradwire.jax_backend.zero.elementwise import PATIENCE
from tests.jax.replicas import AXIS, mesh_of, refused

pytestmark = pytest.mark.slow

PARAMS = {"w": jnp.ones((6, 4)), "b": jnp.ones(5)}
SCALED = PARAMS | {"s": jnp.ones(())}


def sharded(inner, **options):
    return gw.zero1(inner, **{"axis_name": AXIS, "replicas": 4} | options)


def stateless(function):
    return optax.stateless(lambda updates, params: jax.tree.map(function, updates))


def scaled(factor):
    return stateless(lambda u: u * factor(u))


def kept(of):
    """Scales by a state of its own, made from a parameter by `init`."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(of, params),
        lambda updates, state, params=None: (
            jax.tree.map(lambda u, s: u * s, updates, state),
            state,
        ),
    )


def late(tx, step):
    """Begins after so many steps."""
    return optax.conditionally_transform(tx, lambda count: count >= step)


NEEDY = optax.GradientTransformationExtraArgs(
    lambda p: optax.EmptyState(),
    lambda u, s, p=None, *, needed, **_: (jax.tree.map(lambda x: x * needed, u), s),
)
FIRST = optax.GradientTransformation(
    lambda params: jax.tree.map(lambda p: jnp.zeros((2, *p.shape)), params),
    lambda updates, state, params: (
        updates,
        jax.tree.map(lambda s, u: s + u[None], state, updates),
    ),
)

UPDATE = "the update of"
LAMB = optax.lamb(0.1)
FACTORED = optax.adafactor(
    0.1, clipping_threshold=None, multiply_by_parameter_scale=False, min_dim_size_to_factor=4
)
BY_FINITE = optax.MultiSteps(optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite)


def by_rows(tx):
    """For parameters of more than five rows, as muP masks."""
    return optax.masked(tx, lambda params: jax.tree.map(lambda x: x.shape[0] > 5, params))


#: What does not work on pieces, and what the message names.
REFUSED = [
    (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), "the state '1.0.mu.b'"),
    (optax.clip_by_global_norm(1e5), "the update of 'b'"),  # far above
    (optax.adafactor(0.1), UPDATE),
    (FACTORED, "the state '0.v_row.w'"),
    (optax.contrib.muon(0.1), "update of 'w'"),
    (LAMB, UPDATE),
    (optax.sm3(0.1), "the state"),
    (optax.adaptive_grad_clip(0.1), UPDATE),
    (optax.centralize(), "the update of 'w'"),
    (optax.noisy_sgd(0.1, key=0), UPDATE),
    (optax.zero_nans(), "the state 'found_nan.b'"),
    (optax.apply_if_finite(optax.adam(0.1), 3), UPDATE),
    (optax.flatten(optax.adam(0.1)), "which no parameter has"),
    (BY_FINITE, "the state"),
    (optax.MultiSteps(LAMB, PATIENCE), UPDATE),
    (optax.MultiSteps(LAMB, PATIENCE + 1), "no update"),
    (optax.chain(optax.apply_every(9), LAMB), UPDATE),
    (late(optax.clip_by_global_norm(1.0), 1000), UPDATE),
    (stateless(lambda u: u + (u != 0).any()), UPDATE),
    (scaled(lambda u: jnp.arange(u.size).reshape(u.shape)), UPDATE),
    (stateless(lambda u: u.at[(0,) * u.ndim].set(0)), UPDATE),
    (optax.stateless(lambda u, p: u | {"w": u["w"] * np.eye(6, 4)}), "raised"),
    (stateless(lambda u: u.T.reshape(u.shape)), "the update of 'w'"),
    (optax.lbfgs(), "which no parameter has"),
    (NEEDY, "needed"),
    (FIRST, "the state 'b'"),
    # Ways to scale by the number of inputs, as muP does: a branch, a mask, numbers.
    (scaled(lambda u: 2.0 if u.shape[0] == 6 else 1.0), "the update of 'w'"),
    (by_rows(optax.add_decayed_weights(0.1)), "the update of 'w'"),
    (by_rows(optax.adam(0.1)), "state"),
    (scaled(lambda u: 1 / u.shape[-1]), UPDATE),
    (scaled(lambda u: jnp.full_like(u, 1 / u.shape[0])), UPDATE),
    (scaled(lambda u: 1 / jnp.ones(u.shape).sum()), UPDATE),
    (kept(lambda x: jnp.full_like(x, 1 / x.size)), "the state"),
    (kept(lambda x: jnp.float32(1 / x.size)), "the state"),
]


@pytest.mark.parametrize(("inner", "named"), REFUSED, ids=[*map(str, range(len(REFUSED)))])
def test_what_does_not_work_on_pieces(inner, named):
    with refused(named, "elementwise=True"):
        sharded(inner).init(PARAMS)


def test_a_scalar_parameter_is_no_number_for_the_others():
    sharded(optax.stateless(lambda u, p: u | {"s": u["s"] * p["s"]})).init(SCALED)
    with refused("the update of 'b'"):
        sharded(optax.stateless(lambda u, p: u | {"b": u["b"] * p["s"]})).init(SCALED)


def test_it_is_tried_for_any_number_of_replicas_and_where_init_is_traced():
    inner, right = optax.centralize(), optax.adam(0.1)
    for replicas in (1, 2, 50):
        with refused("the update of 'w'", "elementwise=True"):
            jax.eval_shape(sharded(inner, replicas=replicas).init, PARAMS)
        jax.eval_shape(sharded(right, replicas=replicas).init, PARAMS)
    for maps in (
        lambda f: jax.vmap(f, axis_name=AXIS, axis_size=4, in_axes=None),
        lambda f: jax.shard_map(
            f, mesh=mesh_of(4), in_specs=P(), out_specs=P(AXIS), check_vma=False
        ),
    ):
        for traced in (maps, lambda f, maps=maps: jax.jit(maps(f))):
            with refused("the update of 'w'", "elementwise=True"):
                traced(lambda p: sharded(inner).init(p).pieces)(PARAMS)
            traced(lambda p: sharded(right).init(p).pieces)(PARAMS)
    jax.config.update("jax_debug_nans", True)  # some gradients of the trial are NaN
    try:
        sharded(right).init(PARAMS)
    finally:
        jax.config.update("jax_debug_nans", False)


def test_a_trial_is_small():
    """Of parameters that no memory holds."""
    huge = {f"w{i}": jax.ShapeDtypeStruct((1 << 20, 1 << 16), jnp.bfloat16) for i in range(3)}
    jax.eval_shape(sharded(optax.adam(0.1)).init, huge)
    with refused("the state 'v_row.w0'"):
        jax.eval_shape(sharded(optax.scale_by_factored_rms()).init, huge)


def test_what_decides_by_sizes_is_refused_by_real_ones():
    """A trial shortens these matrices below 128, from which on they are factored."""
    matrices = {f"w{i}": jax.ShapeDtypeStruct((24, 256, 256), jnp.float32) for i in range(40)}
    with refused("the state 'v_row.w0'", "(24, 256)"):
        jax.eval_shape(sharded(optax.scale_by_factored_rms()).init, matrices)


def test_what_knows_no_shape_passes():
    """Rates by name, numbers in the state, counters, schedules, accumulation, other dtypes, a
    learning rate that starts at zero, parameters that do not move."""
    rates = {"w": 0.5, "b": np.full((), 0.25, np.float32), "s": 2.0}
    by_name = optax.stateless(lambda u, p: jax.tree.map(lambda x, rate: x * rate, u, rates))
    schedule = optax.join_schedules(
        [optax.constant_schedule(0.0), optax.cosine_decay_schedule(0.1, 9)], [5]
    )
    frozen = optax.multi_transform(
        {"a": optax.lion(0.1), "b": optax.set_to_zero()}, {"w": "a", "b": "b", "s": "a"}
    )
    for inner in (
        by_name,
        kept(lambda x: jnp.full_like(x, 0.5)),
        kept(lambda x: jnp.float32(x.ndim)),
        optax.adamw(schedule),
        optax.MultiSteps(optax.adam(0.1), PATIENCE),
        late(optax.clip(1.0), 1000),
        frozen,
        optax.chain(gw.clip_by_global_norm(1.0, AXIS), optax.lion(0.1, mu_dtype=jnp.bfloat16)),
        optax.adabelief(0.1),
        optax.adagrad(schedule),
        optax.rmsprop(schedule, centered=True, momentum=0.9),
        optax.chain(
            optax.clip(0.5), optax.add_decayed_weights(0.1), optax.sgd(0.1, 0.9, nesterov=True)
        ),
        optax.contrib.schedule_free_adamw(0.1),
        optax.inject_hyperparams(optax.adamw)(learning_rate=schedule),
        optax.masked(optax.adam(0.1), {"w": True, "b": False, "s": True}),
    ):
        sharded(inner).init(
            {name: x.astype(jnp.bfloat16 if name == "w" else x.dtype) for name, x in SCALED.items()}
        )


def test_elementwise_lets_it_pass():
    tx = sharded(LAMB, elementwise=True)
    state = tx.init(PARAMS)
    specs = gw.partition_specs(state, AXIS)
    step = jax.shard_map(
        lambda g, s: tx.update(g, s, g),
        mesh=mesh_of(4),
        in_specs=(P(), specs),
        out_specs=(P(), specs),
        check_vma=False,
    )
    after = jax.eval_shape(step, PARAMS, state)[1]
    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, state)
    assert sharded(NEEDY, elementwise=True).init(PARAMS).pieces.per_replica == {}


def test_weights_are_refused_where_nobody_weighs():
    """Not ignored."""
    params, given = {"w": jnp.zeros(4)}, {"w": jnp.ones((2, 4))}
    for told in ({"weight": 1.0}, {"settings": {"rank": 2}}):
        tx = gw.zero1(optax.sgd(1.0), axis_name=AXIS, replicas=2)
        step = lambda g, tx=tx, told=told: tx.update(g, tx.init(params), params, **told)  # noqa: E731
        with refused(f"{next(iter(told))}=", "averaged=True"):
            jax.vmap(step, axis_name=AXIS)(given)


def test_a_gradient_of_none_is_named():
    params = {"w": jnp.zeros(4), "b": jnp.zeros(4)}
    tx = gw.zero1(optax.sgd(1.0, 0.9), axis_name=AXIS, replicas=2)
    step = lambda g: tx.update({"w": g, "b": None}, tx.init(params), params)  # noqa: E731
    with refused("without a gradient: 'b'"):
        jax.eval_shape(jax.vmap(step, axis_name=AXIS), jnp.ones((2, 4)))


def test_a_trial_moves_numbers_whoever_forbids_it():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    with jax.transfer_guard("disallow"):
        jax.eval_shape(sharded(optax.adam(0.1)).init, shapes)


def test_clipping_where_dtypes_are_not_promoted():
    params = {"w": jnp.ones((4, 3), jnp.bfloat16), "b": jnp.ones(3)}
    inner = optax.chain(gw.clip_by_global_norm(1.0, AXIS), optax.sgd(0.1))
    with jax.numpy_dtype_promotion("strict"):
        tx = gw.zero1(inner, axis_name=AXIS, replicas=2)
        step = lambda g: tx.update(g, tx.init(params), params)[0]  # noqa: E731
        given = jax.tree.map(lambda x: jnp.stack([x, x]), params)
        updates = jax.vmap(step, axis_name=AXIS)(given)
    norm = np.sqrt(sum(np.square(np.float64(x[0])).sum() for x in jax.tree.leaves(updates)))
    assert norm == pytest.approx(0.1, rel=1e-2)
