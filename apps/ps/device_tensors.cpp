// SPDX-License-Identifier: Apache-2.0
#include <c10/core/Device.h>

#include "cohort/ps/module/device_block.h"

#include "apps/ps/device.h"

namespace cohort::cli {

ps::BlockMaker blocks_on(const std::string& device) {
  return device == "host" ? ps::make_host_block : ps::device_blocks(c10::Device(device));
}

}  // namespace cohort::cli
