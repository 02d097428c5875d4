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

void parallel_for(size_t count, const std::function<void(size_t begin, size_t end)>& work) {
  constexpr size_t kTaken = 64;
  std::atomic<size_t> next = 0;
  std::once_flag once;
  std::exception_ptr error;
  const auto run = [&] {
    try {
      for (size_t begin = 0; (begin = next.fetch_add(kTaken)) < count;)
        work(begin, std::min(begin + kTaken, count));
    } catch (...) {
      std::call_once(once, [&] { error = std::current_exception(); });
      next = count;
    }
  };
  {
    std::vector<std::jthread> threads;
    for (unsigned i = 1; i < std::thread::hardware_concurrency(); ++i) {
      threads.emplace_back(run);
      pthread_setname_np(threads.back().native_handle(), "tokenise");
    }
    run();
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace cohort::translate
