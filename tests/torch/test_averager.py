"""An algorithm without DDP: on the local shards of FSDP2, between its replicas; in a loop written by hand; what it refuses."""

import copy
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, LocalSGD, PowerSGD, WireDtype, shard_by_parameter
from gradwire.core.algorithms.zero import Zero
from gradwire.core.ops import Spec
from gradwire.torch_backend import Averager, DataParallel, ZeroOptimizer, local_sgd, register_comm_hook
from tests.forked import run_ranks
from tests.launch import ROOT
from tests.torch.ranks import Cases
from tests.torch.training import Branches, Trace, flat, loss_on, mlp, oracle, relative, same_bits, train

RANKS = 4
#: An odd number of rows, so that shards are unequal.
WIDTHS = (40, 37, 36, 28)
ALGORITHM = PowerSGD(rank=2)

cases = Cases(__file__, ranks=RANKS)
results = cases.fixture()


def sharded_model(mesh):
    from torch.distributed.fsdp import fully_shard

    model = mlp(*WIDTHS)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


@cases.case
def replicas_of_shards(world):
    """What docs/averager.md says, on 2 replicas of 2 shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded_model(mesh)
    parameters = dict(model.named_parameters())
    averager = Averager(ALGORITHM, {n: p.to_local() for n, p in parameters.items()}, mesh.get_group("replicate"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = Trace()
    for step in range(6):
        optimizer.zero_grad()
        loss_on(40)(model, world.rank, step).backward()
        gradients = {n: p.grad.to_local() for n, p in parameters.items()}
        trace.local.append({n: g.clone() for n, g in gradients.items()})
        averager(gradients)
        trace.given.append({n: p.grad.to_local().clone() for n, p in parameters.items()})
        optimizer.step()
    trace.weights = {n: p.full_tensor().detach().clone() for n, p in parameters.items()}
    return trace, averager.stats(), averager.error_norm()


@pytest.mark.parametrize("shard", [0, 1])
def test_replicas_of_a_shard_are_averaged_as_the_simulator_says(results, shard):
    traces = [trace for trace, _, _ in results("replicas_of_shards")]
    replicas = [traces[shard], traces[2 + shard]]
    for step, right in enumerate(oracle(ALGORITHM, replicas)):
        for trace in replicas:
            assert relative(trace.given[step], right) < 1e-4
            assert relative(trace.local[step], right) > 1e-3


def test_all_ranks_of_a_sharded_model_have_one_model(results):
    first, *others = [trace.weights for trace, _, _ in results("replicas_of_shards")]
    for weights in others:
        assert same_bits(weights, first)
    for _, stats, error in results("replicas_of_shards"):
        assert (stats.steps, stats.collectives) == (6, 12)
        assert stats.bytes_sent < stats.dense_bytes / 3
        assert error > 0


@cases.case
def checkpoint_of_shards(world):
    """Each shard gets its own memory back; that of another has other names."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard = mesh.get_local_rank("shard")

    def steps(averager, part, numbers):
        averages = []
        for number in numbers:
            generator = torch.Generator().manual_seed(10 * number + world.rank)
            averages.append(averager({f"shard{part}/w": torch.randn(24, 20, generator=generator)})[f"shard{part}/w"])
        return averages

    def made(part=shard):
        return Averager(ALGORITHM, {f"shard{part}/w": torch.zeros(24, 20)}, mesh.get_group("replicate"))

    first, second, other = made(), made(), made(1 - shard)
    steps(first, shard, range(3))
    folder = str(world.folder / "shards")
    dcp.save({"averager": first}, checkpoint_id=folder)
    dcp.load({"averager": second}, checkpoint_id=folder)
    saved = first.state_dict()
    with pytest.raises(ValueError, match="another model") as refused:
        other.load_state_dict(saved)
    equal = same_bits(saved, second.state_dict())
    return equal, str(refused.value), steps(first, shard, range(3, 5)), steps(second, shard, range(3, 5))


def test_shards_are_saved_and_loaded_apart(results):
    for rank, (equal, said, expected, given) in enumerate(results("checkpoint_of_shards")):
        assert equal
        assert f"shard{rank % 2}/w" in said
        assert relative(torch.stack(given), torch.stack(expected)) < 1e-5


@cases.case
def by_hand(world):
    """As DDP with the hook, of which the buckets are one group."""
    model, twin = mlp(*WIDTHS), DistributedDataParallel(mlp(*WIDTHS), process_group=world.group)
    averager = Averager(ALGORITHM, dict(model.named_parameters()), world.group)
    hook = register_comm_hook(twin, ALGORITHM)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss_on(40)(model, world.rank, step).backward()
        averager({n: p.grad for n, p in model.named_parameters()})
        optimizer.step()
    train(twin, loss_on(40), 5, local=False)
    return {
        "by hand": flat(model),
        "by the hook": flat(twin.module),
        "states": [each.gathered_state_dict("all", to=None) for each in (averager, hook)],
        "stats": [averager.stats(), hook.stats()],
    }


def test_a_loop_by_hand_is_ddp_with_the_hook(results):
    first, *others = results("by_hand")
    for each in (first, *others):
        assert same_bits(each["by hand"], first["by hand"])
        assert relative(each["by hand"], each["by the hook"]) < 1e-6
        ours, theirs = each["states"]
        assert ours["local"].keys() == theirs["local"].keys()
        for name in ours["local"]:
            assert relative(ours["local"][name]["error"], theirs["local"][name]["error"]) < 1e-4
        ours, theirs = each["stats"]
        assert (ours.steps, ours.bytes_sent) == (theirs.steps, theirs.bytes_sent)


#: By step, what each rank's forward pass takes; in the third, the right branch is taken by nobody.
TAKEN = [(("left",), ("right",), (), ("left", "right")), (("left", "right"),) * 4, (("left",), (), ("left",), ())]


@cases.case
def unused_parameters(world):
    model = Branches()
    averager = Averager(ALGORITHM, dict(model.named_parameters()), world.group, unused=True)
    trace, present, states = Trace(), [], []
    for step, taken in enumerate(TAKEN):
        model.zero_grad()
        loss_on(40)(lambda x, t=taken: model(x, t[world.rank]), world.rank, step).backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        trace.local.append(
            {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        )
        averages = averager(gradients)
        present.append(sorted({n.split(".")[0] for n in averages}))
        trace.given.append({n: averages[n].clone() for n in averages})
        states.append(averager.gathered_state_dict("all", to=None))
    return trace, present, states, averager.stats()


def test_parameters_that_some_rank_has_not_used(results):
    traces = [trace for trace, *_ in results("unused_parameters")]
    right = oracle(ALGORITHM, traces, used=lambda step, name: step != 2 or "right" not in name)
    for trace, present, states, stats in results("unused_parameters"):
        assert present == [["left", "right", "trunk"], ["left", "right", "trunk"], ["left", "trunk"]]
        for given, expected in zip(trace.given, right, strict=True):
            assert relative(given, expected) < 1e-5
        # A parameter that nobody has used keeps its memory.
        assert same_bits(states[2]["local"]["right.weight"], states[1]["local"]["right.weight"])
        assert not same_bits(states[2]["local"]["left.weight"], states[1]["local"]["left.weight"])
        assert stats.collectives == 9


@cases.case
def goes_on_from_a_state(world):
    def steps(averager, numbers):
        averages = []
        for number in numbers:
            generator = torch.Generator().manual_seed(10 * number + world.rank)
            gradients = {n: torch.randn(s, generator=generator) for n, s in {"w": (24, 20), "b": (24,)}.items()}
            averages.append(averager(gradients))
        return averages

    parameters = {"w": torch.zeros(24, 20), "b": torch.zeros(24)}
    whole, first, second = (Averager(ALGORITHM, parameters, world.group) for _ in range(3))
    expected = steps(whole, range(6))
    steps(first, range(3))
    second.load_state_dict(first.gathered_state_dict("all", to=None))
    return same_bits(steps(second, range(3, 6)), expected[3:])


def test_an_averager_goes_on_from_its_state_bit_for_bit(results):
    assert results("goes_on_from_a_state") == [True] * RANKS


@cases.case
def ranks_that_differ(world):
    said = []
    for tensors, algorithm in [
        ({"w": torch.zeros(8 + world.rank % 2, 8)}, AllReduce()),
        ({"w": torch.zeros(8, 8)}, PowerSGD(1 + world.rank % 2, min_compression_rate=0.1)),
    ]:
        with pytest.raises(ValueError, match="ranks differ") as refused:
            Averager(algorithm, tensors, world.group)
        said.append(str(refused.value))
    return said


def test_ranks_that_ask_for_different_things_all_learn_of_it(results):
    first, *others = results("ranks_that_differ")
    assert all(each == first for each in others)
    assert "ranks differ in parameters" in first[0]
    assert "ranks differ in algorithm" in first[1]


@cases.case
def sharded_models_elsewhere(world):
    """What is refused says where to go."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded_model(mesh)
    with_dtensor = nn.Linear(4, 4, bias=False)
    local = DTensor.from_local(torch.zeros(2, 4), mesh["shard"], [Shard(0)], run_check=False)
    with_dtensor.weight = nn.Parameter(local)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    tries = {
        "hook": lambda: register_comm_hook(model, ALGORITHM),
        "DataParallel": lambda: DataParallel(model, ALGORITHM, process_group=world.group),
        "DataParallel of DTensors": lambda: DataParallel(with_dtensor, ALGORITHM, process_group=world.group),
        "ZeroOptimizer": lambda: ZeroOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1),
        "local_sgd": lambda: local_sgd(model, sgd, LocalSGD(4), process_group=world.group),
        "Averager": lambda: Averager(ALGORITHM, dict(model.named_parameters()), mesh.get_group("replicate")),
    }
    said = {}
    for name, attempt in tries.items():
        with pytest.raises((TypeError, ValueError)) as refused:
            attempt()
        said[name] = f"{type(refused.value).__name__}: {refused.value}"
    averager = Averager(ALGORITHM, {n: p.to_local() for n, p in model.named_parameters()}, mesh.get_group("replicate"))
    loss_on(40)(model, world.rank, 0).backward()
    with pytest.raises(TypeError, match=r"is a DTensor; give its local part, p\.grad\.to_local\(\)"):
        averager({n: p.grad for n, p in model.named_parameters()})
    return said


SAID = {
    "hook": r"^TypeError: ddp is a FSDPSequential, sharded by FSDP.*Averager\(algorithm",
    "DataParallel": r"^TypeError: module is a FSDPSequential, sharded by FSDP.*Averager\(algorithm",
    "DataParallel of DTensors": r"^ValueError: parameter 'weight' is a DTensor, sharded already.*Averager\(algorithm",
    "ZeroOptimizer": r"^ValueError: parameter '0.weight' is a DTensor.*use SGD itself",
    "local_sgd": r"^TypeError: module is a FSDPSequential, sharded by FSDP",
    "Averager": r"^ValueError: tensors\['0.weight'\] is a DTensor; give its local part, p\.to_local\(\)",
}


@pytest.mark.parametrize("name", SAID)
def test_sharded_models_are_refused_by_name_with_what_serves_them(results, name):
    for said in results("sharded_models_elsewhere"):
        assert re.search(SAID[name], said[name], re.DOTALL), said[name]


PAGE = (ROOT / "docs" / "averager.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("number", "ranks"), [(0, 2), (1, 4)], ids=["by hand", "FSDP2"])
def test_the_snippets_of_the_page_train(tmp_path, number, ranks):
    assert len(SNIPPETS) == 2
    script = tmp_path / "snippet.py"
    script.write_text(SNIPPETS[number].replace("dist.destroy", "print(repr(averager))\ndist.destroy"))
    output = run_ranks(script, ranks)
    assert output.count("Averager(PowerSGD(rank=4): 2 of 4 tensors, ") == ranks
    assert output.count("20 steps") == ranks


TENSORS = {"w": torch.zeros(24, 20), "b": torch.zeros(24)}
GOOD = {"w": torch.ones(24, 20), "b": torch.ones(24)}
WRONG_CALLS = {
    "a name less": (
        {"w": GOOD["w"]},
        r"'b' missing, none unknown. A parameter without a gradient is there as None",
    ),
    "a name more": (GOOD | {"c": GOOD["b"]}, "none missing, 'c' unknown"),
    "None": (GOOD | {"b": None}, r"gradients\['b'\] is None.*unused=True"),
    "another shape": (
        GOOD | {"b": torch.ones(23)},
        r"gradients\['b'\] is \(23,\) float32; the tensor was \(24,\) float32",
    ),
    "another dtype": (GOOD | {"b": torch.ones(24).half()}, r"gradients\['b'\] is \(24,\) float16"),
    "sparse": (GOOD | {"w": torch.ones(24, 20).to_sparse()}, r"gradients\['w'\] is sparse"),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_call_that_does_not_fit_is_refused_before_anything_is_changed(name):
    gradients, said = WRONG_CALLS[name]
    averager = Averager(ALGORITHM, TENSORS)
    averager({n: g.clone() for n, g in GOOD.items()})
    before = copy.deepcopy(averager.gathered_state_dict("all"))
    with pytest.raises(ValueError, match=said):
        averager(gradients)
    assert averager.stats().steps == 1
    assert same_bits(averager.gathered_state_dict("all"), before)


WRONG = {
    "a class": (PowerSGD, TENSORS, TypeError, "algorithm=PowerSGD is a class and no algorithm"),
    "a schedule": (LocalSGD(4), TENSORS, ValueError, "give both to gradwire.torch_backend.local_sgd"),
    "no tensors": (ALGORITHM, {}, ValueError, "has nothing to average"),
    "no tensor": (ALGORITHM, {"w": (24, 20)}, TypeError, r"tensors\['w'\] is a tuple"),
    "integers": (AllReduce(), {"w": torch.zeros(3, dtype=torch.int32)}, ValueError, "'w' has dtype int32"),
    "an algorithm with an optimizer": (
        Zero(shard_by_parameter({n: Spec(tuple(x.shape)) for n, x in TENSORS.items()}, 1), AllReduce()),
        TENSORS,
        ValueError,
        r"asks for \w+, which nobody answers while gradients are averaged; gradwire\.torch_backend\.ZeroOptimizer",
    ),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_served_is_refused_by_name(name):
    algorithm, tensors, error, said = WRONG[name]
    with pytest.raises(error, match=said):
        Averager(algorithm, tensors)


@pytest.mark.usefixtures("alone")
def test_buckets_of_the_algorithm_are_messages_here():
    averager = Averager(WireDtype(AllReduce(bucket_bytes=64), "bfloat16"), {n: torch.zeros(32) for n in "abc"})
    averager({n: torch.ones(32) for n in "abc"})
    assert averager.stats().collectives == 3
    averager.reconfigure(AllReduce(bucket_bytes=256))
    averager({n: torch.ones(32) for n in "abc"})
    assert averager.stats().collectives == 5


@pytest.mark.usefixtures("alone")
def test_gradients_in_other_strides_are_averaged_in_place():
    weight = torch.zeros(3, 4, 5, 6).to(memory_format=torch.channels_last)
    averager = Averager(PowerSGD(rank=1), {"w": weight, "v": torch.zeros(20, 20).T})
    gradients = {
        "w": torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
        "v": torch.randn(20, 20).T,
    }
    before = {n: g.clone() for n, g in gradients.items()}
    averages = averager(gradients)
    for name, average in averages.items():
        assert average is gradients[name]
        assert average.stride() == before[name].stride()
        assert relative(average, before[name]) < 1
        assert not same_bits(average, before[name])


if __name__ == "__main__":
    cases.main()
