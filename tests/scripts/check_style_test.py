#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/check-style finds what it is for, and repairs what it can.

Usage: check_style_test.py SOURCE_FOLDER [CASES OF unittest]
"""
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(sys.argv.pop(1)).resolve()
LICENCE = "// SPDX-License-Identifier: Apache-2.0\n"
GOOD = """/// Sends `tensor`.
///
/// Errors: c10::ValueError for another dtype.
/// Cost:   one message.
"""


class CheckStyleTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree = pathlib.Path(folder.name)
        for name in ("scripts", "cohort", "apps", "examples", "tests", "bench", "docs"):
            (self.tree / name).mkdir()
        for name in ("README.md", "CONTRIBUTING.md"):
            (self.tree / name).write_text("")
        shutil.copy(SOURCE / "scripts/check-style", self.tree / "scripts")
        self.dropped("")

    def dropped(self, words):
        (self.tree / "scripts/dropped-words.txt").write_text(words)

    def run_on(self, text, *flags):
        path = self.tree / "cohort/sample.h"
        path.write_text(LICENCE + text)
        done = subprocess.run([self.tree / "scripts/check-style", *flags], capture_output=True, text=True)
        self.assertEqual(done.stderr, "")
        return done.returncode, done.stdout, path.read_text().removeprefix(LICENCE)

    def expect_fixed(self, bad, good):
        code, output, _ = self.run_on(bad)
        self.assertEqual(code, 1)
        self.assertIn("cohort/sample.h:2: expected", output)
        self.assertEqual(self.run_on(bad, "--fix"), (0, "", good))
        self.assertEqual(self.run_on(good), (0, "", good))

    def test_labels_stand_on_lines_of_their_own(self):
        self.expect_fixed("/// Sends `tensor`.\n///\n/// Errors: c10::ValueError for another\n/// dtype. Cost: one message.\n", GOOD)

    def test_a_torn_label_is_repaired(self):
        self.expect_fixed("/// Sends.\n/// Errors:     c10::Error on every rank,\n/// if\n///             a rank is lost.\n",
                          "/// Sends.\n/// Errors: c10::Error on every rank, if a rank is lost.\n")

    def test_code_and_lists_stay(self):
        text = "/// Uses it:\n///\n///   auto x = f();\n///   g(x);\n///\n/// - one\n/// - two\n"
        self.assertEqual(self.run_on(text, "--fix"), (0, "", text))

    def test_cut_literals_are_joined(self):
        self.expect_fixed('  check(x, "a message that "\n      "was cut");\n', '  check(x, "a message that was cut");\n')
        long = f'  check(x, "{"word " * 15}"\n      "{"more " * 10}end");\n'
        self.assertEqual(self.run_on(long)[0], 0)

    def test_a_dropped_word_is_found_wherever_it_is(self):
        self.dropped("# comment\nOldName NewName\n")
        for name in ("cohort/a.h", "docs/a.md", "tests/a.cpp", "README.md"):
            with self.subTest(name=name):
                (self.tree / name).write_text(LICENCE + "It is OldName, not OldNames.\n")
                code, output, _ = self.run_on(GOOD)
                self.assertEqual((code, output), (1, f"{name}:2: expected NewName instead of OldName\n"))
                (self.tree / name).write_text(LICENCE + "OldNames\n")
        self.assertEqual(self.run_on(GOOD)[0], 0)

    def test_source_without_its_licence_is_found(self):
        for name, text, line in (("cohort/a.h", "#pragma once\n", 1), ("scripts/a", "#!/bin/sh\nls\n", 2), ("tests/CMakeLists.txt", "", 1)):
            with self.subTest(name=name):
                path = self.tree / name
                path.write_text(text)
                self.assertEqual(self.run_on(GOOD)[:2],
                                 (1, f"{name}:{line}: expected a comment with SPDX-License-Identifier: Apache-2.0\n"))
                path.unlink()

    def test_a_phrase_is_found_with_capitals_and_in_words_alone(self):
        self.dropped("(?i:old\\sphrase) new\n")
        self.assertEqual(self.run_on("// Old phrase, an old\n// phrase, old phrases.\n")[:2],
                         (1, "cohort/sample.h:2: expected new instead of Old phrase\n"))

    def grpc_tests(self, target, source):
        """Which names of a source of `target` are found, where tsan's target is tsan_test and it excludes what begins with Rpc."""
        (self.tree / "CMakePresets.json").write_text(json.dumps(
            {"buildPresets": [{"name": "tsan", "targets": ["tsan_test"]}],
             "testPresets": [{"name": "tsan", "filter": {"exclude": {"name": "^Rpc|^Nets/"}}}]}))
        folder = self.tree / "tests/ps"
        folder.mkdir(exist_ok=True)
        (folder / "CMakeLists.txt").write_text(f"# {LICENCE}cohort_add_test({target}\n  SOURCES a_test.cpp\n  DEPS x LABEL unit)\n")
        (folder / "a_test.cpp").write_text(LICENCE + source)
        return re.findall(r"tests/ps/a_test.cpp:(\d+): (\S+) runs through gRPC: expected a name", self.run_on(GOOD)[1])

    def test_a_test_through_grpc_that_tsan_would_run_is_found(self):
        source = ("// RpcServer\nclass Served {\n  RpcServer rpc_;\n};\n\nint help() {\n  Served served;\n}\n\n"
                  "class FixedTest : public testing::Test {\n  int x_ = help();\n};\n\n"
                  "TEST(Free, A) {\n  // RpcServer\n}\n\nTEST(Free, B) {\n  help();\n}\n\nTEST(RpcTest, C) {\n  help();\n}\n\n"
                  "TEST_F(FixedTest, D) {}\n\nTEST_P(Wire, E) {\n  const auto channel = make_rpc_channel({});\n}\n\n"
                  "TEST(Free, F) {}\n")
        self.assertEqual(self.grpc_tests("tsan_test", source), [("19", "Free.B"), ("27", "FixedTest.D"), ("29", "Wire.E")])
        instantiated = source + "INSTANTIATE_TEST_SUITE_P(Nets, Wire, testing::Bool());\n"
        self.assertEqual(self.grpc_tests("tsan_test", instantiated), [("19", "Free.B"), ("27", "FixedTest.D")])
        self.assertEqual(self.grpc_tests("other_test", source), [])


if __name__ == "__main__":
    unittest.main()
