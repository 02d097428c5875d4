#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the recipes of examples/clusters as a user would, on one machine: its Slurm, two network namespaces as hosts.

Usage: recipes.py BUILD_FOLDER SOURCE_FOLDER [NAME OF A TEST ...]. The program is `cohort bench ddp`, whose rank 0 prints one JSON
line with the number of ranks.
"""
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import kubernetes_validate
import yaml
from ways_to_start import BUILD, PROGRAM, environment, free_port, one_node_cluster

RECIPES = pathlib.Path(sys.argv[2]).resolve() / "examples/clusters"
LIMIT_S = 100


def with_cohort(**more):
    """The environment of a user who has the programs on the PATH."""
    return environment(PATH=f"{BUILD / 'bin'}:{os.environ['PATH']}", **more)


@contextlib.contextmanager
def hosts(*names):
    """Network namespaces that one wire joins; yields {name: the words that run a command there} and a file that is their
    /etc/hosts, in which no name stands yet, and the lines to add."""
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        known = folder / "hosts"
        known.write_text("127.0.0.1 localhost\n")
        spaces = [f"cohort-recipe-{os.getpid()}-{i}" for i in range(len(names))]
        ip = lambda *words: subprocess.run(["ip", *words], check=True)
        for space in spaces:
            ip("netns", "add", space)
            stack.callback(ip, "netns", "del", space)
        ip("-n", spaces[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", spaces[1])
        for i, space in enumerate(spaces):
            ip("-n", space, "addr", "add", f"10.78.0.{i + 1}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", space, "link", "set", link, "up")
        enter = 'mount --bind "$1" /etc/hosts && hostname "${2%%.*}" && shift 2 && exec "$@"'
        words = {name: ["ip", "netns", "exec", space, "unshare", "--uts", "--mount", "sh", "-c", enter, "sh", str(known), name]
                 for name, space in zip(names, spaces)}
        lines = "".join(f"10.78.0.{i + 1} {name}\n" for i, name in enumerate(names))
        yield words, known, lines


class Recipes(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def expect_ranks(self, count, output):
        lines = [json.loads(line[line.index("{"):]) for line in output.splitlines() if '{"' in line]
        self.assertEqual([line["world_size"] for line in lines], [count], output)

    def run_to_end(self, words, env, **more):
        """Its output, both streams; it must end well."""
        done = subprocess.run(words, env=env, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=LIMIT_S, **more)
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def wait_for(self, what, describe):
        """Until what() is true."""
        deadline = time.monotonic() + LIMIT_S
        while not what():
            if time.monotonic() > deadline:
                self.fail(describe())
            time.sleep(0.1)

    def sbatch(self, *words, meanwhile=lambda job, env: None):
        """Runs a script of Slurm on one node of two cores until the job is completed; returns its output. `meanwhile`: called
        with the job's number when it is submitted."""
        log = self.folder / "job.log"
        output = lambda: log.read_text() if log.exists() else "no output"
        with one_node_cluster() as variables:
            env = with_cohort(**variables)
            job = self.run_to_end(["sbatch", "--parsable", "--nodes=1", "--overcommit", "--cpus-per-task=1", f"--output={log}",
                                   *words], env).strip()
            state = lambda: self.run_to_end(["squeue", "-h", "-t", "all", "-o", "%T", "-j", job], env).strip()
            meanwhile(job, env)
            self.wait_for(lambda: state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), output)
            self.assertEqual(state(), "COMPLETED", output())
        self.assertEqual(list(self.folder.glob("job.secret*")), [])
        return output()

    def test_launchers_by_srun(self):
        self.expect_ranks(2, self.sbatch("--ntasks-per-node=2", RECIPES / "launchers.sbatch", "srun", *PROGRAM))

    def test_launchers_by_cohort(self):
        self.expect_ranks(2, self.sbatch("--ntasks-per-node=2", RECIPES / "launchers.sbatch", "cohort", *PROGRAM))

    def test_launchers_by_another_way(self):
        done = subprocess.run(["bash", RECIPES / "launchers.sbatch", "mpirun", "./train"], text=True, capture_output=True,
                              env=with_cohort(SLURM_NTASKS_PER_NODE=2))
        self.assertEqual((done.returncode, done.stderr), (2, "launchers.sbatch: expected srun or cohort, got mpirun\n"))

    def corpus(self):
        """A made-up language: words are spelt backwards."""
        words = ["red", "green", "blue", "one", "two", "three", "cat", "dog", "sun", "moon"]
        for name, count in (("train", 300), ("valid", 40)):
            lines = [[words[(i * 7 + k * (3 + i // 10)) % 10] for k in range(i % 5 + 1)] for i in range(count)]
            (self.folder / f"{name}.en").write_text("".join(" ".join(line) + "\n" for line in lines))
            (self.folder / f"{name}.xx").write_text("".join(" ".join(word[::-1] for word in line) + "\n" for line in lines))
        return ("--train-sets train.en train.xx --valid-sets valid.en valid.xx --model-dir run --preset tiny --dim-emb 32 "
                "--transformer-dim-ffn 64 --enc-depth 1 --dec-depth 1 --dim-vocabs 60 60 --mini-batch 16 --tokenize 13a").split()

    def test_translator_is_requeued_when_its_time_is_up(self):
        flags = self.folder / "flags.yaml"
        flags.write_text("after-epochs: 100000\n")
        log = self.folder / "job.log"

        def time_is_up(job, env):
            self.wait_for(lambda: (self.folder / "run/history.jsonl").exists(), lambda: log.read_text())
            flags.write_text("after-epochs: 1\n")  # For the second start, which then has nothing left to do.
            self.run_to_end(["scancel", "--signal=TERM", job], env)  # As --signal does: to the steps alone.
        output = self.sbatch("--ntasks-per-node=1", RECIPES / "translator.sbatch", *self.corpus(), "--config", "flags.yaml",
                             meanwhile=time_is_up)
        self.assertRegex(output, "(?s)asked to stop by a signal.*resumed.*reached --after-epochs 1")

    def test_mpirun(self):
        root = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}
        output = self.run_to_end([RECIPES / "mpirun.sh", "localhost:3", *PROGRAM],
                                 with_cohort(MASTER_PORT=free_port(), **root))
        self.expect_ranks(3, output)

    def ssh(self, words, known, lines, program):
        """ssh.sh with a stand-in for ssh, which runs the command in the namespace of its host."""
        known.write_text(known.read_text() + lines)
        stand_in = self.folder / "bin/ssh"
        stand_in.parent.mkdir()
        cases = "".join(f"{name}) exec {' '.join(map(repr, enter))} sh -c \"$3\" ;;\n" for name, enter in words.items())
        stand_in.write_text(f'#!/bin/sh\n[ "$1" = -tt ] || exit 255\ncase $2 in\n{cases}esac\nexit 255\n')
        stand_in.chmod(0o755)
        env = with_cohort()
        env["PATH"] = f"{stand_in.parent}:{env['PATH']}"
        return subprocess.run([RECIPES / "ssh.sh", "2", *words, "--", *program], env=env, cwd=self.folder, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S)

    def test_ssh(self):
        with hosts("host0", "host1") as (words, known, lines):
            done = self.ssh(words, known, lines, PROGRAM)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.expect_ranks(4, done.stdout)
        self.assertEqual(list(self.folder.glob("job.secret*")), [])

    def test_ssh_ends_with_the_failing_hosts_code(self):
        with hosts("host0", "host1") as (words, known, lines):
            done = self.ssh(words, known, lines, ["sh", "-c", "[ $RANK = 0 ] || exit 7; sleep 100", "a word"])
        self.assertEqual(done.returncode, 7, done.stdout)

    def test_ssh_says_how_it_is_called(self):
        for words in ("", "2", "2 host0", "2 -- ./train", "two host0 -- ./train", "2 host0 --"):
            done = subprocess.run([RECIPES / "ssh.sh", *words.split()], cwd=self.folder, text=True, capture_output=True, timeout=LIMIT_S)
            self.assertEqual((done.returncode, done.stderr), (2, "usage: ssh.sh RANKS HOST... -- PROGRAM [ARGUMENT...]\n"), words)
        self.assertEqual(list(self.folder.glob("job.secret*")), [])

    def kubernetes(self):
        return {each["kind"]: each for each in yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())}

    def test_kubernetes_objects_are_valid(self):
        objects = self.kubernetes()
        self.assertEqual(list(objects), ["Service", "Job"])
        for each in objects.values():
            kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
        objects["Job"]["spec"]["completion"] = 2
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(objects["Job"], kubernetes_validate.latest_version(), strict=True)

    def test_kubernetes_pods_of_any_order_train_together(self):
        objects = self.kubernetes()
        spec = objects["Job"]["spec"]
        pod = spec["template"]["spec"]
        self.assertEqual(pod["subdomain"], objects["Service"]["metadata"]["name"])
        self.assertEqual(objects["Service"]["spec"]["clusterIP"], "None")
        self.assertEqual(objects["Service"]["spec"]["selector"],
                         {"batch.kubernetes.io/job-name": objects["Job"]["metadata"]["name"]})
        names = [f"{objects['Job']['metadata']['name']}-{i}.{pod['subdomain']}" for i in range(spec["completions"])]
        secret = self.folder / "job.secret"
        secret.write_text("a secret\n")
        secret.chmod(0o600)
        container, = pod["containers"]
        mount, = container["volumeMounts"]
        in_pod = {"/app/train": PROGRAM, f"--rdzv-secret-file={mount['mountPath']}/job.secret": [f"--rdzv-secret-file={secret}"],
                  "--nproc-per-node=4": ["--nproc-per-node=2"]}
        self.assertLessEqual(set(in_pod), set(container["command"]))
        command = [word for each in container["command"] for word in in_pod.get(each, [each])]
        with hosts(*names) as (words, known, lines), contextlib.ExitStack() as stack:
            logs = [self.folder / f"pod{i}.log" for i in range(len(names))]
            pods = []
            for name, log in reversed(list(zip(names, logs))):  # The first pod starts last.
                pods.append(subprocess.Popen([*words[name], *command], env=with_cohort(), stdout=stack.enter_context(log.open("w")),
                                             stderr=subprocess.STDOUT))
                stack.callback(lambda each=pods[-1]: each.poll() is None and each.send_signal(signal.SIGKILL))
                deadline = time.monotonic() + LIMIT_S
                while f"{names[0]}:29400 does not resolve yet" not in log.read_text():
                    self.assertTrue(time.monotonic() < deadline and pods[-1].poll() is None, log.read_text())
                    time.sleep(0.05)
            known.write_text(known.read_text() + lines)  # The service knows the pods now.
            codes = [each.wait(timeout=LIMIT_S) for each in pods]
            output = "".join(log.read_text() for log in logs)
            self.assertEqual(codes, [0] * len(names), output)
            self.expect_ranks(2 * len(names), output)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *(f"Recipes.{name}" for name in sys.argv[3:])])
