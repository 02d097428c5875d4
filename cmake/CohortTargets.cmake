# SPDX-License-Identifier: Apache-2.0
# The functions that every folder of the project uses.

# cohort_add_library(NAME [SHARED] SOURCES ... HEADERS ... DEPS ... [TORCH])
# Target cohort_NAME, alias cohort::NAME: a static library, a shared one with SHARED, or headers alone without SOURCES.
# HEADERS are the public ones, which are installed, and what these include; the others of the folder are private. A library
# without any is not installed. Headers are found from the repository root. TORCH shares the precompiled libtorch headers.
function(cohort_add_library name)
  cmake_parse_arguments(ARG "SHARED;TORCH" "" "SOURCES;HEADERS;DEPS;PRIVATE_DEPS" ${ARGN})
  set(kind STATIC)
  set(scope PUBLIC)
  if(ARG_SHARED)
    set(kind SHARED)
  elseif(NOT ARG_SOURCES)
    set(kind INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(cohort_${name} ${kind})
  add_library(cohort::${name} ALIAS cohort_${name})
  set_target_properties(cohort_${name} PROPERTIES EXPORT_NAME ${name})
  target_sources(cohort_${name} ${scope} FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${ARG_HEADERS})
  # Headers alone: nobody who links the installed library needs them.
  list(TRANSFORM ARG_PRIVATE_DEPS REPLACE "^nlohmann_json::.*" "$<BUILD_INTERFACE:\\0>")
  target_link_libraries(cohort_${name} ${scope} ${ARG_DEPS})
  target_compile_features(cohort_${name} INTERFACE cxx_std_20)
  if(ARG_HEADERS)
    set_property(GLOBAL APPEND PROPERTY COHORT_LIBRARIES ${name})
  endif()
  if(NOT ARG_SOURCES)
    return()
  endif()
  target_sources(cohort_${name} PRIVATE ${ARG_SOURCES})
  target_link_libraries(cohort_${name} PRIVATE ${ARG_PRIVATE_DEPS})
  cohort_warnings(cohort_${name})
  if(ARG_TORCH)
    cohort_use_torch_pch(cohort_${name})
  endif()
endfunction()

# cohort_add_backend(NAME SOURCES ... DEPS ... [TORCH] [FOLDER output folder])
# A plug-in libcohort_NAME.so, target cohort_NAME: see cohort/comm/backend.h. Without FOLDER it goes to lib/ and is installed.
function(cohort_add_backend name)
  cmake_parse_arguments(ARG "TORCH" "FOLDER" "SOURCES;DEPS" ${ARGN})
  add_library(cohort_${name} MODULE ${ARG_SOURCES})
  target_include_directories(cohort_${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(cohort_${name} PRIVATE ${ARG_DEPS})
  target_link_options(cohort_${name} PRIVATE -Wl,--exclude-libs,ALL)
  cohort_warnings(cohort_${name})
  if(ARG_TORCH)
    cohort_use_torch_pch(cohort_${name})
  endif()
  if(ARG_FOLDER)
    set_target_properties(cohort_${name} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${ARG_FOLDER})
  else()
    install(TARGETS cohort_${name} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/cohort/lib)
  endif()
endfunction()

# cohort_add_loops(LIBRARY SOURCE NAME FLAGS ...)
# Compiles SOURCE into cohort_LIBRARY for an instruction set: with these flags, vectorised, and COHORT_LOOPS defined as NAME.
function(cohort_add_loops library source name)
  set(target cohort_${library}_loops_${name})
  add_library(${target} OBJECT ${source})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_definitions(${target} PRIVATE COHORT_LOOPS=${name})
  target_compile_options(${target} PRIVATE -O3 -fopenmp-simd -fno-math-errno -fno-trapping-math ${ARGN})
  cohort_warnings(${target})
  target_sources(cohort_${library} PRIVATE $<TARGET_OBJECTS:${target}>)
endfunction()

function(cohort_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wno-missing-field-initializers
    $<$<BOOL:${COHORT_WERROR}>:-Werror>)
endfunction()

# Precompiled headers (libtorch takes 20 seconds to read) reused by every target that asks. What more of libtorch they
# held, every source would pay for: GCC instantiates the templates of a precompiled header again in each, four seconds
# a source. Batches of sources (COHORT_UNITY_BUILD) share that cost.
function(cohort_use_torch_pch target)
  if(NOT TARGET cohort_torch_pch)
    add_library(cohort_torch_pch OBJECT ${PROJECT_SOURCE_DIR}/cmake/torch_pch.cpp)
    target_link_libraries(cohort_torch_pch PRIVATE libtorch::torch_cpu)
    target_precompile_headers(cohort_torch_pch PRIVATE
      <torch/types.h> <torch/nn/module.h> <torch/csrc/distributed/c10d/ProcessGroup.hpp>)
    cohort_warnings(cohort_torch_pch)
    target_compile_options(cohort_torch_pch PRIVATE -fpch-preprocess)
  endif()
  target_precompile_headers(${target} REUSE_FROM cohort_torch_pch)
  target_compile_options(${target} PRIVATE -fpch-preprocess)
endfunction()

# Sources of this folder that see no tensor do without.
function(cohort_without_torch_pch)
  set_source_files_properties(${ARGN} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
endfunction()

# Gives a program that computes with tensors its warnings, the precompiled header, and an allocator that keeps
# what is freed: every step asks for the same large blocks again.
function(cohort_tensor_program target)
  if(NOT TARGET cohort_program_settings)
    add_library(cohort_program_settings OBJECT ${PROJECT_SOURCE_DIR}/cmake/program_settings.cpp)
  endif()
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:cohort_program_settings>)
  target_link_libraries(${target} PRIVATE -Wl,--no-as-needed ${JEMALLOC_LIBRARY} -Wl,--as-needed)
  cohort_warnings(${target})
  cohort_use_torch_pch(${target})
endfunction()
