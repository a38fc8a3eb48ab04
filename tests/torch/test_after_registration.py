"""The world after registration: what was seen then changes, and whoever holds the training follows,
refuses by name, or warns."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import AllReduce, LocalSGD, PowerSGD, diloco
from gradwire.torch_backend.local_sgd import handle as handle_module
from tests.torch.compare import relative, said, same_bits, weights
from tests.torch.models import Layers, loss_on, mlp
from tests.torch.optimizers import ScheduleFree
from tests.torch.ranks import Cases, World
from tests.torch.test_zero_trials import Coded, CodedState
from tests.torch.training import fit, sgd

cases = Cases(__file__, ranks=2)

SKIP = "skip_all_reduce_unused_params"
#: Whether this torch has it.
SKIPS = SKIP in inspect.signature(DistributedDataParallel).parameters
#: By step, which of three parts of a model take part: DDP leaves out the buckets of the others, the
#: first, the last, both of them.
TAKEN = ("abc", "abc", "ab", "bc", "b", "ac", "abc")


def parts() -> nn.Module:
    def forward(self: Any, x: Tensor, taken: str) -> Tensor:
        for name in taken:
            x = x + getattr(self, name)(x)
        return x

    return Layers(forward, **{name: mlp(24, 20, 24, seed=i) for i, name in enumerate("abc")})


def registered(world: World, how: str, **options: Any) -> tuple[nn.Module, Any]:
    """A DDP whose gradients are averaged in this way, and what counts its steps."""
    ddp = DistributedDataParallel(
        parts(),
        process_group=world.group,
        bucket_cap_mb=0.002,
        find_unused_parameters=True,
        broadcast_buffers=False,
        **options,
    )
    if how in ("AllReduce", "PowerSGD"):
        handle = gw.register_comm_hook(ddp, PowerSGD(rank=2) if how == "PowerSGD" else AllReduce())
        return ddp, lambda: handle.stats().steps
    if how == "powerSGD_hook":
        names = ddp.module.named_parameters()
        state: Any = gw.PowerSGDState(world.group, 2, start_powerSGD_iter=0, named_parameters=names)
        ddp.register_comm_hook(state, gw.powerSGD_hook)
        return ddp, lambda: state.iter
    if how == "post_localSGD_hook":
        state = gw.PostLocalSGDState(world.group, world.group, 100)
        ddp.register_comm_hook(state, gw.post_localSGD_hook)
        return ddp, lambda: state.iter
    handle = gw.local_sgd(ddp, None, LocalSGD(2, start_step=100), process_group=world.group)
    return ddp, lambda: handle.stats().collectives


@cases.each(["AllReduce", "PowerSGD", "powerSGD_hook", "post_localSGD_hook", "local_sgd"])
def test_buckets_that_ddp_leaves_out_end_a_step_all_the_same(world: World, how: str) -> None:
    if not SKIPS:
        return
    trained, counted = [], []
    for skips in (True, False):
        ddp, count = registered(world, how, **({SKIP: True} if skips else {}))
        optimizer, steps = sgd(ddp), []
        for step, taken in enumerate(TAKEN):
            optimizer.zero_grad()
            loss_on(24)(lambda x: ddp(x, taken), world.rank, step).backward()  # noqa: B023
            optimizer.step()
            steps.append(count())
        trained.append(weights(ddp.module))
        counted.append(steps)
        assert world.agree(trained[-1])
    # which takes an unused parameter to have a gradient of zeros, and a compression error to be
    # sent
    if how != "powerSGD_hook":
        assert relative(trained[0], trained[1]) < 1e-4
    if how != "local_sgd":
        assert counted[0] == counted[1] == list(range(1, len(TAKEN) + 1))


@cases.case
def test_torchs_state_names_a_first_step_that_buckets_were_left_out_of(world: World) -> None:
    if not SKIPS:
        return
    ddp, _ = registered(world, "powerSGD_hook", **{SKIP: True})
    for taken in ("ab", "bc", "b"):
        with pytest.raises(RuntimeError, match="left buckets out of the first step"):
            ddp(torch.ones(2, 24), taken).sum().backward()
    for taken in ("abc", "b"):
        ddp(torch.ones(2, 24), taken).sum().backward()


class Growing(nn.Module):
    """Heads may be added, and a running mean is assigned anew in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(16, 12)
        self.heads = nn.ModuleList([nn.Linear(12, 4)])
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        h = torch.tanh(self.body(x - self.mean))
        return torch.cat([head(h) for head in self.heads], 1)


LOCAL = {
    "module": (LocalSGD(2), False),
    "DDP": (LocalSGD(2), True),
    "diloco": (diloco(2), True),
    "overlapped": (diloco(4, fragments=2, overlap=1), False),
}


class Run:
    """`Growing` under local SGD; `wrapped` in DDP or not."""

    def __init__(self, world: World, local: LocalSGD, wrapped: bool, **options: Any) -> None:
        torch.manual_seed(0)
        self.world, self.model, self.number = world, Growing(), 0
        self.net: nn.Module = self.model
        if wrapped:
            self.net = DistributedDataParallel(
                self.model, process_group=world.group, broadcast_buffers=False
            )
        self.optimizer = sgd(self.model)
        self.handle = gw.local_sgd(
            self.net, self.optimizer, local, process_group=world.group, **options
        )

    def backward(self) -> None:
        data = torch.Generator().manual_seed(100 * self.world.rank + self.number)
        self.net(torch.randn(8, 16, generator=data) + self.world.rank).square().mean().backward()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.backward()
            self.optimizer.step()
            self.number += 1


def grown(run: Run) -> None:
    run.model.heads.append(nn.Linear(12, 4))
    run.optimizer.add_param_group({"params": list(run.model.heads[1].parameters())})


def replaced(run: Run) -> None:
    run.model.heads[0] = nn.Linear(12, 4)
    run.optimizer.param_groups[0]["params"] = list(run.model.parameters())


def assigned(run: Run) -> None:
    run.model.heads[0].weight = nn.Parameter(torch.ones(4, 12))


def halved(run: Run) -> None:
    run.model.half()


def cut(run: Run) -> None:
    run.model.heads[0].bias.data = torch.zeros(2)


@cases.each(
    {
        f"{change.__name__}, {door}": (change, door)
        for change in (grown, replaced, assigned, halved, cut)
        for door in ("module", "DDP", "diloco")
    }
)
def test_parameters_that_are_others_are_refused_before_the_step(
    world: World, variant: tuple[Any, str]
) -> None:
    change, door = variant
    run = Run(world, *LOCAL[door])
    run.steps(3)
    change(run)
    before, steps = weights(run.model), run.handle.steps
    for p in run.model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(
        RuntimeError, match=r"'heads.*local_sgd was called.*handle\.unregister\(\)|'body"
    ):
        run.optimizer.step()
    assert run.handle.steps == steps
    assert same_bits(weights(run.model), before)


@cases.case
def test_parameters_that_are_gone_or_frozen_are_nobodys_loss(world: World) -> None:
    run = Run(world, *LOCAL["module"])
    run.model.heads.append(nn.Linear(12, 4))
    run.optimizer.add_param_group({"params": list(run.model.heads[1].parameters())})
    run.handle.unregister()
    run.handle = gw.local_sgd(run.net, run.optimizer, LocalSGD(2), process_group=world.group)
    run.steps(1)
    del run.model.heads[1]
    run.optimizer.param_groups.pop()
    run.model.body.requires_grad_(False)
    run.steps(3)
    assert run.handle.synchronized
    assert world.agree(weights(run.model))


@cases.case
def test_a_parameter_that_no_optimizer_here_knows_is_spoken_of_at_once(world: World) -> None:
    run = Run(world, *LOCAL["module"])
    run.steps(1)
    run.model.heads.append(nn.Linear(12, 4))
    with pytest.warns(
        UserWarning, match="nobody averages 'heads.1.weight', 'heads.1.bias'.*local_sgd was called"
    ):
        run.steps(1)


@cases.case
def test_an_optimizer_has_one_handle_until_it_is_unregistered(world: World) -> None:
    """A second would average what the first has averaged, and step outer optimizers twice."""
    run = Run(world, diloco(2), False)
    run.steps(1)
    words = said(gw.local_sgd, run.net, run.optimizer, diloco(2), process_group=world.group)
    assert words.startswith("ValueError: optimizer has a handle already")
    run.handle.unregister()
    run.handle = gw.local_sgd(run.net, run.optimizer, diloco(2), process_group=world.group)
    run.steps(2)
    assert world.agree(weights(run.model))


@cases.case
def test_a_closure_may_be_called_as_often_as_a_step_wants(world: World) -> None:
    """L-BFGS writes to the parameters between its backward passes."""
    run = Run(world, LocalSGD(2), False)
    run.handle.unregister()
    optimizer = torch.optim.LBFGS(
        run.model.parameters(), lr=0.01, max_iter=15, tolerance_grad=0, tolerance_change=0
    )
    handle = gw.local_sgd(run.net, optimizer, LocalSGD(2), process_group=world.group)
    passes = 0

    def closure() -> float:
        nonlocal passes
        passes += 1
        optimizer.zero_grad()
        run.backward()
        return 1.0

    for _ in range(2):  # no warning
        optimizer.step(closure)
    assert passes == 30
    assert (handle.steps, handle.synchronized) == (2, True)
    assert world.agree(weights(run.model))

    # who steps by hand is spoken of all the same
    def step_by_hand() -> None:
        for _ in range(12):
            closure()
            with torch.no_grad():
                for p in run.model.parameters():
                    p.sub_(0.01 * p.grad)

    with pytest.warns(UserWarning, match="the LBFGS that local_sgd was given has not stepped"):
        step_by_hand()


class Sam(torch.optim.Optimizer):
    """Two calls round two backward passes, and the step of the optimizer inside (Foret et al.
    2021)."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("is not called")


@cases.each({"module": False, "DDP": True})
def test_an_optimizer_that_does_not_step_is_spoken_of_and_nothing_is_claimed(
    world: World, wrapped: bool
) -> None:
    for inside in (False, True):
        run = Run(world, LocalSGD(2), wrapped)
        run.handle.unregister()
        sam = Sam(run.optimizer)
        run.handle = gw.local_sgd(
            run.net, run.optimizer if inside else sam, LocalSGD(2), process_group=world.group
        )

        def step(run: Run = run, sam: Sam = sam) -> None:
            for part in (sam.first_step, sam.second_step):
                sam.zero_grad()
                run.backward()
                part()
            run.number += 1

        step()
        run.backward()
        assert run.handle.synchronized is False
        if inside:
            step()
            assert (run.handle.steps, run.handle.synchronized) == (2, True)
            for _ in range(10):  # no warning
                step()
            assert world.agree(weights(run.model))
            continue
        with pytest.raises(RuntimeError, match="parameters of its own"):
            run.handle.state_dict()
        with warnings.catch_warnings(record=True) as heard:
            for _ in range(12):
                step()
        assert len(heard) == 1
        assert "the Sam that local_sgd was given has not stepped" in str(heard[0].message)
        run.handle.synchronize()
        assert run.handle.synchronized
        assert world.agree(weights(run.model))


@cases.case
def test_weights_that_are_put_aside_and_back_or_accumulated_gradients_are_no_step(
    world: World,
) -> None:
    run = Run(world, *LOCAL["DDP"])
    run.steps(2)
    kept = weights(run.model)
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(0.5)  # an average of weights, for an evaluation
    run.model.load_state_dict(kept, strict=False)
    assert run.handle.synchronized
    run.steps(2)
    for _ in range(12):  # no warning
        run.backward()
    assert run.handle.synchronized


@cases.each({"module": False, "DDP": True})
def test_buffers_that_are_assigned_anew_are_averaged_where_they_are(
    world: World, wrapped: bool
) -> None:
    run = Run(world, LocalSGD(2), wrapped)
    run.steps(4)
    assert run.handle.synchronized
    assert world.agree(run.model.mean)
    run.steps(1)
    run.handle.synchronize()
    assert world.agree(run.model.mean)
    del run.model.mean
    run.model.mean = torch.zeros(16)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"buffer 'mean' was .* and is gone"):
        run.handle.synchronize()


class Norms(nn.Module):
    """Spectral norm in both of torch's ways, the vectors of one's own, and statistics of two
    kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.old = nn.utils.spectral_norm(nn.Linear(6, 5))
        self.new = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5))
        self.batch = nn.BatchNorm1d(5)
        self.register_buffer("u", nn.functional.normalize(torch.randn(1, 7)))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.batch(self.new(self.old(x)))


RUNNING = ["batch.running_mean", "batch.running_var"]


@cases.each(
    {
        "average": ("average", [*RUNNING, "scale"]),
        "keep": ("keep", []),
        "patterns": (["*.running_*"], RUNNING),
    }
)
def test_running_statistics_are_averaged_and_vectors_of_length_1_are_kept(
    world: World, variant: tuple[Any, list[str]]
) -> None:
    buffers, averaged = variant
    torch.manual_seed(0)
    model = Norms()
    handle = gw.local_sgd(
        model, sgd(model), LocalSGD(2), process_group=world.group, buffers=buffers
    )
    with torch.no_grad():
        for b in model.buffers():
            if b.is_floating_point():
                b.add_(world.rank)
    handle.synchronize()
    for name, b in model.named_buffers():
        if b.is_floating_point():
            assert world.agree(b) is (name in averaged), name
    wrong = said(
        gw.local_sgd, mlp(4, 3), None, LocalSGD(2), process_group=world.group, buffers=["*.running"]
    )
    assert "ValueError: buffers pattern '*.running' matches no floating buffer" in wrong


def everywhere(value: float, model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.full_like(p, value) for name, p in model.named_parameters()}


@cases.each(
    {name: (local, wrapped, {}) for name, (local, wrapped) in LOCAL.items()}
    | {
        "on the host": (diloco(2), False, {"outer_device": "cpu"}),
        "eager": (diloco(4, eager=True), False, {}),
    }
)
def test_weights_that_are_loaded_in_the_middle_stay(world: World, variant: Any) -> None:
    local, wrapped, options = variant
    run = Run(world, local, wrapped, **options)
    run.steps(5)
    run.optimizer.param_groups[0]["lr"] = 0.0
    run.model.load_state_dict(everywhere(0.5, run.model), strict=False)
    run.steps(9)
    assert same_bits(weights(run.model), everywhere(0.5, run.model))
    run.optimizer.param_groups[0]["lr"] = 0.1
    run.steps(3)
    kept, remembered = weights(run.model), copy.deepcopy(run.handle.rank_state_dict())
    if world.rank == 0:  # evaluates an average of weights, alone
        run.model.load_state_dict(everywhere(0.1, run.model), strict=False)
        run.model.load_state_dict(kept, strict=False)
    run.handle._begin()
    assert same_bits(run.handle.rank_state_dict(), remembered)
    run.steps(5)
    run.handle.synchronize()
    assert world.agree(weights(run.model))


@cases.case
def test_a_part_that_is_loaded_leaves_replicas_equal(world: World) -> None:
    run = Run(world, diloco(4), False)
    run.steps(6)
    run.optimizer.param_groups[0]["lr"] = 0.0
    run.model.body.load_state_dict(everywhere(0.5, run.model.body))
    run.steps(6)
    assert run.handle.synchronized
    assert world.agree([weights(run.model), run.handle.outer_parameters()])
    torch.testing.assert_close(weights(run.model.body), everywhere(0.5, run.model.body))


@cases.case
def test_weights_that_are_written_between_steps_are_said_once(world: World) -> None:
    """Where it is not the rule: one who clips weights after each step trains so."""

    def write(run: Run, low: float, high: float) -> None:
        with torch.no_grad():
            for p in run.model.body.parameters():
                p.clamp_(low, high)

    run, clipped = Run(world, diloco(4), False), Run(world, diloco(4), False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.steps(12)
        run.model.load_state_dict(everywhere(0.1, run.model), strict=False)  # which is followed
        run.steps(12)
        run.handle.synchronize()
        run.steps(1)
        for _ in range(14):
            write(clipped, -1.0, 1.0)
            clipped.steps(1)
    write(run, 0.5, 0.5)
    with pytest.warns(
        UserWarning, match="'body.0.weight'.* were written to between two steps.*load_state_dict"
    ) as said:
        run.steps(1)
    assert "heads" not in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.steps(12)
        write(run, 0.5, 0.5)
        run.steps(1)


@cases.case
def test_weights_that_one_rank_alone_has_loaded_are_refused(world: World) -> None:
    run = Run(world, diloco(4), False)
    run.steps(1)
    if world.rank == 0:
        run.model.load_state_dict(everywhere(0.5, run.model), strict=False)
        said = r"waited in vain for ranks \[1\].*load the same on all of them"
        soon = mock.patch.object(handle_module, "LONGEST", timedelta(seconds=0.5))
        with soon, pytest.raises(RuntimeError, match=said):
            run.steps(1)


@cases.each(["weights first", "handle first"])
def test_a_state_that_is_loaded_with_its_weights_goes_on_from_there(
    world: World, order: str
) -> None:
    run = Run(world, diloco(4), False)
    run.steps(6)
    model, handle = (
        copy.deepcopy(run.model.state_dict()),
        copy.deepcopy(run.handle.rank_state_dict()),
    )
    run.steps(5)
    wanted = weights(run.model)
    loads = [lambda: run.model.load_state_dict(model), lambda: run.handle.load_state_dict(handle)]
    for load in loads if order == "weights first" else loads[::-1]:
        load()
    run.number = 6
    run.steps(5)
    assert same_bits(weights(run.model), wanted)


@cases.case
def test_copies_of_a_model_take_nothing_along(world: World) -> None:
    run = Run(world, diloco(4), False)
    run.steps(1)
    for copied in (copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))):
        copied.load_state_dict(run.model.state_dict())
        copied(torch.ones(2, 16)).sum().backward()
    assert run.handle._assumed.unloaded is None


class WithMasters(torch.optim.Optimizer):
    """SGD on masters in float32, of which the parameters are the rounded values, as
    TransformerEngine's and apex's optimizers."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state.setdefault("seen", torch.zeros_like(p, dtype=torch.float32)).add_(p.grad)
                master = state.setdefault("master", p.float().clone())
                p.copy_(master.sub_(p.grad.float(), alpha=self.param_groups[0]["lr"]))


def local_run(
    world: World, local: LocalSGD, optimizer: Any, dtype: torch.dtype, **options: Any
) -> Any:
    model = mlp(8, 7, 5).to(dtype)
    made = optimizer(model.parameters(), lr=0.05)
    return model, made, gw.local_sgd(model, made, local, process_group=world.group, **options)


def stepped(world: World, model: nn.Module, optimizer: Any, steps: range) -> None:
    fit(
        model,
        optimizer,
        world.rank,
        steps,
        loss_on(8, dtype=next(model.parameters()).dtype, spread=1),
    )


@cases.each(
    {
        f"{moments}, {name}": (moments, local)
        for moments in ("keep", "average")
        for name, local in {
            "plain": LocalSGD(4),
            "diloco": diloco(4),
            "overlap": diloco(4, overlap=2),
            "fragments": diloco(4, fragments=2),
        }.items()
    }
)
def test_masters_in_an_optimizers_state_go_with_their_parameters(
    world: World, variant: tuple[str, LocalSGD]
) -> None:
    moments, local = variant
    model, optimizer, handle = local_run(world, local, WithMasters, torch.bfloat16, moments=moments)
    stepped(world, model, optimizer, range(12))
    for p in model.parameters():
        master = optimizer.state[p]["master"]
        assert torch.equal(master.to(p.dtype), p) or relative(master, p) < 2e-2
        if not local.has_outer:
            assert world.agree(master)
            assert torch.equal(master.to(p.dtype), p)
        if local == LocalSGD(4):
            assert world.agree(optimizer.state[p]["seen"]) is (moments == "average")
    optimizer.param_groups[0]["lr"] = 0.0
    before = weights(model)
    stepped(world, model, optimizer, range(12, 13))
    assert (
        relative(
            {n: x.float() for n, x in weights(model).items()},
            {n: x.float() for n, x in before.items()},
        )
        < 2e-2
    )
    handle.synchronize()
    stepped(world, model, optimizer, range(13, 14))
    assert world.agree(weights(model))


class Lookahead(torch.optim.SGD):
    """Slow weights, which the fast ones become every five steps (Zhang et al. 2019)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            slow = state.setdefault("slow", p.clone())
            state["steps"] = state.get("steps", 0) + 1
            if not state["steps"] % 5:
                p.copy_(slow.lerp_(p, 0.5))


@cases.each(
    {
        f"{name}, {moments}": (optimizer, moments)
        for name, optimizer in {
            "ASGD": partial(torch.optim.ASGD, t0=4),
            "Lookahead": Lookahead,
        }.items()
        for moments in ("keep", "average")
    }
)
def test_averages_of_weights_are_no_masters_once_they_have_begun(
    world: World, variant: tuple[Any, str]
) -> None:
    """What an optimizer keeps is the parameters at first. Later these become the mean of what they
    are on all ranks, not of that."""
    optimizer, moments = variant
    model, made, handle = local_run(world, LocalSGD(3), optimizer, torch.float32, moments=moments)
    for step in range(10):
        stepped(world, model, made, range(step, step + 1))
        before = world.everyones(weights(model))
        if step == 7:
            handle.synchronize()
            wanted = {n: torch.stack([each[n] for each in before]).mean(0) for n in before[0]}
            assert relative(weights(model), wanted) < 1e-5
    handle.synchronize()
    assert world.agree(weights(model))


@cases.case
def test_averages_of_masters_are_those_of_float32(world: World) -> None:
    """Rates are so small that most parameters stay as they are from one average to the next."""
    model, optimizer, _ = local_run(world, LocalSGD(2), WithMasters, torch.bfloat16)
    twin, plain, handle = local_run(world, LocalSGD(2), WithMasters, torch.float32)
    for group in (*optimizer.param_groups, *plain.param_groups):
        group["lr"] = 1e-3
    for step in range(60):
        loss_on(8, dtype=torch.bfloat16, spread=1)(model, world.rank, step).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.float()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    start, begun = mlp(8, 7, 5).to(torch.bfloat16), mlp(8, 7, 5)
    moved, wanted = (
        {
            n: made.state[p]["master"] - before.float()
            for (n, p), before in zip(each.named_parameters(), of, strict=True)
        }
        for each, made, of in (
            (model, optimizer, start.parameters()),
            (twin, plain, begun.parameters()),
        )
    )
    assert handle.synchronized
    assert relative(moved, wanted) < 1e-3


@cases.each({"keep": "keep", "average": "average"})
def test_schedule_free_weights_go_with_their_parameters(world: World, moments: str) -> None:
    for local in (LocalSGD(4), diloco(4)):
        model, optimizer, handle = local_run(
            world, local, ScheduleFree, torch.float32, moments=moments
        )
        stepped(world, model, optimizer, range(10))
        handle.synchronize()
        optimizer.eval()
        assert world.agree(weights(model))
        assert all(torch.isfinite(x).all() for x in weights(model).values())


@cases.each(
    ["reconfigure", "unregister", "register", "local reconfigure", "local unregister", "zero"]
)
def test_what_is_made_in_inference_mode_trains_on(world: World, what: str) -> None:
    """As in a validation hook of Lightning, with the bits of what is made outside."""
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        model = mlp(24, 20, 16)
        ddp = DistributedDataParallel(model, process_group=world.group, broadcast_buffers=False)
        optimizer: Any = sgd(model, momentum=0.9)
        if what == "zero":
            optimizer = gw.ZeroOptimizer(
                model.named_parameters(), torch.optim.AdamW, process_group=world.group
            )
        local = what.startswith("local")
        handle: Any = (
            gw.local_sgd(ddp, optimizer, diloco(2))
            if local
            else gw.register_comm_hook(ddp, PowerSGD(rank=2))
        )
        fit(ddp, optimizer, world.rank, range(3), loss_on(24))
        with mode():
            if what == "zero":
                optimizer.load_state_dict(optimizer.consolidated_state_dict(to=None))
            elif what.endswith("reconfigure"):
                handle.reconfigure(diloco(3) if local else PowerSGD(rank=3))
            else:
                handle.unregister()
            if what == "register":
                gw.register_comm_hook(ddp, PowerSGD(rank=3))
        fit(ddp, optimizer, world.rank, range(3, 8), loss_on(24))
        found.append(weights(model))
    assert same_bits(*found)


@cases.case
def test_messages_have_names(world: World) -> None:
    run = Run(world, diloco(4, overlap=2), False)
    run.steps(4)
    assert run.handle._collectives.last.endswith(" bytes")


@cases.case
def test_states_that_cannot_be_averaged_are_those_of_the_first_rank_in_the_end(
    world: World,
) -> None:
    model, optimizer, handle = local_run(world, LocalSGD(2), CodedState, torch.float32)
    stepped(world, model, optimizer, range(3))
    for p in model.parameters():
        optimizer.state[p]["buffer"] = Coded(torch.full_like(p, float(world.rank)))
    handle.unregister()
    assert world.agree(weights(model))
    assert all(bool((optimizer.state[p]["buffer"].values_ == 0).all()) for p in model.parameters())
