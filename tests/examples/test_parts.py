"""What the scripts are made of: one model in torch and in Flax, the same bytes of text for both,
their options; and the examples that need NumPy alone."""

import re
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import FlaxNames, PowerSGD, Simulator, plan
from gradwire.jax_backend import parameter_shapes
from gradwire.testing import check
from tests.examples.conftest import EXAMPLES, examples_importable

with examples_importable():
    import flags
    import model_flax
    import model_torch
    import text as examples_text
    import train_flax
    from power_sgd_on_one_screen import power_sgd, side_by_side
    from two_more_methods import RandomProjection, TopRows
    from write_your_own import RandomElements

SIZES = {"vocabulary": 256, "context": 16, "width": 128, "layers": 2, "heads": 2}


# --- models -------------------------------------------------------------------------------------


def to_torch(params):
    """Flax's parameters as torch has them."""
    found = FlaxNames(model_torch.Transformer(**SIZES), params).to_torch(
        flatten_dict(params, sep="/")
    )
    return {name: torch.tensor(x) for name, x in found.items()}


@pytest.mark.slow
def test_the_same_weights_give_the_same_logits():
    tokens = np.random.default_rng(0).integers(0, 256, (3, 16))
    flax_model = model_flax.Transformer(**SIZES)
    params = jax.jit(flax_model.init)(jax.random.key(0), jnp.asarray(tokens))["params"]
    # Biases and norms begin at 0 and 1, where a mistake would not show.
    moved = jax.tree.map(lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size).reshape(x.shape)), params)
    torch_model = model_torch.Transformer(**SIZES)
    # names and shapes are those of the other, none left over
    torch_model.load_state_dict(to_torch(moved))
    ours = np.asarray(jax.jit(flax_model.apply)({"params": moved}, tokens))
    with torch.no_grad():
        theirs = torch_model(torch.from_numpy(tokens)).numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
    names, arrays = (
        FlaxNames(torch_model, params),
        {name: x.numpy() for name, x in torch_model.state_dict().items()},
    )
    for back in (names.to_flax(arrays), jax.jit(names.to_flax)(arrays)):
        jax.tree.map(np.testing.assert_array_equal, back, flatten_dict(moved, sep="/"))


def test_the_initial_weights_are_drawn_alike():
    torch.manual_seed(0)
    ours = model_torch.Transformer(**SIZES).state_dict()
    tokens = jnp.zeros((1, 16), jnp.int32)
    theirs = to_torch(
        jax.jit(model_flax.Transformer(**SIZES).init)(jax.random.key(0), tokens)["params"]
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape
        # thousands of numbers: their standard deviations agree to a few percent
        if tensor.dim() == 2:
            assert abs(tensor.std() / theirs[name].std() - 1) < 0.1, name
        else:
            assert torch.equal(tensor, theirs[name]), name


def test_flax_sends_what_torch_sends():
    """The blocks of one are stacked by `nn.scan`, its attention has heads as an axis: the plan does
    not show it."""
    sizes = SIZES | {"width": 256, "layers": 3, "heads": 4}
    with torch.device("meta"):
        ours = {
            name: tuple(p.shape) for name, p in model_torch.Transformer(**sizes).named_parameters()
        }
    tokens = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    params = jax.eval_shape(model_flax.Transformer(**sizes).init, jax.random.key(0), tokens)[
        "params"
    ]
    theirs = parameter_shapes(params)
    assert theirs["blocks/attention/query/kernel"] == (3, 256, 4, 64)
    for rank in (1, 2, 4):
        here, there = plan(ours, PowerSGD(rank)), plan(theirs, PowerSGD(rank, **train_flax.VIEWS))
        assert (here.dense_bytes, here.steps) == (there.dense_bytes, there.steps)
        assert here.compression_ratio > 15


def test_no_byte_sees_the_ones_after_it_and_by_default_there_are_a_few_million_parameters():
    model = model_torch.Transformer(**SIZES)
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
    assert not torch.equal(before[:, 9:], after[:, 9:])
    args = flags.check(flags.parser("").parse_args([]), flags.parser(""))
    with torch.device("meta"):
        model = model_torch.Transformer(256, args.context, args.width, args.layers, args.heads)
    assert 2e6 < sum(p.numel() for p in model.parameters()) < 4e6


# --- text ---------------------------------------------------------------------------------------


@pytest.fixture
def letters(tmp_path):
    path = tmp_path / "letters.txt"
    path.write_bytes(bytes(range(250)) * 40)
    return path


def test_the_standard_library_is_on_every_machine():
    text = examples_text.load(context=64)
    assert 2e6 < len(text.train) < 4.5e6
    assert 1e5 < len(text.validation) < len(text.train)
    train, held_out = text.train.tobytes(), text.validation.tobytes()
    assert b"import" in train
    # Held out by whole files: no stretch of it stands in what is trained on.
    assert not any(held_out[i : i + 400] in train for i in range(1000, len(held_out) - 400, 40_000))


def test_a_batch_depends_on_seed_step_and_replica_alone_and_targets_are_the_next_bytes(letters):
    first, again = (examples_text.load(letters, context=8) for _ in range(2))
    assert first.train.tobytes() + first.validation.tobytes() == letters.read_bytes()
    assert len(first.validation) == 1000  # the last tenth
    inputs, targets = batch = first.batch(1, 2, 3, size=16, context=8)
    assert inputs.shape == targets.shape == (16, 8)
    np.testing.assert_array_equal(targets, (inputs + 1) % 250)
    np.testing.assert_array_equal(batch, again.batch(1, 2, 3, size=16, context=8))
    for other in ((0, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not np.array_equal(batch, first.batch(*other, size=16, context=8))


def test_replicas_share_the_windows_that_are_held_out_to_the_last_byte(letters):
    text = examples_text.load(letters, context=8)
    (whole, targets), *shares = [
        text.validation_batch(0, 1, 12, 8),
        *(text.validation_batch(i, 3, 12, 8) for i in range(3)),
    ]
    parts = np.concatenate([inputs for inputs, _ in shares])
    np.testing.assert_array_equal(np.sort(whole, axis=0), np.sort(parts, axis=0))
    assert targets[-1, -1] == text.validation[-1]


def test_too_little_text_is_refused_by_name(tmp_path):
    with pytest.raises(SystemExit, match=r"absent\.txt: No such file"):
        examples_text.load(tmp_path / "absent.txt", context=8)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(
        SystemExit, match=r"short\.txt is too short: 8 bytes to train on and 1 held out"
    ):
        examples_text.load(short, context=8)


# --- options ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_torch.py", "train_flax.py", "demo.py"])
def test_help_explains_every_flag(script, start):
    text = start(EXAMPLES / script, "--help").finish()
    options = re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)
    assert len(options) >= 3
    for option in options:  # followed by its explanation, on its line or on the next
        assert re.search(
            rf"^  {option}\b[^\n]*?(?:  +|\n {{10,}})(\w[^\n]*)", text, re.MULTILINE
        ), option


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--batch-size", "-1"], "--batch-size -1 must be at least 1"),
        (
            ["--width", "100"],
            "--width 100 is more than one head of 64 and no multiple of 64; 64 is",
        ),
        (["--rank", "0"], "--rank must be at least 1"),
        (["--start-step", "-1"], "--start-step and --seed at least 0"),
        (["--compress", "none", "--half-step"], "--half-step is PowerSGD's, and --compress none"),
        (["--resume"], "--resume needs --checkpoint"),
        (["--resume", "--checkpoint", "nowhere.pt"], "no checkpoint at nowhere.pt"),
    ],
)
def test_impossible_flags_are_refused(given, message, capsys):
    p = flags.parser("")
    with pytest.raises(SystemExit):
        flags.check(p.parse_args(given), p)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_windows_that_cannot_be_shared_are_refused(start):
    refused = start(
        EXAMPLES / "train_flax.py", "--devices=3", "--eval-windows=4", python=sys.executable
    )
    assert "--eval-windows 4 is not a multiple of the 3 devices" in refused.output()
    assert refused.process.returncode == 2


# --- NumPy alone --------------------------------------------------------------------------------

STEPS = 5


@settings(max_examples=25)
@given(
    n=st.integers(4, 20),
    m=st.integers(4, 20),
    rank=st.integers(1, 4),
    replicas=st.integers(1, 3),
    signal=st.sampled_from(["full rank", "lower rank", "zero"]),
    seed=st.integers(0, 99),
)
def test_gradwire_computes_what_is_on_the_screen(n, m, rank, replicas, signal, seed):
    """`PowerSGD` is the paper's algorithm, as one screen of NumPy has it: step by step the same
    averages and the same errors."""
    rng = np.random.default_rng(seed)
    # the same on all replicas: of a lower rank are their averages, too
    left = rng.normal(size=(n, max(1, rank - 1)))

    def gradient():
        if signal == "lower rank":
            return left @ rng.normal(size=(left.shape[1], m))
        return rng.normal(size=(n, m)) * (signal == "full rank")

    given = [
        [{"w": gradient(), "b": rng.normal(size=n)} for _ in range(replicas)] for _ in range(STEPS)
    ]
    simulator = Simulator(
        PowerSGD(rank, min_compression_rate=1e-3), {"w": (n, m), "b": (n,)}, replicas
    )
    q = simulator.states[0].tensors["w"]["q"].T.copy()
    seen = [[] for _ in range(replicas)]

    def train(replica, all_reduce_mean):
        errors, qs = {"w": np.zeros((n, m))}, {"w": q}
        for step in range(STEPS):
            averages = power_sgd(given[step][replica], errors, qs, all_reduce_mean)
            seen[replica].append({**averages, "error": errors["w"]})

    side_by_side(replicas, train)
    for step in range(STEPS):
        averages = simulator.step(given[step])
        for state, expected in zip(simulator.states, [own[step] for own in seen], strict=True):
            for name in ("w", "b"):
                np.testing.assert_allclose(averages[name], expected[name], rtol=0, atol=1e-9)
            np.testing.assert_allclose(
                state.tensors["w"]["error"], expected["error"], rtol=0, atol=1e-9
            )


def test_the_screen_converges(capsys):
    runpy.run_path(str(EXAMPLES / "power_sgd_on_one_screen.py"), run_name="__main__")
    errors = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[:-1]]
    assert errors[0] == 1
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02


@pytest.mark.parametrize(
    "method", [RandomElements(every=4), RandomProjection(2), TopRows(4)], ids=repr
)
def test_each_keeps_all_promises_that_a_shipped_method_keeps(method):
    assert check(method) == check(PowerSGD(2), world_sizes=(2,))


@pytest.mark.slow
def test_a_method_of_your_own_runs_with_numpy_alone(start, tmp_path):
    (alone := tmp_path / "alone.py").write_text(
        "import runpy, sys\n"
        # importing it fails
        "for name in ('torch', 'jax', 'flax', 'optax'): sys.modules[name] = None\n"
        f"runpy.run_path({str(EXAMPLES / 'write_your_own.py')!r}, run_name='__main__')\n"
    )
    output = start(alone, python=sys.executable).finish()
    rows = re.findall(
        r"^(\w+)\(.*\) +([\d,]+) bytes +(\d) messages? +([\d.]+)%$", output, re.MULTILINE
    )
    # float64
    per_step = [
        4 * 2 * (256 * 64 + 256),
        4 * 2 * (256 * 8 + 64 * 8 + 256),
        4 * 2 * (256 * 64 // 8 + 256),
    ]
    methods = [("AllReduce", "1"), ("PowerSGD", "2"), ("RandomElements", "1")]
    expected = [
        (name, f"{200 * n:,}", messages)
        for (name, messages), n in zip(methods, per_step, strict=True)
    ]
    assert [row[:3] for row in rows] == expected
    assert all(float(error) < 1 for *_, error in rows)
