// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/lexical_table.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "cohort/base/checksum.h"
#include "cohort/base/error.h"
#include "cohort/base/safetensors.h"
#include "cohort/text/text_file.h"
#include "cohort/translate/summed_file.h"

namespace cohort::translate {
namespace {

constexpr const char* kTableFormat = "cohort shortlist 1";
constexpr std::array kTableTensors = {"offsets", "targets", "probabilities", "frequent"};

struct Likelihood {
  int32_t target;
  float probability;
};

// Puts the `best` of each source piece in order.
nmt::LexicalTable table_of(std::vector<std::vector<Likelihood>> by_source, int64_t best) {
  nmt::LexicalTable table{.offsets = {0}, .best = best};
  for (auto& found : by_source) {
    std::ranges::sort(found, [](const Likelihood& a, const Likelihood& b) {
      return std::pair(-a.probability, a.target) < std::pair(-b.probability, b.target);
    });
    const auto kept = std::min(found.size(), static_cast<size_t>(best));
    for (size_t i = 0; i < kept; ++i) {
      table.targets.push_back(found[i].target);
      table.probabilities.push_back(found[i].probability);
    }
    table.offsets.push_back(std::ssize(table.targets));
    std::vector<Likelihood>().swap(found);
  }
  return table;
}

// Expected counts and probabilities of pairs of pieces that occur together.
class PieceCounts {
 public:
  explicit PieceCounts(int64_t workspace_mib)
      : most_slots_(std::min<size_t>(
            static_cast<size_t>(workspace_mib) * (size_t{1} << 20) / kSlotBytes, size_t{1} << 31)) {
    while (most_slots_ >> doublings_ >= 2 * kFewestSlots) ++doublings_;
    resize(most_slots_ >> doublings_);
  }

  // Makes the pair's entry, if need be; entries of other pairs may be given up for it. Before the first normalise().
  void add(int32_t source, int32_t target, double count) {
    if (used_ * 4 >= keys_.size() * 3) make_room();
    const size_t slot = slot_of(key_of(source, target));
    if (keys_[slot] == kNone) {
      keys_[slot] = key_of(source, target);
      ++used_;
    }
    counts_[slot] += count;
  }
  // Where the pair is, or a place whose probability is 0.
  size_t find(int32_t source, int32_t target) const { return slot_of(key_of(source, target)); }
  float probability(size_t slot) const { return probabilities_[slot]; }
  void add_at(size_t slot, double count) { counts_[slot] += count; }

  // Probabilities of the counts, which begin again at 0.
  void normalise(int64_t source_pieces) {
    probabilities_.resize(keys_.size());
    std::vector<double> totals(static_cast<size_t>(source_pieces));
    for (size_t slot = 0; slot < keys_.size(); ++slot)
      if (keys_[slot] != kNone) totals[keys_[slot] >> 32] += counts_[slot];
    for (size_t slot = 0; slot < keys_.size(); ++slot) {
      if (keys_[slot] == kNone) continue;
      const double total = totals[keys_[slot] >> 32];
      probabilities_[slot] = total > 0 ? static_cast<float>(counts_[slot] / total) : 0;
      counts_[slot] = 0;
    }
  }

  // Of each source piece. The counts are gone then.
  std::vector<std::vector<Likelihood>> by_source(int64_t source_pieces) && {
    counts_ = std::vector<double>();
    std::vector<size_t> sizes(static_cast<size_t>(source_pieces));
    const auto for_likely = [&](const auto& body) {
      for (size_t slot = 0; slot < keys_.size(); ++slot)
        if (keys_[slot] != kNone && probabilities_[slot] > 0) body(keys_[slot] >> 32, slot);
    };
    for_likely([&](uint64_t source, size_t) { ++sizes[source]; });
    std::vector<std::vector<Likelihood>> found(sizes.size());
    for (size_t source = 0; source < sizes.size(); ++source) found[source].reserve(sizes[source]);
    for_likely([&](uint64_t source, size_t slot) {
      found[source].push_back(
          {static_cast<int32_t>(keys_[slot] & 0xffffffffU), probabilities_[slot]});
    });
    return found;
  }

 private:
  static constexpr uint64_t kNone = ~uint64_t{0};
  static constexpr size_t kFewestSlots = 4096;
  // A key, a count, and what make_room() keeps beside them: 3/8 of a pair of both, or 3/4 of a count. Later a probability takes
  // less than that, and what by_source() makes less than the counts.
  static constexpr size_t kSlotBytes = 16 + 6;

  static uint64_t key_of(int32_t source, int32_t target) {
    return static_cast<uint64_t>(source) << 32 | static_cast<uint32_t>(target);
  }
  static uint64_t hash_of(uint64_t key) {
    key *= 0x9e3779b97f4a7c15ULL;
    return (key ^ key >> 29) * 0xbf58476d1ce4e5b9ULL >> 32;
  }
  size_t slot_of(uint64_t key) const {
    size_t slot = hash_of(key) * keys_.size() >> 32;
    while (keys_[slot] != kNone && keys_[slot] != key)
      if (++slot == keys_.size()) slot = 0;
    return slot;
  }

  // Puts the entries that `is_kept` into tables of `slots`.
  template <class IsKept>
  void rebuild(size_t slots, const IsKept& is_kept) {
    std::vector<std::pair<uint64_t, double>> entries;
    entries.reserve(used_);
    for (size_t slot = 0; slot < keys_.size(); ++slot)
      if (keys_[slot] != kNone && is_kept(keys_[slot], counts_[slot]))
        entries.emplace_back(keys_[slot], counts_[slot]);
    resize(slots);
    for (const auto& [key, count] : entries) {
      const size_t slot = slot_of(key);
      keys_[slot] = key;
      counts_[slot] = count;
    }
    used_ = entries.size();
  }

  void resize(size_t slots) {
    keys_ = std::vector<uint64_t>();  // Not beside the new ones.
    counts_ = std::vector<double>();
    keys_.assign(slots, kNone);
    counts_.assign(slots, 0);
  }

  // Leaves at most half of 3/4 of the places taken.
  void make_room() {
    if (doublings_ > 0) {
      rebuild(most_slots_ >> --doublings_, [](uint64_t, double) { return true; });
      return;
    }
    double median = 0;
    size_t equal = 0, kept_equal = used_ / 2;
    {
      std::vector<double> all;
      all.reserve(used_);
      for (size_t slot = 0; slot < keys_.size(); ++slot)
        if (keys_[slot] != kNone) all.push_back(counts_[slot]);
      const auto middle = all.begin() + std::ssize(all) / 2;
      std::ranges::nth_element(all, middle);
      median = *middle;
      for (const double count : all) {
        if (count == median) ++equal;
        if (count > median) --kept_equal;
      }
    }
    // Of those equal to the median as many as there is room for, from all parts of the table.
    size_t seen = 0;
    rebuild(keys_.size(), [&](uint64_t, double count) {
      if (count != median) return count > median;
      ++seen;
      return seen * kept_equal / equal != (seen - 1) * kept_equal / equal;
    });
  }

  size_t most_slots_;
  int doublings_ = 0;  // until there are so many
  size_t used_ = 0;
  std::vector<uint64_t> keys_;
  std::vector<double> counts_;
  std::vector<float> probabilities_;
};

// Calls body(the source's pieces and its end id, the target's pieces) for each pair.
template <class Body>
void for_pairs(const Corpus& corpus, const Body& body) {
  for (int64_t pair = 0; pair < corpus.size(); ++pair) {
    std::vector<int32_t> source = corpus.source(pair);
    source.push_back(text::kEosId);
    body(source, corpus.target(pair));
  }
}

std::unordered_map<std::string, int32_t> ids_by_spelling(const text::Tokenizer& tokenizer) {
  std::unordered_map<std::string, int32_t> ids;
  for (int32_t id = 0; id < tokenizer.num_pieces(); ++id) ids.emplace(tokenizer.piece(id), id);
  return ids;
}

template <class T>
TensorView view_of(const char* name, DType type, const std::vector<T>& values) {
  return {.name = name,
          .dtype = type,
          .shape = {std::ssize(values)},
          .bytes = std::as_bytes(std::span(values))};
}

template <class T>
std::vector<T> tensor_values(const SafetensorsFile& file, const char* name, DType type) {
  const TensorView& tensor = file.at(name);
  if (tensor.dtype != type || tensor.shape.size() != 1)
    throw ConfigError(std::string(name) + ": expected one dimension of " + to_string(type));
  const auto* first = reinterpret_cast<const T*>(tensor.bytes.data());
  return {first, first + tensor.bytes.size() / sizeof(T)};
}

TensorMetadata facts_of(const std::vector<std::filesystem::path>& vocabularies) {
  return {{"format", kTableFormat},
          {"vocabulary.source_sha256", sha256_of_file(vocabularies.at(0).string())},
          {"vocabulary.target_sha256", sha256_of_file(vocabularies.at(1).string())}};
}

// What of the table cannot be; "" if it can.
std::string flaw_of(const nmt::LexicalTable& table) {
  const auto& offsets = table.offsets;
  const auto is_piece = [&](int32_t id) { return id >= 0 && id < table.target_pieces; };
  const auto is_probability = [](float p) { return p >= 0 && p <= 1; };
  if (table.target_pieces <= text::kEosId ||
      table.target_pieces > std::numeric_limits<int32_t>::max())
    return "target_pieces is out of range";
  if (offsets.empty() || offsets.front() != 0 || offsets.back() != std::ssize(table.targets) ||
      !std::ranges::is_sorted(offsets))
    return "offsets do not fit targets";
  if (table.best < 1) return "best is out of range";
  if (table.joined && std::ssize(offsets) - 1 != table.target_pieces)
    return "both sides have one vocabulary, but not as many pieces";
  if (table.probabilities.size() != table.targets.size()) return "probabilities do not fit targets";
  if (!std::ranges::all_of(table.probabilities, is_probability))
    return "a probability is not in [0, 1]";
  if (!std::ranges::all_of(table.targets, is_piece) ||
      !std::ranges::all_of(table.frequent, is_piece))
    return "a piece is not in the vocabulary";
  return "";
}

}  // namespace

nmt::LexicalTable learn_lexical_table(const Corpus& corpus, int64_t source_pieces,
                                      int64_t target_pieces, const LexicalOptions& options) {
  PieceCounts counts(options.workspace_mib);
  std::vector<int64_t> occurrences(static_cast<size_t>(target_pieces));
  int64_t num_targets = 0;  // of this round, those whose log p is known
  double log_probs = 0;
  // In the first round all targets of a piece are equally likely.
  for_pairs(corpus, [&](const auto& source, const auto& target) {
    num_targets += std::ssize(target);
    log_probs -= static_cast<double>(target.size()) * std::log(static_cast<double>(target_pieces));
    for (const int32_t t : target) {
      ++occurrences[static_cast<size_t>(t)];
      for (const int32_t s : source) counts.add(s, t, 1 / static_cast<double>(source.size()));
    }
  });
  const auto end_round = [&](int64_t round) {
    counts.normalise(source_pieces);
    if (options.on_round) {
      options.on_round(round, log_probs / static_cast<double>(std::max<int64_t>(num_targets, 1)));
    }
  };
  end_round(1);
  std::vector<size_t> slots;
  for (int64_t round = 2; round <= options.rounds; ++round) {
    log_probs = 0;
    num_targets = 0;
    for_pairs(corpus, [&](const auto& source, const auto& target) {
      slots.resize(source.size());
      for (const int32_t t : target) {
        double sum = 0;
        for (size_t i = 0; i < source.size(); ++i) {
          slots[i] = counts.find(source[i], t);
          sum += counts.probability(slots[i]);
        }
        if (sum == 0) continue;  // all its pairs were given up
        log_probs += std::log(sum / static_cast<double>(source.size()));
        ++num_targets;
        for (const size_t slot : slots)
          counts.add_at(slot, static_cast<double>(counts.probability(slot)) / sum);
      }
    });
    end_round(round);
  }
  nmt::LexicalTable table = table_of(std::move(counts).by_source(source_pieces), options.best);
  table.target_pieces = target_pieces;
  for (int32_t piece = 0; piece < target_pieces; ++piece)
    if (occurrences[static_cast<size_t>(piece)] > 0) table.frequent.push_back(piece);
  std::ranges::stable_sort(table.frequent, std::greater{},
                           [&](int32_t piece) { return occurrences[static_cast<size_t>(piece)]; });
  return table;
}

LexicalText read_lexical_text(const std::filesystem::path& path, const text::Tokenizer& source,
                              const text::Tokenizer& target, int64_t best) {
  auto source_ids = ids_by_spelling(source);
  const auto target_ids = ids_by_spelling(target);
  source_ids["NULL"] = text::kEosId;
  std::vector<std::vector<Likelihood>> by_source(static_cast<size_t>(source.num_pieces()));
  std::ifstream stream = text::open_text(path);
  text::LineReader lines(stream, path.string());
  LexicalText result;
  int64_t num_known = 0;
  for (std::string line; lines.next(line);) {
    std::istringstream fields(line);
    std::string target_piece, source_piece, number, more;
    fields >> target_piece >> source_piece >> number;
    double probability = -1;
    const auto [end, error] =
        std::from_chars(number.data(), number.data() + number.size(), probability);
    if (number.empty() || fields >> more || error != std::errc() ||
        end != number.data() + number.size() || !(probability >= 0 && probability <= 1)) {
      throw ConfigError(path.string() + ": line " + std::to_string(lines.number()) +
                        ": expected \"target source probability\", got \"" + line.substr(0, 100) +
                        "\"");
    }
    if (target_piece == "NULL") continue;
    const auto s = source_ids.find(source_piece);
    const auto t = target_ids.find(target_piece);
    if (s == source_ids.end() || t == target_ids.end()) {
      ++result.num_unknown;
      continue;
    }
    ++num_known;
    by_source[static_cast<size_t>(s->second)].push_back(
        {t->second, static_cast<float>(probability)});
  }
  if (num_known == 0) {
    throw ConfigError(path.string() + ": expected pieces of both vocabularies, got none in " +
                      std::to_string(lines.number()) + (lines.number() == 1 ? " line" : " lines"));
  }
  result.table = table_of(std::move(by_source), best);
  result.table.target_pieces = target.num_pieces();
  for (int32_t piece = text::kEosId + 1; piece < target.num_pieces(); ++piece)
    result.table.frequent.push_back(piece);
  return result;
}

void write_lexical_table(const std::filesystem::path& path, const nmt::LexicalTable& table,
                         const std::vector<std::filesystem::path>& vocabularies) {
  const std::array tensors = {view_of("offsets", DType::kI64, table.offsets),
                              view_of("targets", DType::kI32, table.targets),
                              view_of("probabilities", DType::kF32, table.probabilities),
                              view_of("frequent", DType::kI32, table.frequent)};
  TensorMetadata metadata = facts_of(vocabularies);
  metadata["target_pieces"] = std::to_string(table.target_pieces);
  metadata["best"] = std::to_string(table.best);
  add_sums(metadata, tensors);
  write_safetensors(path.string(), tensors, metadata);
}

nmt::LexicalTable read_lexical_table(const std::filesystem::path& path,
                                     const std::vector<std::filesystem::path>& vocabularies) {
  const SafetensorsFile file(path.string());
  const auto refuse = [&](const std::string& why) -> void {
    throw ConfigError(path.string() + ": expected a whole shortlist: " + why);
  };
  if (const auto damage = damage_of(file, kTableFormat, kTableTensors); !damage.empty())
    refuse(damage);
  const TensorMetadata facts = facts_of(vocabularies);
  for (const auto& [name, file_of] : {std::pair{"vocabulary.source_sha256", vocabularies[0]},
                                      {"vocabulary.target_sha256", vocabularies[1]}}) {
    if (entry_of(file.metadata(), name) != facts.at(name)) {
      throw ConfigError(path.string() + ": expected a shortlist made for the vocabulary " +
                        file_of.string() + ", got one made for another");
    }
  }
  nmt::LexicalTable table;
  try {
    table.offsets = tensor_values<int64_t>(file, "offsets", DType::kI64);
    table.targets = tensor_values<int32_t>(file, "targets", DType::kI32);
    table.probabilities = tensor_values<float>(file, "probabilities", DType::kF32);
    table.frequent = tensor_values<int32_t>(file, "frequent", DType::kI32);
  } catch (const ConfigError& error) {
    refuse(one_line(error));
  }
  const auto number_of = [&](const char* name) {
    const std::string text = entry_of(file.metadata(), name);
    int64_t number = 0;
    std::from_chars(text.data(), text.data() + text.size(), number);
    return number;
  };
  table.target_pieces = number_of("target_pieces");
  table.best = number_of("best");
  table.joined = facts.at("vocabulary.source_sha256") == facts.at("vocabulary.target_sha256");
  if (const auto flaw = flaw_of(table); !flaw.empty()) refuse(flaw);
  return table;
}

}  // namespace cohort::translate
