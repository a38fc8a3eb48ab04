"""What tools save and restore: Hugging Face's Trainer, accelerate, `torch.distributed.checkpoint` and Lightning, each with a compressor's memory, by what
`gradwire.torch_backend.integrations` has for it, and with a `ZeroOptimizer`, as docs/integrations.md tells users to write it.

Two ranks train, save on the way, and go on; two, three and one restore. Steps are of the same examples, however many ranks share them, so all
of them have to arrive where the run arrived that was not interrupted. The Trainer and Lightning, which take seconds to load on each rank, restore on two
and on one: how memory is divided among three, no tool has a part in.
"""

import functools
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
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
from tests.torch.compare import relative, said, same_bits, weights
from tests.torch.models import mlp
from tests.torch.ranks import Cases
from tests.torch.tools import gpt2, lightning_fit, lightning_module, new_accelerator, new_trainer, quiet
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
            of(SAVING)
        (folder / str(ranks)).mkdir()
        return cases.run(folder / str(ranks), ranks)

    return of


def shared(world, name):
    """A place for files, the same for every launch."""
    return world.folder.parent / name


def data(step, rank, ranks):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(EXAMPLES, WIDTHS[0], generator=generator, dtype=torch.float64).chunk(ranks)[rank]
    return x, x.sin().cumsum(1)


def loss_of(model, world, step):
    x, y = data(step, world.rank, world.size)
    return (model(x) - y).square().mean()


def errors(handle):
    """The mean error, by parameter. Every rank calls this."""
    return {name: memory["error"] for name, memory in handle.state_dict()["local"].items()}


def handed_on(world, name, *found):
    """What the ranks that save have found, for those that restore."""
    file = shared(world, f"{name}.found")
    if world.size == SAVING and world.rank == 0:
        torch.save(found, file)
    dist.barrier(world.group)
    return torch.load(file, weights_only=False)


def interrupted(world, name, make, make_again=None, *, seen, before=0):
    """A run that is saved on its way, and one that restores that and goes on: what is `seen` when it is saved and restored, and the weights
    in the end, of the one and of the other; and the latter."""
    folder, found = shared(world, name), ()
    if world.size == SAVING:
        whole = make(world)
        whole.steps(range(SAVED))
        whole.save(folder)
        found = [seen(whole)]
        whole.steps(range(SAVED, STEPS))
        found += [weights(whole.model)]
    resumed = (make_again or make)(world)
    resumed.steps(range(before))  # so that what is restored is not what is there already
    resumed.restore(folder)
    restored = seen(resumed)
    resumed.steps(range(SAVED, STEPS))
    return handed_on(world, name, *found), (restored, weights(resumed.model)), resumed


slow_sgd = functools.partial(sgd, lr=0.02)


def adamw(model, **options):
    return ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3, eps=1e-3, **options)


class Run:
    """DDP in a user's own loop, or in accelerate's. `attach(ddp, optimizer)` gives what is saved besides the weights; of each rank's own in `parts`."""

    def __init__(self, world, attach=None, optimizer=slow_sgd, *, accelerated=False, parts=False):
        self.world, self.model, self.accelerator, self.parts = world, mlp(*WIDTHS).double(), None, parts
        self.optimizer = self.inner = optimizer(self.model)
        self.ddp = self.model
        if accelerated:
            self.accelerator = new_accelerator()
            self.ddp, self.optimizer = self.accelerator.prepare(self.model, self.inner)
        if not isinstance(self.ddp, DistributedDataParallel):  # accelerate wraps nothing on one rank
            self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.01)
        self.handle = attach and attach(self.ddp, self.inner)

    def steps(self, numbers):
        fit(self.ddp, self.optimizer, self.world, numbers, loss_of)

    def save(self, folder):
        self.accelerator.save_state(folder) if self.accelerator else self.with_weights(dcp.save, folder)

    def restore(self, folder):
        self.accelerator.load_state(folder) if self.accelerator else self.with_weights(dcp.load, folder)

    def with_weights(self, do, folder):
        model, state = self.model.state_dict(), self.state()
        do({"model": model, "state": state}, checkpoint_id=folder)
        self.model.load_state_dict(model)
        return state

    def state(self):
        return self.handle.sharded_state if self.parts else self.handle


class Accelerated(Run):
    """accelerate with a compressor."""

    def __init__(self, world, algorithm):
        super().__init__(world, accelerated=True)
        self.compression = integrations.AcceleratorCompression(self.accelerator, self.ddp, algorithm)
        self.handle = self.compression.handle


def in_loop(**options):
    return lambda world, algorithm: Run(world, lambda ddp, _: register_comm_hook(ddp, algorithm), **options)


WAYS = {"DCP": in_loop(), "DCP in parts": in_loop(parts=True), "accelerate": Accelerated}


@cases.each(
    {f"{way}, {name}": (way, name) for way in WAYS for name in ALGORITHMS | (NONLINEAR if way != "DCP" else {})}
)
@quiet()
def test_ranks_go_on_from_their_own_memory_and_another_number_from_the_mean(world, variant):
    """Where each rank's own is saved; with DCP and the handle itself, all from the mean."""
    way, algorithm = variant[0], (ALGORITHMS | NONLINEAR)[variant[1]]
    (saved, whole), (restored, weights), resumed = interrupted(
        world,
        f"{way} {algorithm}",
        lambda world: WAYS[way](world, algorithm),
        seen=lambda run: errors(run.handle),
        before=1,
    )
    assert relative(restored, saved) < 1e-12  # the mean of three equal numbers is rounded
    assert resumed.handle.rank_state_dict()["step"] == STEPS
    if world.size == SAVING and way != "DCP":
        assert same_bits(weights, whole)
    elif algorithm in ALGORITHMS.values():
        assert relative(weights, whole) < 1e-9
    else:
        assert relative(weights, whole) > 1e-6  # the tolerance above tells the one from the other
    # Each has an error of its own: to mix them up would be seen.
    assert len(set(world.everyones(resumed.handle.error_norm()))) == world.size


@cases.case(ranks=(SAVING,))
@quiet()
def test_ranks_go_on_from_their_own_memory_all_together_or_not_at_all(world):
    run, folder = Accelerated(world, NONLINEAR["largest elements"]), shared(world, "some are lost")
    run.steps(range(3))
    run.save(folder)
    own, mean = run.handle.rank_state_dict(), errors(run.handle)
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
    assert same_bits({name: memory["error"] for name, memory in mine.items()}, {n: x[0] for n, x in mean.items()})
    for file in files:
        moved(f"{file}.lost", file)
    run.restore(folder)
    assert same_bits(run.handle.rank_state_dict(), own)


TOOLS = {
    "DCP": PowerSGD(2),
    "accelerate": PowerSGD(2),
    "DCP in parts": TopK(8, per=64),
}


class Local(Run):
    """Local SGD."""

    def save(self, folder):
        assert "Call synchronize() on every rank before" in said(super().save, f"{folder} refused")
        self.handle.synchronize()
        super().save(folder)


@cases.each({tool: (tool, compressor) for tool, compressor in TOOLS.items()})
@quiet()
def test_local_sgd_is_saved_where_replicas_are_equal(world, variant):
    tool, compressor = variant
    schedule, options = (
        diloco(3, compressor=compressor),
        {"accelerated": tool == "accelerate", "parts": "parts" in tool},
    )

    def make(world):
        run = Local(world, lambda ddp, inner: local_sgd(ddp, inner, schedule), **options)
        if run.accelerator:
            run.accelerator.register_for_checkpointing(run.handle)
        return run

    (saved, whole), (restored, weights), resumed = interrupted(
        world, f"local {tool}", make, seen=lambda run: run.handle.state_dict()
    )
    assert same_bits(restored["tensors"], saved["tensors"])
    now, then = ({n: m["error"] for n, m in state["local"].items()} for state in (restored, saved))
    assert relative(now, then) < 1e-12
    assert resumed.handle.synchronized
    assert world.agree(weights)
    if world.size == SAVING:  # another number of replicas takes other steps by itself
        assert same_bits(weights, whole) if options["parts"] else relative(weights, whole) < 1e-9


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
    """What docs/integrations.md tells users of the Trainer to write; and what the Trainer does if they do not."""
    from transformers import Trainer, TrainerCallback

    class Consolidate(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            if control.should_save:
                careless.append(said(Trainer._save_optimizer_and_scheduler, self.trainer, args.output_dir))
                optimizer.optimizer.consolidate_state_dict()

    return Consolidate()


def by_trainer(world, name, algorithm, whole):
    """Train, and save on the way, if `whole`; and go on from there. The weights of both, and the handle of what went on."""
    folder, careless = shared(world, name), []

    def trainer_of(to):
        model = gpt2(64, 16).double()
        options = {"max_steps": STEPS, "save_steps": SAVED, "save_strategy": "steps", "seed": 0, "logging_steps": 2}
        options |= {"per_device_train_batch_size": EXAMPLES // world.size, "logging_strategy": "steps"}
        trainer = new_trainer(model, to, consolidate_callback(careless), adamw(model), dataset=Text(), **options)
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
    assert [(entry["step"], entry["gradwire/steps"]) for entry in drawn] == [(step, step) for step in (2, 4, 6, 8)]
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
    for by, near in ((by_trainer, 1e-6), (by_lightning, 1e-9))  # the loss of the Trainer's model is in float32
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


# ---- ZeroOptimizer where a tool does not know of it


class Zero(Run):
    """DDP and a `ZeroOptimizer`. By what `torch.distributed.checkpoint` has for optimizers, if there are options for it."""

    def __init__(self, world, cls=torch.optim.AdamW, *, in_hook=False, by_torch=False, accelerated=False, **options):
        # Tools that know optimizers of one process want all of the state.
        options |= {"consolidate": True} if by_torch is not False else {}
        make = lambda model: ZeroOptimizer(model.named_parameters(), cls, lr=1e-3, **options)  # noqa: E731
        super().__init__(world, None, make, accelerated=accelerated)
        self.by_torch = by_torch
        if in_hook:
            self.ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, self.ddp, self.optimizer))

    def state(self):
        if self.by_torch is False:
            return self.inner.sharded_state
        return get_optimizer_state_dict(self.ddp, self.optimizer, options=self.by_torch)

    def with_weights(self, do, folder):
        state = super().with_weights(do, folder)
        if self.by_torch is not False and do is dcp.load:
            set_optimizer_state_dict(self.ddp, self.optimizer, state, options=self.by_torch)

    def whole(self):
        return self.inner.consolidated_state_dict(to=None)


def zero(*args, **options):
    return lambda world: Zero(world, *args, **options)


#: What saves, and what restores if it is another.
SHARDED = {
    "pieces": (zero(),),
    "whole parameters": (zero(torch.optim.Adafactor, shard="parameter"),),
    "pieces, then whole parameters": (zero(), zero(shard="bucket")),
    "master weights": (zero(master_dtype=torch.float32),),
    "nothing to remember": (zero(torch.optim.SGD),),
    "accelerate": (zero(accelerated=True, consolidate=True),),
    "get_optimizer_state_dict": (zero(by_torch=None),),
    "get_optimizer_state_dict, a step in the hook": (zero(by_torch=None, in_hook=True),),
    "get_optimizer_state_dict, flat": (zero(by_torch=StateDictOptions(flatten_optimizer_state_dict=True)),),
    "get_optimizer_state_dict, full": (zero(by_torch=StateDictOptions(full_state_dict=True)),),
}


@cases.each(SHARDED.keys())
@quiet()
def test_a_sharded_optimizer_is_saved_and_restored_bit_for_bit_on_any_number_of_ranks(world, name):
    (saved, whole), (restored, resumed), _ = interrupted(
        world, f"zero {name}", *SHARDED[name], seen=lambda run: (run.whole(), weights(run.model))
    )
    (optimizer, model), (optimizer_now, model_now) = saved, restored
    assert bool(optimizer["state"]) == (name != "nothing to remember")
    assert same_bits(optimizer_now["state"], optimizer["state"])
    assert optimizer_now["param_groups"][0]["params"] == optimizer["param_groups"][0]["params"]
    assert optimizer_now["param_groups"][0]["lr"] == 1e-3
    assert same_bits(model_now, model)
    if world.size == SAVING:
        assert same_bits(resumed, whole)
    else:  # another number of ranks sums the same examples in another order
        assert relative(resumed, whole) < (1e-6 if name == "master weights" else 1e-9)


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
        assert same_bits(other.optimizer.rank_state_dict()["tensors"]["0.weight"], state["tensors"]["0.weight"])
        return words

    assert "max_exp_avg_sq" in load(amsgrad=True)  # more is remembered
    assert "lr_decay" in load(torch.optim.Adagrad)
    Zero(world, master_dtype=torch.float32).save(folder)
    assert "and AdamW remembers ['exp_avg', 'exp_avg_sq', 'step'] with the options given here" in load()
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
    assert "parameter '0.weight' has shape" in said(sharded.load_state_dict, {**state, "shapes": turned})
