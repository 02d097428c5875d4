#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The peer of `bench/first_all_reduce`: meet through Gloo, sum one number, leave.

    torchrun --nproc-per-node 2 bench/peers/first_all_reduce.py
"""
import json
import time

import torch
import torch.distributed as dist


def peak_rss_bytes():
    """The most memory that this process ever held, as the kernel counted it."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


dist.init_process_group("gloo")
total = torch.full((1,), dist.get_rank() + 1.0)
dist.all_reduce(total)
done_at = time.time()
# One write, so that lines of two ranks do not mix.
print(json.dumps({"rank": dist.get_rank(), "sum": total.item(), "done_at": done_at,
                  "peak_rss_bytes": peak_rss_bytes()}) + "\n", end="", flush=True)
dist.destroy_process_group()
