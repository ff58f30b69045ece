"""The Parquet format: row groups, footers, statistics and page indexes behind the port in `formats/base.py`.

`format` implements the port; each of the other modules reads one part of a Parquet file. Imports what `formats` may,
and no other format.
"""
