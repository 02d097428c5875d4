// SPDX-License-Identifier: Apache-2.0
// How HierarchicalBackend's operations move data. What ranks do inside their host depends on the
// call and on where the ranks are, so all ranks of a host do the same.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <algorithm>
#include <array>
#include <span>

#include "cohort/comm/backends/hierarchical/hierarchical_backend.h"
#include "cohort/comm/time_left.h"

namespace cohort::comm {
namespace {

// Of a tensor, at a time: long enough that a message costs little more than its bytes, short enough
// that the network does not wait for the first.
constexpr int64_t kPieceBytes = int64_t{1} << 20;

int64_t count_pieces(int64_t length, int64_t piece) {
  return std::max<int64_t>((length + piece - 1) / piece, 1);
}

std::span<std::byte> bytes_in(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

// Piece n of a vector; empty behind its end.
at::Tensor piece_of(const at::Tensor& flat, int64_t n, int64_t piece) {
  const int64_t begin = std::min(n * piece, flat.numel());
  return flat.narrow(0, begin, std::min(piece, flat.numel() - begin));
}

// The elements of a run of ranks, `each` of a rank.
at::Tensor part_of_run(const at::Tensor& flat, const HostRun& run, int64_t each) {
  return flat.narrow(0, run.first * each, run.count * each);
}

// Where `place`, of `size` places from the root on, sends what it gets: of a single piece along a
// binomial tree, which takes fewest steps; of many along a chain, so that none sends them twice.
std::vector<int> places_after(int place, int size, bool one_piece) {
  if (!one_piece) return place + 1 < size ? std::vector<int>{place + 1} : std::vector<int>();
  std::vector<int> next;
  const int limit = place == 0 ? size : place & -place;
  for (int stride = 1; stride < limit && place + stride < size; stride *= 2)
    next.insert(next.begin(), place + stride);
  return next;
}
int place_before(int place, bool one_piece) {
  return one_piece ? place & (place - 1) : place - 1;
}

// The leaders' share of a reduce_scatter, in rounds: one takes a piece of every run of ranks. The
// next may begin before the last one is reduced.
class LeaderScatter {
 public:
  // `piece`: elements, a multiple of 64. `inside`: whose ranks read of `scratch`, which grows.
  LeaderScatter(LeaderExchange& leaders, const std::vector<HostRun>& runs, int64_t piece,
                const at::TensorOptions& options, c10d::Backend* inside, at::Tensor& scratch)
      : leaders_(leaders), runs_(runs), piece_(piece), options_(options), scratch_(scratch) {
    num_slots_ = std::ssize(runs);
    for (const HostRun& run : runs) {
      first_received_.push_back(num_slots_);
      if (run.host == leaders.rank()) num_slots_ += leaders.size();
    }
    const int64_t bytes = 2 * num_slots_ * slot_bytes();
    if (scratch.defined() && scratch.numel() >= bytes) return;
    const bool shares = inside != nullptr && inside->supportsTensorAlloc(-1);
    scratch.reset();
    scratch = shares ? inside->allocateTensor(bytes, at::kByte) : at::empty({bytes}, at::kByte);
  }

  // Copies this host's terms of a run, for the input keeps its content.
  at::Tensor keep(int64_t round, size_t run, const at::Tensor& terms) const {
    return slot(round, static_cast<int64_t>(run), terms.numel()).copy_(terms);
  }
  // Sends what `keep` returned to the leader of the run, or gets the other leaders' terms.
  void exchange(int64_t round, size_t run, const at::Tensor& kept) {
    auto& batch = messages_[static_cast<size_t>(round % 2)];
    if (runs_[run].host != leaders_.rank())
      return leaders_.send(batch, bytes_in(kept), runs_[run].host);
    for (int peer = 0; peer < leaders_.size(); ++peer) {
      if (peer != leaders_.rank())
        leaders_.receive(batch, bytes_in(received(round, run, peer, kept.numel())), peer);
    }
  }
  // `results`: `each` elements of every rank of this host.
  void reduce(int64_t round, const Reduction& reduction, const at::Tensor& results, int64_t each) {
    leaders_.wait(messages_[static_cast<size_t>(round % 2)]);
    int64_t begin = 0;
    for (size_t run = 0; run < runs_.size(); ++run) {
      if (runs_[run].host != leaders_.rank()) continue;
      const int64_t length = runs_[run].count * each;
      const at::Tensor result = piece_of(results.narrow(0, begin, length), round, piece_);
      begin += length;
      std::vector<const std::byte*> terms;
      for (int host = 0; host < leaders_.size(); ++host) {
        const at::Tensor term = host == leaders_.rank()
                                    ? slot(round, static_cast<int64_t>(run), result.numel())
                                    : received(round, run, host, result.numel());
        terms.push_back(bytes_in(term).data());
      }
      comm::reduce(reduction, bytes_in(result).data(), terms, result.numel());
    }
  }

 private:
  int64_t slot_bytes() const { return piece_ * static_cast<int64_t>(options_.dtype().itemsize()); }
  at::Tensor slot(int64_t round, int64_t number, int64_t numel) const {
    const int64_t place = round % 2 * num_slots_ + number;
    return at::from_blob(scratch_.mutable_data_ptr<uint8_t>() + place * slot_bytes(), {numel},
                         options_);
  }
  at::Tensor received(int64_t round, size_t run, int host, int64_t numel) const {
    return slot(round, first_received_[run] + host, numel);
  }

  LeaderExchange& leaders_;
  const std::vector<HostRun>& runs_;
  const int64_t piece_;
  const at::TensorOptions options_;
  const at::Tensor& scratch_;
  int64_t num_slots_ = 0;                // of a round
  std::vector<int64_t> first_received_;  // by run: slot of what leader 0 sends
  std::array<LeaderExchange::Batch, 2> messages_;
};

}  // namespace

void HierarchicalBackend::reduce_inside(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (!inside_) return;
  Tensors tensors{tensor};
  c10d::ReduceOptions options;
  options.reduceOp = op;
  options.rootRank = 0;
  options.timeout = time_left(deadline_);
  options.asyncOp = false;
  inside_->reduce(tensors, options)->wait();
}

void HierarchicalBackend::broadcast_inside(const at::Tensor& tensor, int root) {
  if (!inside_) return;
  Tensors tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  options.timeout = time_left(deadline_);
  options.asyncOp = false;
  inside_->broadcast(tensors, options)->wait();
}

// Of one piece after another: a leader reduces piece n inside while pieces n - 1 and n - 2 are
// between the hosts.
void HierarchicalBackend::reduce_all(const at::Tensor& flat, const Reduced& reduced, int root) {
  const int root_host = root < 0 ? -1 : host_of(root);
  const bool hands_out = root < 0 || (host_ == root_host && root != own_group().front());
  const int64_t piece = kPieceBytes / flat.element_size();
  const int64_t num = count_pieces(flat.numel(), piece);
  std::optional<LeaderReduction> between;
  if (leaders_) {
    between.emplace(*leaders_, reduced.between, static_cast<size_t>(flat.element_size()), root_host,
                    scratch_);
    between->reserve(std::min<size_t>(flat.nbytes(), kPieceBytes));
  }
  for (int64_t n = 0; n < num + 2; ++n) {
    if (n < num) {
      const at::Tensor own = piece_of(flat, n, piece);
      reduce_inside(own, reduced.inside);
      if (between) between->send_terms(static_cast<size_t>(n), bytes_in(own));
    }
    if (between && n >= 1 && n <= num) between->reduce(static_cast<size_t>(n - 1));
    if (n >= 2) {
      if (between) between->finish(static_cast<size_t>(n - 2));
      if (hands_out) broadcast_inside(piece_of(flat, n - 2, piece), 0);
    }
  }
}

void HierarchicalBackend::broadcast_all(const at::Tensor& bytes, int root) {
  const int root_host = host_of(root);
  const int num_hosts = static_cast<int>(groups_.size());
  const int64_t num = count_pieces(bytes.numel(), kPieceBytes);
  const int place = (host_ - root_host + num_hosts) % num_hosts;
  const auto host_at = [&](int other) { return (other + root_host) % num_hosts; };
  std::vector<LeaderExchange::Batch> received(static_cast<size_t>(num));
  LeaderExchange::Batch sent;
  if (leaders_ && place > 0) {
    for (int64_t n = 0; n < num; ++n)
      leaders_->receive(received[static_cast<size_t>(n)], bytes_in(piece_of(bytes, n, kPieceBytes)),
                        host_at(place_before(place, num == 1)));
  }
  const HostGroup& root_group = groups_[static_cast<size_t>(root_host)];
  const auto index = std::ranges::find(root_group, root) - root_group.begin();
  for (int64_t n = 0; n < num; ++n) {
    const at::Tensor own = piece_of(bytes, n, kPieceBytes);
    if (place == 0) broadcast_inside(own, static_cast<int>(index));
    if (leaders_) {
      leaders_->wait(received[static_cast<size_t>(n)]);
      for (const int next : places_after(place, num_hosts, num == 1))
        leaders_->send(sent, bytes_in(own), host_at(next));
    }
    if (place > 0) broadcast_inside(own, 0);
  }
  if (leaders_) leaders_->wait(sent);
}

// Of bytes. All that leaders send is under way at once, for it lies in the ranks' own tensors.
void HierarchicalBackend::gather_all(const at::Tensor& output, const at::Tensor& input) {
  const int64_t each = input.numel();
  std::vector<Tensors> own(1);
  for (const int rank : own_group()) own[0].push_back(output.narrow(0, rank * each, each));
  if (inside_) {
    Tensors inputs{input};
    c10d::AllgatherOptions options;
    options.timeout = time_left(deadline_);
    options.asyncOp = false;
    inside_->allgather(own, inputs, options)->wait();
  } else if (own[0][0].const_data_ptr() != input.const_data_ptr()) {
    own[0][0].copy_(input);
  }
  struct Piece {
    int host;
    at::Tensor bytes;
    LeaderExchange::Batch received{};
  };
  std::vector<Piece> pieces;
  int64_t longest = 0;
  for (const HostRun& run : runs_) longest = std::max(longest, run.count * each);
  for (int64_t n = 0; n < count_pieces(longest, kPieceBytes); ++n) {
    for (const HostRun& run : runs_) {
      const at::Tensor piece = piece_of(part_of_run(output, run, each), n, kPieceBytes);
      if (piece.numel() > 0) pieces.push_back({run.host, piece});
    }
  }
  LeaderExchange::Batch sent;
  for (Piece& piece : pieces) {
    if (!leaders_) break;
    if (piece.host != host_) leaders_->receive(piece.received, bytes_in(piece.bytes), piece.host);
    for (int peer = 0; piece.host == host_ && peer < leaders_->size(); ++peer)
      if (peer != host_) leaders_->send(sent, bytes_in(piece.bytes), peer);
  }
  for (Piece& piece : pieces) {
    if (piece.host == host_) continue;
    if (leaders_) leaders_->wait(piece.received);
    broadcast_inside(piece.bytes, 0);
  }
  if (leaders_) leaders_->wait(sent);
}

void HierarchicalBackend::scatter_reduced(const at::Tensor& output, const at::Tensor& input,
                                          const Reduced& reduced) {
  const int64_t each = output.numel();
  const int64_t most = kPieceBytes / output.element_size() / std::ssize(runs_);
  const int64_t piece = std::max<int64_t>(most / 64, 1) * 64;
  int64_t longest = 0;
  for (const HostRun& run : runs_) longest = std::max(longest, run.count * each);
  const int64_t rounds = count_pieces(longest, piece);
  std::optional<LeaderScatter> between;
  if (leaders_)
    between.emplace(*leaders_, runs_, piece, output.options(), inside_.get(), scatter_scratch_);
  // By the index of the rank in its host. A rank that is alone needs no memory for others.
  const int64_t num_inside = std::ssize(own_group());
  const at::Tensor results =
      leaders_ && inside_ ? at::empty({num_inside * each}, output.options()) : output;
  for (int64_t round = 0; round < rounds + 1; ++round) {
    for (size_t run = 0; round < rounds && run < runs_.size(); ++run) {
      at::Tensor terms = piece_of(part_of_run(input, runs_[run], each), round, piece);
      if (between) terms = between->keep(round, run, terms);
      reduce_inside(terms, reduced.inside);
      if (between) between->exchange(round, run, terms);
    }
    if (between && round > 0) between->reduce(round - 1, reduced.between, results, each);
  }
  if (!inside_) return;
  Tensors outputs{output};
  std::vector<Tensors> parts;
  if (leaders_) parts.push_back(results.view({num_inside, each}).unbind(0));
  c10d::ScatterOptions options;
  options.rootRank = 0;
  options.timeout = time_left(deadline_);
  options.asyncOp = false;
  inside_->scatter(outputs, parts, options)->wait();
}

}  // namespace cohort::comm
