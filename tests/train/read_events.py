# SPDX-License-Identifier: Apache-2.0
"""Prints as JSON what TensorBoard itself finds in a folder of event files: the curves and the texts."""
import json
import sys

from tensorboard.backend.event_processing import event_accumulator

events = event_accumulator.EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "tensors": 0})
events.Reload()
tags = events.Tags()
scalars = {tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in tags["scalars"]}
texts = {
    tag: [[e.step, e.tensor_proto.string_val[0].decode()] for e in events.Tensors(tag)]
    for tag in events.summary_metadata
    if events.SummaryMetadata(tag).plugin_data.plugin_name == "text"
}
json.dump({"scalars": scalars, "texts": texts}, sys.stdout)
