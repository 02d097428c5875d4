// SPDX-License-Identifier: Apache-2.0
#include "cohort/text/sentencepiece_bridge.h"

#include <exception>
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>
#include <unordered_map>
#include <utility>

namespace cohort::text::bridge {
namespace {

constexpr int kFatalOnly = 3;  // SentencePiece's log levels: 0 info .. 3 fatal.

// Walks over the caller's sentences without copying them.
class SpanIterator : public sentencepiece::SentenceIterator {
 public:
  explicit SpanIterator(std::span<const std::string> sentences) : sentences_(sentences) {}
  bool done() const override { return next_ == sentences_.size(); }
  void Next() override { ++next_; }
  const std::string& value() const override { return sentences_[next_]; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  std::span<const std::string> sentences_;
  size_t next_ = 0;
};

}  // namespace

struct PieceModel::Processor {
  sentencepiece::SentencePieceProcessor model;
};

PieceModel::PieceModel(std::unique_ptr<Processor> processor) : processor_(std::move(processor)) {}
PieceModel::~PieceModel() = default;

std::unique_ptr<PieceModel> PieceModel::load(std::string_view bytes, std::string& error) {
  sentencepiece::SetMinLogLevel(kFatalOnly);
  auto processor = std::make_unique<Processor>();
  try {
    const auto status = processor->model.LoadFromSerializedProto({bytes.data(), bytes.size()});
    if (!status.ok()) {
      error = status.error_message();
      return nullptr;
    }
  } catch (const std::exception& caught) {
    error = caught.what();
    return nullptr;
  }
  return std::unique_ptr<PieceModel>(new PieceModel(std::move(processor)));
}

int32_t PieceModel::num_pieces() const {
  return processor_->model.GetPieceSize();
}
int32_t PieceModel::pad_id() const {
  return processor_->model.pad_id();
}
int32_t PieceModel::unk_id() const {
  return processor_->model.unk_id();
}
int32_t PieceModel::bos_id() const {
  return processor_->model.bos_id();
}
int32_t PieceModel::eos_id() const {
  return processor_->model.eos_id();
}

std::string PieceModel::piece(int32_t id) const {
  return processor_->model.IdToPiece(id);
}

std::vector<int32_t> PieceModel::encode(std::string_view text) const {
  return processor_->model.EncodeAsIds({text.data(), text.size()});
}

std::string PieceModel::decode(std::span<const int32_t> ids) const {
  return processor_->model.DecodeIds(std::vector<int>(ids.begin(), ids.end()));
}

std::string train(std::span<const std::string> sentences, std::span<const TrainerFlag> flags,
                  std::string& error) {
  std::unordered_map<std::string, std::string> arguments;
  for (const TrainerFlag& flag : flags) arguments[flag.name] = flag.value;
  arguments["minloglevel"] = std::to_string(kFatalOnly);
  std::string bytes;
  try {
    SpanIterator iterator(sentences);
    const auto status = sentencepiece::SentencePieceTrainer::Train(arguments, &iterator, &bytes);
    if (!status.ok()) {
      error = status.error_message();
      return {};
    }
  } catch (const std::exception& caught) {
    error = caught.what();
    return {};
  }
  return bytes;
}

}  // namespace cohort::text::bridge
