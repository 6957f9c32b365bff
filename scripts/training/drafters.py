"""The two drafters as trainable PyTorch modules, parameters named as in their GGUF files.

An MTP block predicts one token from the target's last hidden state and the token drawn from it, and
is chained on its own output. A DFlash drafter predicts a block of tokens at once from the outputs
of several target layers; with DSpark's heads it also knows the token before each.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from target import Features, Target, Weights, attend, experts, gated_out, gated_qkv, rms_norm, rope
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from modelgen.drafter import DraftShape, tensor_shapes


class Named(nn.Module):
    """A module whose parameters have GGUF names, which contain dots."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.ParameterDict()

    def add(self, name: str, *shape: int, scale: float = 1.0) -> None:
        """Add a parameter: ones for norms, else normal with variance scale^2 / its row length."""
        x = torch.ones(shape)
        if not name.endswith("norm.weight"):
            x = torch.randn(shape) * scale * shape[-1] ** -0.5
        self.table[name.replace(".", "/")] = nn.Parameter(x)

    def names(self) -> list[str]:
        """Return all names in the order in which they were added."""
        return [k.replace("/", ".") for k in self.table]

    def weight(self, name: str) -> nn.Parameter:
        """Return one parameter."""
        parameter: nn.Parameter = self.table[name.replace(".", "/")]
        return parameter

    def block(self, prefix: str) -> Weights:
        """Return the parameters below a prefix, named by what follows it."""
        names = [n for n in self.names() if n.startswith(prefix)]
        return {n.removeprefix(prefix): self.weight(n) for n in names}


class Mtp(Named):
    """A full-attention layer of the target's shape behind the projection of (token, hidden)."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        hp = self.hp = target.hp
        self.prefix = f"blk.{hp.n_layer}."
        last = max(il for il in range(hp.n_layer) if not hp.is_recurrent(il))
        for name, w in target.blocks[last].items():
            self.add(self.prefix + name, *w.shape)
            with torch.no_grad():
                self.weight(self.prefix + name).copy_(w.float())
        for name in ("enorm", "hnorm", "shared_head_norm"):
            self.add(f"{self.prefix}nextn.{name}.weight", hp.n_embd)
        self.add(f"{self.prefix}nextn.eh_proj.weight", hp.n_embd, 2 * hp.n_embd)
        with torch.no_grad():
            # The layer that the block starts from expects a residual stream: begin with the hidden
            # state itself and let training mix in the token.
            eh_proj = self.weight(f"{self.prefix}nextn.eh_proj.weight")
            eh_proj[:, hp.n_embd :] += torch.eye(hp.n_embd)
            self.weight(f"{self.prefix}nextn.shared_head_norm.weight").copy_(target.norm)

    def forward(self, target: Target, ids: Tensor, hidden: Tensor, n_steps: int) -> list[Tensor]:
        """Return the normed hidden state [batch, time, n_embd] of each step of the chain.

        Row i of step s reads token i + s and predicts token i + s + 1, given the target's hidden
        state of position i - 1 and the true tokens between. It sees the first step's keys up to
        row i, as a prompt leaves them, and the later steps' own.
        """
        hp, w = self.hp, self.block(self.prefix)
        time = ids.shape[1]
        previous = F.pad(hidden[:, :-1], (0, 0, 1, 0))
        causal = torch.ones(time, time, dtype=torch.bool, device=ids.device).tril()
        own = torch.eye(time, dtype=torch.bool, device=ids.device)
        pos = torch.arange(time, device=ids.device)[None]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        steps = []
        for s in range(n_steps):
            token = F.embedding(F.pad(ids[:, s:], (0, s)), target.embd)
            e = rms_norm(token, w["nextn.enorm.weight"], hp.f_norm_rms_eps)
            h = rms_norm(previous, w["nextn.hnorm.weight"], hp.f_norm_rms_eps)
            x = F.linear(torch.cat([e, h], -1), w["nextn.eh_proj.weight"]).float()
            q, k, v, gate = gated_qkv(
                w, rms_norm(x, w["attn_norm.weight"], hp.f_norm_rms_eps), pos + s, hp
            )
            keys.append(k)
            values.append(v)
            mask = torch.cat([causal] + [own] * s, 1) if s else None
            x = x + gated_out(w, attend(q, torch.cat(keys, 1), torch.cat(values, 1), mask), gate)
            y = rms_norm(x, w["post_attention_norm.weight"], hp.f_norm_rms_eps)
            x = x + experts(w, y, hp.n_expert_used)
            previous = rms_norm(x, w["nextn.shared_head_norm.weight"], hp.f_norm_rms_eps)
            steps.append(previous)
        return steps


# The DFlash drafter.
SHAPE = DraftShape(
    n_vocab=4096, n_embd=256, windows="fff", n_head=8, n_head_kv=2, head_dim=64, n_ff=640,
    n_ctx_train=2048, n_swa=0, target_layers=(1, 3, 5, 6), mask_id=4095, block_size=12,
    rope_freq_base=1e5, markov_rank=64, samples_anchor=False,
)  # fmt: skip


class Dflash(Named):
    """A block-diffusion drafter; row i >= 1 of a block predicts the token at anchor + i."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.hp = target.hp
        small = (2 * SHAPE.n_layer) ** -0.5
        scales = {"attn_output": small, "ffn_down": small, "markov_w2": 0.1, "conf_proj": 0.1}
        for name, ne in tensor_shapes(SHAPE).items():
            self.add(name, *ne[::-1], scale=scales.get(name.split(".")[-2], 1.0))
        nn.init.zeros_(self.weight("conf_proj.bias"))

    def forward(self, target: Target, ids: Tensor, features: Features, anchors: Tensor,
                lengths: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Draft blocks after anchors [batch, n_anchor], of lengths [batch, n_anchor] rows.

        A row sees the context before its anchor and the rows of its own block, nothing else. Return
        the hidden state [batch, n_anchor, block, n_embd], and which rows take part.
        """
        size, time = SHAPE.block_size, ids.shape[1]
        offset = torch.arange(size, device=ids.device)
        pos = (anchors[..., None] + offset).flatten(1)
        visible = offset < lengths[..., None]
        tokens = torch.full_like(pos, SHAPE.mask_id).unflatten(1, (-1, size))
        tokens[..., 0] = ids.gather(1, anchors)
        mask = block_mask(anchors, visible, time)
        hidden = torch.cat([features.layers[il] for il in SHAPE.target_layers], -1)
        context = F.linear(hidden, self.weight("fc.weight"))
        context = rms_norm(context, self.weight("enc.output_norm.weight"), self.hp.f_norm_rms_eps)
        x = F.embedding(tokens.flatten(1), target.embd).float()
        for il in range(SHAPE.n_layer):
            x = self._layer(self.block(f"blk.{il}."), x, pos, context, mask)
        x = rms_norm(x, self.weight("output_norm.weight"), self.hp.f_norm_rms_eps)
        return x.unflatten(1, (-1, size)), visible

    def _layer(self, w: Weights, x: Tensor, pos: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        eps = self.hp.f_norm_rms_eps
        y = rms_norm(x, w["attn_norm.weight"], eps)
        q = F.linear(y, w["attn_q.weight"]).unflatten(-1, (-1, SHAPE.head_dim))
        q = self._rotated(q, w["attn_q_norm.weight"], pos)
        y = torch.cat([context, y], 1)
        before = torch.arange(context.shape[1], device=x.device).expand(x.shape[0], -1)
        k = F.linear(y, w["attn_k.weight"]).unflatten(-1, (-1, SHAPE.head_dim))
        k = self._rotated(k, w["attn_k_norm.weight"], torch.cat([before, pos], 1))
        v = F.linear(y, w["attn_v.weight"]).unflatten(-1, (-1, SHAPE.head_dim))
        x = x + F.linear(attend(q, k, v, mask), w["attn_output.weight"]).float()
        y = rms_norm(x, w["ffn_norm.weight"], eps)
        y = F.silu(F.linear(y, w["ffn_gate.weight"])) * F.linear(y, w["ffn_up.weight"])
        return x + F.linear(y, w["ffn_down.weight"]).float()

    def _rotated(self, x: Tensor, norm: Tensor, pos: Tensor) -> Tensor:
        x = rms_norm(x, norm, self.hp.f_norm_rms_eps)
        return rope(x, pos, SHAPE.head_dim, self.hp.rope_freq_base)

    def markov(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embedding [..., rank] of the tokens before, and their bias on the logits."""
        embedding = F.embedding(previous, self.weight("markov_w1.weight"))
        return embedding, F.linear(embedding, self.weight("markov_w2.weight"))

    def confidence(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Return the logit [...] of a row's chance to be accepted; trains only this head."""
        x = torch.cat([hidden.detach().float(), embedding.detach().float()], -1)
        return F.linear(x, self.weight("conf_proj.weight"), self.weight("conf_proj.bias"))[..., 0]


def block_mask(anchors: Tensor, visible: Tensor, time: int) -> Tensor:
    """Return which keys [batch, 1, n_anchor * block, time + n_anchor * block] each row may see."""
    _, n_anchor, size = visible.shape
    rows = n_anchor * size
    at = torch.arange(time, device=anchors.device)
    context = (at < anchors[..., None]).repeat_interleave(size, 1)
    block = torch.arange(rows, device=anchors.device) // size
    own = (block[:, None] == block) & visible.flatten(1)[:, None]
    # Rows that take no part see themselves, so that every row has a key.
    own = own | torch.eye(rows, dtype=torch.bool, device=anchors.device)
    return torch.cat([context, own], -1)[:, None]


# By step of the chain.
MTP_WEIGHTS = (1.0, 0.8, 0.6)


def soft_loss(logits: Tensor, target_logits: Tensor, weight: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats, against the target's distribution."""
    wanted = target_logits.float().softmax(-1)
    loss = -(wanted * logits.float().log_softmax(-1)).sum(-1)
    return (loss * weight).sum() / weight.sum()


def mtp_loss(mtp: Mtp, target: Target, ids: Tensor, hidden: Tensor, logits: Tensor) -> Tensor:
    """Return the loss of the whole chain; logits: the target's [batch, time, n_vocab]."""
    time = ids.shape[1]
    with target.autocast():
        steps = mtp(target, ids, hidden, len(MTP_WEIGHTS))
    total = torch.zeros((), device=ids.device)
    for s, (row, weight) in enumerate(zip(steps, MTP_WEIGHTS)):
        drafted = target.logits(row[:, : time - s])
        ones = torch.ones(drafted.shape[:2], device=ids.device)
        total = total + weight * soft_loss(drafted, logits[:, s:], ones)
    return total / sum(MTP_WEIGHTS)


def draw_blocks(ids: Tensor, n_anchor: int, size: int) -> tuple[Tensor, Tensor]:
    """Return random anchors and lengths [batch, n_anchor]; half of the blocks have all rows."""
    shape = (ids.shape[0], n_anchor)
    anchors = torch.randint(1, ids.shape[1] - 2, shape, device=ids.device)
    short = torch.randint(3, size + 1, shape, device=ids.device)
    full = torch.rand(shape, device=ids.device) < 0.5
    return anchors, torch.where(full, size, short)


def dflash_loss(dflash: Dflash, target: Target, ids: Tensor, features: Features,
                logits: Tensor, n_anchor: int) -> Tensor:  # fmt: skip
    """Return the loss of random blocks: without and with the Markov head, and of confidence."""
    size, time = SHAPE.block_size, ids.shape[1]
    anchors, lengths = draw_blocks(ids, n_anchor, size)
    with target.autocast():
        hidden, visible = dflash(target, ids, features, anchors, lengths)
    at = anchors[..., None] + torch.arange(size, device=ids.device) - 1
    depth = torch.arange(size, device=ids.device).float()
    # earlier rows decide more; row 0 none
    weight = torch.where(depth > 0, torch.exp(-(depth - 1) / (size / 2)), depth)
    weight = weight * visible * (at < time)
    at = at.clamp(max=time - 1)
    rows = torch.arange(len(ids), device=ids.device)[:, None, None]
    wanted, previous = logits[rows, at], ids[rows, at]
    plain = target.logits(hidden)
    with target.autocast():
        embedding, bias = dflash.markov(previous)
    drafted = plain + bias
    accepted = (drafted.argmax(-1) == wanted.argmax(-1)).float()
    sure = F.binary_cross_entropy_with_logits(
        dflash.confidence(hidden, embedding), accepted, reduction="none"
    )
    confidence = (sure * weight).sum() / weight.sum()
    both = soft_loss(plain, wanted, weight) + soft_loss(drafted, wanted, weight)
    return 0.5 * both + 0.1 * confidence
