"""What a user does with a handle: sees what it does, gives the gradients back to DDP, changes the algorithm in a running job."""

import gc
import logging
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, LocalSGD, PowerSGD, WireDtype
from gradwire.torch_backend import Averager, DataParallel, local_sgd, register_comm_hook
from tests.torch.ranks import Cases
from tests.torch.training import (
    Branches,
    branching_loss,
    collective_payloads,
    loss_on,
    mlp,
    oracle,
    relative,
    same_bits,
    train,
)

RANKS = 2
WIDTHS = (40, 36, 36, 28)
LOSS = loss_on(40)

cases = Cases(__file__, ranks=RANKS)
results = cases.fixture()


def wrapped(world, algorithm=None, model=None, **options):
    ddp = DistributedDataParallel(model or mlp(*WIDTHS), process_group=world.group, bucket_cap_mb=0.006, **options)
    return ddp, register_comm_hook(ddp, algorithm, message_bytes=1000) if algorithm is not None else None


@cases.case
def given_back(world):
    """Compressed for three steps, plain from there on; beside a DDP that has no hook and begins with those weights."""
    ddp, handle = wrapped(world, PowerSGD(rank=2))
    train(ddp, LOSS, 3, local=False)
    plain, _ = wrapped(world)
    plain.module.load_state_dict(ddp.module.state_dict())
    before = handle.stats()
    handle.unregister()
    with collective_payloads() as payloads:
        after = train(ddp, LOSS, range(3, 6), local=False)
    return {
        "bits": same_bits(after.given, train(plain, LOSS, range(3, 6), local=False).given),
        "stats": same_bits(vars(handle.stats()), vars(before)),
        "bytes": sum(p.nbytes for p in payloads),
        "repr": repr(handle),
        "twice": refusal(handle.unregister),
        "reconfigure": refusal(handle.reconfigure, PowerSGD(rank=4)),
    }


def refusal(function, *args):
    try:
        function(*args)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def test_after_unregister_ddp_averages_as_without_a_hook(results):
    dense = 4 * sum(p.numel() for p in mlp(*WIDTHS).parameters())
    for seen in results("given_back"):
        assert seen["bits"]
        assert seen["stats"]
        assert seen["bytes"] == 3 * dense
        assert seen["repr"].startswith("CommHook(unregistered; PowerSGD(rank=2): 3 of 6 tensors, ")
        for call in ("twice", "reconfigure"):
            assert (
                seen[call]
                == "ValueError: this handle is unregistered; register_comm_hook(ddp, algorithm) gives a new one"
            )


@cases.case
def registered_again(world):
    """The second hook is as good as one on a DDP of its own."""
    ddp, first = wrapped(world, PowerSGD(rank=2))
    train(ddp, LOSS, 2, local=False)
    said = refusal(register_comm_hook, ddp, PowerSGD(rank=1))
    first.unregister()
    train(ddp, LOSS, range(2, 4), local=False)
    again, _ = wrapped(world)
    again.module.load_state_dict(ddp.module.state_dict())
    handles = [register_comm_hook(each, PowerSGD(rank=1), message_bytes=1000) for each in (ddp, again)]
    gone = weakref.ref(first._driver)
    del first
    gc.collect()
    weights = [train(each, LOSS, range(4, 8), local=False).weights for each in (ddp, again)]
    handles[0].unregister()
    train(ddp, LOSS, 1, local=False)
    return {
        "said": said,
        "weights": weights,
        "states": [h.gathered_state_dict("all", to=None) for h in handles],
        "freed": gone() is None,
        "hooks": len(ddp._comm_hooks),
    }


def test_a_new_hook_takes_the_place_of_one_that_was_unregistered(results):
    for seen in results("registered_again"):
        assert (
            "If register_comm_hook has registered it, unregister() of the handle that it returned makes place"
            in seen["said"]
        )
        assert relative(*seen["weights"]) < 1e-6  # buckets of the second DDP are rebuilt anew
        assert seen["states"][0]["step"] == 4
        assert seen["freed"]
        assert seen["hooks"] == 1


@cases.case
def local_sgd_instead(world):
    """In a DDP that had a hook, and in one that had none."""
    found = []
    for had_one in (True, False):
        ddp, handle = wrapped(world, PowerSGD(rank=2) if had_one else None)
        if handle is not None:
            handle.unregister()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        local = local_sgd(ddp, optimizer, LocalSGD(2, start_step=2))
        for step in range(4):
            optimizer.zero_grad()
            LOSS(ddp, world.rank, step).backward()
            optimizer.step()
        found.append(({n: p.detach().clone() for n, p in ddp.module.named_parameters()}, vars(local.stats())))
        said = refusal(register_comm_hook, ddp, PowerSGD(rank=2))
    return found, said


def test_local_sgd_takes_the_place_of_a_hook_that_was_unregistered(results):
    for (first, second), said in results("local_sgd_instead"):
        assert same_bits(first, second)
        assert "ddp has a communication hook already" in said


@cases.case
def unused_parameters(world):
    """Nobody keeps count any more."""
    ddp, handle = wrapped(world, PowerSGD(rank=2), Branches(), find_unused_parameters=True)
    plain, _ = wrapped(world, None, Branches(), find_unused_parameters=True)
    train(ddp, branching_loss, 3, local=False)
    plain.module.load_state_dict(ddp.module.state_dict())
    handle.unregister()
    hooks = [p._post_accumulate_grad_hooks for p in ddp.module.parameters()]
    traces = [train(each, branching_loss, range(3, 7), local=False) for each in (ddp, plain)]
    return same_bits(traces[0].given, traces[1].given), [len(h or ()) for h in hooks]


def test_unused_parameters_after_unregister(results):
    for same, hooks in results("unused_parameters"):
        assert same
        assert not any(hooks)


@cases.case
def into_itself(world):
    """Changing nothing changes no bit."""
    (ddp, handle), (twin, _) = (wrapped(world, PowerSGD(rank=2, half_step=True)) for _ in range(2))
    train(ddp, LOSS, 3, local=False)
    difference = handle.reconfigure(PowerSGD(rank=2, half_step=True))
    after = train(ddp, LOSS, range(3, 8), local=False)
    train(twin, LOSS, 3, local=False)
    return bool(difference), same_bits(after.given, train(twin, LOSS, range(3, 8), local=False).given), handle.stats()


def test_the_same_algorithm_again_changes_no_bit(results):
    for difference, same, stats in results("into_itself"):
        assert not difference
        assert same
        assert stats.steps == 8


@cases.case
def another_rank(world):
    """As a hook of that rank, on a DDP of its own, that has loaded what fits of the state."""
    ddp, handle = wrapped(world, PowerSGD(rank=2))
    train(ddp, LOSS, 3, local=False)
    other, loaded = wrapped(world, PowerSGD(rank=4))
    train(other, LOSS, 3, local=False)
    other.module.load_state_dict(ddp.module.state_dict())
    loaded.load_state_dict(handle.gathered_state_dict("all", to=None), strict=False)
    for name, memory in loaded._driver.state.tensors.items():  # what does not fit begins anew, and here it has begun
        fresh = wrapped(world, PowerSGD(rank=4))[1]._driver.state.tensors[name]["q"]
        memory["q"].copy_(fresh)
    error = handle.error_norm()
    difference = handle.reconfigure(PowerSGD(rank=4))
    kept = handle.error_norm()
    traces = [train(each, LOSS, range(3, 8), local=False) for each in (ddp, other)]
    return {
        "same": same_bits(traces[0].given, traces[1].given),
        "errors": (error, kept),
        "difference": difference,
        "algorithm": repr(handle.algorithm),
        "steps": handle.stats().steps,
        "weights": traces[0].weights,
    }


def test_memory_is_kept_where_it_fits(results):
    first, second = results("another_rank")
    assert same_bits(first["weights"], second["weights"])
    for seen in (first, second):
        assert seen["same"]
        assert seen["errors"][0] == seen["errors"][1] > 0
        assert seen["difference"].algorithm == ("PowerSGD(rank=2)", "PowerSGD(rank=4)")
        assert len(seen["difference"].reshaped) == 3
        assert (seen["algorithm"], seen["steps"]) == ("PowerSGD(rank=4)", 8)


@cases.case
def counts(world):
    """Steps count on: `start_step` is a step of the run."""
    ddp, handle = wrapped(world, AllReduce())
    train(ddp, LOSS, 3, local=False)
    handle.reconfigure(PowerSGD(rank=2, start_step=4))
    sent = [handle.stats().bytes_sent]
    for step in range(3, 6):
        train(ddp, LOSS, [step], local=False)
        sent.append(handle.stats().bytes_sent)
    return sent


def test_steps_and_bytes_count_on(results):
    dense = 4 * sum(p.numel() for p in mlp(*WIDTHS).parameters())
    for sent in results("counts"):
        assert sent[:2] == [3 * dense, 4 * dense]
        assert 0 < sent[2] - sent[1] < dense / 4
        assert sent[3] - sent[2] == sent[2] - sent[1]


#: By rank, what is asked for; and what the error says.
WRONG = {
    "ranks": (lambda rank: PowerSGD(rank=1 + rank), "ranks differ in algorithm"),
    "a pattern": (lambda rank: PowerSGD({"conv*": 2}), "rank pattern 'conv*' matches no parameter"),
    "one rank alone": (lambda rank: PowerSGD({"conv*": 2}) if rank else PowerSGD(4), "rank pattern 'conv*'"),
    "a schedule": (lambda rank: LocalSGD(4), "averages parameters, after steps of the optimizer"),
    "buckets of its own": (lambda rank: AllReduce(8), "bucket_bytes=8 of AllReduce(bucket_bytes=8) means nothing here"),
    "a class": (lambda rank: PowerSGD, "algorithm=PowerSGD is a class and no algorithm"),
}


@cases.each(WRONG)
def wrong(world, variant):
    make, _ = variant
    (ddp, handle), (twin, _) = (wrapped(world, PowerSGD(rank=2)) for _ in range(2))
    for each in (ddp, twin):
        train(each, LOSS, 3, local=False)
    said = refusal(handle.reconfigure, make(world.rank))
    after = [train(each, LOSS, range(3, 6), local=False).given for each in (ddp, twin)]
    return said, same_bits(*after), repr(handle.algorithm)


@pytest.mark.parametrize("name", WRONG)
def test_a_change_that_fails_changes_nothing(results, name):
    for said, same, algorithm in results(f"wrong[{name}]"):
        assert WRONG[name][1] in said
        assert same
        assert algorithm == "PowerSGD(rank=2)"


@cases.case
def of_data_parallel(world):
    """To plain averages, in buckets that are divided on their way, and back."""
    model = DataParallel(mlp(*WIDTHS), PowerSGD(rank=2), process_group=world.group, bucket_cap_mb=0.006)
    twin = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group, bucket_cap_mb=0.006)
    train(model, LOSS, 2, local=False)
    twin.module.load_state_dict(model.module.state_dict())
    model.reconfigure(AllReduce())
    plain = [train(each, LOSS, range(2, 5), local=False).given for each in (model, twin)]
    messages = model.stats().collectives
    train(model, LOSS, [5], local=False)
    buckets = len(model.buckets()), model.stats().collectives - messages
    model.reconfigure(PowerSGD(rank=1))
    trace = train(model, LOSS, range(6, 9))
    return same_bits(*plain), buckets, trace, repr(model.algorithm), "PowerSGD(rank=1): 3 of 6 tensors" in repr(model)


def test_data_parallel_is_reconfigured_too(results):
    traces = [trace for _, _, trace, *_ in results("of_data_parallel")]
    for step, right in enumerate(oracle(PowerSGD(rank=1), traces)):
        assert relative(traces[0].given[step], right) < 1e-5
    for same, (buckets, messages), _, algorithm, shown in results("of_data_parallel"):
        assert same
        assert buckets == messages > 1
        assert algorithm == "PowerSGD(rank=1)"
        assert shown


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        self.lines.append((record.name, record.levelname, record.getMessage()))


@cases.case
def log(world):
    logger, seen = logging.getLogger("gradwire"), Lines()
    logger.addHandler(seen)
    logger.setLevel(logging.INFO)
    ddp, handle = wrapped(world, PowerSGD(rank=2))
    train(ddp, LOSS, 2, local=False)
    shown = repr(handle)
    handle.reconfigure(WireDtype(AllReduce(), torch.bfloat16))
    DataParallel(mlp(400, 300), PowerSGD(rank=2, start_step=100, half_step=True), process_group=world.group)
    Averager(PowerSGD(rank=2), {"w": torch.zeros(40, 36)}, world.group)
    logger.removeHandler(seen)
    return seen.lines, shown


def test_one_line_for_each_registration_on_the_first_rank(results):
    (first, shown), (second, _) = results("log")
    assert second == []
    # 36·40 + 36·36 + 28·36 weights and 36 + 36 + 28 biases; (36 + 40 + 36 + 36 + 28 + 36) · 2 numbers for the weights.
    weights, biases, factors = 36 * 40 + 36 * 36 + 28 * 36, 100, 2 * (76 + 72 + 64)
    ratio = (weights + biases) / (factors + biases)
    expected = f"PowerSGD(rank=2): 3 of 6 tensors, 15.4 kB → 2.1 kB ({ratio:.1f}×), 2 messages; error memory 15.0 kB"
    assert [round(4 * n / 1000, 1) for n in (weights + biases, factors + biases, weights)] == [15.4, 2.1, 15.0]
    assert first == [
        ("gradwire", "INFO", expected),
        (
            "gradwire",
            "INFO",
            "WireDtype(algorithm=AllReduce(), dtype='bfloat16'): 6 tensors, 15.4 kB → 7.7 kB (2.0×), 1 message",
        ),
        (
            "gradwire",
            "INFO",
            "PowerSGD(rank=2, start_step=100, half_step=True): 1 of 2 tensors, 481.2 kB → 4.0 kB (120×), 1 message from step 100 on; "
            "error memory 480.0 kB",
        ),
        (
            "gradwire",
            "INFO",
            "PowerSGD(rank=2): 1 of 1 tensors, 5.8 kB → 608 bytes (9.5×), 2 messages; error memory 5.8 kB",
        ),
    ]
    saved = 2 * 4 * (weights - factors) / 1000
    assert shown == f"CommHook({expected}; 2 steps, {saved:.1f} kB saved)"


@cases.case
def ranges(world):
    ddp, _ = wrapped(world, WireDtype(PowerSGD(rank=2), "bfloat16"))
    train(ddp, LOSS, 2, local=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(ddp, LOSS, 2, local=False)
    counted = {event.key: event.count for event in profile.key_averages() if event.key.startswith("gradwire")}
    inside = dist.get_world_size(world.group) == RANKS
    return counted, inside


def test_the_profiler_shows_what_is_done(results):
    for counted, inside in results("ranges"):
        assert inside
        assert set(counted) == {"gradwire: PowerSGD send", "gradwire: PowerSGD finish"}
        assert counted["gradwire: PowerSGD finish"] == 2
        assert counted["gradwire: PowerSGD send"] >= 2


if __name__ == "__main__":
    cases.main()
