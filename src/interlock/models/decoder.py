"""The pre-norm decoder that the model families share: embedding, layers, final norm, head.

    x = embed(token)
    for each layer: x += attention(norm(x)); x += mlp or experts(norm(x))
    logits = head(norm(x))

The residual stream is replicated over attention-TP ranks. Legend: n tokens, m rows, h hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from interlock.checkpoint.source import WeightSource
from interlock.checkpoint.specs import TensorSpec
from interlock.kv.cache import KVCache, LayerCache
from interlock.models import decoder_weights as names
from interlock.moe.layer import MoELayer
from interlock.moe.observer import LayerObserver
from interlock.nn.attention import Attention
from interlock.nn.context import ModelContext
from interlock.nn.embedding import Embedding, Head
from interlock.nn.linear import HeldFormats, read_row_shard
from interlock.nn.mlp import SwiGLU
from interlock.nn.norm import RMSNorm
from interlock.nn.rope import RopeTables
from interlock.plan.card import LayerCard
from interlock.step import Step


class DecoderLayer:
    """Attention and MLP (dense or experts) of one layer, each after its norm.

    Attributes:
        observer: told what the layer computes; None except in a step that is inspected.
    """

    def __init__(self, index: int, card: LayerCard, context: ModelContext, tables: RopeTables) -> None:
        model = context.plan.card
        self.index = index
        self.observer: LayerObserver | None = None
        self._prefix, self._dtype = names.layer_prefix(index), context.dtype
        self._input_norm = RMSNorm(context, model.norm_eps)
        self.attention = Attention(
            card.attention,
            context,
            tables=tables,
            eps=model.norm_eps,
            chunks=names.card_chunks(model),
        )
        self._post_norm = RMSNorm(context, model.norm_eps)
        self.experts: MoELayer | None = None
        self._mlp: SwiGLU | None = None
        if card.is_moe:
            assert model.experts is not None, "a MoE layer needs an ExpertsCard"
            self.experts = MoELayer(model.experts, model.hidden_size, index, context.moe)
        else:
            self._mlp = SwiGLU(
                context, hidden_size=model.hidden_size, intermediate_size=model.intermediate_size
            )

    def load(self, source: WeightSource) -> None:
        self._input_norm.load(source, self._prefix + "input_layernorm.weight")
        self.attention.load(source, self._prefix + "self_attn.")
        self._post_norm.load(source, self._prefix + "post_attention_layernorm.weight")
        if self._mlp is not None:
            self._mlp.load(source, self._prefix + "mlp.")
        if self.experts is not None:
            load_experts(self.experts, source, self._prefix + "mlp.", self._dtype)

    def tell_formats(self, attention: HeldFormats, mlp: HeldFormats) -> None:
        """Add what the linears are held in."""
        self.attention.tell_format(attention)
        if self._mlp is not None:
            self._mlp.tell_format(mlp)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step, cache: LayerCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, h] is not yet added to ``residual`` (None before the first layer); returns the same pair."""
        hidden, residual = self._input_norm.add_for(x, residual, quantised=self.attention.takes_quantised)
        attended = self.attention(hidden, step, cache)
        if self.observer is not None:
            self.observer.computed(self.index, "attention", attended)
        output, residual = self._transformed(attended, residual, step)
        if self.observer is not None:
            self.observer.computed(self.index, "mlp", output)
        return output, residual

    def _transformed(
        self, attended: torch.Tensor, residual: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._mlp is not None:
            quantised = self._mlp.takes_quantised
            rows, residual = self._post_norm.add_for(attended, residual, quantised=quantised)
            return self._mlp(rows), residual
        assert self.experts is not None
        hidden, residual = self._post_norm.add(attended, residual)
        return self.experts.forward(hidden, step), residual


def load_experts(layer: MoELayer, source: WeightSource, prefix: str, dtype: torch.dtype) -> None:
    """Router in float32 as stored; of the experts only those that this rank holds."""
    bias = prefix + "gate.e_score_correction_bias"
    layer.load_router(source.read(prefix + "gate.weight"), source.read(bias) if bias in source else None)
    fill = source.expert_fill(prefix, layer.local_experts.start)
    if fill is None or not layer.fill_experts(fill):
        for expert in layer.local_experts:
            _load_expert(layer, source, f"{prefix}experts.{expert}.", expert, dtype)
    layer.finish_loading()


def _load_expert(layer: MoELayer, source: WeightSource, prefix: str, expert: int, dtype: torch.dtype) -> None:
    names = [f"{prefix}{name}_proj.weight" for name in ("gate", "up", "down")]
    if layer.keeps_fp8 and all(map(source.is_fp8, names)):
        gate, up, down = (source.read_fp8(name) for name in names)
        layer.load_expert_fp8(expert, gate, up, down)
    else:
        layer.load_expert(expert, *(source.read(name, dtype=dtype) for name in names))


class Decoder:
    """A causal language model. ``forward`` and ``logits`` expect ``torch.inference_mode`` from the caller."""

    def __init__(self, context: ModelContext) -> None:
        card = context.plan.card
        self.context = context
        self._embedding = Embedding(context, vocab_size=card.vocab_size)
        tables = RopeTables(context.plan.max_model_len, context.device)
        self.layers = tuple(
            DecoderLayer(index, layer, context, tables) for index, layer in enumerate(card.layers)
        )
        self._norm = RMSNorm(context, card.norm_eps)
        self._head = Head(context, vocab_size=card.vocab_size)

    def load_weights(
        self, source: WeightSource, specs: Sequence[TensorSpec], skipped_prefixes: Sequence[str] = ()
    ) -> None:
        """Check that ``source`` holds exactly ``specs``, then read this rank's part of them.

        Raises:
            CheckpointError: names what is missing, unexpected, mis-shaped or damaged.
        """
        source.validate(specs, skipped_prefixes)
        parts = len(self.layers) + 1
        self._embedding.load(source, names.EMBEDDING)
        self._norm.load(source, names.FINAL_NORM)
        self._head.load(self._head_weight(source))
        source.progress(1, parts, "embedding and head")
        for index, layer in enumerate(self.layers):
            layer.load(source)
            source.progress(index + 2, parts, f"layer {index}")

    def _head_weight(self, source: WeightSource) -> torch.Tensor:
        """The head's own weight, or the embedding's when the config ties them and the file has no other."""
        embedding = self._embedding
        if names.HEAD not in source:
            return embedding.weight
        weight = read_row_shard(source, names.HEAD, embedding.part, dtype=self.context.dtype)
        if not self.context.plan.card.tie_word_embeddings:
            return weight
        if torch.equal(weight, embedding.weight.to(weight.device)):
            return embedding.weight
        source.report.warnings.append(
            "config.json ties the head to the embedding, but the checkpoint holds a different "
            "lm_head.weight, which is used"
        )
        return weight

    def observe(self, observer: LayerObserver | None) -> None:
        """Tell ``observer`` what every layer computes from now on; None stops it."""
        for layer in self.layers:
            layer.observer = observer
            if layer.experts is not None:
                layer.experts.observer = observer

    def observed(self) -> dict[str, object]:
        """Receipts of the network: plan item -> what its layers were built with.

        An attention backend that some layer never called is not shown.
        """
        attentions = [layer.attention for layer in self.layers]
        extras = {a.window_extra for a in attentions if a.window_extra is not None}
        attention = asdict(self.context.attention.observed())
        return {
            "attention_backend": attention["name"] if all(a.calls for a in attentions) else None,
            "attention": attention,
            "dtype": str(self._embedding.weight.dtype).removeprefix("torch."),
            "sliding_window_extra": extras.pop() if len(extras) == 1 else sorted(extras) or None,
            "deterministic": all(a.is_deterministic for a in attentions),
            "num_hidden_layers": len(self.layers),
            **self._held_formats(),
        }

    def _held_formats(self) -> dict[str, object]:
        """What the linears are held in, by their packed weights."""
        attention, mlp = HeldFormats(set(), set()), HeldFormats(set(), set())
        for layer in self.layers:
            layer.tell_formats(attention, mlp)
        held: dict[str, object] = {"attention_weight_format": attention.observed}
        return held | ({"mlp_weight_format": mlp.observed} if mlp.observed else {})

    def forward(self, step: Step, cache: KVCache) -> torch.Tensor:
        """Hidden states [n, h] after the final norm; writes the step's keys and values to ``cache``."""
        x, residual = self._embedding(step.token_ids), None
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            x, residual = layer(x, residual, step, layer_cache)
        assert residual is not None, "a model has at least one layer"
        return self._norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [m, h] -> float32 [m, vocab], gathered over attention TP."""
        return self._head(hidden)
