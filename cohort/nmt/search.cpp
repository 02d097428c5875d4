#include "cohort/nmt/search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <torch/types.h>

#include "cohort/base/error.h"

namespace cohort::nmt {
namespace {

constexpr int64_t kPad = 0;
constexpr int64_t kUnk = 1;
constexpr int64_t kBegin = 2;
constexpr int64_t kEnd = 3;
constexpr float kNever = -std::numeric_limits<float>::infinity();

// The beginning of a translation. Places of the beam that hold none are never extended.
struct Beginning {
  std::vector<int32_t> tokens;
  double log_prob = kNever;
};

struct Sentence {
  size_t row = 0;               // in the source batch
  int64_t limit = 0;            // most tokens before the end id
  std::vector<Beginning> beam;  // `beam_size` places
};

// The likeliest next tokens of every place of every beam, and the end id's own probability.
struct NextTokens {
  at::Tensor log_probs;      // float [B*K, C]
  at::Tensor tokens;         // int64 [B*K, C]
  at::Tensor end_log_probs;  // float [B*K]
};

struct Extension {
  size_t place = 0;  // of what it extends
  int64_t token = 0;
  double log_prob = 0;
};

NextTokens likeliest(const at::Tensor& logits, const SearchOptions& options) {
  at::Tensor scores = logits.flatten(0, 1).to(at::kFloat);
  const at::Tensor sums = at::logsumexp(scores, 1, /*keepdim=*/true);
  TORCH_CHECK(
      at::isfinite(sums).all().item<bool>(),
      "search: the model's scores are not finite: it has diverged, or its parameters are damaged");
  // No label ever has these ids: training says nothing of them.
  for (const int64_t id : {kPad, kBegin}) scores.select(1, id).fill_(kNever);
  if (!options.allow_unk) scores.select(1, kUnk).fill_(kNever);
  // Twice the beam: if half of the best extensions end, enough are left to go on.
  const auto [best, tokens] = at::topk(scores, std::min(2 * options.beam_size, scores.size(1)), 1);
  return {best - sums, tokens, scores.select(1, kEnd) - sums.squeeze(1)};
}

// All extensions of the beam at `index` in the batch, best first.
std::vector<Extension> extend(const std::vector<Beginning>& beam, size_t index, bool must_end,
                              const NextTokens& next) {
  const auto count = static_cast<size_t>(next.tokens.size(1));
  std::vector<Extension> result;
  for (size_t place = 0; place < beam.size(); ++place) {
    const double so_far = beam[place].log_prob;
    if (so_far == kNever) continue;
    const size_t row = index * beam.size() + place;
    if (must_end) {
      result.push_back({place, kEnd, so_far + next.end_log_probs.const_data_ptr<float>()[row]});
      continue;
    }
    const float* log_probs = next.log_probs.const_data_ptr<float>() + row * count;
    const int64_t* tokens = next.tokens.const_data_ptr<int64_t>() + row * count;
    for (size_t c = 0; c < count && log_probs[c] != kNever; ++c)
      result.push_back({place, tokens[c], so_far + log_probs[c]});
  }
  std::ranges::stable_sort(result, std::greater{}, &Extension::log_prob);
  return result;
}

Hypothesis finish(Beginning beginning, double log_prob, const SearchOptions& options) {
  const auto length = static_cast<double>(beginning.tokens.size() + 1);
  return {std::move(beginning.tokens), log_prob,
          log_prob / std::pow(length, options.normalize) - options.word_penalty * length};
}

class BeamSearch {
 public:
  BeamSearch(Transformer& model, const at::Tensor& source_BS, const at::Tensor& lengths_B,
             const SearchOptions& options)
      : model_(model),
        options_(options),
        state_(model->begin_decoding(model->encode(source_BS, lengths_B), lengths_B)),
        results_(static_cast<size_t>(source_BS.size(0))) {
    for (size_t row = 0; row < results_.size(); ++row) {
      const auto source_tokens = lengths_B[static_cast<int64_t>(row)].item<int64_t>();
      Sentence sentence{.row = row,
                        .limit = longest(source_tokens),
                        .beam = std::vector<Beginning>(static_cast<size_t>(options.beam_size))};
      sentence.beam[0].log_prob = 0;
      sentences_.push_back(std::move(sentence));
    }
    last_BK_ = at::full({source_BS.size(0), options.beam_size}, kBegin, at::kLong);
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

  void step() {
    const NextTokens next = likeliest(model_->decode_step(last_BK_, state_), options_);
    std::vector<Sentence> going;
    std::vector<int64_t> kept, origins, last;
    for (size_t index = 0; index < sentences_.size(); ++index) {
      Sentence& sentence = sentences_[index];
      const auto places = advance(sentence, index, next);
      if (places.empty()) continue;
      kept.push_back(static_cast<int64_t>(index));
      for (size_t k = 0; k < sentence.beam.size(); ++k) {
        origins.push_back(static_cast<int64_t>(index * sentence.beam.size() + places[k]));
        last.push_back(sentence.beam[k].tokens.empty() ? kPad : sentence.beam[k].tokens.back());
      }
      going.push_back(std::move(sentence));
    }
    const bool all_go_on = going.size() == sentences_.size();
    sentences_ = std::move(going);
    if (!all_go_on) state_.keep_sentences(at::tensor(kept, at::kLong));
    if (!all_go_on || options_.beam_size > 1)
      state_.keep_hypotheses(at::tensor(origins, at::kLong));
    last_BK_ = at::tensor(last, at::kLong).view({-1, options_.beam_size});
  }

  // Moves the sentence's beam on by one token, and what ended to the results. Returns the place
  // that each place of the new beam extends; nothing if the sentence is done.
  std::vector<size_t> advance(Sentence& sentence, size_t index, const NextTokens& next) {
    auto& ended = results_[sentence.row];
    const auto beam_size = sentence.beam.size();
    const bool must_end = state_.position > sentence.limit;
    std::vector<Beginning> beam;
    std::vector<size_t> places;
    size_t rank = 0;
    for (const Extension& extension : extend(sentence.beam, index, must_end, next)) {
      if (beam.size() == beam_size && rank >= beam_size) break;
      Beginning beginning = sentence.beam[extension.place];
      if (extension.token == kEnd) {
        // One that ends counts only where it would have had a place.
        if (rank < beam_size && ended.size() < beam_size)
          ended.push_back(finish(std::move(beginning), extension.log_prob, options_));
      } else if (beam.size() < beam_size) {
        beginning.tokens.push_back(static_cast<int32_t>(extension.token));
        beginning.log_prob = extension.log_prob;
        beam.push_back(std::move(beginning));
        places.push_back(extension.place);
      }
      ++rank;
    }
    if (ended.size() == beam_size || beam.empty()) return {};
    beam.resize(beam_size);
    places.resize(beam_size);
    sentence.beam = std::move(beam);
    return places;
  }

  Transformer& model_;
  const SearchOptions& options_;
  DecoderState state_;
  std::vector<Sentence> sentences_;  // those not done, in the batch's order
  std::vector<std::vector<Hypothesis>> results_;
  at::Tensor last_BK_;  // the newest token of every place
};

}  // namespace

void validate(const SearchOptions& options) {
  const auto check = [](bool good, const std::string& what, double value, const char* expected) {
    if (!good) throw ConfigError(what + " " + std::to_string(value) + ": expected " + expected);
  };
  check(options.beam_size >= 1, "beam size", static_cast<double>(options.beam_size), "at least 1");
  check(options.max_length >= 1, "longest output", static_cast<double>(options.max_length),
        "at least 1");
  check(options.max_length_factor >= 0, "length factor", options.max_length_factor, "at least 0");
  check(std::isfinite(options.normalize) && std::isfinite(options.word_penalty), "length penalty",
        options.normalize, "a finite number");
}

std::vector<std::vector<Hypothesis>> search(Transformer& model, const at::Tensor& source_BS,
                                            const at::Tensor& source_lengths_B,
                                            const SearchOptions& options) {
  validate(options);
  const at::NoGradGuard no_grad;
  const bool was_training = model->is_training();
  model->eval();
  auto results = BeamSearch(model, source_BS, source_lengths_B, options).run();
  model->train(was_training);
  return results;
}

}  // namespace cohort::nmt
