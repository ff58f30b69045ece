"""All-reduce strategies on 2, 4 and 6 real ranks: equal to plain DDP, exact after a restart, with the bytes predicted.

Ranks run in separate processes that talk over gloo. Nodes are only declared, except in the test that counts bytes,
where each node has a network namespace of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import allreduce_children
import pytest
from network import TUN, Network
from servers import Nursery, TorchRanks

from strata.trainer.strategy.cost import Choice
from strata.trainer.strategy.topology import Topology
from strata.trainer.strategy.traffic import sent_by_node

DEADLINE_S = 50.0
WORLDS = [(2, 2), (4, 2), (6, 3)]
"""Ranks, and those of a node."""
REASSOCIATION = 1e-6
"""Relative error of 32-bit sums in another order, after several steps."""

MODEL_ERROR = 2.0
"""Factor between predicted and measured times that a busy machine may cause; 1.2 on a quiet one."""

Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def ranks_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    variables = {"OMP_NUM_THREADS": "1"}
    modules = ("allreduce_children", "network_children", "torch._dynamo")
    nursery = Nursery(tmp_path_factory.mktemp("ranks"), *modules, **variables)
    yield nursery
    nursery.close()


@pytest.fixture
def run(ranks_nursery: Nursery, tmp_path: Path) -> Run:
    """`run("case", 4, 2)` on four ranks with two per node; returns what each rank found."""
    numbers = itertools.count()

    def run_case(case: str, num_ranks: int, ranks_per_node: int, **arguments: Any) -> list[Any]:
        return TorchRanks(ranks_nursery, "allreduce_children").run(
            allreduce_children.rank_main,
            num_ranks,
            deadline_s=DEADLINE_S,
            case=case,
            meeting=str(tmp_path / f"meeting-{next(numbers)}"),
            ranks_per_node=ranks_per_node,
            **arguments,
        )

    return run_case


# -- equality ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_ranks", "on_node"), WORLDS)
def test_every_algorithm_trains_like_plain_ddp(run: Run, num_ranks: int, on_node: int) -> None:
    for found in run("equality", num_ranks, on_node):
        errors = {algorithm: error for algorithm, (error, _) in found.items()}
        assert errors["ring"] == 0.0 or num_ranks > 2, "the order of a sum of two does not matter"
        assert max(errors.values()) <= REASSOCIATION, errors
        assert all(is_everywhere for _, is_everywhere in found.values())


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4, 6])
def test_ranks_of_one_machine_average_in_shared_memory_like_plain_ddp(run: Run, num_ranks: int) -> None:
    for found in run("memory", num_ranks, num_ranks):
        assert found["choice"] == "memory", "the default on one machine"
        assert found["error"] == 0.0 or num_ranks > 2, "the order of a sum of two does not matter"
        assert found["error"] <= REASSOCIATION
        assert found["is_everywhere"]
        assert found["is_free_of_buckets"], "ranks are added in their order, whatever the buckets"
        assert found["resumes"]
        is_sparse, error = found["sparse"]
        assert is_sparse
        assert max(error, found["unused"]) <= REASSOCIATION


def test_without_memory_on_one_rank_all_ranks_use_the_ring(run: Run) -> None:
    for found in run("no_memory", 2, 2):
        assert found["choice"] == "ring"
        assert "algorithm='memory' needs all ranks on one machine" in found["error"]


def test_when_a_rank_leaves_the_others_end_with_an_error_that_names_it(run: Run) -> None:
    first, _, third = run("rank_lost", 3, 3)
    errors = [first["error"], third["error"]]

    assert any(error.startswith("rank 1 left the all-reduce") for error in errors), errors
    assert all("left the all-reduce" in error for error in errors), "the second may notice that the first has ended"


@pytest.mark.parametrize(("num_ranks", "on_node"), WORLDS)
def test_sixteen_bit_gradients_stay_within_the_bound_of_the_format(run: Run, num_ranks: int, on_node: int) -> None:
    shares = run("compressed", num_ranks, on_node)[0]

    assert len(shares) == 6
    assert {name: share for name, share in shares.items() if not 0 < share <= 1} == {}


@pytest.mark.parametrize(("num_ranks", "on_node"), [(2, 2), (4, 2), pytest.param(6, 3, marks=pytest.mark.slow)])
def test_powersgd_is_exact_for_gradients_of_its_rank(run: Run, num_ranks: int, on_node: int) -> None:
    found = run("power_sgd", num_ranks, on_node)[0]

    assert found.pop("is_compressed")
    for error, is_everywhere in found.values():
        assert error < 1e-5
        assert is_everywhere


@pytest.mark.parametrize(("num_ranks", "on_node"), WORLDS)
def test_local_steps_equal_a_simulation_in_one_process(run: Run, num_ranks: int, on_node: int) -> None:
    found = run("local", num_ranks, on_node)[0]

    assert all(is_everywhere for _, is_everywhere in found.values())
    assert found["local"][0] <= REASSOCIATION
    assert found["diloco"][0] <= REASSOCIATION
    assert 0 < found["outer one"][0] < 2**-8, "only the way since the last average is rounded to bf16"


@pytest.mark.parametrize(("num_ranks", "on_node"), [(2, 2), (4, 2), pytest.param(6, 3, marks=pytest.mark.slow)])
def test_sparse_gradients_are_averaged_and_stay_sparse(run: Run, num_ranks: int, on_node: int) -> None:
    for found in run("sparse", num_ranks, on_node):
        assert all(is_sparse and error <= REASSOCIATION for is_sparse, error in found.values()), found


def test_unused_and_frozen_parameters_are_left_alone(run: Run) -> None:
    found = run("unused", 4, 2)[0]

    assert found.pop("local keeps unused weights")
    assert found.pop("beside a lane") < 2**-8, "other buckets, so another order of sums in bf16"
    assert max(found.values()) <= REASSOCIATION, found


# -- exactness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_ranks", "on_node"), [(4, 2), pytest.param(6, 3, marks=pytest.mark.slow)])
def test_a_resumed_run_ends_with_identical_weights(run: Run, num_ranks: int, on_node: int) -> None:
    for found in run("resume", num_ranks, on_node):
        assert found == dict.fromkeys(found, True)


# -- errors --------------------------------------------------------------------------------------------------------


def test_bind_refuses_what_cannot_work_and_names_the_cure(run: Run) -> None:
    found = run("refusals", 6, 3)[1]

    assert found["group_size"] == (
        "group_size=4 does not divide the world size, 6; use 2 or 3, or leave group_size out, or change the number of "
        "workers"
    )
    assert "torch's process group has rank 1 of 6, but `ranks` is rank 2 of 6" in found["ranks"]
    assert "the module of rank 1 has other parameters than that of rank 0" in found["module"]
    assert "pass `module.module`" in found["wrapped"]


def test_both_kinds_of_lanes_average_and_an_error_in_a_lane_ends_the_backward_pass(run: Run) -> None:
    for found in run("overlap", 2, 2):
        assert found["ThreadLane"] == found["StreamLane"] == [0.5] * 8
        assert "OSError: the cable is cut" in found["error"]


# -- links and bytes -----------------------------------------------------------------------------------------------


def test_all_ranks_measure_the_same_links_and_choose_the_same_algorithm(run: Run) -> None:
    found = run("measuring", 4, 2)

    assert len({tuple(each["figures"]) for each in found}) == 1
    assert all(figure > 0 for figure in found[0]["figures"])
    assert len({(each["choice"], each["reason"]) for each in found}) == 1
    assert found[0]["reason"].startswith("predicted for ")
    assert all(each["is_same_group"] for each in found)


NUM_BYTES = 6_000_000
"""Divides evenly by every grid below; large enough for several segments of gloo."""
REPEATS = 1
HEADERS_INTER = 0.08
"""Share of TCP and IP headers and acknowledgements: about 52 bytes for each packet of 1,448, and as much back."""
HEADERS_INTRA = 0.02
"""The same for packets of up to 64 KB."""
HANDSHAKE_BYTES = 20_000
"""Barriers and preambles of gloo around the measurement."""


@pytest.fixture
def run_on_nodes(ranks_nursery: Nursery, tmp_path: Path, requires_service: Callable[..., Path]) -> Run:
    """`run_on_nodes("case", 3, 2)` on three nodes of two ranks, each with a network namespace of its own."""
    requires_service("ip")
    requires_service(TUN, "the kernel needs CONFIG_TUN, and a container --device /dev/net/tun")

    def run_case(case: str, num_nodes: int, on_node: int, delay_s: float = 0.0, **arguments: Any) -> list[Any]:
        names = [f"node-{number}" for number in range(num_nodes)]
        network = Network(ranks_nursery, *names)
        for one, other in itertools.combinations(names, 2):
            network.disturb(one, other, delay_s=delay_s, jitter_s=0.0, loss=0.0)
        try:
            children = [
                network.nodes[names[rank // on_node]].fork(
                    "allreduce_children:rank_main",
                    case=case,
                    meeting=str(tmp_path / "meeting"),
                    rank=rank,
                    num_ranks=num_nodes * on_node,
                    ranks_per_node=on_node,
                    interface="strata0",
                    **arguments,
                )
                for rank in range(num_nodes * on_node)
            ]
            return [child.receive(DEADLINE_S)["said"] for child in children]
        finally:
            ranks_nursery.bury()

    return run_case


@pytest.mark.parametrize(
    ("num_nodes", "on_node"),
    [(2, 2), *(pytest.param(*world, marks=pytest.mark.slow) for world in [(3, 2), (2, 3), (6, 1)])],
)
def test_the_bytes_on_real_links_are_those_of_the_formula(run_on_nodes: Run, num_nodes: int, on_node: int) -> None:
    topology = Topology(world_size=num_nodes * on_node, ranks_per_node=on_node)
    size = 3 if on_node == 1 else on_node
    choices = [Choice(algorithm="ring"), *(Choice(algorithm=name, group_size=size) for name in ("group", "2d"))]
    found = run_on_nodes(
        "traffic",
        num_nodes,
        on_node,
        num_bytes=NUM_BYTES,
        repeats=REPEATS,
        choices=[[choice.algorithm, choice.group_size] for choice in choices],
    )

    for choice in choices:
        for node, expected in enumerate(sent_by_node(choice, NUM_BYTES, topology)):
            intra, inter = found[node * on_node][f"{choice.algorithm} {choice.group_size}"]
            _assert_within(intra, expected.intra_bytes, HEADERS_INTRA)
            _assert_within(inter, expected.inter_bytes, HEADERS_INTER)


def _assert_within(found: float, expected: float, headers: float) -> None:
    assert expected <= found <= expected * (1 + headers) + HANDSHAKE_BYTES


def test_with_slow_links_between_nodes_auto_leaves_the_ring_and_is_faster(run_on_nodes: Run) -> None:
    """Two nodes of three ranks, ten milliseconds apart: a ring of six passes the slow links ten times."""
    found = run_on_nodes("slow_links", 2, 3, delay_s=0.01)[0]
    (chosen_s, predicted_s), (ring_s, predicted_ring_s) = found["chosen"], found["ring"]

    assert found["choice"] in ("group", "2d"), found["reason"]
    assert chosen_s < ring_s / 2, found
    assert 1 / MODEL_ERROR < chosen_s / predicted_s < MODEL_ERROR, found
    assert 1 / MODEL_ERROR < ring_s / predicted_ring_s < MODEL_ERROR, found
