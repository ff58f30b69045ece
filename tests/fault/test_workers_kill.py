"""An agent is killed, and none of its workers survives."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

DEADLINE_S = 30.0

AGENT = """
    import asyncio, json, os, sys
    from pathlib import Path
    from strata.launch.processes.local import LocalWorkers
    from strata.launch.processes.base import ProcessSpec

    place, is_warm = Path(sys.argv[1]), sys.argv[2] == "warm"

    async def main():
        workers = LocalWorkers(is_warm=is_warm)
        await workers.start([
            ProcessSpec(rank=rank, script="worker.py", arguments=(sys.argv[3],), directory=str(place),
                        variables=dict(os.environ), log=place / f"{rank}.log")
            for rank in range(2)
        ])
        await workers.next_exit()

    asyncio.run(main())
"""
WORKER = """
    import json, os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"])
    descriptor = os.open(sys.argv[1], os.O_WRONLY)
    os.write(descriptor, (json.dumps([os.getpid(), os.getppid(), child.pid]) + "\\n").encode())
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["warm", "cold"])
def test_when_the_agent_is_killed_no_process_of_its_workers_survives(tmp_path: Path, how: str) -> None:
    (tmp_path / "agent.py").write_text(textwrap.dedent(AGENT))
    (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER))
    os.mkfifo(tmp_path / "pids")
    pids = os.open(tmp_path / "pids", os.O_RDWR | os.O_NONBLOCK)
    agent = subprocess.Popen([sys.executable, tmp_path / "agent.py", tmp_path, how, tmp_path / "pids"])
    try:
        watched = [os.pidfd_open(pid) for line in lines(pids, 2) for pid in set(json.loads(line))]
        os.kill(agent.pid, signal.SIGKILL)
        assert agent.wait(DEADLINE_S) == -signal.SIGKILL
        assert all(is_gone(each) for each in watched)  # workers, the processes that forked them, their children
    finally:
        agent.kill()
        agent.wait()
        os.close(pids)
    for each in watched:
        os.close(each)


def lines(descriptor: int, count: int) -> list[str]:
    text, deadline_s = "", time.monotonic() + DEADLINE_S
    while text.count("\n") < count:
        ready, _, _ = select.select([descriptor], [], [], deadline_s - time.monotonic())
        assert ready, f"only {text!r} was received"
        text += os.read(descriptor, 4_096).decode()
    return text.splitlines()


def is_gone(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], DEADLINE_S)[0])
