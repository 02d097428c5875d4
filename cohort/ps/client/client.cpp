// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/client/client.h"

#include <algorithm>
#include <c10/util/Exception.h>
#include <cmath>
#include <map>

#include "cohort/base/error.h"
#include "cohort/ps/client/timer_thread.h"
#include "cohort/ps/id_hash.h"
#include "cohort/ps/rpc/rpc_channel.h"
#include "cohort/ps/wire/bfloat16.h"

namespace cohort::ps {

// Which of `ids` are which server's: positions, server after server.
struct Client::Spread {
  std::vector<uint32_t> positions;  // Empty for one server: all, in their order.
  std::vector<size_t> begins;       // By server, and the end.

  Spread(std::span<const uint64_t> ids, uint32_t servers) : begins(servers + 1, 0) {
    begins.back() = ids.size();
    if (servers == 1) return;
    std::vector<uint32_t> server_of_id(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
      server_of_id[i] = server_of(ids[i], servers);
      if (server_of_id[i] + 1 < servers) ++begins[server_of_id[i] + 1];
    }
    for (uint32_t server = 1; server < servers; ++server) begins[server] += begins[server - 1];
    std::vector<size_t> next(begins.begin(), begins.end() - 1);
    positions.resize(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
      positions[next[server_of_id[i]]++] = static_cast<uint32_t>(i);
    }
  }

  size_t count(size_t server) const { return begins[server + 1] - begins[server]; }

  // Copies those of `from`, of `width` values a row, that are the server's.
  template <class Value>
  void copy_rows(size_t server, size_t width, const Value* from, Value* to) const {
    if (positions.empty()) {
      std::copy_n(from, begins.back() * width, to);
      return;
    }
    for (size_t j = begins[server]; j < begins[server + 1]; ++j, to += width)
      std::copy_n(from + positions[j] * width, width, to);
  }

  // The position of the server's row `j` of count(server).
  size_t position(size_t server, size_t j) const {
    return positions.empty() ? j : positions[begins[server] + j];
  }
};

namespace {

// Parameters and tables have numbers of their own.
constexpr uint64_t kOfParameter = uint64_t{1} << 32;

std::string shape_text(SectionKind kind, uint32_t table, uint32_t width, size_t values) {
  return std::to_string(values) + " values of " +
         (kind == SectionKind::kRows ? "rows of table " : "block ") + std::to_string(table) + ", " +
         std::to_string(width) + " wide";
}

}  // namespace

struct PendingPull::State {
  std::vector<PullRows> rows;
  std::vector<Client::Spread> spreads;  // As `rows`.
  std::vector<std::span<float>> parameters;
  struct Part {
    ReplyFuture future;
    std::vector<SectionShape> shapes;  // What was asked for: rows, then blocks.
  };
  std::vector<Part> parts;  // By server.
  const Client* client = nullptr;

  Message checked(size_t server, const Reply& reply) const;
};

// The sections of `reply`, each of the shape that was asked for.
Message PendingPull::State::checked(size_t server, const Reply& reply) const {
  const auto refuse = [&](const std::string& what) {
    C10_THROW_ERROR(DistError, "server " + std::to_string(server) + " (" +
                                   client->options_.servers[server] + "): its answer to a pull " +
                                   what);
  };
  Message message;
  try {
    message = parse_message(reply.message.span(),
                            reply.message.is_owner() ? Checksums::kChecked : Checksums::kIgnored);
  } catch (const c10::ValueError& error) {
    refuse("is damaged: " + one_line(error));
  }
  if (message.header.kind != MessageKind::kReply) refuse("is of another kind of message");
  if (message.header.job != client->fingerprint_) refuse("is of another job");
  const auto& shapes = parts[server].shapes;
  if (message.sections.size() != shapes.size())
    refuse("has " + std::to_string(message.sections.size()) + " sections, expected " +
           std::to_string(shapes.size()));
  for (size_t i = 0; i < shapes.size(); ++i) {
    const SectionShape& asked = shapes[i];
    const size_t values = asked.count * asked.width;
    const Section& section = message.sections[i];
    if (section.kind != asked.kind || section.table != asked.table ||
        section.width != asked.width || section.num_values() != values)
      refuse("has in section " + std::to_string(i) + " " +
             shape_text(section.kind, section.table, section.width, section.num_values()) +
             ", expected " + shape_text(asked.kind, asked.table, asked.width, values));
    if (section.dtype != asked.dtype)
      refuse("has in section " + std::to_string(i) + " values in " + to_string(section.dtype) +
             ", expected " + to_string(asked.dtype));
  }
  return message;
}

PendingPull::PendingPull(std::unique_ptr<State> state) : state_(std::move(state)) {}
PendingPull::PendingPull(PendingPull&&) noexcept = default;
PendingPull& PendingPull::operator=(PendingPull&&) noexcept = default;
PendingPull::~PendingPull() = default;

uint64_t PendingPull::wait() {
  const Client& client = *state_->client;
  uint64_t steps = UINT64_MAX;
  for (size_t server = 0; server < state_->parts.size(); ++server) {
    const Reply reply = state_->parts[server].future.wait();
    steps = std::min(steps, reply.steps);
    const Message message = state_->checked(server, reply);
    const std::span sections(message.sections);
    for (size_t i = 0; i < state_->rows.size(); ++i) {
      const Section& section = sections[i];
      const Client::Spread& spread = state_->spreads[i];
      const size_t width = section.width;
      const float* values = section.values.data();
      float* const out = state_->rows[i].weights.data();
      if (section.dtype == WireDtype::kBfloat16) {
        if (spread.positions.empty()) {
          widen_bfloat16(section.bfloat16s, {out, section.bfloat16s.size()});
          continue;
        }
        for (size_t j = 0; j < spread.count(server); ++j)
          widen_bfloat16(section.bfloat16s.subspan(j * width, width),
                         {out + spread.position(server, j) * width, width});
        continue;
      }
      if (spread.positions.empty()) {
        std::copy(values, values + section.values.size(), out);
        continue;
      }
      for (size_t j = spread.begins[server]; j < spread.begins[server + 1]; ++j, values += width) {
        std::copy_n(values, width, out + spread.positions[j] * width);
      }
    }
    for (const Section& section : sections.subspan(state_->rows.size())) {
      const auto parameter = state_->parameters[client.parameter_of_block_[section.table]];
      const auto out = parameter.subspan(
          static_cast<size_t>(client.job_.blocks[section.table].begin), section.num_values());
      if (section.dtype == WireDtype::kBfloat16) {
        widen_bfloat16(section.bfloat16s, out);
      } else {
        std::ranges::copy(section.values, out.begin());
      }
    }
  }
  return steps;
}

Client::Client(const ClientOptions& options, const JobOptions& job, const ChannelMaker& channels)
    : options_(options),
      job_(job),
      fingerprint_(job.fingerprint()),
      timer_(std::make_unique<TimerThread>()) {
  validate(job_);
  if (static_cast<int>(options_.servers.size()) != job_.servers)
    throw ConfigError("client: the job has " + std::to_string(job_.servers) + " servers, " +
                      std::to_string(options_.servers.size()) + " endpoints were given");
  std::map<std::string, size_t> numbers;
  for (const BlockOptions& block : job_.blocks) {
    const auto [found, is_new] = numbers.try_emplace(block.parameter, parameters_.size());
    if (is_new) parameters_.push_back({block.parameter, 0});
    auto& elements = parameters_[found->second].elements;
    elements = std::max(elements, block.end);
    parameter_of_block_.push_back(found->second);
  }
  for (int server = 0; server < job_.servers; ++server) {
    LinkOptions link = options_.link;
    link.server = server;
    link.endpoint = options_.servers[static_cast<size_t>(server)];
    link.trainer = options_.trainer;
    auto channel = channels ? channels(server)
                            : make_rpc_channel({.endpoint = link.endpoint,
                                                .security = options_.security,
                                                .connections = options_.connections});
    links_.push_back(std::make_unique<ServerLink>(std::move(channel), link, *timer_));
  }
  try {
    join();
  } catch (const ConfigError&) {
    throw;
  } catch (const c10::ValueError& error) {
    throw ConfigError(one_line(error));  // Another job, for example: a restart does not help.
  }
}

Client::~Client() = default;

// Before any server is changed: one that were given the wrong part would keep the job.
void Client::check_numbers() {
  std::vector<ReplyFuture> answers;
  for (auto& link : links_)
    answers.push_back(link->begin({.call = Call::kStatus, .trainer = options_.trainer}));
  for (size_t server = 0; server < answers.size(); ++server) {
    const int number = answers[server].wait().server;
    TORCH_CHECK_VALUE(number == static_cast<int>(server), "client: ", options_.servers[server],
                      " is given as server ", server, " and is server ", number,
                      ": expected endpoints in the order of the servers' numbers");
  }
}

void Client::restore(const std::string& checkpoint) {
  std::vector<ReplyFuture> answers;
  for (auto& link : links_) {
    answers.push_back(link->begin({.call = Call::kRestore,
                                   .trainer = options_.trainer,
                                   .job = fingerprint_,
                                   .text = checkpoint}));
  }
  for (ReplyFuture& answer : answers) answer.wait();
}

void Client::join() {
  check_numbers();
  const std::string json = job_.to_json();
  if (options_.trainer == 0) {
    for (auto& link : links_) link->call({.call = Call::kJob, .trainer = 0, .text = json});
    if (options_.restore) restore(*options_.restore);
  }
  is_initialised_ = true;
  sequences_ = std::vector<std::atomic<uint64_t>>(links_.size());
  uint64_t at_start = 0, pushed_everywhere = UINT64_MAX;
  std::vector<uint64_t> steps;
  for (size_t server = 0; server < links_.size(); ++server) {
    const Reply reply = links_[server]->join(fingerprint_, json);
    sequences_[server] = reply.last_sequence;
    is_initialised_ &= reply.is_initialised;
    at_start = std::max(at_start, reply.steps_at_start);
    pushed_everywhere = std::min(pushed_everywhere, reply.last_sequence);
    steps.push_back(reply.steps);
  }
  if (options_.trainer == kNoTrainer) return;
  const auto [least, most] = std::ranges::minmax_element(steps);
  const uint64_t closed = *most;
  pushed_before_ = job_.mode == Mode::kSync ? closed - at_start : pushed_everywhere;
  if (job_.mode != Mode::kSync) {
    if (options_.repeats_pushes) {
      for (auto& sequence : sequences_) sequence = pushed_everywhere;
    }
    return;
  }
  // One step is open at most; more if one server alone went back to a checkpoint.
  TORCH_CHECK_VALUE(closed - *least <= 1, "client: ", options_.servers[least - steps.begin()],
                    " is at step ", *least, ", ", options_.servers[most - steps.begin()],
                    " at step ", closed,
                    ": expected one step of all servers, which may go back to a checkpoint");
  // It is a member on every server, so no step closes without it. If one server has closed a step,
  // the others have all pushes of it, its own among them; where it was not a member it abstains.
  step_ = closed;
  for (size_t server = 0; server < links_.size(); ++server) {
    while (sequences_[server] < closed)
      links_[server]->push(MessageWriter({}), ++sequences_[server]);
  }
}

// Whether a step closes only after this trainer confirms that all servers have its push.
bool Client::confirms() const {
  return job_.mode == Mode::kSync && job_.servers > 1 && options_.trainer != kNoTrainer;
}

void Client::await_acknowledged() {
  for (auto& link : links_) link->flush();
}

std::vector<SectionShape> Client::block_shapes(int server, bool with_values,
                                               WireDtype dtype) const {
  std::vector<SectionShape> shapes;
  for (uint32_t block = 0; block < job_.blocks.size(); ++block) {
    const BlockOptions& options = job_.blocks[block];
    if (options.server != server) continue;
    shapes.push_back({.kind = SectionKind::kBlock,
                      .table = block,
                      .count = static_cast<uint64_t>(options.end - options.begin),
                      .has_values = with_values,
                      .dtype = dtype});
  }
  return shapes;
}

void Client::initialise(std::span<const std::span<const float>> parameters) {
  TORCH_CHECK_VALUE(!parameters.empty() || parameters_.empty(), "initialise: expected ",
                    parameters_.size(), " parameters, got none");
  check_parameters("initialise", std::vector(parameters.begin(), parameters.end()));
  // Before any server gets its part: if one rejected it, the others would be initialised.
  for (size_t i = 0; job_.error_if_nonfinite && i < parameters.size(); ++i) {
    const auto values = parameters[i];
    const auto bad =
        std::ranges::find_if_not(values, [](float value) { return std::isfinite(value); });
    TORCH_CHECK_VALUE(bad == values.end(), "initialise: ", parameters_[i].name,
                      ": expected finite values, got ", *bad, " at element ", bad - values.begin(),
                      " (error_if_nonfinite)");
  }
  std::vector<ReplyFuture> futures;
  for (int server = 0; server < job_.servers; ++server) {
    const auto shapes = block_shapes(server, true, WireDtype::kFloat32);
    if (shapes.empty()) continue;
    MessageWriter message(shapes, links_[static_cast<size_t>(server)]->buffer_maker());
    for (size_t i = 0; i < shapes.size(); ++i) {
      const BlockOptions& block = job_.blocks[shapes[i].table];
      const auto values = parameters[parameter_of_block_[shapes[i].table]];
      std::copy_n(values.begin() + block.begin, shapes[i].count, message.values(i).begin());
    }
    futures.push_back(
        links_[static_cast<size_t>(server)]->push(std::move(message), 0, 0, kInitialValues));
  }
  for (ReplyFuture& future : futures) future.wait();
  is_initialised_ = true;
}

void Client::check_rows(const char* call, uint32_t table, size_t ids, size_t floats) const {
  TORCH_CHECK_VALUE(table < job_.tables.size(), call, ": the job has ", job_.tables.size(),
                    " tables, got number ", table);
  const size_t expected = ids * static_cast<size_t>(job_.tables[table].width);
  TORCH_CHECK_VALUE(floats == expected, call, ": table '", job_.tables[table].name, "': ", ids,
                    " ids need ", expected, " floats, got ", floats);
}

template <class Values>
void Client::check_parameters(const char* call, const std::vector<Values>& parameters) const {
  if (parameters.empty()) return;
  TORCH_CHECK_VALUE(parameters.size() == parameters_.size(), call, ": expected ",
                    parameters_.size(), " parameters, got ", parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    TORCH_CHECK_VALUE(parameters[i].size() == static_cast<size_t>(parameters_[i].elements), call,
                      ": parameter '", parameters_[i].name, "' has ", parameters_[i].elements,
                      " elements, got ", parameters[i].size());
  }
}

PendingPull Client::pull(std::span<const PullRows> rows, std::vector<std::span<float>> parameters,
                         bool is_prediction) {
  check_parameters("pull", parameters);
  const uint64_t confirmed = step();
  if (confirms() && !is_prediction) await_acknowledged();
  auto state = std::make_unique<PendingPull::State>();
  state->rows.assign(rows.begin(), rows.end());
  state->parameters = std::move(parameters);
  state->client = this;
  for (const PullRows& asked : rows) {
    check_rows("pull", asked.table, asked.ids.size(), asked.weights.size());
    state->spreads.emplace_back(asked.ids, static_cast<uint32_t>(job_.servers));
  }
  for (int server = 0; server < job_.servers; ++server) {
    const auto at = static_cast<size_t>(server);
    std::vector<SectionShape> shapes;
    for (size_t i = 0; i < rows.size(); ++i) {
      shapes.push_back({.kind = SectionKind::kRows,
                        .table = rows[i].table,
                        .width = static_cast<uint32_t>(job_.tables[rows[i].table].width),
                        .count = state->spreads[i].count(at),
                        .has_values = false,
                        .dtype = job_.tables[rows[i].table].wire_dtype});
    }
    if (!state->parameters.empty()) {
      const auto blocks = block_shapes(server, false, job_.dense_wire_dtype);
      shapes.insert(shapes.end(), blocks.begin(), blocks.end());
    }
    MessageWriter message(shapes, links_[at]->buffer_maker());
    for (size_t i = 0; i < rows.size(); ++i)
      state->spreads[i].copy_rows(at, 1, rows[i].ids.data(), message.ids(i).data());
    std::vector<SectionShape> answer = shapes;
    for (SectionShape& shape : answer) {
      shape.has_ids = false;
      shape.has_values = true;
    }
    state->parts.push_back(
        {links_[at]->pull(std::move(message), is_prediction ? 0 : sequences_[at].load(),
                          is_prediction ? 0 : confirmed, is_prediction ? kPrediction : 0,
                          message_bytes(answer)),
         std::move(shapes)});
  }
  return PendingPull(std::move(state));
}

void Client::push(std::span<const PushRows> rows, std::vector<std::span<const float>> parameters) {
  check_parameters("push", parameters);
  std::vector<Spread> spreads;
  for (const PushRows& pushed : rows) {
    check_rows("push", pushed.table, pushed.ids.size(), pushed.gradients.size());
    spreads.emplace_back(pushed.ids, static_cast<uint32_t>(job_.servers));
  }
  all_or_nothing([&] { send_push(rows, parameters, spreads); });
}

void Client::send_push(std::span<const PushRows> rows,
                       const std::vector<std::span<const float>>& parameters,
                       const std::vector<Spread>& spreads) {
  // A pull may have reported a rejected push: then no server gets the next one.
  for (auto& link : links_) link->check_pushes();
  if (confirms()) await_acknowledged();
  const uint64_t confirmed = confirms() ? step() : 0;
  const uint64_t next = step() + 1;
  for (int server = 0; server < job_.servers; ++server) {
    const auto at = static_cast<size_t>(server);
    std::vector<SectionShape> shapes;
    for (size_t i = 0; i < rows.size(); ++i) {
      shapes.push_back({.kind = SectionKind::kRows,
                        .table = rows[i].table,
                        .width = static_cast<uint32_t>(job_.tables[rows[i].table].width),
                        .count = spreads[i].count(at),
                        .dtype = job_.tables[rows[i].table].wire_dtype});
    }
    if (!parameters.empty()) {
      const auto blocks = block_shapes(server, true, job_.dense_wire_dtype);
      shapes.insert(shapes.end(), blocks.begin(), blocks.end());
    }
    const uint64_t sequence = job_.mode == Mode::kSync ? next : sequences_[at] + 1;
    MessageWriter message(shapes, links_[at]->buffer_maker());
    for (size_t i = 0; i < rows.size(); ++i) {
      spreads[i].copy_rows(at, 1, rows[i].ids.data(), message.ids(i).data());
      if (shapes[i].dtype == WireDtype::kBfloat16) {
        round_rows(rows[i], at, spreads[i], sequence, message.bfloat16s(i));
      } else {
        spreads[i].copy_rows(at, shapes[i].width, rows[i].gradients.data(),
                             message.values(i).data());
      }
    }
    for (size_t i = rows.size(); i < shapes.size(); ++i) {
      const BlockOptions& block = job_.blocks[shapes[i].table];
      const uint64_t parameter = parameter_of_block_[shapes[i].table];
      const auto begin = static_cast<uint64_t>(block.begin);
      const auto values = parameters[parameter].subspan(begin, shapes[i].count);
      if (shapes[i].dtype == WireDtype::kBfloat16) {
        round_stochastically(rounding_key(0, kOfParameter + parameter, options_.trainer, sequence),
                             begin, values, message.bfloat16s(i));
      } else {
        std::ranges::copy(values, message.values(i).begin());
      }
    }
    links_[at]->push(std::move(message), sequence, confirmed);
    sequences_[at] = sequence;  // A concurrent pull does not wait for a push that is not sent yet.
  }
  // Not before: a concurrent pull confirms this step, which all servers must have.
  if (job_.mode == Mode::kSync) step_ = next;
}

// The same bits whichever server a row is on: by its id and the element.
void Client::round_rows(const PushRows& rows, size_t server, const Spread& spread,
                        uint64_t sequence, std::span<uint16_t> to) const {
  const TableOptions& table = job_.tables[rows.table];
  const auto width = static_cast<size_t>(table.width);
  const uint64_t key = rounding_key(table.seed, rows.table, options_.trainer, sequence);
  for (size_t j = 0; j < spread.count(server); ++j) {
    const size_t position = spread.position(server, j);
    round_stochastically(rounding_key_of_row(key, rows.ids[position]), 0,
                         rows.gradients.subspan(position * width, width),
                         to.subspan(j * width, width));
  }
}

void Client::flush() {
  all_or_nothing([this] {
    await_acknowledged();
    // With one server the push has confirmed its step; that the link, too, repeats it in heartbeats
    // tells a server that was restarted meanwhile.
    if (job_.mode != Mode::kSync || options_.trainer == kNoTrainer) return;
    for (auto& link : links_) link->confirm(step());
  });
}

// If one server rejected a push that others have, no server may get the next one.
void Client::all_or_nothing(const std::function<void()>& pushes) {
  try {
    pushes();
  } catch (...) {
    give_up_pushes();
    throw;
  }
}

void Client::give_up_pushes() {
  for (auto& link : links_) link->give_up_pushes();
}

void Client::save(const std::string& folder) {
  TORCH_CHECK_VALUE(!folder.empty(), "save: expected a folder");
  flush();
  Request request{.call = Call::kSave,
                  .trainer = options_.trainer,
                  .step = step_,
                  .nonce = draw_nonce(),
                  .text = folder};
  std::vector<ReplyFuture> parts;
  for (auto& link : links_) parts.push_back(link->begin(request));
  for (ReplyFuture& part : parts) part.wait();
  request.call = Call::kFinishSave;
  links_.front()->call(request);
}

std::vector<std::string> Client::status() {
  std::vector<std::string> lines;
  for (auto& link : links_) {
    lines.push_back(link->call({.call = Call::kStatus, .trainer = options_.trainer}).text);
  }
  return lines;
}

void Client::stop_servers() {
  for (auto& link : links_) link->call({.call = Call::kStop, .trainer = options_.trainer});
}

void Client::leave() {
  flush();
  for (auto& link : links_) link->leave();
}

}  // namespace cohort::ps
