"""ptf's own kernels for CPUs, in C++: attention over packed documents and over caches, the loss of a head, norms,
gates, rotations, products of bf16, and tokens drawn from logits.

They are compiled for the machine's processor by its own compiler at their first use (library.py), and are what
`train.fused` calls `cpu_kernels`.
"""
