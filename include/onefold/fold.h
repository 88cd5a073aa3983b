// The public algebra: folds (what is accumulated) and the two executors every machine has.
// Includes the algebra headers only; compiles with g++, clang++ and NVRTC.
#pragma once

#include "onefold/algebra/attention_state.h"
#include "onefold/algebra/monoid.h"
#include "onefold/algebra/scalar.h"
#include "onefold/algebra/softmax.h"
#include "onefold/algebra/welford.h"
