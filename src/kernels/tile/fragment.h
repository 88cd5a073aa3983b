// Which thread of a warp holds which element of a matrix product, as arithmetic.
//
// A warp holds a 16 x 8 block of accumulators as four numbers a thread: thread 4 g + t has columns
// 2 t and 2 t + 1 of rows g and g + 8. Tiles are grids of such blocks. Host and device; includes
// scalar.h only.
#pragma once

#include "onefold/algebra/scalar.h"

namespace onefold::tile {

inline constexpr int kWarp = 32;
inline constexpr int kBlockRows = 16;  // of an accumulator block
inline constexpr int kBlockColumns = 8;

// Position of number `idx` of the four, inside the block.
constexpr int accumulator_row(int lane, int idx) { return lane / 4 + 8 * (idx / 2); }
constexpr int accumulator_column(int lane, int idx) { return 2 * (lane % 4) + idx % 2; }

// ldmatrix x4 loads four matrices of 8 rows by 16 bytes; lane l names row l % 8 of matrix l / 8,
// and thread 4 g + t receives the 32-bit word t of row g of each. Operands are read with these
// four:

// A, 16 rows by 32 bytes of depth, from rows: the upper and lower rows, then the other half depth.
constexpr int a_row(int lane) { return lane % 8 + 8 * (lane / 8 % 2); }
constexpr int a_byte(int lane) { return 16 * (lane / 16); }

// B of two blocks side by side, 16 columns by 32 bytes of depth, from a tile that holds columns of
// B as rows: the two halves of the depth, then the other block.
constexpr int b_row(int lane) { return lane % 8 + 8 * (lane / 16); }
constexpr int b_byte(int lane) { return 16 * (lane / 8 % 2); }

// B of two blocks, 16-bit, depth 16, from a tile that holds B as it is, loaded transposed. The
// addresses are those of A.
constexpr int b_trans_row(int lane) { return a_row(lane); }
constexpr int b_trans_byte(int lane) { return a_byte(lane); }

// A 16-bit, depth 16, from a tile that holds its transpose, loaded transposed: row is the depth.
constexpr int a_trans_row(int lane) { return b_row(lane); }
constexpr int a_trans_byte(int lane) { return b_byte(lane); }

// With 32-bit elements the depth of a product is 8, and thread 4 g + t wants depths t and t + 4. An
// accumulator has columns 2 t and 2 t + 1 there instead, so that P becomes an operand by naming
// depth t column 2 t and depth t + 4 column 2 t + 1, in A and in B alike.
constexpr int paired_depth(int lane, int half) { return 2 * (lane % 4) + half; }
// Where depth `depth` of eight lies in a row that ldmatrix reads as such an operand A: thread
// 4 g + t receives words t and t + 4.
constexpr int place_of_depth(int depth) { return depth / 2 + 4 * (depth % 2); }

}  // namespace onefold::tile
