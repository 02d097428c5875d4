// SPDX-License-Identifier: Apache-2.0
// Entries of a zip archive that are stored as they are: what torch.save writes.
#pragma once
#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <string_view>

namespace cohort {

/// Whether these bytes begin as a zip archive does.
bool is_zip_archive(std::span<const std::byte> file);

/// Returns views of the entries of the archive `file`, by name, zip64 included, but of those that
/// are compressed or encrypted: torch.save compresses code alone. Checksums are not read: it can
/// leave them out.
/// Errors: ConfigError that begins with `path` and names the entry: no archive, cut short, entries
///         that are doubled, or not within the file.
/// Source: PKWARE, APPNOTE.TXT 6.3.10, section 4.3.
std::map<std::string, std::span<const std::byte>, std::less<>> zip_entries(
    const std::string& path, std::span<const std::byte> file);

}  // namespace cohort
