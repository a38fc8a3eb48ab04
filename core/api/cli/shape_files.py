"""Parameters of a model that lies in a file: their names, shapes and dtypes, without their values.

    specs_in(Path("model.safetensors"))
    specs_in(Path("shapes.json"))   # {"weight": [2048, 512], "bias": {"shape": [2048], "dtype": …}}

The format of safetensors: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire.core.ops import ITEMSIZE, Spec
from gradwire.core.plan.advice import CompressionWarning
from gradwire.core.text.wording import some

SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: So many that are left out are named.
NAMED = 3
#: Bytes of a header, at most; the format's own limit.
HEADER = 100_000_000


def specs_in(path: Path) -> dict[str, Spec]:
    """Parameters of a safetensors file, of the index of several (`model.safetensors.index.json`),
    or of a JSON of shapes.

    Tensors of integers are left out: they are no parameters. So are weights in floats of 8 bits,
    which nobody trains as they are, with a warning that names them. Floating buffers are not told
    apart from parameters.

    Raises:
        ValueError: the file holds something else, named.
        OSError: it cannot be read.
    """
    if path.suffix == ".safetensors":
        return _safetensors(path)
    try:
        content = json.loads(path.read_text())
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply for a JSON of shapes") from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if isinstance(content, dict) and isinstance(content.get("weight_map"), dict):
        files = dict.fromkeys(map(str, content["weight_map"].values()))
        if not files:
            raise ValueError(f"{path}: its weight_map names no file, so there is no tensor")
        return {
            name: spec for file in files for name, spec in _safetensors(path.parent / file).items()
        }
    if not isinstance(content, dict) or not content:
        raise ValueError(f'{path}: give name → shape, as in {{"mlp.weight": [2048, 512]}}')
    return {name: _spec(path, name, given) for name, given in content.items()}


def _spec(path: Path, name: str, given: Any) -> Spec:
    shape, dtype = (
        (given.get("shape"), given.get("dtype", "float32"))
        if isinstance(given, Mapping)
        else (given, None)
    )
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(
            f'{path}: {name!r} is {given!r} and no shape; give [2048, 512], or {{"shape": …,'
            ' "dtype": …}'
        )
    if dtype is not None and not (isinstance(dtype, str) and dtype in ITEMSIZE):
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
        tensors = {
            name: entry for name, entry in json.loads(text).items() if name != "__metadata__"
        }
        shapes = {
            name: entry["shape"] for name, entry in tensors.items() if entry["dtype"] in SAFETENSORS
        }
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no safetensors file: it does not begin with a header of tensors"
        ) from error
    if short := [name for name, entry in tensors.items() if str(entry["dtype"]).startswith("F8_")]:
        warnings.warn(
            f"{path}: {len(short)} tensors of floats of 8 bits are left out, among them"
            f" {some(short, NAMED)}. A training holds them in a longer dtype: give a checkpoint in"
            " that, or a JSON of shapes",
            CompressionWarning,
            stacklevel=2,
        )
    if not shapes:
        raise ValueError(
            f"{path} holds no tensor of {', '.join(SAFETENSORS.values())}: nothing that is trained"
        )
    return {
        name: Spec(_spec(path, name, given).shape, SAFETENSORS[tensors[name]["dtype"]])
        for name, given in shapes.items()
    }
