"""What a compiled program does one after the other: products, and messages from their start to
their end."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(
    r"%?(?P<name>[\w.-]+) = .*? (?P<kind>send|send-done|all-reduce-start|all-reduce-done|fusion|custom-call|convolution|dot)\((?P<rest>.*)"
)
#: How a product is called: on a GPU, and in a fusion for a TPU.
_PRODUCT = re.compile(
    r'(calls|custom_call_target)=[%"]*(\w*gemm|\w*cublas|\w*matmul)|kind=kOutput.*op_name="[^"]*dot_general'
)
#: The groups of a message between slices, which is no all-reduce.
SLICES = "slices"


@dataclass(frozen=True)
class Message:
    """A message, and how many products of the program come before its start and before its end."""

    groups: str
    start: int
    end: int


@dataclass(frozen=True)
class Schedule:
    """The entry of a scheduled program: its products, and the messages that start and end."""

    products: int
    messages: tuple[Message, ...]

    def beside(self, groups: str) -> int:
        """Products that stand between the start and the end of some message in groups that begin
        so."""
        return len(
            {i for m in self.messages if m.groups.startswith(groups) for i in range(m.start, m.end)}
        )


def schedule(text: str) -> Schedule:
    """Of a compiled program, as `compiled.as_text()` has it."""
    products, started, messages = 0, dict[str, tuple[int, str]](), []
    for line in text[text.index("ENTRY") :].splitlines():
        found = _LINE.search(line)
        if not found:
            continue
        kind = found["kind"]
        if kind in ("fusion", "custom-call", "convolution", "dot"):
            products += kind in ("convolution", "dot") or _PRODUCT.search(line) is not None
        elif kind in ("send", "all-reduce-start"):
            groups = re.search(r"replica_groups=(\S+)", line)
            started[found["name"]] = (
                products,
                SLICES if kind == "send" else groups[1] if groups else "",
            )
        else:
            begun = next(
                name for name in re.findall(r"%([\w.-]+)", found["rest"]) if name in started
            )
            start, of = started[begun]
            messages.append(Message(of, start, products))
    return Schedule(products, tuple(messages))
