"""For the reference: parameters of data classes as Python takes them, and types without the checks
that `Annotated` carries. griffe overlooks `field(kw_only=False)`, by which `PowerSGD(4)` needs no
keyword, and lists what a class inherits first."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import griffe

KINDS = list(griffe.ParameterKind)


class ParameterOrder(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        self._visit(pkg)

    def _visit(self, item: griffe.Module | griffe.Class) -> None:
        for member in item.members.values():
            if not member.is_alias and isinstance(member, griffe.Module | griffe.Class):
                self._visit(member)
            elif not member.is_alias and isinstance(member, griffe.Attribute):
                member.annotation = without_checks(member.annotation)
            elif not member.is_alias and isinstance(member, griffe.Function):
                for parameter in member.parameters:
                    parameter.annotation = without_checks(parameter.annotation)
                member.returns = without_checks(member.returns)
        init = item.members.get("__init__")
        if (
            isinstance(item, griffe.Class)
            and isinstance(init, griffe.Function)
            and "dataclass" in item.labels
        ):
            for parameter in init.parameters:
                field = item.members.get(parameter.name)
                if isinstance(field, griffe.Attribute) and "kw_only=False" in str(field.value):
                    parameter.kind = griffe.ParameterKind.positional_or_keyword
            init.parameters = griffe.Parameters(
                *sorted(init.parameters, key=lambda each: KINDS.index(each.kind or KINDS[1]))
            )


def without_checks(x: Any) -> Any:
    """An expression of griffe with `T` for each `Annotated[T, …]`."""
    if (
        isinstance(x, griffe.ExprSubscript)
        and str(x.left) == "Annotated"
        and isinstance(x.slice, griffe.ExprTuple)
    ):
        return without_checks(x.slice.elements[0])
    if isinstance(x, list | tuple):
        return type(x)(map(without_checks, x))
    if isinstance(x, griffe.Expr) and not isinstance(x, griffe.ExprName) and is_dataclass(x):
        return replace(
            x,
            **{
                field.name: without_checks(getattr(x, field.name))
                for field in fields(x)
                if field.init
            },
        )
    return x
