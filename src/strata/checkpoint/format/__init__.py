"""The checkpoint format: manifest, parts of ranks and their merge, byte layout, nested state as a tree, shards, dtypes.

Pure functions and data types: no storage, no threads, no clock. Imports nothing of `strata` but `errors`; never imports
`save`, `load`, `saver` or `group`. Everything read from storage is checked here before it is used.
"""
