"""States of all replicas in one form: made, reduced, spread, renamed and taken apart; and runs that go on with other numbers of replicas."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import PowerSGD, Simulator, Spec
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.state import checkpoint
from gradwire.core.state.files import whole_file

OPS = NumpyOps()
SHAPES = {"w": (12, 10), "conv": (8, 3, 2, 2), "b": (12,), "s": ()}
#: 12 examples make a step; any of these numbers of replicas shares them equally.
EXAMPLES = 12
WORLDS = st.sampled_from([1, 2, 3, 4, 6])
ALGORITHMS = {
    "full": PowerSGD(2),
    "half": PowerSGD(2, half_step=True),
    "dense start": PowerSGD(1, start_step=3),
    "no warm start": PowerSGD(2, warm_start=False),
    "no memory": PowerSGD(2, warm_start=False, error_feedback=False),
}


def per_example(step):
    rng = np.random.default_rng([7, step])
    return {name: rng.standard_normal((EXAMPLES, *shape)) for name, shape in SHAPES.items()}


def step(sim):
    """One step on the step's examples, divided among the replicas, however many they are."""
    examples, replicas = per_example(sim.steps), len(sim.states)
    parts = {name: np.split(x, replicas) for name, x in examples.items()}
    return sim.step([{name: parts[name][r].mean(0) for name in SHAPES} for r in range(replicas)])


def state_of(tensors, algorithm="PowerSGD(rank=2)", step=0, shared=None):
    return checkpoint.head("compressor", algorithm, step) | {"shared": shared or {}, "tensors": tensors}


def state_dict(sim, replica):
    state = sim.states[replica]
    return state_of(state.tensors, repr(sim.algorithm), sim.steps, state.shared)


def gathered(sim):
    return checkpoint.gather(OPS, [state_dict(sim, r) for r in range(len(sim.states))], sim.algorithm.per_replica)


def resumed(algorithm, state, replicas):
    sim = Simulator(algorithm, SHAPES, replicas)
    for replica in range(replicas):
        own = checkpoint.of_replica(OPS, state, replica, replicas)
        loaded, difference = checkpoint.fit(own, repr(algorithm), sim.states[replica])
        assert not difference
        sim.states[replica] = loaded
    sim.steps = state["step"]
    return sim


def relative(x, y):
    x, y = (np.concatenate([np.ravel(each[name]) for name in SHAPES]) for each in (x, y))
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


@settings(max_examples=15, deadline=None)
@given(
    worlds=st.lists(WORLDS, min_size=2, max_size=4),
    stays=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    name=st.sampled_from(sorted(ALGORITHMS)),
    errors=st.sampled_from(["mean", "all"]),
)
def test_runs_that_change_their_number_of_replicas_follow_the_one_that_does_not(worlds, stays, name, errors):
    algorithm = ALGORITHMS[name]
    whole, sim = Simulator(algorithm, SHAPES, 4), Simulator(algorithm, SHAPES, worlds[0])
    for world, stay in zip(worlds, stays, strict=False):
        state = gathered(sim)
        state = checkpoint.mean_of_replicas(OPS, state) if errors == "mean" else state
        sim = resumed(algorithm, state, world)
        for _ in range(stay):
            # What rounding adds grows by a factor per step, and a step or two in twenty are unlucky.
            assert relative(step(sim), step(whole)) < 1e-8


def test_every_replica_gets_its_own_error_back_or_the_mean():
    sim = Simulator(PowerSGD(2), SHAPES, 3)
    for _ in range(4):
        step(sim)
    state, errors = gathered(sim), [s.tensors["w"]["error"] for s in sim.states]
    assert set(state["tensors"]["w"]) == {"q"}
    assert state["local"]["w"]["error"].shape == (3, 12, 10)
    assert state["replicas"] == 3
    for replica in range(3):
        own = checkpoint.of_replica(OPS, state, replica, 3)
        np.testing.assert_array_equal(own["tensors"]["w"]["error"], errors[replica])
        assert "replicas" not in own
    mean = sum(errors) / 3
    for replica in range(5):
        own = checkpoint.of_replica(OPS, state, replica, 5)
        np.testing.assert_allclose(own["tensors"]["w"]["error"], mean, rtol=0, atol=1e-15)
    assert checkpoint.mean_of_replicas(OPS, state)["local"]["w"]["error"].shape == (1, 12, 10)
    assert checkpoint.spread(OPS, state, 5)["replicas"] == 5


def test_means_of_narrow_memory_are_formed_in_a_wide_one():
    states = [state_of({"w": {"error": np.full((2,), value, "float16")}}) for value in (60000.0, 60000.0, 1.0, 1.0)]
    mean = checkpoint.mean_of_replicas(OPS, checkpoint.gather(OPS, states, {"error"}))
    assert mean["local"]["w"]["error"].dtype == np.float16
    np.testing.assert_array_equal(mean["local"]["w"]["error"], [[np.float16(30000.5)] * 2])


NAMES = st.text(min_size=1, max_size=12)
MEMORIES = st.dictionaries(st.sampled_from(["q", "p", "error"]), st.integers(0, 3), max_size=3)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(NAMES, MEMORIES, max_size=4), st.integers(0, 2**40), st.booleans())
def test_flat_names_come_apart_again_whatever_a_parameter_is_called(memories, steps, portable):
    tensors = {name: {k: np.full((n,), n) for k, n in memory.items()} for name, memory in memories.items()}
    state = state_of(tensors, step=steps, shared={"phase": np.int32(1)})
    state |= {"local": tensors, "replicas": 3} if portable else {}
    arrays, metadata = checkpoint.flatten(state)
    assert all(isinstance(value, str) for value in metadata.values())
    assert all(isinstance(key, str) for key in arrays)
    again = checkpoint.unflatten(arrays, metadata)
    assert again.keys() == state.keys()
    plain = {k: v for k, v in again.items() if k not in ("shared", "tensors", "local")}
    assert json.dumps(plain, sort_keys=True) == json.dumps({k: state[k] for k in plain}, sort_keys=True)
    for section in ("tensors", "local") if portable else ("tensors",):
        assert {n: {k: x.shape for k, x in m.items()} for n, m in again[section].items()} == {
            n: {k: x.shape for k, x in m.items()} for n, m in tensors.items()
        }


def test_what_does_not_fit_is_named_and_the_rest_kept():
    def init(algorithm, **shapes):
        return algorithm.init(OPS, {name: Spec(shape, "float64") for name, shape in shapes.items()})

    old, new = PowerSGD(2, half_step=True), PowerSGD(3, half_step=True)
    then = init(old, same=(24, 20), gone=(24, 20), narrow=(24, 20))
    now = init(new, same=(24, 20), fresh=(24, 20), narrow=(24, 16), b=(4,))
    state = state_of(then.tensors, repr(old), 5, then.shared)
    kept, difference = checkpoint.fit(state, repr(new), now)
    assert difference
    assert difference.algorithm == (repr(old), repr(new))
    assert difference.removed == ("gone",)
    assert difference.added == ("fresh",)
    assert len(difference.reshaped) == 2  # the rank of `same`, everything of `narrow`
    for word in ("'gone'", "'fresh'", "'narrow'", "(24, 16)", "PowerSGD(rank=2"):
        assert word in str(difference)
    wide = {f"w{i}": (24, 20) for i in range(9)}
    before = init(old, **wide)
    many = checkpoint.fit(state | {"tensors": before.tensors}, repr(new), init(new, **wide))[1]
    assert len(many.reshaped) == 9
    assert str(many).endswith("; and 7 more")
    # The error is of any rank; a factor has one. Nothing of another shape is taken over.
    assert set(kept.tensors) == {"same", "narrow"}
    assert set(kept.tensors["same"]) == {"error"}
    assert kept.tensors["narrow"] == {}
    assert set(kept.shared) == {"phase"}
    assert not checkpoint.fit(state, repr(old), then)[1]


def not_finite_in(state, section, name, key, value):
    memory = state[section] if name is None else state[section][name]
    changed = np.array(memory[key], copy=True)
    changed.reshape(-1)[-1] = value  # of all replicas, the last one's
    changed = {**memory, key: changed}
    return {**state, section: changed if name is None else {**state[section], name: changed}}


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "float64"), (-np.inf, "bfloat16")])
def test_memory_that_is_not_finite_is_refused_by_name(value, dtype):
    sim = Simulator(PowerSGD(2, state_dtype=dtype), SHAPES, 3)
    step(sim)
    one, everyone = state_dict(sim, 0), gathered(sim)
    current, configuration = sim.states[0], repr(sim.algorithm)
    assert not checkpoint.fit(one, configuration, current)[1]
    for key in ("q", "error"):
        with pytest.raises(ValueError, match=rf"memory '{key}' of parameter 'conv' holds"):
            checkpoint.fit(not_finite_in(one, "tensors", "conv", key, value), configuration, current)
    # Of another replica's as well, so that all of them refuse it.
    damaged = not_finite_in(everyone, "local", "w", "error", value)
    for replica in range(3):
        with pytest.raises(ValueError, match="memory 'error' of parameter 'w' holds"):
            checkpoint.of_replica(OPS, damaged, replica, 3)


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "compressor.pt"
    with whole_file(path) as file:
        file.write(b"first")

    def interrupted():
        with whole_file(path) as file:
            file.write(b"sec")
            file.flush()
            assert path.read_bytes() == b"first"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"first"
    assert [x.name for x in tmp_path.iterdir()] == ["compressor.pt"]


def test_names_move():
    sim = Simulator(PowerSGD(2), SHAPES, 2)
    step(sim)
    state = gathered(sim)

    def turned(name, key, x):
        return x.mT if (name, key) == ("w", "error") else x

    names = {"w": "Dense_0/kernel", "conv": "Conv_0/kernel"}
    moved = checkpoint.renamed(state, names, algorithm="other", tensor=turned)
    assert moved["algorithm"] == "other"
    assert set(moved["tensors"]) == set(moved["local"]) == {"Dense_0/kernel", "Conv_0/kernel"}
    np.testing.assert_array_equal(moved["local"]["Dense_0/kernel"]["error"], state["local"]["w"]["error"].mT)
    assert set(state["tensors"]) == {"w", "conv"}
