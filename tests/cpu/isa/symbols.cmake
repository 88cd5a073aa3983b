# Run by ctest, see tests/CMakeLists.txt. An inline function that several objects define is weak,
# and the linker keeps any one copy for all of them. If an object compiled for an instruction set
# defined one that others share, a processor without that set could be sent into it. So each of
# these OBJECTS (joined by |) may define weak symbols only of its own namespace; NM lists them.

string(REPLACE "|" ";" objects "${OBJECTS}")
list(FILTER objects INCLUDE REGEX "/src/cpu/isa/")
if(NOT objects)
  message(FATAL_ERROR "No object of src/cpu/isa is among ${OBJECTS}.")
endif()

set(faults "")
foreach(object IN LISTS objects)
  string(REGEX REPLACE "^.*/([a-z0-9_]+)\\.cc\\..*$" "\\1" isa "${object}")
  execute_process(COMMAND ${NM} --demangle --defined-only ${object}
    OUTPUT_VARIABLE listing RESULT_VARIABLE status)
  string(FIND "${listing}" " T onefold::cpu::${isa}_kernels" table)
  if(NOT status EQUAL 0 OR table EQUAL -1)
    message(FATAL_ERROR "${NM} does not show onefold::cpu::${isa}_kernels in ${object}.")
  endif()
  string(REPLACE ";" "," listing "${listing}")
  string(REPLACE "\n" ";" lines "${listing}")
  list(FILTER lines INCLUDE REGEX "^[0-9a-f]* [VWu] ")
  list(LENGTH lines num_weak)
  list(FILTER lines EXCLUDE REGEX "onefold::cpu::${isa}::")
  list(FILTER lines EXCLUDE REGEX " V DW\\.ref\\.")  # a pointer to the exception handler, no code
  foreach(line IN LISTS lines)
    string(APPEND faults "\n  ${isa}: ${line}")
  endforeach()
  message(STATUS "${isa}: ${num_weak} weak symbols")
endforeach()
if(faults)
  message(FATAL_ERROR "Weak symbols outside the namespace of their instruction set:${faults}")
endif()
