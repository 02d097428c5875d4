# SPDX-License-Identifier: Apache-2.0
"""Unpacks the parts of the libtorch wheels that a C++ program needs.

Usage: unpack_libtorch.py [--cuda] OUT_DIR WHEEL...
Keeps torch/include, the libraries of torch/lib (those of CUDA with --cuda alone, those of Python never), the licences, and
everything of the other wheels.
"""
import pathlib
import re
import sys
import zipfile

OF_PYTHON = re.compile(r"torch/lib/.*(python|libshm)")
OF_CUDA = re.compile(r"torch/lib/.*(cuda|nvshmem|caffe2_nvrtc)")
NEEDED = re.compile(r"(torch/(include|lib)/|torch/version\.py|torch-[^/]*\.dist-info/|nvidia)")


def main(out_dir, wheels, cuda):
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if NEEDED.match(name) and not OF_PYTHON.match(name) and (cuda or not OF_CUDA.match(name)):
                    archive.extract(name, out_dir)
    for library in ["torch/lib/libtorch_cpu.so", "torch/lib/libc10.so"] + ["torch/lib/libtorch_cuda.so"] * cuda:
        if not pathlib.Path(out_dir, library).is_file():
            sys.exit(f"unpack_libtorch: the wheels hold no {library}")


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--cuda"]
    if len(arguments) < 2:
        sys.exit("usage: unpack_libtorch.py [--cuda] OUT_DIR WHEEL...")
    main(arguments[0], arguments[1:], cuda="--cuda" in sys.argv)
