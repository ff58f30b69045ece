"""The parts of strategies that need no other rank: settings, grids, packing, lanes, compression."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from strata.errors import InvalidArgument
from strata.identity import Identity
from strata.trainer.strategy import AllReduce, PowerSGD
from strata.trainer.strategy.lane import StreamLane, ThreadLane
from strata.trainer.strategy.local_steps import OuterStep, cut
from strata.trainer.strategy.power_sgd import PowerSGDAverager
from strata.trainer.strategy.reduce import Averager, Scratch
from strata.trainer.strategy.topology import Grid, Topology, divisors, from_local_ranks, make_grid

# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"algorithm": "2d", "group_size": 4, "compression": "fp16"},
        {"compression": PowerSGD(matrix_rank=4), "bucket_mb": 1},
        {"local_steps": 50, "outer_lr": 0.7, "outer_momentum": 0.9, "compression": "bf16"},
    ],
)
def test_settings_are_frozen_and_survive_a_pickle(settings: dict[str, Any]) -> None:
    strategy = AllReduce(**settings)

    assert pickle.loads(pickle.dumps(strategy)) == strategy
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.bucket_mb = 1


@pytest.mark.parametrize(
    ("settings", "field", "cure"),
    [
        ({"algorithm": "tree"}, "algorithm", "use 'memory', 'ring', 'group', '2d', 'auto'"),
        ({"compression": "fp8"}, "compression", "use 'fp16', 'bf16', 'powersgd', None"),
        ({"group_size": 4}, "group_size", "set algorithm to 'group' or '2d', or leave group_size out"),
        ({"algorithm": "2d", "group_size": 1}, "group_size", "not a whole number of 2 or more"),
        ({"algorithm": "2d", "group_size": 2.0}, "group_size", "not a whole number of 2 or more"),
        ({"local_steps": 0}, "local_steps", "not a whole number of 1 or more"),
        ({"local_steps": True}, "local_steps", "not a whole number of 1 or more"),
        ({"bucket_mb": 0}, "bucket_mb", "the default is 25"),
        ({"bucket_mb": float("nan")}, "bucket_mb", "not a number of 0 or more"),
        ({"outer_lr": "fast"}, "outer_lr", "not a number of 0 or more"),
        ({"outer_lr": 0.7}, "outer_lr", "set local_steps to 2 or more"),
        ({"outer_momentum": 0.9}, "outer_momentum", "set local_steps to 2 or more"),
        ({"local_steps": 2, "outer_lr": 0}, "outer_lr", "a learning rate above 0"),
        ({"local_steps": 2, "outer_momentum": 1}, "outer_momentum", "a momentum below 1"),
        ({"local_steps": 2, "compression": "powersgd"}, "compression", "use 'fp16' or 'bf16', or local_steps=1"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_cure(settings: dict[str, Any], field: str, cure: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        AllReduce(**settings)

    assert refusal.value.field == field
    assert cure in str(refusal.value)


@pytest.mark.parametrize("settings", [{"matrix_rank": 0}, {"start_step": -1}, {"min_ratio": 0.5}])
def test_powersgd_refuses_invalid_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=f"{next(iter(settings))}=.* is below"):
        PowerSGD(**settings)


def test_a_single_rank_gets_its_own_module_back() -> None:
    module = nn.Linear(2, 2)
    bound = AllReduce(algorithm="auto", local_steps=7).bind(module, Identity())

    with bound.accumulating():
        bound.module(torch.ones(1, 2)).sum().backward()
    bound.after_step(7)
    bound.finish()
    assert bound.module is module
    assert bound.is_replicated
    assert bound.state_dict() == {}


@pytest.mark.parametrize(
    ("module", "cure"),
    [
        (nn.Linear(2, 2).requires_grad_(False), "no parameter that requires a gradient; unfreeze some"),
        (nn.ReLU(), "no parameter that requires a gradient; unfreeze some"),
        (nn.LazyLinear(2), "parameter weight has no shape yet; run the module once on a batch"),
    ],
)
def test_a_module_that_cannot_be_trained_is_refused(module: nn.Module, cure: str) -> None:
    with pytest.raises(InvalidArgument, match=cure):
        AllReduce().bind(module, Identity())


def test_several_ranks_need_a_process_group() -> None:
    with pytest.raises(InvalidArgument, match=r"call context.init_process_group\(\) first"):
        AllReduce().bind(nn.Linear(2, 2), Identity(world_size=2))


# -- grids ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(1, 12))
def test_rows_and_columns_each_hold_every_rank_once(num_rows: int, group_size: int) -> None:
    world_size = num_rows * group_size
    grid = Grid(world_size=world_size, group_size=group_size)

    rows = {tuple(grid.row(rank)) for rank in range(world_size)}
    columns = {tuple(grid.column(rank)) for rank in range(world_size)}
    assert sorted(rank for row in rows for rank in row) == list(range(world_size))
    assert sorted(rank for column in columns for rank in column) == list(range(world_size))
    assert all(len(set(row) & set(column)) == 1 for row in rows for column in columns)
    assert grid.leaders == sorted(row[0] for row in rows) == grid.column(0)


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "rows_and_columns"),
    [
        (2, 1, (2, 1)),
        (4, 1, (2, 2)),
        (6, 1, (3, 2)),
        (6, 3, (2, 3)),
        (6, 6, (3, 2)),
        (7, 1, (7, 1)),
        (1_000, 1, (40, 25)),
    ],
)
def test_by_default_a_row_is_a_node_or_the_grid_is_nearly_square(
    world_size: int, ranks_per_node: int, rows_and_columns: tuple[int, int]
) -> None:
    grid = make_grid(Topology(world_size=world_size, ranks_per_node=ranks_per_node), None)

    assert (grid.num_rows, grid.group_size) == rows_and_columns
    assert grid.is_flat == (1 in rows_and_columns)


@pytest.mark.parametrize(("world_size", "cure"), [(6, "use 2 or 3, or leave group_size out"), (7, "algorithm='ring'")])
def test_a_group_size_that_does_not_divide_the_ranks_is_refused(world_size: int, cure: str) -> None:
    with pytest.raises(InvalidArgument, match=cure):
        make_grid(Topology(world_size=world_size), 4)


@given(st.integers(1, 2_000))
def test_divisors_are_complete_and_sorted(number: int) -> None:
    assert divisors(number) == [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@pytest.mark.parametrize(
    ("local_ranks", "sizes", "ranks_per_node"),
    [
        ([0, 1, 0, 1], [2, 2, 2, 2], 2),
        ([0, 1, 2, 3], [4, 4, 4, 4], 4),
        ([0, 0, 1, 1], [2, 2, 2, 2], 1),  # ranks of a node are not neighbors
        ([0, 1, 0], [2, 2, 1], 1),  # nodes of different sizes
        ([0, 0], [2, 2], 1),  # a launcher that sets no local ranks
        ([0, 0], [0, 0], 1),
    ],
)
def test_nodes_of_one_size_are_recognized(local_ranks: list[int], sizes: list[int], ranks_per_node: int) -> None:
    found = from_local_ranks(local_ranks, sizes)

    assert found == Topology(world_size=len(local_ranks), ranks_per_node=ranks_per_node)


def test_a_world_that_does_not_fill_its_nodes_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="5 ranks do not fill nodes of 2 ranks"):
        Topology(world_size=5, ranks_per_node=2)


# -- packing -------------------------------------------------------------------------------------------------------


class Echo:
    """An algorithm for ranks that all hold the same numbers."""

    def __init__(self, world_size: int, multiple_of: int = 1) -> None:
        self.world_size = world_size
        self.multiple_of = multiple_of
        self.summed: list[Tensor] = []

    def sum_(self, flat: Tensor) -> None:
        assert flat.numel() % self.multiple_of == 0
        self.summed.append(flat)
        flat.mul_(self.world_size)


@given(st.integers(1, 50), st.integers(1, 6), st.sampled_from([None, torch.float16, torch.bfloat16]))
def test_an_average_of_equal_numbers_is_the_number(size: int, unit: int, wire: torch.dtype | None) -> None:
    echo = Echo(4, unit)
    tensor = torch.arange(size, dtype=torch.float32)

    Averager(echo, 4, wire=wire).average_(tensor)

    assert torch.equal(tensor, torch.arange(size, dtype=torch.float32))
    assert echo.summed[0].dtype == (wire or torch.float32)


def test_half_precision_does_not_overflow_in_the_sum() -> None:
    tensor = torch.full((3,), 60_000.0)

    Averager(Echo(8), 8, wire=torch.float16).average_(tensor)

    assert tensor.tolist() == [60_000.0] * 3


def test_gradients_that_are_small_already_are_not_cast() -> None:
    echo = Echo(2)
    for dtype in (torch.bfloat16, torch.float16):
        Averager(echo, 2, wire=torch.float16).average_(torch.ones(4, dtype=dtype))

    assert [each.dtype for each in echo.summed] == [torch.bfloat16, torch.float16]


def test_buckets_of_all_sizes_share_one_buffer() -> None:
    echo = Echo(2, multiple_of=4)
    averager = Averager(echo, 2)
    for size in (30, 7, 29, 30):
        averager.average_(torch.ones(size))

    assert len({each.untyped_storage().data_ptr() for each in echo.summed}) == 1


def test_a_scratch_keeps_one_buffer_for_each_type() -> None:
    scratch, single, double = Scratch(), torch.empty(0), torch.empty(0, dtype=torch.float64)
    first, other, again = scratch.take(5, like=single), scratch.take(9, like=double), scratch.take(3, like=single)

    assert (first.numel(), other.numel(), again.numel()) == (5, 9, 3)
    assert first.data_ptr() == again.data_ptr() != other.data_ptr()


# -- lanes ---------------------------------------------------------------------------------------------------------


def test_a_lane_runs_work_in_order_and_not_in_the_caller() -> None:
    lane, order, is_open = ThreadLane(), [], threading.Event()

    def first() -> None:
        assert is_open.wait(10)
        order.append((1, threading.current_thread() is threading.main_thread()))

    one = lane.submit(first, torch.tensor(1.0))
    two = lane.submit(lambda: order.append((2, False)), torch.tensor(2.0))
    assert not two.done()
    is_open.set()
    assert (two.wait().item(), one.wait().item()) == (2.0, 1.0)
    assert order == [(1, False), (2, False)]


def test_a_lane_passes_on_an_error_and_continues() -> None:
    def fail() -> None:
        raise OSError("the cable is cut")

    lane = ThreadLane()
    failed, next_one = lane.submit(fail, torch.ones(1)), lane.submit(lambda: None, torch.ones(1))

    with pytest.raises(RuntimeError, match="the cable is cut"):
        failed.wait()
    assert next_one.wait().item() == 1.0


def test_the_thread_of_a_lane_ends_with_it_and_keeps_no_bucket_alive() -> None:
    before = set(threading.enumerate())  # lanes of other tests may still be ending
    lane = ThreadLane()
    (thread,) = [each for each in threading.enumerate() if each not in before]
    bucket = torch.ones(1)
    alive = weakref.ref(bucket)
    lane.submit(lambda: None, bucket).wait()
    del bucket
    lane.submit(lambda: None, torch.ones(1)).wait()  # the thread has let go of the one before
    gc.collect()

    assert alive() is None
    del lane
    thread.join(10)
    assert not thread.is_alive()


def test_a_stream_lane_runs_work_at_once() -> None:
    tensor = torch.zeros(1)

    assert StreamLane(torch.device("cpu")).submit(lambda: tensor.add_(1), tensor).value().item() == 1.0


# -- compression ---------------------------------------------------------------------------------------------------


class FakeBucket:
    """Gradients of some parameters, as DDP lays them out."""

    def __init__(self, gradients: dict[Tensor, Tensor], *, is_last: bool = True) -> None:
        self._parameters = list(gradients)
        self._flat = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
        self._is_last = is_last

    def buffer(self) -> Tensor:
        return self._flat

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        parts = self._flat.split([parameter.numel() for parameter in self._parameters])
        return [part.view_as(parameter) for part, parameter in zip(parts, self._parameters, strict=True)]

    def is_last(self) -> bool:
        return self._is_last


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(16, 8, 3)
        self.layer = nn.Linear(20, 30)


def make_power_sgd(config: PowerSGD, world_size: int = 2) -> tuple[PowerSGDAverager, dict[str, Tensor], Echo]:
    torch.manual_seed(0)
    parameters: dict[str, Tensor] = dict(Tiny().named_parameters())
    echo = Echo(world_size)
    return PowerSGDAverager(config, Averager(echo, world_size), parameters, world_size), parameters, echo


def gradients_of(parameters: dict[str, Tensor], seed: int) -> dict[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {parameter: torch.randn(parameter.shape, generator=generator) for parameter in parameters.values()}


def test_powersgd_sends_thin_matrices_and_vectors_in_two_messages() -> None:
    averager, parameters, echo = make_power_sgd(PowerSGD(matrix_rank=1, start_step=0))

    averager.average_bucket_(FakeBucket(gradients_of(parameters, 1)))

    rows, columns, biases = 8 + 30, 16 * 9 + 20, 8 + 30
    assert [each.numel() for each in echo.summed] == [rows + biases, columns]
    counted = sum(PowerSGD(matrix_rank=1).num_elements(parameter.shape) for parameter in parameters.values())
    assert counted == rows + columns + biases


def test_powersgd_loses_nothing_over_time() -> None:
    """Error feedback: what was applied and what is still owed add up to all gradients."""
    averager, parameters, _ = make_power_sgd(PowerSGD(matrix_rank=1, start_step=2))
    given_total = {name: torch.zeros(p.shape) for name, p in parameters.items()}
    applied_total = {name: torch.zeros(p.shape) for name, p in parameters.items()}
    for step in range(8):
        gradients = gradients_of(parameters, step)
        bucket = FakeBucket(gradients)
        averager.average_bucket_(bucket)
        for (name, parameter), applied in zip(parameters.items(), bucket.gradients(), strict=True):
            given_total[name] += gradients[parameter]
            applied_total[name] += applied

    errors = averager.state_dict()["powersgd"]["errors"]
    assert set(errors) == {"convolution.weight", "layer.weight"}
    for name, total in given_total.items():
        owed = errors[name].view_as(total) if name in errors else 0
        torch.testing.assert_close(applied_total[name] + owed, total)


def test_powersgd_turns_zeros_into_zeros_and_recovers() -> None:
    averager, parameters, _ = make_power_sgd(PowerSGD(matrix_rank=2, start_step=0))
    zeros = FakeBucket({parameter: torch.zeros(parameter.shape) for parameter in parameters.values()})
    averager.average_bucket_(zeros)
    assert zeros.buffer().abs().max() == 0

    later = FakeBucket(gradients_of(parameters, 1))
    averager.average_bucket_(later)
    assert all(gradient.isfinite().all() and gradient.abs().max() > 0 for gradient in later.gradients())


@pytest.mark.parametrize("split", [False, True])
def test_powersgd_gives_the_same_result_for_any_buckets_after_a_resume(split: bool) -> None:
    config = PowerSGD(matrix_rank=2, start_step=1)
    averager, parameters, _ = make_power_sgd(config)
    for step in range(3):
        averager.average_bucket_(FakeBucket(gradients_of(parameters, step)))
    state = averager.state_dict()
    resumed, same_parameters, _ = make_power_sgd(config)
    resumed.load_state_dict(state)

    expected = FakeBucket(gradients_of(parameters, 9))
    averager.average_bucket_(expected)
    gradients = gradients_of(same_parameters, 9)
    parts = [dict([pair]) for pair in gradients.items()] if split else [gradients]
    buckets = [FakeBucket(part, is_last=part is parts[-1]) for part in parts]
    for bucket in buckets:
        resumed.average_bucket_(bucket)

    assert torch.equal(torch.cat([bucket.buffer() for bucket in buckets]), expected.buffer())


def test_powersgd_drops_errors_of_another_world_size_and_keeps_the_rest() -> None:
    averager, parameters, _ = make_power_sgd(PowerSGD(start_step=0))
    averager.average_bucket_(FakeBucket(gradients_of(parameters, 1)))
    larger, _, _ = make_power_sgd(PowerSGD(start_step=0), world_size=3)

    larger.load_state_dict(averager.state_dict())

    found = larger.state_dict()["powersgd"]
    assert (found["step"], found["errors"]) == (1, {})
    assert found["bases"].keys() == {"convolution.weight", "layer.weight"}


def test_powersgd_can_resume_with_another_matrix_rank() -> None:
    averager, parameters, _ = make_power_sgd(PowerSGD(matrix_rank=1, start_step=0))
    averager.average_bucket_(FakeBucket(gradients_of(parameters, 1)))
    wider, parameters, echo = make_power_sgd(PowerSGD(matrix_rank=3, start_step=0))

    wider.load_state_dict(averager.state_dict())
    wider.average_bucket_(FakeBucket(gradients_of(parameters, 2)))

    assert echo.summed[1].numel() == 3 * (16 * 9 + 20)


@pytest.mark.parametrize(("shape", "expected"), [((8,), False), ((2, 2), False), ((100, 100), True), ((0, 100), False)])
def test_only_matrices_that_shrink_are_compressed(shape: tuple[int, ...], expected: bool) -> None:
    assert PowerSGD(matrix_rank=2).is_worthwhile(shape) is expected


# -- local steps ---------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=20), st.integers(1, 200))
def test_cut_keeps_every_tensor_once_in_buckets_of_one_type(sizes: list[tuple[int, bool]], limit: int) -> None:
    tensors = [torch.empty(size, dtype=torch.float64 if is_double else torch.float32) for size, is_double in sizes]

    buckets = cut(tensors, limit)

    assert sorted(id(each) for bucket in buckets for each in bucket) == sorted(map(id, tensors))
    assert all(len({each.dtype for each in bucket}) == 1 for bucket in buckets)
    assert all(len(bucket) == 1 or sum(each.nbytes for each in bucket) <= limit for bucket in buckets)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_outer_step_is_torchs_nesterov_sgd(momentum: float) -> None:
    weight = torch.arange(4.0)
    outer, reference = OuterStep(lr=0.7, momentum=momentum), nn.Parameter(weight.clone())
    optimizer = torch.optim.SGD([reference], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    outer.drop_anchor({"weight": weight})
    average: Callable[[Any], None] = lambda tensors: None  # noqa: E731 - a single rank
    for step in range(3):
        weight.add_(torch.tensor([0.1, -0.2, 0.3, step]))
        reference.grad = reference.detach() - weight
        outer.step({"weight": weight}, average)
        optimizer.step()

        torch.testing.assert_close(weight, reference.detach(), rtol=1e-6, atol=1e-6)
