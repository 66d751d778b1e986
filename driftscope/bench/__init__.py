"""The benchmark of fused heads: correctness first, then time and memory, on the same inputs in one run."""
