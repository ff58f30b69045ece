"""The saver: the thread or the process that writes staged snapshots, and the one place where a commit happens.

`client` runs in the training process, `process` is the saver process that outlives it, `protocol` the messages between
them.
"""
