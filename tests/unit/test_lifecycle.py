"""Exit hooks run while threads work; nothing of the parent's goes on in a forked child."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from strata import lifecycle
from strata.errors import ForkedProcess
from strata.lifecycle import Descriptor, Home, finalize, renewed


def run_fresh(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)


def in_child(check: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        is_so = False
        try:
            is_so = check()
        finally:
            os._exit(0 if is_so else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_hooks_run_last_first_while_pools_work_and_one_that_fails_stops_no_other() -> None:
    done = run_fresh(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from strata.lifecycle import at_exit\n"
        "pool = ThreadPoolExecutor(1)\n"
        "pool.submit(print, 'now').result()\n"
        "at_exit(lambda: pool.submit(print, 'first').result())\n"
        "at_exit(lambda: 1 / 0)\n"
        "withdraw = at_exit(lambda: print('never'))\n"
        "at_exit(lambda: at_exit(lambda: print('made by the last')))\n"
        "withdraw()\n"
        "raise SystemExit(7)"
    )

    assert done.stdout.split("\n") == ["now", "made by the last", "first", ""]
    assert "ZeroDivisionError" in done.stderr
    assert done.returncode == 7


def test_a_forked_child_runs_no_hook_of_its_parent_and_its_own() -> None:
    done = run_fresh(
        "import os, sys\n"
        "from strata.lifecycle import at_exit\n"
        "at_exit(lambda: print('parent', flush=True))\n"
        "if os.fork() == 0:\n"
        "    at_exit(lambda: print('child', flush=True))\n"
        "else:\n"
        "    os.wait()"
    )

    assert (done.stdout, done.stderr) == ("child\nparent\n", "")


def test_leaving_joins_threads_runs_hooks_and_flushes_files_and_tears_no_module_down(tmp_path: Path) -> None:
    done = run_fresh(
        "import atexit, ctypes, sys, threading, types\n"
        "from strata.lifecycle import at_exit, leave\n"
        "def say(text, write=sys.stdout.write): write(f'{text}\\n')  # in one piece: a thread writes as well\n"
        "class Loud:\n"
        "    def __init__(self, text): self.text = text\n"
        "    def __del__(self, say=say): say(self.text)\n"
        "atexit.register(say, 'atexit')\n"
        "at_exit(lambda: say(f'hook {sys.last_value.code}'))\n"
        "is_leaving = threading.Event()\n"
        "threading.Thread(target=lambda: (is_leaving.wait(20), say('thread'))).start()\n"
        "at_exit(is_leaving.set)\n"
        "released = Loud('a global of the script')\n"
        "cycle = Loud('a cycle')\n"
        "cycle.itself = cycle\n"
        "module = sys.modules['kept'] = types.ModuleType('kept')\n"
        "module.kept = Loud('a global of a module')\n"
        f"module.text = open({str(tmp_path / 'text')!r}, 'w')\n"
        "module.text.write('written')\n"
        f"module.data = open({str(tmp_path / 'data')!r}, 'wb')\n"
        "module.data.write(b'written')\n"
        "ctypes.CDLL(None).puts(b'from C')\n"
        "leave(259)"
    )

    printed = ["a cycle", "a global of the script", "atexit", "from C", "hook 259", "thread"]
    assert sorted(done.stdout.splitlines()) == printed
    assert done.stderr == ""
    assert done.returncode == 3, "as sys.exit(259) in a shell"
    assert [(tmp_path / name).read_text() for name in ("text", "data")] == ["written", "written"]


def test_a_process_leaves_even_if_exit_functions_fail_and_their_errors_cannot_be_printed() -> None:
    done = run_fresh(
        "import atexit, sys, threading\n"
        "from strata.lifecycle import leave\n"
        "atexit.register(lambda: 1 / 0)\n"
        "threading._register_atexit(lambda: sys.exit(1))\n"
        "print('before')\n"
        "atexit.register(print, 'after')\n"
        "sys.stderr.close()\n"
        "leave(5)"
    )

    assert (done.returncode, done.stdout) == (5, "before\nafter\n")


@pytest.mark.parametrize("number", [0, 1], ids=["no function that joins threads", "no function that calls hooks"])
def test_a_python_without_a_private_function_leaves_through_the_whole_shutdown(number: int) -> None:
    done = run_fresh(
        "import atexit, sys, threading, types\n"
        "from strata import lifecycle\n"
        "class Loud:\n"
        "    def __del__(self, say=sys.stdout.write): say('torn down\\n')\n"
        "private = list(lifecycle._PRIVATE)\n"
        f"private[{number}] = (private[{number}][0], '_of_another_version')\n"
        "lifecycle._PRIVATE = tuple(private)\n"
        "atexit.register(print, 'atexit')\n"
        "lifecycle.at_exit(lambda: sys.stdout.write(f'hook {sys.last_value.code}\\n'))\n"
        "is_leaving = threading.Event()\n"
        "threading.Thread(target=lambda: (is_leaving.wait(20), sys.stdout.write('thread\\n'))).start()\n"
        "lifecycle.at_exit(is_leaving.set)\n"
        "module = sys.modules['kept'] = types.ModuleType('kept')\n"
        "module.kept = Loud()\n"
        "lifecycle.leave(259)"
    )

    assert sorted(done.stdout.splitlines()) == ["atexit", "hook 259", "thread", "torn down"]
    assert (done.returncode, done.stderr) == (3, "")


def test_the_private_functions_exist_in_this_python() -> None:
    assert all(callable(getattr(module, name)) for module, name in lifecycle._PRIVATE), "else every trial exits slowly"


def test_an_object_knows_its_home() -> None:
    home = Home()
    home.require("this thing")

    def is_refused() -> bool:
        with pytest.raises(ForkedProcess, match=f"this thing belongs to process {os.getppid()}, which forked this one"):
            home.require("this thing")
        return not home.is_here

    assert in_child(is_refused)


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_a_lock_that_another_thread_holds_is_free_in_a_forked_child(make: Callable[[], threading.Lock]) -> None:
    lock, is_held, is_over = renewed(make()), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            is_over.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait(30)
    try:
        assert in_child(lambda: lock.acquire(timeout=0))
        assert not lock.acquire(timeout=0)
    finally:
        is_over.set()
        holder.join(30)


def test_a_descriptor_is_closed_in_a_forked_child_only() -> None:
    here, there = os.pipe()
    descriptor = Descriptor(there)

    assert in_child(lambda: descriptor.fd == -1)
    assert os.write(descriptor.fd, b"x") == 1
    descriptor.close()
    descriptor.close()
    assert os.read(here, 2) == b"x"
    os.close(here)


def test_a_finalizer_is_called_where_it_was_made_only() -> None:
    class Owner:
        pass

    owner, calls = Owner(), list[int]()
    finalizer = finalize(owner, calls.append, 1)

    def is_spared() -> bool:
        finalizer()
        return not calls

    assert in_child(is_spared)
    del owner
    assert calls == [1]
