"""Algorithms as text, and files of shapes: what is no such thing is refused by the parser's own
error, and nothing is run."""

from __future__ import annotations

import json
import random
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from gradwire import Spec, plan
from gradwire.cli.shape_files import specs_in
from gradwire.core.plan.expressions import NotAnAlgorithm, parse_algorithm
from tests.fuzz.engine import LATE, LONG, SLOW, WRONG_CLASS, Found, shown

GOOD = (
    "PowerSGD(rank=4)",
    "PowerSGD({'*.w': 2, '*': 0}, half_step=True, max_norm=1.0)",
    "WireDtype(TwoLevel(PowerSGD(1), within=2), 'bfloat16')",
    "TopK(0.01, per=(8, 8), bits=4)",
    "LocalSGD({2: 4, 'all': 8}, start_step=3, outer=OuterSGD(0.7, 0.9, True))",
    "diloco(100, fragments=4, overlap=2, merge='progress', compressor=Quantize('int4'))",
    "AllReduce(bucket_bytes=1 << 20)",
)
PIECES = (
    *("(", ")", "[", "]", "{", "}", ",", "=", "'", '"', "*", "**", "<<", "-", "~", ".", ":", ";", "#", "\\", "\n", "\0", "é", "\ud800"),
    *("None", "True", "0", "-1", "1e999", "1 << 62", "9" * 400, "1j", "rank=4", "lambda: 0", "__import__('os')", "f'{1}'", "...", "a.b"),
    *("PowerSGD", "LocalSGD(2)", "x for x in y", "(" * 50, "[" * 200, "not ", "if", "**{'rank': 2}", "*[2]", "rank=3", "b'x'"),
)  # fmt: skip
SHAPES = {"layers.0.w": (16, 12), "layers.1.w": (16, 12), "b": (16,)}

JSON = json.dumps({"a.w": [16, 12], "b": {"shape": [4], "dtype": "bfloat16"}}).encode()
HEADER = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
SAFETENSORS = struct.pack("<Q", len(HEADER)) + HEADER + bytes(24)
INDEX = json.dumps({"weight_map": {"w": "one.safetensors", "v": "two.safetensors"}}).encode()
FILES = {"shapes.json": JSON, "one.safetensors": SAFETENSORS, "model.safetensors.index.json": INDEX}
WORDS = (
    *(b"null", b"true", b"-1", b"1e999", b"NaN", b"[]", b"{}", b'"w"', b'"dtype"', b"18446744073709551616", b"[" * 5000),
    *(b"{\"a\":" * 5000, b"\xff\xfe", b"\x00", b"\xed\xa0\x80", b'"../../etc/passwd"', b"9" * 5000, b'{"shape": [2]}', b"1.5"),
)  # fmt: skip


def _watched(
    what: str, attempt: Callable[[], object], refusals: tuple[type[Exception], ...], found: Found
) -> None:
    found.tried += 1
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempt()
    except refusals:
        pass
    except Exception as error:
        found.add(WRONG_CLASS, f"{what}: {type(error).__name__}: {shown(error, 150)}")
    if time.perf_counter() - began > LONG:
        found.add(SLOW, what)


def _altered(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 4)):
        i, j = sorted(rng.randint(0, len(text)) for _ in range(2))
        text = rng.choice(
            (
                text[:i] + text[j:],
                text[:i] + rng.choice(PIECES) + text[j:],
                text[:i] + text[i:j] + text[i:],
            )
        )
    return text


def expressions(seed: int, found: Found, count: int) -> None:
    """Algorithms that were altered: each is refused, or is one, of which there is a plan, or a
    ValueError that says what does not fit the model."""
    rng = random.Random(seed)
    for _ in range(count):
        text = _altered(rng.choice(GOOD), rng)

        def attempt(text: str = text) -> None:
            made = parse_algorithm(text)
            try:
                str(plan(SHAPES, made, world_size=4))
            except ValueError:
                pass  # a schedule or a pattern of other models
            except Exception as error:
                found.add(
                    LATE, f"plan of {shown(text)}: {type(error).__name__}: {shown(error, 150)}"
                )

        _watched(f"parse_algorithm({text[:100]!r})", attempt, (NotAnAlgorithm,), found)


def files(seed: int, found: Found, count: int, folder: Path) -> None:
    """Files of shapes that are cut, flipped, or hold something else: refused by ValueError or
    OSError, or read as shapes."""
    rng = random.Random(seed)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    for _ in range(count):
        name = rng.choice(list(FILES))
        content = FILES[name]
        for _ in range(rng.randint(1, 3)):
            i, j = sorted(rng.randint(0, len(content)) for _ in range(2))
            flipped = bytes(b ^ rng.randrange(256) for b in content[i : i + 3])
            content = rng.choice(
                (
                    content[:i],
                    content[:i] + rng.choice(WORDS) + content[j:],
                    content[:i] + flipped + content[i + 3 :],
                )
            )
        path = folder / f"damaged-{name}"
        path.write_bytes(content)

        def attempt(path: Path = path) -> None:
            specs = specs_in(path)
            assert all(isinstance(each, Spec) and each.nbytes >= 0 for each in specs.values())

        _watched(f"specs_in({name}): {content[:60]!r}", attempt, (ValueError, OSError), found)
