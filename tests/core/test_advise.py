"""Fits of message times, predicted steps, and what is recommended."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gradwire import AllReduce, PowerSGD, Probe, Quantize, Sign, Spec, TopK, WireDtype, diloco
from gradwire.core.advise.advice import Advice, default_methods, name_of, weigh
from gradwire.core.advise.cost import Cost, Group, Round, ddp_buckets
from gradwire.core.advise.curve import Curve
from gradwire.core.advise.probe import ALL, BETWEEN, WITHIN, Level, measure, partition
from gradwire.core.advise.quality import Quality, quality_of
from gradwire.core.advise.timeline import Compute, predict
from gradwire.core.expressions import parse_algorithm
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.plan.memory import memory_bytes
from gradwire.core.plan.traffic import Message

SIZES = [1 << k for k in range(8, 27, 2)]
seconds = st.floats(1e-7, 1.0)
rates = st.floats(1e-12, 1e-6)


@given(seconds, rates)
def test_times_on_a_line_are_fitted_by_it(fixed, per_byte):
    curve = Curve.fitted([(n, fixed + per_byte * n) for n in SIZES])
    assert curve.error < 1e-6
    for n in SIZES:
        assert curve.fit(n) == pytest.approx(fixed + per_byte * n, rel=1e-6)
        assert curve.seconds(n) == pytest.approx(fixed + per_byte * n)


@given(st.lists(st.tuples(st.sampled_from(SIZES), seconds), min_size=1, max_size=20))
def test_any_times_have_a_fit_that_could_be_a_network(samples):
    curve = Curve.fitted(samples)
    assert curve.fixed >= 0
    assert curve.per_byte >= 0
    assert curve.fixed + curve.per_byte > 0
    times = [curve.seconds(n) for n in (0, 1, *SIZES, 1 << 30)]
    assert times == sorted(times)
    assert times[0] == 0


@given(seconds, rates, st.lists(st.floats(0.8, 1.25), min_size=len(SIZES), max_size=len(SIZES)), st.floats(1e-3, 1e3))
def test_a_fit_is_no_worse_than_the_truth_and_knows_no_unit(fixed, per_byte, noise, unit):
    truth = [fixed + per_byte * n for n in SIZES]
    measured = [t * factor for t, factor in zip(truth, noise, strict=True)]
    curve = Curve.fitted(list(zip(SIZES, measured, strict=True)))
    off = sum(((a - b) / b) ** 2 for a, b in zip(truth, measured, strict=True))
    assert sum(e**2 for e in curve.errors) <= off * (1 + 1e-6) + 1e-12
    slower = Curve.fitted([(n, unit * t) for n, t in zip(SIZES, measured, strict=True)])
    assert slower.fixed == pytest.approx(unit * curve.fixed, rel=1e-4, abs=1e-9 * unit)
    assert slower.per_byte == pytest.approx(unit * curve.per_byte, rel=1e-4, abs=1e-18 * unit)


def level(name=ALL, replicas=2, fixed=1e-3, per_byte=1e-8, overlap=1.0):
    curve = Curve.fitted([(n, fixed + per_byte * n) for n in (1, *SIZES)])
    return Level(name, replicas, curve, curve, overlap)


def network(overlap=1.0, **times):
    return Probe("torch", "cpu", 2, 2, (level(overlap=overlap, **times),))


def test_a_probe_says_alpha_and_beta_of_a_ring():
    four = level(replicas=4, fixed=6e-3, per_byte=1.5e-8)
    assert four.latency == pytest.approx(1e-3)
    assert four.bandwidth == pytest.approx(1e8)


def test_a_probe_is_plain_data(tmp_path, monkeypatch):
    levels = (level(), level(WITHIN), level(BETWEEN, fixed=0.01, per_byte=0.0))
    probe = Probe("torch", "cpu", 4, 2, levels)
    probe.save(tmp_path / "probe.json")
    assert str(Probe.load(tmp_path / "probe.json")) == str(probe)
    json.loads((tmp_path / "probe.json").read_text(), parse_constant=pytest.fail)  # no inf in it

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)  # before the new one has its name
    with pytest.raises(KeyboardInterrupt):
        network().save(tmp_path / "probe.json")
    assert str(Probe.load(tmp_path / "probe.json")) == str(probe)
    for broken in ("{", "{}", '{"levels": []}', "[1]"):
        (tmp_path / "broken.json").write_text(broken)
        with pytest.raises(ValueError, match="gradwire probe"):
            Probe.load(tmp_path / "broken.json")


class Imagined:
    """A network of two speeds."""

    def __init__(self):
        self.asked = []

    def all_reduce(self, nbytes, groups, repeats):
        self.asked.append((nbytes, groups))
        inside = groups is not None and groups[0] == (0, 1)
        return 1e-5 + nbytes / (1e10 if inside else 1e7)

    exchange = all_reduce

    def overlap(self, nbytes, groups):
        return 1.7


def test_levels_are_those_of_nodes():
    imagined = Imagined()
    probe = measure(imagined, "torch", "cpu", 6, 3)
    within, between = partition(6, 3)
    assert (within, between) == (((0, 1), (2, 3), (4, 5)), ((0, 2, 4), (1, 3, 5)))
    assert {groups for _, groups in imagined.asked} == {None, within, between}
    assert [(each.name, each.replicas) for each in probe.levels] == [(ALL, 6), (WITHIN, 2), (BETWEEN, 3)]
    assert probe.level(WITHIN).bandwidth == pytest.approx(1e10)
    assert all(each.overlap == 1 for each in probe.levels)
    # No message is sent that takes minutes.
    assert max(n for n, groups in imagined.asked if groups is None) < 20e6
    assert measure(Imagined(), "torch", "cpu", 6, 6).levels[0].name == ALL


def message(nbytes, **options):
    return Message(nbytes, exchange=False, **options)


def cost(*groups, **options):
    return Cost((tuple(groups),), **options)


EVEN = Compute(3.0)  # backward takes 2 seconds, and a byte of 100 is ready after 20 ms of it
SLOW = {"fixed": 1e-9, "per_byte": 0.01}  # a second for 100 bytes


def test_what_is_sent_at_the_end_is_waited_for():
    time = predict(cost(Group(100, (Round(0.5, (message(100),)), Round(0.25)))), EVEN, network(**SLOW), 100)
    assert time.compression == pytest.approx(0.75)
    assert time.exposed == pytest.approx(1.0, rel=1e-6)
    assert time.step == pytest.approx(4.75, rel=1e-6)


def test_what_is_sent_early_hides_under_backward():
    groups = [Group(n, (Round(0.0, (message(50),)), Round(0.0))) for n in (50, 100)]
    time = predict(cost(*groups), EVEN, network(**SLOW), 100)
    # The first takes half a second of the second that is left; the second begins when backward ends.
    assert time.exposed == pytest.approx(0.5, rel=1e-6)
    assert time.hidden == pytest.approx(0.5, rel=1e-6)
    assert predict(cost(*groups), EVEN, network(overlap=0.5, **SLOW), 100).exposed == pytest.approx(0.75, rel=1e-6)
    assert predict(cost(*groups, overlaps=False), EVEN, network(**SLOW), 100).exposed == pytest.approx(1.0, rel=1e-6)


def test_messages_wait_for_those_before_them():
    groups = [Group(n, (Round(0.0, (message(200),)), Round(0.0))) for n in (50, 100)]
    assert predict(cost(*groups), EVEN, network(**SLOW), 100).exposed == pytest.approx(3.0, rel=1e-6)


def test_what_is_computed_meanwhile_hides_a_message():
    one = Group(100, (Round(0.0, (message(100),), meanwhile=0.4), Round(0.0)))
    time = predict(cost(one), EVEN, network(**SLOW), 100)
    assert (time.compression, time.exposed) == (pytest.approx(0.4), pytest.approx(0.6, rel=1e-6))


def test_measured_arrivals_are_used():
    early = Compute(3.0, ((1.0, 90), (2.5, 100)))
    one = Group(90, (Round(0.0, (message(100),)), Round(0.0)))
    last = Group(100, (Round(0.0, ()), Round(0.0)))
    assert predict(cost(one, last), early, network(**SLOW), 100).exposed == pytest.approx(0, abs=1e-6)
    assert early.ready(50, 100) == pytest.approx(1.0)


def test_local_sgd_pays_once_in_a_period():
    average = Group(100, (Round(0.5, (message(100),)), Round(0.0)))
    time = predict(cost(average, every=10, overlaps=False), EVEN, network(**SLOW), 100)
    assert (time.compression, time.exposed) == (pytest.approx(0.05), pytest.approx(0.1, rel=1e-6))


def test_each_message_takes_the_link_of_its_level():
    within, between = partition(4, 2)
    levels = (level(per_byte=1e-2), level(WITHIN, per_byte=1e-5, fixed=1e-9), level(BETWEEN, per_byte=1e-3, fixed=1e-9))
    probe = Probe("torch", "cpu", 4, 2, levels)
    sent = Round(0.0, (message(100, groups=within), message(100, groups=between)))
    time = predict(cost(Group(100, (sent, Round(0.0)))), EVEN, probe, 100)
    assert time.exposed == pytest.approx(0.001 + 0.1, rel=1e-3)


@given(st.floats(0.0, 2.0), st.floats(0.0, 2.0), st.floats(0.0, 1.0), st.integers(1, 400), st.integers(1, 400))
def test_a_step_lies_between_all_hidden_and_nothing_hidden(before, after, overlap, first, second):
    rounds = [
        (Round(before, (message(first),)), Round(after)),
        (Round(before, (message(second),)), Round(after)),
    ]
    groups = [Group(50, rounds[0]), Group(100, rounds[1])]
    probe = network(overlap=overlap, **SLOW)
    time = predict(cost(*groups), EVEN, probe, 100)
    wire = sum(probe.levels[0].seconds(n, exchange=False) for n in (first, second))
    assert time.compression == pytest.approx(2 * (before + after))
    assert time.exposed + time.hidden == pytest.approx(wire)
    assert probe.levels[0].seconds(second, exchange=False) * (1 - 1e-9) <= time.exposed + 2 * after + 1e-9
    assert time.step >= EVEN.seconds + time.compression - 1e-9


SPECS = {"w": Spec((512, 512)), "b": Spec((512,))}
DENSE = AllReduce()


def advice_of(times, allowed=Quality.FEEDBACK):
    """Of methods that wait so long, on a step of a second."""
    costs = [
        (
            algorithm,
            cost(Group(100, (Round(computed, (message(max(1, round(100 * waited))),)), Round(0.0))), overlaps=False),
        )
        for algorithm, (computed, waited) in times.items()
    ]
    return weigh(costs, SPECS, network(fixed=1e-9, per_byte=0.01), Compute(1.0), allowed)


def test_the_fastest_is_recommended_with_its_reason():
    advice = advice_of({DENSE: (0, 5.0), PowerSGD(4): (0.2, 0.1), WireDtype(DENSE, "int8"): (0.1, 1.5)})
    assert advice.recommended == "PowerSGD(rank=4)"
    assert "6.0 s" in advice.reason
    assert "→ PowerSGD(rank=4)" in str(advice)
    assert "Take PowerSGD(rank=4): " in str(advice)


def test_an_advice_fits_the_screen():
    times = {DENSE: (0, 5.0), PowerSGD(4): (0.2, 0.5), WireDtype(DENSE, "bfloat16"): (0.1, 4.0), diloco(100): (0, 0.1)}
    advice = advice_of(times)
    narrow = advice.printed(80).splitlines()
    assert max(map(len, narrow)) <= 80
    (row,) = [i for i, line in enumerate(narrow) if line.strip() == "WireDtype(AllReduce(), 'bfloat16')"]
    wide = next(line for line in str(advice).splitlines() if "bfloat16" in line)
    compute = next(line for line in str(advice).splitlines() if line.startswith("  plain")).split()[3:5]
    assert narrow[row + 1].split() == wide.replace(" ".join(compute), "", 1).split()[2:]
    assert f"a step alone takes {' '.join(compute)}" in " ".join(narrow)
    assert advice.printed(200) == str(advice)


def test_of_equals_the_one_closest_to_plain_averages_is_recommended():
    advice = advice_of({DENSE: (0, 5.0), PowerSGD(4): (0.2, 0.0), WireDtype(DENSE, "int8"): (0.2, 0.03)})
    assert advice.recommended == "WireDtype(AllReduce(), 'int8')"
    assert "PowerSGD(rank=4) is as fast" in advice.reason


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ((0, 0.02), "there is nothing to gain"),
        ((0, 0.2), "no method of class 'feedback' or better is faster"),
        ((0, 0.16), "within 5 % of the fastest"),
    ],
)
def test_where_nothing_is_gained_plain_averages_stay(plain, said):
    other = (0.1, 0.02) if said.startswith("within") else (0.3, 0.1)
    advice = advice_of({DENSE: plain, PowerSGD(4): other})
    assert advice.recommended == "plain"
    assert said in advice.reason
    assert "Leave it: " in str(advice)


def test_quality_that_is_not_allowed_is_shown_and_not_recommended():
    times = {DENSE: (0, 5.0), PowerSGD(4): (0.2, 0.5), diloco(100): (0, 0.1)}
    assert advice_of(times).recommended == "PowerSGD(rank=4)"
    assert advice_of(times, Quality.LOCAL).recommended == "diloco(100)"
    assert advice_of(times, Quality.ROUNDED).recommended == "plain"
    assert advice_of(times).method("diloco(100)").quality == "local"


def test_an_advice_is_plain_data():
    advice = advice_of({DENSE: (0, 5.0), PowerSGD(4): (0.2, 0.1)})
    assert Advice.from_dict(json.loads(json.dumps(advice.as_dict()))) == advice
    with pytest.raises(ValueError, match=r"costs lack AllReduce\(\)"):
        advice_of({PowerSGD(4): (0.2, 0.1)})


@pytest.mark.parametrize(
    ("algorithm", "quality"),
    [
        (DENSE, "exact"),
        (WireDtype(DENSE, "bfloat16"), "rounded"),
        (WireDtype(DENSE, "int8"), "rounded"),
        (WireDtype(DENSE, "int4"), "lossy"),
        (Quantize("int4"), "feedback"),
        (PowerSGD(4), "feedback"),
        (WireDtype(PowerSGD(4), "bfloat16"), "feedback"),
        (PowerSGD(4, error_feedback=False), "lossy"),
        (TopK(64, error_feedback=0.95), "lossy"),
        (Sign(max_norm=1.0), "lossy"),
        (diloco(8), "local"),
    ],
)
def test_quality(algorithm, quality):
    assert quality_of(algorithm).label == quality


def test_names():
    assert name_of(DENSE) == "plain"
    assert name_of(diloco(8)) == "diloco(8)"
    others = [
        AllReduce(bucket_bytes=4),
        WireDtype(DENSE, "int8"),
        WireDtype(DENSE, "int8", block=64),
        diloco(8, lr=1.0),
    ]
    for algorithm in [*default_methods()[1:], *others]:
        assert parse_algorithm(name_of(algorithm)) == algorithm


def test_buckets_are_those_of_ddp():
    specs = {str(i): Spec((1 << 18,)) for i in range(60)}
    assert [len(bucket) for bucket in ddp_buckets(specs)] == [1, 25, 25, 9]
    assert ddp_buckets(specs)[0] == ["59"]


def test_memory_is_what_a_method_keeps():
    assert memory_bytes(DENSE, SPECS, 2) == 0
    assert memory_bytes(PowerSGD(4), SPECS, 2) == 4 * (512 * 512 + 512 * 4)
    assert memory_bytes(diloco(8), SPECS, 2) == 2 * 4 * (512 * 512 + 512)


def test_messages_are_those_of_the_plan():
    sent = [step.messages for step in dry_run(WireDtype(PowerSGD(4), "int8"), SPECS, world_size=4).cycle]
    assert len(sent) == 1
    assert all(each.exchange for each in sent[0] if each.nbytes > 2100)
    full, half = [step.messages for step in dry_run(PowerSGD(4, half_step=True), SPECS).cycle]
    assert [each.nbytes for each in (*full, *half)] == [4 * 512 * 4 + 2048] * 2
    assert not any(each.exchange for each in full)


@given(seconds)
def test_a_step_takes_time(step):
    assume(step > 0)
    assert Compute(step).ready(100, 100) == pytest.approx(step)
    with pytest.raises(ValueError, match="step_seconds"):
        Compute(-step)
