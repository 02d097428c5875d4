#include <ATen/Context.h>
#include <c10/core/Device.h>

#include "cohort/base/error.h"
#include "cohort/ps/module/device_block.h"

#include "apps/ps/device.h"

namespace cohort::apps {

ps::BlockMaker blocks_on(const std::string& device) {
  if (device == "host") return ps::make_host_block;
  try {
    const c10::Device place(device);
    if (!place.is_cpu() && !place.is_cuda())
      throw ConfigError("--device " + device + ": expected host, cuda, cuda:N or cpu");
    if (place.is_cuda() && !at::hasCUDA())
      throw ConfigError("--device " + device + ": libtorch sees no CUDA here");
    return ps::device_blocks(place);
  } catch (const ConfigError&) {
    throw;
  } catch (const c10::Error&) {
    throw ConfigError("--device " + device + ": expected host, cuda, cuda:N or cpu");
  }
}

}  // namespace cohort::apps
