"""From decoded Arrow tables to batches: column types and policies, gathering rows, output formats.

No files and no threads; torch and pandas are imported only when the output format asks for them.
"""
