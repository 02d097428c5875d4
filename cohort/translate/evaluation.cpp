// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/evaluation.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <torch/types.h>

#include "cohort/base/checksum.h"
#include "cohort/base/error.h"
#include "cohort/train/check_same.h"
#include "cohort/translate/parallel_for.h"

namespace cohort::translate {
namespace {

// Adds up the counts of all ranks.
template <class Counts>
void sum_over_ranks(Counts& counts, const comm::ProcessGroup& group) {
  at::Tensor sums =
      at::tensor(at::ArrayRef<int64_t>(counts.data(), counts.size()), at::kLong).to(group.device());
  group.all_reduce(sums);
  std::copy_n(sums.cpu().const_data_ptr<int64_t>(), counts.size(), counts.begin());
}

// Each rank looks for its part of the sentences among its own.
void check_same_text(const Corpus& corpus, const std::vector<std::string>& references,
                     const comm::ProcessGroup& group) {
  Sha256 text;
  text.update(std::as_bytes(corpus.lengths()));
  for (int64_t pair = 0; pair < corpus.size(); ++pair) {
    for (const auto& ids : {corpus.source(pair), corpus.target(pair)})
      text.update(std::as_bytes(std::span(ids)));
    text.update(references[static_cast<size_t>(pair)]);
    text.update(std::string_view("\n"));
  }
  train::check_same_on_ranks(group, "evaluation", "text and vocabularies", text.hex());
}

// Rank 0 collects {sentence number: translation} of all ranks into corpus order.
std::vector<std::string> collect(const std::vector<int64_t>& numbers,
                                 const std::vector<std::string>& translations, size_t total,
                                 const comm::ProcessGroup& group) {
  nlohmann::json mine = nlohmann::json::array();
  for (size_t i = 0; i < numbers.size(); ++i) mine.push_back({numbers[i], translations[i]});
  const auto all =
      group.all_gather_object(mine.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  std::vector<std::string> ordered;
  if (group.rank() != 0) return ordered;
  ordered.resize(total);
  for (const std::string& part : all) {
    for (const auto& item : nlohmann::json::parse(part)) {
      ordered[item[0].get<size_t>()] = item[1].get<std::string>();
    }
  }
  return ordered;
}

}  // namespace

Evaluation evaluate(nmt::Transformer& model, const Corpus& corpus,
                    const std::vector<std::string>& references, const text::Tokenizer& target,
                    const comm::ProcessGroup& group, const EvaluationOptions& options) {
  TORCH_CHECK_VALUE(std::ssize(references) == corpus.size(), "evaluate: ", references.size(),
                    " references for ", corpus.size(), " sentences");
  check_same_text(corpus, references, group);
  const at::NoGradGuard no_grad;
  const nmt::InEvaluation evaluating(*model);
  const auto plan = data::plan_eval_batches(corpus.lengths(), options.mini_batch_words,
                                            group.rank(), group.size());
  at::Tensor nll_sum = at::zeros({1}, at::TensorOptions(model->device()).dtype(at::kDouble));
  int64_t num_tokens = 0;
  text::BleuStats bleu;
  text::ChrfStats chrf;
  std::vector<int64_t> numbers;
  std::vector<std::string> translations;
  Evaluation result;
  const auto timed = [](double& seconds, const auto& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const auto translate_batch = [&](const nmt::Batch& batch, std::span<const int32_t> indices) {
    const std::vector<int64_t> batch_numbers(indices.begin(), indices.end());
    const auto results =
        nmt::search(model, batch.source_BS, batch.source_lengths_B, options.search, batch_numbers);
    for (size_t row = 0; row < indices.size(); ++row) {
      const auto index = static_cast<size_t>(indices[row]);
      translations.push_back(target.decode(results[row].front().tokens));
      numbers.push_back(indices[row]);
      const std::span reference(&references[index], 1);
      bleu += text::bleu_statistics(translations.back(), reference, options.bleu);
      chrf += text::chrf_statistics(translations.back(), reference, options.chrf);
    }
  };
  int64_t num_done = 0;
  for (const auto& indices : plan.batches) {
    const nmt::Batch batch = make_batch(corpus, indices);
    timed(result.loss_seconds,
          [&] { nll_sum += std::get<1>(model->forward(batch.to(model->device()))); });
    num_tokens += batch.num_target_tokens;
    if (options.translate)
      timed(result.translate_seconds, [&] { translate_batch(batch, indices); });
    if (options.on_batch) options.on_batch(++num_done, std::ssize(plan.batches));
  }
  at::Tensor loss = nll_sum.to(group.device());
  group.all_reduce(loss);
  std::array<int64_t, 3> totals{num_tokens, bleu.sys_len, bleu.ref_len};
  sum_over_ranks(totals, group);
  sum_over_ranks(bleu.correct, group);
  sum_over_ranks(bleu.total, group);
  sum_over_ranks(chrf.counts, group);
  bleu.sys_len = totals[1];
  bleu.ref_len = totals[2];

  result.loss = loss.item<double>() / static_cast<double>(std::max<int64_t>(totals[0], 1));
  if (options.translate) {
    result.bleu = text::bleu_score(bleu, options.bleu);
    result.chrf = text::chrf_score(chrf, options.chrf);
    result.translations = collect(numbers, translations, references.size(), group);
  }
  return result;
}

std::vector<std::vector<Translation>> translate_all(
    nmt::Transformer& model, const std::vector<std::vector<int32_t>>& sources,
    const text::Tokenizer& target, const EvaluationOptions& options) {
  const Corpus corpus(sources, std::vector<std::vector<int32_t>>(sources.size()));
  const auto plan = data::plan_eval_batches(corpus.lengths(), options.mini_batch_words, 0, 1);
  std::vector<std::vector<Translation>> translations(sources.size());
  const auto translate = [&](std::span<const int32_t> indices) {
    const nmt::Batch batch = make_batch(corpus, indices);
    std::vector<int64_t> numbers(indices.begin(), indices.end());
    for (int64_t& number : numbers) number += options.first_number;
    const auto results =
        nmt::search(model, batch.source_BS, batch.source_lengths_B, options.search, numbers);
    for (size_t row = 0; row < indices.size(); ++row) {
      const auto i = static_cast<size_t>(indices[row]);
      for (const nmt::Hypothesis& h : results[row])
        translations[i].push_back({target.decode(h.tokens), h.log_prob, h.score});
      if (sources[i].empty()) translations[i] = {{}};
    }
  };
  std::vector<std::span<const int32_t>> batches;
  for (const auto& indices : plan.batches) {
    const size_t most =
        options.mini_batch > 0 ? static_cast<size_t>(options.mini_batch) : indices.size();
    for (size_t first = 0; first < indices.size(); first += most)
      batches.push_back(std::span(indices).subspan(first, std::min(most, indices.size() - first)));
  }
  // The longest are begun first: so the threads end at about the same time.
  std::ranges::stable_sort(batches, std::greater{}, [&](std::span<const int32_t> indices) {
    size_t tokens = 0;
    for (const int32_t i : indices) tokens += sources[static_cast<size_t>(i)].size();
    return tokens;
  });
  parallel_for(batches.size(), [&](size_t begin, size_t) { translate(batches[begin]); },
               {.threads = static_cast<size_t>(options.threads), .taken = 1, .name = "translate"});
  return translations;
}

}  // namespace cohort::translate
