"""The share of the time that computes, against what others have measured. Beside published tables it stands in docs/choosing.md, where it is compared."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import AllReduce, LocalSGD, PowerSGD, TwoLevel, WireDtype, diloco, link_for, utilization

#: Bandwidths of the papers' tables, Gbit/s, and the utilizations asked for.
GRID = np.logspace(-1, 3, 50)
SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)

#: Streaming DiLoCo, arXiv 2501.18512v1, Table 4: parameters, layers, seconds of a step; and for each method the Gbit/s for each share.
STREAMING = [
    (1e9, 24, 0.1, {
        "data-parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
        "DiLoCo": (1.4, 6.2, 13.3, 23.3, 86.8),
        "streaming": (1.4, 5.2, 9.1, 16.0, 28.1),
        "overlapped": (1.4, 4.3, 6.2, 9.1, 11.0),
        "in 4 bits": (0.4, 0.9, 1.7, 2.0, 3.0),
    }),
    (10e9, 48, 0.8, {
        "data-parallel": (104.8, 222.3, 222.3, 268.3, 471.5),
        "DiLoCo": (1.7, 7.5, 16.0, 33.9, 104.8),
        "streaming": (1.7, 5.2, 9.1, 13.3, 19.3),
        "overlapped": (1.7, 3.6, 5.2, 6.2, 7.5),
        "in 4 bits": (0.4, 0.9, 1.4, 1.4, 1.7),
    }),
    (100e9, 108, 4.9, {
        "data-parallel": (184.2, 323.8, 390.7, 390.7, 471.5),
        "DiLoCo": (3.0, 11.0, 23.3, 49.4, 184.2),
        "streaming": (2.4, 6.2, 9.1, 11.0, 19.3),
        "overlapped": (1.7, 3.6, 4.3, 5.2, 5.2),
        "in 4 bits": (0.5, 0.9, 1.1, 1.1, 1.4),
    }),
]  # fmt: skip

#: Scaling laws for DiLoCo, arXiv 2503.09799, Table 6: the same, by period; 1 is data-parallel.
SCALING = [
    (10e9, 48, 0.8, {
        1: (104.8, 184.2, 222.3, 222.3, 390.7),
        10: (16.0, 49.4, 86.8, 152.6, 222.3),
        50: (3.0, 11.0, 23.3, 41.0, 126.5),
        100: (1.4, 6.2, 13.3, 23.3, 86.8),
        300: (0.5, 2.0, 4.3, 9.1, 41.0),
    }),
    (405e9, 126, 26.0, {
        1: (126.5, 222.3, 268.3, 323.8, 323.8),
        10: (19.3, 72.0, 126.5, 184.2, 268.3),
        50: (3.6, 13.3, 28.1, 59.6, 184.2),
        100: (2.0, 7.5, 16.0, 33.9, 126.5),
        300: (0.7, 3.0, 6.2, 13.3, 59.6),
    }),
    (671e9, 61, 20.0, {
        1: (323.8, 569.0, 686.6, 686.6, 1000.0),
        10: (49.4, 152.6, 268.3, 390.7, 686.6),
        50: (7.5, 33.9, 72.0, 126.5, 390.7),
        100: (4.3, 16.0, 41.0, 72.0, 268.3),
        300: (1.7, 6.2, 13.3, 28.1, 126.5),
    }),
]  # fmt: skip


def model(parameters, layers):
    return {f"layers.{i}.w": (int(parameters / layers) // 4096, 4096) for i in range(layers)}


def streaming(method, layers):
    """Three layers a fragment, H 100, one step of overlap."""
    fragments = layers // 3
    return {
        "data-parallel": AllReduce(),
        "DiLoCo": diloco(100),
        "streaming": diloco(100, fragments=fragments),
        "overlapped": diloco(100, fragments=fragments, overlap=1),
        "in 4 bits": diloco(100, fragments=fragments, overlap=1, compressor=WireDtype(AllReduce(), "e3m0")),
    }[method]


def test_what_others_have_measured():
    """Half of their 16 cells within a tenth; at 50 Mbit/s their messages took a quarter longer than their link needs."""
    cells = json.loads((Path(__file__).parent / "authors" / "diloco_measured.json").read_text())
    gpt = model(30_846_720, 12)
    ratios = []
    for cell in cells:
        mine = utilization(gpt, diloco(cell["period"]), step=cell["step"], link=cell["link"], replicas=4)
        ratios.append(max(mine, cell["utilization"]) / min(mine, cell["utilization"]))
    assert len(cells) == 16
    assert statistics.median(ratios) <= 1.10
    assert max(ratios) <= 1.30


@settings(deadline=None, max_examples=30)
@given(
    share=st.floats(0.05, 0.98),
    algorithm=st.sampled_from(
        [AllReduce(), PowerSGD(2), diloco(20), diloco(20, fragments=4, overlap=3), diloco(20, eager=True)]
    ),
    replicas=st.integers(2, 9),
)
def test_a_link_is_the_inverse_of_a_utilization(share, algorithm, replicas):
    shape = model(1e6, 6)
    link = link_for(shape, algorithm, step=0.1, utilization=share, replicas=replicas)
    assert utilization(shape, algorithm, step=0.1, link=1.01 * link, replicas=replicas) >= share
    assert utilization(shape, algorithm, step=0.1, link=0.9 * link, replicas=replicas) <= share


def test_less_is_waited_for_what_is_smaller_later_and_nearer():
    shape = model(4e6, 8)

    def share(algorithm, **options):
        return utilization(shape, algorithm, **{"step": 0.05, "link": "100Mbit", "replicas": 8} | options)

    rising = [
        AllReduce(),
        PowerSGD(4),
        diloco(50),
        diloco(50, fragments=4),
        diloco(50, fragments=4, overlap=4),
        diloco(50, fragments=4, overlap=4, compressor=WireDtype(AllReduce(), "int4")),
    ]
    shares = [share(algorithm) for algorithm in rising]
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.1
    assert shares[-1] > 0.98
    assert share(AllReduce(), link=1e8) == share(AllReduce())
    assert share(AllReduce(), latency=0.01) < share(AllReduce())
    assert share(diloco(50, eager=True)) > share(diloco(50))
    assert share(TwoLevel(PowerSGD(4), within=4)) > 0.9 * share(PowerSGD(4))
    assert share(LocalSGD({4: 10, "all": 50})) > share(LocalSGD(10))


def test_a_message_that_a_step_cannot_hide_takes_its_time():
    """By hand: one layer, a ring of four sends 1.5 times the bytes; the step waits for all of it."""
    took = 1.5 * 4 * 1000 * 8 / 1e6
    assert utilization({"w": (1000,)}, LocalSGD(5), step=0.1, link=1e6, replicas=4) == pytest.approx(0.5 / (0.5 + took))
