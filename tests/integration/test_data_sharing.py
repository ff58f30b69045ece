"""Ranks from real libraries, and broadcasts from rank 0 to real processes over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strata.data.ranks import find_ranks
from strata.errors import InvalidArgument

NUM_RANKS = 3
DEADLINE_S = 45

RANK = """
import json, os, sys
import torch, torch.distributed as distributed
from strata.data import ranks as r
from strata.errors import NoData

distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=3)
ranks = r.find_ranks(environment={})
calls, results = [], []

def share(produce):
    def counted():
        calls.append(ranks.rank)
        return produce()
    try:
        data = r.share(ranks, counted)
        results.append([len(data), data[:4].hex(), sum(data)])
    except Exception as error:
        results.append([type(error).__name__, str(error), getattr(error, "field", "")])

def refuse():
    raise NoData("there are no files in /nowhere; check the path", field="path")

def refuse_at_length():
    raise NoData("ö" * 1_000_000)

def too_much():
    r.MAX_SHARED_BYTES = 10
    return b"x" * 11

def little():
    return b"in step"

share(lambda: bytes(range(256)) * 4096 + bytes([ranks.rank]))
share(lambda: b"")
share(refuse)
share(lambda: {}["nothing"])
share(refuse_at_length)
share(too_much)
share(little)
distributed.barrier()

def report():
    own = [ranks.rank, ranks.world_size, ranks.found_in]
    print(json.dumps({"ranks": own, "calls": len(calls), "results": results}), flush=True)
    os._exit(0)

share(report)  # rank 0 exits here, while the others wait for it
report()
"""


def test_all_ranks_get_the_result_or_the_error_of_rank_0_and_its_death_is_reported(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "meeting"), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        outputs = [child.communicate(timeout=DEADLINE_S)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    found = [json.loads(text.splitlines()[-1]) for text in outputs]

    assert [one["ranks"] for one in found] == [[rank, NUM_RANKS, "torch.distributed"] for rank in range(NUM_RANKS)]
    assert [one["calls"] for one in found] == [8, 0, 0]
    whole, empty, refused, failed, long, too_much, last = zip(*(one["results"][:7] for one in found), strict=True)
    assert whole == ([256 * 4096 + 1, "00010203", 4096 * sum(range(256))],) * NUM_RANKS
    assert empty == ([0, "", 0],) * NUM_RANKS
    assert refused == (["NoData", "there are no files in /nowhere; check the path", "path"],) * NUM_RANKS
    assert failed[0][0] == "KeyError"
    assert failed[1] == failed[2] == ["DataError", "rank 0 failed: KeyError: 'nothing'; see its log", ""]
    assert [(kind, len(message)) for kind, message, _ in long] == [("NoData", 1_000_000), *[("NoData", 8_000)] * 2]
    assert {kind for kind, _, _ in too_much} == {"LimitExceeded"}
    assert last == ([7, b"in s".hex(), sum(b"in step")],) * NUM_RANKS
    for one in found[1:]:
        kind, message, _ = one["results"][7]
        assert kind == "DataError"
        assert message.startswith("the broadcast from rank 0 failed: ")


def test_a_real_accelerator_provides_the_rank() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    try:
        found = find_ranks(accelerator=accelerator, environment={})
        assert (found.rank, found.world_size, found.found_in) == (0, 1, "the accelerator")
        assert found.device == accelerator.device
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # the state is global
    with pytest.raises(InvalidArgument, match=r"accelerator is a Accelerator .*_reset_state\(\)` was called"):
        find_ranks(accelerator=accelerator, environment={})
