"""What a user holds of an algorithm at work on torch tensors: its statistics and its memory, out
and in."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gradwire.core.algorithm import Algorithm
from gradwire.core.plan.dry_run import size_of
from gradwire.core.protocol.weights import counted_weight
from gradwire.core.state.checkpoint import StateMismatch
from gradwire.torch_backend.engine.cuda_graphs import has_graphs
from gradwire.torch_backend.engine.driver import Driver
from gradwire.torch_backend.monitor.fidelity import Approximation
from gradwire.torch_backend.monitor.stats import Stats
from gradwire.torch_backend.setup.registration import in_one_line, reconfigured
from gradwire.torch_backend.state.rank_memory import ShardedState


@contextmanager
def discarding(driver: Callable[[], Driver]) -> Iterator[None]:
    """Steps in this context leave no trace in the memory of whichever driver is at work:
    `reconfigure` may put another in its place."""
    before, driver().discarding = driver().discarding, True
    try:
        yield
    finally:
        driver().discarding = before


@contextmanager
def measuring(driver: Driver) -> Iterator[Approximation]:
    """Steps in this context are compared with a full average. To be entered on all ranks."""
    measurement = driver.measure()
    try:
        yield measurement.found
    finally:
        driver.measurement = None
    if measurement.failure:
        warnings.warn(
            f"handle.measured(): a step was not measured, since {measurement.failure}", stacklevel=5
        )


class Handle:
    """A driver as its user sees it. `in_buckets`: gradients come bucket by bucket, and not all at
    once. `instead`: what gives another handle."""

    in_buckets = True
    instead = ""
    _registered = True

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        driver.replays.wanted = has_graphs(driver.ops.device)

    def __repr__(self) -> str:
        """What it does, and what it has saved."""
        stats = self.stats()
        sent = stats.bytes_sent if stats.between_bytes is None else stats.between_bytes
        saved = f"{size_of(max(stats.dense_bytes - sent, 0))} saved" + (
            " between nodes" if stats.within_bytes else ""
        )
        spent = (
            f", {stats.compress_share:.0%} of a step spent compressing"
            if stats.step_seconds
            else ""
        )
        what = (
            in_one_line(self._driver)
            if self._registered
            else f"unregistered; {in_one_line(self._driver)}"
        )
        return f"{type(self).__name__}({what}; {stats.steps} steps, {saved}{spent})"

    def _why_not(self) -> str:
        return (
            ""
            if self._registered
            else f"this handle is unregistered; {self.instead} gives a new one"
        )

    def _require_registered(self) -> None:
        """Raise ValueError for what would have no effect."""
        if why_not := self._why_not():
            raise ValueError(why_not)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that runs."""
        return self._driver.algorithm

    @property
    def weight(self) -> float:
        """What this replica counts for, from the next step on: the tokens of its batch, 0 if it is
        absent. 1 until it is set.

            handle = register_comm_hook(ddp, Weighted(WireDtype(PowerSGD(16), "int8")))
            handle.weight = batch.numel()
            loss.backward()

        See `gradwire.Weighted`, which the algorithm has to be on all ranks. Set it before the first
        gradient arrives. On CUDA asking for it waits for the device, and setting it does not: a
        captured graph goes by the weight that is there when it is replayed.

        Raises:
            TypeError, ValueError: it is no weight, or all replicas count alike; or this handle is
                unregistered.
        """
        return float(self._driver.weight)

    @weight.setter
    def weight(self, weight: float) -> None:
        self._require_registered()
        instead = f"give Weighted({self.algorithm!r}) on all ranks"
        number = counted_weight(
            weight, self.algorithm, weighted=self._driver.weighted, instead=instead
        )
        self._driver.weight.fill_(number)

    @property
    def replay(self) -> bool:
        """Whether steps are replayed as CUDA graphs of what lies between two messages, where the
        host decides the same in each of them. On CUDA they are; with `Auto`, which looks at few
        steps of a method, they are not.

            handle = register_comm_hook(ddp, WireDtype(PowerSGD(16), "int8"))
            handle.replay = False           # every step is eager

        To be set between steps, on all ranks: one that eager steps compute on alone joins what
        others do not, which a device may round otherwise. Whether a rank then replays a step is its
        own affair. On the CPU it changes nothing. See docs/performance.md.
        """
        return self._driver.replays.wanted

    @replay.setter
    def replay(self, wanted: bool) -> None:
        self._driver.replays.wanted = bool(wanted)

    def set(self, **settings: float) -> None:
        """Tell the algorithm something of its next steps, until it is told otherwise: what it asks
        for with `await setting(ops, name, default)`.

            handle.set(threshold=0.05)

        The same on every rank, before the first gradient arrives. It survives `reconfigure` where
        the other algorithm asks for it too.

        Raises:
            TypeError: a value is no number.
            ValueError: the algorithm does not ask for it, or this handle is unregistered. Nothing
                has been changed then.
        """
        self._require_registered()
        self._driver.settings.say(settings, self.algorithm)

    def reconfigure(self, algorithm: Algorithm) -> StateMismatch:
        """Go on with another algorithm, another rank for instance, from the next step on. To be
        called on all ranks, between steps.

            handle.reconfigure(PowerSGD(rank=8))

        Memory is kept where it fits: the compression error so far, and factors of the same shape.
        Others begin anew. The error of a tensor that is no longer compressed is dropped. Steps and
        statistics count on, so `start_step` means what it says. A CUDA graph that has captured a
        step goes on with the algorithm before: capture anew.

        Args:
            algorithm: what to run, the same on every rank.

        Returns:
            What of the memory did not fit.

        Raises:
            TypeError: no algorithm.
            ValueError: it cannot be served (named), or ranks ask for different things or are at
                different steps; on all ranks. Nothing has been changed then.
        """
        if why_not := self._why_not():
            raise ValueError(why_not)
        driver, difference = reconfigured(
            self._driver, algorithm, {"call": "reconfigure"}, in_buckets=self.in_buckets
        )
        self._use(driver)
        return difference

    def _use(self, driver: Driver) -> None:
        self._driver = driver

    def stats(self) -> Stats:
        """Steps, bytes and collectives since registration, times of the last steps, and how the
        error develops. On CUDA this waits for the device."""
        return self._driver.stats()

    def local_error_norm(self) -> float:
        """The 2-norm of the compression error so far on this rank, in units of gradients without a
        loss scale, a Python float. On CUDA the host waits."""
        return self._driver.local_error_norm()

    @contextmanager
    def measured(self) -> Iterator[Approximation]:
        """The next step is compared with a full average of the same gradients: how well does the
        algorithm do, and for which parameters?

            with handle.measured() as found:
                loss.backward()
            print(found.relative_error, found.by_parameter)

        To be entered on all ranks, round a whole backward pass. It costs a full average, one
        message for each parameter, and the memory of the gradients; neither `bytes_sent` nor the
        step itself knows of it. Of a model that is sharded it is about this rank's shard. With two
        levels the error of a node counts for all of its ranks.

        Warns:
            UserWarning: a step could not be measured, for want of memory for instance: once, when
                the context is left. The step is as it would have been, and `relative_error` None,
                or that of a step before.

        Raises:
            RuntimeError: some ranks have not entered within 10 minutes, or the timeout that the
                process group was given; a CUDA graph is being captured.
            ValueError: the handle is unregistered.
        """
        self._require_registered()
        with measuring(self._driver) as found:
            yield found

    @contextmanager
    def discarded(self) -> Iterator[None]:
        """Backward passes in this context leave no trace in the memory: for gradients that no
        optimizer will step with.

            with handle.discarded():
                generator_loss.backward()  # through the discriminator, whose gradients are dropped

        Gradients are averaged as usual, compressed with the factors that are there. But the error
        of the steps before is not added to them, the error of this step is not kept, and factors,
        phase and step stay as they are, bit for bit. `stats()` counts the bytes, and no step. The
        loss scale is not followed until the next step that counts.

        It takes memory for an error while the pass runs. Enter it on all ranks alike, round the
        whole backward pass: whether they do is not compared, since that would be a message. What
        ranks receive stays equal if they do not, but their steps and phases part.
        """
        with discarding(lambda: self._driver):
            yield

    def forget(self, names: str | Iterable[str] | None = None) -> None:
        """Set to zero the compression error so far: after a batch that should not have been, or
        before the model is used for something else. Factors and step stay. Call it on all ranks;
        one that does not sends its part later.

        Args:
            names: patterns (`fnmatch`) of the names of parameters, or one pattern; None: all.

        Raises:
            ValueError: a pattern matches no parameter. Nothing has been changed then.
        """
        self._driver.forget(names)

    def state_dict(self) -> dict[str, Any]:
        """The compressor memory of all ranks, for a checkpoint that any number of ranks can
        continue. Every rank calls this, and every rank receives the same: what tools that keep one
        rank's copy, or parts of each rank's, put together again.

        It is `gathered_state_dict("mean", to=None)`: with one copy of the error, the mean over the
        ranks. A run that continues from it follows the one that was not interrupted up to rounding
        if its method is linear (PowerSGD); TopK, Sign and Quantize need each rank's own error for
        that: `sharded_state`, `gathered_state_dict("all")` or `rank_state_dict`.

        Returns:
            Plain nested dictionaries of tensors on the CPU, numbers and strings, keyed by parameter
            name.

        Raises:
            RuntimeError: some ranks have not called it within 10 minutes, or the timeout that the
                process group was given.
        """
        return self._state_dict()

    def _state_dict(self, *, sliced: bool = False) -> dict[str, Any]:
        return self._driver.memory.whole(sliced=sliced)

    @property
    def sharded_state(self) -> ShardedState:
        """The memory of all ranks for `torch.distributed.checkpoint`, the mean error in slices, of
        which each rank has one; and each rank's own as an entry of its own, which nobody gathers.
        As many ranks go on bit for bit, another number from the mean.

            state = {"model": model.state_dict(), "compressor": handle.sharded_state}
            dcp.save(state, checkpoint_id=folder)
            ...
            dcp.load({"model": weights, "compressor": handle.sharded_state}, checkpoint_id=folder)
        """
        return ShardedState(self, lambda: self._driver.memory)

    def rank_state_dict(self) -> dict[str, Any]:
        """This rank's own compressor memory, copied where it is: to be saved by each rank, and
        loaded by the same rank of the same number of them. Communicates nothing. The run continues
        bit for bit."""
        return self._driver.memory.own()

    def gathered_state_dict(
        self, errors: str = "mean", to: int | None = 0
    ) -> dict[str, Any] | None:
        """The compressor memory of all ranks, in the portable form of
        `gradwire.core.state.checkpoint`: for a checkpoint that any number of ranks can continue, or
        JAX. Every rank calls this.

        Args:
            errors: "mean" keeps one copy of the compression error, the mean over the ranks, which
                is all that a linear method needs: a run that continues from it follows the one that
                was not interrupted up to rounding. "all" keeps that of every rank, W times as much:
                on the same number of ranks the run continues bit for bit.
            to: the rank that receives it, the others receive None; or None: all ranks do.

        Returns:
            Plain nested dictionaries of tensors on the CPU, and numbers.

        Raises:
            ValueError: an argument is none of these.
            RuntimeError: as `state_dict`.
        """
        return self._driver.memory.portable(errors, to)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> StateMismatch:
        """Continue from a `state_dict` or a `gathered_state_dict` of any number of ranks: each then
        takes its own error where there is one for each, and else the mean. Or from a
        `rank_state_dict` of the same rank.

        To be called on all ranks, with the same state. They compare it in the next backward pass,
        which raises a RuntimeError if they differ.

        Args:
            state: as it was given, or as `torch.load(weights_only=True)`, safetensors, orbax or JAX
                give it back.
            strict: raise if it is of another configuration, other parameters or other shapes.
                Otherwise take over what fits, leave the rest of the memory as it is, and log what
                was dropped. Use the same on all ranks.

        Returns:
            What did not fit: `if difference: print(difference)`.

        Raises:
            ValueError: it is no state, is another rank's, does not fit, or holds NaN or inf, said
                how; or after `unregister`. Nothing has been changed then.
        """
        if why_not := self._why_not():
            raise ValueError(why_not)
        return self._driver.load_state_dict(state, strict)
