"""What several benchmarks share. A benchmark itself is a file in the folder above, and no file imports it."""
