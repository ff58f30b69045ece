"""A function as a run: write it into a run directory, start workers that call it, and collect their results.

`TrainingOrchestrator.run` and the Trainer use it. It does for a function what `strata run` does for a script, also in
a notebook, whose thread already has an event loop. How a call travels to the workers is in `function`.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import inspect
import os
import shutil
import signal
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from strata.clock import SystemClock
from strata.errors import ConfigError, RunFailed
from strata.lifecycle import interrupted
from strata.train import function as remote_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from strata.launch.actions import Finish
    from strata.launch.record.directory import RunDirectory
    from strata.launch.record.log import Which
    from strata.launch.run import PageOf, RunPage

Result = TypeVar("Result")
CALLED = "strata.train.function"
STOP_AGAIN_S = 1.0
"""Interval between two requests to stop a run that is just starting."""


def run_call(
    call: remote_function.Call,
    *,
    workers: int | str,
    engine: str,
    servers: int = 0,
    name: str = "",
    max_restarts: int = 3,
    checkpoints: str = "",
    logs: str = "auto",
    page_of: PageOf | None = None,
) -> list[Any]:
    """Make a call on workers, and on parameter servers as the last ranks; `TrainingOrchestrator.run` documents the
    other arguments and the errors. `page_of` returns the page that is served meanwhile.
    """
    from strata.launch.record.log import parse_which  # noqa: PLC0415

    which = parse_which(logs)
    directory = _prepare(
        call,
        workers=workers,
        servers=servers,
        engine=check_engine(engine),
        name=name,
        max_restarts=max_restarts,
        checkpoints=checkpoints,
    )
    finish = _carry_out(directory, which, None if page_of is None else page_of(directory))
    if finish.outcome != "done":
        raise _failure(directory, finish)
    status = directory.status
    if status is None:
        raise RunFailed(f"run {directory.name} is done, but its status cannot be read; see {directory.path}")
    place = _call_directory(directory)
    try:
        ranks = range(status.world_size - status.num_servers)
        found = [remote_function.read_result(place, status.attempt, rank) for rank in ranks]
    except RunFailed as error:
        raise RunFailed(f"run {directory.name} is done, but {error}\nlogs: {directory.path / 'logs'}") from error
    shutil.rmtree(place, ignore_errors=True)  # the caller has the results
    return found


@contextlib.contextmanager
def importing_ahead(function: Callable[..., Any], *preload: str) -> Iterator[None]:
    """Begin to import what workers on this machine need for a call of this function with these modules to preload, for
    a `run_call` inside the context.
    """
    from strata.launch.processes.imports import preloads  # noqa: PLC0415
    from strata.launch.processes.local import warm_ahead  # noqa: PLC0415

    with warm_ahead([*preloads(CALLED, is_module=True, directory=str(Path.cwd())), *preload_of(function, preload)]):
        yield


def check_engine(name: str) -> Literal["local", "ray"]:
    """
    Raises:
        ConfigError: The engine is unknown.
    """
    if name == "local":
        return "local"
    if name != "ray":
        raise ConfigError(f"engine={name!r} is unknown; use 'local' or 'ray'", field="engine")
    return "ray"


def _prepare(
    call: remote_function.Call,
    *,
    workers: int | str,
    servers: int,
    engine: Literal["local", "ray"],
    name: str,
    max_restarts: int,
    checkpoints: str,
) -> RunDirectory:
    """Create the run's directory with the function in it."""
    from strata.launch.record import directory as run_directory  # noqa: PLC0415
    from strata.launch.spec import RunSpec, Size  # noqa: PLC0415

    chosen = name or run_directory.new_name(SystemClock())
    place = run_directory.root() / chosen
    spec = RunSpec(
        name=chosen,
        script=CALLED,
        arguments=(str(place / "call" / remote_function.FUNCTION),),
        is_module=True,
        workers=Size.parse(str(workers)).plus(servers),
        num_servers=servers,
        directory=str(Path.cwd()),
        checkpoints=run_directory.checkpoints_at(checkpoints, place),
        max_restarts=max_restarts,
        engine=engine,
        preload=preload_of(call.function, call.preload),
        function=call.name,
    )
    if engine == "ray":
        from strata.launch.nodes.ray_cluster import check  # noqa: PLC0415

        check(spec)
    directory = run_directory.create(spec)
    try:
        remote_function.write_call(_call_directory(directory) / remote_function.FUNCTION, call)
    except BaseException:
        shutil.rmtree(directory.path, ignore_errors=True)
        raise
    return directory


def _call_directory(directory: RunDirectory) -> Path:
    return directory.path / "call"


def preload_of(function: Callable[..., Any], more: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the modules that a process which calls this function will need: what it imports, and those that its
    attribute `preload` names.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return ("cloudpickle", *_imports_of(function), *getattr(function, "preload", ()), *more)


def _imports_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return what the function will import, from the text of its file and its own body. Imports inside other functions
    of the file do not count.
    """
    from strata.launch.processes.imports import safe_imports  # noqa: PLC0415

    text = ""
    with contextlib.suppress(OSError, TypeError, ValueError):
        text = Path(inspect.getsourcefile(function) or "").read_text(encoding="utf-8")
    with contextlib.suppress(OSError, TypeError, SyntaxError, ValueError):
        match ast.parse(textwrap.dedent(inspect.getsource(function))).body:
            case [ast.FunctionDef(body=lines)]:
                text += "\n" + ast.unparse(ast.Module(lines, []))
    return safe_imports(text)


def _carry_out(directory: RunDirectory, logs: Which, page: RunPage | None) -> Finish:
    """Run the agent; in another thread if this one already has an event loop, as in a notebook."""
    from strata.launch.record.display import LoggingDisplay, display_for  # noqa: PLC0415
    from strata.launch.run import run  # noqa: PLC0415 - heavy

    is_watched = sys.stderr is not None and sys.stderr.isatty()

    def work() -> Finish:
        if is_watched:
            display = display_for(sys.stderr, SystemClock())
        else:
            display = LoggingDisplay(sys.stdout or Path(os.devnull).open("w"), directory.name)  # noqa: SIM115
        try:
            return run(directory, display, logs=logs, page=page)
        finally:
            display.close()

    return carry_out(directory, work)


def carry_out(directory: RunDirectory, work: Callable[[], Result]) -> Result:
    """Call the function that runs an agent or a study; in another thread if this one already has an event loop, as in a
    notebook. Ctrl-C then lets its workers save, and is raised when they have ended.
    """
    if not _is_in_loop():
        return work()
    with _interrupted_here(), ThreadPoolExecutor(1, thread_name_prefix="strata-run") as pool:
        future = pool.submit(work)
        try:
            return future.result()
        except BaseException:  # Ctrl-C, which only the main thread receives
            _stop(directory, future)
            raise


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def _interrupted_here() -> Iterator[None]:
    """Let Ctrl-C raise an exception where the main thread waits. Under `asyncio.run` it would cancel the waiting task,
    which notices only after the wait.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if before is not None:  # None: not set by Python
            signal.signal(signal.SIGINT, before)


def _stop(directory: RunDirectory, future: Future[Any]) -> None:
    """Ask the run to stop and wait for its end. The workers save first; after another Ctrl-C they are killed."""
    is_asked = is_now = False
    while not future.done():
        try:
            is_asked = is_asked or _ask_to_stop(directory, is_now=is_now)
            wait([future], timeout=None if is_asked else STOP_AGAIN_S)
        except KeyboardInterrupt:
            is_asked, is_now = False, True


def _ask_to_stop(directory: RunDirectory, *, is_now: bool) -> bool:
    """Ask once, since a second request kills the workers; return whether the agent has received it."""
    from strata.launch import control  # noqa: PLC0415

    status = directory.status
    if status is None or not status.control:
        return False
    try:
        control.ask(status.control, control.Stop(is_now=is_now))
    except ConfigError:  # the agent has not started yet, or has ended
        return False
    return True


def _failure(directory: RunDirectory, finish: Finish) -> BaseException:
    """Return the error to raise: the cause, the worker's traceback or last lines, the path of the logs."""
    from strata.launch.record.log import NUM_LAST_LINES, last_lines  # noqa: PLC0415

    if finish.outcome == "stopped" and finish.reason.startswith("Ctrl-C"):
        return interrupted(f"run {directory.name}: {finish.reason}")
    lines = [f"run {directory.name} {finish.outcome}: {finish.reason}"]
    log = directory.first_failure() if finish.outcome == "failed" else None
    if log is not None:
        trace = remote_function.read_error(_call_directory(directory), log.attempt, log.rank)
        lines += [f"output of rank {log.rank}:", trace or "\n".join(last_lines(log.path, NUM_LAST_LINES))]
    lines += [f"logs: {directory.path / 'logs'}"]
    return RunFailed("\n".join(lines))
