"""Commands to workers, delivered reliably.

A command is durable when its sender is answered. It is repeated to its worker until the worker acknowledges it. Ids
increase, so one number acknowledges all commands up to it, and a worker recognises a duplicate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.coordinator.state import limits
from strata.coordinator.state.events import CommandRecord, CommandsAcked, CommandSent, PendingCommands
from strata.errors import InvalidArgument, UnknownWorker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from strata.coordinator.config import Limits
    from strata.coordinator.state.events import CommandName
    from strata.coordinator.state.membership import Membership

MAX_REMEMBERED_REQUESTS = 1_000
"""Request ids remembered, so that a repeated call sends nothing twice."""


class Commands:
    def __init__(self, job_id: str, *, limits: Limits) -> None:
        self.job_id = job_id
        self.last_id = 0
        self.pending: dict[str, list[CommandRecord]] = {}
        """By worker, oldest first."""
        self.requests: dict[str, int] = {}
        """Request id → command id."""
        self._limits = limits

    # -- decisions -------------------------------------------------------------------------------------------------

    def send(
        self,
        membership: Membership,
        worker_ids: Sequence[str],
        name: CommandName,
        *,
        reason: str,
        args: Mapping[str, str],
        request_id: str,
    ) -> list[CommandSent]:
        """Return the command, or nothing if this request was already processed."""
        if request_id:
            limits.check_id(request_id, "request_id")
            if request_id in self.requests:
                return []
        limits.check_text(reason, "reason")
        limits.check_map_size(args, "args", max_bytes=self._limits.max_metadata_bytes)
        for worker_id in worker_ids:
            if worker_id not in membership.members:
                limits.check_id(worker_id, "worker_ids")
                raise UnknownWorker(
                    f"job {self.job_id!r} has no worker {worker_id!r}; see ListWorkers", field="worker_ids"
                )
        targets = tuple(dict.fromkeys(worker_ids)) or tuple(membership.members)
        if not targets:
            raise InvalidArgument(f"job {self.job_id!r} has no workers", field="worker_ids")
        for worker_id in targets:
            limits.check_room(
                len(self.pending.get(worker_id, ())),
                self._limits.max_pending_commands_per_worker,
                f"commands waiting for {worker_id}",
                "max_pending_commands_per_worker",
                field="worker_ids",
            )
        command = CommandRecord(command_id=self.last_id + 1, name=name, reason=reason, args=dict(args))
        return [CommandSent(job_id=self.job_id, command=command, worker_ids=targets, request_id=request_id)]

    def ack(self, worker_id: str, command_id: int) -> list[CommandsAcked]:
        pending = self.pending.get(worker_id)
        if not pending or pending[0].command_id > command_id:
            return []
        return [CommandsAcked(job_id=self.job_id, worker_id=worker_id, command_id=command_id)]

    def previous_id(self, worker_id: str) -> int:
        """Return the id of the command that waits before a worker's newest one, or 0."""
        pending = self.pending.get(worker_id, ())
        return pending[-2].command_id if len(pending) > 1 else 0

    # -- apply -----------------------------------------------------------------------------------------------------

    def apply_sent(self, event: CommandSent) -> None:
        self.last_id = event.command.command_id
        for worker_id in event.worker_ids:
            self.pending.setdefault(worker_id, []).append(event.command)
        if event.request_id:
            self.requests[event.request_id] = self.last_id
            while len(self.requests) > MAX_REMEMBERED_REQUESTS:
                del self.requests[next(iter(self.requests))]

    def apply_acked(self, event: CommandsAcked) -> None:
        left = [c for c in self.pending.get(event.worker_id, ()) if c.command_id > event.command_id]
        if left:
            self.pending[event.worker_id] = left
        else:
            self.pending.pop(event.worker_id, None)

    def apply_left(self, worker_id: str) -> None:
        """Drop the commands of an incarnation that left."""
        self.pending.pop(worker_id, None)

    # -- snapshot --------------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[PendingCommands, ...]:
        return tuple(
            PendingCommands(worker_id=worker_id, commands=tuple(commands))
            for worker_id, commands in self.pending.items()
        )

    def restore(self, last_id: int, pending: Iterable[PendingCommands], requests: Mapping[str, int]) -> None:
        self.last_id = last_id
        self.pending = {p.worker_id: list(p.commands) for p in pending}
        self.requests = dict(requests)
