// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/accelerator.h"
#include "cohort/ps/module/device_block.h"

#include "apps/ps/device.h"

namespace cohort::cli {

ps::BlockMaker blocks_on(const std::string& device) {
  return device == "host" ? ps::make_host_block
                          : ps::device_blocks(comm::init_accelerator(device, {}));
}

}  // namespace cohort::cli
