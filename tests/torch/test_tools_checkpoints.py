"""What tools save and restore: Hugging Face's Trainer, accelerate, `torch.distributed.checkpoint`
and Lightning, each with a compressor's memory, by what `gradwire.torch_backend.integrations` has
for it, and with a `ZeroOptimizer`, as docs/works-together.md tells users to write it.

Two ranks train, save on the way, and go on; two, three and one restore. Steps are of the same
examples, however many ranks share them, so all of them have to arrive where the run arrived that
was not interrupted. The Trainer and Lightning, which take seconds to load on each rank, restore on
two and on one: how memory is divided among three, no tool has a part in.
"""

import contextlib
import functools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from gradwire import PowerSGD, TopK, diloco
from gradwire.torch_backend import (
    ZeroOptimizer,
    allreduce_hook,
    hook_with_zero_step,
    integrations,
    local_sgd,
    register_comm_hook,
)
from tests.torch.compare import COUNTS, relative, said, same_bits, weights
from tests.torch.models import mlp
from tests.torch.ranks import Cases
from tests.torch.tools import (
    gpt2,
    lightning_fit,
    lightning_module,
    new_accelerator,
    new_trainer,
    quiet,
)
from tests.torch.training import fit, sgd

os.environ["HF_HUB_OFFLINE"] = "1"
pytestmark = pytest.mark.slow

#: What saves comes first, and what restores besides.
SAVING = 2
RANKS = (SAVING, 1, 3)
#: Where the Trainer and Lightning are loaded.
HEAVY = (SAVING, 1)
WIDTHS = (24, 40, 32, 24)
#: 12 examples make a step: 2, 3 and 1 ranks share them equally.
EXAMPLES = 12
SAVED, STEPS = 5, 9
#: One that remembers something by name and a number for all.
ALGORITHMS = {"half step": PowerSGD(2, half_step=True)}
#: One whose next step is not a function of the mean error alone.
NONLINEAR = {"largest elements": TopK(8, per=64)}

cases = Cases(__file__, ranks=RANKS)


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """Of a number of ranks: the results. Files lie in one folder."""
    folder = tmp_path_factory.mktemp("tools")

    @functools.cache
    def of(ranks):
        if ranks != SAVING:
            of(SAVING).finish()
        (folder / str(ranks)).mkdir()
        return launches.enter_context(cases.run(folder / str(ranks), ranks, slow=True))

    with contextlib.ExitStack() as launches:
        yield of


def shared(world, name):
    """A place for files, the same for every launch."""
    return world.folder.parent / name


def data(step, rank, ranks):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(EXAMPLES, WIDTHS[0], generator=generator, dtype=torch.float64).chunk(ranks)[
        rank
    ]
    return x, x.sin().cumsum(1)


def loss_of(model, world, step):
    x, y = data(step, world.rank, world.size)
    return (model(x) - y).square().mean()


def errors(state):
    """The mean error, by parameter."""
    return {name: memory["error"] for name, memory in state["local"].items()}


def handed_on(world, name, *found):
    """What the ranks that save have found, for those that restore."""
    file = shared(world, f"{name}.found")
    if world.size == SAVING and world.rank == 0:
        torch.save(found, file)
    dist.barrier(world.group)
    return torch.load(file, weights_only=False)


def interrupted(world, name, make, make_again=None):
    """A run that is saved on its way, and one that restores that and goes on: what is seen when it
    is saved and restored, and the weights in the end, of the one and of the other; and the
    latter."""
    folder, found = shared(world, name), ()
    if world.size == SAVING:
        whole = make(world)
        whole.steps(range(SAVED))
        whole.save(folder)
        found = [whole.seen()]
        whole.steps(range(SAVED, STEPS))
        found += [weights(whole.model)]
    resumed = (make_again or make)(world)
    resumed.steps(resumed.before)
    resumed.restore(folder)
    restored = resumed.seen()
    resumed.steps(range(SAVED, STEPS))
    return handed_on(world, name, *found), (restored, weights(resumed.model)), resumed


slow_sgd = functools.partial(sgd, lr=0.02)


def adamw(model, **options):
    return ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3, eps=1e-3, **options)


class Run:
    """DDP in a user's own loop, or in accelerate's. `attach(ddp, optimizer)` gives what is saved
    besides the weights; of each rank's own in `parts`."""

    before = range(1)  # so that what is restored is not what is there already

    def __init__(self, world, attach=None, optimizer=slow_sgd, *, accelerated=False, parts=False):
        self.world, self.model, self.accelerator, self.parts = (
            world,
            mlp(*WIDTHS).double(),
            None,
            parts,
        )
        self.optimizer = self.inner = optimizer(self.model)
        self.ddp = self.model
        if accelerated:
            self.accelerator = new_accelerator()
            self.ddp, self.optimizer = self.accelerator.prepare(self.model, self.inner)
        # accelerate wraps nothing on one rank
        if not isinstance(self.ddp, DistributedDataParallel):
            self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.01)
        self.handle = attach and attach(self.ddp, self.inner)

    def steps(self, numbers):
        fit(self.ddp, self.optimizer, self.world, numbers, loss_of)

    def save(self, folder):
        self.accelerator.save_state(folder) if self.accelerator else self.with_weights(
            dcp.save, folder
        )

    def restore(self, folder):
        self.accelerator.load_state(folder) if self.accelerator else self.with_weights(
            dcp.load, folder
        )

    def with_weights(self, do, folder):
        model, state = self.model.state_dict(), self.state()
        do({"model": model, "state": state}, checkpoint_id=folder)
        self.model.load_state_dict(model)
        return state

    def state(self):
        return self.handle.sharded_state if self.parts else self.handle

    def seen(self):
        """By every rank."""
        state = self.handle.state_dict()
        return {"errors": errors(state)} | (
            {"tensors": state["tensors"]} if isinstance(self, Local) else {}
        )


class Accelerated(Run):
    """accelerate with a compressor."""

    def __init__(self, world, algorithm):
        super().__init__(world, accelerated=True)
        self.compression = integrations.AcceleratorCompression(
            self.accelerator, self.ddp, algorithm
        )
        self.handle = self.compression.handle


class Local(Run):
    """Local SGD, which is saved where replicas are equal."""

    before = range(0)

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        if self.accelerator:
            self.accelerator.register_for_checkpointing(self.handle)

    def save(self, folder):
        assert "Call synchronize() on every rank before" in said(super().save, f"{folder} refused")
        self.handle.synchronize()
        super().save(folder)


class Zero(Run):
    """DDP and a `ZeroOptimizer`. By what `torch.distributed.checkpoint` has for optimizers, if
    there are options for it."""

    def __init__(
        self,
        world,
        cls=torch.optim.AdamW,
        *,
        in_hook=False,
        by_torch=False,
        accelerated=False,
        **options,
    ):
        # Tools that know optimizers of one process want all of the state.
        options |= {"consolidate": True} if by_torch is not False else {}
        make = lambda model: ZeroOptimizer(model.named_parameters(), cls, lr=1e-3, **options)  # noqa: E731
        super().__init__(world, None, make, accelerated=accelerated)
        self.by_torch = by_torch
        if in_hook:
            self.ddp.register_comm_hook(
                None, hook_with_zero_step(allreduce_hook, self.ddp, self.optimizer)
            )

    def state(self):
        if self.by_torch is False:
            return self.inner.sharded_state
        return get_optimizer_state_dict(self.ddp, self.optimizer, options=self.by_torch)

    def with_weights(self, do, folder):
        state = super().with_weights(do, folder)
        if self.by_torch is not False and do is dcp.load:
            set_optimizer_state_dict(self.ddp, self.optimizer, state, options=self.by_torch)

    def seen(self):
        return self.whole() | {"weights": weights(self.model)}

    def whole(self):
        return self.inner.consolidated_state_dict(to=None)


@dataclass
class Row:
    """What saves, and what restores if it is another. On as many ranks the run goes on with the
    same `bits`, or as `near`; on others as `near`, or, if `other` ranks take other steps by
    themselves, however it likes."""

    make: Callable[..., Run]
    make_again: Callable[..., Run] | None = None
    bits: bool = True
    near: float = 1e-9
    other: bool = True


def compressed(algorithm, **options):
    return lambda world: Run(world, lambda ddp, _: register_comm_hook(ddp, algorithm), **options)


def local(compressor, **options):
    schedule = diloco(3, compressor=compressor)
    return lambda world: Local(world, lambda ddp, inner: local_sgd(ddp, inner, schedule), **options)


def zero(*args, **options):
    return lambda world: Zero(world, *args, **options)


HALF, LARGEST = ALGORITHMS["half step"], NONLINEAR["largest elements"]
FLAT, FULL = (
    StateDictOptions(flatten_optimizer_state_dict=True),
    StateDictOptions(full_state_dict=True),
)
ROWS = {
    # With DCP and the handle itself, all from the mean. Of a method that is not linear, the mean is
    # not enough.
    "DCP": Row(compressed(HALF), bits=False),
    "DCP in parts": Row(compressed(HALF, parts=True)),
    "DCP in parts, largest elements": Row(compressed(LARGEST, parts=True), other=False),
    "accelerate": Row(lambda world: Accelerated(world, HALF)),
    "accelerate, largest elements": Row(lambda world: Accelerated(world, LARGEST), other=False),
    "local SGD": Row(local(PowerSGD(2)), bits=False, other=False),
    "local SGD, accelerate": Row(local(PowerSGD(2), accelerated=True), bits=False, other=False),
    "local SGD in parts": Row(local(TopK(8, per=64), parts=True), other=False),
    "pieces": Row(zero()),
    "whole parameters": Row(zero(torch.optim.Adafactor, shard="parameter")),
    "pieces, then whole parameters": Row(zero(), zero(shard="bucket")),
    "master weights": Row(zero(master_dtype=torch.float32), near=1e-6),
    "nothing to remember": Row(zero(torch.optim.SGD)),
    "accelerate, whole": Row(zero(accelerated=True, consolidate=True)),
    "get_optimizer_state_dict": Row(zero(by_torch=None)),
    "get_optimizer_state_dict, a step in the hook": Row(zero(by_torch=None, in_hook=True)),
    "get_optimizer_state_dict, flat": Row(zero(by_torch=FLAT)),
    "get_optimizer_state_dict, full": Row(zero(by_torch=FULL)),
}


@cases.each({name: (name, row) for name, row in ROWS.items()})
@quiet()
def test_what_is_saved_goes_on_on_any_number_of_ranks(world, variant):
    """Bit for bit on as many, where each rank's own is saved; another number sums the same examples
    in another order."""
    name, row = variant
    (saved, whole), (restored, weights), resumed = interrupted(
        world, name, row.make, row.make_again
    )
    for key in saved.keys() - COUNTS:  # which `get_optimizer_state_dict` leaves out
        x = saved[key]
        # The mean of three equal numbers is rounded.
        assert (
            relative(restored[key], x) < 1e-12 if key == "errors" else same_bits(restored[key], x)
        )
    if world.size == SAVING and row.bits:
        assert same_bits(weights, whole)
    elif world.size == SAVING or row.other:
        assert relative(weights, whole) < row.near
    elif "local" not in name:
        assert relative(weights, whole) > 1e-6  # the tolerance above tells the one from the other
    assert world.agree(weights)
    if resumed.handle is None:
        assert bool(saved["state"]) == (name != "nothing to remember")
    elif not isinstance(resumed, Local):
        assert resumed.handle.rank_state_dict()["step"] == STEPS
        # Each has an error of its own: to mix them up would be seen.
        assert len(set(world.everyones(resumed.handle.local_error_norm()))) == world.size


@cases.case(ranks=(SAVING,))
@quiet()
def test_ranks_go_on_from_their_own_memory_all_together_or_not_at_all(world):
    run, folder = Accelerated(world, NONLINEAR["largest elements"]), shared(world, "some are lost")
    run.steps(range(3))
    run.save(folder)
    own, mean = run.handle.rank_state_dict(), errors(run.handle.state_dict())
    files = [Path(folder, f"compressor.pt.rank{r}") for r in range(world.size)]

    def moved(file, to):
        dist.barrier(world.group)
        if world.rank == 0:
            Path(file).rename(to)
        dist.barrier(world.group)

    run.steps(range(3, 4))
    before = run.handle.rank_state_dict()
    moved(files[1], f"{files[1]}.lost")
    assert "ValueError: ranks [1] have no memory of their own" in said(run.restore, folder)
    assert same_bits(run.handle.rank_state_dict(), before)
    moved(files[0], f"{files[0]}.lost")
    run.restore(folder)
    mine = run.handle.rank_state_dict()["tensors"]
    assert same_bits(
        {name: memory["error"] for name, memory in mine.items()}, {n: x[0] for n, x in mean.items()}
    )
    for file in files:
        moved(f"{file}.lost", file)
    run.restore(folder)
    assert same_bits(run.handle.rank_state_dict(), own)


# ---- Hugging Face's Trainer and Lightning, each with a compressor and a sharded optimizer


class Text(torch.utils.data.Dataset):
    """Sequences that count up."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        start = torch.randint(0, 64, (96, 1), generator=generator)
        self.x = (start + torch.randint(1, 4, (96, 1), generator=generator) * torch.arange(16)) % 64

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.x[i].clone()}


#: What the user has left out.
CONSOLIDATE = "consolidate_state_dict(to=0) on every rank"


def consolidate_callback(careless):
    """What docs/works-together.md tells users of the Trainer to write; and what the Trainer does if
    they do not."""
    from transformers import Trainer, TrainerCallback

    class Consolidate(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            if control.should_save:
                careless.append(
                    said(Trainer._save_optimizer_and_scheduler, self.trainer, args.output_dir)
                )
                optimizer.optimizer.consolidate_state_dict()

    return Consolidate()


def by_trainer(world, name, algorithm, whole):
    """Train, and save on the way, if `whole`; and go on from there. The weights of both, and the
    handle of what went on."""
    folder, careless = shared(world, name), []

    def trainer_of(to):
        model = gpt2(64, 16).double()
        options = {
            "max_steps": STEPS,
            "save_steps": SAVED,
            "save_strategy": "steps",
            "seed": 0,
            "logging_steps": 2,
        }
        options |= {
            "per_device_train_batch_size": EXAMPLES // world.size,
            "logging_strategy": "steps",
        }
        trainer = new_trainer(
            model, to, consolidate_callback(careless), adamw(model), dataset=Text(), **options
        )
        compression = integrations.TrainerCompression(trainer, algorithm)
        trainer.add_callback(compression)
        return trainer, compression

    checkpoint, elsewhere, found = Path(folder) / f"checkpoint-{SAVED}", f"{folder} elsewhere", None
    if whole:
        trainer, compression = trainer_of(folder)
        trainer.train()
        found = weights(trainer.model)
        assert compression.handle.stats().compression_ratio > 2
        assert Path(f"{checkpoint / 'compressor.pt'}.rank{world.rank}").exists()
        file = torch.load(checkpoint / "compressor.pt", weights_only=True)["local"]
        assert {len(x) for memory in file.values() for x in memory.values()} == {1}
        # Only the first rank saves: it is the one that has to say that nobody has consolidated.
        assert [CONSOLIDATE in words for words in careless] == [world.rank == 0] * 2
        assert world.rank == 0 or careless == ["", ""]
        if world.rank == 0:
            shutil.copytree(checkpoint, elsewhere)
        dist.barrier(world.group)
    again, compression = trainer_of(f"{folder} {world.size}")
    again.train(resume_from_checkpoint=elsewhere)
    drawn = [entry for entry in again.state.log_history if "gradwire/compression_ratio" in entry]
    assert [(entry["step"], entry["gradwire/steps"]) for entry in drawn] == [
        (step, step) for step in (2, 4, 6, 8)
    ]
    assert drawn[-1]["gradwire/compress_ms"] > 0 < drawn[-1]["gradwire/wait_ms"]
    resumed = weights(again.model)
    again.train()  # once more, from where it is
    assert compression.handle.stats().steps == 2 * STEPS
    return found, resumed


def by_lightning(world, name, algorithm, whole):
    def run(steps, checkpoint=None):
        def loss(module, _):
            return loss_of(module.net, world, module.trainer.global_step)

        compress = integrations.LightningCompression(algorithm)
        module = lightning_module(mlp(*WIDTHS).double(), loss, adamw)
        options = {"callbacks": [compress], "max_steps": steps}
        trainer = lightning_fit(module, world.size, 100, checkpoint=checkpoint, **options)
        assert compress.handle.rank_state_dict()["step"] == steps
        return trainer, weights(module.net)

    checkpoint = f"{shared(world, name)}.ckpt"
    if whole:
        run(SAVED)[0].save_checkpoint(checkpoint)
        assert Path(f"{checkpoint}.rank{world.rank}").exists()
    return run(STEPS)[1] if whole else None, run(STEPS, checkpoint)[1]


WITH_BOTH = {
    f"{by.__name__}, {name}": (by, near, algorithm)
    # the loss of the Trainer's model is in float32
    for by, near in ((by_trainer, 1e-6), (by_lightning, 1e-9))
    for name, algorithm in (ALGORITHMS | NONLINEAR).items()
}


@cases.each(WITH_BOTH, ranks=HEAVY)
@quiet()
def test_a_tool_saves_and_resumes_the_compressor_and_a_sharded_optimizer(world, variant):
    by, near, algorithm = variant
    name = f"{by.__name__} {algorithm}"
    whole, resumed = by(world, name, algorithm, world.size == SAVING)
    (whole,) = handed_on(world, name, whole)
    if world.size == SAVING:
        assert same_bits(resumed, whole)
    elif algorithm in ALGORITHMS.values():
        assert relative(resumed, whole) < near


@cases.case(ranks=(SAVING,))
@quiet()
def test_no_part_of_a_sharded_optimizer_is_lost(world):
    folder = shared(world, "zero refused")
    careless = Zero(world, accelerated=True)
    careless.save(shared(world, "careless"))  # nothing has been learned: that is all of it
    careless.steps(range(1))
    words = said(careless.save, shared(world, "careless"))
    assert words.startswith("RuntimeError")
    assert "consolidate=True, for tools that call state_dict" in words
    assert CONSOLIDATE in words
    fresh, again, run = Zero(world), Zero(world), Zero(world)
    fresh.save(folder)  # has learned nothing
    again.steps(range(1))
    again.restore(folder)
    assert fresh.whole()["state"] == again.whole()["state"] == {}
    run.steps(range(1))
    words = said(dcp.save, {"optimizer": run.optimizer}, checkpoint_id=folder)
    assert "give torch.distributed.checkpoint optimizer.sharded_state" in words
    assert "consolidate=True" in said(get_optimizer_state_dict, run.ddp, run.optimizer)
    run.save(folder)

    def load(optimizer_class=torch.optim.AdamW, **options):
        other = Zero(world, optimizer_class, **options)
        state = other.optimizer.rank_state_dict()
        words = said(other.restore, folder)
        assert same_bits(
            other.optimizer.rank_state_dict()["tensors"]["0.weight"], state["tensors"]["0.weight"]
        )
        return words

    assert "max_exp_avg_sq" in load(amsgrad=True)  # more is remembered
    assert "lr_decay" in load(torch.optim.Adagrad)
    Zero(world, master_dtype=torch.float32).save(folder)
    assert (
        "and AdamW remembers ['exp_avg', 'exp_avg_sq', 'step'] with the options given here"
        in load()
    )
    whole, new = Zero(world, consolidate=True), Zero(world, consolidate=True)
    whole.steps(range(1))
    folder = shared(world, "zero consolidated")
    dcp.save({"optimizer": whole.optimizer}, checkpoint_id=folder)
    words = said(dcp.load, {"optimizer": new.optimizer}, checkpoint_id=folder)
    assert "save and load optimizer.sharded_state" in words
    sharded = new.optimizer.sharded_state
    assert "sharded_format is None" in said(sharded.load_state_dict, {"state": {}})
    state = sharded.state_dict()
    turned = state["shapes"] | {"0.weight": list(reversed(state["shapes"]["0.weight"]))}
    assert "parameter '0.weight' has shape" in said(
        sharded.load_state_dict, {**state, "shapes": turned}
    )
