"""Set-ups that look wrong and come out right, and what is said of those that may be wrong. What is refused stands in `test_refusals.py`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradwire.jax_backend as gw
from tests.jax.replicas import AXIS, mesh_of

PARAMS = {"w": jnp.ones((32, 24)), "b": jnp.ones(24)}
TX = gw.power_sgd(2, axis_name=AXIS)


def test_inside_vmap_nothing_has_to_be_placed():
    """It refuses by itself what differs and has no axis."""
    given = jax.tree.map(lambda x: np.stack([np.asarray(x) * i for i in range(4)]), PARAMS)
    with pytest.raises(ValueError, match=r"vmap has mapped output.* but out_axes is None"):
        jax.eval_shape(jax.vmap(TX.update, (0, None), None, axis_name=AXIS), given, TX.init(PARAMS))
    states = jax.jit(jax.vmap(TX.init, None, axis_name=AXIS, axis_size=4))(PARAMS)
    _, states = jax.jit(jax.vmap(TX.update, axis_name=AXIS))(given, states)
    assert gw.unreplicate(states).local.per_replica["error"]["w"].shape == (4, 32, 24)


def test_one_vector_is_not_compressed():
    with pytest.warns(UserWarning, match=r"one vector of 792 elements.*optax.chain\(power_sgd\(...\), optax.flatten"):
        optax.flatten(optax.chain(TX, optax.sgd(0.1))).init(PARAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optax.chain(TX, optax.flatten(optax.sgd(0.1))).init(PARAMS)
        optax.flatten(gw.all_reduce_mean(axis_name=AXIS)).init(PARAMS)


# What the state of a chain tells.

MASK = {"w": True, "b": False}
REST = jax.tree.map(lambda x: not x, MASK)
MEAN = gw.all_reduce_mean(axis_name=AXIS)
CHAINS = {
    "adam before": (optax.chain(optax.adam(0.1), TX), "ScaleByAdamState"),
    "momentum before": (optax.chain(optax.clip(1.0), optax.trace(0.9), MEAN), "TraceState"),
    "adam before a mask": (
        optax.chain(optax.adam(0.1), optax.masked(TX, MASK), optax.masked(MEAN, REST)),
        "ScaleByAdamState",
    ),
    "injected before": (optax.chain(optax.inject_hyperparams(optax.adam)(0.1), MEAN), "InjectStatefulHyperparamsState"),
    "a mask alone": (optax.chain(optax.masked(TX, MASK), optax.sgd(0.1)), "optax.masked"),
    "right": (optax.chain(TX, optax.adam(0.1)), None),
    "clipped and decayed before": (
        optax.chain(optax.clip(1.0), optax.add_decayed_weights(0.1), TX, optax.adam(0.1)),
        None,
    ),
    "counted before": (optax.chain(optax.scale_by_schedule(lambda count: 1.0), TX), None),
    "two axes": (optax.chain(MEAN, TX, optax.adam(0.1)), None),
    "a mask and the rest": (optax.chain(optax.masked(TX, MASK), optax.masked(MEAN, REST), optax.adam(0.1)), None),
    "the rest first": (optax.chain(optax.masked(MEAN, REST), optax.masked(TX, MASK), optax.adam(0.1)), None),
    "labels": (
        optax.partition({"a": optax.chain(TX, optax.sgd(0.1, 0.9)), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}),
        None,
    ),
    "zero1 behind": (optax.chain(TX, gw.zero1(optax.adam(0.1), axis_name=AXIS, replicas=4, averaged=True)), None),
}


@pytest.mark.parametrize("name", CHAINS)
def test_what_the_state_of_a_chain_tells(name):
    tx, said = CHAINS[name]
    calls = (lambda s: gw.partition_specs(s, AXIS), lambda s: gw.distribute(s, mesh_of(4), AXIS), gw.replicate)
    for state in (tx.init(PARAMS), (PARAMS, tx.init(PARAMS)), (tuple(PARAMS.values()), {"opt": tx.init(PARAMS)})):
        for call in calls:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call(state)
            assert [said in str(w.message) for w in caught] == ([] if said is None else [True])
