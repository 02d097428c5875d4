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

# What a test binary without run_program cannot do for itself (cohort/base/amx.h).
if(COHORT_BUILD_TESTS)
  try_run(COHORT_AMX_HAS_NO_TILES COHORT_AMX_COMPILES
    SOURCES ${PROJECT_SOURCE_DIR}/cmake/amx_has_no_tiles.cpp ${PROJECT_SOURCE_DIR}/cohort/base/amx.cpp
    CMAKE_FLAGS -DINCLUDE_DIRECTORIES=${PROJECT_SOURCE_DIR} CXX_STANDARD 20)
endif()

# cohort_add_test(NAME SOURCES ... [DEPS ...] LABEL unit|distributed|fault|numerics|slow|peers|gpu [RANKS n]
#                 [TIMEOUT s] [TORCH] [SERIAL] [ENVIRONMENT ...])
# One CTest entry for each GoogleTest case in SOURCES, of the test binary NAME. Several calls with one NAME add to one binary,
# each with the properties of its own cases: a binary that links libtorch takes seconds to link, so a folder has one of them.
function(cohort_add_test name)
  cmake_parse_arguments(ARG "TORCH;SERIAL" "LABEL;RANKS;TIMEOUT" "SOURCES;DEPS;ENVIRONMENT" ${ARGN})
  if(NOT ARG_LABEL)
    message(FATAL_ERROR "cohort_add_test(${name}): LABEL is missing")
  endif()
  # Far beyond what an idle machine needs: it is for tests that hang, not for machines that are busy.
  set(default_timeout 180)
  if(ARG_LABEL STREQUAL unit)
    set(default_timeout 90)
  elseif(ARG_LABEL STREQUAL slow)
    set(default_timeout 600)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT ${default_timeout})
  endif()
  if(NOT ARG_RANKS)
    set(ARG_RANKS 1)
  endif()
  set(properties LABELS ${ARG_LABEL} TIMEOUT ${ARG_TIMEOUT} PROCESSORS ${ARG_RANKS})
  list(APPEND ARG_ENVIRONMENT OMP_NUM_THREADS=1 COHORT_BIN=${CMAKE_RUNTIME_OUTPUT_DIRECTORY}
       COHORT_SOURCE=${PROJECT_SOURCE_DIR} COHORT_TEST_PYTHON=${COHORT_TEST_PYTHON})
  if(COHORT_AMX_HAS_NO_TILES)
    list(APPEND ARG_ENVIRONMENT ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16)
  endif()
  # gtest_discover_tests unpacks lists three times over: so many backslashes keep this one together.
  list(JOIN ARG_ENVIRONMENT [[\\\\\\\;]] environment)
  list(APPEND properties ENVIRONMENT "${environment}")
  if(ARG_SERIAL)
    list(APPEND properties RUN_SERIAL TRUE)
  elseif(ARG_LABEL STREQUAL fault)
    # These mostly wait: one at a time, beside tests of other kinds.
    list(APPEND properties RESOURCE_LOCK fault)
  endif()
  if(NOT TARGET ${name})
    add_executable(${name})
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
    target_link_libraries(${name} PRIVATE GTest::gtest_main)
    target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
    cohort_warnings(${name})
    # Compiles in five eighths of the time that -O2 takes; GCC then takes what std::regex holds for uninitialised. What is
    # tested keeps its own.
    target_compile_options(${name} PRIVATE $<$<CONFIG:Checked>:-Og> $<$<CONFIG:Checked>:-Wno-maybe-uninitialized>)
    if(ARG_TORCH)
      cohort_use_torch_pch(${name})
    endif()
  endif()
  target_sources(${name} PRIVATE ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS})
  cohort_test_filter(filter ${ARG_SOURCES})
  include(GoogleTest)
  # A busy machine may take long to load libtorch for a list of names.
  gtest_discover_tests(${name} TEST_FILTER "${filter}" DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 120 PROPERTIES "${properties}")
endfunction()

# The GoogleTest filter of all suites that SOURCES define. Read from the sources, so that no case can be left out.
function(cohort_test_filter result)
  set(suites)
  foreach(source IN LISTS ARGN)
    get_filename_component(path ${source} ABSOLUTE)
    file(STRINGS ${path} tests REGEX "^(TYPED_)?TEST(_F|_P)?\\(")
    foreach(test IN LISTS tests)
      string(REGEX REPLACE "^[A-Z_]+\\(([A-Za-z0-9_]+).*" "\\1" suite "${test}")
      list(APPEND suites "${suite}.*" "*/${suite}.*")
    endforeach()
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${path})
  endforeach()
  list(REMOVE_DUPLICATES suites)
  list(JOIN suites ":" filter)
  set(${result} "${filter}" PARENT_SCOPE)
endfunction()
