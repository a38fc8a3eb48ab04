"""What is handed over in place of an algorithm, a dtype or a pattern."""

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
import torch
from jax import numpy as jnp

from gradwire import AllReduce, LocalSGD, PowerSGD, Simulator, WireDtype, plan
from gradwire.core.algorithm import require_algorithm
from gradwire.jax_backend import parameter_shapes

SHAPES = {"w": (64, 32)}
DOORS = {
    "plan": lambda given: plan(SHAPES, given),
    "Simulator": lambda given: Simulator(given, SHAPES, 2),
    "WireDtype": lambda given: WireDtype(given, "bfloat16"),
    "LocalSGD": lambda given: LocalSGD(8, compressor=given),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (PowerSGD, r"=PowerSGD is a class and no algorithm: give an instance, such as PowerSGD\(rank=4\)"),
        ("powersgd", r"='powersgd' is a str and no algorithm: give an instance, such as PowerSGD\(rank=4\)"),
        (None, r"=None is a NoneType and no algorithm: give an instance, such as PowerSGD\(rank=4\)"),
    ],
    ids=["a class", "a name", "None"],
)
def test_what_is_no_algorithm(door, given, said):
    if (door, given) == ("LocalSGD", None):  # no compressor
        return
    with pytest.raises(TypeError, match=said):
        DOORS[door](given)


def test_half_an_algorithm_is_told_what_it_lacks():
    class Half:
        per_replica = frozenset()

        def init(self, ops, specs): ...
        def step(self, ops, gradients, state, step): ...

    with pytest.raises(TypeError, match=r"lacks start_step, cycle; gradwire\.Algorithm says"):
        require_algorithm(Half())


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", torch.bfloat16, jnp.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)],
    ids=["name", "torch", "jax", "ml_dtypes", "numpy"],
)
def test_a_dtype_is_known_in_every_framework(dtype):
    assert WireDtype(AllReduce(), dtype) == WireDtype(AllReduce(), "bfloat16")
    assert repr(WireDtype(AllReduce(), dtype)) == "WireDtype(algorithm=AllReduce(), dtype='bfloat16')"
    assert repr(PowerSGD(4, state_dtype=dtype)) == "PowerSGD(rank=4, state_dtype='bfloat16')"
    given, named = (Simulator(AllReduce(), SHAPES, 1, dtype=each).specs for each in (np.float32, "float32"))
    assert given == named
    assert plan(SHAPES, AllReduce(), dtype=dtype).dense_bytes == 64 * 32 * 2


@pytest.mark.parametrize("dtype", [np.int16, torch.int64, "fp16", 4, torch.nn.Linear])
def test_what_is_no_dtype_to_send_in(dtype):
    with pytest.raises(ValueError, match="no dtype to send in"):
        WireDtype(AllReduce(), dtype)
    with pytest.raises(ValueError, match="state_dtype"):
        PowerSGD(4, state_dtype=dtype)


def test_an_unmatched_pattern_lists_the_nearest_names_and_no_more():
    names = [f"transformer.h.{i}.{part}.weight" for i in range(60) for part in ("attn", "mlp", "ln")]
    words = r"^rank pattern 'transformer\.h\.7\.atn\.weight' matches no parameter"
    with pytest.raises(ValueError, match=words) as error:
        plan(dict.fromkeys(names, (64, 64)), PowerSGD({"transformer.h.7.atn.weight": 2, "*": 4}))
    assert "'transformer.h.7.attn.weight'" in str(error.value)
    assert str(error.value).endswith("and 175 more")
    assert len(str(error.value)) < 300


def test_a_plan_takes_a_module_and_whatever_has_shapes():
    model = torch.nn.Linear(64, 32)
    shapes = {"weight": (32, 64), "bias": (32,)}
    expected = plan(shapes, PowerSGD(2))
    named = {"weight": [32, 64], "bias": np.empty(32)}
    for given in (model, dict(model.named_parameters()), model.state_dict(), named):
        assert plan(given, PowerSGD(2), dtype="float32") == expected
    assert plan(model, PowerSGD(2)) == expected


def test_a_plan_leaves_out_what_is_frozen_in_a_module():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8))
    model[0].requires_grad_(False)
    assert [t.name for t in plan(model, AllReduce()).tensors] == ["1.weight", "1.bias"]


def test_a_plan_counts_arrays_in_their_own_dtype():
    model = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    assert plan(model, AllReduce()).wire_bytes == (64 * 32 + 32) * 2
    assert plan(model, LocalSGD(4)).peak_bytes == (64 * 32 + 32) * 2
    assert plan(model, AllReduce(), itemsize=4).wire_bytes == (64 * 32 + 32) * 4
    mixed = {"a": jnp.zeros(3, jnp.float16), "b": (3,)}
    assert plan(mixed, AllReduce()).wire_bytes == 3 * 2 + 3 * 4
    with pytest.raises(ValueError, match="'steps' has dtype int32"):
        plan({"w": jnp.zeros(3), "steps": jnp.zeros((), jnp.int32)}, AllReduce())


def test_a_plan_takes_a_tree_of_jax_under_the_names_of_its_transformations():
    params = {
        "Dense_1": {"kernel": jnp.zeros((64, 32)), "bias": jnp.zeros(32)},
        "Dense_0": {"kernel": jax.ShapeDtypeStruct((16, 64), jnp.float32), "bias": None},
        "scale": jnp.zeros(()),
    }
    assert plan(params, PowerSGD(2)) == plan(parameter_shapes(params), PowerSGD(2))
    names = ["Dense_0/kernel", "Dense_1/bias", "Dense_1/kernel", "scale"]
    assert [t.name for t in plan(params, AllReduce()).tensors] == names
    with pytest.raises(ValueError, match="same name 'a/b'"):
        plan({"a": {"b": (3,)}, "a/b": (3,)}, AllReduce())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.nn.Linear(4, 4).named_parameters(), "shapes is a generator; give name → shape, a torch module"),
        (torch.nn.Linear, "shapes is a type; give"),
        ({"w": 3.0}, r"shapes\['w'\] is a float, and has no shape; give"),
        ({"layers": {"0": [(3, 4), (5,)]}}, r"shapes\['layers/0'\] is a list, and has no shape.*parameter_shapes"),
        (
            {"layers": (jnp.ones(()), jnp.ones(()))},
            r"shapes\['layers'\] is a tuple, and has no shape.*parameter_shapes",
        ),
        ({"w": optax.MaskedNode()}, r"shapes\['w'\] is a MaskedNode, and has no shape.*parameter_shapes"),
    ],
    ids=["a generator", "a class", "a number", "a list", "arrays", "a hole"],
)
def test_a_plan_says_what_has_no_shapes(given, said):
    with pytest.raises(TypeError, match=said):
        plan(given, PowerSGD(2))


@pytest.mark.parametrize("wrong", [{"world_size": 0}, {"bandwidth": 0.0}, {"latency": -1.0}])
def test_a_network_that_is_none(wrong):
    network = {"world_size": 4, "latency": 1e-4, "bandwidth": 1e9, **wrong}
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        plan(SHAPES, AllReduce()).seconds(**network)
