# Run by ctest, see CMakeLists.txt beside this file.

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    string(REPLACE ";" " " command "${ARGV}")
    message(FATAL_ERROR "'${command}' ended with ${status}.")
  endif()
endfunction()

set(prefix ${work_dir}/prefix)
set(consumer ${work_dir}/consumer)
file(REMOVE_RECURSE ${prefix} ${consumer})

run(${CMAKE_COMMAND} --install ${build_dir} --prefix ${prefix})
run(${CMAKE_COMMAND} -S ${source_dir}/tests/package/consumer -B ${consumer} -G ${generator}
    -DCMAKE_CXX_COMPILER=${compiler} -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_BUILD_TYPE=Release
    -DONEFOLD_EXAMPLES=${source_dir}/examples/cpp -DONEFOLD_VERSION_WANTED=${version})
run(${CMAKE_COMMAND} --build ${consumer})
run(${consumer}/example)
