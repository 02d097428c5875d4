# SPDX-License-Identifier: Apache-2.0
# Finds the headers of NCCL and of the CUDA 13 toolkit that libtorch's NCCL backend is compiled with.
#
# Input:   COHORT_NCCL, a cache variable or environment variable: a folder that holds include/nccl.h, where the toolkit
#          has none. The version must be exactly the one asked for: the backend's interface holds NCCL's structs.
# Targets: Nccl::headers.
set(COHORT_NCCL "$ENV{COHORT_NCCL}" CACHE PATH "Folder of NCCL (holds include/nccl.h), if not in the CUDA toolkit")
find_package(CUDAToolkit 13 QUIET)
find_path(Nccl_INCLUDE_DIR nccl.h HINTS ${COHORT_NCCL}/include ${CUDAToolkit_INCLUDE_DIRS})
if(Nccl_INCLUDE_DIR)
  file(STRINGS "${Nccl_INCLUDE_DIR}/nccl.h" _lines REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]" "" _numbers "${_lines}")
  list(JOIN _numbers "." Nccl_VERSION)
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Nccl REQUIRED_VARS Nccl_INCLUDE_DIR CUDAToolkit_FOUND
  VERSION_VAR Nccl_VERSION
  REASON_FAILURE_MESSAGE "a CUDA 13 toolkit and nccl.h ${Nccl_FIND_VERSION} are needed (COHORT_NCCL names the folder of NCCL)")
if(Nccl_FOUND AND NOT TARGET Nccl::headers)
  add_library(Nccl::headers INTERFACE IMPORTED)
  set_target_properties(Nccl::headers PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${Nccl_INCLUDE_DIR};${CUDAToolkit_INCLUDE_DIRS}")
endif()
