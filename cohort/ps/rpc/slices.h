// SPDX-License-Identifier: Apache-2.0
// Buffers as gRPC's slices: without copies on the way out, with one on the way in.
#pragma once
#include <cstring>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>
#include <memory>
#include <utility>
#include <vector>

#include "cohort/ps/wire/message.h"

namespace cohort::ps {

/// A slice that shares `buffer` and `hold`: gRPC may hold it for longer than the call lasts.
inline grpc::Slice slice_of(std::shared_ptr<const Buffer> buffer,
                            std::shared_ptr<void> hold = nullptr) {
  struct Owner {
    std::shared_ptr<const Buffer> buffer;
    std::shared_ptr<void> hold;
  };
  auto* const owner = new Owner{std::move(buffer), std::move(hold)};
  return {const_cast<std::byte*>(owner->buffer->span().data()), owner->buffer->size(),
          [](void* shared) { delete static_cast<Owner*>(shared); }, owner};
}

/// All bytes of `bytes` in one piece.
inline Buffer buffer_of(const grpc::ByteBuffer& bytes) {
  Buffer buffer(bytes.Length());
  std::vector<grpc::Slice> slices;
  if (!bytes.Dump(&slices).ok()) return {};
  size_t position = 0;
  for (const grpc::Slice& slice : slices) {
    std::memcpy(buffer.data() + position, slice.begin(), slice.size());
    position += slice.size();
  }
  return buffer;
}

}  // namespace cohort::ps
