"""Run as `commands.py PLAN|PROBE|ADVISE …`, on each rank: a command of gradwire, with few and small
messages, and a doctor who looks at one algorithm."""

import sys

from gradwire import Sign, doctoring
from gradwire.cli import doctor
from gradwire.cli.app import main
from gradwire.core.advise import probe


def few_and_small() -> None:
    """From now on, in this process."""
    probe.SIZES = probe.SIZES[:3]
    probe.REPEATED = 0.002


def one_algorithm() -> None:
    """Where none is named, and with all the time that a busy machine needs."""
    doctoring.SECONDS = {True: 200.0, False: 200.0}
    doctor.doctor = lambda named, *, quick, **rest: doctoring.doctor(
        named or [Sign()], quick=True, **rest
    )


if __name__ == "__main__":
    few_and_small()
    one_algorithm()
    main(sys.argv[1:])
