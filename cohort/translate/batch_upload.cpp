// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/batch_upload.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <utility>

namespace cohort::translate {

BatchUpload::BatchUpload(at::Device device) : device_(device) {
  if (device.is_cpu()) return;
  stream_ = c10::impl::getDeviceGuardImpl(device.type())->getStreamFromGlobalPool(device);
  copied_.emplace(device.type());
}

void BatchUpload::start(const nmt::Batch& batch) {
  const c10::OptionalStreamGuard beside(stream_);
  batch_ = batch.to(device_);
  if (stream_) copied_->record(*stream_);
}

nmt::Batch BatchUpload::take() {
  nmt::Batch batch = std::exchange(batch_, {});
  if (!stream_) return batch;
  const auto* device = c10::impl::getDeviceGuardImpl(device_.type());
  const c10::Stream current = device->getStream(device_);
  copied_->block(current);
  // Else the allocator takes their memory for free once the copies' stream has no more use of it.
  for (const at::Tensor& tensor : {batch.source_BS, batch.source_lengths_B, batch.input_BT,
                                   batch.labels_BT, batch.target_lengths_B, batch.label_rows_N})
    device->recordDataPtrOnStream(tensor.storage().data_ptr(), current);
  return batch;
}

}  // namespace cohort::translate
