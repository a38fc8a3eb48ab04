"""What gradwire takes of torch that is private, or younger than the oldest torch it runs on: which
versions have it, and what is done in the others.

No other file names anything private of torch. What is always needed is looked up when this file is
imported, and what a feature needs when it is asked for; so no backward pass is the first to find
that a name is gone.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.utils import _pytree

#: The oldest torch and the newest that the tests have passed with.
TESTED = "2.6", "2.15"


class NeedsTorch(ValueError):
    """This torch is too old for what was asked. The message names the version that is not."""


@dataclass(frozen=True)
class Feature:
    """What not every torch can do.

    Attributes:
        name: what a user asks for.
        uses: of torch, so that `since` is the first version.
        since: "2.7".
    """

    name: str
    uses: str
    since: str

    @property
    def there(self) -> bool:
        """Whether this torch can."""
        return torch_is(self.since)

    @property
    def obstacle(self) -> str:
        """Why this torch cannot; "" if it can."""
        if self.there:
            return ""
        return (
            f"{self.name} needs {self.uses}, which torch has since {self.since}; this is torch"
            f" {torch.__version__}"
        )

    def require(self) -> None:
        """Raise NeedsTorch if this torch cannot."""
        if self.obstacle:
            raise NeedsTorch(self.obstacle)


def torch_is(since: str) -> bool:
    """Whether this torch is that version or a later one."""
    return _numbers(torch.__version__) >= _numbers(since)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


SHARDED_MODELS = Feature(
    "compress_replicas (and local_sgd on a model that fully_shard has sharded)",
    "FSDPModule.set_all_reduce_hook",
    "2.7",
)
MUON = Feature("Muon", "torch.optim.Muon", "2.9")
#: `reduce_dtype=None` of a `MixedPrecisionPolicy` is the dtype of the parameters, and no longer
#: `param_dtype`.
REDUCES_IN_OWN_DTYPE = torch_is("2.15")

#: torch 2.13 has given them other names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

# ---- optimizers, and the kernels on lists of tensors that they are made of. 2.6 to 2.15.

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub_ = torch._foreach_sub_


def save_with_hooks(
    optimizer: torch.optim.Optimizer, save: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """The state of an optimizer that saves it by itself, with what users have hooked around its
    `state_dict`. 2.6 to 2.15."""
    for before in list(optimizer._optimizer_state_dict_pre_hooks.values()):
        before(optimizer)
    state = save()
    for after in list(optimizer._optimizer_state_dict_post_hooks.values()):
        changed = after(optimizer, state)
        state = state if changed is None else changed
    return state


def load_with_hooks(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    load: Callable[[Mapping[str, Any]], None],
) -> None:
    """Load it so, too, with what is hooked around `load_state_dict`. 2.6 to 2.15."""
    given = dict(state) if isinstance(state, Mapping) else state
    for before in list(optimizer._optimizer_load_state_dict_pre_hooks.values()):
        changed = before(optimizer, given)
        given = given if changed is None else changed
    load(given)
    for after in list(optimizer._optimizer_load_state_dict_post_hooks.values()):
        after(optimizer)


def view_base(x: Tensor) -> Tensor | None:
    """The tensor of which `x` is a view. 2.6 to 2.15."""
    return x._base


def times_written(tensors: Iterable[Tensor]) -> list[int]:
    """How often each of these tensors has been written to in place. 2.6 to 2.15."""
    return list(map(attrgetter("_version"), tensors))


# ---- autograd. 2.6 to 2.15.

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_node: Callable[[], Any] = torch._C._current_autograd_node
#: Call a function when the backward pass that runs now has come to its end.
queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback


def add_gradient_hook(
    parameter: Tensor, hook: Callable[[Tensor], None]
) -> tuple[dict[int, Any], int]:
    """Call this when a gradient has been accumulated. Returns all such hooks of the parameter, in
    the order in which they are called, and the key of this one."""
    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    hooks: Any = parameter._post_accumulate_grad_hooks
    return hooks, handle.id


def step_unseen(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer that stands in for another, without hooks on the steps of all optimizers:
    who counts steps would count it."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return _graph_task() != -1


def in_node() -> bool:
    """Whether the engine is in the middle of a node: in a callback, of the pass around the one that
    has ended."""
    return _node() is not None


# ---- the compiler. 2.6 to 2.15.


#: What `torch.compiler.disable` does to a function, without importing the compiler.
disable_dynamo = _disable_dynamo


def in_compiled_autograd() -> bool:
    """Whether compiled autograd runs this backward pass. Nothing is imported for it."""
    return bool(
        getattr(
            sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False
        )
    )


def before_compile(module: Any) -> Any:
    """The module of which `torch.compile` has made this one; any other as it is."""
    return getattr(module, "_orig_mod", module)


# ---- nested containers. `tree_leaves`: 2.6 to 2.15; `tree_is_leaf` is there since 2.8, and
# `leaves_of` tells the same.


def leaves_of(tree: Any) -> list[Any]:
    """What is in a nesting of the containers that torch knows; of any other object, itself."""
    return _pytree.tree_leaves(tree)


# ---- process groups. 2.6 to 2.15.


def reads_many(store: Any) -> bool:
    """Whether a store reads many keys in one request, by `multi_get`."""
    return bool(store.has_extended_api())


def store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """The store by which torch has made a group; None if torch has not made it, as where members
    come and go."""
    found = dist.distributed_c10d._world.pg_map.get(group)
    return None if found is None else found[1]


def number_of_groups() -> int:
    """How many process groups this process has, all in all. Before 2.14 members of a group that
    others do not know find each other by that."""
    return len(dist.distributed_c10d._world.pg_names)


@contextmanager
def named_apart(what: str) -> Iterator[None]:
    """Let `new_group(use_local_synchronization=True)`, within, make a group that only its members
    know, which all of them call `what`.

    Its name has to be the same for them, and nobody else's. Since 2.14 torch takes a counter for
    that, and counts on: other ranks fall behind, and the next group of all ranks has several names,
    and is waited for in vain. So the counter is what `what` says, and then what it was. Before, it
    was not used here: see `number_of_groups`.
    """
    world = dist.distributed_c10d._world
    before = world.group_count
    world.group_count = int.from_bytes(hashlib.sha256(what.encode()).digest()[:6], "big")
    try:
        yield
    finally:
        world.group_count = before


def in_this_order(ranks: list[int]) -> dict[str, Any]:
    """The option of `new_group` that numbers its members as they are given. It is there since 2.12;
    before, members are numbered in rising order, and whoever needs theirs looks it up."""
    if ranks == sorted(ranks) or "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        return {}
    return {"sort_ranks": False}


def libraries_of(group: dist.ProcessGroup) -> list[Any]:
    """The library of a group for each kind of device; none of a group that is written in Python."""
    return list(_libraries(group))


def _libraries(group: dist.ProcessGroup) -> Iterator[Any]:
    for device in group._device_types:
        with suppress(RuntimeError):
            yield group._get_backend(device)


def timeout_of_library(library: Any) -> Any:
    """What a library was told; None where it does not say."""
    return getattr(getattr(library, "options", None), "_timeout", None)


# ---- DistributedDataParallel. 2.6 to 2.15.


def count_of_reducer(ddp: Any) -> int | None:
    """How many parameters a DDP averages: those that it was made with. None where it does not
    say."""
    count: int | None = ddp._get_ddp_logging_data().get("num_parameter_tensors")
    return count


def noted_hooks(ddp: Any) -> list[Any]:
    """The communication hooks that DDP has noted, each with its state."""
    found: list[Any] = getattr(ddp, "_comm_hooks", [])
    return found


def note_hooks(ddp: Any, hooks: list[Any]) -> None:
    """Let DDP have noted these."""
    ddp._comm_hooks = hooks


def joins(ddp: Any) -> bool:
    """Whether DDP's `join()` is on."""
    return bool(ddp._join_config.enable)


def hands_single_gradients(ddp: Any) -> bool:
    """Whether DDP gives hooks single gradients instead of buckets."""
    return bool(getattr(ddp, "_use_python_reducer", False))


# ---- optimizers, scalers, the profiler. 2.6 to 2.15.

#: Of an optimizer that skips steps by itself when a `GradScaler` found inf.
SKIPS_BY_ITSELF = "_step_supports_amp_scaling"


#: What `Optimizer.__init__` puts around the step of a class, and what calls the hooks.
_STEP_WITH_HOOKS = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


def is_within_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the hook that asks is of a step within a step of the same optimizer: a class's own
    step calls that of its base, and torch calls the hooks of both."""
    running, frame = 0, inspect.currentframe()
    while frame is not None:
        running += frame.f_code is _STEP_WITH_HOOKS and frame.f_locals["args"][0] is optimizer
        frame = frame.f_back
    return running > 1


def takes_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it was made by `Optimizer.__init__`; wrappers may not have been."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def steps_in_backward(parameter: Tensor) -> bool:
    """Whether an optimizer steps it in the backward pass."""
    return hasattr(parameter, "_in_backward_optimizers")


def tensor_of_scale(scaler: torch.amp.GradScaler) -> Tensor | None:
    """The scale where the scaler keeps it, so that reading it makes the host not wait; None before
    its first use."""
    return getattr(scaler, "_scale", None)


#: Whether torch's profiler runs in this thread; torch's own function, which each step asks. Said to
#: do so never where torch does not tell.
profiler_runs: Callable[[], bool] = getattr(torch._C._autograd, "_profiler_enabled", bool)

#: How many modes look at each operation of this thread (`torch.utils._python_dispatch`). None where
#: torch does not tell.
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", int)


def operations_are_watched() -> bool:
    """Whether somebody looks at each operation of this thread, as a debugger does."""
    return _dispatch_modes() > 0 or torch.is_anomaly_enabled()


# ---- CUDA graphs. 2.6 to 2.15.


def end_allocation(device: torch.device, pool: Any) -> None:
    """Let a capture that CUDA has ended allocate from its pool no longer. Nothing, if it does
    not."""
    with suppress(RuntimeError):  # it does not
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


# ---- FSDP2. `_get_fsdp_state`, `_state_ctx`, `all_reduce_grads`, `mp_policy`: 2.6 to 2.15.


def require_sharded_models(modules: list[Any]) -> None:
    """Raise ValueError, before anything is hooked, if replicas of modules that `fully_shard` has
    sharded cannot be served; NeedsTorch if this torch is too old."""
    SHARDED_MODELS.require()
    try:
        for module in modules:
            fsdp_accumulates(module)
    except AttributeError as error:
        raise ValueError(
            f"torch {torch.__version__} keeps elsewhere ({error}) whether a backward pass"
            f" accumulates, which {SHARDED_MODELS.name} has to know; torch {SHARDED_MODELS.since}"
            f" to {TESTED[1]} are tested. gradwire.torch_backend.Averager needs nothing of it"
        ) from error


def fsdp_state(module: Any) -> Any:
    """What FSDP keeps for all modules of one `fully_shard` call."""
    return module._get_fsdp_state()


def fsdp_groups(module: Any) -> list[Any]:
    """FSDP's groups of the parameters of one `fully_shard` call: a list since 2.12, before that one
    or none."""
    state = fsdp_state(module)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def fsdp_accumulates(module: Any) -> bool:
    """Whether gradients of this backward pass are to stay with their replica: after
    `set_requires_all_reduce(False)` or `set_is_last_backward(False)`."""
    last = fsdp_state(module)._state_ctx.is_last_backward
    return not last or not all(group.all_reduce_grads for group in fsdp_groups(module))


def fsdp_policies(module: Any) -> list[Any]:
    """The `MixedPrecisionPolicy` of each of the groups; since 2.15 of each parameter of theirs."""
    found: list[Any] = []
    for group in fsdp_groups(module):
        found += [
            each.mp_policy
            for each in ([group] if hasattr(group, "mp_policy") else group.fsdp_params)
        ]
    return found
