"""Adapters to other libraries: `torch_dcp` for torch.distributed.checkpoint, `pytrees` for JAX.

This module imports nothing: `torch_dcp` needs torch, `pytrees` needs JAX, and neither needs the other. Adapters may
import every other folder of `checkpoint`, none of which imports them.
"""
