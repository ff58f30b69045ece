"""The history of measured values: `rings` downsamples one series, `store` bounds them all, `file` keeps them on disk.

`rings` and `store` are pure. Only `file` reads and writes, in its own thread. Imports `sample`, nothing of `live` or
`http`.
"""
