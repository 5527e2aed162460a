#!/usr/bin/env python3
"""Train the demo model: a small Mixture-of-Experts language model with DeepSeek-V2's architecture.

24 million parameters, 5 million active per token: MLA attention with YaRN, one dense layer, five MoE layers of
32 routed experts (4 chosen) and 2 shared ones. Expert width 160 is a multiple of 32 but not of 256, so that quantising
to Q4_K_M falls back to Q5_0/Q8_0 on the down projections, exactly as DeepSeek-V2-Lite's 1408 does.

    python train.py --out checkpoint --minutes 8      # one data-centre GPU
    python train.py --out checkpoint --smoke          # two minutes on a laptop CPU, to see that it works

Writes a Hugging Face checkpoint (config.json, tokenizer.json, model-0000N-of-0000M.safetensors with DeepSeek's own
tensor names) that transformers' DeepseekV2ForCausalLM loads, and train_log.json with losses and held-out scores.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import re
import time
from dataclasses import dataclass

import corpus
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import DeepseekV2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\n\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}"
    "{% elif m['role'] == 'system' %}{{ m['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


# --------------------------------------------------------------------------- data


def document_text(turns: list[list[str]]) -> str:
    """One document as the model sees it, without the begin-of-sequence token."""
    return "".join(f"User: {q}\n\nAssistant: {a}{EOS}" if q else f"{a}{EOS}" for q, a in turns)


def make_documents(seed_and_count: tuple[int, int]) -> list[str]:
    seed, count = seed_and_count
    return [document_text(d) for d in corpus.documents(seed, count)]


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE, digits apart: GGUF's `gpt2` model with the `smollm` pre-tokenizer is exactly this."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator((t.replace(EOS, "") for t in texts), trainer)
    return tok


def pack(tok: Tokenizer, texts: list[str]) -> np.ndarray:
    """All documents, each begun by BOS, as one uint16 stream."""
    bos = tok.token_to_id(BOS)
    parts = []
    for i in range(0, len(texts), 20000):
        for enc in tok.encode_batch(texts[i : i + 20000]):
            parts.append(np.array([bos, *enc.ids], dtype=np.uint16))
    return np.concatenate(parts)


# -------------------------------------------------------------------------- model


class Norm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


def rotate(x, cos, sin):
    """Rotate neighbouring pairs. x: [..., T, D]; cos, sin: [T, D/2]."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: DeepseekV2Config):
        super().__init__()
        self.c, h = c, c.num_attention_heads
        self.q_proj = nn.Linear(c.hidden_size, h * (c.qk_nope_head_dim + c.qk_rope_head_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = Norm(c.kv_lora_rank)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, h * (c.qk_nope_head_dim + c.v_head_dim), bias=False)
        self.o_proj = nn.Linear(h * c.v_head_dim, c.hidden_size, bias=False)
        rope = c.rope_parameters
        mscale = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1.0
        self.scale = mscale * mscale / math.sqrt(c.qk_nope_head_dim + c.qk_rope_head_dim)

    def forward(self, x, cos, sin):
        c, (b, t, _) = self.c, x.shape
        q = self.q_proj(x).view(b, t, c.num_attention_heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(b, t, c.num_attention_heads, -1).transpose(1, 2)
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_rope = rotate(k_rope.unsqueeze(1), cos, sin).expand(-1, c.num_attention_heads, -1, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), -1)
        k = torch.cat((k_nope, k_rope), -1)
        v = F.pad(v, (0, q.shape[-1] - c.v_head_dim))  # flash kernels want one head size
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)[..., : c.v_head_dim]
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """Batched experts with a capacity: tokens beyond it are dropped while training, never afterwards."""

    def __init__(self, c: DeepseekV2Config):
        super().__init__()
        e, h, f = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
        self.c = c
        self.router = nn.Parameter(torch.randn(e, h) * 0.02)
        self.gate = nn.Parameter(torch.randn(e, h, f) / math.sqrt(h))
        self.up = nn.Parameter(torch.randn(e, h, f) / math.sqrt(h))
        self.down = nn.Parameter(torch.randn(e, f, h) / math.sqrt(f) / math.sqrt(2 * c.num_hidden_layers))
        self.shared_experts = MLP(h, f * c.n_shared_experts)
        self.balance_loss = torch.zeros(())

    def forward(self, x):
        c, shape = self.c, x.shape
        x = x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            scores = (x.float() @ self.router.float().T).softmax(-1)
        weight, chosen = scores.topk(c.num_experts_per_tok, -1)
        t, k, e = x.shape[0], c.num_experts_per_tok, c.n_routed_experts
        slack = 1.5 if self.training else float(e)
        capacity = min(t, -(-int(slack * t * k / e) // 8) * 8)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=e)
        starts = counts.cumsum(0) - counts
        rank = torch.arange(t * k, device=x.device) - starts[flat[order]]
        slot = torch.where(rank < capacity, flat[order] * capacity + rank, e * capacity)
        gathered = (
            x.new_zeros(e * capacity + 1, x.shape[1]).index_copy(0, slot, x[order // k])[:-1].view(e, capacity, -1)
        )
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        gathered = gathered.to(dtype)
        hidden = F.silu(gathered @ self.gate.to(dtype)) * (gathered @ self.up.to(dtype))
        out = (hidden @ self.down.to(dtype)).flatten(0, 1)
        out = torch.cat((out, out.new_zeros(1, out.shape[1])))
        slot_of = torch.empty_like(slot).index_copy(0, order, slot)
        routed = (out[slot_of].view(t, k, -1).float() * weight.unsqueeze(-1)).sum(1)
        share = counts.float() / (t * k)
        self.balance_loss = e * (share * scores.mean(0)).sum()
        self.counts = counts.detach()
        return (routed.to(x.dtype) + self.shared_experts(x)).view(shape)


class Layer(nn.Module):
    def __init__(self, c: DeepseekV2Config, index: int):
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c.hidden_size, c.intermediate_size) if index < c.first_k_dense_replace else MoE(c)
        self.input_layernorm, self.post_attention_layernorm = Norm(c.hidden_size), Norm(c.hidden_size)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, c: DeepseekV2Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        inv_freq, factor = ROPE_INIT_FUNCTIONS["yarn"](c)
        assert abs(factor - 1.0) < 1e-6  # mscale equals mscale_all_dim
        angles = torch.outer(torch.arange(c.max_position_embeddings).float(), inv_freq.float())
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2 and "router" not in name:
                std = 0.02 if "embed" in name or "lm_head" in name else 1 / math.sqrt(p.shape[1])
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= math.sqrt(2 * c.num_hidden_layers)
                nn.init.normal_(p, std=std)

    def forward(self, ids):
        t = ids.shape[1]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos[:t], self.sin[:t])
        return self.lm_head(self.norm(x))


def make_config(vocab: int, bos: int, eos: int) -> DeepseekV2Config:
    return DeepseekV2Config(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=768,
        moe_intermediate_size=160,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_routed_experts=32,
        n_shared_experts=2,
        num_experts_per_tok=4,
        first_k_dense_replace=1,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        bos_token_id=bos,
        eos_token_id=eos,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    )


def checkpoint_tensors(model: Model) -> dict[str, torch.Tensor]:
    """float16 tensors under DeepSeek's names; norms and routers stay float32."""
    out = {}
    for name, p in model.state_dict().items():
        p = p.detach().float().cpu()
        if re.search(r"mlp\.(gate|up|down)$", name):
            base, which = name.rsplit(".", 1)
            for e in range(p.shape[0]):
                out[f"model.{base}.experts.{e}.{which}_proj.weight"] = p[e].T.contiguous().half()
        elif name.endswith("mlp.router"):
            out["model." + name.replace("router", "gate.weight")] = p
        elif name.startswith("lm_head"):
            out[name] = p.half()
        else:
            out["model." + name] = p if "norm" in name else p.half()
    return out


def save_checkpoint(
    model: Model, config: DeepseekV2Config, tok: Tokenizer, folder: str, shard_bytes: int = 15 << 20
) -> None:
    os.makedirs(folder, exist_ok=True)
    shards, size = [{}], 0
    for name, t in checkpoint_tensors(model).items():
        if size + t.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = t
        size += t.nbytes
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, f"{folder}/{file}", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    with open(f"{folder}/model.safetensors.index.json", "w") as fh:
        json.dump(
            {"metadata": {"total_size": sum(t.nbytes for s in shards for t in s.values())}, "weight_map": weight_map},
            fh,
        )
    tok.save(f"{folder}/tokenizer.json")
    values = config.to_dict()
    values |= {"architectures": ["DeepseekV2ForCausalLM"], "chat_template": CHAT_TEMPLATE}
    with open(f"{folder}/config.json", "w") as fh:
        json.dump(values, fh, indent=1)


# ------------------------------------------------------------------- training loop


@torch.no_grad()
def held_out_scores(model: Model, tok: Tokenizer, device: str, per_skill: int, limit: int = 80) -> dict[str, float]:
    """Share of held-out questions of each skill answered rightly by greedy decoding."""
    model.eval()
    bos, eos = tok.token_to_id(BOS), tok.token_to_id(EOS)
    scores = {}
    for skill in corpus.SKILLS:
        if skill in ("story_en", "story_zh"):
            continue
        items = [i for i in corpus.held_out_items(skill, corpus.EVAL_BUCKET, per_skill) if i.q]
        if not items:
            continue
        rows = [[bos, *tok.encode(f"User: {i.q}\n\nAssistant:").ids] for i in items]
        prompt_lengths, open_rows = [len(r) for r in rows], set(range(len(rows)))
        for _ in range(limit):
            width = max(map(len, rows))
            ids = torch.tensor([r + [eos] * (width - len(r)) for r in rows], device=device)
            best = model(ids).argmax(-1).tolist()  # causal: padding on the right changes nothing
            for n in list(open_rows):
                nxt = best[n][len(rows[n]) - 1]
                open_rows.discard(n) if nxt == eos else rows[n].append(nxt)
            if not open_rows:
                break
        answers = [tok.decode(r[n:]).strip() for r, n in zip(rows, prompt_lengths)]
        right = sum(bool(re.search(i.pattern(), a)) for i, a in zip(items, answers))
        scores[skill] = right / len(items)
    model.train()
    return scores


@dataclass
class Batches:
    """Random windows of the token stream, on the device."""

    stream: torch.Tensor
    batch: int
    length: int

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        start = torch.randint(0, self.stream.numel() - self.length - 1, (self.batch, 1), device=self.stream.device)
        window = self.stream[start + torch.arange(self.length + 1, device=self.stream.device)].long()
        return window[:, :-1], window[:, 1:]


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", required=True)
    ap.add_argument("--minutes", type=float, default=8.0, help="stop training after this long, data included")
    ap.add_argument("--docs", type=int, default=2_400_000)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--smoke", action="store_true")
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()
    if args.smoke:
        args.docs, args.batch, args.minutes = 20_000, 8, 1.2
    began = time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    torch.set_float32_matmul_precision("high")

    workers = os.cpu_count() or 1
    with multiprocessing.Pool(workers) as pool:
        texts = sum(
            pool.map(make_documents, [(args.seed * 1000 + i, args.docs // workers) for i in range(workers)]), []
        )
    random.shuffle(texts)
    tok = train_tokenizer(texts[:60_000], 4096)
    stream = torch.from_numpy(pack(tok, texts).astype(np.int32)).to(device)
    print(f"{len(texts)} documents, {stream.numel() / 1e6:.1f}M tokens, {time.time() - began:.0f} s", flush=True)

    config = make_config(tok.get_vocab_size(), tok.token_to_id(BOS), tok.token_to_id(EOS))
    model = Model(config).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters", flush=True)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )
    data, step, log, t0 = Batches(stream, args.batch, 512 if not args.smoke else 128), 0, [], time.time()
    budget = args.minutes * 60 - (t0 - began)
    moes = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE)]
    while (done := (time.time() - t0) / budget) < 1.0:
        lr = args.lr * min(1.0, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in opt.param_groups:
            group["lr"] = lr
        x, y = data.next()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
            balance = sum(m.balance_loss for m in moes) / len(moes)
            total = loss + 0.003 * balance
        opt.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % (200 if device == "cuda" else 10) == 0:
            rate = (step + 1) * x.numel() / (time.time() - t0)
            log.append({"step": step, "loss": loss.item(), "balance": balance.item(), "tokens_per_s": rate})
            print(
                f"step {step} loss {loss.item():.4f} balance {balance.item():.3f} {rate / 1e3:.0f}k tok/s", flush=True
            )
        step += 1
    save_checkpoint(model, config, tok, args.out)
    print("saved", args.out, flush=True)
    scores = held_out_scores(model, tok, device, 4 if args.smoke else 24, 8 if args.smoke else 80)
    shares = [(m.counts.float() / m.counts.sum()).tolist() for m in moes]
    with open(f"{args.out}/train_log.json", "w") as fh:
        json.dump({"log": log, "held_out": scores, "steps": step, "expert_share": shares}, fh)
    print(json.dumps(scores, indent=1))


if __name__ == "__main__":
    main()
