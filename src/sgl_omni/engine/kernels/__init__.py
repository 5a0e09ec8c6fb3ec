"""Triton kernels, one file a purpose. Imported only where tensors are on a GPU (or by Triton's interpreter)."""
