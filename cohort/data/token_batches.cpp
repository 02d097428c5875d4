// SPDX-License-Identifier: Apache-2.0
#include "cohort/data/token_batches.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>

#include "cohort/base/error.h"
#include "cohort/data/random.h"

namespace cohort::data {
namespace {

using Order = std::vector<int32_t>;
using Lengths = std::span<const PairLength>;
using Range = Batches::Range;

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
  require(lengths.size() <= INT32_MAX, "at most 2147483647 sentences", std::ssize(lengths));
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto [source, target] = lengths[i];
    require(source >= 0 && target >= 0, "lengths >= 0 for sentence " + std::to_string(i),
            std::min(source, target));
  }
}

const PairLength& length_of(Lengths lengths, int32_t sentence) {
  return lengths[static_cast<size_t>(sentence)];
}

int64_t width_of(const PairLength& length) {
  return std::max<int64_t>({1, length.source, length.target});
}

// Orders by target length, then by source length, ascending and descending in turn, so that sources
// are also alike where the target's length changes. Equals keep their order: where a
// window is the whole corpus, an epoch's shuffle still decides which sentences share a batch.
void sort_by_length(Lengths lengths, std::span<int32_t> sentences, bool upwards) {
  struct Item {
    uint64_t length;
    uint32_t place;
    int32_t sentence;
    auto operator<=>(const Item&) const = default;
  };
  std::vector<Item> items(sentences.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const auto [source, target] = length_of(lengths, sentences[i]);
    const auto by_turns = static_cast<uint32_t>(target % 2 == 0 ? source : INT32_MAX - source);
    items[i] = {static_cast<uint64_t>(target) << 32 | by_turns, static_cast<uint32_t>(i),
                sentences[i]};
  }
  if (upwards) {
    std::sort(items.begin(), items.end());
  } else {
    std::sort(items.begin(), items.end(), std::greater<>());
  }
  for (size_t i = 0; i < items.size(); ++i) sentences[i] = items[i].sentence;
}

// Which batches may be.
struct Limits {
  int64_t rows = 0;          // 0: any number
  int64_t target_words = 0;  // rows x longest target; 0: any number
  int64_t words = 0;         // rows x longest side; 0: any number
  std::span<const int64_t> fit_rows{};

  int64_t fit_of(int64_t width) const {
    return fit_rows[static_cast<size_t>((width - 1) / kFitStep)];
  }
  // Whether `count` sentences, the longest of which have these lengths, are too many.
  bool exceeded_by(int64_t count, int64_t width, int64_t target) const {
    return (rows > 0 && count > rows) || (target_words > 0 && count * target > target_words) ||
           (words > 0 && count * width > words) || (!fit_rows.empty() && count > fit_of(width));
  }
  // The share of a full batch that a sentence takes, as if all others were like it.
  double share_of(const PairLength& length) const {
    double share = rows > 0 ? 1.0 / static_cast<double>(rows) : 0;
    if (target_words > 0)
      share = std::max(share, static_cast<double>(std::max(1, length.target)) /
                                  static_cast<double>(target_words));
    if (!fit_rows.empty())
      share = std::max(share, 1.0 / static_cast<double>(fit_of(width_of(length))));
    return share;
  }
};

Limits limits_of(const BatchOptions& options) {
  return {.rows = options.mini_batch,
          .target_words = options.mini_batch_words,
          .fit_rows = options.fit_rows};
}

// Returns where the window that begins at `begin` ends: maxi_batch batches' worth of sentences.
size_t window_end(Lengths lengths, const Order& order, size_t begin, const BatchOptions& options) {
  const Limits limits = limits_of(options);
  size_t end = begin;
  for (int64_t batches = 0; batches < options.maxi_batch && end < order.size(); ++batches) {
    // Rounding must not make a sixth of six.
    for (double filled = 0; filled < 1 - 1e-9 && end < order.size(); ++end)
      filled += limits.share_of(length_of(lengths, order[end]));
  }
  return end;
}

void sort_windows(Lengths lengths, Order& order, const BatchOptions& options) {
  bool upwards = true;
  for (size_t begin = 0; begin < order.size(); upwards = !upwards) {
    const size_t end = window_end(lengths, order, begin, options);
    sort_by_length(lengths, std::span(order).subspan(begin, end - begin), upwards);
    begin = end;
  }
}

std::vector<Range> cut(Lengths lengths, const Order& order, const Limits& limits) {
  std::vector<Range> batches;
  int64_t width = 0;
  int64_t target = 0;
  for (int64_t i = 0; i < std::ssize(order); ++i) {
    const PairLength& own = length_of(lengths, order[static_cast<size_t>(i)]);
    width = std::max(width, width_of(own));
    target = std::max<int64_t>(target, own.target);
    if (batches.empty() || limits.exceeded_by(i + 1 - batches.back().first, width, target)) {
      batches.emplace_back(i, i);
      width = width_of(own);
      target = own.target;
    }
    batches.back().second = i + 1;
  }
  return batches;
}

int64_t size_of(const Range& batch) {
  return batch.second - batch.first;
}

// Makes the number of batches a multiple of `group` by halving those of the last group, the one
// with most rows first, or removes them if they have too few sentences. Returns the number removed.
int64_t complete_last_group(std::vector<Range>& batches, size_t group) {
  size_t missing = (group - batches.size() % group) % group;
  if (missing == 0) return 0;
  const auto begin = batches.end() - static_cast<ptrdiff_t>(group - missing);
  const int64_t sentences = batches.back().second - begin->first;
  if (sentences < static_cast<int64_t>(group)) {
    batches.erase(begin, batches.end());
    return sentences;
  }
  const size_t first = batches.size() - (group - missing);
  for (; missing > 0; --missing) {
    const auto widest =
        std::max_element(batches.begin() + static_cast<ptrdiff_t>(first), batches.end(),
                         [](const Range& a, const Range& b) { return size_of(a) < size_of(b); });
    const Range upper{widest->first + size_of(*widest) / 2, widest->second};
    widest->second = upper.first;
    batches.insert(widest + 1, upper);
  }
  return 0;
}

void count(Lengths lengths, const Order& order, const std::vector<Range>& batches, int world_size,
           BatchPlan& plan) {
  int64_t padded = 0;
  const auto ranks = static_cast<size_t>(world_size);
  plan.step_target_tokens.assign((batches.size() + ranks - 1) / ranks, 0);
  for (size_t number = 0; number < batches.size(); ++number) {
    const Range& batch = batches[number];
    const int64_t tokens_before = plan.target_tokens;
    int64_t longest_source = 0;
    int64_t longest_target = 0;
    for (int64_t i = batch.first; i < batch.second; ++i) {
      const auto [source, target] = length_of(lengths, order[static_cast<size_t>(i)]);
      plan.source_tokens += source;
      plan.target_tokens += target;
      longest_source = std::max<int64_t>(longest_source, source);
      longest_target = std::max<int64_t>(longest_target, target);
    }
    plan.step_target_tokens[number / ranks] += plan.target_tokens - tokens_before;
    padded += size_of(batch) * (longest_source + longest_target);
    plan.num_sentences += size_of(batch);
  }
  const int64_t tokens = plan.source_tokens + plan.target_tokens;
  if (padded > 0) {
    plan.padding_share = static_cast<double>(padded - tokens) / static_cast<double>(padded);
  }
}

// Orders batches by what they cost to compute, padding included: ranks of a step get neighbours.
void sort_by_cost(Lengths lengths, const Order& order, std::vector<Range>& batches) {
  struct Item {
    int64_t cost;
    Range batch;
    auto operator<=>(const Item&) const = default;
  };
  std::vector<Item> items;
  items.reserve(batches.size());
  for (const Range& batch : batches) {
    int64_t source = 0;
    int64_t target = 0;
    for (int64_t i = batch.first; i < batch.second; ++i) {
      const PairLength& own = length_of(lengths, order[static_cast<size_t>(i)]);
      source = std::max<int64_t>(source, own.source);
      target = std::max<int64_t>(target, own.target);
    }
    items.push_back({size_of(batch) * (source + target), batch});
  }
  std::sort(items.begin(), items.end());
  for (size_t i = 0; i < items.size(); ++i) batches[i] = items[i].batch;
}

void check_fit(Lengths lengths, const std::vector<int64_t>& fit_rows) {
  if (fit_rows.empty()) return;
  for (size_t i = 0; i < fit_rows.size(); ++i) {
    require(fit_rows[i] >= 1 && (i == 0 || fit_rows[i] <= fit_rows[i - 1]),
            "fit_rows of 1 or more that never rise", fit_rows[i]);
  }
  const int64_t covered = std::ssize(fit_rows) * kFitStep;
  for (const PairLength& length : lengths) {
    require(width_of(length) <= covered,
            "sentences of at most " + std::to_string(covered) + " tokens, for which fit_rows are",
            width_of(length));
  }
}

int64_t batches_per_update(const BatchOptions& options) {
  return options.world_size * options.optimizer_delay;
}

void check(Lengths lengths, const BatchOptions& options, int64_t epoch) {
  check_ranks(options.rank, options.world_size);
  require(options.mini_batch >= 0, "mini_batch >= 0", options.mini_batch);
  require(options.mini_batch_words >= 0, "mini_batch_words >= 0", options.mini_batch_words);
  require(options.mini_batch > 0 || options.mini_batch_words > 0 || !options.fit_rows.empty(),
          "mini_batch or mini_batch_words > 0, or fit_rows", 0);
  require(options.maxi_batch > 0, "maxi_batch > 0", options.maxi_batch);
  require(epoch >= 0, "epoch >= 0", epoch);
  require(options.optimizer_delay > 0, "optimizer_delay > 0", options.optimizer_delay);
  require(std::ssize(lengths) >= batches_per_update(options),
          "at least " + std::to_string(batches_per_update(options)) +
              " sentences, one for each batch of an update",
          static_cast<int64_t>(lengths.size()));
  check_lengths(lengths);
  check_fit(lengths, options.fit_rows);
}

// The batches of all ranks, update by update; batch i is that of rank i % world_size.
struct AllBatches {
  Order order;
  std::vector<Range> batches;
  int64_t num_dropped = 0;
};

// Which group of `size` batches has the longest sentence; the last of several, the dearest.
size_t longest_group(Lengths lengths, const AllBatches& all, size_t size) {
  size_t longest = 0;
  int64_t width = 0;
  for (size_t i = 0; i < all.batches.size(); ++i) {
    for (int64_t k = all.batches[i].first; k < all.batches[i].second; ++k) {
      const int64_t own = width_of(length_of(lengths, all.order[static_cast<size_t>(k)]));
      if (own < width) continue;
      width = own;
      longest = i / size;
    }
  }
  return longest;
}

AllBatches plan_all(Lengths lengths, Order sentences, const BatchOptions& options, int64_t epoch) {
  const auto group = static_cast<size_t>(batches_per_update(options));
  if (sentences.size() < group) {
    const int64_t num_dropped = std::ssize(sentences);
    return {std::move(sentences), {}, num_dropped};
  }
  SplitMix64 random(options.seed, static_cast<uint64_t>(epoch));
  if (options.shuffle) shuffle(std::span(sentences), random);
  sort_windows(lengths, sentences, options);
  AllBatches sorted{std::move(sentences), {}, 0};
  sorted.batches = cut(lengths, sorted.order, limits_of(options));
  sorted.num_dropped = complete_last_group(sorted.batches, group);
  sort_by_cost(lengths, sorted.order, sorted.batches);
  if (!options.shuffle) return sorted;
  std::vector<size_t> updates(sorted.batches.size() / group);
  std::iota(updates.begin(), updates.end(), size_t{0});
  shuffle(std::span(updates), random);
  if (epoch == 0 && !updates.empty()) {
    const size_t dearest = updates.size() - 1;
    const size_t longest = longest_group(lengths, sorted, group);
    std::swap(updates[0], *std::ranges::find(updates, dearest));
    if (longest != dearest) std::swap(updates[1], *std::ranges::find(updates, longest));
  }
  std::vector<Range> batches;
  batches.reserve(sorted.batches.size());
  for (const size_t update : updates) {
    // No rank has the dearest of every update.
    for (size_t i = 0; i < group; ++i)
      batches.push_back(sorted.batches[update * group + (i + update) % group]);
  }
  sorted.batches = std::move(batches);
  return sorted;
}

BatchPlan of_rank(Lengths lengths, AllBatches all, int rank, int world_size) {
  BatchPlan plan;
  plan.num_dropped = all.num_dropped;
  count(lengths, all.order, all.batches, world_size, plan);
  std::vector<Range> own;
  own.reserve(all.batches.size() / static_cast<size_t>(world_size) + 1);
  for (size_t i = static_cast<size_t>(rank); i < all.batches.size();
       i += static_cast<size_t>(world_size)) {
    own.push_back(all.batches[i]);
  }
  plan.batches = Batches(std::move(all.order), std::move(own));
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
  Order sentences(lengths.size());
  std::iota(sentences.begin(), sentences.end(), 0);
  for (const EpochPart& part : done) {
    check(lengths, part.options, epoch);
    AllBatches all = plan_all(lengths, std::move(sentences), part.options, epoch);
    const auto taken = part.num_batches * part.options.world_size;
    require(part.num_batches >= 0 && taken <= std::ssize(all.batches),
            "at most " + std::to_string(std::ssize(all.batches) / part.options.world_size) +
                " batches of epoch " + std::to_string(epoch) + " done",
            part.num_batches);
    all.batches.erase(all.batches.begin(), all.batches.begin() + taken);
    if (&part == &done.back() && same_plan(part.options, options))
      return of_rank(lengths, std::move(all), options.rank, options.world_size);
    // What was not trained on yet, in the corpus's order, including what the part's plan left out.
    std::vector<bool> trained(lengths.size(), true);
    for (const auto& [begin, end] : all.batches) {
      for (int64_t i = begin; i < end; ++i)
        trained[static_cast<size_t>(all.order[static_cast<size_t>(i)])] = false;
    }
    for (int64_t i = std::ssize(all.order) - all.num_dropped; i < std::ssize(all.order); ++i)
      trained[static_cast<size_t>(all.order[static_cast<size_t>(i)])] = false;
    sentences.clear();
    for (size_t i = 0; i < lengths.size(); ++i) {
      if (!trained[i]) sentences.push_back(static_cast<int32_t>(i));
    }
  }
  return of_rank(lengths, plan_all(lengths, std::move(sentences), options, epoch), options.rank,
                 options.world_size);
}

BatchPlan plan_eval_batches(Lengths lengths, int64_t max_tokens, int rank, int world_size) {
  check_ranks(rank, world_size);
  require(max_tokens > 0, "max_tokens > 0", max_tokens);
  check_lengths(lengths);
  AllBatches all;
  all.order.resize(lengths.size());
  std::iota(all.order.begin(), all.order.end(), 0);
  sort_by_length(lengths, all.order, /*upwards=*/false);
  all.batches = cut(lengths, all.order, {.words = max_tokens});
  return of_rank(lengths, std::move(all), rank, world_size);
}

}  // namespace cohort::data
