"""What a training was seen to be when it was registered, compared with what it is, once a step.

Whoever holds a training believes that these parameters, of these shapes and dtypes, are where they
were, and that this optimizer steps them. Users grow heads, thaw layers, convert models, load
weights, step with another optimizer, and nothing says so. One object knows what was believed, and
is asked at three moments:

- Before a step, `require`: the parameters that the optimizer has, and each parameter's place,
  shape, dtype and device. What differs is refused by name, with nothing changed; what is only gone
  is nobody's loss. A walk through the module finds parameters that no optimizer here knows; it
  takes longer, so it is not for each step.
- After a step, `stepped`: a tensor counts how often it is written to, and the counts are noted.
- After a backward pass, `_passed`: parameters that were written to from pass to pass, with no step
  between, are stepped by another optimizer: a warning, once. Until the next step `others_stepped`
  says that what is known of the weights is not so. Passes within a step are those of its closure,
  between which L-BFGS itself writes.
- Before a step again, `notice_written`, for those that remember weights: parameters that were
  written to since the last step, where that is not the rule: a warning, once. What goes by `p.data`
  no count shows.

And before `load_state_dict` of the module, or of a part of it, a digest of the weights is kept, for
those that remember weights: other ones may be put in their place, or an average of weights for an
evaluation, and these again.

All of it is identities and counts that Python has: no message, no tensor, nothing for a device, a
few tenths of a microsecond for a parameter. Nothing runs in what a user compiles or captures: steps
and backward passes are outside, and what is called from inside of them is `uncompiled`. All ranks
run one program, so what is refused on one is refused on all; where a rank differs by itself, the
others wait at the next message, whose error says where each of them is.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwire.core.text.wording import some
from gradwire.torch_backend.engine.torch_modes import uncompiled
from gradwire.torch_backend.monitor.watcher import UnknownParameters
from gradwire.torch_backend.ops.workspace import dtype_name
from gradwire.torch_backend.setup.optimizer_state import has_two_modes
from gradwire.torch_backend.torch_internals import times_written

#: Backward passes between which others have written to the parameters, until it is said.
PASSES = 10
#: Steps between which nobody else has written to them, until it is said that somebody has: who does
#: so in each step trains with it.
QUIET = 10
#: Parameters that are asked for it.
FEW = 8


def refuse_thawed(frozen: Mapping[str, Tensor], call: str, remedy: str) -> None:
    """Raise RuntimeError if one of the parameters that were frozen in this call has a gradient now:
    before an optimizer takes it, and replicas drift apart."""
    thawed = [name for name, p in frozen.items() if p.grad is not None]
    if thawed:
        raise RuntimeError(
            f"parameters {some(thawed)} have gradients, and nobody averages these parameters: they"
            f" were frozen when {call} was called. {remedy}; or freeze them again, with p.grad ="
            " None"
        )


class Assumptions:
    """Those of one handle.

    Args:
        call: what was called: "local_sgd".
        trained: the parameters that are averaged, by name, as the optimizer knows them.
        frozen: the module's others.
        module: of which they are; None: nobody knows.
        optimizer: that steps them; None: nobody knows.
        remedy: what to do when parameters are others.
        digest: of the weights; None: nobody remembers any.
        moves: parameters may be put in other places and on other devices, and whoever holds them
            follows (FSDP).

    Attributes:
        remembers_weights: somebody does, who has to know of others.
        unloaded: the digest before weights were loaded into the module, for the first time since
            the last step; None: none were.
    """

    def __init__(
        self,
        call: str,
        trained: Mapping[str, Tensor],
        frozen: Mapping[str, Tensor],
        module: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        remedy: str,
        *,
        digest: Callable[[], str] | None = None,
        moves: bool = False,
    ) -> None:
        self._call, self._frozen, self._remedy = call, frozen, remedy
        self._names = list(trained)
        self._optimizer = optimizer
        self._module = None if module is None else weakref.ref(module)
        self._trained = list(trained.values())
        self._known = {id(p) for p in (*trained.values(), *frozen.values())}
        self._stepped_by_it = self._of_optimizer()
        self._places = [] if moves else list(_places(trained, module))
        then = f"{call} was called. {remedy}"
        unknown = None if module is None else UnknownParameters(module, self._trained, then=then)
        self._look = (lambda step: None) if unknown is None else unknown.look
        self._hooks: list[RemovableHandle] = []
        self._digest = digest
        self.remembers_weights = digest is not None
        self.unloaded: str | None = None
        self._versions: list[int] = []
        self._few_versions: list[int] = []
        self._passes = self._foreign = self._quiet = 0
        self._steps_now = False
        self._said = self._said_written = False
        self.stepped()
        self._hook(module)

    def _of_optimizer(self) -> list[int]:
        return (
            []
            if self._optimizer is None
            else [id(p) for g in self._optimizer.param_groups for p in g["params"]]
        )

    def _hook(self, module: nn.Module | None) -> None:
        """Hooks go with the parameters and the module, which are not held by them."""
        self_ref = weakref.ref(self)

        @uncompiled
        def passed(_: Tensor) -> None:
            if (assumptions := self_ref()) is not None:
                assumptions._passed()

        if self._trained:
            self._hooks.append(self._trained[0].register_post_accumulate_grad_hook(passed))  # type: ignore[no-untyped-call]
        for owner in _owners(self._trained, module) if self._digest else ():
            self._hooks.append(owner.register_load_state_dict_pre_hook(_BeforeLoading(self_ref)))  # type: ignore[no-untyped-call]

    def require(self, step: int) -> None:
        """Require, before each step, that all is as it was. `step`: its number. Raises RuntimeError
        for what is not, by name."""
        refuse_thawed(self._frozen, self._call, self._remedy)
        if self._optimizer is not None and (now := self._of_optimizer()) != self._stepped_by_it:
            self._refuse_foreign()
            self._stepped_by_it = now
        for name, attributes, attribute, p, dtype, shape, device in self._places:
            there = attributes.get(attribute)
            if (
                (there is None or there is p)
                and p.dtype is dtype
                and p.shape == shape
                and p.device == device
            ):
                continue
            what = (
                f"{tuple(p.shape)} {dtype_name(p.dtype)} on {p.device}"
                if there is p
                else "another tensor"
            )
            was = (
                f"{tuple(shape)} {dtype_name(dtype)} on {device}"
                if there is p
                else "one that is not there any more"
            )
            raise RuntimeError(
                f"parameter {name!r} is {what} now, and was {was} when {self._call} was called."
                f" {self._remedy}"
            )
        self._look(step)
        self._steps_now = True

    def _refuse_foreign(self) -> None:
        assert self._optimizer is not None
        module = None if self._module is None else self._module()
        names = {} if module is None else {id(p): name for name, p in module.named_parameters()}
        foreign: list[Any] = [
            names.get(id(p), tuple(p.shape))
            for group in self._optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and id(p) not in self._known
        ]
        if foreign:
            raise RuntimeError(
                f"the optimizer has parameters {some(foreign)} that have come since {self._call}"
                f" was called, which knows nothing of them. {self._remedy}"
            )

    def stepped(self) -> None:
        """Note that a step has ended, after it, and after all else that writes to the parameters
        for this handle."""
        self._versions, self._few_versions = (
            times_written(self._trained),
            times_written(self._trained[:FEW]),
        )
        self._passes = self._foreign = 0
        self._steps_now = False

    def notice_written(self) -> None:
        """Notice weights that somebody else has written: before each step, of those that remember
        weights and have neither begun nor loaded any since the last one. Whether it was the same
        weights that were put in again nobody knows, but of an optimizer that does so itself."""
        if not self.remembers_weights or self._said_written:
            return
        now = times_written(self._trained)
        if now == self._versions or self.unloaded is not None or has_two_modes(self._optimizer):
            self._quiet += 1
            return
        if self._quiet >= QUIET:
            self._said_written = True
            written = [
                name
                for name, new, old in zip(self._names, now, self._versions, strict=True)
                if new != old
            ]
            warnings.warn(
                f"parameters {some(written)} were written to between two steps, by copy_() or the"
                f" like: outer parameters know nothing of it, so {self._call} takes it for"
                " training, and outer steps take part of it back. Put other weights in by the"
                " module's load_state_dict(), which is followed; weights that were put back after"
                " an evaluation are no matter",
                stacklevel=2,
            )
        self._quiet = 0

    def _passed(self) -> None:
        if self._steps_now:
            return
        self._passes += 1
        if (now := times_written(self._trained[:FEW])) == self._few_versions:
            return
        self._few_versions = now
        self._foreign += 1
        if self._foreign == PASSES and not self._said:
            self._said = True
            given = (
                "handle.step() was not called"
                if self._optimizer is None
                else (
                    f"the {type(self._optimizer).__name__} that {self._call} was given has not"
                    " stepped"
                )
            )
            warnings.warn(
                f"parameters have been changed between {PASSES} backward passes, and {given}:"
                f" nothing is averaged. Give {self._call} the optimizer whose step() is called (of"
                " a wrapper, such as SAM, the one inside); or None, and call handle.step() after"
                " each step",
                stacklevel=2,
            )

    def _before_loading(self) -> None:
        if self._digest is not None and self.remembers_weights and self.unloaded is None:
            self.unloaded = self._digest()

    @property
    def others_stepped(self) -> bool:
        """Whether parameters have been changed since the last step, where backward passes have come
        since: by an optimizer that nobody here knows."""
        return self._passes > 0 and times_written(self._trained) != self._versions

    def leave(self) -> None:
        """Take away what was hooked."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _places(trained: Mapping[str, Tensor], module: nn.Module | None) -> Iterable[tuple[Any, ...]]:
    """The places of each parameter: name, where it lives, the attribute there, and what it is."""
    for name, p in trained.items():
        owner, _, attribute = name.rpartition(".")
        attributes: Mapping[str, Any] = (
            {} if module is None else module.get_submodule(owner)._parameters
        )
        yield name, attributes, attribute, p, p.dtype, p.shape, p.device


def _owners(trained: Iterable[Tensor], module: nn.Module | None) -> list[nn.Module]:
    """The modules whose own parameters these are: what loads a module, loads them one by one."""
    wanted = {id(p) for p in trained}
    parts = [] if module is None else module.modules()
    return [part for part in parts if any(id(p) in wanted for p in part._parameters.values())]


class _BeforeLoading:
    """Called by a module before a state is loaded into it. A copy of the module takes one along
    that does nothing."""

    def __init__(self, of: Callable[[], Assumptions | None] = lambda: None) -> None:
        self._of = of

    def __call__(self, *_: object) -> None:
        if (assumptions := self._of()) is not None:
            assumptions._before_loading()

    def __reduce__(self) -> tuple[Any, ...]:
        return _BeforeLoading, ()
