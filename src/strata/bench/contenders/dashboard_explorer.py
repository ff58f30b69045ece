"""The explorer of `strata dashboard` on plain safetensors files: over HTTP, each file opened for the first time."""

from __future__ import annotations

import http.client
import json
import statistics
import time
from importlib import util
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from strata.bench.contenders.dashboard_files import (
    LARGE,
    NUM_BINS,
    NUM_TENSORS,
    many_tensors,
    one_large_tensor,
    path_of,
)
from strata.bench.server_processes import announced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

MAX_CHILDREN = 1_000
ASK_S = 60.0


class Asker:
    """One connection to the explorer."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ASK_S)

    def ask(self, path: str, **query: Any) -> Any:
        self._connection.request("GET", f"/api/explorer/{path}?{urlencode(query)}")
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            raise RuntimeError(f"/api/explorer/{path} has status {answer.status}: {body[:200]!r}")
        return json.loads(body)


def walk(asker: Asker, place: str, name: str) -> None:
    """Descend to the last tensor of a file as a user does, group by group."""
    groups = path_of(NUM_TENSORS - 1)[:-1]
    unders = [{}, *({"under": ".".join(groups[:depth])} for depth in range(1, 1 + len(groups)))]
    for under in unders:
        found = asker.ask("tree", place=place, id=name, limit=MAX_CHILDREN, **under)
    if not found["items"]:
        raise RuntimeError(f"the explorer lists no tensor below {'.'.join(groups)}")


def draw(asker: Asker, place: str, name: str) -> None:
    found = asker.ask("histogram", place=place, id=name, name=LARGE, bins=NUM_BINS)
    if len(found["counts"]) != NUM_BINS:
        raise RuntimeError(f"the histogram has {len(found['counts'])} bins, not {NUM_BINS}")


def median_ms(paths: Sequence[Path], look: Callable[[Asker, str, str], None]) -> float:
    """Return the median time of a look into each file but the first."""
    arguments = ["-m", "strata.cli", "dashboard", str(paths[0].parent), "--port", "0", "--json"]
    taken_s = []
    with announced(arguments, on_server_core=None) as (addresses, _process):
        asker = Asker(addresses["http"])
        for path in paths:
            start_s = time.perf_counter()
            look(asker, addresses["places"][0], path.name)
            taken_s.append(time.perf_counter() - start_s)
    return statistics.median(taken_s[1:]) * 1e3


def main() -> None:
    with many_tensors() as paths:
        tree_ms = median_ms(paths, walk)
    with one_large_tensor() as paths:
        histogram_ms = median_ms(paths, draw)
    print(json.dumps({"figures": {"tree_20k_ms": tree_ms, "histogram_64mib_ms": histogram_ms}}))


if __name__ == "__main__":
    if util.find_spec("safetensors") is None:
        print(json.dumps({"not_installed": "safetensors"}))
    else:
        main()
