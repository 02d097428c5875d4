// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/pickle.h"

#include <array>
#include <bit>
#include <cstring>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "cohort/base/error.h"

namespace cohort {

using Kind = PickleValue::Kind;
using Value = PickleValue;

namespace {

constexpr std::array<std::pair<std::string_view, DType>, 10> kStorages = {
    {{"torch.DoubleStorage", DType::kF64},
     {"torch.FloatStorage", DType::kF32},
     {"torch.HalfStorage", DType::kF16},
     {"torch.BFloat16Storage", DType::kBF16},
     {"torch.LongStorage", DType::kI64},
     {"torch.IntStorage", DType::kI32},
     {"torch.ShortStorage", DType::kI16},
     {"torch.CharStorage", DType::kI8},
     {"torch.ByteStorage", DType::kU8},
     {"torch.BoolStorage", DType::kBool}}};
constexpr std::string_view kOrderedDict = "collections.OrderedDict";
constexpr std::string_view kTensor = "torch._utils._rebuild_tensor_v2";
constexpr std::string_view kParameter = "torch._utils._rebuild_parameter";
constexpr std::string_view kScript = "__torch__.";
// libtorch's Pickler says by these what type a dict or list has.
constexpr std::array<std::string_view, 5> kTags = {
    "torch.jit._pickle.restore_type_tag", "torch.jit._pickle.build_intlist",
    "torch.jit._pickle.build_doublelist", "torch.jit._pickle.build_boollist",
    "torch.jit._pickle.build_tensorlist"};

const DType* storage_type(std::string_view name) {
  for (const auto& [storage, dtype] : kStorages)
    if (storage == name) return &dtype;
  return nullptr;
}

bool is_tag(std::string_view name) {
  for (const auto tag : kTags)
    if (tag == name) return true;
  return false;
}

}  // namespace

const char* to_string(Kind kind) {
  constexpr std::array kNames = {"None",      "a bool",  "an integer", "a float",
                                 "a text",    "a tuple", "a list",     "a dict",
                                 "an object", "a name",  "a storage",  "a tensor"};
  return kNames[static_cast<size_t>(kind)];
}

class PickleReader {
 public:
  PickleReader(const std::string& path, std::span<const std::byte> bytes, Pickle& pickle)
      : path_(path), left_(bytes), pickle_(pickle) {}

  void run() {
    while (true) {
      const auto operation = number<uint8_t>();
      if (operation == '.') break;
      if (!push_constant(operation) && !use_memo(operation) && !build_container(operation) &&
          !build_object(operation)) {
        fail("operation " + std::to_string(operation) +
             ", which a state dict of tensors does not need");
      }
    }
    pickle_.root_ = pop();
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw ConfigError(path_ + ": expected a pickled state dict, found " + what);
  }
  void require(bool holds, const char* expected) const {
    if (!holds) fail(std::string("no ") + expected + ": it is damaged");
  }

  std::string_view take(uint64_t size) {
    require(size <= left_.size(), "end");
    const auto taken = left_.first(size);
    left_ = left_.subspan(size);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }
  template <class Number>
  Number number() {
    Number number{};
    std::memcpy(&number, take(sizeof(Number)).data(), sizeof(Number));
    return number;
  }
  std::string_view line() {
    const std::string_view rest(reinterpret_cast<const char*>(left_.data()), left_.size());
    const size_t end = rest.find('\n');
    require(end != rest.npos, "end of a name");
    return take(end + 1).substr(0, end);
  }

  Value* make(Value value) { return &pickle_.values_.emplace_back(std::move(value)); }
  void push(Value* value) { stack_.push_back(value); }
  Value* pop() {
    require(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "value where one is needed");
    Value* value = stack_.back();
    stack_.pop_back();
    return value;
  }
  Value& top(Kind kind) {
    require(stack_.size() > (marks_.empty() ? 0 : marks_.back()) && stack_.back()->kind == kind,
            to_string(kind));
    return *stack_.back();
  }
  std::vector<Value*> pop_to_mark() {
    require(!marks_.empty(), "mark");
    std::vector<Value*> items(stack_.begin() + static_cast<ptrdiff_t>(marks_.back()), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  std::vector<Value*> pop_some(size_t count) {
    std::vector<Value*> items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    return items;
  }
  void append(Value& to, const std::vector<Value*>& items) const {
    require(to.kind != Kind::kDict || items.size() % 2 == 0, "value of a key");
    to.items.insert(to.items.end(), items.begin(), items.end());
  }

  bool push_constant(uint8_t operation) {
    switch (operation) {
      case 0x80:  // PROTO
        number<uint8_t>();
        return true;
      case 0x95:  // FRAME
        number<uint64_t>();
        return true;
      case 'N':
        push(make({}));
        return true;
      case 0x88:
      case 0x89:
        push(make({.kind = Kind::kBool, .integer = operation == 0x88}));
        return true;
      case 'K':
        push(integer(number<uint8_t>()));
        return true;
      case 'M':
        push(integer(number<uint16_t>()));
        return true;
      case 'J':
        push(integer(number<int32_t>()));
        return true;
      case 0x8a:  // LONG1
        push(integer(long_integer()));
        return true;
      case 'G':
        number<uint64_t>();
        push(make({.kind = Kind::kFloat}));
        return true;
      case 'X':
        push(text(take(number<uint32_t>())));
        return true;
      case 0x8c:  // SHORT_BINUNICODE
        push(text(take(number<uint8_t>())));
        return true;
      case '}':
        push(make({.kind = Kind::kDict}));
        return true;
      case ']':
        push(make({.kind = Kind::kList}));
        return true;
      case ')':
        push(make({.kind = Kind::kTuple}));
        return true;
      default:
        return false;
    }
  }

  Value* integer(int64_t number) { return make({.kind = Kind::kInteger, .integer = number}); }
  Value* text(std::string_view text) {
    return make({.kind = Kind::kText, .text = std::string(text)});
  }
  // Little-endian two's complement of any length up to 8.
  int64_t long_integer() {
    const auto bytes = take(number<uint8_t>());
    if (bytes.size() > 8) fail("an integer of more than 64 bits");
    uint64_t bits = !bytes.empty() && (bytes.back() & 0x80) != 0 ? ~uint64_t{0} : 0;
    std::memcpy(&bits, bytes.data(), bytes.size());
    return std::bit_cast<int64_t>(bits);
  }

  bool use_memo(uint8_t operation) {
    switch (operation) {
      case 'q':
        remember(number<uint8_t>());
        return true;
      case 'r':
        remember(number<uint32_t>());
        return true;
      case 0x94:  // MEMOIZE
        remember(memo_.size());
        return true;
      case 'h':
        push(remembered(number<uint8_t>()));
        return true;
      case 'j':
        push(remembered(number<uint32_t>()));
        return true;
      default:
        return false;
    }
  }

  void remember(uint64_t key) {
    Value* value = pop();
    push(value);
    memo_[key] = value;
  }
  Value* remembered(uint64_t key) const {
    const auto found = memo_.find(key);
    require(found != memo_.end(), "value of that number");
    return found->second;
  }

  bool build_container(uint8_t operation) {
    switch (operation) {
      case '(':
        marks_.push_back(stack_.size());
        return true;
      case 't':
        push(make({.kind = Kind::kTuple, .items = pop_to_mark()}));
        return true;
      case 0x85:
      case 0x86:
      case 0x87:
        push(make({.kind = Kind::kTuple, .items = pop_some(operation - 0x84U)}));
        return true;
      case 's': {
        const auto items = pop_some(2);
        append(top(Kind::kDict), items);
        return true;
      }
      case 'u': {
        const auto items = pop_to_mark();
        append(top(Kind::kDict), items);
        return true;
      }
      case 'a': {
        const auto items = pop_some(1);
        append(top(Kind::kList), items);
        return true;
      }
      case 'e': {
        const auto items = pop_to_mark();
        append(top(Kind::kList), items);
        return true;
      }
      default:
        return false;
    }
  }

  bool build_object(uint8_t operation) {
    switch (operation) {
      case 'c': {
        const std::string module(line());
        push(name(module, std::string(line())));
        return true;
      }
      case 0x93: {  // STACK_GLOBAL
        const Value* second = pop();
        const Value* first = pop();
        require(first->kind == Kind::kText && second->kind == Kind::kText, "name");
        push(name(first->text, second->text));
        return true;
      }
      case 'Q': {
        const Value* id = pop();
        push(storage(*id));
        return true;
      }
      case 'R': {
        const Value* arguments = pop();
        const Value* called = pop();
        push(reduce(*called, *arguments));
        return true;
      }
      case 0x81: {  // NEWOBJ
        const Value* arguments = pop();
        const Value* made = pop();
        if (made->kind != Kind::kName || made->text != kScript || arguments->kind != Kind::kTuple ||
            !arguments->items.empty())
          fail("an object of another class than TorchScript's: nothing of it was run");
        push(make({.kind = Kind::kObject}));
        return true;
      }
      case 'b': {  // BUILD: of a dict, its attributes, such as _metadata
        const Value* state = pop();
        require(state->kind == Kind::kDict, "state of an object");
        require(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "object");
        if (stack_.back()->kind == Kind::kDict) return true;
        append(top(Kind::kObject), state->items);
        return true;
      }
      default:
        return false;
    }
  }

  Value* name(const std::string& module, const std::string& name) {
    std::string whole = module + "." + name;
    if (whole != kOrderedDict && whole != kTensor && whole != kParameter && !is_tag(whole) &&
        storage_type(whole) == nullptr && !whole.starts_with(kScript)) {
      fail("the name " + whole +
           ", which a state dict of tensors does not have: nothing of it was run");
    }
    if (whole.starts_with(kScript)) whole = kScript;  // Which of these classes is all the same.
    return make({.kind = Kind::kName, .text = std::move(whole)});
  }

  // ("storage", type, record, device, number of elements)
  Value* storage(const Value& id) {
    const auto& items = id.items;
    const bool good = id.kind == Kind::kTuple && items.size() >= 5 &&
                      items[0]->kind == Kind::kText && items[0]->text == "storage" &&
                      items[1]->kind == Kind::kName && items[2]->kind == Kind::kText &&
                      items[4]->kind == Kind::kInteger && items[4]->integer >= 0;
    require(good, "storage of a tensor");
    const DType* dtype = storage_type(items[1]->text);
    require(dtype != nullptr, "storage type");
    return make({.kind = Kind::kStorage,
                 .integer = items[4]->integer,
                 .dtype = *dtype,
                 .items = {items[2]}});
  }

  Value* reduce(const Value& called, const Value& arguments) {
    require(called.kind == Kind::kName && arguments.kind == Kind::kTuple, "call");
    const auto& items = arguments.items;
    const auto is = [&](size_t i, Kind kind) { return i < items.size() && items[i]->kind == kind; };
    if (called.text == kOrderedDict) {
      require(items.empty(), "empty OrderedDict");
      return make({.kind = Kind::kDict});
    }
    if (called.text == kTensor) {
      require(is(0, Kind::kStorage) && is(1, Kind::kInteger) && is(2, Kind::kTuple) &&
                  is(3, Kind::kTuple),
              "tensor");
      return make({.kind = Kind::kTensor, .items = {items.begin(), items.begin() + 4}});
    }
    // These return their first argument.
    require((called.text == kParameter && is(0, Kind::kTensor)) ||
                (is_tag(called.text) && !items.empty()),
            "function that a state dict has");
    return items[0];
  }

  const std::string& path_;
  std::span<const std::byte> left_;
  Pickle& pickle_;
  std::vector<Value*> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, Value*> memo_;
};

Pickle::Pickle(const std::string& path, std::span<const std::byte> bytes) {
  PickleReader(path, bytes, *this).run();
}

}  // namespace cohort
