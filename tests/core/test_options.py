"""Options by their annotations; algorithms, rates and times as text; and what is handed over in
place of an algorithm's parameters, a dtype or a pattern."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jax import numpy as jnp

import gradwire as gw
from gradwire import (
    AllReduce,
    LocalSGD,
    OuterSGD,
    PowerSGD,
    Quantize,
    Sign,
    Simulator,
    TopK,
    TwoLevel,
    WireDtype,
    plan,
)
from gradwire.core.plan.expressions import NotAnAlgorithm, parse_algorithm
from gradwire.core.text import units
from gradwire.core.text.options import OWN_CHECK, Names, at_least, check, more_than, share
from gradwire.jax_backend import parameter_shapes


class Thing:
    def __repr__(self) -> str:  # in the names of tests, which all processes have to give alike
        return "Thing()"


TAKEN: list[tuple[Any, Any, Any]] = [
    *((int, value, 3) for value in (3, np.int64(3), np.array(3))),
    *((float, value, float(value)) for value in (0.5, np.float32(0.5), 1 << 60)),
    *((int | None, value, value) for value in (None, 2)),
    *((float | Literal["progress"], value, value) for value in ("progress", 2, 0.5)),
    (bool, True, True),
    (str, "a", "a"),
    (Annotated[int, at_least(1)] | None, 1, 1),
    (Annotated[float, more_than(0)], 1e-9, 1e-9),
    (Annotated[float, share(most_open=True)], 0, 0),
    (Literal["keep", "drop"], "keep", "keep"),
    (Literal[2, 4], np.int8(4), 4),
    (tuple[int, int], [2, np.int32(3)], (2, 3)),
    (tuple[str, ...], ("a", "b"), ("a", "b")),
    (Mapping[str, Annotated[int, at_least(0)]], {"*": np.int64(0)}, {"*": 0}),
    (Sequence[int], [1, 2], [1, 2]),
    (Annotated[Any, Names(("a",), str.lower)], "A", "a"),
    (type[Thing], Thing, Thing),
    (Any, object, object),
]


@pytest.mark.parametrize(("hint", "value", "expected"), TAKEN, ids=repr)
def test_what_fits_is_taken_as_pythons_own(hint, value, expected):
    new = check("x", value, hint)
    assert new == expected
    assert type(new) is type(expected)
    assert check("x", new, hint) == new


#: hint: values of another type, and values that are none of its.
REFUSED: list[tuple[Any, Sequence[Any], Sequence[Any]]] = [
    (int, [True, 1.0, "1", np.array([1])], []),
    (float, [False, "0.5", 1j], [math.nan, np.float64("inf"), 10**400]),
    (bool, ["False", 0, np.bool_(True)], []),
    (str, [b"a"], []),
    (Annotated[int, at_least(1)] | None, [1.5], [0]),
    (Annotated[int, at_least(1, 8)], [], [0, 9]),
    (Annotated[float, more_than(0)], [], [0]),
    (Annotated[float, share(most_open=True)], [], [1.0, -0.1]),
    (Literal["keep", "drop"], [1], ["kept"]),
    (tuple[int, int], ["12"], [(1,)]),
    (tuple[str, ...], ["ab", ("a", 1)], []),
    (Mapping[str, int], [[("a", 1)], {"a": 1.5}], []),
    (Sequence[int], [3], []),
    (Thing, [1], []),
    (Thing | None, ["x"], []),
    (type[Thing], [int, Thing()], []),
    (Annotated[Any, Names(("a",), str.lower)], [3], ["b"]),
]


@pytest.mark.parametrize(("hint", "other", "none"), REFUSED, ids=repr)
def test_what_does_not_is_refused_by_name(hint, other, none):
    for error, value in [*((TypeError, x) for x in other), *((ValueError, x) for x in none)]:
        with pytest.raises(error, match="rank") as refused:
            check("rank", value, hint)
        assert type(refused.value) is error


def test_what_only_a_function_knows_is_not_checked_and_what_says_by_itself_what_it_takes_is_asked():
    """Annotations of a class that is made in a function: what its base has is checked still."""

    @dataclass(frozen=True)
    class Inner(OuterSGD):
        own: "Unknown" = 0  # noqa: F821

    def even(value, name):
        if value % 2:
            raise ValueError(f"{name} is odd")

    assert Inner(3, own="x").own == "x"
    assert check("size", 4, Annotated[int, even]) == 4
    assert check("size", "any", Annotated[int, OWN_CHECK]) == "any"
    for wrong, words in (
        (lambda: Inner(0), "lr=0"),
        (lambda: check("size", 3, Annotated[int, even]), "size is odd"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()


def test_advice_ends_the_message_and_a_value_that_cannot_be_shown_is_refused_too():
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError

    for value, hint, words in (
        (0, Annotated[int, at_least(1), "1 to 32 are usual"] | None, "1 to 32 are usual.*or None$"),
        (Silent(), int, "rank=<"),
        (list(range(1000)), int, "a list"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            check("rank", value, hint)


ALGORITHMS = [
    PowerSGD(rank={"*embed*": 0, "*": 4}, start_step=10, half_step=True),
    WireDtype(AllReduce(bucket_bytes=25 << 20), "bfloat16"),
    Quantize("int4", block=64),
    Sign(per="column", magnitudes=2),
    TwoLevel(PowerSGD(4), "node"),
    TwoLevel(AllReduce(), ((0, 2), (1, 3))),
    LocalSGD({8: 4, "all": 16}, start_step=1000),
    gw.diloco(
        30,
        lr=0.8,
        momentum=0,
        compressor=TopK(64, per=(64, 64), bits=2, mean="senders", error_feedback=0.95),
    ),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_what_an_algorithm_shows_is_what_it_is_read_from(algorithm):
    assert parse_algorithm(repr(algorithm)) == algorithm


NOT_RUN = [
    "__import__('os').system('true')",
    "PowerSGD(rank=(lambda: 4)())",
    "PowerSGD.__init__(4)",
    "[PowerSGD(x) for x in [4]][0]",
    "PowerSGD(rank=f'{open(0)}')",
    "AllReduce().__class__",
    "(x := PowerSGD(4))",
    "NAMES['PowerSGD'](4)",
    "'a' * 1000000000",
]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("PowerSGD", r"PowerSGD needs its options: write PowerSGD\(…\)"),
        ("PowerSDG(4)", "PowerSDG is unknown; did you mean PowerSGD"),
        ("PowerSGD(rnk=4)", "PowerSGD has no option rnk; did you mean rank"),
        ("PowerSGD()", "'rank'"),
        ("PowerSGD(rank=0)", "rank=0"),
        ("PowerSGD(4", "is no expression"),
        ("WireDtype(AllReduce(), 'int7')", "int7"),
        ("OuterSGD()", "algorithm"),
        ("4", "no algorithm"),
        ("", "is no expression"),
        ("PowerSGD(*[4])", r"\*\[4\] is neither a known name nor a literal"),
        ("PowerSGD(**{'rank': 4})", "neither a known name nor a literal"),
        ("AllReduce(1 << 10)", "neither a known name nor a literal"),
        ("PowerSGD(rank=4j)", "rank=4j"),
        ("AllReduce(bucket_bytes={[]: 3})", "unhashable"),
        ("(" * 300 + ")" * 300, "is no expression|too deeply"),
        ("PowerSGD(" + "4, " * 400, "1209 characters"),
        *((text, ".") for text in NOT_RUN),
    ],
)
def test_what_is_wrong_is_named(text, said):
    with pytest.raises(NotAnAlgorithm, match=said):
        parse_algorithm(text)


RATES = dict.fromkeys(["10Gbit", "10 Gbit/s", "10gbit", "1.25GB/s", "10Gb/s", "10 Gb/s"], 1.25e9)
RATES |= {"100Mbps": 12.5e6, "8bit": 1, ".5MB": 5e5}
TIMES = {"50us": 5e-5, "0.2 ms": 2e-4, "1s": 1, "0s": 0, "7µs": 7e-6}


@pytest.mark.parametrize(
    ("read", "found", "neither", "said"),
    [
        (
            units.rate,
            RATES,
            ["10", "Gbit", "10Gb", "-1Gbit", "0Gbit", "10 Gbit/m", "", "1e3Gbit"],
            "give it as 10Gbit",
        ),
        (units.seconds, TIMES, ["50", "us", "5m", "-1s", ""], "give it as 50us"),
    ],
)
def test_rates_and_times_are_read(read, found, neither, said):
    for text, number in found.items():
        assert read(text) == pytest.approx(number)
    for text in neither:
        with pytest.raises(ValueError, match=said):
            read(text)


@given(st.floats(1, 1e14), st.floats(1e-7, 1e3))
def test_a_rate_and_a_time_that_are_shown_are_read_back(rate, seconds):
    assert units.rate(units.rate_of(rate).replace("1e+03 ", "1000 ")) == pytest.approx(
        rate, rel=6e-3
    )
    assert units.seconds(units.time_of(seconds).replace(",", "")) == pytest.approx(
        seconds, rel=0.06, abs=6e-8
    )


SHAPES = {"w": (64, 32)}


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", torch.bfloat16, jnp.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)],
    ids=["name", "torch", "jax", "ml_dtypes", "numpy"],
)
def test_a_dtype_is_known_in_every_framework(dtype):
    assert WireDtype(AllReduce(), dtype) == WireDtype(AllReduce(), "bfloat16")
    assert (
        repr(WireDtype(AllReduce(), dtype)) == "WireDtype(algorithm=AllReduce(), dtype='bfloat16')"
    )
    assert repr(PowerSGD(4, state_dtype=dtype)) == "PowerSGD(rank=4, state_dtype='bfloat16')"
    one, other = (
        Simulator(AllReduce(), SHAPES, 1, dtype=each).specs for each in (np.float32, "float32")
    )
    assert one == other
    assert plan(SHAPES, AllReduce(), dtype=dtype).dense_bytes == 64 * 32 * 2


def test_an_unmatched_pattern_lists_the_nearest_names_and_no_more():
    names = [
        f"transformer.h.{i}.{part}.weight" for i in range(60) for part in ("attn", "mlp", "ln")
    ]
    words = r"^rank pattern 'transformer\.h\.7\.atn\.weight' matches no parameter"
    with pytest.raises(ValueError, match=words) as error:
        plan(dict.fromkeys(names, (64, 64)), PowerSGD({"transformer.h.7.atn.weight": 2, "*": 4}))
    assert "'transformer.h.7.attn.weight'" in str(error.value)
    assert str(error.value).endswith("and 175 more")
    assert len(str(error.value)) < 300


def test_a_plan_takes_a_module_and_whatever_has_shapes():
    model = torch.nn.Linear(64, 32)
    expected = plan({"weight": (32, 64), "bias": (32,)}, PowerSGD(2))
    named = {"weight": [32, 64], "bias": np.empty(32)}
    for shapes in (model, dict(model.named_parameters()), model.state_dict(), named):
        assert plan(shapes, PowerSGD(2), dtype="float32") == expected
    assert plan(model, PowerSGD(2)) == expected
    model.bias.requires_grad_(False)  # what is frozen is left out
    assert [t.name for t in plan(model, AllReduce()).tensors] == ["weight"]


def test_a_plan_counts_arrays_in_their_own_dtype_under_the_names_of_jax():
    model = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    assert (
        plan(model, AllReduce()).wire_bytes
        == plan(model, LocalSGD(4)).peak_bytes
        == (64 * 32 + 32) * 2
    )
    assert plan(model, AllReduce(), itemsize=4).wire_bytes == (64 * 32 + 32) * 4
    assert (
        plan({"a": jnp.zeros(3, jnp.float16), "b": (3,)}, AllReduce()).wire_bytes == 3 * 2 + 3 * 4
    )
    params = {
        "Dense_1": {"kernel": jnp.zeros((64, 32)), "bias": jnp.zeros(32)},
        "Dense_0": {"kernel": jax.ShapeDtypeStruct((16, 64), jnp.float32), "bias": None},
        "scale": jnp.zeros(()),
    }
    assert plan(params, PowerSGD(2)) == plan(parameter_shapes(params), PowerSGD(2))
    names = ["Dense_0/kernel", "Dense_1/bias", "Dense_1/kernel", "scale"]
    assert [t.name for t in plan(params, AllReduce()).tensors] == names
