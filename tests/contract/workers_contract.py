"""The contract of `Workers`. An implementation supplies a fixture `make` that creates one for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from strata.errors import ConfigError, InvalidArgument
from strata.launch.processes.base import ProcessSpec, Workers
from strata.launch.protocol import WorkerExit

DEADLINE_S = 30.0
T = TypeVar("T")
Make = Callable[[], Workers]

SLEEPS = "import time; print('here', flush=True); time.sleep(600)"
STARTS_A_CHILD = "import subprocess; print('child', subprocess.Popen(['sleep', '600']).pid)\n"
STARTS_A_DAEMON = STARTS_A_CHILD.replace("'600']", "'600'], start_new_session=True")
STARTS_A_SAVER = "import os; os.environ['STRATA_OUTLIVES_WORKER'] = '1'\n" + STARTS_A_DAEMON
DOUBLE_FORKS = """
import os, signal, sys, time
sys.stdout.flush()
until_written, written = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(1, b'child %d\\n' % os.getpid())
        os.close(written)
        time.sleep(600)
    os._exit(0)
os.close(written)
os.wait()
os.read(until_written, 1)  # or its line and ours might be one
"""
FACTS = """
    import json, os, sys
    facts = {"argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "file": __file__, "cwd": os.getcwd(),
             "names": sorted(globals()), "spec": __spec__ and __spec__.name, "package": __package__,
             "loader": type(__loader__).__name__, "is_main": sys.modules["__main__"].__dict__ is globals(),
             "stdin": sys.stdin.read(), "future": __annotations__}
    print(json.dumps(facts))
"""


class Stage:
    """A directory with scripts and logs."""

    def __init__(self, make: Make, place: Path) -> None:
        self.make = make
        self.place = place

    def write(self, text: str, name: str = "script.py") -> Path:
        path = self.place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def log(self, rank: int = 0) -> str:
        return (self.place / f"{rank}.log").read_text()

    def order(
        self, text: str = "", *, rank: int = 0, script: str | None = None, variables: Mapping[str, str] | None = None
    ) -> ProcessSpec:
        return ProcessSpec(
            rank=rank,
            script=script or str(self.write(text, f"script-{rank}.py")),
            directory=str(self.place),
            variables=dict(os.environ) if variables is None else variables,
            log=self.place / f"{rank}.log",
        )

    def run(self, *orders: ProcessSpec) -> dict[int, int]:
        """Exit codes by rank."""

        async def act(workers: Workers) -> dict[int, int]:
            await workers.start(orders)
            exits = [await workers.next_exit() for _ in orders]
            return {each.rank: each.code for each in exits}

        return self.act(act)

    def act(self, body: Callable[[Workers], Awaitable[T]]) -> T:
        async def run() -> T:
            async with asyncio.timeout(DEADLINE_S), opened(self.make) as workers:
                return await body(workers)

        return asyncio.run(run())

    async def wait_for_line(self, word: str, rank: int = 0) -> list[str]:
        """Wait for a complete line with this prefix; return its fields."""
        while True:
            with contextlib.suppress(FileNotFoundError):
                for line in self.log(rank).splitlines(keepends=True):
                    if line.startswith(word) and line.endswith("\n"):
                        return line.split()
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def opened(make: Make) -> AsyncIterator[Workers]:
    workers = make()
    try:
        yield workers
    finally:
        await workers.close()


class Watched:
    """A handle of a process, which keeps its process id from being reused."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def is_gone(self, within_s: float = 0.0) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(within_s * 1_000))

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        os.close(self._fd)


def pythons_own(order: ProcessSpec) -> subprocess.CompletedProcess[str]:
    """Run the same script with plain Python."""
    how = ["-m", order.script] if order.is_module else [order.script]
    return subprocess.run(
        [sys.executable, *how, *order.arguments],
        cwd=order.directory,
        env=order.variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


class WorkersContract:
    @pytest.fixture
    def stage(self, make: Make, tmp_path: Path) -> Stage:
        return Stage(make, tmp_path)

    # -- a worker is what Python would make of the script ----------------------------------------------------------

    @pytest.mark.parametrize(
        ("text", "code"),
        [
            ("print('done')", 0),
            ("raise SystemExit(3)", 3),
            ("raise SystemExit('the reason')", 1),
            ("def deep():\n    raise ValueError('wrong')\ntry:\n    deep()\nexcept ValueError:\n    {}['key']", 1),
            ("this is no Python", 1),
            ("import sys\nsys.excepthook = lambda kind, value, _: print('caught', kind, value)\n1 / 0", 1),
            ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
            ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -11),
            ("raise KeyboardInterrupt", -2),
            (
                """
                import atexit, threading
                def late():
                    threading.main_thread().join()
                    import __main__
                    print(__main__.word)
                atexit.register(print, "last")
                threading.Thread(target=late).start()
                word = "later"
                print("first")
                """,
                0,
            ),
        ],
    )
    def test_a_worker_exits_as_python_does_with_the_same_output(self, stage: Stage, text: str, code: int) -> None:
        order = stage.order(text)
        expected = pythons_own(order)

        assert stage.run(order) == {0: code}
        assert (expected.returncode, expected.stdout) == (code, stage.log())

    def test_a_missing_script_is_reported_as_python_does(self, stage: Stage) -> None:
        order = stage.order(script="nowhere.py")

        assert stage.run(order) == {0: 2}
        assert stage.log() == pythons_own(order).stdout

    @pytest.mark.parametrize("how", ["file", "link", "directory", "module", "package"])
    def test_a_script_finds_what_it_would_find_under_python(self, stage: Stage, how: str) -> None:
        stage.write(FACTS, "real/there/facts.py")
        stage.write(FACTS, "real/there/package/__main__.py")
        stage.write("", "real/there/package/__init__.py")
        (stage.place / "link.py").symlink_to("real/there/facts.py")
        order = ProcessSpec(
            rank=0,
            script={
                "file": "there/facts.py",
                "link": "../link.py",
                "directory": "there/package",
                "module": "there.facts",
                "package": "there.package",
            }[how],
            arguments=("--size", "3", "--", "a b"),
            is_module=how in ("module", "package"),
            directory=str(stage.place / "real"),
            variables={"PATH": os.defpath, "PYTHONPATH": f"relative{os.pathsep}/absolute{os.pathsep}../other"},
            log=stage.place / "0.log",
        )
        expected = pythons_own(order).stdout

        assert stage.run(order) == {0: 0}
        assert json.loads(stage.log()) == json.loads(expected)

    def test_a_traceback_of_a_module_begins_in_the_module(self, stage: Stage) -> None:
        path = stage.write("1 / 0", "wrong.py")
        order = ProcessSpec(
            rank=0, script="wrong", is_module=True, directory=str(stage.place), variables={}, log=stage.place / "0.log"
        )

        assert stage.run(order) == {0: 1}
        assert stage.log().splitlines()[1].strip() == f'File "{path}", line 1, in <module>'

    def test_the_environment_is_replaced_wholly(self, stage: Stage) -> None:
        variables = {"ONE": "1", "PATH": os.defpath, "ANY_BYTES": "\udc80 ü", "EMPTY": ""}
        order = stage.order("import json, os; print(json.dumps(dict(os.environ)))", variables=variables)

        assert stage.run(order) == {0: 0}
        assert json.loads(stage.log()) == variables

    def test_classes_of_the_script_can_be_pickled_and_sent_to_its_processes(self, stage: Stage) -> None:
        order = stage.order("""
            import multiprocessing, pickle

            class Thing:
                def __init__(self, size): self.size = size

            def double(thing): return Thing(thing.size * 2)

            if __name__ == "__main__":
                assert pickle.loads(pickle.dumps(Thing(1))).size == 1
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    print(pool.apply(double, (Thing(4),)).size)
        """)

        assert stage.run(order) == {0: 0}
        assert stage.log() == "8\n"

    def test_a_worker_has_no_descriptors_but_its_own_and_leads_a_session(self, stage: Stage) -> None:
        order = stage.order("""
            import os
            print(sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1], os.readlink("/proc/self/fd/0"))
            print(os.getsid(0) == os.getpgid(0) == os.getpid())
        """)

        assert stage.run(order) == {0: 0}
        assert stage.log() == "[0, 1, 2] /dev/null\nTrue\n"

    def test_signals_are_pythons_own_and_none_is_blocked(self, stage: Stage) -> None:
        order = stage.order("""
            import signal
            print({number.name: str(signal.getsignal(number)).split(" at ")[0] for number in signal.Signals})
            print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.set_wakeup_fd(-1))
        """)

        assert stage.run(order) == {0: 0}
        assert stage.log() == pythons_own(order).stdout

    def test_a_missing_directory_is_named(self, stage: Stage) -> None:
        order = stage.order("print('never')")
        order = ProcessSpec(
            rank=0, script=order.script, directory=str(stage.place / "gone"), variables={}, log=order.log
        )

        assert stage.run(order) == {0: 1}
        assert "gone" in stage.log()

    # -- logs ------------------------------------------------------------------------------------------------------

    def test_what_a_killed_worker_has_printed_is_in_its_log_behind_what_was_there(self, stage: Stage) -> None:
        order = stage.order("import os; print('half a line', end=''); os.kill(os.getpid(), 9)")
        order.log.write_text("before\n")

        assert stage.run(order) == {0: -9}
        assert stage.log() == "before\nhalf a line"

    def test_a_log_is_bounded_and_its_newest_part_is_complete(self, stage: Stage) -> None:
        order = replace(
            stage.order("""
                import os, subprocess
                for number in range(20_000):
                    os.write(1, b"line %d\\n" % number)
                subprocess.run(["echo", "of a child"])
                raise ValueError("the last words")
            """),
            log_bytes=64 << 10,
        )

        assert stage.run(order) == {0: 1}
        old, new = (stage.place / "0.log.1").read_bytes(), (stage.place / "0.log").read_bytes()
        assert (32 << 10) - 100 < len(old) <= 32 << 10
        assert len(new) <= 32 << 10
        lines = (old + new).decode().splitlines()
        first = int(lines[0].split()[1])
        assert lines[: 20_000 - first] == [f"line {number}" for number in range(first, 20_000)]
        assert lines[20_000 - first] == "of a child"
        assert lines[-1] == "ValueError: the last words"

    def test_a_full_disk_stops_no_worker_and_the_end_of_its_log_is_known(self, stage: Stage) -> None:
        order = replace(stage.order("print('x' * 3_000_000); raise ValueError('bad')"), log=Path("/dev/full"))

        async def act(workers: Workers) -> WorkerExit:
            await workers.start([order])
            return await workers.next_exit()

        gone = stage.act(act)
        assert (gone.code, gone.log_end[-1]) == (1, "ValueError: bad")

    def test_a_worker_that_closes_its_output_exits_as_any_other(self, stage: Stage) -> None:
        order = stage.order("import os; print('said', flush=True); os.close(1); os.close(2); os._exit(7)")

        assert stage.run(order) == {0: 7}
        assert stage.log() == "said\n"

    def test_a_process_list_shows_run_rank_and_script(self, stage: Stage) -> None:
        order = replace(stage.order("print(open('/proc/self/cmdline').read())"), title="strata: job rank 0: train.py")

        assert stage.run(order) == {0: 0}
        assert stage.log().rstrip("\0\n") == "strata: job rank 0: train.py"

    def test_an_unwritable_log_is_refused_and_no_worker_starts(self, stage: Stage) -> None:
        good, bad = stage.order("print('here')"), stage.order("", rank=1)
        bad = ProcessSpec(
            rank=1, script=bad.script, directory=bad.directory, variables={}, log=stage.place / "none" / "1.log"
        )

        async def act(workers: Workers) -> None:
            with pytest.raises(ConfigError, match=r"none/1\.log"):
                await workers.start([good, bad])
            assert workers.pid_of(0) is None
            await workers.start([good])
            assert await workers.next_exit() == WorkerExit(0, 0)

        stage.act(act)
        assert stage.log() == "here\n"

    # -- ends ------------------------------------------------------------------------------------------------------

    def test_every_worker_of_every_start_ends_exactly_once(self, stage: Stage) -> None:
        orders = [stage.order(f"raise SystemExit({rank + 10})", rank=rank) for rank in range(3)]

        async def act(workers: Workers) -> list[list[WorkerExit]]:
            await workers.prepare()
            attempts = []
            for _ in range(3):
                await workers.start(orders)
                attempts.append([await workers.next_exit() for _ in orders])
            return attempts

        for exits in stage.act(act):
            assert sorted((each.rank, each.code) for each in exits) == [(0, 10), (1, 11), (2, 12)]

    def test_a_rank_that_runs_cannot_be_started_again(self, stage: Stage) -> None:
        order = stage.order(SLEEPS)

        async def act(workers: Workers) -> None:
            await workers.start([order])
            with pytest.raises(InvalidArgument, match="rank 0"):
                await workers.start([order])
            with pytest.raises(InvalidArgument, match="rank 1"):
                await workers.start([stage.order(rank=1)] * 2)
            workers.kill([0])
            assert await workers.next_exit() == WorkerExit(0, -9, is_killed=True)
            await workers.start([order])

        stage.act(act)

    def test_an_order_without_bounds_is_refused(self, stage: Stage) -> None:
        order = stage.order("", variables={"HUGE": "x" * (17 << 20)})

        with pytest.raises(InvalidArgument, match="bytes"):
            stage.run(order)

    def test_a_worker_is_known_by_its_process_as_long_as_it_runs(self, stage: Stage) -> None:
        async def act(workers: Workers) -> None:
            assert workers.pid_of(0) is None
            await workers.start([stage.order("import os; print('pid', os.getpid()); input()")])
            pid = workers.pid_of(0)
            assert await stage.wait_for_line("pid") == ["pid", str(pid)]
            assert (await workers.next_exit()).code == 1  # stdin is at its end
            assert workers.pid_of(0) is None
            workers.kill([0, 7])
            workers.send_signal(0, signal.SIGTERM)

        stage.act(act)

    def test_a_signal_reaches_the_worker_that_may_handle_it(self, stage: Stage) -> None:
        handles = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"

        async def act(workers: Workers) -> None:
            await workers.start([stage.order(SLEEPS), stage.order(handles + SLEEPS, rank=1)])
            await stage.wait_for_line("here")
            await stage.wait_for_line("here", 1)
            for rank in range(2):
                workers.send_signal(rank, signal.SIGTERM)
            exits = {await workers.next_exit(), await workers.next_exit()}
            assert exits == {WorkerExit(0, -signal.SIGTERM), WorkerExit(1, 5)}

        stage.act(act)

    def test_a_signal_right_after_the_start_is_not_lost(self, stage: Stage) -> None:
        async def act(workers: Workers) -> None:
            for _ in range(5):
                await workers.start([stage.order(SLEEPS)])
                workers.send_signal(0, signal.SIGTERM)
                assert await workers.next_exit() == WorkerExit(0, -signal.SIGTERM)

        stage.act(act)

    def test_a_signal_during_the_start_reaches_the_worker_once_it_runs(self, stage: Stage) -> None:
        async def act(workers: Workers) -> None:
            starting = asyncio.create_task(workers.start([stage.order(SLEEPS)]))
            await asyncio.sleep(0)
            workers.send_signal(0, signal.SIGTERM)
            await starting
            assert await workers.next_exit() == WorkerExit(0, -signal.SIGTERM)

        stage.act(act)

    def test_a_worker_that_was_already_dead_when_it_was_killed_has_not_been_killed_by_the_run(
        self, stage: Stage
    ) -> None:
        async def act(workers: Workers) -> None:
            await workers.start([stage.order(SLEEPS), stage.order(SLEEPS, rank=1)])
            pid = workers.pid_of(0)
            assert pid is not None
            process = psutil.Process(pid)
            process.kill()
            process.wait(timeout=30)  # blocks the loop, so that the exit is not known when the order comes
            workers.kill([0, 1])
            assert {await workers.next_exit(), await workers.next_exit()} == {
                WorkerExit(0, -9),
                WorkerExit(1, -9, is_killed=True),
            }

        stage.act(act)

    def test_a_killed_worker_goes_with_its_children_and_without_others(self, stage: Stage) -> None:
        async def act(workers: Workers) -> None:
            await workers.start([stage.order(STARTS_A_CHILD + SLEEPS), stage.order(SLEEPS, rank=1)])
            child = Watched(int((await stage.wait_for_line("child"))[1]))
            await stage.wait_for_line("here", 1)
            workers.kill([0])
            assert await workers.next_exit() == WorkerExit(0, -9, is_killed=True)
            assert child.is_gone(DEADLINE_S)
            child.end()
            other = Watched(workers.pid_of(1) or 0)
            assert not other.is_gone()
            other.end()

        stage.act(act)

    def test_processes_in_a_workers_group_end_with_it(self, stage: Stage) -> None:
        async def act(workers: Workers) -> None:
            await workers.start([stage.order(STARTS_A_CHILD)])
            await stage.wait_for_line("child")
            assert await workers.next_exit() == WorkerExit(0, 0)

        stage.act(act)
        pid = int(stage.log().split()[1])
        with contextlib.suppress(ProcessLookupError):
            assert Watched(pid).is_gone(DEADLINE_S)

    @pytest.mark.parametrize("text", [STARTS_A_DAEMON, DOUBLE_FORKS], ids=["session", "double fork"])
    def test_descendants_outside_a_workers_group_end_soon_after_it(self, stage: Stage, text: str) -> None:
        async def act(workers: Workers) -> None:
            await workers.start([stage.order(text + SLEEPS)])
            daemon = Watched(int((await stage.wait_for_line("child"))[1]))
            workers.kill([0])
            assert await workers.next_exit() == WorkerExit(0, -9, is_killed=True)
            assert await asyncio.to_thread(daemon.is_gone, DEADLINE_S)
            daemon.end()

        stage.act(act)

    def test_after_close_no_double_forked_process_is_left(self, stage: Stage) -> None:
        async def act(workers: Workers) -> Watched:
            await workers.start([stage.order(DOUBLE_FORKS + SLEEPS)])
            return Watched(int((await stage.wait_for_line("child"))[1]))

        daemon = stage.act(act)
        assert daemon.is_gone()
        daemon.end()

    def test_a_process_that_may_outlive_its_worker_continues(self, stage: Stage) -> None:
        async def act(workers: Workers) -> Watched:
            await workers.start([stage.order(STARTS_A_SAVER + SLEEPS)])
            saver = Watched(int((await stage.wait_for_line("child"))[1]))
            workers.kill([0])
            await workers.next_exit()
            return saver

        saver = stage.act(act)
        try:
            assert not saver.is_gone()
        finally:
            saver.end()

    def test_a_worker_can_be_killed_before_it_runs(self, stage: Stage) -> None:
        async def act(workers: Workers) -> None:
            starting = asyncio.create_task(workers.start([stage.order(SLEEPS)]))
            await asyncio.sleep(0)
            workers.kill([0])
            await starting
            assert await workers.next_exit() == WorkerExit(0, -9, is_killed=True)

        stage.act(act)

    def test_a_cancelled_start_leaves_no_process(self, stage: Stage) -> None:
        async def act(workers: Workers) -> None:
            starting = asyncio.create_task(workers.start([stage.order(SLEEPS, rank=rank) for rank in range(2)]))
            await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            await workers.close()
            await workers.start([stage.order("print('well')", rank=rank) for rank in range(2)])

        stage.act(act)

    def test_no_process_is_left_after_close(self, stage: Stage) -> None:
        async def act(workers: Workers) -> None:
            before = descriptors()
            await workers.start([stage.order(STARTS_A_CHILD + SLEEPS, rank=rank) for rank in range(2)])
            watched = [Watched(int((await stage.wait_for_line("child", rank))[1])) for rank in range(2)]
            watched += [Watched(workers.pid_of(rank) or 0) for rank in range(2)]
            await workers.close()
            assert [each.is_gone() for each in watched] == [True] * 4
            for each in watched:
                each.end()
            await workers.close()
            assert descriptors() == before
            assert {(await workers.next_exit()).code for _ in range(2)} == {-9}

        stage.act(act)

    def test_many_starts_leave_no_descriptors_behind(self, stage: Stage) -> None:
        async def act(workers: Workers) -> None:
            counts = []
            for _ in range(8):
                await workers.start([stage.order("")])
                await workers.next_exit()
                counts.append(len(descriptors()))
            assert counts[-1] <= counts[1] + 1  # a cold host may still be exiting

        stage.act(act)
