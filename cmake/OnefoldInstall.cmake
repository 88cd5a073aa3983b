# find_package(onefold CONFIG) -> onefold::onefold.

include(CMakePackageConfigHelpers)
set(onefold_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/onefold)

install(TARGETS onefold EXPORT onefold-targets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/onefold DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h")
install(EXPORT onefold-targets NAMESPACE onefold:: DESTINATION ${onefold_package_dir})

configure_package_config_file(cmake/onefold-config.cmake.in
  ${PROJECT_BINARY_DIR}/onefold-config.cmake INSTALL_DESTINATION ${onefold_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/onefold-config-version.cmake
  COMPATIBILITY SameMajorVersion)
install(FILES ${PROJECT_BINARY_DIR}/onefold-config.cmake
              ${PROJECT_BINARY_DIR}/onefold-config-version.cmake
  DESTINATION ${onefold_package_dir})
