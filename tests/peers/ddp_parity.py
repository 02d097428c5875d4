#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""20 steps of two small models on 2 ranks: PyTorch's DDP and Cohort's must end with the same bits.

In one bucket, and in several, cut in the order of gradients. On 3 ranks, where the order of summation shows, the bits
differ.

Usage: ddp_parity.py BUILD_FOLDER. Run by the Python that COHORT_PEER_PYTHON names; prints one JSON line, exits 1 on a
difference. Both sides run one thread per rank, float32, SGD with momentum, Gloo, and no communication hook.
"""
import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

import torch
from torch import nn

STEPS, RANKS, BATCH = 20, 2, 8
CAPS = (25, 0.01)  # bucket_cap_mb
TYPES = {torch.float32: "F32", torch.int64: "I64"}


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 16, 3, stride=2)
        self.out = nn.Linear(16 * 5 * 5, 10)

    def forward(self, x):
        return self.out(torch.relu(self.second(torch.relu(self.first(x)))).flatten(1))

    @staticmethod
    def data():
        return torch.randn(STEPS, RANKS, BATCH, 3, 12, 12), torch.randint(0, 10, (STEPS, RANKS, BATCH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.proj, self.up, self.down = (
            nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 32))

    def forward(self, x):
        batch, length = x.shape[:2]
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(8.0), -1), v)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, 32))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block0, self.block1, self.out = nn.Embedding(50, 32), Block(), Block(), nn.Linear(32, 50)

    def forward(self, x):
        return self.out(self.block1(self.block0(self.embed(x)))).flatten(0, 1)

    @staticmethod
    def data():
        x = torch.randint(0, 50, (STEPS, RANKS, BATCH, 9))
        return x, (x * 7 + 3) % 50


MODELS = {"convolution": Convolution, "transformer": Transformer}


def save(path, tensors):
    header, chunks, offset = {}, [], 0
    for name, tensor in tensors.items():
        raw = tensor.contiguous().numpy().tobytes()
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
        chunks.append(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))


def load(path):
    """Returns the raw bytes of every tensor by name."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + size])
    header.pop("__metadata__", None)
    return {name: raw[8 + size + entry["data_offsets"][0]:8 + size + entry["data_offsets"][1]]
            for name, entry in header.items()}


def peer(folder):
    """One rank of PyTorch's side."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    cap = float(os.environ["PARITY_CAP"])
    for name, make in MODELS.items():
        model = make()
        start = torch.load(folder / f"{name}.pt")
        model.load_state_dict(start["model"])
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for x, y in zip(start["x"], start["y"]):
            sgd.zero_grad()
            nn.functional.cross_entropy(ddp(x[rank]), y[rank].flatten()).backward()
            sgd.step()
        if rank == 0:
            save(folder / f"{name}.peer", {key: value.detach() for key, value in model.named_parameters()})
            buckets = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
            (folder / f"{name}.buckets").write_text(str(len(buckets)))
    torch.distributed.destroy_process_group()


def main(build):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="cohort-parity-"))
    torch.manual_seed(1)
    for name, make in MODELS.items():
        model = make()
        x, y = make.data()
        torch.save({"model": model.state_dict(), "x": x, "y": y}, folder / f"{name}.pt")
        save(folder / f"{name}.start", {**model.state_dict(), "data.x": x, "data.y": y})
    result = {"torch": torch.__version__, "steps": STEPS, "ranks": RANKS, "runs": []}
    for cap in CAPS:
        environment = dict(os.environ, OMP_NUM_THREADS="1", PARITY_FOLDER=str(folder), PARITY_CAP=str(cap))
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), __file__],
                       env=environment, check=True)
        for name in MODELS:
            ours = folder / f"{name}.ours"
            subprocess.run([build / "bin/cohort", "run", "--nproc-per-node", str(RANKS), "--",
                            build / "tests/ddp_parity", name, folder / f"{name}.start", ours, str(cap)],
                           env=environment, check=True)
            mine, theirs = load(ours), load(folder / f"{name}.peer")
            start = load(folder / f"{name}.start")
            assert mine.keys() == theirs.keys(), "other parameters"
            assert all(theirs[key] != start[key] for key in theirs), "a parameter has not moved"
            buckets = int((folder / f"{name}.buckets").read_text())
            assert (buckets > 1) == (cap < 1), f"{buckets} buckets of {cap} MiB"
            result["runs"].append({"model": name, "buckets": buckets, "parameters": len(mine),
                                   "different": [key for key in mine if mine[key] != theirs[key]]})
    print(json.dumps(result))
    return 1 if any(run["different"] for run in result["runs"]) else 0


if __name__ == "__main__":
    if "RANK" in os.environ:
        peer(pathlib.Path(os.environ["PARITY_FOLDER"]))
    else:
        sys.exit(main(pathlib.Path(sys.argv[1]).resolve()))
