"""A training process as a worker of its job: what it says to the coordinator, and what it is asked from there."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from strata.errors import BarrierBroken, CoordinatorError, CoordinatorUnavailable, StaleGeneration, StrataError
from strata.train.agreeing import Agreement, Due

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.checkpoint import CheckpointMetadata
    from strata.coordinator.client import CoordinatorClient, Worker
    from strata.coordinator.events import CommandRecord
    from strata.coordinator.membership import WorkerStateName
    from strata.launch.contract import Place
    from strata.train.agreeing import Wish

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 300.0
"""For all workers of an attempt to be there: one of them may have to import for long."""
AGREE_TIMEOUT_S = 30.0
LEAVE_TIMEOUT_S = 5.0
"""For the other ranks to tell of the last checkpoint, too."""
POLL_S = 1.0
_WISHES: dict[str, Wish] = {"STOP": "stop", "CHECKPOINT_NOW": "checkpoint"}
_AGREED_COMMAND, _AGREED_LIMIT = "agree_command", "agree_limit"
"""Heartbeat metrics: about which command, and how far training goes."""


class Membership(Protocol):
    @property
    def generation(self) -> int: ...

    def report(
        self, *, state: WorkerStateName, step: int | None = None, epoch: int | None = None, **metrics: float
    ) -> None: ...

    def restored(self, found: CheckpointMetadata) -> None: ...

    def ask_checkpoint(self, reason: str) -> None:
        """Lets all ranks agree on a step and save there. Returns at once."""
        ...

    def leave(self, *, together: bool) -> None: ...


class NoMembership:
    """Without a coordinator: nobody listens."""

    generation = 0

    def report(
        self, *, state: WorkerStateName, step: int | None = None, epoch: int | None = None, **metrics: float
    ) -> None:
        pass

    def restored(self, found: CheckpointMetadata) -> None:
        pass

    def ask_checkpoint(self, reason: str) -> None:
        pass

    def leave(self, *, together: bool) -> None:
        pass


class JoinedMembership:
    """With one. All ranks of the attempt are there when it is made."""

    def __init__(
        self,
        client: CoordinatorClient,
        place: Place,
        agreement: Agreement,
        *,
        on_left: Callable[[], None] | None = None,
    ) -> None:
        self._client = client
        self._on_left = on_left
        self._place = place
        self._agreement = agreement
        self._worker: Worker = client.register_worker(place.worker_id, job_id=place.run, takeover=True)
        self._worker.report(attempt=place.attempt, rank=place.rank)
        self._has_stepped = False
        _meet(self._worker, place, deadline_s=time.monotonic() + JOIN_TIMEOUT_S)
        self._is_leaving = threading.Event()
        self._wanted = ""
        """Why this rank wants a checkpoint of all, until it has said so."""
        self._listener = threading.Thread(target=self._listen, name="strata-context", daemon=True)
        self._listener.start()

    @property
    def worker(self) -> Worker:
        return self._worker

    @property
    def generation(self) -> int:
        return self._worker.generation

    def report(
        self, *, state: WorkerStateName, step: int | None = None, epoch: int | None = None, **metrics: float
    ) -> None:
        if state == "TRAINING" and not self._has_stepped:
            self._has_stepped = True
            metrics["first_step_at_s"] = time.time()
        self._worker.report(state=state, step=step, epoch=epoch, **metrics)

    def restored(self, found: CheckpointMetadata) -> None:
        """Compares with what the coordinator knows to be the last."""
        self._worker.report(restored_at_s=time.time())
        try:
            told = self._worker.recover().checkpoint
        except CoordinatorError as error:
            log.warning("the coordinator could not be asked for the last checkpoint: %s", error)
            return
        if told is not None and told.checkpoint.checkpoint_id != found.id:
            last = told.checkpoint.checkpoint_id
            log.warning("checkpoint %s is restored; the last that was told of is %s", found.id, last)

    def ask_checkpoint(self, reason: str) -> None:
        self._wanted = reason

    def leave(self, *, together: bool) -> None:
        """`together`: not before all ranks do, since a checkpoint of theirs may still need this one's word."""
        self._is_leaving.set()
        try:
            if together and self._place.world_size > 1:
                self._worker.barrier("end", step=self._place.attempt, timeout_s=LEAVE_TIMEOUT_S)
        except StrataError as error:  # somebody has died, or does not come: then there is nothing to wait for
            log.info("leaving before the others: %s", error)
        try:
            self._worker.deregister("done")
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
                if self._wanted:
                    reason, self._wanted = self._wanted, ""
                    self._client.send_command("CHECKPOINT_NOW", job_id=self._place.run, reason=reason)
                for command in self._worker.take_commands():
                    if command.name in _WISHES:
                        self._agree(command, _WISHES[command.name])
            except StrataError as error:
                if self._is_leaving.is_set() or self._worker.lost is not None:
                    return
                log.warning("no word from the coordinator: %s", error)
            except Exception:
                if not self._is_leaving.is_set():
                    log.exception("the context no longer listens to the coordinator")
                return

    def _agree(self, command: CommandRecord, wish: Wish) -> None:
        """All ranks' threads do this for the same command, whatever their training does meanwhile."""
        limit = self._agreement.set_limit()
        try:
            said: dict[str, Any] = {_AGREED_COMMAND: float(command.command_id), _AGREED_LIMIT: float(limit)}
            self._worker.report(**said)
            self._worker.heartbeat()
            self._worker.barrier("agree", step=command.command_id, timeout_s=AGREE_TIMEOUT_S)
            told = self._client.list_workers(job_id=self._place.run).workers
            limits = [w.metrics.get(_AGREED_LIMIT, 0.0) for w in told if _is_about(w.metrics, command.command_id)]
            self._agreement.agree(Due(wish, int(max(limits)), command.reason))
        except BarrierBroken as error:
            log.warning("the ranks cannot agree on a step for %s: %s", command.name, error)
            self._agreement.give_up()
        except BaseException:
            self._agreement.give_up()
            raise


def _meet(worker: Worker, place: Place, *, deadline_s: float) -> None:
    """Until all ranks of this attempt are there, and nobody else.

    Members of the attempt before are replaced or go as they are missed; they never arrive at this barrier. So a
    generation of the right size in which everybody arrives consists of new ones only.

    Raises:
        CoordinatorUnavailable, BarrierBroken: Somebody does not come in time.
    """
    while True:
        left_s = max(deadline_s - time.monotonic(), 0.1)
        worker.wait_for_workers(place.world_size, timeout_s=left_s)
        if worker.world_size > place.world_size:
            worker.wait_changed(min(left_s, POLL_S))
        else:
            try:
                worker.barrier("start", step=place.attempt, timeout_s=left_s)
            except (BarrierBroken, StaleGeneration):
                if time.monotonic() >= deadline_s:
                    raise
            else:
                return
        if time.monotonic() >= deadline_s:
            raise CoordinatorUnavailable(
                f"{worker.world_size} workers are in job {place.run!r}, {place.world_size} should be; "
                "is another run of the same name under way?"
            )


def _is_about(metrics: dict[str, Any], command_id: int) -> bool:
    return int(metrics.get(_AGREED_COMMAND, -1)) == command_id
