// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/atomic_file.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fcntl.h>
#include <filesystem>
#include <optional>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/base/fd.h"
#include "cohort/base/system_error.h"

namespace cohort {
namespace {

constexpr size_t kMaxChunk = size_t{1} << 30;  // One write() moves less than 2 GiB.

[[noreturn]] void fail(const std::string& path, const char* action, int error) {
  throw_without_stack(path + ": cannot " + action + ": " + system_reason(error));
}

// Removes the temporary file unless it became the real one.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::filesystem::path& target) {
    const std::string prefix = target.filename().string() + ".tmp-" + std::to_string(::getpid());
    for (int attempt = 0;; ++attempt) {
      name_ = target.parent_path() / (prefix + "-" + std::to_string(attempt));
      descriptor_ = ::open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (descriptor_ >= 0) return;
      if (is_of_the_path(errno)) {
        throw ConfigError(target.string() +
                          ": expected a path in a writable folder: " + system_reason(errno));
      }
      if (errno != EEXIST) fail(target.string(), "make a temporary file beside it", errno);
    }
  }
  ~TemporaryFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (!renamed_) ::unlink(name_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  int descriptor() const { return descriptor_; }

  void become(const std::string& path) {
    if (::fsync(descriptor_) != 0) fail(path, "sync", errno);
    const int closed = ::close(descriptor_);
    descriptor_ = -1;
    if (closed != 0) fail(path, "close", errno);
    if (::rename(name_.c_str(), path.c_str()) != 0) {
      const int error = errno;
      if (std::error_code ignored; std::filesystem::is_directory(path, ignored))
        throw ConfigError(path + ": expected the path of a file: " + system_reason(EISDIR));
      fail(path, "rename to it", error);
    }
    renamed_ = true;
  }

 private:
  std::filesystem::path name_;
  int descriptor_ = -1;
  bool renamed_ = false;
};

void sync_folder_of(const std::string& path) {
  auto folder = std::filesystem::path(path).parent_path();
  if (folder.empty()) folder = ".";
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail(path, "open its folder", errno);
  const int error = ::fsync(descriptor) == 0 ? 0 : errno;
  ::close(descriptor);
  // EINVAL: the file system has no syncing of folders.
  if (error != 0 && error != EINVAL) fail(path, "sync its folder", error);
}

std::optional<int> number_in(const std::string& text) {
  int number = -1;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end ? std::optional(number) : std::nullopt;
}

// The descriptor that `path` is a name of: /dev/stdout, /dev/fd/1, /proc/self/fd/1, links to them.
std::optional<int> named_descriptor(std::filesystem::path path) {
  constexpr int kMostLinks = 40;
  std::error_code error;
  const auto descriptors = std::filesystem::canonical("/proc/self/fd", error);
  for (int i = 0; i < kMostLinks && !error; ++i) {
    const auto folder = path.has_parent_path() ? path.parent_path() : ".";
    if (std::filesystem::canonical(folder, error) == descriptors && !error)
      return number_in(path.filename().string());
    // No link: an error, which ends the search.
    if (const auto target = std::filesystem::read_symlink(path, error); !error)
      path = folder / target;
  }
  return std::nullopt;
}

// Opens what nothing may be renamed onto; none: a file may be. A descriptor is duplicated, for
// another opening of its file would begin at the start.
Fd open_in_place(const std::string& path) {
  Fd there;
  if (const auto descriptor = named_descriptor(path)) {
    there = Fd(::fcntl(*descriptor, F_DUPFD_CLOEXEC, 0));
  } else {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode) || S_ISDIR(status.st_mode))
      return {};
    there = Fd(::open(path.c_str(), O_WRONLY | O_NOCTTY | O_CLOEXEC));
  }
  if (there) return there;
  throw ConfigError(path + ": expected what can be written to: " + system_reason(errno));
}

}  // namespace

void make_folder(const std::string& path) {
  std::error_code ignored;
  if (path.empty() || std::filesystem::is_directory(path, ignored)) return;
  make_folder(std::filesystem::path(path).parent_path().string());
  if (::mkdir(path.c_str(), 0777) != 0) {
    const int error = errno;
    if (std::filesystem::is_directory(path, ignored)) return;  // Another rank was faster.
    if (error == EEXIST || is_of_the_path(error)) {
      throw ConfigError(
          path + ": expected a folder, or a place where one can be made: " + system_reason(error));
    }
    fail(path, "make this folder", error);
  }
  sync_folder_of(path);
}

void make_writable_folder(const std::string& path) {
  make_folder(path);
  const std::string trial = path + "/.trial-" + std::to_string(::getpid());
  const Fd file(::open(trial.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  if (!file) {
    throw ConfigError(path + ": expected a folder that can be written to: " + system_reason(errno));
  }
  ::unlink(trial.c_str());
}

void FileWriter::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), std::min(bytes.size(), kMaxChunk));
    if (written < 0) {
      if (errno == EINTR) continue;
      fail(path_, "write", errno);
    }
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

// A file system may refuse the flag, or want larger units.
void FileWriter::write_direct(std::span<const std::byte> bytes) {
  if (set_direct(true)) {
    while (!bytes.empty()) {
      const ssize_t written = ::write(descriptor_, bytes.data(), std::min(bytes.size(), kMaxChunk));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0 && errno != EINVAL) fail(path_, "write", errno);
      if (written <= 0) break;
      bytes = bytes.subspan(static_cast<size_t>(written));
      if (written % kDirectUnit != 0) break;
    }
    set_direct(false);
  }
  write(bytes);
}

bool FileWriter::set_direct(bool on) const {
  struct stat status {};
  // To a pipe the flag means something else: packets.
  if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) return false;
  const int flags = ::fcntl(descriptor_, F_GETFL);
  return flags >= 0 &&
         ::fcntl(descriptor_, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

void write_atomically(const std::string& path, const std::function<void(FileWriter&)>& body) {
  if (const Fd there = open_in_place(path)) {
    FileWriter writer(there.get(), path);
    body(writer);
    return;
  }
  write_atomically_renamed(path, [&](FileWriter& writer) {
    body(writer);
    return path;
  });
}

void write_atomically_renamed(const std::string& path,
                              const std::function<std::string(FileWriter&)>& body) {
  TemporaryFile temporary(path);
  FileWriter writer(temporary.descriptor(), path);
  temporary.become(body(writer));
  sync_folder_of(path);
}

void write_atomically(const std::string& path, std::string_view content) {
  write_atomically(path, [&](FileWriter& writer) { writer.write(content); });
}

void write_atomically(const std::string& path, std::span<const std::byte> content) {
  write_atomically(path, [&](FileWriter& writer) { writer.write(content); });
}

}  // namespace cohort
