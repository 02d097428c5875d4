// SPDX-License-Identifier: Apache-2.0
// Which way of sharding a model's training fits into the ranks' memory, by the strategies'
// formulas. Pure numbers: opens nothing, measures nothing.
//
// Bytes that a rank holds after backward in float32 under Adam (parameter, gradient, two moments:
// 16), of P parameters on N ranks, H of them on each host:
//   ddp 16 P    zero1 (8 + 8/N) P    zero2 (4 + 12/N) P    zero3 16/N P    hybrid 16/H P
// and 4 bytes a parameter of the largest unit, for what is gathered and for gradients on their way:
// 1 + 2 (N-2)/N times with zero1, 3 + 2 (N-2)/N times with zero2, 4 + (N-2)/N times with zero3, and
// 4 + (H-2)/H times with hybrid (docs/collectives.md). Activations come on top.
// What a rank sends in a step, in units of 4 P bytes:
// 2 (N-1)/N, with zero3 3 (N-1)/N; with hybrid 3 (H-1)/H within its host, and 2/H (M-1)/M across M
// hosts. Where K ranks compute one model (tensor parallel), each of these with P/K parameters on
// N/K ranks, H/K of them on a host whose memory is the K-th part.
// Source: Rajbhandari et al. 2020, arXiv:1910.02054, sections 3 and 7, for float32.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cohort::parallel {

struct AdviceRequest {
  int64_t parameters = 0;         ///< > 0.
  int64_t largest_unit = 0;       ///< Parameters of it; 0: not known, and left out.
  int world_size = 1;             ///< N > 0.
  int local_world_size = 1;       ///< H > 0, which divides N.
  int64_t host_memory_bytes = 0;  ///< Of each host, shared by its ranks; > 0.
  /// Copies of parameters and moments that the program keeps beside them to save, in bytes a
  /// parameter. They lie with the ranks that save: each rank's share, under ddp all with rank 0.
  double saved_bytes = 0;
  /// The program gathers the whole model on every rank for a while, without gradients: 4 bytes a
  /// parameter beside the shards of zero3 and hybrid.
  bool gathers_whole = false;
};

/// The share of a rank's memory that state at rest may take: the rest is for activations, buffers
/// on their way, libraries and data.
inline constexpr double kShareAtRest = 0.7;

struct StrategyFit {
  std::string strategy;  ///< As --strategy takes it.
  double bytes = 0;      ///< Of a rank; of rank 0's host, the mean over its ranks.
  double sent = 0;       ///< By a rank and step, in units of the parameters' bytes.
  bool fits = false;     ///< `bytes` are at most kShareAtRest of the rank's memory.
  std::string reason;    ///< One line, with the numbers.
};

struct StrategyAdvice {
  std::vector<StrategyFit> strategies;  ///< ddp, zero1, zero2, zero3; hybrid if N > H > 1.
  /// The first that fits, in the order of what they cost: ddp, zero1, zero2, hybrid, zero3.
  std::optional<std::string> chosen;
  /// Ranks that compute one model, where only that makes `chosen` fit: the fewest, a divisor of
  /// local_world_size. `strategies` are those without.
  int tensor_parallel = 1;
  std::string reason;  ///< Why that one; where none fits, what would.
};

/// Errors: ConfigError for numbers out of range.
StrategyAdvice advise(const AdviceRequest& request);

/// Reads "93M", "1.5B", "350k" or "93255680": a number of parameters; nothing of another text.
std::optional<int64_t> parse_parameter_count(const std::string& text);

/// Returns "1.39 GiB" or "355.7 MiB".
std::string readable_bytes(double bytes);

}  // namespace cohort::parallel
