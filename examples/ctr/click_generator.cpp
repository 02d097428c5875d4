// SPDX-License-Identifier: Apache-2.0
#include "examples/ctr/click_generator.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "cohort/base/atomic_file.h"
#include "cohort/base/error.h"
#include "cohort/data/random.h"

#include "examples/ctr/example_line.h"
#include "examples/ctr/interruption.h"

namespace ctr {
namespace {

using cohort::data::SplitMix64;

// Categories per slot in the training set of Criteo's Kaggle competition.
constexpr std::array<int64_t, kCategories> kVocabulary{
    1460, 583,   10131227, 2202608, 305,  24,   12517, 633,     3,  93145, 5683,   8351593, 3194,
    27,   14992, 5461306,  10,      5652, 2173, 4,     7046547, 18, 15,    286181, 105,     142572};
constexpr int64_t kWeighingCategories = 100;  // Nobody could learn the weight of a rare one.

// What is drawn for a thing of the model, not for a row.
enum Stream : uint64_t { kWeight = 1, kFactor, kText, kRows };

constexpr double kBias = -1.6;
constexpr double kWeightScale = 0.30;
constexpr double kFactorScale = 0.45;
constexpr int kFactors = 4;
constexpr std::array<std::array<int, 2>, 4> kPairs{{{0, 1}, {4, 7}, {5, 13}, {16, 22}}};

// log(x + 1) is about normal: its middle, its spread, the share that is missing, and its slope.
struct NumberLaw {
  double middle, spread, missing, slope;
};
constexpr std::array<NumberLaw, kNumbers> kNumberLaws{{{0.7, 0.9, 0.45, 0.25},
                                                       {2.0, 1.8, 0.00, 0.05},
                                                       {1.8, 1.2, 0.22, -0.08},
                                                       {1.6, 0.9, 0.22, 0.06},
                                                       {7.5, 2.6, 0.03, -0.05},
                                                       {3.4, 1.6, 0.22, -0.07},
                                                       {1.7, 1.4, 0.04, 0.12},
                                                       {2.2, 1.1, 0.00, 0.04},
                                                       {3.8, 1.5, 0.04, 0.05},
                                                       {0.4, 0.4, 0.45, 0.30},
                                                       {1.0, 0.8, 0.04, 0.15},
                                                       {0.1, 0.3, 0.77, 0.10},
                                                       {1.7, 1.1, 0.22, -0.12}}};

// About normal, mean 0 and variance 1: the sum of four uniform numbers of 16 bits each.
double normal(uint64_t bits) {
  const uint64_t sum =
      (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
  return (static_cast<double>(sum) * 0x1p-16 - 2) * std::sqrt(3.0);
}

uint64_t bits_of(uint64_t seed, Stream stream, uint64_t a, uint64_t b) {
  return SplitMix64(SplitMix64(seed, stream).next(), SplitMix64(a, b).next()).next();
}

// The inverse of the continuous distribution on [1, size + 1) with density x^-zipf, rounded down.
int64_t draw_category(double uniform, int64_t size, double zipf) {
  const double end = static_cast<double>(size) + 1;
  const double x = std::abs(zipf - 1) < 1e-9
                       ? std::pow(end, uniform)
                       : std::pow(1 + uniform * (std::pow(end, 1 - zipf) - 1), 1 / (1 - zipf));
  return std::clamp<int64_t>(static_cast<int64_t>(x), 1, size);
}

double weight_of(uint64_t seed, int slot, int64_t category) {
  if (category > kWeighingCategories) return 0;
  return kWeightScale * normal(bits_of(seed, kWeight, static_cast<uint64_t>(slot),
                                       static_cast<uint64_t>(category)));
}

double product_of(uint64_t seed, int slot, int64_t category, int other, int64_t other_category) {
  if (std::max(category, other_category) > kWeighingCategories) return 0;
  SplitMix64 one(
      bits_of(seed, kFactor, static_cast<uint64_t>(slot), static_cast<uint64_t>(category)));
  SplitMix64 two(
      bits_of(seed, kFactor, static_cast<uint64_t>(other), static_cast<uint64_t>(other_category)));
  double sum = 0;
  for (int i = 0; i < kFactors; ++i) sum += normal(one.next()) * normal(two.next());
  return kFactorScale * kFactorScale * sum;
}

void append_number(std::string& text, int64_t number) {
  std::array<char, 24> digits{};
  text.append(digits.data(),
              std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr);
}

void append_hex(std::string& text, uint32_t value) {
  for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[value >> shift & 15];
}

void append_line(std::string& text, const MadeExample& example) {
  text += example.click ? '1' : '0';
  for (const int64_t number : example.numbers) {
    text += '\t';
    if (number >= 0) append_number(text, number);
  }
  for (const uint32_t category : example.categories) {
    text += '\t';
    append_hex(text, category);
  }
  text += '\n';
}

// Writes rows [begin, end) and scores their true logits.
Metrics write_rows(const ClickModel& model, int64_t begin, int64_t end, cohort::FileWriter& file,
                   const cohort::StopRequest& stop) {
  constexpr size_t kPiece = 1 << 20;
  ScoreSet truth;
  std::string text;
  for (int64_t row = begin; row < end; ++row) {
    check_interruption(stop);
    const MadeExample example = model.draw(row);
    append_line(text, example);
    const auto logit = static_cast<float>(example.logit);
    const float label = example.click ? 1 : 0;
    truth.add({&logit, 1}, {&label, 1});
    if (text.size() < kPiece) continue;
    file.write(std::string_view(text));
    text.clear();
  }
  file.write(std::string_view(text));
  return truth.metrics();
}

void refuse_present(const std::string& file) {
  if (!std::filesystem::exists(file)) return;
  throw cohort::ConfigError(
      file + ": is there already: name another folder, or let ctr generate --overwrite replace it");
}

// What is no file, a pipe or a folder, stays.
std::error_code remove_file(const std::string& path) {
  std::error_code error, ignored;
  if (std::filesystem::is_regular_file(path, ignored)) std::filesystem::remove(path, error);
  return error;
}

// Removes the files, in this order, unless all of them were completed.
class FilesOnTrial {
 public:
  explicit FilesOnTrial(std::vector<std::string> files) : files_(std::move(files)) {}
  ~FilesOnTrial() {
    for (const std::string& file : files_) remove_file(file);
  }
  FilesOnTrial(const FilesOnTrial&) = delete;
  FilesOnTrial& operator=(const FilesOnTrial&) = delete;
  void keep() { files_.clear(); }

 private:
  std::vector<std::string> files_;
};

nlohmann::json to_json(const Metrics& metrics) {
  return {{"rows", metrics.count},
          {"clicks", metrics.clicks},
          {"auc", metrics.auc},
          {"log_loss", metrics.log_loss}};
}

}  // namespace

ClickModel::ClickModel(uint64_t seed, double zipf) : seed_(seed), zipf_(zipf) {
  if (!(zipf > 0 && zipf < 10)) {
    throw cohort::ConfigError("--zipf: expected an exponent above 0 and below 10, got " +
                              std::to_string(zipf));
  }
}

MadeExample ClickModel::draw(int64_t row) const {
  SplitMix64 random(bits_of(seed_, kRows, static_cast<uint64_t>(row), 0));
  MadeExample example;
  example.logit = kBias;
  for (size_t i = 0; i < kNumbers; ++i) {
    const NumberLaw& law = kNumberLaws[i];
    const double log = std::max(0.0, law.middle + law.spread * normal(random.next()));
    const auto number = static_cast<int64_t>(std::expm1(log));
    example.numbers[i] = random.uniform() < law.missing ? -1 : number;
    if (example.numbers[i] >= 0) {
      example.logit += law.slope * (std::log1p(static_cast<double>(number)) - law.middle);
    }
  }
  std::array<int64_t, kCategories> categories{};
  for (int slot = 0; slot < kCategories; ++slot) {
    const auto s = static_cast<size_t>(slot);
    categories[s] = draw_category(random.uniform(), kVocabulary[s], zipf_);
    example.logit += weight_of(seed_, slot, categories[s]);
    example.categories[s] = static_cast<uint32_t>(
        bits_of(seed_, kText, static_cast<uint64_t>(slot), static_cast<uint64_t>(categories[s])));
  }
  for (const auto& [one, two] : kPairs) {
    example.logit += product_of(seed_, one, categories[static_cast<size_t>(one)], two,
                                categories[static_cast<size_t>(two)]);
  }
  example.click = random.uniform() < 1 / (1 + std::exp(-example.logit));
  return example;
}

Truth generate_clicks(const GeneratorOptions& options, const std::string& folder) {
  if (options.rows < 1) {
    throw cohort::ConfigError("--rows: expected 1 or more, got " + std::to_string(options.rows));
  }
  const ClickModel model(options.seed, options.zipf);
  const int64_t test_rows =
      options.test_rows < 0 ? std::max<int64_t>(1, options.rows / 10) : options.test_rows;
  const std::string train = folder + "/train.tsv";
  const std::string test = folder + "/test.tsv";
  const std::string noted = folder + "/truth.json";
  if (!options.overwrite) {
    for (const std::string& file : {train, test, noted}) refuse_present(file);
  }
  cohort::make_folder(folder);
  const cohort::StopRequest stop;
  if (const std::error_code error = remove_file(train); error)
    throw cohort::ConfigError(train + ": expected a file that can be replaced: " + error.message());
  FilesOnTrial trial({train, test, noted});
  nlohmann::json facts{{"seed", options.seed}, {"zipf", options.zipf}};
  const auto note = [&] { cohort::write_atomically(noted, facts.dump(2) + "\n"); };
  note();  // Without figures yet: whose test.tsv it is, if the process is killed.
  Truth truth;
  cohort::write_atomically(test, [&](cohort::FileWriter& file) {
    truth.test = write_rows(model, options.rows, options.rows + test_rows, file, stop);
  });
  cohort::write_atomically(train, [&](cohort::FileWriter& file) {
    truth.train = write_rows(model, 0, options.rows, file, stop);
    facts["train"] = to_json(truth.train);
    facts["test"] = to_json(truth.test);
    note();
  });
  trial.keep();
  return truth;
}

bool is_unfinished(const std::string& folder) {
  return !std::filesystem::exists(folder + "/train.tsv") &&
         std::filesystem::exists(folder + "/truth.json");
}

double attainable_auc(const std::string& folder) {
  std::ifstream file(folder + "/truth.json");
  const auto facts = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  const auto pointer = nlohmann::json::json_pointer("/test/auc");
  if (!facts.is_object() || !facts.contains(pointer) || !facts[pointer].is_number()) return -1;
  return facts[pointer].get<double>();
}

}  // namespace ctr
