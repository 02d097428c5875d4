#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""CTranslate2's search with the base translator: the peer of `bench/nmt_decode`.

    python bench/peers/nmt_decode_ctranslate2.py --beam-size 4 --precision float32

The same network as `cohort::nmt::Transformer` with random weights, one thread, every output forced
to `--output-tokens`. Prints one JSON line: generated tokens per second, the median of the runs.
"""
import argparse
import json
import statistics
import tempfile
import time

import ctranslate2
import numpy as np
from ctranslate2.specs import transformer_spec

VOCABULARY, WIDTH, HEADS, LAYERS, INNER = 32_000, 512, 8, 6, 2048
PARAMETERS = 93_255_680


def make_model(folder, random):
    """Writes the base translator to `folder` and returns its number of parameters."""
    count = 0

    def draw(*shape):
        nonlocal count
        count += int(np.prod(shape))
        bound = (6 / sum(shape)) ** 0.5
        return random.uniform(-bound, bound, shape).astype(np.float32)

    def norm(spec):
        nonlocal count
        spec.gamma, spec.beta = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
        count += 2 * WIDTH

    def attention(spec, self_attention):
        norm(spec.layer_norm)
        projections = [3 * WIDTH, WIDTH] if self_attention else [WIDTH, 2 * WIDTH, WIDTH]
        for linear, rows in zip(spec.linear, projections):
            linear.weight = draw(rows, WIDTH)

    def feed_forward(spec):
        nonlocal count
        norm(spec.layer_norm)
        spec.linear_0.weight, spec.linear_1.weight = draw(INNER, WIDTH), draw(WIDTH, INNER)
        spec.linear_0.bias, spec.linear_1.bias = np.zeros(INNER, np.float32), np.zeros(WIDTH, np.float32)
        count += INNER + WIDTH

    spec = transformer_spec.TransformerSpec.from_config((LAYERS, LAYERS), HEADS, pre_norm=True)
    spec.encoder.embeddings[0].weight = draw(VOCABULARY, WIDTH)
    spec.decoder.embeddings.weight = draw(VOCABULARY, WIDTH)
    spec.decoder.projection.weight = draw(VOCABULARY, WIDTH)
    for stack in (spec.encoder, spec.decoder):
        norm(stack.layer_norm)
        for layer in stack.layer:
            attention(layer.self_attention, True)
            feed_forward(layer.ffn)
            if stack is spec.decoder:
                attention(layer.attention, False)
    pieces = ["<blank>", "<unk>", "<s>", "</s>"] + [f"w{i}" for i in range(4, VOCABULARY)]
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    spec.config.add_source_eos = True
    spec.validate()
    spec.save(folder)
    assert count == PARAMETERS, count
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beam-size", type=int, default=1)
    parser.add_argument("--precision", default="float32", help="CTranslate2's compute type")
    parser.add_argument("--batch", type=int, default=32, help="sentences at a time")
    parser.add_argument("--source-tokens", type=int, default=25, help="the end mark included")
    parser.add_argument("--output-tokens", type=int, default=30)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(folder, random)
        translator = ctranslate2.Translator(
            folder, "cpu", compute_type=options.precision, inter_threads=1, intra_threads=1)
    ids = random.integers(4, VOCABULARY, (options.batch, options.source_tokens - 1))
    source = [[f"w{i}" for i in row] for row in ids]
    rates = []
    for run in range(options.runs + 1):  # the first warms up
        start = time.perf_counter()
        results = translator.translate_batch(
            source, beam_size=options.beam_size, max_batch_size=0,
            min_decoding_length=options.output_tokens, max_decoding_length=options.output_tokens)
        seconds = time.perf_counter() - start
        tokens = sum(len(result.hypotheses[0]) for result in results)
        assert tokens == options.batch * options.output_tokens, tokens
        rates.append(tokens / seconds)
    rates = rates[1:]
    print(json.dumps({
        "bench": "nmt_decode_ctranslate2", "tokens_per_s": round(statistics.median(rates), 1),
        "tokens_per_s_each": [round(rate, 1) for rate in rates], "precision": options.precision, "beam_size": options.beam_size,
        "batch": options.batch, "source_tokens": options.source_tokens,
        "output_tokens": options.output_tokens, "params": parameters,
        "ctranslate2": ctranslate2.__version__}), flush=True)


if __name__ == "__main__":
    main()
