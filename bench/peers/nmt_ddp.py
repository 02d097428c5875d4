#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch training step of the base translator under a strategy: the peer of `bench/nmt_step`.

    torchrun --nproc-per-node 2 bench/peers/nmt_ddp.py --steps 5 --warmup 2

Same network, same arithmetic, same batches as the C++ benchmark; rank 0 prints one JSON line.
The README beside this file says which choices were measured and why they are the defaults.
Shape letters: B rows, S source and T target positions, N tokens, D model, H heads, V vocabulary.
"""
import argparse
import ctypes
import datetime
import json
import math
import os
import resource
import statistics
import sys
import time

# Keep freed memory inside the process: a step frees and takes hundreds of megabytes, and giving
# them back to the kernel costs page faults. Before torch is loaded; MALLOC_* variables win.
if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
    M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)
    libc.mallopt(M_TOP_PAD, 64 << 20)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

PAD, BOS, EOS, FIRST_TOKEN = 0, 2, 3, 4
VOCABULARY, D_MODEL, HEADS, LAYERS, D_FF = 32_000, 512, 8, 6, 2048
DROPOUT, SMOOTHING, CLIP, NOAM_WARMUP = 0.1, 0.1, 1.0, 4000
PARAMETERS = 93_255_680
SENTENCES, SHORTEST, LONGEST = 20_000, 4, 100
LOSS_ROWS = 32  # Rows of logits whose float32 softmax stays in a CPU's cache; on a card all are taken at once.


# ---------------------------------------------------------------- data, as the C++ bench makes it

class SplitMix64:
    """The splitmix64 stream; `take(n)` gives its next n values as uint64."""

    def __init__(self, seed):
        self.state = np.uint64(seed % 2**64)

    def take(self, count):
        golden = np.uint64(0x9E3779B97F4A7C15)
        with np.errstate(over="ignore"):
            z = self.state + golden * np.arange(1, count + 1, dtype=np.uint64)
            self.state = self.state + golden * np.uint64(count)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return z ^ (z >> np.uint64(31))


def plan_batches(seed, budget):
    """Batches of (source length, target length), rows x (longest target + 1) <= budget, shuffled.

    u1, u2, u3 of a sentence are three consecutive draws; round(x) is floor(x + 0.5).
    """
    stream = SplitMix64(seed)
    uniforms = ((stream.take(3 * SENTENCES) >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def clamp(x):
        return min(max(math.floor(x + 0.5), SHORTEST), LONGEST)

    lengths = []
    for u1, u2, u3 in uniforms.reshape(-1, 3).tolist():
        z = math.sqrt(-2.0 * math.log(1.0 - u1)) * math.cos(2.0 * math.pi * u2)
        target = clamp(math.exp(3.2 + 0.5 * z))
        lengths.append((target, clamp(target * (0.85 + 0.3 * u3))))
    batches, rows = [], []
    for target, source in sorted(lengths):  # Ascending: the newest row is the longest.
        if rows and (len(rows) + 1) * (target + 1) > budget:
            batches.append(rows)
            rows = []
        rows.append((source, target))
    batches.append(rows)
    for i in range(len(batches) - 1, 0, -1):
        j = int(stream.take(1)[0] % np.uint64(i + 1))
        batches[i], batches[j] = batches[j], batches[i]
    return batches


def make_batch(seed, index, rows):
    """The batch at `index` of the shuffled plan: what forward() takes of it, and its target tokens (with EOS)."""
    stream = SplitMix64(seed * 1_000_003 + index)
    source = np.full((len(rows), max(s for s, _ in rows) + 1), PAD, dtype=np.int64)
    inputs = np.full((len(rows), max(t for _, t in rows) + 1), PAD, dtype=np.int64)
    labels = np.full_like(inputs, PAD)
    for row, (s, t) in enumerate(rows):
        draws = stream.take(s + t) % np.uint64(VOCABULARY - FIRST_TOKEN) + np.uint64(FIRST_TOKEN)
        source[row, :s], source[row, s] = draws[:s], EOS
        inputs[row, 0], inputs[row, 1:t + 1] = BOS, draws[s:]
        labels[row, :t], labels[row, t] = draws[s:], EOS
    tokens = sum(t + 1 for _, t in rows)
    # Where sentences end is known here; to ask a card would wait for it.
    tensors = [torch.from_numpy(each) for each in (source, inputs, labels, np.flatnonzero(labels != PAD))]
    return tensors, bool((source == PAD).any()), tokens


# ---------------------------------------------------------------- network

class Attention(nn.Module):
    """Multi-head attention without bias; one projection for q, k, v (self) or for k, v (cross)."""

    def __init__(self, kind, is_self):
        super().__init__()
        self.kind, self.is_self = kind, is_self
        if is_self:
            self.qkv = nn.Linear(D_MODEL, 3 * D_MODEL, bias=False)
        else:
            self.q = nn.Linear(D_MODEL, D_MODEL, bias=False)
            self.kv = nn.Linear(D_MODEL, 2 * D_MODEL, bias=False)
        self.out = nn.Linear(D_MODEL, D_MODEL, bias=False)

    def forward(self, x_BTD, memory_BSD, mask, causal):
        heads = (HEADS, D_MODEL // HEADS)
        if self.is_self:
            q, k, v = self.qkv(x_BTD).unflatten(-1, (3, *heads)).unbind(2)
        else:
            q = self.q(x_BTD).unflatten(-1, heads)
            k, v = self.kv(memory_BSD).unflatten(-1, (2, *heads)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # B H T D/H
        if self.kind == "sdpa":
            # The CPU flash kernel has no dropout: it is applied to the output instead.
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
            out = F.dropout(out, DROPOUT, self.training)
        else:
            scores = torch.matmul(q * (q.shape[-1] ** -0.5), k.transpose(-2, -1))
            if mask is not None:
                scores = scores + mask
            out = torch.matmul(F.dropout(scores.softmax(-1), DROPOUT, self.training), v)
        return self.out(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A pre-norm layer of the encoder, or of the decoder with its attention to the source."""

    def __init__(self, kind, decoder):
        super().__init__()
        self.self_attention, self.self_norm = Attention(kind, True), nn.LayerNorm(D_MODEL)
        self.decoder = decoder
        if decoder:
            self.cross_attention, self.cross_norm = Attention(kind, False), nn.LayerNorm(D_MODEL)
        self.up, self.down = nn.Linear(D_MODEL, D_FF), nn.Linear(D_FF, D_MODEL)
        self.ff_norm = nn.LayerNorm(D_MODEL)

    def forward(self, x, self_mask, causal, memory=None, memory_mask=None):
        def add(x, y):
            return x + F.dropout(y, DROPOUT, self.training)

        x = add(x, self.self_attention(self.self_norm(x), None, self_mask, causal))
        if self.decoder:
            x = add(x, self.cross_attention(self.cross_norm(x), memory, memory_mask, False))
        hidden = F.dropout(F.relu(self.up(self.ff_norm(x))), DROPOUT, self.training)
        return add(x, self.down(hidden))


class SmoothedLoss(torch.autograd.Function):
    """Sum of label-smoothed cross-entropies of h_ND w_VD^T, times `scale`.

    The forward turns the logits into their gradient in place, a few rows at a time in float32:
    the [tokens, vocabulary] matrix exists once, in the type of `h`.
    """

    @staticmethod
    def forward(ctx, h_ND, w_VD, labels_N, scale):
        logits_NV = torch.mm(h_ND, w_VD.t())
        loss = torch.zeros((), dtype=torch.float32, device=h_ND.device)
        rows = LOSS_ROWS if h_ND.device.type == "cpu" else len(labels_N)
        for z, y in zip(logits_NV.split(rows), labels_N.unsqueeze(1).split(rows)):
            log_p = torch.log_softmax(z, -1, dtype=torch.float32)
            loss -= (1 - SMOOTHING) * log_p.gather(1, y).sum() + SMOOTHING * log_p.mean(-1).sum()
            grad = log_p.exp_().sub_(SMOOTHING / VOCABULARY)
            grad.scatter_add_(1, y, torch.full(y.shape, SMOOTHING - 1.0, device=y.device))
            z.copy_(grad)
        ctx.save_for_backward(h_ND, w_VD, logits_NV)
        ctx.scale = scale
        return loss * scale

    @staticmethod
    def backward(ctx, grad_output):
        h_ND, w_VD, grad_NV = ctx.saved_tensors
        # Reading the number would wait for a card.
        scale = ctx.scale * (grad_output.item() if grad_output.device.type == "cpu" else grad_output.to(h_ND.dtype))
        return torch.mm(grad_NV, w_VD) * scale, torch.mm(grad_NV.t(), h_ND * scale), None, None


class Translator(nn.Module):
    """The base Transformer with its loss: DDP sees one forward, which returns a scalar."""

    def __init__(self, kind, dtype):
        super().__init__()
        self.kind, self.dtype = kind, dtype
        self.source_embedding = nn.Embedding(VOCABULARY, D_MODEL)
        self.target_embedding = nn.Embedding(VOCABULARY, D_MODEL)
        self.encoder = nn.ModuleList(Layer(kind, False) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(Layer(kind, True) for _ in range(LAYERS))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(D_MODEL), nn.LayerNorm(D_MODEL)
        self.output = nn.Linear(D_MODEL, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        for embedding in (self.source_embedding, self.target_embedding):
            nn.init.normal_(embedding.weight, std=D_MODEL ** -0.5)
        angle = torch.arange(LONGEST + 1).unsqueeze(1) * torch.exp(
            torch.arange(0, D_MODEL, 2) * (-math.log(10_000.0) / D_MODEL))
        self.register_buffer("positions", torch.cat([angle.sin(), angle.cos()], 1), False)

    def embed(self, embedding, ids):
        x = embedding(ids) * D_MODEL ** 0.5 + self.positions[:ids.shape[1]]
        return F.dropout(x.to(self.dtype), DROPOUT, self.training)

    def forward(self, source, inputs, labels, real, has_padding, scale):
        """`real`: the flat positions of labels that are not padding; `has_padding`: whether `source` has any."""
        # Masks only where needed: padded targets come last, so causality hides them.
        source_mask = None
        if has_padding:
            padded = source == PAD
            source_mask = torch.zeros(padded.shape, dtype=self.dtype, device=source.device)
            source_mask = source_mask.masked_fill_(padded, -math.inf)[:, None, None, :]
        causal_mask = None
        if self.kind == "bmm":
            size = inputs.shape[1]
            causal_mask = torch.full((size, size), -math.inf, dtype=self.dtype, device=source.device).triu_(1)
        memory = self.embed(self.source_embedding, source)
        for layer in self.encoder:
            memory = layer(memory, source_mask, False)
        memory = self.encoder_norm(memory)
        x = self.embed(self.target_embedding, inputs)
        for layer in self.decoder:
            x = layer(x, causal_mask, self.kind == "sdpa", memory, source_mask)
        h_ND = self.decoder_norm(x).flatten(0, 1).index_select(0, real).to(self.dtype)
        return SmoothedLoss.apply(h_ND, self.output.weight.to(self.dtype),
                                  labels.flatten().index_select(0, real), scale)


# ---------------------------------------------------------------- the step, timed

def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed ones")
    parser.add_argument("--mini-batch-words", type=int, default=4096,
                        help="rows x (longest target + 1) of a rank's batch, at most")
    parser.add_argument("--rows", type=int, default=0, help="sentences of a batch, all alike ...")
    parser.add_argument("--length", type=int, default=12, help="... and their length on both sides")
    parser.add_argument("--strategy", choices=("ddp", "zero1", "fsdp2"), default="ddp")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--attention", choices=("sdpa", "bmm", "auto"), default="auto")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the card of LOCAL_RANK")
    parser.add_argument("--seed", type=int, default=1, help="of the data and of the weights")
    options = parser.parse_args()
    if options.steps < 1 or options.warmup < 0 or options.mini_batch_words <= LONGEST:
        parser.error(f"--steps needs >= 1, --warmup >= 0, --mini-batch-words > {LONGEST}")
    return options


def main():
    options = parse()
    torch.set_num_threads(1)
    on_card = options.device == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_card else torch.device("cpu")
    if on_card:
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # It plans each new shape first: 0.3 s a step where every batch has another.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_card else "gloo", timeout=datetime.timedelta(seconds=300))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)  # Same weights on all ranks; dropout differs below.
    attention = ("sdpa" if on_card else "bmm") if options.attention == "auto" else options.attention
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    model = Translator(attention, dtype).to(device)
    parameters = list(model.parameters())
    assert sum(p.numel() for p in parameters) == PARAMETERS
    adam = {"lr": 0.0, "betas": (0.9, 0.98), "eps": 1e-9, "fused": True}
    if options.strategy == "fsdp2":
        for layer in (*model.encoder, *model.decoder):
            fully_shard(layer)
        sharded = fully_shard(model)
        parameters = list(model.parameters())
        optimizer = torch.optim.Adam(parameters, **adam)
    else:
        sharded = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
        optimizer = (ZeroRedundancyOptimizer(parameters, torch.optim.Adam, **adam)
                     if options.strategy == "zero1" else torch.optim.Adam(parameters, **adam))
    inner = optimizer.optim if options.strategy == "zero1" else optimizer
    torch.manual_seed(options.seed * 1000 + rank)
    if options.rows > 0:
        batches = [[(options.length, options.length)] * options.rows]
    else:
        batches = plan_batches(options.seed, options.mini_batch_words)

    def step(number, batch):
        tensors, has_padding, tokens = batch
        source, inputs, labels, real = (t.to(device, non_blocking=True) for t in tensors)
        total = torch.tensor(tokens)
        dist.all_reduce(total)
        optimizer.zero_grad(set_to_none=True)
        # DDP averages over the ranks: world / total makes it the sum over the global tokens.
        with torch.autocast(options.device, torch.bfloat16, enabled=options.precision == "bf16"):
            loss = sharded(source, inputs, labels, real, has_padding, world / total.item())
        loss.backward()
        # The fused kernel divides by grad_scale as it reads: clipping costs no pass of its own.
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        if options.strategy == "fsdp2":
            norm = norm.full_tensor()
        inner.grad_scale = (norm / CLIP).clamp(min=1.0)
        optimizer.param_groups[0]["lr"] = D_MODEL ** -0.5 * min(
            number ** -0.5, number * NOAM_WARMUP ** -1.5)
        optimizer.step()
        return total.item(), loss.detach()

    def meet():
        if on_card:
            torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(()))  # Over Gloo: a barrier of both backends would be NCCL's.

    seconds, speeds = [], []
    for number in range(options.warmup + options.steps):
        index = (number * world + rank) % len(batches)
        batch = make_batch(options.seed, index, batches[index])
        if on_card:
            batch = ([tensor.pin_memory() for tensor in batch[0]], *batch[1:])
        meet()
        start = time.perf_counter()
        tokens, loss = step(number + 1, batch)
        meet()
        if number >= options.warmup:
            seconds.append(time.perf_counter() - start)
            speeds.append(tokens / seconds[-1])
    loss = loss.cpu()
    dist.all_reduce(loss)
    with open("/proc/self/smaps_rollup") as file:  # While all ranks are there.
        sizes = {line.split()[0]: int(line.split()[1]) for line in file if line.startswith(("Rss:", "Pss:"))}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peaks = torch.tensor([peak, peak - (sizes["Rss:"] - sizes["Pss:"])]) * 1024
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({
            "bench": f"nmt_{options.strategy}_pytorch",
            "tgt_tokens_per_s": round(statistics.median(speeds), 1),
            "tgt_tokens_per_s_min": round(min(speeds), 1),
            "tgt_tokens_per_s_max": round(max(speeds), 1),
            "steps": options.steps,
            "world_size": world,
            "params": PARAMETERS,
            "precision": options.precision,
            "device": options.device,
            "attention": attention,
            "mini_batch_words": options.mini_batch_words,
            "median_step_s": round(statistics.median(seconds), 4),
            "step_s": [round(s, 4) for s in seconds],
            "final_loss": round(loss.item() / world, 5),
            "peak_rss_bytes": peaks[0].item(),
            "peak_pss_bytes": peaks[1].item(),
            "peak_device_memory_bytes": torch.cuda.max_memory_allocated() if on_card else None,
            "torch": torch.__version__,
        }), flush=True)
    dist.destroy_process_group()
    # Python's own end can deadlock: it destroys DDP's reducer, and with it Gloo's group, while holding the lock that Gloo's
    # thread waits for.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
