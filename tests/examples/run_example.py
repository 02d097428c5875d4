#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs an example as its head comment says, and expects the output that stands there.

Usage: run_example.py COHORT PROGRAM SOURCE. In the comment a command stands behind "//   $ ", what it prints to stdout in the
"//   " lines after it. COHORT takes the place of `cohort`, PROGRAM that of `./NAME`. The commands run in one empty folder.
"""
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile


def commands_of(source):
    """[(command, what it prints)] of the head comment."""
    commands = []
    for line in source.read_text().splitlines():
        if not line.startswith("//"):
            break
        if line.startswith("//   $ "):
            commands.append([line.removeprefix("//   $ "), ""])
        elif line.startswith("//   ") and commands:
            commands[-1][1] += line.removeprefix("//   ") + "\n"
    if not commands or not all(printed for _, printed in commands):
        sys.exit(f"{source}: expected a head comment with a command, and after each what it prints")
    return commands


def main():
    cohort, program, source = (pathlib.Path(argument).resolve() for argument in sys.argv[1:])
    replaced = {"cohort": str(cohort), f"./{source.stem}": str(program)}
    launchers = re.compile("RANK|WORLD_SIZE|LOCAL_|MASTER_|SLURM_|OMPI_|PADDLE_|TORCHELASTIC_|COHORT_(?!LIBTORCH$|CACHE$)")
    env = {name: value for name, value in os.environ.items() if not launchers.match(name)}
    with tempfile.TemporaryDirectory() as folder:
        for command, expected in commands_of(source):
            words = [replaced.get(word, word) for word in shlex.split(command)]
            if str(program) not in words:
                sys.exit(f"{source}: expected ./{source.stem} in the command, got {command}")
            done = subprocess.run(words, cwd=folder, env={**env, "OMP_NUM_THREADS": "1"}, text=True, capture_output=True)
            if done.returncode != 0 or done.stdout != expected:
                sys.exit(f"$ {command}\n{done.stderr}exit code {done.returncode}, expected 0\n"
                         f"printed:\n{done.stdout}expected:\n{expected}")


if __name__ == "__main__":
    main()
