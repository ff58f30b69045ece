"""Bytes and states that an earlier version of Strata wrote; this one must read them."""

from __future__ import annotations

import base64
import struct

import pyarrow as pa
import pytest

from strata.data.order.map_rows import MapRows
from strata.data.plan import cache as survey_cache
from strata.data.plan import survey as surveys
from strata.data.plan.survey import Survey, SurveyedFile

SURVEY = (
    "c3RyYXRhIHN1cnZleSA0CrSUYNBDi9Xt7jSdQc5HksYotS/9YBECdQoAptA6M3Brswb8/7kuiCmaQAcwL0tJgk/O80JCK9svtm2p"
    "0FZkyRvg9GiNnUhlzJyQmEUxs7Vbpi8AIwAvAMchR6Y8efq17/s+CI/DZEUZMlinMelGNxRWPxuT2u1SWP1cmjlc0nZXVhdHYxER"
    "PyiLU2+9l7Sh/0BynKL9Av8UwUly5Hil8sOX/nj8KUvwfxIHePAxeUcJhARp8uT9e2MeKDATm5wVHU4yADlABPIir5wXDIA7OIw2"
    "VI3nt2xyft9qZTBj0gVZydkpgDrcpNbWDdaFMBYDi+a5Gr3T4mQu4KRWdlkq9KCqzAIVRNKQoysgwKIZIvNQZLqXkEMW+wASIkeE"
    "gQRJCaDQ2zP83cLPLj+GAyNP1YJt7PBjOqHPzBTxfOUIFycwaiv4Dvwr3rbcT2at2YZFCcCE1ZbbW1xS4Q0vsx3Mm7KZe8IU0qVV"
    "oA=="
)
MAP_STATE = {"version": 1, "kind": "map", "num_rows": 50, "seed": 9, "shuffle": True, "epoch": 2, "position": 12}


def packed(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def test_a_survey_of_an_earlier_version_is_read() -> None:
    x, day = (bytes(pa.schema([field]).serialize()) for field in (("x", pa.int64()), ("day", pa.int32())))
    file = SurveyedFile(
        path="/data/a.parquet",
        name="a.parquet",
        size_bytes=300,
        mtime_ns=7,
        partition=(("day", "1"),),
        version="v1",
        schema=0,
        index=packed(0, 1),
        rows=packed(10, 20),
        first_row=packed(0, 10),
        offset=packed(4, 90),
        num_bytes=packed(80, 160),
        null_counts=packed(0),
        passing=packed(3, 20),
        num_counted=1,
        parts=packed(0, 2, 5),
        num_pages=4,
        num_pages_skipped=2,
        bytes_skipped=60,
    )
    found = surveys.from_bytes(base64.b64decode(SURVEY))

    assert found.files == (file,)
    assert list(map(surveys.schema_of, found.schemas)) == [surveys.schema_of(x)]
    assert surveys.schema_of(found.partition_schema) == surveys.schema_of(day)
    assert found == Survey(
        format="parquet",
        is_typed=True,
        is_keyed=False,
        schemas=found.schemas,
        partition_schema=found.partition_schema,
        files=(file,),
        num_files=3,
        num_files_pruned=1,
        condition_text="x > 1",
        condition_schema=found.condition_schema,
        skipped=(("b.parquet", "damaged"),),
        num_files_skipped=1,
    )


def test_the_key_of_a_cached_survey_is_unchanged() -> None:
    key = survey_cache.key(
        source_kind="local",
        roots=["/data"],
        format_name="parquet",
        columns=["x"],
        condition_text="x > 1",
        unit_bytes=1024,
    )
    assert key == "528e2b3ea21a1c41a4444ef772c2ece1"


@pytest.mark.parametrize(
    ("rank", "world_size", "expected"),
    [
        (0, 2, [([13, 28, 8], 11066589371066131942), ([9, 26, 44], 13786270813705845240)]),
        (1, 2, [([14, 10, 32], 9558264130497682911), ([46, 33, 7], 12210672306198745272)]),
        (0, 1, [([13, 28, 8], 11066589371066131942), ([14, 10, 32], 9558264130497682911)]),
    ],
)
def test_a_state_of_a_map_style_loader_of_an_earlier_version_resumes_at_the_same_rows(
    rank: int, world_size: int, expected: list[tuple[list[int], int]]
) -> None:
    rows = MapRows(50, rank=rank, world_size=world_size, batch_size=3, shuffle=True, shuffle_seed=9)
    rows.load_state_dict(MAP_STATE)
    rows.begin()
    shares = rows.shares()
    assert [(share.rows, share.seed) for share in (next(shares), next(shares))] == expected
