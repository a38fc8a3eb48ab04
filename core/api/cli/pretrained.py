"""Models of transformers by their configuration alone: a `config.json`, or a class. Neither weights
nor the network are asked for.

built_from_config(Path("config.json"))
built_by_default(transformers.GPT2LMHeadModel)
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def is_configuration(path: Path) -> bool:
    """Whether a file is a configuration of transformers, which names the type of its model."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return False  # whoever reads shapes says what is wrong
    return isinstance(content, dict) and isinstance(content.get("model_type"), str)


def built_from_config(path: Path) -> Callable[[], Any]:
    """What builds the model of a `config.json`: the first of its architectures that transformers
    has, or the bare model.

    Raises:
        ValueError: transformers is not here, or does not know the type.
    """
    try:
        library = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path} is a configuration of transformers; `pip install transformers torch`"
        ) from error
    try:
        config = library.AutoConfig.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=True
        )
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: transformers {library.__version__} does not read it: {error}"
        ) from error
    for name in config.architectures or ():
        if hasattr(library, name):
            model = getattr(library, name)
            return lambda: model(config)
    return lambda: library.AutoModel.from_config(config)


def built_by_default(found: Callable[[], Any]) -> Callable[[], Any]:
    """The callable itself; of a class of transformers what builds it with the configuration that it
    has by default."""
    config = getattr(found, "config_class", None)
    if not isinstance(found, type) or config is None:
        return found
    return lambda: found(config())
