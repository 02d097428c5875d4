// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/precision.h"

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::translate {

nmt::Precision agreed_precision(std::optional<nmt::Precision> own,
                                const comm::ProcessGroup& group) {
  const nmt::Precision precision = own ? *own : nmt::best_precision();
  const auto all = group.all_gather_object(nmt::to_string(precision));
  const auto other = std::ranges::find_if(all, [&](const auto& one) { return one != all.front(); });
  if (other == all.end()) return precision;
  throw ConfigError("--precision: expected the same on all ranks, got " + all.front() +
                    " on rank 0 and " + *other + " on rank " + std::to_string(other - all.begin()) +
                    ": auto is what suits a rank's own processor, so name one");
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
