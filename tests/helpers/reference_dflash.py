"""A DFlash drafter in float64 numpy, written from the description of the architecture."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from modelgen.drafter import DraftShape

Array = npt.NDArray[np.float64]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Norm of the last axis."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def inverse_frequencies(s: DraftShape) -> tuple[Array, float]:
    """Return the frequency of each pair of a head, and the magnitude of what is rotated."""
    d, base = s.head_dim, s.rope_freq_base
    plain = base ** (-np.arange(0, d, 2) / d)
    if not s.yarn_factor:
        return plain, 1.0

    def pair_of(turns: float) -> float:
        return d * math.log(s.yarn_orig / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), d - 1)
    ramp = np.clip((np.arange(d // 2) - low) / max(high - low, 1e-3), 0, 1)
    mixed = plain / s.yarn_factor * ramp + plain * (1 - ramp)
    return mixed, 0.1 * math.log(s.yarn_factor) + 1


def rope(x: Array, places: Array, s: DraftShape) -> Array:
    """Rotate heads [n, n_head, d] by positions [n]: halves of a head are pairs."""
    inverse, magnitude = inverse_frequencies(s)
    angle = places[:, None, None] * inverse
    cos, sin = np.cos(angle) * magnitude, np.sin(angle) * magnitude
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@dataclass
class ReferenceDrafter:
    """A drafter of one sequence.

    weights: by llama.cpp's names, as `modelgen.drafter.values`. embedding, head: of the target,
    [n_vocab, n_embd]. features: of each position, [n_layers * n_embd].
    """

    s: DraftShape
    weights: dict[str, Array]
    embedding: Array
    head: Array
    features: dict[int, Array] = field(default_factory=dict)

    def _keys(self, x: Array, places: Array, il: int) -> tuple[Array, Array]:
        s, w, n = self.s, self.weights, len(x)
        k = (x @ w[f"blk.{il}.attn_k.weight"].T).reshape(n, s.n_head_kv, s.head_dim)
        k = rms_norm(k, w[f"blk.{il}.attn_k_norm.weight"], s.f_norm_rms_eps)
        v = (x @ w[f"blk.{il}.attn_v.weight"].T).reshape(n, s.n_head_kv, s.head_dim)
        return rope(k, places, s), v

    def hidden(self, anchor: int, n_past: int, n_rows: int) -> Array:
        """Return the normed rows of a block, [n_rows, n_embd]."""
        s, w = self.s, self.weights
        held = np.array(sorted(p for p in self.features if p < n_past), dtype=np.int64)
        fused = np.zeros((len(held), s.n_embd))
        for i, p in enumerate(held):
            fused[i] = w["fc.weight"] @ self.features[int(p)]
        context = rms_norm(fused, w["enc.output_norm.weight"], s.f_norm_rms_eps)
        places = n_past + np.arange(n_rows)
        x = self.embedding[[anchor] + [s.mask_id] * (n_rows - 1)]
        for il in range(s.n_layer):
            cur = rms_norm(x, w[f"blk.{il}.attn_norm.weight"], s.f_norm_rms_eps)
            q = (cur @ w[f"blk.{il}.attn_q.weight"].T).reshape(n_rows, s.n_head, s.head_dim)
            q = rope(rms_norm(q, w[f"blk.{il}.attn_q_norm.weight"], s.f_norm_rms_eps), places, s)
            old, new = self._keys(context, held, il), self._keys(cur, places, il)
            k, v = (np.concatenate([a, b]) for a, b in zip(old, new))
            at = np.concatenate([held, places])
            sees = self._sees(places, at, len(held), s.windows[il] == "s")
            x = x + self._attend(q, k, v, sees) @ w[f"blk.{il}.attn_output.weight"].T
            cur = rms_norm(x, w[f"blk.{il}.ffn_norm.weight"], s.f_norm_rms_eps)
            gate, up = (cur @ w[f"blk.{il}.ffn_{part}.weight"].T for part in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"blk.{il}.ffn_down.weight"].T
        return rms_norm(x, w["output_norm.weight"], s.f_norm_rms_eps)

    def _sees(self, places: Array, at: Array, n_held: int, is_sliding: bool) -> Array:
        ahead = places[:, None] - at
        sees = np.ones(ahead.shape, bool)
        if self.s.is_causal:
            sees[:, n_held:] = ahead[:, n_held:] >= 0
        return sees & (ahead < self.s.n_swa) if is_sliding and self.s.n_swa else sees

    def _attend(self, q: Array, k: Array, v: Array, sees: Array) -> Array:
        group = self.s.n_head // self.s.n_head_kv
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.s.head_dim)
        weights = softmax(np.where(sees, scores, -np.inf))
        return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)

    def after(self, anchor: int, n_past: int, n: int) -> Callable[[int, int], dict[int, float]]:
        """Return what gives log p of the target's tokens at a depth after a token."""
        s, w = self.s, self.weights
        rows = self.hidden(anchor, n_past, n if s.samples_anchor else n + 1)
        logits = rows[0 if s.samples_anchor else 1 :] @ w.get("output.weight", self.head).T
        names = w["d2t"] if s.n_vocab_draft else np.arange(logits.shape[1])

        def given(depth: int, token: int) -> dict[int, float]:
            biased = logits[depth] + w["markov_w2.weight"] @ w["markov_w1.weight"][token]
            return dict(zip(names.tolist(), np.log(softmax(biased)).tolist()))

        return given

    def draft(self, anchor: int, n_past: int, n: int) -> tuple[Array, Array | None]:
        """Return log probabilities of n drafted tokens [n, n_draft], and their confidence [n].

        With a Markov head, each row is given the likeliest token of the one before.
        """
        s, w = self.s, self.weights
        anchored = bool(s.markov_rank) and s.samples_anchor
        rows = self.hidden(anchor, n_past, n if anchored else n + 1)[0 if anchored else 1 :]
        logits = rows @ w.get("output.weight", self.head).T
        sure = []
        before = anchor
        for i in range(n if s.markov_rank else 0):
            trait = w["markov_w1.weight"][before]
            logits[i] += w["markov_w2.weight"] @ trait
            best = int(logits[i].argmax())
            before = int(w["d2t"][best]) if s.n_vocab_draft else best
            if s.has_confidence:
                z = w["conf_proj.weight"].reshape(-1) @ np.concatenate([rows[i], trait])
                sure.append(1 / (1 + np.exp(-z - w["conf_proj.bias"].item())))
        return np.log(softmax(logits)), np.array(sure) if sure else None
