# SPDX-License-Identifier: Apache-2.0
# Finds the SentencePiece that scripts/setup builds from its source archive.
#
# Input:   COHORT_SENTENCEPIECE, the folder that holds include/ and lib/libsentencepiece*.a.
# Targets: SentencePiece::static. Only cohort_text's shared wrapper may link it, with hidden symbols
#          (docs/architecture.md says why).
set(COHORT_SENTENCEPIECE "$ENV{COHORT_SENTENCEPIECE}" CACHE PATH "Folder of SentencePiece (holds include/ and lib/)")
if(NOT COHORT_SENTENCEPIECE)
  set(_cache "$ENV{COHORT_CACHE}")
  if(NOT _cache)
    set(_cache "$ENV{HOME}/.cache/cohort")
  endif()
  set(COHORT_SENTENCEPIECE "${_cache}/sentencepiece-0.2.1" CACHE PATH "" FORCE)
endif()
include(FindPackageHandleStandardArgs)
find_file(SentencePiece_HEADER sentencepiece_trainer.h PATHS ${COHORT_SENTENCEPIECE}/include NO_DEFAULT_PATH)
find_package_handle_standard_args(SentencePiece REQUIRED_VARS SentencePiece_HEADER
  REASON_FAILURE_MESSAGE "run scripts/setup, which builds it")
if(SentencePiece_FOUND AND NOT TARGET SentencePiece::static)
  add_library(SentencePiece::static INTERFACE IMPORTED)
  set_target_properties(SentencePiece::static PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${COHORT_SENTENCEPIECE}/include"
    INTERFACE_LINK_LIBRARIES
      "${COHORT_SENTENCEPIECE}/lib/libsentencepiece_train.a;${COHORT_SENTENCEPIECE}/lib/libsentencepiece.a")
endif()
