"""Unreadable files never abort the process, and the message states the problem."""

from __future__ import annotations

import base64
import decimal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.orc as paorc
import pyarrow.parquet as pq
import pytest

from strata.data import StructuredDataset
from strata.errors import DataFileInvalid

encryption = pytest.importorskip("pyarrow.parquet.encryption")


class _Keys(encryption.KmsClient):  # type: ignore[misc,name-defined]
    def __init__(self, _: object) -> None:
        super().__init__()

    def wrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64encode(key)

    def unwrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64decode(key)


def write_encrypted(path: Path, columns: list[str]) -> None:
    table = pa.table({name: range(100) for name in "abc"})
    factory = encryption.CryptoFactory(_Keys)
    config = encryption.EncryptionConfiguration(
        footer_key="footer", column_keys={"key": columns}, plaintext_footer=True, double_wrapping=False
    )
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), config)
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table, row_group_size=25)


def in_child(script: str, *arguments: object) -> str:
    """Return the output of a script that must run to its end."""
    made = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, timeout=100, check=False
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return made.stdout


READ_PARTLY = """
import sys
from strata.data import StructuredDataset
from strata.errors import DataFileInvalid
for columns in (None, ["a", "b"], ["b"], ["a", "c"]):
    for filters in (None, "a >= 50"):
        try:
            loader, _ = StructuredDataset.create_dataloader(
                sys.argv[1], columns=columns, filters=filters, output_format="arrow", cache=False
            )
            print(sum(batch.num_rows for batch in loader))
        except DataFileInvalid as error:
            print(error)
"""


@pytest.mark.parametrize("encrypted", [["b"], ["b", "a"]])
def test_columns_that_are_not_encrypted_are_read_and_the_others_named(tmp_path: Path, encrypted: list[str]) -> None:
    write_encrypted(tmp_path / "a.parquet", encrypted)
    lines = in_child(READ_PARTLY, tmp_path / "a.parquet").splitlines()
    assert all("'b'" in line and "encrypted" in line and "columns=" in line for line in lines[:6])
    if "a" in encrypted:
        assert all("'a'" in line for line in lines[6:])
    elif int(pa.__version__.partition(".")[0]) >= 26:
        assert lines[6:] == ["100", "50"]
    else:
        assert all("does not support: Cannot decrypt ColumnMetadata" in line for line in lines[6:])


def test_a_filter_on_an_encrypted_column_names_it(tmp_path: Path) -> None:
    write_encrypted(tmp_path / "a.parquet", ["b"])
    with pytest.raises(DataFileInvalid, match="encrypted columns \\('b'\\)"):
        StructuredDataset.create_dataloader(str(tmp_path / "a.parquet"), columns=["a"], filters="b > 3", cache=False)


MUTATE = """
import random, sys
from pathlib import Path
import pyarrow as pa, pyarrow.fs as pafs
from strata.data.filter import expression as expressions
from strata.data.filter import filter as filters
from strata.data.source.source import DataFile
from strata.data.formats.parquet.format import ParquetFormat
from strata.data.source.source import Source
from strata.errors import StrataError

path, form, source = Path(sys.argv[1]), ParquetFormat(), Source(pafs.LocalFileSystem(), is_local=True)
whole = path.read_bytes()
size = int.from_bytes(whole[-8:-4], "little")
start, footer = len(whole) - 8 - size, whole[-8 - size : -8]
condition = expressions.decode(filters.parse("a > 10 and b < '5' and c < 3.0 and h > 3").expression)


def mutated(seed):
    random_, made = random.Random(seed), bytearray(footer)
    for _ in range(random_.choice([1, 1, 1, 2, 4])):
        at, how = random_.randrange(len(made)), random_.random()
        if how < 0.5:
            made[at] ^= 1 << random_.randrange(8)
        elif how < 0.7:
            made[at] = random_.randrange(256)
        elif how < 0.85:
            del made[at : at + random_.randrange(1, 9)]
        else:
            made[at:at] = random_.randbytes(random_.randrange(1, 9))
    return whole[:start] + bytes(made) + len(made).to_bytes(4, "little") + b"PAR1"


def read(file):
    (facts,) = form.inspect_all(source, [file], columns=None, with_nulls=[True])
    if isinstance(facts, Exception):
        return
    used = [name for name in ("a", "b", "c", "h") if name in facts.schema.names]
    if len(used) == 4 and len(set(facts.schema.names)) == len(facts.schema.names):
        form.presence(source, file, facts, condition, pa.schema([facts.schema.field(name) for name in used]))
    reader = form.open(source, file, facts.schema, facts.version)
    try:
        for unit in facts.units[:2]:
            if len(set(facts.schema.names)) == len(facts.schema.names) and unit.num_rows < 1 << 20:
                reader.read(unit, facts.schema.names)
    finally:
        reader.close()


for seed in range(int(sys.argv[2])):
    path.write_bytes(data := mutated(seed))
    try:
        read(DataFile(str(path), path.name, len(data), seed))
    except StrataError:
        pass
print("all read or refused")
"""


def test_no_damaged_parquet_footer_aborts_the_process(tmp_path: Path) -> None:
    pq.write_table(
        pa.table(
            {
                "a": range(100),
                "b": [str(number) for number in range(100)],
                "c": [number / 2 for number in range(100)],
                "d": [number % 2 == 0 for number in range(100)],
                "e": pa.array(range(100), pa.timestamp("us")),
                "f": [[1, 2]] * 100,
                "g": pa.array([b"ab"] * 100, pa.binary(2)),
                "h": pa.array([decimal.Decimal(number) for number in range(100)], pa.decimal128(20, 2)),
            }
        ),
        tmp_path / "a.parquet",
        row_group_size=50,
        write_page_index=True,
    )
    assert in_child(MUTATE, tmp_path / "a.parquet", 2500) == "all read or refused\n"


def test_an_intact_file_that_pyarrow_cannot_decode_is_not_reported_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [1, 2, 3]}), path, compression="none", use_dictionary=False)
    names_codec = b"\x19\x18\x01x\x15"  # the path of the column, and then the codec of its pages
    path.write_bytes(path.read_bytes().replace(names_codec + b"\x00", names_codec + b"\x06"))
    loader, _ = StructuredDataset.create_dataloader(str(path), output_format="arrow", cache=False)
    with pytest.raises(DataFileInvalid, match=r"intact.*LZO compression.*zstd") as caught:
        list(loader)
    assert "damaged" not in str(caught.value)
    assert "row group 0" in str(caught.value)


def test_an_orc_file_with_an_unknown_codec_is_not_reported_as_truncated(tmp_path: Path) -> None:
    path = tmp_path / "a.orc"
    paorc.write_table(pa.table({"x": [1, 2, 3]}), path, compression="zlib")
    data = bytearray(path.read_bytes())
    postscript = len(data) - 1 - data[-1]
    at = data.index(b"\x10\x01", postscript)  # field 2, compression: zlib
    data[at + 1] = 6
    path.write_bytes(data)
    with pytest.raises(DataFileInvalid, match=r"intact.*brotli.*zstd"):
        StructuredDataset.create_dataloader(str(path), format="orc", cache=False)


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_damage_found_by_a_decode_worker_is_located(tmp_path: Path, worker_type: Any) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": range(4_000)}), path, row_group_size=1_000, compression="snappy")
    start = pq.read_metadata(path).row_group(2).column(0).data_page_offset
    loader, _ = StructuredDataset.create_dataloader(
        str(path), output_format="arrow", worker_type=worker_type, num_workers=1, cache=False
    )
    with path.open("r+b") as damaged:
        damaged.seek(start + 50)
        damaged.write(b"\xff" * 1_000)
    with pytest.raises(DataFileInvalid, match="row group 2, which begins with row 2000") as caught:
        list(loader)
    assert (caught.value.path, caught.value.row_group) == (str(path), 2)
