// Letting go of Python's global interpreter lock while numbers are computed.
//
// Invariant: nothing below a WithoutGil touches a Python object. A thread that asks for the lock
// again while the interpreter shuts down (a daemon thread inside a call when the program ends)
// never gets it: before Python 3.14 it is ended on the spot, by unwinding its stack, and the frames
// of C++ below it are not made for that and abort the whole process. Here such a thread waits, as
// in 3.14, for the process to end. Includes Python.h by way of nanobind, and the standard library.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <thread>

namespace onefold::python {

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // no exception: the unwinding of pthread_exit, which must not go on
      while (true) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace onefold::python
