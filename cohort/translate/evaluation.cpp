#include "cohort/translate/evaluation.h"

#include <nlohmann/json.hpp>
#include <torch/types.h>

#include "cohort/base/error.h"

namespace cohort::translate {
namespace {

constexpr size_t kSumCount = 2 + 2 * text::kBleuOrder;

// Rank 0 collects {sentence number: translation} of all ranks into corpus order.
std::vector<std::string> collect(const std::vector<int64_t>& numbers,
                                 const std::vector<std::string>& translations, size_t total,
                                 comm::ProcessGroup& group) {
  nlohmann::json mine = nlohmann::json::array();
  for (size_t i = 0; i < numbers.size(); ++i) mine.push_back({numbers[i], translations[i]});
  const auto all =
      group.all_gather_text(mine.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
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
                    comm::ProcessGroup& group, const EvaluationOptions& options) {
  TORCH_CHECK_VALUE(references.size() == corpus.source.size(), "evaluate: ", references.size(),
                    " references for ", corpus.source.size(), " sentences");
  const at::NoGradGuard no_grad;
  const bool was_training = model->is_training();
  model->eval();
  const auto plan = data::plan_eval_batches(corpus.lengths(), options.mini_batch_words,
                                            group.rank(), group.size());
  double nll_sum = 0;
  int64_t num_tokens = 0;
  text::BleuStats stats;
  std::vector<int64_t> numbers;
  std::vector<std::string> translations;
  for (const auto& indices : plan.batches) {
    const nmt::Batch batch = make_batch(corpus, indices);
    nll_sum += std::get<1>(model->forward(batch)).item<double>();
    num_tokens += batch.num_target_tokens;
    if (!options.translate) continue;
    const auto results =
        nmt::search(model, batch.source_BS, batch.source_lengths_B, options.search);
    for (size_t row = 0; row < indices.size(); ++row) {
      const auto index = static_cast<size_t>(indices[row]);
      translations.push_back(target.decode(results[row].front().tokens));
      numbers.push_back(indices[row]);
      stats += text::bleu_statistics(translations.back(), std::span(&references[index], 1),
                                     options.bleu);
    }
  }
  model->train(was_training);

  at::Tensor loss = at::tensor({nll_sum}, at::kDouble);
  group.all_reduce(loss);
  std::vector<int64_t> counts{num_tokens, stats.sys_len, stats.ref_len};
  counts.insert(counts.end(), stats.correct.begin(), stats.correct.end());
  counts.insert(counts.end(), stats.total.begin(), stats.total.end());
  TORCH_INTERNAL_ASSERT(counts.size() == kSumCount + 1);
  at::Tensor sums = at::tensor(counts, at::kLong);
  group.all_reduce(sums);
  const int64_t* sum = sums.data_ptr<int64_t>();
  text::BleuStats global{.sys_len = sum[1], .ref_len = sum[2]};
  std::copy_n(sum + 3, text::kBleuOrder, global.correct.begin());
  std::copy_n(sum + 3 + text::kBleuOrder, text::kBleuOrder, global.total.begin());

  Evaluation result;
  result.loss = loss.item<double>() / static_cast<double>(std::max<int64_t>(sum[0], 1));
  if (options.translate) {
    result.bleu = text::bleu_score(global, options.bleu);
    result.translations = collect(numbers, translations, corpus.source.size(), group);
  }
  return result;
}

std::vector<std::vector<Translation>> translate_all(
    nmt::Transformer& model, const std::vector<std::vector<int32_t>>& sources,
    const text::Tokenizer& target, const EvaluationOptions& options) {
  Corpus corpus;
  corpus.source = sources;
  corpus.target.resize(sources.size());
  const auto plan = data::plan_eval_batches(corpus.lengths(), options.mini_batch_words, 0, 1);
  std::vector<std::vector<Translation>> translations(sources.size());
  for (const auto& indices : plan.batches) {
    const nmt::Batch batch = make_batch(corpus, indices);
    const auto results =
        nmt::search(model, batch.source_BS, batch.source_lengths_B, options.search);
    for (size_t row = 0; row < indices.size(); ++row) {
      const auto i = static_cast<size_t>(indices[row]);
      for (const nmt::Hypothesis& h : results[row])
        translations[i].push_back({target.decode(h.tokens), h.log_prob, h.score});
      if (sources[i].empty()) translations[i] = {{}};
    }
  }
  return translations;
}

}  // namespace cohort::translate
