"""The forms of a training state: a Flax `TrainState`; parameters and the optimizer's state, first
in a tuple; or an nnx model and its `nnx.Optimizer`."""

from __future__ import annotations

from typing import Any


def is_train_state(training: Any) -> bool:
    """Whether it is a `flax.training.train_state.TrainState`."""
    return hasattr(training, "apply_gradients")


def is_nnx(training: Any) -> bool:
    """Whether these are objects of nnx, which are changed in place."""
    return isinstance(training, tuple) and len(training) == 2 and hasattr(training[1], "opt_state")


def parts(training: Any) -> tuple[Any, Any]:
    """Parameters and the optimizer's state."""
    if is_nnx(training):
        from flax import nnx

        model, optimizer = training
        return nnx.state(model, optimizer.wrt), optimizer.opt_state
    return (training.params, training.opt_state) if is_train_state(training) else training[:2]


def with_parts(training: Any, params: Any, opt_state: Any) -> Any:
    """The same with others."""
    if is_nnx(training):
        from flax import nnx

        model, optimizer = training
        nnx.update(model, params)
        nnx.update(optimizer.opt_state, nnx.state(opt_state))
        return training
    if is_train_state(training):
        return training.replace(params=params, opt_state=opt_state)
    return (params, opt_state, *training[2:])
