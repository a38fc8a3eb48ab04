"""What tools save and restore: Hugging Face's Trainer, accelerate, `torch.distributed.checkpoint` and Lightning, each with a compressor's memory and with
a `ZeroOptimizer`, as docs/composition.md tells users to write it.

Two ranks train, save on the way, and go on; two, three and one restore. Steps are of the same examples, however many ranks share them, so all
of them have to arrive where the run arrived that was not interrupted.
"""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from gradwire import PowerSGD, diloco
from gradwire.torch_backend import ZeroOptimizer, allreduce_hook, hook_with_zero_step, local_sgd, register_comm_hook
from tests.torch.ranks import Cases
from tests.torch.tools import lightning_trainer, quiet
from tests.torch.training import mlp, relative, same_bits

os.environ["HF_HUB_OFFLINE"] = "1"
pytestmark = pytest.mark.slow

#: What saves, and what restores besides.
SAVING = 2
RANKS = [SAVING, 1, 3]
WIDTHS = (24, 40, 32, 24)
#: 12 examples make a step: 2, 3 and 1 ranks share them equally.
EXAMPLES = 12
SAVED, STEPS = 5, 9
ALGORITHMS = {"full step": PowerSGD(2), "half step": PowerSGD(2, half_step=True)}

cases = Cases(__file__, ranks=SAVING)


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """Of a number of ranks: the results. Files lie in one folder."""
    folder = tmp_path_factory.mktemp("tools")
    launched = {}

    def of(ranks):
        for size in (SAVING, ranks):
            if size not in launched:
                (folder / str(size)).mkdir()
                launched[size] = cases.run(folder / str(size), 1, size)
        return launched[ranks]

    return of


def shared(world, name):
    """A place for files, the same for every launch."""
    return world.folder.parent / name


def data(step, rank, ranks):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(EXAMPLES, WIDTHS[0], generator=generator, dtype=torch.float64).chunk(ranks)[rank]
    return x, x.sin().cumsum(1)


def loss_of(model, step, world):
    x, y = data(step, world.rank, world.size)
    return (model(x) - y).square().mean()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def errors(handle):
    """The mean error, by parameter. Every rank calls this."""
    return {name: memory["error"] for name, memory in handle.state_dict()["local"].items()}


class Run:
    """DDP in a user's own loop."""

    def __init__(self, world, algorithm):
        self.world = world
        self.model = mlp(*WIDTHS).double()
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.01)
        self.handle = register_comm_hook(self.ddp, algorithm)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)

    def steps(self, numbers):
        for number in numbers:
            self.optimizer.zero_grad()
            loss_of(self.ddp, number, self.world).backward()
            self.optimizer.step()

    def save(self, folder):
        dcp.save({"model": self.model.state_dict(), "compressor": self.handle}, checkpoint_id=folder)

    def restore(self, folder):
        model = self.model.state_dict()
        dcp.load({"model": model, "compressor": self.handle}, checkpoint_id=folder)
        self.model.load_state_dict(model)


class Accelerated(Run):
    """accelerate's loop."""

    def __init__(self, world, algorithm):
        self.world = world
        self.accelerator = new_accelerator()
        model = mlp(*WIDTHS).double()
        self.ddp, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
        self.model = model
        if world.size == 1:  # accelerate wraps nothing then
            self.ddp = DistributedDataParallel(model)
        self.handle = register_comm_hook(self.ddp, algorithm)
        self.accelerator.register_for_checkpointing(self.handle)

    def save(self, folder):
        self.accelerator.save_state(folder)

    def restore(self, folder):
        self.accelerator.load_state(folder)


def new_accelerator():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return Accelerator(cpu=True)


TOOLS = {"DCP": Run, "accelerate": Accelerated}
HANDLES = {f"{tool}, {name}": (make, ALGORITHMS[name]) for tool, make in TOOLS.items() for name in ALGORITHMS}


@cases.each(HANDLES)
@quiet()
def handle(world, what):
    make, algorithm = what
    folder, found = shared(world, f"{make.__name__} {algorithm}"), {}
    if world.size == SAVING:
        whole = make(world, algorithm)
        whole.steps(range(SAVED))
        whole.save(folder)
        found["own norm"] = whole.handle.error_norm()
        found["saved error"] = errors(whole.handle)
        whole.steps(range(SAVED, STEPS))
        found["whole"] = weights(whole.model)
    resumed = make(world, algorithm)
    resumed.steps(range(1))  # so that what is restored is not what is there already
    resumed.restore(folder)
    found["error"] = errors(resumed.handle)
    resumed.steps(range(SAVED, STEPS))
    found["resumed"] = weights(resumed.model)
    found["stepped"] = resumed.handle.rank_state_dict()["step"]
    return found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", HANDLES)
def test_a_handle_that_a_tool_saved_goes_on_on_any_number_of_ranks(results_of, name, ranks):
    first, second = results_of(SAVING)(f"handle[{name}]")
    assert first["own norm"] != second["own norm"]  # each has an error of its own: to mix them up would be seen
    for rank in results_of(ranks)(f"handle[{name}]"):
        assert relative(rank["error"], first["saved error"]) < 1e-12  # the mean of three equal numbers is rounded
        assert rank["stepped"] == STEPS
        assert relative(rank["resumed"], first["whole"]) < 1e-9


class Local:
    """Local SGD in a user's own loop."""

    def __init__(self, world):
        self.world = world
        self.model = mlp(*WIDTHS).double()
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)
        self.handle = local_sgd(self.ddp, self.optimizer, diloco(3, compressor=PowerSGD(2)))

    steps, save, restore = Run.steps, Run.save, Run.restore


class AcceleratedLocal(Local):
    """The same in accelerate's."""

    def __init__(self, world):
        self.world = world
        self.accelerator = new_accelerator()
        self.model = mlp(*WIDTHS).double()
        inner = torch.optim.SGD(self.model.parameters(), lr=0.02)
        ddp, self.optimizer = self.accelerator.prepare(self.model, inner)
        # accelerate wraps nothing on one rank.
        self.ddp = ddp if world.size > 1 else DistributedDataParallel(self.model)
        self.handle = local_sgd(self.ddp, inner, diloco(3, compressor=PowerSGD(2)))
        self.accelerator.register_for_checkpointing(self.handle)

    save, restore = Accelerated.save, Accelerated.restore


LOCAL = {"DCP": Local, "accelerate": AcceleratedLocal}


@cases.each(LOCAL)
@quiet()
def local(world, make):
    folder, found = shared(world, make.__name__), {}
    if world.size == SAVING:
        whole = make(world)
        whole.steps(range(SAVED))
        with pytest.raises(Exception, match=r"Call synchronize\(\) on every rank before"):
            whole.save(shared(world, f"{make.__name__} refused"))
        whole.handle.synchronize()
        assert whole.handle.synchronized
        whole.save(folder)
        found["state"] = whole.handle.state_dict()
        whole.steps(range(SAVED, STEPS))
        found["whole"] = weights(whole.model)
    resumed = make(world)
    resumed.restore(folder)
    assert resumed.handle.synchronized
    found["restored"] = resumed.handle.state_dict()
    resumed.steps(range(SAVED, STEPS))
    assert resumed.handle.synchronized
    found["resumed"] = weights(resumed.model)
    return found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("tool", LOCAL)
def test_local_sgd_is_saved_where_replicas_are_equal(results_of, tool, ranks):
    saved = results_of(SAVING)(f"local[{tool}]")[0]
    ranks_now = results_of(ranks)(f"local[{tool}]")
    for rank in ranks_now:
        assert same_bits(rank["restored"]["tensors"], saved["state"]["tensors"])
        errors_now, errors_saved = (
            {n: m["error"] for n, m in state["local"].items()} for state in (rank["restored"], saved["state"])
        )
        assert relative(errors_now, errors_saved) < 1e-12
        assert same_bits(rank["resumed"], ranks_now[0]["resumed"])
        if ranks == SAVING:  # another number of replicas takes other steps by itself
            assert relative(rank["resumed"], saved["whole"]) < 1e-9


# ---- Hugging Face's Trainer


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


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    none = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **none, bos_token_id=0, eos_token_id=0, use_cache=False)).double()


def compress_callback(algorithm):
    """What docs/composition.md tells users of the Trainer to write."""
    from transformers import TrainerCallback

    class Compress(TrainerCallback):
        handle = None

        def on_train_begin(self, args, state, control, **kwargs):
            if self.handle is None:  # train() may be called again: the model stays wrapped
                scaler = self.trainer.accelerator.scaler  # None without fp16
                self.handle = register_comm_hook(self.trainer.model_wrapped, algorithm, grad_scaler=scaler)
            if state.global_step:  # resumed
                file = f"{args.output_dir}/checkpoint-{state.global_step}/compressor.pt"
                self.handle.load_state_dict(torch.load(file, weights_only=True))

        def on_save(self, args, state, control, **kwargs):
            compressor = self.handle.state_dict()  # on every rank
            if state.is_world_process_zero:
                torch.save(compressor, f"{args.output_dir}/checkpoint-{state.global_step}/compressor.pt")

    return Compress()


def new_trainer(world, folder, callback=None, make_optimizer=None, **options):
    from transformers import Trainer, TrainingArguments
    from transformers.utils import logging as their_logging

    their_logging.set_verbosity_error()
    args = TrainingArguments(
        output_dir=str(folder),
        **{"max_steps": STEPS, "save_steps": SAVED, "save_strategy": "steps"} | options,
        per_device_train_batch_size=EXAMPLES // world.size,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_backend="gloo",
        seed=0,
    )
    model = gpt2()
    optimizers = (make_optimizer(model) if make_optimizer else None, None)
    trainer = Trainer(
        model=model, args=args, train_dataset=Text(), callbacks=[callback] if callback else None, optimizers=optimizers
    )
    if callback:
        callback.trainer = trainer
    return trainer


@cases.each({"full step": PowerSGD(2), "half step": PowerSGD(2, half_step=True)})
@quiet()
def trainer(world, algorithm):
    folder, found = shared(world, f"trainer {algorithm}"), {}
    checkpoint = Path(folder) / f"checkpoint-{SAVED}"
    if world.size == SAVING:
        callback = compress_callback(algorithm)
        whole = new_trainer(world, folder, callback)
        whole.train()
        found["whole"] = weights(whole.model)
        found["ratio"] = callback.handle.stats().compression_ratio
        found["file"] = torch.load(checkpoint / "compressor.pt", weights_only=True)["local"]
    if world.size > 1:
        callback = compress_callback(algorithm)
        again = new_trainer(world, folder, callback, save_strategy="no")
        again.train(resume_from_checkpoint=str(checkpoint))
        found["resumed"] = weights(again.model)
        found["steps"] = [callback.handle.stats().steps]
        again.train()  # once more, from where it is
        found["steps"] += [callback.handle.stats().steps]
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_trainer_saves_and_resumes_the_compressor(results_of, name, ranks):
    saved = results_of(SAVING)(f"trainer[{name}]")[0]
    assert saved["ratio"] > 2
    assert {len(x) for memory in saved["file"].values() for x in memory.values()} == {1}
    for rank in results_of(ranks)(f"trainer[{name}]"):
        assert relative(rank["resumed"], saved["whole"]) < 1e-6  # its loss is in float32
        assert rank["steps"] == [STEPS, 2 * STEPS]


# ---- Lightning, with both


def fit(world, steps, checkpoint=None, save=None):
    """A run with a compressor and a `ZeroOptimizer`; returns the weights and the compressor's handle."""
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp(*WIDTHS).double()

        def training_step(self, batch, _):
            return loss_of(self.net, self.trainer.global_step, world)

        def configure_optimizers(self):
            return ZeroOptimizer(self.named_parameters(), torch.optim.AdamW, lr=1e-3, eps=1e-3)

    class Compress(pl.Callback):
        """What docs/composition.md tells users of Lightning to write."""

        loaded = None

        def on_train_start(self, trainer, module):
            self.handle = register_comm_hook(trainer.strategy.model, PowerSGD(2))
            if self.loaded is not None:
                self.handle.load_state_dict(self.loaded)

        def state_dict(self):
            return self.handle.state_dict()

        def load_state_dict(self, state):
            self.loaded = state

    compress, module = Compress(), Module()
    trainer = lightning_trainer(
        world.size,
        strategy=DDPStrategy(process_group_backend="gloo"),
        callbacks=[compress],
        max_steps=steps,
    )
    trainer.fit(module, torch.utils.data.DataLoader(range(100), batch_size=None), ckpt_path=checkpoint)
    if save is not None:
        trainer.save_checkpoint(save)
    return weights(module.net), compress.handle


@cases.case
@quiet()
def lightning(world):
    checkpoint, found = str(shared(world, "lightning.ckpt")), {}
    if world.size == SAVING:
        found["whole"], _ = fit(world, STEPS)
        fit(world, SAVED, save=checkpoint)
    found["resumed"], handle = fit(world, STEPS, checkpoint=checkpoint)
    found["step"] = handle.rank_state_dict()["step"]
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_lightning_saves_and_resumes_the_compressor_and_a_sharded_optimizer(results_of, ranks):
    saved = results_of(SAVING)("lightning")[0]
    for rank in results_of(ranks)("lightning"):
        assert rank["step"] == STEPS
        assert relative(rank["resumed"], saved["whole"]) < 1e-9


# ---- ZeroOptimizer where a tool does not know of it


def adamw(model, **options):
    return ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3, eps=1e-3, **options)


class Zero(Run):
    """DDP and a `ZeroOptimizer` in a user's own loop."""

    def __init__(self, world, optimizer_class=torch.optim.AdamW, *, in_hook=False, **options):
        self.world = world
        self.model = mlp(*WIDTHS).double()
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.01)
        self.optimizer = ZeroOptimizer(self.model.named_parameters(), optimizer_class, lr=1e-3, **options)
        if in_hook:
            self.ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, self.ddp, self.optimizer))

    def save(self, folder):
        self.weights_and(dcp.save, folder, self.optimizer.sharded_state)

    def restore(self, folder):
        self.weights_and(dcp.load, folder, self.optimizer.sharded_state)

    def weights_and(self, do, folder, state):
        model = self.model.state_dict()
        do({"model": model, "optimizer": state}, checkpoint_id=folder)
        self.model.load_state_dict(model)

    def whole(self):
        return self.optimizer.consolidated_state_dict(to=None)


class ZeroByTorch(Zero):
    """By what `torch.distributed.checkpoint` has for optimizers."""

    def __init__(self, world, options, **others):
        super().__init__(world, consolidate=True, **others)
        self.options = options

    def save(self, folder):
        state = get_optimizer_state_dict(self.ddp, self.optimizer, options=self.options)
        self.weights_and(dcp.save, folder, state)

    def restore(self, folder):
        state = get_optimizer_state_dict(self.ddp, self.optimizer, options=self.options)
        self.weights_and(dcp.load, folder, state)
        set_optimizer_state_dict(self.ddp, self.optimizer, state, options=self.options)


def by_torch(options=None, **others):
    return lambda world: ZeroByTorch(world, options, **others)


def zero(*args, **options):
    return lambda world: Zero(world, *args, **options)


#: What saves, and what restores.
SHARDED = {
    "pieces": (zero(), zero()),
    "whole parameters": (
        zero(torch.optim.Adafactor, shard="parameter"),
        zero(torch.optim.Adafactor, shard="parameter"),
    ),
    "pieces, then whole parameters": (zero(), zero(shard="bucket")),
    "a step in the hook": (zero(in_hook=True), zero(in_hook=True)),
    "master weights": (zero(master_dtype=torch.float32), zero(master_dtype=torch.float32)),
    "nothing to remember": (zero(torch.optim.SGD), zero(torch.optim.SGD)),
    "get_optimizer_state_dict": (by_torch(), by_torch()),
    "get_optimizer_state_dict, a step in the hook": (by_torch(in_hook=True), by_torch(in_hook=True)),
    "get_optimizer_state_dict, flat": (by_torch(StateDictOptions(flatten_optimizer_state_dict=True)),) * 2,
    "get_optimizer_state_dict, full": (by_torch(StateDictOptions(full_state_dict=True)),) * 2,
}


@cases.each({name: (name, *both) for name, both in SHARDED.items()})
@quiet()
def dcp_zero(world, what):
    name, make, make_again = what
    folder, found = shared(world, f"dcp zero {name}"), {}
    if world.size == SAVING:
        whole = make(world)
        whole.steps(range(SAVED))
        whole.save(folder)
        found["saved"] = whole.whole(), weights(whole.model)
        whole.steps(range(SAVED, STEPS))
        found["whole"] = weights(whole.model)
    resumed = make_again(world)
    resumed.restore(folder)
    found["restored"] = resumed.whole(), weights(resumed.model)
    resumed.steps(range(SAVED, STEPS))
    found["resumed"] = weights(resumed.model)
    return found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", SHARDED)
def test_dcp_saves_and_restores_a_sharded_optimizer_bit_for_bit_on_any_number_of_ranks(results_of, name, ranks):
    saved = results_of(SAVING)(f"dcp_zero[{name}]")[0]
    (optimizer, model) = saved["saved"]
    for rank in results_of(ranks)(f"dcp_zero[{name}]"):
        restored, restored_model = rank["restored"]
        assert restored["state"].keys() == optimizer["state"].keys()
        assert bool(restored["state"]) == (name != "nothing to remember")
        assert all(same_bits(restored["state"][n], own) for n, own in optimizer["state"].items())
        assert restored["param_groups"][0]["params"] == optimizer["param_groups"][0]["params"]
        assert restored["param_groups"][0]["lr"] == 1e-3
        assert same_bits(restored_model, model)
        if ranks == SAVING:
            assert same_bits(rank["resumed"], saved["whole"])
        else:  # another number of ranks sums the same examples in another order
            assert relative(rank["resumed"], saved["whole"]) < (1e-6 if name == "master weights" else 1e-9)


@cases.case
@quiet()
def dcp_zero_refused(world):
    if world.size != SAVING:
        return {}
    folder, found = shared(world, "dcp zero refused"), {}

    def refused(call):
        with pytest.raises(BaseException) as info:
            call()
        return str(info.value)

    fresh = Zero(world)
    fresh.save(folder)
    before = fresh.whole()
    again = Zero(world)
    again.steps(range(1))
    again.restore(folder)
    found["fresh"] = before["state"], again.whole()["state"]
    run = Zero(world)
    run.steps(range(1))
    found["nothing said"] = refused(lambda: dcp.save({"optimizer": run.optimizer}, checkpoint_id=folder))
    found["nothing said to torch"] = refused(lambda: get_optimizer_state_dict(run.ddp, run.optimizer))
    run.save(folder)

    def load(optimizer_class=torch.optim.AdamW, **options):
        other = Zero(world, optimizer_class, **options)
        state = other.optimizer.rank_state_dict()
        said = refused(lambda: other.restore(folder))
        assert same_bits(other.optimizer.rank_state_dict()["tensors"]["0.weight"], state["tensors"]["0.weight"])
        return said

    found["more is remembered"] = load(amsgrad=True)
    found["another optimizer"] = load(torch.optim.Adagrad)
    run = Zero(world, master_dtype=torch.float32)
    run.save(folder)
    found["less is remembered"] = load()
    whole = Zero(world, consolidate=True)
    whole.steps(range(1))
    dcp.save({"optimizer": whole.optimizer}, checkpoint_id=shared(world, "dcp zero consolidated"))
    new = Zero(world, consolidate=True)
    found["new"] = refused(
        lambda: dcp.load({"optimizer": new.optimizer}, checkpoint_id=shared(world, "dcp zero consolidated"))
    )
    found["no such state"] = refused(lambda: new.optimizer.sharded_state.load_state_dict({"state": {}}))
    state = new.optimizer.sharded_state.state_dict()
    found["shapes"] = refused(
        lambda: new.optimizer.sharded_state.load_state_dict(
            {**state, "shapes": {**state["shapes"], "0.weight": list(reversed(state["shapes"]["0.weight"]))}}
        )
    )
    return found


SHARDED_REFUSED = {
    "nothing said": "give torch.distributed.checkpoint optimizer.sharded_state",
    "nothing said to torch": "consolidate=True",
    "more is remembered": "max_exp_avg_sq",
    "another optimizer": "lr_decay",
    "less is remembered": "and AdamW remembers ['exp_avg', 'exp_avg_sq', 'step'] with the options given here",
    "new": "save and load optimizer.sharded_state",
    "no such state": "sharded_format is None",
    "shapes": "parameter '0.weight' has shape",
}


@pytest.mark.parametrize("what", SHARDED_REFUSED)
def test_dcp_does_not_lose_a_part_of_a_sharded_optimizer(results_of, what):
    for found in results_of(SAVING)("dcp_zero_refused"):
        assert SHARDED_REFUSED[what] in found[what]


def test_dcp_restores_an_optimizer_that_has_learned_nothing(results_of):
    for found in results_of(SAVING)("dcp_zero_refused"):
        assert found["fresh"] == ({}, {})


class AcceleratedZero(Run):
    def __init__(self, world, **options):
        self.world = world
        self.accelerator = new_accelerator()
        self.model = mlp(*WIDTHS).double()
        self.ddp, self.optimizer = self.accelerator.prepare(self.model, adamw(self.model, **options))

    save, restore = Accelerated.save, Accelerated.restore


@cases.case
@quiet()
def accelerate_zero(world):
    folder, found = shared(world, "accelerate zero"), {}
    if world.size == SAVING:
        careless = AcceleratedZero(world)
        careless.save(shared(world, "careless"))  # nothing has been learned: that is all of it
        careless.steps(range(1))
        with pytest.raises(RuntimeError, match="consolidate=True, for tools that call state_dict") as refused:
            careless.save(shared(world, "careless"))
        found["refused"] = str(refused.value)
        whole = AcceleratedZero(world, consolidate=True)
        whole.steps(range(SAVED))
        whole.save(folder)
        whole.steps(range(SAVED, STEPS))
        found["whole"] = weights(whole.model)
    resumed = AcceleratedZero(world, consolidate=True)
    resumed.restore(folder)
    resumed.steps(range(SAVED, STEPS))
    found["resumed"] = weights(resumed.model)
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_accelerate_saves_a_sharded_optimizer_whole_or_not_at_all(results_of, ranks):
    saved = results_of(SAVING)("accelerate_zero")
    assert "consolidate_state_dict(to=0) on every rank" in saved[1]["refused"]
    for rank in results_of(ranks)("accelerate_zero"):
        assert relative(rank["resumed"], saved[0]["whole"]) < 1e-9


def consolidate_callback(careless):
    """What docs/composition.md tells users of the Trainer to write; and what the Trainer does if they do not."""
    from transformers import TrainerCallback

    class Consolidate(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            if control.should_save:
                if careless is not None:
                    careless.append(self.attempt(args))
                optimizer.optimizer.consolidate_state_dict()

        def attempt(self, args):
            try:
                self.trainer._save_optimizer_and_scheduler(args.output_dir)
            except RuntimeError as error:
                return str(error)
            return ""

    return Consolidate()


@cases.case
@quiet()
def trainer_zero(world):
    folder, found, careless = shared(world, "trainer zero"), {}, []
    if world.size == SAVING:
        whole = new_trainer(world, folder, consolidate_callback(careless), adamw, max_steps=2 * SAVED)
        whole.train()
        found |= {"whole": weights(whole.model), "careless": careless}
    if world.size > 1:
        again = new_trainer(world, folder, None, adamw, max_steps=2 * SAVED, save_strategy="no")
        again.train(resume_from_checkpoint=str(Path(folder) / f"checkpoint-{SAVED}"))
        found["resumed"] = weights(again.model)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_trainer_saves_a_sharded_optimizer_whole_or_not_at_all(results_of, ranks):
    first, second = results_of(SAVING)("trainer_zero")
    assert len(first["careless"]) == 2
    assert all("consolidate_state_dict(to=0) on every rank" in said for said in first["careless"])
    assert second["careless"] == ["", ""]  # only the first rank saves: it is the one that has to say it
    for rank in results_of(ranks)("trainer_zero"):
        assert relative(rank["resumed"], first["whole"]) < 1e-6  # its loss is in float32


if __name__ == "__main__":
    cases.main()
