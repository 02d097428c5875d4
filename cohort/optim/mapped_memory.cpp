// SPDX-License-Identifier: Apache-2.0
#include "cohort/optim/mapped_memory.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <torch/types.h>
#include <unistd.h>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/fd.h"

namespace cohort::optim {
namespace {

constexpr int64_t kAlignment = 64;

[[noreturn]] void fail(const std::string& folder, const std::string& what) {
  throw ConfigError(folder + ": " + what);
}

// A file without a name. Not every file system has O_TMPFILE.
int open_nameless(const std::string& folder) {
  std::string path = folder + "/.cohort-state-XXXXXX";
  const int file = ::mkostemp(path.data(), O_CLOEXEC);
  if (file < 0) fail(folder, std::string("expected a writable folder: ") + std::strerror(errno));
  ::unlink(path.c_str());
  return file;
}

}  // namespace

MappedMemory::MappedMemory(const std::string& folder, int64_t bytes) : bytes_(bytes) {
  TORCH_CHECK_VALUE(bytes > 0, "mapped memory: expected more than 0 bytes, got ", bytes);
  const Fd file(open_nameless(folder));
  // Asked first: where a file system cannot reserve, the C library would write to every block.
  struct statvfs disk {};
  const bool known = ::fstatvfs(file.get(), &disk) == 0;
  const double free_bytes =
      known ? static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize) : 0;
  const std::string needed = std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB";
  if (known && free_bytes < static_cast<double>(bytes)) {
    fail(folder, "expected room for " + needed + ", got " +
                     std::to_string(static_cast<int64_t>(free_bytes) >> 20) + " MiB");
  }
  int error = EINTR;
  while (error == EINTR) error = ::posix_fallocate(file.get(), 0, bytes);
  if (error != 0) fail(folder, "no room for " + needed + ": " + std::strerror(error));
  void* memory = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED,
                        file.get(), 0);
  if (memory == MAP_FAILED) fail(folder, "cannot map " + needed + ": " + std::strerror(errno));
  memory_ = std::shared_ptr<char>(static_cast<char*>(memory), [bytes](char* place) {
    ::munmap(place, static_cast<size_t>(bytes));
  });
}

int64_t MappedMemory::bytes_of(const at::Tensor& like) {
  const auto bytes = like.numel() * static_cast<int64_t>(like.element_size());
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

at::Tensor MappedMemory::zeros_like(const at::Tensor& like) {
  TORCH_CHECK(used_ + bytes_of(like) <= bytes_, "mapped memory: expected at most ", bytes_ - used_,
              " bytes, got ", bytes_of(like));
  char* place = memory_.get() + used_;  // a fresh file reads as zeros
  used_ += bytes_of(like);
  const auto keep = [owner = memory_](void*) {};
  return at::from_blob(place, like.sizes(), keep, at::TensorOptions(like.scalar_type()));
}

}  // namespace cohort::optim
