// SPDX-License-Identifier: Apache-2.0
// What a checkpoint's manifest.json says: which tensors there are, and which file holds which of
// their elements. Knows nothing of torch.
//
//   {"version": 2, "update": 500,
//    "files": {"weights.0-of-2": {"name": "weights-500.0-of-2.5c0e1f7a.safetensors",
//                                 "sha256": "5c0e1f7a...", "bytes": 4242}, ...},
//    "facts": {"model.dim_emb": "512", ...},
//    "tensors": {"weights": {"embedding": {"dtype": "F32", "shape": [8, 4],
//        "ranges": {"weights.0-of-2": [0, 16], "weights.1-of-2": [16, 32]}}, ...}},
//    "sha256": "77af778b..."}
//
// Ranges are begin and end of elements counted row by row, pair after pair. A file holds its ranges
// of a tensor end to end under the tensor's name: in the tensor's shape if that is all of it, else
// in one dimension. The last line is the SHA-256 of the text before it; a manifest without that
// line is read, too. Manifests of version 1 have no "tensors": each file is a part, and its header
// says the rest.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/safetensors.h"

namespace cohort {

/// Elements [begin, end) of a tensor, counted row by row.
struct ElementRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const ElementRange&) const = default;
};

struct StoredFile {
  std::string name;  ///< In the checkpoint's folder.
  std::string sha256;
  std::optional<uint64_t> bytes;  ///< Version 1 does not say.
  bool operator==(const StoredFile&) const = default;
};

struct StoredTensor {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::map<std::string, std::vector<ElementRange>> ranges;  ///< By file's key; ascending.
};

/// A plain value. A checkpoint's is whole (`check_coverage`); that of one rank's share is not.
struct Manifest {
  int version = 2;
  std::optional<int64_t> update;
  std::map<std::string, std::string> metadata;  ///< "facts" in the file.
  std::map<std::string, StoredFile> files;      ///< By key: the part, and which share of it.
  std::map<std::string, std::map<std::string, StoredTensor>> parts;  ///< Then by tensor.

  /// Reads a folder's manifest.
  /// Errors: ConfigError that names the file: there is none, it is no manifest, was changed, was
  ///         written by a later version, or its ranges are not every element of every tensor once.
  static Manifest read(const std::string& folder);
  /// Reads JSON, whole or a share.
  /// Errors: ConfigError that begins with `where`.
  static Manifest parse(const std::string& json, const std::string& where);
  /// Errors: ConfigError if a name or the metadata is not UTF-8.
  std::string to_json() const;

  /// Adds another share's files and tensors.
  /// Errors: ConfigError that begins with `where` if a tensor has another type or shape there.
  void add(const Manifest& other, const std::string& where);
  /// Errors: ConfigError that begins with `where` and names tensor and elements if an element is in
  ///         no file, or in two.
  void check_coverage(const std::string& where) const;
};

/// "[3, 2]".
std::string to_string(const std::vector<int64_t>& shape);

}  // namespace cohort
