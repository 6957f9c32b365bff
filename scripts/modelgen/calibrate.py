"""Gains that keep activations finite and give router and head plausible statistics.

Every sublayer reads a normalised stream (rms 1), so its output rms is set by its last matrix. The
residual stream starts at rms 1 and gains `growth` of energy over all layers together.

A router score is static + token-dependent. The static part is carried by the first
`const_dims` of the embedding, which hold the same value for every token: the router reads them with
a normal draw for each expert. The token-dependent part is a random projection of the rest. Its
memory of earlier tokens comes from the DeltaNet layers: `mixer_boost` strengthens the constant
dimensions at their input, which makes keys and queries alike, so that the state averages over
recent values.

Measured with these defaults (12 layers of 256 experts top-8, 256 tokens, text and random ids), and
in the right column the targets for models like 35B-A3B:

    normalised entropy of the selections            .73 to .75           .74
    shared with the token before / 8 before         .25 to .29 / .23 to .27   .31 / .22
    distinct experts of 2 / 4 / 8 / 16 / 32 tokens  13.8 22.7 35 51 70   13.5 22.2 34.9 51.7 71.6
    hits of a global LRU over 26.9 %, by quarters   .80 .88 .88 .88      .80 .87 .87 .86

Where all mixers are attention, they average over the whole text, so what tokens share lasts longer.
Less of the stream is theirs there, and their keys tell tokens apart better (`Calibration.of`).
Measured with 128 experts top-8; targets of such models are not known, so they are those above:

    normalised entropy of the selections            .75 to .78
    shared with the token before / 8 before         .29 to .34 / .29 to .33
    distinct experts of 2 / 4 / 8 / 16 / 32 tokens  13.5 21 31 42 54
    hits of a global LRU over 26.9 %, by quarters   .78 .83 .83 .83

Weights cannot express a static part that changes with the prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .blocks import TYPES
from .shape import Shape

# rms of silu(z) and sigmoid(z) for a standard normal z.
SILU_RMS = 0.596
SIGMOID_RMS = 0.541
# rms of an attention output of unit values when scores have a deviation of 2.
ATTENTION_RMS = 0.6


@dataclass(frozen=True)
class Calibration:
    """The tunable statistics of a synthetic model."""

    growth: float = 8.0
    mixer_share: float = 0.75
    const_share: float = 0.3
    mixer_boost: float = 2.5
    router_std: float = 1.0
    static_low: float = 0.45
    static_high: float = 0.70
    static_edge: float = 0.45
    logit_std: float = 3.0
    conv_std: float = 0.5
    alpha_gain: float = 0.5
    qk_norm: float = 1.4

    @classmethod
    def of(cls, s: Shape) -> Calibration:
        """Return the statistics of a model of a shape."""
        return cls() if s.is_qwen35 else cls(mixer_share=0.5, qk_norm=2.2)

    def _out_rms(self, s: Shape, share: float) -> float:
        return math.sqrt(self.growth * share / s.n_layer)

    def attn_out_gain(self, s: Shape) -> float:
        gate = SIGMOID_RMS if s.is_qwen35 else 1.0
        return self._out_rms(s, self.mixer_share) / (gate * ATTENTION_RMS)

    def deltanet_out_gain(self, s: Shape) -> float:
        return self._out_rms(s, self.mixer_share) / SILU_RMS

    def down_gain(self, s: Shape) -> float:
        # The routing weights sum to 1 and are nearly even: their rms sum is about 1.15 / sqrt(k).
        weight = 1.15 / math.sqrt(s.n_expert_used)
        share = (1 - self.mixer_share) / (2 if s.n_ff_shexp else 1)
        return self._out_rms(s, share) / (SILU_RMS * weight)

    def shared_down_gain(self, s: Shape) -> float:
        return self._out_rms(s, (1 - self.mixer_share) / 2) / (SILU_RMS * SIGMOID_RMS)

    def dense_down_gain(self, s: Shape) -> float:
        return self._out_rms(s, 1 - self.mixer_share) / SILU_RMS

    def stream_energy(self, s: Shape, il: int) -> float:
        """Return the mean square of the residual stream at the router of layer `il`."""
        return 1 + self.growth * (il + self.mixer_share) / s.n_layer

    def static_part(self, s: Shape, il: int, rng: np.random.Generator) -> float:
        """Return the share `a` of the static part; the first two and the last layer are flatter."""
        if il < 2 or il == s.n_layer - 1:
            return self.static_edge
        return float(rng.uniform(self.static_low, self.static_high))

    def const_dims(self, s: Shape, embd_type: str) -> int:
        """Return how many leading dimensions are constant: whole blocks, about n_embd / 8.

        0 if a row is a single block: such a model has no static part.
        """
        block = TYPES[embd_type].n_elem
        n = max(block, s.n_embd // 8 // block * block)
        return n if n < s.n_embd else 0

    def embd_scale(self, s: Shape, embd_type: str) -> tuple[float, float]:
        """Return (constant, deviation of the other dimensions) of an embedding row of rms 1."""
        n = self.const_dims(s, embd_type)
        if n == 0:
            return 0.0, 1.0
        rest = (1 - self.const_share) * s.n_embd / (s.n_embd - n)
        return math.sqrt(self.const_share * s.n_embd / n), math.sqrt(rest)
