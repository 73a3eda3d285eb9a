"""Parts of the benchmark tools."""
