"""Requests to a running agent."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from strata.errors import ConfigError
from strata.launch import control


class Agent:
    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def stop(self, reason: str, *, is_now: bool = False) -> None:
        self.asked.append(("stop", reason, is_now))

    def scale(self, workers: int | None, servers: int | None = None) -> None:
        if workers is not None and workers > 8:
            raise ConfigError(f"{workers} workers are not within 1:8")
        self.asked.append(("scale", workers, servers))

    def dump_stacks(self, rank: int) -> None:
        self.asked.append(("stacks", rank))


def with_agent(path: Path, ask: Callable[[], None], agent: Agent | None = None) -> Agent:
    """Ask in a thread, as another program would."""
    agent = agent or Agent()

    async def serve() -> None:
        async with control.serve(agent, path):
            await asyncio.to_thread(ask)

    asyncio.run(serve())
    return agent


def test_an_agent_does_what_it_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "control"

    def ask() -> None:
        control.ask(str(path), control.Stop())
        control.ask(str(path), control.Stop(is_now=True))
        control.ask(str(path), control.Scale(3))
        control.ask(str(path), control.Scale(servers=2))
        control.ask(str(path), control.Stacks(1))

    assert with_agent(path, ask).asked == [
        ("stop", "strata stop", False),
        ("stop", "strata stop", True),
        ("scale", 3, None),
        ("scale", None, 2),
        ("stacks", 1),
    ]


def test_an_order_for_a_trial_reaches_the_agent_of_a_study_and_is_refused_by_that_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "control"

    class StudyAgent(Agent):
        def order_trial(self, trial: int, order: control.TrialOrder, reason: str) -> None:
            self.asked.append((trial, order, reason))

    def ask() -> None:
        control.ask(str(path), control.OrderTrial(7, "stop", "by hand" + "!" * 1_000))

    ((trial, order, reason),) = with_agent(path, ask, StudyAgent()).asked
    assert (trial, order, len(reason)) == (7, "stop", control.MAX_REASON)
    with pytest.raises(ConfigError, match="a run has no trials; only studies do"):
        with_agent(path, ask)


def test_a_refusal_is_returned_as_text(tmp_path: Path) -> None:
    path = tmp_path / "control"

    def ask() -> None:
        with pytest.raises(ConfigError, match="9 workers are not within 1:8"):
            control.ask(str(path), control.Scale(9))

    assert with_agent(path, ask).asked == []


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"{}\n",
        b'{"do": "dance"}\n',
        b'{"do": "scale", "workers": "x"}\n',
        b"\xff\n",
        b"x" * 100_000 + b"\n",
    ],
)
def test_garbage_is_no_request(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "control"

    def ask() -> None:
        with socket.socket(socket.AF_UNIX) as link, contextlib.suppress(ConnectionError):
            link.settimeout(30.0)
            link.connect(str(path))
            link.sendall(line)
            with contextlib.suppress(OSError):  # if it has hung up on us, we are "not connected"
                link.shutdown(socket.SHUT_WR)
            while link.recv(4096):
                pass
        control.ask(str(path), control.Scale(2))

    assert with_agent(path, ask).asked == [("scale", 2, None)]


def test_without_an_agent_the_cure_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not answer.*strata ps"):
        control.ask(str(tmp_path / "nobody"), control.Stop())


class SignalledAgent(Agent):
    def __init__(self) -> None:
        super().__init__()
        self.was_asked = asyncio.Event()

    def stop(self, reason: str, *, is_now: bool = False) -> None:
        super().stop(reason, is_now=is_now)
        self.was_asked.set()


def test_the_second_signal_does_not_wait_for_a_checkpoint() -> None:
    async def receive() -> Agent:
        agent = SignalledAgent()
        with control.handle_signals(agent):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
                agent.was_asked.clear()
                signal.raise_signal(number)
                await agent.was_asked.wait()
        return agent

    assert asyncio.run(receive()).asked == [
        ("stop", "SIGTERM", False),
        ("stop", "Ctrl-C", True),
        ("stop", "Ctrl-C", True),
    ]
