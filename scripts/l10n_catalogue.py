# SPDX-License-Identifier: Apache-2.0
"""Reads the zh_CN message catalogues (GNU .mo files) out of a Debian package, without installing it."""
import re
import struct
import subprocess
import tarfile

# .../zh_CN/..., .../zh_CN.UTF-8/..., languages/zh_CN.mo, languages/admin-zh_CN.mo, locale/zh_Hans/...
CATALOGUE = re.compile(r"(.*[/-])?(zh_CN(\.UTF-8)?|zh_Hans)(/.*)?\.mo")


def read_deb(path):
    """Yields (English, Chinese) for every entry of every zh_CN catalogue in the .deb file `path`."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE) as process:
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                if member.isfile() and CATALOGUE.fullmatch(member.name):
                    yield from read_mo(archive.extractfile(member).read(), member.name)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, process.args)


def read_mo(data, name):
    """Yields the (English, Chinese) entries of a .mo file; a plural entry yields one pair a form."""
    magic = data[:4]
    if magic not in (b"\xde\x12\x04\x95", b"\x95\x04\x12\xde"):
        raise ValueError(f"{name} is no .mo file")
    order = "<" if magic == b"\xde\x12\x04\x95" else ">"
    _, count, originals, translations = struct.unpack_from(order + "4I", data, 4)
    charset = "utf-8"
    for index in range(count):
        length, start = struct.unpack_from(order + "2I", data, originals + 8 * index)
        source = data[start:start + length]
        length, start = struct.unpack_from(order + "2I", data, translations + 8 * index)
        target = data[start:start + length]
        if not source:  # The header: sorted first, names the character set.
            found = re.search(rb"charset=([\w-]+)", target)
            charset = found.group(1).decode() if found else charset
            continue
        source = source.rpartition(b"\x04")[2]  # msgctxt \x04 msgid
        forms = source.split(b"\0")
        targets = target.split(b"\0")
        # Chinese has one form for all numbers; its message is written after the English plural.
        pairs = zip(forms, targets) if len(targets) > 1 else [(forms[-1], targets[0])]
        for english, chinese in pairs:
            yield english.decode("utf-8", "replace"), chinese.decode(charset, "replace")
