// A seeded source of random cases, and the line that reproduces a failing one.
//
// Invariant: the n-th number of seed s is the same on every machine (no std::*_distribution).
// --gtest_random_seed=s chooses other cases. Includes the standard library and GoogleTest.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>

namespace onefold::test {

// SplitMix64: G. L. Steele, D. Lea, C. H. Flood, "Fast splittable pseudorandom number generators",
// 2014.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t bits() {
    state_ += 0x9E3779B97F4A7C15u;
    std::uint64_t x = state_;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  // In [0, 1).
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  // In [low, high].
  int integer(int low, int high) {
    return low + static_cast<int>(bits() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool chance(double probability) { return uniform() < probability; }
  // Box and Muller.
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(6.283185307179586 * uniform());
  }
  // A sign and a magnitude from 10^-power to 10^power.
  double wide(double power) {
    return (chance(0.5) ? 1.0 : -1.0) * std::pow(10.0, uniform(-power, power));
  }

 private:
  std::uint64_t state_;
};

inline std::uint64_t base_seed() {
  return static_cast<std::uint64_t>(::testing::GTEST_FLAG(random_seed));
}

inline std::string reproduce(int case_idx) {
  const ::testing::TestInfo* info = ::testing::UnitTest::GetInstance()->current_test_info();
  return "case " + std::to_string(case_idx) +
         "; again with --gtest_filter=" + info->test_suite_name() + "." + info->name() +
         " --gtest_random_seed=" + std::to_string(base_seed());
}

// Calls body(random) `cases` times, each with a generator of its own.
template <class Body>
void for_random_cases(int cases, Body&& body) {
  for (int idx = 0; idx < cases; ++idx) {
    SCOPED_TRACE(reproduce(idx));
    Random random(base_seed() * 1000003u + static_cast<std::uint64_t>(idx));
    body(random);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace onefold::test
