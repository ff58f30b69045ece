"""The driver with simulated processes: kills of workers, nodes and the driver itself at every point of a study."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from pathlib import Path

import pytest
from trial_processes import Simulated, SimulatedNode, SimulatedStudy

from strata import SearchSpace
from strata.launch.environment import STOPPED
from strata.tune import driver as drivers
from strata.tune import messages as m
from strata.tune.search import Search
from strata.tune.state import events as e
from strata.tune.state.actions import Finish

NUM_STEPS = 6
FINISHED = '"kind":"Finished"'


def a_spec(num_trials: int = 6, **more: object) -> e.StudySpec:
    space = SearchSpace().add_float("x", min=0, max=1)
    return e.StudySpec(name="sweep", space=space.to_dict(), num_trials=num_trials, **more)  # type: ignore[arg-type]


SEED_OF_PROMOTION = 2
"""With this seed, ASHA resumes a trial that it had paused."""
ASHA = {"scheduler": "asha", "scheduler_options": {"eta": 2, "min_step": 2}}


def train(process: Simulated) -> float:
    for step in range(process.first_step, NUM_STEPS + 1):
        process.report(step, float(process.order.config["x"]) / step)  # type: ignore[arg-type]
        process.save(step)
    return float(process.order.config["x"]) / NUM_STEPS  # type: ignore[arg-type]


def check(study: SimulatedStudy, num_trials: int = 6) -> None:
    """No trial is lost, none has two results, and the journal gives the same decisions again."""
    facts = study.facts()
    state = study.state()
    assert sorted(state.trials) == list(range(num_trials))
    assert all(trial.is_over for trial in state.trials.values())
    results = Counter(fact.trial for fact in facts if isinstance(fact, e.Finished))
    assert set(results.values()) <= {1}
    assert set(results) == {each.number for each in state.trials.values() if each.state == "finished"}
    for number in results:
        assert state.trials[number].values == (state.trials[number].config["x"] / NUM_STEPS,)
    leases = [(fact.trial, fact.lease) for fact in facts if isinstance(fact, e.Leased)]
    assert len(set(leases)) == len(leases)
    redone = decided_again(study.spec, facts)
    assert redone == facts


def decided_again(spec: e.StudySpec, facts: list[e.Event]) -> list[e.Event]:
    """Feed what came from outside to a new study, and return its facts."""
    decided = e.Opened | e.Asking | e.Leased | e.StopSent | e.Pruned | e.Ended
    again: list[e.Event] = [facts[0]]
    search = Search(spec)
    pending: list[e.Event] = []
    for fact in facts[1:]:
        if pending and fact == pending[0]:
            pending.pop(0)
            continue
        assert not pending, (fact, pending)
        if isinstance(fact, e.Lost) and fact.is_blameless and fact.reason == "the study was restarted":
            pending = list(search.recover(now_s=fact.at_s).facts)[1:]
            again += [fact, *pending]
            continue
        assert not isinstance(fact, decided), fact
        handled = search.handle(fact, now_s=fact.at_s)
        again += handled.facts
        pending = list(handled.facts[1:])
    return again


async def run_until(study: SimulatedStudy, node: SimulatedNode, text: str, nth: int = 1, num_slots: int = 2) -> None:
    """Run a driver, and kill it when its journal has this text for the n-th time."""
    running = asyncio.create_task(study.run(node, num_slots=num_slots))
    journal = study.directory / "study.jsonl"
    while not running.done():
        if journal.exists() and journal.read_text().count(text) >= nth:
            break
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_trials_of_a_study_run_to_their_ends_and_their_jobs_are_removed(tmp_path: Path) -> None:
    study = SimulatedStudy(tmp_path, a_spec(**ASHA))
    finish = asyncio.run(study.run(SimulatedNode("a", train)))

    assert finish.is_complete
    check(study)
    assert {each.state for each in study.state().trials.values()} == {"finished", "pruned"}
    assert study.coordinator is not None
    assert sorted(study.coordinator.dropped) == [f"sweep.{number}" for number in range(6)]


def test_trials_report_over_tls_with_a_token(tmp_path: Path) -> None:
    seen = []
    study = SimulatedStudy(tmp_path, a_spec(2))
    node = SimulatedNode("a", train)
    node.on_hello = lambda node, spec: seen.append(node.endpoint)
    asyncio.run(study.run(node, host="127.0.0.1"))

    check(study, 2)
    assert all(each.address.startswith("127.0.0.1:") and each.token and each.ca for each in seen)


def test_a_resumed_driver_removes_the_jobs_that_a_killed_one_has_left(tmp_path: Path) -> None:
    study = SimulatedStudy(tmp_path, a_spec(4))

    async def scene() -> None:
        await run_until(study, SimulatedNode("a", train), FINISHED, num_slots=1)
        study.old_jobs = ["sweep.0", "sweep.0-2", "sweep.1", "sweep.nodes", "sweep.2.0", "other.0", "sweep.99"]
        await study.run(SimulatedNode("b", train), num_slots=1)

    asyncio.run(scene())
    check(study, 4)
    assert study.coordinator is not None
    assert study.coordinator.dropped[:2] == ["sweep.0", "sweep.0-2"]
    assert sorted(study.coordinator.dropped[2:]) == ["sweep.1", "sweep.2", "sweep.3"]


@pytest.mark.parametrize("step", [1, 2, 3, NUM_STEPS])
def test_a_killed_worker_loses_no_trial_at_any_step(tmp_path: Path, step: int) -> None:
    killed: set[int] = set()

    def killing(process: Simulated) -> float:
        for number in range(process.first_step, NUM_STEPS + 1):
            if number == step and process.order.trial not in killed:
                killed.add(process.order.trial)
                process.is_killed.set()
            process.report(number, float(process.order.config["x"]) / number)  # type: ignore[arg-type]
            process.save(number)
        return float(process.order.config["x"]) / NUM_STEPS  # type: ignore[arg-type]

    study = SimulatedStudy(tmp_path, a_spec(**ASHA))
    asyncio.run(study.run(SimulatedNode("a", killing)))

    assert killed
    check(study)


def test_a_driver_that_dies_with_the_last_report_of_a_trial_does_not_change_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial saves the step that it has just reported, while the driver dies before it has read that report."""
    dead = threading.Event()
    received = drivers.Driver._received

    def dies(driver: drivers.Driver, group: object, process: object, message: m.FromTrial) -> None:
        if isinstance(message, m.Report) and message.step == NUM_STEPS:
            dead.set()
        if not dead.is_set():
            received(driver, group, process, message)  # type: ignore[arg-type]

    def training(process: Simulated) -> None:
        for step in range(process.first_step, NUM_STEPS + 1):
            process.report(step, float(process.order.config["x"]) / step)  # type: ignore[arg-type]
            if step == NUM_STEPS:
                assert dead.wait(10)
            process.save(step)

    study = SimulatedStudy(tmp_path, a_spec(1))
    node = SimulatedNode("a", training)

    async def scene() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(drivers.Driver, "_received", dies)
            running = asyncio.create_task(study.run(node))
            await asyncio.to_thread(dead.wait, 10)
            await asyncio.to_thread(node.join)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        again = SimulatedNode("b", training)
        again.checkpoints = node.checkpoints
        await study.run(again)

    asyncio.run(scene())
    check(study, 1)


@pytest.mark.parametrize("kind", ["Asking", "Asked", "Leased", "Reported", "StopSent", "Stopped", "Finished", "Ended"])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_driver_killed_after_any_fact_continues_and_no_trial_has_two_results(
    tmp_path: Path, kind: str, nth: int
) -> None:
    study = SimulatedStudy(tmp_path, a_spec(**ASHA))
    files: dict[str, int] = {}

    async def scene() -> None:
        node = SimulatedNode("a", train)
        node.checkpoints = files
        await run_until(study, node, f'"kind":"{kind}"', nth)
        if study.state().ended is None:
            again = SimulatedNode("b", train)
            again.checkpoints = files
            await study.run(again)

    asyncio.run(scene())
    check(study)


@pytest.mark.parametrize("text", ['"kind":"Lost"', '"kind":"Failed"', '"lease":2,"slot"'])
def test_a_driver_killed_after_a_loss_a_failure_or_a_promotion_continues(tmp_path: Path, text: str) -> None:
    files: dict[str, int] = {}
    unlucky = {1, 2}

    def faulty(process: Simulated) -> float:
        number = process.order.trial
        if number in unlucky and process.first_step == 1:
            unlucky.discard(number)
            process.report(1, float(process.order.config["x"]))  # type: ignore[arg-type]
            process.save(1)
            if number == 1:
                raise ValueError("no luck")
            process.is_killed.set()
        return train(process)

    study = SimulatedStudy(tmp_path, a_spec(**ASHA))

    async def scene() -> None:
        node, again = SimulatedNode("a", faulty), SimulatedNode("b", faulty)
        node.checkpoints = again.checkpoints = files
        await run_until(study, node, text)
        assert study.state().ended is None
        await study.run(again)

    asyncio.run(scene())
    check(study)
    assert text in (tmp_path / "study.jsonl").read_text()


class Fate:
    """Lets the first process that gets to a moment die, alone or with its node."""

    def __init__(self, moment: str, victim: str) -> None:
        self.has_struck = False
        self._moment = moment
        self._victim = victim
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()

    def at(self, moment: str, process: Simulated) -> None:
        with self._lock:
            if moment != self._moment or self.has_struck:
                return
            self.has_struck = True
        if self._victim == "worker":
            process.is_killed.set()
        else:
            self._loop.call_soon_threadsafe(process.node.die)
            assert process.is_killed.wait(10)


def mortal(process: Simulated, fate: Fate) -> float:
    """Train, and report the result twice."""
    x = float(process.order.config["x"])  # type: ignore[arg-type]
    fate.at("promote" if process.order.lease > 1 else "run", process)
    for step in range(process.first_step, NUM_STEPS + 1):
        if step == 2:
            fate.at("report", process)
        try:
            process.report(step, x / step)
        except SystemExit:
            fate.at("stop", process)
            raise
        process.save(step)
    fate.at("finish", process)
    process.link.finish((x / NUM_STEPS,))
    fate.at("finished", process)
    return x / NUM_STEPS


@pytest.mark.parametrize("victim", ["worker", "node"])
@pytest.mark.parametrize("moment", ["run", "report", "stop", "promote", "finish", "finished"])
def test_a_worker_or_a_node_that_dies_at_any_moment_loses_no_trial(tmp_path: Path, moment: str, victim: str) -> None:
    study = SimulatedStudy(tmp_path, a_spec(seed=SEED_OF_PROMOTION, **ASHA))

    async def scene() -> Fate:
        fate = Fate(moment, victim)
        nodes = [SimulatedNode(name, lambda process: mortal(process, fate)) for name in ("a", "b")]
        nodes[1].checkpoints = nodes[0].checkpoints
        await study.run(*nodes)
        return fate

    fate = asyncio.run(scene())
    assert fate.has_struck
    check(study)
    lost = [fact for fact in study.facts() if isinstance(fact, e.Lost)]
    assert lost or moment == "stop", "one that dies instead of stopping has stopped"
    assert {fact.is_blameless for fact in lost} <= {victim == "node"}


def test_a_coordinator_that_does_not_answer_costs_a_study_no_trial(tmp_path: Path) -> None:
    study = SimulatedStudy(tmp_path, a_spec(**ASHA))
    study.is_coordinator_down = True
    finish = asyncio.run(study.run(SimulatedNode("a", train)))

    assert finish.is_complete
    check(study)
    assert study.coordinator is not None
    assert study.coordinator.num_refused >= 6


def test_trials_of_a_lost_node_resume_on_another_and_are_not_blamed(tmp_path: Path) -> None:
    files: dict[str, int] = {}
    going_on = threading.Event()

    def waiting(process: Simulated) -> float:
        for step in range(process.first_step, NUM_STEPS + 1):
            if step == 3 and process.node.name == "b":
                process.node.die_in_loop()  # type: ignore[attr-defined]
                going_on.wait(10)
            process.report(step, float(process.order.config["x"]) / step)  # type: ignore[arg-type]
            process.save(step)
        return float(process.order.config["x"]) / NUM_STEPS  # type: ignore[arg-type]

    study = SimulatedStudy(tmp_path, a_spec())

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        here, there = SimulatedNode("a", waiting, slots=1), SimulatedNode("b", waiting, slots=1)
        here.checkpoints = there.checkpoints = files

        def die() -> None:
            loop.call_soon_threadsafe(there.die)
            loop.call_soon_threadsafe(going_on.set)

        there.die_in_loop = die  # type: ignore[attr-defined]
        await study.run(here, there)

    asyncio.run(scene())
    check(study)
    lost = [fact for fact in study.facts() if isinstance(fact, e.Lost)]
    assert len(lost) == 1
    assert lost[0].is_blameless
    assert "node b is lost: its power is off" in lost[0].reason
    assert [fact.num_slots for fact in study.facts() if isinstance(fact, e.Resized)] == [2, 1]


def test_a_node_that_joins_gets_trials(tmp_path: Path) -> None:
    names: list[str] = []
    study = SimulatedStudy(tmp_path, a_spec(8))

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        first, second = SimulatedNode("a", lambda process: None, slots=1), SimulatedNode("b", train, slots=1)

        def joining(process: Simulated) -> float:
            if process.order.trial == 1:
                second.endpoint = process.node.endpoint
                assert study.nodes is not None
                loop.call_soon_threadsafe(study.nodes.join, second)
            names.append(process.node.name)
            return train(process)

        first._train = second._train = joining
        await study.run(first)

    asyncio.run(scene())
    check(study, 8)
    assert set(names) == {"a", "b"}


def test_the_ranks_of_a_trial_start_and_end_together(tmp_path: Path) -> None:
    seen: list[tuple[int, int, int, int]] = []
    failed = threading.Event()

    def ranks(process: Simulated) -> float:
        identity = process.order.worker.identity
        seen.append((process.order.trial, process.order.lease, identity.rank, identity.world_size))
        first = process.first_step
        if process.order.trial == 0 and identity.rank == 1 and not failed.is_set():
            failed.set()
            process.is_killed.set()
            return 0.0
        for step in range(first, NUM_STEPS + 1):
            if process.order.trial == 0 and process.order.lease == 1 and step > 2:
                process.is_killed.wait(10)  # as in a collective whose peer is gone
            process.report(step, float(process.order.config["x"]) / step)  # type: ignore[arg-type]
            process.save(step)
        return float(process.order.config["x"]) / NUM_STEPS  # type: ignore[arg-type]

    study = SimulatedStudy(tmp_path, a_spec(3), workers_per_trial=2)
    asyncio.run(study.run(SimulatedNode("a", ranks, slots=4)))

    check(study, 3)
    assert sorted(each for each in seen if each[0] == 0) == [(0, lease, rank, 2) for lease in (1, 2) for rank in (0, 1)]
    assert study.state().trials[0].lease == 2
    assert math.isfinite(study.state().trials[0].values[0] or math.inf)


def test_a_trial_saves_and_continues_on_the_workers_that_no_other_one_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "CHECKPOINTS_S", 0.01)
    seen: list[tuple[int, int, int]] = []
    is_stopped = threading.Event()

    def growing(process: Simulated) -> float:
        identity = process.order.worker.identity
        step = process.first_step
        if process.order.trial == 0:
            seen.append((process.order.lease, identity.rank, identity.world_size))
            if identity.world_size == 2 and identity.rank == 1:
                assert is_stopped.wait(30)
                raise SystemExit(STOPPED)
            try:
                while identity.world_size == 2:  # until the driver asks it to stop
                    process.report(step, 0.5)
                    process.save(step)
                    step += 1
            finally:
                is_stopped.set()
        process.report(step, 0.5)
        return 0.5

    study = SimulatedStudy(tmp_path, a_spec(2), workers_per_trial=2)
    node = SimulatedNode("a", growing, slots=4)
    study.steps = lambda job: node.checkpoints.get(str(tmp_path / "trials/00000/checkpoints"), 0) * (job == "sweep.0")
    finish = asyncio.run(study.run(node, max_slots_per_trial=2))

    assert finish.is_complete
    assert sorted(seen) == [(1, 0, 2), (1, 1, 2), *((2, rank, 4) for rank in range(4))]
    leases = [fact for fact in study.facts() if isinstance(fact, e.Leased) and fact.trial == 0]
    assert [each.extra_slots for each in leases] == [(), (1,)]
    assert leases[1].checkpoint == f"sweep.0/{leases[1].step}"
    assert decided_again(study.spec, study.facts()) == study.facts()


# -- stops -------------------------------------------------------------------------------------------------------------


async def stopped_study(study: SimulatedStudy, node: SimulatedNode, *reasons: str, grace_s: float = 30.0) -> Finish:
    """Run a driver, and ask it to stop for each reason, the first time once a trial has reported."""
    running = asyncio.create_task(study.run(node, grace_s=grace_s))
    journal = study.directory / "study.jsonl"
    for kind, reason in zip(("Reported", "StopRequested"), reasons, strict=False):
        while not running.done():
            if journal.exists() and f'"kind":"{kind}"' in journal.read_text():
                break
            await asyncio.sleep(0)
        assert study.driver is not None
        study.driver.stop(reason, is_now=kind == "StopRequested")
    return await running


def reporting(process: Simulated) -> None:
    """Train until it is asked to stop; rank 0 then saves."""
    for step in range(process.first_step, 1_000_000):
        process.report(step, 0.5)
        process.save(step)


def hanging(process: Simulated) -> None:
    process.report(process.first_step, 0.5)
    process.is_killed.wait(30)


def test_a_stopped_driver_lets_trials_save_and_the_study_can_be_continued(tmp_path: Path) -> None:
    study = SimulatedStudy(tmp_path, a_spec(2))
    node = SimulatedNode("a", reporting)
    finish = asyncio.run(stopped_study(study, node, "Ctrl-C"))

    assert finish == Finish("Ctrl-C", is_complete=False)
    assert {each.state for each in study.state().trials.values()} == {"queued"}
    assert not [fact for fact in study.facts() if isinstance(fact, e.Lost)]
    assert isinstance(study.facts()[-1], e.Ended)


@pytest.mark.parametrize(("reasons", "grace_s"), [(("Ctrl-C", "Ctrl-C"), 30.0), (("Ctrl-C",), 0.05)])
def test_a_second_request_or_the_end_of_the_grace_period_ends_a_study_whose_trials_hang(
    tmp_path: Path, reasons: tuple[str, ...], grace_s: float
) -> None:
    study = SimulatedStudy(tmp_path, a_spec(2))
    finish = asyncio.run(stopped_study(study, SimulatedNode("a", hanging), *reasons, grace_s=grace_s))
    assert finish == Finish("Ctrl-C", is_complete=False)
    assert study.state().stop_reason == "Ctrl-C"

    again = asyncio.run(study.run(SimulatedNode("b", train)))

    assert again.is_complete
    assert [each.state for each in study.state().trials.values()] == ["finished", "finished"]


@pytest.mark.parametrize("has_context", [False, True])
def test_only_trials_that_may_save_are_waited_for_until_the_end_of_the_grace_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_context: bool
) -> None:
    monkeypatch.setattr(drivers, "NOTHING_TO_SAVE_S", 0.0)
    study = SimulatedStudy(tmp_path, a_spec(2))
    study.old_jobs = ["sweep.0", "sweep.1"] if has_context else ["other.0"]
    grace_s = 0.3 if has_context else 30.0
    finish = asyncio.run(stopped_study(study, SimulatedNode("a", hanging), "Ctrl-C", grace_s=grace_s))

    assert finish == Finish("Ctrl-C", is_complete=False)
    stopped = [fact.trial for fact in study.facts() if isinstance(fact, e.Stopped)]
    assert sorted(stopped) == ([] if has_context else [0, 1])
    assert not [fact for fact in study.facts() if isinstance(fact, e.Lost)], "a kill of ours is no lost worker"
    asked = next(fact for fact in study.facts() if isinstance(fact, e.StopRequested))
    assert asked.wait_s == grace_s
