# Run by ctest, see tests/CMakeLists.txt: the instructions that the CPU kernels execute in a few
# calls, held to those recorded for the COMPILER (GNU-12) in counts.txt. VALGRIND shows every
# PROGRAM the same processor, without AVX-512 and with the same caches, so that machines agree.
#
# With -D RECORD=ON what was counted is written down instead. A change for the better is recorded
# too, or the next one for the worse would hide in it.

set(percent 2)  # what may change without being recorded
set(recorded_in ${CMAKE_CURRENT_LIST_DIR}/counts.txt)
set(ENV{ONEFOLD_BACKEND} avx2)

execute_process(COMMAND ${PROGRAM} OUTPUT_VARIABLE names RESULT_VARIABLE status)
string(REGEX MATCHALL "[^\n]+" names "${names}")
if(NOT status EQUAL 0 OR NOT names)
  message(FATAL_ERROR "${PROGRAM} lists no cases.")
endif()

file(STRINGS ${recorded_in} recorded)
set(others ${recorded})
list(FILTER others EXCLUDE REGEX "^${COMPILER} ")
list(FILTER recorded INCLUDE REGEX "^${COMPILER} ")
if(NOT recorded AND NOT RECORD)
  message("There are no counts for ${COMPILER} in ${recorded_in}: record_instructions makes them.")
  return()
endif()

# The instructions of the program's own functions in a profile: those of the C library (memset by
# the byte, as its rep instructions count) are another machine's choice. Lines are "ob=object",
# what its functions cost as "position cost", and after "calls=" what somebody else did.
function(count_own profile result)
  file(STRINGS ${profile} lines REGEX "^(ob=|calls=|[0-9+*-])")
  set(sum 0)
  set(own FALSE)
  set(called FALSE)
  foreach(line IN LISTS lines)
    if(line MATCHES "^ob=")
      string(COMPARE EQUAL "${line}" "ob=${PROGRAM}" own)
    elseif(line MATCHES "^calls=")
      set(called TRUE)
    elseif(called)
      set(called FALSE)
    elseif(own AND line MATCHES " ([0-9]+)$")
      math(EXPR sum "${sum} + ${CMAKE_MATCH_1}")
    endif()
  endforeach()
  set(${result} ${sum} PARENT_SCOPE)
endfunction()

set(faults "")
foreach(name IN LISTS names)
  execute_process(
    COMMAND ${VALGRIND} --tool=callgrind --callgrind-out-file=${PROFILE} --compress-strings=no
            --toggle-collect=counted_call* ${PROGRAM} ${name}
    OUTPUT_VARIABLE output ERROR_VARIABLE report RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${name}: ${VALGRIND} ended with ${status}\n${output}${report}")
  endif()
  count_own(${PROFILE} count)
  if(count LESS 10000)
    message(FATAL_ERROR "${name}: ${count} instructions are none; see ${PROFILE}")
  endif()
  message(STATUS "${name}: ${count}")
  list(APPEND others "${COMPILER} ${name} ${count}")
  if(RECORD)
    continue()
  endif()
  if(NOT recorded MATCHES "${COMPILER} ${name} ([0-9]+)")
    string(APPEND faults "\n  ${name}: ${count}, never recorded")
    continue()
  endif()
  set(before ${CMAKE_MATCH_1})
  math(EXPR lowest "${before} * (100 - ${percent}) / 100")
  math(EXPR highest "${before} * (100 + ${percent}) / 100")
  if(count LESS lowest OR count GREATER highest)
    math(EXPR tenths "(${count} - ${before}) * 1000 / ${before}")
    string(APPEND faults "\n  ${name}: ${count} instead of ${before} (${tenths} per mille)")
  endif()
endforeach()

if(RECORD)
  list(SORT others COMPARE NATURAL)
  list(JOIN others "\n" text)
  file(WRITE ${recorded_in} "${text}\n")
elseif(faults)
  message(FATAL_ERROR "More than ${percent} % away from what ${recorded_in} has for ${COMPILER}; if "
    "that is meant, the target record_instructions writes it down:${faults}")
endif()
