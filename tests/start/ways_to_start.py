#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Starts one program, unchanged, in every way there is, and expects one group of ranks that trains together.

Usage: ways_to_start.py BUILD_FOLDER [NAME OF A TEST ...]. The program is `cohort bench ddp`, or one that makes several
groups: its rank 0 prints one JSON line with the number of ranks, the others nothing.
"""
import contextlib
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time
import unittest

BUILD = pathlib.Path(sys.argv[1]).resolve()
PROGRAM = [str(BUILD / "bin/cohort"), "bench", "ddp", "--layers", "2", "--width", "16", "--steps", "2", "--warmup", "1",
           "--rendezvous-timeout", "100", "--timeout", "100"]
SEVERAL_GROUPS = [str(BUILD / "tests/several_groups")]
CONTRACTS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PADDLE_", "TORCHELASTIC_", "COHORT_")


def environment(**more):
    """This process's, without any launcher's place in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(CONTRACTS)}
    return {**kept, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in more.items()}}


def free_port():
    """Of those that the system gives to nobody by itself, a moment later say."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def one_node_cluster():
    """Slurm's daemons on this machine alone, without systemd, munge or cgroups; yields what srun needs to find them."""
    host = socket.gethostname().split(".")[0]
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "ClusterName": "ways", "SlurmctldHost": f"{host}(127.0.0.1)", "SlurmUser": "root", "SlurmdUser": "root",
            "AuthType": "auth/none", "CredType": "cred/none", "MpiDefault": "none", "ProctrackType": "proctrack/pgid",
            "AuthInfo": "cred_expire=5", "SchedulerParameters": "sched_interval=1,batch_sched_delay=0",
            "TaskPlugin": "task/none", "JobAcctGatherType": "jobacct_gather/none", "SelectType": "select/linear",
            "SlurmctldPort": free_port(), "SlurmdPort": free_port(), "StateSaveLocation": folder,
            "SlurmdSpoolDir": folder + "/spool", "SlurmctldPidFile": folder + "/ctld.pid",
            "SlurmdPidFile": folder + "/d.pid", "SlurmctldLogFile": folder + "/ctld.log",
            "SlurmdLogFile": folder + "/d.log", "ReturnToService": 2,
        }
        lines = [f"{key}={value}" for key, value in settings.items()]
        lines += [f"NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN",
                  f"PartitionName=all Nodes={host} Default=YES State=UP"]
        conf = pathlib.Path(folder, "slurm.conf")
        conf.write_text("\n".join(lines) + "\n")
        env = environment(SLURM_CONF=conf)
        daemons = [subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                   for words in (["slurmctld", "-D"], ["slurmd", "-D", "-N", host])]
        try:
            deadline = time.monotonic() + 60
            while "idle" not in (state := subprocess.run(["sinfo", "-h", "-o", "%T"], env=env, text=True,
                                                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout):
                logs = "".join(log.read_text() for log in pathlib.Path(folder).glob("*.log"))
                assert time.monotonic() < deadline, f"the cluster did not start: {state}{logs}"
                time.sleep(0.2)
            yield {"SLURM_CONF": conf, "MASTER_PORT": free_port()}
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(timeout=30)


class WaysToStart(unittest.TestCase):
    def expect_ranks(self, count, commands):
        """Runs (words, environment) side by side; together they are one group of `count`."""
        processes = [subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                     for words, env in commands]
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        self.assertEqual([process.returncode for process in processes], [0] * len(processes), outputs)
        lines = [line for output in outputs for line in output.splitlines() if line.startswith("{")]
        self.assertEqual(len(lines), 1, outputs)
        self.assertEqual(json.loads(lines[0])["world_size"], count)

    def cohort_run(self, program):
        self.expect_ranks(3, [([PROGRAM[0], "run", "--nproc-per-node", "3", "--", *program], environment())])

    def test_cohort_run(self):
        self.cohort_run(PROGRAM)

    def test_several_groups_by_cohort_run(self):
        self.cohort_run(SEVERAL_GROUPS)

    def torchrun(self, program):
        python = os.environ.get("COHORT_PEER_PYTHON")
        self.assertTrue(python, "set COHORT_PEER_PYTHON, see bench/peers/README.md")
        self.expect_ranks(3, [([python, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--no-python", *program],
                               environment())])

    def test_torchrun(self):
        self.torchrun(PROGRAM)

    def test_several_groups_by_torchrun(self):
        self.torchrun(SEVERAL_GROUPS)

    def test_several_groups_by_hand(self):
        place = {"WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        self.expect_ranks(3, [(SEVERAL_GROUPS, environment(RANK=rank, **place)) for rank in range(3)])

    def test_mpirun(self):
        place = ["-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_port()}"]
        self.expect_ranks(3, [(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", *place, *PROGRAM],
                               environment())])

    def test_slurms_variables(self):
        commands = []
        job = {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0, "SLURM_NTASKS": 3, "SLURM_NNODES": 1, "SLURM_NODEID": 0,
               "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "3", "MASTER_PORT": free_port()}
        for rank in range(3):
            commands.append((PROGRAM, environment(SLURM_PROCID=rank, SLURM_LOCALID=rank, **job)))
        self.expect_ranks(3, commands)

    def test_srun(self):
        with one_node_cluster() as variables:
            self.expect_ranks(3, [(["srun", "--ntasks", "3", "--overcommit", *PROGRAM], environment(**variables))])

    def test_shell_loop_over_two_nodes(self):
        port = str(free_port())
        commands = []
        for node in range(2):
            for local_rank in range(2):
                flags = ["--nproc-per-node", "2", "--rank", str(node), "--world-size", "2", "--addr", "127.0.0.1",
                         "--port", port]
                commands.append(([*PROGRAM, *flags], environment(LOCAL_RANK=local_rank)))
        self.expect_ranks(4, commands)

    def three_shells(self, url, **variables):
        self.expect_ranks(3, [([*PROGRAM, "--rank", str(rank), "--world-size", "3", "--dist-url", url,
                                "--dist-backend", "gloo"], environment(**variables)) for rank in range(3)])

    def test_dist_url_tcp(self):
        self.three_shells(f"tcp://127.0.0.1:{free_port()}")

    def test_dist_url_file(self):
        with tempfile.TemporaryDirectory() as folder:
            self.three_shells(f"file://{folder}/meet")
            self.assertFalse(pathlib.Path(folder, "meet").exists(), "the last process leaves the file behind")
            self.assertEqual(os.listdir(folder), [])

    def test_dist_url_env(self):
        self.three_shells("env://", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())

    def test_paddles_environment(self):
        endpoints = ",".join(f"127.0.0.1:{free_port()}" for _ in range(3))
        commands = []
        for rank in range(3):
            commands.append((PROGRAM, environment(
                PADDLE_TRAINER_ID=rank, PADDLE_TRAINERS_NUM=3, PADDLE_TRAINER_ENDPOINTS=endpoints,
                PADDLE_CURRENT_ENDPOINT=endpoints.split(",")[rank])))
        self.expect_ranks(3, commands)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *(f"WaysToStart.{name}" for name in sys.argv[2:])])
