"""From a checkpoint back to tensors: whole, in slices or memory-mapped, every byte verified before it is used.

Never writes.
"""
