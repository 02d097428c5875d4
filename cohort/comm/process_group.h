// The ranks of one job and their collectives on tensors, over c10d.
#pragma once
#include <ATen/core/Tensor.h>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/call_site.h"
#include "cohort/comm/place.h"

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace cohort::comm {

struct GroupOptions {
  std::string backend = "gloo";  ///< The engine: "gloo" or another of backend.h.
  std::chrono::milliseconds rendezvous_timeout{300'000};  ///< Until every rank has come.
  std::chrono::milliseconds timeout{600'000};             ///< Of every later operation.
  /// Network interface of the engine, "eth0"; empty: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, else
  /// by route.
  std::string interface;
  /// Compare what the ranks call before data moves (docs/comm.md: what is found, what it costs).
  /// The same on all ranks. COHORT_CHECK_COLLECTIVES=0 turns it off, too.
  bool check_collectives = true;
};

/// How ranks' values become one. kAvg is the sum, then one division, for floating types. kBand,
/// kBor, kBxor are bitwise, for integers and bool.
enum class ReduceOp { kSum, kMax, kMin, kProduct, kAvg, kBand, kBor, kBxor };

class ProcessGroup;

/// A collective under way. The tensors belong to it until `wait` has returned; to drop it unwaited
/// leaves them undefined.
///
/// Owner: the caller. Threads: one.
class [[nodiscard]] Work {
 public:
  Work(Work&&) noexcept;
  Work& operator=(Work&&) noexcept;
  ~Work();

  /// Blocks until the result is there. A second call returns at once. Errors: as ProcessGroup;
  /// c10::ValueError once the group is gone.
  void wait(CallSite site = CallSite::here());

 private:
  friend class ProcessGroup;
  struct State;
  explicit Work(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// A process group: this rank's connection to its peers.
///
/// Owner: the program's outermost frame; everything below takes `ProcessGroup&`.
/// Threads: one caller at a time. A watching thread of its own answers when a peer asks who is
/// alive. Collective: the constructor, every operation and `close`; same order on every rank.
/// Names and meanings of the collectives are torch.distributed's.
/// Tensors: contiguous, on a device that the engine serves, of the same shape and dtype on every
///          rank (all_to_all: its splits may differ). Collectives that move data take every dtype;
///          those that reduce take bool (kMax, kMin, kBand, kBor), uint8, int8, int32, int64,
///          float16, bfloat16, float32 and float64. Autograd records none of them: what is written
///          in place keeps its history, and a leaf that requires a gradient may be written.
/// Blocks:  every operation, until its result is there, except those called `_async`.
/// Errors:  PeerError from any of them when a rank is lost or late, or when ranks call different
///          things; it names the ranks as far as the survivors can tell. The group, its parent and
///          its sub-groups are dead after it. c10::ValueError for bad arguments and after
///          `close`, before anything is sent.
/// `site`, a last argument everywhere, is filled in by the compiler: where the call stands, for
/// traces and errors.
class ProcessGroup {
 public:
  /// Meets the other ranks of `place`. Blocks, at most `rendezvous_timeout`.
  /// A process may make several groups, one after another or at a time; all ranks in one order.
  /// One process is a group of size 1 and needs no network; with more, SIGPIPE no longer ends the
  /// process (a write to a lost rank is an error instead), unless the program handles it itself.
  /// Errors: ConfigError if the backend is unknown, rank 0 cannot listen on the port, or the ranks'
  ///         numbers and options clash; PeerError that names the ranks that have not come.
  explicit ProcessGroup(const Place& place, const GroupOptions& options = {});
  /// Local: closes connections without a word. Call `close` first on the good path.
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  int rank() const;  ///< Within this group.
  int size() const;
  int global_rank(int rank) const;  ///< Number in the whole job of this group's `rank`.
  const std::string& name() const;  ///< "world", or the sub-group's name.
  const Place& place() const;       ///< Of this process in the whole job.

  /// Returns the group of some of this group's ranks; nullptr on ranks outside of it.
  /// Collective over this group: every rank calls it, with the same `ranks` and `name`. Ranks are
  /// this group's numbers; they are sorted, as torch.distributed does. Several sub-groups may have
  /// one name. Blocks until its members have met. The new group must not outlive this one, and
  /// shares its fate: a lost rank is named by its number in the job.
  std::unique_ptr<ProcessGroup> subgroup(const std::vector<int>& ranks, const std::string& name,
                                         CallSite site = CallSite::here());

  /// Replaces `tensor` by the sum (or other `op`) over ranks, in place, on every rank.
  /// Shapes: any. Numerics: in the tensor's dtype. Cost: 2 (W-1)/W of the bytes sent per rank
  /// (ring).
  void all_reduce(at::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                  CallSite site = CallSite::here());
  Work all_reduce_async(at::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                        CallSite site = CallSite::here());
  /// Returns the sum of `value` over ranks.
  int64_t all_reduce_sum(int64_t value, CallSite site = CallSite::here());
  /// The same as all_reduce, but only rank `root` gets the result; the others' tensors keep no
  /// meaning.
  void reduce(at::Tensor& tensor, int root = 0, ReduceOp op = ReduceOp::kSum,
              CallSite site = CallSite::here());
  /// Copies `tensor` from rank `root` to all, in place.
  void broadcast(at::Tensor& tensor, int root = 0, CallSite site = CallSite::here());

  /// Returns every rank's tensor, by rank, on every rank.
  std::vector<at::Tensor> all_gather(const at::Tensor& tensor, CallSite site = CallSite::here());
  /// Fills `output` with every rank's `input`, by rank. Shapes: `output` has W times `input`'s
  /// elements, same dtype; `input` may be this rank's part of it, which saves a copy. Cost: W-1
  /// times `input`'s bytes sent and received per rank, over Gloo on one host straight from rank to
  /// rank, in place.
  void all_gather_into(at::Tensor& output, const at::Tensor& input,
                       CallSite site = CallSite::here());
  /// `of`: what is gathered, which ranks then compare, too, and errors name.
  Work all_gather_into_async(at::Tensor& output, const at::Tensor& input,
                             const std::string& of = {}, CallSite site = CallSite::here());
  /// Returns every rank's tensor, by rank, on rank `root`; nothing elsewhere.
  std::vector<at::Tensor> gather(const at::Tensor& tensor, int root = 0,
                                 CallSite site = CallSite::here());
  /// Fills `output` with rank `root`'s `inputs[rank]`. `inputs`: W tensors of output's shape on the
  /// root, none elsewhere.
  void scatter(at::Tensor& output, const std::vector<at::Tensor>& inputs, int root = 0,
               CallSite site = CallSite::here());
  /// Reduces `input` over ranks and leaves the rank-th of its W equal parts in `output`.
  /// Shapes: `input` has W times `output`'s elements, same dtype. `output` may be this rank's part
  /// of `input`; otherwise `input` keeps its content.
  /// Numerics: in the tensor's dtype; over Gloo in the order of ranks. Cost: (W-1)/W of the bytes
  /// sent per rank; over Gloo straight from rank to rank, then a local sum (its own sends more,
  /// docs/comm.md), which needs memory for W-2 parts, and for one more where `output` is `input`'s.
  void reduce_scatter(at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::kSum,
                      CallSite site = CallSite::here());
  /// `of`: as all_gather_into_async's.
  Work reduce_scatter_async(at::Tensor& output, const at::Tensor& input,
                            ReduceOp op = ReduceOp::kSum, const std::string& of = {},
                            CallSite site = CallSite::here());
  /// Sends part r of `input` to rank r and fills part r of `output` with what rank r sent. Parts
  /// are along dimension 0: equal, or as long as `input_splits` and `output_splits` say (W numbers
  /// each; rank a's input_splits[b] must be rank b's output_splits[a]).
  void all_to_all(at::Tensor& output, const at::Tensor& input,
                  const std::vector<int64_t>& output_splits = {},
                  const std::vector<int64_t>& input_splits = {}, CallSite site = CallSite::here());

  /// Sends `tensor` to rank `to`, which calls `recv` with this rank, tag (>= 0), dtype and number
  /// of elements. Only these two call. With check_collectives dtype and number go ahead in a
  /// message of their own. Errors: c10::ValueError from `recv` if the sender's differ.
  void send(const at::Tensor& tensor, int to, int tag = 0, CallSite site = CallSite::here());
  void recv(at::Tensor& tensor, int from, int tag = 0, CallSite site = CallSite::here());

  /// Returns rank `root`'s text (any bytes, any length) on every rank.
  std::string broadcast_text(const std::string& text, int root = 0,
                             CallSite site = CallSite::here());
  /// Returns every rank's text, by rank, on every rank. Memory: W times the longest text.
  std::vector<std::string> all_gather_text(const std::string& text,
                                           CallSite site = CallSite::here());
  /// Returns every rank's text, by rank, on rank `root`; nothing elsewhere.
  std::vector<std::string> gather_text(const std::string& text, int root = 0,
                                       CallSite site = CallSite::here());

  /// Returns once every rank has come here with the same `name`. The error of one that waits in
  /// vain says which ranks have not come, and what they did last (as torch's monitored_barrier,
  /// which it replaces). `limit` replaces the group's timeout, for a wait while one rank does long
  /// work alone; it is not for groups whose ranks may differ in it.
  void barrier(const std::string& name, std::optional<std::chrono::milliseconds> limit = {},
               CallSite site = CallSite::here());

  /// Runs `call`, which drives the engine itself, and turns what it throws for a lost peer into
  /// PeerError. The trace shows `operation` meanwhile; what ranks call here is not compared.
  void guard(const std::string& operation, const std::function<void()>& call,
             CallSite site = CallSite::here());

  /// Says good-bye: a barrier that rank 0, the store's host, leaves last. No operation may follow.
  /// A sub-group's is a barrier only; the group of all ranks goes last.
  void close(CallSite site = CallSite::here());

  c10d::ProcessGroup& engine();  ///< For code that drives c10d, like DistributedDataParallel.

 private:
  friend class GroupReference;
  friend class Work;
  struct Impl;
  explicit ProcessGroup(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;  // Shared with nobody: others see by it whether the group lives.
};

/// How something that may outlive a group refers to it: a node of autograd's graph, a module.
///
/// Owner: anyone; keeps nothing alive. Threads: as the group, its destruction included.
class GroupReference {
 public:
  explicit GroupReference(ProcessGroup& group);
  /// Returns the group. Errors: c10::ValueError that names `user` and the group if that is gone.
  ProcessGroup& get(const char* user) const;

 private:
  ProcessGroup* group_;
  std::string name_;
  std::weak_ptr<void> life_;
};

}  // namespace cohort::comm
