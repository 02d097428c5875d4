#include "cohort/parallel/gradient_engine.h"

#include <sstream>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <torch/nn/modules/embedding.h>
#include <unordered_set>

#include "cohort/base/error.h"

namespace cohort::parallel {
namespace {

constexpr size_t kBroadcastBytes = 250 << 20;

c10::intrusive_ptr<c10d::ProcessGroup> shared(comm::ProcessGroup& group) {
  return c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(&group.engine());
}

std::string describe(const torch::nn::Module& model) {
  std::ostringstream out;
  for (const auto& item : model.named_parameters()) {
    out << "parameter " << item.key() << ' ' << item.value().sizes() << ' ' << item.value().dtype()
        << (item.value().requires_grad() ? "" : " frozen") << '\n';
  }
  for (const auto& item : model.named_buffers()) {
    out << "buffer " << item.key() << ' ' << item.value().sizes() << ' ' << item.value().dtype()
        << '\n';
  }
  return out.str();
}

// The first line in which `mine` departs from `theirs`; empty if equal.
std::string first_difference(const std::string& mine, const std::string& theirs) {
  std::istringstream a(mine);
  std::istringstream b(theirs);
  while (true) {
    std::string line_a;
    std::string line_b;
    const bool more_a = static_cast<bool>(std::getline(a, line_a));
    const bool more_b = static_cast<bool>(std::getline(b, line_b));
    if (!more_a && !more_b) return "";
    if (line_a != line_b) {
      return "has " + (more_a ? line_a : "no more entries") + " where rank 0 has " +
             (more_b ? line_b : "no more entries");
    }
  }
}

struct OwnedParameters {
  std::vector<at::Tensor> tensors;
  std::vector<bool> sparse;
  std::unordered_map<size_t, std::string> names;
};

// Registration order, trainable ones, each shared tensor once.
OwnedParameters trainable_parameters(torch::nn::Module& model) {
  OwnedParameters found;
  std::unordered_set<c10::TensorImpl*> seen;
  for (const auto& child : model.named_modules("", true)) {
    bool sparse = false;
    if (const auto* embedding = child.value()->as<torch::nn::Embedding>()) {
      sparse = embedding->options.sparse();
    } else if (const auto* bag = child.value()->as<torch::nn::EmbeddingBag>()) {
      sparse = bag->options.sparse();
    }
    for (const auto& item : child.value()->named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = item.value();
      if (!tensor.requires_grad() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
      found.names[found.tensors.size()] =
          child.key().empty() ? item.key() : child.key() + "." + item.key();
      found.tensors.push_back(tensor);
      found.sparse.push_back(sparse);
    }
  }
  return found;
}

}  // namespace

void verify_same_model(const torch::nn::Module& model, comm::ProcessGroup& group) {
  const std::string mine = describe(model);
  const std::string difference = first_difference(mine, group.broadcast_text(mine));
  const std::vector<std::string> all = group.all_gather_text(difference);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    TORCH_CHECK_VALUE(all[rank].empty(), "the models differ between ranks: rank ", rank, " ",
                      all[rank]);
  }
}

void broadcast_model(const torch::nn::Module& model, comm::ProcessGroup& group) {
  std::vector<at::Tensor> state;
  for (const auto& tensor : model.parameters()) state.push_back(tensor.detach());
  for (const auto& tensor : model.buffers()) state.push_back(tensor.detach());
  if (state.empty() || group.size() == 1) return;
  group.guard("broadcast of the model",
              [&] { c10d::broadcast_coalesced(shared(group), state, kBroadcastBytes, 0); });
}

struct GradientEngine::Impl {
  Impl(comm::ProcessGroup& g, const DistributedDataParallelOptions& o) : group(g), options(o) {}

  comm::ProcessGroup& group;
  DistributedDataParallelOptions options;
  std::vector<at::Tensor> buffers;
  std::shared_ptr<c10d::Reducer> reducer;
  std::shared_ptr<c10d::Logger> logger;
  bool synchronized = true;
};

GradientEngine::GradientEngine(torch::nn::Module& model, comm::ProcessGroup& group,
                               const DistributedDataParallelOptions& options)
    : impl_(std::make_unique<Impl>(group, options)) {
  TORCH_CHECK_VALUE(options.bucket_cap_mb > 0, "bucket_cap_mb: expected more than 0, got ",
                    options.bucket_cap_mb);
  verify_same_model(model, group);
  broadcast_model(model, group);
  for (const auto& buffer : model.buffers()) impl_->buffers.push_back(buffer.detach());

  OwnedParameters owned = trainable_parameters(model);
  TORCH_CHECK_VALUE(!owned.tensors.empty(), "the model has no parameter that requires a gradient");
  const auto cap_bytes = static_cast<size_t>(options.bucket_cap_mb * 1024 * 1024);
  const bool rebuilds = options.static_graph || !options.find_unused_parameters;
  // One bucket until the order of gradients is known; then the Reducer cuts at cap_bytes.
  const std::vector<size_t> limits =
      rebuilds ? std::vector<size_t>{SIZE_MAX} : std::vector<size_t>{1 << 20, cap_bytes};
  auto buckets =
      std::get<0>(c10d::compute_bucket_assignment_by_size(owned.tensors, limits, owned.sparse));
  std::reverse(buckets.begin(), buckets.end());
  impl_->reducer = std::make_shared<c10d::Reducer>(
      owned.tensors, buckets, shared(group), owned.sparse, static_cast<int64_t>(cap_bytes),
      options.find_unused_parameters, options.gradient_as_bucket_view, owned.names,
      std::min<int64_t>(c10d::kDefaultFirstBucketBytes, static_cast<int64_t>(cap_bytes)),
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
      /*bucket_bytes_cap_list=*/std::vector<int64_t>{});
  impl_->logger = std::make_shared<c10d::Logger>(impl_->reducer);
  impl_->reducer->set_logger(impl_->logger);
  impl_->logger->set_construction_data_and_log(model.name(), {}, -1, options.broadcast_buffers,
                                               /*has_sync_bn=*/false, options.static_graph);
  if (options.static_graph) {
    impl_->reducer->set_static_graph();
    impl_->logger->set_static_graph();
  }
}

GradientEngine::~GradientEngine() = default;

void GradientEngine::before_forward() {
  if (!at::GradMode::is_enabled()) return;
  Impl& my = *impl_;
  if (my.synchronized) {
    my.logger->set_runtime_stats_and_log();
    my.reducer->prepare_for_forward();
  }
  my.group.guard("forward", [&] {
    if (my.synchronized) my.reducer->rebuild_buckets();
    if (my.synchronized && my.options.broadcast_buffers && !my.buffers.empty()) {
      const at::NoGradGuard no_grad;
      c10d::broadcast_coalesced(shared(my.group), my.buffers, kBroadcastBytes, 0);
    }
  });
}

void GradientEngine::after_forward(const std::vector<at::Tensor>& outputs) {
  Impl& my = *impl_;
  if (!at::GradMode::is_enabled() || !my.synchronized) return;
  const bool search = my.options.find_unused_parameters && !my.options.static_graph;
  my.reducer->prepare_for_backward(search ? outputs : std::vector<at::Tensor>{});
}

void GradientEngine::backward(const at::Tensor& loss, const at::Tensor& gradient) {
  impl_->group.guard("all_reduce of gradients", [&] { loss.backward(gradient); });
}

bool GradientEngine::set_synchronized(bool on) {
  return std::exchange(impl_->synchronized, on);
}

int64_t GradientEngine::num_buckets() const {
  return static_cast<int64_t>(
      impl_->reducer->get_grad_buckets(/*return_zero_tensors=*/false).size());
}

}  // namespace cohort::parallel
