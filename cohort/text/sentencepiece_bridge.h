// SPDX-License-Identifier: Apache-2.0
// The only door to SentencePiece: everything behind it lives in one shared library with hidden
// symbols, because SentencePiece's own (flags, protobuf) clash with libtorch's and gRPC's.
//
// Internal to cohort/text; programs use tokenizer.h. No exception crosses: errors are texts.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::text::bridge {

/// A loaded model.
/// Threads: const calls from any thread.
class [[gnu::visibility("default")]] PieceModel {
 public:
  /// Returns the model in `bytes` (a model file's content), or null and the reason in `error`.
  static std::unique_ptr<PieceModel> load(std::string_view bytes, std::string & error);
  ~PieceModel();
  PieceModel(const PieceModel&) = delete;
  PieceModel& operator=(const PieceModel&) = delete;

  int32_t num_pieces() const;
  int32_t pad_id() const;
  int32_t unk_id() const;
  int32_t bos_id() const;
  int32_t eos_id() const;
  /// Precondition: 0 <= id < num_pieces().
  std::string piece(int32_t id) const;
  std::vector<int32_t> encode(std::string_view text) const;
  /// Precondition: 0 <= id < num_pieces() for all.
  std::string decode(std::span<const int32_t> ids) const;

 private:
  struct Processor;
  explicit PieceModel(std::unique_ptr<Processor> processor);
  std::unique_ptr<Processor> processor_;
};

/// One trainer option: SentencePiece's name of it, and its value.
struct TrainerFlag {
  std::string name;
  std::string value;
};

/// Trains a model; returns its bytes, or nothing and the reason in `error`. Prints nothing.
[[gnu::visibility("default")]] std::string train(std::span<const std::string> sentences,
                                                 std::span<const TrainerFlag> flags,
                                                 std::string& error);

}  // namespace cohort::text::bridge
