#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch training step of ResNet-50 with DistributedDataParallel: the peer of `imagenet --arch resnet50`.

    torchrun --nproc-per-node 2 bench/peers/resnet_ddp.py --steps 20 --batch-size-per-rank 128 --device cuda

Same network (torchvision's, without torchvision), by default autocast to bfloat16 and channels last, cuDNN's choice by trial, SGD with momentum and weight decay. The
pictures are random numbers in pinned memory, copied to the card in each step: nothing is decoded. Rank 0 prints one JSON line.
"""
import argparse
import datetime
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PARAMETERS_BELOW_FC = 23_508_032


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = None
        if stride != 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)), inplace=True)


def resnet50(classes):
    layers, inputs = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)], 64
    for index, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << index
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if index > 0 and block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed ones")
    parser.add_argument("--batch-size-per-rank", type=int, default=128)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16", help="bfloat16: by autocast")
    parser.add_argument("--memory-format", choices=("contiguous", "channels_last"), default="channels_last")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the card of LOCAL_RANK")
    options = parser.parse_args()
    if options.steps < 1 or options.warmup < 0 or options.batch_size_per_rank < 1:
        parser.error("--steps and --batch-size-per-rank need >= 1, --warmup >= 0")
    return options


def main():
    options = parse()
    on_card = options.device == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_card else torch.device("cpu")
    if on_card:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_card else "gloo", timeout=datetime.timedelta(seconds=300))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    memory_format = torch.channels_last if options.memory_format == "channels_last" else torch.contiguous_format
    model = resnet50(options.classes).to(device, memory_format=memory_format)
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == PARAMETERS_BELOW_FC + 2049 * options.classes
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    torch.manual_seed(rank)
    images = torch.randn(options.batch_size_per_rank, 3, options.image_size, options.image_size)
    images = images.contiguous(memory_format=memory_format)
    labels = torch.randint(options.classes, (options.batch_size_per_rank,))
    if on_card:
        images, labels = images.pin_memory(), labels.pin_memory()

    def step():
        x, y = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.precision == "bfloat16"):
            scores = parallel(x)
        loss = F.cross_entropy(scores.float(), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def meet():
        if on_card:
            torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(()))  # Over Gloo: a barrier of both backends would be NCCL's.

    for _ in range(options.warmup):
        step()
    seconds = []
    for _ in range(options.steps):
        meet()
        start = time.perf_counter()
        loss = step()
        meet()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        print(json.dumps({
            "bench": "resnet50_ddp_pytorch",
            "images_per_s": round(options.batch_size_per_rank * world / statistics.median(seconds), 2),
            "median_step_s": round(statistics.median(seconds), 4),
            "steps": options.steps,
            "world_size": world,
            "batch_size_per_rank": options.batch_size_per_rank,
            "image_size": options.image_size,
            "params": parameters,
            "precision": options.precision + (" by autocast" if options.precision == "bfloat16" else "")
                         + (", channels last" if options.memory_format == "channels_last" else ""),
            "device": options.device,
            "peak_device_memory_bytes": torch.cuda.max_memory_allocated() if on_card else None,
            "final_loss": round(loss.item(), 5),
            "torch": torch.__version__,
        }), flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # As in nmt_ddp.py: Python's own end can deadlock in Gloo.


if __name__ == "__main__":
    main()
