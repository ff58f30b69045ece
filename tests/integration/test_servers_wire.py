"""Workers and servers over real sockets and shared memory, in threads and in processes that are killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strata.errors import InvalidArgument, StaleIncarnation, Unauthenticated
from strata.servers import protocol
from strata.servers.client import ServersClient
from strata.servers.clocks import Push
from strata.servers.connection import MAX_UNACKED, room_beside
from strata.servers.copies import fetch, opened
from strata.servers.placement import Placement
from strata.servers.server import Server
from strata.servers.state import Fence, ServerState
from strata.servers.table.initial import Initial
from strata.servers.table.optimizers import SGD, Adagrad
from strata.servers.table.table import NotFiniteGradient, TableSpec
from strata.transport.bulk import ConnectionLost, connect
from strata.transport.tokens import Grant, Guard, Role
from tests.integration.servers import until

TOKEN = "a-token-for-these-tests"
GUARD = Guard(lambda: (Grant(Role.WORKER, TOKEN.encode()), Grant(Role.READER, b"a-token-of-a-reader")))
WIDTHS = {"users": 8, "items": 4}
SPECS = [
    TableSpec(name=name, width=width, optimizer=Adagrad(lr=0.1), initial=Initial(seed=width))
    for name, width in WIDTHS.items()
]
PLAIN = [TableSpec(name=name, width=width, optimizer=SGD(lr=1.0)) for name, width in WIDTHS.items()]
DEADLINE_S = 30.0


class Cluster:
    """Servers of this process."""

    def __init__(self, directory: Path, kind: str, num_servers: int, **settings: Any) -> None:
        addresses = [f"unix:{directory}/{n}" if kind == "unix" else "127.0.0.1:0" for n in range(num_servers)]
        self.servers = [Server(ServerState(SPECS, **settings), address, guard=GUARD) for address in addresses]
        self.addresses = {f"server-{number}": server.addresses[0] for number, server in enumerate(self.servers)}

    def client(self, rank: int = 0, incarnation: int = 1, **more: Any) -> ServersClient:
        given = {"tokens": dict.fromkeys(self.addresses, TOKEN), **more}
        return ServersClient(self.addresses, Fence(rank, 0, incarnation), WIDTHS, **given)

    def rows(self, table: str) -> tuple[Any, Any]:
        saved = [server.state.tables[table].rows() for server in self.servers]
        keys = np.concatenate([each.keys for each in saved])
        order = np.argsort(keys)
        return keys[order], np.concatenate([each.weights for each in saved])[order]

    def close(self) -> None:
        for server in self.servers:
            server.close()


@pytest.fixture(params=["unix", "unix without shared memory", "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cluster(tmp_path: Path, kind: str) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, kind.partition(" ")[0], 2, num_workers=1, staleness=0)
    yield cluster
    cluster.close()


def keys_of(step: int, rank: int = 0) -> dict[str, Any]:
    generator = np.random.default_rng((step, rank))
    return {name: np.sort(generator.choice(5_000, 800, replace=False)).astype(np.uint64) for name in WIDTHS}


def train(client: ServersClient, rank: int, steps: int) -> None:
    for step in range(client.clock, steps):
        wanted = keys_of(step, rank)
        pulled = client.pull(step, wanted)
        rows = pulled.rows(DEADLINE_S)
        gradients = {name: Push(wanted[name], rows[name] * np.float32(0.5) + 1) for name in wanted}
        client.push(step + 1, gradients).result(DEADLINE_S)


def test_rows_and_gradients_travel_to_the_servers_that_own_them(cluster: Cluster, kind: str) -> None:
    client = cluster.client(region_bytes=0 if "without" in kind else 1 << 20)
    train(client, 0, 5)
    client.close()

    alone = ServerState(SPECS, num_workers=1, staleness=0)
    fence = Fence(0, 0, 1)
    alone.join(fence)
    for step in range(5):
        wanted = keys_of(step)
        rows = {name: alone.tables[name].pull(keys) for name, keys in wanted.items()}
        gradients = {name: Push(wanted[name], rows[name] * np.float32(0.5) + 1) for name in wanted}
        alone.push(fence, step + 1, gradients)
    for table in WIDTHS:
        keys, weights = cluster.rows(table)
        expected = alone.tables[table].rows()
        assert keys.tolist() == expected.keys.tolist()
        assert weights.tobytes() == expected.weights.tobytes()
    assert all(len(server.state.tables["users"]) > 100 for server in cluster.servers)


def test_rows_travel_between_machines_in_half_precision_on_request(tmp_path: Path) -> None:
    found = []
    for is_half in (False, True):
        cluster = Cluster(tmp_path, "tcp", 2, num_workers=1, staleness=0)
        client = cluster.client(is_half=is_half)
        train(client, 0, 3)
        wanted = keys_of(1)
        found.append(client.pull(3, wanted).rows(DEADLINE_S)["users"])
        kept = np.concatenate([server.state.tables["users"].pull(wanted["users"]) for server in cluster.servers])
        client.close()
        cluster.close()

    exact, halves = found
    assert (halves.astype(np.float16) == halves).all(), "sent in 16 bits"
    assert not (kept.astype(np.float16) == kept).all(), "kept in 32 bits"
    np.testing.assert_allclose(halves, exact, rtol=5e-3, atol=1e-4)


def test_shared_memory_is_never_converted_to_half_precision(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "unix", 1, num_workers=1, staleness=0)
    client = cluster.client(is_half=True)
    train(client, 0, 2)
    rows = client.pull(2, keys_of(1)).rows(DEADLINE_S)["users"]
    client.close()
    cluster.close()

    assert not (rows.astype(np.float16) == rows).all()


def test_a_push_that_overtakes_those_of_other_workers_waits_for_them(tmp_path: Path) -> None:
    """A worker whose batches need no rows of a server does not wait for the others there."""
    cluster = Cluster(tmp_path, "unix", 1, num_workers=2, staleness=0)
    fast, slow = cluster.client(0), cluster.client(1)
    key, ones = np.array([7], np.uint64), np.ones((1, WIDTHS["items"]), np.float32)
    early = [fast.push(1, {}), fast.push(2, {}, {}), fast.push(3, {"items": Push(key, ones)}, {"items": 0.5})]
    late = [slow.push(step, {"items": Push(key, ones)}) for step in (1, 2)]
    for each in (*early, *late):
        each.result(DEADLINE_S)
    slow.push(3, {}).result(DEADLINE_S)
    fast.close(), slow.close()

    alone = ServerState(SPECS, num_workers=1, staleness=0)
    fence = Fence(0, 0, 1)
    alone.join(fence)
    for step in (1, 2, 3):
        alone.push(fence, step, {"items": Push(key, ones / 2)}, {"items": 0.5 if step == 3 else 0.1})
    assert cluster.rows("items")[1].tobytes() == alone.tables["items"].rows().weights.tobytes()
    assert cluster.servers[0].state.step == 3
    cluster.close()


def test_a_server_that_waits_for_a_step_notices_workers_that_join_with_it(tmp_path: Path) -> None:
    """A restarted server is asked to save a step that an earlier process of it has acknowledged."""
    cluster = Cluster(tmp_path, "unix", 1, num_workers=1, staleness=None)
    waiting = threading.Thread(target=cluster.servers[0].wait_for_step, args=(5, DEADLINE_S))
    waiting.start()
    with connect(cluster.addresses["server-0"], token=TOKEN, max_bytes=1_000) as connection:
        connection.send(protocol.encode(protocol.Join(1, 0, 0, 1, clock=5)))
        connection.receive()
        waiting.join(DEADLINE_S / 2)
        assert not waiting.is_alive()
    cluster.close()


def test_rows_stay_in_shared_memory_while_they_are_used_and_later_pulls_do_not_change_them(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "unix", 1, num_workers=1, staleness=None)
    client = cluster.client(num_pulls=3)
    train(client, 0, 2)
    pulled = [client.pull(2, keys_of(step)).rows(DEADLINE_S) for step in range(5)]
    tensors = [torch.from_numpy(rows["users"][:]) for rows in pulled]
    is_lent = [rows["users"].base is not None for rows in pulled]
    expected = [cluster.servers[0].state.tables["users"].pull(keys_of(step)["users"]) for step in range(5)]
    del pulled

    assert is_lent == [True, True, False, False, False], "one region is left for the next pulls"
    assert [tensor.numpy().tobytes() for tensor in tensors] == [rows.tobytes() for rows in expected]
    del tensors
    again = client.pull(2, keys_of(0)).rows(DEADLINE_S)["users"]
    assert again.base is not None, "the regions of rows that are gone are free"
    client.close()
    assert again.tobytes() == expected[0].tobytes(), "rows outlive the connection"
    cluster.close()


def test_gradients_beside_pulled_rows_are_pushed_from_there_and_stay_until_the_server_has_read_them(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path, "unix", 1, num_workers=1, staleness=None)
    client, wanted = cluster.client(num_pulls=3), keys_of(0)
    gradients = {name: np.random.default_rng(1).normal(size=(800, WIDTHS[name])).astype(np.float32) for name in wanted}
    rows = client.pull(0, wanted).rows(DEADLINE_S)
    rooms = {name: room_beside(each) for name, each in rows.items()}
    for name, room in rooms.items():
        assert room is not None
        room[...] = gradients[name]
        assert client._links[0]._is_placed(room, slice(None)), "it is not copied"
    with cluster.servers[0]._lock:  # it reads nothing yet
        pushed = client.push(1, {name: Push(wanted[name], room) for name, room in rooms.items()})
        del rows, rooms, room
        later = [client.pull(1, keys_of(step)) for step in range(1, 6)]
    pushed.result(DEADLINE_S)
    for each in later:
        each.rows(DEADLINE_S)

    alone = ServerState(SPECS, num_workers=1, staleness=None)
    alone.join(Fence(0, 0, 1))
    alone.push(Fence(0, 0, 1), 1, {name: Push(wanted[name], each) for name, each in gradients.items()})
    for name, table in alone.tables.items():
        assert cluster.rows(name)[1].tobytes() == table.rows().weights.tobytes()
    client.close()
    cluster.close()


def test_a_message_that_does_not_fit_into_shared_memory_goes_through_the_socket(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "unix", 1, num_workers=1, staleness=None)
    client = cluster.client(region_bytes=1 << 13)
    train(client, 0, 3)
    assert cluster.servers[0].state.step == 3
    client.close()
    cluster.close()


def test_pulls_that_are_never_read_do_not_block_later_ones(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "unix", 1, num_workers=1, staleness=None)
    client = cluster.client()
    kept = [client.pull(0, keys_of(step)) for step in range(10)]
    for step, pulled in enumerate(kept):
        expected = cluster.servers[0].state.tables["users"].pull(keys_of(step)["users"])
        assert pulled.rows(DEADLINE_S)["users"].tobytes() == expected.tobytes()
    client.close()
    cluster.close()


def test_two_synchronous_workers_in_threads_make_the_same_bits_every_time(tmp_path: Path) -> None:
    def run(number: int) -> list[bytes]:
        place = tmp_path / str(number)
        place.mkdir()
        cluster = Cluster(place, "unix", 2, num_workers=2, staleness=0)
        clients = [cluster.client(rank) for rank in range(2)]
        threads = [threading.Thread(target=train, args=(client, rank, 6)) for rank, client in enumerate(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        found = [array.tobytes() for table in WIDTHS for array in cluster.rows(table)]
        for client in clients:
            client.close()
        cluster.close()
        return found

    assert run(0) == run(1)


def test_errors_of_a_server_reach_the_worker_with_their_type(cluster: Cluster) -> None:
    client = cluster.client()
    bad = np.full((1, 8), np.nan, np.float32)
    with pytest.raises(NotFiniteGradient, match="table 'users'"):
        client.push(1, {"users": Push(np.array([3], np.uint64), bad)}).result(DEADLINE_S)
    client._widths["visitors"] = 4
    with pytest.raises(InvalidArgument, match="table 'visitors' is unknown"):
        client.pull(0, {"visitors": np.arange(50, dtype=np.uint64)}).rows(DEADLINE_S)
    client.close()


def test_a_replaced_worker_is_refused_and_the_new_one_continues_at_its_clock(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "unix", 1, num_workers=1, staleness=None)
    old = cluster.client(incarnation=1)
    train(old, 0, 2)
    new = cluster.client(incarnation=2)
    assert new.clock == 2
    with pytest.raises(StaleIncarnation):
        old.pull(2, keys_of(2)).rows(DEADLINE_S)
    with pytest.raises(StaleIncarnation):
        cluster.client(incarnation=1)
    old.close()
    new.close()
    cluster.close()


def test_a_worker_that_joins_anew_keeps_its_pulls_when_its_first_connection_ends(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "unix", 1, num_workers=2, staleness=0)
    first, other = cluster.client(0), cluster.client(1)
    second = cluster.client(0)
    wanted = keys_of(0)
    second.push(1, {}).result(DEADLINE_S)
    pulled = second.pull(1, wanted)  # waits for the other worker
    first.close()
    until(lambda: cluster.servers[0].num_joined == 2, "the first connection has ended")

    other.push(1, {}).result(DEADLINE_S)

    assert len(pulled.rows(DEADLINE_S)["users"]) == len(wanted["users"])
    second.close()
    other.close()
    cluster.close()


@pytest.mark.parametrize("removed", [False, True])
def test_a_new_owner_copies_its_rows_while_training_continues_and_then_what_has_changed(
    tmp_path: Path, removed: bool
) -> None:
    cluster = Cluster(tmp_path, "unix", 1, num_workers=1, staleness=0)
    source, client = cluster.servers[0], cluster.client()
    train(client, 0, 3)
    new = ServerState(SPECS, num_workers=1, staleness=0)
    num_copied = []

    def is_new(keys: Any) -> Any:
        return Placement.of(2).owners_of(keys) == 1

    with opened(source.addresses[0], SPECS, token=TOKEN, server=1, num_servers=2) as connection:
        for step in (0, 5):
            pieces = list(connection.pieces(step))
            num_copied.append(sum(len(each.rows.keys) for each in pieces))
            for piece in pieces:
                if piece.is_first and piece.is_whole:
                    new.keep_only(lambda keys: np.zeros(len(keys), np.bool_), piece.table)
                new.receive(piece.table, piece.rows, piece.about)
            if not step:
                train(client, 0, 5)
                if removed:
                    users = source.state.tables["users"]
                    users.remove(users.rows(keep=is_new).keys[:5])
    client.close()

    for name, table in source.state.tables.items():
        expected, found = table.rows(keep=is_new), new.tables[name].rows()
        assert [each.tobytes() for each in found] == [each.tobytes() for each in expected]
        assert new.tables[name].num_updates == table.num_updates == 5
    total = sum(map(len, new.tables.values()))
    assert num_copied[1] < total or removed
    cluster.close()


def test_a_reader_may_not_train(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "unix", 1, num_workers=1, staleness=None)
    with pytest.raises(Unauthenticated, match="requires the role worker; this token has reader"):
        cluster.client(tokens={"server-0": "a-token-of-a-reader"})
    cluster.close()


def test_bytes_that_are_no_request_end_the_connection_only(cluster: Cluster) -> None:
    client = cluster.client()
    with connect(cluster.servers[0].addresses[0], token=TOKEN, max_bytes=1_000) as hostile:
        hostile.send(b"\x93\x01\x02")
        with contextlib.suppress(ConnectionLost):
            assert hostile.receive() is None
    train(client, 0, 1)
    client.close()


def test_a_worker_learns_which_server_is_lost(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "unix", 2, num_workers=1, staleness=None)
    client = cluster.client()
    cluster.servers[1].close()
    with pytest.raises(ConnectionLost, match="parameter server server-1"):
        client.pull(0, keys_of(0)).rows(DEADLINE_S)
    client.close()
    cluster.close()


def counted(number: int) -> dict[str, Push]:
    """Return a push whose gradients differ from step to step, and have no rows on some server now and then."""
    keys = np.arange(number % 3, 40 * (number % 2) + 2, dtype=np.uint64)
    return {name: Push(keys, np.full((len(keys), width), number, np.float32)) for name, width in WIDTHS.items()}


@pytest.mark.parametrize("num_bytes", [0, 1 << 20])
def test_a_server_that_returns_gets_what_it_has_not_acknowledged_and_counts_what_it_has_lost(
    tmp_path: Path, num_bytes: int
) -> None:
    def start(name: str, step: int) -> Server:
        server = Server(ServerState(PLAIN, num_workers=1, staleness=None), f"unix:{tmp_path}/{name}", guard=GUARD)
        server.state.begin(step)
        return server

    kept, lost = start("kept", 0), start("lost", 0)
    names = ("server-0", "server-1")
    addresses = {name: each.addresses[0] for name, each in zip(names, (kept, lost), strict=True)}
    tokens = dict.fromkeys(names, TOKEN)
    client = ServersClient(addresses, Fence(0, 0, 1), WIDTHS, tokens=tokens, region_bytes=num_bytes, is_patient=True)
    for step in range(1, 8):
        client.push(step, counted(step)).result(DEADLINE_S)
    lost.close()
    until(lambda: bool(client.lost), "the loss is known")
    assert list(client.lost) == [1]
    pushed = [client.push(step, counted(step)) for step in (8, 9)]  # without waiting for the server
    found = start("returned", 5)  # from a checkpoint of step 5
    num_lost = client.reconnect(1, found.addresses[0], token=TOKEN, context=None, saved=(0, 0))
    for each in pushed:
        each.result(DEADLINE_S)
    client.push(10, counted(10)).result(DEADLINE_S)

    assert (num_lost, found.state.num_lost) == (2, 2)
    assert not client.lost
    assert (kept.state.step, found.state.step) == (10, 10)
    expected = ServerState(PLAIN, num_workers=1, staleness=None)
    expected.join(Fence(0, 0, 1))
    owned = Placement.of(len(names))
    for clock, step in enumerate((8, 9, 10), start=1):
        own = {
            name: Push(push.keys[of], push.gradients[of])
            for name, push in counted(step).items()
            for of in [owned.owners_of(push.keys) == 1]
        }
        expected.push(Fence(0, 0, 1), clock, own)
    for name in WIDTHS:
        now, then = found.state.tables[name].rows(), expected.tables[name].rows()
        assert (now.keys.tolist(), now.weights.tolist()) == (then.keys.tolist(), then.weights.tolist())
    client.close()
    kept.close()
    found.close()


def test_a_push_that_was_applied_and_not_acknowledged_is_not_applied_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "unix", 1, num_workers=1, staleness=None)
    client = cluster.client(is_patient=True)
    server = cluster.servers[0]
    client.push(1, counted(1)).result(DEADLINE_S)
    client._links[0]._connection.close()  # the network fails, not the server
    until(lambda: bool(client.lost), "the loss is known")
    pushed = client.push(2, counted(2))
    server.state.push(Fence(0, 0, 1), 2, counted(2))  # its acknowledgement was lost
    before = server.state.tables["users"].rows().weights.tolist()

    assert client.reconnect(0, server.addresses[0], token=TOKEN, context=None, saved=(0, 0)) == 0

    pushed.result(DEADLINE_S)
    assert server.state.tables["users"].rows().weights.tolist() == before
    client.push(3, counted(3)).result(DEADLINE_S)
    client.close()
    cluster.close()


def test_a_server_that_returns_takes_its_rows_from_its_copy_and_has_lost_nothing(tmp_path: Path) -> None:
    def start(name: str, **more: Any) -> Server:
        state = ServerState(PLAIN, num_workers=1, staleness=None)
        return Server(state, f"unix:{tmp_path}/{name}", guard=GUARD, **more)

    def client_of(server: Server) -> ServersClient:
        return ServersClient(
            {"only": server.addresses[0]}, Fence(0, 0, 1), WIDTHS, tokens={"only": TOKEN}, is_patient=True
        )

    server, copy = start("server"), start("copy", is_copy=True)
    client, copies = client_of(server), client_of(copy)
    for step in range(1, 6):
        client.push(step, counted(step), saved=(step, 1), copies=copies)  # the copy waits for no checkpoint
        server.saved(step)
    until(lambda: server.state.step == copy.state.step == 5, "both have applied all pushes")
    server.close()
    until(lambda: bool(client.lost), "the loss is known")
    pushed = client.push(6, counted(6), copies=copies)
    until(lambda: copy.state.step == 6, "the copy is ahead")
    assert not pushed.done()

    returned = start("returned")
    returned.state.take_over(fetch(copy.addresses[0], PLAIN, token=TOKEN))
    assert client.reconnect(0, returned.addresses[0], token=TOKEN, context=None, saved=(5, 1)) == 0
    pushed.result(DEADLINE_S)
    client.push(7, counted(7), copies=copies).result(DEADLINE_S)

    expected = ServerState(PLAIN, num_workers=1, staleness=None)
    expected.join(Fence(0, 0, 1))
    for step in range(1, 8):
        expected.push(Fence(0, 0, 1), step, counted(step))
    for name in WIDTHS:
        rows = [each.tables[name].rows() for each in (returned.state, copy.state, expected)]
        assert len({(each.keys.tobytes(), each.weights.tobytes(), each.versions.tobytes()) for each in rows}) == 1
    for each in (client, copies, returned, copy):
        each.close()


def test_a_push_does_not_wait_for_the_acknowledgement_of_a_lost_copy(tmp_path: Path) -> None:
    states = [ServerState(PLAIN, num_workers=1, staleness=None) for _ in range(2)]
    server, copy = (Server(each, f"unix:{tmp_path}/{n}", guard=GUARD) for n, each in enumerate(states))
    client, copies = (
        ServersClient({"only": each.addresses[0]}, Fence(0, 0, 1), WIDTHS, tokens={"only": TOKEN}, is_patient=True)
        for each in (server, copy)
    )
    copy.close()
    until(lambda: bool(copies.lost), "the loss is known")
    pushed = [client.push(step, counted(step), copies=copies) for step in range(1, 2 * MAX_UNACKED)]
    until(lambda: server.state.step == len(pushed), "the server has applied all of them")
    assert not any(each.done() for each in pushed)
    for each in (client, copies, server):
        each.close()


SERVER = """
    import sys, threading
    from strata.servers.server import Server
    from strata.servers.state import ServerState
    from tests.integration.test_servers_wire import GUARD, SPECS

    server = Server(ServerState(SPECS, num_workers=1, staleness=0), sys.argv[1], guard=GUARD)
    print("ready", flush=True)
    threading.Event().wait()
"""


def test_a_server_that_is_killed_fails_pending_pulls_at_once(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVER), f"unix:{tmp_path}/server"],
        stdout=subprocess.PIPE,
        cwd=root,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    client = ServersClient({"only": f"unix:{tmp_path}/server"}, Fence(0, 0, 1), WIDTHS, tokens={"only": TOKEN})
    train(client, 0, 2)
    waiting = client.pull(5, keys_of(5))  # of a step that never comes
    process.kill()
    with pytest.raises(ConnectionLost, match="parameter server only"):
        waiting.rows(DEADLINE_S)
    process.wait()
    process.stdout.close()
    client.close()


# -- a slow worker -----------------------------------------------------------------------------------------------------


class SlowWorker:
    """Makes a step whenever the test allows it."""

    def __init__(self, client: ServersClient, rank: int) -> None:
        self._client = client
        self._rank = rank

    def step(self) -> None:
        train(self._client, self._rank, self._client.clock + 1)
        self._client.clock += 1


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_fast_worker_is_never_further_ahead_than_the_staleness(tmp_path: Path, staleness: int) -> None:
    """The slow worker makes a step only when the fast one has to wait for it."""
    cluster = Cluster(tmp_path, "unix", 2, num_workers=2, staleness=staleness)
    clients = [cluster.client(rank) for rank in range(2)]
    steps = 8
    fast, slow = threading.Thread(target=train, args=(clients[0], 0, steps)), SlowWorker(clients[1], 1)
    fast.start()
    states = [server.state for server in cluster.servers]
    for step in range(steps):
        ahead = min(step + staleness + 1, steps)
        if ahead < steps:
            until(lambda: any(state.waits_for() == [1] for state in states), "the fast worker waits")
        until(lambda ahead=ahead: all(state.clocks.of(0) == ahead for state in states), f"it makes {ahead} steps")
        assert [state.clocks.of(1) for state in states] == [step, step]
        slow.step()
    fast.join(DEADLINE_S)

    assert not fast.is_alive()
    assert [(state.clocks.of(0), state.clocks.of(1)) for state in states] == [(steps, steps)] * 2
    for client in clients:
        client.close()
    cluster.close()


def test_an_asynchronous_worker_makes_all_its_steps_while_another_makes_a_quarter(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "unix", 2, num_workers=2, staleness=None)
    clients = [cluster.client(rank) for rank in range(2)]
    slow = SlowWorker(clients[1], 1)
    for quarter in range(1, 5):
        train(clients[0], 0, 4 * quarter)
        clients[0].clock = 4 * quarter
        slow.step()

    for server in cluster.servers:
        assert (server.state.clocks.of(0), server.state.clocks.of(1)) == (16, 4)
    for client in clients:
        client.close()
    cluster.close()
