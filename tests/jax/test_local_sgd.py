"""Local SGD as its users call it, with averages that are taken later, and what it does to the
memory of inner and outer optimizers."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax import lax

import gradwire.jax_backend as gw
from gradwire import LocalSGD, PowerSGD, diloco, plan
from tests.jax.replicas import AXIS, mesh_of, refused
from tests.parity.outer_steps import by_hand, drift

TARGET = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
SLOPE = np.array([1.0, 1.7], np.float32)


def gradient(w, replica, step, sin=jnp.sin):
    """Of two replicas that want to go to different places, which move."""
    return SLOPE_OF[sin][replica] * (w - TARGET_OF[sin][replica] - sin(0.3 * step))


SLOPE_OF = {jnp.sin: jnp.asarray(SLOPE), np.sin: SLOPE.astype(np.float64)}
TARGET_OF = {jnp.sin: jnp.asarray(TARGET), np.sin: TARGET.astype(np.float64)}


def train_two(txs, steps):
    """For each transformation: the parameter after every step and the state in the end, a row for
    each of two replicas."""

    def run(state):
        results = {}
        for name, tx in txs.items():

            def one(carry, step, tx=tx):
                params, opt_state = carry
                gradients = {"w": gradient(params["w"], lax.axis_index(AXIS), step)}
                updates, opt_state = tx.update(gradients, opt_state, params)
                params, opt_state = tx.average_params(
                    optax.apply_updates(params, updates), opt_state
                )
                return (params, opt_state), params["w"]

            (_, after), trace = lax.scan(one, gw.this_replica(state)[name], jnp.arange(steps))
            results[name] = trace, gw.stack_replicas(after)
        return results

    params = {"w": jnp.zeros((3, 4))}
    start = gw.stack_replicas({name: (params, tx.init(params)) for name, tx in txs.items()})
    devices = jax.devices()[:2]
    after = jax.pmap(run, AXIS, devices=devices)(gw.replicate(start, devices))
    return {
        name: (np.asarray(w), gw.unreplicate(state).per_replica)
        for name, (w, state) in after.items()
    }


@pytest.mark.parametrize("optimizer", [optax.scale_by_adam, optax.scale_by_sm3])
def test_moments_are_kept_averaged_or_begun_anew(optimizer):
    """Also where they are a list of arrays for each parameter."""
    inner = optax.chain(optimizer(), optax.scale_by_schedule(lambda step: -0.1 / (1 + step)))
    choices = ("keep", "average", "reset")
    after = train_two(
        {what: gw.local_sgd(inner, LocalSGD(4), axis_name=AXIS, moments=what) for what in choices},
        6,
    )
    trace = after["keep"][0]
    assert all(np.array_equal(trace[:, :4], after[what][0][:, :4]) for what in choices)

    def alone(state, replica, trace, steps):
        """The state of a replica's optimizer after these steps, of which all but the fourth lead
        where they led here."""
        for step in steps:
            before = trace[replica, step - 1] if step else np.zeros((3, 4), np.float32)
            update, state = inner.update({"w": gradient(before, replica, step)}, state)
            assert step == 3 or np.allclose(
                trace[replica, step], before + update["w"], rtol=1e-4, atol=1e-6
            )
        return state

    fresh = inner.init({"w": jnp.zeros((3, 4))})
    kept = [alone(fresh, replica, trace, range(4)) for replica in range(2)]
    mean = jax.tree.map(lambda *x: jnp.stack(x).mean(0).astype(x[0].dtype), *kept)
    for what, begin in (
        ("keep", kept),
        ("average", [mean] * 2),
        ("reset", [(fresh[0], kept[0][1])] * 2),
    ):
        trace, state = after[what]  # where a schedule goes on
        for replica in range(2):
            mine = jax.tree.map(lambda x, replica=replica: x[replica], state.inner)
            for x, y in zip(
                *map(jax.tree.leaves, (mine, alone(begin[replica], replica, trace, (4, 5)))),
                strict=True,
            ):
                assert np.allclose(x, y, rtol=1e-4, atol=1e-6)


def test_accumulation_inside_counts_micro_steps():
    """Two gradients per update, four of them per average: as with twice the batch and half the
    period."""
    tx = gw.local_sgd(optax.MultiSteps(optax.sgd(0.1), 2), LocalSGD(4), axis_name=AXIS)
    (trace, _), w = train_two({"it": tx}, 8)["it"], [np.zeros((3, 4))] * 2
    for step in range(0, 8, 2):
        w = [
            x - 0.05 * (gradient(x, r, step, np.sin) + gradient(x, r, step + 1, np.sin))
            for r, x in enumerate(w)
        ]
        w = [(w[0] + w[1]) / 2] * 2 if step % 4 == 2 else w
        for r in range(2):
            assert np.allclose(trace[r, step + 1], w[r], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("moments", ["keep", "average", "reset"])
def test_an_average_between_micro_steps_loses_no_gradient(moments):
    """Nor the place of a schedule; the moments inside begin anew."""
    inner = optax.MultiSteps(optax.sgd(optax.linear_schedule(0.1, 0.3, 2), momentum=0.5), 2)
    tx = gw.local_sgd(inner, LocalSGD(3), axis_name=AXIS, moments=moments)

    def run(params, state):
        for _ in range(6):
            updates, state = tx.update({"w": jnp.ones(3)}, state, params)
            params, state = tx.average_params(optax.apply_updates(params, updates), state)
        return params["w"], state.inner

    w, inner = jax.vmap(run, axis_name=AXIS, axis_size=2)(
        {"w": jnp.zeros((2, 3))},
        jax.vmap(tx.init, axis_size=2, axis_name=AXIS)({"w": jnp.zeros((2, 3))}),
    )
    assert inner.gradient_step.tolist() == [3, 3]
    # rates 0.1, 0.2, 0.3; the momentum of the second step is that of one gradient where it is anew
    moved = 0.1 + 0.2 * (1.0 if moments == "reset" else 1.5)
    moved += 0.3 * (1.5 if moments == "reset" else 1.75)
    np.testing.assert_allclose(w, np.full((2, 3), -moved), rtol=1e-5)


def test_under_vmap_an_average_is_sent_only_when_it_is_due():
    """As DrJAX maps replicas, with `jax.jit` inside too. A branch on a number that has an axis for
    the replicas would become a selection, and be taken always."""
    period, steps = 3, 7
    tx = gw.diloco(optax.sgd(0.1), period, axis_name=AXIS, start_step=1)
    params = {"w": jnp.zeros((3, 4))}
    mesh = mesh_of(2)
    state = gw.replicate(
        gw.stack_replicas((params, tx.init(params))), jax.devices()[:2], axis_name=AXIS
    )

    def step(state, replica):
        params, opt_state = gw.this_replica(state)
        gradients = {"w": gradient(params["w"], replica, opt_state.averages.step)}
        updates, opt_state = tx.update(gradients, opt_state, params)
        return gw.stack_replicas(tx.average_params(optax.apply_updates(params, updates), opt_state))

    numbers = jax.device_put(jnp.arange(2), jax.NamedSharding(mesh, jax.P(AXIS)))
    mapped = jax.jit(jax.vmap(jax.jit(step), axis_name=AXIS, spmd_axis_name=AXIS))
    text = mapped.lower(state, numbers).compile().as_text()
    always = text[text.index("ENTRY") :]
    assert "conditional(" in always
    sent_always = [line for line in always.splitlines() if " all-reduce(" in line]
    assert not any("f32[" in line.split(" all-reduce(")[0] for line in sent_always), sent_always
    other = jax.pmap(step, AXIS, devices=jax.devices()[:2])
    expected = state
    for _ in range(steps):
        state, expected = mapped(state, numbers), other(expected, jnp.arange(2))
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert np.allclose(x, y, rtol=1e-5, atol=1e-6)


PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}


def test_copies_are_whole():
    """As launchers and experiments make them, and users who wrap one half."""
    tx = gw.diloco(optax.sgd(0.1), 4, axis_name=AXIS)
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    for made in (
        copy.copy(tx),
        copy.deepcopy(tx),
        copy.deepcopy(state).tx,
        tx._replace(update=tx.update),
        type(tx)(*tx),
    ):
        assert np.array_equal(made.outer_params(made.init(PARAMS))["w"], PARAMS["w"])
        assert made.turn(3) == tx.turn(3)
    wrapped = tx._replace(update=lambda *args: tx.update(*args))
    assert wrapped.turn(3) == tx.turn(3)
    with refused("local_sgd or diloco", error=TypeError):
        wrapped._replace(init=lambda params: tx.init(params)).turn(3)


def test_marks():
    inside = gw.stack_replicas({"w": 1.0, "memory": gw.stack_replicas({"e": jnp.ones(3)})})
    assert inside.per_replica["memory"].per_replica["e"].shape == (1, 3)
    own = {
        "w": (),
        "memory": gw.stack_replicas({"e": jnp.ones(3)})._replace(per_replica={"e": (1, 3)}),
    }
    assert jax.tree.map(jnp.shape, gw.this_replica(inside)) == own
    assert gw.stack_replicas({"w": jax.ShapeDtypeStruct((2,), jnp.float32)}).per_replica[
        "w"
    ].shape == (1, 2)
    # Accumulation outside has rows for its gradients.
    local = gw.local_sgd(optax.sgd(0.1, momentum=0.9), LocalSGD(4), axis_name=AXIS)
    tx = optax.MultiSteps(local, 2).gradient_transformation()
    specs = gw.partition_specs(gw.stack_replicas((PARAMS, tx.init(PARAMS))), AXIS)
    assert all(spec == jax.P(AXIS) for spec in jax.tree.leaves(specs))


@pytest.mark.parametrize(("check_vma", "moments"), [(False, "average"), (True, "reset")])
def test_a_node_is_what_shares_the_first_of_two_axes(check_vma, moments):
    axes = ("host", "chip")
    mesh = jax.make_mesh((2, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    # One remembers the gradient itself, a mask gives a momentum to one parameter, accumulation has
    # branches of its own.
    inner = optax.chain(
        optax.GradientTransformation(
            lambda params: params, lambda updates, state, params: (updates, updates)
        ),
        optax.masked(optax.MultiSteps(optax.sgd(1.0, momentum=0.5), 1), {"w": True, "v": False}),
    )
    tx = gw.local_sgd(
        inner, LocalSGD({"node": 1, "all": 50}, subgroup="node"), axis_name=axes, moments=moments
    )

    def run(x):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update({"w": -params["w"], "v": x}, state, params)
            params, state, extra = tx.average_params(
                {"w": params["w"], "v": x}, state, jnp.float32(3)
            )
            return (params, state), updates | {"extra": extra}

        params = {"w": x, "v": x}
        (params, _), updates = lax.scan(step, (params, tx.init(params)), length=2)
        return params, jax.tree.map(lambda y: y.reshape(2, 1), updates)

    rows = jax.P(axes), jax.P(None, axes)
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=jax.P(axes), out_specs=rows, check_vma=check_vma
    )
    params, updates = jax.jit(mapped)(jnp.array([1.0, 3.0, 10.0, 20.0]))
    means = np.array([2.0, 2.0, 15.0, 15.0])
    assert np.array_equal(params["w"], means)
    assert np.array_equal(params["v"], means)
    # What `inner` made of averaged gradients: the negative mean, with momentum half as much again
    # in the second step.
    assert np.array_equal(updates["w"], [means, (1.0 if moments == "reset" else 1.5) * means])
    assert np.array_equal(updates["v"], [means, means])
    assert np.array_equal(updates["extra"], np.full((2, 4), 3))


def test_unequal_groups_under_pmap():
    tx = gw.local_sgd(optax.sgd(1.0), LocalSGD({((0, 2, 3), (1,)): 1, "all": 50}), axis_name=AXIS)
    mapped = jax.pmap(lambda x: tx.average_params({"w": x}, tx.init({"w": x}))[0]["w"], AXIS)
    params = mapped(jnp.array([1.0, 3.0, 5.0, 6.0]))
    assert params.tolist() == [4.0, 3.0, 4.0, 4.0]


def test_init_under_jit_and_on_shapes():
    tx = gw.diloco(optax.adam(1e-3), 6, axis_name=AXIS, fragments=2)
    state = tx.init(PARAMS)
    for other in (jax.jit(tx.init)(PARAMS), jax.eval_shape(tx.init, PARAMS)):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), other) == jax.tree.map(
            lambda x: (x.shape, x.dtype), state
        )
    assert state.placed.per_replica.dtype == jnp.int8
    assert np.array_equal(state.averages.memory["outer"]["w"], PARAMS["w"])
    marked = optax.tree.map_params(tx, lambda x: x + 7, state)
    assert np.array_equal(marked.inner[0].mu["w"], state.inner[0].mu["w"] + 7)


def test_a_tree_with_nothing_in_it():
    tx = gw.local_sgd(optax.sgd(0.1), LocalSGD(4), axis_name=AXIS)
    step = jax.make_jaxpr(
        lambda p: tx.average_params(p, tx.update(p, tx.init(p), p)[1]), axis_env=[(AXIS, 4)]
    )
    assert step({"empty": {}}).out_avals


# Averages that are taken later, where the host says what is due. (That it changes no number is in
# tests/parity.)


@pytest.mark.parametrize("compressor", [None, PowerSGD(2)], ids=repr)
def test_no_message_stands_in_a_branch(compressor):
    """It leaves after step 3 and is taken after step 5, whose program alone sends; and it is of
    what the state holds, not of what the step computes."""
    tx = gw.local_sgd(optax.sgd(0.1), diloco(4, overlap=2, compressor=compressor), axis_name=AXIS)
    ones = {"w": jnp.ones((24, 16)), "b": jnp.ones(24)}
    state = tx.init(ones)
    assert all(np.array_equal(x, ones[n]) for n, x in tx.outer_params(state).items())
    state = state._replace(placed=jax.tree.map(lambda x: x.astype(bool), state.placed))

    def sent(n):
        def step(params, state):
            return tx.step(params, (params, state), turn=tx.turn(n))

        return gw.collective_traffic(step, ones, state, axis_env=[(AXIS, 4)])

    assert [n for n in range(4, 12) if sent(n)] == [5, 9]
    assert not any(each.branches for each in sent(5))


@pytest.mark.slow
@pytest.mark.parametrize("told", [False, True], ids=["counted", "turn"])
@pytest.mark.parametrize("options", [(10, 3, 3), (5, 3, 4), (5, 3, None)], ids=str)
def test_two_events_of_a_schedule_in_one_step_are_two_outer_steps(options, told):
    """Gaps between fragments differ, so one arrives after the step after which another leaves. An
    overlap of None: eager."""
    period, fragments, overlap = options
    late = {"eager": True} if overlap is None else {"overlap": overlap}
    local = diloco(period, fragments=fragments, **late)
    tx = gw.local_sgd(optax.sgd(1.0), local, axis_name=AXIS)
    names = [f"layer{f}" for f in range(fragments)]
    training = started(tx, {n: jnp.ones(1) for n in names}, replicas=1)

    def step(training, given, turn):
        return jax.vmap(lambda t: tx.step(given, t, turn=turn), axis_name=AXIS)(training)

    step, steps = jax.jit(step, static_argnames="turn"), 2 * period + local.overlap + 1
    for n in range(steps):
        given = {name: jnp.full(1, drift(n, f)) for f, name in enumerate(names)}
        training = step(training, given, tx.turn(n) if told else None)
    np.testing.assert_allclose(
        [training[0][n][0, 0] for n in names], by_hand(local, steps)[0], rtol=3e-4
    )


def placed(training):
    """As `stack_replicas` and `replicate` would: one row of `placed` on each replica."""
    return jax.tree.map(lambda x: x.astype(bool) if x.dtype == jnp.int8 else x, training)


def started(tx, params, replicas=2, begin=lambda params, tx: (params, tx.init(params))):
    """A training, with a row for each replica."""
    return placed(jax.tree.map(lambda x: jnp.stack([x] * replicas), begin(params, tx)))


def without_row(training):
    """In global form: a mark has one axis for the replicas."""
    params, state = training
    return params, state._replace(placed=jax.tree.map(lambda x: x[:, 0], state.placed))


@pytest.mark.parametrize("told", [True, False])
def test_a_replica_that_breaks_comes_back_with_all_its_fragments(told):
    """A gradient depends on all parameters: what has not come back breaks what has."""
    tx = gw.local_sgd(optax.sgd(0.1), diloco(6, fragments=3, overlap=2), axis_name=AXIS)
    start = started(tx, {n: jnp.ones(2) for n in "abc"})
    start[0]["a"] = jnp.array([[np.nan, 1.0], [1.0, 1.0]])

    def step(training, turn=None):
        gradient = jax.grad(lambda p: jnp.square(sum(p.values())).sum())(training[0])
        training = tx.step(gradient, training, turn=turn)
        return training, jnp.isfinite(jnp.stack(list(training[0].values()))).all()

    def run(training):
        if not told:
            return lax.scan(lambda training, _: step(training), training, length=6)[1]
        finite = []
        for n in range(6):
            training, each = step(training, tx.turn(n))
            finite.append(each)
        return jnp.stack(finite)

    # The first fragment has its turn after step 1.
    assert jax.jit(jax.vmap(run, axis_name=AXIS))(start).tolist() == [
        [False] + [True] * 5,
        [True] * 6,
    ]


INNER = {
    "adam": optax.adam(0.05),
    "momentum": optax.sgd(0.05, momentum=0.9),
    "adafactor": optax.adafactor(0.05),
    "accumulated": optax.MultiSteps(optax.adam(0.05), 2).gradient_transformation(),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=0.05),
}
MOMENTS = ("keep", "average", "reset")
WAYS = [{}, {"overlap": 2}, {"fragments": 2}, {"eager": True}, {"start_step": 3}, {"merge": 0.5}]


AT_ONCE = [
    ("adam", "keep", {}),
    ("adam", "average", {"overlap": 2}),
    ("adam", "keep", {"fragments": 2, "overlap": 1, "compressor": PowerSGD(1)}),
    ("adam", "average", {"eager": True}),
]


def others():
    """Adam goes every way with each fate of its moments; others go the plain way, and one more each
    time."""
    for (i, inner), (j, moments) in itertools.product(enumerate(INNER), enumerate(MOMENTS)):
        for k, way in enumerate(WAYS):
            fits = moments != "reset" or not way.keys() & {"overlap", "fragments", "eager"}
            met = inner == "adam" or k in (0, 1 + (2 * i + j) % 5)
            if fits and met and (inner, moments, way) not in AT_ONCE:
                yield pytest.param(inner, moments, way, marks=pytest.mark.slow)


@pytest.mark.parametrize(("inner", "moments", "options"), [*AT_ONCE, *others()])
def test_a_nan_on_one_replica_costs_a_period_and_no_more(inner, moments, options):
    """One gradient and one statistic of the second of three, at each step of the third period.
    Averages go on, and all that was broken is whole again."""
    period, periods, replicas = 4, 8, 3
    tx = gw.local_sgd(INNER[inner], diloco(period, **options), axis_name=AXIS, moments=moments)
    params = {"w": jnp.ones((12, 8)), "b": jnp.ones(4)}
    one = jax.tree.map(lambda x: x[0], started(tx, params, 1))

    def step(broken, replica, n, carry):
        training, mean = carry
        bad = jnp.where((n == broken) & (replica == 1), jnp.nan, 0.0)
        gradients = jax.tree.map(lambda x: x - (0.1 * replica + 0.01 * n) + bad, training[0])
        training, mean = tx.step(gradients, training, 0.9 * mean + 0.1 + bad)
        return (training, mean), tx.outer_params(training[1])["b"]

    never, when = 10**6, np.arange(2 * period, 3 * period) + options.get("start_step", 0)
    broken, replica = jnp.array([never, *when]), jnp.arange(replicas)
    each = jax.vmap(jax.vmap(step, (None, 0, None, 0), axis_name=AXIS), (0, None, None, 0))
    begin = jax.tree.map(
        lambda x: jnp.tile(x, (len(broken), replicas, *[1] * x.ndim)), (one, jnp.ones(2))
    )
    # What is mapped lies within the loop: JAX maps a loop once for each part of its state.
    (training, mean), outer = jax.jit(
        lambda begin: lax.scan(
            lambda carry, n: each(broken, replica, n, carry), begin, jnp.arange(period * periods)
        )
    )(begin)
    outer = np.moveaxis(outer, 0, 2)
    assert all(
        np.isfinite(x).all() for x in jax.tree.leaves((training[0], training[1].inner, mean))
    )
    moved = np.abs(np.diff(outer[:, :, period - 1 :: period], axis=2)).max(-1)
    assert (moved[:, :, -1] > 1e-4).all(), moved[:, :, -1]
    refused = np.asarray(training[1].averages.account.skipped)
    # the others then know what they count it for
    alone = replicas if not options.get("eager") else 1
    assert refused.sum(1).tolist() == [0] + [alone] * period
    assert (np.asarray(training[1].arrived) >= periods - 1).all()


@pytest.mark.parametrize("begins", [np.inf, 1.0])
def test_an_optimizer_that_is_told_inf_is_not_broken(begins):
    """A clip that is off, from the beginning or while training: Adam counts on."""
    clip = optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=begins)
    inner = optax.chain(clip, optax.adam(0.1))
    tx = gw.local_sgd(inner, diloco(2), axis_name=AXIS)
    start = started(tx, {"w": jnp.ones(2)})
    start[1].inner[0].hyperparams["max_norm"] = jnp.full(2, jnp.inf)

    def run(training):
        return lax.scan(lambda own, _: (tx.step(own[0], own), None), training, length=5)[0]

    after = jax.jit(jax.vmap(run, axis_name=AXIS))(start)[1].inner
    assert optax.tree.get(after[1], "count").tolist() == [5, 5]
    assert np.isinf(after[0].hyperparams["max_norm"]).all()


class Noisy(NamedTuple):
    """Of an optimizer that has its random key beside its moments."""

    mu: Any
    key: Any


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_random_keys_beside_moments_go_on_where_those_begin_anew(make):
    def update(updates, state, params=None):
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, state.mu, updates)
        return mu, Noisy(mu, jax.random.split(state.key)[0])

    inner = optax.GradientTransformation(lambda params: Noisy(params, make(0)), update)
    tx = gw.local_sgd(inner, LocalSGD(2), axis_name=AXIS, moments="reset")

    def run(training):
        for _ in range(4):
            training = tx.step(training[0], training)
        return training[1].inner.key

    keys = jax.jit(jax.vmap(run, axis_name=AXIS))(started(tx, {"w": jnp.ones(2)}))
    expected = make(0)
    for _ in range(4):
        expected = jax.random.split(expected)[0]
    assert (keys == expected).all()


def test_weights_that_do_not_add_up_are_refused_and_counted():
    """Of replicas whose program alone sees them."""
    tx = gw.local_sgd(optax.sgd(0.1), diloco(2, weighted=True), axis_name=AXIS)
    start = started(tx, {"w": jnp.ones(2)})

    def run(training, weights):
        for n in range(6):
            training = tx.step(training[0], training, weight=weights[n])
        return training[1].averages.account.skipped, training[1].arrived, training[0]["w"]

    weights = np.ones((2, 6), np.float32)
    weights[1, 1], weights[:, 3] = -1, 0
    refused, arrived, w = jax.jit(jax.vmap(run, axis_name=AXIS))(start, weights)
    assert (refused.tolist(), arrived.tolist()) == ([2, 2], [3, 3])
    assert (w < 1).all()


def test_both_halves_of_a_step_in_one_call():
    """Two replicas whose gradients differ: after every second step they agree, and extras with
    them."""
    tx = gw.local_sgd(optax.sgd(0.5), diloco(2, lr=1.0, momentum=0.0), axis_name=AXIS)

    def begin(params, tx):
        return TrainState.create(apply_fn=None, params=params, tx=optax.chain(optax.identity(), tx))

    start = started(tx, {"w": jnp.arange(6.0).reshape(3, 2)}, begin=begin)

    def run(training, gradient):
        seen = []
        for n in range(4):
            training, stats = tx.step(
                {"w": gradient}, training, {"mean": gradient.sum()}, turn=tx.turn(n)
            )
            seen.append((training.params["w"], stats["mean"]))
        return seen

    seen = jax.jit(jax.vmap(run, axis_name=AXIS))(
        start, jnp.stack([jnp.ones((3, 2)), jnp.full((3, 2), 3.0)])
    )
    expected = np.arange(6.0).reshape(3, 2)
    for n, (w, mean) in enumerate(seen):
        alone = np.stack([expected - 0.5 * (n % 2 + 1) * g for g in (1.0, 3.0)])
        if n % 2:
            expected = alone.mean(0)
            alone = np.stack([expected] * 2)
        np.testing.assert_allclose(w, alone, rtol=3e-5)
        np.testing.assert_allclose(mean, [12.0, 12.0] if n % 2 else [6.0, 18.0])


def test_of_nnx_as_well():
    tx = gw.local_sgd(optax.sgd(0.5), diloco(1, lr=1.0, momentum=0.0), axis_name=AXIS)

    def run(gradient):
        model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        before = model.kernel[...]
        tx.step(nnx.State({"kernel": nnx.Param(gradient)}), (model, optimizer), turn=tx.turn(0))
        return before - model.kernel[...], optimizer.step[...]

    moved, steps = jax.jit(jax.vmap(run, axis_name=AXIS))(
        jnp.stack([jnp.ones((2, 2)), jnp.full((2, 2), 3.0)])
    )
    np.testing.assert_allclose(moved, np.ones((2, 2, 2)), rtol=1e-5)
    assert steps.tolist() == [1, 1]


def test_a_turn_of_another_step_is_counted_and_refused():
    """Each different turn is told at each step. Then a resumed run numbers its steps from 0."""
    tx = gw.local_sgd(optax.sgd(0.1), diloco(3, start_step=2, overlap=1), axis_name=AXIS)
    training = started(tx, {"w": jnp.ones(2)})
    # replicas part, nothing happens, a difference leaves, its average arrives
    assert len(tx.all_turns()) == 4

    def step(turn):
        return jax.jit(
            jax.vmap(lambda training: tx.step(training[0], training, turn=turn), axis_name=AXIS)
        )

    steps = {turn: step(turn) for turn in tx.all_turns()}
    for n, right in zip(range(9), tx.turns(training), strict=False):
        for turn, told in steps.items():
            wrong = told(training)[1].wrong_turns
            assert wrong.tolist() == [turn != right] * 2, (n, turn)
        assert next(tx.turns(training)) == right == tx.turn(n)
        training = steps[right](training)
    # of the steps 9 to 11, in which nothing happens, a difference leaves, and arrives
    for n in range(3):
        training = steps[tx.turn(n)](training)
    whole, mesh = gw.stack_replicas(())._replace(per_replica=without_row(training)), mesh_of(2)
    mapped = jax.tree.map(lambda x: x[:, None], whole)
    doors = [
        lambda: gw.stats(training),
        lambda: tx.turns(training),
        lambda: tx.outer_params(training),
        lambda: gw.distribute(whole, mesh, AXIS),
        lambda: gw.replicate(whole, jax.devices()[:2], axis_name=AXIS),
        lambda: gw.unreplicate(mapped),
        lambda: gw.set_replicas(whole, 2),
    ]
    for door in doors:
        with refused("turn of another step 2 times", "tx.turns(state)", "wrong_turns to 0"):
            door()
    mended = whole.per_replica[1]._replace(wrong_turns=np.zeros(2, np.int32))
    assert gw.distribute(whole._replace(per_replica=(whole.per_replica[0], mended)), mesh, AXIS)


def test_keys_that_nothing_tells_from_numbers_are_warned_of():
    """Those of `jax.random.PRNGKey`."""
    state = gw.distribute(
        gw.stack_replicas({"key": jax.random.PRNGKey(0), "n": jnp.uint32(7)}), mesh_of(4), AXIS
    )
    with pytest.warns(UserWarning, match="key is an array of uint32.*jax.random.key") as said:
        gw.set_replicas(state, 2)
    assert len(said) == 1
    wrapped = {
        name: jax.random.wrap_key_data(x) if x.ndim > 1 else x
        for name, x in state.per_replica.items()
    }
    with warnings.catch_warnings():  # as is advised
        warnings.simplefilter("error")
        after = gw.distribute(gw.set_replicas(gw.PerReplica(wrapped), 2), mesh_of(2), AXIS)
    assert len({jax.random.key_data(key).tobytes() for key in after.per_replica["key"]}) == 2


@pytest.mark.parametrize("placed_first", [True, False])
def test_another_number_of_replicas_goes_on_from_the_mean(placed_first):
    """Four, then two or eight. Each draws its own noise, counts go on, and what has travelled is
    not lost."""
    tx = gw.local_sgd(optax.adam(0.1), diloco(4, overlap=2), axis_name=AXIS)
    state = gw.distribute(
        gw.stack_replicas((PARAMS, tx.init(PARAMS), jax.random.key(0), jnp.uint32(7))),
        mesh_of(4),
        AXIS,
    )
    sharding = jax.NamedSharding(mesh_of(4), jax.P(AXIS))
    rows = jax.device_put(jnp.arange(4.0)[:, None, None] * jnp.ones((4, 3, 2)), sharding)
    state = state._replace(per_replica=(state.per_replica[0] | {"w": rows}, *state.per_replica[1:]))
    given = (
        state
        if placed_first
        else jax.tree.map(
            lambda x: x if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x),
            state,
        )
    )
    assert gw.set_replicas(given, 4).per_replica[0]["w"] is given.per_replica[0]["w"]
    after = gw.distribute(gw.set_replicas(given, 2), mesh_of(2), AXIS).per_replica
    assert after[0]["w"].tolist() == np.full((2, 3, 2), 1.5).tolist()
    assert (after[1].averages.step.tolist(), after[3].tolist()) == ([0, 0], [7, 7])
    assert len({jax.random.key_data(key).tobytes() for key in after[2]}) == 2
    assert after[1].placed.per_replica.shape == (2, 1) or after[1].placed.per_replica.shape == (2,)
    assert gw.replicate(gw.set_replicas(given, 2), jax.devices()[:2], axis_name=AXIS).per_replica[
        0
    ]["w"].shape == (
        2,
        1,
        3,
        2,
    )


@pytest.mark.parametrize("placed_first", [True, False])
@pytest.mark.parametrize("box", [lambda x: x, lambda x: linen.Partitioned(x, ("a", None))])
def test_for_fewer_replicas_one_that_is_not_finite_is_left_out(box, placed_first):
    """And what travels counts by the weights that it left with."""
    tx = gw.local_sgd(optax.trace(0.9), diloco(4, overlap=2, weighted=True), axis_name=AXIS)
    params = {"w": box(jnp.ones((3, 2)))}
    state = gw.distribute(gw.stack_replicas((params, tx.init(params))), mesh_of(4), AXIS)
    weights, others = np.float32([3, 1, 0, 1]), np.float32([1, 2, 3, np.nan])

    def filled(path, x):
        if x.dtype != np.float32 or x.ndim < 1:
            return x
        rows = weights if "weight" in jax.tree_util.keystr(path) else others
        host = np.broadcast_to(rows.reshape(-1, *[1] * (x.ndim - 1)), x.shape)
        return jax.device_put(host, x.sharding) if placed_first else host

    state = jax.tree_util.tree_map_with_path(filled, state)
    own, after = gw.set_replicas(state, 2).per_replica
    memory = after.averages.memory
    found = own, after.inner, memory["outer"], memory["difference"], memory["weight"]
    assert [float(np.unique(x)[0]) for x in jax.tree.leaves(found)] == [2, 2, 2, 1.25, 1.25]


# Transformations of Optax as outer optimizers. (That SGD of Optax is ours is in tests/parity.)

SHAPES = {"block1/w": (4, 3), "block2/w": (3, 2), "b": (3,)}
ADAMW = functools.partial(optax.adamw, 0.05, weight_decay=0.1)


def test_adamw_is_that_of_a_loop_by_hand_and_goes_on_with_fewer_replicas():
    """In two fragments, whose counts of steps are their own. Three replicas, then two."""
    tx = gw.local_sgd(
        optax.sgd(0.1), diloco(4, fragments=2, layout=("block*", "*"), outer=ADAMW), axis_name=AXIS
    )
    start = {n: jnp.ones(s) for n, s in SHAPES.items()}
    rows, step = (
        started(tx, start, 3),
        jax.jit(jax.vmap(lambda t, g: tx.step(g, t), axis_name=AXIS)),
    )
    by_hand, parts = ADAMW(), [["block1/w", "block2/w"], ["b"]]
    outer = [{n: start[n] for n in part} for part in parts]
    memory = [by_hand.init(each) for each in outer]
    mine = [dict(start)] * 3
    for n in range(16):
        if n == 10:  # two go on from the mean of three
            rows = jax.tree.map(
                lambda x: np.repeat(np.asarray(x).mean(0, keepdims=True), 2, 0).astype(x.dtype),
                rows,
            )
            mine = [{name: sum(p[name] for p in mine) / 3 for name in SHAPES}] * 2
        rng = np.random.default_rng(n)
        gradients = [
            {k: rng.standard_normal(s).astype(np.float32) for k, s in SHAPES.items()} for _ in mine
        ]
        rows = step(rows, {name: np.stack([g[name] for g in gradients]) for name in SHAPES})
        mine = [
            {name: p[name] - 0.1 * g[name] for name in SHAPES}
            for p, g in zip(mine, gradients, strict=True)
        ]
        for number, part in enumerate(parts):
            if (n + 1 - 2 * (number + 1)) % 4 == 0:
                average = {
                    name: sum(outer[number][name] - p[name] for p in mine) / len(mine)
                    for name in part
                }
                updates, memory[number] = by_hand.update(average, memory[number], outer[number])
                outer[number] = optax.apply_updates(outer[number], updates)
                mine = [p | outer[number] for p in mine]
        for r, p in enumerate(mine):
            for name in SHAPES:
                np.testing.assert_allclose(rows[0][name][r], p[name], rtol=2e-4, atol=2e-5)
    counts = rows[1].averages.memory["outer.0.count"]
    assert (counts["block1/w"].tolist(), counts["b"].tolist()) == ([4, 4], [4, 4])


def test_an_outer_optimizer_with_a_bound_that_is_off_refuses_no_average():
    def clipped(most):
        inject = optax.inject_hyperparams(optax.clip_by_global_norm)
        return lambda: optax.chain(inject(max_norm=most), optax.sgd(0.7, momentum=0.9))

    found = []
    for most in (jnp.inf, 1e6):
        tx = gw.local_sgd(optax.sgd(0.1), diloco(2, outer=clipped(most)), axis_name=AXIS)

        def run(training, tx=tx):
            return lax.scan(lambda own, _: (tx.step(own[0], own), None), training, length=6)[0]

        params, state = jax.jit(jax.vmap(run, axis_name=AXIS))(started(tx, {"w": jnp.ones(2)}))
        assert state.averages.account.skipped.tolist() == [0, 0]
        found.append(params["w"])
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert (found[0] < 1).all()


def test_an_outer_optimizer_that_draws_is_refused():
    outer = lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.7))  # noqa: E731
    with refused("outer=", "keeps a random key, under 'outer.0.rng_key'", error=TypeError):
        gw.local_sgd(optax.sgd(0.1), diloco(2, outer=outer), axis_name=AXIS)


def test_what_an_outer_optimizer_remembers_and_sends():
    local, params = diloco(4, outer=ADAMW), {n: jnp.ones(s) for n, s in SHAPES.items()}
    memory = gw.local_sgd(optax.sgd(0.1), local, axis_name=AXIS).init(params).averages.memory
    assert sorted(memory) == ["outer", "outer.0.count", "outer.0.mu", "outer.0.nu"]
    assert plan({"w": (8, 8)}, local).wire_bytes == plan({"w": (8, 8)}, diloco(4)).wire_bytes
