"""docs/security.md states the limits that the coordinator applies; `test_exhaustion.py` attacks it at each of them."""

from __future__ import annotations

import re
from pathlib import Path

from strata.coordinator.config import Limits
from strata.coordinator.http import server as http
from strata.coordinator.http.access import CSRF_HEADER
from strata.coordinator.serve import admission, listener, session_frames
from strata.dashboard.history import store
from strata.dashboard.http import login, sessions
from strata.dashboard.live import feed, stream

PAGE = Path(__file__).parents[2] / "docs" / "security.md"


def test_the_table_of_attacks_states_the_limits_in_the_code() -> None:
    rows = re.findall(r"^\| .+ \| (.+) \| \d+ MB \| [\d.]+ s \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    limits = Limits()
    size = f"{limits.max_grpc_message_bytes >> 20} MiB each"
    seconds = f"for {admission.BODY_WITHIN_S:g} s, or {admission.CONTENDED_WITHIN_S:g} s while others wait"
    connections = f"{http.MAX_CONNECTIONS_PER_PEER} connections per machine, {http.MAX_CONNECTIONS:,} in total"
    expected = [
        f"{listener.HEALTH_BODIES} are received at once, {size} (`max_grpc_message_bytes`), {seconds}",
        f"{session_frames.MAX_WITHOUT_HELLO:,} without a hello",
        f"{admission.NUM_READERS_BODIES} are received at once, {size}, {seconds}",
        f"{admission.SMALL_BYTES >> 10} KiB per frame, refused when announced",
        f"{admission.FRAME_WITHIN_S:g} s per frame",
        f"{limits.max_unread_bytes >> 20} MiB of unread responses in total (`max_unread_bytes`)",
        f"{limits.max_receive_bytes >> 20} MiB of unfinished frames in total (`max_receive_bytes`)",
        f"{limits.max_message_elements:,} elements (`max_message_elements`)",
        f"{connections}; {http.REQUEST_WITHIN_S:g} s per request",
    ]

    assert [limit for limit in expected if not any(row.startswith(limit) for row in rows)] == []


def test_the_section_on_the_dashboard_states_the_limits_in_the_code() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split("## Dashboard")[1].split("\n## ")[0].split())
    expected = [
        f"at most {sessions.MAX_SESSIONS:,}, for {sessions.LIFETIME_S / 3_600:g} hours",
        f"A login has {login.MAX_BODY_BYTES >> 10} KiB and {login.BODY_WITHIN_S:g} s",
        f"At most {stream.MAX_CLIENTS} pages get live updates",
        f"one shared buffer of {feed.MAX_BYTES >> 20} MiB",
        f"reads nothing for {http.READ_WITHIN_S:g} s is disconnected",
        f"at most {store.MAX_SERIES} series",
        f"the header `{CSRF_HEADER}`",
    ]

    assert [limit for limit in expected if limit not in text] == []
