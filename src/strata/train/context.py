"""The context of a training script: its identity, its data, its checkpoints and its progress reports.

    ctx = strata.init()
    loader = ctx.dataloader("data/", batch_size=512, shuffle=True)
    progress = ctx.restore({"model": model, "optimizer": optimizer})
    step = progress.step
    for epoch in ctx.epochs(3):
        for batch in loader:
            …
            step += 1
            ctx.report(step=step, loss=loss.item())
            ctx.maybe_checkpoint({"model": model, "optimizer": optimizer})

A checkpoint holds the script's state and, of the same step, our own: the positions of the loaders and the states of the
random generators. So training resumes exactly, with any world size.

The last step of a run is saved with every strategy: at the end of `epochs`, or else when the context is closed.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

from strata.errors import CheckpointAborted, InvalidArgument, NoCheckpoint, StrataError
from strata.identity import Identity
from strata.launch.environment import NEEDED_WORLD_SIZE, STOPPED
from strata.lifecycle import Home, at_exit, renewed
from strata.train import pytrees
from strata.train.agreement import Agreement, Due
from strata.train.alone import Alone
from strata.train.collectives import CollectiveWaits
from strata.train.last_step import LastStep
from strata.train.loaders import Loaders, is_path, map_style_module
from strata.train.loggers import Loggers
from strata.train.metrics import Gauges
from strata.train.own_state import OURS, OwnState, own_state, put_generators
from strata.train.roles import PLACEMENT, SAVED_PLACEMENT, SAVED_SERVERS, Roles
from strata.train.schedule import Schedule
from strata.train.time_use import TimeUseMeter, data_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from strata.checkpoint import CheckpointManager, CheckpointMetadata, Save
    from strata.checkpoint.policy import Strategy
    from strata.data.order.steps import Tail
    from strata.launch.environment import WorkerSpec
    from strata.train.membership import Membership
    from strata.train.process_group import Meetings
    from strata.train.roles import Companion

log = logging.getLogger(__name__)

SAVING, AGREEING, ENDING, RESIZING = "saving", "agreeing", "ending", "resizing"
"""Reasons for which a rank cannot be restarted alone."""
AGREE_TIMEOUT_S = 180.0
"""Longest wait for the other ranks to publish their limits. Their threads give up sooner."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The point at which a run resumes."""

    step: int = 0
    """Last step that the model has made; 0 on a fresh start."""
    epoch: int = 0
    checkpoint: CheckpointMetadata | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    """The restored state. JAX pytrees are immutable, so they are new trees; everything else is restored in place."""

    @property
    def is_fresh(self) -> bool:
        return self.checkpoint is None


class Listener(Protocol):
    """A program that runs a training function in this process, and follows its progress."""

    def reported(self, context: Context, metrics: Mapping[str, float]) -> None:
        """Called after every report."""

    def saving(self, context: Context) -> None:
        """Called before every save, which waits until this returns."""


_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Notify `listener` of the reports and saves of all contexts in this process."""
    _listeners.append(listener)


class Context:
    """Created by `strata.init()`, for use in the training thread."""

    def __init__(
        self,
        identity: Identity,
        membership: Membership,
        manager: CheckpointManager,
        *,
        strategy: Strategy | None = None,
        agreement: Agreement | None = None,
        alone: Alone | None = None,
        spec: WorkerSpec | None = None,
        loggers: Loggers | None = None,
    ) -> None:
        self.identity = identity
        self._num_servers = 0 if spec is None else spec.num_servers
        """Parameter servers, if `strata scale` has changed their number."""
        self.servers_before = 0 if spec is None else spec.servers_before
        """How many servers there were when this one joined; 0 unless it joins while the others train."""
        self.layout = 0 if spec is None else spec.layout
        """How often the number of servers has changed in this attempt; on a server that joins, with that change."""
        self.alone = alone or Alone({})
        """Whether this process may be restarted without the others."""
        self.may_lose_ranks = False
        """Ranks are restarted alone, so that a checkpoint may have to be given up while training continues."""
        self._meetings: Meetings | None = None
        self._save: Save | None = None
        """The last save, until it is known to have ended."""
        self.roles = Roles.of(identity, 0)
        self.companion: Companion | None = None
        """Notified before this rank saves or ends together with the others."""
        self.checkpoints = manager
        self.step = 0
        """Last step that was reported, counted or restored."""
        self.epoch = 0
        self._membership = membership
        self._agreement = agreement or Agreement()
        self._schedule = Schedule(strategy, manager, membership)
        self._loaders = Loaders(identity.world_size)
        self._restored: tuple[int, Mapping[str, Any]] | None = None
        """Restored step, and our own part of its checkpoint."""
        self.last_save: Save | None = None
        """The save that was started last."""
        self._has_saved = False
        self._last = LastStep()
        self.saves = False
        """Whether the script uses checkpoints: it has called `restore` or `maybe_checkpoint`."""
        self._closing = renewed(threading.Lock())
        self._is_closed = False
        self._home = Home()
        # Keep a reference until exit: a script that trains in main() has dropped its context by then.
        self._withdraw = at_exit(self._close_at_exit)
        self._loggers_of_script = loggers or Loggers()
        self._gauges = Gauges()
        membership.watch(self._gauges.read)
        self.time_use = TimeUseMeter()
        """Where the wall time of this process goes."""
        self.time_use.add_source("barrier_s", lambda: self._agreement.waited_s)
        self._collective_waits = CollectiveWaits(self.time_use)
        self.time_use.is_collective_known = self._collective_waits.is_known
        membership.measure(self.time_use.read)

    # -- identity --------------------------------------------------------------------------------------------------

    @property
    def place(self) -> Identity:
        """An older name of `identity`."""
        return self.identity

    def divide(self, num_servers: int) -> Roles:
        """Make the last ranks parameter servers: from now on, the world of the workers ends before them. Call it on all
        ranks, before anything else. If `strata scale` has changed the number of servers, its number counts.

        Raises:
            ConfigError: No rank would be left to train.
        """
        if num_servers:
            num_servers = self._num_servers or num_servers
            self._membership.resized(self.identity.world_size)
        self.roles = Roles.of(self.identity, num_servers)
        if num_servers:
            self._gauges.layout = self.layout if not self.servers_before else self.layout - 1.0
            if self.roles.is_server:
                self._gauges.server = self.roles.server
            else:
                self.identity = self.roles.among_workers(self.identity)
            self._loaders = Loaders(self.roles.num_workers)
        return self.roles

    @property
    def rank(self) -> int:
        return self.identity.rank

    @property
    def world_size(self) -> int:
        return self.identity.world_size

    @property
    def local_rank(self) -> int:
        return self.identity.local_rank

    @property
    def attempt(self) -> int:
        """Number of earlier starts of the run's workers."""
        return self.identity.attempt

    @property
    def membership(self) -> Membership:
        """The connection to the other ranks of the run, for what is beyond a training script."""
        return self._membership

    @property
    def generation(self) -> int:
        """Generation of the membership; 0 without a coordinator."""
        return self._membership.generation

    @property
    def device(self) -> Any:
        """This process's accelerator, or the CPU, as a torch device."""
        from strata.train.process_group import device_of  # noqa: PLC0415 - imports torch, which the caller has

        return device_of(self.local_rank)

    def init_process_group(self, **arguments: Any) -> None:
        """Initialize torch's process group: NCCL with CUDA, gloo otherwise. `arguments` go to torch."""
        from strata.train.process_group import initialize  # noqa: PLC0415 - imports torch

        initialize(self.identity, has_servers=self.roles.num_servers > 0, arguments=arguments)

    def meet_on_demand(self) -> None:
        """Let workers be restarted alone: torch's process group exists only within `together`. Call it on all ranks of
        a run whose workers share no collective while they train.
        """
        self._membership.follow_restarts()
        self.may_lose_ranks = True
        if not self.roles.is_server and self._meetings is None:
            from strata.train.process_group import Meetings  # noqa: PLC0415 - imports torch

            self._meetings = Meetings(self)

    def will_end(self) -> None:
        """All workers go on to the end of the run, which one that is restarted alone would not know: all restart."""
        self.alone.hold(ENDING)

    @contextlib.contextmanager
    def together(self, name: str, *, timeout_s: float | None = None) -> Iterator[None]:
        """Run the body on all workers together, with torch's process group. `name` is used once in an attempt.

        `timeout_s`: time for the last worker to arrive; by default a few hours.
        """
        if self._meetings is None:  # the group exists all the time
            yield
            return
        with self._meetings.meet(name, *([] if timeout_s is None else [timeout_s])):
            yield

    # -- data ------------------------------------------------------------------------------------------------------

    def dataloader(self, source: Any, format: str | None = None, *, name: str = "", **arguments: Any) -> Any:  # noqa: A002
        """Return a loader for this rank. Checkpoints contain its position, from which any world size can resume.

        Args:
            source: Paths or URLs of files, with the arguments of `StructuredDataset.create_dataloader`; or your own
                map-style dataset (`__len__` and `__getitem__`), with the arguments of `torch.utils.data.DataLoader`,
                `shuffle_seed=` and `tail=`.
            format: Format of the files.
            name: Name in checkpoints; default: loaders are numbered.
        """
        arguments = {"rank": self.rank, "num_ranks": self.world_size, **arguments}
        if not is_path(source):
            if format is not None:
                raise InvalidArgument(
                    f"format={format!r} applies to files, not to a {type(source).__name__}; leave it out",
                    field="format",
                )
            return self._map_loader(source, name, **arguments)
        from strata.data import StructuredDataset  # noqa: PLC0415 - imports pyarrow

        loader, dataset = StructuredDataset.create_dataloader(source, format, **arguments)
        self.attach(loader, name=name)
        self._gauges.add_rows(lambda: dataset.get_metrics().rows)
        return loader

    def _map_loader(self, dataset: Any, name: str, *, rank: int, num_ranks: int, **options: Any) -> Any:
        loader = map_style_module().map_loader(dataset, ranks=Identity(rank=rank, world_size=num_ranks), **options)
        return self.attach(loader, name=name)

    def sampler(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        shuffle_seed: int = 0,
        tail: Tail = "uneven",
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> Any:
        """Return a sampler for a `DataLoader` of your own, instead of a `DistributedSampler`. Pass the loader to
        `attach`:

            loader = ctx.attach(DataLoader(dataset, batch_size=32, sampler=ctx.sampler(dataset), num_workers=4))

        Iterating over the loader before that raises an error: a sampler alone does not know what was delivered.
        """
        ranks = Identity(
            rank=self.rank if rank is None else rank,
            world_size=self.world_size if num_ranks is None else num_ranks,
        )
        return map_style_module().RowSampler(
            dataset, ranks=ranks, shuffle=shuffle, shuffle_seed=shuffle_seed, tail=tail
        )

    def attach(self, loader: Any, *, name: str = "", per_rank: bool | None = None) -> Any:
        """Save a loader's position in checkpoints; return the loader. It must have `state_dict` and `load_state_dict`,
        or be a `DataLoader` that was built with `ctx.sampler`.

        `per_rank`: whether its state is per rank, so that only the same world size can resume and `strata scale` is
        refused. Default: true, except for our own loaders.

        Raises:
            InvalidArgument: The loader has no state, or the name is taken.
            ConfigError: Its restored state is per rank and was saved with another world size.
        """
        was_waiting = self._loaders.add(loader, name=name, per_rank=per_rank)
        self._gauges.are_loaders_per_rank = self._loaders.are_per_rank
        waited_s = data_wait(loader)
        if waited_s is not None:
            self.time_use.add_source(
                "data_s", waited_s, is_waiting=lambda: getattr(loader, "is_waited_for", False) is True
            )
        if hasattr(loader, "rows_delivered"):
            self._gauges.add_rows(lambda: loader.rows_delivered)
        if was_waiting and self._restored is not None and self._restored[0] == self.step:
            put_generators(self._restored[1], self.rank)  # creating a loader draws random numbers
        return loader

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the remaining epochs of `number`, starting with the interrupted one, and call `set_epoch` on attached
        loaders or their samplers. After the last epoch, save the last step unless it is already saved.
        """
        while self.epoch < number:
            self._loaders.set_epoch(self.epoch)
            yield self.epoch
            self.epoch += 1
        self._save_last()

    @property
    def num_lost_updates(self) -> int:
        """Updates that a parameter server has lost; the agent adds them to the timeline of the run."""
        return self._gauges.num_lost_updates

    @num_lost_updates.setter
    def num_lost_updates(self, number: int) -> None:
        self._gauges.num_lost_updates = number

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def restore(
        self, into: Mapping[str, Any], *, generators: bool = True, loaders: bool = True, strict: bool = True
    ) -> Progress:
        """Load the last committed checkpoint into modules, optimizers and everything else with `load_state_dict`, and
        into the loaders and random generators. Call it on all ranks. Without a checkpoint, nothing changes.

        JAX pytrees are immutable, so they are returned: `state = ctx.restore(state).state`.

        Args:
            into: Objects by the names that they were saved under.
            generators: False leaves the random generators unchanged.
            loaders: False restarts the epoch; rows that were already trained on are read again.
            strict: False loads only the parts of `into` that the checkpoint has.

        Raises:
            ConfigError: A loader's state is per rank and was saved with another world size.
            InvalidArgument: The checkpoint has other parts.
            PlanChanged: The data have changed since they were read.
        """
        if OURS in into:
            raise InvalidArgument(f"the name {OURS!r} is reserved; choose another name", field="into")
        with self.time_use.during("restore_s"):
            return self._restore(into, generators=generators, loaders=loaders, strict=strict)

    def _restore(self, into: Mapping[str, Any], *, generators: bool, loaders: bool, strict: bool) -> Progress:
        self.saves = True
        self._membership.report("RECOVERING")
        self._schedule.restored()
        chosen = self._newest() if self.identity.incarnation else None
        if self.identity.incarnation and chosen is None:
            return Progress(state=into)
        self._last.forget()
        ours, given_back = OwnState(), pytrees.stand_ins(into)
        try:
            with pytrees.on_the_host(given_back):
                found = self.checkpoints.restore(
                    {**into, **given_back, OURS: ours}, id=chosen, strict=strict, saved_by=self._chosen
                )
        except NoCheckpoint:
            if chosen is not None:  # deleted a moment ago; all ranks restart and choose again
                raise
            return Progress(state=into)
        state = {**into, **{name: tree.restored(strict=strict) for name, tree in given_back.items()}}
        if ours.state:
            self._put_back(ours.state, has_generators=generators, has_loaders=loaders)
        else:  # a checkpoint without our part, which strict=False allows
            self.step, self.epoch = found.step, found.epoch
            self._agreement.restored(self.step)
        self._last.saved = self.step
        self._membership.restored(found)
        return Progress(self.step, self.epoch, found, state)

    def _newest(self) -> str | None:
        """Return the checkpoint that a rank loads without the others, which do not choose with it."""
        newest = self.checkpoints.latest()
        return None if newest is None else newest.id

    def _chosen(self, found: CheckpointMetadata) -> Sequence[int]:
        """Report the checkpoint that is loaded next; return the ranks whose states this rank loads."""
        self._membership.chose(found)
        return self.roles.saved_by(found)

    def continue_after(self, step: int) -> None:
        """Continue after a step that an earlier process of this rank has made, later than the checkpoint."""
        self.step = step
        self._agreement.restored(step)
        self.checkpoints.resumed(step)

    def _put_back(self, state: Mapping[str, Any], *, has_generators: bool, has_loaders: bool) -> None:
        self.step, self.epoch = int(state["step"]), int(state["epoch"])
        self._agreement.restored(self.step)
        if has_loaders:
            self._loaders.load_state_dict(state)
        if has_generators:
            put_generators(state, self.rank)
            self._restored = self.step, state

    def report(self, *, step: int | None = None, epoch: int | None = None, **metrics: float) -> None:
        """Report this rank's progress and metrics; cheap enough for every step."""
        if step is not None:
            self.step = step
            self._last.is_new = True
        if epoch is not None:
            self.epoch = epoch
        self._membership.report("TRAINING", self.step, self.epoch, metrics)
        if not self.time_use.is_begun:
            self._begin_measuring()
        for listener in _listeners:
            listener.reported(self, metrics)
        self._loggers_of_script.log(self.step, metrics)

    def _begin_measuring(self) -> None:
        """The first step has ended."""
        self.time_use.begin()
        if self.world_size > 1:
            self._collective_waits.begin()

    def watch(self, gauges: Callable[[], Mapping[str, float]]) -> None:
        """Report the metrics that `gauges` returns, too. Another thread calls it about once a second."""
        self._gauges.add(gauges)

    def checkpoint(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        replicated: Iterable[str] = (),
        **arguments: Any,
    ) -> Save:
        """Save now; call it on every rank after the same step. Return when the state is copied; `.wait()` on the result
        waits until the checkpoint is committed. `arguments` go to `CheckpointManager.save`.
        """
        self.step = self.step if step is None else step
        if OURS in state:
            raise InvalidArgument(f"the name {OURS!r} is reserved; choose another name", field="state")
        with self.time_use.during("checkpoint_s"):
            return self._checkpoint(state, metadata, replicated, arguments)

    def _checkpoint(
        self,
        state: Mapping[str, Any],
        metadata: Mapping[str, Any] | None,
        replicated: Iterable[str],
        arguments: dict[str, Any],
    ) -> Save:
        for listener in _listeners:
            listener.saving(self)
        self.alone.hold(SAVING)
        self._forget_save()
        self._has_saved = True
        self._last.unsaved, self._last.saved = None, self.step
        self._schedule.saved()
        if self._loaders.are_per_rank:
            metadata = {**(metadata or {}), NEEDED_WORLD_SIZE: str(self.world_size)}
        if self.roles.num_servers:
            saved = {SAVED_SERVERS: self.roles.num_servers, SAVED_PLACEMENT: PLACEMENT}
            metadata = {**(metadata or {}), **saved}
        if self.companion is not None:
            self.companion.saving(self.step)
        parts = {name: pytrees.storable(part) for name, part in state.items()}
        parts[OURS] = own_state(self._loaders, step=self.step, epoch=self.epoch, world_size=self.roles.num_workers)
        save = self.checkpoints.save(
            parts,
            step=self.step,
            epoch=self.epoch,
            metadata=metadata,
            replicated=replicated,
            replicas=self.roles.num_workers,
            **arguments,
        )
        self._gauges.save = self.last_save = self._save = save
        return save

    def maybe_checkpoint(
        self, state: Mapping[str, Any], *, step: int | None = None, is_passing: bool = False, **arguments: Any
    ) -> Save | None:
        """Save if the strategy or a request demands it; save and exit if a stop was requested. Call it after every
        step, on every rank.

        Args:
            step: Default: the step that was reported since the last call, or else the next one.
            is_passing: `state` is valid only during this call, as inside a framework's loop. Then `save_last` saves the
                last step, and `epochs` and `close` do not.
        """
        self._home.require("this context")
        try:
            return self._maybe_checkpoint(state, step=step, is_passing=is_passing, arguments=arguments)
        finally:
            self.release_alone()

    def _maybe_checkpoint(
        self, state: Mapping[str, Any], *, step: int | None, is_passing: bool, arguments: dict[str, Any]
    ) -> Save | None:
        self.saves = True
        if step is not None or not self._last.is_new:
            self.report(step=self.step + 1 if step is None else step)
        self._last.is_new = False
        due = self._resize_if_due(self._agreement.take_due(self.step, timeout_s=AGREE_TIMEOUT_S))
        should_stop = any(each.wish == "stop" for each in due)
        self._last.is_under_way, self._last.ends_elsewhere = True, is_passing
        if not due and not self._schedule.is_time(self.step, self.identity):
            self._last.keep(None if is_passing else (state, arguments), self._loaders.positions())
            return None
        save = self.checkpoint(state, **arguments)
        if should_stop:
            with self.time_use.during("checkpoint_s"):
                save.wait()
            self.stop(due[0].reason)
        return save

    def _resize_if_due(self, due: list[Due]) -> list[Due]:
        """Change the number of servers if that is due; return what else is."""
        for each in due:
            if each.wish != "resize" or self.companion is None:
                continue
            num_servers, layout = int(each.args["servers"]), int(each.args["layout"])
            if layout == self.layout + 1:  # the agent repeats a request that had no result
                self.alone.hold(RESIZING)
                self.end_save()
                self.companion.resizing(self.step, num_servers, layout)
                self.resized(num_servers, layout)
                self.companion.resized()
                self.alone.release(RESIZING)
        return [each for each in due if each.wish != "resize"]

    def resized(self, num_servers: int, layout: int, *, num_moved: int = 0) -> None:
        """The run has another number of servers from now on. Call it on all ranks after the same step, with no save in
        progress.

        Args:
            layout: How often the number has changed in this attempt.
            num_moved: Rows that this server got from others.
        """
        self._gauges.num_moved_rows = num_moved
        self.roles = replace(self.roles, num_servers=num_servers)
        world_size = self.roles.num_workers + num_servers
        if self.roles.is_server:
            self.identity = replace(self.identity, world_size=world_size)
        self.checkpoints.regroup(world_size)
        self._membership.resized(world_size)
        self._membership.welcomed()
        self.servers_before, self.layout = 0, layout
        self._gauges.layout = float(layout)

    def ready_to_serve(self) -> None:
        """This server, which joins while the others train, can take over rows: the agent lets them agree on a step."""
        self._gauges.layout = self.layout - 0.5

    def end_save(self) -> None:
        """Wait until no save is in progress."""
        self._forget_save()
        self.checkpoints.wait()

    def retire(self, reason: str) -> None:
        """Leave the run, which continues without this rank, and exit."""
        self._last.is_under_way = self._has_saved = False
        log.warning("leaving the run: %s", reason)
        self.close()
        raise SystemExit(0)

    @property
    def is_saving(self) -> bool:
        """Whether a save keeps this process from being restarted alone."""
        return self.alone.is_begun and self._save is not None

    def completing(self, step: int) -> None:
        """The effects of this step are about to leave this process. If all ranks save after it, this one must, too."""
        if self.alone.is_begun and self._schedule.is_certain(step):
            self.alone.hold(SAVING)

    def release_alone(self) -> None:
        """Between two steps, with no save in progress and none agreed on, the others do not rely on this rank."""
        if not self.alone.is_begun or (self._save is not None and not self._save.done):
            return
        self._forget_save()
        self.alone.release(SAVING)
        self._agreement.when_idle(lambda: self.alone.release(AGREEING))

    def _forget_save(self) -> None:
        """Wait for the end of the last save. One that was given up because a rank was restarted is not an error: the
        next save replaces it.
        """
        save, self._save = self._save, None
        if save is not None and self.may_lose_ranks:
            save.until_ended()
            save.was_reported |= isinstance(save.error, CheckpointAborted)

    def save_last(self, state: Mapping[str, Any], *, saves_again: bool = False, **arguments: Any) -> None:
        """Save the last reported step, unless it is already saved. Call it at the end of training, on every rank. Only
        callbacks for frameworks need it: `epochs` and `close` do the same.

        `saves_again`: save even if the step is saved, because that save did not know that it was the last.
        """
        self._home.require("this context")
        self._last.is_under_way |= self._last.is_new
        self._last.is_new = self._last.ends_elsewhere = False
        self._last.unsaved = None if self.step == self._last.saved and not saves_again else (state, arguments)
        self._save_last()

    @property
    def _saves_last(self) -> bool:
        """Whether the last step is saved automatically: not with `Manual`, and not in a framework's loop."""
        return self._last.is_under_way and self._schedule.is_automatic and not self._last.ends_elsewhere

    def _save_last(self) -> None:
        """Save the last step on all ranks, which must have made the same steps. Never save in the middle of a step."""
        if not self._saves_last:
            return
        if self._last.is_new:
            self._warn_of_unsaved("it was reported, but maybe_checkpoint was not called after it")
            return
        unsaved = self._last.take()
        if self.companion is not None:
            self.companion.ending(self.step)
        with self.time_use.during("barrier_s"):
            ends_together = self._membership.ends_together(self.step)
        if ends_together and unsaved is not None:
            state, arguments = unsaved
            self.checkpoint(state, **arguments)

    def _is_at_a_step(self) -> bool:
        """Return whether no batch was taken after the last step: a loop that is left early may have taken one more."""
        why = self._last.why_not_here(self._loaders.positions())
        if why:
            self._warn_of_unsaved(f"{why}; end training with ctx.epochs(), or call ctx.checkpoint")
        return not why

    def _warn_of_unsaved(self, why: str) -> None:
        if self.rank == 0 and self._saves_last and self._last.unsaved is not None:
            log.warning("the last step, %d, is not saved: %s", self.step, why)

    @property
    def is_saved(self) -> bool:
        """Whether the last step is in a checkpoint, or there is none."""
        return self.step <= max(self._last.saved, 0)

    def idle(self) -> None:
        """Report that this rank has nothing to do for now: a rank that makes no steps does not hang."""
        self._membership.report("IDLE", self.step, self.epoch)

    def stop_reason(self) -> str:
        """Return why all ranks were asked to stop; empty if they were not. For ranks that wait between two steps:
        `maybe_checkpoint` stops after the next one. One rank asks, and all of them save and call `stop`.
        """
        return self._agreement.reason_of("stop")

    def is_stopping(self) -> str:
        """Return why all ranks were asked to stop; empty if they were not. For a rank that makes no steps itself."""
        return next((due.reason for due in self._agreement.take_all() if due.wish == "stop"), "")

    def ask_stop(self, reason: str) -> None:
        """Let all ranks agree on a step, save there and exit, in `maybe_checkpoint`. Return at once. A single rank does
        so in its next call.
        """
        if self.world_size == 1:
            self._agreement.agree(Due("stop", self.step, reason))
        else:
            self._membership.ask_stop(reason)

    def stop(self, reason: str) -> None:
        """Wait for the save in progress, leave the job and exit as a rank that was asked to stop."""
        self.checkpoints.wait()
        self._last.is_under_way = False
        log.warning("saved step %d and stopping: %s", self.step, reason)
        self.close()
        raise SystemExit(STOPPED)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, *, is_failing: bool = False, is_exiting: bool = False) -> None:
        """Save the last step if necessary, wait for the save in progress and leave the job. Also called at exit.

        Args:
            is_failing: Save nothing and wait for no other rank, which may be waiting for this one.
            is_exiting: The program is exiting. One of several ranks cannot tell whether the others are, too.
        """
        with self._closing:
            if self._is_closed or not self._home.is_here:  # a forked child has nothing to close
                return
            self._is_closed = True
        self._withdraw()
        self._loggers_of_script.close(is_failing=is_failing)
        try:
            if not is_failing and is_exiting and self.world_size > 1:
                self._warn_of_unsaved(
                    "with several ranks, end training with ctx.close(), `with strata.init() as ctx:` or ctx.epochs()"
                )
            elif not is_failing and self._is_at_a_step():
                self._save_last()
            self.checkpoints.close()
        finally:
            reason = "failed" if is_failing else "done"
            with contextlib.closing(self._collective_waits):  # last: until then, heartbeats read what it measures
                self._membership.leave(together=self._has_saved and not is_failing, reason=reason)
            # Garbage collection would end torch's worker processes only after 5 s each: it closes their queues first.
            self._loaders = Loaders(self.world_size)

    def _close_at_exit(self) -> None:
        self.close(is_failing=getattr(sys, "last_value", None) is not None, is_exiting=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close(is_failing=error is not None)
        except StrataError:
            if error is None:  # otherwise the first error matters more
                raise
