#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/cost-model: what it fits, on few cores and on many.  Usage: cost_model_test.py SOURCE_FOLDER"""
import importlib.machinery
import importlib.util
import pathlib
import sys
import unittest

SOURCE = pathlib.Path(sys.argv.pop(1)).resolve()
sys.path.insert(0, str(SOURCE / "bench"))
sys.dont_write_bytecode = True
LOADER = importlib.machinery.SourceFileLoader("cost_model", str(SOURCE / "bench/cost-model"))
cost_model = importlib.util.module_from_spec(importlib.util.spec_from_loader("cost_model", LOADER))
LOADER.exec_module(cost_model)

RATES = ["100mbit", "1gbit"]


def exact_model():
    link = lambda bits: {"message_s": 2e-4, "bits_per_s": bits}
    backend = {"none": {"message_s": 0, "bits_per_s": 1e15}, "100mbit": link(0.95e8), "1gbit": link(0.94e9),
               "work": {"message_s": 1e-4, "byte_s": 1e-9}}
    return {"gloo": backend, "hierarchical": backend, "shm": {"call_s": 5e-5, "byte_s": 1e-10}}


def points_of(model, cores):
    """What a machine measures for which `model` is exact."""
    points = {}
    for rate in ["none", *RATES]:
        for hosts in cost_model.FITTED_HOSTS:
            points[f"{rate} {hosts}x1"] = {backend: {
                str(size): cost_model.predicted(model, backend, hosts, 1, rate, size, cores) for size in cost_model.SIZES[rate]}
                for backend in ("gloo", "hierarchical")}
            for backend in ("gloo", "hierarchical"):
                work = model[backend]["work"]
                points[f"{rate} {hosts}x1"][f"{backend}-cpu"] = {str(size): sum(
                    count * seconds for count, seconds in zip(cost_model.work_row(backend, hosts, 1, size, 1),
                                                              (work["message_s"], work["byte_s"])))
                    for size in cost_model.SIZES[rate]}
    for ranks in cost_model.FITTED_HOSTS:
        crowd = max(1, ranks / cores)
        points[f"none 1x{ranks}"] = {"shm-registered": {
            str(size): cost_model.shm_seconds(model, ranks, size, crowd) for size in cost_model.SIZES["none"]}}
    return points


class CostModelTest(unittest.TestCase):
    def fitted(self, model, cores):
        cost_model.CORES = cores
        return cost_model.fit(points_of(model, cores), RATES)

    # Data without noise: what is left is rounding. Single numbers are not compared where the data hardly tell them apart.
    def check_links(self, found, model, cores):
        for backend in ("gloo", "hierarchical"):
            for rate in RATES:
                for hosts in cost_model.FITTED_HOSTS:
                    for size in cost_model.SIZES[rate]:
                        time = [cost_model.predicted(which, backend, hosts, 1, rate, size, cores) for which in (found, model)]
                        self.assertAlmostEqual(time[0] / time[1], 1, delta=1e-6, msg=f"{backend} {rate} {hosts} {size}")
                self.assertAlmostEqual(found[backend][rate]["bits_per_s"] / model[backend][rate]["bits_per_s"], 1, delta=1e-6)
        self.assertAlmostEqual(found["shm"]["call_s"] / model["shm"]["call_s"], 1, delta=1e-6)
        self.assertAlmostEqual(found["shm"]["byte_s"] / model["shm"]["byte_s"], 1, delta=1e-6)

    def test_what_is_exact_is_found_whether_ranks_share_cores_or_not(self):
        model = exact_model()
        for cores in (2, 3, 8):
            found = self.fitted(model, cores)
            self.check_links(found, model, cores)
            for backend in ("gloo", "hierarchical"):
                for term in ("message_s", "byte_s"):
                    self.assertAlmostEqual(found[backend]["work"][term] / model[backend]["work"][term], 1, delta=1e-6)

    def test_small_messages_of_ranks_that_share_cores_take_what_the_cores_need(self):
        model, size = exact_model(), 1 << 12
        self.assertAlmostEqual(cost_model.predicted(model, "gloo", 8, 1, "1gbit", size, 2) / (14 * 8 / 2 * 1e-4), 1, delta=.01)
        self.assertAlmostEqual(cost_model.predicted(model, "gloo", 8, 1, "1gbit", size) / (14 * 2e-4), 1, delta=.05)

    def test_only_the_leaders_of_hosts_have_work(self):
        for ranks in (1, 8):
            self.assertEqual(cost_model.work_row("hierarchical", 4, ranks, 1 << 20), [2 * 3, 2 * 3 / 4 * (1 << 20)])
            self.assertEqual(cost_model.work_row("hierarchical", 4, ranks, 1 << 20, shared_cores=2), [4 * 3, 3 * (1 << 20)])
            self.assertEqual(cost_model.work_row("gloo", 4, ranks, 1 << 20)[0], 2 * (4 * ranks - 1))

    def test_ranks_of_all_hosts_share_the_cores(self):
        model, size = exact_model(), 1 << 20
        inside = lambda cores: (cost_model.predicted(model, "hierarchical", 4, 2, "100mbit", size, cores) -
                                cost_model.predicted(dict(model, shm={"call_s": 0, "byte_s": 0}), "hierarchical", 4, 2, "100mbit", size,
                                                     cores))
        self.assertAlmostEqual(inside(2) / inside(8), 4, delta=1e-9)


if __name__ == "__main__":
    unittest.main()
