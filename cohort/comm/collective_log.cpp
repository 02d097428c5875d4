#include "cohort/comm/collective_log.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <sstream>
#include <unistd.h>

namespace cohort::comm {
namespace {

constexpr size_t kKept = 64;

// A flight record: one line each, fields separated by tabs. The first line is the present, the
// others are the past:
//   <state>\t<milliseconds>\t<text>         state: 1 running, 2 waiting
//   <group>\t<sequence>\t<what>\t<site>     what must be equal on all ranks, site need not be
struct Present {
  bool waiting = false;
  int64_t ms = 0;
  std::string text;
};

struct Past {
  std::string what;
  std::string site;
};

using Number = std::pair<std::string, int64_t>;  // group, number

std::vector<std::string> split(const std::string& line) {
  std::vector<std::string> fields;
  std::istringstream in(line);
  for (std::string field; std::getline(in, field, '\t');) fields.push_back(field);
  return fields;
}

std::string clean(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == '\t' || c == '\n'; }, ' ');
  return text;
}

std::optional<Present> present_of(const std::string& record) {
  const auto fields = split(record.substr(0, record.find('\n')));
  if (fields.size() != 3) return std::nullopt;
  return Present{fields[0] == "2", std::atoll(fields[1].c_str()), fields[2]};
}

// In the order in which the rank called them.
std::vector<std::pair<Number, Past>> past_of(const std::string& record) {
  std::vector<std::pair<Number, Past>> result;
  std::istringstream in(record);
  std::string line;
  std::getline(in, line);
  while (std::getline(in, line)) {
    const auto fields = split(line);
    if (fields.size() == 4)
      result.push_back({{fields[0], std::atoll(fields[1].c_str())}, {fields[2], fields[3]}});
  }
  return result;
}

std::string call(int rank, const Past& past) {
  return "rank " + std::to_string(rank) + " calls " + past.what + " at " + past.site;
}

TraceRecord blank(int rank, int world_size) {
  TraceRecord record;
  record.pid = getpid();
  record.rank = rank;
  record.world_size = world_size;
  record.since_ns = steady_now_ns();
  return record;
}

}  // namespace

CollectiveLog::CollectiveLog(int rank, int world_size, std::shared_ptr<RankTrace> trace)
    : blank_(blank(rank, world_size)), trace_(std::move(trace)), last_(blank_) {
  trace_->show(this, last_);
}

CollectiveLog::~CollectiveLog() {
  trace_->forget(this);
}

void CollectiveLog::begin(TraceRecord record, std::optional<MatchedCall> matched) {
  record.pid = blank_.pid;
  record.rank = blank_.rank;
  record.world_size = blank_.world_size;
  record.state = TraceState::kWaiting;
  record.since_ns = steady_now_ns();
  trace_->show(this, record);
  const std::lock_guard lock(mutex_);
  if (matched) {
    if (matched_.size() == kKept) matched_.pop_front();
    matched_.push_back(std::move(*matched));
  }
  underway_.push_back(record);
  last_ = record;
}

void CollectiveLog::end() {
  const std::lock_guard lock(mutex_);
  if (underway_.empty()) return;
  underway_.pop_back();
  if (underway_.empty()) {
    last_.state = TraceState::kRunning;
    last_.since_ns = steady_now_ns();
  } else {
    last_ = underway_.back();  // a collective inside of another guarded call
  }
  trace_->show(this, last_);
}

std::optional<int64_t> CollectiveLog::waiting_ns() const {
  const std::lock_guard lock(mutex_);
  if (underway_.empty()) return std::nullopt;
  return steady_now_ns() - underway_.back().since_ns;
}

std::string CollectiveLog::flight_record() const {
  const std::lock_guard lock(mutex_);
  std::ostringstream out;
  out << (underway_.empty() ? 1 : 2) << '\t' << (steady_now_ns() - last_.since_ns) / 1'000'000
      << '\t' << clean(describe(last_)) << '\n';
  for (const MatchedCall& call : matched_) {
    out << clean(call.group) << '\t' << call.number << '\t' << clean(call.what) << '\t'
        << (call.site.empty() ? "an unknown location" : clean(call.site)) << '\n';
  }
  return out.str();
}

std::optional<std::string> find_mismatch(const FlightRecords& records) {
  struct Entry {
    int rank;
    size_t position;  // among the rank's calls
    Past past;
  };
  // A collective is compared with that of the lowest rank that knows it.
  std::map<Number, Entry> known_calls;
  std::vector<std::pair<Entry, Entry>> differences;
  for (const auto& [rank, record] : records) {
    size_t position = 0;
    for (const auto& [number, past] : past_of(record)) {
      const Entry entry{rank, position++, past};
      const auto [known, is_new] = known_calls.try_emplace(number, entry);
      if (!is_new && known->second.past.what != past.what)
        differences.emplace_back(entry, known->second);
    }
  }
  if (differences.empty()) return std::nullopt;
  // The fault is a difference before which its two ranks have none; others may be its consequences.
  // Ranks that call two groups in different orders have no such one: any will do.
  const auto is_before = [](const Entry& a, const Entry& b) {
    return a.rank == b.rank && a.position < b.position;
  };
  const auto is_first = [&](const auto& difference) {
    const auto& [a, b] = difference;
    return std::none_of(differences.begin(), differences.end(), [&](const auto& other) {
      const auto& [c, d] = other;
      return is_before(c, a) || is_before(c, b) || is_before(d, a) || is_before(d, b);
    });
  };
  const auto found = std::find_if(differences.begin(), differences.end(), is_first);
  const auto& [mine, theirs] = found == differences.end() ? differences.front() : *found;
  return call(mine.rank, mine.past) + " where " + call(theirs.rank, theirs.past);
}

std::string describe_others(const FlightRecords& records) {
  std::map<std::string, int> votes;
  std::map<int, Present> presents;
  for (const auto& [rank, record] : records) {
    const auto present = present_of(record);
    if (!present) continue;
    presents[rank] = *present;
    if (present->waiting) ++votes[present->text];
  }
  if (votes.empty()) return "";
  // Where fewer than half of the ranks wait in one call, none is the one that the others miss.
  const auto most = std::max_element(
      votes.begin(), votes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  std::string result;
  for (const auto& [rank, present] : presents) {
    const bool with_most = present.waiting && present.text == most->first;
    if (with_most && 2 * most->second > static_cast<int>(presents.size())) continue;
    std::array<char, 32> seconds{};
    std::snprintf(seconds.data(), seconds.size(), "%.1f s", static_cast<double>(present.ms) / 1000);
    result += (result.empty() ? "" : "; ") + std::string("rank ") + std::to_string(rank) +
              (present.waiting ? " waits in " + present.text + " since " + seconds.data()
                               : " has not come: outside of collectives since " +
                                     std::string(seconds.data()) + ", last called " + present.text);
  }
  return result;
}

}  // namespace cohort::comm
