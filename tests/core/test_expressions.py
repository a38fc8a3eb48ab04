"""Algorithms, rates and times as text."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire import AllReduce, LocalSGD, PowerSGD, Quantize, Sign, TopK, TwoLevel, WireDtype, diloco
from gradwire.core.plan.expressions import NotAnAlgorithm, parse_algorithm
from gradwire.core.text import units

ALGORITHMS = [
    AllReduce(),
    AllReduce(bucket_bytes=25 << 20),
    PowerSGD(rank=4),
    PowerSGD(rank={"*embed*": 0, "*": 4}, start_step=10, half_step=True),
    WireDtype(PowerSGD(rank=2), "bfloat16"),
    Quantize("int4", block=64),
    TopK(64, per=(64, 64), bits=2, mean="senders", error_feedback=0.95),
    Sign(per="column", magnitudes=2),
    TwoLevel(PowerSGD(4), "node"),
    TwoLevel(AllReduce(), ((0, 2), (1, 3))),
    LocalSGD(8, start_step=1000),
    LocalSGD({8: 4, "all": 16}),
    diloco(30, lr=0.8, momentum=0, compressor=TopK(64, per=(64, 64), bits=2)),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_what_an_algorithm_shows_is_what_it_is_read_from(algorithm):
    assert parse_algorithm(repr(algorithm)) == algorithm


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
    ],
)
def test_what_is_wrong_is_named(text, said):
    with pytest.raises(NotAnAlgorithm, match=said):
        parse_algorithm(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "PowerSGD(rank=(lambda: 4)())",
        "PowerSGD.__init__(4)",
        "[PowerSGD(x) for x in [4]][0]",
        "PowerSGD(rank=f'{open(0)}')",
        "AllReduce().__class__",
        "(x := PowerSGD(4))",
        "NAMES['PowerSGD'](4)",
        "'a' * 1000000000",
    ],
)
def test_nothing_is_run(text):
    with pytest.raises(NotAnAlgorithm):
        parse_algorithm(text)


RATES = {
    "10Gbit": 1.25e9,
    "10 Gbit/s": 1.25e9,
    "10gbit": 1.25e9,
    "100Mbps": 12.5e6,
    "1.25GB/s": 1.25e9,
    "8bit": 1,
    ".5MB": 5e5,
}
TIMES = {"50us": 5e-5, "0.2 ms": 2e-4, "1s": 1, "0s": 0, "7µs": 7e-6}


@pytest.mark.parametrize(("read", "found"), [(units.rate, RATES), (units.seconds, TIMES)])
def test_rates_and_times_are_read(read, found):
    for text, number in found.items():
        assert read(text) == pytest.approx(number)


NO_RATES = ["10", "Gbit", "10Gb", "-1Gbit", "0Gbit", "10 Gbit/m", "", "1e3Gbit"]
NO_TIMES = ["50", "us", "5m", "-1s", ""]


@pytest.mark.parametrize(
    ("read", "texts", "said"),
    [
        (units.rate, NO_RATES, "is no rate: give it as 10Gbit"),
        (units.seconds, NO_TIMES, "is no time: give it as 50us"),
    ],
)
def test_what_is_neither_is_refused(read, texts, said):
    for text in texts:
        with pytest.raises(ValueError, match=said):
            read(text)


@given(st.floats(1, 1e14))
def test_a_rate_that_is_shown_is_read_back(rate):
    assert units.rate(units.rate_of(rate).replace("1e+03 ", "1000 ")) == pytest.approx(rate, rel=6e-3)


@given(st.floats(1e-7, 1e3))
def test_a_time_that_is_shown_is_read_back(seconds):
    shown = units.seconds(units.time_of(seconds).replace(",", ""))
    assert math.isclose(shown, seconds, rel_tol=0.06, abs_tol=6e-8)
