// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/event_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <unistd.h>

#include "cohort/base/error.h"

namespace cohort::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "events.out.tfevents.";

double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// The time must have ten digits and not be earlier than that of the folder's last file: TensorBoard
// reads them by name.
std::string new_file(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  std::error_code unknown;  // `error` has why it was not made.
  if (!fs::is_directory(folder, unknown))
    throw ConfigError(folder + " cannot be made: " + error.message());
  auto seconds = static_cast<long long>(now());
  fs::directory_iterator files(folder, error);
  for (; !error && files != fs::directory_iterator(); files.increment(error)) {
    long long there = 0;
    const std::string format = std::string(kPrefix) + "%10lld.";
    if (std::sscanf(files->path().filename().c_str(), format.c_str(), &there) == 1)
      seconds = std::max(seconds, there + 1);
  }
  if (error) throw ConfigError(folder + " cannot be read: " + error.message());
  std::array<char, HOST_NAME_MAX + 1> host{};
  ::gethostname(host.data(), host.size() - 1);
  return folder + "/" + kPrefix + std::to_string(seconds) + "." + host.data() + "." +
         std::to_string(::getpid());
}

template <class Number>
std::string little_endian(Number number) {
  static_assert(std::endian::native == std::endian::little);
  return {reinterpret_cast<const char*>(&number), sizeof number};
}

// Protobuf: each field begins with its number and the kind of what follows.
enum WireType : uint64_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

std::string varint(uint64_t number) {
  std::string bytes;
  for (; number >= 0x80; number >>= 7) bytes += static_cast<char>(number | 0x80);
  return bytes + static_cast<char>(number);
}

std::string key(uint64_t field, WireType type) {
  return varint(field << 3 | type);
}
std::string integer(uint64_t field, int64_t value) {
  return key(field, kVarint) + varint(static_cast<uint64_t>(value));
}
std::string message(uint64_t field, std::string_view content) {
  return key(field, kBytes) + varint(content.size()) + std::string(content);
}

// Fields of Event, Summary and Summary.Value, from TensorFlow's event.proto and summary.proto.
constexpr uint64_t kEventTime = 1, kEventStep = 2, kEventVersion = 3, kEventSummary = 5,
                   kEventSessionLog = 7;
constexpr uint64_t kSummaryValue = 1;
constexpr uint64_t kValueTag = 1, kValueNumber = 2, kValueTensor = 8, kValueMetadata = 9;

// A session begins here: what other files hold of this step and later ones is void.
std::string session_start() {
  return message(kEventSessionLog, integer(/*status*/ 1, /*START*/ 1));
}

std::string text_value(std::string_view tag, std::string_view text) {
  constexpr int64_t kDtString = 7, kDataClassTensor = 2;
  const std::string shape = message(/*dim*/ 2, integer(/*size*/ 1, 1));
  const std::string tensor = integer(/*dtype*/ 1, kDtString) + message(/*tensor_shape*/ 2, shape) +
                             message(/*string_val*/ 8, text);
  const std::string metadata = message(/*plugin_data*/ 1, message(/*plugin_name*/ 1, "text")) +
                               integer(/*data_class*/ 4, kDataClassTensor);
  return message(kValueTag, tag) + message(kValueTensor, tensor) +
         message(kValueMetadata, metadata);
}

std::string masked_checksum(std::string_view bytes) {
  return little_endian(std::rotr(crc32c(bytes), 15) + 0xa282ead8U);
}

constexpr std::array<uint32_t, 256> checksum_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < table.size(); ++i) {
    table[i] = i;
    for (int bit = 0; bit < 8; ++bit)
      table[i] = table[i] >> 1 ^ ((table[i] & 1) != 0 ? 0x82F63B78U : 0);
  }
  return table;
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  static constexpr auto kTable = checksum_table();
  uint32_t sum = ~0U;
  for (const char byte : bytes)
    sum = sum >> 8 ^ kTable[(sum ^ static_cast<unsigned char>(byte)) & 0xFF];
  return ~sum;
}

EventFile::EventFile(const std::string& folder, int64_t first_step)
    : file_(new_file(folder), AppendFile::Open::kNew) {
  add_event({}, message(kEventVersion, "brain.Event:2"));
  add_event(first_step, session_start());
}

void EventFile::add_scalars(int64_t step, const Scalars& scalars) {
  std::string values;
  for (const auto& [tag, value] : scalars) {
    if (!std::isfinite(value)) continue;
    values += message(kSummaryValue, message(kValueTag, tag) + key(kValueNumber, kFixed32) +
                                         little_endian(static_cast<float>(value)));
  }
  if (!values.empty()) add_event(step, message(kEventSummary, values));
}

void EventFile::add_text(int64_t step, std::string_view tag, std::string_view markdown) {
  add_event(step, message(kEventSummary, message(kSummaryValue, text_value(tag, markdown))));
}

// A record: the length, its checksum, the event, its checksum.
void EventFile::add_event(std::optional<int64_t> step, std::string_view fields) {
  std::string event = key(kEventTime, kFixed64) + little_endian(now());
  if (step) event += integer(kEventStep, *step);
  event += fields;
  const std::string length = little_endian(static_cast<uint64_t>(event.size()));
  file_.append(length + masked_checksum(length) + event + masked_checksum(event));
}

}  // namespace cohort::train
