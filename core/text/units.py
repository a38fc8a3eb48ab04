"""Rates and times as people write them: "10Gbit", "1.25 GB/s", "50us"."""

from __future__ import annotations

import math
import re

#: Bytes per second. Powers of 1000, as networks have them.
RATES = {
    f"{prefix}{unit}": 1000.0**power * size
    for power, prefix in enumerate(("", "k", "M", "G", "T"))
    for unit, size in (("bit", 1 / 8), ("B", 1.0))
}
TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def rate(text: str) -> float:
    """Bytes per second of "10Gbit", "100 Mbit/s", "10Gbps" and "25Gb/s" (bits) or "1.25GB/s".
    Raises ValueError for anything else, and for nothing at all."""
    number, unit = _split(text)
    unit = re.sub(r"/s$", "", re.sub(r"(?<=[kMGT])b(ps|/s)$|^bps$", "bit", unit))
    known = {name.lower() if name.endswith("bit") else name: worth for name, worth in RATES.items()}
    worth = known.get(unit.lower() if unit.lower().endswith("bit") else unit)
    if worth is None or not 0 < number * worth < math.inf:
        raise ValueError(f"{text!r} is no rate: give it as 10Gbit, 100Mbit or 1.25GB/s")
    return number * worth


def seconds(text: str) -> float:
    """Seconds of "50us", "0.2 ms" or "1s". Raises ValueError for anything else."""
    number, unit = _split(text)
    if unit not in TIMES or not 0 <= number < math.inf:
        raise ValueError(f"{text!r} is no time: give it as 50us, 0.2ms or 1s")
    return number * TIMES[unit]


def rate_of(bytes_per_second: float) -> str:
    """A rate as one reads it: "9.4 Gbit/s"."""
    bits = 8 * bytes_per_second
    for prefix, worth in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if bits >= worth:
            return f"{bits / worth:.3g} {prefix}bit/s"
    return f"{bits:.3g} bit/s"


def time_of(seconds: float) -> str:
    """A time as one reads it: "12 µs", "180 ms", "9.4 s"."""
    for unit, worth in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= worth:
            return (
                f"{seconds / worth:,.0f} {unit}"
                if seconds >= 10 * worth
                else f"{seconds / worth:.1f} {unit}"
            )
    return f"{seconds * 1e6:.1f} µs" if seconds else "0"


def _split(text: str) -> tuple[float, str]:
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(\D+?)\s*", text)
    if found is None:
        return math.nan, ""
    return float(found[1]), found[2]
