// SPDX-License-Identifier: Apache-2.0
// TensorBoard's event files: curves and texts of a run, for `tensorboard --logdir`.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cohort/base/append_file.h"

namespace cohort::train {

/// Writes one file of events, readable while it grows. One writer a folder.
///
/// The format is TensorFlow's: records with a checksum before and after, each a protobuf message
/// Event. The few fields that are used are written by hand.
class EventFile {
 public:
  using Scalars = std::vector<std::pair<std::string, double>>;

  /// Makes `folder` if need be, and a new file in it that sorts after those that are there. They
  /// may hold steps from `first_step` on, of a run that trained past its last checkpoint:
  /// TensorBoard is told to forget these.
  /// Errors: ConfigError that names the folder or file that cannot be made.
  EventFile(const std::string& folder, int64_t first_step);

  /// Adds one value to each named curve, as float32. A number that is not finite is left out; a
  /// finite one beyond float32's range becomes an infinity.
  /// Errors: c10::Error that names the file; the event is not there then, not even half.
  void add_scalars(int64_t step, const Scalars& scalars);
  /// Adds a text, which TensorBoard reads as Markdown.
  /// Errors: as above.
  void add_text(int64_t step, std::string_view tag, std::string_view markdown);

 private:
  void add_event(std::optional<int64_t> step, std::string_view fields);

  AppendFile file_;
};

/// CRC-32C (Castagnoli), as in iSCSI and in event files.
uint32_t crc32c(std::string_view bytes);

}  // namespace cohort::train
