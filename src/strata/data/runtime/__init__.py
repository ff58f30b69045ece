"""The running loader: decode threads and processes, prefetch, the pipeline that connects them, and its metrics.

Apart from surveys, only this folder of `strata.data` starts threads and processes. It may import every other folder but
`iceberg`. It never decides about row order: `order` does.
"""
