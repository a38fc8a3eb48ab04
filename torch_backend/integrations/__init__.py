"""Support for other libraries: Hugging Face's Trainer and accelerate, Lightning. Each is imported
when its name is asked for.

    from gradwire.torch_backend.integrations import (
        AcceleratorCompression, LightningCompression, TrainerCompression
    )

    method = WireDtype(PowerSGD(16), "int8")
    trainer.add_callback(TrainerCompression(trainer, method))            # transformers
    trainer = Trainer(callbacks=[LightningCompression(method)])          # Lightning
    compression = AcceleratorCompression(accelerator, model, method)     # accelerate

Each registers the hook on the DDP that the tool makes, with its loss scaler; saves and restores the
compressor's memory in its checkpoints, for any number of processes; and logs what compression does
to its trackers. `training_of_trainer` and `training_of_lightning` make of them what
`gradwire.compare` trains.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradwire.torch_backend.integrations.accelerate import AcceleratorCompression
    from gradwire.torch_backend.integrations.lightning import LightningCompression
    from gradwire.torch_backend.integrations.trainer import TrainerCompression
    from gradwire.torch_backend.integrations.training import (
        training_of_lightning,
        training_of_trainer,
    )

__all__ = [
    "AcceleratorCompression",
    "LightningCompression",
    "TrainerCompression",
    "training_of_lightning",
    "training_of_trainer",
]

_MODULES = {
    "AcceleratorCompression": "accelerate",
    "LightningCompression": "lightning",
    "TrainerCompression": "trainer",
    "training_of_lightning": "training",
    "training_of_trainer": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
