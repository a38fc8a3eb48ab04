"""gradwire as a communication hook of `DistributedDataParallel`.

ddp = DistributedDataParallel(model)
handle = gradwire.torch_backend.register_comm_hook(ddp, WireDtype(PowerSGD(16), "int8"))
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradwire.core.advise.choosing.methods import Auto
from gradwire.core.algorithm import Algorithm
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.state.checkpoint import StateMismatch
from gradwire.core.text.options import OWN_CHECK, AtLeast0, checked
from gradwire.torch_backend.ddp.auto import Choice, Choosing, choice_for
from gradwire.torch_backend.ddp.bucket_hook import BucketHook, LeftBehind, Slot
from gradwire.torch_backend.engine.cuda_graphs import has_graphs
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.engine.groups.nodes import on_nodes
from gradwire.torch_backend.engine.torch_modes import outside_inference_mode
from gradwire.torch_backend.monitor.stats import Stats
from gradwire.torch_backend.monitor.watcher import UnknownParameters
from gradwire.torch_backend.setup.consistency import (
    meet_to_change,
    obstacle,
    require_same_on_all_ranks,
)
from gradwire.torch_backend.setup.handle import Handle
from gradwire.torch_backend.setup.registration import announce, prepared, require_gradient_algorithm
from gradwire.torch_backend.setup.sharded_models import INSTEAD, is_fsdp
from gradwire.torch_backend.state.rank_memory import ShardedState
from gradwire.torch_backend.torch_internals import (
    before_compile,
    count_of_reducer,
    hands_single_gradients,
    note_hooks,
    noted_hooks,
)


@outside_inference_mode
@checked
def register_comm_hook(
    ddp: Annotated[DistributedDataParallel, OWN_CHECK],
    algorithm: Algorithm | Auto,
    *,
    message_bytes: AtLeast0 | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> "CommHook":
    """Let `algorithm` average the gradients of a DDP module. The training loop stays as it is.

    To be called on all ranks, once, before the first backward pass; works with any bucket size,
    `find_unused_parameters`, `static_graph`, `gradient_as_bucket_view` and `no_sync`. It
    communicates once, to check that all ranks ask for the same.

    Examples:
        >>> import gradwire, torch
        >>> from gradwire.torch_backend import register_comm_hook
        >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512))
        >>> method = gradwire.WireDtype(gradwire.PowerSGD(16), "int8")
        >>> handle = register_comm_hook(ddp, method)
        >>> ddp(torch.ones(2, 512)).sum().backward()
        >>> handle.stats().bytes_sent, handle.stats().dense_bytes
        (17424, 1050624)

    Args:
        ddp: the wrapped model, or what `torch.compile` has made of it. Gradients of float dtypes,
            dense, on one device.
        algorithm: what to run, the same on every rank: `WireDtype(AllReduce(), "int8")`,
            `PowerSGD(rank=16)`, your own; or `gradwire.Auto()`, which finds the fastest while the
            training runs.
        message_bytes: buckets are collected until their payload has so many bytes, and then share
            one message. None: 1 MiB; 4 MiB for compressed gradients on an accelerator, where
            messages are quick and kernels count. With two levels, what travels inside a node counts
            a 32nd.
        grad_scaler: the scaler of the loss. The compression error is in units of scaled gradients
            and has to follow when the scale changes; without this it counts for too much, or too
            little, in the steps after.

    Returns:
        A handle with the hook's statistics and state.

    Warns:
        CompressionWarning: much stays uncompressed, or a tensor looks like a stack; see
            `gradwire.core.plan.advice`. And once in training, a UserWarning, if parameters are
            thawed or added of which DDP knows nothing.

    Logs, on the first rank, one line to the logger `gradwire`: what is compressed, bytes, messages
    and memory.

    Raises:
        TypeError: `ddp` is not a DistributedDataParallel, or `algorithm` is no algorithm.
        ValueError: a parameter or option cannot be served (named), `ddp` has a hook already, or
            ranks ask for different things. The module is unchanged then.
    """
    ddp = before_compile(ddp)
    if is_fsdp(ddp):
        raise TypeError(
            f"ddp is a {type(ddp).__name__}, sharded by FSDP, which averages by itself. {INSTEAD}"
        )
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"ddp is a {type(ddp).__name__}; wrap the model first: DistributedDataParallel(model)"
        )
    auto = algorithm if isinstance(algorithm, Auto) else None
    if isinstance(algorithm, Auto):
        algorithm = AllReduce()
    require_gradient_algorithm(algorithm)
    algorithm = on_nodes(algorithm, ddp.process_group, next(ddp.parameters()).device)
    parameters = _trained_parameters(ddp)
    settings = {
        "auto": str(auto),
        "message_bytes": str(message_bytes),
        "grad_scaler": str(grad_scaler is not None),
    }
    frozen = [name for name, p in ddp.module.named_parameters() if not p.requires_grad]
    obstacle = _obstacle(ddp, algorithm, parameters)
    groups, trial = prepared(
        algorithm, parameters, ddp.process_group, settings, obstacle, frozen=frozen
    )
    device = next(iter(parameters.values())).device
    choice = None if auto is None else choice_for(auto, parameters, groups, device)
    driver = Driver(
        algorithm, specs_of(parameters), device, groups, message_bytes, grad_scaler=grad_scaler
    )
    announce(driver, trial)
    handle = hooked(ddp, driver, parameters)
    ignored: set[str] = getattr(ddp, "parameters_to_ignore", set())
    then = "DistributedDataParallel wrapped the model. Wrap it anew"
    unknown = UnknownParameters(ddp.module, parameters.values(), ignored, then=then)
    handle._notice(*_note_used(ddp, parameters), unknown.look)
    if choice is not None:
        handle._choose(choice)
    return handle


def hooked(
    ddp: DistributedDataParallel, driver: Driver, parameters: Mapping[str, Tensor]
) -> "CommHook":
    """Let a driver average what DDP has in its buckets. There must be no `hook_obstacle`."""
    slot = _slot_of(ddp)
    handle = CommHook(driver, parameters, None, slot=slot)
    if slot is None:
        note_hooks(ddp, _hooks_of(ddp))
        try:
            ddp.register_comm_hook(None, handle.hook)
        except RuntimeError:
            # of the reducer, which has a built-in hook; DDP has noted ours before it asked
            note_hooks(ddp, [noted for noted in noted_hooks(ddp) if noted[0] != handle.hook])
            raise
    return handle


def hook_obstacle(ddp: DistributedDataParallel) -> str:
    """Why DDP takes no hook of ours; "" if it does."""
    slot = _slot_of(ddp)
    if getattr(ddp, "mixed_precision", None) is not None:
        return (
            "ddp was made with mixed_precision=…, which takes DDP's only communication hook for"
            " itself; leave mixed_precision out, and run the forward pass under torch.autocast"
        )
    if slot is None and _hooks_of(ddp):
        return (
            "ddp has a communication hook already, and DDP takes only one; wrap the model anew to"
            " change it"
        )
    if slot is not None and not slot.free:
        return (
            "ddp has a communication hook already, of gradwire's. unregister() of the handle that"
            " register_comm_hook or local_sgd returned makes place for another, and"
            " reconfigure(...) changes it"
        )
    return ""


class CommHook(Handle):
    """What `register_comm_hook` returns. Of a DDP that has our hook already it takes the slot.

    Examples:
        >>> import gradwire, torch
        >>> from gradwire.torch_backend import register_comm_hook
        >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
        >>> handle = register_comm_hook(ddp, gradwire.PowerSGD(rank=8))
        >>> ddp(torch.ones(2, 256)).sum().backward()
        >>> len(handle.reconfigure(gradwire.PowerSGD(rank=16)).reshaped)  # the factor
        1
        >>> state = handle.state_dict()
        >>> state["step"], sorted(state["tensors"]["weight"]), sorted(state["local"]["weight"])
        (1, ['q'], ['error'])
    """

    instead = "register_comm_hook(ddp, algorithm)"

    def __init__(
        self,
        driver: Driver,
        parameters: Mapping[str, Tensor],
        used: set[str] | None,
        *,
        slot: Slot | None = None,
    ) -> None:
        super().__init__(driver)
        self._on_bucket = BucketHook(driver, {p: name for name, p in parameters.items()}, used)
        self._note_hooks: list[RemovableHandle] = []
        if slot is None:
            slot = Slot(self._on_bucket)
        else:
            slot.take(self._on_bucket)
        self._slot = slot
        self._look: Callable[[int], None] | None = None
        self._choosing: Choosing | None = None

    @property
    def hook(self) -> Callable[[object, GradBucket], torch.futures.Future[Tensor]]:
        """The function that DDP calls, for tools that register hooks themselves. Its first argument
        is not used."""
        return self._slot.hook

    def unregister(self) -> None:
        """Give the gradients back: from the next step on DDP averages them as they are, as if no
        hook had been registered. To be called on all ranks, between steps. `register_comm_hook` may
        then be called on the same DDP again.

        Statistics and memory stay readable, and are gone with the handle.

        Raises:
            ValueError: it has been unregistered before; or ranks call different things.
        """
        driver = self._driver
        settings = {"call": "unregister", "step": str(driver.memory.steps)}
        meet_to_change(driver.memory.placement.meetings)
        require_same_on_all_ranks(
            driver.process_group, settings, {}, self._why_not(), driver.ops.device
        )
        self.leave()

    @outside_inference_mode
    def leave(self) -> None:
        """What `unregister` does, when all ranks have agreed on it."""
        driver = self._driver
        plain = Driver(AllReduce(), driver.specs, driver.ops.device, driver.process_group, 0)
        self._slot.take(BucketHook(plain, self._on_bucket.names))
        self._slot.free = True
        self._registered = False
        _remove(self._note_hooks)

    def _use(self, driver: Driver) -> None:
        super()._use(driver)
        self._on_bucket.driver.abandon()
        self._on_bucket.driver = driver

    def _choose(self, choice: Choice) -> None:
        """Let each step be averaged by the method that is chosen for it."""
        self.replay = False
        chosen = self._choosing = Choosing(choice, lambda: self._driver, self._use)
        look = self._look

        def before_step(step: int) -> None:
            if look is not None:
                look(step)
            chosen.before_step(step)

        self._on_bucket.at_start, self._on_bucket.at_end = before_step, chosen.after_step

    def reconfigure(self, algorithm: Algorithm) -> StateMismatch:
        difference = super().reconfigure(algorithm)
        if self._choosing is not None:  # the user has chosen, and steps may be replayed again
            self.replay = has_graphs(self._driver.ops.device)
        self._choosing = self._on_bucket.at_end = None
        self._on_bucket.at_start = self._look
        return difference

    reconfigure.__doc__ = Handle.reconfigure.__doc__

    def stats(self) -> Stats:
        found = super().stats()
        return (
            found
            if self._choosing is None
            else replace(found, choices=tuple(self._choosing.changes))
        )

    stats.__doc__ = Handle.stats.__doc__

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> StateMismatch:
        if self._choosing is None or not self._registered:
            return super().load_state_dict(state, strict)
        return self._choosing.loaded(state, strict)

    load_state_dict.__doc__ = Handle.load_state_dict.__doc__

    @property
    def sharded_state(self) -> ShardedState:
        if self._choosing is None:
            return super().sharded_state
        return ShardedState(self, lambda: self._driver.memory, changes=True)

    sharded_state.__doc__ = Handle.sharded_state.__doc__

    def _notice(
        self, used: set[str] | None, hooks: list[RemovableHandle], look: Callable[[int], None]
    ) -> None:
        """Keep count of used parameters, by these hooks, and look for new ones."""
        self._on_bucket.used, self._note_hooks = used, hooks
        # parameters may outlive DDP
        weakref.finalize(self._on_bucket, _remove, hooks)
        self._look = self._on_bucket.at_start = look


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _trained_parameters(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    ignored: set[str] = getattr(ddp, "parameters_to_ignore", set())
    return {n: p for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored}


def _slot_of(ddp: DistributedDataParallel) -> Slot | None:
    """Ours; None if DDP has no hook, or somebody else's."""
    hooks = _hooks_of(ddp)
    slot = getattr(hooks[0][0], "__self__", None) if hooks else None
    return slot if isinstance(slot, Slot) else None


def _hooks_of(ddp: DistributedDataParallel) -> list[Any]:
    """What DDP has noted, but for hooks that were left behind in pickling."""
    return [
        each
        for each in noted_hooks(ddp)
        if not isinstance(getattr(each[0], "__self__", None), LeftBehind)
    ]


def _note_used(
    ddp: DistributedDataParallel, parameters: Mapping[str, Tensor]
) -> tuple[set[str] | None, list[RemovableHandle]]:
    """A set that every parameter enters when its gradient is accumulated, and what does it. The
    reducer keeps the same account, but cannot be asked for it while it runs a hook."""
    if not ddp.find_unused_parameters or ddp.static_graph:
        return None, []
    used: set[str] = set()
    hooks: list[RemovableHandle] = []
    for name, parameter in parameters.items():

        def note(p: Tensor, name: str = name) -> None:
            if p.grad is not None:  # autograd also ends with none, which DDP leaves alone
                used.add(name)

        hooks.append(parameter.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]
    return used, hooks


def _obstacle(
    ddp: DistributedDataParallel, algorithm: Algorithm, parameters: Mapping[str, Tensor]
) -> str:
    """Why this rank cannot take part; "" if it can."""
    if why_not := hook_obstacle(ddp):
        return why_not
    if hands_single_gradients(ddp):
        return (
            'torch._dynamo.config.optimize_ddp="python_reducer" hands hooks single gradients'
            ' instead of buckets; set it to "ddp_optimizer", the default, before the model is'
            " wrapped"
        )
    known = count_of_reducer(ddp)
    if known is not None and known != len(parameters):
        return (
            f"{len(parameters)} parameters have requires_grad=True, and {known} had when"
            " DistributedDataParallel wrapped the model: it averages those. Freeze or thaw them"
            " before, and wrap the model anew"
        )
    return obstacle(ddp.module, algorithm, parameters)
