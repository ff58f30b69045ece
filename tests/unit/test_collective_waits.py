"""Waits in collectives of torch: what counts, what does not, and what is left unset."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from strata.coordinator.state.time_use import TimeUse
from strata.identity import Identity
from strata.train.collectives import EVERY_ITERATION, TORCHS_RATE, CollectiveWaits, Pass, backend_of_cpu, exposed_s
from strata.train.time_use import TimeUseMeter

MS = 1_000_000


class HandClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s


class FakeReducer:
    rate = TORCHS_RATE

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.rate = rate

    def prepare_for_forward(self) -> None:
        pass


class FakeLogger:
    """What DDP measured of its last backward pass."""

    def __init__(self) -> None:
        self.times = {"iteration": 0}

    def waited(self, from_ms: int, to_ms: int) -> None:
        number = self.times["iteration"] + 1
        names = ("iteration", "backward_compute_time_end", "backward_comm_time_end")
        self.times = dict(zip(names, (number, from_ms * MS, to_ms * MS), strict=True))

    def set_runtime_stats_and_log(self) -> None:
        pass

    def _get_ddp_logging_data(self) -> Any:
        return SimpleNamespace(ints_map=self.times)


class FakeTorch:
    """The parts of torch that are read or wrapped."""

    def __init__(self, clock: HandClock) -> None:
        class Work:
            def wait(self, seconds: float) -> bool:
                clock.now_s += seconds
                return True

        class ProcessGroup:
            def monitored_barrier(self, seconds: float) -> None:
                clock.now_s += seconds

        def broadcast(seconds: float) -> None:
            clock.now_s += seconds

        self.Work = Work
        self.logger: Any = type("Logger", (FakeLogger,), dict(vars(FakeLogger)))
        self.reducer: Any = type("Reducer", (FakeReducer,), dict(vars(FakeReducer)))
        self.backends: dict[Any, str] = {"default": "cpu:gloo,cuda:gloo"}
        self.private = SimpleNamespace(Work=Work, _world=SimpleNamespace(pg_backend_config=self.backends))
        self.distributed = SimpleNamespace(
            distributed_c10d=self.private,
            Logger=self.logger,
            Reducer=self.reducer,
            ProcessGroup=ProcessGroup,
            _broadcast_coalesced=broadcast,
            is_available=lambda: True,
            get_debug_level=lambda: "OFF",
            DebugLevel=SimpleNamespace(DETAIL="DETAIL"),
        )
        self.is_on_gpu = False
        strategy = SimpleNamespace(
            _FrameAction=SimpleNamespace(SKIP=1),
            _FrameExecStrategy=lambda *actions: actions,
            set_code_exec_strategy=lambda code, strategy: None,
        )
        self.torch = SimpleNamespace(
            distributed=self.distributed,
            cuda=SimpleNamespace(is_initialized=lambda: self.is_on_gpu),
            _C=SimpleNamespace(_dynamo=SimpleNamespace(eval_frame=strategy)),
        )

    @property
    def modules(self) -> Any:
        return {
            "torch": self.torch,
            "torch.distributed": self.distributed,
            "torch.distributed.distributed_c10d": self.private,
        }


class Process:
    """A training process with a clock of its own."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.fake = FakeTorch(self.clock)
        self.meter = TimeUseMeter(self.clock)
        self.waits = CollectiveWaits(self.meter, self.fake.modules, self.clock.monotonic_s)
        self.meter.is_collective_known = self.waits.is_known

    def begin(self) -> None:
        self.meter.begin()
        self.waits.begin()

    def forward(self, logger: FakeLogger, reducer: FakeReducer) -> None:
        """What DDP does at the beginning of a forward pass."""
        logger.set_runtime_stats_and_log()
        reducer.prepare_for_forward()

    @property
    def collective_s(self) -> float | None:
        use = self.meter.read()
        assert use is not None
        return use.collective_s


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process()
    yield made
    made.waits.close()


# -- what counts -------------------------------------------------------------------------------------------------------


def test_waits_of_the_training_thread_count_from_the_end_of_the_first_step(process: Process) -> None:
    process.fake.Work().wait(5.0)
    process.begin()
    assert process.collective_s == 0.0

    assert process.fake.Work().wait(2.0), "the result is torch's"
    process.fake.distributed._broadcast_coalesced(0.5)
    process.fake.distributed.ProcessGroup().monitored_barrier(0.25)

    assert process.meter.read() == TimeUse(measured_s=2.75, collective_s=2.75)


def test_threads_that_communicate_beside_training_do_not_count(process: Process) -> None:
    process.begin()
    lane = threading.Thread(target=lambda: process.fake.Work().wait(3.0))
    lane.start()
    lane.join()

    assert process.collective_s == 0.0


def test_a_wait_in_progress_is_part_of_what_is_read(process: Process) -> None:
    process.begin()
    with process.waits.waiting():
        process.clock.now_s += 4
        assert process.collective_s == 4.0
    assert process.collective_s == 4.0


def test_a_collective_inside_another_wait_counts_as_that_one(process: Process) -> None:
    is_in_next = False
    process.meter.add_source("data_s", lambda: 1.0 if process.clock.now_s > 101 else 0.0, is_waiting=lambda: is_in_next)
    process.begin()
    with process.meter.during("checkpoint_s"):
        process.fake.Work().wait(1.0)
    is_in_next = True
    process.fake.Work().wait(1.0)
    is_in_next = False
    process.fake.Work().wait(0.5)

    assert process.meter.read() == TimeUse(measured_s=2.5, data_s=1.0, checkpoint_s=1.0, collective_s=0.5)


def test_a_loader_knows_that_its_caller_waits_for_it() -> None:
    map_style = pytest.importorskip("strata.data.map_style")
    found: list[bool] = []

    class Rows:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            found.append(loader.is_waited_for)
            return index

    loader = map_style.map_loader(Rows(), ranks=Identity(), batch_size=2)
    found.extend(loader.is_waited_for for _ in loader)

    assert found == [True, True, False] * 2


def test_each_backward_pass_of_ddp_counts_once(process: Process) -> None:
    logger, reducer = process.fake.logger(), process.fake.reducer()
    logger.waited(1, 900)  # before the end of the first step
    process.begin()
    process.forward(logger, reducer)
    assert (process.collective_s, reducer.rate) == (0.0, EVERY_ITERATION)

    process.clock.now_s += 1
    logger.waited(1_000, 1_300)
    process.forward(logger, reducer)
    process.forward(logger, reducer)  # another forward pass before the next backward pass
    process.clock.now_s += 1
    logger.waited(2_000, 2_100)
    process.forward(logger, reducer)

    assert process.collective_s == pytest.approx(0.4)


def test_a_module_of_ddp_that_is_created_later_counts_from_its_first_pass(process: Process) -> None:
    logger, reducer = process.fake.logger(), process.fake.reducer()
    process.begin()
    process.forward(logger, reducer)
    process.clock.now_s += 1
    logger.waited(1_000, 1_300)
    process.forward(logger, reducer)

    assert process.collective_s == pytest.approx(0.3)


def test_each_module_of_ddp_has_its_own_passes(process: Process) -> None:
    loggers = [process.fake.logger() for _ in range(2)]
    reducer = process.fake.reducer()
    process.begin()
    for logger in loggers:
        process.forward(logger, reducer)
    process.clock.now_s += 1
    for logger in loggers:
        logger.waited(1_000, 1_300)
        process.forward(logger, reducer)

    assert process.collective_s == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("computed_ms", "end_ms", "wait_s"),
    [
        (100, 400, 0.3),
        (100, 100, 0.0),
        (100, 50, 0.0),  # never negative
        (0, 400, 0.0),  # not measured
        (100, 7, 0.0),  # the pass that was seen before
        (100, 3_600_100, 2.0),  # the clock was set while it waited
    ],
)
def test_the_wait_of_ddp_is_what_follows_its_computing(computed_ms: int, end_ms: int, wait_s: float) -> None:
    times = {"backward_compute_time_end": computed_ms * MS, "backward_comm_time_end": end_ms * MS}

    assert exposed_s(times, Pass(7 * MS, seen_s=50.0), now_s=52.0) == pytest.approx(wait_s)


# -- what stays unset --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "backend"),
    [("cpu:gloo,cuda:gloo", "gloo"), ("cpu:gloo,cuda:nccl", "gloo"), ("cuda:nccl", ""), ("cpu:mpi", "mpi"), ("", "")],
)
def test_the_backend_of_the_cpu_is_read_from_the_configuration_of_a_group(config: str, backend: str) -> None:
    assert backend_of_cpu(config) == backend


def test_nothing_is_known_without_a_process_group(process: Process) -> None:
    process.fake.backends.clear()
    process.begin()
    assert process.collective_s is None

    process.fake.backends["meeting"] = "cpu:gloo"
    assert process.collective_s == 0.0


def test_a_group_that_was_destroyed_has_been_measured(process: Process) -> None:
    process.begin()
    assert process.collective_s == 0.0
    process.fake.backends.clear()
    assert process.collective_s == 0.0


@pytest.mark.parametrize("backend", ["cuda:nccl", "cpu:mpi", "cpu:ucc,cuda:ucc"])
def test_a_group_that_cannot_be_measured_leaves_the_value_unset_for_good(process: Process, backend: str) -> None:
    process.begin()
    process.fake.backends["second"] = backend
    assert process.collective_s is None

    del process.fake.backends["second"]
    process.fake.Work().wait(1.0)
    assert process.collective_s is None


def test_accelerators_are_not_measured_and_ddp_keeps_its_own_rate(process: Process) -> None:
    process.fake.is_on_gpu = True
    process.begin()
    reducer = process.fake.reducer()
    process.forward(process.fake.logger(), reducer)

    assert (process.collective_s, reducer.rate) == (None, TORCHS_RATE)


def test_a_process_that_begins_to_use_an_accelerator_gets_back_the_rate_of_torch(process: Process) -> None:
    process.begin()
    reducer = process.fake.reducer()
    process.forward(process.fake.logger(), reducer)
    assert reducer.rate == EVERY_ITERATION
    process.fake.is_on_gpu = True
    assert process.collective_s is None
    assert reducer.rate == TORCHS_RATE

    process.forward(process.fake.logger(), reducer)
    assert reducer.rate == TORCHS_RATE


def test_detailed_logs_of_torch_are_not_flooded(process: Process) -> None:
    process.fake.distributed.get_debug_level = lambda: "DETAIL"
    process.begin()
    assert process.collective_s is None


def test_ddp_that_communicates_by_compiled_code_is_not_measured(process: Process) -> None:
    modules = {**process.fake.modules, "torch._dynamo.config": SimpleNamespace(optimize_ddp="python_reducer")}
    waits = CollectiveWaits(process.meter, modules)
    waits.begin()
    assert not waits.is_known()


@pytest.mark.parametrize("missing", ["torch", "torch.distributed", "torch.distributed.distributed_c10d"])
def test_a_script_without_torch_distributed_is_left_alone(process: Process, missing: str) -> None:
    modules = {name: module for name, module in process.fake.modules.items() if name != missing}
    waits = CollectiveWaits(process.meter, modules)
    waits.begin()
    assert not waits.is_known()


@pytest.mark.parametrize("name", ["Logger", "Reducer", "ProcessGroup", "_broadcast_coalesced"])
def test_a_torch_without_what_is_wrapped_stays_as_it_was(process: Process, name: str) -> None:
    wait = process.fake.Work.wait
    delattr(process.fake.distributed, name)
    process.begin()

    assert process.collective_s is None
    assert process.fake.Work.wait is wait


def test_a_failing_measurement_of_ddp_does_not_reach_the_script(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "strata.train.collectives")
    logger, reducer = process.fake.logger(), process.fake.reducer()
    process.begin()
    process.forward(logger, reducer)
    assert process.collective_s == 0.0
    logger.times = {"iteration": 1}  # a later version with other names
    process.forward(logger, reducer)
    process.forward(logger, reducer)

    assert process.collective_s is None
    (record,) = caplog.records
    assert "cannot read the times of DDP" in record.getMessage()
    assert record.levelname == "DEBUG"


def test_a_rate_that_cannot_be_set_does_not_reach_the_script(process: Process) -> None:
    process.begin()
    process.fake.reducer._set_ddp_runtime_logging_sample_rate = None
    process.forward(process.fake.logger(), process.fake.reducer())

    assert process.collective_s is None


def test_ddp_in_another_thread_than_the_one_that_reports_is_not_measured(process: Process) -> None:
    process.begin()
    trainer = threading.Thread(target=lambda: process.forward(process.fake.logger(), process.fake.reducer()))
    trainer.start()
    trainer.join()

    assert process.collective_s is None


def test_an_error_of_a_collective_is_raised_and_its_wait_counts(process: Process) -> None:
    def fail(work: Any, seconds: float) -> bool:
        process.clock.now_s += seconds
        raise RuntimeError("connection reset by peer")

    process.fake.Work.wait = fail  # type: ignore[method-assign]
    process.begin()
    with pytest.raises(RuntimeError, match="reset by peer"):
        process.fake.Work().wait(2.0)

    assert process.collective_s == 2.0


# -- torch stays as it was ---------------------------------------------------------------------------------------------


def test_closing_puts_back_what_was_wrapped(process: Process) -> None:
    owners = [process.fake.Work, process.fake.logger, process.fake.reducer, process.fake.distributed.ProcessGroup]
    before = [dict(vars(owner)) for owner in owners]
    process.begin()
    assert [dict(vars(owner)) for owner in owners] != before
    process.waits.close()

    assert [dict(vars(owner)) for owner in owners] == before


def test_the_last_heartbeat_after_the_end_keeps_what_was_measured(process: Process) -> None:
    process.begin()
    process.fake.Work().wait(2.0)
    process.waits.close()

    assert process.collective_s == 2.0


def test_closing_leaves_ddp_with_the_rate_of_torch(process: Process) -> None:
    reducer = process.fake.reducer()
    process.begin()
    process.forward(process.fake.logger(), reducer)
    assert reducer.rate == EVERY_ITERATION
    process.waits.close()

    assert reducer.rate == TORCHS_RATE


def test_a_wrapper_around_ours_survives_and_nothing_is_counted_after_the_end(process: Process) -> None:
    process.begin()
    ours = process.fake.Work.wait
    process.fake.Work.wait = lambda *arguments: ours(*arguments)  # type: ignore[method-assign]  # noqa: PLW0108 - a profiler
    process.waits.close()

    assert process.fake.Work().wait(1.0)
    assert process.meter.read() == TimeUse(measured_s=1.0, collective_s=0.0)


def test_a_second_context_of_a_process_measures_nothing(process: Process) -> None:
    process.begin()
    second = CollectiveWaits(process.meter, process.fake.modules)
    second.begin()
    second.close()

    assert not second.is_known()
    assert process.collective_s == 0.0


def test_names_of_the_installed_torch_can_be_wrapped_and_put_back() -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    class Counting:
        num_waits = 0

        @contextmanager
        def _counted(self) -> Iterator[None]:
            self.num_waits += 1
            yield

        def during(self, wait: str) -> AbstractContextManager[None]:
            return self._counted()

        def add(self, wait: str, seconds: float) -> None:
            raise AssertionError("without DDP")

    meter = Counting()
    all_reduce, wait = dist.all_reduce, vars(dist.distributed_c10d.Work)["wait"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    waits = CollectiveWaits(meter)
    try:
        waits.begin()
        assert waits.is_known()
        all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2), async_op=True).wait()
        dist.barrier()
        assert meter.num_waits == 3
    finally:
        waits.close()
        dist.destroy_process_group()
    assert vars(dist.distributed_c10d.Work)["wait"] is wait
