"""torch's own names: coming from `torch.distributed.algorithms.ddp_comm_hooks`, only the import
line changes.

    from gradwire.torch_backend import PowerSGDState, powerSGD_hook
    state = PowerSGDState(process_group=None, matrix_approximation_rank=4)
    ddp.register_comm_hook(state, powerSGD_hook)

Unlike torch's, these run with any number of buckets on Gloo and NCCL, from step 0 on. New code
registers an algorithm with `gradwire.torch_backend.register_comm_hook`.
"""

# No `from __future__ import annotations`: DDP compares the hooks' annotations with the real
# objects.

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket

from gradwire.core.algorithm import Algorithm, State, Stepped
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.power_sgd import PowerSGD
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.ops import A, Ops, Spec
from gradwire.core.plan.advice import warn
from gradwire.core.state import checkpoint
from gradwire.core.text.name_patterns import chosen
from gradwire.core.text.wording import some
from gradwire.torch_backend.ddp.bucket_hook import (
    BackwardPass,
    Bucket,
    BucketHook,
    as_it_is,
    raise_after_backward,
)
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups, given_or_default
from gradwire.torch_backend.engine.scheduler import Step
from gradwire.torch_backend.engine.torch_modes import uncompiled
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.ops.workspace import dtype_name
from gradwire.torch_backend.setup.self_check import wrong_here

logger = logging.getLogger(__name__)

#: What follows a warning about a tensor.
INSTEAD = (
    "torch's names see every tensor as torch does; gradwire.torch_backend.register_comm_hook(ddp,"
    " PowerSGD(rank, stacked=…, rows=…)) does not."
)

#: Attributes of a `PowerSGDState` that are heeded from the next step on, whenever they are
#: assigned: torch's name → that of `PowerSGD`.
OPTIONS = {
    "matrix_approximation_rank": "rank",
    "start_powerSGD_iter": "start_step",
    "min_compression_rate": "min_compression_rate",
    "use_error_feedback": "error_feedback",
    "warm_start": "warm_start",
    "orthogonalization_epsilon": "orthogonalization_epsilon",
    "random_seed": "seed",
}

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


class PowerSGDState:
    """Configuration and memory for `powerSGD_hook`, with torch's arguments and defaults.

    Examples:
        >>> import torch
        >>> from gradwire.torch_backend import PowerSGDState, powerSGD_hook
        >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512))
        >>> state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=0)
        >>> ddp.register_comm_hook(state, powerSGD_hook)
        >>> ddp(torch.ones(2, 512)).sum().backward()
        >>> state.compression_stats()
        (57.0, 262656, 4608)

    Args:
        process_group: whose ranks are averaged over; None is the default group.
        matrix_approximation_rank: rank of the approximation.
        start_powerSGD_iter: number of steps that average uncompressed gradients first. Any number
            from 0 on.
        min_compression_rate: compress a tensor only if its elements shrink by more than this
            factor.
        use_error_feedback: add to each gradient the compression error of the ones before.
        warm_start: begin power iteration with the factor of the step before.
        orthogonalization_epsilon: added to the norms in orthonormalization. 0 is safe: zero
            gradients need none here.
        random_seed: of the initial factors.
        compression_stats_logging_frequency: log the statistics every so many steps.
        batch_tensors_with_same_shape: accepted; equal shapes always share their kernel calls where
            that saves time, without copies of gradients.
        named_parameters: beyond torch: `ddp.module.named_parameters()`, so that memory is kept
            under the parameters' names. Without it, parameters are called `parameter.0`,
            `parameter.1`, … in the order of the module (`parameter.bfloat16.0`, … if they have
            several dtypes), so register before the first backward pass. A pickled state brings its
            names along.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,  # noqa: N803  (torch's name)
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        *,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self._names = (
            {p: name for name, p in named_parameters} if named_parameters is not None else None
        )
        self._running: _Running | None = None
        # What `state_dict` gave: memory, the parameters' names by dtype in the order of the module,
        # elements before and after compression.
        self._loaded: dict[str, Any] = {
            "format": 1,
            "memory": None,
            "names": {},
            "elements": [0, 0],
        }
        self._first_iter = 0
        self._discarding = False
        self.algorithm(square=False)  # raises now for an argument that cannot be served

    def algorithm(self, *, square: bool) -> PowerSGD:
        """The configuration as gradwire has it; `square` is True for `batched_powerSGD_hook`.
        Raises ValueError for an option that cannot be served."""
        options = {name: getattr(self, theirs) for theirs, name in OPTIONS.items()}
        rows = {} if square else {"*": 1}  # as torch sees a tensor: (shape[0], rest)
        return PowerSGD(**options, square=square, rows=rows)

    def __setattr__(self, name: str, value: Any) -> None:
        """Options are heeded from the next step on; memory is kept where it fits. Assign the same
        on all ranks."""
        running: _Running | None = self.__dict__.get("_running")
        if name not in OPTIONS or running is None:
            super().__setattr__(name, value)
            return
        before = getattr(self, name)
        super().__setattr__(name, value)
        try:
            running.reconfigure()
        except (TypeError, ValueError):
            super().__setattr__(name, before)
            raise

    @property
    def _driver(self) -> Driver | None:
        return None if self._running is None else self._running.driver

    @property
    def iter(self) -> int:
        """Number of steps taken. May be set, which moves the step from which on gradients are
        compressed."""
        if self._driver is not None:
            return self._driver.memory.steps
        memory = self._loaded["memory"]
        return int(memory["step"]) if memory else self._first_iter

    @iter.setter
    def iter(self, steps: int) -> None:
        if self._driver is not None:
            self._driver.memory.steps = steps
        elif memory := self._loaded["memory"]:
            self._loaded = {**self._loaded, "memory": {**memory, "step": steps}}
        else:
            self._first_iter = steps

    @property
    def total_numel_before_compression(self) -> int:
        """Elements of the gradients of all compressed steps so far, an int; 0 before the first."""
        return self.compression_stats()[1]

    @property
    def total_numel_after_compression(self) -> int:
        """Elements that were sent in place of `total_numel_before_compression`, an int."""
        return self.compression_stats()[2]

    @property
    def error_dict(self) -> dict[str, Tensor]:
        """The compression error so far on this rank, by the parameter's name (torch: by the
        bucket's number)."""
        return self._memories("error")

    @property
    def q_memory_dict(self) -> dict[str, Tensor]:
        """The factors that the next step begins with, transposed, by the parameter's name (torch:
        by the bucket's number)."""
        return self._memories("q")

    def _memories(self, key: str) -> dict[str, Tensor]:
        tensors = {} if self._driver is None else self._driver.memory.state.tensors
        return {name: memory[key] for name, memory in tensors.items() if key in memory}

    def compression_stats(self) -> tuple[float, int, int]:
        """(rate, elements before compression, elements after) of the compressed steps' gradients so
        far."""
        now = self._running.elements if self._running else (0, 0)
        before, after = (old + new for old, new in zip(self._loaded["elements"], now, strict=True))
        return (before / after if after else 0), before, after

    @contextmanager
    def discarded(self) -> Iterator[None]:
        """Backward passes in this context leave no trace in the memory, see `CommHook.discarded`:
        for gradients that no optimizer will step with. Beyond torch. Enter it on all ranks alike,
        round the whole backward pass."""
        before, self._discarding = self._discarding, True
        try:
            yield
        finally:
            self._discarding = before

    def forget(self, names: str | Iterable[str] | None = None) -> None:
        """Set to zero the compression error so far, see `CommHook.forget`. Beyond torch.

        Args:
            names: patterns (`fnmatch`) of the names of parameters, or one pattern; None: all.

        Raises:
            ValueError: a pattern matches no parameter. Nothing has been changed then.
        """
        if self._driver is not None:
            self._driver.forget(names)
        elif memory := self._loaded["memory"]:
            errors, tensors = self.algorithm(square=False).per_replica, memory["tensors"]
            forgotten = {
                name: {
                    k: torch.zeros_like(x) if k in errors else x for k, x in tensors[name].items()
                }
                for name in chosen("names", names, tensors)
            }
            self._loaded = {
                **self._loaded,
                "memory": {**memory, "tensors": {**tensors, **forgotten}},
            }

    def state_dict(self) -> dict[str, Any]:
        """This rank's memory as plain nested dictionaries of tensors (copies), numbers and names:
        what `torch.save` writes of it, `torch.load(weights_only=True)` reads. Pickling this object,
        as with torch's, keeps the configuration too."""
        kept = {**self._loaded, "elements": list(self.compression_stats()[1:])}
        if self._running is not None and self._running.driver is not None:
            # As with torch's, one rank's serves all if it has to. What was sent is in "elements".
            own = self._running.driver.memory.own()
            kept["memory"] = {
                key: value for key, value in own.items() if key not in ("rank", "replicas", "sent")
            }
            kept["names"] = self._running.names
        return kept

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, on the same rank, before training or in the middle of
        it.

        Raises:
            ValueError: the dictionary is no such state; or, now or in the first step, it is of
                other parameters or another configuration. Nothing has been changed then.
        """
        loaded = _require_own(state)
        if self._running is not None and self._running.driver is not None:
            if self._running.names != loaded["names"] or loaded["memory"] is None:
                raise ValueError(
                    f"the state is of parameters {loaded['names']}; this one is of"
                    f" {self._running.names}"
                )
            self._running.driver.load_state_dict(loaded["memory"])
            self._running.count_anew()
        self._loaded = loaded

    def __getstate__(self) -> dict[str, Any]:
        logger.warning("The process group cannot be saved and is left out of the saved state.")
        passing = ("process_group", "_running", "_names", "_discarding")
        return {k: v for k, v in self.__dict__.items() if k not in passing} | {
            "_loaded": self.state_dict()
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        logger.warning(
            "The process group is set to the default one; set `state.process_group` for another."
        )
        self.__dict__.update(state)
        self.process_group, self._running, self._names, self._discarding = None, None, None, False

    def _on_bucket(
        self, bucket: GradBucket, *, square: bool = False, wire_dtype: str | None = None
    ) -> torch.futures.Future[Tensor]:
        if self._running is None:
            self._running = _Running(self, square, wire_dtype)
        if self._running.variant != (square, wire_dtype):
            raise ValueError(
                "this PowerSGDState serves another hook already; use one state per hook"
            )
        return self._running.on_bucket(bucket)


def _require_own(state: Mapping[str, Any]) -> dict[str, Any]:
    """What `PowerSGDState.state_dict` gave. Raises ValueError for anything else."""
    given = state if isinstance(state, Mapping) else {}
    if (
        given.get("format") is True
        or given.get("format") != 1
        or not {"memory", "names", "elements"} <= given.keys()
    ):
        raise ValueError(
            f"not what PowerSGDState.state_dict() gives: format 1 and not {given.get('format')!r},"
            f" with {sorted(map(str, given))}"
        )
    names, memory, elements = given["names"], given["memory"], given["elements"]
    if not isinstance(names, Mapping) or not all(
        isinstance(x, (list, tuple)) for x in names.values()
    ):
        raise ValueError(
            f"names={names!r} in the state must be lists of parameters' names, by dtype"
        )
    counts = elements if isinstance(elements, (list, tuple)) else ()
    if len(counts) != 2 or any(
        isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in counts
    ):
        raise ValueError(
            f"elements={elements!r} in the state must be two numbers, before and after compression"
        )
    if memory is not None:
        checkpoint.require_kind(memory, "compressor", checkpoint.COMMON)
        checkpoint.step_in(memory)
        checkpoint.scale_in(memory)
        checkpoint.require_finite(memory)
    by_dtype = {dtype: list(of_dtype) for dtype, of_dtype in names.items()}
    return {"format": 1, "memory": memory, "names": by_dtype, "elements": list(counts)}


class _Running:
    """The memory of a `PowerSGDState` once its hook has been called.

    A hook that is registered with a state is not told which module it serves. The buckets of the
    first step hold the parameters in the order of the module, last bucket first: so that step waits
    for the last of them, and then everybody has a name. Of several that DDP has kept nobody knows
    the last: they are averaged as they are, in a step that does not count, and the next step, whose
    buckets are the same, is the first.
    """

    def __init__(self, state: PowerSGDState, square: bool, wire_dtype: str | None) -> None:
        self.variant = (square, wire_dtype)
        self.driver: Driver | None = None
        self.names: dict[str, list[str]] = {}
        self._state = state
        self._algorithm = self._configured()
        self._reconfigured = False
        self._hook: BucketHook | None = None
        self._known: frozenset[Tensor] = frozenset()
        self._first_pass = BackwardPass()
        self._first_step: list[Bucket] = []
        self._before_start = (0, 0)
        self._next_report = 0

    def _configured(self) -> Algorithm:
        square, wire_dtype = self.variant
        algorithm = self._state.algorithm(square=square)
        return algorithm if wire_dtype is None else WireDtype(algorithm, wire_dtype)

    def reconfigure(self) -> None:
        """Heed the state's options from the next step on. Raises for one that cannot be served."""
        self._configured()
        self._reconfigured = True

    def _go_on(self) -> None:
        """Go on with the options that the state has now."""
        assert self.driver is not None
        assert self._hook is not None
        self._reconfigured = False
        # counted by the start that was: a later one counts none of these steps
        loaded = self._state._loaded
        counted = zip(loaded["elements"], self.elements, strict=True)
        self._algorithm = self._configured()
        self._state._loaded = {**loaded, "elements": [old + new for old, new in counted]}
        driver = self._made(self.driver.specs, self.driver.ops.device, self.driver.process_group)
        driver.continue_from(self.driver)
        self.driver = self._hook.driver = driver
        self.count_anew()

    @property
    def elements(self) -> tuple[int, int]:
        """Gradient elements and sent elements of the compressed steps."""
        if self.driver is None or self.driver.memory.steps <= self._algorithm.start_step:
            return 0, 0
        dense, sent = self._before_start
        return self.driver.dense_elements - dense, self.driver.memory.sent.elements - sent

    def count_anew(self) -> None:
        """Count elements from now on: those before are known from a state."""
        assert self.driver is not None
        self._before_start = self.driver.dense_elements, self.driver.memory.sent.elements

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        read = Bucket.read(bucket)
        if self._hook is not None:
            self._require_known(read)
            self._hook(read)
        elif read.kept:
            return one_message(self._state.process_group, bucket, AllReduce())
        else:
            if self._first_pass.enter(read.index, read.is_last, self._refuse_first_step):
                self._first_step = []
            self._first_step.append(read)
            if read.is_last and len(self._first_step) <= read.index:
                self._refuse_first_step()
            elif read.is_last:
                buckets, self._first_step = self._first_step, []
                try:
                    self._run_first_step(buckets)
                except Exception as error:
                    # of a pass that does not end DDP would take no other
                    for each in buckets:
                        if not each.future.done():
                            each.future.set_result(each.buffer)
                    raise_after_backward(error)
        return read.future

    def _before_step(self, step: int) -> None:
        assert self.driver is not None
        if self._reconfigured:
            self._go_on()
        self.driver.discarding = self._state._discarding

    def _refuse_first_step(self) -> None:
        """Raise when the pass is over: DDP has left buckets out."""
        buckets, self._first_step = self._first_step, []
        for bucket in buckets:
            bucket.future.set_result(bucket.buffer)
        raise_after_backward(
            RuntimeError(
                "skip_all_reduce_unused_params=True of DDP has left buckets out of the first step,"
                " by which a PowerSGDState learns the parameters: use all of them in this step, or"
                " gradwire.torch_backend.register_comm_hook(ddp, PowerSGD(rank)), which asks the"
                " model. Nothing was averaged"
            )
        )

    def _run_first_step(self, buckets: Sequence[Bucket]) -> None:
        if complex_shapes := [
            tuple(p.shape) for bucket in buckets for p in bucket.parameters if p.is_complex()
        ]:
            raise ValueError(
                f"parameters of shapes {some(complex_shapes)} are complex: a bucket holds two"
                " numbers for each of their elements, and hooks are shown half of them as the"
                " gradient. Use allreduce_hook, which averages buckets as they are"
            )
        self._algorithm, self._reconfigured = self._configured(), False
        # By dtype, because a bucket holds one: parameters of different dtypes interleave
        # differently with every bucket size.
        in_module_order: dict[str, list[Tensor]] = {}
        for bucket in reversed(buckets):
            for p in bucket.parameters:
                in_module_order.setdefault(dtype_name(p.dtype), []).append(p)
        names = self._names_for(in_module_order)
        self.names = {
            dtype: [names[p] for p in of_dtype] for dtype, of_dtype in in_module_order.items()
        }
        group = given_or_default(self._state.process_group)
        # In a wrapper's hands gradients may have another dtype than their parameters.
        gradients = {
            p: g
            for bucket in buckets
            for p, g in zip(bucket.parameters, bucket.gradients, strict=True)
        }
        in_order = {
            names[p]: gradients[p] for of_dtype in in_module_order.values() for p in of_dtype
        }
        driver = self._made(specs_of(in_order), buckets[0].buffer.device, group)
        warn(self._algorithm, driver.specs, INSTEAD)
        driver.memory.steps = self._state._first_iter
        if (memory := self._state._loaded["memory"]) is not None:
            driver.load_state_dict(memory)
        self.driver, self._hook, self._known = driver, BucketHook(driver, names), frozenset(names)
        self._hook.at_start, self._hook.at_end = self._before_step, self._after_step
        for bucket in buckets:
            self._hook(bucket)

    def _made(
        self, specs: Mapping[str, Spec], device: torch.device, group: dist.ProcessGroup
    ) -> Driver:
        """A driver. Nobody has registered it, so ranks compare what they know of it in its first
        step."""
        driver = Driver(self._algorithm, specs, device, group)
        driver.obstacle = wrong_here(self._algorithm, specs, dist.get_world_size(group), device)
        return driver

    def _require_known(self, bucket: Bucket) -> None:
        unknown = [tuple(p.shape) for p in bucket.parameters if p not in self._known]
        if unknown:
            raise ValueError(
                "this PowerSGDState serves a model that has no parameters of shapes"
                f" {some(unknown)}: another one, or one wrapped before they were trained. Give each"
                " model, and each wrapper, a state of its own; `load_state_dict` takes memory over"
            )

    def _names_for(self, in_module_order: Mapping[str, Sequence[Tensor]]) -> dict[Tensor, str]:
        names = self._state._names
        if names is None:
            several = len(in_module_order) > 1
            of_dtype = self._state._loaded["names"] or {
                dtype: [
                    f"parameter.{dtype}.{i}" if several else f"parameter.{i}"
                    for i in range(len(ps))
                ]
                for dtype, ps in in_module_order.items()
            }
            here, there = (
                {d: len(x) for d, x in each.items()} for each in (in_module_order, of_dtype)
            )
            if here != there:
                raise ValueError(
                    f"the loaded state is of a model with {there} parameters; DDP averages {here}"
                    " here"
                )
            return {
                p: name
                for dtype, ps in in_module_order.items()
                for p, name in zip(ps, of_dtype[dtype], strict=True)
            }
        unknown = [tuple(p.shape) for ps in in_module_order.values() for p in ps if p not in names]
        if unknown:
            raise ValueError(
                f"named_parameters lacks parameters of shapes {some(unknown)} that DDP averages"
            )
        return names

    def _after_step(self) -> None:
        assert self.driver is not None
        if self.driver.memory.steps <= self._algorithm.start_step:
            self.count_anew()
        elif self.driver.memory.steps >= self._next_report:
            self._next_report = (
                self.driver.memory.steps + self._state.compression_stats_logging_frequency
            )
            logger.info(
                "Compression stats after %d steps: rate %.2f, elements before %d, after %d",
                self.driver.memory.steps,
                *self._state.compression_stats(),
            )


@uncompiled
def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:  # noqa: N802
    """PowerSGD, see `gradwire.PowerSGD`: two all-reduces a step where the factors fit one message,
    whatever the number of buckets.

    Args:
        state: options and memory, one for each DDP module.
        bucket: that DDP hands over: dense gradients of one float dtype, on one device.

    Returns:
        A future of the averaged bucket, a tensor of the same shape and dtype. It is completed when
        the last bucket of the step has arrived.

    Raises:
        ValueError: a parameter or option that cannot be served, named, in the first step.
    """
    return state._on_bucket(bucket)


@uncompiled
def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:  # noqa: N802
    """PowerSGD on flattened tensors, each viewed as a square matrix, vectors too.

    torch flattens a whole bucket into one square; here it is each tensor, so that memory belongs to
    parameters and survives the rebuilding of buckets.
    """
    return state._on_bucket(bucket, square=True)


@uncompiled
def allreduce_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """Average the bucket as it is: what DDP does without a hook.

    Args:
        process_group: whose ranks average; None is the default group.
        bucket: that DDP hands over: gradients of one float or complex dtype, on one device.

    Returns:
        A future of the averaged bucket, a tensor of the same shape and dtype.
    """
    return one_message(process_group, bucket, AllReduce())


@dataclass(frozen=True)
class _InDtype(AllReduce):
    """An all-reduce that sums in this dtype, as torch's. `WireDtype` sums in float32."""

    dtype: str = "float32"

    async def step(
        self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any
    ) -> Stepped[A]:
        averages, _ = await super().step(
            ops, {n: ops.cast(g, self.dtype) for n, g in gradients.items()}, state, step
        )
        return {
            name: ops.cast(averages[name], ops.dtype_of(g)) for name, g in gradients.items()
        }, state


@uncompiled
def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """An all-reduce, see `allreduce_hook`, in float16, half the bytes of float32. Sums above 65,504
    become inf."""
    return one_message(process_group, bucket, _InDtype(dtype="float16"))


@uncompiled
def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """An all-reduce, see `allreduce_hook`, in bfloat16, half the bytes of float32, on Gloo too."""
    return one_message(process_group, bucket, _InDtype(dtype="bfloat16"))


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """A hook that does what `hook` does, with what it sends cast to float16.

    Args:
        hook: one of gradwire's, whose messages are cast one by one; or any other, whose bucket is.

    Returns:
        A hook with the arguments and the result of `hook`.
    """
    return _wrapper(hook, "float16")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """The same as `fp16_compress_wrapper`, in bfloat16."""
    return _wrapper(hook, "bfloat16")


# DDP refuses functions of torch's name without NCCL; ours run on Gloo.
bf16_compress_hook.__name__ = "gradwire_bf16_compress_hook"


def _wrapper(hook: Hook, dtype: str) -> Hook:
    @uncompiled
    def wrapped(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if hook in (powerSGD_hook, batched_powerSGD_hook):
            low_rank: PowerSGDState = state
            return low_rank._on_bucket(
                bucket, square=hook is batched_powerSGD_hook, wire_dtype=dtype
            )
        if hook is allreduce_hook:
            return one_message(state, bucket, _InDtype(dtype=dtype))
        original = bucket.buffer()
        bucket.set_buffer(original.to(getattr(torch, dtype)))
        future: torch.futures.Future[Tensor] = hook(state, bucket).then(
            lambda done: original.copy_(single(done.value()))
        )
        return future

    return wrapped


def single(value: Any) -> Tensor:
    """Futures of collectives hold a list of one tensor."""
    tensor: Tensor = value[0] if isinstance(value, list) else value
    return tensor


def one_message(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, algorithm: Algorithm
) -> torch.futures.Future[Tensor]:
    """Run an algorithm of a single message. The callback only unpacks: it launches nothing, so the
    order of messages is the buckets'."""
    buffer = Bucket.read(bucket).buffer
    ops = TorchOps(buffer.device)
    step = Step(Collectives(ProcessGroups(given_or_default(process_group)), ops))
    running = step.start(algorithm.step(ops, {"bucket": buffer}, State(), 0))
    sent = running.pending
    assert sent is not None

    def unpack(done: torch.futures.Future[Any]) -> Tensor:
        done.value()  # raises what went wrong
        # Not `receive`: this runs as part of the message's completion, and would wait for itself.
        running.advance(sent.unpacked())
        if not running.ended:
            raise RuntimeError(f"{algorithm} asks for more than one message")
        average = running.result[0]["bucket"]
        return buffer if average is buffer else buffer.copy_(average)

    if not sent.works:
        return as_it_is(buffer)
    return cast("torch.futures.Future[Tensor]", sent.works[0].get_future().then(unpack))
