"""How many kernels and messages a step takes on a device, and what the host waits for: ceilings, counted without a device."""

import pytest
import torch

from benchmarks.dry import Kernels, PretendedGroup, Step, gradwire_step, on_a_device
from benchmarks.shapes import gpt
from gradwire import PowerSGD
from gradwire.core.ops import Spec
from gradwire.torch_backend.drive import Driver
from gradwire.torch_backend.foreseen import Foreseen

GPT_125M = gpt(12, 768, 50_257, 1024)
GPT_1_3B = gpt(24, 2048, 50_257, 2048)


def made(shapes, algorithm, cap_mib=25.0, **options) -> Step:
    """A step in which everything is warm."""
    with on_a_device():
        step = gradwire_step(shapes, algorithm, cap_mib, **options)
    for _ in range(2):
        with Kernels():
            step.run()
    return step


def counted(step: Step) -> tuple[int, int, int]:
    """Kernels, all-reduces, waits of the host."""
    before = step.all_reduces
    with Kernels() as seen:
        step.run()
    return seen.kernels, step.all_reduces - before, seen.waits


@pytest.mark.parametrize(("rank", "ceiling", "messages"), [(1, 400, 2), (4, 450, 2), (32, 600, 2)])
def test_a_step_of_a_gpt_with_the_buckets_of_ddp(rank, ceiling, messages) -> None:
    kernels, all_reduces, waits = counted(made(GPT_125M, PowerSGD(rank)))
    assert kernels <= ceiling
    assert all_reduces == messages
    assert waits == 0


def test_the_number_of_kernels_does_not_grow_with_the_rank() -> None:
    kernels = {
        rank: counted(made(GPT_125M, PowerSGD(rank), 100_000.0, message_bytes=1 << 40))[0] for rank in (2, 8, 64)
    }
    assert len(set(kernels.values())) == 1, kernels


def test_a_large_model_at_rank_4_takes_two_messages() -> None:
    assert counted(made(GPT_1_3B, PowerSGD(4)))[1] == 2


def test_smaller_messages_can_be_asked_for() -> None:
    assert counted(made(GPT_125M, PowerSGD(4), message_bytes=1 << 20))[1] > 2


@pytest.mark.parametrize(
    ("device", "start_step", "worth"), [("cpu", 0, 1 << 20), ("cuda", 0, 32 << 20), ("cuda", 1, 1 << 20)]
)
def test_messages_are_larger_where_kernels_count(device, start_step, worth) -> None:
    """But not while steps are dense: to share a message, buckets would have to be copied."""
    algorithm, specs = PowerSGD(1, start_step=start_step), {"w": Spec((512, 512), "float32")}
    driver = Driver(algorithm, specs, torch.device("cpu"), PretendedGroup())
    driver.ops.device = torch.device(device)
    assert driver._worth_a_message() == worth


def test_numbers_that_are_foreseen_are_not_read_from_the_device() -> None:
    counter = torch.tensor(3)
    foreseen = Foreseen(torch.device("cpu"))
    foreseen.note({"phase": counter})
    assert foreseen.value(counter) is counter  # on the CPU there is nothing to wait for
