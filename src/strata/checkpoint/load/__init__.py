"""From a checkpoint back to tensors: whole, in slices or memory-mapped.

`integrity` defines what an intact checkpoint is, for loads and for `verify`. Every byte is verified before it is used,
except those that are memory-mapped. May import `group`, `format` and the store. Writes nothing but `statistics.json`.
"""
