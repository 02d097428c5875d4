// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/declared_job.h"

#include <algorithm>
#include <c10/util/Exception.h>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "cohort/ps/id_hash.h"
#include "cohort/ps/wire/request.h"

namespace cohort::ps {

namespace {

constexpr int64_t kMaxAnswerBytes = std::numeric_limits<int32_t>::max();  // What gRPC carries.

uint64_t elements_of(const BlockOptions& block) {
  return static_cast<uint64_t>(block.end - block.begin);
}

bool is_initial(const Header& header) {
  return header.kind == MessageKind::kPush && (header.flags & kInitialValues) != 0;
}

}  // namespace

DeclaredJob::DeclaredJob(JobOptions options, int server)
    : options_(std::move(options)),
      fingerprint_(options_.fingerprint()),
      server_(server),
      num_blocks_(
          static_cast<size_t>(std::ranges::count(options_.blocks, server, &BlockOptions::server))) {
}

void DeclaredJob::check_same(uint64_t fingerprint, const std::string& text) const {
  TORCH_CHECK_VALUE(fingerprint == fingerprint_, "job: this server has another one",
                    text.empty() ? "" : ": " + first_difference(options_, JobOptions::parse(text)));
}

void DeclaredJob::check(const Message& message) const {
  TORCH_CHECK_VALUE(message.header.job == fingerprint_, "the message is of another job");
  check_sections(message);
  if (message.header.kind == MessageKind::kPush) {
    TORCH_CHECK_VALUE(message.header.trainer != kNoTrainer, "push: it names no trainer");
    return check_finite(message);
  }
  const int64_t bytes = answer_bytes(message);
  TORCH_CHECK_VALUE(bytes <= kMaxAnswerBytes, "pull: its answer would have ", bytes,
                    " bytes, a message has ", kMaxAnswerBytes,
                    " at most: ask for fewer rows at once");
}

void DeclaredJob::check_sections(const Message& message) const {
  const bool push = message.header.kind == MessageKind::kPush;
  const bool initial = is_initial(message.header);
  TORCH_CHECK_VALUE(!initial || message.sections.size() == num_blocks_,
                    "message: initial values of ", message.sections.size(), " blocks, server ",
                    server_, " has ", num_blocks_);
  const Section* before = nullptr;
  for (const Section& section : message.sections) {
    TORCH_CHECK_VALUE(!initial || section.kind == SectionKind::kBlock,
                      "message: initial values are of blocks, got those of rows");
    TORCH_CHECK_VALUE(!before || before->kind < section.kind ||
                          (before->kind == section.kind && before->table < section.table),
                      "message: expected its sections in the order of tables, each once");
    before = &section;
    if (section.kind == SectionKind::kBlock) {
      TORCH_CHECK_VALUE(section.table < options_.blocks.size() &&
                            options_.blocks[section.table].server == server_,
                        "message: server ", server_, " has no block ", section.table);
      TORCH_CHECK_VALUE(section.width == 1, "message: block ", section.table, " has width 1, got ",
                        section.width);
      check_dtype(section, initial);
      const uint64_t elements = elements_of(options_.blocks[section.table]);
      TORCH_CHECK_VALUE(!push || section.num_values() == elements, "message: block ", section.table,
                        " has ", elements, " elements, got ", section.num_values());
      continue;
    }
    TORCH_CHECK_VALUE(section.table < options_.tables.size(), "message: the job has ",
                      options_.tables.size(), " tables, got number ", section.table);
    const TableOptions& table = options_.tables[section.table];
    TORCH_CHECK_VALUE(section.width == table.width, "message: rows of table '", table.name,
                      "' have ", table.width, " values, got ", section.width);
    check_dtype(section, initial);
    TORCH_CHECK_VALUE(!push || section.num_values() == section.ids.size() * section.width,
                      "message: table '", table.name, "': ", section.ids.size(), " ids with ",
                      section.num_values(), " values");
    const auto foreign = find_foreign(section.ids);
    TORCH_CHECK_VALUE(!foreign, "message: row ", *foreign, " of table '", table.name,
                      "' is server ", server_of(*foreign, static_cast<uint32_t>(options_.servers)),
                      "'s, this is server ", server_);
  }
}

WireDtype DeclaredJob::dtype_of(const Section& section) const {
  return section.kind == SectionKind::kBlock ? options_.dense_wire_dtype
                                             : options_.tables[section.table].wire_dtype;
}

void DeclaredJob::check_dtype(const Section& section, bool is_initial) const {
  const WireDtype expected = is_initial ? WireDtype::kFloat32 : dtype_of(section);
  if (section.dtype == expected) return;
  const std::string of = section.kind == SectionKind::kBlock
                             ? "block " + std::to_string(section.table)
                             : "table '" + options_.tables[section.table].name + "'";
  TORCH_CHECK_VALUE(false, "message: the ", is_initial ? "initial values" : "values", " of ", of,
                    " travel as ", to_string(expected), ", got ", to_string(section.dtype));
}

// Which one it is is looked for only where there is one: the pass over all has no branches.
std::optional<uint64_t> DeclaredJob::find_foreign(std::span<const uint64_t> ids) const {
  const auto servers = static_cast<uint32_t>(options_.servers),
             own = static_cast<uint32_t>(server_);
  if (servers == 1) return std::nullopt;
  uint32_t difference = 0;
  for (const uint64_t id : ids) difference |= server_of(id, servers) ^ own;
  if (difference == 0) return std::nullopt;
  return *std::ranges::find_if(ids, [&](uint64_t id) { return server_of(id, servers) != own; });
}

void DeclaredJob::check_finite(const Message& push) const {
  if (!options_.error_if_nonfinite) return;
  const auto nonfinite = find_nonfinite(push);
  if (!nonfinite) return;
  const Header& header = push.header;
  const bool initial = is_initial(header);
  const Section& section = push.sections[nonfinite->section];
  const size_t at = nonfinite->value;
  const float value = value_of(section, at);
  std::string of;
  size_t element = at;
  if (section.kind == SectionKind::kRows) {
    of = "row " + std::to_string(section.ids[at / section.width]) + " of table '" +
         options_.tables[section.table].name + "'";
    element = at % section.width;
  } else {
    const BlockOptions& block = options_.blocks[section.table];
    of = "parameter '" + block.parameter + "'";
    element = at + static_cast<size_t>(block.begin);
  }
  TORCH_CHECK_VALUE(
      false, initial ? "initial values" : "push " + std::to_string(header.sequence), " of trainer ",
      header.trainer, ": the ", initial ? "value" : "gradient", " of ", of, " is ",
      std::isnan(value) ? "nan"
      : value > 0       ? "inf"
                        : "-inf",
      " at element ", element, ": expected finite values",
      initial ? ""
              : ": lower the learning rate, clip the gradients, or set error_if_nonfinite to "
                "false");
}

std::vector<SectionShape> DeclaredJob::answer_to(const Message& pull) const {
  std::vector<SectionShape> shapes;
  for (const Section& section : pull.sections) {
    const bool is_block = section.kind == SectionKind::kBlock;
    shapes.push_back(
        {.kind = section.kind,
         .table = section.table,
         .width = section.width,
         .count = is_block ? elements_of(options_.blocks[section.table]) : section.ids.size(),
         .has_ids = false,
         .dtype = dtype_of(section)});
  }
  return shapes;
}

int64_t DeclaredJob::answer_bytes(const Message& pull) const {
  int64_t bytes = 0;
  for (const SectionShape& shape : answer_to(pull))
    bytes += static_cast<int64_t>(shape.count * shape.width * bytes_of(shape.dtype));
  return bytes;
}

}  // namespace cohort::ps
