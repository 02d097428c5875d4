#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Scripts that are called wrongly say how, in one line, and do nothing.

Usage: usage_test.py SOURCE_FOLDER
"""
import pathlib
import subprocess
import sys
import unittest

ROOT = pathlib.Path(sys.argv[1]).resolve()


class UsageTest(unittest.TestCase):
    def call(self, script, *arguments):
        return subprocess.run([ROOT / "scripts" / script, *arguments], text=True, capture_output=True, timeout=60)

    def test_wrong_arguments(self):
        for script in ("build", "bundle", "release", "sanitize", "setup"):
            done = self.call(script, "--no-such")
            self.assertEqual(done.returncode, 2, script)
            self.assertEqual(done.stdout, "", script)
            self.assertRegex(done.stderr, rf"^usage: scripts/{script} .*\n$")
        self.assertFalse((ROOT / "build/--no-such").exists())

    def test_help_of_the_tests_builds_nothing(self):
        done = self.call("test", "--help")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertRegex(done.stdout, r"^usage: scripts/test [^\n]*\n$")


unittest.main(argv=sys.argv[:1])
