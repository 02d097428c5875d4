// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/parallel_for.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <pthread.h>
#include <thread>
#include <vector>

namespace cohort::translate {

void parallel_for(size_t count, const std::function<void(size_t begin, size_t end)>& work,
                  const ParallelForOptions& options) {
  const size_t num_threads =
      options.threads > 0 ? options.threads : std::thread::hardware_concurrency();
  std::atomic<size_t> next = 0;
  std::once_flag once;
  std::exception_ptr error;
  const auto run = [&] {
    try {
      for (size_t begin = 0; (begin = next.fetch_add(options.taken)) < count;)
        work(begin, std::min(begin + options.taken, count));
    } catch (...) {
      std::call_once(once, [&] { error = std::current_exception(); });
      next = count;
    }
  };
  {
    std::vector<std::jthread> threads;
    for (size_t i = 1; i < num_threads && i * options.taken < count; ++i) {
      threads.emplace_back(run);
      pthread_setname_np(threads.back().native_handle(), options.name);
    }
    run();
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace cohort::translate
