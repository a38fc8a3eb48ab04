"""How the arrays of stacked parameters are called in a state: `"0.mu.{layer_0.kernel|layer_1.kernel}"`, of replica 0 and of replica 1.

In the inner state, whose tree is that of the parameters, a stack lies where the first of its parameters lies: `"0.mu.layer_0.kernel"`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

OPEN, BETWEEN, CLOSE = "{|}"


def dotted(name: str) -> str:
    """A parameter's name as in the path of a state."""
    return name.replace("/", ".")


def parameter_in(path: str, names: Collection[str]) -> tuple[str, str, str] | None:
    """A path taken apart in what is before a parameter's name, the name, and what is after it: the last of these names, and the longest that ends
    there. None if it has none of them."""
    parts = path.split(".")
    for stop in range(len(parts), 0, -1):
        for start in range(stop):
            if (name := ".".join(parts[start:stop])) in names:
                return "".join(p + "." for p in parts[:start]), name, "".join("." + p for p in parts[stop:])
    return None


def stacked_keys(paths: Sequence[str], stacks: Mapping[str, Sequence[str]], names: Collection[str]) -> list[str | None]:
    """The key of each of these paths of an inner state; None for what belongs to no stack.

    Args:
        paths: in the inner state.
        stacks: see `StackShards`.
        names: of all parameters.

    Raises:
        ValueError: a name with one of the signs that stand between names.
    """
    if bad := [name for name in names if set(name) & {OPEN, BETWEEN, CLOSE}]:
        raise ValueError(
            f"parameter {bad[0]!r} has one of the signs {OPEN + BETWEEN + CLOSE} in its name, which stand between stacked names"
        )
    members = {dotted(stack): tuple(map(dotted, own)) for stack, own in stacks.items()}
    known = set(map(dotted, names))
    keys: list[str | None] = []
    for path in paths:
        before, name, after = parameter_in(path, known) or ("", "", "")
        own = members.get(name)
        keys.append(f"{before}{OPEN}{BETWEEN.join(own)}{CLOSE}{after}" if own else None)
    return keys


def paths_in(key: str) -> tuple[str, ...] | None:
    """The paths that the parameters of a stack have in a plain state; None for the key of anything else."""
    before, opened, rest = key.partition(OPEN)
    names, closed, after = rest.partition(CLOSE)
    return tuple(f"{before}{name}{after}" for name in names.split(BETWEEN)) if opened and closed else None


def path_at(key: str) -> str:
    """Where an array with this key lies in the inner state."""
    return (paths_in(key) or (key,))[0]
