#include "jit/digest.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace onefold::jit {
namespace {

// FIPS 180-4: the first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::array<unsigned char, 8> big_endian(std::uint64_t x) {
  std::array<unsigned char, 8> bytes;
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<unsigned char>(x >> (56 - 8 * i));
  return bytes;
}

}  // namespace

void Digest::block(const unsigned char* data) {
  std::uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = std::uint32_t{data[4 * i]} << 24 | std::uint32_t{data[4 * i + 1]} << 16 |
           std::uint32_t{data[4 * i + 2]} << 8 | std::uint32_t{data[4 * i + 3]};
  }
  for (int i = 16; i < 64; ++i) {
    const std::uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + w[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) +
           (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (int i = 0; i < 64; ++i) {
    const std::uint32_t choice = (e & f) ^ (~e & g);
    const std::uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    const std::uint32_t t =
        h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + choice + kRound[i] + w[i];
    const std::uint32_t u = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + majority;
    h = g, g = f, f = e, e = d + t, d = c, c = b, b = a, a = t + u;
  }
  const std::uint32_t mixed[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state_[i] += mixed[i];
}

void Digest::bytes(const unsigned char* data, std::size_t size) {
  num_bytes_ += size;
  while (size > 0) {
    if (num_pending_ == 0 && size >= pending_.size()) {
      block(data);
      data += pending_.size();
      size -= pending_.size();
      continue;
    }
    const std::size_t take = std::min(size, pending_.size() - num_pending_);
    std::memcpy(pending_.data() + num_pending_, data, take);
    num_pending_ += take;
    data += take;
    size -= take;
    if (num_pending_ == pending_.size()) {
      block(pending_.data());
      num_pending_ = 0;
    }
  }
}

Digest& Digest::add(std::string_view part) {
  const auto length = big_endian(part.size());
  bytes(length.data(), length.size());
  bytes(reinterpret_cast<const unsigned char*>(part.data()), part.size());
  return *this;
}

std::string Digest::hex() {
  const auto length = big_endian(num_bytes_ * 8);
  const unsigned char one = 0x80, zero = 0;
  bytes(&one, 1);
  while (num_pending_ != pending_.size() - length.size()) bytes(&zero, 1);
  bytes(length.data(), length.size());

  std::string text;
  for (const std::uint32_t word : state_) {
    for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
  }
  return text;
}

std::string sha256(std::string_view data) {
  Digest digest;
  digest.bytes(reinterpret_cast<const unsigned char*>(data.data()), data.size());
  return digest.hex();
}

}  // namespace onefold::jit
