"""Who is warned of what, and who is not."""

import warnings

import pytest

import gradwire
from gradwire import CompressionWarning, PowerSGD, Sign, Spec, TopK, TwoLevel, WireDtype, diloco, plan
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
    "torch convolutions": {"0.weight": (64, 64, 3, 3), "0.bias": (64,), "1.weight": (64, 64, 3, 3)},
    "torch ResNet": {
        "layer1.0.conv1.weight": (64, 64, 3, 3),
        "layer1.0.bn1.weight": (64,),
        "layer1.0.conv2.weight": (64, 64, 3, 3),
        "fc.weight": (1000, 64),
    },
    "Flax convolutions": {"Conv_0/kernel": (3, 3, 3, 64), "Conv_1/kernel": (3, 3, 64, 64), "Dense_0/kernel": (64, 10)},
    "attention": {"query/kernel": (512, 8, 64), "query/bias": (8, 64), "out/kernel": (8, 64, 512), "out/bias": (512,)},
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
    found = looks_stacked(shapes)
    assert set(found) == {name for name, shape in shapes.items() if len(shape) > 2}
    assert set(found.values()) == {f"{module}/*"}
    (text,) = advice(PowerSGD(4), specs_of(shapes))
    assert f"Say stacked={{'{module}/*': 1}}" in text
    assert f"'{module}/attention/query/kernel' (12, 128, 4, 32)" in text
    assert advice(PowerSGD(4, stacked={f"{module}/*": 1}), specs_of(shapes)) == []


def test_a_whole_model_of_a_stack():
    assert set(looks_stacked({"kernel": (12, 64, 64), "bias": (12, 64)}).values()) == {"*"}


def test_experts_of_transformers_look_like_stacks():
    (text,) = advice(PowerSGD(4), specs_of(MIXTRAL))
    assert "Say stacked={'*.experts.*': 1}" in text
    assert "'model.layers.0.mlp.experts.gate_up_proj' (8, 1024, 256)" in text
    assert "and 1 more" in text


def test_the_advice_for_experts_is_what_they_need():
    """Expert by expert, as separate tensors would be."""
    algorithm = PowerSGD(4, stacked={"*.experts.*": 1})
    assert advice(algorithm, specs_of(MIXTRAL)) == []
    apart = {
        f"{name}.{i}" if "experts" in name else name: shape[1:] if "experts" in name else shape
        for name, shape in MIXTRAL.items()
        for i in range(shape[0] if "experts" in name else 1)
    }
    assert plan(MIXTRAL, algorithm).wire_bytes == plan(apart, PowerSGD(4)).wire_bytes


@pytest.mark.parametrize(
    "options", [{"stacked": {"*experts*": 0}}, {"rows": {"*experts*": 2}}, {"rank": {"*experts*": 0, "*": 4}}]
)
def test_who_has_decided_is_left_alone(options):
    assert advice(PowerSGD(**{"rank": 4, **options}), specs_of(MIXTRAL)) == []


def test_what_the_framework_knew_in_vain_is_said():
    """Local SGD, and factors that are drawn anew in each step, have to be told."""
    shapes = {"body/kernel": StackedShape((12, 256, 256), 1)}
    assert advice(PowerSGD(4), specs_of(shapes)) == []
    for algorithm in (PowerSGD(4, warm_start=False), diloco(10, compressor=PowerSGD(4))):
        (text,) = advice(algorithm, specs_of(shapes))
        assert "stacked={'body/kernel': 1}" in text
        with pytest.warns(CompressionWarning):
            assert plan(shapes, algorithm).tensors[0].view == "12·256 | 256"


def test_a_large_tensor_that_another_view_would_shrink():
    (text, most) = advice(PowerSGD(4, rows={"w": 1}), {"w": Spec((4, 512, 512))})
    assert "'w' (4, 512, 512) travels uncompressed" in text
    assert "with rows={'w': 2} 'w' is 4·512 | 512" in text
    assert "compresses nothing" in most
    assert advice(PowerSGD(4, rows={"w": 2}), {"w": Spec((4, 512, 512))}) == []
    (text, _) = advice(PowerSGD(4, stacked={"w": 1}), {"w": Spec((600, 600))})
    assert "with stacked={'w': 0} 'w' is 600 | 600" in text
    assert advice(PowerSGD(4, stacked={"w": 0}), {"w": Spec((600, 600))}) == []


def test_most_bytes_uncompressed():
    lora = {f"{i}.lora_A.weight": Spec((8, 4096)) for i in range(10)}
    (text,) = advice(PowerSGD(4), lora)
    assert text.startswith("PowerSGD(rank=4) compresses nothing: not one of 10 tensors, '0.lora_A.weight' (8, 4096), ")
    assert "a lower rank compresses more" in text
    assert advice(PowerSGD(1), lora) == []
    (text,) = advice(PowerSGD(4), lora | {"w": Spec((400, 400))})
    assert text.startswith(
        "PowerSGD(rank=4) leaves 1.2 of 1.9 MiB uncompressed, most of it '0.lora_A.weight' (8, 4096)"
    )
    (text,) = advice(PowerSGD(4), {"flat": Spec((1 << 20,))})  # optax.flatten
    assert "A vector is no matrix" in text
    assert advice(PowerSGD(4, square=True), {"flat": Spec((1 << 20,))}) == []
    # Deliberately left out.
    assert advice(PowerSGD({"w": 4, "*": 0}), {"flat": Spec((1 << 20,)), "w": Spec((64, 64))}) == []


def test_nothing_is_said_of_small_models_and_of_those_that_send_everything():
    assert advice(PowerSGD(4), {"w": Spec((64, 64)), "v": Spec((8, 64)), "ScanX_0/w": Spec((3, 8, 8))}) == []
    assert advice(PowerSGD(4), {"w": Spec((8,)), "scale": Spec(())}) == []
    assert advice(gradwire.AllReduce(), specs_of(SCANNED)) == []
    assert advice(diloco(10), specs_of(SCANNED)) == []


def test_what_compresses_nothing_says_so_of_small_models_too():
    """LoRA of r = 8 at rank 4: every factor would be half as large as its matrix, at the least."""
    lora = {"lora_A.weight": Spec((8, 64)), "lora_B.weight": Spec((64, 8)), "bias": Spec((64,))}
    (text,) = advice(PowerSGD(4), lora)
    assert "compresses nothing: not one of 3 tensors" in text
    assert advice(PowerSGD(2), lora) == []
    assert advice(PowerSGD({"*_A*": 4}), lora)
    assert advice(PowerSGD({"*_A*": 0}), lora) == []


def test_less_than_half_saved_says_so():
    """Everything is compressed, each tensor by little."""
    square = {f"{i}": Spec((400, 400)) for i in range(4)}  # rank 150: 300 * 400 of 400 * 400 numbers
    options = {"rank": 150, "min_compression_rate": 1.2}
    (text,) = advice(PowerSGD(**options), square)
    assert "sends 1.8 of 2.4 MiB, 1.3 times fewer" in text
    assert advice(PowerSGD(**options, half_step=True), square) == []
    assert advice(PowerSGD(**options, state_dtype="bfloat16"), square) == []


@pytest.mark.parametrize(
    "algorithm", [PowerSGD(4), WireDtype(PowerSGD(4), "bfloat16"), diloco(10, compressor=PowerSGD(4))], ids=repr
)
def test_the_warning_comes_once_and_points_here(algorithm):
    with pytest.warns(CompressionWarning, match="looks like a stack") as caught:
        warn(algorithm, specs_of(SCANNED), "By the way.")
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message).endswith("\nBy the way.")
    with pytest.warns(CompressionWarning, match="looks like a stack") as caught:
        plan(SCANNED, algorithm)
    (warning,) = caught
    assert warning.filename == __file__


def test_refusals_come_before_warnings():
    with warnings.catch_warnings(), pytest.raises(ValueError, match="int8"):
        plan({"w": (8, 8)}, PowerSGD(4), dtype="int8")


def test_a_wire_dtype_round_what_is_gathered():
    shapes = {"w": (64, 64)}
    for algorithm in (WireDtype(TopK(8, per=64), "int8"), diloco(4, compressor=WireDtype(Sign(), "int4"))):
        with pytest.warns(CompressionWarning, match="what is gathered is not quantized.*Leave WireDtype out.*bits=8"):
            plan(shapes, algorithm, world_size=2)
    assert not advice(WireDtype(TwoLevel(Sign(), 2), "int8"), {name: Spec(shape) for name, shape in shapes.items()})
    assert not advice(WireDtype(Sign(), "bfloat16"), {"w": Spec((64, 64))})
