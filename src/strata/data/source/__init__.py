"""Where files come from: file systems and their options, paths and patterns, listings, Hive partitions.

May import `strata.storage`, `pyarrow_private` and the standard library's I/O. Never parses a file: that is the task of
`formats`.
"""
