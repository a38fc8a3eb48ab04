"""What compression misses in a model, said once, when an algorithm meets its parameters.

Nothing here changes what is done. To be rid of a warning, follow it, or filter
`gradwire.CompressionWarning`.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from gradwire.core.algorithm import nested
from gradwire.core.algorithms.shared.views import View, all_views, view_of
from gradwire.core.algorithms.two_level import TwoLevel, levels_of
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.codecs import CODECS, BlockCodec
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.ops import ITEMSIZE, Spec
from gradwire.core.plan.dry_run import dry_run, size_of
from gradwire.core.plan.links import Links
from gradwire.core.text.name_patterns import Patterns
from gradwire.core.text.wording import some

#: Below so many bytes a tensor, a stack or a model is too small to speak of.
LARGE = 1 << 20
#: Parts of names below which parameters of three and more axes are stacked: torch's and Flax's
#: experts, what `nn.scan` and `nn.vmap` make.
STACKS = re.compile(r"experts?|moe|(Scan|Vmap)[A-Z]\w*")


#: Outer steps of a run, below which somebody is told.
ROUNDS = 50


class CompressionWarning(UserWarning):
    """A model is compressed less well than it could be."""


def warn(algorithm: Any, specs: Mapping[str, Spec], hint: str = "") -> None:
    """Say what `advice` finds, in one warning that points at the first line outside gradwire, with
    a hint after it. `algorithm` may be wrapped (`WireDtype`), or local SGD."""
    found = advice(algorithm, specs)
    if found:
        warnings.warn(
            "\n".join([*found, *filter(None, [hint])]), CompressionWarning, stacklevel=outside()
        )


def warn_of_few_rounds(local: LocalSGD, steps: int | None) -> None:
    """Warn where a run of so many steps has few outer steps. None: nobody knows its length."""
    rounds = 0 if steps is None else (steps - local.start_step) // local.longest
    if steps is not None and local.has_outer and rounds < ROUNDS:
        warnings.warn(
            f"steps={steps} are {max(rounds, 0)} outer steps of {local!r}: with fewer than {ROUNDS}"
            " the outer optimizer has hardly begun to act. A period of"
            f" {max((steps - local.start_step) // ROUNDS, 1)} has {ROUNDS}",
            CompressionWarning,
            stacklevel=outside(),
        )


def advice(algorithm: Any, specs: Mapping[str, Spec]) -> list[str]:
    """Sentences about what stays uncompressed, is compressed as something that it does not look
    like, or is not quantized; [] if all is well.

    Of views nothing is said of algorithms that have no views, of parameters to which the user gave
    no rank, or of small models, unless they have matrices and none of them is compressed.
    """
    return [*_of_codes(algorithm, specs), *_of_shapes(algorithm, specs)]


def advice_on_nodes(algorithm: Any, specs: Mapping[str, Spec], links: Links) -> str:
    """A sentence where two levels would send less between these nodes; "" where they would not,
    where each replica is a node, and of an algorithm that has two."""
    if links.near is None or levels_of(algorithm) is not None:
        return ""
    two = TwoLevel(algorithm, len(links.near[0]))
    now, then = (
        statistics.fmean(map(links.nbytes, dry_run(each, specs, links.replicas).traffic))
        for each in (algorithm, two)
    )
    if then >= now:
        return ""
    return (
        f"A node of {two.within} replicas sends {size_of(now)} to others in a step; with"
        f" TwoLevel({algorithm!r}) it would send {size_of(then)}, and average whole gradients"
        " inside"
    )


def _of_codes(algorithm: Any, specs: Mapping[str, Spec]) -> Iterator[str]:
    """About a `WireDtype` round what is gathered, which it does not quantize."""
    algorithm = next((each for each in nested(algorithm) if isinstance(each, WireDtype)), None)
    if algorithm is None or not isinstance(CODECS[algorithm.dtype], BlockCodec):
        return

    def sent(algorithm: Any) -> int:
        return sum(step.nbytes for step in dry_run(algorithm, specs, 2).traffic)

    try:
        coded = sent(algorithm) < sent(algorithm.algorithm)
    except ValueError:
        # it is made for another number of replicas, or refused by whoever asks for advice
        return
    if not coded and specs:
        yield (
            f"{algorithm!r} sends as many bytes as {algorithm.algorithm!r}: what is gathered is not"
            " quantized, nor what is no wider than the codes. Leave WireDtype out; TopK quantizes"
            " its values by itself, with bits=8."
        )


def _of_shapes(algorithm: Any, specs: Mapping[str, Spec]) -> list[str]:
    known = {name: getattr(spec.shape, "stacked", 0) for name, spec in specs.items()}
    for inner in nested(algorithm):
        if hasattr(inner, "wanted_rank"):
            break
        if hasattr(
            inner, "compressor"
        ):  # local SGD is given parameters, of which the framework says nothing in later steps
            specs = {name: replace(spec, shape=tuple(spec.shape)) for name, spec in specs.items()}
    else:
        return []
    asked = {
        name: spec
        for name, spec in specs.items()
        if spec.dtype in ITEMSIZE and spec.size and inner.wanted_rank(name)
    }
    dense = {name: spec for name, spec in asked.items() if not inner.rank_of(name, spec.shape)}
    stacks = {} if inner.square else _unnoticed_stacks(inner, asked, known)
    better = (
        {}
        if inner.square
        else {name: _better(inner, name, asked[name]) for name in dense if name not in stacks}
    )
    return [
        *_of_stacks(inner, asked, stacks),
        *_of_views(asked, better),
        *_of_most(inner, asked, dense),
    ]


def looks_stacked(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Parameters whose first axis looks like a stack of layers or experts → a pattern of names for
    `PowerSGD(stacked=…)`.

    Their name says so (`STACKS`, unless a number follows: `experts.0` is one of a list). Or
    everything below one module has the same first axis and at least two, as in what `nn.scan`
    stacks, where biases and scales have become (layers, features).
    """
    found: dict[str, str] = {}
    modules: dict[tuple[str, ...], list[str]] = {}
    for name, shape in shapes.items():
        parts, separator = re.split(r"[./]", name), "/" if "/" in name else "."
        for i, part in enumerate(parts):
            modules.setdefault(tuple(parts[:i]), []).append(name)
            named = STACKS.fullmatch(part) and i + 1 < len(parts) and not parts[i + 1].isdigit()
            if named and len(shape) > 2 and shape[0] > 1 and name not in found:
                found[name] = f"{'*' + separator if i else ''}{part}{separator}*"
    for members in sorted(modules.values(), key=len, reverse=True):  # the outermost module first
        of = [shapes[name] for name in members]
        if any(len(shape) == 2 for shape in of) and all(
            len(shape) > 1 and shape[0] == of[0][0] > 1 for shape in of
        ):
            # A model that is a stack and nothing else still has the stack's name.
            levels = zip(*(re.split(r"[./]", name)[:-1] for name in members), strict=False)
            common = [
                level[0]
                for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels)
            ]
            for name in members:
                if len(shapes[name]) > 2:
                    found.setdefault(name, ("/" if "/" in name else ".").join([*common, "*"]))
    return found


def _unnoticed_stacks(
    algorithm: Any, specs: Mapping[str, Spec], known: Mapping[str, int]
) -> dict[str, str]:
    """Those that nobody has called a stack, or said to be something else. `known`: to the
    framework, if not to the algorithm."""
    found = {name: name for name in specs if known[name]}
    found |= looks_stacked({name: tuple(spec.shape) for name, spec in specs.items()})
    nbytes: Counter[str] = Counter()
    for name in list(found):
        view = algorithm.view_of(name, specs[name].shape)
        decided = any(
            Patterns(option).of(name) is not None for option in (algorithm.stacked, algorithm.rows)
        )
        if view is None or view.stack or decided:
            del found[name]
        else:
            nbytes[found[name]] += specs[name].nbytes
    return {name: found[name] for name in specs if name in found and nbytes[found[name]] > LARGE}


def _better(algorithm: Any, name: str, spec: Spec) -> tuple[str, View] | None:
    """The options, and the view, under which a large uncompressed tensor would be compressed most;
    None if there is none."""
    if spec.nbytes <= LARGE:
        return None
    wanted, found = algorithm.wanted_rank(name), []
    for stacked, rows, view in all_views(tuple(spec.shape)):
        sent = math.prod(view.stack) * (view.n + view.m) * min(view.n, view.m, wanted)
        if sent * algorithm.min_compression_rate < spec.size:
            found.append((stacked, sent, rows, view))
    if not found:
        return None
    stacked, _, rows, view = min(found, key=lambda f: f[:2])
    options = (
        [f"stacked={{{name!r}: {stacked}}}"]
        if stacked or Patterns(algorithm.stacked).of(name)
        else []
    )
    if view != view_of(name, tuple(spec.shape), stacked) or Patterns(algorithm.rows).of(name):
        options.append(f"rows={{{name!r}: {rows}}}")
    return ", ".join(options), view


def _of_stacks(
    algorithm: Any, specs: Mapping[str, Spec], stacks: Mapping[str, str]
) -> Iterator[str]:
    if stacks:
        patterns = dict.fromkeys(stacks.values(), 1)
        first = next(iter(stacks))
        view = algorithm.view_of(first, specs[first].shape)
        yield (
            f"The first axis of {_some(stacks, specs)} looks like a stack of layers or experts, and"
            f" {algorithm!r} sees one matrix, {first!r} as {view}. Say stacked={patterns!r}, and"
            " each layer is compressed by itself. If these are no stacks, say so:"
            f" stacked={dict.fromkeys(patterns, 0)!r}."
        )


def _of_views(specs: Mapping[str, Spec], better: Mapping[str, Any]) -> Iterator[str]:
    large = {name: found for name, found in better.items() if found is not None}
    if large:
        name, (options, view) = next(iter(large.items()))
        yield (
            f"{_some(large, specs)} travels uncompressed, more than 1 MiB, and another view would"
            f" shrink it: with {options} {name!r} is {view}."
        )


def _of_most(algorithm: Any, specs: Mapping[str, Spec], dense: Mapping[str, Spec]) -> Iterator[str]:
    total, rest = (sum(spec.nbytes for spec in some.values()) for some in (specs, dense))
    sent = rest + sum(
        _factor_bytes(algorithm, name, spec) for name, spec in specs.items() if name not in dense
    )
    largest = sorted(dense, key=lambda name: -dense[name].nbytes)
    vector = bool(largest) and algorithm.view_of(largest[0], dense[largest[0]].shape) is None
    why = (
        "A vector is no matrix: do not flatten parameters (optax.flatten), or give square=True."
        if vector
        else (
            "A matrix is compressed where its two factors are smaller than it by more than"
            " min_compression_rate: a lower rank compresses more of them."
        )
    )
    shows = "gradwire.plan shows every tensor."
    matrices = any(algorithm.view_of(name, spec.shape) is not None for name, spec in specs.items())
    if len(dense) == len(specs) and (matrices or total > LARGE):
        yield (
            f"{algorithm!r} compresses nothing: not one of {len(specs)} tensors,"
            f" {_some(largest, specs)}. {why} {shows}"
        )
    elif total > LARGE and 2 * rest > total:
        yield (
            f"{algorithm!r} leaves {rest / 2**20:.1f} of {total / 2**20:.1f} MiB uncompressed, most"
            f" of it {_some(largest, specs)}. {why} {shows}"
        )
    elif total > LARGE and 2 * sent > total:
        yield (
            f"{algorithm!r} sends {sent / 2**20:.1f} of {total / 2**20:.1f} MiB, {total / sent:.1f}"
            " times fewer. Below 2 times the price of compression is seldom earned back; a lower"
            f" rank sends less. {shows}"
        )


def _factor_bytes(algorithm: Any, name: str, spec: Spec) -> int:
    """What a step sends of a compressed tensor, on average."""
    view = algorithm.view_of(name, spec.shape)
    numbers = math.prod(view.stack) * (view.n + view.m) * algorithm.rank_of(name, spec.shape)
    return int(numbers * ITEMSIZE[algorithm.state_dtype or spec.dtype] // algorithm.phases)


def _some(names: Iterable[str], specs: Mapping[str, Spec]) -> str:
    return some(names, 3, lambda name: f"{name!r} {tuple(specs[name].shape)}")


def outside() -> int:
    """The `stacklevel`, for who calls this, of the first frame that is not ours."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(
        "gradwire."
    ):
        level, frame = level + 1, frame.f_back
    return level
