"""The checks of one rank: its kernels, the messages of its group, and every algorithm through a
hook of DDP, each step from the known state before it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.ops import Spec
from gradwire.core.simulate.doctor import kernels
from gradwire.core.simulate.doctor.messages import given, messages, require_right
from gradwire.core.simulate.doctor.methods import known
from gradwire.core.simulate.doctor.report import Fault, Section, unseen_row
from gradwire.core.simulate.known_answers import KnownStep
from gradwire.core.state.checkpoint import head
from gradwire.torch_backend.cpu.compiled import Loops, loops_for
from gradwire.torch_backend.ddp.hook import register_comm_hook
from gradwire.torch_backend.doctor.compiled_loops import WITHOUT
from gradwire.torch_backend.doctor.machine import unseen
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups, given_or_default
from gradwire.torch_backend.engine.scheduler import run_alone
from gradwire.torch_backend.ops.full_precision import plain_arithmetic
from gradwire.torch_backend.ops.kernels import TorchOps

#: Buckets of DDP, small enough that there are several.
BUCKET_MB = 0.3


def check_kernels(section: Section, device: torch.device, *, quick: bool) -> None:
    """Every kernel and codec on a device, as a step calls them: under the user's own settings of
    precision, which steps leave aside."""
    ops = TorchOps(device)

    def checked(check: kernels.Check) -> None:
        with torch.no_grad(), plain_arithmetic(device):
            found = check.call(
                ops,
                {name: torch.from_numpy(x.copy()).to(device) for name, x in check.given.items()},
            )
        check.require([_in_numpy(x) for x in found])

    for name, check in kernels.checks(quick=quick).items():
        section.check(name, functools.partial(checked, check))


def check_messages(section: Section, group: dist.ProcessGroup, device: torch.device) -> None:
    """What each kind of request brings, between all ranks of a group."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def checked() -> str:
        ops = TorchOps(device)
        own = {name: torch.from_numpy(x).to(device) for name, x in given(rank, size).items()}
        found = run_alone(Collectives(ProcessGroups(group), ops), messages(ops, own))
        return require_right({name: _in_numpy(x) for name, x in found.items()}, rank, size)

    section.check("messages", checked)


def check_methods(
    section: Section,
    group: dist.ProcessGroup,
    device: torch.device,
    algorithms: Sequence[Algorithm],
    *,
    loops: bool = False,
) -> None:
    """Averages and memory of each algorithm, on this rank; and that all ranks have received the
    same bits. With `loops`: once more with what numba compiles for it."""
    for algorithm in algorithms:
        section.check(
            repr(algorithm), functools.partial(_check_method, algorithm, group, device, loops=loops)
        )


def note_unseen(section: Section, device: torch.device, say: Any) -> None:
    """A row where nobody has tried gradwire before."""
    if name := unseen(device):
        say(unseen_row(section.part, name))


def _check_method(
    algorithm: Algorithm, group: dist.ProcessGroup, device: torch.device, *, loops: bool
) -> str:
    specs, steps = known(algorithm, dist.get_world_size(group))
    wrong = _wrong_steps(algorithm, specs, steps, group, device, Loops())
    made = loops_for(algorithm, specs, device, least=0) if loops else Loops()
    # All ranks take all steps, so that none waits for another.
    compiled = loops and device.type == "cpu" and of_first(device, group)(bool(made))
    if compiled:
        slower, wrong = wrong, _wrong_steps(algorithm, specs, steps, group, device, made)
        wrong = slower or (wrong and f"with compiled loops {wrong}. {WITHOUT}")
    if wrong:
        raise Fault(wrong)
    return f"{len(steps)} steps{', and with compiled loops' if compiled else ''}"


def _wrong_steps(
    algorithm: Algorithm,
    specs: Mapping[str, Spec],
    steps: Sequence[KnownStep],
    group: dist.ProcessGroup,
    device: torch.device,
    loops: Loops,
) -> str:
    """What is wrong in known steps, in words; "" if nothing is."""
    rank, wrong = dist.get_rank(group), ""
    module = _Given(
        {
            name: torch.ones(spec.shape, dtype=torch.float32, device=device)
            for name, spec in specs.items()
        }
    )
    ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=BUCKET_MB)
    handle = register_comm_hook(ddp, algorithm)
    handle._driver.ops.loops = loops
    for step in steps:
        handle.load_state_dict(_saved(algorithm, step, rank))
        module.zero_grad()
        ddp(
            {name: torch.from_numpy(x).to(device) for name, x in step.gradients[rank].items()}
        ).backward()
        averages = {
            name: _in_numpy(p.grad) for name, p in module.named_parameters() if p.grad is not None
        }
        state = handle.rank_state_dict()
        tensors = {
            name: {k: _in_numpy(x) for k, x in each.items()}
            for name, each in state["tensors"].items()
        }
        after = State({k: _in_numpy(x) for k, x in state["shared"].items()}, tensors)
        # which asks the first rank, whatever is wrong here
        others = _other_bits(step, averages, group, device)
        wrong = wrong or step.wrong_on(rank, averages, after) or others
    handle.unregister()
    return wrong


def _other_bits(
    step: KnownStep,
    averages: dict[str, npt.NDArray[Any]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> str:
    """Whether the first rank of the group has received other averages, in words."""
    if step.bad:
        return ""
    mine = np.concatenate([x.reshape(-1) for _, x in sorted(averages.items())])
    first = torch.from_numpy(mine.copy()).to(device)
    dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
    differ = int(np.count_nonzero(mine != _in_numpy(first)))
    return (
        f"in step {step.number} ranks received other averages: {differ} elements differ from those"
        " of the first rank"
        if differ
        else ""
    )


def _saved(algorithm: Algorithm, step: KnownStep, rank: int) -> dict[str, Any]:
    state = step.before[rank]
    return {
        **head("compressor", repr(algorithm), step.number),
        "shared": state.shared,
        "tensors": state.tensors,
    }


def _in_numpy(x: Any) -> npt.NDArray[Any]:
    """A copy; of short floats as float32."""
    if not isinstance(x, Tensor):
        return np.array(x)
    x = x.detach().cpu()
    found: npt.NDArray[Any] = (
        (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).numpy().copy()
    )
    return found


class _Given(nn.Module):
    """A loss whose gradients are what is given: the sum of parameter times gradient. A gradient
    that is not finite comes through as it is."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        for name, x in parameters.items():
            *path, last = name.split(".")
            place: nn.Module = self
            for part in path:
                if part not in dict(place.named_children()):
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            place.register_parameter(last, nn.Parameter(x))

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return torch.stack([(p * given[name]).sum() for name, p in self.named_parameters()]).sum()


def join(library: str, device: torch.device, seconds: float) -> dist.ProcessGroup:
    """Join the ranks that a launcher has started: the group of all of them."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(library, timeout=timedelta(seconds=seconds))
    return given_or_default(None)


def of_first(device: torch.device, group: dist.ProcessGroup) -> Callable[[bool], bool]:
    """Makes of what the first rank thinks what all of a group do."""

    def decided(own: bool) -> bool:
        x = torch.tensor([int(own)], dtype=torch.int32, device=device)
        dist.broadcast(x, dist.get_global_rank(group, 0), group=group)
        return bool(x.item())

    return decided
