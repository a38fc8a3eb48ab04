"""Replicas whose gradients arrive in random orders, over a network that is slow in random places: the order contract of the drivers.

Every replica runs a `Reducer` and, for each bucket that it launches, a program of its own, as the torch driver does: a bucket's first message
goes out when the bucket is launched, everything after it when the pass is over. A collective is a place in each replica's queue: it is done
when all replicas have come to that place, and the n-th entries of all queues must ask for the same. Which replica goes on next is random. What
comes out must be what the lock-step simulator makes of the same gradients.
"""

import random
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np

from gradwire import AllReduce, Compressor, Simulator, assign_buckets
from gradwire.core.buckets.reducer import Reducer
from gradwire.core.requests import Branch, LocalNorm, Orthonormalize, Reduce, StepIsFinite
from gradwire.core.simulate import NumpyOps
from tests.soak import draw
from tests.soak.checks import close, same_bits

__all__ = ["Network", "Replica", "run"]

NDArray = np.ndarray[Any, Any]
STEPS = 12

#: A replica that runs: yields True if it can go on whenever it likes, or the message that it waits for.
Running = Generator["bool | Message", None, None]


class Network:
    """A queue of messages for each replica."""

    def __init__(self, replicas):
        self.sent = [[] for _ in range(replicas)]
        self._averages = {}

    def send(self, replica, request):
        message = Message(self, len(self.sent[replica]), request)
        self.sent[replica].append(message)
        return message

    def answer(self, place):
        """The averages, once all replicas have sent; they must have sent the same kind of thing."""
        if place not in self._averages:
            self._averages[place] = self._average(place)
        return [x.copy() for x in self._averages[place]]

    def _average(self, place):
        requests = [queue[place].request for queue in self.sent]
        shapes = [[x.shape for x in r.arrays] for r in requests]
        assert all(s == shapes[0] for s in shapes), (
            f"message {place} is {shapes[0]} for some and not for others: {shapes}"
        )
        return [np.asarray(sum(r.arrays[i] / len(requests) for r in requests)) for i in range(len(shapes[0]))]


class Message:
    def __init__(self, network, place, request):
        self.network, self.place, self.request = network, place, request

    @property
    def done(self):
        return all(len(queue) > self.place for queue in self.network.sent)

    def answer(self):
        return self.network.answer(self.place)


class Group:
    """A bucket that has been launched, and its program."""

    def __init__(self, program):
        self.stack = [program]
        self.result = None
        self.message = None
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
            if isinstance(request, Orthonormalize):
                answers = request.answer()
            elif isinstance(request, Branch):
                self.stack.append((request.then if request.predicate else request.otherwise)(*request.operands))
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
        """One pass. Between any two gradients another replica may have its turn."""
        self.launched, self.groups, self.given = [], [], {}
        self._launch(network, self.reducer.begin(unused), gradients, step)
        for i in order:
            yield True
            self._launch(network, self.reducer.ready(i), gradients, step)
        yield True
        self._launch(network, self.reducer.end(), gradients, step)
        finite = True
        while any(g.result is None for g in self.groups):
            sending = [g for g in self.groups if g.message]
            for group in sending:
                assert group.message is not None
                while not group.message.done:
                    yield group.message
                answers = group.message.answer()
                if group.message.request.watched:
                    finite = finite and all(bool(np.isfinite(x).all()) for x in answers)
                self._advance(network, group, tuple(answers))
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
            self.groups.append(Group(self.algorithm.step(self.ops, mine, state, step)))
            self._advance(network, self.groups[-1], None)

    def _advance(self, network, group, answers):
        group.message, group.at_barrier, group.norm = None, False, None
        request = group.advance(answers)
        if isinstance(request, Reduce):
            group.message = network.send(self.number, request)
        elif isinstance(request, StepIsFinite):
            group.at_barrier = True
        elif isinstance(request, LocalNorm):
            group.norm = self.ops.norm_of_all(request.arrays)


def run(seed):
    """One history. Returns the number of steps; raises AssertionError if something does not hold."""
    rng = random.Random(seed)
    shapes = draw.shapes(rng)
    algorithm = draw.algorithm(rng) if rng.random() < 0.5 else AllReduce()
    if isinstance(algorithm, Compressor) and rng.random() < 0.3:
        algorithm = replace(algorithm, max_norm=3.0)  # whose norm all programs of a step have to make together
    stream = draw.Gradients(shapes, seed)
    simulator = Simulator(algorithm, shapes, draw.replicas(rng, least=2))
    sizes = [spec.nbytes for spec in simulator.specs.values()]
    limits = [rng.choice([0, 64, 256, 1024]), rng.choice([0, 128, 512, 1 << 20])]
    replicas = [
        Replica(r, algorithm, simulator, assign_buckets(sizes, limits)[::-1]) for r in range(len(simulator.states))
    ]
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
        interleave(rng, running, turns=rng.randrange(40))
        for replica, program, old in zip(replicas, running, before, strict=True):
            program.close()
            if not replica.given:
                replica.abandon()
                assert same_bits(replica.state, old), "a pass that failed has changed a memory"
            else:  # it had come to its end already; its process, too, goes back to the last checkpoint
                replica.state = old
        one_step(rng, simulator, replicas, gradients, unused)
        return
    interleave(rng, running)
    assert all(replica.launched == list(range(len(replica.reducer.buckets))) for replica in replicas)
    assert len({len(queue) for queue in network.sent}) == 1
    expected = simulator.step(gradients)
    for replica, state in zip(replicas, simulator.states, strict=True):
        for name, average in expected.items():
            same = replica.given[name].tobytes() == replicas[0].given[name].tobytes()
            assert same or np.array_equal(replica.given[name], replicas[0].given[name], equal_nan=True), (
                f"{name} differs"
            )
            close(name, replica.given[name], average)
        for name, memory in state.tensors.items():
            for key, right in memory.items():
                close(f"{key} of {name}", replica.state.tensors[name][key], right)
        # The same history from here on, whatever rounding a bucket has caused.
        replica.state = state.map(np.array)


def interleave(rng, running, turns=None):
    """Give the replicas their turns at random, until all have ended or so many turns have been taken."""
    with np.errstate(invalid="ignore", over="ignore"):  # some gradients hold inf or NaN
        _interleave(rng, running, turns)


def _interleave(rng, running, turns):
    waiting = dict.fromkeys(range(len(running)))
    while waiting and turns != 0:
        able = [r for r, message in waiting.items() if message is None or message.done]
        assert able, f"a deadlock: replicas {list(waiting)} wait, and nobody sends"
        replica = rng.choice(able)
        try:
            now = next(running[replica])
            waiting[replica] = now if isinstance(now, Message) else None
        except StopIteration:
            del waiting[replica]
        turns = None if turns is None else turns - 1
