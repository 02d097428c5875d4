// SPDX-License-Identifier: Apache-2.0
// Two ways to share the base translator's parameters out to ranks: flat, where a bucket's
// parameters lie end to end in one buffer that is cut evenly (parallel/sharding), and by rows, where
// each parameter is cut along dimension 0, as PyTorch's FSDP2 does.
//
//   cohort run --nproc-per-node 2 -- build/release/bin/sharding_layout
//
// Both have the same buckets, and take turns in every round. Rank 0 prints one JSON line: seconds to
// gather all buckets, to reduce and scatter all gradients, and of a step of Muon over the matrices
// of the layers, of the slowest rank; bytes sent, of padding, and of buffers.
#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <torch/types.h>

#include "cohort/base/program.h"
#include "cohort/cli/parse.h"
#include "cohort/comm/process_group.h"
#include "cohort/nmt/transformer.h"
#include "cohort/parallel/muon.h"
#include "cohort/parallel/sharding/flat_layout.h"
#include "cohort/parallel/sharding/unit_parameters.h"
#include "cohort/translate/tensor_memory.h"

#include "bench/median.h"
#include "bench/sent_bytes.h"

namespace {

using cohort::comm::ProcessGroup;
using cohort::parallel::FlatLayout;
using cohort::parallel::FlatSlice;
using cohort::parallel::FlatTensor;
using Clock = std::chrono::steady_clock;
using Tensors = std::vector<at::Tensor>;

struct Options {
  int64_t rounds = 7;
  int muon_iterations = 5;
};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A bucket of parameters, cut. A shard is one flat tensor.
class Layout {
 public:
  explicit Layout(ProcessGroup group) : group_(std::move(group)) {}
  virtual ~Layout() = default;
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;

  virtual int64_t shard_numel() const = 0;
  virtual std::vector<FlatSlice> slices() const = 0;  // what this rank's shard holds
  // Every parameter, whole.
  virtual Tensors gather(const at::Tensor& shard) = 0;
  // This rank's shard of the mean of `gradients`, one for each parameter.
  virtual at::Tensor reduce(const Tensors& gradients) = 0;

  double collective_s = 0;  // of the time in gather and reduce

 protected:
  void all_gather(const at::Tensor& whole, const at::Tensor& shard) {
    const auto start = Clock::now();
    group_.all_gather_into(whole, shard);
    collective_s += seconds_since(start);
  }
  at::Tensor reduce_scatter(const at::Tensor& whole) {
    at::Tensor shard = at::empty({shard_numel()});
    const auto start = Clock::now();
    group_.reduce_scatter(shard, whole);
    collective_s += seconds_since(start);
    return shard;
  }
  // As the engine's: the mean's division goes with the copy.
  void put(at::Tensor place, const at::Tensor& gradient) const {
    at::mul_out(place, gradient, at::scalar_tensor(1.0 / group_.size()));
  }

  ProcessGroup group_;
};

class Flat final : public Layout {
 public:
  Flat(const std::vector<FlatTensor>& parameters, const ProcessGroup& group)
      : Layout(group), layout_(parameters, group.size(), /*alignment=*/16) {}

  int64_t shard_numel() const override { return layout_.shard_numel(); }
  std::vector<FlatSlice> slices() const override { return layout_.slices(group_.rank()); }

  Tensors gather(const at::Tensor& shard) override {
    const at::Tensor whole = at::empty({layout_.padded_numel()});
    all_gather(whole, shard);
    return views_of(whole);
  }

  at::Tensor reduce(const Tensors& gradients) override {
    const at::Tensor whole = at::empty({layout_.padded_numel()});
    const Tensors places = views_of(whole);
    for (size_t i = 0; i < places.size(); ++i) put(places[i], gradients[i]);
    for (const auto& [begin, end] : layout_.gaps()) whole.narrow(0, begin, end - begin).zero_();
    return reduce_scatter(whole);
  }

 private:
  Tensors views_of(const at::Tensor& whole) const {
    Tensors views;
    for (const FlatTensor& each : layout_.tensors())
      views.push_back(whole.narrow(0, each.begin, each.numel).view(each.shape));
    return views;
  }

  FlatLayout layout_;
};

// Rank r holds rows [r n, r n + n) of each parameter, n = rows / ranks rounded up; the last ranks
// hold fewer, and padding. What is gathered is interleaved: all of rank 0, then all of rank 1.
class ByRows final : public Layout {
 public:
  ByRows(const std::vector<FlatTensor>& parameters, const ProcessGroup& group)
      : Layout(group), parameters_(parameters) {
    for (const FlatTensor& each : parameters_) {
      const int64_t rows = (each.shape[0] + group.size() - 1) / group.size();
      offsets_.push_back(shard_numel_);
      counts_.push_back(rows * (each.numel / each.shape[0]));
      shard_numel_ += counts_.back();
    }
  }

  int64_t shard_numel() const override { return shard_numel_; }

  std::vector<FlatSlice> slices() const override {
    std::vector<FlatSlice> slices;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto [begin, end] = range_of(i, group_.rank());
      if (begin < end) slices.push_back({i, begin, end, offsets_[i]});
    }
    return slices;
  }

  Tensors gather(const at::Tensor& shard) override {
    const at::Tensor gathered = at::empty({group_.size(), shard_numel_});
    all_gather(gathered, shard);
    Tensors parameters;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor whole = at::empty({group_.size(), counts_[i]});
      whole.copy_(gathered.narrow(1, offsets_[i], counts_[i]));
      parameters.push_back(
          whole.view({-1}).narrow(0, 0, parameters_[i].numel).view(parameters_[i].shape));
    }
    return parameters;
  }

  at::Tensor reduce(const Tensors& gradients) override {
    const at::Tensor whole = at::empty({group_.size(), shard_numel_});
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor place = whole.narrow(1, offsets_[i], counts_[i]);
      const at::Tensor gradient = gradients[i].view({-1});
      if (place.numel() == gradient.numel()) {
        put(place, gradient.view(place.sizes()));
        continue;
      }
      for (int rank = 0; rank < group_.size(); ++rank) {
        const auto [begin, end] = range_of(i, rank);
        const at::Tensor part = place.select(0, rank);
        put(part.narrow(0, 0, end - begin), gradient.narrow(0, begin, end - begin));
        part.narrow(0, end - begin, counts_[i] - (end - begin)).zero_();
      }
    }
    return reduce_scatter(whole);
  }

 private:
  // Of parameter `i`, in elements.
  std::pair<int64_t, int64_t> range_of(size_t i, int rank) const {
    const int64_t numel = parameters_[i].numel;
    return {std::min(rank * counts_[i], numel), std::min((rank + 1) * counts_[i], numel)};
  }

  std::vector<FlatTensor> parameters_;
  std::vector<int64_t> offsets_, counts_;  // of each parameter in a shard
  int64_t shard_numel_ = 0;
};

struct Bucket {
  bool in_layer = false;
  std::vector<FlatTensor> parameters;
};

std::vector<Bucket> buckets_of_base_model() {
  cohort::nmt::TransformerOptions sizes;
  sizes.dim_vocab_source = sizes.dim_vocab_target = 32000;
  cohort::nmt::Transformer model(sizes, cohort::nmt::Precision::kFloat32, at::kMeta);
  std::vector<Bucket> buckets;
  for (const auto& unit : cohort::parallel::divide_into_units(*model, model->layers(), {})) {
    for (const auto& parameters : unit.buckets) {
      buckets.push_back({.in_layer = unit.module != model.get(), .parameters = {}});
      for (const auto& [name, tensor, sparse] : parameters)
        buckets.back().parameters.push_back(
            {.name = name, .shape = tensor.sizes().vec(), .numel = tensor.numel()});
    }
  }
  return buckets;
}

// One layout of the whole model, with this rank's shard of every bucket.
struct Side {
  struct Part {
    std::unique_ptr<Layout> layout;
    at::Tensor shard, momentum;
  };
  std::vector<Part> parts;

  template <class Kind>
  static Side make(const std::vector<Bucket>& buckets, const ProcessGroup& group) {
    Side side;
    for (const Bucket& bucket : buckets) {
      auto layout = std::make_unique<Kind>(bucket.parameters, group);
      const at::Tensor shard = at::zeros({layout->shard_numel()});
      side.parts.push_back({std::move(layout), shard, at::zeros_like(shard)});
    }
    return side;
  }
};

// Values that tell elements of a parameter and ranks apart, exact in float32.
at::Tensor values_of(const FlatTensor& parameter, int rank) {
  return at::arange(parameter.numel, at::kFloat).fmod(8191).add(rank).view(parameter.shape);
}

// Fills the shards and checks that both directions give what one process has.
void fill_and_check(Side& side, const std::vector<Bucket>& buckets, const ProcessGroup& group) {
  for (size_t b = 0; b < buckets.size(); ++b) {
    auto& [layout, shard, momentum] = side.parts[b];
    const auto& parameters = buckets[b].parameters;
    Tensors gradients;
    for (const FlatTensor& each : parameters) gradients.push_back(values_of(each, group.rank()));
    const at::Tensor mean = layout->reduce(gradients);
    const double of_ranks = (group.size() - 1) / 2.0;
    for (const FlatSlice& slice : layout->slices()) {
      const int64_t count = slice.end - slice.begin;
      const at::Tensor plain =
          values_of(parameters[slice.tensor], 0).view({-1}).narrow(0, slice.begin, count);
      shard.narrow(0, slice.offset, count).copy_(plain);
      TORCH_CHECK(at::allclose(mean.narrow(0, slice.offset, count), plain.add(of_ranks), 1e-5),
                  parameters[slice.tensor].name, ": a wrong mean");
    }
    const Tensors whole = layout->gather(shard);
    for (size_t i = 0; i < whole.size(); ++i)
      TORCH_CHECK(whole[i].equal(values_of(parameters[i], 0)), parameters[i].name,
                  ": gathered wrongly");
  }
}

void gather_all(Side& side) {
  for (auto& part : side.parts) part.layout->gather(part.shard);
}

void reduce_all(Side& side, const std::vector<Tensors>& gradients) {
  for (size_t b = 0; b < gradients.size(); ++b) side.parts[b].layout->reduce(gradients[b]);
}

// A step of Muon that gathers a layer's momentum as its parameters are gathered; the shards stand
// for the gradients, too.
void muon_by_bucket(Side& side, const std::vector<Bucket>& buckets, int num_iterations) {
  const at::NoGradGuard no_grad;
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (!buckets[b].in_layer) continue;
    auto& [layout, shard, momentum] = side.parts[b];
    momentum.lerp_(shard, 0.05);
    const Tensors whole = layout->gather(shard.lerp(momentum, 0.95));
    std::map<size_t, at::Tensor> updates;
    for (size_t i = 0; i < whole.size(); ++i)
      if (whole[i].dim() == 2)
        updates[i] = cohort::parallel::orthogonalize(whole[i], num_iterations).reshape({-1});
    for (const FlatSlice& slice : layout->slices()) {
      const int64_t count = slice.end - slice.begin;
      if (updates.contains(slice.tensor))
        shard.narrow(0, slice.offset, count)
            .sub_(updates[slice.tensor].narrow(0, slice.begin, count), 1e-9);
    }
  }
}

// This rank's slices of the layers' matrices, for parallel::Muon.
std::vector<cohort::parallel::LocalShard> matrices_of(Side& side,
                                                      const std::vector<Bucket>& buckets) {
  std::vector<cohort::parallel::LocalShard> shards;
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (!buckets[b].in_layer) continue;
    for (const FlatSlice& slice : side.parts[b].layout->slices()) {
      const FlatTensor& parameter = buckets[b].parameters[slice.tensor];
      if (parameter.shape.size() != 2) continue;
      at::Tensor tensor = at::randn({slice.end - slice.begin}).set_requires_grad(true);
      tensor.mutable_grad() = at::randn_like(tensor.detach());
      shards.push_back({parameter.name, parameter.shape, slice.begin, slice.end, tensor});
    }
  }
  return shards;
}

nlohmann::ordered_json spread(const std::vector<double>& values) {
  return {{"median", cohort::bench::median_of(values)},
          {"least", *std::ranges::min_element(values)},
          {"most", *std::ranges::max_element(values)},
          {"each", values}};
}

// Seconds of `body` on the slowest rank.
double slowest(const ProcessGroup& group, const std::function<void()>& body) {
  group.barrier("turn");
  const auto start = Clock::now();
  body();
  at::Tensor seconds = at::tensor({seconds_since(start)}, at::kDouble);
  return group.all_reduce(seconds, cohort::comm::ReduceOp::kMax).item<double>();
}

int run(const Options& options) {
  at::set_num_threads(1);
  ProcessGroup group(cohort::comm::rank_info_from_environment(), {.backend = "gloo"});
  const std::vector<Bucket> buckets = buckets_of_base_model();
  std::map<std::string, Side> sides;
  sides["flat"] = Side::make<Flat>(buckets, group);
  sides["by_rows"] = Side::make<ByRows>(buckets, group);
  std::vector<Tensors> gradients;
  int64_t numel = 0;
  for (const Bucket& bucket : buckets) {
    gradients.emplace_back();
    for (const FlatTensor& each : bucket.parameters) {
      gradients.back().push_back(at::ones(each.shape));
      numel += each.numel;
    }
  }

  nlohmann::ordered_json line = {
      {"bench", "sharding_layout"}, {"ranks", group.size()}, {"params", numel}};
  // What each side does in a round, and its seconds by round.
  std::map<std::string, std::map<std::string, std::vector<double>>> seconds;
  std::map<std::string, std::function<void(Side&)>> turns;
  turns["gather"] = [](Side& side) { gather_all(side); };
  turns["reduce_scatter"] = [&](Side& side) { reduce_all(side, gradients); };
  turns["muon_by_bucket"] = [&](Side& side) {
    muon_by_bucket(side, buckets, options.muon_iterations);
  };
  std::map<std::string, std::unique_ptr<cohort::parallel::Muon>> muons;
  for (auto& [name, side] : sides) {
    fill_and_check(side, buckets, group);
    muons[name] = std::make_unique<cohort::parallel::Muon>(
        matrices_of(side, buckets), group,
        cohort::parallel::MuonOptions{.num_iterations = options.muon_iterations});
    int64_t padded = 0;
    for (const auto& part : side.parts) padded += part.layout->shard_numel() * group.size();
    line[name]["padding_bytes"] = 4 * (padded - numel);
    for (const auto& what : {"gather", "reduce_scatter"}) {
      const int64_t before = cohort::bench::tcp_bytes_sent();
      const int64_t peak = cohort::translate::peak_tensor_bytes([&] { turns[what](side); });
      line[name][what] = {{"bytes_sent", cohort::bench::tcp_bytes_sent() - before},
                          {"peak_buffer_bytes", peak}};
    }
  }
  for (int64_t round = 0; round < options.rounds; ++round) {
    for (size_t turn = 0; turn < 2; ++turn) {
      const std::string name = (round + turn) % 2 == 0 ? "flat" : "by_rows";
      Side& side = sides[name];
      for (const auto& [what, body] : turns) {
        for (auto& part : side.parts) part.layout->collective_s = 0;
        seconds[name][what].push_back(slowest(group, [&] { body(side); }));
        double collective = 0;
        for (const auto& part : side.parts) collective += part.layout->collective_s;
        seconds[name][what + " collectives"].push_back(collective);
      }
      seconds[name]["muon"].push_back(slowest(group, [&] { muons[name]->step(1e-9); }));
    }
  }
  for (const auto& [name, by_turn] : seconds) {
    for (const auto& [what, each] : by_turn) {
      const auto space = what.find(' ');
      const bool inside = space != std::string::npos;
      line[name][what.substr(0, space)][inside ? "collectives_s" : "s"] = spread(each);
    }
  }
  group.close();
  if (group.rank() == 0) std::printf("%s\n", line.dump().c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return cohort::run_program("sharding_layout", [&] {
    CLI::App app("Flat shards beside shards by rows, of the base translator's parameters");
    Options options;
    app.add_option("--rounds", options.rounds, "Turns of each side")
        ->capture_default_str()
        ->check(cohort::cli::above_zero());
    app.add_option("--muon-iterations", options.muon_iterations,
                   "Of Newton and Schulz; 0: what a step sends and copies alone")
        ->capture_default_str();
    if (const auto ended = cohort::cli::parse(app, argc, argv)) return *ended;
    return run(options);
  });
}
