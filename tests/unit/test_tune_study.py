"""The state machine of a study: no trial is lost, none has two results, and a replay decides the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tune_studies import run_study

from strata.errors import ConfigError, InvalidArgument, LimitExceeded
from strata.tune import SearchSpace
from strata.tune.export import rows
from strata.tune.search import Search, scheduler_of
from strata.tune.state import events as e
from strata.tune.state.actions import Action, Ask, Finish, Kill, Start, Stop
from strata.tune.state.study import MAX_FAILED_FIRST, MAX_LOSSES, StudyState
from strata.tune.state.trial import MAX_SERIES
from strata.tune.state.watch import Watch

SPACE = SearchSpace().add_float("x", min=0, max=1).add_int("n", values=[1, 2, 4])


def spec(**changes: Any) -> e.StudySpec:
    values: dict[str, Any] = {"name": "study", "space": SPACE.to_dict(), "num_trials": 4, "seed": 1}
    return e.StudySpec(**values | changes)


@dataclass
class World:
    """Workers that a test drives by hand, and a journal in memory."""

    spec: e.StudySpec
    num_slots: int = 1
    max_slots: int = 1
    journal: list[e.Event] = field(default_factory=list)
    inputs: list[e.Event] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    is_answering: bool = True
    asks: list[int] = field(default_factory=list)
    was_restarted: bool = False

    def __post_init__(self) -> None:
        self.search = Search(self.spec)
        self.journal.append(e.Opened(spec=self.spec))
        self.do(self.resized(self.num_slots))

    def resized(self, num_slots: int) -> e.Resized:
        return e.Resized(num_slots=num_slots, max_slots_per_trial=self.max_slots)

    @property
    def state(self) -> StudyState:
        return self.search.state

    def do(self, event: e.Event) -> str:
        """Handle an event and, unless a test delays them, the answers of the sampler; return why it is ignored."""
        handled = self.search.handle(event, now_s=float(len(self.journal)))
        self.inputs.append(event)
        self.record(handled.facts, handled.actions)
        return handled.ignored

    def record(self, facts: tuple[e.Event, ...], actions: tuple[Action, ...]) -> None:
        self.journal += facts
        self.actions += actions
        self.asks += [each.trial for each in actions if isinstance(each, Ask)]
        while self.is_answering and self.asks:
            self.do(self.search.answer(self.asks.pop(0)))

    def report(self, trial: int, step: int, *values: float | None) -> str:
        return self.do(e.Reported(trial=trial, lease=self.lease(trial), step=step, values=values))

    def finish(self, trial: int, *values: float | None) -> str:
        return self.do(e.Finished(trial=trial, lease=self.lease(trial), values=values or None))

    def fail(self, trial: int, reason: str = "ValueError: no", **kwargs: Any) -> str:
        return self.do(e.Failed(trial=trial, lease=self.lease(trial), reason=reason, **kwargs))

    def lose(self, trial: int) -> str:
        return self.do(e.Lost(trial=trial, lease=self.lease(trial), reason="killed"))

    def save(self, trial: int, step: int) -> str:
        return self.do(e.Saved(trial=trial, lease=self.lease(trial), step=step, checkpoint=f"{trial}/{step}"))

    def stopped(self, trial: int) -> str:
        return self.do(e.Stopped(trial=trial, lease=self.lease(trial)))

    def lease(self, trial: int) -> int:
        return self.state.trials[trial].lease

    def states(self) -> list[str]:
        return [each.state for _, each in sorted(self.state.trials.items())]

    def last(self) -> Action:
        return self.actions[-1]


def starts(world: World) -> list[tuple[int, int, int]]:
    return [(each.trial, each.lease, each.slot) for each in world.actions if isinstance(each, Start)]


# -- the life of a study -----------------------------------------------------------------------------------------------


def test_a_freed_slot_takes_the_next_trial_and_the_study_ends_after_the_last() -> None:
    world = World(spec(num_trials=3), num_slots=2)
    assert starts(world) == [(0, 1, 0), (1, 1, 1)]

    world.finish(1, 0.5)
    assert starts(world)[-1] == (2, 1, 1)
    world.finish(0, 0.1)
    world.finish(2, 0.3)

    assert world.last() == Finish("all 3 trials have ended", is_complete=True)
    assert world.states() == ["finished"] * 3
    assert world.state.best is world.state.trials[0]


def test_every_configuration_is_one_of_the_space_and_defaults_come_first() -> None:
    space = SearchSpace().add_float("x", min=0, max=1, default=0.25).enqueue({"x": 0.75})
    world = World(spec(space=space.to_dict()), num_slots=4)

    assert [each.config["x"] for each in world.state.trials.values()][:2] == [0.25, 0.75]
    assert [each.is_given for each in world.state.trials.values()] == [True, True, False, False]


def test_a_second_finish_is_ignored() -> None:
    world = World(spec(), num_slots=1)
    finished = e.Finished(trial=0, lease=1, values=(0.5,))
    assert world.do(finished) == ""

    assert world.do(finished) == "trial 0 has already finished"
    assert world.do(e.Finished(trial=0, lease=1, values=(0.1,))) == "trial 0 has already finished"
    assert world.state.trials[0].values == (0.5,)
    assert world.do(e.Finished(trial=9, lease=1)) == "there is no trial 9"


def test_a_finish_without_a_value_takes_the_last_report() -> None:
    world = World(spec(), num_slots=1)
    world.report(0, 1, 0.9)
    world.report(0, 2, 0.7)
    world.finish(0)

    assert world.state.trials[0].values == (0.7,)


def test_a_lost_worker_is_replaced_and_its_trial_resumes_from_its_checkpoint_before_new_ones() -> None:
    world = World(spec(), num_slots=1)
    world.report(0, 5, 0.9)
    world.save(0, 4)
    world.lose(0)

    assert world.last() == Start(0, 2, 0, world.state.trials[0].config, "0/4", 4)
    assert world.do(e.Reported(trial=0, lease=1, step=6, values=(0.1,))) == "trial 0 no longer runs under lease 1"
    assert world.report(0, 5, 0.9) == "trial 0 has already reported step 5"  # it repeats what it did before
    assert world.report(0, 6, 0.8) == ""
    assert [step for step, _ in world.state.trials[0].series.points] == [5, 6]


def test_a_worker_that_is_lost_again_and_again_without_progress_fails_the_trial() -> None:
    world = World(spec(), num_slots=1)
    for _ in range(MAX_LOSSES):
        world.lose(0)

    assert world.state.trials[0].state == "failed"
    assert world.state.trials[0].reason.endswith("lost 5 times without progress, the last time: killed")
    assert starts(world)[-1][0] == 1


def test_lost_workers_do_not_fail_a_trial_that_makes_progress() -> None:
    world = World(spec(), num_slots=1)
    for step in range(3 * MAX_LOSSES):
        world.report(0, step, 1.0)
        world.lose(0)

    assert world.state.trials[0].state == "running"


def test_a_trial_fails_with_its_last_words_after_max_failures_and_the_sweep_goes_on() -> None:
    world = World(spec(max_failures=2), num_slots=1)
    world.fail(0, "first")
    assert world.state.trials[0].state == "running"
    world.fail(0, "second")

    assert (world.state.trials[0].state, world.state.trials[0].reason) == ("failed", "second")
    assert starts(world)[-1] == (1, 1, 0)
    world.fail(1, "SyntaxError", is_final=True)
    assert world.states() == ["failed", "failed", "running"]


def test_a_study_whose_first_trials_all_fail_ends_with_the_cause() -> None:
    world = World(spec(num_trials=100, max_failures=1), num_slots=2)
    while not isinstance(world.last(), Finish):
        world.fail(world.state.running[0].number, "NameError: modle")
        for trial in [each for each in world.state.running if each.stopping]:
            world.stopped(trial.number)

    assert len([each for each in world.states() if each == "failed"]) == MAX_FAILED_FIRST
    finish = world.last()
    assert isinstance(finish, Finish)
    assert finish.reason == "the first 10 trials failed, the last with: NameError: modle"
    assert not finish.is_complete


def test_a_trial_without_a_metric_or_with_nan_at_its_end_has_failed() -> None:
    world = World(spec(num_trials=3), num_slots=3)
    world.finish(0)
    world.report(1, 1, 0.5)
    world.report(1, 2, None)
    world.finish(1)
    world.finish(2, math.nan)

    assert world.states() == ["failed"] * 3
    assert world.state.trials[0].reason == "it returned without having reported loss; report or return it"
    assert world.state.trials[1].reason == "loss is not a finite number at its end"
    assert world.state.best is None


def test_reports_out_of_order_after_a_stop_or_with_an_impossible_step_are_ignored() -> None:
    world = World(spec(), num_slots=1)
    assert world.report(0, 5, 0.5) == ""

    assert world.report(0, 3, 0.1) == "trial 0 has already reported step 5"
    assert world.report(0, 5, 0.1) == "trial 0 has already reported step 5"
    assert world.report(0, -1, 0.1) == "step -1 of trial 0 is not between 0 and 2**63 - 1"
    assert world.report(0, 2**70, 0.1) == "step 1180591620717411303424 of trial 0 is not between 0 and 2**63 - 1"
    assert world.state.trials[0].series.points == [(5, (0.5,))]


def test_a_trial_that_saves_and_stops_after_its_last_report_ends_with_that_value() -> None:
    world = World(spec(), num_slots=1)
    world.report(0, 1, 0.5)
    world.do(e.StopRequested(reason="interrupted"))
    assert world.report(0, 2, 0.25) == "", "it saves step 2, and does not report it again when it continues"
    world.stopped(0)
    world.do(e.Extended(num_trials=world.state.num_trials))
    world.finish(0)

    assert (world.state.trials[0].state, world.state.trials[0].values) == ("finished", (0.25,))


def test_nan_in_between_is_kept_as_missing_and_the_trial_can_still_finish() -> None:
    world = World(spec(), num_slots=1)
    for step, value in enumerate([0.5, None, 0.3]):
        world.report(0, step, value)
    world.finish(0)

    assert world.state.trials[0].series.points == [(0, (0.5,)), (1, (None,)), (2, (0.3,))]
    assert (world.state.trials[0].state, world.state.trials[0].best) == ("finished", 0.3)


def test_a_missing_second_metric_at_the_end_fails_the_trial_and_names_it() -> None:
    world = World(spec(metrics=("loss", "latency"), directions=("min", "min")), num_slots=1)
    world.report(0, 1, 0.5, None)
    world.finish(0)

    assert world.state.trials[0].reason == "latency is not a finite number at its end"


def test_a_silent_trial_is_killed_retried_and_fails_after_max_failures() -> None:
    world = World(spec(max_failures=2), num_slots=1)
    world.report(0, 1, 0.5)
    world.save(0, 1)
    assert world.do(e.Expired(trial=0, lease=1, reason="it reported nothing for 60 s")) == ""
    assert world.last() == Kill(0, 1, 0, "it reported nothing for 60 s")
    assert world.do(e.Expired(trial=0, lease=1, reason="again")) == "trial 0 was asked to stop"
    world.lose(0)
    assert world.last() == Start(0, 2, 0, world.state.trials[0].config, "0/1", 1)

    world.do(e.Expired(trial=0, lease=2, reason="it reported nothing for 60 s"))
    world.lose(0)

    assert (world.state.trials[0].state, world.state.trials[0].reason) == ("failed", "it reported nothing for 60 s")
    assert starts(world)[-1] == (1, 1, 0)


def test_a_silent_trial_that_finishes_before_it_is_killed_keeps_its_result() -> None:
    world = World(spec(), num_slots=1)
    world.do(e.Expired(trial=0, lease=1, reason="silent"))
    world.finish(0, 0.5)

    assert world.state.best is world.state.trials[0]
    assert world.lose(0) == "trial 0 has already finished"


def test_a_watch_reports_trials_that_are_silent_for_longer_than_the_limit() -> None:
    watch = Watch(60.0)
    world = World(spec(), num_slots=2)
    watch.note(world.journal, now_s=100.0)
    world.report(0, 1, 0.5)
    watch.note(world.journal[-1:], now_s=150.0)

    assert watch.overdue(now_s=160.0) == []
    assert watch.overdue(now_s=161.0) == [e.Expired(trial=1, lease=1, reason="it reported nothing for 60 s")]
    num_before = len(world.journal)
    world.finish(1, 0.1)
    watch.note(world.journal[num_before:], now_s=170.0)
    assert [each.trial for each in watch.overdue(now_s=211.0)] == [0]
    assert [each.trial for each in watch.overdue(now_s=231.0)] == [0, 2]
    with pytest.raises(ConfigError, match="report_timeout=0 must be above 0 seconds"):
        Watch(0)


def test_a_trial_that_violates_a_constraint_is_finished_but_not_the_best() -> None:
    world = World(spec(constraints=("memory <= 16", "accuracy >= 0.5")), num_slots=3)
    for trial, values in enumerate([(0.1, 20.0, 0.9), (0.2, 16.0, 0.5), (0.05, 1.0, 0.4)]):
        world.finish(trial, *values)

    assert world.states()[:3] == ["finished"] * 3
    assert world.state.best is world.state.trials[1]
    assert world.state.pareto == [world.state.trials[1]]
    assert world.state.objectives.names == ("loss", "memory", "accuracy")
    assert world.state.objectives.violations((0.1, 20.0, 0.9)) == pytest.approx((4.0, -0.4))
    for text in ("memory < 16", "memory <= x", "memory <= nan", "<= 3"):
        with pytest.raises(ConfigError, match="must be a metric, <= or >=, and a number"):
            World(spec(constraints=(text,)))


def test_trials_of_other_studies_teach_the_sampler_before_it_chooses() -> None:
    known = [
        e.Known(source=f"other/{i}", config={"x": i / 20, "n": 1}, values=((i / 20 - 0.7) ** 2,)) for i in range(20)
    ]

    def first_answers(*facts: e.Event) -> tuple[list[float], list[e.Event]]:
        search = Search(spec(sampler="tpe", num_trials=30))
        journal: list[e.Event] = [e.Opened(spec=search.state.spec)]
        for fact in facts:
            handled = search.handle(fact)
            assert handled.actions == ()
            journal += handled.facts
        found = []
        for event in [e.Resized(num_slots=8)]:
            handled = search.handle(event)
            journal += handled.facts
            for ask in handled.actions:
                assert isinstance(ask, Ask)
                answer = search.answer(ask.trial)
                assert isinstance(answer, e.Asked)
                found.append(answer.config["x"])
        return found, journal  # type: ignore[return-value]

    warm, journal = first_answers(*known)
    cold, _ = first_answers()

    assert sum(abs(x - 0.7) for x in warm) < sum(abs(x - 0.7) for x in cold)
    again = Search.replay([e.decode(e.encode(fact)) for fact in journal])
    assert again.state.num_known == 20
    assert [again.answer(trial).config["x"] for trial in range(8)] == warm  # type: ignore[union-attr]
    with pytest.raises(InvalidArgument, match="before its own"):
        again.handle(known[0])


def test_max_mode_and_several_objectives() -> None:
    world = World(spec(metrics=("accuracy", "latency"), directions=("max", "min")), num_slots=4)
    for trial, values in enumerate([(0.9, 5.0), (0.8, 1.0), (0.7, 3.0), (0.95, 9.0)]):
        world.report(trial, 1, *values)
        world.finish(trial)

    assert world.state.best is world.state.trials[3]
    assert [each.number for each in world.state.pareto] == [0, 1, 3]
    with pytest.raises(InvalidArgument, match="has 1 value; the study has 2 metrics: accuracy, latency"):
        World(world.spec).report(0, 1, 0.5)


# -- orders ------------------------------------------------------------------------------------------------------------


def order(world: World, trial: int, what: e.Order) -> str:
    return world.do(e.Ordered(trial=trial, order=what, reason="by hand"))


def test_a_running_trial_that_is_stopped_by_hand_ends_as_pruned_and_its_slot_takes_the_next() -> None:
    world = World(spec(num_trials=2))
    world.report(0, 1, 0.5)
    assert order(world, 0, "stop") == ""
    assert world.last() == Stop(0, 1, 0, "by hand", is_saving=False)
    world.stopped(0)

    assert (world.state.trials[0].state, world.state.trials[0].reason) == ("pruned", "by hand")
    assert starts(world)[-1] == (1, 1, 0)


def test_a_trial_that_is_requeued_saves_and_starts_again_from_its_checkpoint() -> None:
    world = World(spec(num_trials=1))
    world.report(0, 3, 0.5)
    assert order(world, 0, "requeue") == ""
    assert world.last() == Stop(0, 1, 0, "by hand", is_saving=True)
    world.save(0, 3)
    world.stopped(0)

    again = world.last()
    assert isinstance(again, Start)
    assert (again.trial, again.lease, again.checkpoint, again.step) == (0, 2, "0/3", 3)


def test_a_paused_trial_that_is_stopped_by_hand_is_never_resumed() -> None:
    world = World(spec(num_trials=4, scheduler="asha", scheduler_options={"kind": "promote", "min_step": 1}))
    world.report(0, 1, 0.1)
    world.stopped(0)
    assert world.states()[0] == "paused"
    assert order(world, 0, "stop") == ""
    run_out(world)

    assert world.states()[0] == "pruned"
    assert [trial for trial, *_ in starts(world)].count(0) == 1
    assert world.state.ended is not None
    assert world.state.ended.is_complete


def test_an_order_that_cannot_be_carried_out_is_refused_with_the_reason_and_leaves_no_fact() -> None:
    world = World(spec(num_trials=4, ask_ahead=2), num_slots=2)
    world.finish(0, 0.5)
    waiting = next(each.number for each in world.state.trials.values() if each.state == "queued")
    running = world.state.running[0].number
    num_facts = len(world.journal)

    assert order(world, 0, "stop") == "trial 0 has already finished"
    assert order(world, 9, "requeue") == "there is no trial 9"
    assert order(world, waiting, "stop") == f"trial {waiting} has not started yet"
    assert len(world.journal) == num_facts
    assert order(world, running, "requeue") == ""
    assert order(world, running, "stop") == f"trial {running} is already being stopped: by hand"
    world.do(e.StopRequested(reason="timeout"))
    assert order(world, running, "stop") == "study study is ending: timeout"


# -- stop, pause, resume -----------------------------------------------------------------------------------------------


def pruning() -> World:
    """A study in which trial 1 was asked to stop after its report."""
    world = World(spec(scheduler="asha", scheduler_options={"kind": "stop", "min_step": 1}), num_slots=2)
    world.report(0, 1, 0.1)
    world.report(1, 1, 0.9)
    return world


def test_a_stop_is_sent_with_its_reason_and_frees_the_slot_once_the_worker_has_stopped() -> None:
    world = pruning()
    assert world.last() == Stop(1, 1, 1, "place 2 of 2 at step 1; the best 1/4 go on", is_saving=False)
    assert world.report(1, 2, 0.0) == "trial 1 was asked to stop"

    world.stopped(1)

    assert world.state.trials[1].state == "pruned"
    assert world.state.trials[1].reason.startswith("place 2 of 2")
    assert starts(world)[-1] == (2, 1, 1)


@pytest.mark.parametrize("how", ["lose", "fail"])
def test_a_worker_that_dies_instead_of_stopping_is_pruned_all_the_same(how: str) -> None:
    world = pruning()
    getattr(world, how)(1)

    assert world.state.trials[1].state == "pruned"


def test_a_trial_that_finishes_before_the_stop_arrives_keeps_its_result() -> None:
    world = pruning()
    world.finish(1, 0.05)

    assert world.state.best is world.state.trials[1]
    assert world.stopped(1) == "trial 1 has already finished"


def test_a_paused_trial_is_promoted_from_its_checkpoint_on_another_slot() -> None:
    options = {"min_step": 1, "eta": 2}
    world = World(spec(num_trials=3, scheduler="asha", scheduler_options=options), num_slots=2)
    world.report(0, 1, 0.2)
    world.save(0, 1)
    world.stopped(0)
    world.report(1, 1, 0.9)
    world.stopped(1)

    assert starts(world) == [(0, 1, 0), (1, 1, 1), (2, 1, 0), (0, 2, 1)]
    assert world.last() == Start(0, 2, 1, world.state.trials[0].config, "0/1", 1)
    world.finish(0, 0.1)
    world.finish(2, 0.3)

    assert world.last() == Finish("all 3 trials have ended", is_complete=True)
    assert world.states() == ["finished", "pruned", "finished"]


def test_a_population_takes_turns_and_the_worst_continues_from_the_best() -> None:
    world = World(spec(num_trials=4, scheduler="pbt", scheduler_options={"interval": 1}), num_slots=1)
    for trial, loss in enumerate([0.1, 0.5, 0.3, 0.9]):
        world.report(trial, 1, loss)
        world.save(trial, 1)
        assert world.last() == Stop(trial, 1, 0, world.state.trials[trial].reason, is_saving=True)
        world.stopped(trial)
    for trial in (0, 1, 2):
        assert starts(world)[-1] == (trial, 2, 0)
        world.report(trial, 2, 0.4 if trial else 0.1)
        world.save(trial, 2)
        world.stopped(trial)

    start = world.last()
    assert isinstance(start, Start)
    assert (start.trial, start.checkpoint, start.step) == (3, "0/2", 2)
    assert start.config != world.state.trials[0].config
    assert world.state.trials[3].donors == [0]
    assert world.report(3, 2, 0.1) == "trial 3 has already reported step 2"


def test_fewer_slots_preempt_trials_which_resume_when_there_are_more() -> None:
    world = World(spec(), num_slots=2)
    world.do(e.Resized(num_slots=1))
    assert world.last() == Stop(1, 1, 1, "its slot is gone", is_saving=True)
    world.save(1, 7)
    world.stopped(1)
    assert world.state.trials[1].state == "queued"

    world.do(e.Resized(num_slots=3))

    assert starts(world)[-2:] == [(1, 2, 1), (2, 1, 2)]


def test_trials_that_are_lost_with_their_slots_leave_the_others_alone() -> None:
    world = World(spec(), num_slots=3)
    world.do(e.Resized(num_slots=1, lost=(0, 1)))
    assert not [each for each in world.actions if isinstance(each, Stop)]
    for number in (0, 1):
        world.do(e.Lost(trial=number, lease=1, reason="node b is lost", is_blameless=True))
    assert [each.number for each in world.state.running] == [2]

    world.do(e.Resized(num_slots=2))

    assert starts(world)[-1] == (0, 2, 0)


def test_a_stopped_study_saves_its_trials_and_goes_on_later() -> None:
    world = World(spec(), num_slots=2)
    world.do(e.StopRequested(reason="timeout of 60 s"))
    assert [each for each in world.actions if isinstance(each, Stop)] == [
        Stop(0, 1, 0, "timeout of 60 s", is_saving=True),
        Stop(1, 1, 1, "timeout of 60 s", is_saving=True),
    ]
    world.stopped(0)
    world.finish(1, 0.5)
    assert world.last() == Finish("timeout of 60 s", is_complete=False)
    assert world.do(e.StopRequested(reason="again")) == "the study has already been stopped"

    handled = world.search.recover()
    world.record(handled.facts, handled.actions)
    world.do(e.Resized(num_slots=1))

    assert starts(world)[-1] == (0, 2, 0)


def test_a_complete_study_can_be_extended() -> None:
    world = World(spec(num_trials=1))
    world.finish(0, 0.5)
    world.do(e.Extended(num_trials=2))

    assert starts(world)[-1] == (1, 1, 0)
    with pytest.raises(InvalidArgument, match="num_trials=1 must be between 2, the trials that exist"):
        world.do(e.Extended(num_trials=1))


def test_an_exhausted_space_ends_the_study_early() -> None:
    space = SearchSpace().add_bool("a")
    world = World(spec(space=space.to_dict(), num_trials=9, sampler="grid"), num_slots=4)
    for trial in (0, 1):
        world.finish(trial, 0.5)

    assert world.last() == Finish("all 2 trials have ended", is_complete=True)


def test_with_several_slots_configurations_are_asked_for_ahead_and_late_answers_wait() -> None:
    world = World(spec(ask_ahead=1), num_slots=2)
    assert world.states() == ["running", "running", "queued"]
    world.is_answering = False
    world.finish(0, 0.1)

    assert starts(world)[-1] == (2, 1, 0)
    assert world.asks == [3]
    assert world.do(e.Asked(trial=4, config={})) == "no configuration is due for trial 4"


def test_with_one_slot_a_question_waits_for_the_result_of_the_running_trial() -> None:
    world = World(spec(ask_ahead=1, sampler="tpe"), num_slots=1)
    for number in range(4):
        assert world.states()[number:] == ["running"]
        world.finish(number, 0.1)

    answers = [fact for fact in world.journal if isinstance(fact, e.Asked)]
    assert [(fact.trial, fact.num_told) for fact in answers] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_a_study_that_loses_all_slots_but_one_uses_its_answer_and_asks_no_further_ahead() -> None:
    world = World(spec(ask_ahead=1), num_slots=2)
    world.do(e.Resized(num_slots=1))
    world.do(e.Stopped(trial=1, lease=1))
    world.finish(0, 0.1)

    assert world.states() == ["finished", "running", "queued"], "the preempted trial goes first"
    world.finish(1, 0.1)
    world.finish(2, 0.1)
    assert world.states() == ["finished", "finished", "finished", "running"]


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_series_is_thinned_and_bounded() -> None:
    world = World(spec(num_trials=1))
    for step in range(5 * MAX_SERIES):
        world.report(0, step, float(step))
    series = world.state.trials[0].series

    assert MAX_SERIES // 2 <= len(series.points) <= MAX_SERIES
    assert series.num_reports == 5 * MAX_SERIES
    assert {b[0] - a[0] for a, b in zip(series.points, series.points[1:], strict=False)} == {series.stride}
    assert world.state.trials[0].step == 5 * MAX_SERIES - 1


def test_sizes_are_limited() -> None:
    world = World(spec())
    world.is_answering = False
    world.finish(0, 0.1)

    with pytest.raises(LimitExceeded, match="at most 65,536 are allowed; pass large values as paths"):
        world.do(e.Asked(trial=1, config={"x": "y" * 70_000}))
    with pytest.raises(InvalidArgument, match="num_slots=10001 must be between 0 and 10,000"):
        world.do(e.Resized(num_slots=10_001))
    with pytest.raises(InvalidArgument, match="Leased is decided by the study itself"):
        world.do(e.Leased(trial=0, lease=2, slot=0))
    for wrong, message in [
        ({"num_trials": 0}, "num_trials=0 must be between 1 and 100,000"),
        ({"max_failures": 0}, "max_failures=0 must be 1 or more"),
        ({"metrics": ("a", "a")}, "must be 1 to 8"),
        ({"metrics": ("a", "b")}, "mode has 1 value for 2 metrics"),
        ({"ask_ahead": -1}, "ask_ahead=-1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            spec(**wrong)


@pytest.mark.parametrize("name", [1, "", " loss", "lo\nss", "loss\x1b[31m", "x" * 101, "config.x", *e.RESERVED])
def test_a_metric_has_a_name_that_reports_and_tables_can_have(name: object) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a metric: use 1 to 100 printable") as caught:
        e.check_metric(name, field="metric")
    assert caught.value.field == "metric"


def test_no_metric_replaces_another_column_of_a_table() -> None:
    columns = {name for row in rows(run_study(num_trials=2)) for name in row}

    assert columns - {"loss"} <= {*e.RESERVED, *(each for each in columns if each.startswith("config."))}
    for name in ("val/loss", "auc@10", "pertes é"):
        e.check_metric(name, field="metric")


# -- any order of events -----------------------------------------------------------------------------------------------

SCHEDULERS: list[dict[str, Any]] = [
    {"scheduler": "asha", "scheduler_options": {"eta": 2, "min_step": 1, "compare": "first"}},
    {"scheduler": "none"},
    {"scheduler": "asha", "scheduler_options": {"eta": 2, "min_step": 1}},
    {"scheduler": "asha", "scheduler_options": {"eta": 2, "min_step": 1, "kind": "stop"}},
    {"scheduler": "hyperband", "scheduler_options": {"eta": 2, "num_brackets": 2}},
    {"scheduler": "median", "scheduler_options": {"min_trials": 2}},
    {"scheduler": "pbt"},
]


def check(world: World) -> None:
    """What must hold after every event."""
    state = world.state
    running = [each for each in state.trials.values() if each.state == "running"]
    assert sorted(each.number for each in running) == sorted(each.number for each in state.running)
    taken = [slot for each in running for slot in (each.slot, *each.extra_slots)]
    assert len(set(taken)) == len(taken)
    assert None not in taken
    assert all(each.num_slots <= state.max_slots_per_trial for each in running)
    assert sum(each.num_slots for each in running if each.stopping is None) <= state.num_slots
    assert all(each.slot is None and each.stopping is None for each in state.trials.values() if each not in running)
    # Every number is a trial, or a question that is open, or one that has no answer.
    exhausted = {fact.trial for fact in world.journal if isinstance(fact, e.Exhausted)}
    assert set(range(state.num_asked)) == set(state.trials) | set(state.asking) | exhausted
    assert state.num_asked <= state.num_trials
    if state.ended is None and not state.stop_reason:
        free = state.num_slots - len(taken)
        waiting = [each for each in state.trials.values() if each.state == "queued"]
        assert free <= 0 or not waiting, "a trial waits beside a free slot"


def progress(world: World, data: st.DataObject) -> None:  # noqa: C901 - one case per kind
    """One random event, some of them too late or wrong."""
    trials = sorted(world.state.trials)
    running = [each.number for each in world.state.running]
    kinds = ["resize", "stop", "restart"] * (data.draw(st.integers(0, 9)) == 0)
    kinds += ["answer"] * bool(world.asks)
    kinds += ["report", "save", "stopped", "finish", "fail", "lose", "expire", "order"] * bool(trials)
    if not kinds:
        return
    kind = data.draw(st.sampled_from(kinds))
    is_current = bool(running) and data.draw(st.integers(0, 4)) > 0
    trial = data.draw(st.sampled_from(running if is_current else trials or [0])) if trials else 0
    lease = world.lease(trial) - (0 if is_current else data.draw(st.integers(0, 1))) if trials else 0
    value = data.draw(st.sampled_from([None, 0.1, 0.2, 0.5, 0.7, 0.9]))
    before = world.state.trials[trial].step if trials else None
    step = (before or 0) + data.draw(st.integers(-1, 3))
    match kind:
        case "answer":
            world.do(world.search.answer(world.asks.pop(0)))
        case "report":
            world.do(e.Reported(trial=trial, lease=lease, step=max(0, step), values=(value,)))
        case "save":
            world.do(e.Saved(trial=trial, lease=lease, step=max(0, step), checkpoint=f"{trial}/{step}"))
        case "stopped":
            world.do(e.Stopped(trial=trial, lease=lease))
        case "finish":
            world.do(e.Finished(trial=trial, lease=lease, values=data.draw(st.sampled_from([None, (value,)]))))
        case "fail":
            world.do(e.Failed(trial=trial, lease=lease, reason="no", is_final=data.draw(st.booleans())))
        case "lose" | "expire":
            what = e.Lost if kind == "lose" else e.Expired
            world.do(what(trial=trial, lease=lease, reason="silent"))
        case "order":
            order: e.Order = data.draw(st.sampled_from(["stop", "requeue"]))
            world.do(e.Ordered(trial=trial, order=order, reason="by hand"))
        case "resize":
            world.do(world.resized(data.draw(st.integers(0, 4))))
        case "stop":
            world.do(e.StopRequested(reason="timeout"))
        case "restart":
            restart(world)
            world.was_restarted = True


def restart(world: World) -> None:
    """Kill the driver: what it knows is in the journal."""
    again = Search.replay(world.journal)
    assert summary(again.state) == summary(world.state)
    world.search = again
    handled = again.recover(now_s=1.0)
    world.asks = []
    world.record(handled.facts, handled.actions)
    world.do(world.resized(world.num_slots))


def summary(state: StudyState) -> object:
    """All that a state knows, its scheduler included."""
    hidden = {"_appliers", "_scheduler", "objectives"}
    plain = {name: value for name, value in vars(state).items() if name not in hidden}
    scheduler = plain_values({key: each for key, each in vars(state._scheduler).items() if key != "_perturb"})
    orders = (list(state._queue), list(state._paused), list(state.asking))
    return plain, scheduler, orders


def plain_values(value: object) -> object:
    """Objects as dicts, so that two of them can be compared."""
    if isinstance(value, dict):
        return {key: plain_values(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain_values(each) for each in value]
    if is_dataclass(value):
        return {each.name: plain_values(getattr(value, each.name)) for each in fields(value)}
    return plain_values(vars(value)) if hasattr(value, "__dict__") else value


def run_out(world: World) -> None:
    """Let everything that is left happen: the study must end."""
    world.is_answering = True
    world.record((), ())
    if world.state.stop_reason or world.state.ended is not None:
        return
    world.do(world.resized(2))
    for _ in range(2_000):
        if world.state.ended is not None:
            return
        for trial in world.state.running:
            if trial.stopping:
                world.save(trial.number, trial.step or 0)
                world.stopped(trial.number)
            elif (trial.step or 0) < 8:
                world.report(trial.number, (trial.step or 0) + 1, 0.01 * trial.number + 0.1)
            else:
                world.finish(trial.number, 0.5)
            break
        check(world)
    raise AssertionError(f"the study does not end: {world.states()}")


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    data=st.data(),
    options=st.sampled_from(SCHEDULERS),
    num_slots=st.integers(0, 3),
    max_slots=st.integers(1, 3),
    ahead=st.integers(0, 2),
)
def test_any_order_of_events_keeps_the_invariants_and_replays_to_the_same_state(
    data: st.DataObject, options: dict[str, Any], num_slots: int, max_slots: int, ahead: int
) -> None:
    study = spec(num_trials=6, max_failures=2, ask_ahead=ahead, **options)
    world = World(study, num_slots=num_slots, max_slots=max_slots)
    world.is_answering = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(0, 40))):
        progress(world, data)
        check(world)
    run_out(world)

    facts = [e.decode(e.encode(fact)) for fact in world.journal]
    replayed = StudyState.replay(world.spec, scheduler_of(world.spec, SPACE), facts)
    assert facts == world.journal
    assert summary(replayed) == summary(world.state)
    if not world.was_restarted:  # a restart is more than events
        assert decided_again(world) == (world.journal, world.actions)
    results = [f.trial for f in world.journal if isinstance(f, e.Finished)]
    assert len(results) == len(set(results))
    if world.state.ended is not None and world.state.ended.is_complete:
        assert all(each.is_over for each in world.state.trials.values())


@pytest.mark.parametrize("options", SCHEDULERS, ids=lambda each: str(each["scheduler"]))
@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_the_same_events_give_the_same_decisions(options: dict[str, Any], sampler: str) -> None:
    world = World(spec(num_trials=12, sampler=sampler, **options), num_slots=3)
    run_out(world)
    assert len(starts(world)) >= 12

    assert decided_again(world) == (world.journal, world.actions)


def decided_again(world: World) -> tuple[list[e.Event], list[Action]]:
    """Hand the events of a study to a new one, its sampler asked again; return facts and actions."""
    again = Search(world.spec)
    facts: list[e.Event] = [e.Opened(spec=world.spec)]
    actions: list[Action] = []
    for event in world.inputs:
        if isinstance(event, e.Asked) and event.trial in again.state.asking:
            assert again.answer(event.trial) == event
        handled = again.handle(event, now_s=float(len(facts)))
        facts += handled.facts
        actions += handled.actions
    return facts, actions


@pytest.mark.parametrize("sampler", ["random", "sobol", "tpe", "cmaes"])
def test_the_same_seed_and_one_worker_give_the_same_trials(sampler: str) -> None:
    def trials(seed: int) -> object:
        world = World(spec(num_trials=8, sampler=sampler, scheduler="asha", seed=seed), num_slots=1)
        run_out(world)
        return [(each.config, each.state, each.values) for each in world.state.trials.values()]

    assert trials(3) == trials(3)
    assert trials(3) != trials(4)


def test_a_question_that_waits_for_its_turn_knows_what_was_known_when_it_arose() -> None:
    """The time that a slow sampler takes must not decide what it knows."""
    world = World(spec(num_trials=9, ask_ahead=2, sampler="tpe"), num_slots=2)
    world.is_answering = False
    world.finish(0, 0.5)  # asks for trial 4
    late = world.asks.pop()
    world.finish(1, 0.5)
    answer = world.search.answer(late)

    assert isinstance(answer, e.Asked)
    assert (answer.trial, answer.num_told) == (4, 1)


def test_a_sampler_learns_from_paused_trials_while_the_study_runs() -> None:
    """Few trials of ASHA finish, and those at the end: a sampler that learned from them alone would draw at random."""
    facts: list[e.Event] = []
    run_study(num_trials=30, num_slots=2, sampler="tpe", scheduler="asha", num_steps=27, facts=facts)
    last = max(number for number, fact in enumerate(facts) if isinstance(fact, e.Asked))
    asked = facts[last]

    assert isinstance(asked, e.Asked)
    assert sum(isinstance(each, e.Finished) for each in facts[:last]) < 5
    assert asked.num_told >= 25


@pytest.mark.parametrize("scheduler", ["none", "asha"])
@pytest.mark.parametrize("cut", [5, 17, 40, 61])
def test_a_study_killed_anywhere_asks_the_same_questions_as_one_that_was_not(cut: int, scheduler: str) -> None:
    """With the trials' results a function of their configurations, the kill changes no configuration."""

    def drive(world: World, cut: int | None) -> dict[int, Any]:
        while world.state.ended is None:
            if cut is not None and len(world.journal) >= cut:
                restart(world)
                cut = None
            trial = world.state.running[0]
            x = trial.config["x"]
            assert isinstance(x, float)
            if trial.stopping is not None:
                world.stopped(trial.number)
            elif (trial.step or 0) < 2:
                world.report(trial.number, (trial.step or 0) + 1, x)
            else:
                world.finish(trial.number, (x - 0.3) ** 2)
        return {each.number: (each.config, each.values) for each in world.state.trials.values()}

    first, second = (World(spec(num_trials=14, sampler="tpe", scheduler=scheduler), num_slots=1) for _ in range(2))

    assert drive(first, None) == drive(second, cut)
