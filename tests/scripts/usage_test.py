#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Scripts that are called wrongly say how, in one line, and do nothing.

Usage: usage_test.py SOURCE_FOLDER
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv[1]).resolve()


class UsageTest(unittest.TestCase):
    def call(self, script, *arguments, root=ROOT, **variables):
        return subprocess.run([root / "scripts" / script, *arguments], env=os.environ | variables, text=True, capture_output=True, timeout=60)

    def test_wrong_arguments(self):
        for script in ("build", "bundle", "check-readme", "gpu-check", "release", "sanitize", "setup"):
            done = self.call(script, "--no-such")
            self.assertEqual(done.returncode, 2, script)
            self.assertEqual(done.stdout, "", script)
            self.assertRegex(done.stderr, rf"^usage: scripts/{script} .*\n$")
        self.assertFalse((ROOT / "build/--no-such").exists())

    def test_paths_with_spaces_are_refused(self):
        for name in ("COHORT_CACHE", "COHORT_LIBTORCH"):
            done = self.call("setup", "run", **{"COHORT_LIBTORCH_VERSION": "2.11.0", name: "/absent/a b"})
            self.assertEqual((done.returncode, done.stderr), (2, "setup: /absent/a b: expected a path without spaces\n"), name)
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve() / "a b"
            shutil.copytree(ROOT / "scripts", root / "scripts")
            shutil.copy(ROOT / "CMakeLists.txt", root)
            done = self.call("build", root=root)
            self.assertEqual((done.returncode, done.stderr), (2, f"build: {root}: expected a path without spaces\n"))

    def test_help_of_the_tests_builds_nothing(self):
        done = self.call("test", "--help")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertRegex(done.stdout, r"^usage: scripts/test [^\n]*\n$")


unittest.main(argv=sys.argv[:1])
