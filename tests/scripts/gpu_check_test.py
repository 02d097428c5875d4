#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu-check with programs that only pretend, and bench/gpu-record, which reads what it found.

Usage: gpu_check_test.py SOURCE_FOLDER [CASES OF unittest]
"""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

SOURCE = pathlib.Path(sys.argv.pop(1)).resolve()
DOCTOR = """#!/bin/sh
echo '{"machine": {"host": "h", "cpu": "a CPU", "cores": 2, "gpus": []}, "cuda": {"devices": 0, "kernels": false}, "versions": {}}'
"""
# `cohort run`: writes a history wherever it is told to. As a launcher has it, its rank has a session of its own, and ends with it if it is asked to.
COHORT = """#!/bin/bash
if [[ -n ${RANK_FILE:-} ]]; then
  setsid sleep 600 &
  trap "kill $!; exit 143" TERM
  echo $! >"$RANK_FILE"
  wait
fi
while (($#)); do
  [[ $1 != --output && $1 != --model-dir ]] || {
    mkdir -p "$2"
    echo '{"train_loss": 1.0, "images_per_s": 5, "wait_share": 0, "tgt_tokens_per_s": 7}' >"$2/history.jsonl"
  }
  shift
done
echo '{"rate": 3}'
echo 'a warning of the end' >&2
"""


class GpuCheckTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        self.write("gpu-check/commit", "1234567")
        self.write("gpu-check/libtorch-version", "9.9.0")
        self.write("torch/version.py", "__version__ = '9.9.0'\n")
        self.write("gpu-check/bin/cohort-doctor", DOCTOR)
        self.write("gpu-check/bin/cohort", COHORT)
        self.write("path/python3", '#!/bin/sh\nexec /usr/bin/python3 -S "$@"\n')  # Without torch, wherever this is tested.
        (self.folder / "work").mkdir()
        self.results = self.folder / "results"
        subprocess.run(["tar", "-C", self.folder, "-cf", self.folder / "archive", "gpu-check"], check=True)
        self.environment = {**os.environ, "COHORT_LIBTORCH": str(self.folder / "torch"), "TMPDIR": str(self.folder / "work"),
                            "PATH": f"{self.folder}/path:{os.environ['PATH']}"}
        self.environment.pop("COHORT_GPU_CHECK_MINUTES", None)

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def rehearse(self, *slices, archive="archive", **variables):
        command = [SOURCE / "scripts/gpu-check", "rehearse", self.folder / archive, self.results, *slices]
        return subprocess.run(command, env=self.environment | variables, capture_output=True, text=True, timeout=120)

    def test_a_run_ends_with_its_end(self):
        self.write("results.logs/earlier.txt", "")
        done = self.rehearse("resnet", "translator")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        lines = [json.loads(line) for line in self.results.read_text().splitlines()]
        self.assertEqual([line["check"] for line in lines],
                         ["machine", "resnet50", "pytorch_step", "translator_tiny", "cohort_step_200", "pytorch_step_200", "end"])
        found = {line["check"]: line for line in lines}
        self.assertEqual(found["end"]["slice"], "end")
        self.assertEqual(found["cohort_step_200"]["rate"], 3, "its last line is a warning")
        self.assertEqual(found["pytorch_step"]["status"], "not available")
        self.assertIn("No module named ", found["pytorch_step"]["why"])
        self.assertFalse((self.folder / "results.logs/earlier.txt").exists())
        self.assertEqual(list((self.folder / "work").iterdir()), [])

    def test_what_is_stopped_computes_no_more(self):
        rank = self.folder / "rank"
        for stop in (lambda run: run.terminate(), lambda run: os.killpg(run.pid, signal.SIGINT)):
            rank.unlink(missing_ok=True)
            command = [SOURCE / "scripts/gpu-check", "rehearse", self.folder / "archive", self.results, "resnet"]
            # A shell that runs tests in the background leaves the interrupt ignored.
            run = subprocess.Popen(command, env=self.environment | {"RANK_FILE": str(rank)}, start_new_session=True,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self.addCleanup(run.wait)
            self.addCleanup(run.kill)
            self.wait_until(lambda: rank.exists() and rank.read_text().endswith("\n"))
            stop(run)
            self.assertNotEqual(run.wait(30), 0)
            self.wait_until(lambda: not pathlib.Path(f"/proc/{rank.read_text().strip()}/exe").exists())
            self.assertEqual(list((self.folder / "work").iterdir()), [])
            self.assertNotIn('"end"', self.results.read_text())

    def wait_until(self, condition):
        end = time.monotonic() + 30
        while not condition():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)

    def test_what_cannot_be_is_refused_by_name(self):
        for variables, text in (({"archive": "absent"}, f"{self.folder}/absent: no such file; expected what scripts/gpu-check pack made"),
                                ({"COHORT_GPU_CHECK_MINUTES": "8"}, "COHORT_GPU_CHECK_MINUTES=8: expected 1 to 7")):
            done = self.rehearse(**variables)
            self.assertEqual(done.returncode, 2)
            self.assertIn(f"gpu-check: {text}", done.stderr)


class GpuRecordTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def results(self, name, slice_, card="a card", status="passed", end=True, commit="1234567"):
        machine = {"slice": "machine", "check": "machine", "date": "2026-01-02", "commit": commit, "load": 0.5, "versions": {},
                   "machine": {"cpu": "a CPU", "cores": 2, "gpus": [{"name": card}]}}
        check = {"slice": slice_, "check": "speed", "status": status, "seconds": 2.5, "rate": 7}
        lines = [machine, check, *([{"slice": "end", "check": "end", "status": "passed", "seconds": 0}] if end else [])]
        (self.folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self.folder / name

    def record(self, *results):
        return subprocess.run([sys.executable, SOURCE / "bench/gpu-record", *results], capture_output=True, text=True)

    def test_several_results_make_one_record(self):
        made = json.loads(self.record(self.results("a", "first"), self.results("b", "resnet")).stdout)
        self.assertEqual(sorted(made["slices"]), ["first", "resnet"])
        self.assertEqual(made["slices"]["resnet"]["speed"], {"status": "passed", "seconds": 2.5, "rate": 7})
        self.assertEqual((made["cards"], made["measured"]["commit"], made["measured"]["seconds"]), (["a card"], "1234567", 5.0))

    def test_what_is_cut_off_or_differs_is_refused(self):
        good = self.results("good", "first")
        for other, text in ((self.results("a", "resnet", end=False), "a: expected the results of one run of scripts/gpu-check"),
                            (self.results("b", "resnet", card="another"), "b: cards: expected ['a card']"),
                            (self.results("c", "resnet", commit="7654321"), "c: commit: expected 1234567"),
                            (self.results("d", "first"), "d: expected slices that no earlier file has, got first"),
                            (self.results("e", "resnet", status="failed"), "e: did not pass: speed"),
                            (self.results("f", "resnet", commit="1234567, with changes"), "f: of commit 1234567, with changes: commit what")):
            done = self.record(good, other)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertIn(text, done.stderr)
        cut = self.folder / "cut"
        cut.write_text(good.read_text()[:-20])
        self.assertIn("cut: expected the results of one run", self.record(cut).stderr)


if __name__ == "__main__":
    unittest.main()
