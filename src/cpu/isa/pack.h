// Rows become what products read: panels of keys and values, and queries in lanes.
//
// Invariant: what is packed is what lies in the tensors, rounded nowhere, but for rows that are not
// finite. Compiled once per instruction set; includes tile.h.
#pragma once

#include <cmath>
#include <limits>

#include "cpu/tile.h"

namespace onefold::cpu::ONEFOLD_ISA {

// Whether no element is infinite or NaN: 0 * x is 0 for every finite x.
template <class R>
inline bool all_finite(const R* row, std::int64_t count) {
  Vec<R> sums{};
  std::int64_t d = 0;
  for (; d + kWidth<R> <= count; d += kWidth<R>) sums += load(row + d) * Vec<R>{};
  R sum = sum_of_lanes<R>(sums);
  for (; d < count; ++d) sum += row[d] * R(0);
  return sum == R(0);
}

// to = from * factor; in double where the factor is too small to be a normal R.
template <class R>
inline void scale_row(R* to, const R* from, std::int64_t count, double factor) {
  const R narrow = static_cast<R>(factor);
  if (factor != 0 && std::fabs(narrow) < std::numeric_limits<R>::min()) {
    for (std::int64_t d = 0; d < count; ++d) to[d] = static_cast<R>(double{from[d]} * factor);
    return;
  }
  for (std::int64_t d = 0; d < count; ++d) to[d] = from[d] * narrow;
}

// to[c * to_step + r] = from[r * from_step + c] for an 8 x 8 block of 32-bit numbers or pairs.
template <class X>
inline void transpose_8x8(const X* from, std::int64_t from_step, X* to, std::int64_t to_step) {
#if defined(__AVX2__)
  __m256 row[8], pair[8];
  for (int r = 0; r < 8; ++r)
    row[r] = _mm256_loadu_ps(reinterpret_cast<const float*>(from + r * from_step));
  for (int r = 0; r < 4; ++r) {  // columns 0, 1 and 2, 3 of row pairs, per 128-bit half
    pair[2 * r] = _mm256_unpacklo_ps(row[2 * r], row[2 * r + 1]);
    pair[2 * r + 1] = _mm256_unpackhi_ps(row[2 * r], row[2 * r + 1]);
  }
  for (int half = 0; half < 2; ++half) {  // rows 0 .. 3, then 4 .. 7
    const __m256* p = pair + 4 * half;
    row[4 * half] = _mm256_shuffle_ps(p[0], p[2], 0x44);
    row[4 * half + 1] = _mm256_shuffle_ps(p[0], p[2], 0xEE);
    row[4 * half + 2] = _mm256_shuffle_ps(p[1], p[3], 0x44);
    row[4 * half + 3] = _mm256_shuffle_ps(p[1], p[3], 0xEE);
  }
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(reinterpret_cast<float*>(to + c * to_step),
                     _mm256_permute2f128_ps(row[c], row[4 + c], 0x20));
  }
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(reinterpret_cast<float*>(to + (4 + c) * to_step),
                     _mm256_permute2f128_ps(row[c], row[4 + c], 0x31));
  }
#else
  for (int c = 0; c < 8; ++c) {
    for (int r = 0; r < 8; ++r) to[c * to_step + r] = from[r * from_step + c];
  }
#endif
}

// to[c * to_step + r] = from[r * from_step + c], r < rows, c < columns.
template <class X>
inline void transpose(const X* from, std::int64_t from_step, std::int64_t rows,
                      std::int64_t columns, X* to, std::int64_t to_step) {
  std::int64_t r = 0;
  if constexpr (sizeof(X) == 4) {
    for (; r + 8 <= rows; r += 8) {
      std::int64_t c = 0;
      for (; c + 8 <= columns; c += 8) {
        transpose_8x8(from + r * from_step + c, from_step, to + c * to_step + r, to_step);
      }
      for (; c < columns; ++c) {
        for (int k = 0; k < 8; ++k) to[c * to_step + r + k] = from[(r + k) * from_step + c];
      }
    }
  }
  for (; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) to[c * to_step + r] = from[r * from_step + c];
  }
}

// Rows a score panel's transposition reads and the floats it writes past the end: whole 8 x 8
// blocks, of which the next column overwrites what lies beyond kPanel.
inline constexpr int kPanelRows = 8, kPanelSlack = 8;

// Keys [begin, begin + count) of one key tile, packed. A key whose row is not finite is left out of
// the value panel and listed: the matrix product would carry 0 * NaN to rows that do not see it.
struct PoisonList {
  int count;
  int* keys;  // relative to the tile
};

// A row of keys as a product's operands along d.
template <class X>
inline void load_key(X* to, const Rows& from, const void* row, std::int64_t dim) {
  if constexpr (kTerms<X> == 2) {
    load_pairs(static_cast<const std::uint16_t*>(row), from.dim, dim, to);
  } else {
    load_row(to, row, from.dtype, from.dim, dim);
  }
}

// `rows` holds kPanelRows rows of `dim`, padded to a whole number of vectors.
template <class X>
inline void pack_score_panel(const Rows& from, std::int64_t b, std::int64_t first_row,
                             std::int64_t head, int count, std::int64_t dim, X* rows, X* panel) {
  const std::int64_t depth = operands<X>(dim), step = padded_dim<SumOf<X>>(depth);
  for (int first = 0; first < count; first += kPanel) {
    for (int m = 0; m < kPanelRows; ++m) {
      X* row = rows + m * step;
      if (m < kPanel && first + m < count) {
        load_key(row, from, from.at(b, first_row + first + m, head), dim);
      } else {
        for (std::int64_t d = 0; d < depth; ++d) row[d] = X(0);
      }
    }
    X* to = panel + first * depth;
    if (sizeof(X) == 4 && depth % 8 == 0) {
      transpose(rows, step, kPanelRows, depth, to, kPanel);
    } else {
      transpose(rows, step, kPanel, depth, to, kPanel);
    }
  }
}

// The same keys as plain rows of `step` operands.
template <class X>
inline void pack_key_rows(const Rows& from, std::int64_t b, std::int64_t first_row,
                          std::int64_t head, int count, std::int64_t dim, std::int64_t step,
                          X* to) {
  for (int key = 0; key < count; ++key, to += step) {
    load_key(to, from, from.at(b, first_row + key, head), dim);
  }
}

// The values of `key` as a product's operands along keys, those of the next key beside them where
// an operand holds two; rows that are not finite, listed, and what lies beyond `count`, as zeros.
template <class X>
inline void load_value(X* to, const Rows& from, std::int64_t b, std::int64_t first_row,
                       std::int64_t head, int key, int count, std::int64_t dim,
                       PoisonList& poison) {
  if constexpr (kTerms<X> == 2) {
    const std::uint16_t* row[2] = {};
    for (int n = 0; n < 2 && key + n < count; ++n) {
      row[n] = reinterpret_cast<const std::uint16_t*>(from.at(b, first_row + key + n, head));
      if (all_finite(row[n], from.dim, dim)) continue;
      poison.keys[poison.count++] = key + n;
      row[n] = nullptr;
    }
    interleave_rows(row[0], row[1], from.dim, dim, to);
  } else {
    load_row(to, from.at(b, first_row + key, head), from.dtype, from.dim, dim);
    if (all_finite(to, dim)) return;
    poison.keys[poison.count++] = key;
    for (std::int64_t d = 0; d < dim; ++d) to[d] = X(0);
  }
}

template <class X>
inline void pack_value_rows(const Rows& from, std::int64_t b, std::int64_t first_row,
                            std::int64_t head, int count, std::int64_t dim, std::int64_t step,
                            X* to, PoisonList& poison) {
  poison.count = 0;
  for (int key = 0; key < count; key += kTerms<X>, to += step) {
    load_value(to, from, b, first_row, head, key, count, dim, poison);
  }
}

// `panel_keys` is the number of keys of a panel, in operands.
template <class X>
inline void pack_value_panel(const Rows& from, std::int64_t b, std::int64_t first_row,
                             std::int64_t head, int count, std::int64_t panel_keys,
                             std::int64_t dim, X* row, X* panel, PoisonList& poison) {
  const std::int64_t padded = round_up(dim, kPanel);
  poison.count = 0;
  for (int key = 0; key < count; key += kTerms<X>, panel += kPanel) {
    load_value(row, from, b, first_row, head, key, count, dim, poison);
    for (std::int64_t d = dim; d < padded; ++d) row[d] = X(0);
    X* to = panel;
    for (std::int64_t d = 0; d < padded; d += kPanel, to += panel_keys * kPanel) {
      __builtin_memcpy(to, row + d, kPanel * sizeof(X));
    }
  }
}

// Rows times `factor` as operands along d, one row a lane; pairs pass through a row of numbers and
// `width` rows of operands.
template <class X>
inline void lay_across(const SumOf<X>* rows, int width, std::int64_t dim, double factor,
                       SumOf<X>* row, X* operand_rows, X* to) {
  using R = SumOf<X>;
  const std::int64_t step = padded_dim<R>(dim);
  if constexpr (kTerms<X> == 2) {
    for (int lane = 0; lane < width; ++lane) {
      const R* from = rows + lane * step;
      if (factor != 1) scale_row(row, from, dim, factor), from = row;
      narrow_row(from, dim, operand_rows + lane * step);
    }
    transpose(operand_rows, step, width, operands<X>(dim), to, width);
  } else {
    transpose(rows, step, width, dim, to, width);
    if (factor != 1) scale_row(to, to, dim * width, factor);
  }
}
// Rows as pairs along lanes.
inline void lay_along(const float* rows, int width, std::int64_t dim, Pair* to) {
  const std::int64_t step = padded_dim<float>(dim);
  for (int lane = 0; lane < width; lane += 2) {
    interleave_rows(rows + lane * step, rows + (lane + 1) * step, step, to + lane / 2 * step);
  }
}

}  // namespace onefold::cpu::ONEFOLD_ISA
