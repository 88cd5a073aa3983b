// Which sequence a block works on: packed tiles against brute force, wild index tensors.

#include "kernels/block/sequence.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "tests/algebra/random.h"

namespace onefold::kernels {
namespace {

IndexView view(const std::vector<i64>& v) { return {v.data(), 1, 8}; }
IndexView view(const std::vector<i32>& v) { return {v.data(), 1, 4}; }

TEST(PackedTiles, every_row_of_every_sequence_and_beyond_has_one_tile) {
  test::Random random(test::base_seed());
  for (int idx = 0; idx < 300; ++idx) {
    SCOPED_TRACE(test::reproduce(idx));
    const i64 batch = random.integer(0, 9), tile_rows = 1 << random.integer(0, 5);
    std::vector<i64> cu{0};
    for (int b = 0; b < batch; ++b) cu.push_back(cu.back() + random.integer(0, 40));
    const i64 total = cu.back() + random.integer(0, 40);
    std::set<std::pair<i64, i64>> seen;
    for (i64 t = 0; t < tiles_per_head(total, tile_rows, true, batch); ++t) {
      const TileAt at = packed_tile(view(cu), batch, total, tile_rows, t);
      ASSERT_GE(at.tile, 0);
      ASSERT_LE(at.b, batch);
      ASSERT_TRUE(seen.insert({at.b, at.tile}).second);
    }
    for (i64 b = 0; b <= batch; ++b) {
      const i64 rows = b == batch ? total - cu[b] : cu[b + 1] - cu[b];
      for (i64 tile = 0; tile * tile_rows < rows; ++tile) {
        ASSERT_TRUE(seen.count({b, tile})) << "sequence " << b << " tile " << tile;
      }
    }
  }
}

// Whoever waits for a turn that nobody passes waits for ever.
TEST(Turns, count_the_key_tiles_that_see_the_rows) {
  test::Random random(test::base_seed());
  for (int idx = 0; idx < 3000; ++idx) {
    SCOPED_TRACE(test::reproduce(idx));
    const Lengths n{random.integer(1, 300), random.integer(1, 400)};
    const i64 tile_q = 16 << random.integer(0, 2), tile_k = 16 << random.integer(0, 3);
    Variant v;
    v.top_left = random.chance(0.5);
    if (random.chance(0.6)) v.band_end = random.integer(-60, 60);
    if (random.chance(0.6)) v.band_begin = random.integer(-200, 60);
    const i64 key_tiles = (n.k + tile_k - 1) / tile_k;
    for (i64 i0 = 0; i0 < n.q; i0 += tile_q) {
      const i64 i1 = std::min(i0 + tile_q, n.q);
      i64 before = 0;
      for (i64 tile = key_tiles - 1; tile >= 0; --tile) {
        const TileRange rows = q_range(v, n, tile * tile_k, std::min((tile + 1) * tile_k, n.k));
        // The tiles of rows that a block works on: none when it has no rows.
        if (rows.end <= rows.begin || i0 < rows.begin / tile_q * tile_q || i0 >= rows.end) continue;
        ASSERT_EQ(turns_before(v, n, i0, i1, tile, tile_k), before);
        ++before;
      }
    }
  }
}

// Backward keeps what it knows of a tile of rows under its number.
TEST(RowTiles, every_tile_with_rows_has_a_number_of_its_own) {
  test::Random random(test::base_seed());
  for (int idx = 0; idx < 200; ++idx) {
    SCOPED_TRACE(test::reproduce(idx));
    const bool packed = random.chance(0.5);
    const i64 tile_rows = 1 << random.integer(0, 5);
    std::vector<i64> cu{0};
    ProblemView p;
    p.sequences.batch = random.integer(1, 5);
    p.heads_q = static_cast<int>(random.integer(1, 3));
    for (int b = 0; b < p.sequences.batch; ++b) cu.push_back(cu.back() + random.integer(0, 70));
    if (packed) p.sequences.cu_q = view(cu);
    p.sequences.rows_q = packed ? cu.back() + random.integer(0, 40) : random.integer(1, 70);
    p.query_tiles =
        static_cast<int>(tiles_per_head(p.sequences.rows_q, tile_rows, packed, p.sequences.batch));
    const i64 all = i64{p.query_tiles} * p.heads_q * (packed ? 1 : p.sequences.batch);
    std::set<i64> seen;
    for (i64 item = 0; item < all; ++item) {
      const QueryTile t = query_tile_at(p, static_cast<u32>(item), static_cast<int>(tile_rows));
      if (!t.present()) continue;
      const i64 number = row_tile(p, t.at.b, t.at.h, tile_rows) + t.row0 / tile_rows;
      ASSERT_GE(number, 0);
      ASSERT_LT(number, all);
      ASSERT_TRUE(seen.insert(number).second);
    }
  }
}

TEST(HeadTiles, heads_go_in_step_and_every_tile_has_one_item) {
  for (const u32 num_tiles : {1u, 2u, 7u}) {
    for (const u32 num_heads : {1u, 5u, 12u}) {
      for (u32 in_step = 1; in_step <= num_heads; ++in_step) {
        std::set<std::pair<u32, u32>> seen;
        u32 group = 0, tile = 0;
        for (u32 item = 0; item < num_tiles * num_heads; ++item) {
          const HeadTile at = head_tile_at(item, num_tiles, num_heads, in_step);
          ASSERT_LT(at.head, num_heads);
          ASSERT_LT(at.tile, num_tiles);
          ASSERT_TRUE(seen.insert({at.head, at.tile}).second);
          // Groups one after the other, and in each no tile before all heads have begun the last.
          const u32 own = at.head / in_step;
          ASSERT_GE(own, group);
          if (own == group) {
            ASSERT_GE(at.tile, tile);
          }
          group = own;
          tile = at.tile;
        }
      }
    }
  }
}

TEST(PackedTiles, sequences_lie_where_the_offsets_say) {
  const std::vector<i32> cu_q{0, 3, 3, 10}, cu_k{0, 5, 9, 9}, used{2, 0, 4};
  SequencesView s;
  s.cu_q = view(cu_q);
  s.cu_k = view(cu_k);
  s.used_q = view(used);
  s.batch = 3;
  s.rows_q = 12;
  s.rows_k = 9;
  const Sequence first = sequence_at(s, 0), last = sequence_at(s, 2), beyond = sequence_at(s, 3);
  EXPECT_EQ(first.used.q, 2);
  EXPECT_EQ(first.q_rows, 3);
  EXPECT_EQ(first.used.k, 5);
  EXPECT_EQ(last.q_begin, 3);
  EXPECT_EQ(last.k_begin, 9);
  EXPECT_EQ(last.used.q, 4);
  EXPECT_EQ(last.used.k, 0);
  EXPECT_EQ(beyond.q_begin, 10);
  EXPECT_EQ(beyond.q_rows, 2);
  EXPECT_EQ(beyond.used.q, 0);
  EXPECT_EQ(beyond.used.k, 0);
}

TEST(PackedTiles, wild_index_tensors_stay_inside) {
  test::Random random(test::base_seed());
  for (int idx = 0; idx < 300; ++idx) {
    SCOPED_TRACE(test::reproduce(idx));
    const i64 batch = random.integer(1, 5), total = random.integer(0, 50);
    std::vector<i64> cu, used;
    for (int b = 0; b <= batch; ++b)
      cu.push_back(static_cast<i64>(random.bits()) >> random.integer(0, 63));
    for (int b = 0; b < batch; ++b)
      used.push_back(static_cast<i64>(random.bits()) >> random.integer(0, 63));
    SequencesView s;
    s.cu_q = s.cu_k = view(cu);
    s.used_q = s.used_k = view(used);
    s.batch = batch;
    s.rows_q = s.rows_k = total;
    for (i64 t = 0; t < tiles_per_head(total, 16, true, batch); ++t) {
      const TileAt at = packed_tile(s.cu_q, batch, total, 16, t);
      ASSERT_GE(at.b, 0);
      ASSERT_LE(at.b, batch);
    }
    for (i64 b = 0; b <= batch; ++b) {
      const Sequence q = sequence_at(s, b);
      ASSERT_GE(q.q_begin, 0);
      ASSERT_LE(q.q_begin + q.q_rows, total);
      ASSERT_GE(q.used.q, 0);
      ASSERT_LE(q.used.q, q.q_rows);
      ASSERT_LE(q.used.k, q.k_rows);
    }
  }
}

}  // namespace
}  // namespace onefold::kernels
