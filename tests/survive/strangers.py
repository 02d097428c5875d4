#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A job among strangers: a process without the job's secret says what it likes to everything that the job listens with.

    strangers.py BUILD_FOLDER [--seconds 60]      prints JSON; fails if the job ends otherwise than an undisturbed one

The job: two trainers that join a rendezvous (--rdzv-secret-file) and connect to rank 0's store, and learn through two parameter
servers over TCP. Its trace pages are files, which nobody can talk to. Strangers connect to all four; they send random bytes,
well-formed messages with no or a wrong proof, messages that were good in another conversation, floods of connections,
connections that say nothing or stop in the middle; and they run Cohort's own programs with another secret. Calls to parameter
servers are not replayed: they bear the secret itself (docs/ps.md, Security).
"""
import argparse
import hashlib
import hmac
import json
import os
import pathlib
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

EPOCHS_A_SECOND = 0.45  # About; of the job alone, on two cores.
RDZV_ID = "name-of-the-job"
# What a stranger must never hear: names of keys, settings and tables. The secrets are added.
PRIVATE = [RDZV_ID, "roster", "num_come", "num_entries", "member/", "verdict", "categories", "nnodes", "master_port"]


def free_ports(count):
    """Ports that the system gives to nobody by itself."""
    found = []
    while len(found) < count:
        port = random.randrange(20000, 32000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def proof(secret, text):
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def wait(process):
    """Exit code of a process, and what it and its children took of the processor, in seconds."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime


class Job:
    def __init__(self, build, folder, name, epochs):
        self.bin, self.folder, self.name, self.epochs = build / "bin", folder, name, epochs
        self.secret = hashlib.sha256(os.urandom(32)).hexdigest()
        self.store_secret = proof(self.secret, "store of " + RDZV_ID)
        self.secret_file = folder / f"{name}.secret"
        self.secret_file.write_text(self.secret + "\n")
        self.rendezvous, self.store, *self.servers = free_ports(4)
        self.environment = {key: value for key, value in os.environ.items() if key != "COHORT_JOB_SECRET"}
        self.environment["OMP_NUM_THREADS"] = "1"

    def serve(self, number):
        return subprocess.Popen(
            [self.bin / "cohort-ps", "server", "--endpoint", f"127.0.0.1:{self.servers[number]}", "--server-id", str(number),
             "--servers", "2", "--folder", self.folder / f"{self.name}.ps{number}", "--job-secret-file", self.secret_file],
            stdout=subprocess.DEVNULL, stderr=open(self.folder / f"{self.name}.ps{number}.log", "w"), env=self.environment)

    def run(self, disturb=None):
        servers = [self.serve(number) for number in (0, 1)]
        environment = self.environment | {
            "PADDLE_TRAINING_ROLE": "TRAINER", "PADDLE_TRAINERS_NUM": "2",
            "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(f"127.0.0.1:{port}" for port in self.servers)}
        train = (f"PADDLE_TRAINER_ID=$RANK exec {self.bin}/ctr train --data {self.folder}/data --batch 256 --mode sync "
                 f"--epochs {self.epochs} --save {self.folder}/{self.name}.saved --job-secret-file {self.secret_file}")
        began = time.monotonic()
        visitors = disturb(self) if disturb else None
        said = self.folder / f"{self.name}.log"
        job = subprocess.Popen(
            [self.bin / "cohort", "run", "--nnodes", "1", "--nproc-per-node", "2", "--rdzv-id", RDZV_ID, "--rdzv-endpoint",
             f"127.0.0.1:{self.rendezvous}", "--rdzv-secret-file", self.secret_file, "--master-port", str(self.store),
             "--log-dir", self.folder / f"{self.name}.logs", "--", "sh", "-c", train],
            env=environment, stdout=open(said, "w"), stderr=subprocess.STDOUT)
        code, job_cpu = wait(job)
        seconds = time.monotonic() - began
        visits = visitors() if visitors else None
        alive = [server.poll() is None for server in servers]
        for server in servers:
            server.terminate()
        server_cpu = sum(wait(server)[1] for server in servers)
        text = said.read_text()
        result = {"code": code, "seconds": round(seconds, 1), "cpu_seconds": round(job_cpu + server_cpu, 1),
                  "servers_alive": alive == [True, True], "last_line": text.splitlines()[-1] if text else "",
                  "weights": self.weights() if code == 0 else None}
        if code != 0:
            result["output"] = text[-3000:]
        return result | ({"visits": visits} if visits else {})

    def weights(self):
        """A digest of every parameter and every row; the checkpoint itself also says when rows were written."""
        output = self.folder / f"{self.name}.export"
        subprocess.run([self.bin / "cohort-ps", "export", self.folder / f"{self.name}.saved", "--output", output], check=True,
                       stdout=subprocess.DEVNULL)
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(output.iterdir())}

    def targets(self):
        """What strangers know: where to connect, and what was said there in other conversations."""
        store, line = self.words_of_store(), self.words_of_rendezvous()
        http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">IBI", 0 << 8 | 4, 0, 0)
        rpc = [http2, http2 + os.urandom(300), http2 + struct.pack(">I", 0xffffff << 8 | 1) + b"\x05" + os.urandom(5000),
               b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"]
        hexed = lambda words: [word.hex() for word in words]
        return {"store": {"port": self.store, "words": hexed(store[0]), "replays": hexed(store[1])},
                "rendezvous server": {"port": self.rendezvous, "words": hexed(line[0]), "replays": hexed(line[1])},
                "server 0": {"port": self.servers[0], "words": hexed(rpc), "replays": []},
                "server 1": {"port": self.servers[1], "words": hexed(rpc), "replays": []}}

    def words_of_store(self):
        def frame(kind, *fields):
            body = bytes([kind]) + b"".join(struct.pack("=I", len(field)) + field for field in fields)
            return struct.pack("=I", len(body)) + body
        nonce, old = os.urandom(16).hex(), os.urandom(16).hex()
        hello = b"cohort store 1 " + nonce.encode()
        asks = [frame(0, b"cohort/watch/verdict", b"0 1\n\n\n"), frame(4, b"cohort/name"), frame(6), frame(5, b"cohort/name"),
                frame(7, b"cohort/name"), frame(8, b"never"), struct.pack("=I", 0xffffffff)]
        wrong = proof("another secret", f"cohort store 1 client {nonce} {old}").encode()
        words = [hello, hello + b"-" * 64, *asks, *(hello + wrong + ask for ask in asks),
                 # c10d's own protocol: its first words, then a set.
                 b"\x00" + struct.pack("=I", 0x3C85F7CE) + b"\x01" + struct.pack("=Q", 3) + b"key" + struct.pack("=Q", 1) + b"v"]
        good = proof(self.store_secret, f"cohort store 1 client {nonce} {old}").encode()
        return words, [hello + good + ask for ask in asks]

    def words_of_rendezvous(self):
        def hello(secret, nonce, **more):
            node = os.urandom(16).hex()
            says = {"kind": "hello", "version": 5, "node": node, "session": 1, "nonce": nonce,
                    "proof": proof(secret, f"node {os.urandom(16).hex()} {nonce} {node}"), "received": 0, "id": RDZV_ID,
                    "nnodes": "1", "max_restarts": 0}
            return (json.dumps(says | more) + "\n").encode()
        forged = b'1 0 {"kind": "failed", "round": 1, "code": 1, "meaning": 1, "why": "x"}\n{"kind": "end", "code": 1, "why": "x"}\n'
        words = [hello("", "n"), hello("another", "n"), hello("", "n", id="none"), hello("", "n", version=3),
                 hello("", "n", received=-1), b"\n\n\n", forged, hello("another", "n") + forged, b'{"kind": "join", "nproc": 1}\n']
        return words, [hello(self.secret, os.urandom(16).hex()) + forged for _ in range(4)]


class Visitors:
    """The strangers: threads of one process that has not the secret."""

    def __init__(self, build, targets):
        self.bin, self.targets = build / "bin", targets
        self.over = threading.Event()
        self.lock = threading.Lock()
        self.counts = {name: {} for name in targets}
        self.sent, self.heard, self.longest = 0, 0, {name: 0 for name in targets}
        self.texts = {name: b"" for name in targets}  # What was heard, as far as a search needs it.
        self.programs = []
        self.dice = random.Random(1)

    def note(self, name, kind, text=b"", sent=0):
        with self.lock:
            self.counts[name][kind] = self.counts[name].get(kind, 0) + 1
            self.sent, self.heard = self.sent + sent, self.heard + len(text)
            self.longest[name] = max(self.longest[name], len(text))
            if len(self.texts[name]) < 64 << 20:
                self.texts[name] += text + b"\n"

    def connect(self, name):
        try:
            return socket.create_connection(("127.0.0.1", self.targets[name]["port"]), timeout=2)
        except OSError:
            self.over.wait(0.05)
            return None

    def talk(self, name, kind, words):
        if (s := self.connect(name)) is None:
            return
        text = b""
        with s:
            s.settimeout(0.1)
            try:
                s.sendall(words)
                while len(text) < 1 << 20 and (part := s.recv(65536)):
                    text += part
            except OSError:
                pass
        self.note(name, kind, text, len(words))

    def flood(self, name):
        held = [s for s in (self.connect(name) for _ in range(300)) if s]
        for s in held[::3]:
            try:
                s.sendall(b"cohort store 1 "[:self.dice.randrange(1, 15)])
            except OSError:
                pass
        for s in held:
            s.close()
            self.note(name, "flood")

    def half_open(self, name, held):
        """Says nothing, or stops in the middle, and stays."""
        if (s := self.connect(name)) is None:
            return
        words = self.dice.choice(self.targets[name]["words"])
        try:
            s.sendall(bytes.fromhex(words)[:self.dice.choice([0, 1, 20])])
        except OSError:
            pass
        held.append(s)
        self.note(name, "half open")
        if len(held) > 200:
            held.pop(0).close()

    def visit(self, name):
        held = []
        target = self.targets[name]
        while not self.over.wait(0.01):
            kind = self.dice.choice(["random bytes", "well-formed", "well-formed", "replayed", "half open", "half open", "flood"])
            if kind == "random bytes":
                self.talk(name, kind, self.dice.randbytes(self.dice.choice([1, 60, 200, 100_000])))
            elif kind == "flood":
                self.flood(name)
            elif kind == "half open":
                for _ in range(20):
                    self.half_open(name, held)
            elif words := target["words" if kind == "well-formed" else "replays"]:
                self.talk(name, kind, bytes.fromhex(self.dice.choice(words)))

    def run_programs(self, folder):
        """Cohort's own programs, with another secret or none."""
        other = folder / "other.secret"
        other.write_text("another secret\n")
        ports = {name: str(target["port"]) for name, target in self.targets.items()}
        servers = f"127.0.0.1:{ports['server 0']},127.0.0.1:{ports['server 1']}"
        rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports["store"]}
        train = [self.bin / "ctr", "train", "--mode", "local", "--data", folder / "data"]
        commands = [
            ("rank", train, rank),
            ("status", [self.bin / "cohort-ps", "status", "--pservers", servers], {}),
            ("launcher", [self.bin / "cohort", "run", "--rdzv-endpoint", "127.0.0.1:" + ports["rendezvous server"], "--rdzv-id", RDZV_ID,
                          "--rdzv-secret-file", other, "--log-dir", folder / "other.logs", "--", "true"], {}),
            ("stop", [self.bin / "cohort-ps", "stop", "--pservers", servers, "--job-secret-file", other], {}),
            ("rank", train, rank | {"COHORT_JOB_SECRET": "another secret"})]
        while not self.over.is_set():
            for name, command, more in commands:
                with tempfile.TemporaryFile() as said:
                    process = subprocess.Popen(command, env={**os.environ, **more}, stdout=said, stderr=subprocess.STDOUT)
                    while process.poll() is None and not self.over.wait(0.05):
                        pass
                    if process.poll() is None:  # The job has ended first.
                        process.kill()
                        process.wait()
                        return
                    said.seek(0)
                    self.programs.append((name, process.returncode, said.read().decode(errors="replace").strip()[-300:]))
                if self.over.wait(2):
                    return

    def stay(self, folder):
        signal.signal(signal.SIGTERM, lambda *_: self.over.set())
        threads = [threading.Thread(target=self.visit, args=(name,)) for name in self.targets]
        threads.append(threading.Thread(target=self.run_programs, args=(folder,)))
        for thread in threads:
            thread.start()
        self.over.wait()
        for thread in threads:
            thread.join()
        return {"counts": self.counts, "bytes_sent": self.sent, "bytes_heard": self.heard, "longest_heard": self.longest,
                "programs": sorted({(name, code, text) for name, code, text in self.programs}),
                "strangers_cpu_seconds": round(time.process_time(), 1)}


def disturb(build, folder):
    def begin(job):
        plan, heard = folder / "targets.json", folder / "heard.json"
        plan.write_text(json.dumps(job.targets()))
        process = subprocess.Popen(["nice", "-n", "10", sys.executable, __file__, build, "--visit", folder],
                                   stdout=open(heard, "w"), env=job.environment)

        def end():
            process.terminate()
            process.wait(60)
            visits = json.loads(heard.read_text())
            texts = (folder / "texts").read_bytes() + json.dumps(visits["programs"]).encode()
            secrets = [job.secret, job.store_secret]
            visits["learned"] = [word for word in PRIVATE + secrets if word.encode() in texts]
            # A client without the secret gets a greeting, a random number and at most a rejection.
            visits["learned"] += ["the store says more"] * (visits["longest_heard"]["store"] > 15 + 32 + 64)
            visits["programs_refused"] = (len(visits["programs"]) > 0 and
                                          all(code in (1, 2, 3) for _, code, _ in visits["programs"]))
            return visits
        return end
    return begin


def visit(build, folder):
    visitors = Visitors(build, json.loads((folder / "targets.json").read_text()))
    result = visitors.stay(folder)
    (folder / "texts").write_bytes(b"\n".join(visitors.texts.values()))
    print(json.dumps(result))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=60, help="about how long each of the two runs takes")
    parser.add_argument("--visit", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    build = options.build.resolve()
    if options.visit:
        return visit(build, options.visit)
    with tempfile.TemporaryDirectory(prefix="cohort-strangers-") as name:
        folder = pathlib.Path(name)
        subprocess.run([build / "bin/ctr", "generate", "--rows", "30000", "--output", folder / "data"], check=True,
                       stdout=subprocess.DEVNULL)
        epochs = max(1, round(options.seconds * EPOCHS_A_SECOND))
        alone = Job(build, folder, "alone", epochs).run()
        among = Job(build, folder, "among", epochs).run(disturb(build, folder))
    visits = among["visits"]
    same = alone["code"] == among["code"] == 0 and alone["weights"] == among["weights"]
    good = (same and among["servers_alive"] and not visits["learned"] and visits["programs_refused"] and
            all(counts for counts in visits["counts"].values()))
    print(json.dumps({"epochs": epochs, "alone": alone, "among_strangers": among, "same_weights": same,
                      "times_as_long": round(among["seconds"] / alone["seconds"], 2),
                      "times_the_cpu": round(among["cpu_seconds"] / alone["cpu_seconds"], 2), "good": good}))
    return 0 if good else 1


sys.exit(main())
