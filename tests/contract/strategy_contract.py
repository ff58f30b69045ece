"""The contract of `Strategy`. An implementation supplies a fixture `strategy`, and `run` starts its ranks.

The lower part is what the ranks do: it runs in processes of their own, where the strategy arrives as a pickle.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strata.identity import Identity
from strata.trainer.strategy import Bound, Strategy

if TYPE_CHECKING:
    from nursery import Lifeline

Run = Callable[..., list[Any]]
"""`run("case", strategy)`: what each of the ranks has found."""
NUM_STEPS = 3
MICRO_BATCHES = 3


class StrategyContract:
    def test_a_description_survives_a_pickle(self, strategy: Strategy) -> None:
        assert pickle.loads(pickle.dumps(strategy)) == strategy

    def test_a_single_rank_needs_no_process_group(self, strategy: Strategy) -> None:
        module = make_module()
        bound = strategy.bind(module, Identity())
        make_steps(bound, torch.optim.SGD(module.parameters(), lr=0.1), rank=0, steps=range(NUM_STEPS))
        bound.finish()

        assert not dist.is_initialized()
        assert all(parameter.isfinite().all() for parameter in module.parameters())

    def test_all_ranks_start_with_the_parameters_and_buffers_of_rank_0(self, run: Run, strategy: Strategy) -> None:
        own, first, *others = run("starts", strategy)

        assert own["is_own"], "rank 0 keeps its values"
        assert [each["is_equal"] for each in (own, first, *others)] == [True] * (2 + len(others))
        assert not first["is_own"], "the modules of the ranks were different"

    def test_the_bound_module_shares_its_parameters(self, run: Run, strategy: Strategy) -> None:
        assert all(each["are_same"] for each in run("shares", strategy))

    def test_all_ranks_end_with_the_same_weights_and_buffers(self, run: Run, strategy: Strategy) -> None:
        for each in run("ends", strategy):
            assert each["is_equal"]
            assert each["is_trained"]
            assert each["is_replicated"] == each["is_equal_after_each_step"]

    def test_the_mean_over_ranks_is_learned_not_the_sum(self, run: Run, strategy: Strategy) -> None:
        """Ranks with the same batches train like one rank."""
        for each in run("averages", strategy):
            assert each["error"] < each["bound"]

    def test_accumulated_micro_batches_count_like_one_batch(self, run: Run, strategy: Strategy) -> None:
        for each in run("accumulates", strategy):
            assert each["error"] < each["bound"]

    def test_a_resumed_run_continues_with_the_same_bits(self, run: Run, strategy: Strategy) -> None:
        assert [each["is_exact"] for each in run("resumes", strategy)] == [True, True]

    def test_the_state_of_another_strategy_is_no_obstacle(self, run: Run, strategy: Strategy) -> None:
        for each in run("takes_over", strategy):
            assert each["is_equal"]

    def test_finish_twice_changes_nothing(self, run: Run, strategy: Strategy) -> None:
        assert all(each["is_unchanged"] for each in run("finishes_twice", strategy))


# -- on the ranks --------------------------------------------------------------------------------------------------


def rank_main(
    lifeline: Lifeline, *, case: str, strategy: str, bound: float, meeting: str, rank: int, num_ranks: int
) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)
    ranks = Identity(rank=rank, world_size=num_ranks, local_rank=rank, local_world_size=num_ranks)
    found = globals()[case](pickle.loads(bytes.fromhex(strategy)), ranks)
    dist.destroy_process_group()
    lifeline.send(said={**found, "bound": bound})


def make_module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 20), nn.Linear(20, 1))


def rows_of(step: int, rank: int, num_rows: int = 6) -> Tensor:
    return torch.randn(num_rows, 20, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(module: nn.Module, rows: Tensor) -> Tensor:
    return (module(rows) - rows.mean(1, keepdim=True)).square().mean()


def make_steps(bound: Bound, optimizer: torch.optim.Optimizer, *, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(bound.module, rows_of(step, rank)).backward()
        optimizer.step()
        bound.after_step(step + 1)


def values(module: nn.Module) -> Tensor:
    return torch.cat([each.detach().reshape(-1).double() for each in (*module.parameters(), *module.buffers())])


def is_equal_everywhere(tensor: Tensor) -> bool:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return all(torch.equal(each, gathered[0]) for each in gathered)


def starts(strategy: Strategy, ranks: Identity) -> dict[str, Any]:
    module = make_module(seed=ranks.rank)
    module[1].running_mean.fill_(ranks.rank)
    before = values(module)
    strategy.bind(module, ranks)
    return {"is_own": torch.equal(values(module), before), "is_equal": is_equal_everywhere(values(module))}


def shares(strategy: Strategy, ranks: Identity) -> dict[str, Any]:
    module = make_module()
    bound = strategy.bind(module, ranks)
    return {"are_same": {id(p) for p in bound.module.parameters()} == {id(p) for p in module.parameters()}}


def ends(strategy: Strategy, ranks: Identity) -> dict[str, Any]:
    module = make_module()
    before = values(module)
    bound, optimizer = strategy.bind(module, ranks), torch.optim.SGD(module.parameters(), lr=0.1)
    parameters_are_equal = []
    for step in range(NUM_STEPS):
        make_steps(bound, optimizer, rank=ranks.rank, steps=range(step, step + 1))
        parameters = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
        parameters_are_equal.append(is_equal_everywhere(parameters))
    bound.finish()
    return {
        "is_equal": is_equal_everywhere(values(module)),
        "is_trained": not torch.equal(values(module), before),
        "is_replicated": bound.is_replicated,
        "is_equal_after_each_step": all(parameters_are_equal),
    }


def averages(strategy: Strategy, ranks: Identity) -> dict[str, Any]:
    module, alone = make_module(), make_module()
    bound = strategy.bind(module, ranks)
    make_steps(bound, torch.optim.SGD(module.parameters(), lr=0.1), rank=0, steps=range(NUM_STEPS))
    bound.finish()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(alone, rows_of(step, 0)).backward()
        optimizer.step()
    return {"error": (values(module) - values(alone)).abs().max().item()}


def accumulates(strategy: Strategy, ranks: Identity) -> dict[str, Any]:
    """BatchNorm would see smaller batches, so it is left out."""
    found = []
    for num_micro_batches in (1, MICRO_BATCHES):
        module = nn.Sequential(*(layer for layer in make_module() if not isinstance(layer, nn.BatchNorm1d)))
        bound, optimizer = strategy.bind(module, ranks), torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            *parts, last = rows_of(step, ranks.rank).chunk(num_micro_batches)
            for rows in parts:
                with bound.accumulating():
                    (loss_of(bound.module, rows) / num_micro_batches).backward()
            (loss_of(bound.module, last) / num_micro_batches).backward()
            optimizer.step()
            bound.after_step(step + 1)
        bound.finish()
        found.append(values(module))
    return {"error": (found[0] - found[1]).abs().max().item()}


def resumes(strategy: Strategy, ranks: Identity) -> dict[str, Any]:
    module = make_module()
    bound, optimizer = strategy.bind(module, ranks), torch.optim.Adam(module.parameters())
    make_steps(bound, optimizer, rank=ranks.rank, steps=range(NUM_STEPS))
    saved = copy.deepcopy([each.state_dict() for each in (module, optimizer, bound)])
    make_steps(bound, optimizer, rank=ranks.rank, steps=range(NUM_STEPS, 2 * NUM_STEPS))
    expected = values(module)

    module = make_module(seed=1)
    bound, optimizer = strategy.bind(module, ranks), torch.optim.Adam(module.parameters())
    for each, state in zip((module, optimizer, bound), saved, strict=True):
        each.load_state_dict(state)
    make_steps(bound, optimizer, rank=ranks.rank, steps=range(NUM_STEPS, 2 * NUM_STEPS))
    return {"is_exact": torch.equal(values(module), expected)}


def takes_over(strategy: Strategy, ranks: Identity) -> dict[str, Any]:
    module = make_module(seed=ranks.rank)
    bound, optimizer = strategy.bind(module, ranks), torch.optim.SGD(module.parameters(), lr=0.1)
    module.load_state_dict(make_module(seed=7).state_dict())
    bound.load_state_dict({"another": {"step": 3}})
    make_steps(bound, optimizer, rank=ranks.rank, steps=range(NUM_STEPS))
    bound.finish()
    return {"is_equal": is_equal_everywhere(values(module))}


def finishes_twice(strategy: Strategy, ranks: Identity) -> dict[str, Any]:
    module = make_module()
    bound = strategy.bind(module, ranks)
    make_steps(bound, torch.optim.SGD(module.parameters(), lr=0.1), rank=ranks.rank, steps=range(NUM_STEPS))
    bound.finish()
    before = values(module)
    bound.finish()
    return {"is_unchanged": torch.equal(values(module), before)}
