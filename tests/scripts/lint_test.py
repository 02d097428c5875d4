#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/lint finds what its tools are for, in what changed.

Usage: lint_test.py SOURCE_FOLDER [CASES OF unittest]
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(sys.argv.pop(1)).resolve()
CLEAN = "int {0}();\n"
MISNAMED = "int Wrong();\n"


class LintTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree = pathlib.Path(folder.name).resolve()
        for name in ("scripts", "cohort", "apps", "examples", "tests", "bench", "docs", "build/release/Unity"):
            (self.tree / name).mkdir(parents=True)
        for name in ("scripts/lint", "scripts/paths.sh", "scripts/check-style", "CMakeLists.txt", ".clang-format", ".clang-tidy", ".codespellrc"):
            shutil.copy(SOURCE / name, self.tree / name)
        for name in ("README.md", "CONTRIBUTING.md", "scripts/dropped-words.txt"):
            self.write(name, "")
        self.write(".gitignore", "build\n")
        self.git("init", "-q")
        self.commands = []
        self.batch("a", "b")
        self.batch("c")
        self.commit()

    def write(self, name, text):
        licence = "// SPDX-License-Identifier: Apache-2.0\n" if name.endswith((".cpp", ".h")) else ""
        (self.tree / name).write_text(licence + text)

    def git(self, *words):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false", *words], cwd=self.tree,
                       env={**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}, check=True)

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "all")

    def batch(self, *names):
        """Sources that the build compiles together, as CMake writes them and their command."""
        for name in names:
            self.write(f"cohort/{name}.cpp", CLEAN.format(name))
        unit = self.tree / f"build/release/Unity/{names[0]}.cxx"
        unit.write_text("".join(f'#include "{self.tree}/cohort/{name}.cpp"\n' for name in names))
        self.commands.append({"directory": str(self.tree), "file": str(unit),
                              "command": f"/usr/bin/c++ -I{self.tree} -Wall -Werror -fpch-preprocess -std=c++20 -Winvalid-pch "
                                         f"-include /none/cmake_pch.hxx -o x.o -c {unit}"})
        self.write("build/release/compile_commands.json", json.dumps(self.commands))

    def lint(self, *arguments, **variables):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("COHORT_LIBTORCH")}
        done = subprocess.run([self.tree / "scripts/lint", *arguments], env=kept | variables, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def expect(self, code, text, *arguments, **variables):
        found, output = self.lint(*arguments, **variables)
        self.assertEqual(found, code, output)
        self.assertIn(text, output)
        return output

    def test_a_clean_tree_passes(self):
        self.assertEqual(self.lint(), (0, "lint: nothing found; clang-tidy read 2 units\n"))

    def test_only_what_changed_is_read(self):
        self.write("cohort/c.cpp", MISNAMED)
        self.commit()
        self.write("cohort/a.cpp", "// changed\n" + CLEAN.format("a"))
        self.expect(0, "read 1 units", "HEAD")
        self.expect(1, "cohort/c.cpp:2:5: error: invalid case style for function 'Wrong'", "HEAD~1")
        self.expect(1, "'Wrong'")

    def test_a_new_file_is_read_before_it_is_committed_and_a_deleted_one_is_not(self):
        self.batch("new")
        self.write("cohort/new.cpp", MISNAMED)
        (self.tree / "cohort/c.cpp").unlink()
        output = self.expect(1, "cohort/new.cpp:2:5: error: invalid case style for function 'Wrong'", "HEAD")
        self.assertIn("read 1 units", output)
        self.write("cohort/new.cpp", "int  fine();\n")
        self.expect(1, "cohort/new.cpp:2:4: error: code should be clang-formatted", "HEAD")

    def test_a_header_is_read_with_a_source_that_includes_it(self):
        self.write("cohort/outer.h", "#pragma once\n#include \"cohort/inner.h\"\n")
        self.write("cohort/inner.h", "#pragma once\nint fine();\n")
        self.write("cohort/b.cpp", "#include \"cohort/outer.h\"\n\n" + CLEAN.format("b"))
        self.commit()
        self.write("cohort/inner.h", "#pragma once\nint Wrong();\n")
        self.expect(1, "cohort/inner.h:3:5: error: invalid case style", "HEAD")

    def test_what_changed_last_is_read_first_up_to_a_limit(self):
        for number in range(12):
            self.batch(f"more{number}")
        self.commit()
        self.expect(0, "read 12 units, 3 files that changed earlier are left to --all")
        self.write("cohort/c.cpp", MISNAMED)
        self.commit()
        self.expect(1, "'Wrong'")

    def test_a_batch_is_read_in_the_builds_order(self):
        self.write("cohort/a.cpp", "using Number = int;\n")
        self.commit()
        self.write("cohort/b.cpp", "Number b();\n")
        self.commit()
        self.expect(0, "read 1 units", "HEAD~2")

    def test_the_whole_tree_is_formatted_spelled_and_styled(self):
        self.write("cohort/c.cpp", "int  c();\n")
        self.write("docs/a.md", "It recieves OldName.\n")  # codespell:ignore
        self.write("scripts/dropped-words.txt", "OldName NewName\n")
        self.commit()
        output = self.expect(1, "cohort/c.cpp:2:4: error: code should be clang-formatted")
        self.assertIn("docs/a.md:1: recieves ==> receives", output)  # codespell:ignore
        self.assertIn("docs/a.md:1: expected NewName instead of OldName", output)

    def test_what_is_missing_is_said(self):
        self.expect(1, "lint: git log --name-only --format=: fatal", "no_such_commit")
        (self.tree / "build/release/compile_commands.json").unlink()
        self.expect(1, "compile_commands.json is missing: run scripts/build")

    def test_build_and_tools_are_where_the_other_scripts_have_them(self):
        self.expect(1, f"{self.tree}/build/release-libtorch2.15.0/compile_commands.json is missing", COHORT_LIBTORCH_VERSION="2.15.0")
        self.expect(1, f"{self.tree}/.cache/cohort/venv/bin/clang-tidy", COHORT_CACHE="", HOME=str(self.tree))
        self.expect(2, "lint: libtorch 1.0: expected 2.11.0 or 2.15.0", COHORT_LIBTORCH_VERSION="1.0")


if __name__ == "__main__":
    unittest.main()
