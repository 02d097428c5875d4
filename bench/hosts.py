# SPDX-License-Identifier: Apache-2.0
"""Hosts of benchmarks: network namespaces of this machine, joined by a bridge, where each may send at a limited rate. Needs root."""
import json
import os
import subprocess
import sys

import record

COHORT = record.ROOT / "build/release/bin/cohort"


class Hosts:
    """`count` hosts, each of which sends at `rate` bits a second, as tc writes it ("1gbit"), or "none": without a limit.

    Congestion control is CUBIC, not the machine's default: BBR estimates a link from its delay, which is nearly zero between
    namespaces, and then pauses for milliseconds when a message exceeds its window.
    `name`: tells apart those that one process has at a time.
    """

    def __init__(self, count, rate, name=""):
        prefix = f"cohort-{os.getpid()}{name}"
        self.switch, self.spaces = f"{prefix}-s", [f"{prefix}-{i}" for i in range(count)]
        self.addresses = [f"10.78.0.{i + 1}" for i in range(count)]
        self.rate = rate

    def __enter__(self):
        def run(*words):
            subprocess.run(words, check=True)

        try:
            run("ip", "netns", "add", self.switch)
            run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
            run("ip", "-n", self.switch, "link", "set", "br0", "up")
            for i, space in enumerate(self.spaces):
                run("ip", "netns", "add", space)
                run("ip", "netns", "exec", space, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=cubic")
                run("ip", "-n", space, "link", "set", "lo", "up")
                run("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{i}", "netns", self.switch)
                run("ip", "-n", self.switch, "link", "set", f"p{i}", "master", "br0", "up")
                run("ip", "-n", space, "addr", "add", self.addresses[i] + "/24", "dev", "eth0")
                run("ip", "-n", space, "link", "set", "eth0", "up")
                if self.rate != "none":
                    run("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", self.rate, "burst", "128kb",
                        "latency", "50ms")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for space in [*self.spaces, self.switch]:
            subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)

    def plug(self, host, state):
        """Puts a host's link "up" or "down" at the other end: as if its cable were pulled."""
        subprocess.run(["ip", "-n", self.switch, "link", "set", f"p{host}", state], check=True)

    def on(self, host, *program):
        """The words that run `program` on a host."""
        return ["ip", "netns", "exec", self.spaces[host], *map(str, program)]

    def run(self, *program, ranks=1, timeout=480):
        """Runs `program` as `ranks` ranks of each host; returns what rank 0 printed as lines of JSON."""
        nodes = []
        try:
            for node in range(len(self.spaces)):
                command = self.on(node, COHORT, "run", "--nnodes", len(self.spaces), "--node-rank", node, "--nproc-per-node", ranks,
                                  "--master-addr", self.addresses[0], "--master-port", 29513, "--", *program)
                nodes.append(subprocess.Popen(command, cwd=record.ROOT, env=dict(os.environ, OMP_NUM_THREADS="1"),
                                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            outputs = [node.communicate(timeout=timeout) for node in nodes]
        finally:
            record.end_all(nodes)  # The namespaces end next.
        if any(node.returncode for node in nodes):
            sys.exit(f"{len(self.spaces)} hosts of {ranks}, {self.rate}: {' '.join(map(str, program))} failed: " +
                     " ".join(error[-400:] for _, error in outputs))
        return [json.loads(line) for line in outputs[0][0].splitlines() if line.startswith("{")]
