"""torch's enumeration of hooks, by torch's names."""

import inspect

import pytest
import torch
from torch.distributed.algorithms import ddp_comm_hooks as torchs
from torch.nn.parallel import DistributedDataParallel

from gradwire import torch_backend as ours
from gradwire.torch_backend import DDPCommHookType, PowerSGDState, register_ddp_comm_hook
from tests.torch.compare import same_bits
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import hooked, train

cases = Cases(__file__, ranks=2)

REFUSED = ["QUANTIZE_PER_TENSOR", "QUANTIZE_PER_CHANNEL"]
#: What each name stands for: a hook, and the rank of its state if it has one.
HOOKS = {
    "ALLREDUCE": ("allreduce_hook", None),
    "FP16_COMPRESS": ("fp16_compress_hook", None),
    "BF16_COMPRESS": ("bf16_compress_hook", None),
    "POWER_SGD": ("powerSGD_hook", 1),
    "POWER_SGD_RANK2": ("powerSGD_hook", 2),
    "BATCHED_POWER_SGD": ("batched_powerSGD_hook", 1),
    "BATCHED_POWER_SGD_RANK2": ("batched_powerSGD_hook", 2),
    "NOOP": ("noop_hook", None),
}


def test_names_and_arguments_are_torchs():
    assert [member.name for member in DDPCommHookType] == [member.name for member in torchs.DDPCommHookType]
    assert {*HOOKS, *REFUSED} == {member.name for member in DDPCommHookType}
    theirs = inspect.signature(torchs.register_ddp_comm_hook).parameters
    assert list(inspect.signature(register_ddp_comm_hook).parameters) == list(theirs)
    assert list(inspect.signature(ours.noop_hook).parameters) == ["_", "bucket"]


@cases.each(HOOKS.keys())
def test_a_name_registers_its_hook(world, name):
    hook, rank = HOOKS[name]
    ddps = [hooked(mlp(40, 36, 28), None, world.group, cap=25)[0] for _ in range(3)]
    register_ddp_comm_hook(DDPCommHookType[name], ddps[0], world.group)
    DDPCommHookType[name].value(model=ddps[1], state=world.group)
    state = world.group if rank is None else PowerSGDState(world.group, matrix_approximation_rank=rank)
    ddps[2].register_comm_hook(state, getattr(ours, hook))
    first, *others = [train(ddp, loss_on(40), 3) for ddp in ddps]
    for other in others:
        assert same_bits(other.given, first.given)
    registered = [ddp._comm_hooks[0][0:2] for ddp in ddps]
    assert len({hook.__name__ for hook, _ in registered}) == 1
    assert [getattr(state, "matrix_approximation_rank", None) for _, state in registered] == [rank] * 3
    assert same_bits(first.given, first.local) == (name == "NOOP")
    assert world.agree(first.given) == (name != "NOOP")


@pytest.mark.parametrize("name", REFUSED)
def test_hooks_that_are_not_here_are_refused_by_name(alone, name):
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=alone)
    with pytest.raises(ValueError, match=rf"DDPCommHookType\.{name} is not here.*BF16_COMPRESS"):
        register_ddp_comm_hook(DDPCommHookType[name], ddp)
    assert not ddp._comm_hooks


def test_torchs_own_members_are_refused(alone):
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=alone)
    with pytest.raises(TypeError, match=r"no member of gradwire\.torch_backend\.DDPCommHookType"):
        register_ddp_comm_hook(torchs.DDPCommHookType.ALLREDUCE, ddp)
