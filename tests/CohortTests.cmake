# SPDX-License-Identifier: Apache-2.0
# The functions of the tests. Not in cmake/: a record in bench/results speaks of the code there, and tests do not change it.

# What a test binary without run_program cannot do for itself (cohort/base/amx.h).
try_run(COHORT_AMX_HAS_NO_TILES COHORT_AMX_COMPILES
  SOURCES ${PROJECT_SOURCE_DIR}/tests/support/amx_has_no_tiles.cpp ${PROJECT_SOURCE_DIR}/cohort/base/amx.cpp
  CMAKE_FLAGS -DINCLUDE_DIRECTORIES=${PROJECT_SOURCE_DIR} CXX_STANDARD 20)

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
