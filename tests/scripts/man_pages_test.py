# SPDX-License-Identifier: Apache-2.0
"""The man pages of scripts/man-pages: one for each command, without a warning of mandoc, with every flag of its help.

Usage: man_pages_test.py SOURCE_FOLDER BIN_FOLDER
"""
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

SOURCE, BIN = map(pathlib.Path, sys.argv[1:3])


def output_of(*command):
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout


class ManPagesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        output_of(SOURCE / "scripts/man-pages", BIN / "cohort", cls.folder.name)
        cls.pages = {page.stem: page for page in pathlib.Path(cls.folder.name).iterdir()}

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_every_command_has_a_page_and_no_other(self):
        expected = {"cohort", "cohort-run", "cohort-completion"}
        for program in BIN.glob("cohort-*"):
            for line in output_of(program, "__flags").splitlines():
                kind, command, *_ = line.split("\t")
                if kind == "command":
                    expected.add("cohort-" + command.replace(" ", "-"))
        self.assertGreater(len(expected), 20)
        self.assertEqual(set(self.pages), expected)

    def test_mandoc_has_nothing_to_say(self):
        for page in self.pages.values():
            lint = subprocess.run(["mandoc", "-T", "lint", "-W", "warning", page], capture_output=True, text=True)
            self.assertEqual(lint.stdout + lint.stderr, "", page.name)

    def test_each_word_of_help_stands_in_the_page(self):
        for name, page in self.pages.items():
            shown = " ".join(output_of("mandoc", "-T", "ascii", "-O", "width=500", page).split())
            shown = re.sub(r".\x08", "", shown)
            for line in output_of(BIN / "cohort", *name.split("-")[1:], "--help").splitlines():
                if line.endswith(":"):
                    continue
                for part in re.split(r"\s{2,}", line.removeprefix("Usage: ").strip().removesuffix(".")):
                    self.assertIn(part, shown, f"{name}: {line}")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
