"""Run on each rank: cases of sharded optimizers on Gloo, `CASE,FORM` each. Rank r saves its traces
in `{folder}/{rank}.pt`."""

import torch
import torch.distributed as dist
from given import GivenGradients
from launches import main
from torch.nn.parallel import DistributedDataParallel
from zero_cases import (
    BETAS,
    EPSILON,
    MOMENTUM,
    SHAPES,
    STEPS,
    WEIGHT_DECAY,
    ZERO_CASES,
    dense,
    gradients,
    initial,
)

from gradwire import AllReduce
from gradwire.torch_backend import (
    PowerSGDState,
    ZeroOptimizer,
    allreduce_hook,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    powerSGD_hook,
    register_comm_hook,
)


def zero_of(case, form):
    module = GivenGradients({name: torch.from_numpy(initial(name)) for name in SHAPES})
    named = dict(module.named_parameters())
    groups = [{"params": list(named.items())}]
    if case.optimizer == "sgd":
        optimizer, options = torch.optim.SGD, {"lr": case.peak, "momentum": MOMENTUM}
    else:
        optimizer, options = torch.optim.AdamW, {"lr": case.peak, "betas": BETAS, "eps": EPSILON}
        groups = [
            {
                "params": [(n, p) for n, p in named.items() if p.ndim > 1],
                "weight_decay": WEIGHT_DECAY,
            },
            {"params": [(n, p) for n, p in named.items() if p.ndim <= 1], "weight_decay": 0.0},
        ]
    zero = ZeroOptimizer(
        groups,
        optimizer,
        max_grad_norm=case.max_norm,
        average_gradients=form == "averaging",
        bucket_cap_mb=0.002,
        **options,
    )
    if form == "averaging":
        return module, zero
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.002)
    if form == "plain":
        register_comm_hook(ddp, AllReduce() if dense(case) else case.algorithm)
        return ddp, zero
    overlapped = hook_with_zero_step if form == "overlapped" else hook_with_zero_step_interleaved
    if dense(case):
        ddp.register_comm_hook(None, overlapped(allreduce_hook, ddp, zero))
    else:
        state = PowerSGDState(None, case.algorithm.rank, 0, named_parameters=named.items())
        ddp.register_comm_hook(state, overlapped(powerSGD_hook, ddp, zero))
    return ddp, zero


def run(name, form):
    case = ZERO_CASES[name]
    model, zero = zero_of(case, form)
    schedule = torch.optim.lr_scheduler.LambdaLR(zero, lambda step: case.rate(step) / case.peak)
    trace = {"params": [], "bytes": 0}
    for step in range(STEPS):
        zero.zero_grad()
        given = {n: torch.from_numpy(g.copy()) for n, g in gradients(step, dist.get_rank()).items()}
        model(given).backward()
        zero.step()
        schedule.step()
        trace["params"].append(
            {n.removeprefix("module."): p.detach().clone() for n, p in model.named_parameters()}
        )
    trace["bytes"] = zero.stats().bytes_sent
    return trace


if __name__ == "__main__":
    main(run)
