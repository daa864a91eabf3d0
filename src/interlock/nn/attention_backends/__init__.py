"""Attention backends: what computes attention over the paged cache, by declaration."""
