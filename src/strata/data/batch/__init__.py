"""From decoded Arrow tables to batches: column types and policies, gathering rows, output formats.

No files and no threads. Torch and pandas are imported only if the output format needs them. This folder may import
`plan`, `order` and the folders below them, but never `runtime`.
"""
