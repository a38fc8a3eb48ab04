"""The modes of torch in which nothing here may run: a compiled region, and
`torch.inference_mode()`.

`torch.compile` leaves alone hooks and steps, which send messages, and coroutines, which it cannot
trace. A compiled training step calls `loss.backward()` and `optimizer.step()` from compiled code.
Every Python frame below them that is not marked is then compiled by itself, and the first coroutine
among them is an error. A marked function runs as written, with all that it calls.

What is made in `torch.inference_mode()` can never be trained with. A validation hook of Lightning
runs in it, and may call a handle there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from gradwire.torch_backend.torch_internals import disable_dynamo, in_compiled_autograd

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: `torch.compile` runs this function as it is.

    It is `torch.compiler.disable`, which as a decorator would import the whole compiler together
    with this package, a second or more. torch's own optimizers and DDP are marked like this: the
    compiler is imported by the first call, and then by the first of theirs anyway.
    """
    return disable_dynamo(function)


def refuse_compiled_autograd() -> None:
    """Raise RuntimeError in a backward pass that compiled autograd runs: its graph has no callbacks
    at the end."""
    if in_compiled_autograd():
        raise RuntimeError(
            "compiled autograd makes one graph of the backward pass, and does not say when it ends,"
            " so gradients could not be averaged; set torch._dynamo.config.compiled_autograd ="
            " False"
        )


def outside_inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: what makes tensors that training goes on with, wherever it is called."""

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return outside
