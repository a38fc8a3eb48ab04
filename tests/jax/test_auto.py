"""A training in JAX that chooses its method while it runs, by a clock that says what each method
takes."""

import gc
import json
import logging
import subprocess
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gradwire import AllReduce, Auto, PowerSGD, Probe, Quantize, WireDtype
from gradwire.core.advise.advice import name_of
from gradwire.core.advise.choosing.methods import Decisions
from gradwire.core.advise.cost import Cost
from gradwire.core.advise.probe import Level
from gradwire.core.advise.timeline import Group
from gradwire.jax_backend import (
    AutoStep,
    abstract_state,
    average_gradients,
    distribute,
    mark_varying,
    partition_specs,
    replicate,
    set_replicas,
    unreplicate,
)
from gradwire.jax_backend.choosing import auto_step
from gradwire.jax_backend.choosing.owed import continued, with_owed
from gradwire.jax_backend.choosing.processes import Messages
from gradwire.jax_backend.choosing.step_ends import StepEnds
from tests import launch
from tests.bounds import relative
from tests.jax.replicas import AXIS, mesh_of, refused
from tests.launch import LIMIT

#: A training whose last step begins to compile the others.
ENDS = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec as P
import gradwire
from gradwire.jax_backend import AutoStep, mark_varying, partition_specs
from gradwire.jax_backend.choosing.auto_step import WAITING

params = {f"w{i}": 0.9 * jnp.eye(64) for i in range(6)}
mesh = jax.make_mesh((2,), ("data",))

def loss_of(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.square(x).mean()

def build(average):
    tx = optax.chain(average, optax.adam(0.1))
    state = params, tx.init(params)
    specs = partition_specs(state, "data")

    def step(state, x):
        params, opt = state
        updates, opt = tx.update(jax.grad(loss_of)(mark_varying(params, "data"), x), opt, params)
        return optax.apply_updates(params, updates), opt

    maps = {"mesh": mesh, "in_specs": (specs, P("data")), "out_specs": specs}
    return state, jax.jit(jax.shard_map(step, **maps))

auto = AutoStep(gradwire.Auto(), build, axis_name="data", mesh=mesh)
x = jax.device_put(np.ones((8, 64), np.float32), NamedSharding(mesh, P("data")))
jax.block_until_ready(auto.step(auto.init(), x))
print("compiling" if WAITING in auto._compiled else "compiled", flush=True)
"""

#: Two with an error, one of them with factors too.
METHODS = (AllReduce(), Quantize("int4"), PowerSGD(16))

PARAMS = {
    "w": jnp.asarray(np.random.default_rng(0).normal(0, 0.1, (256, 64)), jnp.float32),
    "b": jnp.zeros(64),
}


def batch(step, replicas=4):
    x = np.random.default_rng([1, step]).standard_normal((replicas * 4, 256)).astype(np.float32)
    return x, np.sin(x[:, :64])


def loss_of(params, x, y):
    return jnp.square(x @ params["w"] + params["b"][None] - y).mean()


def on_a_mesh(mesh):
    """The training of the page, on a mesh, with plain optax."""

    def build(average):
        tx = optax.chain(average, optax.sgd(0.1))
        state = PARAMS, tx.init(PARAMS)
        specs = partition_specs(state, AXIS)

        def train_step(state, x, y):
            params, opt_state = state
            loss, gradients = jax.value_and_grad(loss_of)(mark_varying(params, AXIS), x, y)
            updates, opt_state = tx.update(gradients, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), jax.lax.pmean(loss, AXIS)

        maps = {"mesh": mesh, "in_specs": (specs, P(AXIS), P(AXIS)), "out_specs": (specs, P())}
        return state, jax.jit(jax.shard_map(train_step, **maps), donate_argnums=0)

    return build


class Clock:
    """In place of the time of day: a step takes what its method takes."""

    def __init__(self, seconds, monkeypatch):
        self.seconds, self.now, self.auto, self.pauses = seconds, 0.0, None, ()
        monkeypatch.setattr(auto_step, "perf_counter", lambda: self.now + 0.01)
        monkeypatch.setattr(auto_step.StepEnds, "after", lambda _, array: self.after())

    def after(self):
        self.now += self.seconds[self.auto._number] + (100 if self.auto._at in self.pauses else 0)
        return lambda now=self.now: now


def trained(auto, state, steps, mesh):
    """From its step on, so many; then the state and the losses. With a chooser: so many after all
    methods have been compiled, however long that took."""
    losses, number, counted = [], steps_of(state), 0
    while counted < steps:
        data = jax.device_put(batch(number, mesh.size), NamedSharding(mesh, P(AXIS)))
        state, loss = auto.step(state, *data)
        losses.append(float(loss))
        number, counted = (
            number + 1,
            counted + (auto._decisions is not None or auto._chooser is not None),
        )
    return state, losses


def steps_of(state):
    return int(state[1][0].inner.step)


def decided(path, *changes):
    """A log by which a training takes some of `METHODS`: (step, number)."""
    path.write_text(
        "".join(
            json.dumps({"step": step, "method": repr(METHODS[number])}) + "\n"
            for step, number in changes
        )
    )
    return path


def test_it_ends_at_the_fastest_and_a_log_repeats_the_run(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="gradwire")
    mesh, path = mesh_of(4), tmp_path / "decisions.jsonl"
    auto = AutoStep(Auto(decisions=path), on_a_mesh(mesh), axis_name=AXIS, mesh=mesh)
    clock = Clock((1.0, 0.6, 0.3), monkeypatch)
    clock.auto, clock.pauses = auto, (11, 14, 30)
    state, losses = trained(auto, auto.init(), 60, mesh)
    assert [c.number for c in auto.choices] in ([0, 2], [0, 1, 2])
    assert auto.method == "WireDtype(AllReduce(), 'bfloat16')"
    assert (
        len([r for r in caplog.records if "Auto: from step" in r.message]) == len(auto.choices) - 1
    )
    assert auto.compile_seconds.keys() == {"plain", "WireDtype(AllReduce(), 'int8')", auto.method}
    assert losses[-1] < 0.8 * losses[0]
    assert len({json.loads(line)["method"] for line in path.read_text().splitlines()}) == 3
    again = AutoStep(Auto(decisions=path), on_a_mesh(mesh), axis_name=AXIS, mesh=mesh)
    repeated, also = trained(again, again.init(), len(losses), mesh)
    assert also == losses
    assert all(
        np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (state, repeated)), strict=True)
    )


@pytest.mark.parametrize("mapped", ["pmap", "shard_map"])
def test_what_was_not_sent_is_added_once_also_after_a_step_that_is_not_finite(
    tmp_path, monkeypatch, mapped
):
    """In sum the optimizer is given the sum of all gradients, but for what the method at work still
    remembers."""
    monkeypatch.setattr(auto_step, "methods_of", lambda *given: METHODS)
    mesh, replicas = mesh_of(4), 4
    log = decided(tmp_path / "decisions.jsonl", (1, 1), (3, 2), (4, 0), (7, 1))
    x = np.random.default_rng(0).standard_normal((8, replicas, 256, 64)).astype(np.float32)

    def build(average):
        tx, sums = optax.chain(average, optax.identity()), {"w": jnp.zeros((256, 64))}
        state = {"sums": sums, "opt": tx.init(sums)}
        specs = partition_specs(state, AXIS)

        def add(state, gradient):
            given, opt = tx.update({"w": gradient[0]}, state["opt"])
            finite = jnp.isfinite(given["w"]).all()
            return {
                "sums": {"w": state["sums"]["w"] + jnp.where(finite, given["w"], 0)},
                "opt": opt,
            }

        if mapped == "pmap":
            return state, jax.pmap(add, axis_name=AXIS, donate_argnums=0)
        maps = {"mesh": mesh, "in_specs": (specs, P(AXIS)), "out_specs": specs}
        return state, jax.jit(jax.shard_map(add, **maps), donate_argnums=0)

    auto = AutoStep(
        Auto(loss="5%", decisions=log),
        build,
        axis_name=AXIS,
        mesh=mesh if mapped == "shard_map" else None,
    )
    state, expected = auto.init(), 0.0
    for step, gradient in enumerate(x):
        given = gradient * (np.inf if step == 4 else 1)  # the first that is plain again
        given = (
            given[:, None]
            if mapped == "pmap"
            else jax.device_put(given, NamedSharding(mesh, P(AXIS)))
        )
        state = auto.step(state, given)
        expected += 0 if step == 4 else gradient.mean(0, dtype=np.float64)
        total = np.asarray(state["sums"]["w"], np.float64).reshape(-1, 256, 64)[0]
        off = np.abs(total - expected).max() / np.abs(expected).max()
        owed = state["opt"][0].owed.per_replica
        assert bool(np.any([np.asarray(x).any() for x in jax.tree.leaves(owed)])) == (step == 4)
        assert off < 3e-5 if step in (0, 5, 6) else off > 1e-3, step


@pytest.mark.slow
def test_a_state_is_continued_with_its_method_by_any_number_of_replicas(tmp_path, monkeypatch):
    """From a checkpoint in global form; and a state that somebody has copied is not taken for
    another one."""
    monkeypatch.setattr(auto_step, "methods_of", lambda *given: METHODS)
    log = decided(tmp_path / "decisions.jsonl", (1, 1))
    mesh = mesh_of(4)
    auto = AutoStep(Auto(decisions=log), on_a_mesh(mesh), axis_name=AXIS, mesh=mesh)
    state, _ = trained(auto, auto.init(), 3, mesh)
    saved, method = jax.device_get(state), auto.method
    copied = jax.tree.map(jnp.copy, state)
    assert trained(auto, copied, 1, mesh)[1] == trained(auto, state, 1, mesh)[1]
    for replicas in (4, 2):
        mesh = mesh_of(replicas)
        resumed = AutoStep(Auto(), on_a_mesh(mesh), axis_name=AXIS, mesh=mesh)
        fresh = resumed.init(method)
        restored = jax.tree.unflatten(jax.tree.structure(fresh), jax.tree.leaves(saved))
        placed = distribute(set_replicas(restored, replicas), mesh, AXIS)
        after, more = trained(resumed, placed, 1, mesh)
        assert [c[:2] for c in resumed.choices] == [(3, 1)]
        assert steps_of(after) >= 4
        assert np.isfinite(more).all()


def test_a_state_of_a_trial_is_continued_with_the_method_of_the_trial(monkeypatch):
    monkeypatch.setattr(auto_step, "methods_of", lambda *given: METHODS)
    mesh = mesh_of(2)
    auto = AutoStep(Auto(), on_a_mesh(mesh), axis_name=AXIS, mesh=mesh)
    Clock((1.0, 1.2, 1.2), monkeypatch).auto = auto
    state = auto.init()
    while auto._number == auto.choices[-1].number if auto.choices else True:
        state, _ = trained(auto, state, 1, mesh)
    tried, saved, method = auto._number, jax.device_get(state), auto.method
    assert method == name_of(METHODS[tried])
    resumed = AutoStep(Auto(), on_a_mesh(mesh), axis_name=AXIS, mesh=mesh)
    fresh = resumed.init(method)
    restored = jax.tree.unflatten(jax.tree.structure(fresh), jax.tree.leaves(saved))
    after, _ = trained(resumed, distribute(restored, mesh, AXIS), 0, mesh)
    data = jax.device_put(batch(0, 2), NamedSharding(mesh, P(AXIS)))
    expected, _ = auto._steps[tried](state, *data)
    found, _ = resumed.step(after, *data)
    assert resumed.choices[-1].number == tried
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def train_state_build(train_step, model, params):
    def build(average):
        tx = optax.chain(average, optax.sgd(0.1))
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx), jax.pmap(
            train_step, axis_name=AXIS
        )

    return build


def small_train_state():
    """The parts of `train_state_build` of a model that compiles in no time."""
    model = nn.Dense(8)
    params = model.init(jax.random.key(0), jnp.zeros((1, 16)))["params"]

    def train_step(state, x):
        loss, gradients = jax.value_and_grad(
            lambda params: jnp.square(state.apply_fn({"params": params}, x)).mean()
        )(state.params)
        return state.apply_gradients(grads=gradients), jax.lax.pmean(loss, AXIS)

    return train_step, model, params


def test_a_state_whose_optimizer_is_a_part_of_its_structure_says_its_method(tmp_path, monkeypatch):
    """Of plain averages and codes without memory nothing else does. And a second `init` gives what
    the first one gave."""
    methods = AllReduce(), WireDtype(AllReduce(), "int8")
    monkeypatch.setattr(auto_step, "methods_of", lambda *given: methods)
    log = tmp_path / "decisions.jsonl"
    log.write_text(json.dumps({"step": 1, "method": repr(methods[1])}) + "\n")
    log.write_text(log.read_text() + json.dumps({"step": 2, "method": repr(methods[0])}) + "\n")
    auto = AutoStep(Auto(decisions=log), train_state_build(*small_train_state()), axis_name=AXIS)
    x = np.random.default_rng(0).standard_normal((4, 4, 16)).astype(np.float32)
    auto.init()
    state, states = auto.init(), []
    for _ in range(3):
        state, _ = auto.step(state, x)
        states.append((state, auto.method))
    assert [method for _, method in states] == [name_of(m) for m in (*methods, methods[0])]
    auto._decisions = None  # else they would say how it goes on
    for state, method in reversed(states):
        auto.step(state, x)
        assert auto.method == method


def test_arrays_that_build_makes_may_be_a_part_of_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr(auto_step, "methods_of", lambda *given: METHODS)
    log = decided(tmp_path / "decisions.jsonl", (1, 1), (2, 2))
    mesh = mesh_of(2)
    traced = []

    def build(average):
        frozen = jnp.ones((64,)) * 2
        traced.append(isinstance(frozen, jax.core.Tracer))
        tx = optax.chain(average, optax.sgd(0.1))
        state = PARAMS, tx.init(PARAMS)
        specs = partition_specs(state, AXIS)

        def train_step(state, x, y):
            params, opt_state = state
            given = jax.tree.map(lambda p: jnp.ones_like(p) * x.mean(), params)
            given["b"] = given["b"] * frozen
            updates, opt_state = tx.update(given, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), x.mean()[None]

        maps = {"mesh": mesh, "in_specs": (specs, P(AXIS), P(AXIS)), "out_specs": (specs, P(AXIS))}
        return state, jax.jit(jax.shard_map(train_step, **maps))

    auto = AutoStep(Auto(loss="5%", decisions=log), build, axis_name=AXIS, mesh=mesh)
    assert traced == [False, True, False, True, False]
    state = auto.init()
    for step in range(3):
        data = jax.device_put(batch(step, 2), NamedSharding(mesh, P(AXIS)))
        state, _ = auto.step(state, *data)
        assert auto.method == name_of(METHODS[step])


def test_build_may_look_at_numbers(monkeypatch):
    monkeypatch.setattr(auto_step, "methods_of", lambda *given: METHODS)

    def build(average):
        params = jax.tree.map(lambda x: x + 1, PARAMS)
        tx = optax.chain(average, optax.sgd(0.1 / float(optax.tree.norm(params))))
        state = params, tx.init(params)

        def train_step(state, x):
            updates, opt_state = tx.update(state[0], state[1])
            return optax.apply_updates(state[0], updates), opt_state

        return state, jax.pmap(train_step, axis_name=AXIS)

    AutoStep(Auto(loss="5%"), build, axis_name=AXIS)


def test_a_state_of_numpy_arrays_and_arguments_that_are_no_arrays(tmp_path, monkeypatch):
    """As `flax.serialization` restores it; and a static argument, a word, of a step."""
    monkeypatch.setattr(auto_step, "methods_of", lambda *given: METHODS)
    log = decided(tmp_path / "decisions.jsonl", (1, 1), (4, 2))
    mesh = mesh_of(2)
    plain = on_a_mesh(mesh)

    def build(average):
        state, step = plain(average)
        return state, jax.jit(lambda state, x, y, word: step(state, x, y), static_argnums=3)

    def data(step):
        return jax.device_put(batch(step, 2), NamedSharding(mesh, P(AXIS)))

    auto = AutoStep(Auto(loss="5%", decisions=log), build, axis_name=AXIS, mesh=mesh)
    state = auto.init()
    for step in range(3):
        state, _ = auto.step(state, *data(step), "train")
    expected = jax.device_get(state)
    resumed = AutoStep(Auto(loss="5%", decisions=log), build, axis_name=AXIS, mesh=mesh)
    for step in (3, 4, 5):
        state, _ = auto.step(state, *data(step), "train")
        expected, _ = resumed.step(expected, *data(step), "train")
    assert auto.choices[-1] == resumed.choices[-1]
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_run_that_goes_back_writes_so(tmp_path, monkeypatch):
    monkeypatch.setattr(auto_step, "methods_of", lambda *given: METHODS[:2])
    mesh, path = mesh_of(2), tmp_path / "decisions.jsonl"
    auto = AutoStep(Auto(decisions=path), on_a_mesh(mesh), axis_name=AXIS, mesh=mesh)
    Clock((1.0, 0.2), monkeypatch).auto = auto
    state = auto.init()
    before = jax.tree.map(jnp.copy, state)
    state, _ = trained(auto, state, 40, mesh)
    assert auto.choices[-1].number == 1
    kept, step = auto.choices, auto._steps[1]

    def fails(*given):
        raise OSError

    auto._steps[1] = fails
    with pytest.raises(OSError):
        trained(auto, state, 1, mesh)
    auto._steps[1] = step
    trained(auto, state, 1, mesh)
    assert auto.choices == kept
    trained(auto, before, 1, mesh)
    assert [c[:2] for c in auto.choices] == [(0, 0)]
    lines = Decisions(METHODS[:2], path.read_text())
    assert [lines.at(step) for step in range(60)] == [0] * 60


def test_what_is_owed_stays_where_nothing_has_a_gradient():
    params = {"w": jnp.ones((64, 64))}
    tx = with_owed(average_gradients(AllReduce(), axis_name=AXIS), lambda: ["w"])
    state = tx.init(params)
    state = state._replace(owed=jax.tree.map(jnp.ones_like, state.owed))
    step = jax.vmap(lambda _: tx.update({"w": None}, state)[1].owed, axis_name=AXIS)
    assert step(jnp.zeros(2)).per_replica["w"].all()


def test_what_is_owed_stays_where_a_replica_counts_for_nothing():
    params = {"w": jnp.ones((64, 64))}
    before = with_owed(average_gradients(Quantize("int4"), axis_name=AXIS), tuple)
    after = with_owed(average_gradients(AllReduce(), axis_name=AXIS), lambda: ["w"])
    given = [
        {"w": np.random.default_rng(step).standard_normal((4, 64, 64)).astype(np.float32)}
        for step in range(3)
    ]
    state = replicate(before.init(params), axis_name=AXIS)
    _, state = jax.pmap(before.update, axis_name=AXIS)(given[0], state)
    state = continued(state, replicate(after.init(params), axis_name=AXIS))
    owed = [np.asarray(state.owed.per_replica["w"])[:, 0]]
    step = jax.pmap(lambda g, s, w: after.update(g, s, weight=w), axis_name=AXIS)
    for number, weights in ((1, [1.0, 1.0, 1.0, 0.0]), (2, [1.0, 1.0, 1.0, 1.0])):
        averages, state = step(given[number], state, jnp.asarray(weights))
        expected = (np.asarray(weights)[:, None, None] * (given[number]["w"] + owed[-1])).sum(0)
        assert relative(np.asarray(averages["w"])[0], expected / sum(weights)) < 1e-5
        owed.append(np.asarray(state.owed.per_replica["w"])[:, 0])
    assert owed[0].any((1, 2)).all()
    assert not owed[1][:3].any()
    np.testing.assert_array_equal(owed[1][3], owed[0][3])
    assert not owed[2].any()


def test_what_is_owed_on_a_mesh_that_is_divided_by_hand(tmp_path, monkeypatch):
    """Along another axis `w` has parts and `b` has none: what is owed to `b` stays equal there, also
    where one part of `w` is not finite."""
    methods = AllReduce(), Quantize("int4")
    monkeypatch.setattr(auto_step, "methods_of", lambda *given: methods)
    log = decided(tmp_path / "decisions.jsonl", (1, 1), (2, 0))
    mesh = jax.make_mesh((2, 2), (AXIS, "model"), axis_types=(AxisType.Auto,) * 2)
    place = lambda spec: NamedSharding(mesh, spec)  # noqa: E731
    own, rows = {"w": P(None, "model"), "b": P()}, {"w": P(AXIS, None, "model"), "b": P(AXIS)}
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    params = {name: jax.device_put(x, place(own[name])) for name, x in params.items()}

    def build(average):
        state = params, average.init(params)
        shapes = abstract_state(jax.eval_shape(lambda: state), 2, mesh, AXIS, params=params)
        specs = own, jax.tree.map(lambda x: x.sharding.spec, shapes)[1]

        def step(state, given):
            _, opt = average.update(jax.tree.map(lambda x: x[0], given), state[1], state[0])
            return state[0], opt

        maps = {"in_specs": (specs, rows), "out_specs": specs}
        return state, jax.jit(jax.shard_map(step, mesh=mesh, **maps))

    auto = AutoStep(Auto(loss="5%", decisions=log), build, axis_name=AXIS, mesh=mesh)
    state = auto.init()
    for step in range(4):
        rng = np.random.default_rng(step)
        given = {
            n: rng.standard_normal((2, *x.shape)).astype(np.float32) for n, x in params.items()
        }
        if step == 2:
            given["w"][1, 5, 60] = np.inf
        given = {name: jax.device_put(x, place(rows[name])) for name, x in given.items()}
        state = auto.step(state, given)
        owed = state[1].owed.per_replica["b"]
        parts = [np.asarray(x.data) for x in getattr(owed, "addressable_shards", ())]
        if step >= 2:
            assert all(x.any() == (step == 2) for x in parts)


@pytest.mark.slow
def test_a_process_may_end_while_steps_are_compiled():
    """A thread that is in the middle of that aborts it, if nobody waits."""
    env = launch.environment("ends") | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": launch.xla_flags("--xla_force_host_platform_device_count=2"),
    }
    ended = subprocess.run(
        [launch.interpreter(), "-c", ENDS], env=env, capture_output=True, text=True, timeout=LIMIT
    )
    assert not ended.returncode, ended.stderr[-3000:]
    assert ended.stdout.strip() == "compiling"


def test_the_thread_that_waits_for_steps_ends_with_the_training():
    ends = StepEnds()
    assert ends.after(jnp.zeros(()))() > 0
    thread = ends._thread
    del ends
    gc.collect()
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_a_method_that_cannot_be_compiled_is_left_out(monkeypatch, caplog):
    mesh = mesh_of(2)
    auto = AutoStep(Auto(), on_a_mesh(mesh), axis_name=AXIS, mesh=mesh)
    Clock((1.0, 0.2, 0.5), monkeypatch).auto = auto
    lowered = auto._lowered
    broken = SimpleNamespace(compile=lambda: 1 / 0)
    monkeypatch.setattr(
        auto, "_lowered", lambda number, *given: broken if number == 1 else lowered(number, *given)
    )
    trained(auto, auto.init(), 40, mesh)
    assert [c.number for c in auto.choices] == [0, 2]
    assert "whose step was not compiled: division by zero" in caplog.text


def test_a_method_that_cannot_be_traced_is_left_out(monkeypatch, caplog):
    mesh = mesh_of(2)
    auto = AutoStep(Auto(), on_a_mesh(mesh), axis_name=AXIS, mesh=mesh)
    Clock((1.0, 0.2, 0.5), monkeypatch).auto = auto
    lowered = auto._lowered

    def some(number, *given):
        if number == 1:
            raise NotImplementedError("sums in groups")
        return lowered(number, *given)

    monkeypatch.setattr(auto, "_lowered", some)
    trained(auto, auto.init(), 40, mesh)
    assert [c.number for c in auto.choices] == [0, 2]
    assert "whose step was not compiled: sums in groups" in caplog.text


def test_arguments_that_nobody_has_placed(monkeypatch):
    """As of `jnp.asarray` and `jax.random.split`: they go where the others are."""
    mesh = mesh_of(2)
    auto = AutoStep(Auto(), on_a_mesh(mesh), axis_name=AXIS, mesh=mesh)
    Clock((1.0, 0.2, 0.5), monkeypatch).auto = auto
    state, counted = auto.init(), 0
    while counted < 20:
        state, _ = auto.step(state, *map(jnp.asarray, batch(counted, mesh.size)))
        counted += auto._chooser is not None
    assert [c.number for c in auto.choices] == [0, 1]


@pytest.mark.slow
def test_a_train_state_under_pmap(monkeypatch):
    """Whose optimizer is part of its structure. And another number of rows in the last batch: a
    step that is compiled is not timed."""
    model = nn.Dense(64)
    params = model.init(jax.random.key(0), jnp.zeros((1, 256)))["params"]

    def train_step(state, x, y):
        loss, gradients = jax.value_and_grad(
            lambda params: jnp.square(state.apply_fn({"params": params}, x) - y).mean()
        )(state.params)
        return state.apply_gradients(grads=gradients), jax.lax.pmean(loss, AXIS)

    auto = AutoStep(Auto(), train_state_build(train_step, model, params), axis_name=AXIS)
    Clock((1.0, 1.6, 0.2), monkeypatch).auto = auto
    state, losses, ready = auto.init(), [], 0
    while auto._chooser is None or auto._at < ready + 120:
        rows = 8 if auto._at % 10 == 9 else 16
        state, loss = auto.step(
            state, *(x[:rows].reshape(4, -1, *x.shape[1:]) for x in batch(auto._at))
        )
        losses.append(float(loss[0]))
        ready = auto._at if auto._chooser is None else ready
    assert auto.choices[-1].number == 2
    assert losses[-1] < losses[0]
    assert int(unreplicate(state).step) == steps_of((0, unreplicate(state).opt_state))


def test_what_cannot_be_is_refused_by_name_and_a_probe_orders_methods(tmp_path, monkeypatch):
    mesh = mesh_of(2)
    build = on_a_mesh(mesh)

    def auto(given=None, build=build, **options):
        return AutoStep(given or Auto(**options), build, axis_name=AXIS, mesh=mesh)

    with refused("One method needs no choice", error=TypeError):
        auto(AllReduce())
    with refused("gradwire.jax_backend.AutoStep", error=TypeError):
        average_gradients(Auto(), axis_name=AXIS)
    with refused("return (state, step)", error=TypeError):
        auto(build=lambda average: (average.init(PARAMS), lambda state: state))
    with refused("holds 0 states of the averages", "nnx.split", "split the model alone"):
        auto(build=lambda average: (average.init(PARAMS)[0], build(average)[1]))
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text("{}\n")
    with refused("is no decision", "Remove it"):
        auto(decisions=wrong)
    with refused("none.json"):
        auto(probe=tmp_path / "none.json")
    samples = ((1 << 20, 1e-9),)
    monkeypatch.setattr(
        auto_step,
        "method_cost",
        lambda method, *given: Cost(((Group(4, 1.0 + (method.dtype == "int8"), ()),),)),
    )
    ordered = auto(probe=Probe("jax", "cpu", 2, 2, (Level("all", 2, samples, samples, 0.0),)))
    assert [getattr(m, "dtype", "") for m in ordered._methods] == ["", "bfloat16", "int8"]
    good = auto()
    state, data = good.init(), batch(0, 2)
    with refused("cannot be part of a compiled one", "lax.scan", error=RuntimeError):
        jax.jit(good.step)(state, *data)
    with refused("method='Sign()' is none of those"):
        good.init("Sign()")
    with refused("without the averages of this training"):
        good.step(PARAMS, *data)
    with refused("contracting dimensions", error=TypeError):
        good.step(state, data[0][:, :3], data[1])
    good.step(state, *data)  # nothing has been changed
    strange = auto(build=lambda average: (build(average)[0], jax.jit(lambda state, x, y: 1)))
    with refused("a tuple with the state first"):
        strange.step(strange.init(), *data)


def test_times_are_told_with_a_mesh_in_context():
    """On devices of which some are in it, and none alone is."""
    mesh = jax.make_mesh((2,), (AXIS,))
    result = jax.device_put(jnp.int32(3), NamedSharding(mesh, P()))
    messages = Messages(jax.devices()[:2])
    messages.alone = False  # as with several processes
    with jax.set_mesh(mesh):
        assert StepEnds().after(result)() > 0
        assert messages.send([1.0, 2.0])() == [1.0, 2.0]
