"""The explorer's API on real checkpoints and safetensors files."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from servers import until

from strata.checkpoint import CheckpointManager, Ranks, Shard
from strata.checkpoint.load.statistics import FILE_NAME
from strata.clock import SystemClock
from strata.dashboard.explorer.limits import Budget, ExplorerConfig
from strata.dashboard.explorer.places import Places, open_place
from strata.dashboard.explorer.routes import make_router
from strata.errors import CheckpointInvalid, ConfigError
from strata.launch.record import directory as run_directory
from strata.launch.spec import RunSpec

RANDOM = np.random.default_rng(5)
TABLE = RANDOM.normal(size=(64, 32)).astype(np.float32)
LARGE = RANDOM.normal(size=(4_000, 64)).astype(np.float32)
HOSTILE = "<script>alert(1)</script>/../../etc/passwd\u202e.w"
DATA = "rank-00000.safetensors"


class Client:
    """Requests about places."""

    def __init__(self, http: TestClient, places: Places) -> None:
        self.http = http
        self.places = [place.id for place in places.all()]

    def ask(self, path: str, status: int = 200, **query: Any) -> Any:
        query.setdefault("place", self.places[0])
        answer = self.http.get(f"/api/explorer/{path}", params=query)
        assert answer.status_code == status, answer.text
        return answer.json()

    def ids(self, place: int = 0) -> list[str]:
        """Return the checkpoints, oldest first."""
        found = self.ask("checkpoints", place=self.places[place], order="oldest")["items"]
        return [one["id"] for one in found]

    def complete(self, path: str, **query: Any) -> Any:
        """Repeat a request until its scan is complete."""
        for _ in range(100):
            found = self.ask(path, **query)
            if found["scan"]["is_complete"]:
                return found
        raise AssertionError(f"{path} does not complete: {found['scan']}")


@contextmanager
def exploring(*locations: Path | str, **limits: Any) -> Iterator[Client]:
    places = Places([open_place(str(one)) for one in locations])
    router = make_router(
        places, config=ExplorerConfig(**{"request_timeout_s": 50.0, "scan_s": 50.0, **limits})
    )  # the machine may be busy
    app = FastAPI()
    app.include_router(router)
    try:
        with TestClient(app) as http:
            yield Client(http, places)
    finally:
        router.close()
        places.close()


def state(step: int) -> dict[str, Any]:
    """Return a state in which `frozen` stays, some rows of `large` change, and `wide` changes throughout, a little."""
    table = TABLE.copy()
    table[3] = 0.0
    table[:step] += 0.5
    large = LARGE.copy()
    large[100 * step : 100 * step + 20] = step
    return {
        "model": {
            "frozen": LARGE,
            "large": large,
            "wide": (torch.from_numpy(LARGE) * (1 + step / 100)).to(torch.bfloat16),
            "table": table,
            "half": torch.from_numpy(TABLE).to(torch.bfloat16) + step,
            "bias": torch.full((8,), float(step)),
            "flags": np.array([True, False, step > 1]),
            "ids": np.arange(10) + step,
        },
        "step": np.int64(step),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full checkpoint and two incremental ones, one of them with exclusive ors."""
    where = tmp_path_factory.mktemp("saved")
    with CheckpointManager(str(where), saver="thread", incremental_depth=4, rebase_at=1.0, xor=True) as manager:
        for step in (1, 2, 3):
            if step == 1:
                manager.save(state(1), step=1, epoch=1, metadata={"loss": 0.5, "name": HOSTILE}).wait()
            else:
                manager.save(state(step), step=step, checkpoint_type="INCREMENTAL").wait()
            # The next save would stop the computation of statistics.
            until(lambda step=step: len(list(where.glob(f"*/{FILE_NAME}"))) == step, "its statistics are written")
    return where


# -- lists ---------------------------------------------------------------------------------------------------------


def test_a_timeline_lists_checkpoints_with_their_lineage(saved: Path) -> None:
    with exploring(saved) as client:
        third, second, first = client.ask("checkpoints")["items"]

        assert (first["step"], first["epoch"], first["type"], first["metadata"]["loss"]) == (1, 1, "FULL", 0.5)
        assert (second["type"], second["parent"]) == ("INCREMENTAL", first["id"])
        assert second["id"] in first["children"]
        assert third["size_bytes"] < third["full_bytes"]
        assert client.ask("statistics", id=third["id"], name="model.large")["num_patches"] > 0
        assert client.ask("checkpoint", id=second["id"]) == second
        page = client.ask("checkpoints", limit=2, order="oldest")
        assert ([one["step"] for one in page["items"]], page["total"], page["next_offset"]) == ([1, 2], 3, 2)


def test_the_tree_has_shapes_dtypes_and_statistics(saved: Path) -> None:
    with exploring(saved) as client:
        saved_id = client.ids()[0]
        model, step = client.ask("tree", id=saved_id)["items"]
        below = {node["label"]: node for node in client.ask("tree", id=saved_id, under="model")["items"]}

    assert (model["kind"], model["num_tensors"], model["num_nan"]) == ("group", 8, 0)
    assert (step["kind"], step["tensor"]["dtype"], step["tensor"]["shape"]) == ("tensor", "I64", [])
    table = below["table"]["tensor"]
    expected = state(1)["model"]["table"]
    assert (table["dtype"], table["shape"], table["num_bytes"]) == ("F32", [64, 32], expected.nbytes)
    assert table["statistics"]["norm"] == pytest.approx(np.linalg.norm(expected), rel=1e-6)
    assert table["statistics"]["std"] == pytest.approx(expected.std(), rel=1e-4)


def test_tensors_are_found_by_name_and_property(tmp_path: Path) -> None:
    bad = TABLE.copy()
    bad[0, 0], bad[1, 1] = np.nan, np.inf
    tensors = {"a.bad": bad, "a.dead": state(0)["model"]["table"], "b.zero": np.zeros((4, 4)), "b.one": np.ones(3)}
    with CheckpointManager(str(tmp_path / "with"), saver="thread") as manager:
        manager.save(tensors, step=1).wait()
    safetensors.numpy.save_file(tensors, tmp_path / "without.safetensors")
    with exploring(tmp_path / "with", tmp_path / "without.safetensors") as client:
        for place in (0, 1):
            where = {"place": client.places[place], "id": client.ids(place)[0]}

            def names(where: dict[str, str] = where, **query: Any) -> list[str]:
                return [one["name"] for one in client.complete("tensors", **where, **query)["items"]]

            assert names(search="ZER") == ["b.zero"]
            assert names(search="b.*", sort="bytes", descending=True) == ["b.zero", "b.one"]
            assert names(property="nan") == names(property="inf") == names(property="not_finite") == ["a.bad"]
            assert set(names(property="constant")) == {"b.zero", "b.one"}
            assert names(property="zero") == ["b.zero"]
            assert set(names(property="dead_rows")) == {"a.dead", "b.zero"}
            assert names(sort="dead_rows", descending=True)[:2] == ["b.zero", "a.dead"]
            assert names(sort="max_abs", under="b") == ["b.zero", "b.one"]


# -- one tensor ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 3])
def test_views_of_full_and_incremental_checkpoints_equal_numpy(saved: Path, step: int) -> None:
    expected = state(step)["model"]
    with exploring(saved) as client:
        tensor = {"id": client.ids()[step - 1]}
        table = expected["table"]

        histogram = client.ask("histogram", **tensor, name="model.table", bins=20)
        counts, _ = np.histogram(table.astype(np.float64), 20)
        assert histogram["counts"] == counts.tolist()
        assert histogram["range_from"] == "statistics"
        zoomed = client.ask("histogram", **tensor, name="model.table", bins=4, low=0, high=1)
        assert sum(zoomed["counts"]) == ((table >= 0) & (table <= 1)).sum()
        assert zoomed["num_below"] == (table < 0).sum()

        for name in ("half", "wide"):
            half = client.ask("histogram", **tensor, name=f"model.{name}", bins=20)
            assert half["counts"] == np.histogram(expected[name].double().numpy(), 20)[0].tolist()
        patched = client.ask("rows", **tensor, name="model.large", points=2_048)
        norms = np.linalg.norm(expected["large"].astype(np.float64), axis=1)
        edges = patched["row_edges"][:-1]
        assert np.allclose(patched["norm_max"], np.maximum.reduceat(norms, edges))

        heat = client.ask("heatmap", **tensor, name="model.table", rows=8, columns=4)
        assert np.allclose(heat["means"], table.astype(np.float64).reshape(8, 8, 4, 8).mean(axis=(1, 3)))

        rows = client.ask("rows", **tensor, name="model.table", points=64)
        assert np.allclose(rows["norm_mean"], np.linalg.norm(table.astype(np.float64), axis=1))
        assert rows["dead"] == np.flatnonzero(~table.any(axis=1)).tolist()

        values = client.ask("singular-values", **tensor, name="model.table")["values"]
        assert np.allclose(values, np.linalg.svd(table.astype(np.float64), compute_uv=False), rtol=1e-6)

        sample = client.ask("values", **tensor, name="model.table", start="2,30", shape="3,2")
        assert np.array_equal(np.float32(sample["values"]).reshape(3, 2), table[2:5, 30:32])
        assert client.ask("values", **tensor, name="model.flags")["values"] == [True, False, step > 1]
        assert client.ask("values", **tensor, name="step")["values"] == [step]


def test_a_tensor_sharded_over_ranks_looks_like_a_whole_one(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        rows, columns = Shard(TABLE[rank * 16 : rank * 16 + 16], shape=TABLE.shape, start=(rank * 16, 0)), TABLE.T
        across = Shard(columns[:, rank * 16 : rank * 16 + 16].copy(), shape=columns.shape, start=(0, rank * 16))
        ranks = Ranks(rank=rank, size=4, session="one", timeout_s=30)
        with CheckpointManager(str(tmp_path), saver="thread", ranks=ranks) as manager:
            manager.save({"rows": rows, "columns": across}, step=1).wait()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, range(4)))
    with exploring(tmp_path) as client:
        saved_id = client.ids()[0]
        for name, whole in (("rows", TABLE), ("columns", TABLE.T)):
            tensor = client.ask("statistics", id=saved_id, name=name)
            assert (tensor["num_slices"], tensor["shape"]) == (4, list(whole.shape))
            found = client.ask("values", id=saved_id, name=name, shape=",".join(map(str, whole.shape)))
            assert np.array_equal(np.float32(found["values"]).reshape(whole.shape), whole)
            rows = client.ask("rows", id=saved_id, name=name, points=64)
            assert np.allclose(rows["norm_max"], np.linalg.norm(whole.astype(np.float64), axis=1))
            counts = client.ask("histogram", id=saved_id, name=name, bins=10)["counts"]
            assert counts == np.histogram(whole.astype(np.float64), 10)[0].tolist()


FORMATS = {
    "F64": TABLE.astype(np.float64),
    "F16": TABLE.astype(np.float16),
    "BF16": TABLE.astype(ml_dtypes.bfloat16),
    "F8_E4M3": TABLE.astype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": TABLE.astype(ml_dtypes.float8_e5m2),
    "I8": (TABLE * 10).astype(np.int8),
    "U16": np.abs(TABLE * 100).astype(np.uint16),
    "I64": (TABLE * 1000).astype(np.int64),
    "BOOL": TABLE > 0,
    "C64": TABLE.astype(np.complex64),
}


@pytest.mark.parametrize("kind", ["checkpoint", "file"])
def test_every_dtype_has_statistics_a_histogram_and_values(tmp_path: Path, kind: str) -> None:
    if kind == "checkpoint":
        with CheckpointManager(str(tmp_path), saver="thread", statistics=False) as manager:
            manager.save(dict(FORMATS), step=1).wait()
    else:
        leaves = [np.ascontiguousarray(array) for array in FORMATS.values()]
        entries, data = {}, b""
        for name, array in zip(FORMATS, leaves, strict=True):
            offsets = [len(data), len(data) + array.nbytes]
            entries[name] = {"dtype": name, "shape": list(array.shape), "data_offsets": offsets}
            data += array.tobytes()
        header = json.dumps(entries).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    with exploring(tmp_path) as client:
        saved_id = client.ids()[0]
        for name, array in FORMATS.items():
            numbers = np.abs(array) if name == "C64" else array.astype(np.float64)
            found = client.ask("statistics", id=saved_id, name=name)
            assert found["statistics"]["norm"] == pytest.approx(np.linalg.norm(numbers), rel=1e-5), name
            counts = client.ask("histogram", id=saved_id, name=name, bins=13)["counts"]
            assert counts == np.histogram(numbers.astype(np.float64), 13)[0].tolist(), name
            values = client.ask("values", id=saved_id, name=name, start="5,5", shape="2,3")["values"]
            expected = array[5:7, 5:8].reshape(-1)
            assert [complex(one) for one in values] == pytest.approx([complex(one) for one in expected]), name
            heat = client.ask("heatmap", id=saved_id, name=name, rows=2, columns=2)
            assert np.allclose(heat["means"], numbers.astype(np.float64).reshape(2, 32, 2, 16).mean(axis=(1, 3)))


def test_scalars_vectors_and_empty_tensors_have_every_view(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"scalar": (), "vector": (5,), "none": (0,), "wide": (3, 0), "cube": (2, 3, 4)}
    safetensors.numpy.save_file({n: np.ones(s, np.float32) for n, s in shapes.items()}, tmp_path / "x.safetensors")
    with exploring(tmp_path / "x.safetensors") as client:
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            assert sum(client.ask("histogram", id="x.safetensors", name=name)["counts"]) == size
            assert client.ask("statistics", id="x.safetensors", name=name)["statistics"]["num_elements"] == size
            assert client.ask("heatmap", id="x.safetensors", name=name)["max"] == (1.0 if size else None)
            assert client.ask("rows", id="x.safetensors", name=name)["num_dead"] == 0
            listed = size if name != "cube" else 12  # the first of its two matrices
            assert len(client.ask("values", id="x.safetensors", name=name)["values"]) == listed
            values = client.ask("singular-values", id="x.safetensors", name=name)["values"]
            assert sum(value**2 for value in values) == pytest.approx(size)


@pytest.mark.parametrize("shape", [(0, 1 << 62), (1 << 62, 0), (0, 1 << 62, 8), (1,) * 200])
def test_a_tensor_of_an_absurd_shape_has_every_view(tmp_path: Path, shape: tuple[int, ...]) -> None:
    data = b"" if 0 in shape else bytes(4)
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    with exploring(tmp_path / "x.safetensors") as client:
        for view in ("statistics", "histogram", "values", "singular-values"):
            client.ask(view, id="x.safetensors", name="w")
        edges = [
            *client.ask("heatmap", id="x.safetensors", name="w")["column_edges"],
            *client.ask("rows", id="x.safetensors", name="w")["row_edges"],
        ]
        assert min(edges) >= 0


def test_a_large_tensor_is_read_in_pieces(tmp_path: Path) -> None:
    large = RANDOM.normal(size=(1_500, 4_001)).astype(np.float32)  # 24 MB: rows end anywhere in a piece
    with CheckpointManager(str(tmp_path), saver="thread") as manager:
        manager.save({"w": large}, step=1).wait()
    safetensors.numpy.save_file({"w": large}, tmp_path / "plain.safetensors")
    with exploring(tmp_path) as client:
        for saved_id in client.ids():
            histogram = client.ask("histogram", id=saved_id, name="w")
            assert histogram["counts"] == np.histogram(large.astype(np.float64), 100)[0].tolist()
            heat = client.ask("heatmap", id=saved_id, name="w", rows=3, columns=1)
            assert np.allclose(np.ravel(heat["means"]), large.reshape(3, -1).mean(axis=1, dtype=np.float64))
            rows = client.ask("rows", id=saved_id, name="w", points=1_500)
            assert np.allclose(rows["norm_max"], np.linalg.norm(large.astype(np.float64), axis=1))
            sample = client.ask("values", id=saved_id, name="w", start="1499,4000", shape="1,1")
            assert np.float32(sample["values"]) == large[-1, -1:]


# -- two checkpoints and time --------------------------------------------------------------------------------------


def test_changes_are_ranked_by_relative_l2(saved: Path) -> None:
    old, new = state(1)["model"], state(3)["model"]
    with exploring(saved) as client:
        first, _, third = client.ids()
        found = client.complete("compare", id=third, against=first)

        ranked = {one["name"]: one["change"] for one in found["items"]}
        sizes = [change["relative_l2"] for change in ranked.values()]
        assert sizes == sorted(sizes, reverse=True)
        distance = np.linalg.norm(new["table"].astype(np.float64) - old["table"])
        assert ranked["model.table"]["l2"] == pytest.approx(distance)
        assert ranked["model.table"]["relative_l2"] == pytest.approx(distance / np.linalg.norm(old["table"]), rel=1e-6)
        assert ranked["model.bias"]["relative_l2"] == pytest.approx(2.0)
        assert ranked["model.bias"]["max_abs"] == 2.0
        assert (found["num_changed"], found["num_same"], found["num_added"]) == (8, 1, 0)
        listed = client.complete("tensors", id=third, against=first, property="changed", sort="change")
        assert [one["name"] for one in listed["items"]] == list(ranked)
        assert client.complete("compare", id=third, against=third)["items"] == []


def test_two_runs_and_a_plain_file_are_compared(saved: Path, tmp_path: Path) -> None:
    other = {"model.table": TABLE, "model.bias": torch.full((8,), 1.0).numpy(), "extra": np.ones(2, np.float32)}
    safetensors.numpy.save_file(other, tmp_path / "other.safetensors")
    with exploring(saved, tmp_path / "other.safetensors") as client:
        found = client.complete(
            "compare",
            place=client.places[1],
            id="other.safetensors",
            against_place=client.places[0],
            against=client.ids()[0],
        )

    states = {one["name"]: one["change"]["state"] for one in found["items"]}
    assert states["model.table"] == "changed"
    assert states["extra"] == "added"
    assert states["model.half"] == "removed"
    assert "model.bias" not in states, "its elements are equal"
    assert found["num_same"] == 1


def test_distributions_before_and_after_share_their_bins(saved: Path) -> None:
    old, new = state(1)["model"]["table"], state(3)["model"]["table"]
    with exploring(saved) as client:
        first, _, third = client.ids()
        found = client.ask("compare/histogram", id=third, against=first, name="model.table", bins=16)

    span = (min(old.min(), new.min()), max(old.max(), new.max()))
    assert found["old"]["counts"] == np.histogram(old.astype(np.float64), 16, span)[0].tolist()
    assert found["new"]["counts"] == np.histogram(new.astype(np.float64), 16, span)[0].tolist()
    assert found["change"]["num_different"] == np.count_nonzero(old != new)


@pytest.mark.parametrize("statistics", [True, False])
def test_one_tensor_is_followed_over_all_checkpoints(tmp_path: Path, statistics: bool) -> None:
    with CheckpointManager(str(tmp_path), saver="thread", statistics=statistics) as manager:
        for step in range(1, 4):
            more = {"late": np.ones(3)} if step > 1 else {}
            manager.save({"w": np.full(4, float(max(step, 2))), **more}, step=step).wait()
    with exploring(tmp_path) as client:
        found = client.complete("follow", name="w")
        late = client.complete("follow", name="late")

        assert [(one["step"], one["statistics"]["max"], one["changed"]) for one in found["items"]] == [
            (1, 2.0, None),
            (2, 2.0, False),
            (3, 3.0, True),
        ]
        assert {one["source"] for one in found["items"]} == {"stored" if statistics else "computed"}
        assert found["scan"]["read_bytes"] == 0 or not statistics
        assert [one["is_present"] for one in late["items"]] == [False, True, True]
        assert [one["step"] for one in client.ask("follow", name="w", offset=2)["items"]] == [3]
        client.ask("follow", status=404, name="absent")


# -- verify, export ------------------------------------------------------------------------------------------------


def verified(client: Client, saved_id: str) -> Any:
    started = client.http.post("/api/explorer/verify", json={"place": client.places[0], "id": saved_id})
    assert started.status_code == 202, started.text
    deadline_s = time.monotonic() + 30
    while True:
        task = client.ask(f"tasks/{started.json()['task']}")
        if task["state"] != "running":
            return task
        assert time.monotonic() < deadline_s, task


def test_an_intact_checkpoint_is_verified_and_a_damaged_one_names_file_and_tensor(tmp_path: Path) -> None:
    with CheckpointManager(str(tmp_path), saver="thread") as manager:
        saved_id = manager.save({"w": TABLE}, step=1).wait().id
    with exploring(tmp_path) as client:
        assert verified(client, saved_id)["state"] == "done"
        path = tmp_path / saved_id / DATA
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)

        task = verified(client, saved_id)
        assert task["state"] == "failed"
        assert DATA in task["problem"]
        assert "'w'" in task["problem"]
        problem = client.ask("heatmap", status=409, id=saved_id, name="w")["error"]
        assert problem["kind"] == "CheckpointCorrupt"
        assert DATA in problem["message"]
        assert "'w'" in problem["message"]
        assert client.ask("tensors", id=saved_id, property="dead_rows")["scan"]["problems"]["w"] == problem["message"]


@pytest.mark.parametrize(
    "request_",
    [
        {"content": '{"place": "x", "id": "y"}', "headers": {"content-type": "text/plain"}},
        {"json": {"place": "x", "id": "y"}, "headers": {"sec-fetch-site": "cross-site"}},
    ],
)
def test_a_form_of_another_site_cannot_start_a_verification(saved: Path, request_: Any) -> None:
    with exploring(saved) as client:
        assert client.http.post("/api/explorer/verify", **request_).status_code == 422
        assert client.ask("tasks")["items"] == []


def test_an_incremental_checkpoint_is_exported_as_one_safetensors_file(saved: Path) -> None:
    with exploring(saved) as client:
        query: dict[str, Any] = {"place": client.places[0], "id": client.ids()[2], "only": ["model.t*", "model.half"]}
        answer = client.http.get("/api/explorer/export", params=query | {"strip_prefix": "model."})

    found = safetensors.torch.load(answer.content)
    assert set(found) == {"table", "half"}
    assert np.array_equal(found["table"].numpy(), state(3)["model"]["table"])
    assert torch.equal(found["half"], state(3)["model"]["half"])
    assert answer.headers["content-disposition"].endswith('.safetensors"')


# -- plain files, damage, attacks ----------------------------------------------------------------------------------


def test_a_plain_file_from_anywhere_opens_with_its_metadata_in_natural_order(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.w": np.full(3, i, np.float32) for i in (10, 9, 1)}
    safetensors.numpy.save_file(tensors, tmp_path / "my model.safetensors", metadata={"format": "pt"})
    with exploring(tmp_path / "my model.safetensors", tmp_path) as client:
        (one,) = client.ask("checkpoints")["items"]
        assert (one["kind"], one["step"], one["metadata"]) == ("safetensors", None, {"format": "pt"})
        below = client.ask("tree", id=one["id"], under="layers")["items"]
        assert [node["label"] for node in below] == ["1", "9", "10"]
        assert client.ids(1) == ["my model.safetensors"]
        answer = client.http.get("/api/explorer/export", params={"place": client.places[0], "id": one["id"]})
        assert answer.content == (tmp_path / "my model.safetensors").read_bytes()


def test_a_file_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"w": np.zeros(4)}, path)
    with exploring(path) as client:
        assert client.ask("statistics", id=path.name, name="w")["statistics"]["max"] == 0.0
        safetensors.numpy.save_file({"w": np.ones(8)}, path)
        assert client.ask("statistics", id=path.name, name="w")["statistics"]["max"] == 1.0


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:-5], "bytes, but its header describes"),
        (lambda data: b"", "too few"),
        (lambda data: b"\xff" * 8 + data[8:], "claims"),
        (lambda data: data.replace(b"F32", b"X99"), "tensor 'w' has the unknown dtype 'X99'"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path, damage: Any, words: str) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"w": TABLE}, path)
    path.write_bytes(damage(path.read_bytes()))
    with exploring(tmp_path, path) as client:
        for place in client.places:
            problem = client.ask("tree", status=409, place=place, id="x.safetensors")["error"]["message"]
            assert "x.safetensors" in problem
            assert words in problem
        assert words in client.ask("checkpoints")["problems"]["x.safetensors"]


def test_a_file_truncated_while_it_is_open_is_reported_with_its_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"w": TABLE}, path)
    place = open_place(str(path))
    contents = place.open("x.safetensors")
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(CheckpointInvalid, match=r"x\.safetensors was truncated: tensor 'w'"):
        list(contents.pieces(contents.tensors["w"], Budget(ExplorerConfig(), SystemClock())))


def test_hostile_names_are_text_and_nothing_else(tmp_path: Path) -> None:
    safetensors.numpy.save_file({HOSTILE: TABLE, "../x": TABLE}, tmp_path / "x.safetensors")
    with exploring(tmp_path / "x.safetensors") as client:
        answer = client.http.get(
            "/api/explorer/histogram", params={"place": client.places[0], "id": "x.safetensors", "name": HOSTILE}
        )
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["name"] == HOSTILE
        assert client.ask("statistics", id="x.safetensors", name="../x")["name"] == "../x"
        client.ask("statistics", status=404, id="x.safetensors", name="../../etc/passwd")


@pytest.mark.parametrize(
    "saved_id",
    ["../secret", "..", ".", "/etc/passwd", "a/../../secret", "step-1/../..", "secret\0", "%2e%2e", "link.safetensors"],
)
def test_an_id_never_leads_out_of_its_place(tmp_path: Path, saved_id: str) -> None:
    inside = tmp_path / "inside"
    with CheckpointManager(str(tmp_path / "secret"), saver="thread") as manager:
        manager.save({"w": TABLE}, step=1).wait()
    with CheckpointManager(str(inside), saver="thread") as manager:
        manager.save({"w": TABLE}, step=1).wait()
    safetensors.numpy.save_file({"w": TABLE}, tmp_path / "secret.safetensors")
    (inside / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with exploring(inside) as client:
        for path in ("tree", "checkpoint", "statistics"):
            assert "error" in client.ask(path, status=404, id=saved_id, name="w")
        client.ask("tree", status=404, place="../secret", id=client.ids()[0])
        answer = client.http.post("/api/explorer/verify", json={"place": client.places[0], "id": saved_id})
        assert answer.status_code == 404


def test_a_read_beyond_the_limit_is_refused_with_the_cure(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"w": TABLE, "b": TABLE[0]}, tmp_path / "x.safetensors")
    with exploring(tmp_path, max_read_bytes=1_000, max_values=10) as client:
        tensor = {"id": "x.safetensors", "name": "w"}
        for path in ("histogram", "heatmap", "rows", "singular-values", "statistics"):
            problem = client.ask(path, status=413, **tensor)["error"]
            assert problem["kind"] == "ReadTooLarge"
            assert "max_read_bytes=1,000" in problem["message"]
        assert "max_values=10" in client.ask("values", status=422, **tensor, shape="4,4")["error"]["message"]
        scan = client.complete("tensors", id="x.safetensors", property="nan")["scan"]
        assert list(scan["problems"]) == ["w"]


@pytest.mark.parametrize(
    "query",
    [
        {"start": "64,0"},
        {"start": "0"},
        {"start": "0,0", "shape": "65,1"},
        {"start": "-1,0"},
        {"start": "a"},
        {"shape": "9" * 30},
    ],
)
def test_a_slice_outside_the_tensor_is_refused(saved: Path, query: dict[str, str]) -> None:
    with exploring(saved) as client:
        saved_id = client.ids()[0]
        answer = client.http.get(
            "/api/explorer/values", params={"place": client.places[0], "id": saved_id, "name": "model.table", **query}
        )
        assert answer.status_code == 422 or (answer.status_code == 200 and answer.json()["values"] == [])


def test_a_scan_continues_where_the_last_request_stopped(tmp_path: Path) -> None:
    tensors = {f"w{i}": TABLE for i in range(20)}
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors")
    with exploring(tmp_path, max_read_bytes=5 * TABLE.nbytes) as client:
        first = client.ask("tensors", id="x.safetensors", property="dead_rows")["scan"]
        assert (first["num_needed"], first["is_complete"]) == (20, False)
        assert 0 < first["num_done"] <= 5
        assert client.complete("tensors", id="x.safetensors", property="dead_rows")["scan"]["num_done"] == 20


def test_20_000_tensors_are_listed_searched_and_sorted(tmp_path: Path) -> None:
    names = [f"model.layers.{i // 20}.part{i % 20}" for i in range(20_000)]
    tensors = {name: np.full(2, i, np.float32) for i, name in enumerate(names)}
    with CheckpointManager(str(tmp_path), saver="thread") as manager:
        manager.save(tensors, step=1).wait()
    with exploring(tmp_path) as client:
        saved_id = client.ids()[0]
        assert client.ask("tree", id=saved_id)["items"][0]["num_tensors"] == 20_000
        layers = client.ask("tree", id=saved_id, under="model.layers", limit=1_000)
        assert (layers["total"], len(layers["items"])) == (1_000, 1_000)
        found = client.ask("tensors", id=saved_id, search="*layers.99?.part7", sort="norm", descending=True, limit=3)
        assert [one["name"] for one in found["items"]] == [f"model.layers.{i}.part7" for i in (999, 998, 997)]
        assert (found["total"], found["next_offset"], found["scan"]["read_bytes"]) == (10, 3, 0)


# -- places --------------------------------------------------------------------------------------------------------


def test_one_checkpoint_opens_without_its_neighbours_but_with_its_bases(saved: Path) -> None:
    with exploring(saved) as everything:
        first, second, third = everything.ids()
    with exploring(saved / third) as client:
        assert client.ids() == [third]
        assert client.ask("statistics", id=third, name="model.table")["statistics"]["num_nan"] == 0
        assert client.ask("checkpoint", id=third)["parent"] == second
        client.ask("checkpoint", status=404, id=first)


def test_the_directory_of_a_run_that_is_over_opens_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_RUNS_DIR", str(tmp_path / "runs"))
    run = run_directory.create(
        RunSpec(name="swift-otter", script="x.py", directory=".", checkpoints=str(tmp_path / "far"))
    )
    with pytest.raises(ConfigError, match="run swift-otter has no checkpoints"):
        open_place(str(run.path))
    with CheckpointManager(str(tmp_path / "far"), saver="thread") as manager:
        manager.save({"w": TABLE}, step=1).wait()
    with exploring(run.path, "swift-otter") as client:
        assert len(client.places) == 1, "both name the same checkpoints"
        assert len(client.ids()) == 1
        assert client.ask("places")["items"][0]["label"] == "swift-otter"


@pytest.mark.parametrize("location", ["absent/directory", "ftp://host/x", "file.txt"])
def test_a_location_that_cannot_be_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("x")

    with pytest.raises(ConfigError):
        open_place(location)
