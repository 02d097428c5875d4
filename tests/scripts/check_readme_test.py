#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/check-readme finds what it is for: each case damages a copy of the source tree in one place. And resume() of
bench/record.py.

Usage: check_readme_test.py SOURCE_FOLDER [CASES OF unittest]
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(sys.argv.pop(1)).resolve()
sys.path.insert(0, str(SOURCE / "bench"))
import record  # noqa: E402

PARTS = ["CITATION.cff", "CMakeLists.txt", "CHANGELOG.md", "README.md", "apps", "bench", "cmake", "cohort", "docs", "examples", "scripts", "tests"]
INVENTED, FORGOTTEN = "COHORT_" + "INVENTED", "COHORT_" + "FORGOTTEN"  # in two parts: this file is checked, too
RECORD = "bench/results/invented.json"
BLOCK = "\n<!-- figures r=invented.json\n- Rate: {r.rate:.1f} rows/s\n-->\n<!-- end -->\n"


class CheckReadmeTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.tree = pathlib.Path(self.folder.name)
        for name in PARTS:
            copy = shutil.copytree if (SOURCE / name).is_dir() else shutil.copy
            copy(SOURCE / name, self.tree / name)

    def git(self, *words):
        environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
        done = subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false", *words],
                              cwd=self.tree, env=environment, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip()

    def commit(self):
        if not (self.tree / ".git").exists():
            self.git("init", "-q")
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "all")
        return self.git("rev-parse", "HEAD")

    def check(self, *words):
        done = subprocess.run([self.tree / "scripts/check-readme", *words], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def text(self, name):
        return (self.tree / name).read_text()

    def change(self, name, pattern, replacement):
        text, count = re.subn(pattern, replacement, self.text(name), count=1)
        self.assertEqual(count, 1, f"{name} has no {pattern}")
        (self.tree / name).write_text(text)

    def append(self, name, text):
        (self.tree / name).write_text(self.text(name) + text)

    def expect_fault(self, text):
        code, output = self.check()
        self.assertNotEqual(code, 0, "expected a fault: " + text)
        self.assertIn(text, output)

    def expect_good(self):
        self.assertEqual(self.check()[0], 0, self.check()[1])

    def write_record(self, commit, fields={}):
        measures = {"cohort/base": record.digest("cohort/base", self.tree)}
        measured = {"commit": commit, "uncommitted": [], "measures": measures, "processor": {"name": "a CPU"},
                    "load_before": [0, 0, 0], "command": "bench/x", "settings": {}} | fields
        (self.tree / RECORD).write_text(json.dumps({"measured": measured, "rate": 12.34}))

    def test_the_tree_as_it_is_is_good(self):
        self.expect_good()

    def test_a_tree_without_git_is_good_and_says_so(self):
        code, output = self.check()
        self.assertEqual(code, 0, output)
        self.assertIn("this source tree has no git metadata: whether figures are of this code is not checked", output)

    def test_a_tree_inside_of_another_repository_has_no_git_of_its_own(self):
        outer = self.tree / "outer"
        (outer / "inner").mkdir(parents=True)
        for name in PARTS:
            shutil.move(self.tree / name, outer / "inner" / name)
        self.tree = outer
        self.git("init", "-q")
        self.tree = outer / "inner"
        code, output = self.check()
        self.assertEqual(code, 0, output)
        self.assertIn("no git metadata", output)

    def test_a_fresh_record_gives_its_figure(self):
        self.append("README.md", BLOCK)
        self.write_record(self.commit())
        self.expect_fault("README.md: its example or figures are not the present ones")
        self.check("--write")
        self.assertIn("-->\n- Rate: 12.3 rows/s\n<!-- end -->", self.text("README.md"))
        self.expect_good()
        self.change("README.md", r"-->\n- Rate: 12\.3", "-->\n- Rate: 99.9")
        self.expect_fault("README.md: its example or figures are not the present ones")

    def test_a_chart_has_bars(self):
        self.append("README.md", BLOCK.replace("- Rate:", "- Rate: {bar(r.rate / 123.4)}|"))
        self.write_record(self.commit())
        self.check("--write")
        self.assertIn("-->\n- Rate: #####|", self.text("README.md"))
        self.expect_good()

    def test_a_span_is_read_of_new_and_of_old_records(self):
        self.append("README.md", BLOCK.replace("{r.rate:.1f}", "{span(r.rate)}"))
        commit = self.commit()
        for ends in (("least", "most"), ("min", "max")):
            self.write_record(commit)
            whole = json.loads(self.text(RECORD))
            (self.tree / RECORD).write_text(json.dumps(whole | {"rate": {"median": 2, **dict(zip(ends, (1, 3)))}}))
            self.change("README.md", r"(r=invented\.json\n.*\n-->\n)(- Rate.*\n)?", r"\1")
            self.check("--write")
            self.assertIn("-->\n- Rate: 2.00 (1.00 to 3.00) rows/s\n", self.text("README.md"), ends)

    def test_a_record_of_other_code_gives_none(self):
        self.append("README.md", BLOCK)
        commit = self.commit()
        self.write_record(commit)
        self.check("--write")
        self.append("cohort/base/error.h", "int changed;\n")
        self.expect_fault("README.md: its example or figures are not the present ones")
        self.commit()
        self.expect_fault("README.md: its example or figures are not the present ones")
        self.check("--write")
        self.assertIn("- Rate: not measured since the code changed; bench/results has an earlier figure "
                      f"(invented.json, commit {commit[:7]})\n", self.text("README.md"))
        self.assertNotIn("12.3 rows", self.text("README.md"))
        self.expect_good()

    def test_code_that_the_record_does_not_measure_may_change(self):
        self.append("README.md", BLOCK)
        self.write_record(self.commit())
        self.check("--write")
        self.append("cohort/cli/counted.h", "int changed;\n")
        self.expect_good()

    def test_a_record_is_fresh_in_another_history(self):
        self.append("README.md", BLOCK)
        self.write_record(self.commit())
        self.check("--write")
        shutil.rmtree(self.tree / ".git")
        self.commit()
        self.assertIn("12.3 rows", self.text("README.md"))
        self.expect_good()

    def test_a_record_that_lacks_a_field_gives_none(self):
        self.append("README.md", BLOCK)
        commit = self.commit()
        for field in ("commit", "measures", "processor", "load_before", "command", "settings"):
            self.write_record(commit)
            record = json.loads(self.text(RECORD))
            del record["measured"][field]
            (self.tree / RECORD).write_text(json.dumps(record))
            self.check("--write")
            self.assertNotIn("12.3 rows", self.text("README.md"), field)
        (self.tree / RECORD).write_text('{"rate": 12.34}')
        self.check("--write")
        self.assertNotIn("12.3 rows", self.text("README.md"))

    def test_a_record_without_digests_or_of_what_was_not_committed_gives_none(self):
        self.append("README.md", BLOCK)
        commit = self.commit()
        for fields in ({"uncommitted": ["cohort/base/error.h"]}, {"measures": ["cohort/base"]}, {"commit": None}):
            self.write_record(commit, fields)
            self.check("--write")
            self.assertNotIn("12.3 rows", self.text("README.md"), fields)

    def test_a_dated_record_gives_its_figure_beside_its_date_and_commit(self):
        dated = {"measures": {}, "dated": True, "date": "2026-01-02"}
        self.append("README.md", BLOCK)
        self.commit()
        self.write_record("0123456789abcdef", dated)
        self.expect_fault("README.md: invented.json never becomes stale: say {r.measured.date} and {r.measured.commit:.7}")
        self.change("README.md", r"- Rate: \{r", "- Rate ({r.measured.date}, {r.measured.commit:.7}): {r")
        self.commit()
        self.check("--write")
        self.assertIn("- Rate (2026-01-02, 0123456): 12.3 rows/s\n", self.text("README.md"))
        self.append("cohort/base/error.h", "int changed;\n")
        self.check("--write")
        self.assertIn("- Rate (2026-01-02, 0123456): 12.3 rows/s\n", self.text("README.md"))
        self.expect_good()
        self.write_record("0123456789abcdef", dated | {"dated": False})
        self.expect_fault("README.md: its example or figures are not the present ones")

    def test_a_template_that_does_not_fit_its_record_is_named(self):
        self.append("README.md", BLOCK.replace("r.rate:.1f", "r.speed"))
        self.write_record(self.commit())
        self.expect_fault("README.md: the template of r=invented.json does not fit its record: KeyError('speed')")
        self.change("README.md", r"r\.speed", "r.async")
        self.expect_fault("README.md: {r.async} in the template of r=invented.json: invalid syntax")

    def test_figures_outside_of_blocks(self):
        figures = {"868 target tokens/s": 0, "7 million rows a second": 0, "20 GB/s": 0, "407 us": 0, "60 ns": 0, "0.80 s": 0,
                   "1.3 %": 0, "4.5 GB": 0, "1.19 times": 0, "thrice, 3 times as fast": "times as fast", "0.5 of it": "0.5 of",
                   "BLEU 22.2": 0, "AUC 0.76": 0}
        text = "".join(f"\nThis: {figure}.\n" for figure in figures)
        self.append("README.md", text)
        self.append("docs/nmt.md", text)
        _, output = self.check()
        for page in ("README.md", "nmt.md"):
            for figure, found in figures.items():
                self.assertRegex(output, rf'{page}:\d+: "{re.escape(found or figure)}" is a figure outside of a block')
        self.append("docs/nmt.md", "\n| | Target tokens/s |\n| --- | --- |\n| one | 299 |\n")
        self.expect_fault("\"299\" is a figure outside of a block")

    def test_numbers_that_are_no_measurement_are_good(self):
        self.append("docs/nmt.md", "\nWithin 60 s, 3 ranks of 2 hosts, at most 256 MiB, version 2.11.0, 5 % of them.\n\n    0.5 s in a listing\n")
        self.append("docs/nmt.md", "\n`--grace 1.5 s` and\n\n```\nprints 3 rows/s\n```\n")
        self.expect_good()

    def test_versions_differ(self):
        self.change("CHANGELOG.md", r"(?m)^## \d+\.\d+\.\d+", "## 9.8.7")
        self.expect_fault("CHANGELOG.md begins with 9.8.7")

    def test_the_citation_has_another_version(self):
        self.change("CITATION.cff", r"(?m)^version: .*", "version: 9.8.7")
        self.expect_fault("CITATION.cff has 9.8.7")

    def test_the_consumer_asks_for_another_version(self):
        self.change("tests/consumer/CMakeLists.txt", r"cohort \d+\.\d+", "cohort 9.8")
        self.expect_fault("tests/consumer asks for cohort 9.8")

    def test_a_page_says_another_version(self):
        self.change("README.md", r"find_package\(cohort \d+\.\d+", "find_package(cohort 9.8")
        self.change("docs/installation.md", r"cohort-\d+\.\d+\.\d+-linux", "cohort-9.8.7-linux")
        self.expect_fault("README.md says find_package(cohort 9.8, CMakeLists.txt has version")
        self.expect_fault("installation.md says cohort-9.8.7, CMakeLists.txt has version")

    def test_a_variable_that_is_not_listed(self):
        readers = {"cohort/base/env.cpp": '\nconst char* a = std::getenv("NAME");\n', "scripts/setup": "\necho ${NAME:-}\n",
                   "scripts/build": "\necho $NAME\n", "tests/survive/survive.py": '\nos.environ.get("NAME")\n',
                   "bench/compare-start": '\nos.environ["NAME"]\n', "CMakeLists.txt": "\nset(x $ENV{NAME})\n"}
        for i, (name, text) in enumerate(readers.items()):
            self.append(name, text.replace("NAME", INVENTED + "ABCDEF"[i]))
        _, output = self.check()
        for i, name in enumerate(readers):
            self.assertIn(f"docs/launch.md does not list {INVENTED}{'ABCDEF'[i]}, which {name} reads", output)

    def test_a_listed_variable_that_nothing_reads(self):
        self.append("docs/launch.md", f"\n| `{FORGOTTEN}` | nobody | nothing |\n")
        self.expect_fault(f"docs/launch.md lists {FORGOTTEN}, which nothing reads")

    def test_a_section_that_is_not_there(self):
        self.append("cohort/base/env.h", '// The reason: docs/' + 'launch.md,\n// "Invented".\n')
        self.expect_fault("cohort/base/env.h quotes docs/" + 'launch.md, "Invented": no such section')

    def test_a_proof_that_is_no_test(self):
        self.append("docs/ddp.md", "\n| What | Proof |\n| --- | --- |\n| all | `DdpTest.Invented` |\n")
        self.expect_fault("ddp.md: no such test: DdpTest.Invented")

    def test_a_record_that_is_not_there_or_broken(self):
        self.append("README.md", "\nSee `bench/results/absent.json`.\n")
        (self.tree / "bench/results/broken.json").write_text("{")
        self.expect_fault("README.md names bench/results/absent.json, which is not there")
        self.expect_fault("bench/results/broken.json: ")

    def test_an_example_that_is_not_the_built_one(self):
        self.append("examples/data_parallel.cpp", "// changed\n")
        self.expect_fault("README.md: its example or figures are not the present ones")

    def test_a_listing_that_is_not_the_file(self):
        self.append("examples/clusters/ssh.sh", "# changed\n")
        self.expect_fault("clusters.md: its example or figures are not the present ones")
        self.assertEqual(self.check("--write")[0], 0)
        self.assertIn("# changed\n```\n", self.text("docs/clusters.md"))

    def test_a_listing_of_no_file_or_without_a_block(self):
        self.append("docs/ddp.md", "\n<!-- file examples/absent.sh -->\n```sh\n```\n")
        self.append("docs/ps.md", "\n<!-- file examples/clusters/ssh.sh -->\n")
        self.expect_fault("ddp.md lists examples/absent.sh: No such file or directory")
        self.expect_fault("ps.md: expected a block of code after each <!-- file ... -->")


class ResumeTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.runs = pathlib.Path(folder.name) / "runs"
        self.about = {"measures": {"cohort/base": "1"}, "settings": {"updates": 5}, "date": "first"}

    def resume(self, **changes):
        return record.resume(self.about | changes, self.runs / "measured.json")

    def test_a_resumed_measurement_keeps_what_it_said_of_itself(self):
        self.assertEqual(self.resume()["date"], "first")
        (self.runs / "part").write_text("")
        self.assertEqual(self.resume(date="second")["date"], "first")

    def test_parts_of_other_code_or_settings_are_refused(self):
        self.resume()
        for change in ({"measures": {"cohort/base": "2"}}, {"settings": {"updates": 6}}):
            with self.assertRaisesRegex(SystemExit, f"other {next(iter(change))} than now"):
                self.resume(**change)

    def test_parts_of_unknown_code_are_refused(self):
        self.runs.mkdir()
        (self.runs / "part").write_text("")
        with self.assertRaisesRegex(SystemExit, "measured.json: expected this file"):
            self.resume()
        self.assertEqual([path.name for path in self.runs.iterdir()], ["part"])


if __name__ == "__main__":
    unittest.main()
