#include "cohort/parallel/sharding/sharding_engine.h"

#include <ATen/OpMathType.h>
#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <sstream>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>
#include <tuple>

#include "cohort/parallel/checkpoint.h"
#include "cohort/parallel/mixed_precision.h"
#include "cohort/parallel/model_state.h"
#include "cohort/parallel/sharding/flat_bucket.h"

namespace cohort::parallel {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

thread_local ShardingEngine* current_engine = nullptr;

constexpr int64_t kBucketBytes = 25 << 20;

using Tensors = std::set<const at::TensorImpl*>;

Tensors parameters_of(const torch::nn::Module& module) {
  Tensors tensors;
  for (const at::Tensor& parameter : module.parameters())
    tensors.insert(parameter.unsafeGetTensorImpl());
  return tensors;
}

bool holds(const torch::nn::Module& module, const torch::nn::Module* inner) {
  const auto modules = const_cast<torch::nn::Module&>(module).modules();
  return std::ranges::any_of(modules, [&](const auto& each) { return each.get() == inner; });
}

// Parameters in registration order, each shared one once under its first name.
std::vector<NamedTensor> all_parameters(const torch::nn::Module& model) {
  std::vector<NamedTensor> parameters;
  Tensors seen;
  for (const auto& item : model.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      parameters.push_back({.name = item.key(), .tensor = item.value()});
  }
  return parameters;
}

// Parameters that can lie in one bucket, last ones first, as backward reaches them.
std::vector<std::vector<NamedTensor>> cut(std::vector<NamedTensor> parameters) {
  std::reverse(parameters.begin(), parameters.end());
  std::vector<std::vector<NamedTensor>> buckets;
  const auto kind = [](const NamedTensor& each) {
    return std::tuple(each.tensor.requires_grad(), each.tensor.scalar_type(),
                      each.tensor.device().str());
  };
  std::map<decltype(kind(parameters.front())), std::pair<size_t, int64_t>> open;
  for (NamedTensor& each : parameters) {
    const auto bytes = static_cast<int64_t>(each.tensor.nbytes());
    auto [found, fresh] = open.try_emplace(kind(each), buckets.size(), 0);
    auto& [bucket, filled] = found->second;
    if (fresh || filled + bytes > kBucketBytes) {
      bucket = buckets.size();
      filled = 0;
      buckets.emplace_back();
    }
    filled += bytes;
    buckets[bucket].push_back(std::move(each));
  }
  for (auto& bucket : buckets) std::reverse(bucket.begin(), bucket.end());
  return buckets;
}

std::string text_of(const std::optional<at::ScalarType>& type) {
  return type ? c10::toString(*type) : "unset";
}

// What must agree between ranks beside the model.
std::string describe(const ShardingOptions& options) {
  const MixedPrecision& types = options.mixed_precision;
  std::ostringstream out;
  out << "shard " << static_cast<int>(options.shard) << "\nreshard_after_forward "
      << options.reshard_after_forward << "\nprefetch " << options.prefetch
      << "\nmixed_precision.param_dtype " << text_of(types.param_dtype)
      << "\nmixed_precision.reduce_dtype " << text_of(types.reduce_dtype)
      << "\nmixed_precision.buffer_dtype " << text_of(types.buffer_dtype)
      << "\nmixed_precision.output_dtype " << text_of(types.output_dtype)
      << "\nmixed_precision.cast_forward_inputs " << types.cast_forward_inputs
      << "\nreplicate_group " << (options.replicate_group ? "set" : "unset") << "\ncpu_offload "
      << options.cpu_offload << '\n';
  return out.str();
}

void check_types(const MixedPrecision& types) {
  const auto floating = [](const char* name, const std::optional<at::ScalarType>& type) {
    TORCH_CHECK_VALUE(!type || at::isFloatingType(*type), "mixed_precision.", name,
                      ": expected a floating-point type, got ", c10::toString(*type));
  };
  floating("param_dtype", types.param_dtype);
  floating("reduce_dtype", types.reduce_dtype);
  floating("buffer_dtype", types.buffer_dtype);
  floating("output_dtype", types.output_dtype);
}

// Rows of the mesh share a model out, its columns hold the same slices.
void check_mesh(comm::ProcessGroup& row, comm::ProcessGroup& column) {
  const auto place = [](comm::ProcessGroup& group) {
    return "rank " + std::to_string(group.rank()) + " of " + std::to_string(group.size()) + "\n";
  };
  verify_same_text("places in the sharding groups of one replicate_group", place(row), column);
  verify_same_text("places in the replicate groups of one sharding group", place(column), row);
}

}  // namespace

struct ShardingEngine::Impl {
  // A block and what of its parameters is in no block within it.
  struct Unit {
    const torch::nn::Module* module = nullptr;
    std::vector<FlatBucket*> buckets;
  };

  Impl(torch::nn::Module& m, comm::ProcessGroup& g, const ShardingOptions& o)
      : model(m), group(g), options(o) {}
  ~Impl();

  std::vector<std::string> deferred() const;
  void share_state();

  void make_units(const std::vector<torch::nn::Module*>& modules);
  void fill_deferred();
  void cast_buffers();
  void watch_gradients();
  void gradient_arrived(FlatBucket& bucket);
  void reduce(FlatBucket& bucket);
  void begin_backward();
  void before_backward(size_t unit);
  void finish_backward();
  void abandon_backward();
  void gather(size_t unit, int direction);
  void free(size_t unit);
  size_t place_of(const FlatBucket& bucket) const;
  bool done_in_backward(const FlatBucket& bucket) const;
  void refresh();
  void share_changes();
  double share() const;
  bool divides_loss() const;

  torch::nn::Module& model;
  comm::ProcessGroup& group;
  ShardingOptions options;
  std::vector<Unit> units;  // the first is the whole model's own
  std::vector<std::unique_ptr<FlatBucket>> buckets;
  std::vector<std::pair<std::shared_ptr<Node>, uintptr_t>> hooks;  // to be taken off again
  std::vector<ParameterSlice> slices;

  std::vector<size_t> order;   // of the units' first forwards
  bool order_known = false;    // a whole forward has run
  std::vector<size_t> places;  // by unit, in `order`; its size if the unit has not run
  bool synchronized = true;
  bool may_backward = false;  // inside ShardingEngine::backward
  bool in_backward = false;
  std::vector<size_t> missing;      // by bucket, gradients that this backward still owes
  FlatBucket* reduction = nullptr;  // under way in this backward
};

ShardingEngine::Impl::~Impl() {
  for (const auto& [accumulator, key] : hooks) accumulator->del_post_hook(key);
}

// Names of what lies on the meta device.
std::vector<std::string> ShardingEngine::Impl::deferred() const {
  std::vector<std::string> names;
  for (const auto& item : model.named_parameters())
    if (item.value().is_meta()) names.push_back(item.key());
  for (const auto& item : model.named_buffers())
    if (item.value().is_meta()) names.push_back(item.key());
  return names;
}

void ShardingEngine::Impl::share_state() {
  check_types(options.mixed_precision);
  const std::vector<std::string> later = deferred();
  TORCH_CHECK_VALUE(later.empty() || options.fill, "sharding: ", later.empty() ? "" : later.front(),
                    " is on the meta device: expected ShardingOptions::fill");
  verify_same_text("options of ShardedDataParallel", describe(options), group);
  verify_same_model(model, group);
  if (options.replicate_group) {
    check_mesh(group, *options.replicate_group);
    verify_same_text("options of ShardedDataParallel", describe(options), *options.replicate_group);
    verify_same_model(model, *options.replicate_group);
    broadcast_model(model, *options.replicate_group, 0, later);
  }
  broadcast_model(model, group, 0, later);
}

void ShardingEngine::Impl::fill_deferred() {
  const at::NoGradGuard no_grad;
  std::map<const at::TensorImpl*, std::pair<FlatBucket*, size_t>> waiting;
  for (const auto& bucket : buckets) {
    for (size_t i = 0; bucket->deferred() && i < bucket->parameters().size(); ++i)
      waiting[bucket->parameters()[i].tensor.unsafeGetTensorImpl()] = {bucket.get(), i};
  }
  const auto filled = [this](const std::string& name, c10::IntArrayRef sizes,
                             const at::TensorOptions& kind) {
    at::Tensor value = at::zeros(sizes, kind.device(options.fill_device).requires_grad(false));
    const at::Tensor before = value;
    options.fill(name, value);
    TORCH_CHECK_VALUE(value.is_same(before) && value.sizes() == sizes,
                      "sharding: expected fill to write into the tensor of ", name);
    return value;
  };
  for (const NamedTensor& each : all_parameters(model)) {
    const auto found = waiting.find(each.tensor.unsafeGetTensorImpl());
    if (found == waiting.end()) continue;
    const auto [bucket, index] = found->second;
    bucket->place(index, filled(each.name, each.tensor.sizes(),
                                each.tensor.options().dtype(bucket->kept_type())));
  }
  for (const NamedTensor& each : model_buffers(model)) {
    if (!each.tensor.is_meta()) continue;
    const at::Tensor value = filled(each.name, each.tensor.sizes(), each.tensor.options());
    parallel::set_data(each.tensor, value);
  }
}

void ShardingEngine::Impl::cast_buffers() {
  const auto& type = options.mixed_precision.buffer_dtype;
  if (!type) return;
  for (const NamedTensor& buffer : model_buffers(model))
    buffer.tensor.set_data(cast_floating(buffer.tensor, *type));
}

// A parameter belongs to the innermost unit around it; one that lies in two units side by side, to
// the whole model, which has it gathered all the time.
void ShardingEngine::Impl::make_units(const std::vector<torch::nn::Module*>& modules) {
  units.push_back({.module = &model});
  std::vector<Tensors> inside{parameters_of(model)};
  for (const torch::nn::Module* module : modules) {
    TORCH_CHECK_VALUE(module != &model && holds(model, module),
                      "sharding: a unit is expected to be a module below the model");
    units.push_back({.module = module});
    inside.push_back(parameters_of(*module));
  }
  std::vector<std::vector<NamedTensor>> own(units.size());
  for (NamedTensor& each : all_parameters(model)) {
    size_t owner = 0;
    for (size_t i = 1; i < units.size(); ++i) {
      if (!inside[i].contains(each.tensor.unsafeGetTensorImpl())) continue;
      if (owner == 0 || holds(*units[owner].module, units[i].module)) {
        owner = i;
      } else if (!holds(*units[i].module, units[owner].module)) {
        owner = 0;
        break;
      }
    }
    own[owner].push_back(std::move(each));
  }
  for (size_t i = 0; i < units.size(); ++i) {
    if (own[i].empty()) continue;
    for (auto& parameters : cut(std::move(own[i]))) {
      buckets.push_back(std::make_unique<FlatBucket>(std::move(parameters), group, options));
      units[i].buckets.push_back(buckets.back().get());
    }
  }
  for (const auto& bucket : buckets)
    slices.insert(slices.end(), bucket->slices().begin(), bucket->slices().end());
  places.assign(units.size(), units.size());
}

void ShardingEngine::Impl::watch_gradients() {
  missing.resize(buckets.size());
  for (const auto& bucket : buckets) {
    if (bucket->frozen()) continue;
    for (const NamedTensor& each : bucket->parameters()) {
      const auto accumulator = torch::autograd::impl::grad_accumulator(each.tensor);
      const auto key =
          accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
              [this, at = bucket.get()](const variable_list& outputs, const variable_list&) {
                gradient_arrived(*at);
                return outputs;
              }));
      hooks.emplace_back(accumulator, key);
    }
  }
}

void ShardingEngine::Impl::begin_backward() {
  if (std::exchange(in_backward, true)) return;
  for (size_t i = 0; i < buckets.size(); ++i) missing[i] = buckets[i]->parameters().size();
  torch::autograd::Engine::get_default_engine().queue_callback([this] { finish_backward(); });
}

void ShardingEngine::Impl::before_backward(size_t unit) {
  begin_backward();
  gather(unit, -1);
}

size_t ShardingEngine::Impl::place_of(const FlatBucket& bucket) const {
  const auto is_it = [&](const auto& each) { return each.get() == &bucket; };
  return static_cast<size_t>(std::ranges::find_if(buckets, is_it) - buckets.begin());
}

// Nothing that is still to run needs its parameters.
bool ShardingEngine::Impl::done_in_backward(const FlatBucket& bucket) const {
  return in_backward && !bucket.frozen() && missing[place_of(bucket)] == 0;
}

// A parameter's gradient is there once, after all of the graph that uses the parameter.
void ShardingEngine::Impl::gradient_arrived(FlatBucket& bucket) {
  TORCH_CHECK_VALUE(may_backward,
                    "sharding: expected ShardedDataParallel::backward(loss), got loss.backward()");
  begin_backward();
  if (--missing[place_of(bucket)] > 0) return;
  if (synchronized) {
    reduce(bucket);
  } else {
    bucket.hold_gradients();
  }
  bucket.free();
}

// One bucket's gradients travel while the next one's are computed; more would hold memory.
void ShardingEngine::Impl::reduce(FlatBucket& bucket) {
  if (reduction) reduction->finish_reduce();
  bucket.begin_reduce(divides_loss() ? 1 : share());
  reduction = &bucket;
}

// Of one rank in the mean.
double ShardingEngine::Impl::share() const {
  return 1.0 / (group.size() * (options.replicate_group ? options.replicate_group->size() : 1));
}

// Where the division rounds nothing, that of the loss saves a pass over all gradients.
bool ShardingEngine::Impl::divides_loss() const {
  const auto wide = [](at::ScalarType type) { return type == at::kFloat || type == at::kDouble; };
  const MixedPrecision& types = options.mixed_precision;
  int exponent = 0;
  return std::frexp(share(), &exponent) == 0.5 && wide(types.param_dtype.value_or(at::kFloat)) &&
         wide(types.reduce_dtype.value_or(at::kFloat)) &&
         std::ranges::all_of(buckets, [&](const auto& each) { return wide(each->kept_type()); });
}

void ShardingEngine::Impl::finish_backward() {
  for (size_t i = 0; i < buckets.size(); ++i) {
    if (synchronized && missing[i] > 0 && buckets[i]->has_gradients()) reduce(*buckets[i]);
  }
  if (reduction) reduction->finish_reduce();
  reduction = nullptr;
  for (const auto& bucket : buckets) {
    bucket->settle();
    if (!synchronized) bucket->hold_gradients();
    bucket->free();
  }
  in_backward = false;
}

// What a backward that threw has left.
void ShardingEngine::Impl::abandon_backward() {
  in_backward = false;
  reduction = nullptr;
}

// `direction`: which neighbour in the order of running comes next.
void ShardingEngine::Impl::gather(size_t unit, int direction) {
  for (FlatBucket* bucket : units[unit].buckets) bucket->begin_gather();
  // Backward comes from the whole model's end to the unit that ran last.
  const size_t place = unit == 0 && direction < 0 ? order.size() : places[unit];
  const size_t next = place + static_cast<size_t>(direction);  // beyond both ends: no unit
  if (options.prefetch && places[unit] < units.size() && next < order.size()) {
    for (FlatBucket* bucket : units[order[next]].buckets)
      if (!done_in_backward(*bucket)) bucket->begin_gather();
  }
  for (FlatBucket* bucket : units[unit].buckets) bucket->gather();
}

// What an optimizer, or who loads a checkpoint, has written into slices since the last forward.
void ShardingEngine::Impl::refresh() {
  for (const auto& bucket : buckets) bucket->check_frozen();
  if (options.shard != Shard::kParameters) return share_changes();
  // A forward without a backward has left some parameters gathered.
  for (const auto& bucket : buckets) bucket->free();
}

// Where parameters are whole, what has changed of them travels while the first units run.
void ShardingEngine::Impl::share_changes() {
  // Frozen ones change rarely: when a checkpoint is loaded, say.
  constexpr int64_t kFrozenVote = int64_t{1} << 32;
  const auto changed = [&](bool frozen) {
    return std::ranges::any_of(
        buckets, [&](const auto& each) { return each->frozen() == frozen && each->changed(); });
  };
  const int64_t votes =
      group.all_reduce_sum((changed(false) ? 1 : 0) + (changed(true) ? kFrozenVote : 0));
  if (votes == 0) return;
  for (const auto& bucket : buckets)
    if (bucket->frozen() ? votes >= kFrozenVote : votes % kFrozenVote > 0) bucket->expire();
  for (const size_t unit : order)
    for (FlatBucket* bucket : units[unit].buckets) bucket->begin_gather();
}

void ShardingEngine::Impl::free(size_t unit) {
  for (FlatBucket* bucket : units[unit].buckets) bucket->free();
}

ShardingEngine::ShardingEngine(torch::nn::Module& model, comm::ProcessGroup& group,
                               const ShardingOptions& options,
                               const std::vector<torch::nn::Module*>& units)
    : impl_(std::make_unique<Impl>(model, group, options)) {
  impl_->share_state();
  impl_->make_units(units);
  impl_->fill_deferred();
  impl_->cast_buffers();
  impl_->watch_gradients();
}

ShardingEngine::~ShardingEngine() = default;

ShardingEngine* ShardingEngine::current() {
  return current_engine;
}

ShardingEngine::Forward::Forward(ShardingEngine& engine)
    : outer_(std::exchange(current_engine, &engine)) {
  engine.impl_->abandon_backward();
}

ShardingEngine::Forward::~Forward() {
  current_engine = outer_;
}

std::optional<size_t> ShardingEngine::find_unit(const torch::nn::Module& block) const {
  for (size_t i = 0; i < impl_->units.size(); ++i)
    if (impl_->units[i].module == &block) return i;
  return std::nullopt;
}

void ShardingEngine::before_forward(size_t unit) {
  Impl& my = *impl_;
  // Its parameters would not be there when the body runs again.
  TORCH_CHECK_VALUE(!inside_checkpoint(),
                    "sharding: a unit runs inside a checkpoint's body: "
                    "expected the checkpoint "
                    "inside the unit");
  if (my.places[unit] == my.units.size()) {
    my.places[unit] = my.order.size();
    my.order.push_back(unit);
  }
  if (unit == 0) my.refresh();
  my.gather(unit, +1);
}

void ShardingEngine::after_forward(size_t unit, const std::vector<at::Tensor>& outputs) {
  Impl& my = *impl_;
  bool has_backward = false;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    has_backward = true;
    output.register_hook([&my, unit](const at::Tensor&) { my.before_backward(unit); });
  }
  if (unit == 0) my.order_known = true;
  // Backward begins with the whole model and what ran last in it.
  const bool returns = unit == 0 || (my.order_known && unit == my.order.back());
  if (!has_backward || (!returns && my.options.reshard_after_forward)) my.free(unit);
}

at::Tensor ShardingEngine::cast_input(const at::Tensor& input) const {
  const MixedPrecision& types = impl_->options.mixed_precision;
  return types.param_dtype && types.cast_forward_inputs ? cast_floating(input, *types.param_dtype)
                                                        : input;
}

at::Tensor ShardingEngine::cast_output(const at::Tensor& output) const {
  const auto& type = impl_->options.mixed_precision.output_dtype;
  return type ? cast_floating(output, *type) : output;
}

void ShardingEngine::backward(const at::Tensor& loss, const at::Tensor& gradient) {
  Impl& my = *impl_;
  at::Tensor seed = gradient;
  if (my.divides_loss())
    seed = gradient.defined() ? gradient * my.share() : at::full_like(loss, my.share());
  my.may_backward = true;
  try {
    loss.backward(seed);
  } catch (...) {
    my.may_backward = false;
    my.abandon_backward();
    for (const auto& bucket : my.buckets) bucket->drop_gradients();
    throw;
  }
  my.may_backward = false;
}

bool ShardingEngine::set_synchronized(bool on) {
  return std::exchange(impl_->synchronized, on);
}

const std::vector<ParameterSlice>& ShardingEngine::slices() const {
  return impl_->slices;
}

double ShardingEngine::gradient_norm() {
  const at::NoGradGuard no_grad;
  double sum = 0;
  for (const ParameterSlice& slice : impl_->slices) {
    const at::Tensor& gradient = slice.tensor.grad();
    if (!gradient.defined()) continue;
    // In the gradient's own type unless that is a low one: another would cost a copy. Squares add
    // up in double, so that small tensors are not lost.
    const double norm = at::linalg_vector_norm(gradient, 2, at::OptionalIntArrayRef{}, false,
                                               at::toOpMathType(gradient.scalar_type()))
                            .item<double>();
    sum += norm * norm;
  }
  at::Tensor total = at::tensor({sum}, at::kDouble);
  impl_->group.all_reduce(total);
  return std::sqrt(total.item<double>());
}

void ShardingEngine::summon() {
  if (impl_->options.shard != Shard::kParameters) impl_->share_changes();
  for (const auto& bucket : impl_->buckets) bucket->begin_gather();
  for (const auto& bucket : impl_->buckets) bucket->gather();
}

void ShardingEngine::release(bool keep) {
  for (const auto& bucket : impl_->buckets) {
    if (keep) bucket->keep_written();
    bucket->free();
  }
}

int64_t ShardingEngine::num_units() const {
  return std::ssize(impl_->units);
}

}  // namespace cohort::parallel
