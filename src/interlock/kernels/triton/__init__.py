"""Kernels for NVIDIA GPUs (compute capability 9.0) in Triton. Importing this package imports no Triton."""
