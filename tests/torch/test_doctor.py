"""The doctor finds what is planted in torch, and nothing else: in kernels, messages and algorithms,
between ranks, alone and under a launcher."""

import importlib.util
import os
import time

import pytest
import torch

import gradwire
from gradwire import AllReduce, PowerSGD, Quantize, Sign, TopK, WireDtype
from gradwire.core.simulate.doctor.report import (
    FAULT,
    NOTE,
    OK,
    SKIPPED,
    Report,
    Row,
    Section,
    differing,
)
from gradwire.torch_backend.cpu import codes, compiled, largest, signs, thin
from gradwire.torch_backend.doctor import checks, launched, machine
from gradwire.torch_backend.doctor.checks import check_kernels, check_messages, check_methods
from gradwire.torch_backend.doctor.compiled_loops import check_loops
from gradwire.torch_backend.engine.groups import halves
from gradwire.torch_backend.ops.kernels import TorchOps
from tests.torch.ranks import Cases, variants

cases = Cases(__file__, ranks=2)
needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="numba is not installed"
)
CPU = torch.device("cpu")
FEW = (WireDtype(AllReduce(), "int8"), PowerSGD(2), Sign())
#: All that is shipped takes a minute.
MORE = {
    "half steps": PowerSGD(2, half_step=True),
    "int4": Quantize("int4"),
    "factors of 8 bits": WireDtype(PowerSGD(4), "int8"),
}


def rows_of(check, *arguments, **options):
    rows = []
    check(Section("here", rows.append, time.monotonic() + 200), *arguments, **options)
    return rows


def faults_of(rows):
    return {row.check: row.detail for row in rows if row.verdict != OK}


@cases.case
def test_messages_and_algorithms_are_right_here(world):
    assert faults_of(rows_of(check_messages, world.group, CPU)) == {}
    assert faults_of(rows_of(check_methods, world.group, CPU, FEW)) == {}


@cases.each(MORE, slow=MORE)
def more(world, algorithm):
    return faults_of(rows_of(check_methods, world.group, CPU, [algorithm]))


@pytest.mark.parametrize("name", variants(MORE, slow=MORE))
def test_other_algorithms_are_right_here(results, name):
    assert results(f"more[{name}]") == [{}, {}]


def saturating(patch):
    """What an H100 made of a conversion out of range."""
    patch.setattr(
        TorchOps,
        "nearest_bytes",
        lambda ops, x, *, out=None: torch.full_like(x, 255, dtype=torch.uint8),
    )


def one_wrong_scale(patch):
    right = TorchOps.scales

    def scales(ops, x, largest, *, signed=False):
        scale, reciprocal = right(ops, x, largest, signed=signed)
        scale[-1] *= 1.25
        return scale, reciprocal

    patch.setattr(TorchOps, "scales", scales)


def ten_bits(patch):
    """Products as of TF32."""
    right = TorchOps.matmul

    def shortened(x):
        return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    patch.setattr(
        TorchOps,
        "matmul",
        lambda ops, x, y, *, out=None: right(ops, shortened(x), shortened(y), out=out),
    )


def swallowed(patch):
    """A maximum that loses NaN."""
    right = TorchOps.max_abs
    patch.setattr(
        TorchOps, "max_abs", lambda ops, x: right(ops, x.nan_to_num(0.0, posinf=1.0, neginf=1.0))
    )


def swapped(patch):
    """Rows of a gather in another order than that of the ranks."""
    right = halves.cut_columns
    patch.setattr(halves, "cut_columns", lambda *given: tuple(x.flip(0) for x in right(*given)))


PLANTED = {
    "a conversion that saturates": (saturating, "codec int8", FEW[0]),
    "one wrong scale": (one_wrong_scale, "codec int8", FEW[0]),
    "a product of ten bits": (ten_bits, "matmul", None),
    "a NaN that is swallowed": (swallowed, "max_abs", FEW[0]),
    "ranks in another order": (swapped, "messages", None),
}


#: The rest of them are found in the same way.
SLOW = [name for name in PLANTED if name not in ("one wrong scale", "ranks in another order")]


@cases.each(PLANTED, slow=SLOW)
def planted(world, variant):
    """What is found, on each rank."""
    plant, _, algorithm = variant
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        rows = rows_of(check_kernels, CPU, quick=True) + rows_of(check_messages, world.group, CPU)
        rows += rows_of(check_methods, world.group, CPU, [algorithm] if algorithm else [])
    return faults_of(rows)


@pytest.mark.parametrize("name", variants(PLANTED, slow=SLOW))
def test_what_is_planted_is_found(results, name):
    _, check, algorithm = PLANTED[name]
    for found in results(f"planted[{name}]"):
        assert any(each.startswith(check) for each in found)
        assert algorithm is None or repr(algorithm) in found


@cases.case
def test_an_exception_ends_a_section(world):
    """Ranks may stand at other messages after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "register_comm_hook", lambda *_: {}["no such hook"])
        first, second = rows_of(check_methods, world.group, CPU, [PowerSGD(2), Sign()])
    assert (first.verdict, second.verdict) == (FAULT, SKIPPED)
    assert "no such hook" in first.detail


class OfOneModel(Sign):
    def init(self, ops, specs):
        if "my.layer" not in specs:
            raise ValueError("this is for a model with my.layer")
        return super().init(ops, specs)


@cases.case
def test_what_goes_by_names_is_tried_under_such_names(world):
    """And what asks for more than that is left out, and no fault: the next is tried."""
    named = PowerSGD({"*.embed?.[wv]eight": 2, "head": 0, "*": 1})
    first, second, third = rows_of(check_methods, world.group, CPU, [named, OfOneModel(), Sign()])
    assert (first.verdict, second.verdict, third.verdict) == (OK, SKIPPED, OK)
    assert "it cannot be tried without your model: ValueError: this is for" in second.detail


@cases.case
def test_under_a_launcher(world):
    """Each rank takes part in the checks of all; differing machines are told, and a fault of one
    rank is known to each."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        own = machine.facts(CPU) | (
            {"gpu": f"GPU {world.rank}"} | ({"torch": "1.0"} if world.rank else {})
        )
        patch.setattr(launched, "facts", lambda device: own)
        if world.rank:
            swallowed(patch)
        report = Report(show=lambda row: None)
        launched.examine([Sign()], report, seconds=200, quick=True)
    found = {row.check: row for row in report.rows}
    assert found["torch"].verdict == FAULT
    assert "1.0 on ranks 1" in found["torch"].detail
    assert found["gpu"].verdict == NOTE
    assert "drift apart by rounding" in found["gpu"].detail
    assert found["messages"].verdict == found["Sign()"].verdict == OK
    assert found["max_abs, NaN and inf, rank 1"].verdict == FAULT
    assert [facts["rank"] for facts in report.machine] == [0, 1]
    # The training that asked goes on as before.
    assert torch.distributed.get_world_size() == 2
    assert torch.get_num_threads() == threads
    assert "GRADWIRE_SELFCHECK" not in os.environ


@cases.case
def test_messages_that_are_wrong_on_another_rank_end_it_too(world):
    """Between ranks that do not understand each other nothing else is right."""
    with pytest.MonkeyPatch.context() as patch:
        if world.rank:
            swapped(patch)
        report = Report(show=lambda row: None)
        launched.examine([Sign()], report, seconds=200, quick=True)
    assert "messages, rank 1" in {row.check for row in report.faults}
    assert "Sign()" not in {row.check for row in report.rows}


def test_kernels_are_right_here():
    assert faults_of(rows_of(check_kernels, CPU, quick=False)) == {}


# --- with what numba compiles


def wrong_loop(patch, name):
    """Its first array comes out a little larger than it ought to be; codes by one."""
    right = compiled.compiled

    def larger(which, dtype):
        loop = right(which, dtype)

        def called(*given):
            loop(*given)
            begin, end = given[-2:]
            if which.startswith("encode"):
                # of x or of x and y, and of what each replica has sent
                codes = given[1 if which == "encode" else 2]
                codes[begin:end, -1] ^= 1
            elif end > begin:
                first = given[
                    {"add_and_project": 3, "decode_mean": 2, "sum_of_signs": 4, "largest": 2}.get(
                        which, 0
                    )
                ]
                first[..., -1] += 0.01 * abs(first).max()

        return called if which == name else loop

    for module in (codes, signs, thin, largest):
        patch.setattr(module, "compiled", larger)


@needs_numba
@pytest.mark.parametrize(
    "name", variants(["", *compiled.ARGUMENTS], slow=[*compiled.ARGUMENTS][1:])
)
def test_a_loop_that_is_wrong_is_a_fault(name, monkeypatch):
    if name:
        wrong_loop(monkeypatch, name)
    (first, *rows) = rows_of(check_loops, CPU)
    assert (first.check, first.verdict) == ("compiled loops", OK)
    assert "numba" in first.detail
    faults = faults_of(rows)
    assert bool(faults) == bool(name)
    assert len(faults) < len(rows)
    assert all(
        each.endswith("NUMBA_DISABLE_JIT=1 trains without compiled loops")
        for each in faults.values()
    )


@needs_numba
def test_codes_that_differ_from_torchs_by_a_bit_are_a_fault(monkeypatch):
    """However near they are: with one that has no loops a rank would go on from other numbers."""
    right = TorchOps.decode_mean

    def almost(ops, codec, *of_each, dtype="float32", out=None):
        mean = right(ops, codec, *of_each, dtype=dtype, out=out)
        return mean.nextafter(torch.tensor(torch.inf)) if ops.loops else mean

    monkeypatch.setattr(TorchOps, "decode_mean", almost)
    faults = faults_of(rows_of(check_loops, CPU))
    assert set(faults) == {check for check in faults if ", mean of 3" in check}
    assert faults
    assert all(
        "differs from what torch's operations make of it" in each for each in faults.values()
    )


def test_loops_are_not_looked_for_elsewhere_and_need_not_be_there(monkeypatch):
    assert rows_of(check_loops, torch.device("meta")) == []
    monkeypatch.setattr(compiled, "_numba", lambda: None)
    (row,) = rows_of(check_loops, CPU)
    assert row.verdict == OK
    assert "numba is not installed" in row.detail


@needs_numba
@cases.case
def test_methods_run_with_compiled_loops_too(world):
    """A loop that is wrong on one rank is a fault there; what uses none runs once."""
    methods = [PowerSGD(2), Quantize("int8"), TopK(8, per=64), Quantize("int2")]
    rows = rows_of(check_methods, world.group, CPU, methods, loops=True)
    assert faults_of(rows) == {}
    assert [row.detail for row in rows] == ["4 steps, and with compiled loops"] * 3 + ["4 steps"]
    with pytest.MonkeyPatch.context() as patch:
        if world.rank:
            wrong_loop(patch, "settle_codes")
        rows = rows_of(check_methods, world.group, CPU, [Quantize("int8"), PowerSGD(2)], loops=True)
    faults = faults_of(rows)
    assert list(faults) == [repr(Quantize("int8"))] * (world.rank or 0)
    assert all(each.startswith("with compiled loops ") for each in faults.values())


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_rank_writes_the_report_and_speaks(rank, tmp_path, monkeypatch):
    """Ranks of one machine would write the same file at the same time."""
    shown, file = [], tmp_path / "doctor.json"
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(
        launched, "examine", lambda methods, report, **_: report.add(Row("part", "check", OK))
    )
    report = gradwire.doctor([Sign()], output=file, show=shown.append)
    assert [row.check for row in report.rows] == ["check"]
    assert (file.exists(), len(shown)) == ((True, 1) if rank == "0" else (False, 0))


def test_what_differs():
    machines = {"rank 0": {"torch": "2.11", "gpu": "A"}, "rank 1": {"torch": "2.11", "gpu": "B"}}
    assert differing(machines) == {"gpu": {"rank 0": "A", "rank 1": "B"}}


def test_hardware_that_nobody_has_tried(monkeypatch):
    assert machine.unseen(CPU) == machine.unseen(torch.device("cuda")) == ""
    assert machine.unseen(torch.device("xpu")) == "XPU"
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert machine.unseen(torch.device("cuda")) == "ROCm"
