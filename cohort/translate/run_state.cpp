#include "cohort/translate/run_state.h"

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
  visit("best_loss", state.best.loss);
  visit("best_bleu", state.best.bleu);
  visit("best_chrf", state.best.chrf);
  visit("validations_without_best", state.early_stopping.num_without_best);
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

}  // namespace

void write_facts(const RunState& state, train::Facts& facts) {
  // JSON's numbers are the shortest that read back as the same bits.
  visit_fields(state, [&](const char* name, auto value) { facts[name] = Json(value).dump(); });
  if (state.early_stopping.best) facts["best_metric"] = Json(*state.early_stopping.best).dump();
  Json parts = Json::array();
  for (const data::EpochPart& part : state.trained) {
    Json entry;
    visit_part(part, [&](const char* name, auto value) { entry[name] = value; });
    parts.push_back(entry);
  }
  facts["trained"] = parts.dump();
}

RunState read_state(const train::Facts& facts) {
  const auto read = [&](const char* name) {
    const auto found = facts.find(name);
    if (found == facts.end())
      throw ConfigError(std::string("manifest.json has no fact ") + name +
                        ": expected the checkpoint of a training run");
    return Json::parse(found->second);
  };
  RunState state;
  try {
    visit_fields(state, [&]<class T>(const char* name, T& value) { value = read(name).get<T>(); });
    if (facts.contains("best_metric"))
      state.early_stopping.best = read("best_metric").get<double>();
    for (const Json& entry : read("trained")) {
      data::EpochPart& part = state.trained.emplace_back();
      visit_part(part,
                 [&]<class T>(const char* name, T& value) { value = entry.at(name).get<T>(); });
    }
  } catch (const Json::exception& error) {
    throw ConfigError(std::string("manifest.json: a fact has another form than expected: ") +
                      error.what());
  }
  return state;
}

}  // namespace cohort::translate
