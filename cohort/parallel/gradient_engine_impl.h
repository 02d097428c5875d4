// SPDX-License-Identifier: Apache-2.0
// The inside of GradientEngine, shared by gradient_engine.cpp (its life, forward),
// gradient_engine_backward.cpp, gradient_engine_join.cpp and gradient_engine_options.cpp. Not
// installed.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <utility>
#include <vector>

#include "cohort/comm/libtorch_version.h"
#include "cohort/parallel/delayed_parameters.h"
#include "cohort/parallel/gradient_engine.h"
#include "cohort/parallel/mixed_precision.h"
#include "cohort/parallel/reducer.h"

namespace cohort::parallel {

/// Errors: c10::ValueError if options are out of range or contradict, or name what is not in
///         `model`.
void check_options(const DistributedDataParallelOptions& options, const torch::nn::Module& model);
/// What must agree between ranks beside the model: a line for each option and bucket.
std::string describe(const DistributedDataParallelOptions& options,
                     const std::vector<NamedTensor>& bucketed,
                     const std::vector<NamedTensor>& delayed);

// What a parameter or buffer was when the engine was made.
struct Form {
  explicit Form(const NamedTensor& each)
      : tensor(each.tensor),
        name(each.name),
        type(tensor.scalar_type()),
        device(tensor.device()),
        sizes(tensor.sizes().vec()) {}
  at::Tensor tensor;
  std::string name;
  at::ScalarType type;
  at::Device device;
  std::vector<int64_t> sizes;
};

// Which ranks take part in one step under join.
struct Round {
  int num_active = 0;
  int first_active = 0;
  int64_t num_synchronizing = 0;
};

/// As it is called in traces and errors.
inline constexpr const char* kReduction = "all_reduce of gradients";

struct GradientEngine::Impl : std::enable_shared_from_this<Impl> {
  Impl(std::shared_ptr<torch::nn::Module> m, comm::ProcessGroup g,
       const DistributedDataParallelOptions& o)
      : owned_model(std::move(m)), model(*owned_model), group(std::move(g)), options(o) {}
  ~Impl();

  void select_parameters();
  void sync_initial_state();
  void cast_buffers();
  void make_reducer();
  void watch_gradients();
  void check_forms() const;
  void check_frozen() const;

  void watch_backward(const std::vector<at::Tensor*>& outputs);
  void watch_static_graph(const std::vector<at::Tensor*>& outputs);
  struct RestoreAfterError;
  void backward_begins(bool of_synchronized);
  void backward_ends();
  void gradient_arrived(size_t index);
  void check_expected(size_t index) const;
  void check_finished();
  void abandon();
  void restore_after_error(bool counted) noexcept;
  std::string left_out() const;
  [[noreturn]] void report_left_out();

  Round notify_join_context(bool active, bool synchronizing);
  void shadow_collectives(const Round& round);
  void choose_divisor(const std::optional<Round>& round);

  bool will_copy_buffers() const {
    return buffers_differ && options.broadcast_buffers && !buffers.empty();
  }
  bool searches_unused() const { return options.find_unused_parameters && !options.static_graph; }
  // A synchronized forward ran, and no backward after it has averaged all gradients.
  bool expects_gradients() const {
    return reducer->expects_gradients() || (delayed && delayed->expects_gradients());
  }

  const std::shared_ptr<torch::nn::Module> owned_model;
  torch::nn::Module& model;
  const comm::ProcessGroup group;
  DistributedDataParallelOptions options;  // `ignored`: every name of a shared tensor
  std::vector<NamedTensor> bucketed;
  std::optional<DelayedParameters> delayed;
  std::vector<NamedTensor> watched;  // bucketed, then delayed
  std::vector<NamedTensor> frozen;   // not ignored
  size_t trigger = 0;                // of the delayed ones, in `watched`
  std::vector<at::Tensor> buffers;
  std::vector<Form> forms;
  std::optional<LowPrecisionParameters> low_precision;
  // by this forward, not by one whose backward is still to come
  bool swapped_in_by_forward = false;

  std::shared_ptr<Reducer> reducer;
  std::shared_ptr<c10d::Logger> logger;
  std::vector<std::pair<comm::NodePointer, uintptr_t>> hooks;  // to be taken off again
  std::string comm_hook;

  bool synchronized = true;
  enum class Forward { kNone, kLocal, kSynchronized };
  Forward last_forward = Forward::kNone;  // of those that a backward can follow
  // The backward of the last synchronized forward: no gradient is there, some are, and it has ended
  // without an error.
  enum class Backward { kAwaited, kBegun, kEnded };
  Backward backward = Backward::kAwaited;
  // The first backward of a static graph: not reached, its all-reduce is queued for its end, and
  // averaged.
  enum class StaticGraph { kUnknown, kQueued, kKnown };
  StaticGraph static_graph = StaticGraph::kUnknown;
  int64_t graph_task = -1;  // autograd's number of the backward that reached outputs last
  bool averages = false;    // that backward reached outputs of a synchronized forward
  std::vector<bool> ready;  // by `watched`: its gradient of this backward is there
  // A synchronized forward ran, and none after it, so each rank's buffers follow its own batch.
  bool buffers_differ = true;
  int divisor = group.size();
  int64_t num_prepared = 0;  // synchronized steps, shadowed ones included

  std::optional<JoinOptions> join;
  std::optional<Round> last_round;
};

}  // namespace cohort::parallel
