"""A sharded state in its forms, consolidated and back, on another number of replicas, in checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import gradwire.jax_backend as gw
from tests.jax.quadratic import SHAPES, assert_close, filled, start, train, train_plain
from tests.jax.replicas import AXIS, equal, mesh_of, refused

PARAMS = start()
ADAMW = optax.adamw(optax.linear_schedule(0.05, 0.01, 20), weight_decay=0.1)


def sharded(replicas, inner=ADAMW, **options):
    return gw.zero1(inner, axis_name=AXIS, replicas=replicas, elementwise=True, **options)


def test_map_params_finds_the_pieces():
    tx = sharded(4)
    state = tx.init(PARAMS)
    marked = optax.tree.map_params(tx, lambda x: x + 100, state, transform_non_params=lambda x: x - 100)
    assert equal(marked.pieces, jax.tree.map(lambda x: x + 100, state.pieces))
    assert equal(marked.common, jax.tree.map(lambda x: x - 100, state.common))


def test_of_shapes_it_makes_the_state_that_it_makes_of_arrays():
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    for tx in (sharded(4), sharded(4, optax.sgd(0.1))):
        assert equal(tx.init(abstract), tx.init(PARAMS))


def test_pieces_are_marked_and_nothing_else():
    state = {"params": PARAMS, "opt": sharded(4).init(PARAMS)}
    specs = gw.partition_specs(state, AXIS)
    assert set(jax.tree.leaves(specs["opt"].pieces)) == {P(AXIS)}
    assert set(jax.tree.leaves((specs["opt"].common, specs["params"]))) == {P()}
    assert {n: x.shape for n, x in state["opt"].pieces.per_replica.items() if ".mu." in n} == {
        "0.mu.bias": (4, 2),
        "0.mu.kernel": (4, 1, 9),
        "0.mu.nothing": (4, 1, 0),
        "0.mu.scale": (4,),
    }
    assert [int(c.count) for c in (state["opt"].common[0], state["opt"].common[2])] == [0, 0]


def test_forms():
    plain = filled(ADAMW.init(PARAMS))
    state = gw.reshard(plain, jax.eval_shape(sharded(4).init, PARAMS))
    # A piece is a run of the flattened parameter, padded with zeros.
    rows = state.pieces.per_replica["0.nu.kernel"].reshape(-1)
    np.testing.assert_array_equal(rows, [*plain[0].nu["kernel"].reshape(-1), 0])
    spread = gw.replicate(state, axis_name=AXIS)
    kernel = spread.pieces.per_replica["0.mu.kernel"]
    assert kernel.shape == (4, 1, 1, 9)
    assert [s.data.shape for s in kernel.addressable_shards] == [(1, 1, 1, 9)] * 4
    assert equal(gw.unreplicate(spread), state)
    placed = gw.distribute(state, mesh_of(4), AXIS)
    for i, s in enumerate(placed.pieces.per_replica["0.mu.kernel"].addressable_shards):
        np.testing.assert_array_equal(s.data, state.pieces.per_replica["0.mu.kernel"][i : i + 1])
    assert equal(jax.tree.map(np.asarray, placed), state)


@pytest.mark.parametrize(
    "inner",
    [
        ADAMW,
        optax.MultiSteps(optax.adam(0.1), 2),
        optax.multi_transform(
            {"a": optax.adam(0.1), "b": optax.sgd(0.1, 0.9)}, {n: "a" if len(s) > 1 else "b" for n, s in SHAPES.items()}
        ),
        optax.inject_hyperparams(optax.rmsprop)(0.1),
    ],
    ids=["adamw", "accumulated", "partition", "hyperparameters"],
)
def test_every_number_of_replicas_and_back_to_the_bit(inner):
    plain = filled(inner.init(PARAMS))
    state = plain
    for replicas in (3, 4, 1, 50, 2):
        state = gw.reshard(state, jax.eval_shape(sharded(replicas, inner).init, PARAMS))
        assert isinstance(state, gw.ZeroState)
        assert all(x.shape[0] == replicas for x in state.pieces.per_replica.values())
        assert equal(gw.reshard(state, plain), plain)


def test_training_goes_on_with_another_number_of_replicas():
    """Of states only: gradients are those of two replicas throughout, so that nothing else changes."""
    half, state = train(sharded(2), 2, steps=6)
    whole = gw.reshard(state, jax.eval_shape(ADAMW.init, PARAMS))
    expected, plain = train_plain(ADAMW, 2, steps=6)
    assert_close(whole, plain, 1e-5)
    assert int(whole[0].count) == 6
    # Unsharded, and sharded again by way of four replicas.
    goes_on, _ = train_plain(ADAMW, 2, steps=6, params=half, state=whole)
    four = gw.reshard(state, jax.eval_shape(sharded(4).init, PARAMS))
    again = gw.reshard(four, jax.eval_shape(sharded(2).init, PARAMS))
    assert equal(again, jax.tree.map(np.asarray, state))
    assert_close(train(sharded(2), 2, steps=6, params=half, state=again)[0], goes_on)
    expected, _ = train_plain(ADAMW, 2, steps=6, params=expected, state=plain)
    assert_close(goes_on, expected)


def test_states_that_do_not_fit():
    state, plain = sharded(4).init(PARAMS), ADAMW.init(PARAMS)
    larger = PARAMS | {"kernel": jnp.ones((6, 7))}
    #: A state, what it is to be like, and what the message names.
    for given, like, named in (
        (state, optax.sgd(0.1, 0.9).init(PARAMS), "`like`"),
        (state, ADAMW.init(larger), "0.mu.kernel has shape (4, 1, 9), which cannot become (6, 7)"),
        (ADAMW.init(larger), state, "0.mu.kernel has shape (6, 7), which cannot become (4, 1, 9)"),
        (state, sharded(3).init(larger), "0.mu.kernel has shape (4, 1, 9), which cannot become (3, 1, 14)"),
        (gw.replicate(state), plain, "unreplicate"),
    ):
        with refused(named):
            gw.reshard(given, like)


CHAIN = (gw.power_sgd(2, axis_name=AXIS, min_compression_rate=1.0), optax.adam(0.05))


def flax_state(replicas):
    last = CHAIN[1] if replicas is None else sharded(replicas, CHAIN[1], averaged=True)
    return TrainState.create(apply_fn=None, params=PARAMS, tx=optax.chain(CHAIN[0], last))


def test_a_training_state_is_converted_where_it_holds_sharded_state():
    state = flax_state(4)
    inner = gw.reshard(filled(CHAIN[1].init(PARAMS)), state.opt_state[1])
    state = state.replace(opt_state=(state.opt_state[0], inner), step=7)
    plain = gw.reshard(state, flax_state(None))
    assert isinstance(plain, TrainState)
    assert plain.step == 7
    assert equal(plain.opt_state[1], filled(CHAIN[1].init(PARAMS)))
    assert equal(plain.opt_state[0], state.opt_state[0])
    assert plain.tx is not state.tx  # the one that goes with the state
    assert equal(gw.reshard(plain, flax_state(4)).opt_state, state.opt_state)


def test_the_state_of_an_nnx_optimizer():
    model = nnx.Linear(6, 5, rngs=nnx.Rngs(0))
    sharded_one, plain = (nnx.Optimizer(model, tx, wrt=nnx.Param).opt_state for tx in (sharded(2), ADAMW))
    whole = filled(nnx.as_pure(plain))
    pieces = gw.reshard(whole, sharded_one)
    assert pieces.pieces.per_replica["0.mu.kernel"].shape == (2, 1, 15)
    assert equal(gw.reshard(pieces, plain), whole)


def test_a_checkpoint_by_flax():
    blank = sharded(4).init(PARAMS)
    state = gw.reshard(filled(ADAMW.init(PARAMS)), blank)
    assert equal(serialization.from_bytes(blank, serialization.to_bytes(state)), state)
