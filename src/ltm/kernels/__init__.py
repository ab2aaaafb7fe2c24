"""Triton: where it takes over from the torch definitions in `core`, and its kernels."""
