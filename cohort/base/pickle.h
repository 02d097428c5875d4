// SPDX-License-Identifier: Apache-2.0
// Reads the pickles of state dicts. Nothing that a pickle names is called or looked up: the few
// names that torch.save writes are understood here, and others refused.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "cohort/base/tensor_file.h"

namespace cohort {

/// A value of a pickle. Values refer to one another and live as long as their Pickle.
struct PickleValue {
  enum class Kind {
    kNone,
    kBool,     ///< integer
    kInteger,  ///< integer
    kFloat,    ///< Its value is not kept.
    kText,     ///< text
    kTuple,    ///< items
    kList,     ///< items
    kDict,     ///< items: key, value, key, value ...
    kObject,   ///< Of a class of TorchScript, as torch::save of a module writes; items as kDict.
    kName,     ///< text: "torch._utils._rebuild_tensor_v2"
    kStorage,  ///< items: the text that names its record; integer: its number of elements; dtype
    kTensor,   ///< items: storage, offset, tuple of sizes, tuple of strides
  };
  Kind kind = Kind::kNone;
  int64_t integer = 0;
  DType dtype = DType::kF32;
  std::string text{};
  std::vector<PickleValue*> items{};
};

/// "a dict", for errors.
const char* to_string(PickleValue::Kind kind);

/// A pickle of protocol 2 to 4, as Python's torch.save and libtorch's Pickler write it.
/// Memory: in proportion to the pickle, which has names and shapes of tensors, not their elements.
class Pickle {
 public:
  /// Errors: ConfigError that begins with `path`: an operation that state dicts do not need; a name
  ///         of Python's that they do not have, such as os.system, which is in the message; damage.
  Pickle(const std::string& path, std::span<const std::byte> bytes);

  const PickleValue& root() const { return *root_; }

 private:
  friend class PickleReader;
  std::deque<PickleValue> values_;
  const PickleValue* root_ = nullptr;
};

}  // namespace cohort
