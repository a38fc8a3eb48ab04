"""What the JAX backend refuses. A row: what is done, the exception, and the arguments, parameters
or keys that its message names."""

import pickle
from functools import partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen as nn
from flax import nnx, serialization
from jax import lax

import gradwire.core.protocol as rq
import gradwire.jax_backend as gw
from gradwire import (
    AllReduce,
    LocalSGD,
    LocalSimulator,
    PowerSGD,
    Spec,
    TwoLevel,
    WireDtype,
    Zero,
    shard_by_element,
)
from gradwire.core.protocol.control_requests import OptimizerStep
from gradwire.core.protocol.programs import Request, ask
from gradwire.jax_backend.engine.driver import drive
from tests.jax import sliced
from tests.jax.replicas import AXIS, mesh_of, mesh_of_two, refused, traced

PARAMS = {"w": jnp.ones((32, 24)), "b": jnp.ones(24)}
STACKED = jax.tree.map(lambda x: jnp.stack([x] * 4), PARAMS)
ADAM, SGD = optax.adam(0.1), optax.sgd(0.1)
BOTH = (False, True)
average = partial(gw.average_gradients, axis_name=AXIS)


def power(rank=2, **options):
    return gw.power_sgd(rank, **{"axis_name": AXIS} | options)


def sharded(inner=SGD, **options):
    return gw.zero1(inner, **{"axis_name": AXIS, "replicas": 4, "elementwise": True} | options)


def local(inner=SGD, schedule=LocalSGD(4), **options):  # noqa: B008
    return gw.local_sgd(inner, schedule, **{"axis_name": AXIS} | options)


def diloco(period=4, **options):
    return gw.diloco(SGD, period, axis_name=AXIS, **options)


TX, MEAN, LOCAL, CLIP = power(), gw.all_reduce_mean(axis_name=AXIS), local(), gw.clip_by_global_norm
AVERAGED = sharded(averaged=True)
FINITE = partial(optax.apply_if_finite, max_consecutive_errors=3)
LATE = partial(optax.conditionally_transform, should_transform_fn=lambda step: step >= 2)
SEVERAL = partial(optax.MultiSteps, every_k_schedule=2)
SKIPPING = partial(SEVERAL, should_skip_update_fn=optax.transforms.skip_not_finite)
#: Transformations without any memory.
BARE = (MEAN, power(error_feedback=False), power({"b": 4, "*": 0}), sharded())
IN_ICI = gw.power_sgd(2, axis_name="dcn", within="ici")
PAIRS = ((0, 2), (1, 3))


def rows(*tables):
    """Parameters of a test, called by what has to be named."""
    each = [(call, error, words) for table in tables for call, error, *words in table]
    return [pytest.param(*row, id=f"{row[1].__name__} {' '.join(row[2])}") for row in each]


def init(tx, params=PARAMS):
    return lambda: tx.init(params)


def on_four(function):
    return jax.make_jaxpr(function, axis_env=[(AXIS, 4)])(PARAMS)


def step(tx, updates=PARAMS, state=None):
    """A step, traced with a state that may be that of another transformation."""
    before = tx.init(PARAMS) if state is None else state
    return jax.make_jaxpr(tx.update, axis_env=[(AXIS, 4)])(updates, before, PARAMS)


def injected(**options):
    return optax.inject_hyperparams(gw.power_sgd, **options)(rank=4, axis_name=AXIS).init(PARAMS)


ADAMW = partial(optax.adamw, 0.05)
#: What makes no transformation.
NO_OUTER = (
    partial(torch.optim.AdamW, lr=0.1),
    torch.optim.AdamW,
    lambda: 3,
    partial(optax.sgd, momentum=0.9),
)
TALLER = PARAMS | {"w": jnp.ones((33, 24))}
OF_FOUR, CUT = sharded(ADAM).init(PARAMS), "which cannot become"
#: Sharded states, and what they cannot be made like.
UNLIKE = [
    (OF_FOUR, SGD.init(PARAMS), "`like`"),
    (OF_FOUR, ADAM.init(TALLER), "0.mu.w", "(4, 1, 192)", CUT, "(33, 24)"),
    (ADAM.init(TALLER), OF_FOUR, "0.mu.w", "(33, 24)", CUT, "(4, 1, 192)"),
    (OF_FOUR, sharded(ADAM, replicas=3).init(TALLER), "0.mu.w", "(4, 1, 192)", CUT, "(3, 1, 264)"),
    (gw.replicate(OF_FOUR), ADAM.init(PARAMS), "unreplicate"),
]
AT_ONCE = [
    (lambda: gw.power_sgd(2), TypeError, "axis_name"),
    (lambda: gw.all_reduce_mean(), TypeError, "axis_name"),
    (lambda: gw.average_gradients(AllReduce()), TypeError, "axis_name"),
    *((lambda axis=axis: power(axis_name=axis), TypeError, f"axis_name={axis!r}") for axis in (None, 0, ())),
    (lambda: power(axis_name=(AXIS, 1)), TypeError, "axis_name=", "1"),
    *((lambda axis=axis: sharded(axis_name=axis), TypeError, f"axis_name={axis!r}") for axis in (None, (), 3)),
    *((lambda axis=axis: CLIP(1.0, axis), TypeError, f"axis_name={axis!r}") for axis in (None, (), 3)),
    (lambda: local(axis_name=3), TypeError, "axis_name=3"),
    (lambda: power(axis_name=(AXIS, AXIS)), ValueError, "axis_name=('data', 'data')"),
    (lambda: gw.power_sgd(2, axis_name="ici", within="ici"), ValueError, "axis_name='ici'", "within='ici'"),
    (lambda: average(PowerSGD), TypeError, "algorithm=PowerSGD"),
    *((lambda a=a: average(a), TypeError, f"algorithm={a!r}"[:20]) for a in (optax.sgd(1.0), 4, "powersgd", None)),
    *((lambda rank=rank: power(rank), ValueError, f"rank={rank}") for rank in (0, -3)),
    (lambda: power(ranks=3), TypeError, "ranks"),
    *((lambda n=n: sharded(replicas=n), TypeError, f"replicas={n!r}") for n in (2.0, True, "4")),
    *((lambda o=o: sharded(**{o: "no"}), TypeError, f"{o}='no'") for o in ("averaged", "skip_non_finite", "elementwise")),
    (lambda: sharded(bucket_bytes=8.0), TypeError, "bucket_bytes=8.0"),
    *((lambda n=n: CLIP(n, AXIS), TypeError, f"max_norm={n!r}") for n in ("x", True, None)),
    (lambda: local(moments=3), TypeError, "moments=3"),
    *((lambda n=n: gw.set_replicas(TX.init(PARAMS), n), TypeError, f"replicas={n!r}") for n in (2.0, "4", None)),
    (lambda: gw.set_replicas(TX.init(PARAMS), 0), ValueError, "replicas=0"),
    (lambda: gw.set_replicas(jax.eval_shape(TX.init, PARAMS), 4), TypeError, "ShapeDtypeStruct", "abstract_state("),
    (lambda: gw.abstract_state(TX.init(PARAMS), 0), ValueError, "replicas=0"),
    (lambda: gw.abstract_state(TX.init(PARAMS), 4, mesh_of(4)), ValueError, "axis_name=None", "both"),
    (lambda: gw.replicate(TX.init(PARAMS), axis_name=3), TypeError, "axis_name=3"),
    (lambda: gw.to_portable(TX.init(PARAMS), PowerSGD(2), errors="none"), ValueError, "errors='none'"),
    (lambda: gw.from_portable({}, PowerSGD(2), PARAMS, replicas=2), TypeError, "like="),
    (lambda: gw.from_portable([], PowerSGD(2), TX.init(PARAMS), replicas=2), TypeError, "state=[]"),
    (lambda: sharded(optax.adam), TypeError, "inner=", "zero1("),
    (lambda: sharded(replicas=0), ValueError, "replicas=0"),
    (lambda: sharded(bucket_bytes=0), ValueError, "bucket_bytes=0"),
    (lambda: sharded(bucket_bytes=8, averaged=True), ValueError, "bucket_bytes=8", "averaged=True"),
    (lambda: sharded(wire_dtype="int8", averaged=True), ValueError, "wire_dtype='int8'", "averaged=True"),
    (lambda: sharded(wire_dtype="int7"), ValueError, "dtype='int7'"),
    *((lambda n=n: CLIP(n, AXIS), ValueError, f"max_norm={n}") for n in (0.0, -1.0, float("nan"))),
    (lambda: local(optax.sgd), TypeError, "inner=", "local_sgd("),
    (lambda: local(schedule=4), TypeError, "local", "LocalSGD"),
    (lambda: local(moments="drop"), ValueError, "moments='drop'"),
    (lambda: diloco(fragments=2, moments="reset"), ValueError, "moments='reset'", "fragments=2"),
    (lambda: LocalSGD(4, outer=SGD), TypeError, "outer"),
    (lambda: diloco(outer=3), TypeError, "outer="),
    (lambda: diloco(outer=ADAMW, lr=0.5), TypeError, "lr="),
    *((lambda outer=outer: diloco(outer=outer), TypeError, "outer=") for outer in NO_OUTER),
    (lambda: diloco(outer=partial(optax.sm3, 0.1)), TypeError, "outer=optax", "sm3", "several arrays", "0.mu"),
    (lambda: LocalSimulator(LocalSGD(4, outer=ADAMW), {"w": [1.0]}, 2), TypeError, "outer=", "adamw"),
    (lambda: LOCAL.step({}, {"params": 1}), TypeError, "training"),
    *((lambda given=given, like=like: gw.reshard(given, like), ValueError, *words) for given, like, *words in UNLIKE),
    (lambda: gw.mark_varying(PARAMS, AXIS), NameError, "mark_varying", "'data'"),
    (lambda: gw.stack_replicas(gw.stack_replicas({"w": 1.0})), TypeError, "stack_replicas"),
    (lambda: gw.parameter_shapes({"a": {"b": 1.0}, "a/b": 1.0}), ValueError, "'a/b'"),
    (lambda: gw.stats(ADAM.init(PARAMS)), ValueError, "power_sgd", "local_sgd"),
]  # fmt: skip


class Wish(Request):
    pass


def asking(request):
    """An algorithm that asks this of its gradient of "b"."""

    class Asking(AllReduce):
        async def step(self, ops, gradients, state, step):
            await request(gradients["b"])
            return dict(gradients), state

    return Asking()


ZERO = Zero(shard_by_element({"w": Spec((32, 24)), "b": Spec((24,))}, 1))
WISH, EVEN = asking(lambda x: ask(Wish())), asking(lambda x: rq.all_gather([x], [(24, 24)]))
UNEQUAL, IN_PAIRS = (
    asking(lambda x: rq.all_gather([x[:10]], [(10, 14)])),
    asking(lambda x: rq.mean(x, groups=PAIRS)),
)


def typed(dtype):
    return PARAMS | {"b": jnp.ones(24, dtype)}


BOXED = {"kernel": nn.Partitioned(PARAMS["w"], (None, None))}
CUBE = {"k": jnp.zeros((3, 3, 8, 16))}
BY_THE_MARK = ({"per_replica": jnp.ones((4, 3))}, {"layer": {"per_replica": {"w": jnp.ones(4)}}})
IN_INIT = [
    (init(power({"v*": 2})), ValueError, "'v*'", "'b', 'w'"),
    (init(power(transpose=("*/value",)), BOXED), ValueError, "transpose", "'*/value'"),
    (init(diloco(9, fragments=3)), ValueError, "fragments=3"),
    (init(local(optax.chain(LOCAL, SGD))), ValueError, "inner", "LocalSGDState"),
    (init(LOCAL, {"n": jnp.arange(3)}), ValueError, "'n'", "int32"),
    (init(LOCAL, {"n": jax.ShapeDtypeStruct((3,), "float32")}), TypeError, "jax.eval_shape(tx.init, params)"),
    (lambda: on_four(local(schedule=LocalSGD(4, subgroup=3)).init), ValueError, "4 replicas"),
    (init(sharded(replicas=None)), ValueError, "'data'", "replicas="),
    (lambda: on_four(sharded(replicas=2).init), ValueError, "replicas=2", "'data'"),
    (lambda: jax.make_jaxpr(average(IN_PAIRS).init, axis_env=[(AXIS, 3)])(PARAMS), ValueError, "0 to 2"),
    *((init(tx, PARAMS | {"f": jax.nn.relu}), TypeError, "eqx.filter") for tx in (TX, diloco(), sharded(ADAM))),
    *((init(tx, p), ValueError, "per_replica") for p in BY_THE_MARK for tx in (TX, diloco(), sharded())),
    *((init(wrap(each)), ValueError, said)
      for a, said in ((ZERO, "OptimizerStep"), (UNEQUAL, "(10, 14)"), (WISH, "Wish"))
      for wrap in (average, lambda a: diloco(compressor=a)) for each in (a, WireDtype(a, "bfloat16"))),
    (lambda: injected(), TypeError, "optax.inject_hyperparams"),
    (lambda: injected(static_args=("rank",)), TypeError, "optax.inject_hyperparams"),
    (init(TX, typed(jnp.complex64)), ValueError, "'b'", "complex64", "optax.stateless("),
    (init(TX, typed(jnp.int32)), ValueError, "'b'", "int32", "equinox.is_inexact_array"),
    (init(TX, typed(jnp.float8_e4m3fn)), ValueError, "'b'", "float8_e4m3fn", "optax.tree.cast(params, jax.numpy.bfloat16)"),
    *((init(tx, typed(d)), ValueError, "'b'", jnp.dtype(d).name, "optax.masked")
      for tx in (TX, MEAN, sharded()) for d in (jnp.int32, jnp.bool, jnp.complex64)),
    (lambda: gw.from_portable({}, TwoLevel(PowerSGD(2), "ici"), IN_ICI.init(PARAMS), replicas=4), ValueError,
     "within='ici'"),
]  # fmt: skip


# In a step: gradients and states that are not those of this replica, these parameters, these
# options.

#: An update where no axis "data" is.
NOWHERE = (
    lambda f: f,
    jax.jit,
    lambda f: jax.vmap(f, axis_name="batch", in_axes=None, axis_size=2),
)
DCN = [
    gw.power_sgd(2, axis_name="dcn", **options)
    for options in ({}, {"start_step": 2}, {"half_step": True})
]
OPTIONS = [
    {"rank": 3},
    {"half_step": True},
    {"square": True},
    {"transpose": ("*w",)},
    {"state_dtype": "bfloat16"},
]
OPTIONS += [{"error_feedback": False}, {"warm_start": False}]
#: States of other options, and the transformation that they are given to.
STRANGERS = [pair for other in OPTIONS for pair in ((power(**other), TX), (TX, power(**other)))]
BY_ROWS = [power(1, rows={"*": n}, min_compression_rate=1.0) for n in (1, 2)]
W, B = PARAMS["w"], PARAMS["b"]
INTEGERS = jax.grad(lambda p: p["w"].sum(), allow_int=True)({"w": W, "b": jnp.ones(24, int)})


def gradient(params, x):
    return jax.grad(lambda p: ((x @ p["w"] + p["b"]) ** 2).mean())(params)


def varying(params, x=None, axis=AXIS):
    """What differs between replicas: these parameters, or their gradient."""
    mine = gw.mark_varying(params, axis)
    return mine if x is None else gradient(mine, x)


def over_both(over=()):
    return lambda p, x: lax.pmean(varying(p, x, ("dcn", "ici")), over)


def given(tx, gradients, *mesh, **options):
    """A step in `jax.shard_map`, where JAX knows of gradients whether autodiff has summed them and
    whether they are averages."""
    return lambda: traced(
        lambda p, s, x: tx.update(gradients(p, x), s, p), PARAMS, tx.init(PARAMS), *mesh, **options
    )


def stored(before, now):
    return lambda: serialization.from_bytes(
        now.init(PARAMS), serialization.to_bytes(before.init(PARAMS))
    )


def placed_along_ici():
    """As if the helpers had been told nothing."""
    tx, state = DCN[0], DCN[0].init(PARAMS)
    specs = jax.tree.map(
        lambda x: jax.P("ici") if jnp.ndim(x) == 3 or x.dtype == jnp.int8 else jax.P(), state
    )
    placed = jax.tree.map(
        lambda x, s: (
            jnp.zeros((2, *x.shape[1:]), bool if x.dtype == jnp.int8 else x.dtype) if s else x
        ),
        state,
        specs,
    )

    def body(x, state):
        return tx.update(
            jax.tree.map(lambda p: lax.pcast(p, "dcn", to="varying") * x.mean(), PARAMS), state
        )[0]

    mapped = jax.shard_map(
        body, mesh=mesh_of_two(), in_specs=(jax.P("dcn"), specs), out_specs=jax.P()
    )
    return jax.eval_shape(mapped, jnp.ones(2), placed)


def one_spec(check_vma):
    specs = {"in_specs": (jax.P(), jax.P(), jax.P(AXIS)), "out_specs": (jax.P(), jax.P())}
    mapped = jax.shard_map(
        lambda p, s, x: TX.update(varying(p, x), s), mesh=mesh_of(4), **specs, check_vma=check_vma
    )
    return jax.eval_shape(mapped, PARAMS, TX.init(PARAMS), jnp.ones((4, 32)))


def zero1_of_slices(averaged):
    mesh, few = sliced.mesh_of(2), sliced.FEW
    tx = gw.zero1(ADAM, axis_name="dcn", replicas=2, averaged=averaged)
    state = gw.distribute(tx.init(sliced.arrays(mesh, shapes=few)), mesh, "dcn")
    run = sliced.mapped(
        lambda g, s: tx.update(sliced.first(g), s), state, mesh=mesh, check_vma=False
    )
    return jax.eval_shape(run, sliced.shapes_of_gradients(mesh, shapes=few), state)


def kept(state):
    """On the host, as a checkpoint has it."""
    return jax.tree.map(jnp.asarray, gw.unreplicate(gw.replicate(state)))


PORTABLE = gw.to_portable(TX.init(PARAMS), PowerSGD(2))
#: What is said → what was changed in a saved state.
DAMAGED = {
    "memory 'error' of parameter 'w' holds": {
        "local": {"w": {"error": np.full((1, 32, 24), np.nan)}}
    },
    "memory 'q' of parameter 'w' holds": {"tensors": {"w": {"q": np.full((2, 24), np.inf)}}},
    "scale=0": {"scale": 0},
    "step=": {"step": 2**40},
    "'local' in the state": {"local": 1.5},
    "replicas=": {"replicas": -1},
}


def in_pmap(state, tx=TX, **axes):
    return lambda: jax.eval_shape(
        jax.pmap(tx.update, AXIS, **axes), STACKED, state(tx.init(PARAMS))
    )


ENSEMBLE = jax.vmap(TX.init)(STACKED)
OUTER = gw.diloco(ADAM, 4, axis_name=AXIS)
#: Parameters that differ, as those of an ensemble do.
MEMBERS = jax.tree.map(lambda x: jnp.stack([n * x[0] for n in range(1, 5)]), STACKED)


def of_members(members, tx, params=PARAMS):
    return jax.vmap(tx.init)(jax.tree.map(lambda x: jnp.stack([x] * members), params))


#: Stacks of four, of as many rows.
WHOLE, FOURS = {"shard": "parameter", "elementwise": False}, {n: jnp.ones((4, 2)) for n in "abcd"}


def of_nnx():
    """The structure of a model and an optimizer of nnx, and their arrays, in which types are
    gone."""
    model = nnx.Linear(32, 24, rngs=nnx.Rngs(0))
    return nnx.split((model, nnx.Optimizer(model, optax.chain(TX, ADAM), wrt=nnx.Param)))


def merged():
    graphdef, state = of_nnx()
    return nnx.merge(graphdef, state)[1]


def integers_left_out():
    """With gradients as `jax.grad` makes them."""
    params, table = PARAMS, jnp.arange(4)

    def step(params, x):
        gradients = jax.grad(lambda p: (x @ p["w"]).sum() * table[1])(params)
        return optax.apply_updates(params, TX.update(gradients, TX.init(params), params)[0])

    return jax.make_jaxpr(step, axis_env=[(AXIS, 4)])(params, jnp.ones((2, 32)))


#: What messages advise.
ADVICE = [
    lambda: gw.distribute(gw.set_replicas(kept(fresh()), 2), mesh_of(2), AXIS),
    lambda: gw.stats(merged()),
    lambda: gw.to_portable(merged().opt_state[0], PowerSGD(2)),
    integers_left_out,
    lambda: init(TX, optax.tree.cast(typed(jnp.float8_e4m3fn), jnp.bfloat16))(),
    lambda: [
        gw.distribute(TX.init(jax.tree.map(lambda x, i=i: x[i], STACKED)), mesh_of(4), AXIS)
        for i in range(2)
    ],
    # no ensemble
    lambda: gw.distribute(sharded(optax.sgd(0.1, 0.9), **WHOLE).init(FOURS), mesh_of(4), AXIS),
]


def told(turn):
    return lambda: on_four(lambda p: LOCAL.average_params(p, LOCAL.init(p), turn=turn))


IN_A_STEP = [
    *((at, ValueError, "(4, 1)", "ensemble", "for params in members") for at in (
        lambda: gw.distribute(ENSEMBLE, mesh_of(4), AXIS), lambda: gw.stats(ENSEMBLE),
        lambda: gw.unreplicate((MEMBERS, ENSEMBLE)),
        lambda: gw.unreplicate(jax.vmap(lambda p: gw.stack_replicas((p, OUTER.init(p))))(MEMBERS)))),
    *((lambda given=given: gw.distribute(of_members(*given), mesh_of(4), AXIS), ValueError, f"({given[0]}, 4, ",
       f"{given[0]} members", "ensemble") for given in (
        (3, sharded(ADAM)), (4, sharded(ADAM)), (4, sharded(optax.sgd(0.1, 0.9))),
        (3, sharded(optax.sgd(0.1, 0.9), **WHOLE), FOURS), (4, sharded(ADAM, **WHOLE), FOURS))),
    *((lambda given=given, at=at: at(of_members(*given)), ValueError, f"({given[0]}, ", f"{given[0]} members", "ensemble")
      for at in (lambda state: gw.abstract_state(state, 4), lambda state: gw.replicate(state, jax.devices()[:4]))
      for given in ((4, sharded(ADAM, replicas=1)), (2, sharded(optax.sgd(0.1, 0.9), replicas=1, **WHOLE), FOURS),
                    (4, sharded(optax.sgd(0.1, 0.9), **WHOLE), FOURS))),
    *((lambda form=form, at=at: at(form(MEAN)), ValueError, "account.skipped", "(4,)", "several members of an ensemble")
      for form in (partial(of_members, 4), lambda tx: gw.replicate(tx.init(PARAMS), jax.devices()[:4]))
      for at in (lambda x: gw.distribute(x, mesh_of(4), AXIS), lambda x: gw.abstract_state(x, 4))),
    (lambda: gw.distribute(gw.replicate(sharded(ADAM).init(PARAMS), jax.devices()[:4]), mesh_of(4), AXIS), ValueError,
     "(4, 1, ", "form of jax.pmap"),
    (lambda: gw.unreplicate(of_members(4, sharded(ADAM))), ValueError, "4 members of an ensemble"),
    (lambda: gw.unreplicate(of_members(4, optax.chain(TX, sharded(ADAM, averaged=True)))), ValueError, "4 members"),
    *((lambda what=what: local(optax.flatten(ADAM), moments=what).init(PARAMS), ValueError, f"moments='{what}'", "0.mu",
       "optax.flatten") for what in ("average", "reset")),
    *((lambda form=form, at=at: at(form(MEAN)), ValueError, what, "(4,)", "pmap form, or that of several members")
      for form in (partial(of_members, 4), lambda tx: gw.replicate(tx.init(PARAMS), jax.devices()[:4]))
      for what, at in (("stats", gw.stats), ("account.skipped", lambda x: gw.to_portable(x, AllReduce())))),
    (lambda: gw.reshard(of_members(3, sharded(ADAM)), of_members(3, ADAM)), ValueError, "3 members of an ensemble"),
    (lambda: gw.stats(of_nnx()[1]), ValueError, "stats", "nnx.merge(graphdef, state)[1]"),
    (lambda: gw.to_portable(of_nnx()[1], PowerSGD(2)), ValueError, "nnx.merge(graphdef, state)[1].opt_state"),
    (told(3), TypeError, "turn=3", "tx.turns(state)"),
    (told(LocalSGD(7).turn(6)), ValueError, "another schedule", "LocalSGD(period=4)", "tx.turns(state)"),
    (lambda: LOCAL.turns(jax.eval_shape(LOCAL.init, PARAMS)), TypeError, "turns"),
    (lambda: LOCAL.turns(ADAM.init(PARAMS)), ValueError, "turns", "there are 0"),
    *((lambda at=at, tx=tx: at(tx.update)(PARAMS, tx.init(PARAMS)), NameError, "'data'", "axis_name='data'")
      for at in NOWHERE for tx in (TX, MEAN)),
    (lambda: sharded().update(PARAMS, sharded().init(PARAMS)), NameError, "zero1", "'data'"),
    (lambda: CLIP(1.0, AXIS).update(PARAMS, optax.EmptyState()), NameError, "clip_by_global_norm", "'data'"),
    *((lambda tx=tx, d=d: step(tx, typed(d), tx.init(PARAMS)), ValueError, "'b'", jnp.dtype(d).name, "optax.masked")
      for tx in (TX, MEAN) for d in (jnp.int32, jnp.bool, jnp.complex64)),
    (lambda: step(TX, INTEGERS), ValueError, "'b'", "float0"),
    (given(TX, gradient), ValueError, "'b', 'w'", "mark_varying(params, 'data')", "check_vma=False"),
    (given(TX, lambda p, x: varying(p, x) | {"b": gradient(p, x)["b"]}), ValueError, "gradients of 'b'"),
    (given(TX, lambda p, x: lax.pmean(varying(p, x), AXIS)), ValueError, "'b', 'w'", "pmean or psum"),
    (given(sharded(), gradient), ValueError, "'b', 'w'", "mark_varying(params, 'data')"),
    (given(AVERAGED, varying), ValueError, "averaged=True", "'b'", "'data'"),
    (given(optax.chain(MEAN, sharded()), varying), ValueError, "averaged=True"),
    (given(CLIP(1.0, AXIS), gradient), ValueError, "zero(", "optax.clip_by_global_norm"),
    *((given(tx, over_both(), mesh_of_two(), "dcn"), ValueError, "'b'", "'ici'", "axis_name=('dcn', 'ici')")
      for tx in DCN),
    *((lambda tx=tx: step(tx, {"w": W}), ValueError, "'b'") for tx in (TX, BARE[1])),
    *((lambda tx=tx: step(tx, {"w": W, "bias": B}), ValueError, "'bias'", "'b'") for tx in (TX, BARE[1])),
    *((lambda tx=tx: step(tx, {"b": B}), ValueError, "'w'") for tx in (TX, BARE[1])),
    *((lambda tx=tx: step(tx, {"w": {"v": W}, "b": B}), ValueError, "'w/v'", "'w'") for tx in (TX, BARE[1])),
    (lambda: step(TX, {"w": W.T, "b": B}), ValueError, "'w'", "(24, 32)", "(32, 24)"),
    (lambda: step(TX, state=kept(TX.init(PARAMS))), ValueError, "'error'", "'w'", "(4, 32, 24)", "partition_specs"),
    (lambda: step(sharded(ADAM)), ValueError, "'0.mu.b'", "(4, 6)", "partition_specs"),
    (lambda: step(sharded(ADAM, replicas=None), state=jax.tree.map(lambda x: x[:1] if x.ndim else x, sharded(ADAM, replicas=2).init(PARAMS))), ValueError,
     "'0.mu.b'", "(12,)", "(6,)", "reshard"),
    *((lambda v=v: one_spec(v), ValueError, "distribute(state, mesh, axis_name)", "partition_specs") for v in BOTH),
    (in_pmap(lambda state: state, in_axes=(0, None), out_axes=None), ValueError, "in_axes=0"),
    (in_pmap(flax.jax_utils.replicate), ValueError, "flax.jax_utils.replicate"),
    (in_pmap(gw.replicate, power(within=3)), ValueError, "within=3", "4 replicas"),
    (placed_along_ici, ValueError, "'ici'", "axis_name='dcn'"),
    *((lambda v=v: zero1_of_slices(v), ValueError, "axis_name='dcn'", "'ici'") for v in BOTH),
    *((lambda a=a, b=b: step(b, state=a.init(PARAMS)), ValueError, "PowerSGD(", "PowerSGD(", "from_portable(")
      for a, b in STRANGERS),
    *((stored(a, b), ValueError, "PowerSGD(rank=", "configuration") for a, b in STRANGERS),
    (lambda: step(BY_ROWS[0], state=BY_ROWS[1].init(CUBE), updates=CUBE), ValueError, "rows={'*': 2}"),
    (lambda: step(TX, state=MEAN.init(PARAMS)), ValueError, "AllReduce()", "PowerSGD(rank=2)"),
    *((lambda chain=chain: gw.to_portable(chain, PowerSGD(2)), ValueError, part)
      for chain, part in (((TX.init(PARAMS), ()), "state[0]"), ({"opt": ((), TX.init(PARAMS))}, "state['opt'][1]"))),
    *((lambda change=change: gw.from_portable(PORTABLE | change, PowerSGD(2), TX.init(PARAMS), replicas=4), ValueError, said)
      for said, change in DAMAGED.items()),
    *((lambda state=state: gw.to_portable(state.init(PARAMS), PowerSGD(4)), ValueError, "algorithm=PowerSGD(rank=4)", of)
      for state, of in ((TX, "state is of PowerSGD(rank=2)"), (MEAN, "state is of AllReduce()"),
                        (IN_ICI, "state is of TwoLevel(algorithm=PowerSGD(rank=2), within='ici')"))),
    (lambda: gw.from_portable(PORTABLE, PowerSGD(2), power(seed=3).init(PARAMS), replicas=4), ValueError,
     "algorithm=PowerSGD(rank=2)", "like is of PowerSGD(rank=2, seed=3)"),
    # As a pickle of four fields of it comes back.
    (lambda: gw.to_portable({"step": 1, "shared": {}}, PowerSGD(2)), ValueError, "state is a dict"),
    *((lambda n=n: gw.relative_error(PARAMS, PARAMS, (TX.init(PARAMS),) * n, axis_name=AXIS), ValueError, "state",
       f"{n}") for n in (0, 2)),
]  # fmt: skip


# Where a state belongs.


def placing(make, replicas=4):
    """Every way to give replicas their rows."""
    yield lambda: gw.replicate(make(), jax.devices()[:replicas])
    yield lambda: gw.distribute(make(), mesh_of(replicas), AXIS)


def laid_out(make):
    yield from placing(make)
    yield lambda: gw.partition_specs(make(), AXIS)


def alone():
    return flax.jax_utils.unreplicate(gw.replicate(TX.init(PARAMS)))


def in_pmap_form(make):
    return (
        *laid_out(lambda: gw.replicate(make())),
        lambda: gw.set_replicas(gw.replicate(make()), 2),
    )


ALONG_ICI = {"params": PARAMS, "opt": optax.chain(DCN[0], SGD).init(PARAMS)}
PLACED_WRONGLY = [
    *((put, ValueError, "local.per_replica.error.w", "4 replicas", "set_replicas(state, ")
      for put in placing(lambda: kept(TX.init(PARAMS)), 2)),
    *((put, ValueError, "flax.jax_utils.unreplicate", "set_replicas(state, 4)") for put in placing(alone)),
    (lambda: gw.partition_specs(ALONG_ICI, "ici"), ValueError, "axis_name='ici'", "axis_name='dcn'"),
    (lambda: gw.distribute(ALONG_ICI, mesh_of_two(), "ici"), ValueError, "axis_name='ici'", "axis_name='dcn'"),
    (lambda: gw.distribute(TX.init(PARAMS), mesh_of_two(), AXIS), ValueError, "axis_name='data'", "'dcn', 'ici'"),
    (lambda: gw.distribute(sharded(ADAM, replicas=2).init(PARAMS), mesh_of(4), AXIS), ValueError,
     "pieces.per_replica.0.mu.b", "2 replicas", "reshard"),
    (lambda: gw.replicate(sharded(ADAM, replicas=1).init(PARAMS)), ValueError, "1 replicas"),
    (lambda: gw.abstract_state(sharded(ADAM, replicas=2).init(PARAMS), 4), ValueError, "2 replicas", "replicas=4", "zero1("),
    (lambda: gw.abstract_state(TX.init(PARAMS), 4, mesh_of(4), "other"), ValueError, "axis_name='other'", "'data'"),
    (lambda: gw.abstract_state(gw.replicate(TX.init(PARAMS)), 4, mesh_of(4), AXIS), ValueError, "jax.pmap", "unreplicate"),
    *((put, ValueError, "jax.pmap", "unreplicate(state)")
      for make in (lambda: TX.init(PARAMS), lambda: gw.stack_replicas(LOCAL.init(PARAMS))) for put in in_pmap_form(make)),
    (lambda: gw.unreplicate(TX.init(PARAMS)), ValueError, "step"),
    (lambda: gw.unreplicate(TX.init(PARAMS)._replace(step=jnp.zeros(1), memory={})), ValueError,
     "local.per_replica.error.w", "(1, 32, 24)"),
    # Inside a wrapper that decides by itself whether a step is taken, or that keeps gradients of
    # its own.
    *((put, ValueError, "opt.inner_state", "optax.apply_if_finite")
      for tx in (TX, optax.chain(TX, ADAM)) for put in laid_out(lambda tx=tx: {"opt": FINITE(tx).init(PARAMS)})),
    (lambda: gw.partition_specs(FINITE(sharded(ADAM)).init(PARAMS), AXIS), ValueError, "optax.apply_if_finite",
     "skip_non_finite=True"),
    (lambda: gw.partition_specs(SEVERAL(optax.chain(TX, ADAM)).init(PARAMS), AXIS), ValueError,
     "inner_opt_state.0.local.per_replica", "optax.MultiSteps"),
    *((lambda tx=tx: gw.replicate(FINITE(tx).init(PARAMS)), ValueError, "optax", "apply_if_finite") for tx in BARE),
    *((lambda tx=tx: gw.replicate(optax.contrib.mechanize(optax.chain(tx, ADAM)).init(PARAMS)), ValueError, "mechanize")
      for tx in (TX, MEAN)),
    (lambda: gw.partition_specs(optax.contrib.mechanize(optax.chain(TX, ADAM)).init(PARAMS), AXIS), ValueError,
     "local.per_replica", "mechanize"),
    *((put, ValueError, "optax.conditionally_transform", "start_step=")
      for tx in (TX, optax.chain(MEAN, ADAM), sharded(ADAM)) for put in laid_out(lambda tx=tx: LATE(tx).init(PARAMS))),
    *((lambda tx=tx: gw.replicate(SKIPPING(tx).init(PARAMS)), ValueError, "optax", "should_skip_upd") for tx in BARE),
    *((lambda tx=tx, see=see: see(jax.pmap(lambda _: tx.init(PARAMS), AXIS)(np.zeros(4))), ValueError, "optax", said)
      for see in (gw.stats, gw.unreplicate)
      for tx, said in ((SKIPPING(TX), "should_skip_upd"), (FINITE(TX), "apply_if_finite"))),
    *((lambda tx=tx: gw.partition_specs(SEVERAL(tx).init(PARAMS), AXIS), ValueError, "optax.MultiSteps")
      for tx in BARE),
    *((lambda tx=tx: gw.unreplicate(gw.replicate(SEVERAL(tx).init(PARAMS))._replace(mini_step=np.ones(4))), ValueError,
       "mini_step") for tx in (TX, *BARE)),
]  # fmt: skip


# Of local SGD, whose state differs between replicas in all of it.


def fresh(tx=LOCAL, mark=gw.stack_replicas):
    return mark({"params": PARAMS, "opt_state": tx.init(PARAMS)})


UNMARKED = partial(fresh, mark=dict)


def placed(tx=LOCAL):
    return gw.distribute(fresh(tx), mesh_of(4), AXIS)


def trained(make, specs, *, tx=LOCAL, check_vma=False, read=gw.this_replica):
    """One step, traced."""

    def body(state):
        mine = read(state)
        updates, opt_state = tx.update(
            jax.tree.map(jnp.ones_like, mine["params"]), mine["opt_state"], mine["params"]
        )
        params, opt_state = tx.average_params(
            optax.apply_updates(mine["params"], updates), opt_state
        )
        after = {"params": params, "opt_state": opt_state}
        return after if read is dict else gw.stack_replicas(after)

    shards = {"mesh": mesh_of(4), "in_specs": (specs,), "out_specs": specs, "check_vma": check_vma}
    return lambda: jax.eval_shape(jax.shard_map(body, **shards), make())


def the_same_everywhere():
    def body(p, x):
        _, state = LOCAL.update(jax.tree.map(lambda y: y * x[0], p), LOCAL.init(p), p)
        return LOCAL.average_params(p, state)[0]

    over = jax.shard_map(
        body, mesh=mesh_of(4), in_specs=(jax.P(), jax.P(AXIS)), out_specs=jax.P(AXIS)
    )
    return jax.eval_shape(over, PARAMS, jnp.ones(4))


def used(averages):
    """Every use outside the training step of a state that was updated three times and averaged so
    often, in global form and in that of pmap."""
    opt_state = LOCAL.init(B)
    counted = opt_state.averages._replace(step=jnp.asarray(averages))
    state = gw.stack_replicas((B, opt_state._replace(updates=jnp.asarray(3), averages=counted)))

    def whole():
        return jax.tree.map(lambda x: jnp.concatenate([x] * 4), state)

    spread = lambda: gw.unreplicate(jax.tree.map(lambda x: jnp.stack([x] * 4), state))  # noqa: E731
    return (spread, lambda: gw.set_replicas(whole(), 4), *placing(whole))


PAIRED = local(schedule=LocalSGD({PAIRS: 2, "all": 4}))
OTHERS = [
    diloco(**other)
    for other in ({"fragments": 2}, {"compressor": PowerSGD(2)}, {"state_dtype": "bfloat16"})
]
OTHERS += [diloco(momentum=0.0, nesterov=False)]
OF_LOCAL_SGD = [
    (lambda: LOCAL.update(PARAMS, LOCAL.init(PARAMS), PARAMS), NameError, "'data'"),
    (lambda: LOCAL.average_params(PARAMS, LOCAL.init(PARAMS)), NameError, "'data'"),
    *((lambda n=n: on_four(lambda p: LOCAL.average_params(p, (LOCAL.init(p),) * n)), ValueError, "average_params",
       f"{n}") for n in (0, 2)),
    (lambda: on_four(lambda p: diloco().average_params({"w": W}, diloco().init(p))), ValueError, "'b'"),
    *(row for vma in BOTH for row in (
        (trained(UNMARKED, jax.P(), check_vma=vma, read=dict), ValueError, "`placed`", "stack_replicas(state)"),
        (trained(UNMARKED, jax.P(), check_vma=vma), TypeError, "this_replica", "stack_replicas"),
        (trained(fresh, jax.P(), check_vma=vma), ValueError, "`placed`", "none", "stack_replicas(state)"),
        (trained(placed, jax.P(), check_vma=vma), ValueError, "(4,"))),
    *((put, ValueError, "params.b") for put in laid_out(lambda: (gw.stack_replicas(LOCAL.init(PARAMS)), {"params": PARAMS}))),
    *((put, ValueError, "opt_state.placed") for put in laid_out(UNMARKED)),
    (lambda: gw.distribute(kept(fresh()), mesh_of(2), AXIS), ValueError, "4 replicas", "2"),
    (lambda: gw.set_replicas(sharded(ADAM).init(PARAMS), 2), ValueError, "sharded state of 4", "replicas=2", "reshard"),
    (trained(lambda: placed(PAIRED), jax.P(AXIS), tx=PAIRED, check_vma=True), NotImplementedError, f"{PAIRS}", "'data'"),
    (the_same_everywhere, ValueError, "'b'", "'data'"),
    (trained(lambda: placed(diloco(outer=ADAMW)), jax.P(AXIS), tx=diloco()), ValueError, "adamw"),
    *((trained(lambda a=a: placed(a), jax.P(AXIS), tx=b), ValueError, "LocalSGD(", "LocalSGD(")
      for other in OTHERS for a, b in ((diloco(), other), (other, diloco()))),
    *((call, ValueError, "update", "3 times", "average_params", f"{n} times") for n in (0, 6) for call in used(n)),
]  # fmt: skip


# Requests, and what a traced function sends.


def asked(case, check_vma=False):
    def call():
        if not check_vma:
            return jax.eval_shape(
                jax.vmap(lambda x: drive(case(x), AXIS), axis_name=AXIS), jnp.ones((4, 12))
            )
        over = {"mesh": mesh_of(4), "in_specs": jax.P(AXIS), "out_specs": jax.P()}
        return jax.eval_shape(
            jax.shard_map(lambda x: drive(case(x[0]), AXIS), **over), jnp.ones((4, 12))
        )

    return call


def sent(function):
    return lambda: gw.total_traffic(
        gw.collective_traffic(function, jnp.ones(3), axis_env=[(AXIS, 4)])
    )


STRANGE, UNEVEN = ((0, 1), (2,)), ((0, 1, 2), (3,))
REQUESTS = [
    (asked(lambda x: rq.mean(x, groups=PAIRS)), NotImplementedError, f"groups {PAIRS}", "'data'", "axis_name=("),
    (asked(lambda x: rq.gather(x, groups=PAIRS)), NotImplementedError, f"groups {PAIRS}"),
    (asked(lambda x: rq.all_to_all(x[:2], groups=PAIRS)), NotImplementedError, f"groups {PAIRS}", "check_vma=False"),
    (asked(lambda x: rq.reduce_scatter([x], [(6, 6)], groups=PAIRS)), NotImplementedError, f"groups {PAIRS}"),
    (asked(lambda x: rq.reduce_sum(x, groups=PAIRS), check_vma=True), NotImplementedError, f"groups {PAIRS}"),
    (asked(lambda x: rq.mean(x, groups=STRANGE)), ValueError, f"{STRANGE}", "0 to 3"),
    (asked(lambda x: rq.gather(x, groups=UNEVEN)), ValueError, f"{UNEVEN}"),
    (asked(lambda x: rq.world_size(UNEVEN)), ValueError, f"{UNEVEN}"),
    (asked(lambda x: rq.all_to_all(x)), ValueError, "[12]", "4 replicas"),
    (asked(lambda x: rq.all_gather([x], [(12, 12, 12, 8)])), TypeError, "AllGather", "(12, 12, 12, 8)"),
    (asked(lambda x: ask(OptimizerStep({}, None))), TypeError, "OptimizerStep"),
    (sent(lambda x: lax.while_loop(lambda c: c.sum() < 1, lambda c: lax.psum(c, AXIS), x)), ValueError, "while"),
    (sent(lambda x: lax.cond(x[0] > 0, lambda: lax.psum(x, AXIS), lambda: x)), ValueError, "cond 0", "taken="),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::gradwire.CompressionWarning")
@pytest.mark.parametrize(
    ("call", "error", "words"),
    rows(AT_ONCE, IN_INIT, IN_A_STEP, PLACED_WRONGLY, OF_LOCAL_SGD, REQUESTS),
)
def test_refused(call, error, words):
    with refused(*words, error=error):
        call()


def behind_its_average(state):
    return gw.unreplicate((state[0], state[1]._replace(mini_step=np.ones(4))))


MASKED = optax.masked(TX, {"w": True, "b": False})
#: What is right, and lies beside what is refused.
ACCEPTED = [
    *ADVICE,
    init(average(EVEN)),
    init(average(IN_PAIRS)),  # where nobody knows yet how many replicas there are
    init(local(schedule=LocalSGD(2, compressor=TwoLevel(PowerSGD(2), "ici")), axis_name="dcn")),
    *(init(tx, {"per_replica_scale": jnp.ones(4)}) for tx in (TX, diloco(), sharded())),
    # as is advised
    *(
        lambda d=d: step(MASKED, typed(d), MASKED.init(typed(d)))
        for d in (jnp.complex64, jnp.int32)
    ),
    *(given(tx, varying) for tx in (TX, sharded(), optax.chain(MEAN, AVERAGED))),
    *(given(tx, over_both("ici"), mesh_of_two(), "dcn") for tx in DCN),
    given(AVERAGED, gradient),
    *(given(TX, gradients, check_vma=False) for gradients in (gradient, varying)),
    # of parameters that the loss does not use
    given(TX, lambda p, x: jax.tree.map(lambda g: 0 * g, varying(p))),
    lambda: gw.replicate(optax.chain(TX, FINITE(ADAM)).init(PARAMS)),
    lambda: gw.replicate(optax.chain(TX, LATE(ADAM)).init(PARAMS)),
    *(
        lambda algorithm=algorithm: gw.to_portable(IN_ICI.init(PARAMS), algorithm)
        for algorithm in (PowerSGD(2), TwoLevel(PowerSGD(2), 2))
    ),
    lambda: gw.partition_specs(sharded(SEVERAL(ADAM)).init(PARAMS), AXIS),
    lambda: gw.partition_specs(optax.chain(TX, SEVERAL(ADAM)).init(PARAMS), AXIS),
    lambda: kept(SEVERAL(TX).init(PARAMS)),
    lambda: behind_its_average(gw.replicate(optax.chain(TX, SEVERAL(ADAM)).init(PARAMS))),
    lambda: gw.replicate(gw.set_replicas(alone(), 4)),  # of a run of one replica
    lambda: gw.replicate(alone(), jax.devices()[:1]),
    lambda: gw.distribute(
        optax.chain(gw.all_reduce_mean(axis_name="ici"), DCN[0]).init(PARAMS), mesh_of_two(), "dcn"
    ),
    lambda: gw.distribute(
        power(axis_name=("dcn", "ici")).init(PARAMS), mesh_of_two(), ("ici", "dcn")
    ),
    *(trained(placed, jax.P(AXIS), check_vma=vma) for vma in BOTH),
    trained(lambda: placed(PAIRED), jax.P(AXIS), tx=PAIRED),
    trained(lambda: placed(diloco()), jax.P(AXIS), tx=diloco(8, lr=0.5, start_step=2)),
    *placing(fresh),
    *used(3),
    *(
        lambda tx=tx: step(tx, state=stored(tx, tx)())
        for tx in (TX, *(power(**other) for other in OPTIONS))
    ),
    lambda: step(TX, state=pickle.loads(pickle.dumps(TX.init(PARAMS)))),
    # No memory depends on buckets and dtypes of messages.
    lambda: step(gw.all_reduce_mean(axis_name=AXIS, bucket_bytes=64), state=MEAN.init(PARAMS)),
    lambda: step(MEAN, state=average(WireDtype(AllReduce(), "bfloat16")).init(PARAMS)),
    lambda: step(TX, state=average(WireDtype(PowerSGD(2), "bfloat16")).init(PARAMS)),
]


@pytest.mark.parametrize("call", ACCEPTED)
def test_accepted(call):
    call()
