"""From tensors in memory to the files of a checkpoint: staging, deltas, compression, writing.

May import `group`, `format` and the store. Writes files but never commits a checkpoint: that happens in
`group/commit.py`.
"""
