"""A training process as a worker of its job: what it says to the coordinator, and what it is asked from there."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from strata.coordinator.state import limits
from strata.errors import (
    BarrierBroken,
    CoordinatorError,
    CoordinatorUnavailable,
    InvalidArgument,
    StaleGeneration,
    StrataError,
)
from strata.launch.environment import METRICS, note_last_step
from strata.lifecycle import at_exit
from strata.train.agreement import Agreement, Due

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from strata.checkpoint import CheckpointMetadata
    from strata.coordinator.client import CoordinatorClient, Worker
    from strata.coordinator.state.events import CommandRecord
    from strata.coordinator.state.membership import WorkerStateName
    from strata.identity import Identity
    from strata.train.agreement import Wish

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 300.0
"""For all workers of an attempt to be there: one of them may have to import for long."""
AGREE_TIMEOUT_S = 30.0
AGREE_AGAIN_S = 0.1
END_TIMEOUT_S = 300.0
"""For the other ranks to come to the end of their training, too: one may be evaluating."""
LEAVE_TIMEOUT_S = 5.0
"""For the other ranks to tell of the last checkpoint, too; and then for the coordinator to answer."""
POLL_S = 1.0
MAX_METRICS = 18
"""Of the user's, by name; the coordinator keeps 32 of a worker, and 14 are ours: `METRICS`, and `rows_per_s`."""
NO_METRICS: Mapping[str, float] = MappingProxyType({})
_WISHES: dict[str, Wish] = {"STOP": "stop", "CHECKPOINT_NOW": "checkpoint"}


class Membership(Protocol):
    @property
    def generation(self) -> int: ...

    def report(
        self,
        state: WorkerStateName,
        step: int | None = None,
        epoch: int | None = None,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> None: ...

    def watch(self, look: Callable[[], Mapping[str, float]]) -> None:
        """`look` gives further metrics; it is called about once a second, by another thread."""
        ...

    def restored(self, found: CheckpointMetadata) -> None: ...

    def ask_checkpoint(self, reason: str) -> None:
        """Lets all ranks agree on a step and save there. Returns at once."""
        ...

    def ask_stop(self, reason: str) -> None:
        """And end there. Returns at once; may be called by a handler of signals."""
        ...

    def ends_together(self, step: int) -> bool:
        """Whether all ranks come to the end of their training, and after the same step. Waits for them."""
        ...

    def leave(self, *, together: bool, reason: str = "done") -> None: ...


class NoMembership:
    """Without a coordinator: nobody listens."""

    generation = 0

    def report(
        self,
        state: WorkerStateName,
        step: int | None = None,
        epoch: int | None = None,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> None:
        pass

    def watch(self, look: Callable[[], Mapping[str, float]]) -> None:
        pass

    def restored(self, found: CheckpointMetadata) -> None:
        pass

    def ask_checkpoint(self, reason: str) -> None:
        pass

    def ask_stop(self, reason: str) -> None:
        pass

    def ends_together(self, step: int) -> bool:  # noqa: ARG002 - as the protocol has it
        """Nobody can be asked: as for every save, ranks must make the same steps."""
        return True

    def leave(self, *, together: bool, reason: str = "done") -> None:
        pass


class JoinedMembership:
    """With one, until `leave` or the end of the process. All ranks of the attempt are there when it is made."""

    def __init__(
        self,
        client: CoordinatorClient,
        identity: Identity,
        agreement: Agreement,
        *,
        on_left: Callable[[], None] | None = None,
        on_lost: Callable[[StrataError], None] | None = None,
    ) -> None:
        """`on_lost` is called, in a thread of ours, when the coordinator no longer counts this worker in."""
        self._client = client
        self._on_left = on_left
        self._on_lost = on_lost
        self._identity = identity
        self._agreement = agreement
        # The agent watches over steps, with the run's own limit, and writes down where a hung worker stands.
        self._worker: Worker = client.register_worker(
            identity.worker_id,
            job_id=identity.run,
            takeover=True,
            is_watched=True,
            launch_rank=identity.rank,
            attempt=identity.attempt,
        )
        self._has_stepped = False
        self._step = 0
        self._metrics = _Metrics()
        self._look: Callable[[], Mapping[str, float]] = dict
        self._ours: dict[str, float] = {}
        """Said again and again: a coordinator that was lost and came back knows no metrics."""
        self._tell()
        self._worker.heartbeat()  # who wants this attempt to stop finds its workers from their first step on
        _meet(self._worker, identity, deadline_s=time.monotonic() + JOIN_TIMEOUT_S)
        self._num_ends = 0
        """How often the ranks have met to save the last step."""
        self._is_leaving = threading.Event()
        self._wanted: dict[Literal["CHECKPOINT_NOW", "STOP"], str] = {}
        """What this rank wants of all, and why, until it has said so."""
        self._commands: deque[CommandRecord] = deque()
        """Heard and not yet followed."""
        self._listener = threading.Thread(target=self._listen, name="strata-context", daemon=True)
        self._listener.start()
        self._withdraw_hook = at_exit(lambda: self.leave(together=False))

    @property
    def worker(self) -> Worker:
        return self._worker

    @property
    def generation(self) -> int:
        return self._worker.generation

    def report(
        self,
        state: WorkerStateName,
        step: int | None = None,
        epoch: int | None = None,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> None:
        numbers: dict[str, Any] = self._metrics.numbers(metrics) if metrics else {}
        if state == "TRAINING" and not self._has_stepped:
            self._has_stepped = True
            self._worker.report_event("FIRST_STEP", at_s=time.time(), step=step or 0)
        self._step = self._step if step is None else step
        self._worker.note(state, step, epoch, numbers)

    def watch(self, look: Callable[[], Mapping[str, float]]) -> None:
        self._look = look

    def restored(self, found: CheckpointMetadata) -> None:
        """Compares with what the coordinator knows to be the last."""
        self._worker.report_event("RESTORED", at_s=time.time(), step=found.step)
        try:
            told = self._worker.recover().checkpoint
        except CoordinatorError as error:
            log.warning("the coordinator could not be asked for the last checkpoint: %s", error)
            return
        if told is not None and told.checkpoint.checkpoint_id != found.id:
            last = told.checkpoint.checkpoint_id
            log.warning("checkpoint %s is restored; the last that was told of is %s", found.id, last)

    def ask_checkpoint(self, reason: str) -> None:
        self._wanted["CHECKPOINT_NOW"] = reason

    def ask_stop(self, reason: str) -> None:
        self._wanted["STOP"] = reason

    def ends_together(self, step: int) -> bool:
        if self._identity.world_size == 1:
            return True
        told_as = METRICS.last_steps[self._num_ends % 2]
        self._ours[told_as] = float(step)
        self._num_ends += 1
        try:
            self._tell()
            self._worker.heartbeat()
            self._worker.barrier(f"last/{self._num_ends}", step=self._identity.attempt, timeout_s=END_TIMEOUT_S)
            told = [each.metrics for each in self._client.list_workers(job_id=self._identity.run).workers]
        except StrataError as error:
            log.warning("the last step is not saved, since not all ranks come to an end: %s", error)
            return False
        steps = [int(each[told_as]) for each in told if told_as in each]
        # Who has left by now has found that they differ: else it would wait for this one's part of the checkpoint.
        if steps == [step] * self._identity.world_size:
            return True
        log.warning("the last step, %d on this rank, is not saved: all ranks must make the same number of steps", step)
        return False

    def leave(self, *, together: bool, reason: str = "done") -> None:
        """`together`: not before all ranks do, since a checkpoint of theirs may still need this one's word."""
        self._withdraw_hook()
        self._is_leaving.set()
        if self._has_stepped:
            note_last_step(os.environ, self._step)
        try:
            if together and self._identity.world_size > 1:
                self._worker.barrier("end", step=self._identity.attempt, timeout_s=LEAVE_TIMEOUT_S)
        except StrataError as error:  # somebody has died, or does not come: then there is nothing to wait for
            log.info("leaving before the others: %s", error)
        try:
            self._worker.deregister(reason, timeout_s=LEAVE_TIMEOUT_S)
        except StrataError as error:
            log.info("left without a word: %s", error)
        self._client.close()
        if self._on_left is not None:
            self._on_left()

    # -- beside training -------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._is_leaving.is_set():
            try:
                self._worker.wait_changed(POLL_S)
                self._tell()
                for name, reason in list(self._wanted.items()):
                    self._client.send_command(name, job_id=self._identity.run, reason=reason)
                    del self._wanted[name]  # only now: what could not be said is said again
                self._commands.extend(self._worker.take_commands())
                while self._commands:
                    self._follow(self._commands.popleft())
            except StrataError as error:
                if not self._is_leaving.is_set() and self._worker.lost is None:
                    log.warning("no word from the coordinator: %s", error)
            except Exception:
                if not self._is_leaving.is_set():
                    log.exception("the context no longer listens to the coordinator")
                return
            lost = self._worker.lost
            if lost is not None and not self._is_leaving.is_set():
                log.error("this worker is out of its job: %s", lost)
                if self._on_lost is not None:
                    self._on_lost(lost)
                return

    def _tell(self) -> None:
        """Who this is; and what can be seen from outside, unless the script reports the same by itself."""
        seen = {name: number for name, number in self._look().items() if name not in self._metrics.names}
        self._worker.note(None, None, None, {**self._ours, **seen})

    def _follow(self, command: CommandRecord) -> None:
        is_ours = command.args.get("attempt", str(self._identity.attempt)) == str(self._identity.attempt)
        if command.name in _WISHES and is_ours:
            self._agree(command, _WISHES[command.name])

    def _agree(self, command: CommandRecord, wish: Wish) -> None:
        """All ranks' threads do this for the same command, whatever their training does meanwhile.

        This rank's limit stays as it was first set until all are known: the others count on it.
        """
        limit = self._agreement.set_limit()
        if METRICS.agree_command in self._ours:
            self._ours[METRICS.agreed_command] = self._ours[METRICS.agree_command]
            self._ours[METRICS.agreed_limit] = self._ours[METRICS.agree_limit]
        self._ours |= {METRICS.agree_command: float(command.command_id), METRICS.agree_limit: float(limit)}
        try:
            step = self._greatest_limit(command.command_id, deadline_s=time.monotonic() + AGREE_TIMEOUT_S)
        except (BarrierBroken, CoordinatorUnavailable) as error:
            log.warning("the ranks cannot agree on a step for %s: %s", command.name, error)
            self._agreement.give_up()
        except BaseException:
            self._agreement.give_up()
            raise
        else:
            self._agreement.agree(Due(wish, step, command.reason))

    def _greatest_limit(self, command_id: int, *, deadline_s: float) -> int:
        """Of all ranks. A coordinator that is lost meanwhile takes the limits with it, and is told them again.

        Raises:
            BarrierBroken: Somebody is gone, or does not come in time.
            CoordinatorUnavailable: It is not to be had, or does not know all limits in time.
        """
        has_met = False
        while True:
            try:
                self._tell()
                self._worker.heartbeat()
                if not has_met:
                    left_s = max(deadline_s - time.monotonic(), 0.1)
                    self._worker.barrier("agree", step=command_id, timeout_s=left_s)
                    has_met = True
                told = [worker.metrics for worker in self._client.list_workers(job_id=self._identity.run).workers]
                limits_told = [limit for each in told if (limit := limit_about(each, command_id)) is not None]
                if len(limits_told) >= self._identity.world_size:
                    return int(max(limits_told))
                missing = f"{self._identity.world_size - len(limits_told)} ranks have not said how far they are"
            except CoordinatorUnavailable as error:
                missing = str(error)
            if time.monotonic() >= deadline_s or self._is_leaving.wait(AGREE_AGAIN_S):
                raise CoordinatorUnavailable(missing)


def _meet(worker: Worker, identity: Identity, *, deadline_s: float) -> None:
    """Until all ranks of this attempt are there, and nobody else.

    Members of the attempt before are replaced or go as they are missed; they never arrive at this barrier. So a
    generation of the right size in which everybody arrives consists of new ones only.

    Raises:
        CoordinatorUnavailable, BarrierBroken: Somebody does not come in time.
    """
    while True:
        left_s = max(deadline_s - time.monotonic(), 0.1)
        worker.wait_for_workers(identity.world_size, timeout_s=left_s)
        if worker.world_size > identity.world_size:
            worker.wait_changed(min(left_s, POLL_S))
        else:
            try:
                worker.barrier("start", step=identity.attempt, timeout_s=left_s)
            except (BarrierBroken, StaleGeneration):
                if time.monotonic() >= deadline_s:
                    raise
            else:
                return
        if time.monotonic() >= deadline_s:
            raise CoordinatorUnavailable(
                f"{worker.world_size} workers are in job {identity.run!r}, {identity.world_size} should be; "
                "is another run of the same name under way?"
            )


def limit_about(metrics: Mapping[str, float], command_id: int) -> float | None:
    """How far a rank goes until all agree about a command; None if it does not say.

    It may be at the next command already: then it has read everybody's limits, but not everybody has read its own.
    Beyond that one it does not come before all have.
    """
    for command, limit in (
        (METRICS.agree_command, METRICS.agree_limit),
        (METRICS.agreed_command, METRICS.agreed_limit),
    ):
        if metrics.get(command) == command_id:
            return metrics.get(limit)
    return None


class _Metrics:
    """Takes what can be told of a script's metrics. A run must not suffer from what it reports: the coordinator refuses
    a whole heartbeat for one bad number in it.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._left_out: set[str] = set()

    def numbers(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        found = {}
        for name, value in metrics.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                self._leave_out(name, f"{type(value).__name__} is no number")
                continue
            if not math.isfinite(number):
                self._leave_out(name, f"it is {number}")
            elif name in self.names or self._take_in(name):
                found[name] = number
        return found

    def _take_in(self, name: str) -> bool:
        try:
            limits.check_id(name, "metrics")
        except InvalidArgument as error:
            self._leave_out(name, str(error))
            return False
        if len(self.names) >= MAX_METRICS:
            self._leave_out(name, f"there are {MAX_METRICS} others already")
            return False
        self.names.add(name)
        return True

    def _leave_out(self, name: str, why: str) -> None:
        """Said once a name, and of a script that makes up names only a few times."""
        if name not in self._left_out and len(self._left_out) < MAX_METRICS:
            self._left_out.add(name)
            log.warning("metric %.60r is not shown: %s", name, why)
