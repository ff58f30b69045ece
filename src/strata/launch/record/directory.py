"""Where runs live, and what is in one.

Each run has a directory of its name. The agent that runs it writes there, everybody else only reads, also while it runs
and after it was killed:

    run.json                    what is to be run
    status.json                 how it stands; replaced as a whole, so that a reader never finds half of it
    events.jsonl                what happened, one line each
    logs/attempt-000/rank-0.log what the workers wrote
    checkpoints/, coordinator.db
    lock                        held by the agent

A status says `running` also when its agent was killed. Who wrote it is therefore part of it: the process, when that
began, and on which boot, since numbers of processes are used again.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import platformdirs

from strata.errors import ConfigError
from strata.launch.record.timeline import MAX_TEXT, MAX_WHAT, RunEvent, failed_rank
from strata.launch.spec import RunSpec
from strata.lifecycle import Descriptor
from strata.printing import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from strata.clock import Clock

log = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "STRATA_RUNS_DIR"
MAX_SPEC_BYTES = 8 << 20
"""Arguments and variables go to a process, which takes no more either."""
MAX_STATUS_BYTES = 64 << 10
STATUS_BYTES = 4_096
"""Of the file, at least: one block, which it has from the beginning and can be written over on a full disk."""
MAX_REASON = 2_000
MAX_EVENT_BYTES = 8 << 10
"""Of a line."""
MAX_EVENTS_BYTES = 16 << 20
"""Of the end of the events that are read: those of weeks."""
MAX_NAMED = 8
"""Runs in a message."""
_NAME_TRIES = 100
_LOG = re.compile(r"rank-(\d{1,9})\.log")
_ATTEMPT = re.compile(r"attempt-(\d{1,9})")

State = Literal["starting", "running", "stopping", "done", "failed", "stopped"]
UNDER_WAY: frozenset[str] = frozenset({"starting", "running", "stopping"})


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands, as its agent last said."""

    state: State
    pid: int
    """Of the agent."""
    pid_started: int
    """When that process began, in ticks since the boot."""
    boot_id: str
    attempt: int = 0
    world_size: int = 0
    only_workers: int = 0
    """The number of workers that alone can go on from the last checkpoint; 0: any."""
    num_restarts: int = 0
    step: int = 0
    started_at_s: float = 0.0
    updated_at_s: float = 0.0
    reason: str = ""
    exit_code: int | None = None
    control: str = ""
    """The address of the agent's control socket."""
    checkpoint: str = ""
    """Where the last one is that was committed."""
    coordinator: str = ""
    """Where the run's coordinator is reached."""

    @classmethod
    def of_this_process(cls, *, now_s: float) -> RunStatus:
        """The first of an agent; the others are this one with something replaced."""
        pid = os.getpid()
        return cls(
            state="starting",
            pid=pid,
            pid_started=started_ticks(pid) or 0,
            boot_id=boot_id(),
            started_at_s=now_s,
            updated_at_s=now_s,
        )


class LogFile(NamedTuple):
    attempt: int
    rank: int
    path: Path


class Runs(NamedTuple):
    found: list[RunDirectory]
    passed_over: dict[str, str]
    """Names of those that cannot be read, and why."""


# -- one run -----------------------------------------------------------------------------------------------------------


class RunDirectory:
    def __init__(self, path: Path, spec: RunSpec) -> None:
        self.path = path
        self.spec = spec
        self._failing: set[str] = set()
        """Files that could not be written the last time."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        """Where they are, unless the spec names another place."""
        return self.path / "checkpoints"

    @property
    def journal(self) -> Path:
        """The state of the coordinator that the agent has inside."""
        return self.path / "coordinator.db"

    def write_spec(self, spec: RunSpec) -> None:
        """Another one from the next start on, as with another number of workers. When the run was made stays.

        Raises:
            ConfigError: It is too large, or cannot be written.
        """
        path = self.path / "run.json"
        spec = msgspec.structs.replace(spec, name=self.name)
        encoded = _encoded(spec)
        try:
            times = path.stat()
            _replace(path, encoded)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}); nothing was changed") from error
        self.spec = spec

    @property
    def created_at_s(self) -> float:
        with contextlib.suppress(OSError):  # removed meanwhile
            return (self.path / "run.json").stat().st_mtime
        return 0.0

    # -- status ----------------------------------------------------------------------------------------------------

    @property
    def status(self) -> RunStatus | None:
        """As last written; None if nothing is there that can be read, as after a power cut."""
        try:
            return msgspec.json.decode(_read(self.path / "status.json", MAX_STATUS_BYTES), type=RunStatus)
        except (OSError, ValueError):
            return None

    def write_status(self, status: RunStatus) -> None:
        """Called by whoever holds the lock, from one thread. A full disk does not end a run: it is logged."""
        path = self.path / "status.json"
        status = msgspec.structs.replace(status, reason=printable(status.reason, max_chars=MAX_REASON))
        with self._unless_it_fails("status.json"):
            try:
                _replace(path, msgspec.json.encode(status).ljust(STATUS_BYTES))
            except OSError:
                _write_over(path, status)

    # -- logs ------------------------------------------------------------------------------------------------------

    def log_path(self, attempt: int, rank: int) -> Path:
        """Padded, so that a listing is in order. Its directory is made, if it can be; else opening the log says why."""
        width = len(str(self.spec.workers.at_most - 1))
        path = self.path / "logs" / f"attempt-{attempt:03}" / f"rank-{rank:0{width}}.log"
        with contextlib.suppress(OSError):
            _make_directory(path.parent)
        return path

    def keep_log_end(self, attempt: int, rank: int, lines: Sequence[str]) -> None:
        """Of a worker on another machine, whose log is there. One that is here is left as it is."""
        if not lines:
            return
        path = self.log_path(attempt, rank)
        with self._unless_it_fails(path.name), contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8", errors="replace") as file:
                file.write("\n".join(("(the log is on another machine; this is its end)", *lines, "")))

    def logs(self, *, first_attempt: int = 0) -> list[LogFile]:
        """All that there are, by attempt and rank."""
        found = []
        for directory in _listed(self.path / "logs"):
            attempt = _ATTEMPT.fullmatch(directory.name)
            if attempt is not None and int(attempt[1]) >= first_attempt:
                ranks = ((path, _LOG.fullmatch(path.name)) for path in _listed(directory))
                found += [LogFile(int(attempt[1]), int(rank[1]), path) for path, rank in ranks if rank]
        return sorted(found)

    def first_failure(self, attempt: int | None = None) -> LogFile | None:
        """The log of the worker that ended the attempt, or the newest attempt; None if nobody has failed in it."""
        event = self.failure(attempt)
        if event is None:
            return None
        failed = (event.attempt, failed_rank(event))
        return next((log for log in self.logs() if (log.attempt, log.rank) == failed), None)

    def failure(self, attempt: int | None = None) -> RunEvent | None:
        """What ended the attempt, or the newest attempt that has logs; None if nobody has failed in it."""
        if attempt is None:
            attempt = max((log.attempt for log in self.logs()), default=0)
        events = [event for event in self.events() if event.attempt == attempt]
        return next((event for what in ("cause", "failed") for event in events if event.what == what), None)

    # -- events ----------------------------------------------------------------------------------------------------

    def note(self, event: RunEvent) -> None:
        """Append it; what is too long is cut. A full disk does not end a run: it is logged."""
        what, text = printable(event.what, max_chars=MAX_WHAT), printable(event.text, max_chars=MAX_TEXT)
        line = msgspec.json.encode(msgspec.structs.replace(event, what=what, text=text)) + b"\n"
        assert len(line) <= MAX_EVENT_BYTES, len(line)
        with self._unless_it_fails("events.jsonl"):
            fd = os.open(self.path / "events.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                end = os.fstat(fd).st_size
                if end and os.pread(fd, 1, end - 1) != b"\n":
                    line = b"\n" + line  # behind a line that was cut
                os.write(fd, line)
            finally:
                os.close(fd)

    def events(self) -> list[RunEvent]:
        """In the order in which they were noted. A line that was cut, by a kill or a full disk, is left out."""
        try:
            with (self.path / "events.jsonl").open("rb") as file:
                start = max(file.seek(0, os.SEEK_END) - MAX_EVENTS_BYTES, 0)
                file.seek(start)
                lines = file.read(MAX_EVENTS_BYTES).split(b"\n")
        except OSError:
            return []
        found = []
        for line in lines[1 if start else 0 :]:
            with contextlib.suppress(ValueError):
                found.append(_EVENT.decode(line))
        return found

    # -- the lock --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One agent at a time. A killed one has let go of it.

        Raises:
            ConfigError: Another process has it; the message says which.
        """
        lock = Descriptor(os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            try:
                fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(lock.fd, 20, 0).decode(errors="replace").strip()
                holder = f"process {pid}" if pid.isdecimal() else "another process"
                raise ConfigError(
                    f"{holder} runs {self.name} already; look at it with `strata logs -f {self.name}`, "
                    "stop it before you start it again, or give this run another name",
                    field="name",
                ) from None
            self._sign(lock.fd, str(os.getpid()))
            yield
            self._sign(lock.fd, "")
        finally:
            lock.close()

    def _sign(self, fd: int, holder: str) -> None:
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its holder's name
            os.ftruncate(fd, 0)
            os.pwrite(fd, holder.encode(), 0)

    @contextlib.contextmanager
    def _unless_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if name not in self._failing:
                log.warning("%s cannot be written (%s); the run goes on without", self.path / name, error.strerror)
            self._failing.add(name)
        else:
            self._failing.discard(name)


# -- all runs ----------------------------------------------------------------------------------------------------------


def root() -> Path:
    """`STRATA_RUNS_DIR`, or where this system keeps the state of users' programs."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_state_path("strata") / "runs"


def new_name(clock: Clock) -> str:
    """Of a run that nobody has named, as `251116-0912-3fa2`: in a listing they are in the order of their starts."""
    began = datetime.fromtimestamp(clock.wall_s()).astimezone()
    for _ in range(_NAME_TRIES):
        name = f"{began:%y%m%d-%H%M}-{secrets.token_hex(2)}"
        if not (root() / name).exists():
            return name
    raise ConfigError(f"there are too many runs in {root()}; give this one a name", field="name")


def checkpoints_at(place: str, directory: Path) -> str:
    """A directory or URL that a user has named, as it is called from anywhere; none is in the run's own directory."""
    if not place:
        return str(directory / "checkpoints")
    return place if "://" in place else str(Path(place).absolute())


def create(spec: RunSpec) -> RunDirectory:
    """A new run's directory. It is there with its spec in it, or not at all.

    Raises:
        ConfigError: There is a run of this name, or the place cannot be written to.
    """
    encoded = _encoded(spec)
    path = root() / spec.name
    draft = root() / f".new-{secrets.token_hex(8)}"
    try:
        _make_directory(draft)
        try:
            _replace(draft / "run.json", encoded)
            draft.rename(path)  # also in the place of an empty directory, which is no run
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        if path.exists():
            raise ConfigError(
                f"there is a run {spec.name} in {root()} already; give this one another name, "
                f"or go on with that one: strata resume {spec.name}",
                field="name",
            ) from None
        raise ConfigError(
            f"no run can be kept in {root()} ({error.strerror}); set {DIRECTORY_VARIABLE} to a directory that can be "
            "written to"
        ) from error
    return RunDirectory(path, spec)


def open_run(name: str) -> RunDirectory:
    """The run of this name, or the only one whose name begins so.

    Raises:
        ConfigError: There is none, or several, or it is damaged.
    """
    names = _names()
    matching = [name] if name in names else [each for each in names if name and each.startswith(name)]
    if len(matching) == 1:
        return _opened(root() / matching[0])
    if matching:
        listed = ", ".join(matching[:MAX_NAMED]) + (", …" if len(matching) > MAX_NAMED else "")
        raise ConfigError(f"{len(matching)} runs begin with {name!r}: {listed}; say more of the name", field="run")
    near = difflib.get_close_matches(name, names, n=1)
    guess = f"; did you mean {near[0]}?" if near else ";"
    raise ConfigError(f"no such run: {name!r}{guess} `strata ps --all` lists them", field="run")


def remove(run: RunDirectory) -> None:
    """Delete a run's directory, with its logs and the checkpoints in it.

    Raises:
        ConfigError: It is under way, or cannot be deleted.
    """
    with run.lock():
        doomed = run.path.with_name(f".removed-{secrets.token_hex(8)}")
        try:
            run.path.rename(doomed)  # nobody sees half a run
            shutil.rmtree(doomed)
        except OSError as error:
            raise ConfigError(f"{run.path} cannot be deleted: {error}", field="run") from error


def all_runs() -> Runs:
    """The newest first. One that is damaged hides no other."""
    runs, passed_over = [], {}
    for name in _names():
        try:
            runs.append(_opened(root() / name))
        except ConfigError as error:
            passed_over[name] = error.message
    runs.sort(key=lambda run: (_began_at_s(run), run.name), reverse=True)
    return Runs(runs, passed_over)


def _began_at_s(run: RunDirectory) -> float:
    """A run that was resumed is as new as that."""
    status = run.status
    return max(run.created_at_s, status.started_at_s if status else 0.0)


def _names() -> list[str]:
    return sorted(path.name for path in _listed(root()) if path.is_dir() and not path.name.startswith("."))


def _encoded(spec: RunSpec) -> bytes:
    try:
        encoded = msgspec.json.encode(spec)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{printable(str(error.object), max_chars=200)} is not UTF-8, and names and arguments must be; rename it"
        ) from None
    if len(encoded) > MAX_SPEC_BYTES:
        raise ConfigError(f"arguments and variables of {len(encoded):,} bytes are too much; put them into a file")
    return encoded


def _opened(path: Path) -> RunDirectory:
    try:
        return RunDirectory(path, msgspec.json.decode(_read(path / "run.json", MAX_SPEC_BYTES), type=RunSpec))
    except FileNotFoundError:
        why = "has no run.json"
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except (ValueError, ConfigError) as error:  # a spec refuses what makes no sense by itself
        why = f"has a run.json that is none ({error})"
    raise ConfigError(f"{path} {why}; remove it, once nothing in it is needed", field="run")


# -- whether it lives --------------------------------------------------------------------------------------------------


def state_now(status: RunStatus | None) -> str:
    """What the status says, unless nobody is left of whom it could be true."""
    if status is None or (status.state in UNDER_WAY and not is_alive(status)):
        return "interrupted"
    return status.state


def is_alive(status: RunStatus) -> bool:
    """Whether the very process that wrote it still runs on this machine."""
    started = started_ticks(status.pid)
    return started is not None and started == status.pid_started and status.boot_id == boot_id()


def started_ticks(pid: int) -> int | None:
    """When the process began, in ticks since the boot; None if it has ended, also if nobody has asked after it yet."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name, in brackets, may hold spaces and brackets. Behind it come the state, the third field, and the others.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in ("Z", "X"):
        return None
    return int(fields[19])


def boot_id() -> str:
    """Another one after each boot; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


# -- within ------------------------------------------------------------------------------------------------------------

_EVENT = msgspec.json.Decoder(RunEvent)


def _read(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"longer than {max_bytes:,} bytes")
    return data


def _replace(path: Path, data: bytes) -> None:
    """Whole or as before. Without fsync: after a power cut it may be empty, which readers know."""
    draft = path.with_name(f".{path.name}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:  # noqa: PTH123 - a descriptor
        file.write(data)
    draft.replace(path)


def _write_over(path: Path, status: RunStatus) -> None:
    """In the room that the file has: on a full disk there is no other. A reason that does not fit is cut."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    with open(fd, "wb", buffering=0) as file:  # noqa: PTH123 - a descriptor
        room = os.fstat(fd).st_size
        for max_chars in (MAX_REASON, 200, 0):
            reason = printable(status.reason, max_chars=max_chars)
            data = msgspec.json.encode(msgspec.structs.replace(status, reason=reason))
            if len(data) <= room:
                file.write(data.ljust(room))
                return
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _make_directory(directory: Path) -> None:
    """Only the user may look into the directories that we make."""
    missing = [parent for parent in (directory, *directory.parents) if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir(mode=0o700, exist_ok=True)
