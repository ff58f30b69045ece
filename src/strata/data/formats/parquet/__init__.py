"""Parquet: row groups, footers, statistics and page indexes behind the port of `formats/base.py`.

`format` is the implementation of the port; the other modules read one part of a Parquet file each.
"""
