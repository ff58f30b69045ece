"""Strata's checkpoints behind other libraries' doors.

Nothing is imported here: `torch_dcp` needs torch, `pytrees` needs JAX, and neither needs the other.
"""
