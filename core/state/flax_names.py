"""The parameters of one model in torch and in Flax: how they are called, how they lie, and which of
them are stacked.

torch                                  Flax
blocks.0.norm.weight   (256,)        blocks/norm/scale    (12, 256): layers are stacked by nn.scan,
blocks.11.norm.weight  (256,)                             or blocks_0/…, blocks/0/…
blocks.0.up.weight     (1024, 256)   blocks/up/kernel     (12, 256, 1024): in before out
blocks.0.query.weight  (256, 256)    blocks/query/kernel  (12, 256, 4, 64): attention has heads
conv.weight            (16, 4, 3, 5)   conv/kernel                     (3, 5, 4, 16)
embed.weight           (96, 256)       embed/embedding                 (96, 256)
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire.core.plan.parameters import specs_of
from gradwire.core.text.wording import some

Shape = tuple[int, ...]
Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
#: What Flax calls a `weight` of torch: of linear maps and convolutions, of embeddings, of norms.
WEIGHTS = ("kernel", "embedding", "scale")
#: Digits that the number of a layer may have: of thousands Python makes no `int`.
MOST_DIGITS = 9
#: The kinds of states whose memory is by parameter.
KINDS = ("compressor", "local_sgd")


@dataclass(frozen=True)
class _Place:
    """The place where Flax has a parameter of torch: its name, and which layer of a stack. Shapes
    are that of torch, and that of one layer in Flax."""

    name: str
    layer: Shape
    here: Shape
    there: Shape

    @property
    def order(self) -> Shape:
        """torch's axes in Flax's order: a weight (out, in, …) is a kernel (…, in, out)."""
        axes = tuple(range(len(self.here)))
        return (
            (*axes[2:], 1, 0)
            if self.name.rpartition("/")[2] == "kernel" and len(axes) > 1
            else axes
        )

    @property
    def fits(self) -> bool:
        """Whether each axis is one in Flax, or several that follow each other."""
        turned = [self.here[axis] for axis in self.order]
        sizes, finer = (
            set(itertools.accumulate((1, *shape), operator.mul)) for shape in (turned, self.there)
        )
        return math.prod(turned) == math.prod(self.there) and sizes <= finer

    def turned(self, x: Array, key: str) -> Array:
        """What is like the parameter, or a factor of its matrix, as it lies in Flax; `key` is the
        memory's name."""
        if x.shape != self.here:
            return _own(x[..., self._columns(x, key)])
        return _own(x.transpose(self.order).reshape(self.there))

    def back(self, x: Array, key: str) -> Array:
        """The inverse of `turned`."""
        if x.shape != self.there:
            return _own(x[..., np.argsort(self._columns(x, key))])
        turned = x.reshape([self.here[axis] for axis in self.order])
        return _own(turned.transpose(np.argsort(self.order).tolist()))

    def _columns(self, factor: Array, key: str) -> Array:
        """The order of a factor's columns in Flax: they are some of torch's axes, the first of them
        (the rows of the matrix, `p`) or the last."""
        length, cuts = factor.shape[-1] if factor.ndim else 0, range(1, len(self.here))
        rows, columns = [range(cut) for cut in cuts], [range(cut, len(self.here)) for cut in cuts]
        sides = columns + rows if key == "q" else rows + columns
        side = next(
            (side for side in sides if math.prod(self.here[axis] for axis in side) == length), None
        )
        if side is None:
            raise ValueError(
                f"memory {factor.shape} of {self.name!r} is not like the parameter, {self.here} in"
                " torch, nor a factor of it"
            )
        numbers = np.arange(length).reshape([self.here[axis] for axis in side])
        return numbers.transpose([axis - side[0] for axis in self.order if axis in side]).reshape(
            -1
        )


class FlaxNames:
    """Moves parameters, what is shaped like them, and gradwire's states between torch and Flax.

        names = FlaxNames(torch_model, parameter_shapes(flax_params))
        params = unflatten_dict(names.to_flax(arrays), sep="/")    # arrays: torch's name → NumPy
        saved = names.state_to_flax(handle.gathered_state_dict(), algorithm)

    Modules have the same names on both sides. `weight` is `kernel`, `embedding` or `scale`,
    whichever Flax has there. The weight (out, in, …) of a linear map or a convolution is the kernel
    (…, in, out); heads of attention may be axes of their own. A number in a name is a layer of a
    stack (`nn.scan`), or it ends the name before it (`blocks_0`), or stands alone (`blocks/0`, as
    nnx has it). Not for transposed convolutions, nor for modules that join weights of several maps
    in one, such as `torch.nn.MultiheadAttention`.

    Examples:
        >>> import numpy as np
        >>> from gradwire import FlaxNames
        >>> shapes = {"layers.0.weight": (2, 3), "layers.1.weight": (2, 3)}
        >>> names = FlaxNames(shapes, {"layers/kernel": (2, 3, 2)})
        >>> arrays = {f"layers.{i}.weight": np.full((2, 3), i) for i in (0, 1)}
        >>> names.to_flax(arrays)["layers/kernel"].shape
        (2, 3, 2)

    Args:
        torch: the torch model, or a mapping from the names of its parameters to shapes or to
            anything with a `.shape`.
        flax: the tree of the same parameters in Flax, as nested mappings or as
            `gradwire.jax_backend.parameter_shapes` gives it.

    Raises:
        ValueError: for a parameter on either side that the other does not have, by name, or has in
            another shape or twice.
    """

    def __init__(self, torch: Any, flax: Any) -> None:
        self._flax = {name: tuple(spec.shape) for name, spec in specs_of(flax).items()}
        self._places = {
            name: self._place(name, tuple(spec.shape)) for name, spec in specs_of(torch).items()
        }
        #: Flax's name → torch's, in the order of the layers.
        self._torch: dict[str, list[str]] = {}
        for name in sorted(self._places, key=lambda name: self._places[name].layer):
            self._torch.setdefault(self._places[name].name, []).append(name)
        for name, shape in self._flax.items():
            members = self._torch.get(name, [])
            layers = [self._places[member].layer for member in members]
            stack = shape[: len(layers[0])] if layers else ()
            if layers != list(itertools.product(*map(range, stack))):
                raise ValueError(
                    f"parameter {name!r} of Flax, {shape}, comes from {some(members)} of torch, and"
                    " not from one for each layer: give both models the same modules, by the same"
                    " names"
                )

    def _place(self, name: str, shape: Shape) -> _Place:
        places = [
            _Place(other, layer, shape, self._flax[other][len(layer) :])
            for other, layer in _candidates(name)
            if other in self._flax and len(layer) <= len(self._flax[other])
        ]
        found = [place for place in places if place.fits]
        if len(found) != 1:
            raise ValueError(
                f"parameter {name!r} of torch, {shape}, is {some(place.name for place in found)} of"
                f" Flax's {some(self._flax, 8)}. Give the modules of both models the same names"
            )
        return found[0]

    def to_flax(self, arrays: Mapping[str, Any]) -> Arrays:
        """Parameters, or what is shaped like them (moments of an optimizer), by Flax's names.

        Args:
            arrays: by torch's names, in torch's shapes: of NumPy, of JAX (traced ones too), or what
                NumPy makes arrays of, as tensors on the CPU. They may be some of the parameters,
                but of a stack all layers.

        Raises:
            ValueError: for names or shapes that are not the model's, and for a part of a stack.
        """
        _require({name: place.here for name, place in self._places.items()}, arrays)
        return self._joined(arrays, "")

    def to_torch(self, arrays: Mapping[str, Any]) -> Arrays:
        """The same back: by torch's names.

        Args:
            arrays: by Flax's names, in Flax's shapes.

        Raises:
            ValueError: for names or shapes that are not the model's.
        """
        _require(self._flax, arrays)
        return self._apart(arrays, "")

    def state_to_flax(self, state: Mapping[str, Any], algorithm: Any) -> dict[str, Any]:
        """A portable state of torch's (`gathered_state_dict`) as one for
        `gradwire.jax_backend.from_portable`, of NumPy arrays.

        Errors, outer parameters and velocities move as their parameters do. Factors stay as they
        are, but for the order of the columns in a convolution's, and are stacked where layers are.
        They fit if Flax compresses the matrices that torch has, and torch transposes none:
        `PowerSGD(rank, transpose=("*/kernel",), stacked={…})`.

        Args:
            state: of a compressor, or of local SGD.
            algorithm: with the options that it has in Flax.

        Raises:
            ValueError: for another kind of state, for a parameter that is not the model's, and for
                memory that is neither like its parameter nor a factor of it, or that only some
                layers of a stack have.
        """
        return self._moved(state, algorithm, self._places, self._joined)

    def state_to_torch(self, state: Mapping[str, Any], algorithm: Any) -> dict[str, Any]:
        """The same back, from `gradwire.jax_backend.to_portable`; `algorithm` has the options that
        it has in torch."""
        return self._moved(state, algorithm, self._flax, self._apart)

    def _moved(
        self,
        state: Mapping[str, Any],
        algorithm: Any,
        known: Mapping[str, Any],
        move: Callable[[Arrays, str], Arrays],
    ) -> dict[str, Any]:
        if state.get("kind") not in KINDS:
            raise ValueError(
                f"kind={state.get('kind')!r} of the state is none of {', '.join(map(repr, KINDS))}"
            )
        after = {**state, "algorithm": repr(algorithm)}
        after["shared"] = {key: np.asarray(x) for key, x in state["shared"].items()}
        for section in ("tensors", "local") if "local" in state else ("tensors",):
            memory: Mapping[str, Mapping[str, Any]] = state[section]
            moved: dict[str, Arrays] = {}
            _require(known, memory)
            for key in dict.fromkeys(key for own in memory.values() for key in own):
                arrays = {name: np.asarray(own[key]) for name, own in memory.items() if key in own}
                rows = (
                    zip(*arrays.values(), strict=True) if section == "local" else [arrays.values()]
                )
                each = [move(dict(zip(arrays, row, strict=True)), key) for row in rows]
                for name in each[0]:
                    x = (
                        np.stack([row[name] for row in each])
                        if section == "local"
                        else each[0][name]
                    )
                    moved.setdefault(name, {})[key] = x
            after[section] = moved
        return after

    def _joined(self, arrays: Mapping[str, Any], key: str) -> Arrays:
        found = {}
        for name in dict.fromkeys(self._places[name].name for name in arrays):
            places = {member: self._places[member] for member in self._torch[name]}
            if missing := places.keys() - arrays.keys():
                raise ValueError(
                    f"{some(sorted(missing))} of torch is missing: {name!r} stacks all layers"
                )
            turned = [place.turned(_array(arrays[member]), key) for member, place in places.items()]
            place = places[self._torch[name][0]]
            stack = turned[0].__array_namespace__().stack(turned) if place.layer else turned[0]
            found[name] = (
                stack.reshape(self._flax[name]) if turned[0].shape == place.there else stack
            )
        return found

    def _apart(self, arrays: Mapping[str, Any], key: str) -> Arrays:
        found: Arrays = {}
        for name, given in arrays.items():
            x, places = (
                _array(given),
                {member: self._places[member] for member in self._torch[name]},
            )
            place = places[self._torch[name][0]]
            if not place.layer:
                x = x[None]
            elif x.shape == self._flax[name]:
                x = x.reshape(len(places), *place.there)
            found |= {
                member: place.back(own, key)
                for own, (member, place) in zip(x, places.items(), strict=True)
            }
        return found


def _array(x: Any) -> Any:
    """The array as it is, if it is of NumPy or JAX; else as an array of NumPy."""
    return x if hasattr(x, "__array_namespace__") else np.asarray(x)


def _own(x: Array) -> Array:
    """A copy as the array lies in memory, where it has a memory: not all that saves one looks at
    its strides."""
    return np.ascontiguousarray(x).reshape(x.shape) if isinstance(x, np.ndarray) else x


def _require(known: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Raise ValueError for names that are not known, and for arrays of other shapes than these."""
    for name, x in arrays.items():
        if name not in known:
            raise ValueError(f"{name!r} is no parameter of the model: {some(known, 8)}")
        if (
            isinstance(known[name], tuple)
            and not isinstance(x, Mapping)
            and np.shape(x) != known[name]
        ):
            raise ValueError(
                f"{name!r} has shape {np.shape(x)}, and the parameter has {known[name]}"
            )


def _candidates(name: str) -> Iterator[tuple[str, Shape]]:
    """Names that a parameter of torch may have in Flax, each with the layer that it is then."""
    *modules, last = name.split(".")
    paths: list[tuple[tuple[str, ...], Shape]] = [((), ())]
    for part in modules:
        longer = [((*path, part), layer) for path, layer in paths]
        if part.isdecimal() and len(part) <= MOST_DIGITS:
            longer += [(path, (*layer, int(part))) for path, layer in paths]
            longer += [((*path[:-1], f"{path[-1]}_{part}"), layer) for path, layer in paths if path]
        paths = longer
    leaves = WEIGHTS if last == "weight" else (last,)
    return (("/".join((*path, leaf)), layer) for path, layer in paths for leaf in leaves)
