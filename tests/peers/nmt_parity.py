#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trained translators elsewhere: PyTorch's modules compute the same scores from best/, CTranslate2 the same
translations from `cohort nmt export`.

Usage: nmt_parity.py BUILD_FOLDER [--record FOLDER]. Run by the Python that COHORT_PEER_PYTHON names; prints one JSON
line, exits 1 on a difference. Everything is float32 on one thread, but PyTorch's side: float64, from the float32 weights.

--record trains models of 16 columns and keeps in FOLDER, by variant, a copy of best/ and, as logits.safetensors, ids and
PyTorch's scores: what RecordedLogitsTest reads without any PyTorch for Python. The files in the repository were made by
    $COHORT_PEER_PYTHON tests/peers/nmt_parity.py build/release --record tests/translate/recorded_logits
"""
import argparse
import json
import math
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

import ctranslate2
import safetensors.torch
import sentencepiece
import torch
from torch import nn

HEADS, LONGEST = 4, 60
SIZES = ["--dim-emb", "48", "--transformer-dim-ffn", "96", "--dim-vocabs", "60", "60", "--after-epochs", "12"]
RECORDED_SIZES = ["--dim-emb", "16", "--transformer-dim-ffn", "24", "--dim-vocabs", "40", "40", "--after-epochs", "3",
                  "--enc-depth", "1", "--dec-depth", "1"]
VARIANTS = {
    "pre-norm relu": [],
    "pre-norm swish tied": ["--transformer-ffn-activation", "swish", "--tied-embeddings"],
    "post-norm relu": ["--transformer-postprocess", "dan"],
    "post-norm gelu tied-all": ["--transformer-postprocess", "dan", "--transformer-ffn-activation", "gelu",
                                "--tied-embeddings-all", "--joined-dictionary"],
}
ACTIVATIONS = {"relu": nn.functional.relu, "gelu": nn.functional.gelu, "swish": nn.functional.silu}


def write_corpus(folder):
    """A made-up language: words are spelt backwards."""
    random.seed(1)
    words = "red green blue one two three cat dog sun moon".split()
    for name, count in {"train": 800, "valid": 40, "test": 100}.items():
        lines = [[random.choice(words) for _ in range(random.randint(1, 6))] for _ in range(count)]
        for side, spell in {"en": lambda word: word, "xx": lambda word: word[::-1]}.items():
            text = "".join(" ".join(map(spell, line)) + "\n" for line in lines)
            (folder / f"{name}.{side}").write_text(text)


def run(build, *arguments, **keywords):
    return subprocess.run([build / arguments[0], *arguments[1:]], check=True, text=True,
                          env=dict(os.environ, OMP_NUM_THREADS="1"), stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, **keywords).stdout


def train(build, folder, model_dir, flags, sizes):
    texts = {name: [folder / f"{name}.en", folder / f"{name}.xx"] for name in ("train", "valid")}
    run(build, "bin/cohort-nmt", "train", "--train-sets", *texts["train"], "--valid-sets", *texts["valid"],
        "--model-dir", model_dir, "--preset", "tiny", "--transformer-heads", str(HEADS), "--mini-batch", "32",
        "--lr-warmup", "50", "--learn-rate", "5e-3", "--tokenize", "13a", "--quiet", "--precision", "float32", *sizes,
        *flags)


class Positions(nn.Module):
    """Embeddings scaled by sqrt(D) plus sines in even columns and cosines in odd ones."""

    def __init__(self, table):
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(table)

    def forward(self, ids):
        width = self.embedding.embedding_dim
        angle = torch.arange(ids.shape[1]).double()[:, None] * 10000 ** (-torch.arange(0, width, 2).double() / width)
        return self.embedding(ids) * math.sqrt(width) + torch.stack([angle.sin(), angle.cos()], 2).flatten(1)


def pytorch_logits(best, source, target):
    """The whole model of torch.nn, with weights and facts of a checkpoint."""
    manifest = json.loads((best / "manifest.json").read_text())
    facts = {name.removeprefix("model."): value for name, value in manifest["facts"].items()}
    weights = safetensors.torch.load_file(best / manifest["files"]["weights"]["name"])
    weights = {name: tensor.double() for name, tensor in weights.items()}
    width, pre_norm = int(facts["dim_emb"]), facts["norm"] == "da"
    options = dict(d_model=width, nhead=HEADS, dim_feedforward=int(facts["dim_ffn"]), dropout=0, batch_first=True,
                   activation=ACTIVATIONS[facts["ffn_activation"]], norm_first=pre_norm, dtype=torch.float64)
    make_norm = lambda: nn.LayerNorm(width, dtype=torch.float64) if pre_norm else None
    model = nn.ModuleDict({
        "encoder": nn.TransformerEncoder(nn.TransformerEncoderLayer(**options), int(facts["enc_depth"]), make_norm(),
                                         enable_nested_tensor=False),
        "decoder": nn.TransformerDecoder(nn.TransformerDecoderLayer(**options), int(facts["dec_depth"]), make_norm())})
    own = {name.replace("in_proj.weight", "in_proj_weight"): tensor for name, tensor in weights.items()
           if name.startswith(("encoder.", "decoder."))}
    missing, unexpected = model.load_state_dict(own, strict=False)
    assert not unexpected, unexpected
    with torch.no_grad():  # attention has no biases here
        for name in missing:
            assert name.endswith(("in_proj_bias", "out_proj.bias")), f"{name} is in no checkpoint"
            model.get_parameter(name).zero_()
        shared = weights.get("embedding")
        table = {side: weights.get(f"{side}_embedding", shared) for side in ("source", "target")}
        padding = source == 0
        model.eval()
        memory = model["encoder"](Positions(table["source"])(source), src_key_padding_mask=padding)
        hidden = model["decoder"](Positions(table["target"])(target), memory, memory_key_padding_mask=padding,
                                  tgt_mask=torch.ones(2 * [target.shape[1]]).triu(1).bool())
        return hidden @ weights.get("generator.weight", table["target"]).T


def compare_scores(build, folder, model_dir):
    """Returns the largest difference, as a share of the tolerance of 1e-5 absolute and relative."""
    run(build, "tests/nmt_logits", model_dir, folder / "logits")
    ours = safetensors.torch.load_file(folder / "logits")
    theirs = pytorch_logits(model_dir / "best", ours["source"], ours["input"])
    real = ours["input"] != 0
    return ((ours["logits"] - theirs).abs() / (1e-5 + 1e-5 * theirs.abs()))[real].max().item()


def compare_translations(build, folder, model_dir):
    """Returns how many of the test sentences are translated to the same text."""
    exported = folder / (model_dir.name + "-ctranslate2")
    run(build, "bin/cohort-nmt", "export", "--to", "ctranslate2", "--model-dir", model_dir, "--output-dir", exported)
    sources = (folder / "test.en").read_text()
    ours = run(build, "bin/cohort-nmt", "translate", "--model-dir", model_dir, "--beam-size", "1", "--precision",
               "float32", "--max-output-length", str(LONGEST), "--max-length-factor", "100", input=sources)
    cut, join = (sentencepiece.SentencePieceProcessor(model_file=str(exported / f"{side}.spm"))
                 for side in ("source", "target"))
    translator = ctranslate2.Translator(str(exported), compute_type="float32", intra_threads=1)
    theirs = translator.translate_batch([cut.encode(line, out_type=str) for line in sources.splitlines()],
                                        beam_size=1, max_decoding_length=LONGEST, disable_unk=True)
    theirs = [join.decode(result.hypotheses[0]) for result in theirs]
    return sum(mine == other for mine, other in zip(ours.splitlines(), theirs, strict=True)), len(set(theirs))


def record(build, folder, recorded):
    """Writes a trained model of each variant, small as it comes, with PyTorch's scores."""
    for number, (name, flags) in enumerate(VARIANTS.items()):
        model_dir, kept = folder / str(number), recorded / name.replace(" ", "-")
        train(build, folder, model_dir, flags, RECORDED_SIZES)
        run(build, "tests/nmt_logits", model_dir, folder / "logits")
        ids = safetensors.torch.load_file(folder / "logits")
        ids = {side: ids[side][:4].contiguous() for side in ("source", "input")}
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(model_dir / "best", kept)
        logits = pytorch_logits(kept, ids["source"], ids["input"]).float().contiguous()
        safetensors.torch.save_file({**ids, "logits": logits}, kept / "logits.safetensors", {"torch": torch.__version__})


def compare(build, folder):
    result = {"torch": torch.__version__, "ctranslate2": ctranslate2.__version__, "models": {}}
    for number, (name, flags) in enumerate(VARIANTS.items()):
        model_dir = folder / str(number)
        train(build, folder, model_dir, flags, SIZES)
        same, distinct = compare_translations(build, folder, model_dir)
        result["models"][name] = {"score_difference": compare_scores(build, folder, model_dir),
                                  "same_translations": same, "distinct_translations": distinct}
    print(json.dumps(result))
    good = [model["score_difference"] < 1 and model["same_translations"] == 100 and
            model["distinct_translations"] > 50 for model in result["models"].values()]
    return 0 if all(good) else 1


def main(folder):
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--record", type=pathlib.Path, metavar="FOLDER")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    write_corpus(folder)
    return record(flags.build, folder, flags.record) if flags.record else compare(flags.build, folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="cohort-nmt-parity-") as scratch:
        sys.exit(main(pathlib.Path(scratch)))
