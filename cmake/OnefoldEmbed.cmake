# Device headers as text inside the library: what a kernel may include at run time.
#
# onefold_embed_headers(out): sets `out` to a generated source file that defines jit::kHeaders. A
# header is named as the host includes it: relative to include/ or to src/.

function(onefold_embed_headers out)
  file(GLOB_RECURSE kernels RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS
    src/kernels/*.h src/kernels/*.cuh)
  file(GLOB algebra RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS include/onefold/algebra/*.h)
  set(headers ${algebra} src/core/variant.h ${kernels})
  list(SORT headers)

  set(generated ${PROJECT_BINARY_DIR}/generated/embedded_headers.cc)
  set(script ${PROJECT_SOURCE_DIR}/cmake/embed_headers.cmake)
  list(JOIN headers "|" joined)  # a list does not survive a command line
  set(paths ${headers})
  list(TRANSFORM paths PREPEND ${PROJECT_SOURCE_DIR}/)
  add_custom_command(OUTPUT ${generated}
    COMMAND ${CMAKE_COMMAND} -D "HEADERS=${joined}" -D "OUTPUT=${generated}"
            -D "SOURCE_DIR=${PROJECT_SOURCE_DIR}" -P ${script}
    DEPENDS ${paths} ${script}
    COMMENT "Embedding the device headers"
    VERBATIM)
  set(${out} ${generated} PARENT_SCOPE)
endfunction()
