"""Attention backend ``flash_attention``: FlashAttention-3 on Hopper GPUs, by its paged interface.

Limits as the library checks them (flash_attn_3 3.0.0, ``hopper/flash_api.cpp``): queries, keys and values of
one dtype; widths in eights, alike up to 256, or keys of 129 to 192 with values of 97 to 128, or keys up to 64
with values up to 512. It has windows; sinks are applied to its result (see ``backend.py``).
"""

from interlock.nn.attention_backends.base import AttentionBackend, HeadWidths

PACKAGES = ("flash-attn-3>=3.0",)

BACKEND = AttentionBackend(
    name="flash_attention",
    summary="FlashAttention-3 (flash_attn_with_kvcache), sinks applied after it from its log-sum-exp",
    devices=frozenset({"cuda"}),
    backend="interlock.nn.attention_backends.flash_attention.backend:FlashAttention",
    dtypes=frozenset({"bfloat16"}),
    kv_dtypes=frozenset({"bfloat16"}),
    head_widths=(
        HeadWidths((8, 256), (8, 256), same=True, multiple=8),
        HeadWidths((129, 192), (97, 128), multiple=8),
        HeadWidths((8, 64), (8, 512), multiple=8),
    ),
    min_capability=(9, 0),
    max_capability=(9, 0),
    capturable=True,
    packages=PACKAGES,
    install="pip install --no-build-isolation "
    "'flash-attn-3 @ git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper'",
    never_run="a Hopper GPU with the package (a double that enforces its rules took its place on a CPU)",
)
