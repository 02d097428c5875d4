// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/export_rows.h"

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "cohort/base/safetensors.h"

namespace cohort::ps {

ExportedRows export_rows(const RowTable& table, const std::string& path, uint32_t pushed_since) {
  constexpr size_t kBatch = 4096;
  std::vector<uint64_t> ids;
  table.for_each([&](const RowView& row) {
    if (row.last_push >= pushed_since) ids.push_back(row.id);
  });
  std::sort(ids.begin(), ids.end());
  const int64_t width = table.options().width;
  const auto rows = static_cast<int64_t>(ids.size());
  const std::array<TensorStream, 2> tensors = {
      TensorStream{"ids",
                   DType::kI64,
                   {rows},
                   [&](const ByteSink& write) { write(std::as_bytes(std::span(ids))); }},
      TensorStream{
          "weights", DType::kF32, {rows, width}, [&](const ByteSink& write) {
            std::vector<float> weights(kBatch * static_cast<size_t>(width));
            for (size_t begin = 0; begin < ids.size(); begin += kBatch) {
              const size_t count = std::min(kBatch, ids.size() - begin);
              const std::span part = std::span(weights).first(count * static_cast<size_t>(width));
              table.pull(std::span(ids).subspan(begin, count), part, RowTable::Unknown::kZeros);
              write(std::as_bytes(part));
            }
          }}};
  const std::string sha256 = stream_safetensors(path, tensors,
                                                {{"table", table.options().name},
                                                 {"width", std::to_string(width)},
                                                 {"pushed_since", std::to_string(pushed_since)}});
  return {rows, sha256};
}

}  // namespace cohort::ps
