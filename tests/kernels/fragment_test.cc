// Fragments and shared tiles, run on the host: ldmatrix and mma.sync as PTX defines them, fed by
// the addresses of tile/fragment.h, multiply matrices.

#include "kernels/tile/fragment.h"

#include <gtest/gtest.h>

#include <array>
#include <set>
#include <vector>

#include "kernels/tile/shared_tile.h"

namespace onefold::tile {
namespace {

using Matrix = std::vector<std::vector<int>>;

Matrix numbered(int rows, int columns, int seed) {
  Matrix m(rows, std::vector<int>(columns));
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) m[r][c] = (r * 31 + c * 17 + seed) % 23 - 11;
  }
  return m;
}

// What thread `lane` receives of each of the four matrices of ldmatrix x4 from a tile whose element
// size is kSize: register r holds row lane / 4, 32-bit word lane % 4 of the 8 x 16 bytes that lanes
// 8 r .. 8 r + 7 name; transposed, 16-bit elements (2 (lane % 4) + half, lane / 4).
template <int kSize>
int loaded(const Matrix& tile, int lane, int r, int half, bool transposed, int (*row)(int),
           int (*byte)(int), int row0, int column0) {
  constexpr int kPerWord = 4 / kSize;
  const int matrix_row = transposed ? 2 * (lane % 4) + half : lane / 4;
  const int matrix_column = transposed ? lane / 4 : kPerWord * (lane % 4) + half;
  const int naming = 8 * r + matrix_row;
  return tile[row0 + row(naming)][column0 + byte(naming) / kSize + matrix_column];
}

// The element of A (16 x 16) and B (16 x 8) in register r, half h of a thread, m16n8k16.
struct Place {
  int row, column;
};
Place a_place(int lane, int r, int h) {
  return {lane / 4 + 8 * (r % 2), 2 * (lane % 4) + h + 8 * (r / 2)};
}
Place b_place(int lane, int r, int h) { return {2 * (lane % 4) + h + 8 * r, lane / 4}; }

TEST(Fragment, a_of_16_bit_rows_is_where_mma_wants_it) {
  const Matrix tile = numbered(48, 64, 1);
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int r = 0; r < 4; ++r) {
      for (int h = 0; h < 2; ++h) {
        const Place at = a_place(lane, r, h);
        EXPECT_EQ(loaded<2>(tile, lane, r, h, false, a_row, a_byte, 16, 32),
                  tile[16 + at.row][32 + at.column]);
      }
    }
  }
}

TEST(Fragment, b_of_16_bit_columns_stored_as_rows_is_where_mma_wants_it) {
  const Matrix tile = numbered(48, 64, 2);
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int r = 0; r < 4; ++r) {
      for (int h = 0; h < 2; ++h) {
        const Place at = b_place(lane, r % 2, h);
        EXPECT_EQ(loaded<2>(tile, lane, r, h, false, b_row, b_byte, 16, 32),
                  tile[16 + 8 * (r / 2) + at.column][32 + at.row]);
      }
    }
  }
}

TEST(Fragment, b_loaded_transposed_from_rows_is_where_mma_wants_it) {
  const Matrix tile = numbered(48, 64, 3);
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int r = 0; r < 4; ++r) {
      for (int h = 0; h < 2; ++h) {
        const Place at = b_place(lane, r % 2, h);
        EXPECT_EQ(loaded<2>(tile, lane, r, h, true, b_trans_row, b_trans_byte, 16, 32),
                  tile[16 + at.row][32 + 8 * (r / 2) + at.column]);
      }
    }
  }
}

TEST(Fragment, a_loaded_transposed_from_columns_is_where_mma_wants_it) {
  const Matrix tile = numbered(48, 64, 4);
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int r = 0; r < 4; ++r) {
      for (int h = 0; h < 2; ++h) {
        const Place at = a_place(lane, r, h);
        EXPECT_EQ(loaded<2>(tile, lane, r, h, true, a_trans_row, a_trans_byte, 16, 32),
                  tile[16 + at.column][32 + at.row]);
      }
    }
  }
}

// m16n8k8: A in register r is (g + 8 (r % 2), t + 4 (r / 2)), B in register r is (t + 4 r, g).
TEST(Fragment, operands_of_32_bit_rows_are_where_mma_wants_them) {
  const Matrix tile = numbered(48, 64, 5);
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int r = 0; r < 4; ++r) {
      EXPECT_EQ(loaded<4>(tile, lane, r, 0, false, a_row, a_byte, 16, 8),
                tile[16 + lane / 4 + 8 * (r % 2)][8 + lane % 4 + 4 * (r / 2)]);
      EXPECT_EQ(loaded<4>(tile, lane, r, 0, false, b_row, b_byte, 16, 8),
                tile[16 + 8 * (r / 2) + lane / 4][8 + lane % 4 + 4 * (r % 2)]);
    }
  }
}

// P V for one block: accumulators of P become A, as from_accumulators packs them.
TEST(Fragment, accumulators_become_an_operand_without_moving_between_threads) {
  const Matrix p = numbered(16, 16, 6), v = numbered(16, 8, 7);
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      int want = 0, wide = 0, narrow = 0;
      for (int k = 0; k < 16; ++k) want += p[m][k] * v[k][n];
      for (int lane = 0; lane < kWarp; ++lane) {
        for (int r = 0; r < 4; ++r) {
          for (int h = 0; h < 2; ++h) {
            // 16 bit: register r of A is numbers 2 (r % 2) + h of accumulator block r / 2.
            const int row = accumulator_row(lane, 2 * (r % 2) + h);
            const int column = 8 * (r / 2) + accumulator_column(lane, 2 * (r % 2) + h);
            const Place at = a_place(lane, r, h);
            if (at.row == m) narrow += p[row][column] * v[at.column][n];
          }
        }
        // 32 bit, block by block: depth t is column 2 t, depth t + 4 column 2 t + 1, in A and B.
        for (int block = 0; block < 2; ++block) {
          for (int half = 0; half < 2; ++half) {
            for (int upper = 0; upper < 2; ++upper) {
              const int idx = 2 * upper + half;
              if (accumulator_row(lane, idx) != m) continue;
              EXPECT_EQ(accumulator_column(lane, idx), paired_depth(lane, half));
              wide += p[m][8 * block + accumulator_column(lane, idx)] *
                      v[8 * block + paired_depth(lane, half)][n];
            }
          }
        }
      }
      EXPECT_EQ(narrow, want);
      EXPECT_EQ(wide, want);
    }
  }
}

// What is stored at place_of_depth is read by ldmatrix as the operand whose depths come in pairs.
TEST(Fragment, depths_stored_in_pairs_are_read_in_pairs) {
  std::set<int> places;
  for (int depth = 0; depth < 8; ++depth) places.insert(place_of_depth(depth));
  EXPECT_EQ(places.size(), 8u);
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int half = 0; half < 2; ++half) {
      const int word =
          a_byte(8 * 2 * half) / 4 + lane % 4;  // of matrix 0 or 2, a row's first or last 16 bytes
      EXPECT_EQ(place_of_depth(paired_depth(lane, half)), word);
    }
  }
}

TEST(Fragment, every_accumulator_has_one_owner) {
  std::set<std::pair<int, int>> places;
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int idx = 0; idx < 4; ++idx) {
      places.insert({accumulator_row(lane, idx), accumulator_column(lane, idx)});
    }
  }
  EXPECT_EQ(places.size(), static_cast<std::size_t>(kBlockRows * kBlockColumns));
}

// Shared memory serves 128 bytes at a time from 32 banks of four: eight 16-byte rows, or 32 words.
template <int kRowBytes>
void expect_free_of_conflicts() {
  using Tile = SharedTile<64, kRowBytes>;
  for (int row0 = 0; row0 + 8 <= Tile::kRows; ++row0) {
    for (int byte = 0; byte < kRowBytes; byte += 16) {
      std::set<int> groups;
      for (int row = 0; row < 8; ++row) groups.insert(Tile::offset(row0 + row, byte) / 16 % 8);
      EXPECT_EQ(groups.size(), 8u) << kRowBytes << " bytes, row " << row0;
    }
  }
  std::set<int> banks;  // 32-bit B of a product, depths in pairs
  for (int lane = 0; lane < kWarp; ++lane) {
    banks.insert(Tile::offset(paired_depth(lane, 0), 4 * (lane / 4)) / 4 % 32);
  }
  if (kRowBytes % 128 == 0) {
    EXPECT_EQ(banks.size(), 32u) << kRowBytes;
  }
}

TEST(SharedTile, rows_of_any_length_are_read_without_bank_conflicts) {
  expect_free_of_conflicts<64>();
  expect_free_of_conflicts<128>();
  expect_free_of_conflicts<192>();
  expect_free_of_conflicts<256>();
  expect_free_of_conflicts<320>();
  expect_free_of_conflicts<512>();
  expect_free_of_conflicts<1024>();
}

template <int kRowBytes>
void expect_a_swizzle() {
  using Tile = SharedTile<64, kRowBytes, true>;
  EXPECT_EQ(Tile::kBytes, 64 * kRowBytes);
  for (int row = 0; row < Tile::kRows; ++row) {
    std::set<int> places;
    for (int byte = 0; byte < kRowBytes; byte += 4) {
      const int at = Tile::offset(row, byte);
      // Inside its own line, its chunk as a whole, where an aligned copy of a line keeps it.
      EXPECT_EQ(at / kLine, (row * kRowBytes + byte) / kLine);
      EXPECT_EQ(at % 16, byte % 16);
      EXPECT_EQ(at / 16, Tile::offset(row, byte / 16 * 16) / 16);
      places.insert(at);
    }
    EXPECT_EQ(places.size(), static_cast<std::size_t>(kRowBytes / 4));
    // From where a lane begins to where it reads.
    for (int first = 0; first < 32; first += 16) {
      for (int rows = 0; row + rows < Tile::kRows; rows += 8) {
        for (int byte = 0; byte + first < kRowBytes; byte += 32) {
          EXPECT_EQ(Tile::move(static_cast<u32>(Tile::offset(row, first)), rows, byte),
                    static_cast<u32>(Tile::offset(row + rows, first + byte)));
        }
      }
    }
  }
  for (int row0 = 0; row0 < Tile::kRows; row0 += 8) {
    for (int byte = 0; byte < kRowBytes; byte += 16) {
      std::set<int> groups;
      for (int row = 0; row < 8; ++row) groups.insert(Tile::offset(row0 + row, byte) / 16 % 8);
      EXPECT_EQ(groups.size(), 8u) << kRowBytes << " bytes, row " << row0;
    }
  }
}

TEST(SharedTile, swizzled_lines_keep_their_chunks_and_have_no_bank_conflicts) {
  expect_a_swizzle<128>();
  expect_a_swizzle<256>();
  expect_a_swizzle<512>();
}

}  // namespace
}  // namespace onefold::tile
