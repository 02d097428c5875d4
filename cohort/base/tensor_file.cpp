// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/tensor_file.h"

#include <array>
#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/fd.h"
#include "cohort/base/system_error.h"

namespace cohort {
namespace {

struct DTypeInfo {
  DType dtype;
  const char* name;
  size_t bytes;
};
constexpr std::array<DTypeInfo, 10> kDTypes = {{{DType::kF64, "F64", 8},
                                                {DType::kF32, "F32", 4},
                                                {DType::kF16, "F16", 2},
                                                {DType::kBF16, "BF16", 2},
                                                {DType::kI64, "I64", 8},
                                                {DType::kI32, "I32", 4},
                                                {DType::kI16, "I16", 2},
                                                {DType::kI8, "I8", 1},
                                                {DType::kU8, "U8", 1},
                                                {DType::kBool, "BOOL", 1}}};

}  // namespace

size_t item_size(DType dtype) {
  return kDTypes[static_cast<size_t>(dtype)].bytes;
}
const char* to_string(DType dtype) {
  return kDTypes[static_cast<size_t>(dtype)].name;
}
std::optional<DType> dtype_named(std::string_view name) {
  for (const DTypeInfo& info : kDTypes) {
    if (name == info.name) return info.dtype;
  }
  return std::nullopt;
}
std::optional<int64_t> num_elements(std::span<const int64_t> shape) {
  int64_t count = 1;
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(count, size, &count)) return std::nullopt;
  }
  return count;
}

TensorFile::TensorFile(const std::string& path, const std::string& kind) : path_(path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file)
    throw ConfigError(path + ": expected a readable " + kind + ": " + system_reason(errno));
  struct stat info {};
  if (::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode))
    throw ConfigError(path + ": expected a regular file");
  const auto size = static_cast<size_t>(info.st_size);
  if (size == 0) return;
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (address == MAP_FAILED)
    throw ConfigError(path + ": cannot map into memory: " + system_reason(errno));
  mapping_ = {static_cast<const std::byte*>(address), size};
}

TensorFile::~TensorFile() {
  if (!mapping_.empty()) ::munmap(const_cast<std::byte*>(mapping_.data()), mapping_.size());
}

bool TensorFile::add(TensorView tensor) {
  if (!index_.emplace(tensor.name, tensors_.size()).second) return false;
  tensors_.push_back(std::move(tensor));
  return true;
}

const TensorView* TensorFile::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

const TensorView& TensorFile::at(std::string_view name) const {
  if (const TensorView* tensor = find(name)) return *tensor;
  throw ConfigError(path_ + ": expected a tensor named \"" + std::string(name) + "\", found " +
                    std::to_string(tensors_.size()) + " others");
}

}  // namespace cohort
