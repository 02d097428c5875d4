# SPDX-License-Identifier: Apache-2.0
"""Mutants as text: each names a text of the sources and what to put in its place. No build, no running.

tests/mutants/*.toml hold the mutants. A text must occur exactly once in the .cpp and .h files of cohort/, apps/ and
examples/, whatever its line breaks and its file: so a mutant survives moves and formatting.
"""
import dataclasses
import functools
import hashlib
import itertools
import pathlib
import re
import tomllib

SOURCE_FOLDERS = ("cohort", "apps", "examples")
TEST_MACRO = re.compile(r"^TEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\)", re.MULTILINE)
WORD = re.compile(r"\w")
ADD_TEST = re.compile(r"add_test\(\s*NAME\s+(\w+)")


class MutantError(Exception):
    """A mutant that cannot be used, with the reason in one line."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    find: str  # the text as it stands in the sources; white space does not count
    replace: str
    breaks: str  # the promise that the change breaks
    tests: tuple  # in this order: test files, folders of tests, "Suite.Case" with *, or other CTest entries
    build: tuple = ()  # targets that the tests need and that no test file leads to
    equivalent: str = ""  # why no test can notice it; empty: one must

    def digest(self):
        """Changes with what the mutant does and with the tests that it names."""
        text = repr((tokens(self.find), tokens(self.replace), self.tests))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def tokens(text):
    return re.findall(r"\w+|\S", text)


def pattern(text):
    """A regular expression for `text` with any white space between its tokens."""
    parts = []
    for before, token in itertools.pairwise(["", *tokens(text)]):
        if before:
            parts.append(r"\s+" if WORD.match(before) and WORD.match(token) else r"\s*")
        parts.append(re.escape(token))
    # Not in the middle of a word.
    start = r"(?<!\w)" if WORD.match(parts[0]) else ""
    end = r"(?!\w)" if WORD.match(parts[-1]) else ""
    return re.compile(start + "".join(parts) + end)


class Sources:
    """The text of all sources below `root`, by path."""

    def __init__(self, root):
        self.root = pathlib.Path(root)
        files = sorted(path for folder in SOURCE_FOLDERS for path in (self.root / folder).rglob("*")
                       if path.suffix in (".cpp", ".h"))
        self.texts = {path.relative_to(self.root).as_posix(): path.read_text() for path in files}

    def places(self, text):
        """[(path below the root, begin, end)] of each occurrence of `text`."""
        rarest = max(tokens(text), key=len)  # likely
        return [(path, match.start(), match.end()) for path, source in self.texts.items() if rarest in source
                for match in pattern(text).finditer(source)]

    def place(self, mutant):
        """The one place of `mutant`. Errors: MutantError if there is none, or another one."""
        places = self.places(mutant.find)
        if len(places) == 1:
            return places[0]
        where = ", ".join(path for path, _, _ in places[:5])
        found = f"{len(places)} times{' in ' + where if where else ''}"
        raise MutantError(f"{mutant.name}: expected its text once in {', '.join(SOURCE_FOLDERS)}, found it {found}: "
                          f"{' '.join(mutant.find.split())}")


class Tests:
    """The tests below `root`, by what a mutant may name."""

    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.cases = {}  # test file -> its cases, "Suite.Case"
        for path in sorted((self.root / "tests").rglob("*_test.cpp")):
            name = path.relative_to(self.root).as_posix()
            self.cases[name] = [f"{suite}.{case}" for suite, case in TEST_MACRO.findall(path.read_text())]
        self.others = {name for path in (self.root / "tests").rglob("CMakeLists.txt")
                       for name in ADD_TEST.findall(path.read_text())}

    def files_of(self, entry):
        """The test files that hold what `entry` names; none for a CTest entry of another kind."""
        if "/" in entry:
            return [file for file in self.cases if file == entry or file.startswith(entry.rstrip("/") + "/")]
        return [file for file, cases in self.cases.items() if any(map(glob(entry).fullmatch, cases))]

    def expression(self, entry):
        """CTest's -R for what `entry` names. Errors: MutantError if there is no such test."""
        if entry in self.others:
            return f"^{re.escape(entry)}$"
        files = self.files_of(entry)
        if not files:
            raise MutantError(f"no test is named by {entry}")
        if "/" not in entry:
            return rf"^(.*/)?{glob(entry).pattern}(/.*)?$"
        suites = sorted({case.split(".")[0] for file in files for case in self.cases[file]})
        return rf"^(.*/)?({'|'.join(suites)})\."


@functools.cache
def glob(entry):
    return re.compile(re.escape(entry).replace(r"\*", ".*"))


def load(root):
    """All mutants of tests/mutants, by name. Errors: MutantError."""
    mutants = {}
    for path in sorted((pathlib.Path(root) / "tests/mutants").glob("*.toml")):
        for fields in tomllib.loads(path.read_text()).get("mutant", []):
            fields = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
            try:
                mutant = Mutant(**fields)
            except TypeError as error:
                raise MutantError(f"{path.name}: {fields.get('name', '?')}: {error}") from error
            if mutant.name in mutants:
                raise MutantError(f"{path.name}: {mutant.name}: the name is taken")
            mutants[mutant.name] = mutant
    return mutants


def check(root):
    """One line for each mutant that does not apply to the sources below `root`, or names no test."""
    try:
        mutants = load(root)
    except MutantError as error:
        return [str(error)]
    sources, tests, faults = Sources(root), Tests(root), []
    for mutant in mutants.values():
        try:
            sources.place(mutant)
            if tokens(mutant.find) == tokens(mutant.replace):
                raise MutantError(f"{mutant.name}: changes nothing")
            if not mutant.tests:
                raise MutantError(f"{mutant.name}: names no test")
            for entry in mutant.tests:
                try:
                    tests.expression(entry)
                except MutantError as error:
                    raise MutantError(f"{mutant.name}: {error}") from error
        except MutantError as error:
            faults.append(str(error))
    return faults
