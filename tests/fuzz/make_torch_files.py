#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the corpus of the reader of torch.save's files: make_torch_files.py tests/fuzz/corpus/torch_file

Needs no torch: stand-ins with its names are pickled with the arguments that torch.save gives them, and put into the same archive.
os_system is a pickle that would run a command when Python loads it.
"""
import collections
import io
import pathlib
import pickle
import struct
import sys
import types
import zipfile


def stand_in(name, module):
    made = type(name, (), {"__module__": module})
    made.__qualname__ = name
    setattr(sys.modules.setdefault(module, types.ModuleType(module)), name, made)
    return made


def rebuild(name):
    def function(*arguments):
        raise NotImplementedError

    function.__module__, function.__qualname__ = "torch._utils", name
    setattr(sys.modules.setdefault("torch._utils", types.ModuleType("torch._utils")), name, function)
    return function


TYPES = {c: stand_in(n, "torch") for c, n in {"f": "FloatStorage", "q": "LongStorage", "H": "BFloat16Storage"}.items()}
REBUILD_TENSOR, REBUILD_PARAMETER = rebuild("_rebuild_tensor_v2"), rebuild("_rebuild_parameter")


class Storage:
    def __init__(self, code, values):
        self.code, self.values = code, values


class Tensor:
    def __init__(self, storage, shape, strides, offset=0):
        self.arguments = (storage, offset, shape, strides, False, collections.OrderedDict())

    def __reduce__(self):
        return REBUILD_TENSOR, self.arguments


class Parameter:
    def __init__(self, tensor):
        self.tensor = tensor

    def __reduce__(self):
        return REBUILD_PARAMETER, (self.tensor, True, collections.OrderedDict())


class Pickler(pickle.Pickler):
    def __init__(self, file, storages, protocol):
        super().__init__(file, protocol=protocol)
        self.storages = storages

    def persistent_id(self, value):
        if not isinstance(value, Storage):
            return None
        if value not in self.storages:
            self.storages.append(value)
        return "storage", TYPES[value.code], str(self.storages.index(value)), "cpu", len(value.values)


def write(path, pickled, storages=()):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        records = {"data.pkl": pickled, "byteorder": b"little"}
        for i, storage in enumerate(storages):
            records[f"data/{i}"] = struct.pack(f"<{len(storage.values)}{storage.code}", *storage.values)
        records["version"] = b"3\n"
        for name, content in records.items():
            archive.writestr(zipfile.ZipInfo("archive/" + name), content)


def save(path, value, protocol=2):
    storages, stream = [], io.BytesIO()
    Pickler(stream, storages, protocol).dump(value)
    write(path, stream.getvalue(), storages)


def state_dict():
    shared = Storage("f", [float(i) for i in range(8)])
    state = collections.OrderedDict()
    state["weight"] = Tensor(shared, (2, 3), (3, 1))
    state["bias"] = Parameter(Tensor(shared, (2,), (1,), 6))
    state["turned"] = Tensor(Storage("f", [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]), (3, 2), (1, 3))
    state["steps"] = Tensor(Storage("q", [-7]), (), ())
    state["low"] = Tensor(Storage("H", [0x3F80, 0x4000, 0xC000]), (3,), (1,))  # 1, 2, -2
    state._metadata = collections.OrderedDict({"": {"version": 1}})
    return state


def module():
    """As C++ torch::save writes one: objects of TorchScript classes."""
    script = stand_in("Module", "__torch__")
    outer, inner = script(), script()
    inner.weight = Tensor(Storage("f", [1.0, 2.0]), (2, 1), (1, 1))
    outer.linear, outer.training = inner, True
    outer.steps = Tensor(Storage("q", [5]), (), ())
    return outer


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "state_dict", state_dict())
    save(folder / "protocol_4", state_dict(), protocol=4)
    groups = [{"lr": 0.1, "params": [0, 1], "amsgrad": False, "foreach": None}]
    optimizer = {"state": {0: {"step": 12345, "momentum_buffer": None}}, "param_groups": groups}
    save(folder / "training", {"epoch": 3, "state_dict": state_dict(), "optimizer": optimizer})
    save(folder / "module", module())
    # {"weight": os.system("echo it runs")}
    write(folder / "os_system", b"\x80\x02}X\x06\0\0\0weightcos\nsystem\nX\x0c\0\0\0echo it runs\x85Rs.")


if __name__ == "__main__":
    main()
