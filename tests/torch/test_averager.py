"""An algorithm without DDP: on the local shards of FSDP2, between its replicas; in a loop written by hand; what it refuses."""

import copy
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gradwire import AllReduce, LocalSGD, PowerSGD, WireDtype
from gradwire.torch_backend import Averager, DataParallel, ZeroOptimizer, local_sgd, register_comm_hook
from tests.torch.compare import flat, gradients, relative, said, same_bits
from tests.torch.models import Branches, loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import Trace, distance, hooked, sgd, train

#: An odd number of rows, so that shards are unequal.
WIDTHS = (40, 37, 36, 28)
ALGORITHM = PowerSGD(rank=2)

pytestmark = pytest.mark.usefixtures("alone")

cases = Cases(__file__, ranks=4)


def two_by_two():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def sharded_model(mesh):
    from torch.distributed.fsdp import fully_shard

    model = mlp(*WIDTHS)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def drawn(world, numbers, **shapes):
    """Gradients of the rank, step by step."""
    for number in numbers:
        generator = torch.Generator().manual_seed(10 * number + world.rank)
        yield {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


@cases.case
def test_replicas_of_a_shard_are_averaged_as_the_simulator_says(world):
    """What docs/averager.md says, on 2 replicas of 2 shards."""
    mesh = two_by_two()
    model = sharded_model(mesh)
    parameters = dict(model.named_parameters())
    averager = Averager(ALGORITHM, {n: p.to_local() for n, p in parameters.items()}, mesh.get_group("replicate"))
    optimizer = sgd(model)
    trace = Trace()
    for step in range(6):
        optimizer.zero_grad()
        loss_on(40)(model, world.rank, step).backward()
        local = {n: p.grad.to_local() for n, p in parameters.items()}
        trace.local.append({n: g.clone() for n, g in local.items()})
        averager(local)
        trace.given.append({n: p.grad.to_local().clone() for n, p in parameters.items()})
        optimizer.step()
        assert relative(trace.local[-1], trace.given[-1]) > 1e-3
    assert distance(ALGORITHM, world.everyones(trace)[mesh.get_local_rank("shard") :: 2]) < 1e-4
    assert world.agree({n: p.full_tensor().detach() for n, p in parameters.items()})
    stats = averager.stats()
    assert (stats.steps, stats.collectives) == (6, 12)
    assert stats.bytes_sent < stats.dense_bytes / 3
    assert averager.error_norm() > 0


@cases.case
def test_shards_are_saved_and_loaded_apart(world):
    """Each shard gets its own memory back; that of another has other names."""
    mesh = two_by_two()
    shard = mesh.get_local_rank("shard")

    def made(part=shard):
        return Averager(ALGORITHM, {f"shard{part}/w": torch.zeros(24, 20)}, mesh.get_group("replicate"))

    def steps(averager, numbers):
        return [averager(own) for own in drawn(world, numbers, **{f"shard{shard}/w": (24, 20)})]

    first, second, other = made(), made(), made(1 - shard)
    steps(first, range(3))
    folder = str(world.folder / "shards")
    dcp.save({"averager": first}, checkpoint_id=folder)
    dcp.load({"averager": second}, checkpoint_id=folder)
    saved = first.state_dict()
    with pytest.raises(ValueError, match=rf"another model[^$]*shard{shard}/w"):
        other.load_state_dict(saved)
    assert same_bits(saved, second.state_dict())
    for given, expected in zip(steps(second, range(3, 5)), steps(first, range(3, 5)), strict=True):
        assert relative(given, expected) < 1e-5


@cases.case
def test_a_loop_by_hand_is_ddp_with_the_hook(world):
    """Whose buckets are one group."""
    model, (twin, hook) = mlp(*WIDTHS), hooked(mlp(*WIDTHS), ALGORITHM, world.group, cap=25)
    averager = Averager(ALGORITHM, dict(model.named_parameters()), world.group)
    optimizer = sgd(model)
    for step in range(5):
        optimizer.zero_grad()
        loss_on(40)(model, world.rank, step).backward()
        averager({n: p.grad for n, p in model.named_parameters()})
        optimizer.step()
    train(twin, loss_on(40), 5, local=False)
    assert world.agree(flat(model))
    assert relative(flat(model), flat(twin.module)) < 1e-6
    ours, theirs = (each.gathered_state_dict("all", to=None)["local"] for each in (averager, hook))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert relative(ours[name]["error"], theirs[name]["error"]) < 1e-4
    ours, theirs = averager.stats(), hook.stats()
    assert (ours.steps, ours.bytes_sent) == (theirs.steps, theirs.bytes_sent)


#: By step, what each rank's forward pass takes; in the third, the right branch is taken by nobody.
TAKEN = [(("left",), ("right",), (), ("left", "right")), (("left", "right"),) * 4, (("left",), (), ("left",), ())]


@cases.case
def test_parameters_that_some_rank_has_not_used(world):
    model = Branches()
    averager = Averager(ALGORITHM, dict(model.named_parameters()), world.group, unused=True)
    trace, present, states = Trace(), [], []
    for step, taken in enumerate(TAKEN):
        model.zero_grad()
        loss_on(40)(lambda x, t=taken: model(x, t[world.rank]), world.rank, step).backward()
        trace.local.append({n: torch.zeros_like(p) for n, p in model.named_parameters()} | gradients(model))
        averages = averager({n: p.grad for n, p in model.named_parameters()})
        present.append(sorted({n.split(".")[0] for n in averages}))
        trace.given.append({n: averages[n].clone() for n in averages})
        states.append(averager.gathered_state_dict("all", to=None)["local"])
    assert present == [["left", "right", "trunk"], ["left", "right", "trunk"], ["left", "trunk"]]
    traces = world.everyones(trace)
    assert distance(ALGORITHM, traces, used=lambda step, name: step != 2 or "right" not in name) < 1e-5
    # A parameter that nobody has used keeps its memory.
    assert same_bits(states[2]["right.weight"], states[1]["right.weight"])
    assert not same_bits(states[2]["left.weight"], states[1]["left.weight"])
    assert averager.stats().collectives == 9


@cases.case
def test_an_averager_goes_on_from_its_state_bit_for_bit(world):
    parameters = {"w": torch.zeros(24, 20), "b": torch.zeros(24)}

    def steps(averager, numbers):
        return [averager(own) for own in drawn(world, numbers, w=(24, 20), b=(24,))]

    whole, first, second = (Averager(ALGORITHM, parameters, world.group) for _ in range(3))
    expected = steps(whole, range(6))
    steps(first, range(3))
    second.load_state_dict(first.gathered_state_dict("all", to=None))
    assert same_bits(steps(second, range(3, 6)), expected[3:])


@cases.case
def test_ranks_that_ask_for_different_things_all_learn_of_it(world):
    w, other = torch.zeros(8, 8), torch.zeros(8 + world.rank % 2, 8)
    rank = PowerSGD(1 + world.rank % 2, min_compression_rate=0.1)
    heard = [said(Averager, AllReduce(), {"w": other}, world.group), said(Averager, rank, {"w": w}, world.group)]
    assert world.agree(heard)
    assert "ranks differ in parameters" in heard[0]
    assert "ranks differ in algorithm" in heard[1]


SAID = {
    "hook": r"^TypeError: ddp is a FSDPSequential, sharded by FSDP.*Averager\(algorithm",
    "DataParallel": r"^TypeError: module is a FSDPSequential, sharded by FSDP.*Averager\(algorithm",
    "DataParallel of DTensors": r"^ValueError: parameter 'weight' is a DTensor, sharded already.*Averager\(algorithm",
    "ZeroOptimizer": r"^ValueError: parameter '0.weight' is a DTensor.*use SGD itself",
    "local_sgd": r"^ValueError: parameter '0.weight' is sharded over a mesh of shard 2, and ranks .* are in mesh, as replicas",
    "Averager": r"^ValueError: tensors\['0.weight'\] is a DTensor; give its local part, p\.to_local\(\)",
}


@cases.case
def test_sharded_models_are_refused_by_name_with_what_serves_them(world):
    from torch.distributed.tensor import DTensor, Shard

    mesh = two_by_two()
    model = sharded_model(mesh)
    with_dtensor = nn.Linear(4, 4, bias=False)
    local = DTensor.from_local(torch.zeros(2, 4), mesh["shard"], [Shard(0)], run_check=False)
    with_dtensor.weight = nn.Parameter(local)
    tries = {
        "hook": lambda: register_comm_hook(model, ALGORITHM),
        "DataParallel": lambda: DataParallel(model, ALGORITHM, process_group=world.group),
        "DataParallel of DTensors": lambda: DataParallel(with_dtensor, ALGORITHM, process_group=world.group),
        "ZeroOptimizer": lambda: ZeroOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1),
        "local_sgd": lambda: local_sgd(model, sgd(model), LocalSGD(4), process_group=world.group),
        "Averager": lambda: Averager(ALGORITHM, dict(model.named_parameters()), mesh.get_group("replicate")),
    }
    for name, attempt in tries.items():
        assert re.search(SAID[name], said(attempt), re.DOTALL)
    averager = Averager(ALGORITHM, {n: p.to_local() for n, p in model.named_parameters()}, mesh.get_group("replicate"))
    loss_on(40)(model, world.rank, 0).backward()
    with pytest.raises(TypeError, match=r"is a DTensor; give its local part, p\.grad\.to_local\(\)"):
        averager({n: p.grad for n, p in model.named_parameters()})
    assert SAID.keys() == tries.keys()


TENSORS = {"w": torch.zeros(24, 20), "b": torch.zeros(24)}
GOOD = {"w": torch.ones(24, 20), "b": torch.ones(24)}
WRONG_CALLS = {
    "a name less": ({"w": GOOD["w"]}, r"'b' missing, none unknown. A parameter without a gradient is there as None"),
    "a name more": (GOOD | {"c": GOOD["b"]}, "none missing, 'c' unknown"),
    "None": (GOOD | {"b": None}, r"gradients\['b'\] is None.*unused=True"),
    "another shape": (
        GOOD | {"b": torch.ones(23)},
        r"gradients\['b'\] is \(23,\) float32; the tensor was \(24,\) float32",
    ),
    "another dtype": (GOOD | {"b": torch.ones(24).half()}, r"gradients\['b'\] is \(24,\) float16"),
    "sparse": (GOOD | {"w": torch.ones(24, 20).to_sparse()}, r"gradients\['w'\] is sparse"),
}


@pytest.mark.parametrize(("gradients", "words"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_call_that_does_not_fit_is_refused_before_anything_is_changed(gradients, words):
    averager = Averager(ALGORITHM, TENSORS)
    averager({n: g.clone() for n, g in GOOD.items()})
    before = copy.deepcopy(averager.gathered_state_dict("all"))
    with pytest.raises(ValueError, match=words):
        averager(gradients)
    assert averager.stats().steps == 1
    assert same_bits(averager.gathered_state_dict("all"), before)


#: The doors of hooks refuse classes, schedules and algorithms with an optimizer alike: tests/torch/test_registration.py.
WRONG = {
    "no tensors": (ALGORITHM, {}, ValueError, "has nothing to average"),
    "no tensor": (ALGORITHM, {"w": (24, 20)}, TypeError, r"tensors\['w'\] is a tuple"),
    "integers": (AllReduce(), {"w": torch.zeros(3, dtype=torch.int32)}, ValueError, "'w' has dtype int32"),
    "a schedule": (LocalSGD(4), TENSORS, ValueError, "give both to gradwire.torch_backend.local_sgd"),
}


@pytest.mark.parametrize(("algorithm", "tensors", "error", "words"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_served_is_refused_by_name(algorithm, tensors, error, words):
    with pytest.raises(error, match=words):
        Averager(algorithm, tensors)


def test_buckets_of_the_algorithm_are_messages_here():
    averager = Averager(WireDtype(AllReduce(bucket_bytes=64), "bfloat16"), {n: torch.zeros(32) for n in "abc"})
    averager({n: torch.ones(32) for n in "abc"})
    assert averager.stats().collectives == 3 * 2  # parts of a sum are exchanged, and gathered
    averager.reconfigure(AllReduce(bucket_bytes=256))
    averager({n: torch.ones(32) for n in "abc"})
    assert averager.stats().collectives == 3 * 2 + 2


def test_gradients_in_other_strides_are_averaged_in_place():
    weight = torch.zeros(3, 4, 5, 6).to(memory_format=torch.channels_last)
    averager = Averager(PowerSGD(rank=1), {"w": weight, "v": torch.zeros(20, 20).T})
    gradients = {"w": torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last), "v": torch.randn(20, 20).T}
    before = {n: g.clone() for n, g in gradients.items()}
    averages = averager(gradients)
    for name, average in averages.items():
        assert average is gradients[name]
        assert average.stride() == before[name].stride()
        assert relative(average, before[name]) < 1
        assert not same_bits(average, before[name])
