"""The dashboard: what a run and its checkpoints look like, over HTTP.

`explorer/` reads checkpoints and needs no coordinator. May import every layer below; only `cli` imports it.
"""
