"""The state machine of a study: which trial runs where, what follows from a report, when the study has ended.

`handle` takes an event from outside, decides what follows, and returns facts for the journal and actions for the
driver. Only `apply` changes the state, by one fact at a time: folding a journal therefore gives the same state, without
deciding anything again. A slot is a place for one trial: a worker, or several that train together. A trial may take
several slots if no other one needs them.

An event that comes too late or twice is ignored: a report under an old lease, a second result, a report after pruning.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from strata.errors import InvalidArgument
from strata.printing import counted
from strata.tune.schedulers.base import Resume, Wait
from strata.tune.state import events as e
from strata.tune.state import growth
from strata.tune.state.actions import Ask, Finish, Handled, Kill, Start, Stop
from strata.tune.state.objectives import Objectives
from strata.tune.state.times import Times
from strata.tune.state.trial import Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from strata.tune.schedulers.base import Decision, Scheduler, Verdict
    from strata.tune.space.parameters import Config
    from strata.tune.state.actions import Action

MAX_LOSSES = 5
"""Lost workers in a row, without progress between them, after which the trial is to blame."""
MAX_FAILED_FIRST = 10
"""A study whose first trials all fail ends: the training function is at fault, not the configurations."""


class StudyState:
    def __init__(self, spec: e.StudySpec, scheduler: Scheduler) -> None:
        self.spec = spec
        self.objectives = Objectives(spec)
        self.num_known = 0
        """Trials of other studies that the sampler has learned from."""
        self.num_trials = spec.num_trials
        self.num_slots = 0
        self.max_slots_per_trial = 1
        """Slots that one trial may take if no other needs them."""
        self.trials: dict[int, Trial] = {}
        self.asking: dict[int, None] = {}
        """Trials whose configurations the sampler is asked for, oldest first."""
        self.num_asked = 0
        """Number of the next trial."""
        self.stop_reason = ""
        self.ended: e.Ended | None = None
        self.has_value = False
        """A trial has reported a finite objective, so the training function works."""
        self.num_failed = 0
        self.times = Times()
        self._is_exhausted = False
        self._longest = 0
        """Last step of the longest trial that has finished."""
        self._scheduler = scheduler
        self._slots: dict[int, int] = {}
        """Slot → trial."""
        self._queue: dict[int, None] = {}
        """Trials that wait for a slot, oldest first."""
        self._paused: dict[int, None] = {}
        self._lost_with_slot: set[int] = set()
        """Running trials whose slots are gone; their ends follow."""
        self._appliers: dict[type, Callable[..., Verdict | None]] = {
            e.Opened: lambda _: None,
            e.Known: self._known,
            e.Expired: lambda _: None,
            e.Asked: self._asked,
            e.Exhausted: self._exhausted,
            e.Reported: self._reported,
            e.Saved: self._saved,
            e.Finished: self._finished,
            e.Failed: self._failed,
            e.Lost: self._lost,
            e.Stopped: self._stopped,
            e.Resized: self._resized,
            e.Extended: self._extended,
            e.StopRequested: self._stop_requested,
            e.Ordered: lambda _: None,
            e.Asking: self._asking_begun,
            e.Leased: self._leased,
            e.StopSent: self._stop_sent,
            e.Pruned: self._pruned,
            e.Ended: self._study_ended,
        }

    @classmethod
    def replay(cls, spec: e.StudySpec, scheduler: Scheduler, facts: Iterable[e.Event]) -> StudyState:
        """Return the state that these facts lead to."""
        state = cls(spec, scheduler)
        for fact in facts:
            state.apply(fact)
        return state

    @property
    def running(self) -> list[Trial]:
        """Running trials, by slot."""
        found = ((slot, self.trials[self._slots[slot]]) for slot in sorted(self._slots))
        return [trial for slot, trial in found if trial.slot == slot]

    @property
    def has_spare_slots(self) -> bool:
        """Whether slots are free that no trial needs, and that a running one may be given."""
        is_possible = self.max_slots_per_trial > 1 and not self.stop_reason and self.ended is None
        return is_possible and self._num_free > 0 and not self._has_new and isinstance(self._choose(), Wait)

    # -- events ----------------------------------------------------------------------------------------------------

    def handle(self, event: e.Event, *, now_s: float = 0.0) -> Handled:
        """Return what follows from an event.

        Raises:
            InvalidArgument: The event cannot be one of this study; nothing was changed.
        """
        ignored = self._check(event)
        if ignored:
            return Handled(ignored=ignored)
        event = msgspec.structs.replace(event, at_s=now_s)
        verdict = self.apply(event)
        facts: list[e.Event] = [event]
        actions: list[Action] = []
        for fact in self._decide(event, verdict):
            fact = msgspec.structs.replace(fact, at_s=now_s)
            actions += self._actions(fact)
            self.apply(fact)
            facts.append(fact)
        return Handled(tuple(facts), tuple(actions))

    def recover(self, *, now_s: float = 0.0) -> Handled:
        """Continue after a restart of the driver: running trials were lost with it, unanswered questions are asked
        again, and a stop that was requested before is over.
        """
        known: list[e.Event] = []
        if self.stop_reason or (self.ended is not None and not self.ended.is_complete):
            known.append(e.Extended(num_trials=self.num_trials, at_s=now_s))
        known += [
            e.Lost(trial=each.number, lease=each.lease, reason="the study was restarted", is_blameless=True, at_s=now_s)
            for each in self.running
        ]
        for fact in known:
            self.apply(fact)
        asks = tuple(Ask(number) for number in self.asking)
        # The driver announces its slots when it has them.
        none = e.Resized(num_slots=0, max_slots_per_trial=self.max_slots_per_trial)
        handled = self.handle(none, now_s=now_s)
        return Handled((*known, *handled.facts), asks + handled.actions)

    def apply(self, fact: e.Event) -> Verdict | None:
        """Change the state by one fact; return the scheduler's verdict on a report."""
        self.times.add(fact)
        return self._appliers[type(fact)](fact)

    def _check(self, event: e.Event) -> str:
        """Return why an event is ignored; empty if it counts."""
        match event:
            case e.Asked(trial=number, config=config):
                if number not in self.asking:
                    return _not_asked(number)
                e.check_config(config)
            case e.Exhausted(trial=number):
                return "" if number in self.asking else _not_asked(number)
            case e.Resized():
                self._check_resized(event)
            case e.Extended(num_trials=num_trials):
                if not self.num_asked <= num_trials <= e.MAX_TRIALS:
                    raise InvalidArgument(
                        f"num_trials={num_trials:,} must be between {self.num_asked:,}, the trials that exist, and "
                        f"{e.MAX_TRIALS:,}",
                        field="num_trials",
                    )
            case e.StopRequested():
                return "the study has already been stopped" if self.stop_reason or self.ended else ""
            case e.Ordered():
                return self._check_order(event)
            case e.Known(config=config, values=values):
                if self.num_asked or self.num_known >= e.MAX_KNOWN:
                    raise InvalidArgument(
                        f"a study can begin with at most {e.MAX_KNOWN:,} trials of others, before its own"
                    )
                self._check_values(values, "a trial of another study")
                e.check_config(config)
            case e.Reported() | e.Saved() | e.Finished() | e.Failed() | e.Lost() | e.Expired() | e.Stopped():
                return self._check_worker(event)
            case _:
                raise InvalidArgument(f"{type(event).__name__} is decided by the study itself")
        return ""

    def _check_order(self, event: e.Ordered) -> str:
        """Return why an order is refused, for the person who gave it."""
        trial = self.trials.get(event.trial)
        if self.ended is not None or self.stop_reason:
            return f"study {self.spec.name} is ending: {self.stop_reason or 'all trials have ended'}"
        if trial is None:
            return f"there is no trial {event.trial}"
        if trial.is_over:
            return f"trial {trial.number} has already {trial.state}"
        if not trial.lease:
            return f"trial {trial.number} has not started yet"
        if trial.stopping is not None:
            return f"trial {trial.number} is already being stopped: {trial.reason}"
        if event.order == "requeue" and trial.state != "running":
            return f"trial {trial.number} is {trial.state}, so it continues by itself"
        return ""

    def _check_worker(self, event: e.FromWorker) -> str:
        trial = self.trials.get(event.trial)
        if trial is None:
            return f"there is no trial {event.trial}"
        if trial.is_over:
            return f"trial {trial.number} has already {trial.state}"
        if event.lease != trial.lease or trial.state != "running":
            return f"trial {trial.number} no longer runs under lease {event.lease}"
        if isinstance(event, e.Reported | e.Finished) and event.values is not None:
            self._check_values(event.values, f"trial {trial.number}")
        if isinstance(event, e.Expired) and trial.stopping is not None:
            return f"trial {trial.number} was asked to stop"
        if isinstance(event, e.Reported) and trial.stopping in ("prune", "expire"):
            return f"trial {trial.number} was asked to stop"
        if isinstance(event, e.Reported):
            if not 0 <= event.step <= e.MAX_STEP:
                return f"step {event.step} of trial {trial.number} is not between 0 and 2**63 - 1"
            if trial.step is not None and event.step <= trial.step:
                return f"trial {trial.number} has already reported step {trial.step}"
        return ""

    def _check_resized(self, event: e.Resized) -> None:
        if not 0 <= event.num_slots <= e.MAX_SLOTS or not self.trials.keys() >= set(event.lost):
            raise InvalidArgument(
                f"num_slots={event.num_slots} must be between 0 and {e.MAX_SLOTS:,}, and lost={event.lost} must name "
                "trials"
            )
        if not 1 <= event.max_slots_per_trial <= e.MAX_SLOTS:
            raise InvalidArgument(
                f"max_slots_per_trial={event.max_slots_per_trial} must be between 1 and {e.MAX_SLOTS:,}"
            )

    def _check_values(self, values: e.Values, whose: str) -> None:
        names = self.objectives.names
        if len(values) != len(names):
            raise InvalidArgument(
                f"{whose} has {counted(len(values), 'value')}; the study has {counted(len(names), 'metric')}: "
                f"{', '.join(names)}",
                field="values",
            )

    # -- decisions -------------------------------------------------------------------------------------------------

    def _decide(self, event: e.Event, verdict: Verdict | None) -> Iterator[e.Event]:
        """Yield facts, each of which is applied before the next is decided."""
        if verdict is not None and verdict.what != "continue":
            assert isinstance(event, e.Reported)
            why: e.StopWhy = "prune" if verdict.what == "stop" else "pause"
            yield e.StopSent(trial=event.trial, lease=event.lease, why=why, reason=verdict.reason)
        if isinstance(event, e.Expired):
            yield e.StopSent(trial=event.trial, lease=event.lease, why="expire", reason=event.reason)
        if isinstance(event, e.Ordered):
            trial = self.trials[event.trial]
            if trial.state == "running":
                yield _stop(trial, "prune" if event.order == "stop" else "preempt", event.reason)
            else:
                yield e.Pruned(trial=trial.number, reason=event.reason)
        if isinstance(event, e.Known) or (isinstance(event, e.Saved) and self.max_slots_per_trial == 1):
            return
        if isinstance(event, e.Reported) and len(self._slots) >= self.num_slots:
            return  # a report frees no slot
        while (fact := self._next_fact()) is not None:
            yield fact

    def _next_fact(self) -> e.Event | None:
        if self.ended is not None:
            return None
        if self.stop_reason:
            return self._wind_down()
        if not self.has_value and self.num_failed >= max(MAX_FAILED_FIRST, 2 * self.num_slots):
            last = next(each for each in reversed(self.trials.values()) if each.state == "failed")
            return e.StopRequested(reason=f"the first {self.num_failed} trials failed, the last with: {last.reason}")
        going_on = [each for each in self.running if each.stopping is None and each.number not in self._lost_with_slot]
        if sum(each.num_slots for each in going_on) > self.num_slots:
            widest = max(reversed(going_on), key=lambda each: each.num_slots)
            return _stop(widest, "preempt", "its slot is gone")
        return self._next_lease() or self._next_ahead() or self._next_growth() or self._next_end()

    def _wind_down(self) -> e.Event | None:
        for trial in self.running:
            if trial.stopping is None:
                return _stop(trial, "end", self.stop_reason)
        return None if self._slots or self.asking else e.Ended(reason=self.stop_reason, is_complete=False)

    def _next_lease(self) -> e.Event | None:
        """Return what happens in the first free slot."""
        num_free = self._num_free
        if num_free <= 0:
            return None
        slot = next(each for each in range(self.num_slots) if each not in self._slots)
        waiting = next((number for number in self._queue if self.trials[number].lease), None)
        if waiting is not None:
            return self._widened(self._lease(self.trials[waiting], slot, "continues"))
        choice = self._choose()
        if isinstance(choice, Wait):
            return None
        if isinstance(choice, Resume):
            trial = self.trials[choice.trial]
            donor = self.trials[choice.donor] if choice.donor is not None else None
            return self._widened(self._lease(trial, slot, choice.reason, donor, choice.config))
        if self._queue:
            return self._lease(self.trials[next(iter(self._queue))], slot, "")
        return e.Asking(trial=self.num_asked) if self._can_ask and len(self.asking) < num_free else None

    def _lease(
        self, trial: Trial, slot: int, reason: str, donor: Trial | None = None, config: Config | None = None
    ) -> e.Leased:
        source = donor if donor is not None and donor.checkpoint else trial
        return e.Leased(
            trial=trial.number,
            lease=trial.lease + 1,
            slot=slot,
            reason=reason,
            checkpoint=source.checkpoint,
            step=source.checkpoint_step,
            donor=source.number if source is not trial else None,
            config=config,
        )

    def _widened(self, lease: e.Leased) -> e.Leased:
        """Add the other free slots to the lease of a trial that continues, if it may have them."""
        if self.max_slots_per_trial == 1 or lease.donor is not None or self._has_new_beside(lease.trial):
            return lease
        trial = self.trials[lease.trial]
        paused = [each for each in self._paused if each != trial.number]
        running = [*dict.fromkeys(self._slots.values()), trial.number]
        if not isinstance(self._scheduler.choose(paused, running, has_new=False), Wait):
            return lease
        num_slots = growth.slots_at_start(
            trial, self.running, num_free=self._num_free, max_slots=self.max_slots_per_trial
        )
        if num_slots == 1:
            return lease
        free = [each for each in range(self.num_slots) if each not in self._slots and each != lease.slot]
        reason = f"on {num_slots} slots: {growth.WHY}"
        return msgspec.structs.replace(lease, extra_slots=tuple(free[: num_slots - 1]), reason=reason)

    def _next_growth(self) -> e.Event | None:
        if not self.has_spare_slots:
            return None
        found = growth.next_growth(
            [each for each in self.running if each.number not in self._lost_with_slot],
            num_free=self._num_free,
            max_slots=self.max_slots_per_trial,
            longest=self._longest,
        )
        return None if found is None else _stop(self.trials[found.trial], "grow", found.reason)

    def _next_ahead(self) -> e.Event | None:
        """Ask before a slot is free, so that a slow sampler answers while trials run. One slot alone waits: the only
        result that such an answer lacks is the newest, which matters more than the time of an answer. With several
        slots, answers lack the results of running trials anyway.
        """
        if self.num_slots < 2:
            return None
        num_ready = len(self._queue) + len(self.asking)
        return e.Asking(trial=self.num_asked) if self._can_ask and num_ready < self.spec.ask_ahead else None

    def _next_end(self) -> e.Event | None:
        if self._slots or self._queue or self.asking or self._can_ask or not isinstance(self._choose(), Wait):
            return None
        for number in self._paused:
            return e.Pruned(trial=number, reason=self.trials[number].reason)
        return e.Ended(reason=f"all {counted(len(self.trials), 'trial')} have ended", is_complete=True)

    def _choose(self) -> Decision:
        return self._scheduler.choose(self._paused.keys(), self._slots.values(), has_new=self._has_new)

    @property
    def _num_free(self) -> int:
        return self.num_slots - len(self._slots)

    @property
    def _has_new(self) -> bool:
        """Whether a trial waits for a slot, or a new one can be started."""
        return bool(self._queue) or bool(self.asking) or self._can_ask

    def _has_new_beside(self, number: int) -> bool:
        return any(each != number for each in self._queue) or bool(self.asking) or self._can_ask

    @property
    def _can_ask(self) -> bool:
        return self.num_asked < self.num_trials and not self._is_exhausted

    def _actions(self, fact: e.Event) -> Iterator[Action]:
        match fact:
            case e.Asking(trial=number):
                yield Ask(number)
            case e.Leased(trial=number):
                config = fact.config if fact.config is not None else self.trials[number].config
                yield Start(number, fact.lease, fact.slot, config, fact.checkpoint, fact.step, fact.extra_slots)
            case e.StopSent(trial=number):
                slot = self.trials[number].slot
                assert slot is not None
                if fact.why == "expire":
                    yield Kill(number, fact.lease, slot, fact.reason)
                else:
                    yield Stop(number, fact.lease, slot, fact.reason, is_saving=fact.why != "prune")
            case e.Ended():
                yield Finish(fact.reason, fact.is_complete)

    # -- apply -----------------------------------------------------------------------------------------------------

    def _known(self, fact: e.Known) -> None:  # noqa: ARG002 - only the sampler needs its contents
        self.num_known += 1

    def _asking_begun(self, fact: e.Asking) -> None:
        self.asking[fact.trial] = None
        self.num_asked = fact.trial + 1

    def _asked(self, fact: e.Asked) -> None:
        self.asking.pop(fact.trial, None)
        self.trials[fact.trial] = Trial(fact.trial, dict(fact.config), is_given=fact.is_given)
        self._queue[fact.trial] = None

    def _exhausted(self, fact: e.Exhausted) -> None:
        self.asking.pop(fact.trial, None)
        self._is_exhausted = True

    def _leased(self, fact: e.Leased) -> None:
        trial = self.trials[fact.trial]
        if fact.config is not None:
            trial.config = dict(fact.config)
        if fact.donor is not None:
            trial.donors.append(fact.donor)
            trial.origin = fact.lease
            trial.checkpoint, trial.checkpoint_step, trial.step = fact.checkpoint, fact.step, fact.step
            trial.checkpoint_world_size = self.trials[fact.donor].checkpoint_world_size
            trial.series.cut(fact.step)
        if not trial.lease:
            trial.started_s = fact.at_s
            self._scheduler.started(trial.number, trial.config)
        elif trial.state == "paused":
            self._scheduler.resumed(trial.number, trial.config)
        trial.state, trial.slot, trial.lease, trial.lease_step = "running", fact.slot, fact.lease, trial.step
        trial.extra_slots, trial.num_lease_reports, trial.is_growing = fact.extra_slots, 0, False
        self._queue.pop(fact.trial, None)
        self._paused.pop(fact.trial, None)
        self._slots |= dict.fromkeys((fact.slot, *fact.extra_slots), fact.trial)

    def _reported(self, fact: e.Reported) -> Verdict | None:
        trial = self.trials[fact.trial]
        trial.step, trial.values = fact.step, fact.values
        trial.num_lease_reports += 1
        trial.series.add(fact.step, fact.values)
        losses = self.objectives.losses(fact.values)
        trial.best = min(trial.best, losses[0])
        self.has_value |= losses[0] < math.inf
        if trial.stopping is not None:
            return None  # it saves this step and stops; it does not report the step again when it continues
        is_contended = bool(self._queue) or bool(self._paused) or self._can_ask
        return self._scheduler.reported(trial.number, fact.step, losses, is_contended=is_contended)

    def _saved(self, fact: e.Saved) -> None:
        trial = self.trials[fact.trial]
        trial.checkpoint, trial.checkpoint_step = fact.checkpoint, fact.step
        trial.checkpoint_world_size = fact.world_size

    def _stop_sent(self, fact: e.StopSent) -> None:
        trial = self.trials[fact.trial]
        trial.stopping, trial.reason = fact.why, fact.reason[: e.MAX_REASON]

    def _stopped(self, fact: e.Stopped) -> None:
        trial = self.trials[fact.trial]
        if trial.stopping is None:  # not by us
            self._count_loss(trial, "it stopped without being asked to", fact.at_s)
        else:
            self._obeyed(trial, fact.at_s)

    def _finished(self, fact: e.Finished) -> None:
        trial = self.trials[fact.trial]
        values = fact.values if fact.values is not None else trial.values
        names = self.objectives.names
        if not values:
            metrics = " and ".join(names)
            what = f"it returned without having reported {metrics}; report or return it"
            self._over(trial, "failed", fact.at_s, what)
        elif missing := [name for name, value in zip(names, values, strict=True) if not _is_finite(value)]:
            trial.values = values
            self._over(trial, "failed", fact.at_s, f"{' and '.join(missing)} is not a finite number at its end")
        else:
            trial.values = values
            trial.best = min(trial.best, self.objectives.losses(values)[0])
            self.has_value = True
            self._longest = max(self._longest, trial.step or 0)
            self._over(trial, "finished", fact.at_s, "")

    def _failed(self, fact: e.Failed) -> None:
        trial = self.trials[fact.trial]
        if trial.stopping in ("prune", "expire"):
            self._obeyed(trial, fact.at_s)
        else:
            self._count_failure(trial, fact.reason, fact.at_s, is_final=fact.is_final)

    def _lost(self, fact: e.Lost) -> None:
        trial = self.trials[fact.trial]
        if trial.stopping is not None:
            self._obeyed(trial, fact.at_s)
        elif fact.is_blameless:
            self._requeue(trial, fact.reason)
        else:
            self._count_loss(trial, fact.reason, fact.at_s)

    def _count_failure(self, trial: Trial, reason: str, at_s: float, *, is_final: bool = False) -> None:
        if trial.extra_slots and not trial.has_progressed and not is_final:
            trial.is_narrow = True  # perhaps the function cannot train with more workers, so this does not count
            self._requeue(trial, reason)
            return
        trial.num_failures = 1 if trial.has_progressed else trial.num_failures + 1
        if is_final or trial.num_failures >= self.spec.max_failures:
            self._over(trial, "failed", at_s, reason)
        elif trial.stopping in (None, "expire"):
            self._requeue(trial, reason)
        else:
            self._obeyed(trial, at_s)

    def _count_loss(self, trial: Trial, reason: str, at_s: float) -> None:
        trial.is_narrow |= bool(trial.extra_slots) and not trial.has_progressed
        trial.num_losses = 1 if trial.has_progressed else trial.num_losses + 1
        if trial.num_losses >= MAX_LOSSES:
            text = f"its worker was lost {trial.num_losses} times without progress, the last time: {reason}"
            self._over(trial, "failed", at_s, text)
        else:
            self._requeue(trial, reason)

    def _obeyed(self, trial: Trial, at_s: float) -> None:
        """A trial that was asked to stop has stopped, or died instead: the decision stands."""
        if trial.stopping == "prune":
            self._over(trial, "pruned", at_s, trial.reason)
        elif trial.stopping == "expire":
            self._count_failure(trial, trial.reason, at_s)
        elif trial.stopping == "pause":
            self._release(trial)
            trial.state = "paused"
            self._paused[trial.number] = None
        else:
            trial.is_growing = trial.stopping == "grow"
            self._requeue(trial, trial.reason)

    def _requeue(self, trial: Trial, reason: str) -> None:
        self._release(trial)
        trial.state, trial.reason = "queued", reason[: e.MAX_REASON]
        self._queue[trial.number] = None

    def _pruned(self, fact: e.Pruned) -> None:
        self._over(self.trials[fact.trial], "pruned", fact.at_s, fact.reason)

    def _over(self, trial: Trial, state: Any, at_s: float, reason: str) -> None:
        self._release(trial)
        self._queue.pop(trial.number, None)
        self._paused.pop(trial.number, None)
        trial.state, trial.reason, trial.ended_s = state, reason[: e.MAX_REASON], at_s
        self.num_failed += state == "failed"
        self._scheduler.ended(trial.number, is_failed=state == "failed")

    def _release(self, trial: Trial) -> None:
        if trial.slot is not None:
            for slot in (trial.slot, *trial.extra_slots):
                del self._slots[slot]
        self._lost_with_slot.discard(trial.number)
        trial.slot, trial.extra_slots, trial.stopping = None, (), None

    def _resized(self, fact: e.Resized) -> None:
        self.num_slots, self.max_slots_per_trial = fact.num_slots, fact.max_slots_per_trial
        self._lost_with_slot |= {number for number in fact.lost if self.trials[number].slot is not None}

    def _extended(self, fact: e.Extended) -> None:
        self.num_trials, self.stop_reason, self.ended = fact.num_trials, "", None

    def _stop_requested(self, fact: e.StopRequested) -> None:
        self.stop_reason = fact.reason[: e.MAX_REASON] or "stop requested"

    def _study_ended(self, fact: e.Ended) -> None:
        self.ended = fact

    # -- results ---------------------------------------------------------------------------------------------------

    @property
    def best(self) -> Trial | None:
        """The finished trial with the best result; with several objectives, by the first."""
        return self.objectives.best(self.trials.values())

    @property
    def pareto(self) -> list[Trial]:
        """The finished trials that no other one dominates."""
        return self.objectives.pareto(self.trials.values())


def _not_asked(number: int) -> str:
    return f"no configuration is due for trial {number}"


def _stop(trial: Trial, why: e.StopWhy, reason: str) -> e.StopSent:
    return e.StopSent(trial=trial.number, lease=trial.lease, why=why, reason=reason)


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
