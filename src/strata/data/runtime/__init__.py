"""The running loader: decode threads and processes, prefetch, the pipeline that connects them, and its metrics.

Apart from the survey (`plan`), this is the only folder of `strata.data` that starts threads and processes. It may import
every folder but `iceberg`. It never decides about row order: `order` does.
"""
