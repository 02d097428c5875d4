// SPDX-License-Identifier: Apache-2.0
// The options of DistributedDataParallel: what is refused, and what must agree between ranks.
#include <sstream>

#include "cohort/parallel/gradient_engine_impl.h"

namespace cohort::parallel {

void check_options(const DistributedDataParallelOptions& options, const torch::nn::Module& model) {
  const auto positive = [](const char* option, double value) {
    TORCH_CHECK_VALUE(value > 0, option, ": expected more than 0, got ", value);
  };
  positive("bucket_cap_mb", options.bucket_cap_mb);
  positive("first_bucket_mb", options.first_bucket_mb);
  positive("logging_sample_rate", options.logging_sample_rate);
  for (const double cap : options.bucket_cap_mb_list) positive("bucket_cap_mb_list", cap);
  check_types(options.mixed_precision);

  const bool unused = options.find_unused_parameters, is_static = options.static_graph;
  const bool delays = !options.delay_all_reduce_named_params.empty();
  const struct {
    bool holds;
    const char *option, *expected;
  } rules[] = {
      {unused || !options.skip_all_reduce_unused_params, "skip_all_reduce_unused_params",
       "expected find_unused_parameters with it"},
      {!is_static || !options.skip_all_reduce_unused_params, "skip_all_reduce_unused_params",
       "expected no static_graph with it, which searches for unused parameters in the first step "
       "alone"},
      {!options.rebuild_buckets || !unused || is_static, "rebuild_buckets",
       "expected no find_unused_parameters with it, which varies the order of gradients"},
      {!options.rebuild_buckets || options.bucket_layout.empty(), "rebuild_buckets",
       "expected no bucket_layout with it, which is kept as it is"},
      {options.forward_order.empty() || (options.bucket_layout.empty() && !options.rebuild_buckets),
       "forward_order", "expected neither bucket_layout nor rebuild_buckets, which replace it"},
      {delays == !options.param_to_hook_all_reduce.empty(),
       "delay_all_reduce_named_params and param_to_hook_all_reduce", "expected both or neither"},
      {!delays || (!unused && !is_static), "delay_all_reduce_named_params",
       "expected neither find_unused_parameters nor static_graph, which vary when gradients come"},
  };
  for (const auto& [holds, option, expected] : rules)
    TORCH_CHECK_VALUE(holds, option, ": ", expected);

  const auto parameters = model.named_parameters();
  const auto buffers = model.named_buffers();
  for (const std::string& name : options.ignored)
    TORCH_CHECK_VALUE(parameters.contains(name) || buffers.contains(name),
                      "ignored: expected names of parameters or buffers, got ", name);
}

std::string describe(const DistributedDataParallelOptions& options,
                     const std::vector<NamedTensor>& bucketed,
                     const std::vector<NamedTensor>& delayed) {
  std::ostringstream out;
  out << "find_unused_parameters " << options.find_unused_parameters << "\nstatic_graph "
      << options.static_graph << "\nbroadcast_buffers " << options.broadcast_buffers
      << "\nrebuild_buckets " << options.rebuild_buckets << "\nskip_all_reduce_unused_params "
      << options.skip_all_reduce_unused_params << '\n'
      << describe(options.mixed_precision) << "delay_all_reduce_named_params";
  for (const NamedTensor& each : delayed) out << ' ' << each.name;
  out << "\nparam_to_hook_all_reduce " << options.param_to_hook_all_reduce << '\n';
  const BucketIndices buckets = initial_buckets(bucketed, options);
  for (size_t i = 0; i < buckets.size(); ++i) {
    out << "bucket " << i << " of";
    for (const size_t index : buckets[i]) out << ' ' << bucketed[index].name;
    out << '\n';
  }
  return out.str();
}

}  // namespace cohort::parallel
