"""The cost model and the bytes per link: arithmetic on small and large clusters."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.errors import InvalidArgument
from strata.trainer.strategy import table
from strata.trainer.strategy.cost import MIN_GAIN, RING, Choice, Link, Links, candidates, decide, predict_s
from strata.trainer.strategy.links import fit_link
from strata.trainer.strategy.topology import Topology
from strata.trainer.strategy.traffic import messages, sent_by_node, sent_by_rank

PAGE = Path(__file__).parents[2] / "docs" / "all-reduce.md"

topologies = st.builds(
    lambda nodes, on_node: Topology(world_size=nodes * on_node, ranks_per_node=on_node),
    st.integers(1, 6),
    st.integers(1, 6),
)
a_link = st.builds(
    lambda latency_s, bytes_per_s: Link(latency_s=latency_s, bytes_per_s=bytes_per_s),
    st.floats(0, 1e-2),
    st.floats(1e6, 1e11),
)
three_links = st.builds(lambda intra, inter, shared: Links(intra=intra, inter=inter, shared=shared), *[a_link] * 3)
sizes = st.floats(1, 1e9)


def two_d(group_size: int) -> Choice:
    return Choice(algorithm="2d", group_size=group_size)


def group(group_size: int) -> Choice:
    return Choice(algorithm="group", group_size=group_size)


# -- bytes ---------------------------------------------------------------------------------------------------------


@given(topologies, sizes)
def test_ring_and_2d_send_the_least_that_an_all_reduce_can(topology: Topology, num_bytes: float) -> None:
    least_bytes = 2 * (topology.world_size - 1) * num_bytes
    for choice in candidates(topology):
        total = sum(message.num_bytes for message in messages(choice, num_bytes, topology))
        if choice.algorithm == "group":
            assert total >= least_bytes * (1 - 1e-9)
        else:
            assert math.isclose(total, least_bytes, abs_tol=1e-6)


@given(topologies)
def test_every_rank_hears_from_every_other_rank(topology: Topology) -> None:
    """Follow the messages forward from rank 0 and backward to it: both ways reach all ranks."""
    for choice in candidates(topology):
        pairs = [(message.source, message.target) for message in messages(choice, 1.0, topology)]
        for ways in (pairs, [(target, source) for source, target in pairs]):
            reached, waiting = {0}, [0]
            while waiting:
                here = waiting.pop()
                found = {target for source, target in ways if source == here} - reached
                reached |= found
                waiting += found
            assert reached == set(range(topology.world_size))


@given(topologies, sizes)
def test_the_bytes_of_nodes_are_those_of_their_ranks(topology: Topology, num_bytes: float) -> None:
    for choice in candidates(topology):
        ranks, nodes = sent_by_rank(choice, num_bytes, topology), sent_by_node(choice, num_bytes, topology)
        for part in ("intra_bytes", "inter_bytes"):
            assert math.isclose(
                sum(getattr(each, part) for each in ranks), sum(getattr(each, part) for each in nodes), abs_tol=1e-6
            )
        assert topology.num_nodes > 1 or all(each.inter_bytes == 0 for each in nodes)
        assert topology.ranks_per_node > 1 or all(each.intra_bytes == 0 for each in nodes)


def test_with_rows_as_nodes_group_and_2d_send_as_much_between_nodes_but_from_one_or_all_ranks() -> None:
    topology = Topology(world_size=32, ranks_per_node=8)
    by_group, by_2d = (sent_by_rank(choice, 8e6, topology) for choice in (group(8), two_d(8)))

    assert [each.inter_bytes for each in by_group[:9]] == [12e6, *[0.0] * 7, 12e6]
    assert {each.inter_bytes for each in by_2d} == {1.5e6}
    assert sent_by_node(RING, 8e6, topology)[0].inter_bytes == 2 * 31 / 32 * 8e6


@given(st.integers(2, 9), st.integers(2, 9))
def test_the_formulas_of_the_page_hold_when_rows_are_nodes(num_nodes: int, on_node: int) -> None:
    n, m, k, size = num_nodes * on_node, num_nodes, on_node, 1e6
    topology = Topology(world_size=n, ranks_per_node=k)
    expected = {
        RING: (2 * (k - 1) * (n - 1) / n, 2 * (n - 1) / n),
        group(k): ((k - 1) * (2 + 1 / k), 2 * (m - 1) / m),
        two_d(k): (2 * (k - 1), 2 * (m - 1) / m),
    }

    for choice, (intra, inter) in expected.items():
        for sent in sent_by_node(choice, size, topology):
            assert (sent.intra_bytes, sent.inter_bytes) == pytest.approx((intra * size, inter * size))


# -- times ---------------------------------------------------------------------------------------------------------


@given(topologies, three_links, sizes)
def test_a_larger_message_never_takes_less_time(topology: Topology, links: Links, num_bytes: float) -> None:
    for choice in candidates(topology):
        assert 0 <= predict_s(choice, num_bytes, topology, links) <= predict_s(choice, 2 * num_bytes, topology, links)


@given(topologies, three_links, sizes)
def test_the_decision_is_the_ring_or_clearly_faster(topology: Topology, links: Links, num_bytes: float) -> None:
    decision = decide(num_bytes, topology, links)
    chosen_s, ring_s = (predict_s(choice, num_bytes, topology, links) for choice in (decision.choice, RING))

    assert decision.choice == RING or chosen_s < (1 - MIN_GAIN) * ring_s
    assert str(decision.choice) in decision.reason


@pytest.mark.parametrize("world_size", [2, 3, 7, 997])
def test_a_prime_number_of_ranks_leaves_only_the_ring(world_size: int) -> None:
    topology = Topology(world_size=world_size)

    assert list(candidates(topology)) == [RING]
    assert "no other fits" in decide(1e6, topology, Links.uniform(Link(latency_s=1e-5, bytes_per_s=1e9))).reason


def test_times_are_those_of_the_alpha_beta_model() -> None:
    link = Link(latency_s=1e-3, bytes_per_s=1e6)
    flat = Topology(world_size=6)
    links = Links.uniform(link)

    assert predict_s(RING, 6e6, flat, links) == pytest.approx(2 * 5 * (1e-3 + 1.0))
    rows_s, columns_s = 2 * 2 * (1e-3 + 2.0), 2 * 1 * (1e-3 + 1.0)
    assert predict_s(two_d(3), 6e6, flat, links) == pytest.approx(rows_s + columns_s)
    leaders_s, broadcast_s = 2 * 1 * (1e-3 + 3.0), 2 * (1e-3 + 6.0)
    assert predict_s(group(3), 6e6, flat, links) == pytest.approx(rows_s + leaders_s + broadcast_s)


def test_each_algorithm_has_links_on_which_it_wins() -> None:
    fast, slow = Link(latency_s=1e-6, bytes_per_s=1e10), Link(latency_s=1e-4, bytes_per_s=1e9)
    topology = Topology(world_size=32, ranks_per_node=8)
    parallel = Links(intra=fast, inter=slow, shared=slow)  # every rank has a network card of its own
    congested = Links(intra=fast, inter=slow, shared=Link(latency_s=1e-3, bytes_per_s=1e7))

    assert decide(1e8, topology, parallel).choice == two_d(8)
    assert decide(1e5, topology, congested).choice == group(8)
    assert decide(1e9, Topology(world_size=4), Links.uniform(slow)).choice == RING


@given(three_links, st.integers(2, 16))
def test_more_flows_of_a_node_have_the_measured_ends(links: Links, ranks_per_node: int) -> None:
    assert links.across(1, ranks_per_node) == links.inter
    shared = links.across(ranks_per_node, ranks_per_node)
    assert shared.bytes_per_s == links.shared.bytes_per_s
    assert shared.latency_s == pytest.approx(links.shared.latency_s)


@given(st.integers(2, 64), st.floats(1e-6, 1e-3), st.floats(1e6, 1e10))
def test_a_link_is_found_again_from_the_times_it_predicts(num_ranks: int, latency_s: float, bytes_per_s: float) -> None:
    link, topology = Link(latency_s=latency_s, bytes_per_s=bytes_per_s), Topology(world_size=num_ranks)
    small_s, large_s = (predict_s(RING, size, topology, Links.uniform(link)) for size in (0, 1 << 24))

    found = fit_link(num_ranks, small_s, 1 << 24, large_s)

    assert found.latency_s == pytest.approx(latency_s)
    assert found.bytes_per_s == pytest.approx(bytes_per_s)


def test_noise_that_makes_the_large_message_faster_still_gives_a_link() -> None:
    assert fit_link(4, 0.02, 1_000, 0.01).bytes_per_s > 0


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0)])
def test_an_impossible_link_is_refused(latency_s: float, bytes_per_s: float) -> None:
    with pytest.raises(InvalidArgument, match="a latency of at least 0 and a bandwidth above 0"):
        Link(latency_s=latency_s, bytes_per_s=bytes_per_s)


# -- documentation -------------------------------------------------------------------------------------------------


def test_the_page_shows_the_table_that_the_model_prints() -> None:
    assert "\n".join(table.lines()) in PAGE.read_text(encoding="utf-8")
