"""Sparse int8 attention: every block of query rows walks its own list of key tiles."""
