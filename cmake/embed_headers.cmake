# Run by OnefoldEmbed.cmake: writes the files HEADERS (joined by |) of SOURCE_DIR as C++ strings.

string(REPLACE "|" ";" headers "${HEADERS}")
set(table "")
foreach(header IN LISTS headers)
  file(READ ${SOURCE_DIR}/${header} text)
  string(REGEX REPLACE "^(include|src)/" "" name ${header})
  if(text MATCHES "\\)embedded\"")
    message(FATAL_ERROR "${header} contains )embedded\", which ends the string that holds it.")
  endif()
  string(APPEND table "    {\"${name}\", R\"embedded(${text})embedded\"},\n")
endforeach()
file(WRITE ${OUTPUT}.new
  "// Written by cmake/embed_headers.cmake.\n"
  "#include \"jit/headers.h\"\n\n"
  "namespace onefold::jit {\n\n"
  "const Header kHeaders[] = {\n${table}};\n"
  "const std::size_t kNumHeaders = sizeof(kHeaders) / sizeof(kHeaders[0]);\n\n"
  "}  // namespace onefold::jit\n")
file(RENAME ${OUTPUT}.new ${OUTPUT})
