"""Mutations of the product that an accelerator would mind, each run against the tests of this
folder that concern it: `make mutate-emulated`.

    make mutate-emulated                            # all of them, each at most 90 s; goes on where it was stopped
    make mutate-emulated ARGS="--fresh read_early"  # this one, anew

In a function, the only place of its syntax tree that matches a pattern becomes something else. In
patterns a capital letter is any expression. A mutation is caught by an assertion, by a hang (a rank
waits until its time is up), or not. Every verdict is a line of runs/mutate/emulated.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.mutate import FOLDER, ROOT, copies, run

RESULTS = FOLDER / "emulated.json"
#: Seconds for the tests of a mutation, most of which Python takes to start, on a machine that does
#: nothing else.
LIMIT = 90
#: What is said where a rank has waited for others until its time was up.
WAITED = ("stopped after", "Timed out", "timed out")


@dataclass(frozen=True)
class Tests:
    """Tests of a file, and regular expressions of those of its cases that they look at."""

    nodes: tuple[str, ...]
    cases: str

    def __add__(self, other: Tests) -> Tests:
        return Tests(self.nodes + other.nodes, f"{self.cases}|{other.cases}")


def ways(*names: str, ranks: int = 2) -> Tests:
    """Of `test_ways.py`."""
    nodes = tuple(
        f"tests/emulated/test_ways.py::test_a_way_to_train[{name}-{ranks}]" for name in names
    )
    return Tests(nodes, exactly(f"way[{name}]" for name in names))


def in_file(file: str, *tests: str) -> Tests:
    """Of another file, whose tests are called like their cases."""
    return Tests(tuple(f"tests/emulated/{file}::{test}" for test in tests), exactly(tests))


def exactly(names: Iterable[str]) -> str:
    """A regular expression of these names alone."""
    return "^(" + "|".join(re.escape(name) for name in names) + ")$"


#: In mixed precision FSDP lets go of what it has reduced while it is cast.
UNITS = [
    f"test_unit_by_unit_on_a_stream_of_its_own[{policy}]" for policy in ("plain", "mixed precision")
]
SHARDED = in_file("test_sharded.py", *UNITS)


#: Of outer parameters in the host's memory.
ON_THE_HOST = in_file("test_streams.py", "test_outer_parameters_may_be_on_the_host")
ON_THE_HOST += ways("diloco, on the host", "diloco, on the host, overlap")


@dataclass(frozen=True)
class Mutation:
    """A change of one function, which has the name of its class where others are called alike: a
    pattern becomes statements or an expression; and `also` another. `tests` concern it."""

    function: str
    pattern: str
    becomes: str
    tests: Tests
    also: tuple[str, str] | None = None


MUTATIONS = {
    "the_outside_does_not_wait": Mutation("_Stream.__exit__", "X.wait_stream(Y)", "pass", SHARDED),
    "not_recorded_on_the_stream": Mutation("on_unit", "X.record_stream(Y)", "pass", SHARDED),
    "read_early": Mutation(
        "Pending.wait",
        *("self.arrive(times)", "early = self.unpacked()\nself.arrive(times)"),
        ways("top_k", "hook_with_zero_step by element, all-to-all"),
        also=("return self.unpacked()", "return early"),
    ),
    "waits_on_another_stream": Mutation(
        "Pending.settle",
        "work.wait()",
        "with torch.Stream('emu'):\n    work.wait()",
        ways("PowerSGD"),
    ),
    "accumulators_not_held": Mutation(
        "BackwardReducer._hook",
        "self._accumulators = X",
        "self._accumulators = []",
        in_file("test_streams.py", "test_a_forward_pass_on_two_streams[DataParallel(AllReduce)]"),
    ),
    "another_order_on_one_rank": Mutation(
        "Step.advance",
        "sent = X",
        "sent = (X)[:: 1 - 2 * (self.collectives.groups.whole.rank() == 1)]",
        ways("PowerSGD, a message per bucket"),
    ),
    "goes_on_in_a_callback": Mutation(
        "Step.run",
        "X.advance(None)",
        "X.advance(None)\n"
        "if not self.collectives.ops.host_knows and X.pending is not None and len(X.pending.works) == 1:\n"
        "    X.pending.works[0].get_future().then(lambda _: X.receive() if X.pending is not None else None)",
        ways("PowerSGD, a message per bucket"),
    ),
    "all_ranks_in_place_of_a_group": Mutation(
        "Collectives._reduce",
        "X[request.groups]",
        "X.whole",
        in_file(
            "test_reference.py",
            "test_a_request_is_answered_as_the_core_says[means in groups, NCCL]",
        ),
    ),
    "rank_for_a_rank_of_the_group": Mutation(
        "Exchange.__init__",
        "group.rank() if rank is None else rank",
        "dist.get_rank()",
        ways("everything that can be asked"),
    ),
    "scratch_used_again_in_a_step": Mutation(
        "Step.run",
        "X.advance(None)",
        "self.collectives.scratch.rewind()\nX.advance(None)",
        ways("rank_2", "half_step"),
    ),
    "abandoned_on_its_way": Mutation(
        "Running.close",
        "X.settle()",
        "pass",
        in_file(
            "test_streams.py",
            "test_a_pass_after_one_that_failed_leaves_its_messages_alone[DataParallel(PowerSGD)]",
        ),
    ),
    "pinned_memory_read_early": Mutation(
        "Foreseen.value", "X.synchronize()", "pass", ways("half_step")
    ),
    "pinned_memory_written_early": Mutation(
        "Workspace.on_device",
        "return X if Y else Z",
        "if Y:\n"
        "    return X\n"
        "stage = self.__dict__.setdefault('_stage', {})\n"
        "key = (numbers.dtype, tuple(numbers.shape))\n"
        "if key not in stage:\n"
        "    stage[key] = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)\n"
        "return stage[key].copy_(numbers).to(self.device, non_blocking=True)",
        ways("DDP, unused parameters"),
    ),
    "the_host_reads": Mutation("SkippedSteps.add", "X += ~Y", "X += int(not Y)", ways("PowerSGD")),
    "no_overlap": Mutation(
        "Reducing._launch",
        "if Y.is_cpu:\n    last_messages.append(work)",
        "if not Y.is_cpu:\n    work.wait()",
        in_file("test_streams.py", "test_messages_travel_during_the_backward_pass[DDP]"),
    ),
    "constants_made_anew": Mutation(
        "Workspace.constant", "key not in self._constants", "True", ways("rank_2", "int8")
    ),
    "times_noted_in_a_capture": Mutation(
        "GradientStep._begin",
        "if X:\n    self.watch.times.skip()\nelif Y:\n    self.watch.begin()",
        "if Y:\n    self.watch.begin()",
        in_file("test_streams.py", "test_a_capture_notes_no_times"),
    ),
    "cast_forgotten": Mutation(
        "share",
        "torch.promote_types(X, torch.float32)",
        "X",
        in_file("test_reference.py", "test_a_mean_is_rounded_once[bfloat16, DDP]"),
    ),
    "factor_where_the_default_is": Mutation(
        "share",
        "return torch.tensor(X, dtype=Y, device='cpu')",
        "return torch.tensor(X, dtype=Y)",
        in_file("test_reference.py", "test_a_mean_is_rounded_once[bfloat16, local_sgd]"),
    ),
    "given_twice_on_the_device": Mutation(
        "on_host",
        "X.to('cpu', copy=True)",
        "X.clone().to('cpu', copy=True)",
        in_file(
            "test_streams.py", "test_a_newcomer_is_given_copies_that_take_no_room_on_the_device"
        ),
    ),
    "added_in_any_order": Mutation(
        "CodingOps.scatter_add", "if self.host_knows:\n    return X", "return X", ways("top_k")
    ),
    "finite_for_one_rank": Mutation(
        "Step.finite",
        "return A if B else None",
        "return ((A | True) if self.collectives.groups.whole.rank() == 1 else A) if B else None",
        in_file("test_reference.py", "test_the_numbers_are_numpys[DDP]"),
    ),
    "event_not_recorded": Mutation(
        "Foreseen.note", "self._arrived.record(X)", "pass", ways("half_step")
    ),
    "first_rank_for_the_first_of_a_group": Mutation(
        "ShardedBackward._learn", "dist.get_global_rank(X, Y)", "Y", SHARDED
    ),
    "memory_grows": Mutation(
        "Step.begin", "X.scratch.rewind()", "pass", ways("PowerSGD, forty steps")
    ),
    "numbers_from_pageable_memory": Mutation(
        "Workspace.from_host",
        "self.on_device(torch.tensor(X, dtype=Y, device='cpu'))",
        "torch.tensor(X, dtype=Y, device=self.device)",
        ways("DDP, unused parameters"),
    ),
    "count_read_early": Mutation(
        "SkippedSteps.look",
        "self._arrived is None or self._arrived.query()",
        "True",
        in_file("test_streams.py", "test_a_count_is_read_when_it_has_come"),
    ),
    "divided_on_its_way": Mutation(
        "Reducing._launch",
        *("if divides:\n    X", "pass"),
        ways("all_reduce"),
        also=(
            "if Y.is_cpu:\n    last_messages.append(work)",
            "if self._divides:\n    Y.mul_(share(group, Y.dtype))",
        ),
    ),
    "no_overlap_of_shards": Mutation(
        "Exchange.sum_for_owners",
        "return [reduce_scatter_single(A, B, group=C, async_op=True)]",
        "work = reduce_scatter_single(A, B, group=C, async_op=True)\nwork.wait()\nreturn [work]",
        in_file(
            "test_streams.py",
            "test_shards_travel_during_the_backward_pass[hook_with_zero_step by element]",
        ),
    ),
    "the_host_chooses": Mutation(
        "TorchOps.where",
        "self.host_knows and ok.ndim == 0",
        "ok.ndim == 0",
        ways("int8", "DDP, unused parameters"),
    ),
    "copied_before_it_is_there": Mutation(
        "HostMemory.store", "self._stream.wait_stream(X)", "pass", ON_THE_HOST
    ),
    "event_on_another_stream": Mutation(
        "HostMemory.store",
        "self._copied.record(self._stream)",
        "self._copied.record(torch.accelerator.current_stream(self._device))",
        ON_THE_HOST,
    ),
    "one_scratch_for_all_messages": Mutation(
        "InFlight.leave",
        "collectives = Collectives(X, Y)",
        "collectives = self.__dict__.setdefault('_own', Collectives(X, Y))\ncollectives.scratch.rewind()",
        ways(
            "diloco, overlap",
            "diloco, overlap, fragments",
            "diloco, eager",
            "diloco, two on their way",
        ),
    ),
    "looked_at_before_it_has_come": Mutation(
        "Step.receive",
        *("self.watch(X)", "pass"),
        ways("PowerSGD, a message per bucket", "DataParallel(PowerSGD)"),
        also=("arrived.append(X.wait(Y))", "self.watch(X.watched)\narrived.append(X.wait(Y))"),
    ),
    "memories_of_a_skipped_step": Mutation(
        "TorchOps.where_each",
        "torch.where(ok, _flat(X), _flat(Y))",
        "_flat(X)",
        ways("DDP, GradScaler", "many memories, GradScaler"),
    ),
    "not_divided": Mutation(
        "launch_reduce_scatter",
        "X.mul_(share(Y, Z))",
        "X",
        ways("hook_with_zero_step by element", "ZeroOptimizer by element, averaging"),
    ),
    "scale_the_other_way": Mutation(
        "LossScale.follow",
        "foreach_mul_(X, scale / self.value)",
        "foreach_mul_(X, self.value / scale)",
        ways("DDP, GradScaler", "DataParallel, GradScaler"),
    ),
    "phase_not_foreseen": Mutation(
        "GradientStep._foresee",
        "self.collectives.foreseen.note(X)",
        "pass",
        ways("half_step", "TopK x DataParallel x scaler"),
    ),
}


# --- the change ---------------------------------------------------------------------------------


def changed(source: str, pattern: str, becomes: str) -> tuple[str, int]:
    """A function's source as `ast.unparse` writes it, with something else in all places that match;
    and how many there are. A capital letter is any expression, and in a pattern that is no
    statement one without spaces."""
    (old, *_), new, seen = ast.parse(pattern).body, ast.parse(becomes).body, set[str]()
    whole = len(new) > 1 or not isinstance(old, ast.Expr) or not isinstance(new[0], ast.Expr)

    def group(found: re.Match[str]) -> str:
        if found[0] in seen:
            return f"(?P={found[0]})"
        seen.add(found[0])
        return f"(?P<{found[0]}>{'.+' if whole else '[^ ]+'})"

    lines = [re.sub(r"\b[A-Z]\b", group, re.escape(line)) for line in ast.unparse(old).splitlines()]
    text = r"\n(?P=indent)".join(lines)
    regex = rf"^(?P<indent> *){text}$" if whole else text

    def filled(found: re.Match[str]) -> str:
        text = re.sub(
            r"\b[A-Z]\b",
            lambda letter: found[letter[0]] if letter[0] in seen else letter[0],
            becomes,
        )
        return "\n".join(found["indent"] + line for line in text.splitlines()) if whole else text

    return re.subn(regex, filled, source, flags=re.MULTILINE)


@cache
def _functions() -> dict[str, Path]:
    """The names of all functions, with those of what they are in, and their files."""
    found = {}

    def look(tree: ast.AST, prefix: str, file: Path) -> None:
        for node in ast.iter_child_nodes(tree):
            named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            name = f"{prefix}.{node.name}" if named else prefix  # type: ignore[attr-defined]
            if named and not isinstance(node, ast.ClassDef):
                found[name] = file
            look(node, name, file)

    for file in sorted((ROOT / "torch_backend").rglob("*.py")):
        look(ast.parse(file.read_text()), f"{file}:", file)
    return found


def mutated(mutation: Mutation) -> tuple[Path, str]:
    """The file that it changes, and what is in it then.

    Raises:
        ValueError: there is no such function, or no such place in it, or several.
    """
    found = [name for name in _functions() if name.endswith(f".{mutation.function}")]
    if len(found) != 1:
        raise ValueError(f"{len(found)} functions called {mutation.function}")
    file = _functions()[found[0]]
    node: Any = (tree := ast.parse(file.read_text()))
    for part in found[0].partition(":.")[2].split("."):
        node = next(n for n in ast.walk(node) if getattr(n, "name", "") == part and n is not node)
    source = ast.unparse(node)
    for pattern, becomes in ((mutation.pattern, mutation.becomes), *filter(None, [mutation.also])):
        source, places = changed(source, pattern, becomes)
        if places != 1:
            raise ValueError(f"{places} places of {mutation.function} are like {pattern!r}")
    node.body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    return file, ast.unparse(ast.fix_missing_locations(tree))


# --- what comes of them -------------------------------------------------------------------------


def verdict(folder: Path, tests: Sequence[Tests], limit: float) -> str:
    """Of a copy of the repository: "an assertion", "a hang" or "nothing" stops its tests."""
    env = {
        "PYTHONPATH": str(folder / "build" / "typed"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "GRADWIRE_TEST_CASES": "|".join(each.cases for each in tests),
    }
    nodes = [node for each in tests for node in each.nodes]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *nodes]
    status = run(command, folder, limit, env)
    said = (folder / "runs" / "mutate.log").read_text(errors="replace")
    if status not in (0, 1, None):
        raise RuntimeError(f"the tests could not be run:\n{said[-4000:]}")
    waited = status is None or (status == 1 and any(words in said for words in WAITED))
    return "a hang" if waited else "an assertion" if status else "nothing"


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("names", nargs="*", help="only these")
    p.add_argument(
        "--limit",
        type=float,
        default=LIMIT,
        help=f"seconds for the tests of one (default: {LIMIT})",
    )
    p.add_argument("--fresh", action="store_true", help="forget what came of them before")
    args = p.parse_args()
    names = args.names or list(MUTATIONS)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    todo = [name for name in names if args.fresh or name not in known]
    if todo:
        (folder,) = copies(1)
        (built := ROOT / "build" / "emulated").mkdir(parents=True, exist_ok=True)
        (folder / "build" / "emulated").symlink_to(built)
        everything = [MUTATIONS[name].tests for name in todo]
        if verdict(folder, everything, args.limit * len(todo)) != "nothing":
            raise SystemExit(f"the tests fail as things are, see {folder / 'runs' / 'mutate.log'}")
        for name in todo:
            file, source = mutated(MUTATIONS[name])
            place = folder / file.relative_to(ROOT)
            place.write_text(source)
            known[name] = verdict(folder, [MUTATIONS[name].tests], args.limit)
            place.write_text(file.read_text())
            RESULTS.write_text(json.dumps(known, indent=1) + "\n")
            print(f"{name}: caught by {known[name]}", flush=True)
    print(f"\n{'mutation':32} caught by")
    for name in names:
        print(f"{name:32} {known[name]}")
    caught = [known[name] for name in names].count("an assertion")
    print(f"{caught} of {len(names)} mutations were caught by an assertion")


if __name__ == "__main__":
    main()
