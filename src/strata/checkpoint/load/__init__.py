"""From a checkpoint back to tensors: whole, in slices or memory-mapped.

Every byte is verified before it is used, except those that are memory-mapped. May import `group` and `format`. Writes
nothing but `statistics.json`.
"""
