"""What a compiler or a device may do as it likes, in a StableHLO module: conversions and shifts
whose operand is not proved to be in range.

    faults(jax.jit(step).trace(*arguments).lower(lowering_platforms=PLATFORMS).compiler_ir("stablehlo"))   # a list of sentences

StableHLO leaves open what becomes of an integer that a narrower type cannot hold, of a float that
an integer type cannot, of a float beyond one that has no inf, and of a shift by the width of the
type or more. Ranges are computed from constants, clamps, masks, shifts and comparisons, and nothing
is assumed of arguments. int32 arithmetic wraps (the hash counts on it), so a sum or product that
may overflow may be anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

#: A program for all of them has every branch that depends on the platform.
PLATFORMS = ("cpu", "cuda", "tpu")

INF = math.inf
#: The largest float that rounds to a finite one of a type without inf.
WITHOUT_INF = {"f8E4M3FN": 464.0}
SAME = {
    "broadcast_in_dim",
    "reshape",
    "transpose",
    "slice",
    "reverse",
    "copy",
    "optimization_barrier",
    "all_gather",
    "all_to_all",
}
FIRST = {"gather", "dynamic_slice", "round_nearest_even", "round_nearest_afz", "floor", "ceil"}
REDUCTIONS = {"stablehlo.maximum", "stablehlo.minimum"}
OPPOSITE = {"LT": "GE", "GE": "LT", "GT": "LE", "LE": "GT", "EQ": "NE", "NE": "EQ"}


@dataclass(frozen=True)
class Range:
    """Between which numbers all elements lie, and whether there may be NaN.

    Attributes:
        rounded: they have been rounded by an operation that does so, or are a constant.
        unsure: they are of a shorter float to which a conversion may have rounded them.
    """

    low: float
    high: float
    nan: bool = False
    rounded: bool = False
    unsure: bool = False

    def __or__(self, other: Range) -> Range:
        both = self.rounded and other.rounded
        low, high = min(self.low, other.low), max(self.high, other.high)
        return Range(low, high, self.nan or other.nan, both, self.unsure or other.unsure)

    def within(self, other: Range) -> bool:
        return other.low <= self.low and self.high <= other.high and not self.nan


def faults(module: Any) -> list[str]:
    """A sentence for each place, once."""
    functions = {
        op.attributes["sym_name"].value: op
        for op in module.body.operations
        if op.operation.name == "func.func"
    }
    walk = _Walk(functions)
    walk.block(functions["main"].regions[0].blocks[0], _Frame())
    return list(dict.fromkeys(walk.found))


def of_type(kind: str) -> Range:
    """All that an element type, "i8", "ui32" or "f32", can hold."""
    if kind.startswith(("f", "bf")):
        return Range(-INF, INF, nan=True)
    if kind == "i1":
        return Range(0, 1)
    bits = int(kind.lstrip("usi"))
    return (
        Range(0, 2**bits - 1)
        if kind.startswith("u")
        else Range(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    )


class _Frame:
    """One call of a function: the ranges of its values, and which values of the caller its
    arguments are."""

    def __init__(self) -> None:
        self.ranges: dict[Any, Range] = {}
        self.bound: dict[Any, tuple[_Frame, Any]] = {}


class _Walk:
    def __init__(self, functions: dict[str, Any]) -> None:
        self._functions = functions
        self.found: list[str] = []

    def block(self, block: Any, frame: _Frame) -> list[tuple[Any, Range]]:
        """Values and ranges that a block returns."""
        for op in block.operations:
            name = op.operation.name
            if name in ("func.return", "stablehlo.return", "sdy.return"):
                return [(x, self._range(x, frame)) for x in op.operands]
            for result, found in zip(
                op.results, self._results(op, name.split(".")[-1], frame), strict=True
            ):
                frame.ranges[result] = found
        return []

    def _range(self, value: Any, frame: _Frame) -> Range:
        if value in frame.ranges:
            return frame.ranges[value]
        if value in frame.bound:
            outer, given = frame.bound[value]
            return self._range(given, outer)
        return of_type(_kind(value))

    def _results(self, op: Any, name: str, frame: _Frame) -> list[Range]:
        given = [self._range(x, frame) for x in op.operands]
        whole = [of_type(_kind(x)) for x in op.results]
        if name == "call":
            callee, inner = self._functions[op.attributes["callee"].value], _Frame()
            inner.bound = {
                a: (frame, x)
                for a, x in zip(callee.regions[0].blocks[0].arguments, op.operands, strict=True)
            }
            return [found for _, found in self.block(callee.regions[0].blocks[0], inner)]
        if name == "manual_computation":
            for argument, x in zip(op.regions[0].blocks[0].arguments, op.operands, strict=True):
                frame.bound[argument] = (frame, x)
            return [found for _, found in self.block(op.regions[0].blocks[0], frame)]
        if name in ("case", "if"):
            branches = [
                [found for _, found in self.block(region.blocks[0], frame)] for region in op.regions
            ]
            return [_union(each) for each in zip(*branches, strict=True)]
        if name == "reduce" and len(op.results) == 1:
            body = [each.operation.name for each in op.regions[0].blocks[0].operations]
            return [given[0] | given[1]] if body[0] in REDUCTIONS else whole
        # of loops, sorts, sums over replicas: their arguments may be anything
        for region in op.regions:
            self.block(region.blocks[0], frame)
        if name in SAME:
            return given
        if name in FIRST:
            return [replace(given[0], rounded=given[0].rounded or name.startswith("round"))]
        if name == "top_k":
            return [given[0], Range(0, _shape(op.operands[0])[-1] - 1)]
        if len(op.results) != 1:
            return whole
        return [self._one(op, name, given, whole[0], frame)]

    def _one(self, op: Any, name: str, given: list[Range], whole: Range, frame: _Frame) -> Range:
        kind = _kind(op.results[0])
        integers = not kind.startswith(("f", "bf"))
        match name:
            case "constant":
                return _constant(op, whole)
            case "iota":
                return Range(0, _shape(op.results[0])[op.attributes["iota_dimension"].value] - 1)
            case "concatenate" | "pad" | "dynamic_update_slice":
                return _union(given[: 2 if name != "concatenate" else None])
            case "collective_permute":
                return given[0] | Range(0, 0)  # of devices to which nobody sends
            case "compare":
                return Range(0, 1)
            case "clamp":
                low, x, high = given
                return Range(
                    min(max(x.low, low.low), high.high), max(min(x.high, high.high), low.low), x.nan
                )
            case "maximum" | "minimum":
                pick = max if name == "maximum" else min
                x, y = given
                return Range(pick(x.low, y.low), pick(x.high, y.high), x.nan or y.nan)
            case "reduce_precision":
                return replace(whole, rounded=True)
            case "multiply" if not integers and any(x.rounded and x.low == x.high for x in given):
                # gives inf and NaN alone
                endless = any(x.low == x.high and math.isinf(x.low) for x in given)
                return replace(whole, rounded=endless or all(x.rounded for x in given))
            case "select":
                holds, x, y = op.operands
                return self._where(holds, x, True, frame) | self._where(holds, y, False, frame)
            case "convert":
                return self._converted(op, given[0], kind, whole)
            case "shift_left" | "shift_right_arithmetic" | "shift_right_logical":
                return self._shifted(op, name, *given, whole)
            case "bitcast_convert":
                return (
                    given[0]
                    if integers
                    and given[0].within(whole)
                    and _bits(op.operands[0]) == _bits(op.results[0])
                    else whole
                )
            case "and" if integers:
                masks = [x for x in given if x.low >= 0]
                return Range(0, min(x.high for x in masks)) if masks else whole
            case "or" | "xor" if integers:
                return (
                    Range(0, _ones(max(x.high for x in given)))
                    if min(x.low for x in given) >= 0
                    else whole
                )
            case "add" | "subtract" | "multiply" | "negate" | "abs" if integers:
                found = _computed(name, given)
                return found if found.within(whole) else whole
            case "divide" if integers and given[0].low >= 0 and given[1].low > 0:
                return Range(given[0].low // given[1].high, given[0].high // given[1].low)
            case "remainder" if integers and given[1].low > 0:
                most = given[1].high - 1
                return Range(0 if given[0].low >= 0 else -most, most)
        return whole

    def _where(self, holds: Any, x: Any, true: bool, frame: _Frame) -> Range:
        """The range of `x` where the boolean `holds` is `true`."""
        found, (home, value) = self._range(x, frame), _origin(x, frame)
        for at, of, direction, bound in self._known(holds, true, frame):
            if (at, of) == (home, value):
                narrow = _narrowed(found, direction, bound, _kind(x))
                found = replace(found, low=narrow.low, high=narrow.high, nan=found.nan and not true)
        return found

    def _known(self, holds: Any, true: bool, frame: _Frame) -> list[tuple[_Frame, Any, str, Range]]:
        """Comparisons that are so where the boolean is `true`, unless of NaN if it is not: of which
        value, how, with which range."""
        home, value = _origin(holds, frame)
        op = value.owner
        name = getattr(getattr(op, "operation", op), "name", "")
        if name == ("stablehlo.and" if true else "stablehlo.or"):
            return [each for x in op.operands for each in self._known(x, true, home)]
        if name == "stablehlo.not":
            return self._known(op.operands[0], not true, home)
        if name != "stablehlo.compare":
            return []
        x, y = op.operands
        direction = str(op.attributes["comparison_direction"]).split()[-1].rstrip(">")
        direction, bound = direction if true else OPPOSITE[direction], self._range(y, home)
        at, of = _origin(x, home)
        known = [(at, of, direction, bound)]
        if getattr(
            getattr(of.owner, "operation", of.owner), "name", ""
        ) == "stablehlo.abs" and direction in (
            "LT",
            "LE",
        ):
            other = {"LT": "GT", "LE": "GE"}[direction]
            inner = _origin(of.owner.operands[0], at)
            known += [(*inner, direction, bound), (*inner, other, Range(-bound.high, -bound.low))]
        return known

    def _converted(self, op: Any, x: Range, kind: str, whole: Range) -> Range:
        before = _kind(op.operands[0])
        if kind == "i1" or before == kind:
            return whole if kind == "i1" else x
        if not kind.startswith(("f", "bf")):
            if (
                x.nan
                or math.isinf(x.high - x.low)
                or not (cut := Range(math.trunc(x.low), math.trunc(x.high))).within(whole)
            ):
                self._fault(op, f"of {_said(x)} to {kind}")
                return whole
            return cut
        if kind in WITHOUT_INF and not replace(x, nan=False).within(
            Range(-WITHOUT_INF[kind], WITHOUT_INF[kind])
        ):
            self._fault(op, f"of {_said(x)} to {kind}, which has no inf")
        if not before.lstrip("us").startswith("i"):
            if x.unsure and _mantissa(kind) > _mantissa(before):
                self._fault(
                    op,
                    f"of {before} to {kind}, which may be left out together with the conversion to {before}",
                )
            if _mantissa(kind) < _mantissa(before):
                return replace(
                    x if kind in ("f32", "f64") else whole, rounded=x.rounded, unsure=not x.rounded
                )
        return x if before.lstrip("us").startswith("i") or kind in ("f32", "f64") else whole

    def _shifted(self, op: Any, name: str, x: Range, by: Range, whole: Range) -> Range:
        width = _bits(op.operands[0])
        if not by.within(Range(0, width - 1)):
            self._fault(op, f"by {_said(by)} of {width} bits")
            return whole
        least, most = int(by.low), int(by.high)
        if name == "shift_left":
            found = _union([Range(int(x.low) << s, int(x.high) << s) for s in (least, most)])
            return found if found.within(whole) else whole
        if name == "shift_right_logical" and x.low < 0:
            return Range(0, (2**width - 1) >> least) if least else whole
        return _union([Range(int(x.low) >> s, int(x.high) >> s) for s in (least, most)])

    def _fault(self, op: Any, what: str) -> None:
        self.found.append(f"{op.operation.name} {what}, at {op.location}")


def _origin(value: Any, frame: _Frame) -> tuple[_Frame, Any]:
    """The value itself, in the function that has computed it."""
    while value in frame.bound:
        frame, value = frame.bound[value]
    return frame, value


def _narrowed(x: Range, direction: str, bound: Range, kind: str) -> Range:
    """`x` where it compares so with what lies in `bound`. Of floats that are less than a number the
    largest lies just below it."""

    def below(limit: float) -> float:
        return limit - 1 if not kind.startswith(("f", "bf")) else math.nextafter(limit, -INF)

    def above(limit: float) -> float:
        return limit + 1 if not kind.startswith(("f", "bf")) else math.nextafter(limit, INF)

    match direction:
        case "LT":
            return Range(x.low, min(x.high, below(bound.high)))
        case "LE":
            return Range(x.low, min(x.high, bound.high))
        case "GT":
            return Range(max(x.low, above(bound.low)), x.high)
        case "GE":
            return Range(max(x.low, bound.low), x.high)
        case "EQ":
            return Range(max(x.low, bound.low), min(x.high, bound.high))
    return x


def _computed(name: str, given: list[Range]) -> Range:
    x = given[0]
    match name:
        case "add":
            return Range(x.low + given[1].low, x.high + given[1].high)
        case "subtract":
            return Range(x.low - given[1].high, x.high - given[1].low)
        case "negate":
            return Range(-x.high, -x.low)
        case "abs":
            return Range(
                0 if x.low <= 0 <= x.high else min(abs(x.low), abs(x.high)),
                max(abs(x.low), abs(x.high)),
            )
    products = [a * b for a in (x.low, x.high) for b in (given[1].low, given[1].high)]
    return Range(min(products), max(products))


def _constant(op: Any, whole: Range) -> Range:
    try:
        numbers = np.array(op.attributes["value"]).astype(np.float64)
    except (TypeError, ValueError, BufferError):  # of a type that NumPy has not
        return whole
    finite = numbers[~np.isnan(numbers)]
    if not finite.size:
        return Range(INF, -INF, nan=True, rounded=True)
    exact = float if "f" in _kind(op.results[0]) else int
    return Range(
        exact(finite.min()), exact(finite.max()), nan=finite.size < numbers.size, rounded=True
    )


def _union(ranges: Any) -> Range:
    first, *others = ranges
    for other in others:
        first = first | other
    return first


def _ones(number: float) -> int:
    return (1 << int(number).bit_length()) - 1


def _kind(value: Any) -> str:
    return str(getattr(value.type, "element_type", value.type))


def _shape(value: Any) -> list[int]:
    return list(value.type.shape)


def _bits(value: Any) -> int:
    return int("".join(c for c in _kind(value).split("E")[0] if c.isdigit()))


def _mantissa(kind: str) -> int:
    known = {"f64": 52, "f32": 23, "f16": 10, "bf16": 7}
    return known[kind] if kind in known else int(kind.split("M")[1][0])


def _said(x: Range) -> str:
    return f"{x.low:g} … {x.high:g}" + (" or NaN" if x.nan else "")
