"""Benchmarks that record what was really delivered, and refuse to compare what was not matched.

``decode``, ``prefill``: engines started here, several arms in turn. ``serve``: any OpenAI-compatible server.
``layer`` (one MoE layer), ``a2a``: parts alone. ``record`` makes evidence of all of them.
"""
