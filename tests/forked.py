"""See `tests/launch.py`."""

from tests.launch import run_ranks, start

__all__ = ["run_ranks", "start"]
