// SHA-256 of a sequence of parts, each counted with its length so that no two sequences agree.
//
// Invariant: the digest depends on the parts only, on every machine. Includes the standard library.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace onefold::jit {

class Digest {
 public:
  Digest& add(std::string_view part);

  // Lower-case hexadecimal, 64 characters. Ends the sequence.
  std::string hex();

  friend std::string sha256(std::string_view bytes);

 private:
  void bytes(const unsigned char* data, std::size_t size);
  void block(const unsigned char* data);

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> pending_{};
  std::size_t num_pending_ = 0;
  std::uint64_t num_bytes_ = 0;
};

// SHA-256 of the bytes alone, as the standard defines it: "" gives e3b0c442...
std::string sha256(std::string_view bytes);

}  // namespace onefold::jit
