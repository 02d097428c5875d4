# SPDX-License-Identifier: Apache-2.0
"""Makes an English-Chinese corpus from the zh_CN message catalogues of Debian packages.

Usage: corpus_l10n.py OUT_DIR DEB_DIR [--quick]; scripts/corpus-l10n calls it and explains it.
Downloads the packages into DEB_DIR without installing them, reads their .mo files, cleans and
deduplicates the pairs, and splits them by a hash of the English text. Equal packages give equal files.
"""
import argparse
import collections
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

import l10n_catalogue
import l10n_clean

QUICK_PACKAGES = """
coreutils evolution-common gcc-12-locales git gnucash-common gnupg-l10n kdevelop-l10n krita-l10n
libreoffice-l10n-zh-cn vim-runtime wordpress-l10n
""".split()
PACKAGES = QUICK_PACKAGES + """
anjuta-common aptitude-common audacity-data binutils-common bluefish-data cinnamon-l10n darktable
digikam-data dpkg e2fsprogs-l10n filezilla-common freeciv-data geany-common gimp-data gnome-builder
gnome-control-center-data gnumeric-common gramps inkscape iso-codes k3b-i18n kate5-data
kdenlive-data kmail kmymoney-common libc-l10n libglib2.0-data libgtk-3-common lyx-common
minetest-data phpmyadmin pidgin-data plasma-workspace-data postgresql-15 r-base-core
util-linux-locales vlc-l10n
""".split()
HELD_OUT = 1000
HELD_OUT_QUICK = 200
FEWEST_TRAINING_PAIRS = 50000


def fail(message):
    sys.exit(f"corpus-l10n: {message}")


def find_package(deb_dir, name):
    """Returns the newest downloaded .deb of a package, or None."""
    found = sorted(deb_dir.glob(f"{name}_*.deb"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def refresh_package_lists(name):
    """Runs apt-get update where apt does not know the package, as in a bare image."""
    if subprocess.run(["apt-cache", "show", name], capture_output=True, check=False).stdout:
        return
    if os.getuid() != 0:
        fail(f"apt knows no package {name}; run as root: apt-get update")
    subprocess.run(["apt-get", "update", "-qq"], check=False)


def download(deb_dir, names):
    missing = [name for name in names if not find_package(deb_dir, name)]
    if not missing:
        return
    print(f"corpus-l10n: downloading {len(missing)} Debian packages into {deb_dir}", flush=True)
    refresh_package_lists(missing[0])
    partial = deb_dir / "partial"
    partial.mkdir(parents=True, exist_ok=True)
    command = ["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", *missing]
    result = subprocess.run(command, cwd=partial, capture_output=True, text=True, check=False)
    if result.returncode == 0:  # Otherwise one may be cut short; apt resumes there next time.
        for path in partial.glob("*.deb"):
            path.rename(deb_dir / path.name)
    absent = [name for name in missing if not find_package(deb_dir, name)]
    if result.returncode != 0 or absent:
        reasons = [line for line in result.stderr.splitlines() if line.startswith("E:")]
        fail(f"cannot download {' '.join(absent or missing)}: {' '.join(reasons[:1])}")


def read_packages(deb_dir, names, raw_counts):
    """Yields (package, English, Chinese) of every catalogue entry, packages in the given order."""
    for name in names:
        path = find_package(deb_dir, name)
        try:
            for english, chinese in l10n_catalogue.read_deb(path):
                raw_counts[path.name] += 1
                yield name, english, chinese
        except (ValueError, subprocess.CalledProcessError) as error:
            fail(f"cannot read {path}: {error}; remove it and try again")
        if not raw_counts[path.name]:
            fail(f"{path.name} holds no zh_CN catalogue")


def clean_and_deduplicate(entries, dropped):
    """Returns {English: Chinese}; of several translations the most frequent, then the first, stays."""
    votes = collections.defaultdict(collections.Counter)
    for _, english, chinese in entries:
        pair, reason = l10n_clean.clean(english, chinese)
        if reason:
            dropped[reason] += 1
        else:
            votes[pair[0]][pair[1]] += 1
    for counter in votes.values():
        dropped["duplicate English"] += counter.total() - 1
    return {english: counter.most_common(1)[0][0] for english, counter in votes.items()}


def split(pairs, held_out, dropped):
    """Returns {"train" | "valid" | "test": [(English, Chinese)]}, in an order that the hash decides.

    Texts that differ only in case, punctuation or marks share one key and so one split; of a
    held-out key one text stays.
    """
    by_key = collections.defaultdict(list)
    for english, chinese in pairs.items():
        by_key[l10n_clean.key(english)].append((english, chinese))
    keys = sorted(by_key, key=lambda key: hashlib.sha256(key.encode()).digest())
    splits = {"test": [], "valid": [], "train": []}
    for key in keys:
        texts = sorted(by_key[key])
        sentences = [text for text in texts if l10n_clean.is_worth_testing(*text)]
        name = next((n for n in ("test", "valid") if len(splits[n]) < held_out), "train")
        if name == "train" or not sentences:
            splits["train"] += texts
        else:
            splits[name].append(sentences[0])
            dropped["variant of a held-out sentence"] += len(texts) - 1
    return splits


def report(splits, raw_counts, dropped, recipe):
    lines = ["English-Chinese pairs from the zh_CN message catalogues of Debian packages.",
             "Made by scripts/corpus-l10n; the texts keep the licences of their packages.", "",
             f"recipe {recipe}", "", "Pairs"]
    lines += [f"  {len(splits[name]):7d}  {name}" for name in ("train", "valid", "test")]
    lines += ["", f"Dropped, of {sum(raw_counts.values())} catalogue entries"]
    lines += [f"  {count:7d}  {reason}" for reason, count in dropped.most_common()]
    lines += ["", "Entries of each package"]
    lines += [f"  {raw_counts[name]:7d}  {name}" for name in sorted(raw_counts)]
    return "\n".join(lines) + "\n"


def write(out_dir, splits, text):
    partial = out_dir.with_name(out_dir.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, pairs in splits.items():
        for side, language in enumerate(("en", "zh")):
            with open(partial / f"{name}.{language}", "w", encoding="utf-8") as file:
                file.writelines(pair[side] + "\n" for pair in pairs)
    (partial / "README").write_text(text, encoding="utf-8")
    if out_dir.exists():
        shutil.rmtree(out_dir)
    partial.rename(out_dir)


def recipe_name(quick):
    """Changes whenever one of these scripts does, so that an old corpus is made again."""
    digest = hashlib.sha256()
    for file in ("corpus_l10n.py", "l10n_catalogue.py", "l10n_clean.py"):
        digest.update(pathlib.Path(__file__).with_name(file).read_bytes())
    return f"{'quick' if quick else 'full'} {digest.hexdigest()[:16]}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out_dir", type=pathlib.Path)
    parser.add_argument("deb_dir", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    out_dir, deb_dir = args.out_dir.absolute(), args.deb_dir.absolute()
    recipe = recipe_name(args.quick)
    readme = out_dir / "README"
    if readme.is_file() and f"recipe {recipe}\n" in readme.read_text(encoding="utf-8"):
        print(f"corpus-l10n: {out_dir} is already there")
        return
    if out_dir.exists() and any(out_dir.iterdir()) and not (
            readme.is_file() and "Made by scripts/corpus-l10n" in readme.read_text(encoding="utf-8")):
        fail(f"{out_dir} exists and is no corpus of this script; name another folder")

    names = sorted(QUICK_PACKAGES if args.quick else PACKAGES)
    download(deb_dir, names)
    raw_counts, dropped = collections.Counter(), collections.Counter()
    pairs = clean_and_deduplicate(read_packages(deb_dir, names, raw_counts), dropped)
    splits = split(pairs, HELD_OUT_QUICK if args.quick else HELD_OUT, dropped)
    if not args.quick and len(splits["train"]) < FEWEST_TRAINING_PAIRS:
        fail(f"only {len(splits['train'])} training pairs, expected {FEWEST_TRAINING_PAIRS} or more")
    text = report(splits, raw_counts, dropped, recipe)
    write(out_dir, splits, text)
    print(text, end="")
    print(f"corpus-l10n: wrote {out_dir}")


if __name__ == "__main__":
    main()
