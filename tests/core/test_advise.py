"""What a probe says of a network, predicted steps, what a comparison says of held-out losses, and
what is recommended."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire import (
    AllReduce,
    Comparison,
    LocalSGD,
    PowerSGD,
    Probe,
    Quantize,
    Sign,
    Spec,
    TopK,
    TwoLevel,
    WireDtype,
    diloco,
)
from gradwire.cli.compare import Network
from gradwire.core.advise.advice import default_methods, name_of, predict, weigh
from gradwire.core.advise.compare.fingerprint import Fingerprint
from gradwire.core.advise.compare.runs import Run, Runs, described
from gradwire.core.advise.compare.schedule import (
    OUTER_STEPS,
    doubts,
    evaluated_at,
    ready_at,
    warm_up,
)
from gradwire.core.advise.compare.verdicts import margin, quantile, verdict
from gradwire.core.advise.cost import Cost, cost_of
from gradwire.core.advise.losses import LIMITS, known_losses, limits_of, only_rounds
from gradwire.core.advise.probe import ALL, BETWEEN, WITHIN, Level, measure, partition
from gradwire.core.advise.timeline import Compute, Group
from gradwire.core.algorithms.shared.views import StackedShape
from gradwire.core.buckets.assignment import ddp_buckets
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.plan.expressions import parse_algorithm
from gradwire.core.plan.local_sgd import memory_bytes
from gradwire.core.plan.traffic import Message
from tests.methods import EVERY, METHODS

SIZES = [1 << k for k in range(8, 27, 2)]
DENSE, INT8 = AllReduce(), WireDtype(AllReduce(), "int8")
TWO_LEVELS = TwoLevel(DENSE, within=2)
times = st.floats(1e-7, 1.0)


def level(name=ALL, replicas=2, fixed=1e-3, per_byte=1e-8, overlap=1.0):
    samples = tuple((n, fixed + per_byte * n) for n in (1, *SIZES))
    return Level(name, replicas, samples, samples, overlap)


def network(overlap=1.0, **of):
    return Probe("torch", "cpu", 2, 2, (level(overlap=overlap, **of),))


@given(times, st.floats(1e-12, 1e-6), st.floats(1, 1 << 26))
def test_times_on_a_line_stay_on_it(fixed, per_byte, nbytes):
    found = level(fixed=fixed, per_byte=per_byte).seconds(nbytes, exchange=True)
    assert found == pytest.approx(fixed + per_byte * nbytes)
    # α and β of a ring of four.
    four = level(replicas=4, fixed=6e-3, per_byte=1.5e-8)
    assert four.latency == pytest.approx(1e-3, rel=1e-3)
    assert four.bandwidth == pytest.approx(1e8, rel=1e-2)


@given(
    st.lists(
        st.tuples(st.sampled_from(SIZES), times),
        min_size=1,
        max_size=20,
        unique_by=lambda sample: sample[0],
    )
)
def test_a_larger_message_never_takes_less(samples):
    found = Level(ALL, 2, tuple(sorted(samples)), ((1, 1.0),), 1.0)
    seconds = [found.seconds(n, exchange=False) for n in (0, 1, *SIZES, 1 << 30, 1 << 31)]
    assert seconds == sorted(seconds)
    assert seconds[0] == 0
    # beyond what was measured it grows in proportion
    assert seconds[-1] == pytest.approx(2 * seconds[-2])


def test_a_probe_is_plain_data(tmp_path, monkeypatch):
    probe = Probe(
        "torch", "cpu", 4, 2, (level(), level(WITHIN), level(BETWEEN, fixed=0.01, per_byte=0.0))
    )
    probe.save(tmp_path / "probe.json")
    assert Probe.load(tmp_path / "probe.json") == probe

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)  # before the new one has its name
    with pytest.raises(KeyboardInterrupt):
        network().save(tmp_path / "probe.json")
    assert Probe.load(tmp_path / "probe.json") == probe


class Imagined:
    """A network of two speeds, half of whose messages hide behind products that take a millisecond
    each."""

    def __init__(self):
        self.asked = set()

    def __call__(self, nbytes, groups, *, exchange=False, products=0, repeats=1):
        self.asked.add((nbytes, groups))
        inside = groups is not None and groups[0] == (0, 1)
        sent = nbytes and 1e-5 + nbytes / (1e10 if inside else 1e7)
        computed = products * 1e-3
        return sent + computed - min(sent, computed) / 2


def test_levels_are_those_of_nodes():
    imagined = Imagined()
    probe = measure(imagined, "torch", "cpu", 6, 3)
    within, between = partition(6, 3)
    assert (within, between) == (((0, 1), (2, 3), (4, 5)), ((0, 2, 4), (1, 3, 5)))
    assert {groups for _, groups in imagined.asked} == {None, within, between}
    assert [(each.name, each.replicas) for each in probe.levels] == [
        (ALL, 6),
        (WITHIN, 2),
        (BETWEEN, 3),
    ]
    assert probe.level(WITHIN).bandwidth == pytest.approx(1e10, rel=0.01)
    assert probe.level(ALL).overlap == pytest.approx(0.5)
    # No message is sent that takes minutes.
    assert max(n for n, groups in imagined.asked if groups is None) < 20e6
    assert measure(Imagined(), "torch", "cpu", 6, 6).levels[0].name == ALL


def message(nbytes, **options):
    return Message(nbytes, **options)


EVEN = Compute(3.0)  # backward takes 2 seconds, and a byte of 100 is ready after 20 ms of it
SLOW = {"fixed": 1e-9, "per_byte": 0.01}  # a second for 100 bytes


def waits(*groups, compute=EVEN, overlap=1.0, **options):
    """Seconds for which a step waits, and those that hide."""
    found = predict(
        DENSE, Cost((groups,), **options), compute, network(overlap=overlap, **SLOW), 100
    )
    assert found.step == pytest.approx(found.compute + found.compression + found.exposed)
    return pytest.approx(found.exposed, rel=1e-6, abs=1e-6), pytest.approx(
        found.hidden, rel=1e-6, abs=1e-6
    )


def test_what_a_step_waits_for():
    assert waits(Group(100, 0.5, (message(100),))) == (1.0, 0)
    # the second when the first has arrived
    assert waits(Group(100, 0.5, (message(100), message(50)))) == (1.5, 0)
    # What is sent early hides under backward: the first takes half a second of the second that is
    # left; the other begins when backward ends.
    groups = [Group(n, 0.0, (message(50),)) for n in (50, 100)]
    assert waits(*groups) == (0.5, 0.5)
    assert waits(*groups, overlap=0.5) == (0.75, 0.25)
    assert waits(*groups, overlaps=False) == (1.0, 0)
    # A second message leaves when backward is over.
    assert waits(Group(50, 0.0, (message(50), message(50))), Group(100, 0.0)) == (0.5, 0.5)
    # Messages wait for those before them.
    assert waits(*(Group(n, 0.0, (message(200),)) for n in (50, 100))) == (3.0, 1.0)
    # Measured arrivals are used, and local SGD pays once in a period.
    early = Compute(3.0, ((1.0, 90), (2.5, 100)))
    assert waits(Group(90, 0.0, (message(100),)), Group(100, 0.0), compute=early) == (0, 1.0)
    assert early.ready(50, 100) == pytest.approx(1.0)
    assert waits(Group(100, 0.5, (message(100),)), every=10, overlaps=False) == (0.1, 0)


def test_each_message_takes_the_link_of_its_level():
    within, between = partition(4, 2)
    levels = (
        level(per_byte=1e-2),
        level(WITHIN, per_byte=1e-5, fixed=1e-9),
        level(BETWEEN, per_byte=1e-3, fixed=1e-9),
    )
    sent = (message(100, groups=within), message(100, groups=between))
    found = predict(
        DENSE, Cost(((Group(100, 0.0, sent),),)), EVEN, Probe("torch", "cpu", 4, 2, levels), 100
    )
    assert found.exposed == pytest.approx(0.001 + 0.1, rel=1e-3)


@given(st.floats(0.0, 2.0), st.floats(0.0, 1.0), st.integers(1, 400), st.integers(1, 400))
def test_a_step_lies_between_all_hidden_and_nothing_hidden(computed, overlap, first, second):
    groups = (Group(50, computed, (message(first),)), Group(100, computed, (message(second),)))
    probe = network(overlap=overlap, **SLOW)
    found = predict(DENSE, Cost((groups,)), EVEN, probe, 100)
    wire = sum(probe.levels[0].seconds(n, exchange=False) for n in (first, second))
    assert found.compression == pytest.approx(2 * computed)
    assert found.exposed + found.hidden == pytest.approx(wire)
    assert probe.levels[0].seconds(second, exchange=False) * (1 - 1e-9) <= found.exposed + 1e-9


SPECS = {"w": Spec((512, 512)), "b": Spec((512,))}
TABLE = SPECS | {
    "conv": Spec((64, 32, 3, 3)),
    "tall": Spec((512, 64)),
    "stack": Spec((4, 64, 64)),
    "heads": Spec((64, 4, 32)),
}
PARTS = {"fragments": 4, "layout": "size"}
LATE = [
    diloco(8, overlap=3),
    diloco(8, eager=True),
    diloco(8, overlap=5, **PARTS),
    diloco(8, eager=True, **PARTS),
]
HALF = PowerSGD(2, half_step=True)
LATE += [
    diloco(8, overlap=3, compressor=method) for method in (INT8, HALF, PowerSGD(2, start_step=2))
]
SCHEDULES = [LocalSGD(4), diloco(4, compressor=PowerSGD(2)), diloco(4, **PARTS), *LATE]
IN_GROUPS = [
    LocalSGD({2: 2, "all": 8}),
    LocalSGD(4, subgroup=2),
    diloco({2: 2, "all": 8}, overlap=3),
]
#: Methods that name no parameters.
ANYWHERE = [
    m.algorithm for name, m in METHODS.items() if not name.startswith(("rank_by_name", "views"))
]


@pytest.mark.parametrize(
    "algorithm", [*(m.algorithm for m in EVERY.values()), *SCHEDULES, *IN_GROUPS], ids=repr
)
def test_what_is_sent_is_what_the_plan_says(algorithm):
    groups = [["b"], [name for name in TABLE if name != "b"]]
    cost = cost_of(
        algorithm, TABLE, 4, lambda specs: [0.5] * getattr(algorithm, "cycle", 1), groups
    )
    planned = gw.plan(TABLE, algorithm, world_size=4)
    sent = cost.per_step(sum(message.nbytes for message in cost.messages))
    assert sent == pytest.approx(planned.wire_bytes, rel=0.01)
    assert cost.memory_bytes == memory_bytes(algorithm, TABLE, 4)
    local = isinstance(algorithm, LocalSGD)
    assert (cost.every, cost.overlaps) == ((algorithm.cycle, False) if local else (1, True))
    assert local or [group.ready for group in cost.steps[0]] == [2048, planned.dense_bytes]


@pytest.mark.parametrize("rate", [1e4, 1e7, 1e8])
@pytest.mark.parametrize("algorithm", [*ANYWHERE, *SCHEDULES], ids=repr)
def test_what_is_waited_for_is_what_the_plan_says(algorithm, rate):
    """Of a model of one layer, where nothing overlaps but what may be late, on a network that does
    what it is told: messages hide behind that, and no more."""
    specs, step = {f"layer0.{name}": Spec((512, 128)) for name in "abcd"}, 0.01
    cost = cost_of(algorithm, specs, 4, lambda specs: [0.0] * getattr(algorithm, "cycle", 1))
    probe = Probe("torch", "cpu", 4, 4, (level(replicas=4, fixed=1e-15, per_byte=1.5 / rate),))
    found = predict(algorithm, cost, Compute(step), probe, 1 << 20)
    share = gw.utilization(specs, algorithm, step=step, link=8 * rate, replicas=4)
    assert found.exposed == pytest.approx(step / share - step, rel=1e-3, abs=1e-9)
    planned = gw.plan(specs, algorithm, world_size=4).seconds(4, 0, rate)
    assert found.exposed + found.hidden == pytest.approx(planned, rel=1e-3)


def test_groups_of_the_same_shapes_are_measured_once_in_buckets_of_ddp():
    specs, asked = {str(i): Spec((512, 512)) for i in range(4)}, []
    cost = cost_of(
        DENSE, specs, 2, lambda own: asked.append(own) or [0.5], [[name] for name in specs]
    )
    assert (len(asked), cost.compute) == (1, 2.0)
    buckets = ddp_buckets({str(i): Spec((1 << 18,)) for i in range(60)})
    assert [len(bucket) for bucket in buckets] == [1, 25, 25, 9]
    assert buckets[0] == ["59"]


def test_messages_of_a_dry_run():
    (sent,) = [
        step.messages for step in dry_run(WireDtype(PowerSGD(4), "int8"), SPECS, world_size=4).cycle
    ]
    assert all(each.pattern != "all_reduce" for each in sent if each.nbytes > 2100)
    full, half = [step.messages for step in dry_run(PowerSGD(4, half_step=True), SPECS).cycle]
    assert [each.nbytes for each in (*full, *half)] == [4 * 512 * 4 + 2048] * 2
    assert all(each.pattern == "all_reduce" for each in full)


#: Nobody has measured its loss.
FASTER = diloco(100, momentum=0.8)


def advice_of(methods, *limits, losses=None):
    """Of methods that compute and wait so long, on a step of a second."""
    costs = [
        (
            algorithm,
            Cost(
                ((Group(100, computed, (message(max(1, round(100 * waited))),)),),), overlaps=False
            ),
        )
        for algorithm, (computed, waited) in methods.items()
    ]
    return weigh(
        costs, SPECS, network(fixed=1e-9, per_byte=0.01), Compute(1.0), limits or LIMITS, losses
    )


def test_the_fastest_is_recommended_with_its_reason_on_one_screen():
    rounded = WireDtype(DENSE, "bfloat16")
    long = diloco(100, momentum=0.8, fragments=3, overlap=5, compressor=WireDtype(DENSE, "e3m0"))
    methods = {DENSE: (0, 5.0), PowerSGD(4): (0.2, 0.5), rounded: (0.1, 4.0), long: (0, 0.1)}
    advice = advice_of(methods, 0.1)
    assert advice.recommended == "PowerSGD(rank=4)"
    assert len(advice.methods[-1].algorithm) > 80
    assert "6.0 s" in advice.reason
    assert json.loads(json.dumps(advice.as_dict()))["methods"][0]["step"] == pytest.approx(6)
    lines = str(advice).splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = [
        i for i, line in enumerate(lines) if line.strip() == "WireDtype(AllReduce(), 'bfloat16')"
    ]
    assert lines[row + 1].split() == [
        "5.1",
        "s",
        "100",
        "ms",
        "4.0",
        "s",
        "0",
        "400",
        "bytes",
        "0",
        "bytes",
        "0",
        "by",
        "kind",
    ]
    assert any(line.startswith("→ PowerSGD(rank=4)") for line in lines)
    assert "Take PowerSGD(rank=4): " in " ".join(lines)
    assert "a step alone takes 1.0 s" in " ".join(lines)
    # What costs too much is shown and not recommended, and so is what nobody has measured.
    assert advice.methods[-1].loss is None
    assert advice_of({DENSE: (0, 5.0), PowerSGD(4): (0.2, 0.5)}, 0.03).recommended == "plain"
    three = advice_of(methods, 0.005, 0.02, 0.06)
    assert [choice.recommended for choice in three.choices] == [
        name_of(rounded),
        name_of(rounded),
        "PowerSGD(rank=4)",
    ]
    assert "Within 2 %: the same." in str(three)
    assert "Within 6 % of the loss take PowerSGD(rank=4): " in " ".join(str(three).split())
    with pytest.raises(ValueError, match=r"AllReduce\(\)"):
        advice_of({PowerSGD(4): (0.2, 0.1)})


@pytest.mark.parametrize(
    ("methods", "recommended", "said"),
    [
        ({DENSE: (0, 0.02), PowerSGD(4): (0.3, 0.1)}, "plain", "nothing to gain"),
        (
            {DENSE: (0, 0.2), PowerSGD(4): (0.3, 0.1)},
            "plain",
            "no method whose loss is surely within 10 %",
        ),
        ({DENSE: (0, 0.16), PowerSGD(4): (0.1, 0.02)}, "plain", "within 5 %"),
        # What is quicker and left out for its loss is named: it is not the links that speak against it.
        (
            {DENSE: (0, 5.0), FASTER: (0, 0.1)},
            "plain",
            f"wait 5.0 s of 6.0 s. {name_of(FASTER)} would take 1.1 s, but nobody has measured",
        ),
        (
            {DENSE: (0, 5.0), INT8: (6.0, 0), FASTER: (0, 0.1)},
            "plain",
            "; the others save less than",
        ),
        (
            {DENSE: (0, 5.0), INT8: (6.0, 0), FASTER: (0, 0.1)},
            "plain",
            f"messages. {name_of(FASTER)} would",
        ),
        ({DENSE: (0, 5.0), TWO_LEVELS: (0, 0.5)}, name_of(TWO_LEVELS), "only rounds"),
        # Of equals the one that is closest to uncompressed averages.
        (
            {DENSE: (0, 5.0), PowerSGD(4): (0.2, 0.0), INT8: (0.2, 0.03)},
            name_of(INT8),
            "PowerSGD(rank=4) is as fast",
        ),
    ],
)
def test_where_nothing_is_gained_plain_averages_stay(methods, recommended, said):
    advice = advice_of(methods, 0.1)
    assert advice.recommended == recommended
    assert said in advice.reason
    assert ("Leave it: " in str(advice)) == (recommended == "plain")


ROUNDS = [
    DENSE,
    WireDtype(DENSE, "bfloat16"),
    INT8,
    Quantize("int8"),
    TwoLevel(INT8, 2),
    WireDtype(TWO_LEVELS, "int8"),
]
LOSES = [
    Quantize("int4"),
    WireDtype(DENSE, "int4"),
    PowerSGD(4),
    WireDtype(PowerSGD(4), "bfloat16"),
    Sign(),
    diloco(8),
]


def test_losses_by_kind_and_by_measure_and_names():
    assert all(map(only_rounds, ROUNDS))
    assert not any(map(only_rounds, LOSES))
    methods = {name_of(method): method for method in [*ROUNDS, *LOSES, TwoLevel(PowerSGD(4), 2)]}
    found = known_losses(methods).methods
    assert all(str(found[name_of(method)]) == "0 by kind" for method in ROUNDS)
    # As in the table of docs/frontier.md; nodes do not matter; nobody has trained the last.
    four = found["PowerSGD(rank=4)"]
    assert 0.03 < four.difference < four.bound < 0.07
    assert found[name_of(TwoLevel(PowerSGD(4), 2))] == four
    assert str(four) == f"{100 * four.difference:+.1f}≤{100 * four.bound:.1f} %"
    assert "diloco(8)" not in found
    measured = set(known_losses({name_of(method): method for method in default_methods()}).methods)
    assert len(measured) >= len(default_methods()) - 3


@pytest.mark.parametrize(
    ("asked", "limits"),
    [("1%", (0.01,)), (0.01, (0.01,)), (" 2.5 % ", (0.025,)), (0, (0.0,)), ("150%", (1.5,))],
)
def test_a_limit_is_a_share(asked, limits):
    assert limits_of(asked) == pytest.approx(limits)


@pytest.mark.parametrize("asked", ["best", "2", 1, -0.1, "-1%", "nan", "nan%", "inf%", True, [0.1]])
def test_what_is_no_share_is_refused(asked):
    with pytest.raises(ValueError, match="such as '1%' or"):
        limits_of(asked)


def test_names():
    assert [name_of(DENSE), name_of(diloco(8))] == ["plain", "diloco(8)"]
    others = [AllReduce(bucket_bytes=4), WireDtype(DENSE, "int8", block=64), diloco(8, lr=1.0)]
    for algorithm in [*default_methods()[1:], *others]:
        assert parse_algorithm(name_of(algorithm)) == algorithm


def compared(algorithms, losses, model=SPECS, replicas=2, factors=(1.0,)):
    """A comparison whose methods have these losses of windows with seed 0, and a little more with
    seed 1."""
    runs = Runs("some:make", replicas, 50, factors)
    for algorithm, held_out in zip([DENSE, *algorithms], losses, strict=True):
        for seed in (0, 1):
            windows = [loss + 0.001 * seed for loss in held_out]
            runs.add(
                Run(name_of(algorithm), seed, [1.0], {50: windows}, [], 1.0, factors[0], model)
            )
    return Comparison(runs, algorithms)


METHODS_BY_LOSS = {DENSE: (0, 5.0), PowerSGD(4): (0.2, 0.5), Sign(): (0.1, 0.5)} | {
    diloco(10): (0, 0.1),
    TopK(8): (0, 0.0),
}
#: Worse by 1, 0.5 and 10 %; nothing is known of TopK.
LOSSES = ([2.0, 2.0], [2.02, 2.02], [2.01, 2.01], [2.2, 2.2])


def weighed(worse, losses=LOSSES, methods=METHODS_BY_LOSS, factors=(1.0,)):
    found = compared([PowerSGD(4), Sign(), diloco(10)], losses, factors=factors).losses(SPECS, 2)
    return advice_of(methods, worse, losses=found)


@pytest.mark.parametrize(
    ("worse", "chosen"), [(0.2, "diloco(10)"), (0.02, "Sign()"), (0.002, "plain")]
)
def test_losses_of_ones_own_are_weighed(worse, chosen):
    advice = weighed(worse)
    assert advice.recommended == chosen
    printed = str(advice)
    assert max(map(len, printed.splitlines())) <= 80
    assert "some:make, 50 steps, 2 seeds" in " ".join(printed.split())
    assert "unknown" in printed.split()
    assert (
        chosen == "plain"
        or f"at most {100 * advice.method(chosen).loss.bound:+.1f}" in advice.reason
    )
    told = json.loads(json.dumps(advice.as_dict()))["methods"]
    differences = [method["loss"] and round(method["loss"]["difference"], 3) for method in told]
    assert differences == [None, 0.01, 0.005, 0.1, None]


def test_of_equals_the_one_of_least_loss_is_recommended():
    equal = METHODS_BY_LOSS | {PowerSGD(4): (0.1, 0.48)}
    assert weighed(0.02, methods=equal).recommended == "Sign()"
    # A loss below that of uncompressed averages is no better than theirs.
    better = ([2.0, 2.0], [1.9, 1.9], [1.8, 1.8], [2.2, 2.2])
    assert weighed(0.02, better, equal).recommended == "PowerSGD(rank=4)"
    near = METHODS_BY_LOSS | {DENSE: (0, 0.16), diloco(10): (0.1, 0.02), PowerSGD(4): (0.1, 0.02)}
    assert weighed(0.02, better, near).recommended == "plain"
    assert "4 times your learning rate" in weighed(0.02, factors=(4.0,)).reason
    # An interval that reaches too far is not allowed.
    wide = ([2.0, 2.0], [2.02, 2.02], [1.9, 2.12], [2.2, 2.2])
    assert weighed(0.02, wide).recommended == "PowerSGD(rank=4)"
    nothing = weighed(0.001, methods=METHODS_BY_LOSS | {DENSE: (0, 0.7)})
    assert nothing.recommended == "plain"
    assert "within 0.1 %" in nothing.reason


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"replicas": 4}, "--replicas 2"),
        ({"model": SPECS | {"more": Spec((3,))}}, "3 parameters"),
        ({"model": {"w": Spec((512, 512)), "b": Spec((512,), "bfloat16")}}, "2 parameters"),
        ({"losses": [[2.0], [2.1]]}, "--seeds"),
    ],
)
def test_a_comparison_of_something_else_is_refused(wrong, named):
    with pytest.raises(ValueError, match=named):
        compared(**{"algorithms": [PowerSGD(4)], "losses": LOSSES[:2]} | wrong).losses(SPECS, 2)


def test_names_of_parameters_do_not_tell_models_apart():
    renamed = {f"layer/{name}": spec for name, spec in reversed(SPECS.items())}
    assert described(renamed) == described(SPECS)
    found = compared([PowerSGD(4)], LOSSES[:2])
    with pytest.raises(ValueError, match="another file"):
        found.runs.add(Run("plain", 2, [1.0], {}, specs={"w": Spec((2,))}))


LOCAL = [
    LocalSGD(7),
    LocalSGD({2: 2, 4: 6}, start_step=5),
    diloco(9, fragments=3),
    diloco(9, fragments=3, overlap=2),
]


@given(st.floats(1, 1e4))
def test_the_quantile_is_students(freedom):
    stats = pytest.importorskip("scipy.stats")
    assert quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=2e-3)
    assert quantile(freedom, 0.8) == pytest.approx(stats.t.ppf(0.9, freedom), rel=2e-3)


@pytest.mark.parametrize(
    ("over_seeds", "over_windows"), [(0.0, 1.0), (1.0, 0.0), (0.3, 1.0), (1.0, 1.0)]
)
def test_intervals_hold_the_true_difference_as_often_as_they_say(over_seeds, over_windows):
    """Of other seeds and other windows, drawn some hundred times."""
    random = np.random.default_rng(0)
    seeds, windows, held = 3, 20, []
    for _ in range(200):
        drawn = over_seeds * random.standard_normal(
            (seeds, 1)
        ) + over_windows * random.standard_normal((1, windows))
        drawn = drawn + 0.3 * random.standard_normal((seeds, windows))
        held.append(abs(drawn.mean()) <= margin(drawn))
    assert 0.91 <= np.mean(held) <= 0.99


TWO, TENTH = [[2.0, 2.0]] * 2, [[2.2, 2.2]]
SAYS = [
    (TWO, TENTH * 2, "worse by 10.00 % ± 0.00 at step 4, 2 seeds"),
    # Means of 10 and 12 %: a standard error of 1 %, and Student's t of one degree of freedom is
    # 12.7.
    (TWO, [*TENTH, [2.24, 2.24]], "not told apart (+11.0 % ± 12.7) at step 4, 2 seeds"),
    (TWO, [[1.4, 1.4], [1.44, 1.44]], "better by 29.0 % ± 12.7 at step 4, 2 seeds"),
    ([[2.0, 2.2]] * 2, [[2.0, 2.2]] * 2, "not told apart (+0.00 % ± 0.00) at step 4, 2 seeds"),
    # Windows and seeds are paired.
    (
        [[2.0, 4.0], [3.0, 5.0]],
        [[2.2, 4.2], [3.2, 5.2]],
        "worse by 5.71 % ± 0.00 at step 4, 2 seeds",
    ),
    ([[2.0, 2.0], [3.0, 3.0]], [*TENTH, [2.9, 2.9]], "not told apart"),
    ([[2.0, 2.0]], TENTH, "+10.0 %, no interval, at step 4, 1 seed"),
    (TWO, [[2.2, math.nan]] * 2, "diverges"),
    ([[math.nan, 2.0]] * 2, TWO, "no verdict: uncompressed averages diverge, loss nan at step 4"),
    ([[math.inf] * 2] * 2, [[math.nan] * 2] * 2, "no verdict: uncompressed averages diverge"),
    ([[0.0, 0.0]] * 2, [[0.0, 0.0]] * 2, "not told apart (+0.00 % ± 0.00) at step 4, 2 seeds"),
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
    averages = sum(
        bool(algorithm.due(t, period, algorithm.fragments - 1))
        for t in range(ready - algorithm.overlap)
    )
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
    assert doubts(algorithm, 4, 100, searched=True) == [
        each for each in found if "rate" not in each
    ]


def runs_of(*methods, seeds=(0, 1), steps=100, rates=(1.0,), worse=0.1, specs=None):
    runs = Runs("a:make", 4, steps)
    for seed in seeds:
        for i, method in enumerate(methods):
            held_out = {
                n: [3 + seed + i * worse, 2 + seed + i * worse]
                for n in evaluated_at(method, 4, steps)
            }
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
    """A ring sends 6/4 of a message of 4 MB, which the next forward pass of its only layer waits
    for: 48 ms at 1 Gbit/s, besides 6 hops for each message."""
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
    # nobody has run TopK
    assert found == pytest.approx({name: 0.1 + waits for name, waits in ring.items()})
    # that ring leaves each node once
    two = comparison.seconds(step=0.1, link="1Gbit", nodes=2, library="gloo")
    assert two["plain"] == pytest.approx(0.1 + 0.048)
    assert comparison.seconds(step=0.1, link="1Gbit", latency=1e-4, nodes=2)[
        "plain"
    ] == pytest.approx(0.1 + 0.048 + 4e-4)
    assert Network(0.1, 125e6, 1e-4, "").curves(comparison)["plain"][0][-1] == pytest.approx(
        100 * found["plain"]
    )


#: Of two methods the losses of windows 0 and 2, which choose the rate, and of 1 and 3, which make
#: the verdict, by factor.
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
            runs.add(
                Run(
                    name_of(method),
                    seed,
                    [1.0],
                    {100: [9.0, last + seed, 9.0, last + seed]},
                    [],
                    1e6,
                    factor,
                )
            )
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
    for method, said in (("PowerSGD(rank=4)", "not run"), ("plain", "plain")):
        del runs.done[method, 0, 0.5]
        comparison = Comparison(runs, [PowerSGD(4)])
        assert comparison.factor(PowerSGD(4)) is comparison.verdict(PowerSGD(4)).step is None
        assert said in str(comparison)
    assert comparison.seeds == []


def test_a_table_fits_80_characters_and_names_what_a_reader_has_to_know():
    methods = [PowerSGD(4), TopK(8, per=(16, 16)), LocalSGD(34), diloco(10)]
    printed = str(
        Comparison(runs_of(AllReduce(), *methods[:3], rates=[1.0] * 60 + [2.0] * 40), methods)
    )
    assert max(map(len, printed.splitlines())) <= 80
    said = (
        "4 replicas, 100 steps, 2 seeds",
        "worse by",
        "no verdict",
        "not run",
        "--steps 120",
        "--steps 102",
        "1.0 MB",
    )
    assert all(words in printed for words in said)
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


def test_runs_of_another_training_are_made_anew(tmp_path):
    """What differs is said; and where it is the same, what was taken."""
    file, runs = tmp_path / "c.json", runs_of(AllReduce(), PowerSGD(4))
    mine = Fingerprint("abc", [1.0, 0.9], [0.1, 0.1], [2.0])
    runs.fingerprint = mine
    runs.save(file)
    asked = Runs("a:make", 4, 100)
    for fingerprint, words in (
        (replace(mine, rates=[0.2, 0.2]), "its learning rates differ"),
        (replace(mine, losses=[1.0, 0.8]), "its first losses differ"),
        (replace(mine, held_out=[2.1]), "its held-out losses differ"),
        (replace(mine, source="abd"), "its lines differ"),
    ):
        found = replace(asked, fingerprint=fingerprint).continued(file)
        assert not found.done
        assert words in found.notes[0]
    # Sums of a device in another order.
    near = replace(mine, losses=[1.0, 0.900001])
    found = replace(asked, fingerprint=near).continued(file)
    assert len(found.done) == len(runs.done)
    assert f"Taken from {file}: plain (seeds 0, 1)" in found.notes[0]
    # of which a long path breaks the lines
    said = " ".join(str(Comparison(found, [PowerSGD(4)])).split())
    assert said.endswith("PowerSGD(rank=4) (seeds 0, 1)")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "other"}', '{"format": "gradwire comparison 2"}', "null"]
)
def test_what_is_no_comparison_is_refused(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match=r"c\.json"):
        Runs.load(tmp_path / "c.json")
