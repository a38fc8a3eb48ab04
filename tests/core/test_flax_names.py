"""Names, orientation and stacks of parameters in torch and in Flax. `tests/examples/test_models.py` computes a model's outputs with both."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire import FlaxNames, PowerSGD

SIZES = st.integers(1, 4)
LAYERS = 3


def numbered(shape, start=0):
    return np.arange(start, start + math.prod(shape), dtype=np.float32).reshape(shape)


KINDS = {  # of modules: names here and there, shapes in torch and in Flax of n, m, heads h and a window, and how an array of torch lies in Flax
    "weight/kernel": lambda n, m, h, w: ((n, m), (m, n), lambda x: x.T),
    "weight/embedding": lambda n, m, h, w: ((h, m), (h, m), lambda x: x),
    "weight/scale": lambda n, m, h, w: ((m,), (m,), lambda x: x),
    "bias/bias": lambda n, m, h, w: ((n,), (n,), lambda x: x),
    "weight/kernel heads": lambda n, m, h, w: ((h * n, m), (m, h, n), lambda x: x.T.reshape(m, h, n)),
    "weight/kernel out": lambda n, m, h, w: ((m, h * n), (h, n, m), lambda x: x.T.reshape(h, n, m)),
    "bias/bias heads": lambda n, m, h, w: ((h * n,), (h, n), lambda x: x.reshape(h, n)),
    "weight/kernel window": lambda n, m, h, w: ((n, m, *w), (*w, m, n), lambda x: np.moveaxis(x, (0, 1), (-1, -2))),
    "position/position": lambda n, m, h, w: ((n, m), (n, m), lambda x: x),
}


@st.composite
def models(draw):
    """Shapes in torch and in Flax, and how an array of torch lies in Flax, written out by hand for each kind of module."""
    torch, flax, turned = {}, {}, {}
    sizes = draw(SIZES), draw(SIZES), draw(SIZES), tuple(draw(st.lists(SIZES, min_size=1, max_size=3)))
    for i, kind in enumerate(draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, unique=True))):
        here, there, turn = KINDS[kind](*sizes)
        ours, theirs = kind.partition(" ")[0].split("/")
        how = draw(st.sampled_from(["once", "stacked", "ended", "alone"]))
        mine = [f"m{i}.{ours}"] if how == "once" else [f"a.{k}.m{i}.{ours}" for k in range(LAYERS)]
        torch |= dict.fromkeys(mine, here)
        if how == "stacked":
            name = f"a/m{i}/{theirs}"
            flax[name] = (LAYERS, *there)
            turned[name] = lambda x, mine=mine, turn=turn: np.stack([turn(x[each]) for each in mine])
            continue
        for k, each in enumerate(mine):
            name = {"once": f"m{i}/{theirs}", "ended": f"a_{k}/m{i}/{theirs}"}.get(how, f"a/{k}/m{i}/{theirs}")
            flax[name], turned[name] = there, lambda x, each=each, turn=turn: turn(x[each])
    return torch, flax, turned


@given(models())
def test_parameters_go_there_and_come_back(model):
    torch, flax, turned = model
    names = FlaxNames(torch, flax)
    arrays = {name: numbered(shape, 1000 * i) for i, (name, shape) in enumerate(torch.items())}
    there = names.to_flax(arrays)
    assert {name: x.shape for name, x in there.items()} == flax
    for name, x in there.items():
        np.testing.assert_array_equal(x, turned[name](arrays))
    back = names.to_torch(there)
    assert back.keys() == arrays.keys()
    for name, x in back.items():
        np.testing.assert_array_equal(x, arrays[name])


#: The matrix of one convolution is square, so that the lengths of its factors do not tell them apart.
TORCH = {"conv.weight": (6, 4, 3, 5), "conv.bias": (6,), "square.weight": (16, 4, 2, 2)} | {
    f"a.{i}.up.weight": (8, 12) for i in range(2)
}
FLAX = {
    "conv": {"kernel": (3, 5, 4, 6), "bias": (6,)},
    "square": {"kernel": (2, 2, 4, 16)},
    "a": {"up": {"kernel": (2, 12, 8)}},
}
NAMES = FlaxNames(TORCH, FLAX)


def state_of(rows=2, rank=2):
    """Of two replicas, in torch: factors that reproduce the gradient, and errors."""
    tensors, local = {}, {}
    for i, (name, shape) in enumerate((n, s) for n, s in TORCH.items() if len(s) > 1):
        p, q = numbered((rank, shape[0]), i), numbered((rank, math.prod(shape[1:])), i + 1)
        tensors[name] = {"p": p, "q": q}
        local[name] = {"error": np.stack([(p.T @ q).reshape(shape) + row for row in range(rows)])}
    start = {"format": 1, "kind": "compressor", "algorithm": "PowerSGD(rank=2)", "step": 3, "replicas": rows}
    return start | {"shared": {"clip": np.float32(1)}, "tensors": tensors, "local": local}


def test_a_state_follows_the_parameters():
    algorithm, state = PowerSGD(2, transpose=("*/kernel",), stacked={"a/*": 1}), state_of()
    there = NAMES.state_to_flax(state, algorithm)
    assert there["algorithm"] == repr(algorithm)
    assert there["tensors"]["a/up/kernel"]["q"].shape == (2, 2, 12)
    # In Flax too the factors, transposed, make the matrix that the error is of: (in, out), or (window · in, out).
    for name in ("conv/kernel", "square/kernel", "a/up/kernel"):
        p, q = (there["tensors"][name][key] for key in "pq")
        for row, error in enumerate(there["local"][name]["error"]):
            np.testing.assert_allclose((q.mT @ p).reshape(error.shape) + row, error)
    back = NAMES.state_to_torch(there, PowerSGD(2))
    for key in ("step", "replicas", "algorithm", "tensors", "local"):
        np.testing.assert_equal(back[key], state[key])


def renamed(shapes, before, after):
    return {name.replace(before, after): shape for name, shape in shapes.items()}


def damaged(section, name, memory):
    state = state_of()
    return lambda: NAMES.state_to_flax(state | {section: {name: memory}}, PowerSGD(2))


def arrays(without=()):
    return {name: numbered(shape) for name, shape in TORCH.items() if name not in without}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: FlaxNames(renamed(TORCH, "conv", "cnn"), FLAX), "'cnn.weight'"),
        (lambda: FlaxNames(renamed(TORCH, "weight", "in_proj_weight"), FLAX), "'conv.in_proj_weight'"),
        (lambda: FlaxNames(TORCH | {"conv.weight": (4, 6, 3, 5)}, FLAX), "'conv.weight'"),
        (lambda: FlaxNames({n: s for n, s in TORCH.items() if n != "conv.bias"}, FLAX), "'conv/bias'"),
        (lambda: FlaxNames({n: s for n, s in TORCH.items() if n != "a.1.up.weight"}, FLAX), "'a/up/kernel'"),
        (lambda: FlaxNames(TORCH | {"a.2.up.weight": (8, 12)}, FLAX), "'a/up/kernel'"),
        (lambda: FlaxNames({"m.weight": (3,)}, {"m": {"scale": (3,), "embedding": (3,)}}), "'m.weight'"),
        (lambda: NAMES.to_flax({"nobody": 1.0}), "'nobody'"),
        (lambda: NAMES.to_flax(arrays() | {"conv.bias": np.zeros(5)}), "'conv.bias'"),
        (lambda: NAMES.to_flax(arrays(without=["a.0.up.weight"])), "'a.0.up.weight'"),
        (lambda: NAMES.to_torch({"conv/weight": np.zeros(6)}), "'conv/weight'"),
        (lambda: NAMES.to_torch({"conv/bias": np.zeros(5)}), "'conv/bias'"),
        (lambda: NAMES.state_to_flax({"kind": "sharded_optimizer"}, PowerSGD(2)), "kind='sharded_optimizer'"),
        (damaged("tensors", "nobody", {"q": np.zeros((2, 3))}), "'nobody'"),
        (damaged("tensors", "conv.weight", {"q": np.zeros((2, 61))}), "'conv/kernel'"),
        (damaged("tensors", "a.0.up.weight", {"q": np.zeros((2, 12))}), "'a.1.up.weight'"),
    ],
)
def test_refused(call, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        call()
