// SPDX-License-Identifier: Apache-2.0
// A trained translator as the folder that CTranslate2 loads, a fast translator of its own.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "cohort/nmt/transformer.h"
#include "cohort/translate/run_folder.h"

namespace cohort::translate {

/// Writes `folder`: model.bin, config.json, source_vocabulary.json, target_vocabulary.json, and the
/// two `vocabs` as source.spm and target.spm, which cut text into the pieces of those vocabularies.
///
/// The weights are float32; CTranslate2 turns them into what its user asks for when it loads them.
/// The folder appears whole or not at all: it is written under a new name beside it and renamed.
/// Errors:  ConfigError that names the folder if it exists or cannot be written, and for
///          vocabularies that name the end mark or the unknown piece differently.
/// Source:  CTranslate2 4, python/ctranslate2/specs/model_spec.py and transformer_spec.py: binary
///          version 6, TransformerSpec revision 7.
void write_ctranslate2(const std::filesystem::path& folder, const nmt::Transformer& model,
                       const Tokenizers& tokenizers,
                       const std::vector<std::filesystem::path>& vocabs);

}  // namespace cohort::translate
