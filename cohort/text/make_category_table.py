# SPDX-License-Identifier: Apache-2.0
"""Writes category_table.h from the Unicode categories that the package `regex` knows.

    python3 cohort/text/make_category_table.py > cohort/text/category_table.h

Run it with the Python of scripts/requirements-test.txt, whose `regex` the tests compare with.
"""
import regex

from make_case_table import LETTERS, print_rows

CATEGORIES = [("P", "kPunctuation"), ("S", "kSymbol"), ("N", "kNumber")]


def main():
    letters = "".join(map(chr, LETTERS))
    print(f"// SPDX-License-Identifier: Apache-2.0\n// Written by make_category_table.py from regex {regex.__version__}, not by hand.")
    print("#pragma once\n\nnamespace cohort::text::category_table {\n")
    print("struct Range {\n  char32_t first, last;\n};")
    for category, name in CATEGORIES:
        print(f"\n// Category {category}.", end="")
        ranges = regex.findall(rf"\p{{{category}}}+", letters)
        print_rows(f"inline constexpr Range {name}[]",
                   [f"{{{ord(r[0]):#x}, {ord(r[-1]):#x}}}," for r in ranges])
    print("\n}  // namespace cohort::text::category_table")


main()
