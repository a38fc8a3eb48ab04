"""Hugging Face's Trainer: a callback registers the hook, keeps its memory in the Trainer's checkpoints and logs what it does.

torchrun --nproc-per-node=2 examples/scripts/hf_trainer.py --steps 20
torchrun --nproc-per-node=2 examples/scripts/hf_trainer.py --steps 40     # goes on from the 20
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gradwire import PowerSGD, WireDtype
from gradwire.torch_backend.integrations import TrainerCompression

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--folder", type=Path, default="trainer")
args = parser.parse_args()


class Words(Dataset[dict[str, torch.Tensor]]):
    """Your data: here words of one letter, so that the next letter is known."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.full((32,), i * 7919 % 256)
        return {"input_ids": tokens, "labels": tokens}


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=128, n_layer=2, n_head=4))
arguments = TrainingArguments(
    output_dir=str(args.folder),
    max_steps=args.steps,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    warmup_steps=5,
    gradient_accumulation_steps=2,
    save_steps=10,
    logging_steps=10,
    use_cpu=not torch.cuda.is_available(),
    ddp_backend="nccl" if torch.cuda.is_available() else "gloo",
    report_to="none",  # or "wandb", "tensorboard": the figures of the compression go there too
)
trainer = Trainer(model, arguments, train_dataset=Words())
trainer.add_callback(TrainerCompression(trainer, WireDtype(PowerSGD(16), "int8")))  # the line that is added
trainer.train(resume_from_checkpoint=any(args.folder.glob("checkpoint-*")))
