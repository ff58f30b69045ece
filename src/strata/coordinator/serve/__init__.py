"""The running service: sessions, admission, the engine that orders calls and commits them, leadership, metrics.

Protobuf types stop here (`wire`) and in `client`. May import `journal` and `state`, never `client`. Decides nothing
about jobs: `state` does.
"""
