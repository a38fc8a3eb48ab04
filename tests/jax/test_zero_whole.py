"""`zero1(…, shard="parameter")`: what needs whole parameters does what it does without it, in the
bytes of one all-reduce, with 1/W of the memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradwire.jax_backend as gw
from gradwire import Zero, plan
from gradwire.core.ops import Spec
from gradwire.core.zero.stacks import StackShards
from tests.jax.quadratic import assert_close, filled, start, step_of, train, train_plain
from tests.jax.replicas import AXIS, Replicas, equal, refused

pytestmark = pytest.mark.slow

#: Of one shape five, of another two, of a third one, one of a single row; vectors of two lengths, a
#: scalar.
SHAPES = {f"layer_{i}": (6, 4) for i in range(5)} | {
    "up": (4, 9),
    "up_2": (4, 9),
    "down": (9, 4),
    "row": (1, 7),
}
SHAPES |= {f"bias_{i}": (5,) for i in range(4)} | {"norm": (3,), "scale": ()}
PARAMS = start(SHAPES)


def sharded(inner, replicas, **options):
    return gw.zero1(
        inner, **{"axis_name": AXIS, "replicas": replicas, "shard": "parameter"} | options
    )


def by_name(params):
    """Muon's for hidden matrices."""
    return {n: "muon" if n.startswith(("layer", "up", "down")) else "adam" for n in params}


def mixture(muon, adam):
    return optax.multi_transform({"muon": muon, "adam": adam}, by_name)


HIDDEN, VECTORS = optax.contrib.muon(0.02, weight_decay=0.01), optax.adamw(0.02)
#: Layers of `nn.scan`, of which no number of replicas here has as many, and a matrix of each of two
#: shapes.
LAYERED = {"layers": (5, 6, 4), "layers_bias": (5, 4), "up": (4, 9), "square": (6, 6)}
#: A layer of (6, 4) is a matrix; the biases are AdamW's.
MATRICES = dict.fromkeys([(6, 4), (4, 9), (6, 6)], optax.contrib.MuonDimensionNumbers(-2, -1))
OF_LAYERS = optax.contrib.muon(
    0.02,
    muon_weight_dimension_numbers=lambda params: jax.tree.map(
        lambda p: MATRICES.get(p.shape[-2:]), params
    ),
)
LAMB = optax.MultiSteps(optax.lamb(0.02), 3)
ADAFACTOR = optax.adafactor(0.02, min_dim_size_to_factor=3)
#: It has a list of arrays for each parameter, and scalars it refuses.
SM3 = optax.masked(optax.sm3(0.02), lambda params: jax.tree.map(lambda p: p.ndim > 0, params))
#: In `zero1` → without it.
INNER = {
    "muon": lambda w: (sharded(HIDDEN, w), HIDDEN),
    "adafactor": lambda w: (
        optax.chain(gw.all_reduce_mean(axis_name=AXIS), sharded(ADAFACTOR, w, averaged=True)),
        ADAFACTOR,
    ),
    "lamb, accumulated": lambda w: (sharded(LAMB, w), LAMB),
    "sm3": lambda w: (sharded(SM3, w), SM3),
    "layers": lambda w: (sharded(OF_LAYERS, w, stacked="layers*"), OF_LAYERS),
    "mixture": lambda w: (
        mixture(sharded(HIDDEN, w), gw.zero1(VECTORS, axis_name=AXIS, replicas=w)),
        mixture(HIDDEN, VECTORS),
    ),
}
RUNS = [
    ("mixture", 3, "shard_map_vma"),
    ("layers", 2, "slices"),
    *(
        pytest.param(*run, marks=pytest.mark.slow)
        for run in (
            ("muon", 4, "vmap"),
            ("adafactor", 3, "vmap"),
            ("sm3", 3, "vmap"),
            ("lamb, accumulated", 3, "shard_map"),
            ("layers", 3, "shard_map_vma"),
        )
    ),
]


@pytest.mark.parametrize(("name", "replicas", "mode"), RUNS)
def test_fifty_steps_are_the_plain_ones(name, replicas, mode):
    with jax.enable_x64(True):
        params = start(LAYERED) if name == "layers" else PARAMS
        params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
        tx, plain = INNER[name](replicas)
        found, state = train(tx, replicas, mode, params=params)
        expected, plain_state = train_plain(plain, replicas, params=params)
        assert_close(found, expected, 1e-8)
        if name != "adafactor":  # which has another transformation before it
            assert_close(gw.reshard(state, plain_state), plain_state, 1e-7)
        assert all(np.abs(found[n] - params[n]).max(initial=0) > 0.01 for n in params)


#: As many of each shape as are divided on 2 and on 4 replicas.
EVEN = {f"layer_{i}": (16, 8) for i in range(8)} | {f"up_{i}": (8, 32) for i in range(4)}


def of_one(state):
    """A state in which arrays have one row, for one replica."""
    one = lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)  # noqa: E731
    return state._replace(pieces=jax.tree.map(one, state.pieces))


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(("shapes", "replicas"), [(EVEN, 2), (EVEN, 4), (EVEN, 3), (SHAPES, 4)])
def test_bytes_and_memory(shapes, replicas):
    params, tx = start(shapes), sharded(optax.sgd(0.02, 0.9), replicas)
    state = jax.eval_shape(tx.init, params)
    traffic = gw.collective_traffic(
        tx.update, params, of_one(state), params, axis_env=[(AXIS, replicas)]
    )
    shards = StackShards({n: Spec(s) for n, s in sorted(shapes.items())}, replicas)
    assert [gw.total_traffic(traffic)] == list(plan(shapes, Zero(shards)).steps)
    dense, own, rest = (nbytes(tree) for tree in (params, of_one(state).pieces, state.common))
    if shapes is EVEN and replicas != 3:
        assert {c.kind for c in traffic} == {"reduce_scatter", "all_gather"}
        assert dense <= gw.total_traffic(traffic).nbytes <= 1.02 * dense
        # a momentum is one number for each
        assert own + rest == pytest.approx(dense / replicas, rel=0.1)
    else:
        assert {c.kind for c in traffic} == {"reduce_scatter", "all_gather", "all_reduce"} - (
            {"all_reduce"} if not any(map(shards.is_kept, shapes)) else set()
        )
        assert gw.total_traffic(traffic).nbytes <= 1.5 * dense


@pytest.mark.slow
def test_a_state_goes_to_any_number_of_replicas_and_back():
    """Also between a mixture's parts."""
    plain = filled(INNER["mixture"](1)[1].init(PARAMS))
    of_three, of_four = (jax.eval_shape(INNER["mixture"](w)[0].init, PARAMS) for w in (3, 4))
    state = gw.reshard(plain, of_three)
    straight, by_whole = gw.reshard(state, of_four), gw.reshard(plain, of_four)
    assert equal(straight, by_whole)
    assert equal(gw.reshard(straight, plain), plain)
    with refused("does not have the structure"):
        gw.reshard(state, jax.eval_shape(VECTORS.init, PARAMS))
    with refused("replicas", "reshard"):  # five layers are other stacks on two replicas
        of_four = sharded(HIDDEN, 4).init(PARAMS)
        cut = of_four._replace(pieces=jax.tree.map(lambda x: x[:2], of_four.pieces))
        train(sharded(HIDDEN, 2), 2, steps=1, params=PARAMS, state=cut)


BY_NORM = optax.stateless(
    lambda updates, params: jax.tree.map(lambda x: x / jnp.linalg.norm(x), updates)
)
OF_TWO = optax.masked(optax.scale(2.0), {n: n in ("layer_0", "up") for n in SHAPES})


def but_for(name, since=0):
    """All matrices of one shape decay but this one, from a step on."""
    decay = optax.add_decayed_weights(
        lambda step: 0.1 * (step >= since), {n: n != name for n in SHAPES}
    )
    return optax.chain(decay, optax.sgd(0.1))


PARTED = optax.multi_transform(
    {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {n: "b" if n == "layer_3" else "a" for n in SHAPES}
)
#: Of all layers the longest two dimensions are factored, of some of them none.
FACTORED = optax.adafactor(0.02, min_dim_size_to_factor=200)
#: Of which owners run each by itself.
APART = {"up": (4, 9), "square": (6, 6)}
LAYERS = {"layers": (4, 6, 4)}
CLIP = optax.clip_by_global_norm
#: inner, other options, shapes → words of the error.
REFUSED = [
    (optax.chain(CLIP(1.0), optax.sgd(0.1)), {}, SHAPES, ["mix parameters", "averaged=True"]),
    (CLIP(1e6), {}, SHAPES, ["update of"]),
    (CLIP(1.0), {}, APART, ["update of"]),
    (OF_TWO, {}, SHAPES, ["update of", "optax.multi_transform around"]),
    # beyond the first two of a shape, in the same stack or in another
    (but_for("layer_3"), {}, SHAPES, ["update of 'layer_3'", "optax.multi_transform around"]),
    (but_for("layer_3", 100), {}, SHAPES, ["update of 'layer_3'"]),
    (but_for("layer_2"), {"replicas": 4}, SHAPES, ["update of 'layer_2'"]),
    (PARTED, {}, SHAPES, ["layer_3"]),
    (FACTORED, {"stacked": "layers"}, {"layers": (256, 256, 4)}, ["v_row.layers", "(256, 4)"]),
    (HIDDEN, {"elementwise": True}, SHAPES, ["elementwise=True"]),
    (HIDDEN, {"bucket_bytes": 64}, SHAPES, ["bucket_bytes=64"]),
    (HIDDEN, {"shard": "bucket"}, SHAPES, ["shard='bucket'", "'element', 'parameter'"]),
    (VECTORS, {}, {"a|b": (3,), "c": (3,)}, ["'a|b'"]),
    (BY_NORM, {"stacked": "layers"}, LAYERS, ["update of 'layers'"]),
    (BY_NORM, {"stacked": "blocks/*"}, LAYERS, ["stacked", "'blocks/*'"]),
    (BY_NORM, {"stacked": "layers", "shard": "element"}, LAYERS, ["stacked", "shard='parameter'"]),
    (VECTORS, {"stacked": "*"}, {"scale": (), "layers": (4, 6)}, ["'scale'", "no axis"]),
]


@pytest.mark.parametrize(("inner", "options", "shapes", "words"), REFUSED)
def test_refused_by_name(inner, options, shapes, words):
    with refused(*words):
        sharded(inner, **{"replicas": 2} | options).init(start(shapes))


def test_not_refused():
    """What is alike within each shape, so that each is in its part; what does the same to each
    whole parameter; and what leaves one out that is in no stack."""
    sharded(but_for("layer_4"), 2).init(PARAMS)
    sharded(mixture(HIDDEN, VECTORS), 2).init(PARAMS)
    sharded(BY_NORM, 2).init(start(LAYERS))
    assert StackShards({n: Spec(x) for n, x in APART.items()}, 2).ragged


def test_each_owner_runs_its_own_matrices_alone():
    """Three of these on three replicas would be more work as stacks, and everything if all kept
    them."""
    shapes = {
        "square": (6, 6),
        "up": (4, 9),
        "down": (9, 4),
        "layer_0": (5, 5),
        "layer_1": (5, 5),
        "layer_2": (5, 5),
    }
    seen = []

    def update(updates, params):
        seen.append({n for n, x in updates.items() if not isinstance(x, optax.MaskedNode)})
        return jax.tree.map(lambda x: x / jnp.linalg.norm(x), updates)

    tx = sharded(optax.stateless(update), 3)
    state, params = tx.init(start(shapes)), start(shapes)
    seen.clear()
    jaxpr = jax.make_jaxpr(tx.update, axis_env=[(AXIS, 3)])(params, of_one(state), params)
    assert set(map(frozenset, seen)) == {
        frozenset(n) for n in ({"layer_0"}, {"square"}, {"up"}, {"down"})
    }
    branches = [eqn.params["branches"] for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]
    assert [len(each) for each in branches] == [3]


def test_hostile_gradients():
    """Zeros stay finite; what is not finite on one replica changes nothing on any, also for
    parameters that all of them keep."""
    tx = sharded(HIDDEN, 3, skip_non_finite=True)
    state, step = (
        tx.init(PARAMS),
        jax.jit(lambda given, state: step_of(tx, given, PARAMS, state, 3)),
    )
    zeros = jax.tree.map(lambda p: jnp.zeros((3, *p.shape)), PARAMS)
    broken = jax.tree.map(lambda g: g + 1, zeros)
    broken["row"] = broken["row"].at[2].set(jnp.nan)
    for given in zeros, broken:
        updates, after = step(given, state)
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((updates, after)))
        assert any(x.any() for x in jax.tree.leaves(updates)) is (given is zeros)
    assert_close(after, state, 0)


@pytest.mark.parametrize(("dtype", "least", "most"), [(None, 0, 1e-6), ("int8", 1e-4, 0.02)])
def test_under_pmap_and_in_codes(dtype, least, most):
    """Each parameter over its own norm, of which a piece would have another."""

    def rows(r):
        return {
            n: np.random.default_rng([r, *n.encode()]).normal(size=s) for n, s in SHAPES.items()
        }

    given = [rows(r) for r in range(3)]
    tx = sharded(BY_NORM, 3, wire_dtype=dtype)
    found = Replicas(tx, PARAMS, 3, "pmap").update([jax.tree.map(np.float32, g) for g in given])
    average = {n: np.mean([g[n] for g in given], axis=0) for n in SHAPES}
    off = [np.linalg.norm(found[n] - x / np.linalg.norm(x)) for n, x in average.items()]
    assert least <= max(off) <= most


def test_a_flat_tree_has_names_with_a_slash():
    """As Haiku's. They are those of a nested tree."""
    flat = {
        f"h{i}/{name}": jnp.ones((4, n))
        for i in range(2)
        for name, n in (("up", 6), ("out", 4), ("gate", 6))
    }
    nested = {
        f"h{i}": {name: flat[f"h{i}/{name}"] for name in ("up", "out", "gate")} for i in range(2)
    }
    states = [
        jax.eval_shape(sharded(optax.contrib.muon(0.02), 2).init, tree) for tree in (flat, nested)
    ]
    first, second = (set(state.pieces.per_replica) for state in states)
    assert first == second
    assert any("h0.up|h1.up" in key or "h0.gate|h0.up" in key for key in first)
