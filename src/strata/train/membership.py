"""A training process as a member of its job: it reports to the coordinator and carries out its commands."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from strata.errors import (
    BarrierBroken,
    ConfigError,
    CoordinatorError,
    CoordinatorUnavailable,
    StaleGeneration,
    StrataError,
)
from strata.launch.commit import meet
from strata.launch.environment import METRICS, note_last_step
from strata.lifecycle import at_exit
from strata.train.agreement import Agreement, Due
from strata.train.metrics import ScriptMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from strata.checkpoint import CheckpointMetadata
    from strata.coordinator.client import CoordinatorClient, Worker
    from strata.coordinator.state.events import CommandRecord
    from strata.coordinator.state.membership import WorkerStateName
    from strata.coordinator.state.time_use import TimeUse
    from strata.identity import Identity
    from strata.train.agreement import Wish

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 300.0
"""Time for all workers of an attempt to join: imports may take minutes."""
AGREE_TIMEOUT_S = 30.0
AGREE_RETRY_S = 0.1
END_TIMEOUT_S = 300.0
"""Time for the other ranks to reach the end of their training: one may be evaluating."""
LEAVE_TIMEOUT_S = 5.0
"""Time for the other ranks to acknowledge the last checkpoint, and then for the coordinator to answer."""
POLL_S = 1.0
NO_METRICS: Mapping[str, float] = MappingProxyType({})
NEEDS_COORDINATOR = (
    "these ranks have no coordinator through which they could find each other; start them with `strata run` instead of "
    "torchrun, or with plain python and Trainer(workers=…)"
)
_TOPIC, _RANK, _VALUE = "topic", "rank", "value"
RESIZE_ARGS = ("servers", "layout")
"""Arguments of a request to change the number of parameter servers."""
_WISHES: dict[str, Wish] = {"STOP": "stop", "CHECKPOINT_NOW": "checkpoint", "REBALANCE": "resize"}


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

    def watch(self, gauges: Callable[[], Mapping[str, float]]) -> None:
        """Report the metrics that `gauges` returns. Another thread calls it about once a second."""
        ...

    def measure(self, read: Callable[[], TimeUse | None]) -> None:
        """Send what `read` returns with every heartbeat. Another thread calls it."""
        ...

    def chose(self, found: CheckpointMetadata) -> None:
        """Report which checkpoint this rank is going to load."""
        ...

    def restored(self, found: CheckpointMetadata) -> None: ...

    def ask_checkpoint(self, reason: str) -> None:
        """Let all ranks agree on a step and save there. Return at once."""
        ...

    def ask_stop(self, reason: str) -> None:
        """Let all ranks agree on a step, save and exit there. Return at once; safe in a signal handler."""
        ...

    def ends_together(self, step: int) -> bool:
        """Wait for the end of all ranks' training; return whether all of them made the same steps."""
        ...

    def publish(self, topic: str, value: str) -> None:
        """Send a value of up to 60 KB to all ranks of this attempt."""
        ...

    def collect(self, topic: str, ranks: Iterable[int], *, timeout_s: float) -> dict[int, str]:
        """Wait for what these ranks have published under a topic.

        Raises:
            StrataError: A rank has published nothing in time; the message names it.
        """
        ...

    def follow_restarts(self) -> None:
        """Expect that ranks are restarted alone: adopt every change of the membership, and publish values again."""
        ...

    def resized(self, world_size: int) -> None:
        """From now on, the run consists of the ranks below `world_size`; others may join and leave."""
        ...

    def welcomed(self) -> None:
        """The other ranks count on this one from now on, although it joined later."""
        ...

    def has(self, rank: int) -> bool:
        """Return whether this rank is a member now."""
        ...

    def leave(self, *, together: bool, reason: str = "done") -> None: ...


class NoMembership:
    """The membership of a process without a coordinator: it reports nothing."""

    generation = 0

    def report(
        self,
        state: WorkerStateName,
        step: int | None = None,
        epoch: int | None = None,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> None:
        pass

    def watch(self, gauges: Callable[[], Mapping[str, float]]) -> None:
        pass

    def measure(self, read: Callable[[], TimeUse | None]) -> None:
        pass

    def chose(self, found: CheckpointMetadata) -> None:
        pass

    def restored(self, found: CheckpointMetadata) -> None:
        pass

    def ask_checkpoint(self, reason: str) -> None:
        pass

    def ask_stop(self, reason: str) -> None:
        pass

    def ends_together(self, step: int) -> bool:  # noqa: ARG002 - the protocol's
        """Return True: without a coordinator, ranks must make the same steps by themselves."""
        return True

    def publish(self, topic: str, value: str) -> None:  # noqa: ARG002 - the protocol's
        raise ConfigError(NEEDS_COORDINATOR)

    def collect(self, topic: str, ranks: Iterable[int], *, timeout_s: float) -> dict[int, str]:  # noqa: ARG002
        raise ConfigError(NEEDS_COORDINATOR)

    def follow_restarts(self) -> None:
        pass

    def resized(self, world_size: int) -> None:
        pass

    def welcomed(self) -> None:
        pass

    def has(self, rank: int) -> bool:
        return rank == 0

    def leave(self, *, together: bool, reason: str = "done") -> None:
        pass


class JoinedMembership:
    """The membership of a worker, until `leave` or the end of the process. The constructor waits for all ranks, unless
    this one is restarted alone.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        identity: Identity,
        agreement: Agreement,
        *,
        on_left: Callable[[], None] | None = None,
        on_lost: Callable[[StrataError], None] | None = None,
        is_late: bool = False,
    ) -> None:
        """
        Args:
            on_lost: Called, in another thread, when the coordinator has removed this worker.
            is_late: The other ranks are training. This one takes no part in what they agree on until `resized`.
        """
        self._client = client
        self._is_late = is_late
        self._world_size = identity.world_size
        self._members: tuple[str, ...] = ()
        """Names of all ranks, if others may join; otherwise all members of the job are meant."""
        self._on_left = on_left
        self._on_lost = on_lost
        self._identity = identity
        self._agreement = agreement
        # The agent watches the steps, with the run's own limit, and dumps the stacks of a hung worker.
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
        self._metrics = ScriptMetrics()
        self._gauges: Callable[[], Mapping[str, float]] = dict
        self._ours: dict[str, float] = {}
        """Our own metrics, sent again and again: a restarted coordinator has none."""
        self._report_metrics()
        self._worker.heartbeat()
        if not identity.incarnation and not is_late:
            _meet(self._worker, identity, deadline_s=time.monotonic() + JOIN_TIMEOUT_S)
        self._follows_restarts = identity.incarnation > 0 or is_late
        self._last_followed = self._worker.latest_generation
        """Generation whose new ranks know what this one has published."""
        self._sent: dict[str, str] = {}
        """Values that this rank has published, by topic: a rank that is restarted alone has missed them."""
        self._unsent: dict[str, None] = {}
        """Topics that the ranks of the newest generation have not received again yet."""
        self._num_ends = 0
        """Number of ends of training that the ranks have reached together."""
        self._is_leaving = threading.Event()
        self._wanted: dict[Literal["CHECKPOINT_NOW", "STOP"], str] = {}
        """Requests of this rank to all ranks, with their reasons, until they are sent."""
        self._commands: deque[CommandRecord] = deque()
        """Received and not carried out yet."""
        self._published: dict[tuple[str, int], str] = {}
        """Values that ranks have published, by topic and rank."""
        self._has_published = threading.Condition()
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
        numbers: dict[str, Any] = self._metrics.select(metrics) if metrics else {}
        if state == "TRAINING" and not self._has_stepped:
            self._has_stepped = True
            self._worker.report_event("FIRST_STEP", at_s=time.time(), step=step or 0)
        self._step = self._step if step is None else step
        self._worker.note(state, step, epoch, numbers)

    def watch(self, gauges: Callable[[], Mapping[str, float]]) -> None:
        self._gauges = gauges

    def measure(self, read: Callable[[], TimeUse | None]) -> None:
        self._worker.measure(read)

    def chose(self, found: CheckpointMetadata) -> None:
        self._worker.report_event("CHOSEN", at_s=time.time(), step=found.step)

    def restored(self, found: CheckpointMetadata) -> None:
        """Report a restored checkpoint, and warn if it is not the last one that the coordinator knows."""
        self._worker.report_event("RESTORED", at_s=time.time(), step=found.step)
        try:
            last = self._worker.recover().checkpoint
        except CoordinatorError as error:
            log.warning("cannot ask the coordinator for the last checkpoint: %s", error)
            return
        if last is not None and last.checkpoint.checkpoint_id != found.id:
            last_id = last.checkpoint.checkpoint_id
            log.warning("restored checkpoint %s, but the last one that was committed is %s", found.id, last_id)

    def ask_checkpoint(self, reason: str) -> None:
        self._wanted["CHECKPOINT_NOW"] = reason

    def ask_stop(self, reason: str) -> None:
        self._wanted["STOP"] = reason

    def members(self) -> tuple[str, ...]:
        """Return the names of all ranks, if there may be other members; otherwise none."""
        return self._members

    def ends_together(self, step: int) -> bool:
        if self._world_size == 1:
            return True
        metric = METRICS.last_steps[self._num_ends % 2]
        self._ours[metric] = float(step)
        self._num_ends += 1
        try:
            self._report_metrics()
            self._worker.heartbeat()
            if self._follows_restarts:
                self._worker.refresh()
            self._meet(f"last/{self._num_ends}", step=self._identity.attempt, timeout_s=END_TIMEOUT_S)
            workers = self._client.list_workers(job_id=self._identity.run).workers
        except StrataError as error:
            log.warning("the last step is not saved, because not all ranks reached the end: %s", error)
            return False
        steps = [int(each.metrics[metric]) for each in workers if metric in each.metrics]
        # A rank that has left by now found that they differ: otherwise it would wait for our part of the checkpoint.
        if steps == [step] * self._world_size:
            return True
        log.warning("the last step, %d on this rank, is not saved: all ranks must make the same number of steps", step)
        return False

    def publish(self, topic: str, value: str) -> None:
        self._sent[topic] = value
        self._send(topic, value)

    def follow_restarts(self) -> None:
        self._follows_restarts = True

    def resized(self, world_size: int) -> None:
        self._world_size = world_size
        self._members = tuple(replace(self._identity, rank=rank).worker_id for rank in range(world_size))
        self._follows_restarts = True

    def welcomed(self) -> None:
        self._is_late = False

    def has(self, rank: int) -> bool:
        name = replace(self._identity, rank=rank).worker_id
        workers = self._client.list_workers(job_id=self._identity.run).workers
        return any(each.worker_id == name and each.attempt == self._identity.attempt for each in workers)

    def _meet(self, name: str, *, step: int, timeout_s: float) -> None:
        meet(self._worker, name, step=step, members=self._members, timeout_s=timeout_s)

    def _send(self, topic: str, value: str) -> None:
        rank, attempt = str(self._identity.rank), str(self._identity.attempt)
        args = {_TOPIC: topic, _RANK: rank, _VALUE: value, "attempt": attempt}
        self._client.send_command("MESSAGE", job_id=self._identity.run, args=args)

    def collect(self, topic: str, ranks: Iterable[int], *, timeout_s: float) -> dict[int, str]:
        wanted = {(topic, rank) for rank in ranks}
        with self._has_published:
            if not self._has_published.wait_for(lambda: wanted <= self._published.keys(), timeout_s):
                missing = sorted(rank for _, rank in wanted - self._published.keys())
                raise StrataError(
                    f"rank {missing[0]} has published no {topic} within {timeout_s:g} s; its log shows why (strata "
                    f"logs {self._identity.run} --rank {missing[0]})"
                )
            return {rank: self._published[name, rank] for name, rank in wanted}

    def leave(self, *, together: bool, reason: str = "done") -> None:
        """Leave the job; with `together`, wait for all ranks, whose checkpoint may still need this one."""
        self._withdraw_hook()
        self._is_leaving.set()
        if self._has_stepped:
            note_last_step(os.environ, self._step)
        try:
            if together and self._world_size > 1:
                self._meet("end", step=self._identity.attempt, timeout_s=LEAVE_TIMEOUT_S)
        except StrataError as error:  # a rank has died or is late: do not wait for it
            log.info("leaving before the others: %s", error)
        try:
            self._worker.deregister(reason, timeout_s=LEAVE_TIMEOUT_S)
        except StrataError as error:
            log.info("cannot deregister: %s", error)
        self._client.close()
        if self._on_left is not None:
            self._on_left()

    # -- beside training -------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._is_leaving.is_set():
            try:
                self._worker.wait_changed(POLL_S)
                self._report_metrics()
                # Before anything is sent: a worker that takes no commands soon receives no more.
                self._commands.extend(self._worker.take_commands())
                while self._commands:
                    self._carry_out(self._commands.popleft())
                self._adopt_changes()
                for name, reason in list(self._wanted.items()):
                    self._client.send_command(name, job_id=self._identity.run, reason=reason)
                    del self._wanted[name]  # only now: what failed is sent again
            except StrataError as error:
                if not self._is_leaving.is_set() and self._worker.lost is None:
                    log.warning("cannot reach the coordinator: %s", error)
            except Exception:
                if not self._is_leaving.is_set():
                    log.exception("the context no longer receives commands")
                return
            lost = self._worker.lost
            if lost is not None and not self._is_leaving.is_set():
                log.error("the coordinator has removed this worker: %s", lost)
                if self._on_lost is not None:
                    self._on_lost(lost)
                return

    def _adopt_changes(self) -> None:
        """Adopt a membership in which a rank was restarted alone, and let that rank know what it has missed."""
        latest = self._worker.latest_generation
        if self._follows_restarts and self._last_followed != latest:
            self._worker.refresh()
            self._unsent = dict.fromkeys(self._sent)
            self._last_followed = latest
        for topic in list(self._unsent):
            self._send(topic, self._sent[topic])
            del self._unsent[topic]  # only now: what failed is sent again

    def _report_metrics(self) -> None:
        """Report our own metrics and the gauges, except those that the script reports itself."""
        seen = {name: number for name, number in self._gauges().items() if name not in self._metrics.names}
        self._worker.note(None, None, None, {**self._ours, **seen})

    def _carry_out(self, command: CommandRecord) -> None:
        is_ours = command.args.get("attempt", str(self._identity.attempt)) == str(self._identity.attempt)
        has_args = command.name != "REBALANCE" or all(command.args.get(name, "").isdecimal() for name in RESIZE_ARGS)
        if command.name in _WISHES and is_ours and has_args and not self._is_late:
            self._agree(command, _WISHES[command.name])
        elif command.name == "MESSAGE" and is_ours and command.args.get(_RANK, "").isdecimal():
            with self._has_published:
                key = command.args.get(_TOPIC, ""), int(command.args[_RANK])
                self._published[key] = command.args.get(_VALUE, "")
                self._has_published.notify_all()

    def _agree(self, command: CommandRecord, wish: Wish) -> None:
        """Agree with the other ranks on a step for a command. All ranks' threads do this, whatever their training does.

        This rank's limit does not change until all limits are known: the others rely on it.
        """
        limit = self._agreement.set_limit()
        if METRICS.agree_command in self._ours:
            self._ours[METRICS.agreed_command] = self._ours[METRICS.agree_command]
            self._ours[METRICS.agreed_limit] = self._ours[METRICS.agree_limit]
        self._ours |= {METRICS.agree_command: float(command.command_id), METRICS.agree_limit: float(limit)}
        try:
            step = self._highest_limit(command.command_id, deadline_s=time.monotonic() + AGREE_TIMEOUT_S)
        except (BarrierBroken, CoordinatorUnavailable, StaleGeneration) as error:
            log.warning("the ranks could not agree on a step for %s: %s", command.name, error)
            self._agreement.give_up()
        except BaseException:
            self._agreement.give_up()
            raise
        else:
            self._agreement.agree(Due(wish, step, command.reason, command.args))

    def _highest_limit(self, command_id: int, *, deadline_s: float) -> int:
        """Return the highest limit of all ranks. A coordinator that restarts loses the limits and gets them again.

        Raises:
            BarrierBroken: A rank is gone, or does not arrive in time.
            CoordinatorUnavailable: It does not answer, or does not know all limits in time.
        """
        has_met = False
        while True:
            try:
                self._report_metrics()
                self._worker.heartbeat()
                if not has_met:
                    left_s = max(deadline_s - time.monotonic(), 0.1)
                    self._meet("agree", step=command_id, timeout_s=left_s)
                    has_met = True
                workers = self._client.list_workers(job_id=self._identity.run).workers
                limits = [limit for each in workers if (limit := limit_for(each.metrics, command_id)) is not None]
                if len(limits) >= self._world_size:
                    return int(max(limits))
                missing = f"{self._world_size - len(limits)} ranks have not published their limit"
            except CoordinatorUnavailable as error:
                missing = str(error)
            if time.monotonic() >= deadline_s or self._is_leaving.wait(AGREE_RETRY_S):
                raise CoordinatorUnavailable(missing)


def _meet(worker: Worker, identity: Identity, *, deadline_s: float) -> None:
    """Wait until the members are exactly the ranks of this attempt.

    Members of the last attempt are replaced or removed; they never arrive at this barrier. So a generation of the right
    size in which all members arrive has only new ones.

    Raises:
        CoordinatorUnavailable, BarrierBroken: A rank does not join in time.
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
                f"job {identity.run!r} has {worker.world_size} workers instead of {identity.world_size}; stop other "
                "runs of the same name"
            )


def limit_for(metrics: Mapping[str, float], command_id: int) -> float | None:
    """Return a rank's limit for a command, or None if it has not published one.

    The rank may already be at the next command: it has read all limits, but not all ranks have read its own. It gets no
    further before they have.
    """
    for command, limit in (
        (METRICS.agree_command, METRICS.agree_limit),
        (METRICS.agreed_command, METRICS.agreed_limit),
    ):
        if metrics.get(command) == command_id:
            return metrics.get(limit)
    return None
