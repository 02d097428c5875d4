#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Starts many runs of three ranks; in each, a random rank is killed, stopped or throws at a random step.

Usage: survive.py BUILD_FOLDER [--runs 100] [--seed 1]. Every second run may restart (--max-restarts 1) and must end with
the weights of an undisturbed run, bit for bit. Every other run must end in time, with the rank's name in the message.
After each, no process of the job and no listener on its port may remain. Prints one JSON line; exits 1 on a failure.
"""
import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import socket
import subprocess
import sys
import tempfile
import time

STEPS = 24
STALL_S = 3
# The launcher's exit code where nothing restarts: a stopped rank is killed by the launcher.
CODES = {"kill": 137, "stop": 137, "throw": 1}
# Start-up of three ranks on a busy machine comes on top of the promise.
LIMIT_S = {"kill": 10, "throw": 10, "stop": STALL_S + 10}
START_S = 45


def free_port():
    """Of those that the system gives to nobody by itself, a moment later say."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def still_running(mark):
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "cmdline").read_bytes().decode(errors="replace"):
                    found.append(int(entry.name))
            except OSError:
                pass
    return found


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def run(build, kind, rank, step, restarts):
    """Returns (exit code, output, seconds, what is wrong with what it left)."""
    with tempfile.TemporaryDirectory(prefix="cohort-survive-", ignore_cleanup_errors=True) as folder:
        return run_in(folder, build, kind, rank, step, restarts)


def run_in(folder, build, kind, rank, step, restarts):
    port = free_port()
    command = [build / "bin/cohort", "run", "--nproc-per-node", "3", "--master-port", str(port),
               "--stall-timeout", str(STALL_S), "--max-restarts", str(restarts), "--log-dir", folder + "/logs", "--",
               build / "tests/survivor", folder, str(STEPS), kind, str(rank), str(step)]
    start = time.monotonic()
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90)
        code, output = ended.returncode, ended.stdout
    except subprocess.TimeoutExpired as error:
        code, output = None, (error.stdout or b"").decode(errors="replace")
    seconds = time.monotonic() - start
    left = [f"process {pid} remains" for pid in still_running(folder)]
    if listens(port):
        left.append(f"port {port} is still listened on")
    return code, output, seconds, left


def weights(output):
    found = re.search(r"weights ([0-9a-f]{64})", output)
    return found and found[1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    build = flags.build.resolve()
    draw = random.Random(flags.seed)
    code, output, _, _ = run(build, "none", 0, 0, 0)
    undisturbed = weights(output)
    assert code == 0 and undisturbed, output
    failures, slowest, counts = [], {}, {}
    for number in range(flags.runs):
        kind = ("kill", "stop", "throw")[number % 3]
        rank, step, restarts = draw.randrange(3), draw.randrange(1, STEPS), number % 2
        code, output, seconds, wrong = run(build, kind, rank, step, restarts)
        # By the launcher, that is: survivors name the rank, too.
        if not re.search(rf"^cohort run: rank {rank} \(pid \d+\) (exited|was killed|was stopped)", output, re.M):
            wrong.append(f"rank {rank} is not named")
        if seconds > LIMIT_S[kind] + START_S:
            wrong.append(f"took {seconds:.1f} s")
        if restarts:
            if code != 0 or weights(output) != undisturbed:
                wrong.append(f"exit code {code}, weights {weights(output)} instead of {undisturbed}")
        elif code != CODES[kind]:
            wrong.append(f"exit code {code}, expected {CODES[kind]}")
        name = kind + (" and restart" if restarts else "")
        counts[name] = counts.get(name, 0) + 1
        slowest[name] = max(slowest.get(name, 0), seconds)
        if wrong:
            failures.append({"run": number, "kind": name, "rank": rank, "step": step, "wrong": wrong})
            print(f"run {number}, {name}, rank {rank}, step {step}: {wrong}\n{output}", file=sys.stderr)
    print(json.dumps({"runs": flags.runs, "seed": flags.seed, "ranks": 3, "stall_timeout_s": STALL_S, "counts": counts,
                      "slowest_s": {k: round(v, 2) for k, v in slowest.items()}, "failures": failures}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
