// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/precision.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::translate {
namespace {

constexpr const char* kAuto = "auto: ";  // before a rank's own choice

}  // namespace

nmt::Precision agreed_precision(std::optional<nmt::Precision> own,
                                const comm::ProcessGroup& group) {
  const nmt::Precision precision = own ? *own : nmt::best_precision(group.device().is_cpu());
  const auto all =
      group.all_gather_object(std::string(own ? "" : kAuto) + nmt::to_string(precision));
  const auto is_auto = [](const std::string& one) { return one.starts_with(kAuto); };
  if (std::ranges::all_of(all, is_auto)) {
    std::vector<nmt::Precision> best;
    for (const std::string& one : all)
      best.push_back(nmt::parse_precision(one.substr(std::string_view(kAuto).size())));
    return common_precision(best);
  }
  const auto other = std::ranges::find_if(all, [&](const auto& one) { return one != all.front(); });
  if (other == all.end()) return precision;
  throw ConfigError("--precision: expected the same on all ranks, got " + all.front() +
                    " on rank 0 and " + *other + " on rank " + std::to_string(other - all.begin()));
}

nmt::Precision common_precision(const std::vector<nmt::Precision>& best_of_ranks) {
  const bool any =
      std::ranges::find(best_of_ranks, nmt::Precision::kFloat32) != best_of_ranks.end();
  return any ? nmt::Precision::kFloat32 : best_of_ranks.front();
}

TextValue precision_value(std::optional<nmt::Precision>& precision,
                          std::vector<std::string> words) {
  const auto get = [&precision] {
    return std::vector<std::string>{precision ? nmt::to_string(*precision) : "auto"};
  };
  const auto set = [&precision](const std::vector<std::string>& given) {
    precision.reset();
    if (given.front() != "auto") precision = nmt::parse_precision(given.front());
  };
  return {std::move(words), get, set};
}

}  // namespace cohort::translate
