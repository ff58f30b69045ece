"""The saver: the thread or process that writes staged snapshots and commits them.

`client` runs in the training process, `process` is the saver process that outlives it, `protocol` holds the messages
between them, and `executor` runs one job in either. May import `save`, `load`, `group` and `format`. Never puts a
manifest itself: `group/commit.py` does.
"""
