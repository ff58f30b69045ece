"""docs/wire-protocol.md matches the code: the table of errors, and every call of the service."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strata.coordinator import wire
from strata.errors import BY_KIND, CheckpointError, DataError, StorageError
from strata.v1 import coordinator_pb2, types_pb2

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "wire-protocol.md"
ROW = re.compile(r"^\| `(\w+)` \| `([A-Z_]+)` \| (.+) \|$", re.MULTILINE)

# Raised on the caller's side, or by a coordinator that does not start; CoordinatorError is only their base class.
NEVER_SENT = {
    "ConfigError",
    "CoordinatorError",
    "CoordinatorUnavailable",
    "ForkedProcess",
    "JournalLocked",
    "RunFailed",
} | {kind for kind, error in BY_KIND.items() if issubclass(error, CheckpointError | DataError | StorageError)}


@pytest.fixture(scope="module")
def text() -> str:
    return DOCUMENT.read_text(encoding="utf-8")


def test_the_table_of_errors_is_the_one_in_the_code(text: str) -> None:
    documented = {kind: code for kind, code, _ in ROW.findall(text)}

    sent = BY_KIND.keys() - NEVER_SENT
    assert documented == {kind: wire.status_of(BY_KIND[kind]("x")).name for kind in sent}
    assert BY_KIND.keys() > NEVER_SENT


def test_every_error_has_a_cure(text: str) -> None:
    assert all(len(cure) > 20 for _, _, cure in ROW.findall(text))


def test_every_call_of_the_service_is_documented(text: str) -> None:
    calls = [method.name for method in coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].methods]

    assert len(calls) >= 16
    assert [name for name in calls if f"`{name}`" not in text] == []


def test_every_command_is_documented(text: str) -> None:
    names = [name.removeprefix("COMMAND_KIND_") for name in types_pb2.CommandKind.keys()[1:]]

    assert [name for name in names if f"`{name}`" not in text] == []


def test_every_changing_call_documents_its_repetition(text: str) -> None:
    section = text.split("### Retries and idempotency")[1].split("###", maxsplit=1)[0]
    reading = {"GetAssignedShards", "GetLatestCheckpoint", "GetMembership", "RequestRecovery", "Session"}
    calls = {method.name for method in coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].methods}
    changing = {name for name in calls - reading if not name.startswith("List")}

    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == changing
