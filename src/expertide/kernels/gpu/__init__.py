"""Ops on a GPU, in Triton. Weights stay packed (`layout`, `matrix`) and are decoded inside the products.

Promises: no atomics, no library products in decode, sums in an order that depends neither on the number of tokens nor
on where a weight lies; compute capability 8.0 is enough; at most 99 KiB of shared memory. `device/` holds what is
compiled for the GPU, the modules here choose the launch. With `TRITON_INTERPRET=1` set before triton is imported
everything runs on CPU tensors.

Importing this package imports nothing; its modules import torch and triton.
"""
