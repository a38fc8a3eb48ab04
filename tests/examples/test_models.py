"""The torch model and the Flax model are the same model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict

from gradwire import FlaxNames, PowerSGD, plan
from gradwire.jax_backend import parameter_shapes
from tests.examples.conftest import examples_importable

with examples_importable():
    import flags
    import model_flax
    import model_torch
    import train_flax

SIZES = {"vocabulary": 256, "context": 16, "width": 128, "layers": 2, "heads": 2}


def to_torch(params):
    """Flax's parameters as torch has them."""
    found = FlaxNames(model_torch.Transformer(**SIZES), params).to_torch(flatten_dict(params, sep="/"))
    return {name: torch.tensor(x) for name, x in found.items()}


@pytest.mark.slow
def test_the_same_weights_give_the_same_logits():
    tokens = np.random.default_rng(0).integers(0, 256, (3, 16))
    flax_model = model_flax.Transformer(**SIZES)
    params = jax.jit(flax_model.init)(jax.random.key(0), jnp.asarray(tokens))["params"]
    # Biases and norms begin at 0 and 1, where a mistake would not show.
    moved = jax.tree.map(lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size).reshape(x.shape)), params)
    torch_model = model_torch.Transformer(**SIZES)
    torch_model.load_state_dict(to_torch(moved))  # names and shapes are those of the other, none left over
    ours = np.asarray(jax.jit(flax_model.apply)({"params": moved}, tokens))
    with torch.no_grad():
        theirs = torch_model(torch.from_numpy(tokens)).numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())
    names, arrays = FlaxNames(torch_model, params), {name: x.numpy() for name, x in torch_model.state_dict().items()}
    for back in (names.to_flax(arrays), jax.jit(names.to_flax)(arrays)):
        jax.tree.map(np.testing.assert_array_equal, back, flatten_dict(moved, sep="/"))


def test_the_initial_weights_are_drawn_alike():
    torch.manual_seed(0)
    ours = model_torch.Transformer(**SIZES).state_dict()
    tokens = jnp.zeros((1, 16), jnp.int32)
    theirs = to_torch(jax.jit(model_flax.Transformer(**SIZES).init)(jax.random.key(0), tokens)["params"])
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape
        if tensor.dim() == 2:  # thousands of numbers: their standard deviations agree to a few percent
            assert abs(tensor.std() / theirs[name].std() - 1) < 0.1, name
        else:
            assert torch.equal(tensor, theirs[name]), name


def test_flax_sends_what_torch_sends():
    """The blocks of one are stacked by `nn.scan`, its attention has heads as an axis: the plan does not show it."""
    sizes = SIZES | {"width": 256, "layers": 3, "heads": 4}
    with torch.device("meta"):
        ours = {name: tuple(p.shape) for name, p in model_torch.Transformer(**sizes).named_parameters()}
    tokens = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    params = jax.eval_shape(model_flax.Transformer(**sizes).init, jax.random.key(0), tokens)["params"]
    theirs = parameter_shapes(params)
    assert theirs["blocks/attention/query/kernel"] == (3, 256, 4, 64)
    for rank in (1, 2, 4):
        here, there = plan(ours, PowerSGD(rank)), plan(theirs, PowerSGD(rank, **train_flax.VIEWS))
        assert (here.dense_bytes, here.steps) == (there.dense_bytes, there.steps)
        assert here.compression_ratio > 15


def test_no_byte_sees_the_ones_after_it():
    model = model_torch.Transformer(**SIZES)
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_by_default_it_has_a_few_million_parameters():
    args = flags.check(flags.parser("").parse_args([]), flags.parser(""))
    with torch.device("meta"):
        model = model_torch.Transformer(256, args.context, args.width, args.layers, args.heads)
    assert 2e6 < sum(p.numel() for p in model.parameters()) < 4e6
