"""The Ray engine's decisions, and both sides of its protocol with an actor, without a cluster."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import exceptions

from strata.errors import ConfigError
from strata.identity import Identity
from strata.launch.environment import WorkerSpec
from strata.launch.nodes import ray_actor, ray_cluster
from strata.launch.nodes.base import NodeLost
from strata.launch.nodes.ray import RayNode
from strata.launch.nodes.ray_actor import ActorReady, LogPart, News, NodeActor, at_home
from strata.launch.nodes.ray_cluster import Machine, is_here_only, num_that_fit, reserved, visible_devices
from strata.launch.protocol import NOT_STARTED, KillWorkers, StartWorkers, WorkerExit, WorkerOrder, decode, encode
from strata.launch.record.directory import RunDirectory
from strata.launch.spec import RunSpec, Size


def spec(**changed: Any) -> RunSpec:
    given = {"name": "job", "script": "/src/train.py", "directory": "/src", "checkpoints": "/k", "engine": "ray"}
    return RunSpec(**{**given, **changed})


def worker_spec(rank: int, attempt: int = 0, incarnation: int = 0) -> WorkerSpec:
    return WorkerSpec(
        identity=Identity(
            run="job",
            attempt=attempt,
            incarnation=incarnation,
            rank=rank,
            world_size=2,
            local_rank=0,
            local_world_size=1,
            master_port=1,
        ),
        coordinator="c:1",
        checkpoints="/k",
    )


# -- decisions ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 8)), max_size=5), st.sampled_from([0.1, 0.5, 1, 2, 3]))
def test_as_many_fit_as_the_scarcest_resource_of_each_machine_allows(
    machines: list[tuple[int, int]], cpus: float
) -> None:
    found = [Machine("m", {"CPU": float(num_cpus), "GPU": float(num_gpus)}) for num_cpus, num_gpus in machines]
    expected = sum(min(int(round(num_cpus / cpus, 6)), num_gpus) for num_cpus, num_gpus in machines)
    assert num_that_fit(found, {"CPU": cpus, "GPU": 1.0}) == expected


def test_a_machine_without_a_resource_runs_no_worker_that_needs_it() -> None:
    assert num_that_fit([Machine("m", {"CPU": 8.0})], {"GPU": 1.0}) == 0


@pytest.mark.parametrize(
    ("machines", "changed", "expected"),
    [
        ([("own", 4)], {}, True),
        ([("own", 1), ("own", 1)], {}, True),
        ([("own", 1)], {}, False),  # a cluster that must grow
        ([("own", 4), ("other", 4)], {}, False),
        ([("own", 4)], {"ships": True}, False),
        ([("own", 4)], {"ships": False}, True),
    ],
)
def test_a_run_stays_on_this_machine_if_the_cluster_is_no_larger_and_need_not_be(
    machines: list[tuple[str, int]], changed: dict[str, Any], expected: bool
) -> None:
    found = [Machine(address, {"CPU": float(cpus)}) for address, cpus in machines]
    assert is_here_only(found, "own", spec(workers=Size(1, 2), **changed)) is expected


@pytest.mark.parametrize(
    ("changed", "cure"),
    [
        ({"cpus_per_worker": 0.0}, "must reserve CPUs or GPUs"),
        ({"gpus_per_worker": 1.5}, "a whole number, or less than 1"),
    ],
)
def test_what_ray_cannot_reserve_is_refused(changed: dict[str, Any], cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        reserved(spec(**changed))


def test_a_client_address_is_refused_and_so_is_a_ray_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="ray job submit"):
        ray_cluster.check(spec(address="ray://head:10001"))
    monkeypatch.setattr(ray_cluster, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install .strata-runtime\[ray\]"):
        ray_cluster.check(spec())


@pytest.mark.parametrize(
    ("per_place", "each", "expected"),
    [
        (["3", "1"], 1.0, ["3", "1"]),  # local rank 1 finds its own as number 1
        (["0", "0"], 0.5, []),
        (["0,1", "2,3"], 2.0, []),
        (["", ""], 0.0, []),
        (["3", ""], 1.0, []),
    ],
)
def test_workers_of_a_machine_see_each_others_gpus_in_the_order_of_their_ranks(
    per_place: list[str], each: float, expected: list[str]
) -> None:
    assert visible_devices(per_place, each) == expected


def test_the_script_is_found_in_a_copy_of_the_working_directory() -> None:
    moved = at_home(spec(script="/src/jobs/train.py"), Path("/copy"))
    assert (moved.directory, moved.script) == ("/copy", "/copy/jobs/train.py")
    module = at_home(spec(script="jobs.train", is_module=True), Path("/copy"))
    assert (module.directory, module.script) == ("/copy", "jobs.train")
    with pytest.raises(ConfigError, match="call `strata run` in a directory that contains the script"):
        at_home(spec(script="/elsewhere/train.py"), Path("/copy"))


def test_checkpoints_in_the_directory_of_the_run_are_refused_for_several_machines(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, spec())
    with pytest.raises(ConfigError, match="a location that all of them can reach"):
        ray_cluster.check_checkpoints(spec(checkpoints=str(tmp_path / "checkpoints")), directory)
    ray_cluster.check_checkpoints(spec(checkpoints="s3://bucket/run"), directory)


class FakeRay:
    """A fake of the parts of Ray that a run uses to connect."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.given: dict[str, Any] = {}

    def get_runtime_context(self) -> Any:
        return type("Context", (), {"gcs_address": "10.0.0.1:6379"})

    def shutdown(self) -> None: ...

    def init(self, **given: Any) -> None:
        self.given = given
        if self.error is not None:
            raise self.error


def test_a_missing_cluster_is_reported_soon_with_the_cure() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"there is no Ray cluster at .* start one with `ray start --head`"):
            ray_cluster._init(FakeRay(), spec(address=address))


def test_a_cluster_that_we_start_has_room_for_all_workers_and_no_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray = FakeRay()
    ray_cluster._init(ray, spec(workers=Size(1, 500), cpus_per_worker=0.5))
    assert (ray.given["address"], ray.given["num_cpus"]) == ("local", 250)
    assert ray.given["include_dashboard"] is False


def test_the_working_directory_is_copied_and_one_that_is_too_large_is_refused_with_the_cure() -> None:
    ray = FakeRay()
    ray_cluster._ship(ray, spec(variables={"A": "1"}), is_found=False)
    assert ray.given["runtime_env"] == {"working_dir": "/src", "env_vars": {"A": "1"}}
    too_large = FakeRay(ValueError("Package size (700MiB) exceeds the maximum size of 500MiB"))
    with pytest.raises(ConfigError, match=r"700MiB.*\.rayignore or \.gitignore.*--no-ship"):
        ray_cluster._ship(too_large, spec(), is_found=False)
    with pytest.raises(ConfigError, match="has already connected to Ray"):
        ray_cluster._ship(ray, spec(), is_found=True)


# -- the agent's end ---------------------------------------------------------------------------------------------------


class FakeActor:
    """Answers as Ray does: with a reference that has a future."""

    def __init__(self, **answers: Callable[..., object]) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._answers = answers

    def __getattr__(self, method: str) -> Any:
        return _Method(self, method, self._answers.get(method, lambda *_: None))


class _Method:
    def __init__(self, actor: FakeActor, name: str, function: Callable[..., object]) -> None:
        self._actor, self._name, self._function = actor, name, function

    def remote(self, *arguments: Any) -> Any:
        self._actor.calls.append((self._name, arguments))
        future: concurrent.futures.Future[object] = concurrent.futures.Future()
        found = self._function(*arguments)
        if isinstance(found, Exception):
            future.set_exception(found)
        elif found is not NEVER:
            future.set_result(found)
        return type("Reference", (), {"future": lambda _: future})()


NEVER = object()


def unavailable() -> Exception:
    return exceptions.ActorUnavailableError("socket closed", b"\0" * 16)


def node(actor: FakeActor, *, logs: RunDirectory | None = None, devices: Sequence[str] = ()) -> RayNode:
    here = ActorReady(host="h", address="10.0.0.1", version="1")
    return RayNode(actor, here, name="ray-1", logs=logs, devices=lambda _: devices)


def test_news_that_were_lost_are_fetched_again_under_the_same_number() -> None:
    news = iter(
        [
            encode(News()),
            unavailable(),
            encode(News(exit=WorkerExit(1, 3, "bad"))),
            encode(News(exit=WorkerExit(2, 0, ""))),
        ]
    )

    async def scene() -> None:
        actor = FakeActor(news=lambda _: next(news))
        found = node(actor)
        assert await found.next_exit() == WorkerExit(1, 3, "bad")
        assert await found.next_exit() == WorkerExit(2, 0, "")
        assert [arguments for _, arguments in actor.calls] == [(0,), (1,), (1,), (2,)]
        assert not found.lost.is_set()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("error", "num_calls"), [(unavailable, 2), (exceptions.ActorDiedError, 1)], ids=["silent", "dead"]
)
def test_an_actor_that_is_dead_or_stays_silent_is_a_lost_node(error: Callable[[], Exception], num_calls: int) -> None:
    async def scene() -> None:
        actor = FakeActor(news=lambda _: error())
        found = node(actor)
        with pytest.raises(NodeLost):
            await found.next_exit()
        assert found.lost.is_set()
        assert len(actor.calls) == num_calls
        await found.launch([worker_spec(0)])  # orders to it do nothing
        assert await found.free_port() == 0
        await found.close()
        assert len(actor.calls) == num_calls

    asyncio.run(scene())


def test_an_unanswered_launch_ends_when_the_node_is_lost() -> None:
    async def scene() -> None:
        found = node(FakeActor(obey=lambda _: NEVER))
        launching = asyncio.create_task(found.launch([worker_spec(0)]))
        await asyncio.sleep(0)
        assert not launching.done()
        found.lost.set()
        async with asyncio.timeout(10):
            await launching

    asyncio.run(scene())


def test_a_call_is_repeated_until_it_is_answered() -> None:
    answers = iter([unavailable(), unavailable(), 4321])

    async def scene() -> None:
        actor = FakeActor(free_port=lambda: next(answers))
        assert await node(actor).free_port() == 4321

    asyncio.run(scene())


def test_a_kill_during_the_launch_is_repeated_after_it() -> None:
    async def scene() -> None:
        actor = FakeActor()
        found = node(actor, devices=["3", "1"])
        launching = asyncio.create_task(found.launch([worker_spec(0, attempt=4)]))
        await asyncio.sleep(0)
        found.kill([0, 9])
        await launching
        for _ in range(20):
            await asyncio.sleep(0)
        orders = [msgspec.msgpack.decode(arguments[0], type=WorkerOrder) for _, arguments in actor.calls]
        start = StartWorkers.of([worker_spec(0, attempt=4)], {"CUDA_VISIBLE_DEVICES": "3,1"})
        assert orders == [start, KillWorkers(4, (0,)), KillWorkers(4, (0,))]

    asyncio.run(scene())


def test_output_of_remote_workers_is_in_the_run_directory(tmp_path: Path) -> None:
    news = iter(
        [
            encode(News(logs=[LogPart(0, 1, b"one\n")])),
            encode(News(exit=WorkerExit(1, 1, ""), logs=[LogPart(0, 1, b"two\n")])),
        ]
    )

    async def scene() -> None:
        directory = RunDirectory(tmp_path, spec(workers=Size(2, 2)))
        await node(FakeActor(news=lambda _: next(news)), logs=directory).next_exit()
        assert directory.log_path(0, 1).read_bytes() == b"one\ntwo\n"

    asyncio.run(scene())


# -- the actor's end ---------------------------------------------------------------------------------------------------


class FakeLocalNode:
    def __init__(self) -> None:
        self.orders: list[object] = []
        self.devices: dict[str, str] = {}
        self.refusal: ConfigError | None = None

    async def launch(self, workers: Sequence[WorkerSpec]) -> None:
        self.orders.append([worker_spec.identity.rank for worker_spec in workers])
        if self.refusal is not None:
            raise self.refusal

    def kill(self, ranks: Sequence[int]) -> None:
        self.orders.append(("kill", list(ranks)))


def actor_with(local: FakeLocalNode, directory: RunDirectory, *, is_away: bool = False) -> NodeActor:
    actor = NodeActor()
    actor._node, actor._directory, actor._is_away = local, directory, is_away  # type: ignore[assignment]
    return actor


def test_a_repeated_order_starts_no_worker_twice_and_a_late_kill_is_ignored(tmp_path: Path) -> None:
    async def scene() -> None:
        local = FakeLocalNode()
        actor = actor_with(local, RunDirectory(tmp_path, spec()))
        for _ in range(2):
            await actor.obey(encode(StartWorkers.of([worker_spec(1, attempt=1)])))
        await actor.obey(encode(KillWorkers(0, (1,))))
        await actor.obey(encode(KillWorkers(1, (1,))))
        assert local.orders == [[1], ("kill", []), ("kill", [1])]

    asyncio.run(scene())


def test_a_worker_that_reports_that_it_may_be_is_restarted_alone_and_continues_its_log(tmp_path: Path) -> None:
    async def scene() -> None:
        local = FakeLocalNode()
        directory = RunDirectory(tmp_path, spec())
        actor = actor_with(local, directory, is_away=True)
        await actor.obey(encode(StartWorkers.of([worker_spec(0)])))
        directory.log_path(0, 0).write_bytes(b"first\n")
        actor._exits.put_nowait(WorkerExit(0, -signal.SIGKILL, step=3, is_alone=True))
        end = decode(await actor.news(0), News)
        assert end.exit == WorkerExit(0, -signal.SIGKILL, step=3, is_alone=True)
        assert end.logs == [LogPart(0, 0, b"first\n")]
        for incarnation in (1, 1, 0):  # repeated, and late
            await actor.obey(encode(StartWorkers.of([worker_spec(0, incarnation=incarnation)])))
        assert local.orders == [[0], [0]]
        with directory.log_path(0, 0).open("ab") as file:
            file.write(b"second\n")
        actor._exits.put_nowait(WorkerExit(0, 0))
        assert decode(await actor.news(1), News).logs == [LogPart(0, 0, b"second\n")]

    asyncio.run(scene())


def test_a_worker_that_cannot_be_started_ends_with_the_reason(tmp_path: Path) -> None:
    async def scene() -> None:
        local = FakeLocalNode()
        local.refusal = ConfigError("the disk is full")
        actor = actor_with(local, RunDirectory(tmp_path, spec()))
        await actor.obey(encode(StartWorkers.of([worker_spec(1)])))
        assert decode(await actor.news(0), News).exit == WorkerExit(1, NOT_STARTED, "the disk is full")

    asyncio.run(scene())


@pytest.mark.parametrize("error", [OSError, TimeoutError])
def test_an_actor_that_cannot_receive_exits_reports_it_on_every_call(tmp_path: Path, error: type[Exception]) -> None:
    class Broken(FakeLocalNode):
        async def next_exit(self) -> WorkerExit:
            raise error("stale file handle")

    async def scene() -> None:
        local = Broken()
        actor = actor_with(local, RunDirectory(tmp_path, spec()))
        await actor._collect(local)  # type: ignore[arg-type]
        for _ in range(2):
            with pytest.raises(NodeLost, match=f"{error.__name__}: stale file handle"):
                await actor.news(0)

    asyncio.run(scene())


def test_invalid_news_mean_a_lost_node() -> None:
    async def scene() -> None:
        found = node(FakeActor(news=lambda _: b"?"))
        with pytest.raises(msgspec.DecodeError):
            await found.next_exit()
        assert found.lost.is_set()

    asyncio.run(scene())


def test_news_are_the_same_when_asked_for_again_and_hold_the_end_of_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_actor, "LOG_INTERVAL_S", 0.001)
    monkeypatch.setattr(ray_actor, "MAX_NEWS_BYTES", 8)

    async def scene() -> None:
        directory = RunDirectory(tmp_path, spec())
        actor = actor_with(FakeLocalNode(), directory, is_away=True)
        await actor.obey(encode(StartWorkers.of([worker_spec(0)])))
        directory.log_path(0, 0).write_bytes(b"first\n")
        first = await actor.news(0)
        assert decode(first, News) == News(logs=[LogPart(0, 0, b"first\n")])
        assert await actor.news(0) == first
        with directory.log_path(0, 0).open("ab") as file:
            file.write(b"x" * 10 + b"the end\n")
        actor._exits.put_nowait(WorkerExit(0, -signal.SIGKILL))
        last = decode(await actor.news(1), News)
        assert last.exit == WorkerExit(0, -signal.SIGKILL, "")
        assert last.logs == [LogPart(0, 0, b"\n[10 bytes omitted]\nthe end\n")]

    asyncio.run(scene())


def test_what_a_killed_actor_has_left_is_removed_by_the_next_and_a_living_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living = ray_actor._Scratch()
    begin = ray_actor.BeginActor(spec=spec(), path="/r", is_away=True, is_shipped=True, ca=b"pem", token="secret")
    variables = living.credentials(begin)
    assert Path(variables["STRATA_TOKEN_FILE"]).read_text() == "secret"
    assert Path(variables["STRATA_TOKEN_FILE"]).stat().st_mode & 0o077 == 0
    left = tmp_path / "strata-ray-left"
    left.mkdir()
    (left / "lock").touch()
    other = ray_actor._Scratch()
    assert sorted(tmp_path.iterdir()) == sorted([living.path, other.path])
    living.remove()
    other.remove()
    assert list(tmp_path.iterdir()) == []
