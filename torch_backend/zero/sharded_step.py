"""The driver of `Zero`: one program per bucket, few of them with messages in flight, all in one
order on all ranks.

A bucket's reduce-scatter is launched when its gradients arrive, and awaited when those of the next
bucket do. Then either everything waits for the last bucket, and the optimizer steps once; or
(`interleaved`) a bucket's owners update it at once, and its new parameters travel while the
backward pass goes on. What is launched when is a function of the order of the buckets alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.algorithm import State
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.zero.sharded_step import Zero
from gradwire.torch_backend.cpu.compiled import CODES, loops_for
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.cuda_graphs import refuse_capture
from gradwire.torch_backend.engine.driver import specs_of
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.engine.scheduler import Step
from gradwire.torch_backend.monitor.timers import Moment
from gradwire.torch_backend.ops.kernels import TorchOps

#: Messages in flight together: one on the wire, and one that is being packed or unpacked. More
#: would only cost memory.
IN_FLIGHT = 2
#: A parameter of so many bytes is a message of its own, which travels from where it lies; smaller
#: ones are packed together.
LARGE = 4 << 20


class ShardedStep:
    """One step of a sharded optimizer on one rank: the program of `zero` overwrites the parameters.
    `collectives` have counted what was sent, and their `times` say how long it took, without the
    optimizer's own work. `steps` have come to their end.

    Args:
        optimize: (gradients of the owned pieces, whether to step at all) → new values of the
            pieces.
        wire: in what gradients travel to their owners. None: as they are.
        interleaved: update each bucket as soon as its gradients are averaged.
    """

    def __init__(
        self,
        zero: Zero,
        parameters: Mapping[str, Tensor],
        optimize: Callable[[dict[str, Tensor], bool], dict[str, Tensor]],
        process_group: dist.ProcessGroup,
        *,
        wire: WireDtype | None = None,
        interleaved: bool = False,
    ) -> None:
        self._zero = zero
        self._wire = wire
        self._parameters = parameters
        self._optimize = optimize
        self._interleaved = interleaved
        self._stepped = True
        self._started: Moment = None
        self.steps = 0
        ops = TorchOps(next(iter(parameters.values())).device)
        ops.loops = loops_for(wire, specs_of(parameters), ops.device, CODES)
        self.collectives = Collectives(ProcessGroups(process_group), ops)
        self._buckets = Step(
            self.collectives, optimize=self._update, in_flight=IN_FLIGHT, update_at_once=interleaved
        )

    def begin(self) -> None:
        """Drop whatever a step that never came to its end has left behind."""
        refuse_capture(
            "A sharded optimizer, whose learning rate and count of steps are the host's,"
        )
        self._buckets.begin()
        self.collectives.times.begin()

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Take the gradients of a bucket, which are overwritten. The same buckets in the same order
        on all ranks."""
        self._started = self.collectives.times.now()
        with torch.no_grad():
            for names in _by_message(gradients):
                own = {name: gradients[name] for name in names}
                out = {name: self._parameters[name] for name in names}
                program = self._zero.step(self.collectives.ops, own, State(), 0, out)
                if self._wire is not None:
                    program = self._wire.carried(self.collectives.ops, program, names[0], 0)
                self._buckets.start(program)
        self.collectives.times.worked(self._started)

    def finish(self) -> bool:
        """End the step. Returns whether the optimizer stepped: False if a rank's gradients held inf
        or NaN and that is looked for."""
        self._stepped = True
        times = self.collectives.times
        self._started = times.now()
        with torch.no_grad():
            self._buckets.finish()
            self._buckets.begin()
        times.worked(self._started)
        times.end()
        self.steps += 1
        return self._stepped

    def _update(
        self, asked: Sequence[tuple[dict[str, Tensor], Tensor | None]]
    ) -> list[dict[str, Tensor]]:
        """What the optimizer makes of the pieces of some buckets."""
        ok = asked[0][1]  # the same answer for all of them
        self._stepped = ok is None or bool(ok)
        everything = {name: gradient for pieces, _ in asked for name, gradient in pieces.items()}
        if self._interleaved:
            for name in everything:
                # Messages write into parameters behind autograd's back. A node that still needs the
                # old value must notice.
                torch.autograd.graph.increment_version(self._parameters[name])
        times = self.collectives.times
        times.worked(self._started)  # up to here; what follows is the optimizer's
        new = self._optimize(everything, self._stepped)
        self._started = times.now()
        return [{name: new[name] for name in pieces} for pieces, _ in asked]


def _by_message(gradients: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of what travels together."""
    small = [name for name, g in gradients.items() if g.nbytes < LARGE]
    large = [[name] for name, g in gradients.items() if g.nbytes >= LARGE]
    return [*large, small] if small else large
