# Installs libraries, headers and programs, and what find_package(cohort) reads.
include(CMakePackageConfigHelpers)
get_property(libraries GLOBAL PROPERTY COHORT_LIBRARIES)
set(destination ${CMAKE_INSTALL_LIBDIR}/cmake/cohort)
foreach(library ${libraries})
  install(TARGETS ${library} EXPORT cohortTargets
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
endforeach()
install(EXPORT cohortTargets NAMESPACE cohort:: DESTINATION ${destination})
# The programs find the shared library beside them after installation.
set_target_properties(cohort cohort-checkpoint cohort-doctor cohort-nmt cohort-ps cohort_ps_tensors PROPERTIES
  INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${COHORT_LIBTORCH}/lib")
install(TARGETS cohort cohort-bench cohort-checkpoint cohort-doctor cohort-nmt cohort-ps cohort_ps_tensors RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/cohortConfig.cmake.in
  ${PROJECT_BINARY_DIR}/cohortConfig.cmake INSTALL_DESTINATION ${destination})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cohortConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cohortConfig.cmake ${PROJECT_BINARY_DIR}/cohortConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/FindLibtorch.cmake DESTINATION ${destination})
