"""Attention backend ``paged_attention``: the kernel set's own kernel, on every device and for every model."""

from interlock.nn.attention_backends.base import AttentionBackend

BACKEND = AttentionBackend(
    name="paged_attention",
    summary="the kernel of --kernels, sinks and windows inside",
    devices=frozenset({"cpu", "cuda"}),
    backend="interlock.nn.attention_backends.paged_attention.backend:KernelAttention",
    dtypes=frozenset({"float32", "bfloat16"}),
    capturable=True,
    row_invariant=True,
    portable=True,
)
