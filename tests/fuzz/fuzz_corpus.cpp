// SPDX-License-Identifier: Apache-2.0
// Writes the kept corpora of the fuzz targets, with the encoders that the readers belong to:
//
//     build/release/tests/fuzz_corpus tests/fuzz/corpus
//
// What is there under other names, as inputs that were found, stays. That of torch_file is
// make_torch_files.py's.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cohort/base/manifest.h"
#include "cohort/base/safetensors.h"
#include "cohort/comm/store_protocol.h"
#include "cohort/launch/message.h"
#include "cohort/launch/rendezvous_server.h"
#include "cohort/ps/id_hash.h"
#include "cohort/ps/job.h"
#include "cohort/ps/rpc/shared_area.h"
#include "cohort/ps/wire/request.h"

#include "tests/image/drawn_images.h"

namespace {

namespace fs = std::filesystem;
using namespace cohort;
using namespace cohort::ps;

class Corpus {
 public:
  Corpus(const fs::path& root, const std::string& target) : folder_(root / target) {
    fs::create_directories(folder_);
  }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
  }

 private:
  fs::path folder_;
};

// As fuzz::Pieces::counted takes it.
std::string counted(const std::string& bytes) {
  const auto size = static_cast<uint16_t>(bytes.size());
  return std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + bytes;
}

std::string message(const std::vector<SectionShape>& shapes, const Header& header,
                    uint64_t first_id = 0) {
  MessageWriter writer(shapes);
  for (size_t i = 0; i < shapes.size(); ++i) {
    uint64_t id = first_id;
    for (uint64_t& place : writer.ids(i)) place = id++;
    float value = 0.5f;
    for (float& place : writer.values(i)) place = value += 0.25f;
    uint16_t bits = 0x3f80;
    for (uint16_t& place : writer.bfloat16s(i)) place = bits++;
  }
  const Buffer bytes = writer.finish(header);
  return {reinterpret_cast<const char*>(bytes.span().data()), bytes.size()};
}

SectionShape rows(uint32_t table, uint32_t width, uint64_t count) {
  return {.table = table, .width = width, .count = count};
}
// Of the table in bfloat16.
SectionShape half_rows(uint64_t count) {
  return {.table = 2, .width = 3, .count = count, .dtype = WireDtype::kBfloat16};
}
SectionShape block(uint32_t number, uint64_t count) {
  return {.kind = SectionKind::kBlock, .table = number, .count = count};
}

// The tables and blocks of the targets' jobs.
const std::vector<SectionShape>& whole_push() {
  static const std::vector<SectionShape> shapes{rows(0, 3, 3), rows(1, 1, 2), half_rows(3),
                                                block(0, 5), block(1, 8)};
  return shapes;
}

void write_replies(const Corpus& corpus) {
  std::string whole;
  for (const uint32_t server : {0u, 1u}) {
    uint64_t count = 0;
    for (uint64_t id = 0; id < 8; ++id) count += server_of(id, 2) == server;
    std::vector<SectionShape> shapes{rows(0, 3, count), rows(1, 1, count), half_rows(count),
                                     block(server, server == 0 ? 5 : 8)};
    for (SectionShape& shape : shapes) shape.has_ids = false;
    whole += counted(message(shapes, {.kind = MessageKind::kReply, .step = 7}));
  }
  corpus.write("whole", whole);
  const std::string nothing = counted(message({}, {.kind = MessageKind::kReply}));
  corpus.write("nothing", nothing + nothing);
}

// An event of ps_sync.cpp.
std::string event(int kind, int trainer, const std::string& push = "") {
  const auto byte = static_cast<char>(2 * kind + trainer);
  return byte + (kind < 3 ? "" : counted(push));
}

void write_requests(const Corpus& corpus) {
  corpus.write("push_bfloat16", message({rows(0, 3, 2), half_rows(3), block(1, 8)}, {}));
  SectionShape asked = half_rows(4);
  asked.has_values = false;
  corpus.write("pull_bfloat16", message({asked}, {.kind = MessageKind::kPull}));
}

void write_steps(const Corpus& corpus) {
  const std::string whole = message(whole_push(), {});
  const std::string some = message({rows(0, 3, 2), block(1, 8)}, {}, 1);
  const std::string abstention = message({}, {});
  corpus.write("two_steps",
               event(3, 0, whole) + event(3, 1, whole) + event(3, 1, some) + event(3, 0, whole));
  corpus.write("one_ahead", event(2, 0) + event(3, 0, some) + event(3, 0, whole) +
                                event(3, 1, whole) + event(3, 1, abstention));
  corpus.write("one_leaves", event(3, 0, some) + event(0, 1) + event(3, 0, whole) + event(1, 1) +
                                 event(3, 1, some) + event(3, 0, some));
  corpus.write("all_anew", event(3, 0, some) + event(1, 0) + event(1, 1) + event(2, 1) +
                               event(3, 1, whole) + event(3, 0, whole));
}

void write_shared(const Corpus& corpus) {
  const auto bytes_of = [](const SharedMessage& message) {
    return std::string(reinterpret_cast<const char*>(&message), sizeof(message));
  };
  corpus.write("push", bytes_of({.area = 1, .offset = 64, .bytes = 1 << 12}));
  corpus.write("pull", bytes_of({.area = 1,
                                 .offset = 64,
                                 .bytes = 128,
                                 .answer_offset = 192,
                                 .answer_bytes = (1 << 16) - 192}));
}

// A call of ps_control.cpp. Marks: 1 the right job, 2 the right incarnation, 4 a nonce, 8 later, 16
// handled behind the next call.
std::string call(Call kind, int trainer, int marks, int step, const std::string& bytes = "") {
  const std::string head{static_cast<char>(kind), static_cast<char>(trainer),
                         static_cast<char>(marks), static_cast<char>(step)};
  return head + counted(bytes);
}

JobOptions job(Mode mode, int trainers) {
  return {.mode = mode,
          .trainers = trainers,
          .dense_rule = {.rule = Rule::kSgd, .learning_rate = 0.5f},
          .blocks = {{"w", 0, 5, 0}},
          .tables = {{.name = "a", .width = 3}}};
}

void write_calls(const Corpus& corpus) {
  const std::string push = message({rows(0, 3, 2), block(0, 5)}, {});
  const std::string initial = message({block(0, 5)}, {.flags = kInitialValues});
  const std::string pull =
      message({{.table = 0, .width = 3, .count = 2, .has_values = false},
               {.kind = SectionKind::kBlock, .table = 0, .count = 5, .has_values = false}},
              {.kind = MessageKind::kPull});
  for (const Mode mode : {Mode::kSync, Mode::kAsync}) {
    corpus.write("one_trainer_" + to_string(mode),
                 call(Call::kJob, 0, 0, 0, job(mode, 1).to_json()) + call(Call::kJoin, 0, 5, 0) +
                     call(Call::kConfirm, 0, 2, 0) + call(Call::kPush, 0, 3, 0, initial) +
                     call(Call::kPush, 0, 3, 1, push) + call(Call::kPull, 0, 3, 1, pull) +
                     call(Call::kPush, 0, 3, 3, push) + call(Call::kPush, 0, 3, 2, push) +
                     call(Call::kHeartbeat, 0, 2, 0) + call(Call::kStatus, 255, 0, 0) +
                     call(Call::kLeave, 0, 2, 0) + call(Call::kStop, 255, 0, 0));
  }
  corpus.write("two_trainers",
               call(Call::kJob, 0, 0, 0, job(Mode::kSync, 2).to_json()) +
                   call(Call::kJoin, 0, 1, 0) + call(Call::kPush, 0, 3, 0, initial) +
                   call(Call::kPush, 0, 3, 1, push) + call(Call::kPull, 0, 3, 1, pull) +
                   call(Call::kJoin, 1, 1, 0) + call(Call::kPush, 1, 3, 1, push) +
                   call(Call::kPull, 1, 11, 2, pull) + call(Call::kStatus, 255, 8, 0));
  const JobOptions declared = job(Mode::kAsync, 1);
  const std::string early =
      message({rows(0, 3, 2), block(0, 5)},
              {.job = declared.fingerprint(), .trainer_incarnation = 1, .server_incarnation = 1});
  corpus.write("before_the_job",
               call(Call::kPush, 0, 16, 1, early) + call(Call::kJob, 0, 0, 0, declared.to_json()) +
                   call(Call::kJoin, 0, 1, 0) + call(Call::kPush, 0, 3, 0, initial) +
                   call(Call::kPush, 0, 0, 1, early));
}

void write_checkpoint_files(const Corpus& files, const Corpus& manifests) {
  const std::vector<float> values{1, 2, 3, 4, 5, 6};
  const std::vector<int64_t> number{42};
  const auto floats = std::as_bytes(std::span(values));
  const std::vector<TensorView> tensors{
      {.name = "weight", .dtype = DType::kF32, .shape = {2, 3}, .bytes = floats},
      {.name = "step", .dtype = DType::kI64, .bytes = std::as_bytes(std::span(number))},
      {.name = "half", .dtype = DType::kBF16, .shape = {3, 1}, .bytes = floats.first(6)},
      {.name = "nothing", .dtype = DType::kBool, .shape = {0}}};
  write_safetensors(files.path("four_tensors"), tensors, {{"format", "pt"}, {"note", "\xc3\xa9"}});
  write_safetensors(files.path("no_tensor"), std::vector<TensorView>{});

  Manifest manifest{.update = 500, .metadata = {{"model.dim_emb", "512"}, {"note", "a \"b\""}}};
  manifest.files = {{"weights.0-of-2", {"weights-500.0.safetensors", "5c0e1f7a", 4242}},
                    {"weights.1-of-2", {"weights-500.1.safetensors", "77af778b", 17}}};
  manifest.parts["weights"]["embedding"] = {
      DType::kF32,
      {8, 4},
      {{"weights.0-of-2", {{0, 16}}}, {"weights.1-of-2", {{16, 20}, {20, 32}}}}};
  manifest.parts["weights"]["scalar"] = {DType::kI64, {}, {{"weights.1-of-2", {{0, 1}}}}};
  const std::string whole = manifest.to_json();
  manifests.write("two_shares", whole);
  manifests.write("without_sum", whole.substr(0, whole.rfind(",\n  \"sha256\"")) + "\n}\n");
  manifest.version = 1;
  manifest.parts.clear();
  manifests.write("version_1", manifest.to_json());
}

void write_text(const Corpus& corpus) {
  corpus.write("tsv", "tA red cat.\tEine rote Katze.\r\n\xc3\xa9\t\xe4\xb8\xad\n \tx\n");
  corpus.write("json", "j" + nlohmann::json{{"A red cat.", "Eine rote Katze."},
                                            {"\xc3\xa9", "\xe4\xb8\xad"},
                                            {" ", "x"}}
                                 .dump());
  corpus.write("json_escapes", R"(j[["a\u00e9\ud83d\ude00","b\"\\"], ["",""]])");
  corpus.write("two_files", std::string("2A red cat.\nB\n") + '\0' + "Eine rote Katze.\nC");
}

// Two pairs as build_token_cache writes them. Sums are left out: the target puts them in.
void write_token_cache(const Corpus& corpus) {
  const std::vector<int16_t> ids{17, 4, 9, 5, 5, 30, 6};
  const std::vector<int32_t> lengths{4, 2, 2, 4};  // With end marks.
  const std::vector<int64_t> offsets{0, 4};
  const std::vector<TensorView> tensors{{.name = "ids",
                                         .dtype = DType::kI16,
                                         .shape = {std::ssize(ids)},
                                         .bytes = std::as_bytes(std::span(ids))},
                                        {.name = "lengths",
                                         .dtype = DType::kI32,
                                         .shape = {2, 2},
                                         .bytes = std::as_bytes(std::span(lengths))},
                                        {.name = "offsets",
                                         .dtype = DType::kI64,
                                         .shape = {2},
                                         .bytes = std::as_bytes(std::span(offsets))}};
  write_safetensors(corpus.path("two_pairs"), tensors, {{"pairs.read", "3"}, {"pairs.kept", "2"}});
}

// Six source pieces and six target pieces. Sums are left out, too.
void write_shortlist(const Corpus& corpus) {
  const std::vector<int64_t> offsets{0, 0, 0, 0, 1, 3, 3};
  const std::vector<int32_t> targets{5, 4, 5};
  const std::vector<float> probabilities{0.5F, 0.75F, 0.25F};
  const std::vector<int32_t> frequent{5, 4};
  const auto view = [](const char* name, DType type, const auto& values) {
    return TensorView{.name = name,
                      .dtype = type,
                      .shape = {std::ssize(values)},
                      .bytes = std::as_bytes(std::span(values))};
  };
  const std::vector<TensorView> tensors{
      view("offsets", DType::kI64, offsets), view("targets", DType::kI32, targets),
      view("probabilities", DType::kF32, probabilities), view("frequent", DType::kI32, frequent)};
  write_safetensors(corpus.path("small"), tensors, {{"target_pieces", "6"}, {"best", "2"}});
}

void write_images(const Corpus& corpus) {
  using namespace cohort::test;
  const auto picture = draw_shape(9, 7, 1, 1);
  write_jpeg(corpus.path("ycc420.jpg"), picture, {.quality = 50});
  write_jpeg(corpus.path("gray.jpg"), picture, {.quality = 50, .colors = JpegColors::kGray});
  write_jpeg(corpus.path("cmyk.jpg"), picture, {.quality = 50, .colors = JpegColors::kCmyk});
  write_jpeg(corpus.path("progressive.jpg"), picture, {.quality = 50, .progressive = true});
  write_png(corpus.path("rgb.png"), picture);
  write_png(corpus.path("rgba.png"), picture, PngColors::kRgba);
  write_png(corpus.path("gray.png"), picture, PngColors::kGray);
}

void write_lines(const Corpus& corpus) {
  using launch::text_of;
  const std::string join = text_of({{"kind", "join"},
                                    {"version", launch::kProtocolVersion},
                                    {"id", "none"},
                                    {"nnodes", "1:2"},
                                    {"max_restarts", 1},
                                    {"nproc", 4},
                                    {"port", 40001}}) +
                           "\n";
  const std::string alive = text_of({{"kind", "alive"}}) + "\n";
  const auto done = [](int code) {
    return text_of({{"kind", "done"}, {"round", 1}, {"code", code}}) + "\n";
  };
  const std::string failed =
      text_of({{"kind", "failed"}, {"round", 1}, {"code", 1}, {"why", "rank 2 (pid 17) ..."}}) +
      "\n";
  corpus.write("two_nodes",
               "c" + join + "2" + join + alive + "2" + alive + done(0) + "2" + done(4));
  corpus.write("one_fails", "c" + join + "2" + join + "2" + failed + join + "2" + join);
  const std::string round = text_of({{"kind", "round"},
                                     {"round", 3},
                                     {"node_rank", 1},
                                     {"nodes", 2},
                                     {"base_rank", 4},
                                     {"world_size", 8},
                                     {"master_addr", "10.0.0.1"},
                                     {"master_port", 40001},
                                     {"restart", 0}}) +
                            "\n";
  const std::string stop = text_of({{"kind", "stop"}, {"why", "node 1 left"}}) + "\n";
  const std::string end = text_of({{"kind", "end"}, {"code", 1}, {"why", "too few"}}) + "\n";
  corpus.write("directives", "m" + alive + round + stop + round + end);
}

void write_store_messages(const Corpus& corpus) {
  using comm::frame_of, comm::StoreWord;
  corpus.write("set", frame_of(StoreWord::kSet, {"key", "value", "another", ""}));
  corpus.write("requests", frame_of(StoreWord::kAdd, {"key", "-12"}) +
                               frame_of(StoreWord::kWait, {"key", "other"}) +
                               frame_of(StoreWord::kCancel, {}));
  corpus.write("answers",
               frame_of(StoreWord::kDone, {"value"}) + frame_of(StoreWord::kRefused, {"why"}));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "expected the folder of the corpora\n");
    return 2;
  }
  const fs::path root = argv[1];
  write_replies({root, "ps_reply"});
  write_requests({root, "ps_request"});
  write_steps({root, "ps_sync"});
  write_calls({root, "ps_control"});
  write_shared({root, "ps_shared"});
  write_checkpoint_files({root, "safetensors"}, {root, "manifest"});
  Corpus(root, "weight_map")
      .write("two_files",
             nlohmann::json{{"metadata", {{"total_size", 40}}},
                            {"weight_map",
                             {{"layers.0.weight", "model-00001-of-00002.safetensors"},
                              {"layers.1.weight", "model-00002-of-00002.safetensors"}}}}
                 .dump());
  write_text({root, "parallel_text"});
  write_token_cache({root, "token_cache"});
  write_shortlist({root, "shortlist"});
  write_images({root, "image"});
  write_lines({root, "launcher_line"});
  write_store_messages({root, "store_message"});
}
