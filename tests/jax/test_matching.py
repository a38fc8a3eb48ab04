"""The arrays of an optimizer's state belong to the same parameters whatever these are called, and
whatever holds them."""

import itertools
from typing import Any, NamedTuple

import equinox
import flax.struct
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

import gradwire.jax_backend as gw
from gradwire import LocalSGD
from gradwire.jax_backend.state.matching import places
from gradwire.jax_backend.state.names import flatten
from tests.jax.replicas import AXIS, refused

#: Two that an optimizer keeps apart by shape, and one more of a shape that is there already.
ARRAYS = [jnp.ones((8, 4)), jnp.ones(4), 2 * jnp.ones((8, 4))]


@flax.struct.dataclass
class Fields:
    mu: jax.Array
    nu: jax.Array
    zz: jax.Array


class Module(equinox.Module):
    mu: jax.Array
    nu: jax.Array
    zz: jax.Array


class Rows(NamedTuple):
    """Its words are those of what `factored` may hold at the place of a parameter."""

    row: Any
    column: Any
    more: Any = None


def boxed(box, names):
    return [box(x, (names[: x.ndim])) for x in ARRAYS]


def keyed(*names):
    return lambda: dict(zip(names, ARRAYS, strict=True))


TREES = {
    "nested": lambda: {"a": {"w": ARRAYS[0], "x": ARRAYS[1]}, "b": {"w": ARRAYS[2]}},
    "haiku": lambda: {"mlp/~/a": {"w": ARRAYS[0], "x": ARRAYS[1]}, "mlp/~/b": {"w": ARRAYS[2]}},
    "slashes": keyed("a/w", "a/x", "b/w"),
    "dots": keyed("a.w", "a.x", "b.w"),
    "names in names": keyed("w", "w.w", "w.w.w"),
    "words of a state": keyed("count", "mu", "nu"),
    "more words": keyed("inner_state", "trace", "v_row"),
    "digits": keyed("0", "1", "2"),
    "an empty name": keyed("", "a", "b"),
    "empty parts": keyed("a/", "a//", "b"),
    "integers": keyed(0, 1, 2),
    "list": lambda: list(ARRAYS),
    "tuple": lambda: tuple(ARRAYS),
    "nested list": lambda: [[ARRAYS[0], ARRAYS[1]], [ARRAYS[2]]],
    "dataclass": lambda: Fields(*ARRAYS),
    "named tuple": lambda: Rows(*ARRAYS),
    "named tuples": lambda: {"a": Rows(ARRAYS[0], ARRAYS[1]), "b": Rows(ARRAYS[2], None)},
    "named tuples in a tuple": lambda: ((ARRAYS[0], Rows(ARRAYS[1], None)), Rows(None, ARRAYS[2])),
    "equinox": lambda: Module(*ARRAYS),
    "boxes": lambda: dict(zip("abc", boxed(linen.Partitioned, ("x", "y")), strict=True)),
    "logical boxes": lambda: {"a": boxed(linen.LogicallyPartitioned, ("x", "y"))},
    "nnx": lambda: nnx.State(dict(zip("abc", map(nnx.Param, ARRAYS), strict=True))),
}


class FactoredState(NamedTuple):
    of: Any


def factored(several):
    """Second moments by rows and by columns, both at the place of the parameter: as many as
    `several` makes of them."""

    def init(params):
        return FactoredState(
            jax.tree.map(lambda p: several(jnp.zeros(p.shape[:1]), jnp.zeros(p.shape[-1:])), params)
        )

    def update(updates, state, params=None):
        def after(g, old):
            means = [
                jnp.square(g).reshape(*shape).mean(i)
                for shape, i in (((len(g), -1), 1), ((-1, g.shape[-1]), 0))
            ]
            return jax.tree.map(lambda x, new: 0.9 * x + 0.1 * new, old, several(*means))

        new = jax.tree.map(after, updates, state.of)
        scale = lambda g, both: g / (1 + sum(x.mean() for x in jax.tree.leaves(both)))  # noqa: E731
        return jax.tree.map(scale, updates, new), FactoredState(new)

    return optax.GradientTransformation(init, update)


def in_a_dictionary(row, column):
    return {"row": row, "column": column}


@flax.struct.dataclass
class Codes:
    """As an optimizer of 8 bits has them: integers, and what they are multiplied by."""

    codes: jax.Array
    scale: jax.Array


def coded():
    """Moments in codes."""

    def code(x):
        scale = jnp.abs(x).max()[None] / 127 + 1e-30
        return Codes(jnp.round(x / scale).astype(jnp.int8), scale)

    def decode(x):
        return x.codes * x.scale

    def update(updates, state, params=None):
        new = jax.tree.map(lambda g, old: 0.9 * decode(old) + g, updates, state.of)
        return new, FactoredState(jax.tree.map(code, new))

    return optax.GradientTransformation(
        lambda p: FactoredState(jax.tree.map(lambda x: code(0 * x), p)), update
    )


def halves(params):
    """A label for each leaf; of the last, another."""
    labels = ["one", "one", "two"]
    return jax.tree.unflatten(jax.tree.structure(params), labels)


OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "clipped adamw": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-2))
    ),
    "lion": optax.lion(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "two": optax.multi_transform(
        {"one": optax.adam(1e-2), "two": optax.sgd(1e-2, momentum=0.9)}, halves
    ),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "masked": optax.masked(
        optax.adam(1e-2), lambda p: jax.tree.map(lambda label: label == "one", halves(p))
    ),
    "sm3": optax.sm3(1e-2),
    "masked sm3": optax.masked(
        optax.sm3(1e-2), lambda p: jax.tree.map(lambda label: label == "one", halves(p))
    ),
    "tuples": factored(lambda *both: both),
    "dictionaries": factored(in_a_dictionary),
    "named tuples": factored(Rows),
    "lists in dataclasses": factored(lambda *both: Codes(list(both), both[0])),
    "codes": coded(),
    "accumulated": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}


def owners(optimizer, tree):
    """Of each leaf of the state the number of its parameter, and its shape."""
    names = list(flatten(tree).leaves)
    shapes = {name: jnp.shape(x) for name, x in flatten(tree).leaves.items()}
    state = optimizer.init(tree)
    found = zip(places(state, shapes), jax.tree.leaves(state), strict=True)
    return [
        (None if place is None else names.index(place.name), jnp.shape(x)) for place, x in found
    ]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_names_decide_nothing(optimizer, tree):
    tx = OPTIMIZERS[optimizer]
    expected = owners(tx, TREES["nested"]())
    assert {0, 1} <= {owner for owner, _ in expected}
    assert owners(tx, TREES[tree]()) == expected


@pytest.mark.parametrize("tree", [name for name in TREES if "boxes" not in name and name != "nnx"])
@pytest.mark.slow
def test_whole_parameters_are_divided_whatever_they_are_called(tree):
    """Muon takes matrices, and two of one shape are a stack."""
    tx = optax.contrib.muon(1e-2)
    state = gw.zero1(tx, axis_name=AXIS, replicas=2, shard="parameter").init(TREES[tree]())
    expected = gw.zero1(tx, axis_name=AXIS, replicas=2, shard="parameter").init(TREES["nested"]())
    for x, y in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
        assert jnp.array_equal(x, y)
    whole = gw.reshard(state, tx.init(TREES[tree]()))
    assert jax.tree.structure(whole) == jax.tree.structure(tx.init(TREES[tree]()))


def test_lists_of_arrays_belong_to_the_parameters_at_whose_place_they_are():
    """Also where parameters are in lists, whose numbers are those of a list of arrays, and of the
    links of a chain."""
    two = [jnp.ones((8, 4)), jnp.ones((6, 4))]
    assert [owner for owner, _ in owners(optax.scale_by_sm3(), two)] == [0, 0, 1, 1, 0, 1]
    bare = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda g, s, p=None: (g, s)
    )
    assert [owner for owner, _ in owners(optax.chain(bare, bare), two)] == [0, 1, 0, 1]
    assert [owner for owner, _ in owners(optax.scale_by_sm3(), two[0])] == [0, 0, 0]


@pytest.mark.parametrize("tree", ["digits", "integers", "list", "tuple"])
@pytest.mark.parametrize("several", [in_a_dictionary, Rows, lambda *both: both, Codes])
def test_a_chain_of_as_many_links_as_parameters_holds_all_of_them_in_each(several, tree):
    links = [factored(several), optax.identity(), optax.scale_by_schedule(lambda step: 0.1)]
    for order in itertools.product(links, repeat=3):
        chain = optax.chain(*order)
        assert owners(chain, TREES[tree]()) == owners(chain, TREES["nested"]())


def test_links_of_a_chain_are_no_parameters_of_a_list():
    """Nor where one of them is not there, as on a replica that has the other."""
    chain = optax.chain(optax.scale_by_trust_ratio(), optax.trace(0.9))
    state = chain.init([jnp.ones((8, 4)), optax.MaskedNode()])
    (place,) = places(state, {"0": (8, 4), "1": (8, 4)})
    assert place is not None
    assert (place.name, place.of_several) == ("0", False)


def test_a_count_is_not_that_of_the_only_parameter_with_its_name():
    tx = optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda step: 0.1))
    for name in ("count", "w"):
        assert [owner for owner, _ in owners(tx, {name: jnp.ones((8, 4))})] == [0, None]


@pytest.mark.parametrize(
    ("tx", "held"),
    [
        (optax.sm3(0.1), dict),
        (optax.sm3(0.1), lambda p: nnx.State({n: nnx.Param(x) for n, x in p.items()})),
        (factored(in_a_dictionary), dict),
        (factored(lambda row, column: Rows(column, [row])), dict),
    ],
)
@pytest.mark.slow
def test_several_arrays_of_a_parameter_go_to_its_owner_and_back(tx, held):
    """Of SM3 they are as many as it has axes."""
    params = held(
        {
            name: jnp.ones(shape)
            for name, shape in {"a": (6, 4), "b": (7,), "c": (3, 5, 2), "d": (2,)}.items()
        }
    )
    plain = tx.init(params)
    state = jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), plain)
    for replicas in (3, 2):
        sharded = gw.zero1(tx, axis_name=AXIS, replicas=replicas, shard="parameter").init(params)
        assert any(";" in key for key in sharded.pieces.per_replica)
        state = gw.reshard(state, sharded)
        assert jax.tree.structure(state) == jax.tree.structure(sharded)
    for x in jax.tree.leaves(gw.reshard(state, plain)):
        assert jnp.array_equal(x, jnp.arange(x.size).reshape(x.shape))


def test_codes_are_not_averaged():
    with refused("moments='average'", "of.w.codes", "integers"):
        gw.local_sgd(coded(), LocalSGD(2), axis_name=AXIS, moments="average").init(
            {"w": jnp.ones((8, 4))}
        )
    gw.local_sgd(coded(), LocalSGD(2), axis_name=AXIS, moments="reset").init(
        {"w": jnp.ones((8, 4))}
    )


def test_what_an_outer_optimizer_remembers_of_parameters_with_its_own_words():
    """The count is of all parameters, also of one that is called so."""
    made = [
        gw.diloco(optax.sgd(0.1), 2, axis_name=AXIS, outer=lambda: optax.adam(0.1))
        .init(tree())
        .averages.memory
        for tree in (TREES["words of a state"], TREES["slashes"])
    ]
    assert made[0].keys() == made[1].keys()
    for key in made[0]:
        for x, y in zip(*(jax.tree.leaves(memory[key]) for memory in made), strict=True):
            assert jnp.array_equal(x, y)


def test_a_moment_is_wanted_as_its_parameter_lies():
    """Also where a path in the state ends as that of another parameter does."""
    mesh = jax.make_mesh((2, 2), (AXIS, "fsdp"))
    specs = {"mu": {"w": jax.P("fsdp")}, "w": jax.P(None, "fsdp"), "nu": jax.P()}
    params = jax.tree.map(
        lambda spec: jax.device_put(jnp.ones((4, 4)), jax.NamedSharding(mesh, spec)), specs
    )
    made = jax.eval_shape(
        lambda: (
            params,
            gw.all_reduce_mean(axis_name=AXIS).init(params),
            optax.adam(0.1).init(params),
        )
    )
    own, _, (adam, _) = gw.abstract_state(made, 2, mesh, AXIS, params=params)
    for tree in (own, adam.mu, adam.nu):
        assert jax.tree.map(lambda x: x.sharding.spec, tree) == specs


def test_parameters_of_a_module_that_has_statistics_too():
    mesh = jax.make_mesh((2, 2), (AXIS, "fsdp"))
    optimizer = nnx.Optimizer(nnx.BatchNorm(4, rngs=nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param)
    made = nnx.state((nnx.BatchNorm(4, rngs=nnx.Rngs(0)), optimizer))
    lying = jax.NamedSharding(mesh, jax.P("fsdp"))
    params = jax.tree.map(
        lambda x: jax.device_put(x, lying), nnx.state(nnx.BatchNorm(4, rngs=nnx.Rngs(0)), nnx.Param)
    )
    found = jax.tree_util.tree_flatten_with_path(
        gw.abstract_state(made, 2, mesh, AXIS, params=params)
    )[0]
    kept = {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, x in found
        if x.sharding.spec == lying.spec
    }
    assert len(kept) == 6  # scale and bias, and two moments of each
    assert all("scale" in path or "bias" in path for path in kept)


@pytest.mark.parametrize("shard", ["element", "parameter"])
def test_signs_that_stand_between_names_are_refused(shard):
    with refused("'a;b'", "{|;}"):
        gw.zero1(optax.adam(1e-2), axis_name=AXIS, replicas=2, shard=shard).init(
            {"a;b": jnp.ones((4, 4))}
        )
