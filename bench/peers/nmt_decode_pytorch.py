#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Search with the base translator as a PyTorch tutorial writes it: a peer of `bench/nmt_decode`.

    python bench/peers/nmt_decode_pytorch.py --beam-size 4

Nothing is kept between steps: each computes the whole beginnings again, and the scores of the next
token alone. One thread, every output forced to `--output-tokens`. Prints one JSON line: generated
tokens per second, the median of the runs.
"""
import argparse
import json
import statistics
import time

import torch

from nmt_ddp import BOS, EOS, FIRST_TOKEN, PARAMETERS, VOCABULARY, Translator


def encode(model, source):
    memory = model.embed(model.source_embedding, source)
    for layer in model.encoder:
        memory = layer(memory, None, False)
    return model.encoder_norm(memory)


def next_log_probs(model, memory, prefix):
    """log p [rows, V] of the token after each row of `prefix`."""
    x = model.embed(model.target_embedding, prefix)
    mask = torch.full((prefix.shape[1],) * 2, -torch.inf, dtype=x.dtype).triu_(1)
    for layer in model.decoder:
        x = layer(x, mask, False, memory, None)
    scores = model.output(model.decoder_norm(x[:, -1])).float()
    return scores.log_softmax(-1)


def search(model, source, beam_size, output_tokens):
    """The likeliest translations found, [sentences, 1 + output_tokens]."""
    sentences = source.shape[0]
    memory = encode(model, source)
    beams = torch.full((sentences, 1, 1), BOS)
    totals = torch.zeros(sentences, 1)
    for _ in range(output_tokens):
        width = beams.shape[1]
        log_probs = next_log_probs(model, memory.repeat_interleave(width, 0), beams.flatten(0, 1))
        log_probs[:, :FIRST_TOKEN] = -torch.inf  # no end mark before the length is reached
        sums = totals.unsqueeze(2) + log_probs.view(sentences, width, VOCABULARY)
        totals, places = sums.flatten(1).topk(beam_size)
        origins = places.div(VOCABULARY, rounding_mode="floor")
        beams = torch.cat([beams.gather(1, origins.unsqueeze(2).expand(-1, -1, beams.shape[2])),
                           (places % VOCABULARY).unsqueeze(2)], 2)
    return beams[:, 0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beam-size", type=int, default=1)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="fp32")
    parser.add_argument("--batch", type=int, default=32, help="sentences at a time")
    parser.add_argument("--source-tokens", type=int, default=25, help="the end mark included")
    parser.add_argument("--output-tokens", type=int, default=30)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    model = Translator("bmm", torch.float32).eval().to(dtype)
    model.dtype = dtype
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS
    source = torch.randint(FIRST_TOKEN, VOCABULARY, (options.batch, options.source_tokens))
    source[:, -1] = EOS
    rates = []
    with torch.inference_mode():
        search(model, source, options.beam_size, 2)  # warms up
        for _ in range(options.runs):
            start = time.perf_counter()
            found = search(model, source, options.beam_size, options.output_tokens)
            tokens = found.shape[0] * (found.shape[1] - 1)
            rates.append(tokens / (time.perf_counter() - start))
    print(json.dumps({
        "bench": "nmt_decode_pytorch_uncached", "tokens_per_s": round(statistics.median(rates), 1),
        "tokens_per_s_each": [round(rate, 1) for rate in rates], "precision": options.precision,
        "beam_size": options.beam_size, "batch": options.batch,
        "source_tokens": options.source_tokens, "output_tokens": options.output_tokens,
        "params": PARAMETERS, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
