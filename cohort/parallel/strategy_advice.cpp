// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/strategy_advice.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "cohort/base/error.h"

namespace cohort::parallel {
namespace {

// Bytes a parameter: a part that every rank has, and a part that is sharded among `among` ranks.
struct Formula {
  const char* strategy;
  double whole;
  double shared;
  int among;
  double sent;   // In units of the parameters' bytes.
  double units;  // At most beside it: gathered, and those whose gradients are reduced.
};

std::string number(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.4g", value);
  return text.data();
}

void check(const AdviceRequest& request) {
  const auto require = [](bool holds, const std::string& expected) {
    if (!holds) throw ConfigError("advice on strategies: expected " + expected);
  };
  require(request.parameters > 0, "parameters, got " + std::to_string(request.parameters));
  require(request.largest_unit >= 0 && request.largest_unit <= request.parameters,
          "a unit of the model, got " + std::to_string(request.largest_unit) + " parameters");
  require(request.local_world_size > 0 && request.world_size > 0 &&
              request.world_size % request.local_world_size == 0,
          "as many ranks on each host, got " + std::to_string(request.world_size) +
              " ranks, a host's " + std::to_string(request.local_world_size));
  require(request.host_memory_bytes > 0,
          "memory, got " + std::to_string(request.host_memory_bytes));
}

// The share of a buffer that is another rank's.
double others(int ranks) {
  return static_cast<double>(ranks - 1) / ranks;
}

// The share of a buffer that ranks send to one that has its own part and sums the rest.
double others_to_sum(int ranks) {
  return static_cast<double>(std::max(0, ranks - 2)) / ranks;
}

double rank_memory(const AdviceRequest& request) {
  return static_cast<double>(request.host_memory_bytes) / request.local_world_size;
}

// Beside what the formulas count: units that are gathered and those whose gradients are reduced, or
// the whole model when there are no gradients.
double in_flight(const Formula& formula, const AdviceRequest& request) {
  const double units = 4.0 * formula.units * static_cast<double>(request.largest_unit);
  const double whole = 4.0 * static_cast<double>(request.parameters) * others(formula.among);
  return request.gathers_whole && formula.whole == 0 ? std::max(units, whole) : units;
}

StrategyFit fit(const Formula& formula, const AdviceRequest& request) {
  const auto parameters = static_cast<double>(request.parameters);
  const double each = formula.whole + formula.shared / formula.among;
  // Under ddp one of the host's ranks has all copies, else each has those of its share.
  const double saved =
      request.saved_bytes / (formula.shared == 0 ? request.local_world_size : formula.among);
  const double beside = in_flight(formula, request);
  StrategyFit result{.strategy = formula.strategy,
                     .bytes = (each + saved) * parameters + beside,
                     .sent = formula.sent};
  result.fits = result.bytes <= kShareAtRest * rank_memory(request);
  result.reason =
      number(each) + " bytes a parameter" +
      (saved > 0 ? ", " + number(saved) + " more in copies to be saved" : "") +
      (beside > 0 ? " and " + readable_bytes(beside) + " in units that are gathered or reduced"
                  : "") +
      ": " + readable_bytes(result.bytes) + (result.fits ? " of " : ", more than ") +
      readable_bytes(kShareAtRest * rank_memory(request)) + "; sends " + number(result.sent) +
      " times the parameters a step";
  return result;
}

Formula zero3_on(int ranks) {
  return {"zero3", 0, 16, ranks, 3 * others(ranks), 4 + others_to_sum(ranks)};
}

// Ranks, as many on each host, with which zero3 fits; nothing if no number does.
std::optional<int> ranks_for_zero3(const AdviceRequest& request) {
  constexpr int kMost = 1 << 20;
  for (int ranks = request.local_world_size; ranks <= kMost; ranks += request.local_world_size)
    if (fit(zero3_on(ranks), request).fits) return ranks;
  return {};
}

std::string why(const std::string& strategy) {
  if (strategy == "ddp") return "the whole training state fits on every rank: nothing is simpler";
  if (strategy == "zero1") return "the optimizer's state must be sharded; that costs no traffic";
  if (strategy == "zero2") return "gradients must be sharded, too; that costs no traffic";
  if (strategy == "hybrid")
    return "parameters must be sharded; within each host they need not cross the network";
  return "parameters must be sharded, too, for half as much traffic again";
}

// Without advice on what would fit where nothing does.
StrategyAdvice advise_without_remedy(const AdviceRequest& request) {
  const int ranks = request.world_size, local = request.local_world_size;
  std::vector<Formula> formulas = {
      {"ddp", 16, 0, 1, 2 * others(ranks), 0},
      {"zero1", 8, 8, ranks, 2 * others(ranks), 1 + 2 * others_to_sum(ranks)},
      {"zero2", 4, 12, ranks, 2 * others(ranks), 3 + 2 * others_to_sum(ranks)},
      zero3_on(ranks)};
  if (ranks > local && local > 1) {
    const double across = 2 * others(ranks / local) / local;
    formulas.push_back(
        {"hybrid", 0, 16, local, 3 * others(local) + across, 4 + others_to_sum(local)});
  }
  StrategyAdvice advice;
  for (const Formula& formula : formulas) advice.strategies.push_back(fit(formula, request));
  for (const char* strategy : {"ddp", "zero1", "zero2", "hybrid", "zero3"}) {
    const auto found = std::ranges::find(advice.strategies, strategy, &StrategyFit::strategy);
    if (found == advice.strategies.end() || !found->fits) continue;
    advice.chosen = strategy;
    advice.reason = why(strategy);
    break;
  }
  return advice;
}

// The request of one of `count` tensor-parallel ranks.
AdviceRequest partitioned(const AdviceRequest& request, int count) {
  AdviceRequest part = request;
  part.parameters = (request.parameters + count - 1) / count;
  part.largest_unit = (request.largest_unit + count - 1) / count;
  part.world_size /= count;
  part.local_world_size /= count;
  part.host_memory_bytes /= count;
  return part;
}

// Hybrid is left out: ZeRO-3 fits wherever it does.
std::optional<std::string> first_that_fits_partitioned(const AdviceRequest& request) {
  for (const StrategyFit& each : advise_without_remedy(request).strategies)
    if (each.fits && each.strategy != "hybrid") return each.strategy;
  return {};
}

}  // namespace

StrategyAdvice advise(const AdviceRequest& request) {
  check(request);
  const int ranks = request.world_size, local = request.local_world_size;
  StrategyAdvice advice = advise_without_remedy(request);
  if (advice.chosen) return advice;
  for (int count = 2; count <= local; ++count) {
    if (local % count != 0) continue;
    advice.chosen = first_that_fits_partitioned(partitioned(request, count));
    if (!advice.chosen) continue;
    advice.tensor_parallel = count;
    advice.reason = "no strategy fits alone: " + std::to_string(count) +
                    " ranks of a host must compute one model, each with its part of every layer; "
                    "that many must divide the attention's heads and the inner columns";
    return advice;
  }
  const auto enough = ranks_for_zero3(request);
  advice.reason =
      "none fits on " + std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks") +
      (enough
           ? ": zero3 does on " + std::to_string(*enough) + ", " + std::to_string(local) + " a host"
           : ", nor on more: gathered units and their gradients take " +
                 readable_bytes(in_flight(zero3_on(1 << 20), request)) + " of a rank");
  return advice;
}

std::optional<int64_t> parse_parameter_count(const std::string& text) {
  char* end = nullptr;
  if (text.empty() || text.find_first_not_of("0123456789.kKmMbB") != std::string::npos) return {};
  double count = std::strtod(text.c_str(), &end);
  const std::string suffix = end;
  if (suffix == "k" || suffix == "K") {
    count *= 1e3;
  } else if (suffix == "m" || suffix == "M") {
    count *= 1e6;
  } else if (suffix == "b" || suffix == "B") {
    count *= 1e9;
  } else if (!suffix.empty()) {
    return {};
  }
  if (!(count >= 1 && count < 1e15)) return {};
  return std::llround(count);
}

std::string readable_bytes(double bytes) {
  std::array<char, 32> text{};
  if (bytes >= 1 << 30) {
    std::snprintf(text.data(), text.size(), "%.2f GiB", bytes / (1 << 30));
  } else {
    std::snprintf(text.data(), text.size(), "%.1f MiB", bytes / (1 << 20));
  }
  return text.data();
}

}  // namespace cohort::parallel
