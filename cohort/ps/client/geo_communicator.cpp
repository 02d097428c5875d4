// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <c10/util/Exception.h>
#include <map>
#include <unordered_map>
#include <utility>

#include "cohort/ps/client/communicator.h"
#include "cohort/ps/id_hash.h"

namespace cohort::ps {

namespace {

// The local replica of a row or dense parameter: the servers' values and the present ones.
struct Replica {
  std::vector<float> base;
  std::vector<float> weights;
  bool is_changed = false;  // Since the last synchronisation.
  bool is_open = false;     // Pulled since the last push, which may have a gradient for it.

  void take(std::span<const float> values) {
    base.assign(values.begin(), values.end());
    weights = base;
  }

  void forget_change() { base = weights; }

  void add_change(float divisor, std::vector<float>& changes) const {
    for (size_t i = 0; i < weights.size(); ++i) changes.push_back((weights[i] - base[i]) / divisor);
  }
};

std::vector<float> new_state(const RuleOptions& rule, size_t width) {
  std::vector<float> state(
      static_cast<size_t>(state_width(rule.rule, static_cast<int64_t>(width))));
  initialise_state(rule, state);
  return state;
}

class GeoCommunicator final : public Communicator {
 public:
  GeoCommunicator(Client& client, const GeoOptions& options)
      : client_(client), options_(options), tables_(client.job().tables.size()) {
    TORCH_CHECK_VALUE(options_.table_rules.size() == tables_.size(), "geo: expected ",
                      tables_.size(), " rules of tables, got ", options_.table_rules.size());
  }

  std::function<void()> pull(std::vector<PullRows> rows, std::vector<std::span<float>> parameters,
                             bool is_prediction) override {
    if (is_prediction) {
      return [this, rows = std::move(rows), parameters = std::move(parameters)] {
        client_.pull(rows, parameters, true).wait();
      };
    }
    return [this, rows = std::move(rows), parameters = std::move(parameters)] {
      if (parameters_.empty() && !parameters.empty()) fetch_parameters(parameters);
      for (size_t i = 0; i < parameters.size(); ++i)
        std::copy(parameters_[i].weights.begin(), parameters_[i].weights.end(),
                  parameters[i].begin());
      for (const PullRows& asked : rows) {
        fetch_missing(asked.table, asked.ids);
        auto out = asked.weights.begin();
        Table& table = tables_[asked.table];
        for (const uint64_t id : asked.ids) {
          Replica& row = table.rows.at(id);
          if (!std::exchange(row.is_open, true)) table.open.push_back(id);
          out = std::copy(row.weights.begin(), row.weights.end(), out);
        }
      }
    };
  }

  void push(std::vector<PushRows> rows, std::vector<std::span<const float>> parameters) override {
    // Before anything changes: a push that is rejected can be repeated.
    TORCH_CHECK_VALUE(parameters.size() <= parameters_.size(),
                      "geo: parameters are pushed before a pull");
    for (const PushRows& pushed : rows) {
      for (const uint64_t id : pushed.ids)
        TORCH_CHECK_VALUE(tables_[pushed.table].rows.contains(id), "geo: row ", id,
                          " is pushed before a pull");
    }
    ++steps_;
    for (size_t i = 0; i < parameters.size(); ++i)
      update(options_.dense_rule, steps_, parameters_[i].weights, parameter_states_[i],
             parameters[i]);
    for (Table& table : tables_) table.close_step();
    for (const PushRows& pushed : rows) {
      Table& table = tables_[pushed.table];
      const RuleOptions& rule = options_.table_rules[pushed.table];
      const auto width = static_cast<size_t>(client_.job().tables[pushed.table].width);
      const bool has_state = state_width(rule.rule, static_cast<int64_t>(width)) > 0;
      for (size_t i = 0; i < pushed.ids.size(); ++i) {
        Replica& row = table.rows.at(pushed.ids[i]);
        std::span<float> state;
        if (has_state) {
          const auto [found, is_new] = table.states.try_emplace(pushed.ids[i]);
          if (is_new) found->second = new_state(rule, width);
          state = found->second;
        }
        update(rule, steps_, row.weights, state, pushed.gradients.subspan(i * width, width));
        if (!std::exchange(row.is_changed, true)) table.changed.push_back(pushed.ids[i]);
      }
    }
    if (steps_ % options_.steps == 0) synchronise();
  }

  void flush() override {
    synchronise();
    client_.flush();
  }

 private:
  struct Table {
    std::unordered_map<uint64_t, Replica, IdHash> rows;  // Used since the last synchronisation.
    // The optimizer's, of every row that was ever pushed: kept when the replica is dropped.
    std::unordered_map<uint64_t, std::vector<float>, IdHash> states;
    std::vector<uint64_t> changed;  // In the order of their first change.
    std::vector<uint64_t> open;

    void close_step() {
      for (const uint64_t id : open) rows.at(id).is_open = false;
      open.clear();
    }
  };

  void fetch_parameters(const std::vector<std::span<float>>& parameters) {
    client_.pull({}, parameters).wait();
    parameters_.resize(parameters.size());
    for (size_t i = 0; i < parameters.size(); ++i) {
      parameters_[i].take(parameters[i]);
      parameter_states_.push_back(new_state(options_.dense_rule, parameters[i].size()));
    }
  }

  void fetch_missing(uint32_t number, std::span<const uint64_t> ids) {
    Table& table = tables_[number];
    std::vector<uint64_t> missing;
    for (const uint64_t id : ids) {
      if (!table.rows.contains(id)) missing.push_back(id);
    }
    const auto width = static_cast<size_t>(client_.job().tables[number].width);
    std::vector<float> weights(missing.size() * width);
    const PullRows asked{number, missing, weights};
    if (!missing.empty()) client_.pull(std::span(&asked, 1), {}).wait();
    for (size_t i = 0; i < missing.size(); ++i)
      table.rows[missing[i]].take(std::span(weights).subspan(i * width, width));
  }

  void synchronise() {
    const auto divisor = static_cast<float>(options_.trainers);
    std::vector<std::vector<float>> changes;
    changes.reserve(tables_.size() + parameters_.size());
    std::vector<PushRows> rows;
    for (uint32_t number = 0; number < tables_.size(); ++number) {
      Table& table = tables_[number];
      auto& change = changes.emplace_back();
      for (const uint64_t id : table.changed) table.rows.at(id).add_change(divisor, change);
      rows.push_back({number, table.changed, change});
    }
    std::vector<std::span<const float>> parameters;
    for (const Replica& parameter : parameters_) {
      auto& change = changes.emplace_back();
      parameter.add_change(divisor, change);
      parameters.emplace_back(change);
    }
    client_.push(rows, std::move(parameters));
    client_.flush();
    // The servers have the changes: if the pull fails, they are not sent again.
    for (Table& table : tables_)
      for (const uint64_t id : table.changed) table.rows.at(id).forget_change();
    for (Replica& parameter : parameters_) parameter.forget_change();
    take_over();
  }

  void take_over() {
    std::vector<std::vector<float>> values;
    values.reserve(tables_.size() + parameters_.size());
    std::vector<PullRows> rows;
    for (uint32_t number = 0; number < tables_.size(); ++number) {
      const auto width = static_cast<size_t>(client_.job().tables[number].width);
      const auto& changed = tables_[number].changed;
      rows.push_back({number, changed, values.emplace_back(changed.size() * width)});
    }
    std::vector<std::span<float>> parameters;
    for (const Replica& parameter : parameters_)
      parameters.emplace_back(values.emplace_back(parameter.weights.size()));
    client_.pull(rows, parameters).wait();
    for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].take(parameters[i]);
    for (uint32_t number = 0; number < tables_.size(); ++number) {
      Table& table = tables_[number];
      const auto width = static_cast<size_t>(client_.job().tables[number].width);
      // Other trainers change rows as well: a row that was not used since the last synchronisation
      // is dropped here and pulled again at its next use.
      std::erase_if(table.rows,
                    [](const auto& row) { return !row.second.is_changed && !row.second.is_open; });
      for (size_t i = 0; i < table.changed.size(); ++i) {
        Replica& row = table.rows.at(table.changed[i]);
        row.take(rows[number].weights.subspan(i * width, width));
        row.is_changed = false;
      }
      table.changed.clear();
    }
  }

  Client& client_;
  GeoOptions options_;
  std::vector<Table> tables_;
  std::vector<Replica> parameters_;
  std::vector<std::vector<float>> parameter_states_;  // As `parameters_`.
  int64_t steps_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> make_geo_communicator(Client& client, const GeoOptions& options) {
  return std::make_unique<GeoCommunicator>(client, options);
}

}  // namespace cohort::ps
