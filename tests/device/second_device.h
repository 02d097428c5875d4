// SPDX-License-Identifier: Apache-2.0
// A second device for machines that have none: memory that the host may not touch, and the CPU's kernels behind it. A
// program that links it has the device; nothing of it is installed.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>

namespace cohort::test {

/// The device: of type MTIA, the only dense one that autograd takes and that no libtorch for the CPU has.
///
/// Its memory is mapped twice. Tensors hold addresses of a mapping without access, so code of the
/// host that reads or writes a device pointer ends by SIGSEGV; copies and kernels use the other
/// mapping. An operator runs the CPU's kernel on aliases of its arguments, so results have the bits
/// of the CPU; random numbers are those of the CPU's default generator. As on a real card, tensors
/// of two devices in one operator are an error (but a CPU scalar of no dimension that is only read,
/// and indices of `index` and `index_put_`), and so is a generator of the CPU.
/// There are the default stream and another. Every call is finished when it returns; but what the
/// default stream uses of the other's work before it has waited for it, or the host, is an error.
/// Limits: strided tensors; 8 GiB; no CUDA, XPU or other accelerator in the same process. Attention
///         (scaled_dot_product_attention) takes the path of an unknown device, with other bits than
///         the CPU's fused one.
/// Threads: any.
at::Device second_device();

/// What the program asked of the device since reset_device_counts(), or since it started.
struct DeviceCounts {
  /// Times that a real card would make the host wait: `item`, `equal`, a copy to the host (but one
  /// into pinned memory that need not block), an operator whose result has a size that depends on
  /// data (`nonzero`, `masked_select`, `unique`, `bincount`, `repeat_interleave`), an index that is
  /// a mask, and waiting for a stream, an event or the device.
  int64_t synchronisations = 0;
  int64_t host_to_device = 0;  ///< Copies; an index on the CPU is one.
  int64_t device_to_host = 0;  ///< Copies; `item` is none.
  int64_t new_blocks = 0;      ///< Blocks of memory that no freed one served, ...
  int64_t reused_blocks = 0;   ///< and those that one did. Kernels' scratch memory counts.
  int64_t side_copies = 0;     ///< Of host_to_device, those on another stream than the default one.
  int64_t stream_waits = 0;    ///< Streams told to wait for an event; the host does not.
  /// Blocks that were given back although a stream other than that of their allocation had used
  /// them, and the allocator had not been told: another tensor could have been written there.
  int64_t early_frees = 0;
};

DeviceCounts device_counts();
void reset_device_counts();

/// A CPU tensor on the memory of `tensor`, through the mapping with access; keeps it alive. For what
/// stands in for a driver, such as a backend of collectives: counts nothing.
at::Tensor host_alias(const at::Tensor& tensor);

/// Marks what a thread does, while this lives, as done by what stands in for the device: its
/// kernels, copies and collectives.
class DeviceCode {
 public:
  DeviceCode();
  ~DeviceCode();
  DeviceCode(const DeviceCode&) = delete;
  DeviceCode& operator=(const DeviceCode&) = delete;

 private:
  bool before_;
};
/// Whether this thread is in such code.
bool in_device_code();

}  // namespace cohort::test
