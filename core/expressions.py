"""Algorithms written as text: what a command line is given.

    parse_algorithm("PowerSGD(rank=4)")
    parse_algorithm("WireDtype(PowerSGD(rank={'*embed*': 0, '*': 4}), 'bfloat16')")

The text is read as a tree of syntax and never run. It may hold the names of this table, literals, and products, quotients and shifts of numbers.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from gradwire.core.algorithm import Algorithm, require_algorithm
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.power_sgd import PowerSGD
from gradwire.core.algorithms.quantize import Quantize
from gradwire.core.algorithms.sign import Sign
from gradwire.core.algorithms.top_k import TopK
from gradwire.core.algorithms.two_level import TwoLevel
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.local_sgd.algorithm import LocalSGD, diloco
from gradwire.core.local_sgd.outer import OuterSGD

#: What a text may call.
NAMES: dict[str, Callable[..., Any]] = {
    "AllReduce": AllReduce,
    "LocalSGD": LocalSGD,
    "OuterSGD": OuterSGD,
    "PowerSGD": PowerSGD,
    "Quantize": Quantize,
    "Sign": Sign,
    "TopK": TopK,
    "TwoLevel": TwoLevel,
    "WireDtype": WireDtype,
    "diloco": diloco,
}
#: No configuration is longer; deeper trees than fit into it are refused before they are built.
LONGEST = 1000


class NotAnAlgorithm(ValueError):
    """A text that is no algorithm. The message names the text, what is wrong in it, and the fix."""


def parse_algorithm(text: str) -> Algorithm | LocalSGD:
    """The algorithm that a text writes down, as Python would read it: `PowerSGD(rank=4)`.

    Raises:
        NotAnAlgorithm: the text holds something else than known names, literals and arithmetic of numbers; or an option does not exist or
            has no such value.
    """
    if len(text) > LONGEST:
        raise NotAnAlgorithm(f"an algorithm of {len(text)} characters: write it in at most {LONGEST}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        made = _value(tree)
        if not isinstance(made, LocalSGD):
            require_algorithm(made)
    except SyntaxError as error:
        raise NotAnAlgorithm(f"{text!r} is no expression ({error.msg}): write it as PowerSGD(rank=4)") from error
    except (MemoryError, RecursionError) as error:
        raise NotAnAlgorithm(f"{text!r} is nested too deeply") from error
    except NotAnAlgorithm as error:
        raise NotAnAlgorithm(f"{text!r}: {error}") from error
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:  # what constructors refuse, by name
        raise NotAnAlgorithm(f"{text!r}: {error}") from error
    algorithm: Algorithm | LocalSGD = made
    return algorithm


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Tuple(elts=elements):
            return tuple(map(_value, elements))
        case ast.List(elts=elements):
            return list(map(_value, elements))
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_value(key or _refused(node)): _value(value) for key, value in pairs}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() | ast.LShift() as op, right=right):
            return _computed(_number(left), op, _number(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            return _called(name, args, keywords)
        case ast.Name(id=name) if name in NAMES:
            raise NotAnAlgorithm(f"{name} needs its options: write {name}(…)")
        case ast.Name(id=name):
            raise _unknown(name)
    _refused(node)


def _number(node: ast.expr) -> int | float:
    value = _value(node)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise NotAnAlgorithm(f"{ast.unparse(node)} is no number")
    return value


def _computed(left: int | float, op: ast.operator, right: int | float) -> int | float:
    if isinstance(op, ast.LShift):
        if not (isinstance(left, int) and isinstance(right, int) and 0 <= right < 64):
            raise NotAnAlgorithm(f"{left} << {right}: shift an integer by 0 to 63")
        return left << right
    result = left * right if isinstance(op, ast.Mult) else left / right
    if not math.isfinite(result):
        raise NotAnAlgorithm(f"{left} and {right} give {result}")
    return result


def _called(name: str, args: list[ast.expr], keywords: list[ast.keyword]) -> Any:
    if name not in NAMES:
        raise _unknown(name)
    make = NAMES[name]
    positional = [_value(arg) for arg in args]
    options = {keyword.arg or _refused(keyword.value): _value(keyword.value) for keyword in keywords}
    _require_options(name, make, len(positional), options)
    return make(*positional, **options)


def _require_options(name: str, make: Callable[..., Any], positional: int, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(make).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for option in options:
        if option not in parameters and not open_ended:
            near = difflib.get_close_matches(option, parameters, 1)
            fix = f"did you mean {near[0]}?" if near else f"it has {', '.join(parameters)}"
            raise NotAnAlgorithm(f"{name} has no option {option}; {fix}")
    try:
        inspect.signature(make).bind(*[None] * positional, **dict.fromkeys(options))
    except TypeError as error:
        raise NotAnAlgorithm(f"{name}: {error}; it has {', '.join(parameters)}") from error


def _unknown(name: str) -> NotAnAlgorithm:
    near = difflib.get_close_matches(name, NAMES, 1, cutoff=0.5)
    return NotAnAlgorithm(
        f"{name} is unknown; {f'did you mean {near[0]}?' if near else 'give one of ' + ', '.join(NAMES)}"
    )


def _refused(node: ast.expr) -> Any:
    raise NotAnAlgorithm(f"{ast.unparse(node)} is neither a known name nor a literal; the names are {', '.join(NAMES)}")
