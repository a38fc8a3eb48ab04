"""What a registration says and takes, and what is noticed later. What it refuses:
test_refusals.py."""

import logging
import pickle
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from benchmarks.shapes import gpt
from gradwire import AllReduce, CompressionWarning, PowerSGD, Spec, TwoLevel, diloco
from gradwire.core.plan.dry_run import summary
from gradwire.torch_backend import integrations
from gradwire.torch_backend.integrations.compression import Compression
from gradwire.torch_backend.setup import consistency
from tests.launch import ROOT, run_ranks
from tests.torch.compare import said, same_bits
from tests.torch.models import loss_on, mlp
from tests.torch.refused import Here, lazy
from tests.torch.test_refusals import DOORS
from tests.torch.training import hooked, train

pytestmark = pytest.mark.usefixtures("alone")

WIDTHS = (40, 36, 36, 28)
LOSS = loss_on(40)


class Counts(AllReduce):
    """How often its step is begun."""

    begun = 0

    async def step(self, ops, gradients, state, step):
        Counts.begun += 1
        return await super().step(ops, gradients, state, step)


@pytest.mark.parametrize("door", ["hook", "DataParallel", "Averager"])
def test_an_algorithm_is_tried_out_once_also_where_that_is_logged(door, caplog):
    caplog.set_level("INFO", "gradwire")
    Counts.begun = 0
    DOORS[door](Here(), mlp(*WIDTHS), Counts())()
    assert Counts.begun == 1
    assert any("6 tensors" in line and "1 message" in line for line in caplog.messages)


@pytest.mark.parametrize("ranks", [4, 4096])
def test_ranks_compare_digests_and_send_texts_only_where_they_differ(monkeypatch, ranks):
    sent = []

    def gathered(mine, group, device):
        sent.append(len(pickle.dumps(mine)))
        return [mine if rank != other else others[len(sent) - 1] for rank in range(ranks)]

    monkeypatch.setattr(consistency, "gathered_by_all", gathered)
    groups, own = (
        str(TwoLevel(AllReduce(), within=2).inter_node(ranks)),
        {"parameter 'w'": "(3,) float32"},
    )
    other, others = -1, []
    consistency.require_same_on_all_ranks(None, {"groups": groups}, own)
    assert len(sent) == 1
    assert sent[0] < 300  # bytes of each rank, which every rank receives
    other, others, sent[:] = 2, [("", "another", consistency._digest(own)), {"groups": "[]"}], []
    with pytest.raises(
        ValueError, match=r"ranks differ in groups: rank 0 has \(\(0, .*, others \{2: '\[\]'\}"
    ):
        consistency.require_same_on_all_ranks(None, {"groups": groups}, own)
    assert len(sent) == 2
    assert sent[1] >= len(groups)


@pytest.mark.parametrize("door", DOORS)
def test_lazy_modules_are_taken_after_their_first_forward_pass(door):
    model = lazy()
    model(torch.ones(3, 5))
    DOORS[door](Here(), model, AllReduce())()


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda: hooked(mlp(*WIDTHS, frozen=[0]), PowerSGD(2))[0], "DistributedDataParallel"),
        (lambda: gw.DataParallel(mlp(*WIDTHS, frozen=[0]), PowerSGD(2)), "DataParallel"),
    ],
    ids=["DDP", "DataParallel"],
)
def test_parameters_that_are_thawed_later_are_spoken_of_once(wrap, name):
    wrapped = wrap()
    train(wrapped, LOSS, 3, local=False)
    wrapped.module[0].requires_grad_(True)
    said = f"nobody averages '0.weight', '0.bias'.*when {name} wrapped the model"
    with pytest.warns(UserWarning, match=said) as caught:
        train(wrapped, LOSS, 1, local=False)
    assert len(caught) == 1
    train(wrapped, LOSS, 6, local=False)  # where a warning would be an error


def test_the_line_in_the_page_is_that_of_gpt_2():
    """Whose maps are transposed, which changes no size."""
    shapes = gpt(12, 768, 50_257, 1024) | {"norm_w": (768,), "norm_b": (768,)}
    line = str(summary(PowerSGD(rank=4), {name: Spec(shape) for name, shape in shapes.items()}))
    page = (ROOT / "docs" / "handles.md").read_text()
    assert f"INFO:gradwire:{line}\n" in page
    assert f"CommHook({line}; 1000 steps, " in page


# --- stacked experts: who is warned, and a state of another view ---


class Experts(nn.Module):
    """As transformers has them: every expert of a layer in one parameter, (experts, out, in)."""

    def __init__(self, experts=8, width=128):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 4 * width, width) / width**0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)

    def forward(self, x):
        gate, up = torch.einsum("nd,ehd->neh", x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.einsum("neh,edh->nd", gate.relu() * up, self.down_proj)


def new_model():
    return nn.Sequential(OrderedDict(norm=nn.LayerNorm(128), experts=Experts()))


def compat():
    """torch's hook is told of its parameters in the first step."""
    ddp = DistributedDataParallel(new_model())
    ddp.register_comm_hook(gw.PowerSGDState(None, 4, start_powerSGD_iter=0), gw.powerSGD_hook)
    ddp(torch.randn(4, 128)).square().sum().backward()


WARNED = {
    "hook": (
        lambda: gw.register_comm_hook(DistributedDataParallel(new_model()), PowerSGD(4)),
        "Say stacked={'experts\\.\\*': 1}",
    ),
    "DataParallel": (
        lambda: gw.DataParallel(new_model(), PowerSGD(4)),
        "Say stacked={'experts\\.\\*': 1}",
    ),
    "local_sgd": (
        lambda: gw.local_sgd(new_model(), None, diloco(10, compressor=PowerSGD(4))),
        "Say stacked={'experts\\.\\*': 1}",
    ),
    # (shape[0], rest): 8 rows, too few for rank 4 to shrink them. There is another function for who
    # wants more.
    "torch's own name": (compat, r"register_comm_hook\(ddp, PowerSGD\(rank, stacked="),
}


@pytest.mark.parametrize("name", WARNED)
def test_experts_are_noticed_once_with_the_fix(name):
    register, words = WARNED[name]
    with pytest.warns(CompressionWarning, match=words) as caught:
        register()
    assert len(caught) == 1
    assert caught[0].filename == __file__ or register is compat


def seen_as(**view):
    return hooked(new_model(), PowerSGD(2, **view, min_compression_rate=0.5))[1]


def test_a_state_of_another_view_is_refused_with_what_to_do():
    saved = seen_as(rows={"experts.*": 1}).state_dict()
    here = seen_as(stacked={"experts.*": 1})
    words = r"seen as other matrices; give PowerSGD rows={'experts\.down_proj': 1} to go on"
    with pytest.raises(ValueError, match=words):
        here.load_state_dict(saved)
    assert here.load_state_dict(saved, strict=False).reshaped  # the errors are kept
    # What counts is the shape: a state that knows nothing of the option fits.
    assert not seen_as(rows={"*": 1}).load_state_dict(saved)


# --- what needs no tool of the integrations. With tools: test_tools_checkpoints.py ---


def test_tools_are_imported_when_they_are_asked_for(tmp_path):
    """Of which one stands in that takes no time to load."""
    (tmp_path / "transformers.py").write_text("class TrainerCallback: pass")
    (script := tmp_path / "asks.py").write_text(
        "import sys, gradwire.torch_backend.integrations as i\n"
        "tools = {'transformers', 'accelerate', 'pytorch_lightning', 'lightning'}\n"
        "assert not tools & set(sys.modules)\n"
        "i.AcceleratorCompression\n"
        "assert not tools & set(sys.modules)\n"
        "i.TrainerCompression\n"
        "assert tools & set(sys.modules) == {'transformers'}\n"
    )
    run_ranks(script, 1)
    assert said(getattr, integrations, "Compress").endswith(
        "has no attribute 'Compress'; it has AcceleratorCompression, LightningCompression, TrainerCompression, "
        "training_of_lightning, training_of_trainer"
    )


def test_what_a_load_has_refused_is_not_tried_again(monkeypatch):
    """In a training that resumes nothing. With strict=False what fits is kept."""
    asked = []

    def load(state, strict):
        asked.append((state, strict))
        if strict:
            raise ValueError("the state is of another algorithm")

    monkeypatch.setattr(
        "gradwire.torch_backend.integrations.compression.load_beside",
        lambda beside, state, memory, load: load(state),
    )
    handle = SimpleNamespace(_driver=SimpleNamespace(memory=None), load_state_dict=load)
    for strict in (True, False):
        compression = Compression(PowerSGD(2), strict=strict)
        compression.handle = handle
        compression.load_state_dict({"step": 3})
        assert ("another algorithm" in said(compression.restore)) == strict
        compression.restore()
    assert asked == [({"step": 3}, True), ({"step": 3}, False)]


def embedded(**options):
    """An embedding with sparse gradients, and a layer."""
    words = nn.Embedding(50, 32, sparse=True)
    words.weight.requires_grad_(options.pop("trained", False))
    return DistributedDataParallel(nn.Sequential(words, nn.Linear(32, 40)), **options)


def test_a_sparse_embedding_that_is_not_trained_is_no_obstacle():
    """It is frozen, or DDP was told to leave it out."""
    gw.register_comm_hook(embedded(), PowerSGD(2))
    assert "'0.weight' has sparse gradients" in said(
        gw.register_comm_hook, embedded(trained=True), PowerSGD(2)
    )
    module = nn.Sequential(nn.Embedding(50, 32, sparse=True), nn.Linear(32, 40))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
    gw.register_comm_hook(DistributedDataParallel(module), PowerSGD(2))


@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_that_were_frozen_or_thawed_after_ddp_are_refused(frozen):
    """DDP averages those that it was made with."""
    model = mlp(*WIDTHS)
    model[0].weight.requires_grad_(frozen)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    model[0].weight.requires_grad_(not frozen)
    words = said(gw.register_comm_hook, ddp, PowerSGD(2))
    assert "when DistributedDataParallel wrapped the model" in words
    model[0].weight.requires_grad_(frozen)
    gw.register_comm_hook(ddp, PowerSGD(2))


def test_one_process_hands_the_memory_on(caplog):
    state, compression = {"step": 3}, Compression(PowerSGD(2))
    assert compression.state_dict() == compression.figures() == {}
    compression.load_state_dict(state)
    with caplog.at_level(logging.INFO, "gradwire"):
        compression.attach(nn.Linear(2, 2), None)
    assert [record.getMessage() for record in caplog.records] == [
        "PowerSGD(rank=2): one process trains, and averages nothing"
    ]
    assert compression.handle is None
    assert compression.state_dict() == state


def test_memory_waits_for_the_hook_and_another_ddp_gets_another_hook():
    ddp = DistributedDataParallel(mlp(40, 36))
    first = Compression(PowerSGD(2))
    first.attach(ddp, None)
    handle = first.handle
    first.attach(ddp, None)
    assert first.handle is handle
    mlp_again = DistributedDataParallel(mlp(40, 36))
    state = first.state_dict() | {"step": 7}
    first.load_state_dict(state)
    assert handle.stats().steps == 0
    first.attach(mlp_again, None)
    assert first.handle is not handle
    assert first.handle.stats().steps == 7
    assert same_bits(first.state_dict()["tensors"], state["tensors"])
    assert first.figures()["gradwire/steps"] == 7


def test_several_processes_need_a_ddp(monkeypatch):
    monkeypatch.setattr("gradwire.torch_backend.integrations.compression._several", lambda: True)
    compression = Compression(PowerSGD(2))
    assert said(compression.attach, nn.Linear(2, 2), None).startswith(
        "TypeError: ddp is a Linear; wrap the model first"
    )
    assert compression.handle is None
