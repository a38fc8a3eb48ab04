"""Models of every kind under FSDP2, with replicas that are compressed: what is shared, small, left out, frozen, of half precision, or not alone."""

import pytest
import torch
from torch import nn

from gradwire import AllReduce, CompressionWarning, PowerSGD
from gradwire.torch_backend import compress_replicas
from tests.torch.compare import relative, same_bits
from tests.torch.models import TAKEN, Branches, loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.sharded import local_parts, mesh_of, shard, sharded_mlp, simulated, train_sharded
from tests.torch.training import fit_with_two_rates

ALGORITHM = PowerSGD(rank=2, min_compression_rate=1)
LOSS = loss_on(40, spread=1)
WIDTHS = (40, 36, 32, 20)

cases = Cases(__file__, ranks=4)


class Tied(nn.Module):
    """The last layer's weight is the embedding. FSDP wants both in one unit, here that of the model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body, self.head = nn.Embedding(24, 32), nn.Linear(32, 32), nn.Linear(32, 24, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


def next_token(model, rank, step):
    tokens = torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(10 * step + rank))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


@cases.case
def tied_weights(world):
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(2, 2)
    model, twin = Tied(), Tied()
    for each in (model, twin):
        fully_shard(each.body, mesh=mesh["shard"])
        fully_shard(each, mesh=mesh["shard"])
    handle = compress_replicas(model, ALGORITHM, mesh["replicate"])
    trace = train_sharded(model, next_token, range(4), twin)
    return trace, sorted(handle.rank_state_dict()["tensors"])


def test_tied_weights_are_one_parameter(results):
    found = results("tied_weights")
    assert simulated(ALGORITHM, [trace for trace, _ in found], 2) < 1e-4
    assert all(names == ["body.weight", "embedding.weight"] for _, names in found)


class Adapted(nn.Module):
    """A frozen layer with a low-rank update beside it."""

    def __init__(self, n, m, rank=4):
        super().__init__()
        self.base = nn.Linear(n, m).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(n, rank, bias=False), nn.Linear(rank, m, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@cases.case
def low_rank_adapters(world):
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(shard(nn.Sequential(Adapted(40, 32), nn.Tanh(), Adapted(32, 20)), mesh["shard"]))
    model, twin = models
    with pytest.warns(CompressionWarning, match="compresses nothing") as said:
        handle = compress_replicas(model, PowerSGD(rank=8), mesh["replicate"])
    trace = train_sharded(model, LOSS, range(3), twin)
    stats = handle.stats()
    return trace, stats.bytes_sent == stats.dense_bytes, str(said[0].message), len(handle.rank_state_dict()["tensors"])


def test_small_matrices_are_averaged_in_full_and_frozen_ones_not_at_all(results):
    found = results("low_rank_adapters")
    assert simulated(PowerSGD(rank=8), [trace for trace, *_ in found], 2) < 1e-5
    for trace, in_full, said, remembered in found:
        assert in_full
        assert remembered == 0
        assert "0.down.weight" in said
        assert sorted(trace.given[0]) == ["0.down.weight", "0.up.weight", "2.down.weight", "2.up.weight"]


@cases.case
def unused_on_some_replicas(world):
    mesh = mesh_of(2, 2)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(shard(Branches(), mesh["shard"]))
    model, twin = models
    handle = compress_replicas(model, ALGORITHM, mesh["replicate"], unused=True, message_bytes=0)
    replica = mesh.get_local_rank("replicate")

    def loss(model, rank, step):
        x = torch.randn(24, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        return model(x, TAKEN[step][replica]).square().mean()

    trace = train_sharded(model, loss, range(len(TAKEN)), twin)
    return trace, handle.stats().steps


def test_parameters_that_only_some_replicas_use(results):
    found = results("unused_on_some_replicas")

    def used(step, name):
        return name.startswith("trunk") or any(name.startswith(branch) for taken in TAKEN[step] for branch in taken)

    traces = [trace for trace, _ in found]
    for trace in traces:
        for step, given in enumerate(trace.given):
            # What nobody has used keeps its gradient None.
            assert set(given) == {n for n in trace.local[step] if used(step, n)}
    assert simulated(ALGORITHM, traces, 2, used=used) < 1e-4
    assert all(steps == len(TAKEN) for _, steps in found)


@cases.case
def unused_without_a_word(world):
    mesh = mesh_of(2, 2)
    model = shard(Branches(), mesh["shard"])
    compress_replicas(model, ALGORITHM, mesh["replicate"])
    with pytest.raises(
        RuntimeError, match=r"'right.weight', 'right.bias' have no gradient.*unused=True.*requires_grad=False"
    ):
        model(torch.ones(3, 40), ("left",)).sum().backward()
    return True


def test_a_parameter_without_a_gradient_is_an_error(results):
    assert results("unused_without_a_word") == [True] * 4


@cases.case
def half_precision(world):
    mesh = mesh_of(2, 2)
    algorithm = PowerSGD(rank=2, state_dtype="float32", min_compression_rate=1)
    model, twin = (sharded_mlp(WIDTHS, mesh["shard"], torch.bfloat16) for _ in range(2))
    handle = compress_replicas(model, algorithm, mesh["replicate"])
    trace = train_sharded(model, loss_on(40, dtype=torch.bfloat16, spread=1), range(3), twin)
    kept = {x.dtype for memory in handle.rank_state_dict()["tensors"].values() for x in memory.values()}
    return trace, kept


def test_bfloat16_parameters_have_a_memory_of_float32(results):
    found = results("half_precision")
    assert simulated(PowerSGD(rank=2, min_compression_rate=1), [trace for trace, _ in found], 2) < 3e-2
    for trace, kept in found:
        assert kept == {torch.float32}
        assert {g.dtype for g in trace.given[0].values()} == {torch.bfloat16}


@cases.case
def two_optimizers(world):
    """Of which each steps its own layers."""
    mesh = mesh_of(2, 2)
    found = []
    for apart in (False, True):
        model = sharded_mlp(WIDTHS, mesh["shard"])
        compress_replicas(model, ALGORITHM, mesh["replicate"])
        fit_with_two_rates(model, model, world.rank, LOSS, apart=apart)
        found.append(local_parts(model))
    return found


def test_several_optimizers_step_what_one_would(results):
    for one, several in results("two_optimizers"):
        assert same_bits(one, several)


@cases.case
def generator_and_discriminator(world):
    """Two models in one backward pass, of which one's gradients are dropped: its memory shall not take them up."""
    mesh = mesh_of(2, 2)

    def made():
        return sharded_mlp((8, 32, 40), mesh["shard"]), sharded_mlp((40, 32, 1), mesh["shard"])

    found = []
    for discarding in (True, False):
        g, d = made()
        ours = [compress_replicas(m, ALGORITHM, mesh["replicate"]) for m in (g, d)]
        noise = torch.randn(6, 8, generator=torch.Generator().manual_seed(world.rank))
        d(g(noise).detach()).mean().backward()  # the discriminator's step
        before = ours[1].rank_state_dict()
        d.zero_grad()
        if discarding:
            with ours[1].discarded():
                (-d(g(noise)).mean()).backward()
        else:
            (-d(g(noise)).mean()).backward()
        found.append((same_bits(before, ours[1].rank_state_dict()), [h.stats().steps for h in ours]))
    both = local_parts(g, gradients=True)
    return found, both


def test_two_models_in_one_backward_pass(results):
    found = results("generator_and_discriminator")
    for (kept, taken_up), _ in found:
        assert kept == (True, [1, 1])
        assert taken_up == (False, [1, 2])
    for (_, a), (_, b) in ((found[0], found[2]), (found[1], found[3])):  # replicas of a shard
        assert same_bits(a, b)


@cases.case
def frozen_and_thawed(world):
    mesh = mesh_of(2, 2)
    model, twin = (sharded_mlp(WIDTHS, mesh["shard"]) for _ in range(2))
    handle = compress_replicas(model, ALGORITHM, mesh["replicate"], message_bytes=0)
    train_sharded(model, LOSS, range(2))
    memory = handle.rank_state_dict()["tensors"]
    for each in (model, twin):
        each[2].requires_grad_(requires_grad=False)
    model.zero_grad()
    trace = train_sharded(model, LOSS, range(2, 4), twin)
    frozen = handle.rank_state_dict()["tensors"]
    kept = [same_bits(memory[f"{n}.weight"], frozen[f"{n}.weight"]) for n in (0, 2, 4)]
    for each in (model, twin):
        each[2].requires_grad_(requires_grad=True)
    thawed = train_sharded(model, LOSS, range(4, 6), twin)
    return kept, sorted(trace.given[0]), sorted(thawed.given[0]), thawed.weights


def test_layers_that_are_frozen_keep_their_memory_until_they_are_thawed(results):
    found = results("frozen_and_thawed")
    for kept, frozen, thawed, weights in found:
        assert kept == [False, True, False]
        assert len(frozen) == 4
        assert not any(name.startswith("2.") for name in frozen)
        assert len(thawed) == 6
        assert same_bits(weights, found[0][3])


@cases.case
def thawed_after_registration(world):
    mesh = mesh_of(2, 2)
    model = mlp(*WIDTHS)
    model[0].requires_grad_(requires_grad=False)
    model = shard(model, mesh["shard"])
    handle = compress_replicas(model, ALGORITHM, mesh["replicate"])
    train_sharded(model, LOSS, range(2))
    memory = handle.rank_state_dict()
    model[0].requires_grad_(requires_grad=True)
    with pytest.raises(
        RuntimeError, match=r"'0.weight', '0.bias' have gradients that nobody averages.*compress_replicas again"
    ):
        LOSS(model, world.rank, 2).backward()
    model.zero_grad()
    handle.unregister()
    again = compress_replicas(model, ALGORITHM, mesh["replicate"])
    difference = again.load_state_dict(memory, strict=False)
    twin = sharded_mlp(WIDTHS, mesh["shard"])
    return str(difference), train_sharded(model, LOSS, range(2, 4), twin).weights, again.stats().steps


def test_layers_that_are_thawed_later_are_averaged_once_they_are_known(results):
    found = results("thawed_after_registration")
    for difference, weights, steps in found:
        assert "'0.weight' only here" in difference
        assert same_bits(weights, found[0][1])
        assert steps == 4


@cases.case
def only_one_layer_left(world):
    """All but the first layer to come is frozen: what comes last is not there."""
    mesh = mesh_of(2, 2)
    model, twin = (sharded_mlp(WIDTHS, mesh["shard"]) for _ in range(2))
    compress_replicas(model, AllReduce(), mesh["replicate"], message_bytes=0)
    train_sharded(model, LOSS, range(2))
    for each in (model, twin):
        each[0].requires_grad_(requires_grad=False)
        each[2].requires_grad_(requires_grad=False)
    model.zero_grad()
    return train_sharded(model, LOSS, range(2, 4), twin)


def test_a_step_ends_whichever_layers_are_frozen(results):
    traces = results("only_one_layer_left")
    assert all(sorted(g) == ["4.bias", "4.weight"] for t in traces for g in t.given)
    for rank, trace in enumerate(traces):
        for step, given in enumerate(trace.given):
            for name, average in given.items():
                both = [traces[r].local[step][name] for r in (rank % 2, 2 + rank % 2)]
                assert relative(average, torch.stack(both).mean(0)) < 1e-5


@cases.case
def handles(world):
    """What one handle says after another has taken its place."""
    mesh = mesh_of(2, 2)
    model = sharded_mlp(WIDTHS, mesh["shard"])
    first = compress_replicas(model, ALGORITHM, mesh["replicate"])
    train_sharded(model, LOSS, range(2))
    first.unregister()
    plain = train_sharded(model, LOSS, range(2, 3))
    second = compress_replicas(model, AllReduce(), mesh["replicate"])
    train_sharded(model, LOSS, range(3, 5))
    second.reconfigure(ALGORITHM)
    trace = train_sharded(model, LOSS, range(5, 6))
    return repr(first), repr(second), second.stats().steps, plain.given[0], trace.weights


def test_a_handle_gives_its_place_to_another(results):
    found = results("handles")
    for first, second, steps, _, weights in found:
        assert first.startswith("ReplicaHandle(unregistered; PowerSGD(rank=2")
        assert "; 2 steps, " in first
        assert second.startswith("ReplicaHandle(PowerSGD(rank=2")
        assert steps == 3
        assert same_bits(weights, found[0][4])
    assert same_bits(found[0][3], found[2][3])  # without a handle replicas average gradients as they are
