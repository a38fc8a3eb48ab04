"""Every way to train, on one, two and three ranks of an emulated accelerator: nothing races, nobody
waits, no constant is made twice, and Gloo's results come out.

The accelerator has streams, and its process group behaves as NCCL's: see `device.cpp` and
`process_group.py`.
"""

import os
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.emulated.ways import WAYS, native_collectives, train
from tests.methods import METHODS
from tests.parity.cases import DIFFERENT
from tests.torch.compare import relative, same_bits
from tests.torch.defaults import other_defaults
from tests.torch.ranks import Cases

if "RANK" in os.environ:
    from tests.emulated.device import DEVICE, core, stream, watched
    from tests.emulated.process_group import BACKEND

#: Of the calls of `backward`: a user may call it on any stream.
SIDE_STREAM = 7
#: Buckets are rebuilt after the first steps, and what is kept is made in them.
FIRST_STEPS = 2


def doors() -> list[str]:
    """The first way that each wrap of `ways.py` makes: hooks, wrapper, optimizers, and an algorithm
    that asks for whatever there is."""
    first: dict[str, str] = {}
    for name, way in WAYS.items():
        first.setdefault(way.wrap.__qualname__, name)
    return list(first.values())


#: What differs on three ranks, where more than one is another: averages of factors, sums and votes,
#: and uneven shares of parameters, buckets, codes and groups.
OF_THREE = (
    "PowerSGD",
    "two levels",
    "hook_with_zero_step by parameter",
    "hook_with_zero_step_interleaved by bucket",
    "int8",
    "local_sgd, subgroups",
)
#: Two ranks show everything. One has nobody to wait for: that is shown once for each door, as
#: options change nothing of it.
ON_RANKS = {2: list(WAYS), 1: doors(), 3: [*doors(), *OF_THREE]}
#: Methods that differ from others in numbers, other ways to share out an optimizer's state, and
#: options of DDP behind another door.
SLOW = {
    name
    for name in WAYS
    if (name in METHODS and name not in DIFFERENT)
    or (" x " in name and not name.startswith(("AllReduce x", "TopK x")))
    or name == "PowerSGD, forty steps"
    or (name.startswith("DataParallel, ") and name not in (*doors(), "DataParallel, accumulation"))
    or (any(shares in name for shares in (" by parameter", " by bucket")) and name not in OF_THREE)
}
ROWS = [
    pytest.param(name, ranks, marks=pytest.mark.slow if ranks != 2 or name in SLOW else ())
    for ranks, names in ON_RANKS.items()
    for name in names
]

#: Each door; and what copies to pinned memory, or puts numbers of the host on the device.
UNDER_DEFAULTS = [name for name in doors() if name not in SLOW]
UNDER_DEFAULTS += ["DataParallel(AllReduce)", "Averager, unused parameters", "diloco, on the host"]

cases = Cases(__file__, ranks=1)


@contextmanager
def on_a_side_stream():
    core.wait_for(SIDE_STREAM, 0)
    with stream(SIDE_STREAM):
        yield
    core.wait_for(0, SIDE_STREAM)


@cases.each(WAYS.keys(), slow=SLOW)
def way(world, name):
    if name not in ON_RANKS[world.size]:
        return None

    def look():
        seen = watched.own_waits(), list(watched.made), core.memory()[1]
        watched.waits.clear()
        watched.made.clear()
        return seen

    way, group = WAYS[name], dist.new_group(backend=BACKEND)
    torch.accelerator.synchronize(
        DEVICE
    )  # what the way before has left arrives: NCCL's watchdog would keep its memory until then
    watched.clear()
    under_defaults = None
    with native_collectives(BACKEND if way.native else "nccl"):
        record = train(way, DEVICE, group, on_a_side_stream, look)
        launched = list(group.launched)
        if world.size == 2 and name in UNDER_DEFAULTS:
            under_defaults = train(
                way, DEVICE, group, on_a_side_stream, look, partial(other_defaults, DEVICE)
            )
    on_the_cpu = train(way, torch.device("cpu"), world.group)
    return {
        "problems": watched.problems,
        "on their way": core.messages_on_their_way(),
        "waits": [waits for waits, _, _ in record.seen],
        "made": [made for _, made, _ in record.seen],
        "memory": [used for _, _, used in record.seen],
        "launched": launched,
        "under defaults": under_defaults and _compared(under_defaults, record),
        "difference": relative(record.moved, on_the_cpu.moved),
    }


def _compared(run, plain):
    """Whether the weights are the same to the last bit, and how many waits there were more by
    step."""
    waits = [
        len(now) - len(before) for (now, *_), (before, *_) in zip(run.seen, plain.seen, strict=True)
    ]
    return same_bits(run.moved, plain.moved), waits


@pytest.mark.parametrize("name", UNDER_DEFAULTS)
def test_a_default_device_and_a_default_dtype_change_nothing(results_of, name):
    """They are the device that the model is on, and not the dtype that it has."""
    for result in results_of(2)(f"way[{name}]"):
        same, more_waits = result["under defaults"]
        assert same
        assert not any(more_waits)


@pytest.mark.parametrize(("name", "ranks"), ROWS)
def test_a_way_to_train(results_of, name, ranks):
    way = WAYS[name]
    first, *others = results_of(ranks)(f"way[{name}]")
    for result in (first, *others):
        assert result["problems"] == []
        assert result["on their way"] == way.left
        first_waits, waits = (
            list(map(len, each))
            for each in (result["waits"][:FIRST_STEPS], result["waits"][FIRST_STEPS:])
        )
        assert max(waits) <= way.waits, result["waits"]
        assert sum(first_waits) <= FIRST_STEPS * way.waits + way.waits_at_first, result["waits"]
        assert {event.what for event in result["made"][-1]} <= way.makes, result["made"]
        if way.steps > 30:
            assert result["memory"][-1] < 1.003 * result["memory"][FIRST_STEPS]
        assert result["launched"] == first["launched"]
        assert result["difference"] <= way.tolerance
