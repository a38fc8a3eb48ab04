"""Known answers by torch's kernels: every method, every door, ranks of which one computes wrong,
and the settings of the user."""

import os
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch

import gradwire.torch_backend as gw
from gradwire import PowerSGD, Quantize, Sign, Spec, WireDtype
from gradwire.core.simulate import self_check as looked_at
from gradwire.core.simulate.self_check import VARIABLE
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.setup.self_check import wrong_here
from tests.methods import METHODS, VARIANTS
from tests.parity.cases import SHAPES
from tests.torch.models import mlp
from tests.torch.ranks import Cases
from tests.torch.refused import LOSS, Here, small
from tests.torch.test_refusals import DOORS
from tests.torch.training import fit, sgd

CPU = torch.device("cpu")
cases = Cases(__file__, ranks=2)


def specs(dtype="float32"):
    return {name: Spec(shape, dtype) for name, shape in SHAPES.items()}


def saturating(self, x, *, out=None):
    """As an H100 did it."""
    return torch.full(x.shape, 255, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(looked_at, "_found", {})
    monkeypatch.setenv(VARIABLE, "always")


SLOW_ALIKE = [
    name
    for name in METHODS
    if name not in ("rank_2", "half_step", "quantize", "top_k", "sign", "wire_int8")
]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n in (*SLOW_ALIKE, *VARIANTS) else ())
        for n in METHODS
    ],
)
def test_kernels_are_right(name, both_branches):
    assert wrong_here(METHODS[name].algorithm, specs(), 3, CPU) == ""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", METHODS)
def test_kernels_are_right_in_each_dtype(name, dtype):
    assert wrong_here(METHODS[name].algorithm, specs(dtype), 2, CPU) == ""


def short(kernel):
    """A product of numbers of 10 bits, as TF32 has it."""

    def of(x):
        return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    return lambda self, x, y, *, out=None: kernel(
        self, of(x.contiguous()), of(y.contiguous()), out=out
    )


@pytest.mark.parametrize(
    ("algorithm", "kernel", "wrong"),
    [
        (Quantize("int8"), "nearest_bytes", saturating),
        (WireDtype(PowerSGD(2), "int8"), "nearest_bytes", saturating),
        (PowerSGD(2), "matmul", short(TorchOps.matmul)),
    ],
    ids=["saturating", "saturating factors", "short mantissas"],
)
def test_kernels_that_are_wrong_are_found(monkeypatch, algorithm, kernel, wrong):
    monkeypatch.setattr(TorchOps, kernel, wrong)
    said = wrong_here(algorithm, specs(), 2, CPU)
    assert "computes wrong numbers on cpu: the average of" in said
    assert f"torch {torch.__version__}" in said


@pytest.fixture
def wrong(monkeypatch):
    """Everything is found to be wrong, and nothing is looked at."""
    monkeypatch.setattr(looked_at, "_looked", lambda algorithm, *_: f"{algorithm!r} is wrong here")


@pytest.mark.usefixtures("alone", "wrong")
@pytest.mark.parametrize("door", ["hook", "DataParallel", "Averager", "local_sgd"])
def test_each_door_refuses(door):
    with pytest.raises(ValueError, match=r"Sign\(\) is wrong here"):
        DOORS[door](Here(), small(), Sign())()


@pytest.mark.usefixtures("alone", "wrong")
def test_a_sharded_optimizer_refuses_its_codes():
    with pytest.raises(ValueError, match=r"dtype='int8'.* is wrong here"):
        Here().zero(wire_dtype="int8", average_gradients=True)()


@pytest.mark.usefixtures("alone")
def test_reconfigure_refuses_and_goes_on_as_before(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    handle = Here().hook(small(), PowerSGD(2))()
    monkeypatch.setenv(VARIABLE, "always")
    monkeypatch.setattr(looked_at, "_looked", lambda algorithm, *_: "wrong")
    with pytest.raises(ValueError, match="wrong"):
        handle.reconfigure(Sign())
    assert handle.algorithm == PowerSGD(2)


@pytest.mark.usefixtures("alone")
def test_it_looks_once(caplog):
    caplog.set_level("INFO", "gradwire")
    for _ in range(2):
        Here().hook(mlp(8, 8), Sign())()
        Here().parallel(mlp(8, 8), Sign())()
    assert sum("self-check of Sign()" in line for line in caplog.messages) == 1


def test_settings_of_the_user_have_no_part_in_it_and_stay():
    """Those of which a device's kernels are made of; generators; and the meta device as the default
    one, on which nothing would be computed."""
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            torch.set_float32_matmul_precision("medium")
            assert wrong_here(WireDtype(PowerSGD(2), "int8"), specs(), 2, CPU) == ""
            assert torch.get_float32_matmul_precision() == "medium"
            assert torch.is_autocast_enabled("cpu")
            assert torch.empty(1).device.type == "meta"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert set(looked_at._found.values()) == {""}


def test_while_a_graph_is_captured_nothing_is_looked_at(monkeypatch):
    monkeypatch.setattr("gradwire.torch_backend.setup.self_check.capturing", lambda: True)
    monkeypatch.setattr(looked_at, "_looked", lambda *_: pytest.fail("it looks"))
    assert wrong_here(Sign(), specs(), 2, CPU) == ""


@contextmanager
def looking(kernels=None, verdict=None):
    """As on an accelerator, for the first time in the process; with kernels of our own, or with a
    verdict that needs no look."""
    with ExitStack() as within:
        within.enter_context(mock.patch.dict(os.environ, {VARIABLE: "always"}))
        within.enter_context(mock.patch.object(looked_at, "_found", {}))
        if kernels:
            within.enter_context(mock.patch.multiple(TorchOps, **kernels))
        if verdict is not None:
            within.enter_context(mock.patch.object(looked_at, "_looked", return_value=verdict))
        yield


@cases.case
def test_all_ranks_refuse_together_and_the_rank_is_named(world):
    attempt = Here(world.rank, world.group).hook(small(), Quantize("int8"))
    wrong = {"nearest_bytes": saturating} if world.rank == 1 else {}
    with (
        looking(wrong),
        pytest.raises(ValueError, match="computes wrong numbers on cpu") as refused,
    ):
        attempt()
    who = "" if world.rank == 1 else "rank 1 cannot take part: "
    assert str(refused.value).startswith(f"{who}Quantize(dtype='int8')")
    assert attempt().stats().steps == 0  # the group is as good as before


@cases.case
def test_torchs_hooks_which_nobody_registers_refuse_together_in_their_first_step(world):
    ddp = Here(world.rank, world.group).ddp(small())
    ddp.register_comm_hook(
        gw.PowerSGDState(world.group, 2, start_powerSGD_iter=2), gw.powerSGD_hook
    )
    verdict = "wrong on rank 1" if world.rank == 1 else ""
    with looking(verdict=verdict), pytest.raises(RuntimeError, match="wrong on rank 1"):
        fit(ddp, sgd(ddp), world.rank, range(1), LOSS)
