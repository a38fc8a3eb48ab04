"""The kernels in Triton without a GPU: what they compile to for an H100, what torch knows of them,
and, in a process of its own, what they compute."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from benchmarks.dry import Kernels
from gradwire.torch_backend.ops import fused
from gradwire.torch_backend.ops.kernels import TorchOps
from tests.launch import LIMIT

NUMBERS = Path(__file__).with_name("triton_numbers.py")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed: it is made for Linux alone",
)

FLAG, BYTES, INT, FLOAT = "*i1", "*u8", "i32", "fp32"
TABLE = {"ok": FLAG, "table": "*i64", "count": INT}
CODES = {"width": 128, "padded": 128, "some": 16}
#: Kernel → arguments in the types that Triton gives them, and constants. X is the dtype of
#: gradients. Numbers whose type is in capitals are multiples of 16.
LAUNCHES = {
    "copy_if": (TABLE | {"like": "X"}, {"aligned": True, "block": fused.VECTOR}),
    "add_to": (
        {"like": "X", "table": "*i64", "count": INT},
        {"aligned": True, "block": fused.VECTOR},
    ),
    "multiplied_copy": (
        {"like": "X", "table": "*i64", "count": INT, "factor": FLOAT},
        {"aligned": True, "block": fused.VECTOR},
    ),
    "finite": (
        {"like": "X", "table": "*i64", "count": INT, "found": FLAG},
        {"aligned": True, "block": fused.VECTOR, "blocks": fused.SEEN // fused.VECTOR},
    ),
    "quantize": (
        {"x": "*fp32", "codes": BYTES, "scales": "*fp32", "rows": "N", "inverse": FLOAT},
        CODES,
    ),
    "quantize_mean": (
        {
            "codes": BYTES,
            "scales": "*fp32",
            "lost": "*fp32",
            "mean_codes": BYTES,
            "mean_scales": "*fp32",
            "rows": "N",
        }
        | {
            "replicas": INT,
            "codes_batch": "N",
            "scales_batch": "N",
            "share": FLOAT,
            "factor": FLOAT,
            "inverse": FLOAT,
        },
        CODES | {"keeps": True},
    ),
    "subtract_decoded_if": (
        TABLE | {"like": "X"},
        {"aligned": True, "width": 128, "block": fused.VECTOR},
    ),
    "decode_or_nan": (
        {"ok": FLAG, "codes": BYTES, "scales": "*fp32", "out": "X", "n": "N"},
        {"width": 128, "block": fused.VECTOR},
    ),
    "sum_of_signs": (
        {
            "bits": BYTES,
            "above": "*fp32",
            "below": "*fp32",
            "of_run": "*i32",
            "out": "*fp32",
            "n": "N",
            "whole": "N",
        }
        | {"rest": INT, "replicas": INT, "bits_batch": "N", "numbers": INT},
        {"run": 256, "bits_of": 512, "block": fused.VECTOR},
    ),
    "pack_integers": (
        {"x": "*i32", "out": BYTES, "n": "N", "whole": "N", "left": "N"},
        {"bits": 13, "block": fused.PACKED},
    ),
    "unpack_integers": (
        {
            "data": BYTES,
            "out": "*i32",
            "n": "N",
            "whole": "N",
            "left": "N",
            "apart": "N",
            "across": INT,
        },
        {"bits": 13, "block": fused.VECTOR},
    ),
    "take_rows": (
        {
            "x": "*i64",
            "index": "*i32",
            "out": "*i64",
            "rows": "N",
            "n": "N",
            "batch": "N",
            "apart": "N",
        },
        {"width": 16, "padded": 16, "some": 128},
    ),
    "search_keys": ({"x": "X", "keys": "*i64", "n": "N", "m": "N"}, {"block": fused.VECTOR}),
    "add_at": (
        {
            "index": "*i32",
            "rows": "*i64",
            "values": "*fp32",
            "out": "*fp32",
            "replicas": INT,
            "count": "N",
            "k": "N",
        },
        {"padded": 64},
    ),
}
#: More registers than this leave less than a third of a processor's threads at work.
REGISTERS = 96


def compiled(name: str, dtype: str, *, aligned: bool) -> tuple[str, int, int]:
    """PTX for an H100, the registers of a thread, and the bytes that it spills. `aligned`: as
    tensors of even sizes are launched."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gradwire.torch_backend.ops import triton_kernels

    kernel = getattr(triton_kernels, name)
    types, constants = LAUNCHES[name]
    constants = constants | ({"aligned": aligned} if "aligned" in constants else {})
    multiples = {
        argument for argument, kind in types.items() if kind == "N" or kind == "X" or "*" in kind
    }
    names = {"X": f"*{dtype}", "N": INT}
    signature = {
        each: names.get(types.get(each), types.get(each, "constexpr")) for each in kernel.arg_names
    }
    hints = {
        (i,): [["tt.divisibility", 16]]
        for i, each in enumerate(signature)
        if aligned and each in multiples
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=hints)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=fused.EXACT)
    assert len(made.asm["cubin"])
    return made.asm["ptx"], *said_by_ptxas(made.asm["ptx"])


def said_by_ptxas(ptx: str) -> tuple[int, int]:
    from triton.backends.nvidia.compiler import get_ptxas

    command = [
        get_ptxas(90).path,
        "--verbose",
        "--gpu-name=sm_90a",
        "--output-file=/dev/null",
        "/dev/stdin",
    ]
    said = subprocess.run(
        command, input=ptx, capture_output=True, text=True, check=True, timeout=LIMIT
    ).stderr
    (registers,), (spilled,) = (
        re.findall(r"Used (\d+) registers", said),
        re.findall(r"(\d+) bytes spill stores", said),
    )
    return int(registers), int(spilled)


@needs_triton
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_it_compiles_for_an_h100(name: str, dtype: str) -> None:
    ptx, registers, spilled = compiled(name, dtype, aligned=True)
    assert registers <= REGISTERS
    assert spilled == 0
    # 16 bytes at a time.
    # But what adds here and there, only looks, or stores bytes.
    assert name in ("add_at", "finite", "pack_integers") or re.search(
        r"st\.global\.v(4\.b32|2\.b64)", ptx
    )
    # Nothing that depends on which program comes first, and no result that depends on contracted
    # products.
    assert "atom." not in ptx
    for shortcut in ("fma.rn", "div.full", "div.approx", "rcp.", ".ftz"):
        assert shortcut not in ptx


def ptx_of(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {each: types.get(each, "constexpr") for each in kernel.arg_names}
    own = {each: value for each, value in constants.items() if each in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=own)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=fused.EXACT | options)
    ptx: str = made.asm["ptx"]
    return ptx


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "size"), [("bf16", 8), ("fp32", 32), pytest.param("fp32", 64, marks=pytest.mark.slow)]
)
def test_orthonormalizing_compiles_for_an_h100(dtype: str, size: int) -> None:
    """Kernels that are many programs, or one for each matrix. Many rows are multiplied in tensor
    cores, in float64."""
    from gradwire.torch_backend.ops import factors, triton_factors

    types = {
        "like": f"*{dtype}",
        "table": "*i64",
        "count": INT,
        "found": "*i32",
        "gram_of": "*fp64",
    }
    types |= {"small": "*fp64", "usable": "*i32", "once": "*fp64"}
    columns = min(factors.CHUNK, factors.ELEMENTS // size)
    constants = {"size": size, "chunk": factors.CHUNK, "columns": columns, "refreshes": True}
    for name in (
        "largest",
        "grams",
        "first_factors",
        "first_products",
        "second_factors",
        "second_products",
    ):
        ptx = ptx_of(
            getattr(triton_factors, name), types, constants, **factors._options(name, size)
        )
        assert said_by_ptxas(ptx)[1] <= 256, name
        assert ("mma.sync" in ptx) == (
            size >= factors.MANY and name in ("grams", "first_products", "second_products")
        )
        for shortcut in ("atom.", "fma.rn", "div.full", "div.approx", "rcp.", ".ftz"):
            assert shortcut not in ptx, name


def test_what_this_triton_does_not_multiply_is_left_to_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles of float64, before 3.6."""
    from gradwire.torch_backend.ops import factors

    few, many, matrix = (
        torch.empty(shape, dtype=torch.float64) for shape in ((8, 32), (9, 32), (32, 16))
    )
    for doubles in (True, False):
        monkeypatch.setattr(factors, "multiplies_doubles", lambda doubles=doubles: doubles)
        found = [factors.multiplies(x, matrix) for x in (few, many)]
        assert found == [True, doubles]
    assert factors.multiplies(many.float(), matrix.float())


@needs_triton
@pytest.mark.parametrize("size", [4, 32])
def test_products_compile_for_an_h100(size: int) -> None:
    """As float32 throughout: no tensor cores with fewer digits."""
    from gradwire.torch_backend.ops import factors, triton_factors

    types = {"like": "*fp32", "table": "*i64", "count": INT, "parts": "*fp32"}
    for along in (True, False):
        constants = {"size": size, "part": factors.PART, "along": along, "aligned": True}
        constants |= factors._tile(size, along=along)
        ptx = ptx_of(triton_factors.products, types, constants, enable_fp_fusion=True)
        assert said_by_ptxas(ptx)[1] == 0
        assert not any(word in ptx for word in ("atom.", "tf32", ".ftz"))


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "depth", "aligned"),
    [
        ("fp32", fused.DEPTH[0], True),
        ("fp32", fused.DEPTH[1], False),
        ("bf16", fused.DEPTH[1], True),
    ],
)
def test_factors_are_multiplied_out_by_instructions_that_multiply_tiles(
    dtype: str, depth: int, aligned: bool
) -> None:
    """Rows of factors are read into memory that a processor's threads share, once for all of them.
    Of float32, without tensor cores; of halves, with them."""
    from gradwire.torch_backend.ops import triton_kernels

    types = TABLE | {"like": f"*{dtype}", "like_factor": f"*{dtype}"}
    constants = {
        "subtracts": True,
        "double": False,
        "halves": dtype == "bf16",
        "aligned": aligned,
        "depth": depth,
    }
    constants |= dict(zip(("some", "columns"), fused.TILE, strict=True))
    ptx = ptx_of(triton_kernels.product_if, types, constants, num_stages=1)
    assert said_by_ptxas(ptx)[1] <= (0 if aligned else 64)
    threads = 128
    of_each = fused.TILE[0] * fused.TILE[1] * depth // threads
    assert dtype == "bf16" or ptx.count("fma.rn.f32") == of_each
    assert ("mma" in ptx) == (dtype == "bf16")
    assert not any(word in ptx for word in ("atom.", "tf32", ".ftz"))


@needs_triton
@pytest.mark.parametrize("name", LAUNCHES)
def test_it_compiles_where_all_numbers_are_one(name: str) -> None:
    """Of which Triton makes constants."""
    from gradwire.torch_backend.ops import triton_kernels

    types, constants = LAUNCHES[name]
    numbers = {each for each, kind in types.items() if kind in (INT, "N")}
    names = {
        each: kind.replace("X", "*bf16") for each, kind in types.items() if each not in numbers
    }
    own = (
        constants
        | ({"aligned": False} if "aligned" in constants else {})
        | dict.fromkeys(numbers, 1)
    )
    assert ptx_of(getattr(triton_kernels, name), names, own)


@needs_triton
@pytest.mark.parametrize("name", LAUNCHES)
def test_what_is_not_aligned_spills_no_registers(name: str) -> None:
    assert compiled(name, "fp32", aligned=False)[2] == 0


@needs_triton
@pytest.mark.parametrize("what", ["whole_steps", "not whole_steps"])
def test_what_they_compute(what: str, request: pytest.FixtureRequest) -> None:
    """All of it, or what is quick, as the tests here are chosen. Steps of two ranks are as long as
    all the rest: each has a limit of its own, for a machine that is busy."""
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(NUMBERS)]
    command += ["-m", request.config.getoption("markexpr"), "-k", what]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def arguments() -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """Of each operator, for rows of 256 elements."""
    ok, x = torch.ones((), dtype=torch.bool), torch.empty(4, 256)
    factors = torch.empty(1, 2, 4), torch.empty(1, 2, 256)
    codes, scales = torch.empty(4, 256, dtype=torch.uint8), torch.empty(4, 1)
    of_all = torch.empty(3, 4, 256, dtype=torch.uint8), torch.empty(3, 4, 1)
    out, outs = {"out": torch.empty_like(x)}, {"out": [torch.empty_like(x)]}
    numbers = torch.zeros(4, dtype=torch.int32)
    return {
        "copy_if": ([ok, [x]], outs),
        "subtract_product_if": ([ok, [x], *([factor] for factor in factors)], outs),
        "add_to": ([[x], [x]], {}),
        "multiplied_copy": ([[x], 0.5], outs),
        "finite": ([[x, x]], {"found": torch.empty(2, dtype=torch.bool)}),
        "product_or_nan": ([ok, *([factor] for factor in factors)], outs),
        "quantize": ([x, 127.0], {"codes": codes, "scales": scales}),
        "quantize_mean": (
            [*of_all, 127.0],
            {"mean_codes": codes, "mean_scales": scales, "lost": torch.empty_like(x)},
        ),
        "subtract_decoded_if": ([ok, [x], [codes], [scales], [x[:2]], [1]], outs),
        "decode_or_nan": ([ok, codes, scales], out),
        "sum_of_signs": ([codes[:3, :128], *[torch.empty(3, 2)] * 2, numbers, 256, 512], out),
        "pack_integers": ([torch.zeros(64, dtype=torch.int32), 12], {"out": codes.view(-1)[:96]}),
        "unpack_integers": ([codes[:2, :96], 12], {"out": torch.zeros(2, 64, dtype=torch.int32)}),
        "take_rows": ([x, torch.zeros(6, dtype=torch.int32)], {"out": torch.empty(6, 256)}),
        "search_keys": ([x], {"keys": torch.empty(4, 256, dtype=torch.int64)}),
        "add_at": (
            [
                torch.zeros(3, 4, 8, dtype=torch.int32),
                numbers[:, None].long(),
                torch.empty(3, 4, 8),
            ],
            out,
        ),
    }


@pytest.mark.parametrize("name", arguments())
def test_each_is_one_operation_that_reads_and_writes_what_its_schema_says(name: str) -> None:
    given, written = arguments()[name]
    with Kernels() as seen:
        getattr(torch.ops.gradwire, name)(*given, **written)
    assert seen.by_name == {name: 1}
    twice = given[0] if name == "add_to" else []  # which is read and written
    assert seen.nbytes == sum(
        x.nbytes for x in tree_leaves([given, written, twice]) if isinstance(x, torch.Tensor)
    )
    assert seen.waits == 0


@pytest.mark.parametrize("name", arguments())
def test_compilers_see_what_it_is_without_running_it(name: str) -> None:
    with FakeTensorMode():
        given, written = arguments()[name]
        assert getattr(torch.ops.gradwire, name)(*given, **written) is None


def test_elsewhere_than_on_cuda_there_are_none() -> None:
    assert TorchOps(torch.device("cpu")).fused is None
    assert not fused.available(torch.device("meta"))


def test_without_a_compiler_for_them_the_plain_operations_are_taken(monkeypatch) -> None:
    """Triton compiles what starts a kernel with the C compiler of the machine."""

    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    ones = torch.ones
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "ones", lambda *shape, device, **options: ones(*shape, **options))
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, **options: ones(*shape, **options))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: sys)
    monkeypatch.setattr(fused, "launch", refuse)
    with pytest.warns(
        UserWarning, match=r"without its kernels in Triton on cuda:7.*Failed to find C compiler"
    ):
        assert not fused.available(torch.device("cuda:7"))
    monkeypatch.setattr(fused, "launch", lambda *args, **options: None)
    assert fused.available(torch.device("cuda:6"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not fused.available(torch.device("cuda:5"))
    fused.available.cache_clear()
