"""Filters in their three forms, their trees and texts, and their rest once some columns are known."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data.filter import expression as expressions
from strata.data.filter import filter as filters
from strata.data.filter.expression import Presence
from strata.errors import InvalidArgument, SchemaMismatch

TABLE = pa.table(
    {
        "x": pa.array([1, 3, 5, None, 7], pa.int32()),
        "country": ["de", "fr", "uk", "de", None],
        "y": [0.5, None, 2.5, 3.5, 4.5],
        "day": pa.array([dt.date(2024, 1, day) for day in range(1, 6)]),
        "at": pa.array([f"2024-01-01T0{hour}:00:00" for hour in range(5)]).cast(pa.timestamp("ns")),
        "flag": [True, False, None, True, False],
        "s": pa.array([{"t": 1}, {"t": 2}, None, {"t": None}, {"t": 5}]),
        "a b": [1, 2, 3, 4, 5],
    }
)


def passing(condition: filters.Condition) -> list[int]:
    """Return the indexes of the rows that pass."""
    found = expressions.mask(TABLE, condition.expression).to_pylist()
    assert expressions.count(TABLE, condition.expression) == found.count(True)
    return [number for number, value in enumerate(found) if value]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("x > 3", [2, 4]),
        ("x >= 3 and country in ('fr', 'uk')", [1, 2]),
        ("x == 1 or y > 3", [0, 3, 4]),
        ("not x > 3", [0, 1]),
        ("1 < x <= 5", [1, 2]),
        ("x is None", [3]),
        ("x IS NOT NULL AND NOT (y IS NULL)", [0, 2, 4]),
        ("country not in ['de']", [1, 2, 4]),
        ("country in ('de')", [0, 3]),
        ("country in {'de', None}", [0, 3, 4]),
        ("x == -1 or x == +7", [4]),
        ("day >= date('2024-01-04')", [3, 4]),
        ("at < timestamp('2024-01-01T02:00:00')", [0, 1]),
        ("flag", [0, 3]),
        ("not flag and x > 1", [1, 4]),
        ("s.t > 1", [1, 4]),
        ("col('a b') > 3", [3, 4]),
        ("x < y", []),
        ("country == 'a AND b' OR TRUE == flag", [0, 3]),
        ("x > 3\n  and y > 3", [4]),
        ("y > decimal('2.5')", [3, 4]),
    ],
)
def test_a_filter_written_as_text_selects_its_rows(text: str, rows: list[int]) -> None:
    condition = filters.parse(text)
    assert passing(condition) == rows
    again = filters.parse(condition.text)
    assert (again.text, passing(again)) == (condition.text, rows)


def test_three_ways_to_write_a_filter_give_one_text() -> None:
    ways = [
        "x > 3 and country in ('fr', 'de')",
        [("x", ">", 3), ("country", "in", ["de", "fr"])],
        (pc.field("x") > 3) & pc.field("country").isin(["fr", "de"]),
    ]
    found = [filters.parse(way) for way in ways]
    assert {condition.text for condition in found} == {'x > 3 and country in ("de", "fr")'}
    assert {condition.columns for condition in found} == {("country", "x")}


def test_lists_of_tuples_are_an_or_of_ands() -> None:
    condition = filters.parse([[("x", "=", 1), ("country", "!=", "fr")], [("country", "not in", {"de", "fr"})]])
    assert condition.text == '(x == 1 and country != "fr") or country not in ("de", "fr")'
    assert passing(condition) == [0, 2, 4]
    assert passing(filters.parse(("x", "<=", 1))) == [0]


@pytest.mark.parametrize(
    ("expression", "columns", "text"),
    [
        (pc.field("s", "t") > 1, ("s",), "s.t > 1"),
        (pc.field("a") < pc.field("b"), ("a", "b"), "a < b"),
        (~(pc.field("a").is_null() | ~pc.field("b").is_valid()), ("a", "b"), "not (a is None or b is None)"),
        (pc.match_substring(pc.field("c"), "x"), ("c",), 'match_substring(c, pattern="x", ignore_case=False)'),
        (pc.field("a").is_null(nan_is_null=True), ("a",), "is_null(a, nan_is_null=True)"),
        (pc.field("import") == 1, ("import",), 'col("import") == 1'),
        (pc.add(pc.field("a"), pc.field("d")) == 2.5, ("a", "d"), "add(a, d) == 2.5"),
        ((pc.field("a") > 1) == pc.field("b"), ("a", "b"), "(a > 1) == b"),
        (
            pc.field("t") > pa.scalar(1_000_000_001, pa.timestamp("ns", "UTC")),
            ("t",),
            't > timestamp("1970-01-01T00:00:01.000000001Z")',
        ),
    ],
)
def test_columns_and_text_of_any_pyarrow_expression_are_known(
    expression: pc.Expression, columns: tuple[str, ...], text: str
) -> None:
    condition = filters.parse(expression)
    assert (condition.columns, condition.text) == (columns, text)
    assert expressions.encode(expressions.decode(expression)).equals(expression)


@pytest.mark.parametrize(
    ("filter_", "cure"),
    [
        ("x = 3", "write =="),
        ("x <> 3", "write !="),
        ("x && y", "`and`"),
        ("(x > 3) & (y < 2)", "`and`"),
        ("x == None", "x is None"),
        ("x is 3", "x == 3"),
        ("a b > 3", "col('a name')"),
        ("`a b` > 3", "col('a name')"),
        ("x BETWEEN 1 AND 2", "1 <= x <= 5"),
        ("country LIKE 'd%'", "match_like"),
        ("x in ()", "add values"),
        ("x in (1, 'a')", "one type"),
        ("x in (1, y)", "in quotes"),
        ("'a' in tags", "pyarrow expression"),
        ("x + 1 > 3", "pyarrow expression"),
        ("__import__('os').system('true')", "pyarrow expression"),
        ("x.__class__() == 1", "pyarrow expression"),
        ("date('today') < day", "date('2024-01-01')"),
        ("day > date(2024)", "date('2024-01-01')"),
        ("x >", "consists of"),
        ("3", "consists of"),
        ("1 < 2", "uses no column"),
        ("", "omit it"),
        (f"x > {10**80}", "is not supported"),
        (f"x in (1, {10**80})", "do not fit one type"),
        ("(" * 400 + "x" + ")" * 400, "cannot be parsed"),
        ("not " * 3000 + "x", "too deep"),
        ("x > 1 or " * 20_000 + "x > 1", "characters"),
        ([], "omit it"),
        ([[]], "lists of tuples"),
        ([("x", "~", 3)], "use one of"),
        ([("x", 3)], "(column, operator, value)"),
        ([("x", "==", None)], "is None"),
        ([("x", "in", "abc")], "list of values"),
        ({"x": 1}, "'x > 3'"),
        (pc.field(0) > 3, "pc.field('x')"),
        (pc.scalar(value=True), "uses no column"),
    ],
)
def test_a_malformed_filter_is_rejected_with_the_correct_form(filter_: object, cure: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        filters.parse(filter_)  # type: ignore[arg-type]
    assert cure in str(caught.value)
    assert caught.value.field == "filters"
    assert len(str(caught.value)) < 700


def test_a_long_list_of_values_has_a_short_text_that_still_tells_lists_apart() -> None:
    texts = {filters.parse(pc.field("x").isin([*range(10_000), last])).text for last in (-1, -2)}
    assert len(texts) == 2
    assert max(map(len, texts)) <= expressions.MAX_TEXT


@pytest.mark.parametrize("kind", [pa.duration("s"), pa.timestamp("s", "Europe/Berlin"), pa.time64("ns")])
def test_times_outside_pythons_range_have_distinct_texts(kind: pa.DataType) -> None:
    greatest = {pa.duration("s"): 2**63 - 1, pa.time64("ns"): 86_399_999_999_999}.get(kind, 253_402_300_799)
    values = pa.array([greatest - 1, greatest]).cast(kind)  # the last moment of year 9999 has no local time in Python
    field = pc.field("x")
    for makes in (
        [field == value for value in values],
        [field.isin(pa.array([value], kind)) for value in values],
        [pc.is_in(field, pa.array([value], kind), skip_nulls=True) for value in values],
    ):
        assert len({filters.parse(made).text for made in makes}) == 2


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (f"x == {2**64 - 1}", [2]),
        (f"x in (0, {2**64 - 1}, {2**64})", [0, 2]),
        (f"x < {2**64}", [0, 1, 2]),
        (f"x > {-(2**70)} and x != {2**63}", [0, 2]),
    ],
)
def test_integers_beyond_int64_are_compared(text: str, rows: list[int]) -> None:
    table = pa.table({"x": pa.array([0, 2**63, 2**64 - 1, None], pa.uint64())})
    found = expressions.mask(table, filters.bind(filters.parse(text), table.schema).expression).to_pylist()
    assert [number for number, value in enumerate(found) if value] == rows


def test_a_long_chain_of_conditions_written_as_text_or_tuples_is_read() -> None:
    assert passing(filters.parse(" or ".join(f"x == {number}" for number in range(2, 500)))) == [1, 2, 4]
    assert passing(filters.parse([("x", "!=", number) for number in range(2, 500)])) == [0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("contry == 'de'", "did you mean 'country'"),
        ("X > 3", "did you mean 'x'"),
        ("country == de", "put text in quotes"),
        ("qqqq > 3", "known names are: x, country"),
        ("country > 3", "country is string"),
        ("at > '2024-01-01'", 'timestamp("2024-01-01T00:00:00")'),
        ("x", "not true or false"),
    ],
)
def test_a_filter_that_does_not_fit_the_columns_is_rejected(text: str, message: str) -> None:
    with pytest.raises(SchemaMismatch) as caught:
        filters.bind(filters.parse(text), TABLE.schema)
    assert message in str(caught.value)


VALUES = st.sampled_from([0, 1, 2, None])
LEAVES = st.one_of(
    st.builds(
        lambda column, operator, value: f"{column} {operator} {value}",
        st.sampled_from(["a", "b"]),
        st.sampled_from(["<", "<=", "==", "!=", ">", ">="]),
        st.integers(-1, 3),
    ),
    st.sampled_from(["a in (0, 2)", "b not in (1,)", "a is None", "b is not None", "a < b", "b in (1, None)"]),
)
CONDITIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda parts: "(" + " and ".join(parts) + ")", st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda parts: "(" + " or ".join(parts) + ")", st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda part: f"(not {part})", inner),
    ),
    max_leaves=6,
)
PAIRS = pa.table({"a": [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, None, None, None, None], "b": [0, 1, 2, None] * 4})


@given(CONDITIONS)
def test_the_text_of_a_filter_means_the_same_filter(text: str) -> None:
    condition = filters.parse(text)
    again = filters.parse(condition.text)
    assert again.text == condition.text
    assert expressions.mask(PAIRS, again.expression) == expressions.mask(PAIRS, condition.expression)


@given(CONDITIONS)
def test_the_rest_of_a_filter_with_known_columns_passes_the_same_rows(text: str) -> None:
    condition = filters.parse(text)
    known = pa.table({"a": pa.array([0, 1, 2, None], pa.int64())})
    tree = expressions.decode(condition.expression)
    for number, left in enumerate(expressions.resolve(tree, known)):
        rows = PAIRS.slice(4 * number, 4)
        expected = expressions.count(rows, condition.expression)
        if left.presence is Presence.SOME:
            assert left.node is not None
            assert expressions.count(rows, expressions.encode(left.node)) == expected
        else:
            assert expected == (0 if left.presence is Presence.NONE else 4)
        assert "a < b" in text or "a" not in left.columns
