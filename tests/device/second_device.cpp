// SPDX-License-Identifier: Apache-2.0
#include "tests/device/second_device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/MTIAHooksInterface.h>
#include <ATen/ops/from_blob.h>
#include <algorithm>
#include <array>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ScopeExit.h>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>
#include <vector>

namespace cohort::test {
namespace {

const c10::Device kSecondDevice{c10::DeviceType::MTIA, 0};

thread_local c10::StreamId current_stream = 0;  // The default one, or 1.

// Where a stream was.
struct Moment {
  c10::StreamId stream = 0;
  int64_t tick = 0;
};

// The device's memory and the counts. Blocks are known by their addresses in the mapping with access.
class Arena {
 public:
  Arena() {
    const int file = memfd_create("second device", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kBytes) == 0, "the second device has no memory");
    host_ = map(file, PROT_READ | PROT_WRITE);
    device_ = map(file, PROT_NONE);
    ::close(file);
  }

  // What is the device's, and not pinned, is reported to libtorch's profiler, as a card's allocator does.
  at::DataPtr allocate(size_t bytes, bool pinned) {
    if (bytes == 0) return {nullptr, nullptr, &Arena::release, at::kCPU};
    const auto reported_bytes = pinned ? 0 : static_cast<int64_t>(bytes);
    char* const block = take((bytes + kAlignment - 1) / kAlignment * kAlignment, reported_bytes);
    if (reported_bytes > 0)
      c10::reportMemoryUsageToProfiler(block, reported_bytes, 0, 0, kSecondDevice);
    return {block, block, &Arena::release, at::kCPU};
  }
  static void release(void* block);

  bool holds(const void* host) const { return host >= host_ && host < host_ + kBytes; }
  char* host(const void* device) const {
    return device == nullptr ? nullptr : host_ + (static_cast<const char*>(device) - device_);
  }
  char* device(const void* host) const {
    return host == nullptr ? nullptr : device_ + (static_cast<const char*>(host) - host_);
  }

  // The current stream works on the block of a storage.
  void use(const void* storage) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(static_cast<char*>(const_cast<void*>(storage)));
    if (found == blocks_.end()) return;
    Block& block = found->second;
    block.used_elsewhere = block.used_elsewhere || block.stream != current_stream;
    if (current_stream != 0) block.other_used = ++tick_;
    TORCH_CHECK(current_stream != 0 || block.other_used <= waited_for_,
                "the default stream uses a tensor of another one, for which it has not waited");
  }
  void know_use(const void* storage) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(static_cast<char*>(const_cast<void*>(storage)));
    if (found != blocks_.end()) found->second.used_is_known = true;
  }
  Moment now(c10::StreamId stream) {
    const std::lock_guard lock(mutex_);
    return {stream, tick_};
  }
  // The default stream, or the host, waits for another stream.
  void wait_for(const Moment& moment) {
    const std::lock_guard lock(mutex_);
    if (moment.stream != 0) waited_for_ = std::max(waited_for_, moment.tick);
  }

  void count(int64_t DeviceCounts::*what) {
    const std::lock_guard lock(mutex_);
    ++(counts_.*what);
  }
  DeviceCounts exchange_counts(const DeviceCounts* counts) {
    const std::lock_guard lock(mutex_);
    return counts == nullptr ? counts_ : std::exchange(counts_, *counts);
  }

 private:
  struct Block {
    size_t bytes = 0;
    int64_t reported_bytes = 0;   // To the profiler.
    c10::StreamId stream = 0;     // Of the allocation.
    bool used_elsewhere = false;  // By another stream, ...
    bool used_is_known = false;   // ... which the allocator knows.
    int64_t other_used = 0;       // When the other stream used it last.
  };
  char* take(size_t bytes, int64_t reported_bytes) {
    const std::lock_guard lock(mutex_);
    std::vector<char*>& spare = spare_[bytes];
    char* block = nullptr;
    if (!spare.empty()) {
      block = spare.back();
      spare.pop_back();
      ++counts_.reused_blocks;
    } else {
      TORCH_CHECK(bytes <= kBytes - used_, "the second device is out of memory: ", used_, " of ",
                  kBytes, " bytes are in use, and ", bytes, " more were asked for");
      block = host_ + used_;
      used_ += bytes;
      ++counts_.new_blocks;
    }
    blocks_[block] = {.bytes = bytes, .reported_bytes = reported_bytes, .stream = current_stream};
    return block;
  }

  static constexpr size_t kBytes = size_t{8} << 30;
  static constexpr size_t kAlignment = 64;  // As the CPU's allocator.
  static char* map(int file, int access) {
    void* place = mmap(nullptr, kBytes, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(place != MAP_FAILED, "the second device's memory cannot be mapped");
    return static_cast<char*>(place);
  }

  char* host_ = nullptr;
  char* device_ = nullptr;
  std::mutex mutex_;
  size_t used_ = 0;
  std::map<char*, Block> blocks_;
  std::map<size_t, std::vector<char*>> spare_;
  DeviceCounts counts_;
  int64_t tick_ = 0;        // Grows as the other stream works.
  int64_t waited_for_ = 0;  // What of it the default stream has seen.
};

// Lives for ever: tensors in static objects outlive what ends with the process.
Arena& arena() {
  static auto* const arena = std::make_unique<Arena>().release();
  return *arena;
}

void Arena::release(void* block) {
  Arena& self = arena();
  auto* const place = static_cast<char*>(block);
  Block freed;
  {
    const std::lock_guard lock(self.mutex_);
    freed = self.blocks_.at(place);
    self.spare_[freed.bytes].push_back(place);
    if (freed.used_elsewhere && !freed.used_is_known) ++self.counts_.early_frees;
  }
  if (freed.reported_bytes > 0)
    c10::reportMemoryUsageToProfiler(block, -freed.reported_bytes, 0, 0, kSecondDevice);
}

thread_local bool in_kernel = false;
thread_local bool in_driver = false;  // Or in a kernel.

// The CPU's allocator, but for a kernel that works for the device: what it allocates can become the device's without a copy.
// Pinned memory is of the arena, too.
class HostAllocator final : public c10::Allocator {
 public:
  explicit HostAllocator(bool pinned) : pinned_(pinned), plain_(c10::GetCPUAllocator()) {}
  at::DataPtr allocate(size_t bytes) override {
    return pinned_ || in_kernel ? arena().allocate(bytes, pinned_) : plain_->allocate(bytes);
  }
  at::DeleterFnPtr raw_deleter() const override { return &HostAllocator::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void release(void* block) {
    if (arena().holds(block)) return Arena::release(block);
    c10::GetDefaultCPUAllocator()->raw_deleter()(block);
  }
  bool pinned_;
  c10::Allocator* plain_;
};

// Where tensors lie may change the bits of MKL's products on processors other than Intel's, unless this mode is chosen (oneMKL
// Developer Guide, "Reproducibility Conditions"). Set before the first product, after which MKL does not read it.
const bool products_are_reproducible = setenv("MKL_CBWR", "COMPATIBLE", /*overwrite=*/1) == 0;

HostAllocator pinned_allocator(/*pinned=*/true);
HostAllocator cpu_allocator(/*pinned=*/false);
const bool cpu_allocator_is_set = [] {
  c10::SetCPUAllocator(&cpu_allocator, /*priority=*/1);
  return true;
}();

struct SecondDeviceGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType kType = c10::DeviceType::MTIA;
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kSecondDevice; }
  c10::Device getDevice() const override { return kSecondDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, kSecondDevice, id);
  }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(1); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current_stream, next.id()));
  }
  void* getStreamNativeHandle(c10::Stream) const override { return &arena(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = std::make_unique<Moment>().release();
    *static_cast<Moment*>(*event) = arena().now(stream.id());
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    const std::unique_ptr<Moment> destroyed(static_cast<Moment*>(event));
  }
  void block(void* event, const c10::Stream& stream) const override {
    arena().count(&DeviceCounts::stream_waits);
    if (event != nullptr && stream.id() == 0) arena().wait_for(*static_cast<Moment*>(event));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream&) const override {
    arena().know_use(arena().host(data.get()));
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait(); }
  void synchronizeEvent(void*) const override { wait(); }
  void synchronizeDevice(c10::DeviceIndex) const override { wait(); }
  static void wait() {
    arena().count(&DeviceCounts::synchronisations);
    arena().wait_for(arena().now(1));
  }
};
C10_REGISTER_GUARD_IMPL(MTIA, SecondDeviceGuard);

struct SecondDeviceHooks final : at::MTIAHooksInterface {
  explicit SecondDeviceHooks(at::MTIAHooksArgs = {}) {}
  bool hasMTIA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getDeviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::Stream getCurrentStream(c10::DeviceIndex) const override {
    return SecondDeviceGuard::stream(current_stream);
  }
  c10::Stream getDefaultStream(c10::DeviceIndex) const override {
    return SecondDeviceGuard::stream(0);
  }
  void deviceSynchronize(c10::DeviceIndex) const override { SecondDeviceGuard::wait(); }
  c10::Device getDeviceFromPtr(void*) const override { return kSecondDevice; }
  bool isPinnedPtr(const void* host) const override { return arena().holds(host); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};

// The CPU tensors that stand for the device's during one call of a kernel. Tensors that share a storage do so there, too.
class Aliases {
 public:
  at::Tensor cpu(const at::Tensor& device) {
    for (const auto& pair : tensors_)
      if (pair.device.is_same(device)) return pair.cpu;
    TORCH_CHECK(device.layout() == at::kStrided, "the second device has strided tensors only");
    const at::Tensor alias = copy_of(device, cpu(device.storage()), c10::BackendComponent::MTIABit,
                                     c10::BackendComponent::CPUBit);
    tensors_.push_back({device, alias});
    return alias;
  }

  c10::Storage cpu(const c10::Storage& device) {
    for (const auto& pair : storages_)
      if (is_same(pair.device, device)) return pair.cpu;
    c10::StorageImpl& from = *device.unsafeGetStorageImpl();
    arena().use(arena().host(address(from)));
    c10::Storage alias(c10::Storage::use_byte_size_t(), from.nbytes(),
                       {arena().host(address(from)), at::kCPU}, c10::GetCPUAllocator(),
                       /*resizable=*/true);
    try {
      from.data();
    } catch (
        const c10::
            Error&) {  // It refuses to be read, with a text of its own; views of it are allowed.
      alias.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
          from.get_extra_meta().custom_data_ptr_error_msg_);
    }
    storages_.push_back({device, alias});
    return alias;
  }

  // What a kernel changed of its arguments beside their elements: memory, sizes and strides.
  void carry_back() {
    for (const auto& [device, cpu] : storages_) {
      c10::StorageImpl& to = *device.unsafeGetStorageImpl();
      c10::StorageImpl& from = *cpu.unsafeGetStorageImpl();
      if (arena().host(address(to)) != address(from)) to.set_data_ptr_noswap(taken_from(from));
      if (to.nbytes() != from.nbytes()) to.set_nbytes(from.nbytes());
    }
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const auto [device, cpu] = tensors_[i];
      c10::TensorImpl& to = *device.unsafeGetTensorImpl();
      const c10::Storage storage = this->device(cpu.storage());
      if (!is_same(storage, to.storage())) to.set_storage_keep_dtype(storage);
      if (device.sizes() != cpu.sizes() || device.strides() != cpu.strides() ||
          device.storage_offset() != cpu.storage_offset())
        to.set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }

  // The argument that `cpu` stands for; else a view of one, or a tensor with the memory of `cpu`.
  at::Tensor device(const at::Tensor& cpu) {
    if (!cpu.defined()) return cpu;
    for (const auto& pair : tensors_)
      if (pair.cpu.is_same(cpu)) return pair.device;
    return copy_of(cpu, device(cpu.storage()), c10::BackendComponent::CPUBit,
                   c10::BackendComponent::MTIABit);
  }

 private:
  template <class T>
  struct Pair {
    T device, cpu;
  };

  static char* address(c10::StorageImpl& storage) {
    return static_cast<char*>(storage._mutable_data_ptr_no_checks().get());
  }
  static bool is_same(const c10::Storage& a, const c10::Storage& b) {
    return a.unsafeGetStorageImpl() == b.unsafeGetStorageImpl();
  }

  static at::Tensor copy_of(const at::Tensor& tensor, c10::Storage storage,
                            c10::BackendComponent from, c10::BackendComponent to) {
    const auto keys =
        (tensor.key_set().remove_backend(from) - c10::getAutocastRelatedKeySetFromBackend(from)) |
        c10::DispatchKeySet(to) | c10::getAutocastRelatedKeySetFromBackend(to);
    at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, std::move(storage), keys, tensor.dtype());
    result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                        tensor.storage_offset());
    return result;
  }

  c10::Storage device(const c10::Storage& cpu) {
    for (const auto& pair : storages_)
      if (is_same(pair.cpu, cpu)) return pair.device;
    at::DataPtr memory = taken_from(*cpu.unsafeGetStorageImpl());
    storages_.push_back({c10::Storage(c10::Storage::use_byte_size_t(), cpu.nbytes(),
                                      std::move(memory), /*allocator=*/nullptr,
                                      /*resizable=*/false),
                         cpu});
    return storages_.back().device;
  }

  // Makes the memory of `cpu` the device's and leaves an alias of it there. What the allocator did not give, such as a
  // constant or a library's own memory, is copied.
  static at::DataPtr taken_from(c10::StorageImpl& cpu) {
    char* const host = address(cpu);
    at::DataPtr block;
    if (cpu._mutable_data_ptr_no_checks().get_deleter() == &Arena::release) {
      block = cpu.set_data_ptr({host, at::kCPU});
    } else {
      block = arena().allocate(cpu.nbytes(), /*pinned=*/false);
      if (cpu.nbytes() > 0) std::memcpy(block.get(), host, cpu.nbytes());
    }
    char* const device = arena().device(block.get());
    arena().use(block.get());
    return {device, block.release_context(), &Arena::release, kSecondDevice};
  }

  std::vector<Pair<c10::Storage>> storages_;
  std::vector<Pair<at::Tensor>> tensors_;
};

constexpr std::array<std::string_view, 11> kNeedsData{
    "_local_scalar_dense",   "bincount", "equal",    "masked_select",      "nonzero",
    "repeat_interleave",     "_unique",  "_unique2", "unique_consecutive", "unique_dim",
    "unique_dim_consecutive"};

enum class Use { kRead, kWritten, kIndex };

at::Tensor cpu_argument(Aliases& aliases, const at::Tensor& tensor, Use use,
                        const c10::OperatorHandle& op) {
  if (!tensor.defined()) return tensor;
  const bool is_mask = use == Use::kIndex &&
                       (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
  if (tensor.device() == kSecondDevice) {
    if (is_mask) arena().count(&DeviceCounts::synchronisations);
    return aliases.cpu(tensor);
  }
  TORCH_CHECK(tensor.is_cpu() && (use == Use::kIndex || (use == Use::kRead && tensor.dim() == 0)),
              "Expected all tensors to be on the same device, but ", op.operator_name(), " got ",
              kSecondDevice, " and ", tensor.device(), " of sizes ", tensor.sizes());
  if (use == Use::kIndex) arena().count(&DeviceCounts::host_to_device);
  return tensor;
}

void to_cpu(Aliases& aliases, c10::IValue& value, const c10::Argument& argument,
            const c10::OperatorHandle& op) {
  const auto* alias = argument.alias_info();
  const Use use = alias != nullptr && alias->isWrite() ? Use::kWritten : Use::kRead;
  if (value.isTensor()) {
    value = cpu_argument(aliases, value.toTensor(), use, op);
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = cpu_argument(aliases, tensor, use, op);
    value = tensors;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      tensors.push_back(tensor ? cpu_argument(aliases, *tensor, Use::kIndex, op) : tensor);
    value = tensors;
  } else if (value.isStorage()) {
    value = aliases.cpu(value.toStorage());
  } else if (value.isDevice()) {
    value = c10::Device(at::kCPU);
  } else if (value.isGenerator()) {
    TORCH_CHECK(value.toGenerator() == at::detail::getDefaultCPUGenerator(), op.operator_name(),
                " expected a generator of ", kSecondDevice, ", got one of the CPU");
  }
}

// Runs the CPU's kernel of any operator.
void run_on_aliases(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const DeviceCode here;
  const auto name = std::string_view(op.schema().name()).substr(std::strlen("aten::"));
  if (std::ranges::find(kNeedsData, name) != kNeedsData.end())
    arena().count(&DeviceCounts::synchronisations);
  Aliases aliases;
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i)
    to_cpu(aliases, (*stack)[first + i], arguments[i], op);
  {
    const bool before = std::exchange(in_kernel, true);
    const auto restore = c10::make_scope_exit([before] { in_kernel = before; });
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  aliases.carry_back();
  for (size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = aliases.device(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = aliases.device(tensor);
      value = tensors;
    }
  }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const DeviceCode here;
  if (from.is_cpu()) arena().count(&DeviceCounts::host_to_device);
  if (from.is_cpu() && current_stream != 0) arena().count(&DeviceCounts::side_copies);
  if (to.is_cpu()) {
    arena().count(&DeviceCounts::device_to_host);
    if (!non_blocking || !to.is_pinned()) arena().count(&DeviceCounts::synchronisations);
  }
  Aliases aliases;
  at::Tensor target = to.is_cpu() ? to : aliases.cpu(to);
  target.copy_(from.is_cpu() ? from : aliases.cpu(from));
  return to;
}

// An operator of libtorch that has a kernel for the CPU runs it here, before any formula for devices in general. Others do
// not: the author of one for the CPU learns that it does not serve a card.
TORCH_LIBRARY_IMPL(aten, MTIA, library) {
  library.impl("_copy_from", copy_from);
  const auto run_by_cpu = [&library](const std::string& name) {
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_aliases>());
  };
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (name.name.starts_with("aten::") && op && op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      run_by_cpu(c10::toString(name));
  }
  // These choose a library by the device.
  run_by_cpu("convolution");
  run_by_cpu("convolution_backward");
}

}  // namespace

at::Device second_device() {
  return kSecondDevice;
}

DeviceCounts device_counts() {
  return arena().exchange_counts(nullptr);
}

void reset_device_counts() {
  const DeviceCounts none;
  arena().exchange_counts(&none);
}

DeviceCode::DeviceCode() : before_(std::exchange(in_driver, true)) {}
DeviceCode::~DeviceCode() {
  in_driver = before_;
}
bool in_device_code() {
  return in_driver;
}

at::Tensor host_alias(const at::Tensor& tensor) {
  return at::from_blob(
      arena().host(tensor.mutable_data_ptr()), tensor.sizes(), tensor.strides(), [tensor](void*) {},
      at::TensorOptions(tensor.scalar_type()));
}

}  // namespace cohort::test

namespace at {
using cohort::test::SecondDeviceHooks;
C10_REGISTER_CLASS(MTIAHooksRegistry, MTIAHooks, SecondDeviceHooks);
}  // namespace at
