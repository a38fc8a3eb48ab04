"""For the reference: parameters of data classes as Python takes them. griffe overlooks `field(kw_only=False)`, by which `PowerSGD(4)` needs no keyword, and
lists what a class inherits first."""

from __future__ import annotations

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
        init = item.members.get("__init__")
        if isinstance(item, griffe.Class) and isinstance(init, griffe.Function) and "dataclass" in item.labels:
            for parameter in init.parameters:
                field = item.members.get(parameter.name)
                if isinstance(field, griffe.Attribute) and "kw_only=False" in str(field.value):
                    parameter.kind = griffe.ParameterKind.positional_or_keyword
            init.parameters = griffe.Parameters(
                *sorted(init.parameters, key=lambda each: KINDS.index(each.kind or KINDS[1]))
            )
