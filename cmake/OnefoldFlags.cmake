# What every target of the project is compiled with. Never -ffast-math: the results are specified
# down to infinities, NaN and, for the exact identities, single bits.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

function(onefold_flags target)
  target_compile_options(${target} PRIVATE
    -Wall -Wextra $<$<BOOL:${ONEFOLD_WERROR}>:-Werror>
    -fno-math-errno   # sqrt and friends may become instructions; no result changes
    -Wno-psabi)       # baseline vectors passed by value: the ABI note is not about our interface
  if(ONEFOLD_SANITIZE)
    target_compile_options(${target} PRIVATE
      -fsanitize=${ONEFOLD_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_compile_definitions(${target} PRIVATE _GLIBCXX_ASSERTIONS)
    target_link_options(${target} PRIVATE -fsanitize=${ONEFOLD_SANITIZE})
  endif()
endfunction()
