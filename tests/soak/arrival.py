"""Replicas whose gradients arrive in random orders, over a network that is slow in random places:
the order contract of the drivers.

Every replica runs a `Reducer` and, for each bucket that it launches, a program of its own, as the
torch driver does: a bucket's first message goes out when the bucket is launched, everything after
it when the pass is over. A collective is a place in each replica's queue: it is done when all
replicas have come to that place, and the n-th entries of all queues must ask for the same. Which
replica goes on next is random. What comes out must be what the lock-step simulator makes of the
same gradients.
"""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from gradwire import AllReduce, Compressor, Simulator, assign_buckets
from gradwire.core.buckets.reducer import Reducer
from gradwire.core.protocol.control_requests import Branch, StepIsFinite
from gradwire.core.protocol.local_requests import LocalNorm, Multiply, Orthonormalize, WorldSize
from gradwire.core.simulate import NumpyOps
from tests.soak import draw
from tests.soak.histories import close, same_bits

STEPS = 12


class Network:
    """A queue of requests for each replica, each with its place."""

    def __init__(self, replicas):
        self.sent, self._answers = [[] for _ in range(replicas)], {}

    def send(self, replica, request):
        self.sent[replica].append(request)
        return len(self.sent[replica]) - 1

    def done(self, place):
        return all(len(queue) > place for queue in self.sent)

    def answer(self, replica, place):
        """Once all replicas have sent, who must have sent the same kind of thing: the answers, and
        whether they were finite."""
        if place not in self._answers:
            asked = [queue[place] for queue in self.sent]
            said = [request.describe() for request in asked]
            assert len(set(said)) == 1, (
                f"message {place} is {said[0]} for some and not for others: {said}"
            )
            world = SimpleNamespace(finite=True, give=lambda arrays: None)
            self._answers[place] = type(asked[0]).simulate(asked, world), world
        answers, world = self._answers[place]
        return answers[replica], world.finite


class Group:
    """A bucket that has been launched, and its program."""

    def __init__(self, program, replicas):
        self.stack, self.replicas = [program], replicas
        self.result = None
        self.place = None  # of the message that it waits for
        self.at_barrier = False
        self.norm = None

    def advance(self, answers):
        while True:
            try:
                request = self.stack[-1].send(answers)
            except StopIteration as stop:
                self.stack.pop()
                if not self.stack:
                    self.result = stop.value
                    return None
                answers = (stop.value,)
                continue
            if isinstance(request, Multiply | Orthonormalize):
                answers = request.answer()
            elif isinstance(request, WorldSize):
                answers = (self.replicas,)
            elif isinstance(request, Branch):
                self.stack.append(
                    (request.then if request.predicate else request.otherwise)(*request.operands)
                )
                answers = None
            else:
                return request

    def close(self):
        for program in reversed(self.stack):
            program.close()


class Replica:
    """One process of a training."""

    def __init__(self, number, algorithm, simulator, buckets):
        self.number, self.algorithm, self.ops = number, algorithm, NumpyOps()
        self.names = list(simulator.specs)
        self.reducer = Reducer(self.names, buckets)
        self.state = simulator.states[number].map(np.array)
        self.given = {}
        self.launched = []
        self.groups = []

    def accumulate(self, order):
        """A pass that only adds up."""
        assert self.reducer.begin(accumulating=True) == []
        assert [self.reducer.ready(i) for i in order] == [[]] * len(order)
        assert self.reducer.end() == []

    def backward(self, network, gradients, order, unused, step):
        """One pass. Between any two gradients another replica may have its turn; yields the place
        of a message that it waits for, or None."""
        self.launched, self.groups, self.given = [], [], {}
        told = unused[::2]  # the other ones are found to be unused in the end
        self._launch(network, self.reducer.begin(told), gradients, step)
        self._require_launched({*told})
        for number, i in enumerate(order):
            yield None
            self._launch(network, self.reducer.ready(i), gradients, step)
            self._require_launched({*told, *order[: number + 1]})
        yield None
        assert sorted(self.reducer.missing()) == sorted({*unused} - {*told})
        self._launch(network, self.reducer.end(missing_are_unused=told != unused), gradients, step)
        self._require_launched({*range(len(self.names))})
        assert self.reducer.arrived == order
        assert self.reducer.arrival_order()[: len(order)] == order
        assert sorted(self.reducer.arrival_order()) == [*range(len(self.names))]
        finite = True
        while any(g.result is None for g in self.groups):
            sending = [g for g in self.groups if g.place is not None]
            for group in sending:
                while not network.done(group.place):
                    yield group.place
                answers, good = network.answer(self.number, group.place)
                finite = finite and good
                self._advance(network, group, answers)
            norms = [(g, g.norm) for g in self.groups if g.norm is not None]
            for group, _ in norms if not sending else ():
                self._advance(network, group, (self.ops.norm_of_all([norm for _, norm in norms]),))
            if not sending and not norms:
                for group in self.groups:
                    if group.at_barrier:
                        self._advance(network, group, (np.asarray(finite),))
        for group in self.groups:
            averages, state = group.result
            self.given |= averages
            self.state.shared |= state.shared
            self.state.tensors |= state.tensors

    def _require_launched(self, settled):
        """All buckets that may be, and no other: those before the first that waits for a
        gradient."""
        may = itertools.takewhile(lambda bucket: settled.issuperset(bucket), self.reducer.buckets)
        assert self.launched == [k for k, _ in enumerate(may)], (
            "a bucket was launched too late, or too early"
        )

    def abandon(self):
        """The pass has failed somewhere."""
        self.reducer.abandon()
        for group in self.groups:
            group.close()

    def _launch(self, network, buckets, gradients, step):
        for k in buckets:
            self.launched.append(k)
            mine = {self.names[i]: gradients[self.names[i]].copy() for i in self.reducer.buckets[k]}
            state = self.state.of(mine).map(np.array)  # donated, and a pass may fail
            self.groups.append(
                Group(self.algorithm.step(self.ops, mine, state, step), len(network.sent))
            )
            self._advance(network, self.groups[-1], None)

    def _advance(self, network, group, answers):
        group.place, group.at_barrier, group.norm = None, False, None
        request = group.advance(answers)
        if isinstance(request, StepIsFinite):
            group.at_barrier = True
        elif isinstance(request, LocalNorm):
            group.norm = self.ops.norm_of_all(request.arrays)
        elif request is not None:
            group.place = network.send(self.number, request)


def run(seed):
    """One history. Returns the number of steps; raises AssertionError if something does not
    hold."""
    rng = random.Random(seed)
    shapes = draw.shapes(rng)
    algorithm = draw.algorithm(rng) if rng.random() < 0.5 else AllReduce()
    if isinstance(algorithm, Compressor) and rng.random() < 0.3:
        # whose norm all programs of a step have to make together
        algorithm = replace(algorithm, max_norm=3.0)
    stream = draw.Gradients(shapes, seed)
    simulator = Simulator(algorithm, shapes, draw.replicas(rng, least=2))
    sizes = [spec.nbytes for spec in simulator.specs.values()]
    limits = [rng.choice([0, 64, 256, 1024]), rng.choice([0, 128, 512, 1 << 20])]
    buckets = assign_buckets(sizes, limits)[::-1]
    replicas = [Replica(r, algorithm, simulator, buckets) for r in range(len(simulator.states))]
    for _ in range(STEPS):
        if rng.random() < 0.2:  # buckets in the order in which the first replica's gradients came
            order = replicas[0].reducer.arrival_order()
            for each in replicas:
                each.reducer.rebuild(assign_buckets(sizes, limits, order=order))
        if rng.random() < 0.2:
            rng.choice(replicas).accumulate(rng.sample(range(len(shapes)), len(shapes)))
        gradients = stream.of(len(replicas), list(shapes))
        unused = [[i for i in range(len(shapes)) if rng.random() < 0.1] for _ in replicas]
        for mine, missing in zip(gradients, unused, strict=True):
            mine |= {name: np.zeros(shapes[name]) for i, name in enumerate(shapes) if i in missing}
        if rng.random() < 0.15:
            stream.spoil(rng, gradients)
        one_step(rng, simulator, replicas, gradients, unused)
    return STEPS


def one_step(rng, simulator, replicas, gradients, unused):
    network = Network(len(replicas))
    running = []
    for replica, mine, missing in zip(replicas, gradients, unused, strict=True):
        order = [i for i in range(len(mine)) if i not in missing]
        rng.shuffle(order)
        running.append(replica.backward(network, mine, order, missing, simulator.steps))
    if rng.random() < 0.1:  # somebody fails: nobody's memory has changed, and the step is repeated
        before = [replica.state.map(np.array) for replica in replicas]
        interleave(rng, network, running, turns=rng.randrange(40))
        for replica, program, old in zip(replicas, running, before, strict=True):
            program.close()
            if not replica.given:
                replica.abandon()
                assert same_bits(replica.state, old), "a pass that failed has changed a memory"
            else:
                # it had come to its end already; its process, too, goes back to the last checkpoint
                replica.state = old
        one_step(rng, simulator, replicas, gradients, unused)
        return
    interleave(rng, network, running)
    assert all(
        replica.launched == list(range(len(replica.reducer.buckets))) for replica in replicas
    )
    assert len({len(queue) for queue in network.sent}) == 1
    expected = simulator.step(gradients)
    for replica, state in zip(replicas, simulator.states, strict=True):
        for name, average in expected.items():
            same = replica.given[name].tobytes() == replicas[0].given[name].tobytes()
            assert same or np.array_equal(
                replica.given[name], replicas[0].given[name], equal_nan=True
            ), f"{name} differs"
            close(name, replica.given[name], average)
        for name, memory in state.tensors.items():
            for key, right in memory.items():
                close(f"{key} of {name}", replica.state.tensors[name][key], right)
        # The same history from here on, whatever rounding a bucket has caused.
        replica.state = state.map(np.array)


def interleave(rng, network, running, turns=None):
    """Give the replicas their turns at random, until all have ended or so many turns have been
    taken."""
    waiting = dict.fromkeys(range(len(running)))
    # some gradients hold inf or NaN
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        while waiting and turns != 0:
            able = [r for r, place in waiting.items() if place is None or network.done(place)]
            assert able, f"a deadlock: replicas {list(waiting)} wait, and nobody sends"
            replica = rng.choice(able)
            try:
                waiting[replica] = next(running[replica])
            except StopIteration:
                del waiting[replica]
            turns = None if turns is None else turns - 1
