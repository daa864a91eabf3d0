"""Qwen3-MoE (Qwen3-30B-A3B and its relatives)."""
