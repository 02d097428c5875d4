// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/ctranslate2.h"

#include <cerrno>
#include <cstdlib>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <system_error>
#include <torch/types.h>

#include "cohort/base/atomic_file.h"
#include "cohort/base/error.h"

namespace cohort::translate {
namespace {

namespace fs = std::filesystem;

// The variables of model.bin by name, as CTranslate2 names them.
class Variables {
 public:
  void set(const std::string& name, const at::Tensor& tensor) {
    tensors_[name] = tensor.detach().to(at::kFloat).contiguous();
  }
  void set(const std::string& name, int8_t value) {
    tensors_[name] = at::scalar_tensor(value, at::kChar);
  }
  void set(const std::string& name, int16_t value) {
    tensors_[name] = at::scalar_tensor(value, at::kShort);
  }
  // The variable `name` is that of `other`, which is in the file once.
  void alias(const std::string& name, const std::string& other) { aliases_[name] = other; }
  void write(FileWriter& file) const;

 private:
  std::map<std::string, at::Tensor> tensors_;
  std::map<std::string, std::string> aliases_;
};

template <class Integer>
void write_number(FileWriter& file, int64_t value) {
  TORCH_CHECK_VALUE(std::in_range<Integer>(value), "model.bin: expected at most ",
                    std::numeric_limits<Integer>::max(), " for one number, got ", value);
  const auto number = static_cast<Integer>(value);
  file.write(std::as_bytes(std::span(&number, 1)));
}

void write_name(FileWriter& file, const std::string& name) {
  write_number<uint16_t>(file, std::ssize(name) + 1);
  file.write(std::as_bytes(std::span(name.c_str(), name.size() + 1)));
}

int64_t type_number(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return 0;
    case at::kChar:
      return 1;
    case at::kShort:
      return 2;
    default:
      TORCH_INTERNAL_ASSERT(false);
  }
}

void Variables::write(FileWriter& file) const {
  constexpr int64_t kBinaryVersion = 6;
  constexpr int64_t kRevision = 7;
  write_number<uint32_t>(file, kBinaryVersion);
  write_name(file, "TransformerSpec");
  write_number<uint32_t>(file, kRevision);
  write_number<uint32_t>(file, std::ssize(tensors_));
  for (const auto& [name, tensor] : tensors_) {
    write_name(file, name);
    write_number<uint8_t>(file, tensor.dim());
    for (const int64_t size : tensor.sizes()) write_number<uint32_t>(file, size);
    write_number<uint8_t>(file, type_number(tensor.scalar_type()));
    write_number<uint32_t>(file, static_cast<int64_t>(tensor.nbytes()));
    file.write(std::span(static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()));
  }
  write_number<uint32_t>(file, std::ssize(aliases_));
  for (const auto& [name, other] : aliases_) {
    write_name(file, name);
    write_name(file, other);
  }
}

// Puts the parameters of one model under CTranslate2's names.
class Converter {
 public:
  explicit Converter(const nmt::Transformer& model)
      : options_(model->options()), parameters_(model->named_parameters()) {}

  Variables convert() {
    stack("encoder", options_.enc_depth);
    stack("decoder", options_.dec_depth);
    to_.set("encoder/embeddings_merge", int8_t{0});
    to_.set("decoder/start_from_zero_embedding", int8_t{0});
    // Its own sinusoids have all sines before all cosines; ours alternate.
    to_.set("decoder/position_encodings/encodings",
            nmt::sinusoids(options_.max_positions, options_.dim_emb));
    to_.alias("encoder/position_encodings/encodings", "decoder/position_encodings/encodings");
    embeddings();
    return std::move(to_);
  }

 private:
  const at::Tensor& parameter(const std::string& name) const { return parameters_[name]; }

  void stack(const std::string& side, int64_t depth) {
    const bool pre_norm = options_.norm == nmt::Norm::kPre;
    to_.set(side + "/num_heads", static_cast<int16_t>(options_.heads));
    to_.set(side + "/pre_norm", static_cast<int8_t>(pre_norm));
    to_.set(side + "/activation", activation());
    to_.set(side + "/scale_embeddings", int8_t{1});
    if (pre_norm) norm(side + "/layer_norm", side + ".norm");
    for (int64_t i = 0; i < depth; ++i) {
      const std::string to = side + "/layer_" + std::to_string(i);
      const std::string from = side + ".layers." + std::to_string(i);
      self_attention(to + "/self_attention", from);
      if (side == "decoder") cross_attention(to + "/attention", from);
      norm(to + "/ffn/layer_norm", from + (side == "decoder" ? ".norm3" : ".norm2"));
      linear(to + "/ffn/linear_0", from + ".linear1");
      linear(to + "/ffn/linear_1", from + ".linear2");
    }
  }

  int8_t activation() const {
    switch (options_.ffn_activation) {
      case nmt::Activation::kRelu:
        return 0;
      case nmt::Activation::kSwish:
        return 2;
      case nmt::Activation::kGelu:
        return 3;
    }
    TORCH_INTERNAL_ASSERT(false);
  }

  void norm(const std::string& to, const std::string& from) {
    to_.set(to + "/gamma", parameter(from + ".weight"));
    to_.set(to + "/beta", parameter(from + ".bias"));
  }
  void linear(const std::string& to, const std::string& from) {
    to_.set(to + "/weight", parameter(from + ".weight"));
    to_.set(to + "/bias", parameter(from + ".bias"));
  }
  void self_attention(const std::string& to, const std::string& from) {
    norm(to + "/layer_norm", from + ".norm1");
    to_.set(to + "/linear_0/weight", parameter(from + ".self_attn.in_proj.weight"));
    to_.set(to + "/linear_1/weight", parameter(from + ".self_attn.out_proj.weight"));
  }
  void cross_attention(const std::string& to, const std::string& from) {
    const at::Tensor& in_proj = parameter(from + ".multihead_attn.in_proj.weight");
    const int64_t width = options_.dim_emb;
    norm(to + "/layer_norm", from + ".norm2");
    to_.set(to + "/linear_0/weight", in_proj.narrow(0, 0, width));
    to_.set(to + "/linear_1/weight", in_proj.narrow(0, width, 2 * width));
    to_.set(to + "/linear_2/weight", parameter(from + ".multihead_attn.out_proj.weight"));
  }

  void embeddings() {
    const std::string target = "decoder/embeddings/weight";
    if (options_.tied_embeddings_all) {
      to_.set(target, parameter("embedding"));
      to_.alias("encoder/embeddings_0/weight", target);
    } else {
      to_.set(target, parameter("target_embedding"));
      to_.set("encoder/embeddings_0/weight", parameter("source_embedding"));
    }
    if (options_.tied_embeddings || options_.tied_embeddings_all) {
      to_.alias("decoder/projection/weight", target);
    } else {
      to_.set("decoder/projection/weight", parameter("generator.weight"));
    }
  }

  const nmt::TransformerOptions& options_;
  torch::OrderedDict<std::string, at::Tensor> parameters_;
  Variables to_;
};

std::string vocabulary(const text::Tokenizer& tokenizer) {
  auto pieces = nlohmann::json::array();
  for (int32_t id = 0; id < tokenizer.num_pieces(); ++id) pieces.push_back(tokenizer.piece(id));
  return pieces.dump(1) + "\n";
}

std::string config(const Tokenizers& tokenizers) {
  const auto& [source, target] = tokenizers;
  for (const int32_t id : {text::kUnkId, text::kEosId}) {
    if (source.piece(id) != target.piece(id)) {
      throw ConfigError("CTranslate2 knows one name for piece " + std::to_string(id) +
                        ": expected the same in both vocabularies, got " + source.piece(id) +
                        " and " + target.piece(id));
    }
  }
  const nlohmann::ordered_json config = {{"add_source_bos", false},
                                         {"add_source_eos", true},
                                         {"bos_token", target.piece(text::kBosId)},
                                         {"decoder_start_token", target.piece(text::kBosId)},
                                         {"eos_token", target.piece(text::kEosId)},
                                         {"layer_norm_epsilon", 1e-5},
                                         {"multi_query_attention", false},
                                         {"unk_token", target.piece(text::kUnkId)}};
  return config.dump(2) + "\n";
}

// A folder that is removed unless it gets its name.
class NewFolder {
 public:
  explicit NewFolder(const fs::path& path)
      : path_(path.has_filename() ? path : path.parent_path()) {
    if (fs::exists(path_)) {
      throw ConfigError(path_.string() + " exists: expected the name of a new folder");
    }
    std::error_code error;
    if (path_.has_parent_path()) fs::create_directories(path_.parent_path(), error);
    std::string name = path_.string() + ".XXXXXX";
    if (!error && ::mkdtemp(name.data()) == nullptr) error.assign(errno, std::generic_category());
    if (error) throw ConfigError(path_.string() + " cannot be made: " + error.message());
    beside_ = name;
    fs::create_directory(made());
  }
  ~NewFolder() {
    std::error_code ignored;
    fs::remove_all(beside_, ignored);
  }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  std::string file(const std::string& name) const { return (made() / name).string(); }
  void keep() { fs::rename(made(), path_); }

 private:
  // mkdtemp's own folder is for its owner alone; one in it is as any other.
  fs::path made() const { return beside_ / "made"; }

  fs::path path_;
  fs::path beside_;
};

}  // namespace

void write_ctranslate2(const fs::path& path, const nmt::Transformer& model,
                       const Tokenizers& tokenizers, const std::vector<fs::path>& vocabs) {
  NewFolder folder(path);
  write_atomically(folder.file("config.json"), config(tokenizers));
  write_atomically(folder.file("source_vocabulary.json"), vocabulary(tokenizers.source));
  write_atomically(folder.file("target_vocabulary.json"), vocabulary(tokenizers.target));
  fs::copy_file(vocabs[0], folder.file("source.spm"));
  fs::copy_file(vocabs[1], folder.file("target.spm"));
  const Variables variables = Converter(model).convert();
  write_atomically(folder.file("model.bin"), [&](FileWriter& file) { variables.write(file); });
  folder.keep();
}

}  // namespace cohort::translate
