"""From tensors in memory to bytes of a checkpoint: staging copies, deltas, compression, file writing.

Writes files but never publishes a checkpoint: the commit is in `saver/commit.py`.
"""
