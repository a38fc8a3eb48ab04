"""Parameters of a model that lies in a file: their names, shapes and dtypes, without their values.

    specs_in(Path("model.safetensors"))
    specs_in(Path("shapes.json"))       # {"mlp.weight": [2048, 512], "mlp.bias": {"shape": [2048], "dtype": "bfloat16"}}

The format of safetensors: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire.core.ops import ITEMSIZE, Spec

SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: Bytes of a header, at most; the format's own limit.
HEADER = 100_000_000


def specs_in(path: Path) -> dict[str, Spec]:
    """Parameters of a safetensors file, of the index of several (`model.safetensors.index.json`), or of a JSON of shapes.

    Tensors of integers are left out: they are no parameters. Floating buffers are not told apart from parameters.

    Raises:
        ValueError: the file holds something else, named.
        OSError: it cannot be read.
    """
    if path.suffix == ".safetensors":
        return _safetensors(path)
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if isinstance(content, dict) and isinstance(content.get("weight_map"), dict):
        parts = [_safetensors(path.parent / str(name)) for name in dict.fromkeys(content["weight_map"].values())]
        return {name: spec for part in parts for name, spec in part.items()}
    if not isinstance(content, dict) or not content:
        raise ValueError(f'{path}: give name → shape, as in {{"mlp.weight": [2048, 512]}}')
    return {name: _spec(path, name, given) for name, given in content.items()}


def _spec(path: Path, name: str, given: Any) -> Spec:
    shape, dtype = (given.get("shape"), given.get("dtype", "float32")) if isinstance(given, Mapping) else (given, None)
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f'{path}: {name!r} is {given!r} and no shape; give [2048, 512], or {{"shape": …, "dtype": …}}')
    if dtype is not None and dtype not in ITEMSIZE:
        raise ValueError(f"{path}: {name!r} has dtype {dtype!r}; give one of {', '.join(ITEMSIZE)}")
    return Spec(tuple(shape), dtype or "float32")


def _safetensors(path: Path) -> dict[str, Spec]:
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        text = file.read(size) if 0 < size <= HEADER else b""
    if len(text) != size:
        text = b""
    try:
        tensors = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        return {
            name: Spec(tuple(entry["shape"]), SAFETENSORS[entry["dtype"]])
            for name, entry in tensors.items()
            if entry["dtype"] in SAFETENSORS
        }
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no safetensors file: it does not begin with a header of tensors") from error
