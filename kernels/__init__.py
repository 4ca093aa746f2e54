"""Fused Triton kernels, one file each, beside their torch twins. None yet: the torch path is the truth they will meet."""
