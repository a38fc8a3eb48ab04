"""Replicas in one process train as R processes do over Gloo, to the last bit."""

import os
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from gradwire import (
    AllReduce,
    LocalSGD,
    PowerSGD,
    Quantize,
    Sign,
    TopK,
    TwoLevel,
    WireDtype,
    compare,
    diloco,
)
from gradwire.core.advise.compare.comparison import Comparison
from gradwire.core.advise.compare.fingerprint import source_of
from gradwire.core.advise.losses import known_losses
from gradwire.core.plan.advice import CompressionWarning
from gradwire.torch_backend import Averager, local_sgd
from gradwire.torch_backend.advise.compare.generators import seed_all
from gradwire.torch_backend.advise.compare.one_process import World, ring_sum
from gradwire.torch_backend.advise.compare.opaque import OpaqueReplicas
from gradwire.torch_backend.advise.compare.replicas import (
    free_bytes,
    parameters_of,
    replicas_of,
)
from gradwire.torch_backend.advise.compare.run import run
from gradwire.torch_backend.advise.compare.training import Training
from gradwire.torch_backend.integrations import training_of_lightning, training_of_trainer
from tests.bounds import threads
from tests.compared import loaded, made_by, require_no_mixture
from tests.torch.compare import relative, same_bits, weights
from tests.torch.ranks import Cases
from tests.torch.test_after_registration import WithMasters
from tests.torch.tools import gpt2, lightning_module, new_trainer, quiet

cases = Cases(__file__, ranks=4)

STEPS, RANKS, SEED = 6, 4, 3
METHODS = {
    repr(method): method
    for method in (
        AllReduce(),
        PowerSGD(2),
        WireDtype(AllReduce(), "int8"),
        Quantize("int4"),
        TopK(8, per=(8, 8)),
        Sign(),
        TwoLevel(PowerSGD(2), 2),
        LocalSGD(2),
        LocalSGD({2: 1, 4: 3}, start_step=2),
        diloco(2),
        diloco(3, fragments=2, overlap=1, compressor=Quantize("int4")),
        diloco(2, eager=True),
    )
}


#: Of which a step of the user's own is taken, which has one backward pass. The others accumulate.
OPAQUE = [repr(method) for method in (AllReduce(), PowerSGD(2), LocalSGD(2), diloco(2))]
ACCUMULATE = 2


def model():
    """Its buffers and what it draws differ between replicas; its vectors take several chunks of a
    ring."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Linear(24, 40, bias=False),
        nn.BatchNorm1d(40),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(40, 24),
    )


def batches(replica, replicas):
    generator = torch.Generator().manual_seed(replica)
    return (torch.randn(8, 24, generator=generator) for _ in range(100))


def loss_of(net, x):
    return F.mse_loss(net(x), x.sort(1).values)


def optimizer_of(parameters, rate=1e-2):
    made = torch.optim.AdamW(parameters, rate)
    return made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))


def clip(net):
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)


def sums(net):
    return [p.detach().sum() for p in net.parameters()]


def whole(rate=1e-2, accumulate=1):
    net = model()
    return Training(
        net,
        optimizer=lambda parameters: optimizer_of(parameters, rate),
        batches=batches,
        loss=loss_of,
        after_backward=lambda: clip(net),
        accumulate=accumulate,
        evaluate=sums,
    )


def parts(replica, replicas, rate=1e-2):
    """A step of the user's own."""
    net = model()
    (optimizer, scheduler), data = optimizer_of(net.parameters(), rate), batches(replica, replicas)

    def step():
        optimizer.zero_grad()
        loss = loss_of(net, next(data))
        loss.backward()
        clip(net)
        optimizer.step()
        scheduler.step()
        return loss.item()

    return net, optimizer, step, lambda: sums(net)


@cases.each(METHODS)
def trained(world, method):
    """As a user writes it."""
    net = model()
    seed_all(int(np.random.SeedSequence((SEED, world.rank)).generate_state(1)[0]))
    optimizer, scheduler = optimizer_of(net.parameters())
    named = dict(net.named_parameters())
    ddp = net
    if isinstance(method, LocalSGD):
        if method.start_step:
            ddp = nn.parallel.DistributedDataParallel(
                net, process_group=world.group, broadcast_buffers=False
            )
        local_sgd(ddp, optimizer, method, process_group=world.group)
    else:
        averager = Averager(method, named, world.group)
    data, losses, micro_batches = (
        batches(world.rank, world.size),
        [],
        1 if repr(method) in OPAQUE else ACCUMULATE,
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro_batches):
            with ddp.no_sync() if ddp is not net and part + 1 < micro_batches else nullcontext():
                loss = loss_of(ddp, next(data))
                (loss / micro_batches).backward()
            losses.append(loss.item())
        if not isinstance(method, LocalSGD):
            averager({name: p.grad for name, p in named.items()})
        clip(net)
        optimizer.step()
        scheduler.step()
    return losses, {name: p.detach() for name, p in named.items()}, dict(net.named_buffers())


@pytest.mark.parametrize("name", METHODS)
def test_replicas_in_one_process_have_the_bits_of_processes(results, name):
    torch.set_num_threads(threads())
    accumulate = 1 if name in OPAQUE else ACCUMULATE
    replicas = replicas_of(whole(accumulate=accumulate), METHODS[name], RANKS, SEED)
    losses, rates = zip(*[(replicas.step(), replicas.rate) for _ in range(STEPS)], strict=True)
    assert list(rates) == pytest.approx([1e-2 / (1 + step) for step in range(STEPS)])
    found = results(f"trained[{name}]")
    for rank, (_, parameters, buffers) in enumerate(found):
        if "start_step" in name:  # DDP averages gradients there, and cuts its messages otherwise
            assert relative(parameters, parameters_of(replicas, rank)) < 1e-4
        else:
            assert same_bits(parameters, parameters_of(replicas, rank)), rank
            assert same_bits(buffers, replicas._buffers[rank]), rank
    theirs = np.mean([losses for losses, *_ in found], axis=0).reshape(STEPS, accumulate).mean(1)
    assert losses == pytest.approx(theirs.tolist(), rel=1e-5)


@pytest.mark.parametrize("name", OPAQUE)
def test_a_step_of_the_users_own_has_the_bits_of_processes(results, name):
    torch.set_num_threads(threads())
    replicas = OpaqueReplicas(parts, METHODS[name], RANKS, SEED)
    for _ in range(STEPS):
        replicas.step()
    for (_, parameters, buffers), (net, *_) in zip(
        results(f"trained[{name}]"), replicas.made, strict=True
    ):
        assert same_bits(parameters, {name: p.detach() for name, p in net.named_parameters()})
        assert same_bits(buffers, dict(net.named_buffers()))
    assert replicas.held_out() == list(map(float, sums(replicas.made[0][0])))
    assert replicas.sent > 0


@pytest.mark.parametrize("make", [whole, parts])
@pytest.mark.parametrize("method", [AllReduce(), LocalSGD(2)], ids=repr)
def test_a_factor_on_the_rate_trains_as_the_rate_that_it_makes(method, make):
    """Whatever a scheduler makes of the rate, which it sees as the user wrote it."""

    def trained(rate, factor):
        return run(partial(make, rate=rate), method, 2, 4, SEED, {4}, lambda: None, factor)

    found, expected = trained(1e-3, 4.0), trained(4e-3, 1.0)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.held_out[4] == pytest.approx(expected.held_out[4], rel=1e-5)
    assert found.rates == pytest.approx([4e-3 / (1 + step) for step in range(4)])
    assert found.factor == 4.0
    assert found.losses != pytest.approx(trained(1e-3, 1.0).losses, rel=1e-3)


def test_an_optimizer_without_a_rate_has_none_to_search():
    optimizer = lambda parameters: torch.optim.Optimizer(parameters, {})  # noqa: E731
    with pytest.raises(ValueError, match="rates"):
        run(
            lambda: Training(**FINE | {"optimizer": optimizer}),
            AllReduce(),
            2,
            1,
            0,
            (),
            lambda: None,
            2.0,
        )


def test_a_step_that_cannot_be_taken_apart_is_refused_by_name():
    def made(passes, layers=2):
        def make(replica, replicas):
            net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

            def step():
                for _ in range(passes):
                    loss = sum(layer(torch.ones(1, 2)).sum() for layer in net[:layers])
                    loss.backward()
                return loss

            return net, torch.optim.SGD(net.parameters(), 0.1), step

        return OpaqueReplicas(make, AllReduce(), 2, 0)

    made(1).step()
    with pytest.raises(ValueError, match="accumulate"):
        made(2).step()
    with pytest.raises(ValueError, match=r"1\.weight"):
        made(1, layers=1).step()
    with pytest.raises(TypeError, match="make"):
        OpaqueReplicas(lambda replica, replicas: nn.Linear(1, 1), AllReduce(), 2, 0)


@cases.each({"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64})
def summed(world, dtype):
    """Of vectors that take less than a chunk for each rank, some chunks, and several pieces of
    them."""
    return [
        (own := addend(world.rank, n, dtype), dist.all_reduce(own, group=world.group))[0]
        for n in (3, 1001, 700_001)
    ]


def addend(rank, n, dtype):
    generator = torch.Generator().manual_seed(1000 * n + rank)
    drawn = torch.randn(2, n, generator=generator, dtype=torch.float64)
    return (drawn[0] * 100 ** drawn[1]).to(dtype)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_sums_have_the_bits_of_a_ring(results, name):
    dtype = getattr(torch, name)
    for n, theirs in zip((3, 1001, 700_001), results(f"summed[{name}]")[0], strict=True):
        vectors = [addend(rank, n, dtype) for rank in range(RANKS)]
        assert same_bits(ring_sum(vectors), theirs)
        assert n == 3 or not same_bits(sum(vectors), theirs)


def test_who_waits_in_vain_is_told():
    world = World(3)
    group = [world.groups(rank).whole for rank in range(3)]

    def send(rank):
        if rank != 1:
            dist.all_reduce(torch.ones(2), group=group[rank], async_op=True).wait()

    with pytest.raises(RuntimeError, match="replica 0 waits"):
        world.on_each(send)

    def fail(rank):
        if rank == 1:
            raise KeyError(rank)
        send(rank)

    with pytest.raises(KeyError):
        world.on_each(fail)
    assert world.on_each(lambda rank: rank) == [0, 1, 2]


def test_gradients_that_some_or_all_replicas_lack():
    net = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in ("all", "some", "none")})
    nn.init.zeros_(net["some"].weight)

    def loss(net, batch):
        rank, x = batch
        return (net["all"](x) + (net["some"](x) if rank == 1 else 0)).sum()

    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    decaying = lambda parameters: torch.optim.SGD(parameters, 1.0, weight_decay=0.1)  # noqa: E731
    one = Training(net, decaying, lambda replica, replicas: [(replica, torch.ones(1, 3))], loss)
    replicas_of(one, AllReduce(), 2, 0).step()
    # half of what one replica has
    assert net["some"].weight.detach().equal(torch.full((3, 3), -0.5))
    assert net["none"].weight.detach().equal(before["none.weight"])  # not decayed either
    assert net["all"].weight.detach().allclose(0.9 * before["all.weight"] - 1)


LINEAR = nn.Linear(4, 4)
FINE = {
    "model": LINEAR,
    "optimizer": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "batches": lambda replica, replicas: [torch.full((2, 4), float(replica))],
    "loss": lambda net, x: net(x).mean(),
}
REFUSED = [
    ({"model": LINEAR.weight}, TypeError, "model"),
    ({"model": nn.Linear(2, 2).requires_grad_(False)}, ValueError, "model"),
    ({"optimizer": torch.optim.SGD(LINEAR.parameters(), 0.1)}, TypeError, "optimizer"),
    ({"optimizer": lambda parameters: None}, TypeError, "optimizer"),
    ({"batches": [1, 2]}, TypeError, "batches"),
    ({"batches": lambda replica, replicas: []}, ValueError, "batches"),
    ({"batches": lambda replica, replicas: [torch.ones(2, 4)]}, ValueError, "batches(0, 2)"),
    ({"loss": lambda net, x: net(x)}, TypeError, "loss"),
    ({"accumulate": 0}, ValueError, "accumulate"),
    ({"accumulate": True}, TypeError, "accumulate"),
    ({"evaluate": 3}, TypeError, "evaluate"),
    ({"evaluate": lambda net: net(torch.ones(1, 4)).mean()}, ValueError, "evaluate"),
]


@pytest.mark.parametrize(
    ("wrong", "error", "named"), REFUSED, ids=[f"{r[2]} {i}" for i, r in enumerate(REFUSED)]
)
def test_what_is_no_training_is_refused_by_name(wrong, error, named):
    def use():
        replicas = replicas_of(Training(**FINE | wrong), AllReduce(), 2, 0)
        replicas.step()
        replicas.held_out()

    with pytest.raises(error) as refused:
        use()
    assert named in str(refused.value)


def test_what_cannot_be_kept_for_each_replica_is_refused(monkeypatch):
    class Grows(nn.Linear):
        def forward(self, x):
            self.register_buffer("seen", x.clone())
            return super().forward(x)

    with pytest.raises(ValueError, match="'seen'"):
        replicas_of(Training(**FINE | {"model": Grows(4, 4)}), AllReduce(), 2, 0).step()
    masters = FINE | {"optimizer": lambda params: WithMasters(params, lr=0.1)}
    replicas_of(Training(**masters), AllReduce(), 2, 0).step()  # which has one optimizer for all
    with pytest.raises(ValueError, match="WithMasters keeps weights in its state, as 'master'"):
        replicas_of(Training(**masters), diloco(3), 2, 0).step()
    monkeypatch.setattr(
        "gradwire.torch_backend.advise.compare.replicas.free_bytes", lambda device: 300
    )
    for algorithm in (AllReduce(), LocalSGD(2)):
        with pytest.raises(ValueError, match="replicas=8"):
            replicas_of(Training(**FINE), algorithm, 8, 0)
    for algorithm in (TwoLevel(AllReduce()), LocalSGD({"node": 1, "all": 2}), LocalSGD({3: 2})):
        with pytest.raises(ValueError, match=r"node|period"):
            replicas_of(Training(**FINE | {"model": nn.Linear(1, 1)}), algorithm, 2, 0)


@pytest.mark.parametrize("local", [LocalSGD(3), diloco(3)], ids=repr)
def test_held_out_losses_are_those_of_what_replicas_have_in_common(local):
    """Between two averages the mean of the replicas, of DiLoCo the outer parameters; and looking
    changes nothing."""

    def made():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        parts = {
            "model": net,
            "evaluate": lambda net: torch.cat([p.detach().flatten() for p in net.parameters()]),
            "loss": lambda net, x: net(x + 1).square().mean(),
        }
        return replicas_of(Training(**FINE | parts), local, 2, 0)

    seen, unseen = made(), made()
    start = seen.held_out()
    for step in range(1, 5):
        assert seen.step() == unseen.step()
        found = torch.tensor(seen.held_out())
        sets = [
            torch.cat([p.flatten() for p in parameters_of(seen, rank).values()])
            for rank in range(2)
        ]
        assert sets[0].equal(sets[1]) == (step == 3)
        if step == 3 or not local.has_outer:
            torch.testing.assert_close(found, (sets[0] + sets[1]) / 2)
        elif step < 3:
            torch.testing.assert_close(found, torch.tensor(start))


@pytest.mark.parametrize("method", [AllReduce(), LocalSGD(2)], ids=repr)
def test_a_look_changes_neither_modes_nor_what_is_drawn_next(method):
    """A part that its owner has put in `eval()` stays there, and an `evaluate` that draws, as a
    DataLoader does, gives a replica no other dropout."""

    def made():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
        net[2].eval()

        def evaluate(net):
            assert not net.training
            assert torch.rand(3).sum() > 0
            return [torch.zeros(()), torch.ones(())]

        parts = {
            "model": net,
            "evaluate": evaluate,
            "batches": lambda replica, replicas: [torch.randn(2, 4) + replica] * 9,
            "loss": lambda net, x: net(x + 1).square().mean(),
        }
        return replicas_of(Training(**FINE | parts), method, 2, 0)

    seen, unseen = made(), made()
    for _ in range(4):
        assert seen.step() == unseen.step()
        seen.held_out()
    assert [m.training for m in seen.training.model] == [True, True, False]


@pytest.mark.parametrize(
    "method",
    [LocalSGD(4, fragments=2), diloco(3, fragments=2, overlap=1), diloco(2, eager=True)],
    ids=repr,
)
def test_a_step_of_the_users_own_is_looked_at_as_one_in_pieces(method):
    """Under what replicas have in common, also where they are apart; and each goes on from its
    own."""
    own, pieces = OpaqueReplicas(parts, method, 2, SEED), replicas_of(whole(), method, 2, SEED)
    for _ in range(6):
        assert own.step() == pytest.approx(pieces.step(), rel=1e-6)
        assert own.held_out() == pytest.approx(pieces.held_out(), rel=1e-5)


def test_memory_that_torch_keeps_for_itself_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 60)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert free_bytes(torch.device("cuda")) == 45


def test_ctrl_c_ends_all_replicas(monkeypatch):
    """None of them goes on in what is done next."""
    world = World(3)
    ended = world._ended

    class Interrupted:
        def __init__(self):
            self.asked = 0

        def acquire(self):
            self.asked += 1
            if self.asked == 1:
                raise KeyboardInterrupt
            return ended.acquire()

        def release(self):
            ended.release()

    monkeypatch.setattr(world, "_ended", Interrupted())
    steps = []

    def step(rank):
        for _ in range(1000):
            world.pause(rank)
            world._in_vain = 0
            steps.append(rank)

    with pytest.raises(KeyboardInterrupt):
        world.on_each(step)
    assert not any(world._running)
    assert len(steps) < 3000


# Trainings of Hugging Face's Trainer and of Lightning, against what these train themselves in one
# process.

os.environ["HF_HUB_OFFLINE"] = "1"
TOOL_STEPS = 7
#: Fewer batches than are taken, so that a second epoch begins.
TOOL_BATCHES = 10


def trained_by(training, algorithm, replicas):
    made = replicas_of(training, algorithm, replicas, 0)
    for _ in range(TOOL_STEPS):
        made.step()
    return parameters_of(made, 0)


def texts(batch):
    ids = ((torch.arange(8) + 3) * (batch + 1) % 64)[None]
    return {"input_ids": ids, "labels": ids}


def trainer_of(folder, **options):
    usual = {
        "max_steps": TOOL_STEPS,
        "max_grad_norm": 0.3,
        "gradient_accumulation_steps": ACCUMULATE,
        "ddp_backend": None,
    }
    batches = list(map(texts, range(TOOL_BATCHES)))
    return new_trainer(
        gpt2(64, 16),
        folder,
        None,
        None,
        batches,
        learning_rate=0.01,
        warmup_steps=2,
        **usual | options,
    )


@pytest.mark.slow
@quiet()
def test_a_trainer_is_compared_as_it_trains(tmp_path):
    whole = trainer_of(tmp_path)
    # it would weigh batches by their tokens, of which all have as many
    whole.model_accepts_loss_kwargs = False
    started = {name: p.detach().clone() for name, p in whole.model.named_parameters()}
    whole.train()
    found = trained_by(training_of_trainer(trainer_of(tmp_path)), AllReduce(), 1)
    assert relative(found, weights(whole.model)) < 1e-5
    assert relative(found, started) > 1e-2
    # Two replicas with half of the batches of a step each make the same steps.
    halves = trainer_of(tmp_path, gradient_accumulation_steps=1)
    halves.eval_dataset = [{name: x[0] for name, x in texts(batch).items()} for batch in range(16)]
    training = training_of_trainer(halves)
    assert relative(trained_by(training, AllReduce(), 2), weights(whole.model)) < 1e-5
    assert len(training.evaluate(training.model)) == 2  # of 8 texts each
    # Replicas that train by themselves have an optimizer each.
    trained_by(training_of_trainer(trainer_of(tmp_path)), LocalSGD(2), 2)
    trained_by(training_of_trainer(trainer_of(tmp_path, bf16=True)), AllReduce(), 1)
    with pytest.raises(ValueError, match="max_steps"):
        training_of_trainer(trainer_of(tmp_path, max_steps=-1))
    halves.create_optimizer()
    with pytest.raises(ValueError, match="optimizer"):
        training_of_trainer(halves)


def step_every_epoch(module):
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.5)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)]


def step_every_step(module):
    (optimizer,), (scheduler,) = step_every_epoch(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def module_of(optimizer=step_every_step):
    torch.manual_seed(0)

    def loss(module, batch):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(batch))
        return (module.net(x) - x.sin()).square().mean()

    return lightning_module(nn.Linear(6, 6), loss, optimizer)


def numbers():
    return DataLoader(range(TOOL_BATCHES), batch_size=None)


@pytest.mark.slow
@quiet()
@pytest.mark.parametrize("optimizer", [step_every_step, step_every_epoch])
def test_a_module_of_lightning_is_compared_as_it_trains(optimizer):
    from pytorch_lightning import LightningDataModule, Trainer

    off = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    whole = module_of(optimizer)
    options = {"accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": 0.3}
    Trainer(accelerator="cpu", devices=1, max_steps=TOOL_STEPS, **off, **options).fit(
        whole, numbers()
    )

    class Data(LightningDataModule):
        def setup(self, stage):
            self.ready = stage

        def train_dataloader(self):
            assert self.ready == "fit"
            return numbers()

        def val_dataloader(self):
            return numbers()

    found = trained_by(
        training_of_lightning(module_of(optimizer), Data(), **options), AllReduce(), 1
    )
    assert relative(found, weights(whole)) < 1e-5
    assert relative(found, weights(module_of())) > 1e-2
    halves = training_of_lightning(module_of(optimizer), numbers(), gradient_clip_val=0.3)
    assert halves.evaluate is None
    assert relative(trained_by(halves, AllReduce(), 2), weights(whole)) < 1e-5
    validated = module_of(optimizer)
    type(validated).validation_step = lambda self, batch, number: {
        "loss": self.training_step(batch, number)
    }
    training = training_of_lightning(validated, Data())
    assert len(training.evaluate(training.model)) == TOOL_BATCHES
    type(validated).validation_step = lambda self, batch: None
    with pytest.raises(TypeError, match="validation_step"):
        training.evaluate(training.model)


def plateau(module):
    (optimizer,), _ = step_every_epoch(module)
    return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]


WRONG = [
    (lambda module: step_every_epoch(module)[0] * 2, ValueError, "configure_optimizers"),
    (lambda module: plateau(module)[1][0], ValueError, "optimizers"),
    (plateau, TypeError, "ReduceLROnPlateau"),
    (lambda module: {"optimizer": None}, ValueError, "configure_optimizers"),
]


#: A list of one dictionary, and two lists in a list.
ALIKE = [
    lambda module: [step_every_step(module)],
    lambda module: list(step_every_epoch(module)),
]


@pytest.mark.parametrize("optimizer", ALIKE)
def test_forms_of_optimizers_that_lightning_takes(optimizer):
    class Module(nn.Linear):
        automatic_optimization = True

        def configure_optimizers(self):
            return optimizer(self)

    made, _ = training_of_lightning(Module(2, 2), numbers()).made_optimizer()
    assert isinstance(made, torch.optim.SGD)


def test_a_module_is_set_up_as_lightning_does():
    """Before its loaders are asked for; several of them are refused."""

    class Module(nn.Module):
        automatic_optimization = True

        def prepare_data(self):
            self.told = ["prepare_data"]

        def setup(self, stage):
            self.told.append(stage)

        def configure_model(self):
            self.net = nn.Linear(2, 2)

        def train_dataloader(self):
            assert self.told == ["prepare_data", "fit"]
            return [numbers()] * loaders

        def validation_step(self, batch, number):
            return batch

        def val_dataloader(self):
            return [numbers(), numbers()]

    loaders = 2
    with pytest.raises(TypeError, match="val_dataloader returns 2 loaders"):
        training_of_lightning(Module())
    Module.val_dataloader = lambda self: numbers()
    training = training_of_lightning(Module())
    assert set(training.parameters) == {"net.weight", "net.bias"}
    with pytest.raises(TypeError, match="train_dataloader returns 2 loaders"):
        next(iter(training.batches(0, 1)))


@pytest.mark.parametrize(("optimizer", "error", "named"), WRONG)
def test_what_configures_no_optimizer_is_refused(optimizer, error, named):
    """By what a module has, whoever wrote it."""

    class Module(nn.Linear):
        automatic_optimization = True

        def configure_optimizers(self):
            return optimizer(self)

    with pytest.raises(error, match=named):
        training_of_lightning(Module(2, 2), numbers()).made_optimizer()
    with pytest.raises(ValueError, match="automatic_optimization"):
        training_of_lightning(SimpleNamespace(automatic_optimization=False))


EDITED = """
import torch
import torch.nn.functional as F
from torch import nn
from gradwire.torch_backend import Training

RATE, LATER, SCALE, HELD = 1e-2, 1.0, 1.0, 1

def make():
    model = nn.Linear(8, 4)
    def optimizer(parameters):
        made = torch.optim.SGD(parameters, RATE)
        return made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: LATER if step > 4 else 1.0)
    def batches(replica, replicas):
        generator = torch.Generator().manual_seed(torch.initial_seed() + replica)
        return [SCALE * torch.randn(8, 8, generator=generator) for _ in range(20)]
    def loss(model, x):
        return F.mse_loss(model(x), x[:, :4].abs())
    held_out = torch.randn(64, 8, generator=torch.Generator().manual_seed(HELD)).split(8)
    return Training(model, optimizer, batches, loss, evaluate=lambda model: [loss(model, x) for x in held_out])
"""


def test_runs_of_a_training_that_was_edited_are_made_anew(tmp_path):
    """Its rate, one of later steps, its data, and held-out data."""
    edits = [
        ("RATE, LATER, SCALE, HELD = 1e-2, 1.0, 1.0, 1", f"RATE, LATER, SCALE, HELD = {now}")
        for now in ("1e-1, 1.0, 1.0, 1",)
    ]
    edits += [
        ("1e-1, 1.0, 1.0, 1", "1e-1, 0.1, 1.0, 1"),
        ("1e-1, 0.1, 1.0, 1", "1e-1, 0.1, 2.0, 1"),
        ("0.1, 2.0, 1", "0.1, 2.0, 2"),
    ]
    require_no_mixture(tmp_path, EDITED, *edits)


def edited_training(folder):
    file = folder / "edited_training.py"
    file.write_text(EDITED)
    return made_by(file), {"replicas": 2, "seeds": 1, "training": "mine"}


def test_a_file_keeps_what_its_other_methods_are_judged_by(tmp_path):
    """Uncompressed averages that are trained anew, for another period, are looked at where they
    were before, too; and are not named as taken."""
    (make, options), output = edited_training(tmp_path), tmp_path / "comparison.json"
    first, second = LocalSGD(7), LocalSGD(9)
    before = compare(make, [first], output=output, steps=60, **options)
    after = compare(make, [second], output=output, steps=60, **options)
    assert "plain" not in "".join(after.runs.notes)
    again = compare(make, [first, second], output=output, steps=60, **options)
    assert again.verdict(first) == before.verdict(first)
    assert again.verdict(second) == after.verdict(second)
    (note,) = again.runs.notes
    assert all(name in note for name in ("plain", "LocalSGD(period=7)", "LocalSGD(period=9)"))


def test_two_comparisons_at_once_write_one_file(tmp_path):
    (make, options), output = edited_training(tmp_path), tmp_path / "comparison.json"
    meanwhile = []

    def progress(method, seed, step):
        if method == "Sign()" and not meanwhile:
            meanwhile.append(compare(make, [PowerSGD(1)], output=output, steps=12, **options))

    compare(make, [Sign()], output=output, steps=12, progress=progress, **options)
    assert {repr(each) for each in Comparison.load(output).algorithms} == {
        "Sign()",
        "PowerSGD(rank=1)",
    }


def test_no_rate_is_searched_of_what_no_verdict_can_be_made(tmp_path):
    """A first average that comes after the last step; the others are compared."""
    make, options = edited_training(tmp_path)
    found = compare(make, [LocalSGD(50), Sign()], steps=12, rates=(0.5, 1.0), **options)
    assert found.factor(Sign()) in (0.5, 1.0)
    assert "not run" in str(found)
    assert "no verdict before 3 averages" in str(found).replace("\n", " ")


def test_objects_that_a_training_is_given_may_lie_elsewhere():
    class Data:
        pass

    first, second = (source_of(partial(whole, Data(), rate=0.1)) for _ in range(2))
    assert first == second != source_of(partial(whole, Data(), rate=0.2))


OWN = """
from dataclasses import dataclass
from gradwire import AllReduce

@dataclass(frozen=True)
class Scaled(AllReduce):
    async def step(self, ops, gradients, state, step):
        averages, state = await super().step(ops, gradients, state, step)
        return {n: x * FACTOR for n, x in averages.items()}, state
"""


def own(folder, factor, name="own_method"):
    """A method of somebody's own, as its file is now."""
    file = folder / f"{name}.py"
    file.write_text(OWN.replace("FACTOR", str(factor)))
    return loaded(file).Scaled()


def test_runs_of_an_own_method_that_was_edited_are_made_anew(tmp_path):
    """Nor are they those of another one of that name, or of a method that was measured for all."""
    file, output = tmp_path / "edited_training.py", tmp_path / "comparison.json"
    file.write_text(EDITED)
    make, options = made_by(file), {"replicas": 2, "steps": 6, "seeds": 1, "training": "mine"}
    first = own(tmp_path, 0.5)
    compare(make, [first], output=output, **options)
    again = compare(make, [first], output=output, **options)
    assert again.runs.notes == (f"Taken from {output}: plain (seeds 0); {first!r} (seeds 0)",)
    (left,) = Comparison.load(output, [first]).algorithms
    assert left is first
    for edited in (own(tmp_path, 0.25), own(tmp_path, 0.125, "another")):
        with pytest.warns(CompressionWarning, match="as it was written then"):
            assert not Comparison.load(output, [edited]).algorithms
        found = compare(make, [edited], output=output, **options)
        assert found.as_dict() == compare(make, [edited], **options).as_dict()
        assert "written in another way" in found.runs.notes[0]
    with pytest.raises(ValueError, match=r"Scaled\(.*is the name of two methods"):
        compare(make, [edited, own(tmp_path, 0.5)], **options)
    assert known_losses({"Sign()": Sign(), "mine": edited}).methods.keys() == {"Sign()"}
