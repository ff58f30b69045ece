"""Filters: the three ways users write them, their literals in the column's type, and what statistics decide.

Pure: expressions and bounds in, decisions out. Pruning may only remove what evaluating the filter on the rows would
remove. Never reads a file: `formats` and `plan` call it.
"""
