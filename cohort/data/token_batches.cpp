#include "cohort/data/token_batches.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <tuple>

#include "cohort/base/error.h"
#include "cohort/data/random.h"

namespace cohort::data {
namespace {

using Batch = std::vector<int64_t>;
using Lengths = std::span<const PairLength>;

void require(bool holds, const std::string& expected, int64_t found) {
  if (!holds) {
    throw ConfigError("batch plan: expected " + expected + ", found " + std::to_string(found));
  }
}

void check_ranks(int rank, int world_size) {
  require(world_size > 0, "world_size > 0", world_size);
  require(rank >= 0 && rank < world_size, "rank in [0, " + std::to_string(world_size) + ")", rank);
}

void check_lengths(Lengths lengths) {
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto [source, target] = lengths[i];
    require(source >= 0 && target >= 0, "lengths >= 0 for sentence " + std::to_string(i),
            std::min(source, target));
  }
}

const PairLength& length_of(Lengths lengths, int64_t sentence) {
  return lengths[static_cast<size_t>(sentence)];
}

int64_t width_of(const PairLength& length) {
  return std::max<int64_t>({1, length.source, length.target});
}

// Orders by (target, source) length, equals by number, so the result is one and the same.
bool shorter(Lengths lengths, int64_t a, int64_t b) {
  const auto& la = length_of(lengths, a);
  const auto& lb = length_of(lengths, b);
  return std::tie(la.target, la.source, a) < std::tie(lb.target, lb.source, b);
}

// Returns where the window that begins at `begin` ends: maxi_batch batches' worth of sentences.
size_t window_end(Lengths lengths, const Batch& order, size_t begin, const BatchOptions& options) {
  int64_t batches = 0;
  size_t end = begin;
  while (batches < options.maxi_batch && end < order.size()) {
    int64_t rows = 0;
    int64_t tokens = 0;
    while (end < order.size()) {
      tokens += width_of(length_of(lengths, order[end]));
      ++rows;
      ++end;
      if ((options.mini_batch > 0 && rows >= options.mini_batch) ||
          (options.mini_batch_words > 0 && tokens >= options.mini_batch_words)) {
        break;
      }
    }
    ++batches;
  }
  return end;
}

void sort_windows(Lengths lengths, Batch& order, const BatchOptions& options) {
  bool upwards = true;
  for (size_t begin = 0; begin < order.size(); upwards = !upwards) {
    const size_t end = window_end(lengths, order, begin, options);
    std::sort(order.begin() + static_cast<ptrdiff_t>(begin),
              order.begin() + static_cast<ptrdiff_t>(end), [&](int64_t a, int64_t b) {
                return upwards ? shorter(lengths, a, b) : shorter(lengths, b, a);
              });
    begin = end;
  }
}

std::vector<Batch> cut(Lengths lengths, const Batch& order, int64_t max_rows, int64_t max_words) {
  std::vector<Batch> batches;
  int64_t width = 0;
  for (int64_t sentence : order) {
    const int64_t own = width_of(length_of(lengths, sentence));
    const int64_t rows = batches.empty() ? 0 : static_cast<int64_t>(batches.back().size());
    width = std::max(width, own);
    if (batches.empty() || (max_rows > 0 && rows >= max_rows) ||
        (max_words > 0 && (rows + 1) * width > max_words)) {
      batches.emplace_back();
      width = own;
    }
    batches.back().push_back(sentence);
  }
  return batches;
}

// Makes the number of batches a multiple of `group` by halving those of the last group, the one
// with most rows first, or removes them if they have too few sentences. Returns how many it lost.
int64_t complete_last_group(std::vector<Batch>& batches, size_t group) {
  size_t missing = (group - batches.size() % group) % group;
  if (missing == 0) return 0;
  const auto begin = batches.end() - static_cast<ptrdiff_t>(group - missing);
  const size_t sentences = std::accumulate(
      begin, batches.end(), size_t{0}, [](size_t sum, const Batch& b) { return sum + b.size(); });
  if (sentences < group) {
    batches.erase(begin, batches.end());
    return static_cast<int64_t>(sentences);
  }
  const size_t first = batches.size() - (group - missing);
  for (; missing > 0; --missing) {
    const auto widest =
        std::max_element(batches.begin() + static_cast<ptrdiff_t>(first), batches.end(),
                         [](const Batch& a, const Batch& b) { return a.size() < b.size(); });
    const auto half = widest->begin() + static_cast<ptrdiff_t>(widest->size() / 2);
    Batch upper(half, widest->end());
    widest->erase(half, widest->end());
    batches.insert(widest + 1, std::move(upper));
  }
  return 0;
}

void count(Lengths lengths, const std::vector<Batch>& batches, BatchPlan& plan) {
  int64_t padded = 0;
  for (const Batch& batch : batches) {
    int64_t longest_source = 0;
    int64_t longest_target = 0;
    for (int64_t sentence : batch) {
      const auto [source, target] = length_of(lengths, sentence);
      plan.source_tokens += source;
      plan.target_tokens += target;
      longest_source = std::max<int64_t>(longest_source, source);
      longest_target = std::max<int64_t>(longest_target, target);
    }
    padded += static_cast<int64_t>(batch.size()) * (longest_source + longest_target);
    plan.num_sentences += static_cast<int64_t>(batch.size());
  }
  const int64_t tokens = plan.source_tokens + plan.target_tokens;
  if (padded > 0) {
    plan.padding_share = static_cast<double>(padded - tokens) / static_cast<double>(padded);
  }
}

void check(Lengths lengths, const BatchOptions& options, int64_t epoch) {
  check_ranks(options.rank, options.world_size);
  require(options.mini_batch >= 0, "mini_batch >= 0", options.mini_batch);
  require(options.mini_batch_words >= 0, "mini_batch_words >= 0", options.mini_batch_words);
  require(options.mini_batch + options.mini_batch_words > 0, "mini_batch or mini_batch_words > 0",
          0);
  require(options.maxi_batch > 0, "maxi_batch > 0", options.maxi_batch);
  require(epoch >= 0, "epoch >= 0", epoch);
  require(lengths.size() >= static_cast<size_t>(options.world_size),
          "at least " + std::to_string(options.world_size) + " sentences, one for each rank",
          static_cast<int64_t>(lengths.size()));
  check_lengths(lengths);
}

// The batches of all ranks for `sentences`: those of step s at s * world_size, by rank.
struct AllBatches {
  std::vector<Batch> batches;
  int64_t num_dropped = 0;
};

AllBatches plan_all(Lengths lengths, Batch sentences, const BatchOptions& options, int64_t epoch) {
  const auto world_size = static_cast<size_t>(options.world_size);
  if (sentences.size() < world_size) return {{}, std::ssize(sentences)};
  SplitMix64 random(options.seed, static_cast<uint64_t>(epoch));
  if (options.shuffle) shuffle(std::span(sentences), random);
  sort_windows(lengths, sentences, options);
  auto sorted = cut(lengths, sentences, options.mini_batch, options.mini_batch_words);
  AllBatches plan;
  plan.num_dropped = complete_last_group(sorted, world_size);
  std::vector<size_t> steps(sorted.size() / world_size);
  std::iota(steps.begin(), steps.end(), size_t{0});
  if (options.shuffle) shuffle(std::span(steps), random);
  for (const size_t step : steps) {
    for (size_t rank = 0; rank < world_size; ++rank)
      plan.batches.push_back(std::move(sorted[step * world_size + rank]));
  }
  return plan;
}

BatchPlan of_rank(Lengths lengths, AllBatches all, const BatchOptions& options) {
  BatchPlan plan;
  plan.num_dropped = all.num_dropped;
  count(lengths, all.batches, plan);
  for (size_t i = static_cast<size_t>(options.rank); i < all.batches.size();
       i += static_cast<size_t>(options.world_size)) {
    plan.batches.push_back(std::move(all.batches[i]));
  }
  return plan;
}

}  // namespace

bool same_plan(const BatchOptions& a, const BatchOptions& b) {
  BatchOptions of_same_rank = a;
  of_same_rank.rank = b.rank;
  return of_same_rank == b;
}

BatchPlan plan_batches(Lengths lengths, const BatchOptions& options, int64_t epoch) {
  return plan_rest(lengths, options, epoch, {});
}

BatchPlan plan_rest(Lengths lengths, const BatchOptions& options, int64_t epoch,
                    std::span<const EpochPart> done) {
  check(lengths, options, epoch);
  Batch sentences(lengths.size());
  std::iota(sentences.begin(), sentences.end(), 0);
  for (const EpochPart& part : done) {
    check(lengths, part.options, epoch);
    AllBatches all = plan_all(lengths, sentences, part.options, epoch);
    const auto taken = part.num_batches * part.options.world_size;
    require(part.num_batches >= 0 && taken <= std::ssize(all.batches),
            "at most " + std::to_string(std::ssize(all.batches) / part.options.world_size) +
                " batches of epoch " + std::to_string(epoch) + " done",
            part.num_batches);
    const auto rest = all.batches.begin() + taken;
    if (&part == &done.back() && same_plan(part.options, options)) {
      all.batches.erase(all.batches.begin(), rest);
      return of_rank(lengths, std::move(all), options);
    }
    std::vector<bool> trained(lengths.size());
    for (auto batch = all.batches.begin(); batch != rest; ++batch) {
      for (const int64_t sentence : *batch) trained[static_cast<size_t>(sentence)] = true;
    }
    std::erase_if(sentences,
                  [&](int64_t sentence) { return trained[static_cast<size_t>(sentence)]; });
  }
  return of_rank(lengths, plan_all(lengths, std::move(sentences), options, epoch), options);
}

BatchPlan plan_eval_batches(Lengths lengths, int64_t mini_batch_words, int rank, int world_size) {
  check_ranks(rank, world_size);
  require(mini_batch_words > 0, "mini_batch_words > 0", mini_batch_words);
  check_lengths(lengths);
  Batch order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return shorter(lengths, b, a); });
  auto batches = cut(lengths, order, 0, mini_batch_words);
  BatchPlan plan;
  count(lengths, batches, plan);
  for (size_t i = static_cast<size_t>(rank); i < batches.size();
       i += static_cast<size_t>(world_size)) {
    plan.batches.push_back(std::move(batches[i]));
  }
  return plan;
}

}  // namespace cohort::data
