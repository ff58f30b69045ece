"""Filters: parsing them, fitting their literals to column types, and deciding them from statistics.

Pure: expressions and bounds in, decisions out. Pruning removes only rows that evaluating the filter would remove. May
import `pyarrow_private`. Never reads a file: `formats` and `plan` call it.
"""
