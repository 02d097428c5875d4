#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What every record in bench/results says of itself, and whether it still speaks of this code.

A benchmark calls start() before it measures and prints finish()'s result after. scripts/check-readme asks why_stale() before
a document quotes a figure. As a program, for benchmarks in bash and for records that are older than this file:

    bench/record.py start MEASURED... -- COMMAND...   prints what start() returns. Of MEASURED, --step and --translator stand
                                                      for folders, what begins with build/ or / is a program, and
                                                      --resume=FILE asks resume()
    bench/record.py adopt FILE...                     adds to records that name no commit the one that wrote the file
"""
import datetime
import hashlib
import json
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What the step of bench/nmt_step.cpp is made of.
STEP = ("cohort/base", "cohort/comm", "cohort/data", "cohort/nmt", "cohort/optim", "cohort/parallel", "cohort/train",
        "cohort/translate", "apps/step_batches.cpp", "bench/median.h", "bench/nmt_step.cpp", "bench/sent_bytes.h", "CMakeLists.txt", "cmake")
# What `cohort nmt train` is made of.
TRANSLATOR = ("cohort/base", "cohort/comm", "cohort/data", "cohort/launch", "cohort/nmt", "cohort/optim", "cohort/parallel",
              "cohort/ps", "cohort/text", "cohort/train", "cohort/translate", "apps/nmt", "CMakeLists.txt", "cmake")
# Extensions of the instruction set that decide which kernels run.
FLAGS = ("sse4_2", "avx", "avx2", "fma", "f16c", "sha_ni", "vaes", "avx512f", "avx512bw", "avx512vl", "avx512_vnni",
         "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8")


def git(*words, root=ROOT):
    """Standard output of git in `root`; None if git fails or is not there."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None


def why_no_git(root=ROOT):
    """Why git cannot tell which files `root` consists of; None if it can."""
    top = git("rev-parse", "--show-toplevel", root=root)
    if top is None or pathlib.Path(top).resolve() != pathlib.Path(root).resolve():
        return "this source tree has no git metadata"
    return None


def code_of(path):
    """A file's content; of C++ without lines that are comments alone, and without indentation: they measure alike."""
    content = path.read_bytes()
    if path.suffix not in (".h", ".cpp", ".cu"):
        return content
    lines = (line.strip() for line in content.split(b"\n"))
    return b"\n".join(line for line in lines if line and not line.startswith(b"//"))


def digest(name, root=ROOT):
    """A digest of a folder's or file's names and contents as they are now, without what git ignores.

    Contents, not commits, say whether a record is of this code: they survive a squash, a rebase and a shallow clone.
    """
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", name, root=root) or ""
    whole = hashlib.sha256()
    for file in sorted(set(filter(None, listed.split("\0")))):
        if (path := pathlib.Path(root) / file).is_file():
            content = code_of(path)
            whole.update(f"{file}\0{len(content)}\0".encode() + content)
    return whole.hexdigest()[:16]


def processor(cpuinfo="/proc/cpuinfo"):
    """Vendor, family, model, name, flags of FLAGS and present clock of every core."""
    cores = [dict(map(str.strip, line.split(":", 1)) for line in text.splitlines() if ":" in line)
             for text in pathlib.Path(cpuinfo).read_text().split("\n\n") if text.strip()]
    first = cores[0]
    number = lambda key: int(first[key]) if first.get(key, "").isdigit() else None
    return {"vendor": first.get("vendor_id"), "family": number("cpu family"), "model": number("model"),
            "stepping": number("stepping"), "name": first.get("model name"), "cores": len(cores),
            "mhz": [float(core["cpu MHz"]) for core in cores if "cpu MHz" in core], "cache": first.get("cache size"),
            "flags": [flag for flag in FLAGS if flag in first.get("flags", "").split()]}


def refuse_old_programs(programs):
    """Ends if a program is not built from the code as it is: the record would name a commit that it is not made of."""
    for program in (pathlib.Path(name).absolute() for name in programs):
        build = next((folder for folder in program.parents if (folder / "build.ninja").exists()), None)
        if not program.exists() or not build:
            sys.exit(f"{program}: expected a program of a build folder; build it first")
        done = subprocess.run(["ninja", "-C", build, "-n", program.relative_to(build)], capture_output=True, text=True)
        if "ninja: no work to do." not in done.stdout:
            sys.exit(f"{program} is not built from the code as it is: build it first")


def start(measures, settings=None, programs=(), command=None, root=ROOT):
    """What is to be known before a measurement.

    `measures`: the folders and files, relative to the root, whose code decides the result; the benchmark's own script is added.
    `settings`: values of the benchmark's options. `programs`: what it runs; ends if one is not built from the code as it is.
    """
    command = command or sys.argv
    script = os.path.relpath(os.path.abspath(command[0]), root)
    measures = sorted({*measures, script})
    for name in measures:
        if not (root / name).exists():
            sys.exit(f"{name}: to be measured, and not there")
    refuse_old_programs(programs)
    changed = git("status", "--porcelain", "--", *measures, root=root)
    return {"date": datetime.date.today().isoformat(), "commit": git("rev-parse", "HEAD", root=root),
            "uncommitted": [line[3:] for line in changed.splitlines()] if changed else [],
            "measures": {name: digest(name, root) for name in measures}, "command": " ".join([script, *command[1:]]), "settings": settings or {},
            "processor": processor(), "kernel": platform.release(), "niceness": os.nice(0),
            "load_before": [round(load, 2) for load in os.getloadavg()], "began": time.time()}


def resume(about, path):
    """What `path` holds of start()'s results when this measurement began, or `about`, which `path` then holds.

    For a benchmark that keeps its parts in the folder of `path`: ends if those are of other code or other settings, or if nothing
    says of which.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        if any(path.parent.iterdir()):
            sys.exit(f"{path}: expected this file beside what {path.parent} holds, to tell which code made it. Use another folder")
        keep(path, about)
        return about
    kept = json.loads(path.read_text())
    for name in ("measures", "settings"):
        if kept[name] != about[name]:
            sys.exit(f"{path}: other {name} than now: {kept[name]}; expected {about[name]}. Use another folder, or delete this one")
    return kept


def finish(about, results):
    """The record: what start() returned, completed, and `results`, a dictionary."""
    about = dict(about)
    about["seconds"] = round(time.time() - about.pop("began"), 1)
    about["load_after"] = [round(load, 2) for load in os.getloadavg()]
    return {"measured": about, **results}


def keep(path, value):
    """Puts `value` as JSON in the place of what `path` holds: whole, even if this is cut off, for a later run resumes from it."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.replace(path)


def run_json(*command):
    """Runs a program on one thread a process; returns what the last line that it prints holds."""
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
                          text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def spread(values, digits=None):
    """Median, least and most of several measurements of one quantity; rounded if `digits` are given."""
    found = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return found if digits is None else {name: round(value, digits) for name, value in found.items()}


def earlier_programs():
    """The folder that COHORT_EARLIER_BIN names, whose programs of another version take part; None without it."""
    named = os.environ.get("COHORT_EARLIER_BIN")
    return pathlib.Path(named).absolute() if named else None


def version_of(programs):
    """What `cohort --version` says in a folder of programs, without the name."""
    told = subprocess.run([programs / "cohort", "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return told.split()[-1]


def faster_attention(step):
    """The PyTorch side's faster kind of attention on this machine, and the target tokens a second with each.

    `step`: runs bench/peers/nmt_ddp.py with that --attention, and returns the line that it prints.
    """
    tried = {attention: step(attention)["tgt_tokens_per_s"] for attention in ("bmm", "sdpa")}
    return max(tried, key=tried.get), tried


def free_port():
    """A port of 127.0.0.1 on which nobody listened a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def end_all(launchers):
    """Returns once none of these `cohort run` runs, nor any of their ranks."""
    left = [launcher for launcher in launchers if launcher.poll() is None]
    for launcher in left:
        launcher.terminate()
    for launcher in left:
        try:
            launcher.wait(timeout=10)
        except subprocess.TimeoutExpired:
            launcher.terminate()  # The second one makes `cohort run` kill its ranks.
            try:
                launcher.wait(timeout=30)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def short_commit(record):
    """The first digits of the commit that the record names; None if it names none."""
    commit = isinstance(record, dict) and record.get("measured", {}).get("commit")
    return commit[:7] if commit else None


def why_stale(record, root=ROOT):
    """Why `record` does not speak of the code in `root`; None if it does. Needs git: why_no_git() is None."""
    about = record.get("measured", {}) if isinstance(record, dict) else {}
    missing = [key for key in ("commit", "measures", "processor", "load_before", "command", "settings") if key not in about]
    if missing:
        return "it does not say: " + ", ".join(missing)
    if not about["commit"]:
        return "it names no commit"
    if about["uncommitted"]:
        return f"{about['uncommitted'][0]} was not committed"
    if not isinstance(about["measures"], dict) or not (about["measures"] or about.get("dated")):
        return "it does not say: the digest of what it measures"
    changed = [name for name, then in about["measures"].items() if digest(name, root) != then]
    return f"{changed[0]} has changed since {about['commit'][:7]}" if changed else None


def adopt(path, root=ROOT):
    """Adds the commit that wrote a record to one that names none. It stays stale: nothing says what it measured."""
    record = json.loads(path.read_text())
    if isinstance(record, dict) and "measured" in record:
        return
    commit = git("log", "-1", "--format=%H", "--", str(path), root=root)
    if not commit or git("status", "--porcelain", "--", str(path), root=root):
        sys.exit(f"{path}: expected a file that is committed as it is")
    about = {"commit": commit, "commit_from": "git log: the commit that wrote this file, not what its program was built from"}
    whole = {"measured": about, **(record if isinstance(record, dict) else {"results": record})}
    path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def main():
    words = sys.argv[1:]
    if words[:1] == ["start"] and "--" in words:
        split = words.index("--")
        sets = {"--step": STEP, "--translator": TRANSLATOR}
        kept = [word.removeprefix("--resume=") for word in words[1:split] if word.startswith("--resume=")]
        programs = [word for word in words[1:split] if word.startswith(("build/", "/"))]
        measures = [name for word in words[1:split] if word not in programs and not word.startswith("--resume=")
                    for name in sets.get(word, [word])]
        # What resumes is told apart by its folder of runs, however that was written.
        about = start(measures, {} if kept else {"arguments": words[split + 2:]}, programs, words[split + 1:])
        print(json.dumps(resume(about, pathlib.Path(kept[0])) if kept else about))
    elif words[:1] == ["adopt"] and len(words) > 1:
        for name in words[1:]:
            adopt(pathlib.Path(name).resolve())
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
