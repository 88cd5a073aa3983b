# The library. Each folder of src/ is one layer; which may include which is checked by `dev check`.

include(OnefoldEmbed)

file(GLOB onefold_sources CONFIGURE_DEPENDS
  src/*.cc src/core/*.cc src/plan/*.cc src/cpu/*.cc src/jit/*.cc src/cuda/*.cc src/reference/*.cc)
file(GLOB onefold_kernels CONFIGURE_DEPENDS src/cpu/isa/*.cc)
# A product and a sum are two roundings unless the source says fma: the compiler does not decide.
set(onefold_rounding -ffp-contract=off)
set_source_files_properties(${onefold_sources} PROPERTIES COMPILE_OPTIONS ${onefold_rounding})
onefold_embed_headers(onefold_device_headers)
list(APPEND onefold_sources ${onefold_device_headers})

# One kernel body, compiled once per instruction set and chosen at run time. Only these files see
# instruction-set flags: an inline function of a shared header compiled with them could be the copy
# that the linker keeps for everyone.
set(onefold_isa_flags_baseline "")
set(onefold_isa_flags_avx2 -mavx2 -mfma -mf16c)
set(onefold_isa_flags_avx512 ${onefold_isa_flags_avx2}
    -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # g++ 12 takes the undefined operand inside its own intrinsics for a mistake of ours.
  list(APPEND onefold_isa_flags_avx512 -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
set(onefold_isa_flags_avx512_bf16 ${onefold_isa_flags_avx512} -mavx512bf16)

set(onefold_is_x86_64 FALSE)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8)
  set(onefold_is_x86_64 TRUE)
endif()

set(onefold_kernel_level -O3)  # in Debug builds too, unless a sanitizer is there to look for faults
if(ONEFOLD_SANITIZE)
  set(onefold_kernel_level "")
endif()
set(onefold_isas "")  # those of this build
foreach(file IN LISTS onefold_kernels)
  get_filename_component(isa ${file} NAME_WE)
  if(NOT DEFINED onefold_isa_flags_${isa})
    message(FATAL_ERROR "${file}: cmake/OnefoldLibrary.cmake has no flags for '${isa}'.")
  endif()
  if(isa STREQUAL "baseline" OR onefold_is_x86_64)
    list(APPEND onefold_isas ${isa})
    list(APPEND onefold_sources ${file})
    list(PREPEND onefold_isa_flags_${isa} ${onefold_kernel_level} ${onefold_rounding})
    set_source_files_properties(${file} PROPERTIES
      COMPILE_OPTIONS "${onefold_isa_flags_${isa}}")
  endif()
endforeach()

add_library(onefold ${onefold_sources})
add_library(onefold::onefold ALIAS onefold)
onefold_flags(onefold)
target_compile_features(onefold PUBLIC cxx_std_20)
target_include_directories(onefold
  PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
         $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
  PRIVATE src)

target_compile_definitions(onefold PRIVATE ONEFOLD_VERSION="${PROJECT_VERSION}")  # for info()

find_package(Threads REQUIRED)
target_link_libraries(onefold PRIVATE Threads::Threads ${CMAKE_DL_LIBS})

set_target_properties(onefold PROPERTIES
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
