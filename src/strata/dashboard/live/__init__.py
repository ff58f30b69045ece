"""Live updates: `changes` compares samples, `feed` keeps the serialised messages, `stream` sends them to browsers.

Every message is built and serialised once, however many browsers listen. A browser is a cursor into the feed. Uses the
models of `http`; `feed` and `changes` are pure.
"""
