// SPDX-License-Identifier: Apache-2.0
#include "apps/step_batches.h"

#include <algorithm>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <chrono>
#include <cmath>
#include <numbers>
#include <torch/types.h>

#include "cohort/nmt/kernels/kernels.h"

#include "bench/median.h"

namespace cohort::apps {
namespace {

// The same stream as in bench/peers/nmt_ddp.py, so that both sides see the same sentences.
struct SplitMix64 {
  uint64_t state;
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
};

}  // namespace

std::vector<BatchLengths> plan_batches(const BatchPlan& plan) {
  if (plan.rows > 0)
    return {BatchLengths(static_cast<size_t>(plan.rows), {plan.length, plan.length})};
  SplitMix64 random{plan.seed};
  BatchLengths sentences;
  for (int i = 0; i < 20000; ++i) {
    const double u1 = random.uniform();
    const double u2 = random.uniform();
    const double u3 = random.uniform();
    const double z = std::sqrt(-2 * std::log(1 - u1)) * std::cos(2 * std::numbers::pi * u2);
    const auto target = std::clamp<int64_t>(std::lround(std::exp(3.2 + 0.5 * z)), 4, 100);
    const auto source =
        std::clamp<int64_t>(std::lround(static_cast<double>(target) * (0.85 + 0.3 * u3)), 4, 100);
    sentences.push_back({source, target});
  }
  std::stable_sort(sentences.begin(), sentences.end(),
                   [](const SentenceLengths& a, const SentenceLengths& b) {
                     return std::pair(a.target, a.source) < std::pair(b.target, b.source);
                   });
  std::vector<BatchLengths> batches(1);
  for (const SentenceLengths& s : sentences) {
    const auto rows = static_cast<int64_t>(batches.back().size()) + 1;
    if (rows > 1 && rows * (s.target + 1) > plan.words) batches.emplace_back();
    batches.back().push_back(s);
  }
  for (size_t i = batches.size() - 1; i >= 1; --i)
    std::swap(batches[i], batches[random.next() % (i + 1)]);
  return batches;
}

nmt::Batch make_batch(const BatchLengths& rows, uint64_t seed, int64_t vocabulary) {
  SplitMix64 random{seed};
  SentenceLengths longest{0, 0};
  for (const SentenceLengths& r : rows)
    longest = {std::max(longest.source, r.source), std::max(longest.target, r.target)};
  const auto n = static_cast<int64_t>(rows.size());
  nmt::Batch batch;
  batch.source_BS = at::zeros({n, longest.source + 1}, at::kLong);
  batch.input_BT = at::zeros({n, longest.target + 1}, at::kLong);
  batch.labels_BT = at::zeros({n, longest.target + 1}, at::kLong);
  batch.source_lengths_B = at::zeros({n}, at::kLong);
  batch.target_lengths_B = at::zeros({n}, at::kLong);
  for (int64_t b = 0; b < n; ++b) {
    const SentenceLengths r = rows[static_cast<size_t>(b)];
    int64_t* source = batch.source_BS.data_ptr<int64_t>() + b * (longest.source + 1);
    int64_t* input = batch.input_BT.data_ptr<int64_t>() + b * (longest.target + 1);
    int64_t* labels = batch.labels_BT.data_ptr<int64_t>() + b * (longest.target + 1);
    const auto token = [&] {
      return static_cast<int64_t>(4 + random.next() % static_cast<uint64_t>(vocabulary - 4));
    };
    for (int64_t i = 0; i < r.source; ++i) source[i] = token();
    source[r.source] = 3;
    input[0] = 2;
    for (int64_t i = 0; i < r.target; ++i) input[i + 1] = labels[i] = token();
    labels[r.target] = 3;
    batch.source_lengths_B.data_ptr<int64_t>()[b] = r.source + 1;
    batch.target_lengths_B.data_ptr<int64_t>()[b] = r.target + 1;
    batch.num_target_tokens += r.target + 1;
  }
  return batch;
}

double attention_flop(const BatchLengths& rows, const nmt::TransformerOptions& sizes) {
  double pairs = 0;
  for (const SentenceLengths& row : rows) {
    const auto source = static_cast<double>(row.source + 1);  // with the end mark
    const auto target = static_cast<double>(row.target + 1);
    pairs += static_cast<double>(sizes.enc_depth) * source * source +
             static_cast<double>(sizes.dec_depth) * (target * target + target * source);
  }
  return 12 * static_cast<double>(sizes.dim_emb) * pairs;
}

double step_flop(const BatchLengths& rows, const nmt::TransformerOptions& sizes) {
  const auto width = static_cast<double>(sizes.dim_emb);
  const double square = width * width;
  const double ffn = 2 * width * static_cast<double>(sizes.dim_ffn);
  const auto encoder_layers = static_cast<double>(sizes.enc_depth);
  const auto decoder_layers = static_cast<double>(sizes.dec_depth);
  // A decoder layer makes keys and values of the source, too.
  const double of_source = encoder_layers * (4 * square + ffn) + decoder_layers * 2 * square;
  const double of_target =
      decoder_layers * (6 * square + ffn) + width * static_cast<double>(sizes.dim_vocab_target);
  double flop = attention_flop(rows, sizes);
  for (const SentenceLengths& row : rows) {
    flop += 6 * (static_cast<double>(row.source + 1) * of_source +
                 static_cast<double>(row.target + 1) * of_target);
  }
  return flop;
}

double product_rate(const comm::ProcessGroup& group, at::ScalarType type, int64_t rows) {
  using Clock = std::chrono::steady_clock;
  const at::NoGradGuard no_grad;
  const at::Device device = group.device();
  const at::Tensor a = at::randn({rows, 512}, at::kFloat).to(device, type);
  const at::Tensor b = at::randn({2048, 512}, at::kFloat).to(device, type);
  at::Tensor c = at::empty({rows, 2048}, a.options());
  const auto multiply = [&] { nmt::kernels_for(a).product(a, b.t(), {}, c); };
  multiply();  // The first one makes the kernel.
  std::vector<double> rates;
  for (int trial = 0; trial < 7; ++trial) {
    wait_for_device(device);
    group.barrier("products");
    const auto start = Clock::now();
    for (int i = 0; i < 8; ++i) multiply();
    wait_for_device(device);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    rates.push_back(8 * 2.0 * static_cast<double>(rows) * 512 * 2048 / seconds);
  }
  at::Tensor sum = at::tensor({bench::median_of(rates)}, at::kDouble);
  group.all_reduce(sum);
  return sum.item<double>();
}

void wait_for_device(at::Device device) {
  if (!device.is_cpu())
    c10::impl::getDeviceGuardImpl(device.type())->synchronizeDevice(device.index());
}

}  // namespace cohort::apps
