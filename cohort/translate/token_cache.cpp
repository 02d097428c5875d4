// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/token_cache.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

#include "cohort/base/atomic_file.h"
#include "cohort/base/checksum.h"
#include "cohort/base/error.h"
#include "cohort/base/fd.h"
#include "cohort/base/system_error.h"
#include "cohort/text/parallel_text.h"
#include "cohort/train/check_same.h"
#include "cohort/translate/parallel_for.h"
#include "cohort/translate/run_on_ranks.h"
#include "cohort/translate/summed_file.h"

namespace cohort::translate {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "cohort token cache 1";
constexpr std::array kTensors = {"ids", "lengths", "offsets"};
// Tens of millions of pairs take an hour on one core.
constexpr std::chrono::hours kBuildLimit{12};

// What the system says of a file: equal text means an unchanged file (see the header).
struct FileState {
  std::string text;
  int64_t last_change_ns = 0;
};

FileState state_of(const fs::path& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0)
    throw ConfigError(path.string() + ": cannot be read: " + system_reason(errno));
  const auto ns = [](const timespec& time) { return time.tv_sec * 1'000'000'000 + time.tv_nsec; };
  const int64_t content = ns(info.st_mtim);
  const int64_t status = ns(info.st_ctim);
  std::string text;
  for (const int64_t number : {static_cast<int64_t>(info.st_dev), static_cast<int64_t>(info.st_ino),
                               static_cast<int64_t>(info.st_size), content, status})
    text += (text.empty() ? "" : " ") + std::to_string(number);
  return {text, std::max(content, status)};
}

// A metadata key of the `number`th text file.
std::string text_key(size_t number, const char* what) {
  return "text." + std::to_string(number) + "." + what;
}

// All that decides about the content but the text itself.
TensorMetadata metadata_of_inputs(const TokenCacheInputs& inputs) {
  TensorMetadata metadata{{"format", kFormat},
                          {"text.count", std::to_string(inputs.text.size())},
                          {"max_length", std::to_string(inputs.lengths.max_length)},
                          {"max_length_crop", inputs.lengths.max_length_crop ? "1" : "0"}};
  const std::array names = {"vocabulary.source_sha256", "vocabulary.target_sha256"};
  for (size_t side = 0; side < names.size(); ++side)
    metadata[names[side]] = sha256_of_file(inputs.vocabularies.at(side).string());
  // The form of a single file goes by it.
  if (inputs.text.size() == 1) metadata["text.form"] = inputs.text[0].extension().string();
  return metadata;
}

std::string count_key(const char* name) {
  std::string key = "pairs.";
  return key += name;
}

// Why a whole cache with this metadata is not of `inputs`; nothing if it is.
std::string difference_of(const TensorMetadata& metadata, const TokenCacheInputs& inputs) {
  for (const auto& [name, value] : metadata_of_inputs(inputs)) {
    if (entry_of(metadata, name) == value) continue;
    return name + " was " + entry_of(metadata, name) + ", now it is " + value;
  }
  for (size_t i = 0; i < inputs.text.size(); ++i) {
    if (entry_of(metadata, text_key(i, "state")) == state_of(inputs.text[i]).text) continue;
    if (entry_of(metadata, text_key(i, "sha256")) != sha256_of_file(inputs.text[i].string()))
      return inputs.text[i].string() + " has changed";
  }
  return "";
}

TrainingText text_of(std::shared_ptr<const SafetensorsFile> file, const std::string& origin) {
  const TensorMetadata& metadata = file->metadata();
  TrainingText text;
  visit_counts(text.counts, [&](const char* name, int64_t& count) {
    count = std::strtoll(entry_of(metadata, count_key(name)).c_str(), nullptr, 10);
  });
  Sha256 sum;
  sum.update(entry_of(metadata, "sha256.lengths") + entry_of(metadata, "sha256.ids"));
  text.sha256 = sum.hex();
  text.origin = origin;
  text.corpus = Corpus(std::move(file));
  return text;
}

[[noreturn]] void refuse_folder_of(const fs::path& file, int error) {
  throw ConfigError(
      fs::absolute(file).parent_path().string() +
      ": expected a folder in which the token cache can be written: " + system_reason(error));
}

void make_folder_of(const fs::path& file) {
  if (file.parent_path().empty()) return;
  std::error_code error;
  fs::create_directories(file.parent_path(), error);
  std::error_code ignored;
  if (!fs::is_directory(file.parent_path(), ignored)) refuse_folder_of(file, error.value());
}

// A growing array of numbers on the disk beside `target`, without a name: it vanishes with this.
class Column {
 public:
  explicit Column(const fs::path& target) : target_(target.string()) {
    std::string name = target_ + ".part-XXXXXX";
    file_ = Fd(::mkostemp(name.data(), O_CLOEXEC));
    if (!file_ && is_of_the_path(errno)) refuse_folder_of(target, errno);
    if (!file_) fail("make a temporary file beside it");
    ::unlink(name.c_str());
  }
  ~Column() {
    if (mapped_ != nullptr) ::munmap(mapped_, size_);
  }
  Column(const Column&) = delete;
  Column& operator=(const Column&) = delete;

  template <class T>
  void append(T number) {
    const auto bytes = std::as_bytes(std::span(&number, 1));
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
    size_ += sizeof(T);
    if (buffer_.size() >= size_t{1} << 20) flush();
  }
  size_t size_bytes() const { return size_; }

  // All that was appended; valid as long as this. Nothing may be appended after it.
  std::span<const std::byte> bytes() {
    flush();
    if (size_ == 0) return {};
    void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file_.get(), 0);
    if (mapped == MAP_FAILED) fail("map its parts");
    mapped_ = mapped;
    return {static_cast<const std::byte*>(mapped_), size_};
  }

 private:
  void flush() {
    FileWriter(file_.get(), target_).write(std::span<const std::byte>(buffer_));
    buffer_.clear();
  }
  [[noreturn]] void fail(const char* action) const {
    const int error = errno;
    throw_without_stack(target_ + ": cannot " + action + ": " + system_reason(error));
  }

  std::string target_;
  Fd file_;
  std::vector<std::byte> buffer_;
  size_t size_ = 0;
  void* mapped_ = nullptr;
};

// Pairs on their way from text into columns.
class Builder {
 public:
  Builder(const fs::path& file, const LengthOptions& options, const text::Tokenizer& source,
          const text::Tokenizer& target, const BuildNews& news)
      : options_(options),
        source_(source),
        target_(target),
        news_(news),
        ids_(file),
        lengths_(file),
        offsets_(file),
        is_small_(std::max(source.num_pieces(), target.num_pieces()) <= 1 << 15) {}

  void add(std::string& source, std::string& target) {
    sources_.push_back(std::move(source));
    targets_.push_back(std::move(target));
    if (sources_.size() == kBlock) flush();
  }

  // Writes what was added, with `metadata` and what is known here.
  void write(const fs::path& file, TensorMetadata metadata, int64_t num_dropped_empty) {
    flush();
    counts_.dropped_empty = num_dropped_empty;
    counts_.read += num_dropped_empty;
    if (num_pairs_ == 0) {
      throw ConfigError("--max-length " + std::to_string(options_.max_length) +
                        ": every training pair is longer");
    }
    const int64_t id_size = is_small_ ? sizeof(int16_t) : sizeof(int32_t);
    const std::array tensors = {
        TensorView{.name = "ids",
                   .dtype = is_small_ ? DType::kI16 : DType::kI32,
                   .shape = {static_cast<int64_t>(ids_.size_bytes()) / id_size},
                   .bytes = ids_.bytes()},
        TensorView{.name = "lengths",
                   .dtype = DType::kI32,
                   .shape = {num_pairs_, 2},
                   .bytes = lengths_.bytes()},
        TensorView{.name = "offsets",
                   .dtype = DType::kI64,
                   .shape = {num_pairs_},
                   .bytes = offsets_.bytes()}};
    visit_counts(counts_, [&](const char* name, int64_t count) {
      metadata[count_key(name)] = std::to_string(count);
    });
    add_sums(metadata, tensors);
    write_safetensors(file.string(), tensors, metadata);
  }

 private:
  using Ids = std::vector<int32_t>;
  static constexpr size_t kBlock = 8192;

  using Clock = std::chrono::steady_clock;

  void flush() {
    std::vector<Ids> sources(sources_.size());
    std::vector<Ids> targets(sources_.size());
    parallel_for(sources.size(), [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        sources[i] = source_.encode(sources_[i]);
        targets[i] = target_.encode(targets_[i]);
      }
    });
    for (size_t i = 0; i < sources.size(); ++i) append(sources[i], targets[i]);
    sources_.clear();
    targets_.clear();
    if (!news_.tell || Clock::now() - told_ < news_.interval) return;
    news_.tell(counts_.read);
    told_ = Clock::now();
  }

  void append(Ids& source, Ids& target) {
    ++counts_.read;
    const auto most = static_cast<size_t>(options_.max_length);
    const bool is_long = most > 0 && std::max(source.size(), target.size()) > most;
    if (is_long && !options_.max_length_crop) {
      ++counts_.dropped_long;
      return;
    }
    if (is_long) {
      ++counts_.cropped;
      source.resize(std::min(source.size(), most));
      target.resize(std::min(target.size(), most));
    } else {
      ++counts_.kept;
    }
    ++num_pairs_;
    lengths_.append(static_cast<int32_t>(source.size()) + 1);
    lengths_.append(static_cast<int32_t>(target.size()) + 1);
    offsets_.append(num_ids_);
    for (const Ids* side : {&source, &target}) {
      num_ids_ += std::ssize(*side);
      for (const int32_t id : *side) {
        if (is_small_) {
          ids_.append(static_cast<int16_t>(id));
        } else {
          ids_.append(id);
        }
      }
    }
  }

  const LengthOptions& options_;
  const text::Tokenizer& source_;
  const text::Tokenizer& target_;
  const BuildNews& news_;
  Column ids_, lengths_, offsets_;
  const bool is_small_;
  std::vector<std::string> sources_, targets_;  // to be tokenised
  PairCounts counts_;
  int64_t num_pairs_ = 0;
  int64_t num_ids_ = 0;
  Clock::time_point told_ = Clock::now();
};

}  // namespace

fs::path token_cache_file(const TokenCacheInputs& inputs, const std::string& cache_dir,
                          const std::string& model_dir) {
  if (cache_dir.empty()) return fs::path(model_dir) / "train-tokens.safetensors";
  TensorMetadata metadata = metadata_of_inputs(inputs);
  for (size_t i = 0; i < inputs.text.size(); ++i)
    metadata[text_key(i, "path")] = fs::absolute(inputs.text[i]).lexically_normal().string();
  return fs::path(cache_dir) / (sum_of_metadata(metadata).substr(0, 16) + "-tokens.safetensors");
}

OpenedCache open_token_cache(const fs::path& file, const TokenCacheInputs& inputs) {
  text::check_regular_files(inputs.text);
  if (std::error_code ignored; !fs::exists(file, ignored)) return {};
  TensorMetadata metadata;
  std::optional<TrainingText> text;
  try {
    auto opened = std::make_shared<const SafetensorsFile>(file.string());
    if (const auto damage = damage_of(*opened, kFormat, kTensors); !damage.empty())
      return {.text = {}, .why = "damaged: " + damage};
    metadata = opened->metadata();
    text = text_of(std::move(opened), "used");
  } catch (const ConfigError& error) {
    return {.text = {}, .why = "damaged: " + one_line(error)};
  }
  if (const auto difference = difference_of(metadata, inputs); !difference.empty())
    return {.text = {}, .why = "stale: " + difference};
  return {.text = std::move(text), .why = {}};
}

void build_token_cache(const fs::path& file, const TokenCacheInputs& inputs,
                       const text::Tokenizer& source, const text::Tokenizer& target,
                       const BuildNews& news) {
  constexpr int64_t kTrustedAge = 2'000'000'000;
  text::check_regular_files(inputs.text);
  make_folder_of(file);
  TensorMetadata metadata = metadata_of_inputs(inputs);
  const int64_t now = std::chrono::duration_cast<std::chrono::nanoseconds>(
                          std::chrono::system_clock::now().time_since_epoch())
                          .count();
  std::vector<FileState> states;
  for (size_t i = 0; i < inputs.text.size(); ++i) {
    states.push_back(state_of(inputs.text[i]));
    const bool is_trusted = now - states.back().last_change_ns > kTrustedAge;
    metadata[text_key(i, "state")] = is_trusted ? states.back().text : "young";
    metadata[text_key(i, "sha256")] = sha256_of_file(inputs.text[i].string());
  }
  Builder builder(file, inputs.lengths, source, target, news);
  const int64_t num_dropped_empty =
      text::for_each_pair(inputs.text, [&](std::string& s, std::string& t) { builder.add(s, t); });
  for (size_t i = 0; i < inputs.text.size(); ++i) {
    if (state_of(inputs.text[i]).text != states[i].text)
      throw ConfigError(inputs.text[i].string() + ": changed while it was read");
  }
  builder.write(file, std::move(metadata), num_dropped_empty);
}

TrainingText cached_text(const fs::path& file, const TokenCacheInputs& inputs,
                         const text::Tokenizer& source, const text::Tokenizer& target,
                         const comm::ProcessGroup& group, const BuildNews& news) {
  const bool is_mine = group.rank_info().local_rank == 0;
  OpenedCache opened;
  run_on_ranks(group, "the training text as tokens", is_mine, kBuildLimit, [&] {
    opened = open_token_cache(file, inputs);
    if (opened.text) return;
    build_token_cache(file, inputs, source, target, news);
    const bool was_there = !opened.why.empty();
    opened.text = text_of(std::make_shared<const SafetensorsFile>(file.string()),
                          was_there ? "built: the one there was " + opened.why : "built");
    opened.text->was_bad = was_there;
  });
  run_on_ranks(group, "the token cache", !is_mine, kBuildLimit, [&] {
    opened.text = text_of(std::make_shared<const SafetensorsFile>(file.string()), "used");
  });
  train::check_same_on_ranks(group, "--train-sets", "text", opened.text->sha256);
  opened.text->file = file;
  return std::move(*opened.text);
}

}  // namespace cohort::translate
