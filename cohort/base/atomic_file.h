// SPDX-License-Identifier: Apache-2.0
// Files that are either complete or absent, even when the power fails.
#pragma once
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace cohort {

/// Makes the folder `path` and those it lies in, as far as they are not there, and syncs what each
/// of them lies in: a file that is synced in it later outlives a power cut, and the folder with it.
/// Errors: ConfigError or c10::Error that names the folder and gives the system's reason.
void make_folder(const std::string& path);
/// Makes the folder likewise, and tries to write in it. Leaves nothing there.
/// Errors: ConfigError that names the folder and gives the system's reason, or as make_folder.
void make_writable_folder(const std::string& path);

/// Where the content of a file that is being written goes. Valid during the callback only.
class FileWriter {
 public:
  FileWriter(int descriptor, const std::string& path) : descriptor_(descriptor), path_(path) {}

  /// Errors: c10::Error that names the file and gives the system's reason.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }

  /// The same without the page cache, where the file system can do that: the bytes go from where
  /// they are to the disk. Their address, their number, and what was written before them must be
  /// multiples of kDirectUnit.
  void write_direct(std::span<const std::byte> bytes);
  static constexpr size_t kDirectUnit = 4096;

 private:
  bool set_direct(bool on) const;

  int descriptor_;
  const std::string& path_;
};

/// Replaces the file `path` by `content` in one step; a reader sees the old file or the new one.
///
/// A temporary file in the same folder is written, synced and renamed, then the folder is synced.
/// On failure the temporary file is removed and the old file is untouched, unless only the syncing
/// of the folder failed: then the new file is there but may not outlive a power cut. A symbolic
/// link to a file is replaced, not followed. The mode is 0666 less the umask.
///
/// What is there and is no file (a device, a pipe, a link to one) is never replaced but written
/// straight into, as it comes; likewise an open descriptor by its name (/dev/stdout, /dev/fd/3), at
/// its position, whatever it leads to.
/// Blocks:  until the disk has it.
/// Errors:  ConfigError if the folder is missing or not writable; c10::Error where another path
///          would not help (disk full ...). Both name `path` and give the system's reason.
void write_atomically(const std::string& path, std::string_view content);
void write_atomically(const std::string& path, std::span<const std::byte> content);

/// The same, with content that `body` writes piece by piece. What `body` throws passes through.
void write_atomically(const std::string& path, const std::function<void(FileWriter&)>& body);

/// The same for a name that hangs on the content: when all is written, `body` returns the path to
/// be used instead of `path`, in the same folder, where a file is made in any case. Errors name
/// `path`.
void write_atomically_renamed(const std::string& path,
                              const std::function<std::string(FileWriter&)>& body);

}  // namespace cohort
