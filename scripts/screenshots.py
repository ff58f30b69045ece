"""Make the screenshots in docs/images from real runs: `make screenshots` (about six minutes).

Three scenes, one after the other: a training on two workers of which one is killed, workers that read shards and of
which one is killed, and a study. All of them train on 3 million real flights, which are fetched once. Each image is
taken when the page shows what the image is for; nothing on it is made up. It needs Chromium (`make system-packages`)
and npm.

    scripts/screenshots.py --only tuning --out /tmp/images
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from strata.bench.contenders import models_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[1]
SCENES = Path(__file__).with_name("scenes")
IMAGES = ROOT / "docs" / "images"
STRATA = (sys.executable, "-m", "strata.cli")
MAX_BYTES = 200 * 1024
"""Of an image. All of them together stay below 1 MiB."""
NUM_COLOURS = 256
SCALE = 1.4
"""Pixels of an image for each pixel of the page, so that it is sharp on most screens."""
DESKTOP, PHONE = (1280, 860), (390, 844)
NUM_VALID, NUM_ENDED = 10_000, 24
NUM_BEFORE, NUM_AFTER, STEPS_LOST = 4, 5, 20
"""Checkpoints, one every ten seconds, before and after the failure; steps since the last one when the worker is killed.
"""
DEADLINE_S = 900.0
END_S = 60.0
TIMEOUT_MS = 120_000
PRINTED = "printed.txt"

Theme = Literal["light", "dark"]
T = TypeVar("T")


# -- data and processes ------------------------------------------------------------------------------------------------


def prepare(directory: Path) -> None:
    """Write `train/`, `valid.parquet` and `sizes.json`: the label, the route, the time and the distance of each flight.

    Airports become numbers, the busiest first.
    """
    table = models_data.flights()
    airports = pc.value_counts(pa.chunked_array([*table["origin"].chunks, *table["destination"].chunks]))
    busiest = airports.field("values").take(pc.sort_indices(airports.field("counts"), sort_keys=[("", "descending")]))
    columns = {}
    for name in table.column_names:
        column = table[name]
        if name in ("origin", "destination"):
            column = pc.index_in(column, value_set=busiest)
        columns[name] = column.cast(pa.float32() if name == "distance" else pa.int64())
    sizes = {name: pc.max(column).as_py() + 1 for name, column in columns.items() if pa.types.is_integer(column.type)}
    coded = pa.table(columns)
    order = np.random.default_rng(0).permutation(len(coded))
    (directory / "train").mkdir(parents=True)
    (directory / "sizes.json").write_text(json.dumps(sizes), encoding="utf-8")
    pq.write_table(coded.take(order[:NUM_VALID]), directory / "valid.parquet")
    pq.write_table(coded.take(order[NUM_VALID:]), directory / "train" / "rows.parquet", row_group_size=50_000)


@dataclass
class Program:
    """A program that serves a dashboard."""

    directory: Path
    process: subprocess.Popen[str]
    url: str
    others: list[subprocess.Popen[str]] = field(default_factory=list)

    def get(self, path: str, **query: object) -> Any:
        """Return the JSON of an endpoint.

        Raises:
            RuntimeError: The program has ended.
        """
        if self.process.poll() is not None:
            lines = (self.directory / PRINTED).read_text(encoding="utf-8").splitlines()
            raise RuntimeError("it has ended:\n" + "\n".join(lines[-20:]))
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:  # noqa: S310 - our own address
            return json.load(answer)

    def job(self) -> dict[str, Any]:
        jobs = self.get("/api/overview")["jobs"]["items"]
        return jobs[0] if jobs else {}


@contextmanager
def serving(command: tuple[str, ...], directory: Path, *, address: str) -> Iterator[Program]:
    """Run `strata COMMAND` in `directory` until the block ends; `address` finds its page in what it prints."""
    printed = directory / PRINTED
    with printed.open("w", encoding="utf-8") as file:
        process = start((*STRATA, *command), directory, file)
    try:
        found = until(lambda: re.search(address, printed.read_text(encoding="utf-8")), f"an address from {command[0]}")
        yield Program(directory, process, found[1])
    finally:
        end(process)


def start(command: tuple[str, ...], directory: Path, output: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "STRATA_RUNS_DIR": str(directory / "runs"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=directory, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def until(condition: Callable[[], T | None], what: str, *, deadline_s: float = DEADLINE_S) -> T:
    """Wait until a condition returns something true, and return that."""
    end_s = time.monotonic() + deadline_s
    while not (found := condition()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {deadline_s:g} s: {what}")
        time.sleep(0.1)
    return found


# -- images ------------------------------------------------------------------------------------------------------------


@dataclass
class Camera:
    browser: Browser
    out: Path

    @contextmanager
    def page(
        self, url: str, *, theme: Theme = "light", size: tuple[int, int] = DESKTOP, scale: float = SCALE
    ) -> Iterator[Page]:
        """Open a view in its own window."""
        width, height = size
        context = self.browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=theme,
            device_scale_factor=scale,
            has_touch=size == PHONE,
            reduced_motion="reduce",
        )
        context.set_default_timeout(TIMEOUT_MS)
        try:
            page = context.new_page()
            page.goto(url, wait_until="load")
            loaded(page)
            yield page
        finally:
            context.close()

    def take(self, page: Page, name: str, *, height: int | None = None, part: str = "") -> None:
        """Write the window as NAME.png, with another height if one is given, or the first element that matches `part`.

        Raises:
            ValueError: The image is larger than `MAX_BYTES`.
        """
        if height is not None:
            page.set_viewport_size({"width": page.viewport_size["width"], "height": height})  # type: ignore[index]
        loaded(page)
        packed = pack(page.locator(part).first.screenshot() if part else page.screenshot())
        if len(packed) > MAX_BYTES:
            raise ValueError(f"{name}.png has {len(packed):,} bytes, more than {MAX_BYTES:,}; make the window smaller")
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"{name}.png").write_bytes(packed)
        print(f"{name}.png: {len(packed) / 1024:.0f} KiB", flush=True)


def loaded(page: Page) -> None:
    """Wait for the heading and for everything that is being loaded. The live stream never ends."""
    page.locator("h1").first.wait_for()
    expect(page.locator(".loading")).to_have_count(0, timeout=TIMEOUT_MS)


def pack(png: bytes) -> bytes:
    """Return the image with few colours, which makes it several times smaller. A rare colour, such as that of a dot in
    a legend, counts as much as a frequent one.
    """
    image = Image.open(io.BytesIO(png)).convert("RGB")
    few = image.quantize(NUM_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    packed = io.BytesIO()
    few.save(packed, "PNG", optimize=True)
    return packed.getvalue()


# -- scenes ------------------------------------------------------------------------------------------------------------


def run_scene(camera: Camera, data: Path, directory: Path) -> None:
    """Two workers train; one is killed and recovers; training goes on."""
    flags = ("--workers=2", "--name=flights", "--logs=none")
    command = ("run", *flags, str(SCENES / "train_flights.py"), f"--data={data}")
    with serving(command, directory, address=r"dashboard: (http://\S+)") as run:

        def num_saved() -> int:
            return int(run.get("/api/lineage", job="flights")["checkpoints"]["total"])

        until(lambda: run.job().get("step"), "the first step")
        with camera.page(f"{run.url}/workers?log=1") as workers:  # the strips hold what the page has seen
            until(lambda: num_saved() >= NUM_BEFORE, "checkpoints before the failure")
            lost = int(run.job()["step"]) + STEPS_LOST
            until(lambda: run.job()["step"] >= lost, "steps after the checkpoint")
            os.kill(int((directory / "rank-1.pid").read_text(encoding="utf-8")), signal.SIGKILL)
            until(lambda: recovered(run), "the recovery")
            until(lambda: num_saved() >= NUM_BEFORE + NUM_AFTER, "checkpoints after the failure")
            camera.take(workers, "dashboard-workers", height=1_040)
        shots: tuple[tuple[str, str, dict[str, Any], int | None], ...] = (
            ("dashboard-overview", "/", {}, 900),
            ("dashboard-dark", "/", {"theme": "dark"}, 900),
            ("dashboard-phone", "/", {"size": PHONE, "scale": 2.0}, None),
            ("dashboard-goodput", "/goodput", {}, 770),
            ("dashboard-recovery", "/recovery", {}, 380),
        )
        for name, path, options, height in shots:
            with camera.page(f"{run.url}{path}", **options) as page:
                camera.take(page, name, height=height)
        with camera.page(f"{run.url}/checkpoints?name=model.tables.origin.weight", size=(1280, 1_900)) as page:
            expect(page.locator(".heatmap")).to_be_visible(timeout=TIMEOUT_MS)
            camera.take(page, "explorer-tensor", part=".explorer")
            # Absent if the worker was killed after its checkpoint was complete and before the coordinator recorded it.
            resumed_by = page.locator(".lineage td:nth-child(6)", has_text="attempt")
            resumed_by.scroll_into_view_if_needed()
            camera.take(page, "dashboard-lineage", part="section:has(.lineage)")


def recovered(run: Program) -> bool:
    return any(each["took_s"] for each in run.get("/api/recoveries", job="flights")["items"])


def data_scene(camera: Camera, data: Path, directory: Path) -> None:
    """Four workers read the shards of a dataset; one is killed, and its shards move."""
    num_workers = 4
    flags = ("--listen=127.0.0.1:0", "--http=127.0.0.1:0", "--state=memory", "--json")
    with serving(("coordinator", *flags), directory, address=r'"http": "(http[^"]+)"') as coordinator:
        address = json.loads((directory / PRINTED).read_text(encoding="utf-8").splitlines()[0])["grpc"]
        workers = []
        try:
            for number in range(num_workers):
                script = (str(SCENES / "read_shards.py"), f"--coordinator={address}")
                arguments = (f"--data={data}", f"--worker=worker-{number}")
                with (directory / f"worker-{number}.txt").open("w", encoding="utf-8") as file:
                    workers.append(start((sys.executable, *script, *arguments), directory, file))

            def done() -> float:
                jobs = [each["job_id"] for each in coordinator.get("/api/overview")["jobs"]["items"]]
                shards = coordinator.get("/api/data", job="late-flights")["shards"] if jobs else None
                return shards["dataset"]["num_done"] / shards["dataset"]["num_shards"] if shards else 0.0

            until(done, "the first shard")
            with camera.page(f"{coordinator.url}/data") as page:
                until(lambda: done() > 0.3, "a third of the shards")
                workers[2].kill()
                until(lambda: done() > 0.5, "half of the shards")
                expect(page.locator(".shard-row")).to_have_count(num_workers - 1, timeout=TIMEOUT_MS)
                camera.take(page, "dashboard-data", height=660)
        finally:
            for worker in workers:
                end(worker)


SPACE = """
parameters:
  learning_rate: {type: float, min: 1e-4, max: 1e-1, log: true}
  batch_size: {type: int, values: [512, 1024, 2048]}
  embedding: {type: int, values: [4, 8, 16, 32]}
  width: {type: int, values: [32, 64, 128, 256]}
  dropout: {type: float, min: 0.0, max: 0.5}
"""


def tuning_scene(camera: Camera, data: Path, directory: Path) -> None:
    """A study stops poor trials early."""
    (directory / "space.yaml").write_text(SPACE, encoding="utf-8")
    search = ("--space=space.yaml", "--trials=40", "--workers=2", "--mode=median")
    goal = ("--metric=valid_auc", "--direction=max")
    script = ("--", f"--data={data}", "--steps=125")
    command = ("tune", str(SCENES / "train_flights.py"), "--name=late-flights", *search, *goal, *script)
    with serving(command, directory, address=r"dashboard: (http://\S+)/tuning") as study:

        def counts() -> dict[str, int]:
            found: dict[str, int] = study.get("/api/study")["counts"]
            return found

        until(lambda: sum(counts().get(state, 0) for state in ("finished", "pruned")) >= NUM_ENDED, "ended trials")
        with camera.page(f"{study.url}/tuning") as page:
            camera.take(page, "dashboard-tuning", height=1_150)


SCENES_BY_NAME = {"run": run_scene, "data": data_scene, "tuning": tuning_scene}


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the screenshots of the documentation from real runs.")
    parser.add_argument("--only", choices=sorted(SCENES_BY_NAME), help="make the images of one scene")
    parser.add_argument("--out", type=Path, default=IMAGES, help="directory for the images")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        print("screenshots: chromium is not installed; run make system-packages", file=sys.stderr)
        return 1
    os.environ.setdefault(models_data.DIRECTORY_VARIABLE, str(ROOT / ".build" / "bench-data"))
    with tempfile.TemporaryDirectory(prefix="screenshots-") as name, sync_playwright() as playwright:
        data = Path(name) / "flights"
        prepare(data)
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--force-prefers-reduced-motion"]
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        for scene, make in SCENES_BY_NAME.items():
            if arguments.only in (None, scene):
                directory = Path(name) / scene
                directory.mkdir()
                make(Camera(browser, arguments.out), data, directory)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
