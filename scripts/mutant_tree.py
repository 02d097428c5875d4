# SPDX-License-Identifier: Apache-2.0
"""A copy of the checkout with its build, in which mutants are built and tested while the checkout stays as it is.

The copy (build/mutants/tree) is mounted over the checkout's own path, in a mount namespace that this process alone
sees: all paths that compilers, Ninja and CTest keep are right there, so only what a mutant changes is built again.
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree

LEFT_OUT = {".git", "runs", "__pycache__"}
BUILD = "build/release"
# What Ninja prints of a step that writes one file and nothing else.
OUTPUT = re.compile(r"\[\d+/\d+\] (?:Building CXX object|Linking CXX (?:executable|static library)) (\S+)$")


def synchronise(source, target):
    """Makes `target` a copy of the folder `source`, times of files included; copies what differs in size or time."""
    target.mkdir(parents=True, exist_ok=True)
    with os.scandir(source) as entries:
        wanted = {entry.name: entry for entry in entries if entry.name not in LEFT_OUT}
    for old in list(os.scandir(target)):
        is_folder = old.is_dir(follow_symlinks=False)
        if old.name not in wanted or is_folder != wanted[old.name].is_dir(follow_symlinks=False):
            shutil.rmtree(old.path) if is_folder else os.remove(old.path)
    for name, entry in wanted.items():
        copy = target / name
        if entry.is_dir(follow_symlinks=False):
            synchronise(pathlib.Path(entry.path), copy)
        elif not (copy.is_symlink() or copy.exists()) or stamp(entry) != stamp(copy):
            copy.unlink(missing_ok=True)  # A program that still runs cannot be written.
            shutil.copy2(entry.path, copy, follow_symlinks=False)


def stamp(path):
    status = os.lstat(path)
    return status.st_size, status.st_mtime_ns


def copy_checkout(root):
    """Brings the copy up to date. Nobody may build in the checkout meanwhile."""
    tree = root / "build/mutants/tree"
    tree.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(tree):
        if not (root / name).exists() and name != "build":
            shutil.rmtree(tree / name) if (tree / name).is_dir() else os.remove(tree / name)
    for entry in os.scandir(root):
        if entry.name in LEFT_OUT or entry.name == "build":
            continue
        if entry.is_dir():
            synchronise(pathlib.Path(entry.path), tree / entry.name)
        elif not (tree / entry.name).exists() or stamp(entry) != stamp(tree / entry.name):
            shutil.copy2(entry.path, tree / entry.name)
    synchronise(root / BUILD, tree / BUILD)


def commit(root):
    """The commit of the checkout, with + if sources or tests differ from it."""
    def git(*arguments):
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "apps", "cmake", "cohort", "examples", "tests", "CMakeLists.txt")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def run_inside(root, arguments, keep_copy, files):
    """Runs the program `arguments` with the copy in the checkout's place. `files` are descriptors to hand on."""
    if not (root / BUILD / "build.ninja").exists():
        sys.exit(f"mutants: {root / BUILD} is not there: run scripts/build")
    if not keep_copy:
        copy_checkout(root)
    unshare = ["unshare", "--mount"] + ([] if os.geteuid() == 0 else ["--map-root-user"])
    try:
        probe = subprocess.run([*unshare, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        sys.exit("mutants: there is no unshare here; it is in Debian's util-linux")
    if probe.returncode != 0:
        sys.exit(f"mutants: a mount namespace is needed, which only root may make here: {probe.stderr.strip()}")
    tree = root / "build/mutants/tree"
    mount = ["sh", "-c", 'mount --bind "$1" "$2" && cd "$2" && shift 2 && exec "$@"', "mutants", str(tree), str(root)]
    return subprocess.run([*unshare, *mount, sys.executable, *arguments], pass_fds=files, check=False).returncode


def sources_of(file):
    """The sources that a compiled file is: those of a batch, or itself."""
    if file.parent.name != "Unity":
        return [file]
    return re.findall(r'^#include "(.+)"$', file.read_text(), re.MULTILINE)


class Build:
    """Builds and runs tests in the mounted copy."""

    def __init__(self, root, jobs):
        self.root = root
        self.jobs = jobs
        self.folder = root / BUILD
        if not self.make(["build.ninja"]):
            sys.exit("mutants: CMake could not configure the copy; see build/mutants/tree")
        commands = json.loads((self.folder / "compile_commands.json").read_text())
        self.objects = {}  # source below the root -> its objects below the build folder
        for command in commands:
            for source in sources_of(pathlib.Path(command["file"])):
                name = os.path.relpath(source, root)
                self.objects.setdefault(name, []).append(re.search(r" -o (\S+)", command["command"])[1])

    def make(self, targets, keep_going=False):
        """Whether Ninja could build them."""
        flags = ["-C", str(self.folder), "-j", str(self.jobs), *(["-k", "0"] if keep_going else [])]
        command = ["ninja", *flags, *targets]
        self.output = subprocess.run(command, capture_output=True, text=True, check=False)
        return self.output.returncode == 0

    def outputs_to_make(self, targets):
        """The files that make() would write, or None if it would do more than compile and link."""
        plan = subprocess.run(["ninja", "-C", str(self.folder), "-n", *targets], capture_output=True, text=True, check=False)
        steps = [line for line in plan.stdout.splitlines() if line.startswith("[")]
        found = [OUTPUT.match(line) for line in steps]
        return [self.folder / match[1] for match in found] if all(found) else None

    def targets_of(self, source):
        """The targets that a source is compiled for."""
        return {re.search(r"CMakeFiles/([^/]+)\.dir/", output)[1] for output in self.objects.get(source, [])}

    def first_error(self):
        lines = [line for line in self.output.stdout.splitlines() if re.search(r"error|undefined reference", line)]
        return lines[0].strip()[:200] if lines else self.output.stdout[-200:]

    def test(self, expression):
        """Runs what matches, up to the first failure: (how many, its name or None, how it failed, its output)."""
        report = self.folder / "mutants.xml"
        report.unlink(missing_ok=True)
        command = ["ctest", "--test-dir", str(self.folder), "-j", str(self.jobs), "-R", expression, "--stop-on-failure",
                   "--no-tests=error", "--output-junit", str(report)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(f"ctest -R '{expression}': {(result.stdout + result.stderr).strip()[-300:]}")
        cases = list(xml.etree.ElementTree.parse(report).getroot().iter("testcase"))
        ran = [case for case in cases if case.get("status") != "disabled"]
        # With several at once others of them may have been cut short: the first is enough.
        for case in ran:
            failure = case.find("failure")
            if failure is not None:
                how = re.search(r"\*\*\*(\w+)", result.stdout)  # Failed, Timeout, Exception
                return len(ran), case.get("name"), how[1] if how else "Failed", case.findtext("system-out") or ""
        if result.returncode != 0:
            raise RuntimeError(f"ctest -R '{expression}': {(result.stdout + result.stderr).strip()[-300:]}")
        return len(ran), None, "", ""


class Change:
    """While it lasts, a text stands in a source in another's place."""

    def __init__(self, path, begin, end, replacement):
        self.path = path
        self.before = path.read_text()
        self.after = self.before[:begin] + replacement + self.before[end:]

    def write(self, text):
        started = time.time_ns()
        self.path.write_text(text)
        # Later than everything that was built from the other text: the file system's clock is coarse.
        while self.path.stat().st_mtime_ns <= started:
            self.path.write_text(text)

    def __enter__(self):
        self.write(self.after)
        return self

    def __exit__(self, *_):
        self.write(self.before)


class Mutation(Change):
    """A change that keeps what make() is about to write, and puts it back at its end: nothing is built a second time."""

    def __init__(self, build, path, begin, end, replacement):
        super().__init__(path, begin, end, replacement)
        self.build = build
        self.times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        self.folder = build.root / "build/kept_outputs"
        self.kept = {}  # file -> its copy, or None if there was no file
        self.restores = True

    def make(self, targets):
        """Build.make(targets)."""
        files = self.build.outputs_to_make(targets)
        if files is None:
            self.restores = False
            files = []
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            if file not in self.kept:
                copy = self.folder / str(len(self.kept))
                self.kept[file] = shutil.copy2(file, copy) if file.exists() else None
        return self.build.make(targets)

    def __exit__(self, *error):
        super().__exit__(*error)
        if self.restores:
            for file, copy in self.kept.items():
                file.unlink(missing_ok=True)
                if copy is not None:
                    shutil.move(copy, file)
            # Older than the files that were built from it, so that they are up to date.
            os.utime(self.path, ns=self.times)
