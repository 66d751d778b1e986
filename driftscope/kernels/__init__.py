"""Fused losses: the only place that imports triton or liger_kernel."""
