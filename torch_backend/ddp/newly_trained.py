"""Parameters that are trained and averaged by nobody: frozen, or not there, when the model was wrapped."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor, nn

from gradwire.core.text.wording import some

#: Steps from one look to the next: it takes a walk through the model.
EVERY = 100


def refuse_thawed(frozen: Mapping[str, Tensor], call: str, remedy: str) -> None:
    """Raise RuntimeError if one of the parameters that were frozen in this call has a gradient now: before an optimizer takes it, and replicas drift apart."""
    thawed = [name for name, p in frozen.items() if p.grad is not None]
    if thawed:
        raise RuntimeError(
            f"parameters {some(thawed)} have gradients, and nobody averages these parameters: they were frozen when {call} was called. {remedy}; or "
            "freeze them again, with p.grad = None"
        )


class Newcomers:
    """Warns once of parameters that have come to require gradients since the module was wrapped, when these were known. The message says by
    what wrapper."""

    def __init__(
        self, module: nn.Module, known: Iterable[Tensor], ignored: Collection[str] = (), *, wrapper: str
    ) -> None:
        self._module = weakref.ref(module)
        self._known = {id(p) for p in known}
        self._ignored = frozenset(ignored)
        self._wrapper = wrapper
        self._said = False

    def look(self, step: int) -> None:
        """To be called at the beginning of each step, with its number."""
        if step % EVERY or self._said or (module := self._module()) is None:
            return
        names = [
            name
            for name, p in module.named_parameters()
            if p.requires_grad and id(p) not in self._known and name not in self._ignored
        ]
        if names:
            self._said = True
            warnings.warn(
                f"nobody averages the gradients of {some(names)}, so replicas drift apart: they were frozen, or "
                f"not there, when {self._wrapper} wrapped the model. Wrap it anew",
                stacklevel=2,
            )
