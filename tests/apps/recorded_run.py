#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Today's programs read a run that version 0.3 recorded on 2 ranks under zero2: checkpoints of two parts in shards, its history and
its vocabularies.

    recorded_run.py BIN FOLDER      FOLDER/expected.json has what 0.3 printed of the same run
"""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
    if done.returncode:
        sys.exit(f"{command[0]} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def main():
    programs, recorded = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    expected = json.loads((recorded / "expected.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        model, pairs = pathlib.Path(folder) / "model", recorded / "pairs.tsv"
        shutil.copytree(recorded / "model", model)
        for checkpoint in ("best", "last"):
            run(programs / "cohort", "checkpoint", "verify", model / checkpoint)
        found = json.loads(run(programs / "cohort", "nmt", "evaluate", "--model-dir", model, "--test-sets", pairs, "--tokenize", "13a",
                               "--precision", "float32", "--json"))
        for key in ("sentences", "loss"):
            # Sums of float32 in another order, on another processor.
            if not abs(found[key] - expected[key]) <= 1e-4 * abs(expected[key]):
                sys.exit(f"{key}: 0.3 printed {expected[key]}, today {found[key]}")
        flags = [pairs if word == "PAIRS" else model if word == "MODEL" else word for word in expected["train"]]
        # The recorded run was of bfloat16, which not every CPU multiplies.
        resumed = run(programs / "cohort", "run", "--nproc-per-node", 2, "--", programs / "cohort-nmt",
                      *flags, "--precision", "float32", "--after-batches", expected["updates"] + 5)
        if f"{expected['updates'] + 5} updates" not in resumed:
            sys.exit(f"expected a run that resumes after update {expected['updates']}, got: {resumed}")
        lines = [json.loads(line) for line in (model / "history.jsonl").read_text().splitlines()]
        last = [line["update"] for line in lines if line["type"] == "train"][-1]
        if last <= expected["updates"]:
            sys.exit(f"expected updates after {expected['updates']} in the history, got {last}")


if __name__ == "__main__":
    main()
