#include "cohort/parallel/gradient_engine.h"

#include <ATen/ops/zeros.h>
#include <algorithm>
#include <optional>
#include <sstream>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>

#include "cohort/base/error.h"
#include "cohort/parallel/comm_hooks/compress.h"
#include "cohort/parallel/delayed_parameters.h"
#include "cohort/parallel/mixed_precision.h"
#include "cohort/parallel/reducer.h"

namespace cohort::parallel {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// Passes gradients through and says when the backward of a forward's outputs begins. Outputs that
// the loss does not use get undefined gradients, which still reach every parameter behind them.
struct OutputSink : Node {
  explicit OutputSink(std::function<void()> on_backward) : begin(std::move(on_backward)) {}
  variable_list apply(variable_list&& gradients) override {
    begin();
    return std::move(gradients);
  }
  std::function<void()> begin;
};

void pass_through_sink(const std::vector<at::Tensor*>& outputs, std::function<void()> on_backward) {
  std::vector<at::Tensor*> inner;
  torch::autograd::edge_list edges;
  for (at::Tensor* output : outputs) {
    if (!output->defined() || !output->grad_fn()) continue;
    inner.push_back(output);
    edges.push_back(torch::autograd::impl::gradient_edge(*output));
  }
  if (inner.empty()) return;
  const auto sink = std::make_shared<OutputSink>(std::move(on_backward));
  sink->set_next_edges(std::move(edges));
  for (at::Tensor* output : inner) {
    at::Tensor same = output->detach();
    torch::autograd::set_history(same, sink);
    *output = same;
  }
}

struct Form {
  at::Tensor tensor;
  std::string name;
  at::ScalarType type;
  at::Device device;
  std::vector<int64_t> sizes;
};

Form form_of(const NamedTensor& each) {
  return {each.tensor, each.name, each.tensor.scalar_type(), each.tensor.device(),
          each.tensor.sizes().vec()};
}

void check_options(const DistributedDataParallelOptions& options, const torch::nn::Module& model) {
  const auto positive = [](const char* name, double value) {
    TORCH_CHECK_VALUE(value > 0, name, ": expected more than 0, got ", value);
  };
  positive("bucket_cap_mb", options.bucket_cap_mb);
  positive("first_bucket_mb", options.first_bucket_mb);
  positive("logging_sample_rate", options.logging_sample_rate);
  for (const double cap : options.bucket_cap_mb_list) positive("bucket_cap_mb_list", cap);
  TORCH_CHECK_VALUE(!options.skip_all_reduce_unused_params || options.find_unused_parameters,
                    "skip_all_reduce_unused_params: expected find_unused_parameters with it");
  TORCH_CHECK_VALUE(
      !options.rebuild_buckets || !options.find_unused_parameters || options.static_graph,
      "rebuild_buckets: expected no find_unused_parameters with it, which varies the order of "
      "gradients");
  TORCH_CHECK_VALUE(!options.rebuild_buckets || options.bucket_layout.empty(),
                    "rebuild_buckets: expected no bucket_layout with it, which is kept as it is");
  TORCH_CHECK_VALUE(
      options.delay_all_reduce_named_params.empty() == options.param_to_hook_all_reduce.empty(),
      "delay_all_reduce_named_params and param_to_hook_all_reduce: expected both or neither");
  TORCH_CHECK_VALUE(options.delay_all_reduce_named_params.empty() ||
                        (!options.find_unused_parameters && !options.static_graph),
                    "delay_all_reduce_named_params: expected neither find_unused_parameters nor "
                    "static_graph with it, which vary when and how often gradients come");
  const auto floating = [](const char* name, const std::optional<at::ScalarType>& type) {
    TORCH_CHECK_VALUE(!type || at::isFloatingType(*type), name,
                      ": expected a floating-point type, got ", c10::toString(*type));
  };
  floating("mixed_precision.param_dtype", options.mixed_precision.param_dtype);
  floating("mixed_precision.reduce_dtype", options.mixed_precision.reduce_dtype);
  floating("mixed_precision.buffer_dtype", options.mixed_precision.buffer_dtype);
  floating("mixed_precision.output_dtype", options.mixed_precision.output_dtype);
  const auto parameters = model.named_parameters();
  const auto buffers = model.named_buffers();
  for (const std::string& name : options.ignored) {
    TORCH_CHECK_VALUE(parameters.contains(name) || buffers.contains(name),
                      "ignored: expected names of parameters or buffers, got ", name);
  }
}

std::string text_of(const std::optional<at::ScalarType>& type) {
  return type ? c10::toString(*type) : "unset";
}

// Which ranks take part in one step under join.
struct Round {
  int num_active = 0;
  int first_active = 0;
  int64_t num_synchronizing = 0;
};

}  // namespace

struct GradientEngine::Impl : std::enable_shared_from_this<Impl> {
  Impl(std::shared_ptr<torch::nn::Module> m, comm::ProcessGroup g,
       const DistributedDataParallelOptions& o)
      : owned_model(std::move(m)), model(*owned_model), group(std::move(g)), options(o) {}
  ~Impl();
  struct Backward;

  void select_parameters();
  std::string describe() const;
  void sync_initial_state();
  void cast_buffers();
  void make_engine();
  void watch_gradients();
  void check_expected(size_t index) const;
  void gradient_arrived(size_t index);
  void watch_backward(const std::vector<at::Tensor*>& outputs);
  void backward_begins();
  void backward_ends();

  void check_forms() const;
  void check_finished();
  void abandon();
  void restore_after_error() noexcept;
  std::string left_out() const;
  [[noreturn]] void report_left_out();
  Round notify_join_context(bool active, bool synchronizing);
  bool will_copy_buffers() const {
    return buffers_differ && options.broadcast_buffers && !buffers.empty();
  }
  void shadow_collectives(const Round& round);
  bool searches_unused() const { return options.find_unused_parameters && !options.static_graph; }
  // A synchronized forward ran, and no backward after it has averaged all gradients.
  bool unfinished() const { return reducer->unfinished() || (delayed && delayed->unfinished()); }

  const std::shared_ptr<torch::nn::Module> owned_model;
  torch::nn::Module& model;
  const comm::ProcessGroup group;
  DistributedDataParallelOptions options;
  std::vector<NamedTensor> bucketed;
  std::optional<DelayedParameters> delayed;
  std::vector<NamedTensor> watched;  // bucketed, then delayed
  size_t trigger = 0;                // of the delayed ones, in `watched`
  std::vector<at::Tensor> buffers;
  std::vector<Form> forms;
  std::optional<LowPrecisionParameters> low_precision;
  // by this forward, not by one whose backward is still to come
  bool swapped_in_by_forward = false;

  std::shared_ptr<Reducer> reducer;
  std::shared_ptr<c10d::Logger> logger;
  std::vector<std::pair<std::shared_ptr<Node>, uintptr_t>> hooks;  // to be taken off again
  std::string comm_hook;

  bool synchronized = true;
  enum class Forward { kNone, kLocal, kSynchronized };
  Forward last_forward = Forward::kNone;  // of those that a backward can follow
  // A synchronized forward ran, and none after it, so each rank's buffers follow its own batch.
  bool buffers_differ = true;
  bool begun = false;        // some gradient of the last synchronized forward is there
  bool ended = false;        // and the backward that brought it has ended without an error
  int64_t backward = -1;     // autograd's number of the backward that reached outputs last
  std::vector<bool> ready;   // by `watched`: its gradient of this backward is there
  int divisor = group.size();
  int64_t num_prepared = 0;        // synchronized steps, shadowed ones included
  bool all_reduce_queued = false;  // for the end of a static graph's first backward
  bool graph_known = false;        // that backward has been averaged

  std::optional<JoinOptions> join;
  std::optional<Round> last_round;
};

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

// What must agree between ranks beside the model.
std::string GradientEngine::Impl::describe() const {
  std::ostringstream out;
  out << "find_unused_parameters " << options.find_unused_parameters << "\nstatic_graph "
      << options.static_graph << "\nbroadcast_buffers " << options.broadcast_buffers
      << "\nrebuild_buckets " << options.rebuild_buckets << "\nskip_all_reduce_unused_params "
      << options.skip_all_reduce_unused_params << "\nmixed_precision.param_dtype "
      << text_of(options.mixed_precision.param_dtype) << "\nmixed_precision.reduce_dtype "
      << text_of(options.mixed_precision.reduce_dtype) << "\nmixed_precision.buffer_dtype "
      << text_of(options.mixed_precision.buffer_dtype) << "\nmixed_precision.output_dtype "
      << text_of(options.mixed_precision.output_dtype) << "\nmixed_precision.cast_forward_inputs "
      << options.mixed_precision.cast_forward_inputs << "\ndelay_all_reduce_named_params";
  if (delayed) {
    for (const NamedTensor& each : delayed->parameters()) out << ' ' << each.name;
  }
  out << "\nparam_to_hook_all_reduce " << options.param_to_hook_all_reduce << '\n';
  const BucketIndices buckets = initial_buckets(bucketed, options);
  for (size_t i = 0; i < buckets.size(); ++i) {
    out << "bucket " << i << " of";
    for (const size_t index : buckets[i]) out << ' ' << bucketed[index].name;
    out << '\n';
  }
  return out.str();
}

void GradientEngine::Impl::sync_initial_state() {
  if (!options.init_sync) return;
  verify_same_model(model, group, options.ignored);
  verify_same_text("options of DistributedDataParallel", describe(), group);
  broadcast_model(model, group, 0, options.ignored);
}

void GradientEngine::Impl::cast_buffers() {
  const auto& type = options.mixed_precision.buffer_dtype;
  for (const NamedTensor& buffer : model_buffers(model, options.ignored)) {
    if (type) buffer.tensor.set_data(cast_floating(buffer.tensor, *type));
    buffers.push_back(buffer.tensor);
    forms.push_back(form_of(buffer));
  }
}

void GradientEngine::Impl::make_engine() {
  reducer = make_reducer(bucketed, group, options);
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
    for (const NamedTensor& each : bucketed) {
      TORCH_CHECK_VALUE(!each.sparse_gradient,
                        "mixed_precision.reduce_dtype: expected dense gradients, got the sparse "
                        "one of ",
                        each.name);
    }
    reducer->carry_by(compress_hook(*type, [this] { return divisor; }), group);
  }
}

void GradientEngine::Impl::watch_gradients() {
  ready.resize(watched.size());
  for (size_t i = 0; i < watched.size(); ++i) {
    const auto accumulator = torch::autograd::impl::grad_accumulator(watched[i].tensor);
    const auto key =
        accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
            [this, i](const variable_list& outputs, const variable_list&) {
              gradient_arrived(i);
              return outputs;
            }));
    hooks.emplace_back(accumulator, key);
  }
}

// Lives as long as one backward.
struct GradientEngine::Impl::Backward {
  explicit Backward(std::weak_ptr<Impl> engine) : of(std::move(engine)) {}
  ~Backward() {
    const auto engine = of.lock();
    if (engine && !completed) engine->restore_after_error();
  }
  std::weak_ptr<Impl> of;
  bool completed = false;
};

// What the loss takes from `outputs` is reached by backward before any parameter.
void GradientEngine::Impl::watch_backward(const std::vector<at::Tensor*>& outputs) {
  for (const at::Tensor* output : outputs) {
    if (!output->defined() || !output->grad_fn()) continue;
    output->register_hook([weak = weak_from_this()](const at::Tensor&) {
      if (const auto engine = weak.lock()) engine->backward_begins();
    });
  }
}

// Callbacks run in the order in which they were queued: this one before the Reducer's, which takes
// the averages, and the one that it queues after that.
void GradientEngine::Impl::backward_begins() {
  const int64_t number = torch::autograd::get_current_graph_task_id();
  if (std::exchange(backward, number) == number) return;
  auto& autograd = torch::autograd::Engine::get_default_engine();
  autograd.queue_callback([this, &autograd, life = std::make_shared<Backward>(weak_from_this())] {
    // Gradients of inputs alone are no business of the ranks; the parameters' are still to come.
    life->completed = !begun || last_forward != Forward::kSynchronized;
    if (life->completed) return;
    group.translate_errors("all_reduce of gradients", [this] { reducer->wait_for_averages(); });
    autograd.queue_callback([this, life] {
      backward_ends();
      life->completed = true;
    });
  });
}

void GradientEngine::Impl::backward_ends() {
  reducer->restore_end_of_compute();
  ended = true;
  if (unfinished()) report_left_out();
}

void GradientEngine::Impl::gradient_arrived(size_t index) {
  if (!unfinished()) return check_expected(index);
  if (!std::exchange(begun, true)) {
    torch::autograd::Engine::get_default_engine().queue_callback([this] { ended = true; });
  }
  if (at::GradMode::is_enabled()) {
    C10_THROW_ERROR(NotImplementedError,
                    "backward with create_graph: gradients of gradients are "
                    "not averaged over ranks");
  }
  if (delayed && (index >= bucketed.size() || index == trigger)) {
    TORCH_CHECK_VALUE(!ready[index], watched[index].name,
                      ": expected one gradient per backward, as delay_all_reduce_named_params "
                      "needs it, got another");
    delayed->arrived();
  }
  ready[index] = true;
}

// A gradient that no forward of the wrapper prepared for would silently stay this rank's own.
void GradientEngine::Impl::check_expected(size_t index) const {
  if (last_forward == Forward::kLocal) return;
  TORCH_CHECK_VALUE(false, "rank ", group.rank(), ": ", watched[index].name,
                    " got a gradient that is not averaged: expected one backward after each call "
                    "of the wrapper, and its loss from that call's outputs (the module's own "
                    "forward is for evaluation; no_sync() accumulates)");
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

std::string GradientEngine::Impl::left_out() const {
  std::string names;
  for (size_t i = 0; i < watched.size(); ++i) {
    const bool missing = graph_known ? reducer->awaits(i) : !ready[i] && !reducer->is_unused(i);
    if (missing) names += (names.empty() ? "" : ", ") + watched[i].name;
  }
  // All are there, but past the outputs, and so unseen.
  return names.empty() ? "the outputs of forward" : names;
}

// Makes the next forward independent of a backward that is not to be averaged any more.
void GradientEngine::Impl::abandon() {
  begun = false;
  group.translate_errors("all_reduce of gradients", [&] {
    if (delayed) delayed->abandon();
    reducer->abandon_backward();
  });
}

// A second error must not take the place of the first.
void GradientEngine::Impl::restore_after_error() noexcept {
  try {
    if (low_precision) low_precision->swap_out();
  } catch (const std::exception& error) {
    TORCH_WARN("parameters stay in low precision: ", error.what());
  }
}

void GradientEngine::Impl::report_left_out() {
  const std::string names = left_out();
  abandon();
  const char* hint = options.static_graph ? "static_graph expects the same in every step"
                     : searches_unused()  ? "the loss is to be made from the outputs of forward"
                                          : "find_unused_parameters allows for that";
  TORCH_CHECK_VALUE(false, "rank ", group.rank(), ": backward made no gradient for ", names,
                    "; this step's gradients are not averaged (", hint, ")");
}

// After a backward that threw, or that reached parameters past the outputs.
void GradientEngine::Impl::check_finished() {
  if (!unfinished()) return;
  if (begun && ended) report_left_out();
  // Else no backward followed, or one whose error the caller has seen.
  if (!begun && !reducer->begun()) return;
  if (low_precision) low_precision->swap_out();
  abandon();
}

Round GradientEngine::Impl::notify_join_context(bool active, bool synchronizing) {
  const auto width = static_cast<int64_t>(group.size());
  at::Tensor news = at::zeros({width + 1}, at::kLong);
  auto* values = news.data_ptr<int64_t>();
  values[group.rank()] = active;
  values[width] = synchronizing;
  group.all_reduce(news);
  Round round{.num_synchronizing = values[width]};
  for (int rank = group.size() - 1; rank >= 0; --rank) {
    if (values[rank] == 0) continue;
    ++round.num_active;
    round.first_active = rank;
  }
  const bool complete = round.num_active == group.size();
  // From here on every rank comes to the same result.
  if (round.num_active > 0) {
    last_round = round;
    TORCH_CHECK(!join->throw_on_early_termination || complete,
                "join: ", group.size() - round.num_active, " of ", group.size(),
                " ranks have no batches left");
    TORCH_CHECK_VALUE(round.num_synchronizing == 0 || round.num_synchronizing == round.num_active,
                      "join: expected all ranks within no_sync or none, got ",
                      round.num_synchronizing, " of ", round.num_active,
                      " outside (validation counts as within)");
    TORCH_CHECK_VALUE(complete || !options.static_graph || num_prepared > 0,
                      "join: expected a batch on every rank in the first step of a static graph");
  }
  return round;
}

void GradientEngine::Impl::shadow_collectives(const Round& round) {
  const bool synchronizes = round.num_synchronizing > 0;
  if (synchronizes) group.translate_errors("join", [&] { reducer->rebuild_buckets(); });
  if (will_copy_buffers()) broadcast_tensors(buffers, group, round.first_active);
  buffers_differ = synchronizes;
  if (!synchronizes) return;
  group.translate_errors("join", [&] { reducer->shadow_collectives(); });
  ++num_prepared;
}

GradientEngine::GradientEngine(std::shared_ptr<torch::nn::Module> module,
                               const comm::ProcessGroup& group,
                               const DistributedDataParallelOptions& options)
    : impl_(std::make_shared<Impl>(std::move(module), group, options)) {
  Impl& my = *impl_;
  check_options(options, my.model);
  my.select_parameters();
  my.sync_initial_state();
  my.cast_buffers();
  my.make_engine();
  my.watch_gradients();
  for (const NamedTensor& each : my.watched) my.forms.push_back(form_of(each));
  if (my.options.mixed_precision.param_dtype) {
    std::vector<at::Tensor> all;
    for (const auto& item : my.model.named_parameters()) {
      if (!contains(options.ignored, item.key())) all.push_back(item.value());
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
    const bool by_active = round && !my.join->divide_by_initial_world_size;
    my.divisor = by_active ? round->num_active : my.group.size();
    my.reducer->set_divisor(my.divisor);
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
  if (my.options.static_graph && !my.graph_known) my.reducer->forget_unsynchronized();
  my.reducer->prepare_for_backward(search);
  my.begun = my.ended = my.all_reduce_queued = false;
  ++my.num_prepared;
  std::fill(my.ready.begin(), my.ready.end(), false);
  if (my.delayed) my.delayed->prepare();
  if (!my.searches_unused() && !my.options.static_graph) return;
  // In every step of a static graph, or outputs that the loss leaves out would bring gradients in
  // the first one alone.
  pass_through_sink(outputs, [weak = my.weak_from_this()] {
    const auto engine = weak.lock();
    if (!engine || !engine->options.static_graph || engine->graph_known) return;
    if (std::exchange(engine->all_reduce_queued, true)) return;
    torch::autograd::Engine::get_default_engine().queue_callback([engine] {
      engine->group.translate_errors("all_reduce of gradients",
                                     [&] { engine->reducer->delay_all_reduce(); });
      engine->graph_known = true;
    });
  });
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

bool GradientEngine::set_synchronized(bool on) {
  return std::exchange(impl_->synchronized, on);
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
                    "register_comm_hook: expected no "
                    "mixed_precision.reduce_dtype, which is a hook itself");
  TORCH_CHECK_VALUE(my.num_prepared == 0,
                    "register_comm_hook: expected before the first step, got after ",
                    my.num_prepared);
  TORCH_CHECK_VALUE(!name.empty(), "register_comm_hook: expected a name");
  my.reducer->carry_by(std::move(hook), my.group);
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

void GradientEngine::begin_join(const JoinOptions& options) {
  Impl& my = *impl_;
  TORCH_CHECK_VALUE(!my.join, "join: expected no join within a join");
  TORCH_CHECK_VALUE(!my.delayed && !my.options.skip_all_reduce_unused_params,
                    "join: expected neither delay_all_reduce_named_params nor "
                    "skip_all_reduce_unused_params");
  my.logger->set_uneven_input_join();
  my.join = options;
  my.last_round.reset();
}

void GradientEngine::finish_join() {
  Impl& my = *impl_;
  const auto notify = [&] {
    return my.notify_join_context(/*active=*/false, /*synchronizing=*/false);
  };
  for (Round round = notify(); round.num_active > 0; round = notify()) my.shadow_collectives(round);
  if (my.last_round)
    broadcast_model(my.model, my.group, my.last_round->first_active, my.options.ignored);
}

void GradientEngine::end_join() noexcept {
  impl_->join.reset();
}

}  // namespace cohort::parallel
