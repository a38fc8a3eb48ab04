"""States of all replicas in one form: made, reduced, spread, renamed and taken apart; how a tensor
is a batch of matrices; and runs that go on with other replicas."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import FlaxNames, PowerSGD, Simulator, Spec, plan
from gradwire.core.algorithms.shared.views import StackedShape, View, reproducing, view_of
from gradwire.core.simulate import NumpyOps
from gradwire.core.state import checkpoint
from gradwire.core.state.files import whole_file
from tests import bounds

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
    return checkpoint.head("compressor", algorithm, step) | {
        "shared": shared or {},
        "tensors": tensors,
    }


def state_dict(sim, replica):
    state = sim.states[replica]
    return state_of(state.tensors, repr(sim.algorithm), sim.steps, state.shared)


def gathered(sim):
    return checkpoint.gather(
        OPS, [state_dict(sim, r) for r in range(len(sim.states))], sim.algorithm.per_replica
    )


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
    return bounds.relative(x, y)


@settings(max_examples=15, deadline=None)
@given(
    worlds=st.lists(WORLDS, min_size=2, max_size=4),
    stays=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    name=st.sampled_from(sorted(ALGORITHMS)),
    errors=st.sampled_from(["mean", "all"]),
)
def test_runs_that_change_their_number_of_replicas_follow_the_one_that_does_not(
    worlds, stays, name, errors
):
    algorithm = ALGORITHMS[name]
    whole, sim = Simulator(algorithm, SHAPES, 4), Simulator(algorithm, SHAPES, worlds[0])
    for world, stay in zip(worlds, stays, strict=False):
        state = gathered(sim)
        state = checkpoint.mean_of_replicas(OPS, state) if errors == "mean" else state
        sim = resumed(algorithm, state, world)
        for _ in range(stay):
            # What rounding adds grows by a factor per step, and a step or two in twenty are
            # unlucky.
            assert relative(step(sim), step(whole)) < 1e-8


def test_every_replica_gets_its_own_error_back_or_the_mean():
    sim = Simulator(PowerSGD(2), SHAPES, 3)
    for _ in range(4):
        step(sim)
    state, errors = gathered(sim), [s.tensors["w"]["error"] for s in sim.states]
    assert (set(state["tensors"]["w"]), state["replicas"]) == ({"q"}, 3)
    assert state["local"]["w"]["error"].shape == (3, 12, 10)
    for replicas in (3, 5):
        for replica in range(replicas):
            own = checkpoint.of_replica(OPS, state, replica, replicas)
            expected = errors[replica] if replicas == 3 else sum(errors) / 3
            np.testing.assert_allclose(
                own["tensors"]["w"]["error"], expected, rtol=0, atol=1e-15 * (replicas == 5)
            )
            assert "replicas" not in own
    assert checkpoint.mean_of_replicas(OPS, state)["local"]["w"]["error"].shape == (1, 12, 10)
    assert checkpoint.spread(OPS, state, 5)["replicas"] == 5
    # The mean of a narrow memory is formed in a wide one.
    states = [
        state_of({"w": {"error": np.full((2,), value, "float16")}})
        for value in (60000.0, 60000.0, 1.0, 1.0)
    ]
    mean = checkpoint.mean_of_replicas(OPS, checkpoint.gather(OPS, states, {"error"}))["local"][
        "w"
    ]["error"]
    assert (mean.dtype, mean.tolist()) == (np.float16, [[np.float16(30000.5)] * 2])


TEXTS = st.text(min_size=1, max_size=12)
MEMORIES = st.dictionaries(st.sampled_from(["q", "p", "error"]), st.integers(0, 3), max_size=3)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(TEXTS, MEMORIES, max_size=4), st.integers(0, 2**40), st.booleans())
def test_flat_names_come_apart_again_whatever_a_parameter_is_called(memories, steps, portable):
    tensors = {
        name: {k: np.full((n,), n) for k, n in memory.items()} for name, memory in memories.items()
    }
    state = state_of(tensors, step=steps, shared={"phase": np.int32(1)})
    state |= {"local": tensors, "replicas": 3} if portable else {}
    arrays, metadata = checkpoint.flatten(state)
    assert all(isinstance(text, str) for text in (*metadata.values(), *arrays))
    again = checkpoint.unflatten(arrays, metadata)
    np.testing.assert_equal(again, state)


def test_what_does_not_fit_is_named_and_the_rest_kept():
    def init(algorithm, **shapes):
        return algorithm.init(OPS, {name: Spec(shape, "float64") for name, shape in shapes.items()})

    old, new = PowerSGD(2, half_step=True), PowerSGD(3, half_step=True)
    then = init(old, same=(24, 20), gone=(24, 20), narrow=(24, 20))
    now = init(new, same=(24, 20), fresh=(24, 20), narrow=(24, 16), b=(4,))
    state = state_of(then.tensors, repr(old), 5, then.shared)
    kept, difference = checkpoint.fit(state, repr(new), now)
    assert difference.algorithm == (repr(old), repr(new))
    assert (difference.removed, difference.added) == (("gone",), ("fresh",))
    assert len(difference.reshaped) == 2  # the rank of `same`, everything of `narrow`
    for word in ("'gone'", "'fresh'", "'narrow'", "(24, 16)", "PowerSGD(rank=2"):
        assert word in str(difference)
    wide = {f"w{i}": (24, 20) for i in range(9)}
    many = checkpoint.fit(
        state | {"tensors": init(old, **wide).tensors}, repr(new), init(new, **wide)
    )[1]
    assert len(many.reshaped) == 9
    assert str(many).endswith("; and 7 more")
    # The error is of any rank; a factor has one. Nothing of another shape is taken over.
    assert {name: set(memory) for name, memory in kept.tensors.items()} == {
        "same": {"error"},
        "narrow": set(),
    }
    assert set(kept.shared) == {"phase"}
    assert not checkpoint.fit(state, repr(old), then)[1]


def not_finite_in(state, section, name, key, value):
    changed = np.array(state[section][name][key], copy=True)
    changed.reshape(-1)[-1] = value  # of all replicas, the last one's
    return {**state, section: {**state[section], name: {**state[section][name], key: changed}}}


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "float64"), (-np.inf, "bfloat16")])
def test_memory_that_is_not_finite_is_refused_by_name(value, dtype):
    sim = Simulator(PowerSGD(2, state_dtype=dtype), SHAPES, 3)
    step(sim)
    one, everyone = state_dict(sim, 0), gathered(sim)
    current, configuration = sim.states[0], repr(sim.algorithm)
    assert not checkpoint.fit(one, configuration, current)[1]
    for key in ("q", "error"):
        with pytest.raises(ValueError, match=rf"memory '{key}' of parameter 'conv' holds"):
            checkpoint.fit(
                not_finite_in(one, "tensors", "conv", key, value), configuration, current
            )
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
    np.testing.assert_array_equal(
        moved["local"]["Dense_0/kernel"]["error"], state["local"]["w"]["error"].mT
    )
    assert set(state["tensors"]) == {"w", "conv"}


some_shapes = st.lists(st.integers(1, 6), min_size=2, max_size=5).map(tuple)


@given(some_shapes, st.data())
def test_no_other_cut_sends_less(shape, data):
    """And of equals it is the one with the fewest row axes."""
    stacked = data.draw(st.integers(0, len(shape) - 2))
    view = view_of("w", shape, stacked)
    assert view.batch == shape[:stacked]
    others = [
        math.prod(shape[stacked:cut]) + math.prod(shape[cut:])
        for cut in range(stacked + 1, len(shape))
    ]
    cut = stacked + 1 + others.index(min(others))
    assert (view.rows, view.columns) == (shape[stacked:cut], shape[cut:])


def test_a_shape_that_knows_of_its_stack_is_a_shape():
    shape = StackedShape((12, 64, 128), 1)
    assert shape == (12, 64, 128)
    assert pickle.loads(pickle.dumps(shape)).stacked == 1
    assert str(PowerSGD(4).view_of("w", shape)) == "12 × (64 | 128)"
    # The user knows better.
    assert str(PowerSGD(4, stacked={"w": 0}).view_of("w", shape)) == "12·64 | 128"
    # Without a factor to know it by, a later step could not tell.
    assert str(PowerSGD(4, warm_start=False).view_of("w", shape)) == "12·64 | 128"
    (tensor,) = plan({"w": shape}, PowerSGD(4)).tensors
    assert tensor.wire_bytes == 12 * (64 + 128) * 4 * 4


@given(st.sampled_from([{}, {"half_step": True}, {"transpose": ("w",)}]))
def test_what_the_framework_knew_at_init_is_known_in_every_step(options):
    shape, algorithm = (3, 2, 10, 16), PowerSGD(1, **options)
    hinted, told = (
        Simulator(a, {"w": shape}, 2) for a in (algorithm, PowerSGD(1, stacked={"w": 2}, **options))
    )
    for state in hinted.states:
        memory = algorithm.init(NumpyOps(), {"w": Spec(StackedShape(shape, 2), "float64")}).tensors[
            "w"
        ]
        state.tensors["w"] = memory
    rng = np.random.default_rng(0)
    for _ in range(3):
        given = [{"w": rng.normal(size=shape)} for _ in range(2)]
        np.testing.assert_array_equal(hinted.step(given)["w"], told.step(given)["w"])
    assert hinted.states[0].tensors["w"]["q"].shape[:2] == (6, 1)


@given(some_shapes, st.booleans(), st.data())
def test_the_options_that_gave_a_factor_are_found(shape, transposed, data):
    stacked = data.draw(st.integers(0, len(shape) - 2))
    rows = data.draw(st.integers(1, len(shape) - stacked - 1))
    view = View(
        shape[:stacked], shape[stacked : stacked + rows], shape[stacked + rows :], transposed
    )
    factor = (*view.stack, 2, view.sides[1])
    options = eval(f"dict({reproducing('w', shape, factor)})")
    again = (
        PowerSGD(1, transpose=("w",) * turned, **options).view_of("w", shape)
        for turned in (False, True)
    )
    assert (view.stack, view.sides[1]) in [(found.stack, found.sides[1]) for found in again]


def test_a_state_of_another_view_is_refused_with_what_to_do():
    """Of the first axis and the rest, as every tensor was seen once."""
    before, now = PowerSGD(2, rows={"conv": 1}), PowerSGD(2)
    specs = {"conv": Spec((8, 3, 16), "float64"), "w": Spec((20, 16), "float64")}
    old, new = (a.init(NumpyOps(), specs) for a in (before, now))
    saved = {
        "format": 1,
        "kind": "compressor",
        "algorithm": repr(now),
        "step": 3,
        "shared": {},
        "tensors": old.tensors,
    }
    kept, difference = checkpoint.fit(saved, repr(now), new)
    assert not difference.algorithm
    assert "'q': ('float', (2, 48))" in str(difference)
    assert "'q': ('float', (2, 16))" in str(difference)
    assert "give PowerSGD rows={'conv': 1} to go on with those" in str(difference)
    assert set(kept.tensors["conv"]) == {"error"}  # what can be kept without
    # With that option it fits, though the state knows nothing of it.
    kept, difference = checkpoint.fit(saved, repr(before), old)
    assert not difference
    assert set(kept.tensors["conv"]) == {"error", "q"}
    # Other options still count.
    assert checkpoint.fit(saved, repr(PowerSGD(2, rows={"conv": 1}, seed=1)), old)[1].algorithm
    assert not checkpoint.fit(
        saved | {"algorithm": "WireDtype(PowerSGD(rank=2), 'bfloat16')"},
        "WireDtype(PowerSGD(rank=2, stacked={'w': 0}), 'bfloat16')",
        old,
    )[1]


@pytest.mark.parametrize("half_step", [False, True])
def test_a_step_with_memory_of_another_view_is_refused_by_name(half_step):
    simulator = Simulator(PowerSGD(2, half_step=half_step), {"conv": (8, 3, 16)}, 1)
    old = Simulator(PowerSGD(2, rows={"conv": 1}, half_step=half_step), {"conv": (8, 3, 16)}, 1)
    simulator.states[0].tensors = old.states[0].tensors
    with pytest.raises(
        ValueError,
        match=r"memory of parameter 'conv' holds a factor of shape \(2, 48\).*'conv': 1}",
    ):
        simulator.step([{"conv": np.ones((8, 3, 16))}])


SIZES = st.integers(1, 4)
LAYERS = 3


def numbered(shape, start=0):
    return np.arange(start, start + math.prod(shape), dtype=np.float32).reshape(shape)


# of modules: names here and there, shapes in torch and in Flax of n, m, heads h and a window, and
# how an array of torch lies in Flax
KINDS = {
    "weight/kernel": lambda n, m, h, w: ((n, m), (m, n), lambda x: x.T),
    "weight/embedding": lambda n, m, h, w: ((h, m), (h, m), lambda x: x),
    "weight/scale": lambda n, m, h, w: ((m,), (m,), lambda x: x),
    "bias/bias": lambda n, m, h, w: ((n,), (n,), lambda x: x),
    "weight/kernel heads": lambda n, m, h, w: (
        (h * n, m),
        (m, h, n),
        lambda x: x.T.reshape(m, h, n),
    ),
    "weight/kernel out": lambda n, m, h, w: ((m, h * n), (h, n, m), lambda x: x.T.reshape(h, n, m)),
    "bias/bias heads": lambda n, m, h, w: ((h * n,), (h, n), lambda x: x.reshape(h, n)),
    "weight/kernel window": lambda n, m, h, w: (
        (n, m, *w),
        (*w, m, n),
        lambda x: np.moveaxis(x, (0, 1), (-1, -2)),
    ),
    "position/position": lambda n, m, h, w: ((n, m), (n, m), lambda x: x),
}


@st.composite
def flax_models(draw):
    """Shapes in torch and in Flax, and how an array of torch lies in Flax, written out by hand for
    each kind of module."""
    torch, flax, turned = {}, {}, {}
    sizes = (
        draw(SIZES),
        draw(SIZES),
        draw(SIZES),
        tuple(draw(st.lists(SIZES, min_size=1, max_size=3))),
    )
    for i, kind in enumerate(
        draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, unique=True))
    ):
        here, there, turn = KINDS[kind](*sizes)
        ours, theirs = kind.partition(" ")[0].split("/")
        how = draw(st.sampled_from(["once", "stacked", "ended", "alone"]))
        mine = [f"m{i}.{ours}"] if how == "once" else [f"a.{k}.m{i}.{ours}" for k in range(LAYERS)]
        torch |= dict.fromkeys(mine, here)
        if how == "stacked":
            name = f"a/m{i}/{theirs}"
            flax[name] = (LAYERS, *there)
            turned[name] = lambda x, mine=mine, turn=turn: np.stack(
                [turn(x[each]) for each in mine]
            )
            continue
        for k, each in enumerate(mine):
            name = {"once": f"m{i}/{theirs}", "ended": f"a_{k}/m{i}/{theirs}"}.get(
                how, f"a/{k}/m{i}/{theirs}"
            )
            flax[name], turned[name] = there, lambda x, each=each, turn=turn: turn(x[each])
    return torch, flax, turned


@given(flax_models())
def test_parameters_go_there_and_come_back(model):
    torch, flax, turned = model
    names = FlaxNames(torch, flax)
    torch_arrays = {
        name: numbered(shape, 1000 * i) for i, (name, shape) in enumerate(torch.items())
    }
    there = names.to_flax(torch_arrays)
    assert {name: x.shape for name, x in there.items()} == flax
    for name, x in there.items():
        np.testing.assert_array_equal(x, turned[name](torch_arrays))
    back = names.to_torch(there)
    assert back.keys() == torch_arrays.keys()
    for name, x in back.items():
        np.testing.assert_array_equal(x, torch_arrays[name])


#: The matrix of one convolution is square, so that the lengths of its factors do not tell them
#: apart.
TORCH = {"conv.weight": (6, 4, 3, 5), "conv.bias": (6,), "square.weight": (16, 4, 2, 2)} | {
    f"a.{i}.up.weight": (8, 12) for i in range(2)
}
FLAX = {
    "conv": {"kernel": (3, 5, 4, 6), "bias": (6,)},
    "square": {"kernel": (2, 2, 4, 16)},
    "a": {"up": {"kernel": (2, 12, 8)}},
}
NAMES = FlaxNames(TORCH, FLAX)


def flax_state(rows=2, rank=2):
    """Of two replicas, in torch: factors that reproduce the gradient, and errors."""
    tensors, local = {}, {}
    for i, (name, shape) in enumerate((n, s) for n, s in TORCH.items() if len(s) > 1):
        p, q = numbered((rank, shape[0]), i), numbered((rank, math.prod(shape[1:])), i + 1)
        tensors[name] = {"p": p, "q": q}
        local[name] = {"error": np.stack([(p.T @ q).reshape(shape) + row for row in range(rows)])}
    start = {
        "format": 1,
        "kind": "compressor",
        "algorithm": "PowerSGD(rank=2)",
        "step": 3,
        "replicas": rows,
    }
    return start | {"shared": {"clip": np.float32(1)}, "tensors": tensors, "local": local}


def test_a_state_follows_the_parameters():
    algorithm, state = PowerSGD(2, transpose=("*/kernel",), stacked={"a/*": 1}), flax_state()
    there = NAMES.state_to_flax(state, algorithm)
    assert there["algorithm"] == repr(algorithm)
    assert there["tensors"]["a/up/kernel"]["q"].shape == (2, 2, 12)
    # In Flax too the factors, transposed, make the matrix that the error is of: (in, out), or
    # (window · in, out).
    for name in ("conv/kernel", "square/kernel", "a/up/kernel"):
        p, q = (there["tensors"][name][key] for key in "pq")
        for row, error in enumerate(there["local"][name]["error"]):
            np.testing.assert_allclose((q.mT @ p).reshape(error.shape) + row, error)
    back = NAMES.state_to_torch(there, PowerSGD(2))
    for key in ("step", "replicas", "algorithm", "tensors", "local"):
        np.testing.assert_equal(back[key], state[key])


def named_otherwise(shapes, before, after):
    return {name.replace(before, after): shape for name, shape in shapes.items()}


def damaged(section, name, memory):
    state = flax_state()
    return lambda: NAMES.state_to_flax(state | {section: {name: memory}}, PowerSGD(2))


def torch_arrays(without=()):
    return {name: numbered(shape) for name, shape in TORCH.items() if name not in without}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: FlaxNames(named_otherwise(TORCH, "conv", "cnn"), FLAX), "'cnn.weight'"),
        (
            lambda: FlaxNames(named_otherwise(TORCH, "weight", "in_proj_weight"), FLAX),
            "'conv.in_proj_weight'",
        ),
        (lambda: FlaxNames(TORCH | {"conv.weight": (4, 6, 3, 5)}, FLAX), "'conv.weight'"),
        (
            lambda: FlaxNames({n: s for n, s in TORCH.items() if n != "conv.bias"}, FLAX),
            "'conv/bias'",
        ),
        (
            lambda: FlaxNames({n: s for n, s in TORCH.items() if n != "a.1.up.weight"}, FLAX),
            "'a/up/kernel'",
        ),
        (lambda: FlaxNames(TORCH | {"a.2.up.weight": (8, 12)}, FLAX), "'a/up/kernel'"),
        (
            lambda: FlaxNames({"m.weight": (3,)}, {"m": {"scale": (3,), "embedding": (3,)}}),
            "'m.weight'",
        ),
        (lambda: FlaxNames(TORCH | {f"a.{'1' * 5000}.up.weight": (8, 12)}, FLAX), "'a.1111"),
        (lambda: NAMES.to_flax({"nobody": 1.0}), "'nobody'"),
        (lambda: NAMES.to_flax(torch_arrays() | {"conv.bias": np.zeros(5)}), "'conv.bias'"),
        (lambda: NAMES.to_flax(torch_arrays(without=["a.0.up.weight"])), "'a.0.up.weight'"),
        (lambda: NAMES.to_torch({"conv/weight": np.zeros(6)}), "'conv/weight'"),
        (lambda: NAMES.to_torch({"conv/bias": np.zeros(5)}), "'conv/bias'"),
        (
            lambda: NAMES.state_to_flax({"kind": "sharded_optimizer"}, PowerSGD(2)),
            "kind='sharded_optimizer'",
        ),
        (damaged("tensors", "nobody", {"q": np.zeros((2, 3))}), "'nobody'"),
        (damaged("tensors", "conv.weight", {"q": np.zeros((2, 61))}), "'conv/kernel'"),
        (damaged("tensors", "a.0.up.weight", {"q": np.zeros((2, 12))}), "'a.1.up.weight'"),
    ],
)
def test_refused(call, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        call()
