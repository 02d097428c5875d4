// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/run_state.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "cohort/base/error.h"

namespace cohort::translate {
namespace {

using Json = nlohmann::ordered_json;

// One list of fields, for both directions.
template <class State, class Visit>
void visit_fields(State& state, Visit visit) {
  visit("epoch", state.epoch);
  visit("update", state.updates);
  visit("skipped_in_a_row", state.skipped_in_a_row);
  visit("loss_sum", state.loss_sum);
  visit("token_sum", state.token_sum);
  visit("train_seconds", state.train_seconds);
  visit("seconds", state.seconds);
  visit("best_update", state.best_update);
  visit("validations_without_best", state.early_stopping.num_without_best);
  visit("fit_rows", state.fit_rows);
  visit("fitted_for", state.fitted_for);
}

template <class Part, class Visit>
void visit_part(Part& part, Visit visit) {
  visit("batches", part.num_batches);
  visit("world_size", part.options.world_size);
  visit("mini_batch", part.options.mini_batch);
  visit("mini_batch_words", part.options.mini_batch_words);
  visit("fit_rows", part.options.fit_rows);
  visit("maxi_batch", part.options.maxi_batch);
  visit("optimizer_delay", part.options.optimizer_delay);
  visit("seed", part.options.seed);
}

[[noreturn]] void fail_form(const Json::exception& error) {
  throw ConfigError(
      std::string("manifest.json: a metadata entry has another form than expected: ") +
      error.what());
}

}  // namespace

void write_scores(const ValidScores& scores, const std::string& prefix, train::Metadata& metadata) {
  // JSON's numbers are the shortest that read back as the same bits.
  metadata[prefix + "loss"] = Json(scores.loss).dump();
  if (scores.bleu) metadata[prefix + "bleu"] = Json(*scores.bleu).dump();
  if (scores.chrf) metadata[prefix + "chrf"] = Json(*scores.chrf).dump();
}

std::optional<ValidScores> read_scores(const std::string& prefix, const train::Metadata& metadata) {
  const auto read = [&](const char* name) -> std::optional<double> {
    const auto found = metadata.find(prefix + name);
    if (found == metadata.end()) return std::nullopt;
    const Json value = Json::parse(found->second);
    return value.is_null() ? std::nan("") : value.get<double>();
  };
  try {
    const auto loss = read("loss");
    if (!loss) return std::nullopt;
    return ValidScores{.loss = *loss, .bleu = read("bleu"), .chrf = read("chrf")};
  } catch (const Json::exception& error) {
    fail_form(error);
  }
}

void write_metadata(const RunState& state, train::Metadata& metadata) {
  visit_fields(state,
               [&](const char* name, const auto& value) { metadata[name] = Json(value).dump(); });
  if (state.best) write_scores(*state.best, "best_", metadata);
  if (!state.servers.empty()) metadata["servers"] = state.servers;
  if (state.early_stopping.best) metadata["best_metric"] = Json(*state.early_stopping.best).dump();
  Json parts = Json::array();
  for (const data::EpochPart& part : state.trained) {
    Json entry;
    visit_part(part, [&](const char* name, const auto& value) { entry[name] = value; });
    parts.push_back(entry);
  }
  metadata["trained"] = parts.dump();
}

RunState read_state(const train::Metadata& metadata) {
  const auto read = [&](const char* name) {
    const auto found = metadata.find(name);
    if (found == metadata.end())
      throw ConfigError(std::string("manifest.json has no metadata entry ") + name +
                        ": expected the checkpoint of a training run");
    return Json::parse(found->second);
  };
  RunState state;
  try {
    visit_fields(state, [&]<class T>(const char* name, T& value) { value = read(name).get<T>(); });
    if (metadata.contains("best_metric"))
      state.early_stopping.best = read("best_metric").get<double>();
    for (const Json& entry : read("trained")) {
      data::EpochPart& part = state.trained.emplace_back();
      visit_part(part,
                 [&]<class T>(const char* name, T& value) { value = entry.at(name).get<T>(); });
    }
  } catch (const Json::exception& error) {
    fail_form(error);
  }
  state.best = read_scores("best_", metadata);
  if (const auto servers = metadata.find("servers"); servers != metadata.end())
    state.servers = servers->second;
  return state;
}

}  // namespace cohort::translate
