# SPDX-License-Identifier: Apache-2.0
"""Small translators of several seeds, trained and evaluated on 2 ranks: the common part of bench/int8-quality and bench/learning."""
import argparse
import hashlib
import os
import pathlib
import subprocess

import record

BIN = record.ROOT / "build/release/bin"


def parser(description, runs):
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=lambda text: pathlib.Path(text).resolve())
    options.add_argument("--source", default="en")
    options.add_argument("--target", default="zh")
    options.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    options.add_argument("--updates", type=int, default=2500)
    options.add_argument("--runs", type=lambda text: pathlib.Path(text).resolve(), default=record.ROOT / runs)
    return options


def start(options, script):
    """What a record says of this run, or of the one that it resumes. It is dated: three trainings take more than an hour, and every
    change of the code would make it stale."""
    settings = {key: value for key, value in vars(options).items() if key not in ("folder", "runs", "seeds")}
    settings["data"] = digest_of_data(options)
    about = record.start(record.TRANSLATOR, settings, [BIN / "cohort", BIN / "cohort-nmt"],
                         [script, *(f"--{key} {value}" for key, value in settings.items() if key != "data")])
    return record.resume(about | {"measures": {}, "dated": True}, options.runs / "measured.json")


def ranks(programs, *command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([str(programs / "cohort"), "run", "--nproc-per-node", "2", "--", str(programs / "cohort-nmt"), *map(str, command)],
                   cwd=record.ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)


def tokenizer(options):
    return "zh" if options.target == "zh" else "13a"


def digest_of_data(options):
    total = hashlib.sha256()
    for name in ("train", "valid", "test"):
        for language in (options.source, options.target):
            total.update((options.folder / f"{name}.{language}").read_bytes())
    return total.hexdigest()[:16]


def train(options, seed, run, programs=BIN):
    """The training of one seed; the same command resumes it, and does nothing where it is finished."""
    sets = {name: [options.folder / f"{name}.{language}" for language in (options.source, options.target)] for name in ("train", "valid")}
    ranks(programs, "train", "--train-sets", *sets["train"], "--valid-sets", *sets["valid"], "--tokenize", tokenizer(options),
          "--model-dir", run, "--seed", seed, "--preset", "tiny", "--transformer-dim-ffn", 256, "--enc-depth", 4, "--dec-depth", 4,
          "--tied-embeddings", "--transformer-dropout", 0.2, "--dim-vocabs", 4000, 4000, "--mini-batch-words", 1000, "--learn-rate", "4e-3",
          "--lr-warmup", 400, "--exponential-smoothing", 0.002, "--valid-freq", "4e", "--after-batches", options.updates,
          "--early-stopping", 0, "--quiet")


def translations(options, run, precision, beam, programs=BIN):
    """The lines of the test set's translations."""
    output = run / f"test.{precision or 'own'}.{beam}"
    if not output.exists():
        part = output.with_suffix(output.suffix + ".part")
        ranks(programs, "evaluate", "--model-dir", run, "--test-sets", options.folder / f"test.{options.source}",
              options.folder / f"test.{options.target}", "--tokenize", tokenizer(options), "--beam-size", beam, "--output", part,
              *(["--precision", precision] if precision else []))
        part.rename(output)
    return output.read_text().splitlines()


def reference(options):
    return (options.folder / f"test.{options.target}").read_text().splitlines()
