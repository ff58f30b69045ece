"""What a checkpoint consists of: manifest, parts, byte layout, nested state as a tree, shards, dtypes.

Pure: no storage, no threads, no clock. Never imports `save`, `load` or `saver`.
"""
