"""The command line, called in this process."""

import pytest

from gradwire.cli import app


def run(capsys, *args: str) -> str:
    """What a command prints, which ends well."""
    with pytest.raises(SystemExit) as ended:
        app.main(list(args))
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    return said.out


def refused(capsys, *args: str) -> str:
    """What is said of a command that is wrong, and prints nothing else."""
    with pytest.raises(SystemExit) as ended:
        app.main(list(args))
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert not said.out
    return said.err
