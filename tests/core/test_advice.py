"""Who is warned of what, and who is not."""

import warnings
from functools import partial

import pytest

import gradwire
from gradwire import (
    CompressionWarning,
    PowerSGD,
    Sign,
    Spec,
    TopK,
    TwoLevel,
    WireDtype,
    diloco,
    plan,
)
from gradwire.core.algorithms.shared.views import StackedShape
from gradwire.core.plan.advice import advice, looks_stacked, warn

#: What `nn.scan` makes of a Transformer's layer, of more than 1 MiB.
SCANNED = {
    "ScanBlock_0/LayerNorm_0/scale": (12, 128),
    "ScanBlock_0/attention/query/kernel": (12, 128, 4, 32),
    "ScanBlock_0/attention/query/bias": (12, 4, 32),
    "ScanBlock_0/attention/out/kernel": (12, 4, 32, 128),
    "ScanBlock_0/up/kernel": (12, 128, 512),
    "Dense_0/kernel": (128, 512),
}
#: The same under a name that says nothing.
NAMELESS = {name.replace("ScanBlock_0", "body"): shape for name, shape in SCANNED.items()}
#: transformers' Mixtral, smaller: gate and up in one, experts first.
MIXTRAL = {
    f"model.layers.{i}.{name}": shape
    for i in range(2)
    for name, shape in {
        "self_attn.q_proj.weight": (256, 256),
        "block_sparse_moe.gate.weight": (8, 256),
        "mlp.experts.gate_up_proj": (8, 1024, 256),
        "mlp.experts.down_proj": (8, 256, 512),
        "input_layernorm.weight": (256,),
    }.items()
}
NO_STACKS = {
    "ResNet": {
        "conv1.weight": (64, 64, 3, 3),
        "bn1.weight": (64,),
        "conv2.weight": (64, 64, 3, 3),
        "fc.weight": (1000, 64),
    },
    "Flax convolutions": {
        "Conv_0/kernel": (3, 3, 3, 64),
        "Conv_1/kernel": (3, 3, 64, 64),
        "Dense_0/kernel": (64, 10),
    },
    "attention": {
        "query/kernel": (512, 8, 64),
        "query/bias": (8, 64),
        "out/kernel": (8, 64, 512),
        "out/bias": (512,),
    },
    "a list of experts": {"experts.0.weight": (8, 16, 3), "experts.1.weight": (8, 16, 3)},
    "Llama": {"mlp.gate.weight": (64, 32), "mlp.up.weight": (64, 32)},
    "one layer": {"ScanBlock_0/kernel": (1, 64, 64)},
}


def specs_of(shapes):
    return {name: Spec(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", NO_STACKS)
def test_what_is_no_stack_does_not_look_like_one(name):
    assert looks_stacked(NO_STACKS[name]) == {}


@pytest.mark.parametrize(("shapes", "module"), [(SCANNED, "ScanBlock_0"), (NAMELESS, "body")])
def test_what_scan_makes_looks_like_a_stack(shapes, module):
    assert looks_stacked(shapes) == {
        name: f"{module}/*" for name, shape in shapes.items() if len(shape) > 2
    }
    (text,) = advice(PowerSGD(4), specs_of(shapes))
    assert f"Say stacked={{'{module}/*': 1}}" in text
    assert f"'{module}/attention/query/kernel' (12, 128, 4, 32)" in text
    assert advice(PowerSGD(4, stacked={f"{module}/*": 1}), specs_of(shapes)) == []
    # a whole model
    assert set(looks_stacked({"kernel": (12, 64, 64), "bias": (12, 64)}).values()) == {"*"}


def test_experts_of_transformers_look_like_stacks_and_are_then_sent_as_separate_tensors_would_be():
    (text,) = advice(PowerSGD(4), specs_of(MIXTRAL))
    assert "Say stacked={'*.experts.*': 1}" in text
    assert "'model.layers.0.mlp.experts.gate_up_proj' (8, 1024, 256)" in text
    assert "and 1 more" in text
    apart = {n: shape for n, shape in MIXTRAL.items() if "experts" not in n}
    apart |= {
        f"{n}.{i}": shape[1:]
        for n, shape in MIXTRAL.items()
        if n not in apart
        for i in range(shape[0])
    }
    algorithm = PowerSGD(4, stacked={"*.experts.*": 1})
    assert plan(MIXTRAL, algorithm).wire_bytes == plan(apart, PowerSGD(4)).wire_bytes


def test_what_the_framework_knew_in_vain_is_said():
    """Local SGD, and factors that are drawn anew in each step, have to be told."""
    shapes = {"body/kernel": StackedShape((12, 256, 256), 1)}
    assert advice(PowerSGD(4), specs_of(shapes)) == []
    for algorithm in (PowerSGD(4, warm_start=False), diloco(10, compressor=PowerSGD(4))):
        (text,) = advice(algorithm, specs_of(shapes))
        assert "stacked={'body/kernel': 1}" in text
        with pytest.warns(CompressionWarning):
            assert plan(shapes, algorithm).tensors[0].view == "12·256 | 256"


LORA = {f"{i}.lora_A.weight": (8, 4096) for i in range(10)}
SMALL_LORA = {"lora_A.weight": (8, 64), "lora_B.weight": (64, 8), "bias": (64,)}
FLAT = {"flat": (1 << 20,)}  # optax.flatten
SQUARES = {f"{i}": (400, 400) for i in range(4)}  # rank 150: 300 * 400 of 400 * 400 numbers
HALF_AS_LARGE = partial(PowerSGD, 150, min_compression_rate=1.2)
SAID = [
    (
        PowerSGD(4, rows={"w": 1}),
        {"w": (4, 512, 512)},
        "'w' (4, 512, 512) travels uncompressed",
        "compresses nothing",
    ),
    (
        PowerSGD(4, rows={"w": 1}),
        {"w": (4, 512, 512)},
        "with rows={'w': 2} 'w' is 4·512 | 512",
        "compresses nothing",
    ),
    (
        PowerSGD(4, stacked={"w": 1}),
        {"w": (600, 600)},
        "with stacked={'w': 0} 'w' is 600 | 600",
        "",
    ),
    (
        PowerSGD(4),
        LORA,
        "PowerSGD(rank=4) compresses nothing: not one of 10 tensors, '0.lora_A.weight' (8, 4096), ",
    ),
    (PowerSGD(4), LORA, "a lower rank compresses more"),
    (
        PowerSGD(4),
        LORA | {"w": (400, 400)},
        "leaves 1.2 of 1.9 MiB uncompressed, most of it '0.lora_A.weight' (8, 4096)",
    ),
    (PowerSGD(4), FLAT, "A vector is no matrix"),
    # LoRA of r = 8 at rank 4: every factor would be half as large as its matrix, at the least.
    (PowerSGD(4), SMALL_LORA, "compresses nothing: not one of 3 tensors"),
    (PowerSGD({"*_A*": 4}), SMALL_LORA, "compresses nothing"),
    # Everything is compressed, each tensor by little.
    (HALF_AS_LARGE(), SQUARES, "sends 1.8 of 2.4 MiB, 1.3 times fewer"),
]
NOTHING_IS_SAID = [
    (PowerSGD(4, rows={"w": 2}), {"w": (4, 512, 512)}),
    (PowerSGD(4, stacked={"w": 0}), {"w": (600, 600)}),
    (PowerSGD(1), LORA),
    (PowerSGD(4, square=True), FLAT),
    (PowerSGD(2), SMALL_LORA),
    (HALF_AS_LARGE(half_step=True), SQUARES),
    (HALF_AS_LARGE(state_dtype="bfloat16"), SQUARES),
    # Deliberately left out.
    (PowerSGD({"w": 4, "*": 0}), FLAT | {"w": (64, 64)}),
    (PowerSGD({"*_A*": 0}), SMALL_LORA),
    # Who has decided is left alone, and so are small models, and those that send everything.
    *(
        (PowerSGD(4, **{x: {"*experts*": to}}), MIXTRAL)
        for x, to in (("stacked", 0), ("stacked", 1), ("rows", 2))
    ),
    (PowerSGD({"*experts*": 0, "*": 4}), MIXTRAL),
    (PowerSGD(4), {"w": (64, 64), "v": (8, 64), "ScanX_0/w": (3, 8, 8)}),
    (PowerSGD(4), {"w": (8,), "scale": ()}),
    (gradwire.AllReduce(), SCANNED),
    (diloco(10), SCANNED),
    (WireDtype(TwoLevel(Sign(), 2), "int8"), {"w": (64, 64)}),
    (WireDtype(Sign(), "bfloat16"), {"w": (64, 64)}),
]


@pytest.mark.parametrize(("algorithm", "shapes", "said"), [(a, s, said) for a, s, *said in SAID])
def test_what_is_said(algorithm, shapes, said):
    found = advice(algorithm, specs_of(shapes))
    assert len(found) == len(said)
    assert all(words in text for words, text in zip(said, found, strict=True))


@pytest.mark.parametrize(("algorithm", "shapes"), NOTHING_IS_SAID)
def test_nothing_is_said(algorithm, shapes):
    assert advice(algorithm, specs_of(shapes)) == []


@pytest.mark.parametrize(
    "algorithm",
    [PowerSGD(4), WireDtype(PowerSGD(4), "bfloat16"), diloco(10, compressor=PowerSGD(4))],
    ids=repr,
)
def test_the_warning_comes_once_and_points_here(algorithm):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn(algorithm, specs_of(SCANNED), "By the way.")
        plan(SCANNED, algorithm)
    assert all(
        issubclass(w.category, CompressionWarning) and "looks like a stack" in str(w.message)
        for w in caught
    )
    assert [warning.filename for warning in caught] == [__file__] * 2
    assert [str(warning.message).endswith("\nBy the way.") for warning in caught] == [True, False]


def test_refusals_come_before_warnings():
    with warnings.catch_warnings(), pytest.raises(ValueError, match="int8"):
        plan({"w": (8, 8)}, PowerSGD(4), dtype="int8")


def test_a_wire_dtype_round_what_is_gathered():
    for algorithm in (
        WireDtype(TopK(8, per=64), "int8"),
        diloco(4, compressor=WireDtype(Sign(), "int4")),
    ):
        with pytest.warns(
            CompressionWarning,
            match="what is gathered is not quantized.*Leave WireDtype out.*bits=8",
        ):
            plan({"w": (64, 64)}, algorithm, world_size=2)
