// Lets go of the GIL while C++ computes, and takes it again where that needs Python in between.
//
// Invariant: nothing below a WithoutGil touches a Python object, but below a WithGil. A thread
// that asks for the lock again while the interpreter shuts down (a daemon thread inside a call when
// the program ends) never gets it: before Python 3.14 it is ended on the spot, by unwinding its
// stack, and the frames of C++ below it are not made for that and abort the whole process. Here
// such a thread waits, as in 3.14, for the process to end. Includes Python.h by way of nanobind,
// and the standard library.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <thread>

namespace onefold::python {

[[noreturn]] inline void wait_for_the_end() {
  while (true) std::this_thread::sleep_for(std::chrono::hours(1));
}

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // no exception: the unwinding of pthread_exit, which must not go on
      wait_for_the_end();
    }
  }

 private:
  PyThreadState* state_;
};

// Takes the GIL below a WithoutGil.
class WithGil {
 public:
  WithGil() {
    try {
      state_ = PyGILState_Ensure();
    } catch (...) {
      wait_for_the_end();
    }
  }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;
  ~WithGil() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// Below a WithGil, where Python code runs, which lets go of the lock whenever it likes: body() uses
// the C API alone and throws nothing.
template <class Body>
void run_python(const Body& body) {
  try {
    body();
  } catch (...) {
    wait_for_the_end();
  }
}

}  // namespace onefold::python
