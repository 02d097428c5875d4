// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/search.h"

#include <algorithm>
#include <c10/util/StringUtil.h>
#include <cmath>
#include <optional>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/nmt/decode_times.h"

namespace cohort::nmt {
namespace {

constexpr int64_t kPad = 0;
constexpr int64_t kUnk = 1;
constexpr int64_t kBegin = 2;
constexpr int64_t kEnd = 3;

// The beginning of a translation.
struct Beginning {
  std::vector<int32_t> tokens;
  double log_prob = 0;
  int64_t sample = 0;  // which of the sentence's samples it is; without meaning in a beam
};

struct Sentence {
  size_t row = 0;                // in the source batch
  int64_t number = 0;            // of which its random numbers are a function
  int64_t limit = 0;             // most tokens before the end id
  std::vector<Beginning> beam;   // at most `beam_size`
  std::vector<int32_t> pieces;   // its candidates, of a shortlist
  std::vector<int32_t> columns;  // of these in the batch's product
};

struct Extension {
  size_t place = 0;  // of what it extends
  int64_t token = 0;
  double log_prob = 0;
};

Hypothesis finish(Beginning beginning, double log_prob, const SearchOptions& options) {
  const auto length = static_cast<double>(beginning.tokens.size() + 1);
  return {std::move(beginning.tokens), log_prob,
          log_prob / std::pow(length, options.normalize) - options.word_penalty * length};
}

DecoderState begin_search(Transformer& model, const at::Tensor& source_BS,
                          const at::Tensor& lengths_B) {
  const DecodeScope timed(DecodeSection::kEncoder);
  const at::Tensor lengths = lengths_B.to(model->device());
  return model->begin_decoding(model->encode(source_BS.to(model->device()), lengths), lengths);
}

class Search {
 public:
  Search(Transformer& model, const at::Tensor& source_BS, const at::Tensor& lengths_B,
         const SearchOptions& options, std::span<const int64_t> numbers)
      : model_(model),
        options_(options),
        state_(begin_search(model, source_BS, lengths_B)),
        results_(static_cast<size_t>(source_BS.size(0))) {
    // All places of a beam begin alike: one of them is followed until they differ.
    const int64_t places = options.sampling.enabled ? options.beam_size : 1;
    std::vector<int64_t> kept;
    for (size_t row = 0; row < results_.size(); ++row) {
      const auto index = static_cast<int64_t>(row);
      Sentence sentence{.row = row,
                        .number = numbers.empty() ? index : numbers[row],
                        .limit = longest(lengths_B[index].item<int64_t>())};
      for (int64_t sample = 0; sample < places; ++sample) {
        sentence.beam.push_back({.sample = sample});
        kept.push_back(index);
      }
      if (options.shortlist) {
        const at::Tensor source = source_BS[index].contiguous();
        sentence.pieces =
            options.shortlist->candidates({source.const_data_ptr<int64_t>(),
                                           static_cast<size_t>(lengths_B[index].item<int64_t>())});
      }
      sentences_.push_back(std::move(sentence));
    }
    if (options.shortlist) choose_pieces();
    state_.keep(kept);
    last_N_ = at::full({std::ssize(kept)}, kBegin, at::kLong);
  }

  std::vector<std::vector<Hypothesis>> run() {
    while (!sentences_.empty()) step();
    for (auto& hypotheses : results_)
      std::ranges::stable_sort(hypotheses, std::greater{}, &Hypothesis::score);
    return std::move(results_);
  }

 private:
  int64_t longest(int64_t source_tokens) const {
    const double by_source = options_.max_length_factor * static_cast<double>(source_tokens) + 10;
    const int64_t positions = model_->options().max_positions - 1;  // one is the end id's
    return static_cast<int64_t>(std::min(
        {by_source, static_cast<double>(options_.max_length), static_cast<double>(positions)}));
  }

  // What the batch's products are over: the candidates of all its sentences.
  void choose_pieces() {
    std::vector<int32_t> columns(static_cast<size_t>(options_.shortlist->target_pieces()), -1);
    for (const Sentence& sentence : sentences_)
      for (const int32_t piece : sentence.pieces) columns[static_cast<size_t>(piece)] = 0;
    std::vector<int32_t> pieces;
    for (size_t piece = 0; piece < columns.size(); ++piece) {
      if (columns[piece] < 0) continue;
      columns[piece] = static_cast<int32_t>(pieces.size());
      pieces.push_back(static_cast<int32_t>(piece));
    }
    for (Sentence& sentence : sentences_)
      for (const int32_t piece : sentence.pieces)
        sentence.columns.push_back(columns[static_cast<size_t>(piece)]);
    const DecodeScope timed(DecodeSection::kVocabulary);
    chosen_ = model_->choose_pieces(pieces);
  }

  LogProbs next_log_probs(std::span<const int64_t> banned) {
    if (!chosen_)
      return model_->decode_log_probs(last_N_, state_, questions(banned), needs_log_sums());
    std::vector<std::span<const int32_t>> columns;
    for (const Sentence& sentence : sentences_)
      columns.insert(columns.end(), sentence.beam.size(), sentence.columns);
    return {model_->decode_step(last_N_, state_, *chosen_), columns, needs_log_sums()};
  }

  void step() {
    const int64_t length = state_.position;  // of all beginnings
    const std::vector<int64_t> banned = banned_at(length);
    const LogProbs log_probs = next_log_probs(banned);
    std::vector<Sentence> going;
    std::vector<int64_t> kept, last;
    int64_t first_row = 0;  // of the sentence's beam in log_probs
    for (Sentence& sentence : sentences_) {
      const int64_t next_row = first_row + std::ssize(sentence.beam);
      const auto extensions = length >= sentence.limit
                                  ? endings(sentence, log_probs, first_row)
                                  : extend(sentence, log_probs, first_row, banned, length);
      for (const Extension& taken : advance(sentence, extensions)) {
        kept.push_back(first_row + static_cast<int64_t>(taken.place));
        last.push_back(taken.token);
      }
      if (!sentence.beam.empty()) going.push_back(std::move(sentence));
      first_row = next_row;
    }
    sentences_ = std::move(going);
    state_.keep(kept);
    last_N_ = at::tensor(last, at::kLong);
  }

  // The likeliest token is that with the greatest score, too.
  bool needs_log_sums() const {
    return options_.scores || options_.beam_size > 1 || options_.sampling.enabled;
  }

  // Sampling may ask for any column.
  std::optional<Questions> questions(std::span<const int64_t> banned) const {
    if (options_.sampling.enabled) return std::nullopt;
    return Questions{.greatest = num_extensions() + std::ssize(banned), .column = kEnd};
  }

  // Of a beginning. Twice the beam: if half of the best extensions end, enough are left to continue.
  int64_t num_extensions() const { return 2 * options_.beam_size; }

  // Columns, too: the special pieces are a sentence's first candidates.
  std::vector<int64_t> banned_at(int64_t length) const {
    std::vector<int64_t> banned{kPad,
                                kBegin};  // No label has these: training says nothing of them.
    if (!options_.allow_unk) banned.push_back(kUnk);
    if (length < options_.min_length) banned.push_back(kEnd);
    return banned;
  }

  // What the sentence's beginnings may become, the likeliest first.
  std::vector<Extension> extend(const Sentence& sentence, const LogProbs& log_probs,
                                int64_t first_row, std::span<const int64_t> banned,
                                int64_t length) const {
    const SamplingOptions& sampling = options_.sampling;
    std::vector<Extension> result;
    for (size_t place = 0; place < sentence.beam.size(); ++place) {
      const int64_t row = first_row + static_cast<int64_t>(place);
      const Beginning& beginning = sentence.beam[place];
      const auto add = [&](const Candidate& next) {
        const int64_t token =
            chosen_ ? sentence.pieces[static_cast<size_t>(next.column)] : next.column;
        result.push_back({place, token, beginning.log_prob + next.log_prob});
      };
      if (sampling.enabled) {
        add(draw(log_probs, row, sampling, banned,
                 sampling_number(sampling.seed, sentence.number, beginning.sample, length)));
        continue;
      }
      for (const Candidate& next : log_probs.greatest(row, num_extensions(), banned)) add(next);
    }
    // A shortlist may leave nothing but the end.
    if (result.empty()) return endings(sentence, log_probs, first_row);
    std::ranges::stable_sort(result, std::greater{}, &Extension::log_prob);
    return result;
  }

  static std::vector<Extension> endings(const Sentence& sentence, const LogProbs& log_probs,
                                        int64_t first_row) {
    std::vector<Extension> result;
    for (size_t place = 0; place < sentence.beam.size(); ++place) {
      const int64_t row = first_row + static_cast<int64_t>(place);
      result.push_back({place, kEnd, sentence.beam[place].log_prob + log_probs.at(row, kEnd)});
    }
    std::ranges::stable_sort(result, std::greater{}, &Extension::log_prob);
    return result;
  }

  // Moves the sentence's beam on by one token, and what ended to the results. Returns what each
  // place of the new beam has come from; the beam is empty if the sentence is done.
  std::vector<Extension> advance(Sentence& sentence, const std::vector<Extension>& extensions) {
    auto& ended = results_[sentence.row];
    const auto beam_size = static_cast<size_t>(options_.beam_size);
    std::vector<Beginning> beam;
    std::vector<Extension> taken;
    for (size_t rank = 0; rank < extensions.size(); ++rank) {
      const Extension& extension = extensions[rank];
      if (beam.size() == beam_size && rank >= beam_size) break;
      const Beginning& beginning = sentence.beam[extension.place];
      if (extension.token == kEnd) {
        // One that ends counts only where it would have had a place.
        if (rank < beam_size && ended.size() < beam_size)
          ended.push_back(finish(beginning, extension.log_prob, options_));
      } else if (beam.size() < beam_size) {
        beam.push_back(beginning);
        beam.back().tokens.push_back(static_cast<int32_t>(extension.token));
        beam.back().log_prob = extension.log_prob;
        taken.push_back(extension);
      }
    }
    if (ended.size() == beam_size) {
      beam.clear();
      taken.clear();
    }
    sentence.beam = std::move(beam);
    return taken;
  }

  Transformer& model_;
  const SearchOptions& options_;
  DecoderState state_;
  std::optional<ChosenRows> chosen_;  // of a shortlist
  std::vector<Sentence> sentences_;   // those not done, in the batch's order
  std::vector<std::vector<Hypothesis>> results_;
  at::Tensor last_N_;  // the newest token of every beginning, sentence by sentence
};

void check_shortlist(const Shortlist& shortlist, const TransformerImpl& model) {
  const auto& sizes = model.options();
  if (shortlist.source_pieces() != sizes.dim_vocab_source ||
      shortlist.target_pieces() != sizes.dim_vocab_target) {
    throw ConfigError(c10::str("--shortlist: expected one for vocabularies of ",
                               sizes.dim_vocab_source, " and ", sizes.dim_vocab_target,
                               " pieces, got one for ", shortlist.source_pieces(), " and ",
                               shortlist.target_pieces()));
  }
  if (!model.device().is_cpu())
    throw ConfigError(c10::str("--shortlist: expected --device cpu, got ", model.device()));
  if (model.tensor_parallel()->count() > 1) {
    throw ConfigError(c10::str("--shortlist: expected a whole model, got one of ",
                               model.tensor_parallel()->count(), " tensor-parallel shards"));
  }
}

}  // namespace

void validate(const SearchOptions& options) {
  const auto check = [](bool good, const char* flag, auto value, const char* expected) {
    if (!good) throw ConfigError(c10::str(flag, " ", value, ": expected ", expected));
  };
  check(options.beam_size >= 1, "--beam-size", options.beam_size, "at least 1");
  check(options.max_length >= 1, "--max-output-length", options.max_length, "at least 1");
  check(options.max_length_factor >= 0, "--max-length-factor", options.max_length_factor,
        "at least 0");
  check(std::isfinite(options.normalize), "--normalize", options.normalize, "a finite number");
  check(std::isfinite(options.word_penalty), "--word-penalty", options.word_penalty,
        "a finite number");
  check(options.min_length >= 0, "--min-output-length", options.min_length, "at least 0");
  validate(options.sampling);
  if (options.shortlist && options.sampling.enabled)
    throw ConfigError("--shortlist: expected no --sampling");
}

std::vector<std::vector<Hypothesis>> search(Transformer& model, const at::Tensor& source_BS,
                                            const at::Tensor& source_lengths_B,
                                            const SearchOptions& options,
                                            std::span<const int64_t> numbers) {
  validate(options);
  TORCH_CHECK_VALUE(source_BS.is_cpu() && source_lengths_B.is_cpu(),
                    "search: expected sentences and lengths on the CPU, got them on ",
                    source_BS.device(), " and ", source_lengths_B.device());
  TORCH_CHECK_VALUE(numbers.empty() || std::ssize(numbers) == source_BS.size(0),
                    "search: ", numbers.size(), " sentence numbers for ", source_BS.size(0),
                    " sentences");
  if (options.shortlist) check_shortlist(*options.shortlist, *model);
  if (source_BS.size(0) == 0) return {};
  const at::NoGradGuard no_grad;
  const InEvaluation evaluating(*model);
  return Search(model, source_BS, source_lengths_B, options, numbers).run();
}

}  // namespace cohort::nmt
