// SPDX-License-Identifier: Apache-2.0
// Finds the tensors inside what a module takes and returns: tensors, tuples, containers, optionals,
// and structs of the user's. Knows nothing of ranks.
#pragma once
#include <ATen/core/Tensor.h>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace cohort::parallel {

/// A struct shows its tensors by a function beside it, found by argument-dependent lookup:
///
///   template <class Visit>
///   void visit_tensors(Output& output, Visit&& visit) { visit(output.scores);
///   visit(output.states); }
template <class T>
concept VisitedStruct = requires(std::remove_const_t<T>& value, void (*visit)(...)) {
  visit_tensors(value, visit);
};

template <class T>
concept TupleLike = requires {
  std::tuple_size<std::remove_const_t<T>>::value;
};

template <class T>
concept OptionalLike =
    std::is_same_v<std::remove_const_t<T>, std::optional<typename T::value_type>>;

template <class T>
concept Container = requires(T& value) {
  value.begin();
  value.end();
};

/// Values that cannot hold a tensor.
template <class T>
concept Plain = std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_null_pointer_v<T> ||
    std::is_same_v<std::remove_const_t<T>, std::string>;

/// Whether for_each_tensor knows how to look into a T.
template <class T>
constexpr bool holds_tensors() {
  using Value = std::remove_cvref_t<T>;
  if constexpr (std::is_same_v<Value, at::Tensor> || VisitedStruct<Value>) {
    return true;
  } else if constexpr (Plain<Value>) {
    return false;
  } else if constexpr (OptionalLike<Value>) {
    return holds_tensors<typename Value::value_type>();
  } else if constexpr (TupleLike<Value>) {
    return []<size_t... I>(std::index_sequence<I...>) {
      return (holds_tensors<std::tuple_element_t<I, Value>>() || ...);
    }
    (std::make_index_sequence<std::tuple_size_v<Value>>{});
  } else if constexpr (Container<Value>) {
    return holds_tensors<decltype(*std::declval<Value&>().begin())>();
  } else {
    return false;
  }
}

/// Calls `visit(at::Tensor&)` for each tensor in `value`, in order; undefined ones, too.
///
/// Does not compile for a type it cannot look into, rather than overlook a tensor.
template <class T, class Visit>
void for_each_tensor(T& value, Visit&& visit) {
  if constexpr (std::is_same_v<std::remove_const_t<T>, at::Tensor>) {
    visit(value);
  } else if constexpr (Plain<T>) {
    return;
  } else if constexpr (VisitedStruct<T>) {
    visit_tensors(value, [&](auto& member) { for_each_tensor(member, visit); });
  } else if constexpr (OptionalLike<T>) {
    if (value) for_each_tensor(*value, visit);
  } else if constexpr (TupleLike<T>) {
    std::apply([&](auto&... each) { (for_each_tensor(each, visit), ...); }, value);
  } else if constexpr (Container<T>) {
    for (auto& each : value) for_each_tensor(each, visit);
  } else {
    static_assert(!std::is_same_v<T, T>,
                  "write visit_tensors(value, visit) beside this type: see tensor_tree.h");
  }
}

/// Returns a copy of `value` whose tensors are `replace(tensor)`. Unlike for_each_tensor this
/// compiles for every type: one that it cannot look into (a struct without visit_tensors) passes
/// through as it is, with the tensors in it.
template <class T, class Replace>
decltype(auto) with_tensors(T&& value, Replace&& replace) {
  if constexpr (holds_tensors<T>()) {
    std::remove_cvref_t<T> copy(std::forward<T>(value));
    for_each_tensor(copy, [&](at::Tensor& tensor) { tensor = replace(tensor); });
    return copy;
  } else {
    return std::forward<T>(value);
  }
}

}  // namespace cohort::parallel
