"""Several ranks that save and load one checkpoint together: rank identity, the commit, the choice of what to load.

`commit` is the only module that puts a manifest, so every commit happens there, also that of a single rank. May import
`format` and the store; never imports `save`, `load` or `saver`.
"""
