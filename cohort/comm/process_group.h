// SPDX-License-Identifier: Apache-2.0
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
#include "cohort/comm/rank_info.h"

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace cohort::comm {

/// When ranks compare what they call before data move (docs/comm.md: what is found, what it costs).
enum class CheckCollectives {
  kOff,     ///< Never.
  kOn,      ///< The first time that a kind of call occurs. Later ones match by number.
  kAlways,  ///< At every call: what differs is found at once.
};

struct ProcessGroupOptions {
  /// One of backend.h; "auto": "nccl" where `device` is a CUDA device, else "shm" for ranks of one
  /// host, "hierarchical" or "gloo" for those of several; each sub-group by its own ranks.
  std::string backend = "auto";
  /// Until every rank has come. This and all other timeouts: above 0, at most 3,650 days.
  std::chrono::milliseconds rendezvous_timeout{300'000};
  std::chrono::milliseconds timeout{600'000};  ///< Of every later operation.
  /// Network interface of the backend, "eth0"; empty: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, else
  /// by route.
  std::string interface;
  /// Where this rank computes, as torch's device_id: ProcessGroup::device(). Empty: by the backend
  /// and the local rank.
  std::optional<c10::Device> device;
  /// The same on all ranks. COHORT_CHECK_COLLECTIVES=0, 1 or 2 replaces it.
  CheckCollectives check_collectives = CheckCollectives::kOn;
};

/// How ranks' values become one. kAvg is the sum, then one division, for floating types. kBand,
/// kBor and kBxor are bitwise, for integers; kBand and kBor also for bool.
enum class ReduceOp { kSum, kMax, kMin, kProduct, kAvg, kBand, kBor, kBxor };

class ProcessGroup;

/// An operation that has begun. Its tensors belong to it until `wait` has returned: destroying it
/// before leaves what they hold undefined. It keeps its group and its tensors alive.
///
/// Owner:   the caller.
/// Threads: one.
class [[nodiscard]] Work {
 public:
  Work(Work&&) noexcept;
  Work& operator=(Work&&) noexcept;
  ~Work();

  /// Blocks until the result is there (over nccl: makes the current stream wait for it). A second
  /// call returns at once.
  /// Errors: as ProcessGroup.
  void wait(CallSite site = CallSite::here());

 private:
  friend class ProcessGroup;
  struct State;
  explicit Work(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// What a sub-group has of its own; the rest it shares with its parent.
struct SubgroupOptions {
  std::optional<std::chrono::milliseconds> timeout;  ///< Of every operation.
  std::optional<std::string> backend;  ///< As ProcessGroupOptions::backend; empty: the same.
  /// Number the members as they are listed. false: in the order of their ranks, as
  /// torch.distributed does.
  bool keep_order = false;
};

/// A handle to a process group: this rank's connections to its peers. Copies refer to one group,
/// which lives as long as one of them or what was made with it. An empty handle refers to none.
///
/// Threads:    one caller at a time. A watching thread of its own answers its peers' liveness
///             checks.
/// Collective: the constructor, every operation and `close`; same order on every rank. Names and
///             meanings of the collectives are torch.distributed's.
/// Tensors:    on a device that the backend serves, of the same shape and dtype on every rank
///             (all_to_all: its splits may differ). Of any strides: what is not contiguous is
///             copied before, and after where it is written. Tensors are handles, so a temporary
///             view will do: `group.all_reduce(x.narrow(0, 0, 4))`. Collectives that move data take
///             every dtype; those that reduce take bool (kMax, kMin, kBand, kBor), uint8, int8,
///             int32, int64, float16, bfloat16, float32 and float64. Autograd records none of them:
///             what is written in place keeps its history, and a leaf that requires a gradient may
///             be written. Its version goes up: a backward that needs the old values is an error.
/// Blocks:     every operation, until its result is there, except those called `_async`. Over
///             nccl only the current stream waits for it, not the host, as in PyTorch. With
///             check_collectives, calls of `_async` block while ranks compare them: over all
///             backends but shm at the first call of a kind (kAlways: at every call), and
///             all_to_all_async of CPU tensors with splits at every call.
/// Errors:     PeerError from any of them when a rank is lost or late, or when ranks call different
///             things; it names the ranks as far as the survivors can tell. The group, its parent
///             and its sub-groups are dead after it. c10::ValueError for bad arguments, of an empty
///             handle and after `close`, before anything is sent. `site`, a last argument
///             everywhere, is filled in by the compiler: where the call stands, for traces and
///             errors.
class ProcessGroup {
 public:
  /// An empty handle.
  ProcessGroup() = default;
  /// Joins the rendezvous of the job of `info`. Blocks, at most `rendezvous_timeout`.
  /// A process may make several groups, one after another or at a time; all ranks in one order.
  /// One process is a group of size 1 and needs no network; with more, SIGPIPE no longer ends the
  /// process (a write to a lost rank is an error instead), unless the program handles it itself.
  /// When the last handle goes, connections are closed without notice: call `close` first on the
  /// good path.
  /// Errors: ConfigError if the backend is unknown or serves no tensors of `device`, rank 0 cannot
  ///         listen on the port, or the ranks' numbers and options clash; PeerError that names the ranks that have not come.
  explicit ProcessGroup(const RankInfo& info, const ProcessGroupOptions& options = {});

  explicit operator bool() const { return impl_ != nullptr; }
  bool operator==(const ProcessGroup&) const = default;  ///< Whether both refer to one group.

  int rank() const;  ///< Within this group.
  int size() const;
  int global_rank(int rank) const;  ///< Number in the whole job of this group's `rank`.
  /// The host of each rank, by rank: equal for ranks of one host (and network and process
  /// namespace). Text up to the first "/" is the host's name (COHORT_HOST_NAME, else the system's).
  std::vector<std::string> hosts() const;
  const std::string& name() const;     ///< "world", or the sub-group's name.
  const std::string& backend() const;  ///< ProcessGroupOptions::backend; what "auto" chose.
  const RankInfo& rank_info() const;   ///< Of this process in the whole job.
  /// Where this rank computes, as `net->to(group.device())`: the CPU if the backend serves that
  /// (shm, hierarchical, gloo, mpi), else ProcessGroupOptions::device, or without it the accelerator that
  /// device_index() chooses (rank_info.h).
  /// Errors: as device_index().
  at::Device device() const;

  /// Returns the group of some of this group's ranks; an empty handle on ranks outside of it.
  /// Collective over this group: every rank calls it, with the same arguments. Ranks are this
  /// group's numbers, in any order (SubgroupOptions::keep_order). Several sub-groups may have one
  /// name. Blocks until its members have joined. The new group shares this one's fate: errors
  /// give a lost rank's number in the job.
  ProcessGroup subgroup(const std::vector<int>& ranks, const std::string& name,
                        const SubgroupOptions& options = {},
                        CallSite site = CallSite::here()) const;

  /// Replaces `tensor` by the sum (or other `op`) over ranks, in place, on every rank, and returns
  /// it.
  /// Shapes:   any.
  /// Numerics: in the tensor's dtype; over shm half types are added in float32 and rounded once
  ///           (hierarchical, mpi: docs/backends.md). On three or more ranks the order of summation
  ///           depends on the backend.
  /// Cost:     2 (W-1)/W of the bytes sent per rank over Gloo (ring).
  at::Tensor all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                        CallSite site = CallSite::here()) const;
  Work all_reduce_async(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                        CallSite site = CallSite::here()) const;
  /// Returns the sum of `value` over ranks.
  int64_t all_reduce_sum(int64_t value, CallSite site = CallSite::here()) const;
  /// The same as all_reduce, but only rank `root` gets the result; the others' tensors keep no
  /// meaning.
  at::Tensor reduce(const at::Tensor& tensor, int root = 0, ReduceOp op = ReduceOp::kSum,
                    CallSite site = CallSite::here()) const;
  Work reduce_async(const at::Tensor& tensor, int root = 0, ReduceOp op = ReduceOp::kSum,
                    CallSite site = CallSite::here()) const;
  /// Copies `tensor` from rank `root` to all, in place, and returns it.
  at::Tensor broadcast(const at::Tensor& tensor, int root = 0,
                       CallSite site = CallSite::here()) const;
  Work broadcast_async(const at::Tensor& tensor, int root = 0,
                       CallSite site = CallSite::here()) const;

  /// Returns every rank's tensor, by rank, on every rank.
  std::vector<at::Tensor> all_gather(const at::Tensor& tensor,
                                     CallSite site = CallSite::here()) const;
  /// Fills `outputs`, W tensors of `tensor`'s shape and dtype, with every rank's tensor, by rank.
  Work all_gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& tensor,
                        CallSite site = CallSite::here()) const;
  /// Fills `output` with every rank's `input`, by rank.
  /// Shapes: `output` has W times `input`'s elements, same dtype; `input` may be this rank's part
  ///         of it, which saves a copy.
  /// Cost:   W-1 times `input`'s bytes received per rank; over shm read where the others put them,
  ///         over Gloo on one host straight from rank to rank, in place.
  void all_gather_into(const at::Tensor& output, const at::Tensor& input,
                       CallSite site = CallSite::here()) const;
  /// `of`: what is gathered, which ranks then compare, too, and errors name.
  Work all_gather_into_async(const at::Tensor& output, const at::Tensor& input,
                             const std::string& of = {}, CallSite site = CallSite::here()) const;
  /// Returns every rank's tensor, by rank, on rank `root`; nothing elsewhere.
  std::vector<at::Tensor> gather(const at::Tensor& tensor, int root = 0,
                                 CallSite site = CallSite::here()) const;
  /// Fills `outputs` as `gather`: W tensors of `tensor`'s shape and dtype on the root, none
  /// elsewhere.
  Work gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& tensor, int root = 0,
                    CallSite site = CallSite::here()) const;
  /// Fills `output` with rank `root`'s `inputs[rank]`. `inputs`: W tensors of output's shape on the
  /// root, none elsewhere.
  void scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root = 0,
               CallSite site = CallSite::here()) const;
  Work scatter_async(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root = 0,
                     CallSite site = CallSite::here()) const;
  /// Reduces `input` over ranks and leaves the rank-th of its W equal parts in `output`.
  /// Shapes:   `input` has W times `output`'s elements, same dtype. `output` may be this rank's
  ///           part of `input`; otherwise `input` keeps its content.
  /// Numerics: in the tensor's dtype, over shm half types in float32; over shm and Gloo in the
  ///           order of ranks.
  /// Cost:     (W-1)/W of the bytes sent per rank; over Gloo straight from rank to rank, then a
  ///           local sum (its own sends more, docs/comm.md), which needs memory for W-2 parts, and
  ///           for one more where `output` is `input`'s.
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                      ReduceOp op = ReduceOp::kSum, CallSite site = CallSite::here()) const;
  /// `of`: as all_gather_into_async's.
  Work reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                            ReduceOp op = ReduceOp::kSum, const std::string& of = {},
                            CallSite site = CallSite::here()) const;
  /// Sends part r of `input` to rank r and fills part r of `output` with what rank r sent. Parts
  /// are along dimension 0: equal, or as long as `input_splits` and `output_splits` say (W numbers
  /// each; rank a's input_splits[b] must be rank b's output_splits[a]).
  /// Either all ranks pass splits or none.
  /// Errors: PeerError on every rank if the splits of two ranks disagree: of CPU tensors, with
  ///         check_collectives or over shm; of a device's tensors it is not found. c10::ValueError
  ///         on this rank alone if its splits do not sum to the rows, or differ in what it sends to
  ///         itself.
  void all_to_all(const at::Tensor& output, const at::Tensor& input,
                  const std::vector<int64_t>& output_splits = {},
                  const std::vector<int64_t>& input_splits = {},
                  CallSite site = CallSite::here()) const;
  Work all_to_all_async(const at::Tensor& output, const at::Tensor& input,
                        const std::vector<int64_t>& output_splits = {},
                        const std::vector<int64_t>& input_splits = {},
                        CallSite site = CallSite::here()) const;

  /// Sends `tensor` to rank `to`, which calls `recv` with this rank, tag (>= 0), dtype and number
  /// of elements. Only these two call. It may return before the receiver has called, or wait until
  /// then: two ranks that exchange tensors use send_async or recv_async. With check_collectives
  /// dtype and number are sent before, in a message of their own. Messages of one tag arrive in the
  /// order in which they were sent.
  void send(const at::Tensor& tensor, int to, int tag = 0, CallSite site = CallSite::here()) const;
  Work send_async(const at::Tensor& tensor, int to, int tag = 0,
                  CallSite site = CallSite::here()) const;
  /// Fills `tensor` with what rank `from` sends, and returns it.
  /// Errors: with check_collectives c10::ValueError (from `wait` of the asynchronous form) if the
  ///         sender's dtype or number of elements differs: that message is lost, later ones are
  ///         not. Call `wait` for every receive: if a Work is destroyed before, a later receive of
  ///         the same sender and tag may throw this, too. Its message is left for the next receive
  ///         over shm alone, and only if it has not begun to arrive; otherwise it is lost.
  at::Tensor recv(const at::Tensor& tensor, int from, int tag = 0,
                  CallSite site = CallSite::here()) const;
  Work recv_async(const at::Tensor& tensor, int from, int tag = 0,
                  CallSite site = CallSite::here()) const;

  /// Returns rank `root`'s object, a string of any bytes and any length, on every rank. Lengths may
  /// differ between ranks; so with the two below.
  std::string broadcast_object(const std::string& object, int root = 0,
                               CallSite site = CallSite::here()) const;
  /// Returns every rank's object, by rank, on every rank.
  /// Memory: W times the longest.
  std::vector<std::string> all_gather_object(const std::string& object,
                                             CallSite site = CallSite::here()) const;
  /// Returns every rank's object, by rank, on rank `root`; nothing elsewhere.
  std::vector<std::string> gather_object(const std::string& object, int root = 0,
                                         CallSite site = CallSite::here()) const;

  /// Returns once every rank has come here with the same `name`. The error of one that waits in
  /// vain says which ranks have not come, and what they did last (as torch's monitored_barrier,
  /// which it replaces). `limit` replaces the group's timeout, for a wait while one rank does long
  /// work alone; every rank must pass the same limit.
  void barrier(const std::string& name, std::optional<std::chrono::milliseconds> limit = {},
               CallSite site = CallSite::here()) const;
  /// The same, to wait for later.
  Work barrier_async(const std::string& name, CallSite site = CallSite::here()) const;

  /// Runs `call`, which drives the backend itself, and turns what it throws for a lost peer into
  /// PeerError. The trace shows `operation` meanwhile; what ranks call here is not compared.
  void translate_errors(const std::string& operation, const std::function<void()>& call,
                        CallSite site = CallSite::here()) const;
  /// The same for what every rank of the group calls in the same place among its collectives:
  /// where ranks wait for longer than two seconds, it takes part in the comparison.
  void run_collective(const std::string& operation, const std::function<void()>& call,
                      CallSite site = CallSite::here()) const;

  /// Leaves the group: a barrier that rank 0, the store's host, leaves last. No call may follow,
  /// through any handle. Of a sub-group it ends that group alone: close the group of all ranks last.
  void close(CallSite site = CallSite::here()) const;

  /// The c10d process group with its backends, for code that calls it directly, like
  /// DistributedDataParallel. Local. The reference holds until `close`.
  c10d::ProcessGroup& c10d_group() const;
  /// A store of keys and values that this group's ranks share, for the program's own use.
  c10d::Store& store() const;

 private:
  struct Impl;
  friend class Work;
  explicit ProcessGroup(std::shared_ptr<Impl> impl);
  Impl& impl() const;  // c10::ValueError of an empty handle
  std::shared_ptr<Impl> impl_;
};

/// ProcessGroup(rank_info_from_environment(), options): the group of the job that this process
/// belongs to, by the environment of torchrun, Open MPI, Slurm or Paddle, or of this process alone.
ProcessGroup init_process_group(const ProcessGroupOptions& options = {});

}  // namespace cohort::comm

namespace cohort {
using comm::init_process_group;
using comm::ProcessGroup;
}  // namespace cohort
