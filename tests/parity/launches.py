"""Rows of a table in real processes on Gloo: each number of ranks is launched once, for what has
been selected to run."""

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.bounds import watch_this_process
from tests.launch import run_ranks


def traces_of(file, worker, *columns):
    """A fixture: number of ranks → of each rank, row → what the worker script has returned. A row
    is the values of these parameters of a test."""

    @pytest.fixture(scope="module")
    def traces(request, tmp_path_factory):
        selected = [
            item.callspec.params for item in request.session.items if item.path == Path(file)
        ]

        @cache
        def launched(ranks):
            folder = tmp_path_factory.mktemp("traces")
            rows = [",".join(row[c] for c in columns) for row in selected if row["ranks"] == ranks]
            run_ranks(Path(file).with_name(worker), ranks, str(folder), *rows)
            return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]

        return launched

    return traces


def main(run):
    """What the worker script does: `run(*row)` for each row that it is given."""
    watch_this_process()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [tuple(row.split(",")) for row in sys.argv[2:]]
    torch.save({row: run(*row) for row in rows}, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
