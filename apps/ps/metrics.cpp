// SPDX-License-Identifier: Apache-2.0
#include "apps/ps/metrics.h"

#include <chrono>
#include <future>
#include <nlohmann/json.hpp>
#include <prometheus/collectable.h>
#include <prometheus/exposer.h>
#include <prometheus/metric_family.h>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/ps/endpoints.h"

namespace cohort::cli {

namespace {

using nlohmann::json;
using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

constexpr std::chrono::seconds kStatusTimeout{2};

struct Line {
  const char* key;  // In the server's status.
  const char* name;
  const char* help;
  MetricType type;
};

constexpr Line kOfServer[] = {
    {"steps", "cohort_ps_steps", "Steps closed, or pushes applied in async", MetricType::Gauge},
    {"pushes", "cohort_ps_pushes_total", "Pushes applied or accepted", MetricType::Counter},
    {"duplicates", "cohort_ps_duplicates_total", "Pushes that came again", MetricType::Counter},
    {"refused", "cohort_ps_refused_total", "Requests refused", MetricType::Counter},
    {"pulls", "cohort_ps_pulls_total", "Pulls answered", MetricType::Counter},
    {"rows_pushed", "cohort_ps_rows_pushed_total", "Rows in pushes", MetricType::Counter},
    {"rows_pulled", "cohort_ps_rows_pulled_total", "Rows in pulls", MetricType::Counter},
    {"bytes_in", "cohort_ps_received_bytes_total", "Bytes of messages", MetricType::Counter},
    {"bytes_out", "cohort_ps_sent_bytes_total", "Bytes of answers", MetricType::Counter},
    {"waiting", "cohort_ps_waiting_requests", "Requests that wait", MetricType::Gauge},
    {"pending_bytes", "cohort_ps_open_step_bytes", "Pushes of open steps", MetricType::Gauge}};
constexpr Line kOfTable[] = {
    {"rows", "cohort_ps_table_rows", "Rows in memory", MetricType::Gauge},
    {"cold_rows", "cohort_ps_table_cold_rows", "Rows on disk alone", MetricType::Gauge},
    {"bytes", "cohort_ps_table_bytes", "Memory of a table", MetricType::Gauge},
    {"created", "cohort_ps_table_created_total", "Rows made", MetricType::Counter},
    {"evicted", "cohort_ps_table_evicted_total", "Rows dropped", MetricType::Counter},
    {"demoted", "cohort_ps_table_demoted_total", "Rows moved to disk", MetricType::Counter}};
constexpr Line kOfTrainer[] = {
    {"last_push", "cohort_ps_trainer_pushes", "Number of the last push", MetricType::Gauge},
    {"lead", "cohort_ps_trainer_lead", "Pushes ahead of the slowest", MetricType::Gauge},
    {"silent_s", "cohort_ps_trainer_silent_seconds", "Since it was heard of", MetricType::Gauge}};

void add(std::vector<MetricFamily>& families, const Line& line, const json& values,
         const char* label, const char* label_key) {
  MetricFamily family{.name = line.name, .help = line.help, .type = line.type, .metric = {}};
  for (const json& value : values) {
    if (!value.contains(line.key)) continue;
    ClientMetric metric;
    if (label) {
      const json& name = value.at(label_key);
      metric.label = {{label, name.is_string() ? name.get<std::string>() : name.dump()}};
    }
    const double number = value.at(line.key);
    if (line.type == MetricType::Counter) {
      metric.counter.value = number;
    } else {
      metric.gauge.value = number;
    }
    family.metric.push_back(std::move(metric));
  }
  if (!family.metric.empty()) families.push_back(std::move(family));
}

class ServerMetrics final : public prometheus::Collectable {
 public:
  explicit ServerMetrics(ps::Server& server) : server_(server) {}

  std::vector<MetricFamily> Collect() const override {
    auto answer = std::make_shared<std::promise<std::string>>();
    auto text = answer->get_future();
    server_.submit({.call = ps::Call::kStatus},
                   [answer](const ps::Reply& reply) { answer->set_value(reply.text); });
    std::vector<MetricFamily> families;
    if (text.wait_for(kStatusTimeout) != std::future_status::ready) return families;
    const json status = json::parse(text.get(), nullptr, false);
    if (status.is_discarded()) return families;
    for (const Line& line : kOfServer) add(families, line, json::array({status}), nullptr, nullptr);
    for (const Line& line : kOfTable) add(families, line, status.at("tables"), "table", "name");
    for (const Line& line : kOfTrainer)
      add(families, line, status.at("trainers"), "trainer", "trainer");
    return families;
  }

 private:
  ps::Server& server_;
};

}  // namespace

struct MetricsEndpoint::Parts {
  std::unique_ptr<prometheus::Exposer> exposer;
  std::shared_ptr<ServerMetrics> metrics;
};

void check_metrics(const std::string& endpoint) {
  if (!ps::is_loopback(endpoint))
    throw ConfigError("--metrics " + endpoint +
                      ": expected an address of this host, 127.0.0.1:PORT");
  ps::check_can_listen("--metrics", endpoint);
}

MetricsEndpoint::MetricsEndpoint(ps::Server& server, const std::string& endpoint)
    : parts_(std::make_unique<Parts>()) {
  check_metrics(endpoint);
  parts_->metrics = std::make_shared<ServerMetrics>(server);
  try {
    parts_->exposer = std::make_unique<prometheus::Exposer>(endpoint, 1);
  } catch (const std::exception& error) {
    throw ConfigError("--metrics " + endpoint + ": cannot listen there: " + error.what());
  }
  parts_->exposer->RegisterCollectable(parts_->metrics);
}

MetricsEndpoint::~MetricsEndpoint() = default;

}  // namespace cohort::cli
