// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/rpc/shared_area.h"

#include <algorithm>
#include <array>
#include <c10/util/Exception.h>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <linux/magic.h>
#include <poll.h>
#include <random>
#include <string_view>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

#include "cohort/base/system_error.h"

namespace cohort::ps {

namespace {

// The area's first line holds its number alone. Parts begin at lines.
constexpr uint64_t kLine = 64;
constexpr uint64_t kStep = uint64_t{1} << 20;  // By which memory is allocated.
constexpr size_t kMostAreas = 4096;
constexpr const char* kName = "cohort-ps";

// Not 0, which is what other memory begins with.
uint64_t draw_number() {
  std::random_device device;
  return uint64_t{device()} << 32 | device() | 1;
}

std::string own_path(const Fd& file) {
  return "/proc/self/fd/" + std::to_string(file.get());
}

// Whether it was made by SharedArea, by whichever process.
bool has_its_name(const Fd& file) {
  std::array<char, 64> name{};
  const ssize_t length = ::readlink(own_path(file).c_str(), name.data(), name.size());
  return length > 0 && std::string_view(name.data(), static_cast<size_t>(length)) ==
                           "/memfd:" + std::string(kName) + " (deleted)";
}

}  // namespace

SharedArea::SharedArea(uint64_t bytes) {
  file_ = Fd(::memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  TORCH_CHECK(file_ && ::ftruncate(file_.get(), static_cast<off_t>(bytes)) == 0 &&
                  ::fcntl(file_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0,
              "shared memory: cannot make it: ", system_reason(errno));
  name_ = {.process = ::getpid(), .file = file_.get(), .number = draw_number(), .bytes = bytes};
  TORCH_CHECK(allocate(0, kLine), "shared memory: there is no memory for it");
  map();
  std::memcpy(data_, &name_.number, sizeof(name_.number));
}

SharedArea::SharedArea(const SharedAreaName& name) : name_(name) {
  TORCH_CHECK(name.bytes >= kLine && name.bytes <= kMostBytes, "shared memory: of ", name.bytes,
              " bytes: expected at most ", kMostBytes);
  TORCH_CHECK(name.number != 0, "shared memory: expected its number, got 0");
  process_ = Fd(static_cast<int>(::syscall(SYS_pidfd_open, name.process, 0)));
  TORCH_CHECK(process_, "shared memory: process ", name.process, ": ", system_reason(errno));
  const std::string path =
      "/proc/" + std::to_string(name.process) + "/fd/" + std::to_string(name.file);
  // The caller names any file of any process of this user: what it is is seen before it is opened.
  const Fd found(::open(path.c_str(), O_PATH | O_CLOEXEC));
  TORCH_CHECK(found, "shared memory: ", path, ": ", system_reason(errno));
  TORCH_CHECK(has_its_name(found), "shared memory: ", path, ": no trainer shares it");
  file_ = Fd(::open(own_path(found).c_str(), O_RDWR | O_CLOEXEC));
  TORCH_CHECK(file_, "shared memory: ", path, ": ", system_reason(errno));
  struct stat status {};
  struct statfs file_system {};
  const int seals = ::fcntl(file_.get(), F_GET_SEALS);
  TORCH_CHECK(seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && ::fstat(file_.get(), &status) == 0 &&
                  status.st_uid == ::geteuid() &&
                  static_cast<uint64_t>(status.st_size) >= name.bytes,
              "shared memory: ", path, ": it is not memory of this user that keeps its size");
  TORCH_CHECK(::fstatfs(file_.get(), &file_system) == 0 && file_system.f_type == TMPFS_MAGIC,
              "shared memory: ", path, ": it is not of ordinary pages");
  map();
  const bool is_meant = std::memcmp(data_, &name.number, sizeof(name.number)) == 0;
  file_.reset();
  if (!is_meant) ::munmap(data_, name_.bytes);
  TORCH_CHECK(is_meant, "shared memory: ", path, ": it is another process's");
}

SharedArea::~SharedArea() {
  ::munmap(data_, name_.bytes);
}

bool SharedArea::allocate(uint64_t begin, uint64_t end) const {
  int error = EINTR;
  while (error == EINTR)
    error =
        ::posix_fallocate(file_.get(), static_cast<off_t>(begin), static_cast<off_t>(end - begin));
  return error == 0;
}

void SharedArea::map() {
  void* const data =
      ::mmap(nullptr, name_.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  TORCH_CHECK(data != MAP_FAILED, "shared memory: cannot map it: ", system_reason(errno));
  data_ = static_cast<std::byte*>(data);
}

bool SharedArea::is_orphaned() const {
  pollfd ended{.fd = process_.get(), .events = POLLIN, .revents = 0};
  return ::poll(&ended, 1, 0) > 0;
}

std::optional<std::span<std::byte>> SharedArea::part(uint64_t offset, uint64_t bytes) const {
  if (offset % 8 != 0 || bytes % 8 != 0 || offset < kLine || offset > name_.bytes ||
      bytes > name_.bytes - offset)
    return std::nullopt;
  return std::span(data_ + offset, bytes);
}

std::optional<uint64_t> SharedArea::offset_of(std::span<const std::byte> bytes) const {
  const std::less<> before;
  if (before(bytes.data(), data_) || !before(bytes.data(), data_ + name_.bytes))
    return std::nullopt;
  return static_cast<uint64_t>(bytes.data() - data_);
}

SharedParts::SharedParts(uint64_t bytes) : area_(bytes) {}

std::shared_ptr<SharedParts::Part> SharedParts::take(uint64_t bytes) {
  const uint64_t rounded = (bytes + kLine - 1) / kLine * kLine;
  if (bytes == 0 || bytes > area_.name().bytes) return nullptr;
  const std::lock_guard lock(mutex_);
  uint64_t begin = kLine;
  for (const auto& [first, taken] : taken_) {
    if (first - begin >= rounded) break;
    begin = taken.end;
  }
  const auto found = area_.part(begin, rounded);
  if (!found) return nullptr;
  if (const uint64_t end = begin + rounded; end > allocated_) {
    const uint64_t more = std::min((end + kStep - 1) / kStep * kStep, area_.name().bytes);
    if (!area_.allocate(allocated_, more)) return nullptr;
    allocated_ = more;
  }
  taken_[begin] = {.end = begin + rounded};
  return std::make_shared<Part>(shared_from_this(), begin, *found);
}

void SharedParts::give_back(uint64_t offset) {
  const std::lock_guard lock(mutex_);
  const auto part = taken_.find(offset);
  if (!part->second.is_lost) taken_.erase(part);
}

void SharedParts::lose(uint64_t offset) {
  const std::lock_guard lock(mutex_);
  Taken& part = taken_.at(offset);
  if (!part.is_lost) lost_bytes_ += part.end - offset;
  part.is_lost = true;
}

uint64_t SharedParts::lost_bytes() const {
  const std::lock_guard lock(mutex_);
  return lost_bytes_;
}

SharedParts::Part::~Part() {
  parts_->give_back(offset_);
}

std::optional<SharedMessage> read_shared_message(std::span<const std::byte> bytes) {
  SharedMessage shared;
  if (bytes.size() != sizeof(shared)) return std::nullopt;
  std::memcpy(&shared, bytes.data(), sizeof(shared));
  if (shared.magic != SharedMessage::kMagic) return std::nullopt;
  return shared;
}

void SharedAreas::add(uint64_t channel, const SharedAreaName& name) {
  auto area = std::make_shared<const SharedArea>(name);
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(areas_.size() < kMostAreas || areas_.contains(channel),
              "shared memory: this server has ", kMostAreas, " areas already");
  areas_[channel] = std::move(area);
}

void SharedAreas::remove(uint64_t channel) {
  const std::lock_guard lock(mutex_);
  areas_.erase(channel);
}

void SharedAreas::remove_orphans() {
  const std::lock_guard lock(mutex_);
  std::erase_if(areas_, [](const auto& entry) { return entry.second->is_orphaned(); });
}

std::shared_ptr<const SharedArea> SharedAreas::find(uint64_t number) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [channel, area] : areas_) {
    if (area->name().number == number) return area;
  }
  return nullptr;
}

std::optional<SharedPlaces> SharedAreas::find(const SharedMessage& message) const {
  auto area = find(message.area);
  const auto part = area ? area->part(message.offset, message.bytes) : std::nullopt;
  if (!part) return std::nullopt;
  const auto answer = area->part(message.answer_offset, message.answer_bytes);
  return SharedPlaces{.area = std::move(area), .message = *part, .answer = answer};
}

}  // namespace cohort::ps
