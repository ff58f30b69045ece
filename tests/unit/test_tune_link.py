"""The connection between a trial and the driver: answers, broken connections, strangers."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import strata
from strata.identity import Identity
from strata.launch.environment import WorkerSpec
from strata.train import context as contexts
from strata.tune import endpoint
from strata.tune import messages as m
from strata.tune.endpoint import Connection
from strata.tune.link import DriverLost, Link
from strata.tune.worker import RunningTrial

HELLO = m.Hello(launch=1, rank=0)
ORDER = m.Order(
    trial=3,
    lease=2,
    config={"x": 0.5},
    metrics=("loss",),
    worker=WorkerSpec(identity=Identity(run="sweep.3", attempt=1), coordinator="", checkpoints="/k"),
)


class FakeDriver:
    """Answers as the driver does. `drops` answers are lost with their connections. `is_slow`: it answers a report only
    when the process waits for it.
    """

    def __init__(self, drops: int = 0, *, is_slow: bool = False) -> None:
        self.received: list[m.FromTrial] = []
        self.num_connections = 0
        self.stop: m.StopTrial | None = None
        self.answered: list[int] = []
        self._drops = drops
        self._is_slow = is_slow

    async def handle(self, hello: m.Hello, connection: Connection) -> None:
        self.num_connections += 1
        connection.send(ORDER)
        async for message in connection.messages():
            assert not isinstance(message, m.Hello)
            self.received.append(message)
            if self._drops:
                self._drops -= 1
                return
            if self.stop is not None:
                connection.send(self.stop)
            if self._is_slow and isinstance(message, m.Report):
                continue
            self.answered.append(message.number)
            connection.send(m.Answer(number=message.number))


@asynccontextmanager
async def served(place: Path, driver: FakeDriver, host: str) -> AsyncIterator[m.Endpoint]:
    async with endpoint.serve(driver.handle, place, host=host) as found:
        yield found


def in_a_process(place: Path, driver: FakeDriver, work: Callable[[m.Endpoint], None], host: str = "") -> None:
    async def scene() -> None:
        async with served(place, driver, host) as found:
            await asyncio.to_thread(work, found)

    asyncio.run(scene())


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_a_stop_is_the_answer_to_the_report_that_led_to_it(tmp_path: Path, host: str) -> None:
    driver = FakeDriver()
    driver.stop = m.StopTrial(reason="among the worst", is_saving=True)

    def work(found: m.Endpoint) -> None:
        link = Link(found, HELLO)
        assert link.begin() == ORDER
        assert link.answer() is None, "nothing was reported yet"
        link.report(1, (0.5,))
        assert link.answer() == driver.stop
        link.finish((0.5,))
        link.close()

    in_a_process(tmp_path, driver, work, host)
    assert driver.received == [
        m.Report(lease=2, number=1, step=1, values=(0.5,)),
        m.Result(lease=2, number=2, values=(0.5,)),
    ]


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_a_message_without_an_answer_is_sent_again_over_a_new_connection(tmp_path: Path, host: str) -> None:
    driver = FakeDriver(drops=2)

    def work(found: m.Endpoint) -> None:
        link = Link(found, HELLO)
        link.begin()
        link.report(1, (0.5,))
        assert link.answer() is None
        link.finish(None)
        link.close()

    in_a_process(tmp_path, driver, work, host)
    report = m.Report(lease=2, number=1, step=1, values=(0.5,))
    assert driver.received == [report, report, report, m.Result(lease=2, number=2)]
    assert driver.num_connections == 3


def test_a_trial_that_saves_waits_until_the_driver_has_its_reports(tmp_path: Path) -> None:
    driver = FakeDriver(is_slow=True)

    def work(found: m.Endpoint) -> None:
        link = Link(found, HELLO)
        link.begin()
        link.settle()
        assert driver.answered == [], "nothing was reported yet"
        link.report(1, (0.5,))
        link.settle()
        assert driver.answered == [2], "an answer also counts for the messages before it"
        link.settle()
        assert link.answer() is None
        link.close()

    in_a_process(tmp_path, driver, work)
    assert driver.received == [m.Report(lease=2, number=1, step=1, values=(0.5,)), m.Settle(lease=2, number=2)]


@pytest.mark.parametrize("is_own_report", [False, True])
def test_a_checkpoint_of_a_trial_is_written_after_the_driver_has_the_report_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_own_report: bool
) -> None:
    driver = FakeDriver(is_slow=True)
    monkeypatch.setattr(contexts, "_listeners", [])

    def work(found: m.Endpoint) -> None:
        link = Link(found, HELLO)
        order = link.begin()
        assert order is not None
        trial = RunningTrial(order, link)
        contexts.listen(trial)
        with strata.init(checkpoints=tmp_path / "checkpoints", saver="thread") as ctx:
            save, seen = ctx.checkpoints.save, []
            monkeypatch.setattr(
                ctx.checkpoints, "save", lambda *a, **k: (seen.append(driver.answered[:]), save(*a, **k))[1]
            )
            if is_own_report:
                trial.report(step=1, loss=0.5)
            else:
                ctx.report(step=1, loss=0.5)
            ctx.checkpoint({"a": np.zeros(1)}, step=1).wait()
            assert seen == [[2]]
        link.close()

    in_a_process(tmp_path, driver, work)


def test_a_request_to_stop_between_two_steps_takes_effect_at_the_next_one_which_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(contexts, "_listeners", [])

    def work(found: m.Endpoint) -> None:
        link = Link(found, HELLO)
        order = link.begin()
        assert order is not None
        trial = RunningTrial(order, link)
        contexts.listen(trial)
        with strata.init(checkpoints=tmp_path / "checkpoints", saver="thread") as ctx:
            state = {"a": np.zeros(1)}
            ctx.report(step=1)
            ctx.maybe_checkpoint(state)
            driver.stop = m.StopTrial(reason="no other trial needs them", is_saving=True)
            trial.note(step=1, loss=0.5)
            trial.note(step=2, loss=0.4)
            ctx.report(step=2)
            with pytest.raises(SystemExit):
                ctx.maybe_checkpoint(state)
            saved = ctx.checkpoints.latest()
            assert saved is not None
            assert saved.step == 2
        link.close()

    in_a_process(tmp_path, driver, work)
    assert [each.step for each in driver.received if isinstance(each, m.Report)] == [1, 2]


def test_a_trial_gives_up_when_the_driver_is_gone(tmp_path: Path) -> None:
    links: list[Link] = []

    def work(found: m.Endpoint) -> None:
        links.append(Link(found, HELLO))
        links[0].begin()
        links[0].report(1, (0.5,))
        links[0].answer()

    in_a_process(tmp_path, FakeDriver(), work)
    links[0]._answer_s = 0.2
    links[0].report(2, (0.4,))
    before = random.getstate()
    with pytest.raises(DriverLost, match=r"cannot reach the driver of the study at unix:.* for 0\.2 s"):
        links[0].answer()
    assert random.getstate() == before, "a lost connection must not change the random numbers of the training program"


def test_a_stranger_without_the_token_or_with_a_long_message_gets_no_order(tmp_path: Path) -> None:
    driver = FakeDriver()

    def work(found: m.Endpoint) -> None:
        host, port = found.address.split(":")
        context = ssl.create_default_context(cadata=found.ca)
        for data in (m.encode(HELLO), b"x" * (m.MAX_BYTES + 1) + b"\n", b'{"kind":"Report"}\n', b"GET / HTTP/1.1\n"):
            with (
                socket.create_connection((host, int(port)), 10) as plain,
                context.wrap_socket(plain, server_hostname=host) as link,
            ):
                link.sendall(data)
                with suppress(ConnectionResetError):
                    assert link.recv(100) == b""

    in_a_process(tmp_path, driver, work, "127.0.0.1")
    assert driver.num_connections == 0


def test_the_credentials_of_an_endpoint_are_not_printed() -> None:
    assert "secret" not in repr(m.Endpoint(address="a:1", ca="secret", token="secret"))
