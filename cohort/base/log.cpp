// SPDX-License-Identifier: Apache-2.0
// The only file that sees spdlog. Its fmt is older than the one libtorch ships, so this file is
// compiled without libtorch's include folders and includes no header that needs them.
#include "cohort/base/log.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>

#include "cohort/base/log_file.h"

namespace cohort {
namespace {

constexpr std::array<const char*, 4> kLevelNames = {"debug", "info", "warn", "error"};

std::unique_ptr<spdlog::formatter> formatter(const char* pattern) {
  return std::make_unique<spdlog::pattern_formatter>(pattern, spdlog::pattern_time_type::utc);
}

void append_text(std::string& line, std::string_view text) {
  for (char c : text) line += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
}

void append_value(std::string& line, const std::string& value) {
  const bool plain = !value.empty() && value.find_first_of(" =\"\\\t\r\n") == std::string::npos;
  if (plain) {
    append_text(line, value);
    return;
  }
  line += '"';
  for (char c : value) {
    if (c == '"' || c == '\\') line += '\\';
    if (c == '\n') {
      line += "\\n";
    } else {
      append_text(line, std::string_view(&c, 1));
    }
  }
  line += '"';
}

}  // namespace

LogField::LogField(std::string_view field_key, double number) : key(field_key) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.6g", std::isnan(number) ? NAN : number);
  value = text.data();
}

struct Log::Sinks {
  explicit Sinks(const LogOptions& options)
      : tag("[rank " + std::to_string(options.rank) + "/" + std::to_string(options.world_size) +
            "] "),
        level(options.level),
        logger("cohort") {
    if (!options.file.empty()) {
      prepare_log_file(options.file);
      auto sink = std::make_shared<spdlog::sinks::basic_file_sink_mt>(options.file);
      sink->set_formatter(formatter("%v time=%Y-%m-%dT%H:%M:%S.%eZ"));
      logger.sinks().push_back(std::move(sink));
    }
    if (options.console == LogConsole::kAlways ||
        (options.console == LogConsole::kRankZero && options.rank == 0)) {
      auto sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
      sink->set_formatter(formatter("%v"));
      logger.sinks().push_back(std::move(sink));
    }
    logger.set_level(spdlog::level::trace);
    logger.flush_on(spdlog::level::trace);
  }

  std::string tag;
  LogLevel level;
  spdlog::logger logger;
};

Log::Log(const LogOptions& options) : sinks_(std::make_unique<Sinks>(options)) {}
Log::~Log() = default;
Log::Log(Log&&) noexcept = default;
Log& Log::operator=(Log&&) noexcept = default;

void Log::write(LogLevel level, std::string_view message, Fields fields) const {
  if (level < sinks_->level) return;
  std::string line = sinks_->tag;
  line += kLevelNames[static_cast<size_t>(level)];
  line += ' ';
  append_text(line, message);
  for (const LogField& field : fields) {
    line += ' ';
    line += field.key;
    line += '=';
    append_value(line, field.value);
  }
  // Passed as a string view: braces in the text are not a format.
  sinks_->logger.log(spdlog::level::info, spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace cohort
