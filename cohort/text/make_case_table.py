# SPDX-License-Identifier: Apache-2.0
"""Writes lower_case_table.h from the Unicode data of the running Python.

    python3 cohort/text/make_case_table.py > cohort/text/lower_case_table.h
"""
import unicodedata

LETTERS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def runs(points):
    """Joins sorted integers to [first, last] runs."""
    result = []
    for point in points:
        if result and result[-1][1] == point - 1:
            result[-1][1] = point
        else:
            result.append([point, point])
    return result


def mapping_runs():
    """Joins single-letter mappings to (first, last, stride, distance)."""
    result = []
    for point in LETTERS:
        lower = chr(point).lower()
        if len(lower) != 1 or ord(lower) == point or chr(point) == "\u03a3":
            continue
        distance = ord(lower) - point
        if result and result[-1][3] == distance:
            first, last, stride, _ = result[-1]
            step = point - last
            if step in (1, 2) and (stride == step or first == last):
                result[-1] = (first, point, step, distance)
                continue
        result.append((point, point, 1, distance))
    return result


def ends_in_final_sigma(text):
    return (text + "\u03a3").lower().endswith("\u03c2")


def print_rows(declaration, entries):
    print(f"\n{declaration} = {{")
    row = "   "
    for entry in entries:
        if len(row) + len(entry) + 1 > 100:
            print(row)
            row = "   "
        row += " " + entry
    print(row)
    print("};")


def main():
    cased = [c for c in LETTERS if ends_in_final_sigma(chr(c))]
    ignorable = [c for c in LETTERS
                 if ends_in_final_sigma("a" + chr(c)) and not ends_in_final_sigma(chr(c))]
    version = unicodedata.unidata_version
    print(f"// SPDX-License-Identifier: Apache-2.0\n// Written by make_case_table.py from Unicode {version}, not by hand.")
    print("#pragma once\n#include <cstdint>\n\nnamespace cohort::text::case_table {\n")
    print("struct Mapping {\n  char32_t first, last;\n  uint32_t stride;\n  int32_t distance;\n};")
    print("struct Range {\n  char32_t first, last;\n};")
    print("\n// Letters whose lower case is one letter, `distance` away.", end="")
    print_rows("inline constexpr Mapping kLower[]",
               [f"{{{a:#x}, {b:#x}, {s}, {d}}}," for a, b, s, d in mapping_runs()])
    print("\n// Letters with case that end the search for a final sigma.", end="")
    print_rows("inline constexpr Range kCased[]", [f"{{{a:#x}, {b:#x}}}," for a, b in runs(cased)])
    print("\n// Signs that the search for a final sigma passes over.", end="")
    print_rows("inline constexpr Range kIgnorable[]",
               [f"{{{a:#x}, {b:#x}}}," for a, b in runs(ignorable)])
    print("\n}  // namespace cohort::text::case_table")


if __name__ == "__main__":
    main()
