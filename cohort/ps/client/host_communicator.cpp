// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <c10/util/Exception.h>
#include <cstring>

#include "cohort/ps/client/communicator.h"
#include "cohort/ps/id_numbers.h"
#include "cohort/ps/row_merger.h"

namespace cohort::ps {

namespace {

using Bytes = std::vector<std::byte>;

template <class Value>
void append(Bytes& bytes, std::span<const Value> values) {
  const uint64_t count = values.size();
  const auto head = std::as_bytes(std::span(&count, 1));
  bytes.insert(bytes.end(), head.begin(), head.end());
  const auto body = std::as_bytes(values);
  bytes.insert(bytes.end(), body.begin(), body.end());
}

// What append wrote, in its order.
class Reader {
 public:
  explicit Reader(const Bytes& bytes) : bytes_(bytes) {}

  template <class Value>
  std::vector<Value> take() {
    uint64_t count = 0;
    copy(&count, sizeof(count));
    std::vector<Value> values(count);
    copy(values.data(), count * sizeof(Value));
    return values;
  }

 private:
  void copy(void* to, size_t size) {
    TORCH_CHECK_VALUE(size <= bytes_.size() - position_, "host: a rank sent too few bytes");
    if (size > 0) std::memcpy(to, bytes_.data() + position_, size);
    position_ += size;
  }

  const Bytes& bytes_;
  size_t position_ = 0;
};

class HostCommunicator final : public Communicator {
 public:
  HostCommunicator(const JobOptions& job, const HostRanks& host,
                   std::unique_ptr<Communicator> servers)
      : job_(job), host_(host), servers_(std::move(servers)) {
    TORCH_CHECK_VALUE((host_.rank == 0) == (servers_ != nullptr),
                      "host: rank 0, and no other, talks to servers");
  }

  std::function<void()> pull(std::vector<PullRows> rows, std::vector<std::span<float>> parameters,
                             bool is_prediction) override {
    return [this, rows = std::move(rows), parameters = std::move(parameters), is_prediction] {
      std::vector<std::vector<uint64_t>> ids;
      std::vector<std::vector<float>> weights;
      share_ids(rows, ids);
      for (size_t i = 0; i < rows.size(); ++i)
        weights.emplace_back(ids[i].size() * width_of(rows[i].table));
      if (servers_) {
        std::vector<PullRows> all;
        for (size_t i = 0; i < rows.size(); ++i) all.push_back({rows[i].table, ids[i], weights[i]});
        servers_->pull(std::move(all), parameters, is_prediction)();
      }
      share_values(weights, parameters);
      for (size_t i = 0; i < rows.size(); ++i) pick(rows[i], ids[i], weights[i]);
    };
  }

  void push(std::vector<PushRows> rows, std::vector<std::span<const float>> parameters) override {
    Bytes bytes;
    for (const PushRows& part : rows) {
      append(bytes, part.ids);
      append(bytes, part.gradients);
    }
    for (const auto& values : parameters) append(bytes, values);
    const std::vector<Bytes> all = host_.gather(bytes);
    if (!servers_) return;
    std::vector<RowMerger> mergers(rows.size());
    std::vector<std::vector<float>> sums(parameters.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      mergers[i].begin(static_cast<int64_t>(width_of(rows[i].table)),
                       rows[i].ids.size() * all.size());
    }
    for (const Bytes& of_rank : all) {  // In the order of ranks: that of summation.
      Reader reader(of_rank);
      for (RowMerger& merger : mergers) {
        const auto ids = reader.take<uint64_t>();
        merger.add(ids, reader.take<float>());
      }
      for (auto& sum : sums) {
        const auto values = reader.take<float>();
        if (sum.empty()) {
          sum = values;
        } else {
          for (size_t i = 0; i < sum.size(); ++i) sum[i] += values.at(i);
        }
      }
    }
    if (host_.mean) divide(mergers, sums, static_cast<float>(all.size()));
    std::vector<PushRows> merged;
    for (size_t i = 0; i < rows.size(); ++i)
      merged.push_back({rows[i].table, mergers[i].ids(), mergers[i].gradients()});
    servers_->push(std::move(merged), {sums.begin(), sums.end()});
  }

  void flush() override {
    if (servers_) servers_->flush();
  }

 private:
  size_t width_of(uint32_t table) const { return static_cast<size_t>(job_.tables.at(table).width); }

  // The ids that any rank asks for, in the order of ranks, on all of them.
  void share_ids(const std::vector<PullRows>& rows, std::vector<std::vector<uint64_t>>& ids) const {
    Bytes bytes;
    for (const PullRows& part : rows) append(bytes, part.ids);
    const std::vector<Bytes> all = host_.gather(bytes);
    bytes.clear();
    std::vector<IdNumbers> unions(rows.size());
    for (IdNumbers& distinct : unions) distinct.reset(1024);
    for (const Bytes& of_rank : all) {
      Reader reader(of_rank);
      for (IdNumbers& distinct : unions) {
        for (const uint64_t id : reader.take<uint64_t>()) distinct.number_of(id);
      }
    }
    for (const IdNumbers& distinct : unions) append(bytes, distinct.ids());
    host_.broadcast(bytes);
    Reader reader(bytes);
    for (size_t i = 0; i < rows.size(); ++i) ids.push_back(reader.take<uint64_t>());
  }

  void share_values(std::vector<std::vector<float>>& weights,
                    const std::vector<std::span<float>>& parameters) {
    Bytes bytes;
    if (servers_) {
      for (const auto& values : weights) append(bytes, std::span<const float>(values));
      for (const auto& values : parameters) append(bytes, std::span<const float>(values));
    }
    host_.broadcast(bytes);
    Reader reader(bytes);
    for (auto& values : weights) values = reader.take<float>();
    for (const auto& values : parameters) {
      const auto arrived = reader.take<float>();
      std::copy(arrived.begin(), arrived.end(), values.begin());
    }
  }

  void pick(const PullRows& rows, const std::vector<uint64_t>& ids,
            const std::vector<float>& weights) const {
    const size_t width = width_of(rows.table);
    IdNumbers numbers;
    numbers.reset(ids.size());
    for (const uint64_t id : ids) numbers.number_of(id);
    for (size_t i = 0; i < rows.ids.size(); ++i) {
      const size_t row = numbers.number_of(rows.ids[i]);
      TORCH_CHECK_VALUE(row < ids.size(), "host: rank 0 did not send row ", rows.ids[i]);
      std::copy_n(weights.begin() + static_cast<int64_t>(row * width), width,
                  rows.weights.begin() + static_cast<int64_t>(i * width));
    }
  }

  static void divide(std::vector<RowMerger>& mergers, std::vector<std::vector<float>>& sums,
                     float divisor) {
    for (RowMerger& merger : mergers) merger.divide(divisor);
    for (auto& sum : sums) {
      for (float& value : sum) value /= divisor;
    }
  }

  JobOptions job_;
  HostRanks host_;
  std::unique_ptr<Communicator> servers_;
};

}  // namespace

std::unique_ptr<Communicator> make_host_communicator(const JobOptions& job, const HostRanks& host,
                                                     std::unique_ptr<Communicator> servers) {
  return std::make_unique<HostCommunicator>(job, host, std::move(servers));
}

}  // namespace cohort::ps
