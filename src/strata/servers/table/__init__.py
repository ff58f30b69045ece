"""Tables: rows of float32 weights with their optimizer state, found by 64-bit keys.

Pure arrays: nothing here reads a clock, a file or a socket. Where numba is installed, `native` compiles the loops over
rows; otherwise numpy computes the same values, bit for bit.
"""
