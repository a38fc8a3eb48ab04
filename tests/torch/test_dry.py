"""The counter of kernels counts what it says, and a step that is not computed takes the same path as one that is."""

import pytest
import torch

from benchmarks.dry import Kernels, gradwire_step, on_a_device, torch_step
from gradwire import PowerSGD

SHAPES = {"w": (40, 30), "b": (40,), "again": (40, 30), "wide": (24, 48)}


def test_views_and_questions_are_free() -> None:
    x = torch.ones(4, 6)
    with Kernels(compute=True) as seen:
        y = x.view(-1)[3:].as_strided((2, 2), (2, 1)).mT.unsqueeze(0).expand(3, 2, 2).detach()
        torch.empty_like(x).data_ptr()
        assert not y.is_set_to(x)
        assert y.is_contiguous() is False
    assert seen.kernels == 0 == seen.waits


def test_each_operation_counts_one() -> None:
    x, y = torch.ones(4, 6), torch.ones(6, 4)
    with Kernels(compute=True) as seen:
        torch._foreach_add_([x, x], [x, x])
        torch.matmul(x, y)
        x.copy_(x + 1)
        torch.cat([x.reshape(-1), y.reshape(-1)])
    assert dict(seen.by_name) == {"_foreach_add_": 1, "mm": 1, "add": 1, "copy_": 1, "cat": 1}
    assert seen.kernels == 5


@pytest.mark.parametrize("read", [lambda x: x.item(), bool, lambda x: torch.equal(x, x)])
def test_a_number_that_the_host_reads_is_a_wait(read) -> None:
    with Kernels() as seen:
        read(torch.ones(()))
    assert seen.waits == 1


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("cap_mib", [0.005, 100])
def test_steps_that_are_not_computed_take_the_same_path(rank: int, cap_mib: float) -> None:
    def counts(compute: bool) -> list[dict[str, int]]:
        found = []
        with on_a_device():
            steps = gradwire_step(SHAPES, PowerSGD(rank), cap_mib), torch_step(SHAPES, rank, cap_mib)
        for step in steps:
            for bucket in step.buckets:
                bucket.buffer().normal_()
            for _ in range(4):
                with Kernels(compute=compute) as seen:
                    step.run()
                found.append(dict(seen.by_name) | {"waits": seen.waits, "all-reduces": step.all_reduces})
        return found

    assert counts(compute=True) == counts(compute=False)


def test_nothing_is_computed() -> None:
    x, out = torch.ones(3), torch.zeros(3)
    with Kernels():
        y = x.mul_(2)
        z = torch.add(x, x, out=out)
    assert y is x
    assert x.tolist() == [1, 1, 1]
    assert z is out
    assert z.tolist() == [0, 0, 0]
