"""What is handed over in place of an algorithm, a dtype or a pattern."""

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from jax import numpy as jnp

from gradwire import AllReduce, LocalSGD, PowerSGD, Simulator, WireDtype, plan
from gradwire.jax_backend import parameter_shapes

SHAPES = {"w": (64, 32)}


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


def test_a_plan_takes_a_tree_of_jax_under_the_names_of_its_transformations():
    params = {
        "Dense_1": {"kernel": jnp.zeros((64, 32)), "bias": jnp.zeros(32)},
        "Dense_0": {"kernel": jax.ShapeDtypeStruct((16, 64), jnp.float32), "bias": None},
        "scale": jnp.zeros(()),
    }
    assert plan(params, PowerSGD(2)) == plan(parameter_shapes(params), PowerSGD(2))
    names = ["Dense_0/kernel", "Dense_1/bias", "Dense_1/kernel", "scale"]
    assert [t.name for t in plan(params, AllReduce()).tensors] == names
