"""PostgreSQL's primary dies under a leader and its standby, and a synchronous replica is promoted.

Both have the two databases in one URL. Nothing acknowledged is lost, no worker is declared dead, and no setting has to
change.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from postgres import USER, PostgresReplica, PostgresServer
from servers import Nursery, until
from test_standby import Load, Pair, ask_alone, membership, two_workers

from strata.coordinator.state import events as e
from strata.errors import JournalError

Replicated = tuple[PostgresServer, PostgresReplica]
PATIENT = {"leader_lease_s": 15.0, "poll_s": 0.02}
"""The leader keeps the leadership while the database is down."""


def state_on(primary: PostgresServer, replica: PostgresReplica) -> str:
    """A new state, wherever the primary is."""
    primary.sql("CREATE DATABASE failover")
    return (
        f"postgresql+psycopg://{USER}@/failover?host=127.0.0.1,127.0.0.1&port={primary.port},{replica.port}"
        "&target_session_attrs=read-write"
    )


def leader_on(server: PostgresServer) -> tuple[object, ...]:
    return server.sql("SELECT term, address FROM strata_leader", "/failover")[0]


def check_journal(pair: Pair, load: Load) -> None:
    load.check_nothing_lost(pair.core())
    records = pair.records()
    seqs = [record.seq for record in records]
    assert seqs == list(itertools.islice(itertools.count(seqs[0]), len(seqs)))
    assert [event for record in records if isinstance(event := e.decode(record.payload), e.WorkerLeft)] == []


def test_the_leader_and_its_standby_follow_a_promoted_replica(
    replicated_postgres: Replicated, nursery: Nursery, tmp_path: Path
) -> None:
    primary, replica = replicated_postgres
    pair = Pair(nursery, tmp_path, state_on(primary, replica), leadership=PATIENT)
    pair.start()
    with two_workers(pair.addresses) as (client, workers):
        before = membership(client)
        with Load(workers[0]) as load:
            primary.kill()
            replica.promote()
            load.wait_more()
            assert leader_on(replica) == (1, pair.leader.address)
            assert pair.leader.child.terminate() == 0
            pair.wait_taken_over()
            load.wait_more()
            assert leader_on(replica) == (2, pair.standby.address)
        assert [error for error in load.failures if not isinstance(error, JournalError)] == []
        assert membership(client) == before
        assert [worker.lost for worker in workers] == [None, None]
    check_journal(pair, load)


def test_a_failover_longer_than_the_leader_lease_loses_nothing(
    replicated_postgres: Replicated, nursery: Nursery, tmp_path: Path
) -> None:
    """The first of the two to reach the new primary leads; one that starts later finds it, too."""
    primary, replica = replicated_postgres
    pair = Pair(nursery, tmp_path, state_on(primary, replica))
    pair.start()
    with two_workers(pair.addresses) as (client, workers):
        before = membership(client)
        with Load(workers[0]) as load:
            primary.stop("immediate")
            until(lambda: ask_alone(pair.leader.address).kind == "NotLeader", "its lease runs out")
            replica.promote()
            load.wait_more()
        assert membership(client) == before
        pair.leader.kill()
        pair.standby.kill()
        pair.leader.start()
        assert membership(client) == before
        assert [worker.lost for worker in workers] == [None, None]
    check_journal(pair, load)
