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


def model_with(turn):
    link = lambda bits: {"message_s": 2e-4, "turn_s": turn, "bits_per_s": bits}
    backend = {"none": link(1e15), "100mbit": link(0.95e8), "1gbit": link(0.94e9), "work_s_a_byte": 1e-9}
    return {"gloo": backend, "hierarchical": backend, "shm": {"call_s": 5e-5, "byte_s": 1e-10}}


def points_of(model, cores):
    """What a machine measures for which `model` is exact."""
    points = {}
    for rate in ["none", *RATES]:
        for hosts in cost_model.FITTED_HOSTS:
            points[f"{rate} {hosts}x1"] = {backend: {
                str(size): cost_model.predicted(model, backend, hosts, 1, rate, size, cores) for size in cost_model.SIZES[rate]}
                for backend in ("gloo", "hierarchical")}
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

    def test_ranks_with_a_core_each_are_fitted_without_turns(self):
        model = model_with(turn=0)
        for cores in (3, 8):
            found = self.fitted(model, cores)
            self.check_links(found, model, cores)
            for backend in ("gloo", "hierarchical"):
                for rate in RATES:
                    self.assertEqual(found[backend][rate]["turn_s"], 0)
                    self.assertFalse(found[backend][rate]["crowding_fitted"])
                self.assertAlmostEqual(found[backend]["work_s_a_byte"] / 1e-9, 1, delta=1e-6)

    def test_ranks_that_share_cores_are_fitted_with_their_turns(self):
        model = model_with(turn=1e-4)
        found = self.fitted(model, 2)
        self.check_links(found, model, 2)
        for backend in ("gloo", "hierarchical"):
            self.assertAlmostEqual(found[backend]["1gbit"]["turn_s"] / 1e-4, 1, delta=1e-6)
            self.assertTrue(found[backend]["1gbit"]["crowding_fitted"])

    def test_ranks_of_all_hosts_share_the_cores(self):
        model, size = model_with(turn=0), 1 << 20
        inside = lambda cores: (cost_model.predicted(model, "hierarchical", 4, 2, "100mbit", size, cores) -
                                cost_model.predicted(dict(model, shm={"call_s": 0, "byte_s": 0}), "hierarchical", 4, 2, "100mbit", size,
                                                     cores))
        self.assertAlmostEqual(inside(2) / inside(8), 4, delta=1e-9)


if __name__ == "__main__":
    unittest.main()
