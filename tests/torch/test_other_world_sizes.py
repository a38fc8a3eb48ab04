"""Memory that moves: through files, from all ranks to all, and to another loss scale. To another number of ranks: tests/composition."""

import copy

import numpy as np
import pytest
import safetensors.torch
import torch

from gradwire import LocalSGD, PowerSGD
from gradwire.core.state import checkpoint
from gradwire.torch_backend import local_sgd
from gradwire.torch_backend.ops.kernels import TorchOps
from tests.torch.compare import relative, same_bits
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import buckets_of, hooked, sgd, train

pytestmark = pytest.mark.slow

cases = Cases(__file__, ranks=3)

WIDTHS = (24, 40, 32, 24)
LOSS = loss_on(WIDTHS[0])


def errors(state, scale=1.0):
    return {n: m["error"] / scale for n, m in state["tensors"].items()}


@cases.each({"one, after 1": (1 << 20, 1), "many, after 3": (0, 3)})
def test_more_than_two_ranks_go_on_bit_for_bit_when_the_model_is_one_group(world, variant):
    """A run that is stopped after one step, before buckets are rebuilt, or after three; in float32, where sums depend on their order. With
    several groups their order is that of the buckets."""
    message_bytes, n = variant

    def fresh():
        return hooked(mlp(*WIDTHS), PowerSGD(2), world.group, cap=0.005, message_bytes=message_bytes)

    ddp, handle = fresh()
    train(ddp, LOSS, n, local=False)
    model, state = copy.deepcopy(ddp.module.state_dict()), handle.gathered_state_dict("all", to=None)
    own = handle.rank_state_dict()
    whole = train(ddp, LOSS, range(n, 6), local=False).weights
    ddp, handle = fresh()
    ddp.module.load_state_dict(model)
    handle.load_state_dict(state)
    assert same_bits(handle.rank_state_dict(), own)
    resumed = train(ddp, LOSS, range(n, 6), local=False).weights
    assert buckets_of(ddp) > 1
    assert same_bits(resumed, whole) if message_bytes else relative(resumed, whole) < 1e-5
    # What is gathered on the way is what core gathers from files.
    expected = checkpoint.gather(TorchOps(torch.device("cpu")), world.everyones(own), {"error"})
    assert same_bits(state, expected)
    found = state["local"]["2.weight"]["error"]
    assert found.shape == (3, 32, 40)
    assert not same_bits(found[0], found[1])


@cases.case
def test_the_mean_is_formed_in_a_wide_dtype(world):
    """At every destination."""
    ddp, handle = hooked(mlp(*WIDTHS), PowerSGD(2, state_dtype="bfloat16"), world.group)
    train(ddp, LOSS, 2, local=False)
    own = world.everyones(handle.rank_state_dict()["tensors"]["0.weight"]["error"])
    expected = (sum(x.double() for x in own) / world.size).to(own[0].dtype)
    to_two, to_all = (handle.gathered_state_dict(to=to) for to in (2, None))
    assert (to_two is None) == (world.rank != 2)
    for state in filter(None, (to_two, to_all)):
        assert same_bits(state["local"]["0.weight"]["error"], expected[None])


#: Powers of two, which a GradScaler's float32 divides by exactly.
SCALE, GROWTH = 1024.0, 8.0


def scaler_of(scale, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, **{"growth_interval": 100} | options)


@cases.case
def test_memory_follows_the_loss_scale(world):
    """The same steps without a scaler, with one that the memory follows, and with one that it does not know of. In step 3 the scale has
    grown, step 4 overflows."""

    def run(scaler, known, numbers=range(8), load=None):
        model, options = mlp(*WIDTHS).double(), {"grad_scaler": scaler if known else None}
        ddp, handle = hooked(model, PowerSGD(2), world.group, cap=25, **options)
        optimizer = sgd(model, lr=0.05)
        if load is not None:
            model.load_state_dict(load[0])
            handle.load_state_dict(load[1])
        for number in numbers:
            optimizer.zero_grad()
            y = LOSS(lambda x: ddp(x.double()), world.rank, number)
            if number == 4:
                y = y * float("inf")
            scaler.scale(y).backward()
            scaler.step(optimizer)
            scaler.update()
        return copy.deepcopy(model.state_dict()), handle.rank_state_dict()

    def scaler():
        return scaler_of(SCALE, growth_interval=3, growth_factor=GROWTH)

    expected, state = run(scaler_of(1.0, backoff_factor=0.999999999), False)
    followed, memory = run(scaler(), True)
    assert relative(followed, expected) < 1e-10
    assert relative(run(scaler(), False)[0], expected) > 1e-4  # what happens otherwise
    assert relative(errors(memory, memory["scale"]), errors(state)) < 1e-10
    assert "scale" not in state
    # Stopped when the scale has just grown, and continued with a scaler that begins anew, or unscaled.
    half = run(scaler(), True, range(3))
    assert half[1]["scale"] == SCALE  # of the last step, by which its errors are too large
    assert relative(run(scaler(), True, range(3, 8), half)[0], expected) < 1e-10
    unscaled, until_four = run(scaler_of(1.0), False, range(3, 4), half), run(scaler_of(1.0), False, range(4))
    assert relative(unscaled[0], until_four[0]) < 1e-10
    assert "scale" not in unscaled[1]
    assert relative(errors(unscaled[1]), errors(until_four[1])) < 1e-10


ONE = PowerSGD(2, half_step=True)


def test_states_live_in_files_without_pickle(alone, tmp_path):
    ddp, handle = hooked(mlp(*WIDTHS), ONE, alone)
    train(ddp, LOSS, 3, local=False)
    optimizer = torch.optim.SGD((model := mlp(*WIDTHS)).parameters(), lr=0.1)
    local = local_sgd(model, optimizer, LocalSGD(2, compressor=PowerSGD(2)))
    for name, state in {
        "one rank's": handle.rank_state_dict(),
        "all ranks'": handle.gathered_state_dict(),
        "local SGD": local.rank_state_dict(),
    }.items():
        torch.save(state, tmp_path / "state.pt")
        assert same_bits(torch.load(tmp_path / "state.pt", weights_only=True), state)
        arrays, metadata = checkpoint.flatten(state)
        safetensors.torch.save_file(arrays, tmp_path / name, metadata)
        with safetensors.safe_open(tmp_path / name, "pt") as file:
            found = checkpoint.unflatten({key: file.get_tensor(key) for key in file.keys()}, file.metadata())  # noqa: SIM118
        assert same_bits(found, state)


def test_arrays_of_other_libraries_are_taken(alone):
    ddp, source = hooked(mlp(*WIDTHS).bfloat16(), ONE, alone)
    train(ddp, lambda *a: loss_on(WIDTHS[0])(lambda x: ddp(x.bfloat16()).float(), *a[1:]), 2, local=False)
    state = source.gathered_state_dict()

    def to_numpy(x):
        if isinstance(x, dict):
            return {k: to_numpy(v) for k, v in x.items()}
        if not isinstance(x, torch.Tensor):
            return x
        return x.view(torch.int16).numpy().view(np.dtype("bfloat16")) if x.dtype == torch.bfloat16 else x.numpy()

    pytest.importorskip("ml_dtypes")
    _, handle = hooked(mlp(*WIDTHS).bfloat16(), ONE, alone)
    handle.load_state_dict(to_numpy(state))
    assert same_bits(handle.rank_state_dict(), source.rank_state_dict())
