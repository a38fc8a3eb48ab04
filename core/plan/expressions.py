"""Algorithms written as text: what a command line is given.

    parse_algorithm("PowerSGD(rank=4)")
    parse_algorithm("WireDtype(PowerSGD(rank={'*embed*': 0, '*': 4}), 'bfloat16')")
    parse_algorithm("int8")                                        # WireDtype(AllReduce(), 'int8')
    parse_algorithm("my_methods:IntSGD(bits=8)", own=load)    # one's own, which `load` finds

The text is read as a tree of syntax and never run. It may hold the names of this table, literals,
and, where somebody says how to find them, names of modules.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradwire.core.algorithm import Algorithm, require_algorithm
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.power_sgd import PowerSGD
from gradwire.core.algorithms.quantize import Quantize
from gradwire.core.algorithms.sign import Sign
from gradwire.core.algorithms.top_k import TopK
from gradwire.core.algorithms.two_level import TwoLevel
from gradwire.core.algorithms.weighted import Weighted
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.codecs import CODECS
from gradwire.core.local_sgd.algorithm import LocalSGD, diloco
from gradwire.core.local_sgd.outer import OuterSGD
from gradwire.core.text.wording import meant

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
    "Weighted": Weighted,
    "WireDtype": WireDtype,
    "diloco": diloco,
}
#: A string, which is left as it is; or `module:Class`, that is called.
OWN = re.compile(r"""'[^']*'|"[^"]*"|(?P<name>[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)(?=\s*\()""")
CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
#: No configuration is longer; deeper trees than fit into it are refused before they are built.
LONGEST = 1000


class NotAnAlgorithm(ValueError):
    """A text that is no algorithm. The message names the text, what is wrong in it, and the fix."""


def parse_algorithm(
    text: str, own: Callable[[str], Callable[..., Any]] | None = None
) -> Algorithm | LocalSGD:
    """The algorithm that a text writes down, as Python would read it: `PowerSGD(rank=4)`. The name
    of a codec alone, `int8`, is an average in it.

    Args:
        text: what is read.
        own: finds what `module:Class` in it names. None: such names are refused.

    Raises:
        NotAnAlgorithm: the text holds something else than known names and literals; or an option
            does not exist or has no such value.
    """
    if len(text) > LONGEST:
        raise NotAnAlgorithm(
            f"an algorithm of {len(text)} characters: write it in at most {LONGEST}"
        )
    if text.strip() in CODECS:
        return WireDtype(AllReduce(), text.strip())
    names = dict(NAMES)

    def found(each: re.Match[str]) -> str:
        """A name that Python can read, for one of somebody's own."""
        if each["name"] is None or own is None:
            return each[0]
        name = f"own_{len(names)}"
        names[name] = own(each["name"])
        return name

    readable = OWN.sub(found, text.strip())
    try:
        made = _value(ast.parse(readable, mode="eval").body, names)
        if not isinstance(made, LocalSGD):
            require_algorithm(made)
    except SyntaxError as error:
        if own is not None and CLASS.fullmatch(text.strip()):
            raise NotAnAlgorithm(f"{text!r} is a class: write it as {text.strip()}()") from error
        raise NotAnAlgorithm(
            f"{text!r} is no expression ({error.msg}): write it as PowerSGD(rank=4)"
        ) from error
    except (MemoryError, RecursionError) as error:
        raise NotAnAlgorithm(f"{text!r} is nested too deeply") from error
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        # what constructors refuse, by name
        raise NotAnAlgorithm(f"{text!r}: {error}") from error
    algorithm: Algorithm | LocalSGD = made
    return algorithm


def _value(node: ast.expr, names: Mapping[str, Callable[..., Any]]) -> Any:
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in names:
            called = names[name]
            _once([keyword.arg for keyword in keywords], f"{called.__name__} is given option")
            options = {
                keyword.arg or _refused(keyword.value): _value(keyword.value, names)
                for keyword in keywords
            }
            return _called(called, [_value(arg, names) for arg in args], options)
        case ast.Name(id=name) if name in names:
            raise NotAnAlgorithm(f"{name} needs its options: write {name}(…)")
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)) if name in CODECS:
            raise NotAnAlgorithm(
                f"{name} is a codec: write WireDtype(AllReduce(), {name!r}), or {name} alone"
            )
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            raise NotAnAlgorithm(
                f"{name} is unknown;"
                f" {meant(name, [*NAMES, *CODECS], 'give one of ' + ', '.join(NAMES))}"
            )
    for part in ast.walk(node):
        if isinstance(part, ast.Dict):
            _once([ast.unparse(key) for key in part.keys if key], f"{ast.unparse(part)} has key")
    try:
        return ast.literal_eval(node)
    except ValueError:
        _refused(node)


def _once(names: Sequence[str | None], what: str) -> None:
    """Python takes the last of two equal keys and says nothing."""
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise NotAnAlgorithm(f"{what} {twice} twice; leave one out")


def _called(call: Callable[..., Any], args: list[Any], options: dict[str, Any]) -> Any:
    name, parameters = call.__name__, inspect.signature(call).parameters
    for option in options:
        if option not in parameters and not any(
            p.kind is p.VAR_KEYWORD for p in parameters.values()
        ):
            raise NotAnAlgorithm(
                f"{name} has no option {option};"
                f" {meant(option, parameters, 'it has ' + ', '.join(parameters))}"
            )
    try:
        return call(*args, **options)
    except TypeError as error:
        raise NotAnAlgorithm(f"{name}: {error}; it has {', '.join(parameters)}") from error


def _refused(node: ast.expr) -> Any:
    raise NotAnAlgorithm(
        f"{ast.unparse(node)} is neither a known name nor a literal; the names are"
        f" {', '.join(NAMES)}"
    )
