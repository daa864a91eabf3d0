"""MiMo-V2: hybrid sliding-window attention with sinks, two rope bases, sigmoid-routed experts.

All of it is in the card (window, sinks, value scale, rope base of each layer; scoring and selection bias of
the router), so the shared decoder is the whole network.
"""

from __future__ import annotations

from interlock.checkpoint.source import WeightSource
from interlock.models.decoder import Decoder
from interlock.models.mimo_v2.weights import SKIPPED_PREFIXES, tensor_specs


class MiMoV2(Decoder):
    """MiMo-V2-Flash, V2.5 and V2.5-Pro."""

    def load(self, checkpoint: WeightSource) -> None:
        self.load_weights(checkpoint, list(tensor_specs(self.context.plan.card)), SKIPPED_PREFIXES)
