// SPDX-License-Identifier: Apache-2.0
// Parameters of one unit in one flat buffer, of which this rank holds a shard. For the sharding
// engine alone.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/parallel/model_state.h"
#include "cohort/parallel/sharding/buffer_pool.h"
#include "cohort/parallel/sharding/flat_layout.h"
#include "cohort/parallel/sharding/sharding_engine.h"

namespace cohort::parallel {

/// Gives `tensor` the memory and type of `data`, as set_data, also to a tensor on the meta device.
/// Hooks on its gradient stay.
void set_data(const at::Tensor& tensor, const at::Tensor& data);

/// What a bucket is part of.
struct BucketPlace {
  std::string name;  ///< What is gathered and reduced, in errors: "unit layers.3".
  /// Neighbours among which the whole is kept between forward and backward; empty: among all.
  /// Its size divides the group's.
  comm::ProcessGroup reshard_group;
  /// What comes and goes within a step takes its memory from here; kOptimizer needs none.
  std::shared_ptr<BufferPool> pool;
};

/// From `gather` to `hide` or `free` the module's parameters are views of the flat buffer. Before
/// and after, reading a parameter, or the gradient that it lacks, or writing to one throws a
/// c10::Error with its name. Where parameters are sharded, the buffer's memory comes and goes under
/// autograd's saved tensors, too; a backward that reads one while it is away gets an error with the
/// bucket's name.
///
/// Owner:      the engine.
/// Threads:    one.
/// Collective: begin_gather, begin_unshard, begin_reduce.
class FlatBucket {
 public:
  /// Takes the parameters' present values. All have one type and device, and are either trained or
  /// all frozen. Those that are whole on every rank are there until `hide` or `free`.
  /// Errors: c10::ValueError if one's elements do not lie row by row.
  FlatBucket(std::vector<NamedTensor> parameters, const comm::ProcessGroup& group,
             const ShardingEngineOptions& options, BucketPlace place);

  const std::vector<NamedTensor>& parameters() const { return parameters_; }
  bool frozen() const { return frozen_; }
  bool deferred() const { return deferred_; }  ///< They were on the meta device: `place` each.
  at::ScalarType kept_type() const { return shard_.scalar_type(); }
  /// Makes `value` the whole value of the parameter `index`, of which this rank keeps its shard.
  void place(size_t index, const at::Tensor& value);

  /// Starts to bring the whole of the parameters here, unless they are; `gather` waits for it, and
  /// makes the module's parameters views of it.
  void begin_gather();
  void gather();
  /// Whether this rank's shard was written to, other than through data(), since it was gathered.
  /// The ranks may differ in it.
  bool changed() const { return static_cast<int64_t>(shard_._version()) != gathered_version_; }
  /// Takes the parameters from the module; what was gathered stays for the next `gather`. Neither
  /// waits nor gives memory back.
  void hide();
  /// Takes the parameters from the module, and the next begin_gather gathers again. Sharded ones
  /// give their memory back.
  void free();
  /// The same of sharded ones, but keeps what the next gather needs to be one among the
  /// reshard_group.
  void reshard();
  /// As begin_gather and gather, but of the parameters' own type, whatever they are computed in.
  /// Waits for `begin_unshard`, which every `unshard` needs before it.
  void begin_unshard();
  void unshard();
  /// Keeps what was written into the parameters since `unshard` as this rank's shard.
  void keep_written();

  /// Whether backward may write gradients into the buffer that travels (optim/gradient_memory.h):
  /// not within no_sync().
  void accept_gradients(bool on) { accepts_gradients_ = on; }
  /// Where in that buffer the gradient of parameter `index` goes; undefined: nowhere.
  at::Tensor gradient_memory(size_t index);
  /// Starts to average the parameters' gradients over ranks, absent ones counting 0, and takes them
  /// from the parameters; `finish_reduce` waits, and adds this rank's shard of the average to its
  /// local shards' gradients, or, with a replicate_group, starts the average across replicas, for
  /// which `finish_replication` waits. To shards in another memory the average is then on its way
  /// until the device has done its work, and `finish_copy` adds it.
  void begin_reduce();
  void finish_reduce();
  void finish_replication();
  bool copying() const { return copied_.defined(); }
  void finish_copy();
  /// Adds gradients that do not travel yet to a sum in the type in which they will, if that is not
  /// theirs.
  void hold_gradients();
  /// By parameter: whether this rank had a gradient of it in the sum that `begin_reduce` started.
  /// Empty if it did not.
  const std::vector<bool>& sent() const { return sent_; }
  /// After `finish_copy`: local shards of a parameter of which no rank had a gradient lose
  /// the zeros that they got. `used`: by parameter, how many had one. Only after such a sum;
  /// empties `sent`.
  void drop_unused(const int64_t* used);
  bool reducing() const { return static_cast<bool>(reduction_); }
  c10::Device device() const { return full_.device(); }  ///< Where its unit computes.
  bool has_gradients() const;
  /// Names of parameters whose gradient has not come, if those of others have.
  std::vector<std::string> absent_gradients() const;
  /// Drops the parameters' gradients and sums that wait or are under way; local shards keep their
  /// gradients.
  void drop_gradients();
  /// Errors: c10::ValueError if a frozen parameter requires a gradient by now.
  void check_frozen() const;
  /// Before a forward. Local: a rank without an element of the bucket sees nothing.
  /// Errors: c10::ValueError if a hidden parameter has lost what stands for its gradient, by the
  ///         module's zero_grad(), and its local shard has one.
  void check_cleared() const;

  /// This rank's shard of each parameter.
  const std::vector<LocalShard>& local_shards() const { return local_shards_; }

 private:
  struct Gathering {
    at::Tensor sent, arriving;
    comm::Work work;
  };
  struct Reduction {
    at::Tensor whole, part;
    comm::Work work;
  };
  struct Replication {
    at::Tensor part;
    comm::Work work;
  };
  at::Tensor gradient(size_t index) const;  // undefined: none has come
  at::Tensor dense_gradient(size_t index) const;
  at::Tensor take_gradients();
  comm::ReduceOp reduction_op() const;
  double factor() const;
  at::Tensor own_part(const at::Tensor& flat) const;
  at::Tensor on_device(const at::Tensor& shard) const;
  at::Tensor buffer(const comm::ProcessGroup& group, int64_t numel, at::ScalarType type) const;
  at::Tensor shard_to_send() const;
  void begin_copy(const at::Tensor& reduced);
  void keep_gradients(const at::Tensor& part);
  at::Tensor view_of(const at::Tensor& flat, const FlatTensor& place) const;
  void start_gather(const at::Tensor& arriving);
  void finish_gather();
  void show(size_t index, const at::Tensor& value);
  bool sharded() const { return options_.shard == Shard::kParameters; }
  at::ScalarType travel_type() const {
    return options_.mixed_precision.reduce_dtype.value_or(shard_.scalar_type());
  }

  comm::ProcessGroup group_;
  const ShardingEngineOptions options_;
  const BucketPlace place_;
  std::vector<NamedTensor> parameters_;
  bool frozen_ = false;
  bool deferred_ = false;
  bool own_memory_ = true;  // shard_ is no part of full_
  bool hidden_ = false;     // parameters are not there, and something stands for their gradients
  FlatLayout layout_;
  at::Tensor full_;                // [padded], in the type of computing; its memory may be away
  at::Tensor shard_;               // [shard], in the parameters' type; a view of full_ if it can be
  at::Tensor kept_;                // [padded / ranks of the reshard_group], of full_
  at::Tensor unsharded_;           // [padded], in the parameters' type, where full_ has another
  at::Tensor held_;                // [padded], in the type of travelling: gradients that wait
  std::vector<at::Tensor> views_;  // of full_, by parameter
  std::vector<at::Tensor> absent_;            // what parameters are while they are not there
  std::vector<at::Tensor> absent_gradients_;  // and what gradients are then, unless frozen
  int64_t gathered_version_ = 0;              // of shard_, when it was last gathered
  enum class Content { kStale, kGathering, kWhole };
  Content content_ = Content::kStale;  // of full_
  std::optional<Gathering> gathering_;
  std::optional<Gathering> unsharding_;
  std::optional<Reduction> reduction_;
  std::optional<Replication> replication_;
  at::Tensor copied_;  // [shard], beside shard_: the sum, on its way from the device
  std::vector<LocalShard> local_shards_;
  at::Tensor gradients_;  // [padded]: those that a backward has written where they travel
  bool accepts_gradients_ = true;
  std::vector<bool> had_;    // by parameter: a gradient of it waits in held_
  std::vector<bool> sent_;   // by parameter: it had a gradient in the sum of this backward
  std::vector<bool> began_;  // by shard: that sum was the first of its gradient
};

}  // namespace cohort::parallel
