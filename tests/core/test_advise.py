"""What a probe says of a network, predicted steps, and what is recommended."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire import AllReduce, Comparison, LocalSGD, PowerSGD, Probe, Quantize, Sign, Spec, TopK, WireDtype, diloco
from gradwire.core.advise.advice import default_methods, name_of, predict, weigh
from gradwire.core.advise.compare.runs import Run, Runs, described
from gradwire.core.advise.cost import Cost, cost_of, ddp_buckets
from gradwire.core.advise.probe import ALL, BETWEEN, WITHIN, Level, measure, partition
from gradwire.core.advise.quality import quality_of
from gradwire.core.advise.timeline import Compute, Group
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.plan.expressions import parse_algorithm
from gradwire.core.plan.memory import memory_bytes
from gradwire.core.plan.traffic import Message

SIZES = [1 << k for k in range(8, 27, 2)]
DENSE = AllReduce()
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


@given(st.lists(st.tuples(st.sampled_from(SIZES), times), min_size=1, max_size=20, unique_by=lambda sample: sample[0]))
def test_a_larger_message_never_takes_less(samples):
    found = Level(ALL, 2, tuple(sorted(samples)), ((1, 1.0),), 1.0)
    seconds = [found.seconds(n, exchange=False) for n in (0, 1, *SIZES, 1 << 30, 1 << 31)]
    assert seconds == sorted(seconds)
    assert seconds[0] == 0
    assert seconds[-1] == pytest.approx(2 * seconds[-2])  # beyond what was measured it grows in proportion


def test_a_probe_says_alpha_and_beta_of_a_ring():
    four = level(replicas=4, fixed=6e-3, per_byte=1.5e-8)
    assert four.latency == pytest.approx(1e-3, rel=1e-3)
    assert four.bandwidth == pytest.approx(1e8, rel=1e-2)


def test_a_probe_is_plain_data(tmp_path, monkeypatch):
    probe = Probe("torch", "cpu", 4, 2, (level(), level(WITHIN), level(BETWEEN, fixed=0.01, per_byte=0.0)))
    probe.save(tmp_path / "probe.json")
    assert Probe.load(tmp_path / "probe.json") == probe

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)  # before the new one has its name
    with pytest.raises(KeyboardInterrupt):
        network().save(tmp_path / "probe.json")
    assert Probe.load(tmp_path / "probe.json") == probe


class Imagined:
    """A network of two speeds, half of whose messages hide behind products that take a millisecond each."""

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
    assert [(each.name, each.replicas) for each in probe.levels] == [(ALL, 6), (WITHIN, 2), (BETWEEN, 3)]
    assert probe.level(WITHIN).bandwidth == pytest.approx(1e10, rel=0.01)
    assert probe.level(ALL).overlap == pytest.approx(0.5)
    # No message is sent that takes minutes.
    assert max(n for n, groups in imagined.asked if groups is None) < 20e6
    assert measure(Imagined(), "torch", "cpu", 6, 6).levels[0].name == ALL


def message(nbytes, **options):
    return Message(nbytes, exchange=False, **options)


EVEN = Compute(3.0)  # backward takes 2 seconds, and a byte of 100 is ready after 20 ms of it
SLOW = {"fixed": 1e-9, "per_byte": 0.01}  # a second for 100 bytes


def waits(*groups, compute=EVEN, overlap=1.0, **options):
    """Seconds for which a step waits, and those that hide."""
    found = predict(DENSE, Cost((groups,), **options), compute, network(overlap=overlap, **SLOW), 100)
    assert found.step == pytest.approx(found.compute + found.compression + found.exposed)
    return pytest.approx(found.exposed, rel=1e-6, abs=1e-6), pytest.approx(found.hidden, rel=1e-6, abs=1e-6)


def test_what_a_step_waits_for():
    assert waits(Group(100, 0.5, (message(100),))) == (1.0, 0)
    assert waits(Group(100, 0.5, (message(100), message(50)))) == (1.5, 0)  # the second when the first has arrived
    # What is sent early hides under backward: the first takes half a second of the second that is left; the other begins when backward ends.
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
    levels = (level(per_byte=1e-2), level(WITHIN, per_byte=1e-5, fixed=1e-9), level(BETWEEN, per_byte=1e-3, fixed=1e-9))
    sent = (message(100, groups=within), message(100, groups=between))
    found = predict(DENSE, Cost(((Group(100, 0.0, sent),),)), EVEN, Probe("torch", "cpu", 4, 2, levels), 100)
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
METHODS = [
    DENSE,
    PowerSGD(2, half_step=True),
    PowerSGD({"w": 4, "*": 0}),
    WireDtype(PowerSGD(4), "int8"),
    Quantize("int4"),
    LocalSGD(4),
    diloco(4, compressor=PowerSGD(2)),
    diloco(4, fragments=2),
]


@pytest.mark.parametrize("algorithm", METHODS, ids=repr)
def test_what_is_sent_is_what_the_plan_says(algorithm):
    cost = cost_of(algorithm, SPECS, 4, lambda specs: [0.5] * getattr(algorithm, "cycle", 1), [["b"], ["w"]])
    planned = gw.plan({name: spec.shape for name, spec in SPECS.items()}, algorithm, world_size=4)
    sent = cost.per_step(sum(message.nbytes for message in cost.messages))
    assert sent == pytest.approx(planned.wire_bytes, rel=0.01)
    assert cost.memory_bytes == memory_bytes(algorithm, SPECS, 4)
    local = hasattr(algorithm, "acting_steps")
    assert (cost.every, cost.overlaps) == ((4, False) if local else (1, True))
    assert local or [group.ready for group in cost.steps[0]] == [2048, 4 * 512 * 513]


def test_groups_of_the_same_shapes_are_measured_once_in_buckets_of_ddp():
    specs, asked = {str(i): Spec((512, 512)) for i in range(4)}, []
    cost = cost_of(DENSE, specs, 2, lambda own: asked.append(own) or [0.5], [[name] for name in specs])
    assert (len(asked), cost.compute) == (1, 2.0)
    buckets = ddp_buckets({str(i): Spec((1 << 18,)) for i in range(60)})
    assert [len(bucket) for bucket in buckets] == [1, 25, 25, 9]
    assert buckets[0] == ["59"]


def test_messages_of_a_dry_run():
    (sent,) = [step.messages for step in dry_run(WireDtype(PowerSGD(4), "int8"), SPECS, world_size=4).cycle]
    assert all(each.exchange for each in sent if each.nbytes > 2100)
    full, half = [step.messages for step in dry_run(PowerSGD(4, half_step=True), SPECS).cycle]
    assert [each.nbytes for each in (*full, *half)] == [4 * 512 * 4 + 2048] * 2
    assert not any(each.exchange for each in full)


def advice_of(methods, allowed="feedback", measured=None):
    """Of methods that compute and wait so long, on a step of a second."""
    costs = [
        (algorithm, Cost(((Group(100, computed, (message(max(1, round(100 * waited))),)),),), overlaps=False))
        for algorithm, (computed, waited) in methods.items()
    ]
    return weigh(costs, SPECS, network(fixed=1e-9, per_byte=0.01), Compute(1.0), allowed, measured)


def test_the_fastest_is_recommended_with_its_reason_on_one_screen():
    methods = {
        DENSE: (0, 5.0),
        PowerSGD(4): (0.2, 0.5),
        WireDtype(DENSE, "bfloat16"): (0.1, 4.0),
        diloco(100): (0, 0.1),
    }
    advice = advice_of(methods)
    assert advice.recommended == "PowerSGD(rank=4)"
    assert "6.0 s" in advice.reason
    assert json.loads(json.dumps(advice.as_dict()))["methods"][0]["step"] == pytest.approx(6)
    lines = str(advice).splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = [i for i, line in enumerate(lines) if line.strip() == "WireDtype(AllReduce(), 'bfloat16')"]
    assert lines[row + 1].split() == ["5.1", "s", "100", "ms", "4.0", "s", "0", "400", "bytes", "0", "bytes", "rounded"]
    assert any(line.startswith("→ PowerSGD(rank=4)") for line in lines)
    assert "Take PowerSGD(rank=4): " in " ".join(lines)
    assert "a step alone takes 1.0 s" in " ".join(lines)
    # What is not allowed is shown and not recommended.
    assert advice_of(methods, "local").recommended == "diloco(100)"
    assert advice_of({DENSE: (0, 5.0), PowerSGD(4): (0.2, 0.5)}, "rounded").recommended == "plain"
    assert advice.method("diloco(100)").quality == "local"
    with pytest.raises(ValueError, match=r"AllReduce\(\)"):
        advice_of({PowerSGD(4): (0.2, 0.1)})


def test_of_equals_the_one_closest_to_plain_averages_is_recommended():
    advice = advice_of({DENSE: (0, 5.0), PowerSGD(4): (0.2, 0.0), WireDtype(DENSE, "int8"): (0.2, 0.03)})
    assert advice.recommended == "WireDtype(AllReduce(), 'int8')"
    assert "PowerSGD(rank=4) is as fast" in advice.reason


@pytest.mark.parametrize(
    ("plain", "other", "said"),
    [
        ((0, 0.02), (0.3, 0.1), "nothing to gain"),
        ((0, 0.2), (0.3, 0.1), "no method of class 'feedback'"),
        ((0, 0.16), (0.1, 0.02), "within 5 %"),
    ],
)
def test_where_nothing_is_gained_plain_averages_stay(plain, other, said):
    advice = advice_of({DENSE: plain, PowerSGD(4): other})
    assert advice.recommended == "plain"
    assert said in advice.reason
    assert "Leave it: " in str(advice)


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
    assert quality_of(algorithm) == quality


def test_names():
    assert [name_of(DENSE), name_of(diloco(8))] == ["plain", "diloco(8)"]
    others = [AllReduce(bucket_bytes=4), WireDtype(DENSE, "int8", block=64), diloco(8, lr=1.0)]
    for algorithm in [*default_methods()[1:], *others]:
        assert parse_algorithm(name_of(algorithm)) == algorithm


def compared(algorithms, losses, model=SPECS, replicas=2, factors=(1.0,)):
    """A comparison whose methods have these losses of windows with seed 0, and a little more with seed 1."""
    runs = Runs("some:make", replicas, 50, factors)
    for algorithm, held_out in zip([DENSE, *algorithms], losses, strict=True):
        for seed in (0, 1):
            windows = [loss + 0.001 * seed for loss in held_out]
            runs.add(Run(name_of(algorithm), seed, [1.0], {50: windows}, [], 1.0, factors[0], model))
    return Comparison(runs, algorithms)


METHODS_BY_LOSS = {
    DENSE: (0, 5.0),
    PowerSGD(4): (0.2, 0.5),
    Sign(): (0.1, 0.5),
    diloco(10): (0, 0.1),
    TopK(8): (0, 0.0),
}
#: Worse by 1, 0.5 and 10 %; nothing is known of TopK.
LOSSES = ([2.0, 2.0], [2.02, 2.02], [2.01, 2.01], [2.2, 2.2])


def weighed(worse, losses=LOSSES, methods=METHODS_BY_LOSS, factors=(1.0,)):
    measured = compared([PowerSGD(4), Sign(), diloco(10)], losses, factors=factors).losses(SPECS, 2, worse)
    return advice_of(methods, measured=measured)


@pytest.mark.parametrize(("worse", "chosen"), [(0.2, "diloco(10)"), (0.02, "Sign()"), (0.002, "plain")])
def test_measured_losses_are_weighed_instead_of_classes(worse, chosen):
    advice = weighed(worse)
    assert advice.recommended == chosen
    printed = str(advice)
    assert max(map(len, printed.splitlines())) <= 80
    assert "some:make, 50 steps, 2 seeds" in " ".join(printed.split())
    assert "unknown" in printed.split()
    assert "feedback" not in printed
    assert chosen == "plain" or str(advice.method(chosen).loss) in advice.reason
    told = json.loads(json.dumps(advice.as_dict()))["methods"]
    differences = [method["loss"] and round(method["loss"]["difference"], 3) for method in told]
    assert differences == [None, 0.01, 0.005, 0.1, None]


def test_of_equals_the_one_of_least_loss_is_recommended():
    equal = METHODS_BY_LOSS | {PowerSGD(4): (0.1, 0.48)}
    assert weighed(0.02, methods=equal).recommended == "Sign()"
    # A loss below that of plain averages is no better than theirs.
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
        compared(**{"algorithms": [PowerSGD(4)], "losses": LOSSES[:2]} | wrong).losses(SPECS, 2, 0.02)


def test_names_of_parameters_do_not_tell_models_apart():
    renamed = {f"layer/{name}": spec for name, spec in reversed(SPECS.items())}
    assert described(renamed) == described(SPECS)
    found = compared([PowerSGD(4)], LOSSES[:2])
    with pytest.raises(ValueError, match="another file"):
        found.runs.add(Run("plain", 2, [1.0], {}, specs={"w": Spec((2,))}))
