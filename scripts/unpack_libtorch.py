# SPDX-License-Identifier: Apache-2.0
"""Unpacks the parts of the libtorch wheels that a C++ program on the CPU needs.

Usage: unpack_libtorch.py OUT_DIR WHEEL...
Keeps torch/include, the CPU libraries of torch/lib, the licences, and everything of the other wheels.
"""
import pathlib
import re
import sys
import zipfile

UNNEEDED_LIBRARY = re.compile(r"torch/lib/.*(cuda|python|nvshmem|libshm|caffe2_nvrtc)")
NEEDED = re.compile(r"(torch/(include|lib)/|torch/version\.py|torch-[^/]*\.dist-info/|nvidia)")


def main(out_dir, wheels):
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if NEEDED.match(name) and not UNNEEDED_LIBRARY.match(name):
                    archive.extract(name, out_dir)
    for library in ("torch/lib/libtorch_cpu.so", "torch/lib/libc10.so"):
        if not pathlib.Path(out_dir, library).is_file():
            sys.exit(f"unpack_libtorch: the wheels hold no {library}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: unpack_libtorch.py OUT_DIR WHEEL...")
    main(sys.argv[1], sys.argv[2:])
