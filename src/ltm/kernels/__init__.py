"""The steps of a merge as torch operators, with Triton kernels for NVIDIA GPUs."""
