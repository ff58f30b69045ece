"""Every all-reduce variant passes the contract of strategies, on two real ranks that talk over gloo."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import strategy_contract
from servers import Nursery, TorchRanks
from strategy_contract import NUM_STEPS, Run, StrategyContract

from strata.trainer.strategy import AllReduce, PowerSGD, Strategy

NUM_RANKS = 2
DEADLINE_S = 50.0
EXACT = 1e-6
HALF = 2.0**-10
"""Gradients with eleven binary digits, multiplied by the learning rate."""
COARSE = 2.0**-7


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))))
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    nursery = Nursery(tmp_path_factory.mktemp("ranks"), "strategy_contract", "torch._dynamo", **variables)
    yield nursery
    nursery.close()


class AllReduceContract(StrategyContract):
    bound = EXACT
    """Largest difference to a run without other ranks."""

    @pytest.fixture
    def run(self, nursery: Nursery, tmp_path: Path) -> Run:
        numbers = itertools.count()

        def run_case(case: str, strategy: Strategy) -> list[Any]:
            return TorchRanks(nursery, "strategy_contract").run(
                strategy_contract.rank_main,
                NUM_RANKS,
                deadline_s=DEADLINE_S,
                case=case,
                strategy=pickle.dumps(strategy).hex(),
                bound=self.bound,
                meeting=str(tmp_path / f"meeting-{next(numbers)}"),
            )

        return run_case


class TestSharedMemory(AllReduceContract):
    @pytest.fixture
    def strategy(self) -> Strategy:
        return AllReduce(bucket_mb=0.001)


class TestRing(AllReduceContract):
    @pytest.fixture
    def strategy(self) -> Strategy:
        return AllReduce(algorithm="ring", bucket_mb=0.001)


class TestHalfPrecision(AllReduceContract):
    bound = HALF

    @pytest.fixture
    def strategy(self) -> Strategy:
        return AllReduce(compression="fp16", bucket_mb=0.001)


class TestPowerSGD(AllReduceContract):
    """Its rank is at least that of a gradient of six rows, so the approximation is exact."""

    bound = 10 * EXACT

    @pytest.fixture
    def strategy(self) -> Strategy:
        return AllReduce(compression=PowerSGD(matrix_rank=8, start_step=1, min_ratio=1.0), bucket_mb=0.001)


class TestAuto(AllReduceContract):
    @pytest.fixture
    def strategy(self) -> Strategy:
        return AllReduce(algorithm="auto")


class TestLocalSGD(AllReduceContract):
    @pytest.fixture
    def strategy(self) -> Strategy:
        return AllReduce(local_steps=2)


class TestLocalSGDWithBrainFloats(AllReduceContract):
    bound = COARSE

    @pytest.fixture
    def strategy(self) -> Strategy:
        return AllReduce(local_steps=2, compression="bf16")


class TestDiLoCo(AllReduceContract):
    """The first outer step moves by (1 + momentum) × outer_lr = 1, so ranks with the same batches end like one rank."""

    @pytest.fixture
    def strategy(self) -> Strategy:
        return AllReduce(local_steps=NUM_STEPS, outer_lr=1 / 1.5, outer_momentum=0.5)
