// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/status.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

namespace cohort::ps {

namespace {

constexpr std::chrono::seconds kRatePeriod{5};

}  // namespace

void Activity::tick(Time now) {
  if (now - next_.time >= kRatePeriod) from_ = std::exchange(next_, {counts, now});
}

double Activity::per_second(int64_t Counts::*count, Time now) const {
  const std::chrono::duration<double> seconds = now - from_.time;
  return static_cast<double>(counts.*count - from_.counts.*count) / std::max(seconds.count(), 0.1);
}

std::string status_text(const StatusSources& sources) {
  using nlohmann::json;
  const ParameterState& state = sources.state;
  const Activity& activity = sources.activity;
  const Counts& counts = activity.counts;
  const auto now = std::chrono::steady_clock::now();
  json object{{"server", sources.server},
              {"incarnation", sources.incarnation},
              {"up_s", std::chrono::duration<double>(now - activity.started).count()},
              {"steps", state.steps()},
              {"initialised", state.is_initialised()},
              {"failure", sources.failure},
              {"log_failure", sources.log_failure},
              {"waiting", sources.waiting},
              {"pending_bytes", state.pending_bytes()},
              {"pushes", counts.pushes},
              {"duplicates", counts.duplicates},
              {"refused", counts.refused},
              {"pulls", counts.pulls},
              {"rows_pushed", counts.rows_pushed},
              {"rows_pulled", counts.rows_pulled},
              {"bytes_in", counts.bytes_in},
              {"bytes_out", counts.bytes_out},
              {"trainers", json::array()},
              {"tables", json::array()}};
  if (state.job()) object["mode"] = to_string(state.job()->mode);
  const auto rate = [&](int64_t Counts::*count) { return activity.per_second(count, now); };
  object["per_s"] = {
      {"pushes", rate(&Counts::pushes)},           {"pulls", rate(&Counts::pulls)},
      {"rows_pushed", rate(&Counts::rows_pushed)}, {"rows_pulled", rate(&Counts::rows_pulled)},
      {"bytes_in", rate(&Counts::bytes_in)},       {"bytes_out", rate(&Counts::bytes_out)}};
  for (const auto& [id, trainer] : state.members().trainers()) {
    json line{{"trainer", id},
              {"incarnation", trainer.incarnation},
              {"last_push", trainer.last_sequence},
              {"lead", state.members().lead_of(id)},
              {"member", trainer.is_member}};
    const auto heard = sources.last_message.find(id);
    line["lost"] = trainer.is_member && heard == sources.last_message.end();
    if (heard != sources.last_message.end())
      line["silent_s"] = std::chrono::duration<double>(now - heard->second).count();
    object["trainers"].push_back(std::move(line));
  }
  const auto statistics = state.shard().table_statistics();
  for (size_t i = 0; i < statistics.size(); ++i) {
    const TableStatistics& table = statistics[i];
    object["tables"].push_back({{"name", state.shard().tables()[i]->options().name},
                                {"rows", table.rows},
                                {"cold_rows", table.spilled_rows},
                                {"bytes", table.bytes},
                                {"bytes_per_row", table.bytes_per_row()},
                                {"created", table.created},
                                {"evicted", table.evicted},
                                {"demoted", table.demoted},
                                {"refused", table.refused}});
  }
  // Paths in the reasons may be no UTF-8.
  return object.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace cohort::ps
