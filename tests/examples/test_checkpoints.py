"""The examples' files notice damage; and a run moves from torch to Flax and back as if it had stayed."""

import copy
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend
from gradwire.jax_backend import replicate, unreplicate
from tests.examples.conftest import EXAMPLES, TINY, examples_importable
from tests.launch import run_ranks

pytestmark = pytest.mark.slow

with examples_importable():
    import checkpoints
    import convert
    import flags
    import model_torch
    import train_flax

DATA = bytes(range(256)) * 20


def test_a_file_is_what_was_written_and_damage_is_noticed(tmp_path):
    path = tmp_path / "new" / "file"
    checkpoints.write(path, b"something older")
    checkpoints.write(path, DATA)
    assert checkpoints.read(path) == DATA
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    content = path.read_bytes()
    for length in (0, 10, 40, len(DATA) // 2, len(DATA), len(DATA) + 39):
        assert length < len(content)
        path.write_bytes(content[:length])
        with pytest.raises(SystemExit, match="cut off"):
            checkpoints.read(path)
    for place in (0, 1000, len(DATA) - 1, len(DATA), len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(SystemExit, match=r"damaged|no checkpoint"):
            checkpoints.read(path)


class Torch:
    """What `train_torch.py` does, in this process."""

    def __init__(self, args):
        torch.manual_seed(0)
        self.args = args
        self.model = model_torch.Transformer(256, args.context, args.width, args.layers, args.heads)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
        self.ddp = DistributedDataParallel(self.model)
        here, _ = convert.algorithms(args)
        self.handle = gradwire.torch_backend.register_comm_hook(self.ddp, here)

    def steps(self, numbers):
        losses = []
        for step in numbers:
            self.optimizer.param_groups[0]["lr"] = flags.learning_rate(step, self.args)
            inputs, targets = (torch.from_numpy(x) for x in batch(self.args, step))
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.ddp(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def saved(self, step):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy(state | {"step": step, "compressor": self.handle.gathered_state_dict()})

    def load(self, saved):
        self.handle.load_state_dict(saved["compressor"])
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])


def batch(args, step):
    windows = np.random.default_rng(step).integers(97, 123, (4, args.context + 1)).cumsum(1) % 256
    return windows[:, :-1], windows[:, 1:]


def test_a_run_moves_to_flax_and_back_as_if_it_had_stayed():
    p = flags.parser("")
    args = flags.check(p.parse_args([*TINY, "--layers=2", "--rank=2", "--half-step", "--steps=12", "--lr=0.01"]), p)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        stayed = Torch(args).steps(range(12))
        first = Torch(args)
        moved = first.steps(range(5))

        state = convert.to_flax(first.saved(5), convert.flax_state(args), args)
        devices = jax.devices()[:1]
        state = replicate(state, devices, axis_name="batch")
        step_fn = jax.pmap(train_flax.train_step.__wrapped__, axis_name="batch", devices=devices)
        for step in range(5, 9):
            inputs, targets = (jnp.asarray(x)[None] for x in batch(args, step))
            state, loss = step_fn(state, inputs, targets)
            moved.append(float(loss[0]))

        back = Torch(args)
        back.load(convert.to_torch(unreplicate(state), convert.torch_state(args), args))
        moved += back.steps(range(9, 12))
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
    assert back.handle.rank_state_dict()["step"] == 12
    np.testing.assert_allclose(moved, stayed, rtol=1e-4)
    assert abs(stayed[4] - stayed[-1]) > 0.01  # they moved by more than the tolerance


def test_the_command_line_moves_files(tmp_path, monkeypatch):
    options = [*TINY, "--rank=2", "--half-step"]
    begun, flax, back = (tmp_path / name for name in ("begun", "flax", "back"))
    train = [EXAMPLES / "train_torch.py", 1, *options]
    run_ranks(*train, "--steps=4", f"--checkpoint={begun}")

    def convert_to(*arguments):
        monkeypatch.setattr("sys.argv", ["convert.py", *map(str, arguments), *options])
        convert.main()

    convert_to("flax", begun, flax)
    convert_to("torch", flax, back)
    before, after = (torch.load(io.BytesIO(checkpoints.read(path)), weights_only=True) for path in (begun, back))
    for name, value in before["model"].items():
        assert torch.equal(after["model"][name], value)
    for name, memory in before["compressor"]["tensors"].items():
        for key, value in memory.items():
            torch.testing.assert_close(after["compressor"]["tensors"][name][key].reshape(value.shape), value)
    assert "step 6/6" in run_ranks(*train, "--steps=6", "--resume", f"--checkpoint={back}")

    monkeypatch.setattr("sys.argv", ["convert.py", "flax", str(begun), str(flax), "--zero"])
    with pytest.raises(SystemExit):
        convert.main()
