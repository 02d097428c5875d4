# SPDX-License-Identifier: Apache-2.0
# Installs libraries, public headers and programs, and what find_package(cohort) reads. A library is a component of the same
# name; components that need the same packages share a file of targets.
include(CMakePackageConfigHelpers)
get_property(libraries GLOBAL PROPERTY COHORT_LIBRARIES)
set(destination ${CMAKE_INSTALL_LIBDIR}/cmake/cohort)
set(COHORT_CORE base comm data launch optim parallel train)
set(COHORT_IMAGE image)
set(COHORT_TEXT sentencepiece text)
set(COHORT_NMT nmt)
set(COHORT_PS ps ps_module)
set(COHORT_CLI cli cli_ranks)
set(COHORT_CLI_SERVERS cli_servers)
set(packages CORE IMAGE TEXT NMT PS CLI CLI_SERVERS)
set(COHORT_COMPONENTS)
foreach(package ${packages})
  foreach(library ${COHORT_${package}})
    if(NOT library IN_LIST libraries)
      continue()
    endif()
    list(REMOVE_ITEM libraries ${library})
    list(APPEND COHORT_COMPONENTS ${library}=${package})
    install(TARGETS cohort_${library} EXPORT cohort${package}Targets
      ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
      LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
      FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
    set(used_${package} TRUE)
  endforeach()
  if(used_${package})
    install(EXPORT cohort${package}Targets NAMESPACE cohort:: DESTINATION ${destination})
  endif()
endforeach()
if(libraries)
  message(FATAL_ERROR "no package has ${libraries}: add them to cmake/CohortInstall.cmake")
endif()
install(FILES ${PROJECT_SOURCE_DIR}/cohort/cohort.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/cohort)
if(COHORT_BUILD_APPS)
  # A program is in lib/cohort/bin; the script of its name in bin finds libtorch and starts it.
  set(private ${CMAKE_INSTALL_LIBDIR}/cohort)
  configure_file(${PROJECT_SOURCE_DIR}/cmake/program.sh.in ${PROJECT_BINARY_DIR}/program.sh @ONLY)
  foreach(program cohort cohort-bench cohort-checkpoint cohort-doctor cohort-nmt cohort-ps cohort_ps_tensors)
    if(TARGET ${program})
      set_target_properties(${program} PROPERTIES INSTALL_RPATH "$ORIGIN/../lib;$ORIGIN/../..")
      install(TARGETS ${program} RUNTIME DESTINATION ${private}/bin)
      if(NOT program STREQUAL cohort_ps_tensors)  # Only cohort-ps starts it.
        install(PROGRAMS ${PROJECT_BINARY_DIR}/program.sh DESTINATION ${CMAKE_INSTALL_BINDIR} RENAME ${program})
      endif()
    endif()
  endforeach()
  # Completions and man pages where the shells and man look for them.
  set(share ${PROJECT_BINARY_DIR}/share)
  install(CODE "set(bin $<TARGET_FILE_DIR:cohort>)\nset(share ${share})\nset(man_pages ${PROJECT_SOURCE_DIR}/scripts/man-pages)")
  install(SCRIPT ${PROJECT_SOURCE_DIR}/cmake/GenerateShare.cmake)
  install(DIRECTORY ${share}/ DESTINATION ${CMAKE_INSTALL_DATADIR})
endif()
file(RELATIVE_PATH COHORT_PC_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(${PROJECT_SOURCE_DIR}/cmake/cohort.pc.in ${PROJECT_BINARY_DIR}/cohort.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/cohort.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
# In a folder where CMake does not look: build/release/bin in PATH would have it find these, which are of no use there.
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/cohortConfig.cmake.in
  ${PROJECT_BINARY_DIR}/package/cohortConfig.cmake INSTALL_DESTINATION ${destination})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/cohortConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/package/cohortConfig.cmake ${PROJECT_BINARY_DIR}/package/cohortConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/FindLibtorch.cmake DESTINATION ${destination})
