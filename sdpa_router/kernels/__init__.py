"""Kernels of the router; their code is in the top-level kernels/ folder."""
