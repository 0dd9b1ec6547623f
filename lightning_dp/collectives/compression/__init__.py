"""Compressed all-reduce between groups of ranks: 16 bits, 8 bits, or low-rank factors; with error feedback."""
