"""transformers' models with stacked experts, and peft's adapters: small, with random weights. What is warned of, and what is right."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import CompressionWarning, PowerSGD, plan
from gradwire.torch_backend import register_comm_hook
from tests.torch.compare import gradients
from tests.torch.ranks import Cases
from tests.torch.training import Trace, distance, sgd

pytestmark = pytest.mark.slow
EXPERTS, WIDTH, INNER, VOCABULARY = 8, 64, 160, 32
STACKED = {"*.experts.*": 1}
ALGORITHM = PowerSGD(4, stacked=STACKED)

cases = Cases(__file__, ranks=2)

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "use_cache": False,
    "attention_dropout": 0.0,
}


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=INNER, num_local_experts=EXPERTS))


def qwen3_moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES, intermediate_size=INNER, moe_intermediate_size=INNER, num_experts=EXPERTS, head_dim=16
    )
    return Qwen3MoeForCausalLM(config)


MODELS = {"Mixtral": mixtral, "Qwen3-MoE": qwen3_moe}


def loss_of(model, rank, step):
    tokens = torch.randint(0, VOCABULARY, (6, 16), generator=torch.Generator().manual_seed(1000 * rank + step))
    return model(input_ids=tokens, labels=tokens).loss


def trained(ddp, rank, steps):
    """As `tests.torch.training.train`, of what transformers models return."""
    optimizer = sgd(ddp)
    trace = Trace()
    for step in range(steps):
        twin = copy.deepcopy(ddp.module)
        loss_of(twin, rank, step).backward()
        trace.local.append({n: torch.zeros_like(p) for n, p in twin.named_parameters()} | gradients(twin))
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        trace.given.append(gradients(ddp.module))
        optimizer.step()
    return trace


@cases.each(MODELS)
def test_stacked_experts_are_compressed_expert_by_expert(world, make):
    with warnings.catch_warnings():
        warnings.simplefilter("error", CompressionWarning)
        ddp = DistributedDataParallel(make(), process_group=world.group, find_unused_parameters=True)
        handle = register_comm_hook(ddp, ALGORITHM)
    trace = trained(ddp, world.rank, 3)
    assert world.agree(trace.given)
    assert distance(ALGORITHM, world.everyones(trace)) < 1e-4
    apart = {}
    for n, p in ddp.module.named_parameters():
        shape = tuple(p.shape)
        apart |= {f"{n}.{e}": shape[1:] for e in range(EXPERTS)} if ".experts." in n else {n: shape}
    factors = {n: tuple(m["q"].shape) for n, m in handle._driver.memory.state.tensors.items()}
    # Besides the factors: which parameters were used, one float32 for each that is compressed.
    assert handle.stats().bytes_sent == 3 * (plan(apart, PowerSGD(4)).wire_bytes + 4 * len(factors))
    assert {s for n, s in factors.items() if ".experts." in n} == {(EXPERTS, 4, WIDTH), (EXPERTS, 4, INNER)}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", MODELS)
def test_experts_that_are_not_said_to_be_stacked_are_warned_of(name):
    """With the option that the test above trains with."""
    with pytest.warns(CompressionWarning) as caught:
        register_comm_hook(DistributedDataParallel(MODELS[name]()), PowerSGD(4))
    (said,) = (str(warning.message) for warning in caught)
    assert "looks like a stack of layers or experts" in said
    assert f"Say stacked={STACKED!r}" in said
    assert "experts.gate_up_proj" in said


def adapted(rank):
    """A Transformer's projections with LoRA of this rank."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("q_proj", "v_proj")})
    return get_peft_model(base, LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]))


@pytest.mark.usefixtures("alone")
def test_lora_at_half_its_rank_says_that_nothing_is_compressed():
    ddp = DistributedDataParallel(adapted(8))
    with pytest.warns(CompressionWarning, match="compresses nothing: not one of 4 tensors") as caught:
        handle = register_comm_hook(ddp, PowerSGD(4))
    assert len(caught) == 1
    assert re.search(r"PowerSGD\(rank=4\): 4 tensors, .* \(1\.0×\), 1 message", repr(handle))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CompressionWarning)
        handle = register_comm_hook(DistributedDataParallel(adapted(8)), PowerSGD(1))
    assert "PowerSGD(rank=1): 4 of 4 tensors" in repr(handle)
