"""Who averages what and when, as a pure function of the step."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gradwire import LocalSGD, PowerSGD, Spec
from gradwire.core.local_sgd.schedule import Schedule

PAIRS = ((0, 1), (2, 3))


def due_steps(schedule, period, fragment=0, steps=40):
    return [t for t in range(steps) if schedule.due(t, period, fragment)]


def test_every_period_counts_from_the_end_of_the_warm_up():
    assert due_steps(Schedule(4), 4, steps=16) == [3, 7, 11, 15]
    assert due_steps(Schedule(4, start_step=6), 4, steps=20) == [9, 13, 17]
    assert due_steps(Schedule(1, start_step=2), 1, steps=6) == [2, 3, 4, 5]


def test_the_hierarchy_is_sorted_largest_first():
    levels = Schedule({4: 4, 2: 2}).levels(4)
    assert [(v.groups, v.period) for v in levels] == [(None, 4), (PAIRS, 2)]
    levels = Schedule({((0, 2), (1, 3)): 2, "all": 6}).levels(4)
    assert [(v.groups, v.period) for v in levels] == [(None, 6), (((0, 2), (1, 3)), 2)]


def test_nodes_become_groups_of_their_size():
    schedule = LocalSGD({"node": 2, "all": 8}, subgroup="node")
    assert schedule.mentions_nodes
    fitted = schedule.on_nodes_of(2)
    assert not fitted.mentions_nodes
    assert fitted == LocalSGD({2: 2, "all": 8}, subgroup=2)
    assert fitted.subgroups(4) == PAIRS
    assert LocalSGD(8).on_nodes_of(2) == LocalSGD(8)


def test_groups_of_one_are_nobody():
    assert Schedule(4, subgroup=1).subgroups(4) is None
    assert Schedule(4).subgroups(4) is None


@given(st.integers(1, 12), st.integers(0, 9), st.data())
def test_each_fragment_is_averaged_once_in_a_period_and_never_two_at_once(period, start, data):
    fragments = data.draw(st.integers(1, period))
    schedule = Schedule(period, start_step=start, fragments=fragments)
    due = [due_steps(schedule, period, f, start + 3 * period) for f in range(fragments)]
    for f, steps in enumerate(due):
        assert len(steps) == 3
        assert steps[1] - steps[0] == steps[2] - steps[1] == period
        assert steps[0] >= start
        assert [schedule.round(t, period, f) for t in steps] == [0, 1, 2]
    together = sorted(t for steps in due for t in steps)
    assert len(set(together)) == len(together)
    gaps = {b - a for a, b in itertools.pairwise(together)}
    assert max(gaps, default=0) - min(gaps, default=0) <= 1  # evenly spaced
    assert together[-1] == start + 3 * period - 1  # the last one at the end of a period


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_fragments_are_a_partition_that_names_and_sizes_decide(sizes, data):
    specs = {f"p{i}": Spec((n,)) for i, n in enumerate(sizes)}
    fragments = data.draw(st.integers(1, len(sizes)))
    schedule = Schedule(16, fragments=fragments, layout="size")
    parts = schedule.parts(specs)
    assert len(parts) == fragments
    assert sorted(n for part in parts for n in part) == sorted(specs)
    shuffled = data.draw(st.permutations(list(specs)))
    assert [set(p) for p in schedule.parts({n: specs[n] for n in shuffled})] == [set(p) for p in parts]
    filled = [sum(specs[n].nbytes for n in part) for part in parts]
    assert max(filled) - min(filled) <= max(s.nbytes for s in specs.values()) + 4  # balanced to within one tensor


def test_the_representation_says_what_was_chosen():
    assert repr(LocalSGD(4)) == "LocalSGD(period=4)"
    shown = repr(LocalSGD({2: 2, "all": 4}, start_step=3, compressor=PowerSGD(2)))
    assert shown == "LocalSGD(period={2: 2, 'all': 4}, start_step=3, compressor=PowerSGD(rank=2))"
