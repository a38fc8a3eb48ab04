"""A model of transformers with stacked experts: small, with random weights. What is warned of: test_views.py."""

import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire import CompressionWarning, PowerSGD, plan
from gradwire.torch_backend import register_comm_hook
from tests.torch.tools import quiet
from tests.torch.training import distance, train

pytestmark = pytest.mark.slow
EXPERTS, WIDTH, INNER, VOCABULARY = 8, 64, 160, 32
ALGORITHM = PowerSGD(4, stacked={"*.experts.*": 1})


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_local_experts": EXPERTS}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, max_position_embeddings=32, use_cache=False))


def loss_of(model, rank, step):
    tokens = torch.randint(0, VOCABULARY, (6, 16), generator=torch.Generator().manual_seed(1000 * rank + step))
    return model(input_ids=tokens, labels=tokens).loss


@quiet()
def test_stacked_experts_are_compressed_expert_by_expert(alone):
    with warnings.catch_warnings():
        warnings.simplefilter("error", CompressionWarning)
        ddp = DistributedDataParallel(mixtral(), find_unused_parameters=True)
        handle = register_comm_hook(ddp, ALGORITHM)
    assert distance(ALGORITHM, [train(ddp, loss_of, 3)]) < 1e-4
    apart = {}
    for n, p in ddp.module.named_parameters():
        shape = tuple(p.shape)
        apart |= {f"{n}.{e}": shape[1:] for e in range(EXPERTS)} if ".experts." in n else {n: shape}
    factors = {n: tuple(m["q"].shape) for n, m in handle._driver.memory.state.tensors.items()}
    # Besides the factors: which parameters were used, one float32 for each that is compressed.
    assert handle.stats().bytes_sent == 3 * (plan(apart, PowerSGD(4)).wire_bytes + 4 * len(factors))
    assert {s for n, s in factors.items() if ".experts." in n} == {(EXPERTS, 4, WIDTH), (EXPERTS, 4, INNER)}
