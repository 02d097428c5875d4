# SPDX-License-Identifier: Apache-2.0
# Finds an unpacked libtorch or Python torch, without the CUDA toolkit that TorchConfig.cmake demands.
#
# Input:   COHORT_LIBTORCH, a cache variable or environment variable: the folder that holds
#          include/ and lib/libtorch_cpu.so. Without it the one that scripts/setup made, of COHORT_LIBTORCH_VERSION.
#          The version must be the one asked for, or else one of COHORT_LIBTORCH_VERSIONS.
# Targets: libtorch::c10, libtorch::torch_cpu. Nothing links its CUDA half: cohort/comm/accelerator.h loads it.
set(COHORT_LIBTORCH "$ENV{COHORT_LIBTORCH}" CACHE PATH "Folder of libtorch (holds include/ and lib/)")
set(_versions ${COHORT_LIBTORCH_VERSIONS})
if(Libtorch_FIND_VERSION)
  set(_versions ${Libtorch_FIND_VERSION})
endif()
if(NOT COHORT_LIBTORCH)
  list(GET _versions 0 _version)
  if(DEFINED ENV{COHORT_LIBTORCH_VERSION} AND NOT Libtorch_FIND_VERSION)
    set(_version "$ENV{COHORT_LIBTORCH_VERSION}")
  endif()
  set(_cache "$ENV{COHORT_CACHE}")
  if(NOT _cache)
    set(_cache "$ENV{HOME}/.cache/cohort")
  endif()
  set(COHORT_LIBTORCH "${_cache}/libtorch-${_version}/torch" CACHE PATH "" FORCE)
endif()
set(_version_file "${COHORT_LIBTORCH}/include/torch/headeronly/version.h")
if(EXISTS "${_version_file}")
  file(STRINGS "${_version_file}" _lines REGEX "^#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]" "" _numbers "${_lines}")
  list(JOIN _numbers "." Libtorch_VERSION)
endif()
list(JOIN _versions " or " _expected)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Libtorch REQUIRED_VARS COHORT_LIBTORCH Libtorch_VERSION
  VERSION_VAR Libtorch_VERSION
  REASON_FAILURE_MESSAGE "run scripts/setup, or set COHORT_LIBTORCH to a folder with libtorch ${_expected}")
if(Libtorch_FOUND AND NOT Libtorch_VERSION IN_LIST _versions)
  message(FATAL_ERROR "libtorch ${Libtorch_VERSION} at ${COHORT_LIBTORCH}: expected ${_expected}")
endif()
if(Libtorch_FOUND AND NOT TARGET libtorch::c10)
  add_library(libtorch::c10 INTERFACE IMPORTED)
  set_target_properties(libtorch::c10 PROPERTIES
    INTERFACE_COMPILE_FEATURES cxx_std_20  # 2.15.0's headers refuse less.
    INTERFACE_INCLUDE_DIRECTORIES "${COHORT_LIBTORCH}/include;${COHORT_LIBTORCH}/include/torch/csrc/api/include"
    INTERFACE_LINK_LIBRARIES "${COHORT_LIBTORCH}/lib/libc10.so"
    INTERFACE_LINK_OPTIONS "-Wl,-rpath,${COHORT_LIBTORCH}/lib")
  add_library(libtorch::torch_cpu INTERFACE IMPORTED)
  # --no-as-needed: kernels register themselves from static constructors, which nothing refers to.
  set_target_properties(libtorch::torch_cpu PROPERTIES
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED"
    INTERFACE_LINK_LIBRARIES "-Wl,--no-as-needed,${COHORT_LIBTORCH}/lib/libtorch_cpu.so,--as-needed;libtorch::c10"
    INTERFACE_LINK_OPTIONS "-Wl,--allow-shlib-undefined")
endif()
