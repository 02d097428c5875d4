// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/run_on_ranks.h"

#include <exception>

#include "cohort/base/error.h"

namespace cohort::translate {

void run_on_ranks(const comm::ProcessGroup& group, const std::string& name, bool is_mine,
                  std::chrono::milliseconds limit, const std::function<void()>& work) {
  std::exception_ptr error;
  std::string told;  // its kind and its text; nothing if there is none
  if (is_mine) {
    try {
      work();
    } catch (const ConfigError& caught) {
      error = std::current_exception();
      told = "C" + one_line(caught);
    } catch (const std::exception& caught) {
      error = std::current_exception();
      told = "E" + one_line(caught);
    }
  }
  group.barrier(name, limit);
  const auto all = group.all_gather_object(told);
  if (error) std::rethrow_exception(error);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;
    const std::string rank_name = "rank " + std::to_string(rank) + ": ";
    std::string text = all[rank].substr(1);
    if (!text.starts_with(rank_name))
      text = rank_name + text;  // A sharded checkpoint's errors name it.
    if (all[rank].front() == 'C') throw ConfigError(text);
    throw_without_stack(text);
  }
}

}  // namespace cohort::translate
