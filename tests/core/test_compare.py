"""What a comparison says of held-out losses, and from when on."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire import AllReduce, Comparison, LocalSGD, PowerSGD, Quantize, Spec, TopK, diloco
from gradwire.cli.compare import Network
from gradwire.core.advise.advice import name_of
from gradwire.core.advise.compare.runs import Run, Runs
from gradwire.core.advise.compare.schedule import OUTER_STEPS, doubts, evaluated_at, ready_at, warm_up
from gradwire.core.advise.compare.verdicts import margin, quantile, verdict
from gradwire.core.algorithms.shared.views import StackedShape

LOCAL = [LocalSGD(7), LocalSGD({2: 2, 4: 6}, start_step=5), diloco(9, fragments=3), diloco(9, fragments=3, overlap=2)]


@given(st.floats(1, 1e4))
def test_the_quantile_is_students(freedom):
    stats = pytest.importorskip("scipy.stats")
    assert quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=2e-3)


@pytest.mark.parametrize(("over_seeds", "over_windows"), [(0.0, 1.0), (1.0, 0.0), (0.3, 1.0), (1.0, 1.0)])
def test_intervals_hold_the_true_difference_as_often_as_they_say(over_seeds, over_windows):
    """Of other seeds and other windows, drawn some hundred times."""
    random = np.random.default_rng(0)
    seeds, windows, held = 3, 20, []
    for _ in range(200):
        drawn = over_seeds * random.standard_normal((seeds, 1)) + over_windows * random.standard_normal((1, windows))
        drawn = drawn + 0.3 * random.standard_normal((seeds, windows))
        held.append(abs(drawn.mean()) <= margin(drawn))
    assert 0.91 <= np.mean(held) <= 0.99


TWO, TENTH = [[2.0, 2.0]] * 2, [[2.2, 2.2]]
SAYS = [
    (TWO, TENTH * 2, "worse by 10.00 % ± 0.00 at step 4, 2 seeds"),
    # Means of 10 and 12 %: a standard error of 1 %, and Student's t of one degree of freedom is 12.7.
    (TWO, [*TENTH, [2.24, 2.24]], "not told apart (+11.0 % ± 12.7) at step 4, 2 seeds"),
    (TWO, [[1.4, 1.4], [1.44, 1.44]], "better by 29.0 % ± 12.7 at step 4, 2 seeds"),
    ([[2.0, 2.2]] * 2, [[2.0, 2.2]] * 2, "not told apart (+0.00 % ± 0.00) at step 4, 2 seeds"),
    # Windows and seeds are paired.
    ([[2.0, 4.0], [3.0, 5.0]], [[2.2, 4.2], [3.2, 5.2]], "worse by 5.71 % ± 0.00 at step 4, 2 seeds"),
    ([[2.0, 2.0], [3.0, 3.0]], [*TENTH, [2.9, 2.9]], "not told apart"),
    ([[2.0, 2.0]], TENTH, "+10.0 %, no interval, at step 4, 1 seed"),
    (TWO, [[2.2, math.nan]] * 2, "diverges"),
]


@pytest.mark.parametrize(("plain", "method", "says"), SAYS)
def test_what_a_verdict_says(plain, method, says):
    assert str(verdict(4, plain, method)).startswith(says)
    for unpaired in (method[1:], [windows[1:] for windows in method]):
        with pytest.raises(ValueError, match="pairs"):
            verdict(4, plain, unpaired)


@given(steps=st.integers(1, 200), algorithm=st.sampled_from([AllReduce(), PowerSGD(4), *LOCAL]))
def test_replicas_that_train_by_themselves_are_evaluated_after_an_average(steps, algorithm):
    looks = evaluated_at(algorithm, 4, steps)
    assert looks == sorted(set(looks))
    assert all(1 <= n <= steps for n in looks)
    assert len(looks) <= 10
    if not isinstance(algorithm, LocalSGD):
        assert looks[-1] == steps
        return
    period = algorithm.levels(4)[0].period
    for n in looks:
        sent = n - 1 - algorithm.overlap
        assert n <= algorithm.start_step or algorithm.due(sent, period, algorithm.fragments - 1)
    ready = ready_at(algorithm, 4)
    averages = sum(bool(algorithm.due(t, period, algorithm.fragments - 1)) for t in range(ready - algorithm.overlap))
    assert averages == OUTER_STEPS
    assert steps < ready or looks[-1] >= ready


DOUBTS = [
    (PowerSGD(4), []),
    (PowerSGD(4, start_step=60), ["60"]),
    (PowerSGD(4, start_step=100), ["begins"]),
    (LocalSGD(33), []),
    (LocalSGD(34), ["--steps 102"]),
    (TopK(8), ["rate"]),
    (diloco(10, compressor=TopK(8)), ["rate"]),
    (diloco(10, compressor=Quantize("int2")), ["rate"]),
    (diloco(10, compressor=Quantize("int4")), []),
    (Quantize("int2"), []),
]


@pytest.mark.parametrize(("algorithm", "said"), DOUBTS)
def test_doubts(algorithm, said):
    found = doubts(algorithm, 4, 100)
    assert len(found) == len(said)
    assert all(word in each for word, each in zip(said, found, strict=True))
    assert doubts(algorithm, 4, 100, searched=True) == [each for each in found if "rate" not in each]


def runs_of(*methods, seeds=(0, 1), steps=100, rates=(1.0,), worse=0.1, specs=None):
    runs = Runs("a:make", 4, steps)
    for seed in seeds:
        for i, method in enumerate(methods):
            held_out = {n: [3 + seed + i * worse, 2 + seed + i * worse] for n in evaluated_at(method, 4, steps)}
            if method == AllReduce():
                held_out |= {n: [3.0 + seed, 2.0 + seed] for n in range(1, steps + 1)}
            runs.add(Run(name_of(method), seed, [1.0], held_out, rates, 1e6, specs=specs or {}))
    return runs


def test_verdicts_are_about_what_both_have_run():
    methods = [PowerSGD(4), LocalSGD(33), LocalSGD(34)]
    runs = runs_of(AllReduce(), *methods)
    steps, losses = Comparison(runs, methods).curves()["PowerSGD(rank=4)"]  # which are means
    assert (steps, losses) == (list(range(10, 101, 10)), pytest.approx([3.1] * 10))
    del runs.done["PowerSGD(rank=4)", 1, 1.0]
    found = [Comparison(runs, methods).verdict(method) for method in [*methods, TopK(4)]]
    assert (found[0].seeds, found[0].margin) == (1, None)
    assert (found[1].step, found[1].seeds, found[1].difference) == (99, 2, pytest.approx(0.2 / 3))
    assert found[2].step is found[3].step is None


def test_losses_have_times_over_a_link(tmp_path):
    """A ring sends 6/4 of a message of 4 MB, which the next forward pass of its only layer waits for: 48 ms at 1 Gbit/s, besides 6 hops for each message."""
    methods = [PowerSGD(4), LocalSGD(33), TopK(4)]
    specs = {"w": Spec(StackedShape((10, 100, 1000), 1))}
    runs_of(AllReduce(), *methods[:2], specs=specs).save(tmp_path / "c.json")
    comparison = Comparison(Runs.load(tmp_path / "c.json"), methods)
    assert comparison.runs.specs == specs
    assert comparison.runs.specs["w"].shape.stacked == 1  # so factors are those of ten matrices
    found = comparison.seconds(step=0.1, link="1Gbit", latency=1e-4)
    ring = {
        "plain": 0.048 + 6e-4,
        "PowerSGD(rank=4)": 1.5 * 10 * 1100 * 4 * 4 / 125e6 + 12e-4,
        "LocalSGD(period=33)": (0.048 + 6e-4) / 33,
    }
    assert found == pytest.approx({name: 0.1 + waits for name, waits in ring.items()})  # nobody has run TopK
    assert Network(0.1, 125e6, 1e-4, "").curves(comparison)["plain"][0][-1] == pytest.approx(100 * found["plain"])


#: Of two methods the losses of windows 0 and 2, which choose the rate, and of 1 and 3, which make the verdict, by factor.
SEARCHED = {
    AllReduce(): {0.5: (2.0, 9.0), 1.0: (1.0, 4.0), 2.0: (3.0, 1.0)},
    PowerSGD(4): {0.5: (4.0, 1.0), 1.0: (3.0, 9.0), 2.0: (2.0, 5.0)},
    TopK(8): {0.5: (2.0, 1.0), 1.0: (math.nan, 9.0), 2.0: (2.5, 5.0)},
}


def searched_runs():
    runs = Runs("a:make", 4, 100, (0.5, 1.0, 2.0))
    for method, by_factor in SEARCHED.items():
        for factor, (search, last) in by_factor.items():
            held_out = {10: [0.0, 0.0, 0.0, 0.0], 100: [search, last, search, last]}
            runs.add(Run(name_of(method), 0, [1.0], held_out, [], 1e6, factor))
    for seed in (1, 2):
        for method, factor in ((AllReduce(), 1.0), (PowerSGD(4), 2.0)):
            last = SEARCHED[method][factor][1]
            runs.add(Run(name_of(method), seed, [1.0], {100: [9.0, last + seed, 9.0, last + seed]}, [], 1e6, factor))
    return runs


def test_rates_are_searched_on_other_windows_than_verdicts_are_about(tmp_path):
    methods = [PowerSGD(4), TopK(8)]
    searched_runs().save(tmp_path / "c.json")
    comparison = Comparison(Runs.load(tmp_path / "c.json"), methods)
    assert [comparison.factor(method) for method in SEARCHED] == [1.0, 2.0, 0.5]
    found = comparison.verdict(PowerSGD(4))
    assert (found.loss, found.seeds) == (6.0, 3)
    assert found.difference == pytest.approx(1 / 5)
    told = comparison.as_dict()
    assert (told["PowerSGD(rank=4)"]["rate"], told["plain"]["rate"]) == (2.0, 1.0)
    assert told["TopK(keep=8)"]["tried"] == {"0.5": 2.0, "1": None, "2": 2.5}
    printed = str(comparison)
    assert max(map(len, printed.splitlines())) <= 80
    words = printed.split()
    assert (words.count("×1"), words.count("×2"), words.count("×0.5")) == (1, 1, 1)
    notes = comparison.notes()
    assert len(notes) == 2
    assert "--rates 0.25 0.5 1 2 (for TopK(keep=8))" in notes[0]
    assert "--rates 0.5 1 2 4 (for PowerSGD(rank=4))" in notes[1]


def test_nothing_is_said_before_all_rates_were_tried():
    runs = searched_runs()
    del runs.done["PowerSGD(rank=4)", 0, 0.5]
    comparison = Comparison(runs, [PowerSGD(4)])
    assert comparison.factor(PowerSGD(4)) is comparison.verdict(PowerSGD(4)).step is None
    assert "not run" in str(comparison)
    del runs.done["plain", 0, 0.5]
    assert "plain" in str(comparison)
    assert comparison.seeds == []


def test_a_table_fits_80_characters_and_names_what_a_reader_has_to_know():
    methods = [PowerSGD(4), TopK(8, per=(16, 16)), LocalSGD(34), diloco(10)]
    printed = str(Comparison(runs_of(AllReduce(), *methods[:3], rates=[1.0] * 60 + [2.0] * 40), methods))
    assert max(map(len, printed.splitlines())) <= 80
    for said in (
        "4 replicas, 100 steps, 2 seeds",
        "worse by",
        "no verdict",
        "not run",
        "--steps 120",
        "--steps 102",
        "1.0 MB",
    ):
        assert said in printed
    assert not Comparison(runs_of(AllReduce(), rates=[1.0] * 49 + [2.0] * 51), []).notes()
    # The warm-up is what the rate rises.
    rates = {0: ([], [1.0, 1.0, 0.5]), 2: ([0.1, 0.2, 0.3, 0.3, 0.2], [0.1, 0.2, 0.3])}
    assert all(warm_up(each) == steps for steps, several in rates.items() for each in several)


def test_a_comparison_goes_on_from_its_file(tmp_path):
    file, runs = tmp_path / "c.json", runs_of(AllReduce(), PowerSGD(4))
    assert Runs("a:make", 4, 100).continued(file).done == {}
    runs.save(file)
    found = Runs("a:make", 4, 100).continued(file)
    told = Comparison(found, [PowerSGD(4)]).as_dict()
    assert json.loads(json.dumps(told)) == told == Comparison(runs, [PowerSGD(4)]).as_dict()
    asked = [(1, 1.0, [10, 100]), (1, 1.0, [11]), (2, 1.0, [10]), (1, 2.0, [10])]
    assert [found.has("PowerSGD(rank=4)", *what) for what in asked] == [True, False, False, False]
    assert Runs("a:make", 4, 100, (1.0, 2.0)).continued(file).factors == (1.0, 2.0)
    for other in (Runs("b:make", 4, 100), Runs("a:make", 3, 100), Runs("a:make", 4, 99)):
        with pytest.raises(ValueError, match="another file"):
            other.continued(file)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}', '{"format": "gradwire comparison 1"}', "null"])
def test_what_is_no_comparison_is_refused(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match=r"c\.json"):
        Runs.load(tmp_path / "c.json")
