"""Which method averages the next step of a training, by the times of the steps before: pure
decisions, without a clock, a message or a framework.

    chooser = Chooser(candidates=3)
    method = chooser.advance()           # of the next step, 0 is uncompressed averages
    ...                                  # the step: if chooser.timed, its time counts
    if chooser.shared:                   # the mean of what has been timed since is told to all
        chooser.observe(seconds)         # that of the slowest one, any number of steps later

Whoever gives equal times receives equal methods, so replicas that observe the same choose the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import takewhile
from statistics import median, median_low
from typing import NamedTuple

from gradwire.core.advise.choosing.bursts import Bursts
from gradwire.core.advise.choosing.paired_test import PairedTest

#: Of two methods the one whose steps take so many times as long is put aside after two of them.
FAR = 1.5
#: Timed steps of the first look at a method, and of either one in each round of a trial. The first
#: after a change of the method is not timed, nor are so many at the very beginning.
SCREENED, PAIRS, SETTLING = 2, 4, 2
#: Rounds of a trial at most, while others have had none, and later: of a method that looks faster,
#: or takes less than so many times as long, which costs next to nothing. Of any other it is one.
FEW_ROUNDS, MOST_ROUNDS, NEAR = 6, 12, 1.03
#: What trials may cost in all: so many steps of the chosen method, and this share of all time.
STEPS_FOR_TRIALS, SHARE_FOR_TRIALS = 10, 0.006
#: Steps between trials at first, which double; and the seconds between them at most.
FIRST_GAP, LONGEST_GAP = 32, 3600.0
#: Steps of the chosen method for which one time is told, and so many times are remembered.
WINDOW, WINDOWS = 4, 12
#: The network has become another one if windows that follow each other differ from the others, in
#: the logarithm, by so many of their usual differences; by one of these at least, and at most.
FEW, LEAST, OTHER = 7.0, 0.05, 0.14
#: Networks that are remembered.
NETWORKS = 4
#: Windows in a row at first, and so many times as many after each time in the same direction. One
#: that is n times as far off as the most that may pass for noise counts n times, so that patience
#: with noise is none with another network.
PATIENCE, MORE_PATIENCE = 2, 4


class Change(NamedTuple):
    """Another method is chosen from this step on. `seconds` and `before`: of a step of it, and of
    the one before."""

    step: int
    method: int
    seconds: float
    before: float


class _Round(NamedTuple):
    """The methods of some steps, which of the steps are timed, and after which ones the median of
    the times is shared."""

    methods: Sequence[int]
    timed: Sequence[bool]
    shared: Sequence[bool]


class _Network(NamedTuple):
    """The fastest method in a network, and the seconds of a step of all that were tried there."""

    fastest: int
    seconds: dict[int, float]


#: What was observed of a round: seconds, or None where there was a pause.
Seconds = list[float | None]


class Chooser:
    """Finds the fastest of some methods while a training goes on.

    First uncompressed averages are timed. Each other method then has a *trial* against the chosen
    one: two timed steps, after which the slower one is put aside if it takes 1.5 times as long;
    four more of either, and it is chosen if a sequential test finds it faster (`paired_test`: an
    error rate of 5 % for each trial). Two steps are no test: where they err, a later trial finds
    out. The fastest of the rest and uncompressed averages have trials in turn, after 32 steps, 64,
    128, …, up to an hour. Where nobody can tell, evidence is kept for the next one. If steps of the
    chosen method begin to take another time by themselves, in a trial too, everything may have
    changed, and all have trials again; unless they take what they took in a network that was there
    before: then its fastest method is chosen.

    Bursts, in which steps take longer for a while, count by what they add to a step in the long run
    (`Bursts`). After one, whoever would be faster with that has a trial.

    Trials cost what their slower steps take longer. One is put off while all of them would cost
    more than ten steps of the chosen method and 0.6 % of the training so far. The ten are counted
    anew when a trial has found a faster method, and where steps begin to take 1.5 times as long, or
    two thirds of it.

    Args:
        candidates: so many methods, in the order of their trials. The first are uncompressed
            averages.
        chosen, step: where a training goes on: its method, and the number of the next step.

    Attributes:
        chosen: the method that is chosen, whatever trials go on.
        changes: of that.
        timed, shared: of the step that `advance` was called for last: whether its time counts;
            whether times are to be told after it, and observed.
        trial: for so many steps, with that one, its method stays without being chosen. 0: it is.
    """

    def __init__(self, candidates: int, chosen: int = 0, step: int = 0) -> None:
        self.chosen = chosen
        self.changes: list[Change] = []
        self.timed = self.shared = False
        self.trial = 0
        self._step = step
        self._seconds: dict[int, float] = {}  # of a step of each, by its last trial
        self._untried = [method for method in range(candidates) if method != chosen]
        self._aside: set[int] = set()
        self._tests: dict[int, PairedTest] = {}  # against the chosen one
        self._windows: deque[float] = deque(maxlen=WINDOWS)
        self._departed, self._patience = 0.0, {1: PATIENCE, -1: PATIENCE}
        self._bursts, self._burst, self._hit = Bursts(), 0.0, False
        self._networks: deque[_Network] = deque(maxlen=NETWORKS)
        self._since, self._gap, self._turn = 0, FIRST_GAP, 0
        self._elapsed = self._spent = 0.0
        self._program = self._decisions()
        self._upcoming: deque[tuple[int, bool, bool]] = deque()
        self._awaited = 0
        self._observed: Seconds = []
        self._begin(next(self._program))

    def advance(self) -> int:
        """The method of the next step."""
        self._step += 1
        self._since += 1
        idle = self.chosen, False, False  # what decides what follows is on its way
        method, self.timed, self.shared = self._upcoming.popleft() if self._upcoming else idle
        same = takewhile(lambda step: step[0] == method, self._upcoming)
        self.trial = 0 if method == self.chosen else 1 + len(list(same))
        return method

    def observe(self, seconds: float | None) -> None:
        """Take what was told after the first shared step that was not observed yet.

        Args:
            seconds: of a step on the slowest replica; None: it does not count.
        """
        self._observed.append(seconds)
        self._awaited -= 1
        if self._awaited == 0 and not self._upcoming:
            observed, self._observed = self._observed, []
            self._begin(self._program.send(observed))

    def _begin(self, following: _Round) -> None:
        self._upcoming.extend(zip(*following, strict=True))
        self._awaited = sum(following.shared)

    # --- what is decided

    def _decisions(self) -> Generator[_Round, Seconds, None]:
        first = yield _steps(self.chosen, SETTLING, SCREENED)
        self._note(self.chosen, first)
        while True:
            rival = self._less_hit()
            rival = (
                rival if rival is not None else next(filter(self._affordable, self._rivals()), None)
            )
            if rival is not None:
                yield from self._trial(rival)
            else:
                yield from self._watch()

    def _rivals(self) -> Iterator[int]:
        """Those that may have a trial now, the first of them first."""
        if self._departed:  # a burst, or another network: what is measured now is of neither
            return
        known = {method: self._mean(method) for method in self._seconds if method != self.chosen}
        yield from self._untried
        if self._since < self._gap:
            return
        rest = {method: s for method, s in known.items() if method not in self._aside}
        rivals = [
            min(each, key=lambda method: (each[method], method)) for each in (rest, known) if each
        ][:1]
        if self.chosen != 0 and 0 in known and 0 not in rivals:
            rivals.append(0)
        turn = self._turn % len(rivals) if rivals else 0
        yield from (*rivals[turn:], *rivals[:turn])

    def _less_hit(self) -> int | None:
        """Who would be faster in the long run after a burst, by what is known of bursts. That pays
        for a trial."""
        if not self._hit or self._departed:
            return None
        self._hit = False
        best = min(self._seconds, key=lambda method: (self._mean(method), method))
        return best if best != self.chosen else None

    def _mean(self, method: int) -> float:
        """Seconds of a step of a method, with what bursts add to it."""
        return self._seconds[method] + self._bursts.per_step(method)

    def _affordable(self, rival: int) -> bool:
        own = self._seconds.get(self.chosen)
        if own is None:  # nothing was timed yet
            return True
        longer = max(0.0, self._seconds[rival] - own) if rival in self._seconds else (FAR - 1) * own
        steps = SCREENED + 1 if longer >= (FAR - 1) * own else SCREENED + PAIRS + 2
        return (
            self._spent + steps * longer
            <= STEPS_FOR_TRIALS * own + SHARE_FOR_TRIALS * self._elapsed
        )

    def _trial(self, rival: int) -> Generator[_Round, Seconds, None]:
        own, spent, usual = self.chosen, self._spent, self._usual
        if rival in self._untried:
            self._untried.remove(rival)
        theirs = yield _steps(rival, 1, SCREENED)
        self._account(rival, theirs, own, [])
        winner, way = self._far_ahead(rival, theirs), 0
        if winner == own:
            way = _far_off((yield _steps(own, 0, SCREENED)), usual, any)
        elif winner is None:
            ours = yield _steps(own, 1, SCREENED)
            rounds = 0
            while (
                not (way := _far_off(ours, usual, all))
                and (winner := self._compared(rival, theirs, own, ours)) is None
                and rounds < self._rounds(rival)
            ):
                seconds = yield _both(rival, own, PAIRS)
                theirs, ours, rounds = seconds[:PAIRS], seconds[PAIRS:], rounds + 1
        if usual is not None:  # what would be more was a burst, or another network
            self._spent = min(self._spent, spent + STEPS_FOR_TRIALS * usual)
        if way:
            # So it may be here. What comes next tells, before any trial.
            self._spent, self._departed, winner = spent, float(way), None
            self._forget(rival)
        self._end_trial(rival, winner)

    def _far_ahead(self, rival: int, seconds: Seconds) -> int | None:
        """Whoever takes so much less time that two steps suffice; the other is put aside."""
        own, usual = self.chosen, self._usual
        known = [s + self._bursts.per_step(rival) for s in seconds if s is not None]
        if usual is None or len(known) < SCREENED:
            return None
        usual += self._bursts.per_step(own)
        if all(s >= FAR * usual for s in known):
            self._aside.add(rival)
            return own
        if all(FAR * s <= usual for s in known):
            self._aside.add(own)
            return rival
        return None

    @property
    def _usual(self) -> float | None:
        """Seconds of a step of the chosen method, which a burst does not change."""
        return median(self._windows) if len(self._windows) >= 2 else self._seconds.get(self.chosen)

    def _compared(self, rival: int, theirs: Seconds, own: int, ours: Seconds) -> int | None:
        """What the test says with these steps too."""
        self._account(rival, theirs, own, ours)
        test = self._tests.setdefault(rival, PairedTest())
        # Of one round the k-th of theirs and the next of ours are even steps both, or odd ones.
        for a, b in zip(theirs, [*ours[1:], *ours[:1]], strict=True):
            if a is not None and b is not None:
                test.add(a + self._bursts.per_step(rival), b + self._bursts.per_step(own))
        return None if test.faster == 0 else rival if test.faster > 0 else own

    def _rounds(self, rival: int) -> int:
        """How many a trial may have: more where they cost next to nothing."""
        found = self._seconds
        looks_near = (
            rival in found
            and self.chosen in found
            and self._mean(rival) < NEAR * self._mean(self.chosen)
        )
        return (FEW_ROUNDS if self._untried else MOST_ROUNDS) if looks_near else 1

    def _end_trial(self, rival: int, winner: int | None) -> None:
        self._since, self._turn = 0, self._turn + 1
        self._gap = min(
            2 * self._gap, max(FIRST_GAP, int(LONGEST_GAP / self._seconds.get(self.chosen, 1.0)))
        )
        if winner is not None:
            self._tests.pop(rival, None)  # what has been decided is no evidence for the next time
        if winner == rival:
            self._choose(rival)
            self._allow_trials()

    def _choose(self, method: int) -> None:
        before = self._seconds[self.chosen] = self._usual or self._seconds[self.chosen]
        self.changes.append(Change(self._step, method, self._seconds[method], before))
        self.chosen, self._gap = method, FIRST_GAP * len(self.changes)
        self._patience[1] = PATIENCE  # a method that is new may be the wrong one
        self._aside.discard(method)
        self._tests.clear()
        self._windows.clear()
        self._departed = 0.0

    def _watch(self) -> Generator[_Round, Seconds, None]:
        """Some steps of the chosen method, of which one time is told."""
        (seconds,) = yield _Round(
            [self.chosen] * WINDOW, [True] * WINDOW, [False] * (WINDOW - 1) + [True]
        )
        if seconds is None:
            return
        self._elapsed += WINDOW * seconds
        self._bursts.watched(WINDOW)
        usual = self._usual
        way = 0 if usual is None else self._departs(seconds, usual)
        if way and usual is not None:
            times = max(1.0, abs(math.log(seconds / usual)) / OTHER)
            far = way * min(times, self._patience[way] / PATIENCE)
            self._departed = self._departed + far if way * self._departed >= 0 else far
        if way > 0 and usual is not None:
            self._burst += WINDOW * (seconds - usual)
        elif way == 0:
            self._burst_ended()
        if way == 0 or usual is None:
            self._departed = 0.0
            self._windows.append(seconds)
            self._seconds[self.chosen] = median(self._windows)
        elif abs(self._departed) >= self._patience[way]:
            self._departed = 0.0
            fresh = [s for s in (yield _steps(self.chosen, 0, SCREENED)) if s is not None]
            if fresh and self._departs(median(fresh), usual) == way:  # else it was a burst
                self._another_network(median(fresh), way)
            elif way > 0:
                self._burst_ended()

    def _departs(self, seconds: float, usual: float) -> int:
        """1: it takes longer than usual, beyond the noise that was seen; -1: less; 0: about as
        long."""
        noise = (
            median(abs(math.log(each / usual)) for each in self._windows)
            if self._windows
            else math.inf
        )
        difference = math.log(seconds / usual)
        return (
            0
            if abs(difference) <= min(max(FEW * noise, LEAST), OTHER)
            else 1
            if difference > 0
            else -1
        )

    def _burst_ended(self) -> None:
        if self._burst > 0:
            self._bursts.ended(self.chosen, self._burst)
            self._burst, self._hit = 0.0, True
            if self._bursts.count.bit_count() == 1:
                self._doubt()

    def _doubt(self) -> None:
        """Bursts are seldom seen while a method has a trial: whatever looked slow has another
        one."""
        own = self._seconds[self.chosen]
        for method in [m for m, s in self._seconds.items() if m != self.chosen and s >= FAR * own]:
            self._forget(method)

    def _forget(self, method: int) -> None:
        self._aside.discard(method)
        self._seconds.pop(method, None)
        if method not in self._untried:
            self._untried.append(method)

    def _another_network(self, seconds: float, way: int) -> None:
        """The chosen method takes so long now: go on as in a network that was there before, or
        measure all anew."""
        own = self.chosen
        alike = (
            n
            for n in reversed(self._networks)
            if own in n.seconds and abs(math.log(seconds / n.seconds[own])) <= LEAST
        )
        known = next(alike, None)
        self._networks.append(_Network(own, dict(self._seconds)))
        far = abs(math.log(seconds / self._seconds[own])) >= math.log(FAR)
        self._begin_anew(seconds)
        if known is None:
            self._patience[way] *= MORE_PATIENCE
            if far:
                self._allow_trials()
            return
        self._seconds = {**known.seconds, own: seconds}
        self._untried = [method for method in self._untried if method not in known.seconds]
        if known.fastest != own:
            self._choose(known.fastest)

    def _allow_trials(self) -> None:
        """What trials have cost by now is no reason against the next ones: what was found has paid
        for it, or it was another network beyond doubt."""
        self._spent = min(self._spent, SHARE_FOR_TRIALS * self._elapsed)

    def _begin_anew(self, seconds: float) -> None:
        """All methods have trials again, the fastest so far first: what is known of them is of
        another network."""
        known = {method: s for method, s in self._seconds.items() if method != self.chosen}
        rest = [method for method in self._untried if method not in known]
        self._untried = [*sorted(known, key=lambda method: (known[method], method)), *rest]
        self._seconds = {self.chosen: seconds}
        self._gap = FIRST_GAP
        self._windows.clear()
        self._tests.clear()
        self._aside.clear()
        self._burst = 0.0

    # --- times

    def _note(self, method: int, seconds: Seconds) -> None:
        known = [s for s in seconds if s is not None]
        if known:
            # a burst makes steps longer, and nothing makes them shorter
            self._seconds[method] = median_low(known)
            self._elapsed += sum(known)

    def _account(self, rival: int, theirs: Seconds, own: int, ours: Seconds) -> None:
        """Note times, and what they have cost; a step that is not timed comes before them."""
        self._note(rival, theirs)
        self._note(own, ours)
        if rival in self._seconds and own in self._seconds:
            longer = self._seconds[rival] - self._seconds[own]
            longest = STEPS_FOR_TRIALS * self._seconds[own]  # a burst would be more
            self._spent += min(
                longest, max(longer * (len(theirs) + 1), -longer * (len(ours) + 1) if ours else 0.0)
            )


def _steps(method: int, settling: int, timed: int) -> _Round:
    counts = [False] * settling + [True] * timed
    return _Round([method] * len(counts), counts, counts)


def _far_off(seconds: Seconds, usual: float | None, which: Callable[[Iterable[bool]], bool]) -> int:
    """1: any, or all, of the steps of a method take far longer than is usual for it; -1: they take
    far less."""
    known = [s for s in seconds if s is not None]
    if usual is None or not known:
        return 0
    if which(s >= FAR * usual for s in known):
        return 1
    return -1 if all(FAR * s <= usual for s in known) else 0


def _both(rival: int, own: int, timed: int) -> _Round:
    """Steps of either method, of which the first is not timed."""
    a, b = _steps(rival, 1, timed), _steps(own, 1, timed)
    return _Round([*a.methods, *b.methods], [*a.timed, *b.timed], [*a.shared, *b.shared])
