"""The directory of a run, and the list of all runs.

Each run has a directory of its name. Its agent writes there; everything else only reads, even while the run is active
or after its agent was killed:

    run.json                    the specification
    status.json                 the current status; replaced atomically, so that a reader never sees half of it
    events.jsonl                the timeline, one event per line
    logs/attempt-000/rank-0.log the output of a worker
    checkpoints/, coordinator.db
    lock                        held by the agent

The status is still `running` after its agent was killed. Therefore it identifies its writer: the process id, the
start time of that process and the boot, since process ids are reused.
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

from strata.coordinator.state.server_figures import ServerFigures  # noqa: TC001 - msgspec evaluates it
from strata.errors import ConfigError
from strata.launch.record.timeline import MAX_TEXT, MAX_WHAT, RunEvent, failed_rank
from strata.launch.spec import RunSpec
from strata.lifecycle import Descriptor
from strata.printing import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from strata.clock import Clock

log = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "STRATA_RUNS_DIR"
MAX_SPEC_BYTES = 8 << 20
"""Limit for arguments and variables; a process accepts no more either."""
MAX_STATUS_BYTES = 64 << 10
STATUS_BYTES = 4_096
"""Smallest size of the file: one block, allocated from the start, which can be overwritten on a full disk."""
MAX_REASON = 2_000
MAX_EVENT_BYTES = 8 << 10
MAX_EVENTS_BYTES = 16 << 20
"""Bytes at the end of the timeline that are read: weeks of events."""
MAX_NAMED = 8
"""Runs listed in a message."""
_NAME_TRIES = 100
_LOG = re.compile(r"rank-(\d{1,9})\.log")
_ATTEMPT = re.compile(r"attempt-(\d{1,9})")

State = Literal["starting", "running", "stopping", "done", "failed", "stopped"]
UNDER_WAY: frozenset[str] = frozenset({"starting", "running", "stopping"})


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a run, as its agent last wrote it."""

    state: State
    pid: int
    """Process id of the agent."""
    pid_started: int
    """Start time of that process, in ticks since the boot."""
    boot_id: str
    attempt: int = 0
    world_size: int = 0
    """Processes, with the parameter servers."""
    num_servers: int = 0
    """How many of the last ranks are parameter servers."""
    servers: ServerFigures | None = None
    """What the servers last reported, together."""
    only_workers: int = 0
    """The only world size that can resume from the last checkpoint; 0: any."""
    num_restarts: int = 0
    step: int = 0
    started_at_s: float = 0.0
    updated_at_s: float = 0.0
    reason: str = ""
    exit_code: int | None = None
    control: str = ""
    """Path of the agent's control socket."""
    checkpoint: str = ""
    """Path of the last committed checkpoint."""
    coordinator: str = ""
    """Address of the run's coordinator."""
    page: str = ""
    """URL of the run's page, which only this user can open; empty without one."""

    @classmethod
    def of_this_process(cls, *, now_s: float) -> RunStatus:
        """Return the first status of an agent; later ones replace some of its fields."""
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
    unreadable: dict[str, str]
    """Names of runs that cannot be read, and the reasons."""


# -- one run -----------------------------------------------------------------------------------------------------------


class RunDirectory:
    def __init__(self, path: Path, spec: RunSpec) -> None:
        self.path = path
        self.spec = spec
        self._failing: set[str] = set()
        """Files whose last write failed."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        """Default location of the checkpoints."""
        return self.path / "checkpoints"

    def locate_checkpoints(self) -> str:
        """Return the directory or URL of the checkpoints. A script may use another location than the run's spec.

        Raises:
            ConfigError: The run has no checkpoints.
        """
        status = self.status
        url = (status.checkpoint.rpartition("/")[0] if status is not None else "") or self.spec.checkpoints
        if "://" in url or Path(url).is_dir():
            return url
        if self.checkpoints.is_dir():  # the run was moved with its checkpoints
            return str(self.checkpoints)
        raise ConfigError(
            f"run {self.name} has no checkpoints: {url} does not exist; if its script saves elsewhere "
            "(strata.init(checkpoints=…)), give that location",
            field="location",
        )

    @property
    def journal(self) -> Path:
        """Journal of the agent's own coordinator."""
        return self.path / "coordinator.db"

    def write_next_spec(self, spec: RunSpec) -> None:
        """Replace the spec for the next start only: the names of logs depend on it, and this start has begun them."""
        current = self.spec
        self.write_spec(spec)
        self.spec = current

    def write_spec(self, spec: RunSpec) -> None:
        """Replace the spec for the next start, for example with another number of workers. Keep the creation time.

        Raises:
            ConfigError: The spec is too large or cannot be written.
        """
        path = self.path / "run.json"
        spec = msgspec.structs.replace(spec, name=self.name)
        encoded = _encode(spec)
        try:
            times = path.stat()
            _replace(path, encoded)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        except OSError as error:
            raise ConfigError(f"cannot write {path} ({error.strerror}); nothing was changed") from error
        self.spec = spec

    @property
    def created_at_s(self) -> float:
        with contextlib.suppress(OSError):  # removed in the meantime
            return (self.path / "run.json").stat().st_mtime
        return 0.0

    # -- status ----------------------------------------------------------------------------------------------------

    @property
    def status(self) -> RunStatus | None:
        """The last status; None if it cannot be read, for example after a power failure."""
        try:
            return msgspec.json.decode(_read(self.path / "status.json", MAX_STATUS_BYTES), type=RunStatus)
        except (OSError, ValueError):
            return None

    def write_status(self, status: RunStatus) -> None:
        """Write the status; only the holder of the lock may, from one thread. A full disk is logged and ignored."""
        path = self.path / "status.json"
        status = msgspec.structs.replace(status, reason=printable(status.reason, max_chars=MAX_REASON))
        with self._log_failure("status.json"):
            try:
                _replace(path, msgspec.json.encode(status).ljust(STATUS_BYTES))
            except OSError:
                _write_over(path, status)

    # -- logs ------------------------------------------------------------------------------------------------------

    def log_path(self, attempt: int, rank: int) -> Path:
        """Return the path of a log, padded so that listings are in order. Create its directory if possible; otherwise
        opening the log reports the reason.
        """
        width = len(str(self.spec.workers.at_most - 1))
        path = self.path / "logs" / f"attempt-{attempt:03}" / f"rank-{rank:0{width}}.log"
        with contextlib.suppress(OSError):
            _make_directory(path.parent)
        return path

    def keep_log_end(self, attempt: int, rank: int, lines: Sequence[str]) -> None:
        """Store the end of a log that is on another machine. Do not touch a log that exists here."""
        if not lines:
            return
        path = self.log_path(attempt, rank)
        with self._log_failure(path.name), contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8", errors="replace") as file:
                file.write("\n".join(("(the log is on another machine; this is its end)", *lines, "")))

    def logs(self, *, first_attempt: int = 0) -> list[LogFile]:
        """Return all logs, sorted by attempt and rank."""
        found = []
        for directory in _list(self.path / "logs"):
            attempt = _ATTEMPT.fullmatch(directory.name)
            if attempt is not None and int(attempt[1]) >= first_attempt:
                ranks = ((path, _LOG.fullmatch(path.name)) for path in _list(directory))
                found += [LogFile(int(attempt[1]), int(rank[1]), path) for path, rank in ranks if rank]
        return sorted(found)

    def first_failure(self, attempt: int | None = None) -> LogFile | None:
        """Return the log of the worker whose failure ended the attempt (default: the newest), or None."""
        event = self.failure(attempt)
        if event is None:
            return None
        failed = (event.attempt, failed_rank(event))
        return next((log for log in self.logs() if (log.attempt, log.rank) == failed), None)

    def failure(self, attempt: int | None = None) -> RunEvent | None:
        """Return the failure that ended the attempt (default: the newest with logs), or None."""
        if attempt is None:
            attempt = max((log.attempt for log in self.logs()), default=0)
        events = [event for event in self.events() if event.attempt == attempt]
        return next((event for what in ("cause", "failed") for event in events if event.what == what), None)

    # -- events ----------------------------------------------------------------------------------------------------

    def note(self, event: RunEvent) -> None:
        """Append an event; truncate what is too long. A full disk is logged and ignored."""
        what, text = printable(event.what, max_chars=MAX_WHAT), printable(event.text, max_chars=MAX_TEXT)
        line = msgspec.json.encode(msgspec.structs.replace(event, what=what, text=text)) + b"\n"
        assert len(line) <= MAX_EVENT_BYTES, len(line)
        with self._log_failure("events.jsonl"):
            fd = os.open(self.path / "events.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                end = os.fstat(fd).st_size
                if end and os.pread(fd, 1, end - 1) != b"\n":
                    line = b"\n" + line  # after a truncated line
                os.write(fd, line)
            finally:
                os.close(fd)

    def events(self) -> list[RunEvent]:
        """Return the events in order. Skip a line that a kill or a full disk has truncated."""
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
        """Hold the lock of the run's agent. The system releases that of a killed one.

        Raises:
            ConfigError: Another process holds it; the message names it.
        """
        lock = Descriptor(os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            try:
                fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(lock.fd, 20, 0).decode(errors="replace").strip()
                holder = f"process {pid}" if pid.isdecimal() else "another process"
                raise ConfigError(
                    f"{holder} already runs {self.name}; follow it with `strata logs -f {self.name}`, stop it before "
                    "you start it again, or give this run another name",
                    field="name",
                ) from None
            self._sign(lock.fd, str(os.getpid()))
            yield
            self._sign(lock.fd, "")
        finally:
            lock.close()

    def _sign(self, fd: int, holder: str) -> None:
        with contextlib.suppress(OSError):  # on a full disk the lock has no holder's name
            os.ftruncate(fd, 0)
            os.pwrite(fd, holder.encode(), 0)

    @contextlib.contextmanager
    def _log_failure(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if name not in self._failing:
                log.warning("cannot write %s (%s); the run continues without it", self.path / name, error.strerror)
            self._failing.add(name)
        else:
            self._failing.discard(name)


# -- all runs ----------------------------------------------------------------------------------------------------------


def root() -> Path:
    """Return `STRATA_RUNS_DIR`, or the system's directory for users' state."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_state_path("strata") / "runs"


def new_name(clock: Clock) -> str:
    """Generate a name such as `251116-0912-3fa2`, so that listings are in the order of the starts."""
    began = datetime.fromtimestamp(clock.wall_s()).astimezone()
    for _ in range(_NAME_TRIES):
        name = f"{began:%y%m%d-%H%M}-{secrets.token_hex(2)}"
        if not (root() / name).exists():
            return name
    raise ConfigError(f"{root()} has too many runs; pass a name", field="name")


def checkpoints_at(location: str, directory: Path) -> str:
    """Return the user's directory (as an absolute path) or URL; if empty, a directory inside the run's."""
    if not location:
        return str(directory / "checkpoints")
    return location if "://" in location else str(Path(location).absolute())


def create(spec: RunSpec, fill: Callable[[Path], None] | None = None) -> RunDirectory:
    """Create the directory of a new run atomically, with its spec.

    Args:
        fill: Writes more files into the directory, before it gets its name.

    Raises:
        ConfigError: A run of this name exists, or the directory cannot be written.
    """
    encoded = _encode(spec)
    path = root() / spec.name
    draft = root() / f".new-{secrets.token_hex(8)}"
    try:
        _make_directory(draft)
        try:
            _replace(draft / "run.json", encoded)
            if fill is not None:
                fill(draft)
            draft.rename(path)  # replaces an empty directory, which is not a run
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        if path.exists():
            raise ConfigError(
                f"run {spec.name} already exists in {root()}; give this one another name, or resume that one: strata "
                f"resume {spec.name}",
                field="name",
            ) from None
        raise ConfigError(
            f"cannot write to {root()} ({error.strerror}); set {DIRECTORY_VARIABLE} to a writable directory"
        ) from error
    return RunDirectory(path, spec)


def open_run(name: str) -> RunDirectory:
    """Return the run of this name, or the only one whose name starts with it.

    Raises:
        ConfigError: No run matches, several do, or it is damaged.
    """
    names = _names()
    matching = [name] if name in names else [each for each in names if name and each.startswith(name)]
    if len(matching) == 1:
        return _open(root() / matching[0])
    if matching:
        listed = ", ".join(matching[:MAX_NAMED]) + (", …" if len(matching) > MAX_NAMED else "")
        raise ConfigError(f"{len(matching)} runs start with {name!r}: {listed}; type more of the name", field="run")
    near = difflib.get_close_matches(name, names, n=1)
    guess = f"; did you mean {near[0]}?" if near else ";"
    raise ConfigError(f"no such run: {name!r}{guess} `strata ps --all` lists them", field="run")


def open_directory(path: Path) -> RunDirectory | None:
    """Return the run whose directory this is, wherever it lies; None if it is not the directory of a run.

    Raises:
        ConfigError: The run is damaged.
    """
    return _open(path) if (path / "run.json").is_file() else None


def find_run(location: str) -> RunDirectory | None:
    """Return the run of a directory, of a name or of a unique prefix of a name; None if the location is none of these.

    Raises:
        ConfigError: The run is damaged.
    """
    path = Path(location).expanduser()
    if "://" in location:
        return None
    if path.is_dir():
        return open_directory(path.absolute())
    if path.name != location or path.exists():
        return None
    try:
        return open_run(location)
    except ConfigError:
        return None  # whoever opens it as something else reports all that was tried


def remove(run: RunDirectory) -> None:
    """Delete a run's directory, with its logs and the checkpoints in it.

    Raises:
        ConfigError: The run is active, or its directory cannot be deleted.
    """
    with run.lock():
        doomed = run.path.with_name(f".removed-{secrets.token_hex(8)}")
        try:
            run.path.rename(doomed)  # so that half a run is never visible
            shutil.rmtree(doomed)
        except OSError as error:
            raise ConfigError(f"cannot delete {run.path}: {error}; remove it by hand", field="run") from error


def all_runs() -> Runs:
    """Return all runs, the newest first. A damaged run does not hide the others."""
    runs, unreadable = [], {}
    for name in _names():
        try:
            runs.append(_open(root() / name))
        except ConfigError as error:
            unreadable[name] = error.message
    runs.sort(key=lambda run: (_started_at_s(run), run.name), reverse=True)
    return Runs(runs, unreadable)


def _started_at_s(run: RunDirectory) -> float:
    """Return the time of the last start: a resumed run is as new as its resume."""
    status = run.status
    return max(run.created_at_s, status.started_at_s if status else 0.0)


def _names() -> list[str]:
    return sorted(path.name for path in _list(root()) if path.is_dir() and not path.name.startswith("."))


def _encode(spec: RunSpec) -> bytes:
    try:
        encoded = msgspec.json.encode(spec)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{printable(str(error.object), max_chars=200)} is not UTF-8; names and arguments must be, so rename it"
        ) from None
    if len(encoded) > MAX_SPEC_BYTES:
        raise ConfigError(
            f"arguments and variables have {len(encoded):,} bytes, more than {MAX_SPEC_BYTES:,}; put them into a file"
        )
    return encoded


def _open(path: Path) -> RunDirectory:
    try:
        return RunDirectory(path, msgspec.json.decode(_read(path / "run.json", MAX_SPEC_BYTES), type=RunSpec))
    except FileNotFoundError:
        why = "has no run.json"
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except (ValueError, ConfigError) as error:  # a spec validates itself
        why = f"has an invalid run.json ({error})"
    raise ConfigError(f"{path} {why}; delete the directory if you do not need it", field="run")


# -- is the agent alive? -----------------------------------------------------------------------------------------------


def state_now(status: RunStatus | None) -> str:
    """Return the state, or `interrupted` if the agent of an active run is dead."""
    if status is None or (status.state in UNDER_WAY and not is_alive(status)):
        return "interrupted"
    return status.state


def is_alive(status: RunStatus) -> bool:
    """Return whether the process that wrote the status still runs on this machine."""
    started = started_ticks(status.pid)
    return started is not None and started == status.pid_started and status.boot_id == boot_id()


def started_ticks(pid: int) -> int | None:
    """Return the start time of a process, in ticks since the boot; None if it has ended or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name, in brackets, may contain spaces and brackets. The state, which is the third field, follows it.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in ("Z", "X"):
        return None
    return int(fields[19])


def boot_id() -> str:
    """Return an id of this boot; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


# -- files -------------------------------------------------------------------------------------------------------------

_EVENT = msgspec.json.Decoder(RunEvent)


def _read(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"longer than {max_bytes:,} bytes")
    return data


def _replace(path: Path, data: bytes) -> None:
    """Replace a file atomically, without fsync: after a power failure it may be empty, which readers handle."""
    draft = path.with_name(f".{path.name}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:  # noqa: PTH123 - a descriptor
        file.write(data)
    draft.replace(path)


def _write_over(path: Path, status: RunStatus) -> None:
    """Overwrite the file within its size, for a full disk. Truncate a reason that does not fit."""
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


def _list(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _make_directory(directory: Path) -> None:
    """Create a directory that only the user can enter."""
    missing = [parent for parent in (directory, *directory.parents) if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir(mode=0o700, exist_ok=True)
