#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/record.py: what a record says, when it is stale, and what benchmarks share.  Usage: record_test.py SOURCE_FOLDER"""
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

SOURCE = pathlib.Path(sys.argv.pop(1)).resolve()
sys.path.insert(0, str(SOURCE / "bench"))
import record  # noqa: E402


class RecordTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name in ("cohort/a/a.cpp", "cohort/b/b.cpp", "bench/run"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text("1\n")
        self.git("init", "-q")
        self.commit()

    def git(self, *words):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false", *words], cwd=self.root,
                       check=True, capture_output=True)

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "all")

    def start(self, *measures, **options):
        return record.start(measures, command=[str(self.root / "bench/run"), "--rows", "3"], root=self.root, **options)

    def test_a_record_says_what_it_is_of(self):
        made = record.finish(self.start("cohort/a", settings={"rows": 3}), {"rate": 7})
        about = made["measured"]
        self.assertEqual(made["rate"], 7)
        self.assertEqual(about["commit"], record.git("rev-parse", "HEAD", root=self.root))
        self.assertEqual(about["command"], "bench/run --rows 3")
        self.assertEqual(about["settings"], {"rows": 3})
        self.assertEqual(about["measures"], {name: record.digest(name, self.root) for name in ("bench/run", "cohort/a")})
        self.assertEqual(about["uncommitted"], [])
        self.assertEqual(len(about["load_before"]), 3)
        self.assertGreaterEqual(about["seconds"], 0)
        self.assertNotIn("began", about)
        self.assertGreaterEqual(about["processor"]["cores"], 1)
        self.assertIsNone(record.why_stale(made, self.root))
        self.assertEqual(json.loads(json.dumps(made)), made)

    def test_the_processor_is_read(self):
        file = self.root / "cpuinfo"
        file.write_text("".join(
            f"processor\t: {i}\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nstepping\t: 1\n"
            f"cpu MHz\t\t: 244{i}.5\ncache size\t: 512 KB\nflags\t\t: fpu avx2 avx512_bf16x avx512f\n\n" for i in range(2)))
        self.assertEqual(record.processor(file), {
            "vendor": "AuthenticAMD", "family": 25, "model": 1, "stepping": 1, "name": "AMD EPYC", "cores": 2,
            "mhz": [2440.5, 2441.5], "cache": "512 KB", "flags": ["avx2", "avx512f"]})

    def test_only_a_change_of_what_is_measured_makes_it_stale(self):
        made = record.finish(self.start("cohort/a"), {})
        (self.root / "cohort/b/b.cpp").write_text("2\n")
        self.commit()
        self.assertIsNone(record.why_stale(made, self.root))
        (self.root / "cohort/a/a.cpp").write_text("2\n")
        for _ in range(2):  # not committed, and committed
            self.assertEqual(record.why_stale(made, self.root), f"cohort/a has changed since {made['measured']['commit'][:7]}")
            self.commit() if record.git("status", "--porcelain", root=self.root) else None

    def test_names_and_contents_are_digested_and_nothing_that_is_ignored(self):
        folder = self.root / "cohort/a"
        seen = [record.digest("cohort/a", self.root)]
        for change in (lambda: (folder / "new.cpp").write_text("1\n"), lambda: (folder / "new.cpp").rename(folder / "other.cpp"),
                       lambda: (folder / "a.cpp").unlink()):
            change()
            seen.append(record.digest("cohort/a", self.root))
        self.assertEqual(len(set(seen)), len(seen))
        (self.root / ".gitignore").write_text("*.pyc\n")
        (folder / "a.pyc").write_text("1\n")
        self.assertEqual(record.digest("cohort/a", self.root), seen[-1])
        self.commit()
        self.assertEqual(record.digest("cohort/a", self.root), seen[-1])

    def test_comments_and_indentation_of_cpp_do_not_count(self):
        file, script = self.root / "cohort/a/a.cpp", self.root / "cohort/a/run"
        file.write_text("// one\nint a;  // here\n")
        script.write_text("# one\n")
        before = record.digest("cohort/a", self.root)
        file.write_text("// two\n\n    int a;  // here\n  // three\n")
        self.assertEqual(record.digest("cohort/a", self.root), before)
        file.write_text("// two\nint b;  // here\n")
        self.assertNotEqual(record.digest("cohort/a", self.root), before)
        file.write_text("// one\nint a;  // here\n")
        script.write_text("# two\n")
        self.assertNotEqual(record.digest("cohort/a", self.root), before)

    def test_changes_that_are_not_committed_are_named(self):
        (self.root / "cohort/a/a.cpp").write_text("2\n")
        (self.root / "cohort/a/new.cpp").write_text("2\n")
        made = record.finish(self.start("cohort/a"), {})
        self.assertEqual(made["measured"]["uncommitted"], ["cohort/a/a.cpp", "cohort/a/new.cpp"])
        self.commit()
        self.assertEqual(record.why_stale(made, self.root), "cohort/a/a.cpp was not committed")

    def test_a_program_that_is_not_of_the_code_or_absent_is_refused(self):
        program = self.root / "build/bin/program"
        refused = lambda text: self.assertRaisesRegex(SystemExit, text)
        with refused("expected a program of a build folder; build it first"):
            self.start("cohort/a", programs=[program])
        program.parent.mkdir(parents=True)
        (self.root / "build/build.ninja").write_text(
            f"rule copy\n command = cp $in $out\nbuild bin/program: copy {self.root}/cohort/a/a.cpp\n")
        build = lambda: subprocess.run(["ninja", "-C", self.root / "build"], check=True, capture_output=True)
        build()
        self.start("cohort/a", programs=[program])
        (self.root / "cohort/a/a.cpp").write_text("2\n")
        with refused("bin/program is not built from the code as it is: build it first"):
            self.start("cohort/a", programs=[program])
        build()
        self.start("cohort/a", programs=[program])

    def test_a_shell_starts_a_record_with_its_arguments_and_the_programs_that_it_names(self):
        shutil.copy(SOURCE / "bench/record.py", self.root / "bench/record.py")
        (self.root / "other/bin").mkdir(parents=True)
        (self.root / "other/build.ninja").write_text(
            f"rule copy\n command = cp $in $out\nbuild bin/program: copy {self.root}/cohort/a/a.cpp\n")
        start = lambda: subprocess.run(
            [sys.executable, "bench/record.py", "start", self.root / "other/bin/program", "cohort/a", "--", "bench/run", "data", "5"],
            cwd=self.root, capture_output=True, text=True)
        self.assertIn("other/bin/program: expected a program of a build folder; build it first", start().stderr)
        subprocess.run(["ninja", "-C", self.root / "other"], check=True, capture_output=True)
        about = json.loads(start().stdout)
        self.assertEqual(about["settings"], {"arguments": ["data", "5"]})
        self.assertEqual(sorted(about["measures"]), ["bench/run", "cohort/a"])
        self.assertEqual(about["command"], "bench/run data 5")

    def test_what_is_kept_is_whole_at_every_moment(self):
        path = self.root / "kept.json"
        record.keep(path, {"rounds": [1]})
        with unittest.mock.patch.object(pathlib.Path, "replace", side_effect=KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
            record.keep(path, {"rounds": [1, 2]})
        self.assertEqual(json.loads(path.read_text()), {"rounds": [1]})
        record.keep(path, {"rounds": [1, 2]})
        self.assertEqual(json.loads(path.read_text()), {"rounds": [1, 2]})
        self.assertEqual([each.name for each in self.root.glob("kept*")], ["kept.json"])

    def test_what_is_measured_must_be_there(self):
        with self.assertRaisesRegex(SystemExit, "cohort/absent: to be measured, and not there"):
            self.start("cohort/absent")

    def test_an_old_record_gets_its_files_commit_and_stays_stale(self):
        for text in ('{"rate": 7}', '[{"rate": 7}]'):
            path = self.root / "old.json"
            path.write_text(text)
            with self.assertRaisesRegex(SystemExit, "expected a file that is committed as it is"):
                record.adopt(path, self.root)
            self.commit()
            record.adopt(path, self.root)
            made = json.loads(path.read_text())
            self.assertEqual(made["measured"]["commit"], record.git("rev-parse", "HEAD", root=self.root))
            self.assertEqual(made.get("rate", made.get("results")), 7 if text[0] == "{" else [{"rate": 7}])
            self.assertIn("it does not say: measures, processor", record.why_stale(made, self.root))
            record.adopt(path, self.root)  # and once is enough
            self.assertEqual(json.loads(path.read_text()), made)
            path.unlink()
            self.commit()


class SharedTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def program(self, text):
        program = self.folder / "cohort"
        program.write_text("#!/bin/sh\n" + text)
        program.chmod(0o755)
        return program

    def test_several_measurements_have_a_median_and_ends(self):
        self.assertEqual(record.spread([3, 1, 2]), {"median": 2, "least": 1, "most": 3})
        self.assertEqual(record.spread([0.123, 0.999, 0.5], 1), {"median": 0.5, "least": 0.1, "most": 1.0})

    def test_programs_of_another_version_take_part_where_they_are_named(self):
        with unittest.mock.patch.dict(os.environ):
            os.environ.pop("COHORT_EARLIER_BIN", None)
            self.assertIsNone(record.earlier_programs())
            os.environ["COHORT_EARLIER_BIN"] = ""
            self.assertIsNone(record.earlier_programs())
            os.environ["COHORT_EARLIER_BIN"] = os.path.relpath(self.folder)
            self.assertEqual(record.earlier_programs().resolve(), self.folder.resolve())
            self.assertTrue(record.earlier_programs().is_absolute())
        self.program('[ "$*" = --version ] && echo "cohort 0.3.1"\n')
        self.assertEqual(record.version_of(self.folder), "0.3.1")

    def test_the_faster_kind_of_attention_is_taken(self):
        for faster, rates in (("sdpa", {"bmm": 10, "sdpa": 11}), ("bmm", {"bmm": 11, "sdpa": 10})):
            line = lambda attention: {"tgt_tokens_per_s": rates[attention]}
            self.assertEqual(record.faster_attention(line), (faster, rates))

    def test_a_free_port_can_be_listened_on(self):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", record.free_port()))

    def test_launchers_are_ended_and_those_that_ended_are_left_alone(self):
        loop = "while :; do sleep 0.05; done"
        kinds = ["exit 3", f"trap 'exit 4' TERM; echo ready; {loop}"]
        launchers = [subprocess.Popen(["sh", "-c", text], stdout=subprocess.PIPE, text=True) for text in kinds]
        self.addCleanup(lambda: [launcher.stdout.close() for launcher in launchers])
        launchers[0].wait()
        self.assertEqual(launchers[1].stdout.readline(), "ready\n")
        record.end_all(launchers)
        self.assertEqual([launcher.returncode for launcher in launchers], [3, 4])


if __name__ == "__main__":
    unittest.main()
