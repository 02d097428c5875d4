// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/gradient_engine.h"

#include <algorithm>
#include <torch/csrc/autograd/grad_mode.h>

#include "cohort/comm/shared_tensor.h"
#include "cohort/parallel/comm_hooks/all_reduce.h"
#include "cohort/parallel/comm_hooks/compress.h"
#include "cohort/parallel/gradient_engine_impl.h"

namespace cohort::parallel {

GradientEngine::Impl::~Impl() {
  for (const auto& [accumulator, key] : hooks) accumulator->del_post_hook(key);
}

void GradientEngine::Impl::select_parameters() {
  const auto& names = options.delay_all_reduce_named_params;
  std::vector<NamedTensor> late;
  for (NamedTensor& each : trainable_parameters(model, options.ignored)) {
    (contains(names, each.name) ? late : bucketed).push_back(std::move(each));
  }
  TORCH_CHECK_VALUE(late.size() == names.size(),
                    "delay_all_reduce_named_params: expected names of parameters that require a "
                    "gradient, each once");
  TORCH_CHECK_VALUE(!bucketed.empty() || !late.empty(),
                    "the model has no parameter that requires a gradient");
  TORCH_CHECK_VALUE(!bucketed.empty(),
                    "delay_all_reduce_named_params: expected at least one other parameter");
  for (const auto& item : model.named_parameters()) {
    if (!item.value().requires_grad() && !contains(options.ignored, item.key()))
      frozen.push_back({item.key(), item.value()});
  }
  watched = bucketed;
  watched.insert(watched.end(), late.begin(), late.end());
  if (late.empty()) return;
  const std::string& name = options.param_to_hook_all_reduce;
  const auto found = std::find_if(watched.begin(), watched.end(),
                                  [&](const auto& each) { return each.name == name; });
  TORCH_CHECK_VALUE(found != watched.end(),
                    "param_to_hook_all_reduce: expected a parameter that requires a gradient, got ",
                    name);
  trigger = static_cast<size_t>(found - watched.begin());
  const size_t num_gradients = late.size() + (trigger < bucketed.size() ? 1 : 0);
  delayed.emplace(std::move(late), num_gradients, group);
}

void GradientEngine::Impl::sync_initial_state() {
  if (!options.init_sync) return;
  verify_same_model(model, group, options.ignored);
  const auto late = delayed ? delayed->parameters() : std::vector<NamedTensor>{};
  verify_same_text("options of DistributedDataParallel", describe(options, bucketed, late), group);
  broadcast_model(model, group, 0, options.ignored);
}

// Its gradient would stay this rank's own.
void GradientEngine::Impl::check_frozen() const {
  for (const NamedTensor& each : frozen) {
    TORCH_CHECK_VALUE(!each.tensor.requires_grad(), each.name,
                      " requires a gradient, but was frozen when DistributedDataParallel was made: "
                      "expected a new DistributedDataParallel, which averages it");
  }
}

void GradientEngine::Impl::cast_buffers() {
  const auto& type = options.mixed_precision.buffer_dtype;
  for (const NamedTensor& buffer : model_buffers(model, options.ignored)) {
    if (type) buffer.tensor.set_data(cast_floating(buffer.tensor, *type));
    buffers.push_back(buffer.tensor);
    forms.emplace_back(buffer);
  }
}

void GradientEngine::Impl::make_reducer() {
  reducer = parallel::make_reducer(bucketed, group, options);
  reducer->set_ddp_runtime_logging_sample_rate(options.logging_sample_rate);
  logger = std::make_shared<c10d::Logger>(reducer);
  reducer->set_logger(logger);
  logger->set_construction_data_and_log(model.name(), {}, -1, options.broadcast_buffers,
                                        /*has_sync_bn=*/false, options.static_graph);
  if (options.static_graph) {
    reducer->set_static_graph();
    logger->set_static_graph();
  }
  if (const auto& type = options.mixed_precision.reduce_dtype) {
    for (const NamedTensor& each : bucketed)
      TORCH_CHECK_VALUE(!each.sparse_gradient,
                        "mixed_precision.reduce_dtype: expected no sparse gradient, got one of ",
                        each.name);
    reducer->carry_by(compress_hook(*type, [this] { return divisor; }), "comm_hook");
  } else if (bucketed.front().tensor.is_cpu() && comm::averages_while_summing(group)) {
    reducer->carry_by(all_reduce_hook([this] { return divisor; }));
  }
}

// The same on all ranks, also on those that shadow a step.
void GradientEngine::Impl::choose_divisor(const std::optional<Round>& round) {
  const bool by_active = round && !join->divide_by_initial_world_size;
  divisor = by_active ? round->num_active : group.size();
  reducer->set_divisor(divisor);
}

void GradientEngine::Impl::check_forms() const {
  for (const Form& form : forms) {
    const at::Tensor& now = form.tensor;
    const bool same =
        now.scalar_type() == form.type && now.device() == form.device && now.sizes() == form.sizes;
    TORCH_CHECK_VALUE(same, form.name, ": expected ", form.type, " ", c10::IntArrayRef(form.sizes),
                      " on ", form.device, " as when DistributedDataParallel was made, got ",
                      now.scalar_type(), " ", now.sizes(), " on ", now.device());
  }
}

GradientEngine::GradientEngine(std::shared_ptr<torch::nn::Module> module,
                               const comm::ProcessGroup& group,
                               const DistributedDataParallelOptions& options)
    : impl_(std::make_shared<Impl>(std::move(module), group, options)) {
  Impl& my = *impl_;
  check_options(options, my.model);
  my.options.ignored = under_every_name(my.model, options.ignored);
  my.select_parameters();
  my.sync_initial_state();
  my.cast_buffers();
  my.make_reducer();
  my.watch_gradients();
  for (const NamedTensor& each : my.watched) my.forms.emplace_back(each);
  if (my.options.mixed_precision.param_dtype) {
    std::vector<std::pair<std::string, at::Tensor>> all;
    for (const auto& item : my.model.named_parameters()) {
      if (!contains(my.options.ignored, item.key())) all.emplace_back(item.key(), item.value());
    }
    my.low_precision.emplace(all, *my.options.mixed_precision.param_dtype);
  }
}

GradientEngine::~GradientEngine() = default;

void GradientEngine::before_forward() {
  Impl& my = *impl_;
  const bool trains = at::GradMode::is_enabled();
  const bool synchronizes = trains && my.synchronized;
  if (trains) {
    if (!my.low_precision || !my.low_precision->is_swapped_in()) my.check_forms();
    my.check_frozen();
    my.check_finished();
  }
  std::optional<Round> round;
  if (my.join && (trains || my.will_copy_buffers())) {
    round = my.notify_join_context(/*active=*/true, synchronizes);
  }
  if (synchronizes) {
    my.logger->set_runtime_stats_and_log();
    my.reducer->prepare_for_forward();
    my.group.translate_errors("forward", [&] { my.reducer->rebuild_buckets(); });
    my.choose_divisor(round);
  }
  if (my.will_copy_buffers()) {
    broadcast_tensors(my.buffers, my.group, round ? round->first_active : 0);
  }
  my.buffers_differ = synchronizes;
  if (!my.low_precision) return;
  my.swapped_in_by_forward = !my.low_precision->is_swapped_in();
  my.low_precision->swap_in();
}

void GradientEngine::after_forward(const std::vector<at::Tensor*>& outputs) {
  Impl& my = *impl_;
  if (!at::GradMode::is_enabled()) return abandon_forward();
  my.last_forward = my.synchronized ? Impl::Forward::kSynchronized : Impl::Forward::kLocal;
  my.watch_backward(outputs);
  if (!my.synchronized) return;
  std::vector<at::Tensor> search;
  for (const at::Tensor* output : outputs) {
    if (my.searches_unused() && output->defined()) search.push_back(*output);
  }
  if (my.options.static_graph && my.static_graph != Impl::StaticGraph::kKnown)
    my.reducer->forget_unsynchronized();
  my.reducer->prepare_for_backward(search);
  my.backward = Impl::Backward::kAwaited;
  if (my.static_graph == Impl::StaticGraph::kQueued) my.static_graph = Impl::StaticGraph::kUnknown;
  ++my.num_prepared;
  std::fill(my.ready.begin(), my.ready.end(), false);
  if (my.delayed) my.delayed->prepare();
  if (my.searches_unused() || my.options.static_graph) my.watch_static_graph(outputs);
}

void GradientEngine::abandon_forward() {
  if (impl_->low_precision && impl_->swapped_in_by_forward) impl_->low_precision->swap_out();
}

std::vector<std::pair<std::string, at::Tensor>> GradientEngine::named_parameters() const {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const NamedTensor& each : trainable_parameters(impl_->model))
    named.emplace_back(each.name, each.tensor);
  return named;
}

std::vector<std::pair<std::string, at::Tensor>> GradientEngine::averaged_parameters() const {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const NamedTensor& each : impl_->watched) named.emplace_back(each.name, each.tensor);
  return named;
}

void GradientEngine::set_synchronized(bool on) {
  impl_->synchronized = on;
}

void GradientEngine::check_masters() const {
  TORCH_CHECK_VALUE(
      !impl_->low_precision || !impl_->low_precision->is_swapped_in(),
      "the parameters have the type of mixed_precision.param_dtype until the backward "
      "of the last forward: expected it before they are saved, loaded or taken (a "
      "forward without a backward runs under NoGradGuard)");
}

at::Tensor GradientEngine::cast_input(const at::Tensor& input) const {
  return parallel::cast_input(impl_->options.mixed_precision, input);
}

at::Tensor GradientEngine::cast_output(const at::Tensor& output) const {
  return parallel::cast_output(impl_->options.mixed_precision, output);
}

void GradientEngine::register_comm_hook(CommHook hook, const std::string& name) {
  Impl& my = *impl_;
  TORCH_CHECK_VALUE(my.comm_hook.empty(), "register_comm_hook: expected one hook, ", my.comm_hook,
                    " is there");
  TORCH_CHECK_VALUE(!my.options.mixed_precision.reduce_dtype,
                    "register_comm_hook: expected no mixed_precision.reduce_dtype, itself a hook");
  TORCH_CHECK_VALUE(my.num_prepared == 0,
                    "register_comm_hook: expected before the first step, got after ",
                    my.num_prepared);
  TORCH_CHECK_VALUE(!name.empty(), "register_comm_hook: expected a name");
  my.reducer->carry_by(std::move(hook), "comm_hook");
  my.logger->set_comm_hook(name);
  my.comm_hook = name;
}

BucketLayout GradientEngine::bucket_layout() const {
  BucketLayout layout;
  for (const auto& bucket : impl_->reducer->layout()) {
    layout.emplace_back();
    for (const size_t index : bucket) layout.back().push_back(impl_->bucketed[index].name);
  }
  return layout;
}

DdpLoggingData GradientEngine::logging_data() const {
  const c10::DDPLoggingData data = impl_->logger->get_ddp_logging_data();
  const auto number = [&](const char* name) {
    const auto found = data.ints_map.find(name);
    return found == data.ints_map.end() ? int64_t{0} : found->second;
  };
  return {.iteration = number("iteration"),
          .num_parameter_tensors = number("num_parameter_tensors"),
          .total_parameter_size_bytes = number("total_parameter_size_bytes"),
          .bucket_sizes_bytes = impl_->logger->get_bucket_sizes(),
          .has_rebuilt_buckets = impl_->options.rebuild_buckets && impl_->reducer->has_rebuilt(),
          .forward_compute_time = number("avg_forward_compute_time"),
          .backward_compute_time = number("avg_backward_compute_time"),
          .backward_comm_time = number("avg_backward_comm_time"),
          .backward_compute_comm_overlap_time = number("avg_backward_compute_comm_overlap_time"),
          .comm_hook = impl_->comm_hook};
}

comm::ProcessGroup GradientEngine::group() const {
  return impl_->group;
}

int64_t GradientEngine::num_buckets() const {
  return static_cast<int64_t>(impl_->reducer->layout().size());
}

}  // namespace cohort::parallel
