"""Triton kernels, each beside its torch reference. Importing a kernel imports triton; this package alone does not."""
