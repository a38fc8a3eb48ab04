"""Replicas on one device train as replicas on several do."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from gradwire import AllReduce, LocalSGD, PowerSGD, TwoLevel, diloco
from gradwire.core.advise.timing import NoStep
from gradwire.jax_backend import (
    Training,
    average_gradients,
    local_sgd,
    replicate,
    stack_replicas,
    this_replica,
)
from gradwire.jax_backend.advise.compare import _Form, _rows, run
from gradwire.jax_backend.advise.step_time import step_compute
from tests.compared import require_no_mixture

STEPS, REPLICAS, SEED = 6, 4, 1
HELD_OUT = np.random.default_rng(9).standard_normal((8, 4, 16), np.float32)


def batches(replica, replicas):
    random = np.random.default_rng(replica)
    return [random.standard_normal((8, 16), np.float32) for _ in range(100)]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(nn.relu(nn.Dense(24)(x)))


def loss_of(params, x):
    return jnp.square(Net().apply({"params": params}, x) - jnp.sort(x)).mean()


def started():
    return Net().init(jax.random.key(SEED), jnp.zeros((1, 16)))["params"]


def windows(params):
    return jnp.stack([loss_of(params, x) for x in HELD_OUT])


def linen(wrap):
    state = TrainState.create(apply_fn=None, params=started(), tx=wrap(optax.adamw(1e-2)))

    def train_step(state, x):
        loss, gradients = jax.value_and_grad(loss_of)(state.params, x)
        return state.apply_gradients(grads=gradients), loss

    return Training(state, train_step, batches, lambda state: windows(state.params))


def pair(wrap):
    tx, params = wrap(optax.adamw(1e-2)), started()

    def train_step(state, x):
        params, opt_state = state
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return Training((params, tx.init(params)), train_step, batches, lambda state: windows(state[0]))


class Nnx(nnx.Module):
    def __init__(self, params):
        self.first, self.second = (
            nnx.Linear(16, 24, rngs=nnx.Rngs(0)),
            nnx.Linear(24, 16, rngs=nnx.Rngs(0)),
        )
        for own, given in ((self.first, params["Dense_1"]), (self.second, params["Dense_0"])):
            own.kernel[...], own.bias[...] = given["kernel"], given["bias"]

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


def objects(wrap):
    model = Nnx(started())
    optimizer = nnx.Optimizer(model, wrap(optax.adamw(1e-2)), wrt=nnx.Param)

    def loss_of(model, x):
        return jnp.square(model(x) - jnp.sort(x)).mean()

    def train_step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, gradients)
        return loss

    return Training(
        (model, optimizer),
        train_step,
        batches,
        lambda model, _: jnp.stack([loss_of(model, x) for x in HELD_OUT]),
    )


def on_devices(algorithm):
    """As a user writes it, by `pmap`: the mean losses, and the parameters of all replicas."""
    local = isinstance(algorithm, LocalSGD)
    tx = optax.adamw(1e-2)
    tx = (
        local_sgd(tx, algorithm, axis_name="d")
        if local
        else optax.chain(average_gradients(algorithm, axis_name="d"), tx)
    )
    state = (started(), tx.init(started()))

    def step(state, x):
        params, opt_state = this_replica(state) if local else state
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        if local:
            return stack_replicas(tx.step(gradients, (params, opt_state))), loss
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    state = replicate(stack_replicas(state) if local else state, axis_name="d")
    step, data, losses = (
        jax.pmap(step, axis_name="d"),
        [batches(r, REPLICAS) for r in range(REPLICAS)],
        [],
    )
    for n in range(STEPS):
        state, loss = step(state, np.stack([own[n] for own in data]))
        losses.append(float(np.mean(loss)))
    return losses, (state[0][0] if local else state[0])


@pytest.fixture
def one_device(monkeypatch):
    """For all replicas."""
    monkeypatch.setattr("gradwire.jax_backend.advise.compare._devices", lambda replicas: [])


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("algorithm", [PowerSGD(2), LocalSGD(2, start_step=1)], ids=repr)
@pytest.mark.slow
def test_replicas_on_one_device_train_as_on_several(algorithm):
    found = run(pair, algorithm, REPLICAS, STEPS, SEED, {3, 6}, lambda: None)
    assert found.losses == pytest.approx(on_devices(algorithm)[0], rel=1e-4)
    assert set(found.held_out) == {3, 6}
    assert len(found.held_out[6]) == 8
    assert found.sent > 0


def test_fragments_without_outer_parameters_are_looked_at_under_the_mean():
    """Replicas are apart in all but the fragment that was averaged last."""
    local = LocalSGD(4, fragments=2)
    found = run(pair, local, REPLICAS, STEPS, SEED, {STEPS}, lambda: None)
    _, every = on_devices(local)
    mean, first = (
        jax.tree.map(pick, every) for pick in (lambda x: x.mean((0, 1)), lambda x: x[0, 0])
    )
    assert found.held_out[STEPS] == pytest.approx(np.asarray(windows(mean)), rel=1e-4)
    assert found.held_out[STEPS] != pytest.approx(np.asarray(windows(first)), rel=1e-4)


@pytest.mark.slow
def test_groups_of_replicas_need_devices_of_their_own(monkeypatch):
    """On which they train as on one."""
    found = run(linen, TwoLevel(AllReduce(), 2), REPLICAS, STEPS, SEED, {6}, lambda: None)
    monkeypatch.setattr("gradwire.jax_backend.advise.compare._devices", lambda replicas: [])
    whole = run(linen, AllReduce(), REPLICAS, STEPS, SEED, {6}, lambda: None)
    assert found.losses == pytest.approx(whole.losses, rel=1e-4)
    assert found.held_out[6] == pytest.approx(whole.held_out[6], rel=1e-4)


@pytest.mark.usefixtures("one_device")
def test_all_forms_of_a_training_train_alike():
    first, *others = (
        run(make, diloco(3), REPLICAS, STEPS, SEED, {3, 5, 6}, lambda: None)
        for make in (pair, linen, objects)
    )
    for other in others:
        assert other.losses == pytest.approx(first.losses, rel=1e-4)
        assert other.held_out[6] == pytest.approx(first.held_out[6], rel=1e-4)
    # Held-out windows are judged under the outer parameters, which stay between two averages.
    for each in (first, *others):
        assert each.held_out[5] == each.held_out[3] != pytest.approx(each.held_out[6], rel=1e-3)


@pytest.mark.usefixtures("one_device")
def test_a_factor_on_the_rate_trains_as_the_rate_that_it_makes():
    def twice(wrap):
        return pair(lambda tx: wrap(optax.adamw(2e-2)))

    found, expected, other = (
        run(make, AllReduce(), 2, 4, SEED, {4}, lambda: None, factor)
        for make, factor in ((pair, 2.0), (twice, 1.0), (pair, 1.0))
    )
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    assert found.held_out[4] == pytest.approx(expected.held_out[4], rel=1e-4)
    assert found.losses != pytest.approx(other.losses, rel=1e-3)
    assert found.factor == 2.0


@pytest.mark.usefixtures("one_device")
def test_each_replica_draws_its_own_noise():
    """From keys in its state, which `make` has made once, or in its batches."""
    plain = jnp.ones(2), optax.EmptyState(), jax.random.split(jax.random.key(0), 3)
    with pytest.warns(UserWarning, match="uint32.*draw the same"):
        _rows(_Form(plain), 4, jax.random.PRNGKey(0))
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    of_nnx = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.Param)
    for state in (plain, of_nnx):
        form = _Form(state)
        rows = jax.tree.leaves(jax.tree.map(functools.partial(_rows, form, 4), form.tree(state)))
        (keys,) = [
            jax.random.key_data(x) for x in rows if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        ]
        drawn = {tuple(key) for key in keys.reshape(-1, 2).tolist()}
        assert len(drawn) == keys.size // 2 >= 4

    def keyed(wrap):
        made = pair(wrap)

        def step(state, batch):
            return made.step(state, batch[0] + jax.random.normal(batch[1], (16,)))

        return Training(
            made.state,
            step,
            lambda r, n: [(x, jax.random.key(i)) for i, x in enumerate(batches(r, n)[:3])],
        )

    assert len(run(keyed, AllReduce(), 2, 2, SEED, (), lambda: None).losses) == 2


def test_a_step_that_returns_nothing_has_no_end_to_wait_for():
    """It would be timed to its dispatch."""
    x = jnp.ones(8)
    with pytest.raises(NoStep, match=r"it returns nothing.*return what it computes"):
        step_compute(lambda: print(end=str(jnp.sin(x).shape)[:0]))
    assert step_compute(lambda: jnp.sin(x)).seconds > 0


@pytest.mark.usefixtures("one_device")
def test_what_is_no_training_is_refused_by_name():
    def ragged(wrap):
        made = pair(wrap)
        return Training(made.state, made.step, lambda r, _: [HELD_OUT[r][: r + 1]])

    wrong = [
        (lambda wrap: None, AllReduce(), TypeError, "make"),
        (lambda wrap: linen(lambda tx: tx), AllReduce(), ValueError, "wrap 0 times"),
        (lambda wrap: linen(lambda tx: wrap(wrap(tx))), AllReduce(), ValueError, "wrap 2 times"),
        (lambda wrap: wrap(3), AllReduce(), TypeError, "wrap"),
        (lambda wrap: Training(3, print, print), AllReduce(), TypeError, "state"),
        (lambda wrap: Training((1, 2), print, 3), AllReduce(), TypeError, "batches"),
        (
            lambda wrap: Training(
                pair(wrap).state, pair(lambda tx: tx).step, lambda *_: [HELD_OUT[0]]
            ),
            AllReduce(),
            ValueError,
            "same batch",
        ),
        (ragged, AllReduce(), ValueError, r"batch 1 have shapes \(1, 16\), \(2, 16\)"),
        (linen, TwoLevel(PowerSGD(2), 2), ValueError, "TwoLevel"),
    ]
    for make, algorithm, error, named in wrong:
        with pytest.raises(error, match=named):
            run(make, algorithm, REPLICAS, 1, 0, (), lambda: None)


EDITED = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gradwire.jax_backend import Training

RATE, LATER = 1e-2, 1.0

def make(wrap, seed):
    params = {"w": jax.random.normal(jax.random.key(seed), (8, 4))}
    tx = wrap(optax.sgd(lambda step: jnp.where(step > 4, LATER, 1.0) * RATE))
    def loss_of(params, x):
        return jnp.square(x @ params["w"] - jnp.abs(x[:, :4])).mean()
    def step(state, x):
        params, opt_state = state
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss
    def batches(replica, replicas):
        random = np.random.default_rng([seed, replica])
        return [random.standard_normal((8, 8), np.float32) for _ in range(20)]
    held_out = np.random.default_rng(9).standard_normal((8, 8, 8), np.float32)
    return Training((params, tx.init(params)), step, batches, lambda state: [loss_of(state[0], x) for x in held_out])
"""


@pytest.mark.slow
def test_runs_of_a_training_that_was_edited_are_made_anew(tmp_path):
    """Its rate, and one of later steps, which nobody can ask for."""
    require_no_mixture(
        tmp_path, EDITED, ("= 1e-2, 1.0", "= 1e-1, 1.0"), ("= 1e-1, 1.0", "= 1e-1, 0.1")
    )
